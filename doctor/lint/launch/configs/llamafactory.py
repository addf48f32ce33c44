"""Settings that LLaMA-Factory, or the Trainer of transformers, rejects in a YAML for training.

Sources: https://github.com/hiyouga/LLaMA-Factory/blob/main/src/llamafactory/hparams/parser.py,
https://github.com/hiyouga/LLaMA-Factory/blob/main/src/llamafactory/hparams/finetuning_args.py,
https://github.com/hiyouga/LLaMA-Factory/blob/main/src/llamafactory/model/model_utils/quantization.py,
https://github.com/huggingface/transformers/blob/main/src/transformers/training_args.py and
https://github.com/huggingface/transformers/blob/main/src/transformers/trainer.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import reduce
from typing import NamedTuple

from doctor.lint.launch.configs.contradiction import ZERO3_NAME, Contradiction, later, stage_of
from doctor.lint.launch.yaml_tree import YamlNode

Test = Callable[[YamlNode, str], bool]
"""Tests the value of a key of a configuration."""


def _on(root: YamlNode, key: str) -> bool:
    return root.flag(key) is True


def _given(root: YamlNode, key: str) -> bool:
    """Whether it is set, and neither empty nor off."""
    node = root.get(key)
    return bool(node is not None and (node.pairs or node.items or root.word(key))) and root.flag(key) is not False


def _zero3(root: YamlNode, key: str) -> bool:
    """Whether DeepSpeed's configuration has stage 3, by its content or by the name of its file."""
    node = root.get(key)
    if node is not None and node.is_mapping:
        return stage_of(node) == 3
    return bool(ZERO3_NAME.search((root.word(key) or "").rpartition("/")[2]))


def _is(*words: str) -> Test:
    return lambda root, key: root.word(key) in words


class _Refusal(NamedTuple):
    """Two settings that exclude each other."""

    first: tuple[str, Test]
    second: tuple[str, Test]
    why: str
    fix: str = ""


def _not_under_zero3(key: str, test: Test, why: str, fix: str) -> _Refusal:
    return _Refusal(
        (key, test), ("deepspeed", _zero3), why, f"{fix}, or use `deepspeed: examples/deepspeed/ds_z2_config.json`."
    )


_REFUSALS = (
    _Refusal(
        ("fp16", _on),
        ("bf16", _on),
        "transformers accepts only one of them",
        "Keep only `bf16: true` if the GPUs support it (Ampere and later), else only `fp16: true`.",
    ),
    _Refusal(("fp16_full_eval", _on), ("bf16_full_eval", _on), "transformers accepts only one of them"),
    _Refusal(("deepspeed", _given), ("fsdp", _given), "transformers accepts only one of them"),
    _Refusal(
        ("quantization_bit", _given),
        ("finetuning_type", _is("full", "freeze")),
        "only LoRA and OFT train quantized models",
        "Set `finetuning_type: lora`, or remove `quantization_bit`.",
    ),
    _Refusal(("quantization_bit", _given), ("fp8", _on), "a quantized model cannot be trained in FP8"),
    _not_under_zero3("pure_bf16", _on, "ZeRO-3 does not support pure_bf16", "Set `bf16: true` instead of `pure_bf16`"),
    _not_under_zero3(
        "predict_with_generate",
        _on,
        "ZeRO-3 does not support generation",
        "Predict in a separate run without DeepSpeed",
    ),
    _not_under_zero3("use_unsloth", _on, "Unsloth does not work with ZeRO-3", "Remove `use_unsloth`"),
    _not_under_zero3(
        "pissa_init", _on, "PiSSA cannot be initialized under ZeRO-3", "Run `scripts/pissa_init.py` before training"
    ),
    _Refusal(("use_galore", _on), ("deepspeed", _given), "GaLore does not work with DeepSpeed"),
    _Refusal(("use_apollo", _on), ("deepspeed", _given), "APOLLO does not work with DeepSpeed"),
    _not_under_zero3(
        "quantization_method",
        _is("hqq", "eetq"),
        "ZeRO-3 supports only bitsandbytes",
        "Set `quantization_method: bnb` with `quantization_bit: 4`",
    ),
)
_EIGHT_BITS = _not_under_zero3(
    "quantization_bit",
    lambda root, key: root.word(key) not in (None, "4"),
    "ZeRO-3 supports only 4-bit quantization",
    "Set `quantization_bit: 4`",
)
_BY_NAME = 0.9
"""The stage is derived from the name of DeepSpeed's file, which is not read."""


def contradictions(root: YamlNode) -> Iterator[Contradiction]:
    """The contradictions of one configuration."""
    if root.word("quantization_method") in (None, "bnb", "bitsandbytes"):
        yield from _judge(root, _EIGHT_BITS)
    for refusal in _REFUSALS:
        if refusal.first[0] != "quantization_method" or root.word("quantization_bit") is not None:
            yield from _judge(root, refusal)


def _judge(root: YamlNode, refusal: _Refusal) -> Iterator[Contradiction]:
    sides = (refusal.first, refusal.second)
    if not all(test(root, key) for key, test in sides):
        return
    nodes = [root.key(key) or root.get(key) for key, _ in sides]
    yield Contradiction(
        reduce(later, filter(None, nodes)),
        f"{' conflicts with '.join(_shown(root, *side) for side in sides)} ({refusal.why})",
        refusal.fix or f"Remove `{refusal.first[0]}` or `{refusal.second[0]}`.",
        confidence=_BY_NAME if refusal.second[1] is _zero3 and root.word("deepspeed") else 1.0,
    )


def _shown(root: YamlNode, key: str, test: Test) -> str:
    """The key, with its value if the conflict depends on it; DeepSpeed's file by its name."""
    word = root.word(key)
    if test is _zero3:
        return (word or key).rpartition("/")[2]
    if test is _given:
        return key
    return key if word is None or root.flag(key) else f"{key}: {' '.join(word.split())}"
