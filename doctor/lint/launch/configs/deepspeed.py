"""Settings that DeepSpeed rejects or ignores in its JSON.

Sources: https://www.deepspeed.ai/docs/config-json/,
https://github.com/deepspeedai/DeepSpeed/blob/master/deepspeed/runtime/config.py and
https://github.com/deepspeedai/DeepSpeed/blob/master/deepspeed/runtime/zero/config.py. A framework fills ``"auto"`` in.
Keys that only stage 3 reads (``stage3_…``) are not a contradiction: one file serves several stages.
"""

from __future__ import annotations

from collections.abc import Iterator

from doctor.lint.launch.configs.contradiction import OFFLOADED, Contradiction, later, stage_of
from doctor.lint.launch.yaml_tree import YamlNode


def contradictions(root: YamlNode) -> Iterator[Contradiction]:
    """The contradictions of one configuration."""
    yield from _precisions(root)
    yield from _batch(root)
    stage = stage_of(root)
    if stage is not None:
        yield from _offloads(root, stage)


def _precisions(root: YamlNode) -> Iterator[Contradiction]:
    """runtime/config.py: `bfloat16 and fp16 modes cannot be simultaneously enabled`."""
    name = "bf16" if root.get("bf16") is not None else "bfloat16"
    half, brain = root.get("fp16", "enabled"), root.get(name, "enabled")
    if half is not None and brain is not None and root.flag("fp16", "enabled") and root.flag(name, "enabled"):
        yield Contradiction(
            later(half, brain),
            f"DeepSpeed rejects fp16 and {name} in the same configuration",
            f"Set `fp16.enabled` to false on GPUs with bfloat16 (Ampere and later), else disable {name}.",
        )


def _batch(root: YamlNode) -> Iterator[Contradiction]:
    """train_batch_size = micro batch x accumulation x ranks; with a numeric micro batch, ENV003 reports it."""
    total, steps = root.number("train_batch_size"), root.number("gradient_accumulation_steps")
    place = root.get("train_batch_size")
    if root.number("train_micro_batch_size_per_gpu") is not None or root.flag("elasticity", "enabled"):
        return
    if total and steps and place is not None and total % steps:
        yield Contradiction(
            place,
            f"train_batch_size {total} is not a multiple of gradient_accumulation_steps {steps}",
            f"Set train_batch_size to the micro-batch size × {steps} × the number of ranks.",
        )


def _offloads(root: YamlNode, stage: int) -> Iterator[Contradiction]:
    """runtime/zero/config.py: offload_param is `valid only with stage 3`, offload_optimizer with 1, 2 and 3, a part of
    the optimizer's states with 3."""
    parameters = _offloaded(root, "offload_param", "cpu_offload_param")
    states = _offloaded(root, "offload_optimizer", "cpu_offload")
    if parameters is not None and stage < 3:
        yield Contradiction(
            parameters,
            f"offload_param has no effect with ZeRO stage {stage}: parameters stay on the GPU",
            "Set `stage` to 3, or remove `offload_param`.",
            is_refused=False,
            costs_little=True,
        )
    if states is not None and stage == 0:
        yield Contradiction(
            states,
            "offload_optimizer has no effect with ZeRO stage 0: optimizer states stay on the GPU",
            "Set `stage` to 2, or remove `offload_optimizer`.",
            is_refused=False,
        )
    ratio = root.get("zero_optimization", "offload_optimizer", "ratio")
    part = _number(ratio.text) if ratio is not None else None
    if ratio is not None and part is not None and stage < 3 and 0 <= part < 1:
        yield Contradiction(
            ratio,
            f"DeepSpeed rejects offload_optimizer.ratio {part:g} with ZeRO stage {stage}",
            "Set `stage` to 3, or remove `ratio`.",
        )


def _offloaded(root: YamlNode, section: str, old: str) -> YamlNode | None:
    if root.word("zero_optimization", section, "device") in OFFLOADED:
        return root.get("zero_optimization", section, "device")
    return root.get("zero_optimization", old) if root.flag("zero_optimization", old) else None


def _number(text: str | None) -> float | None:
    try:
        return float(text or "")
    except ValueError:
        return None
