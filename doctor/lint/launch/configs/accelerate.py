"""Settings that ``accelerate launch`` rejects or ignores in its YAML.

Sources: https://github.com/huggingface/accelerate/blob/main/src/accelerate/commands/launch.py,
https://github.com/huggingface/accelerate/blob/main/src/accelerate/utils/launch.py and
https://huggingface.co/docs/accelerate/usage_guides/deepspeed. That ``distributed_type: NO`` starts one process is
reported by ENV003.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from doctor.core.text import conjunction
from doctor.lint.launch.configs.contradiction import OFFLOADED, Contradiction, later
from doctor.lint.launch.yaml_tree import YamlNode

_SECTIONS = {"fsdp_config": "FSDP", "deepspeed_config": "DEEPSPEED", "megatron_lm_config": "MEGATRON_LM"}
_KINDS = re.compile(r"[A-Z_]+")
_OWN_WAYS = ("XLA", "TPU")
"""Types that read fsdp_config differently."""
_NOT_BESIDE_A_FILE = (
    "gradient_accumulation_steps",
    "gradient_clipping",
    "zero_stage",
    "offload_optimizer_device",
    "offload_param_device",
    "offload_param_nvme_path",
    "offload_optimizer_nvme_path",
    "zero3_save_16bit_model",
)
"""accelerate/utils/dataclasses.py, DeepSpeedPlugin._deepspeed_config_checks; mixed_precision is one more."""
_UNLESS_ASKED = 0.9
"""Options of ``accelerate launch`` override the file."""


def contradictions(root: YamlNode) -> Iterator[Contradiction]:
    """The contradictions of one configuration for the user's own hosts."""
    kind = (root.word("distributed_type") or "").upper()
    is_own = (root.word("compute_environment") or "LOCAL_MACHINE") == "LOCAL_MACHINE"
    if not is_own or not _KINDS.fullmatch(kind) or kind in _OWN_WAYS:
        return
    yield from _sections(root, kind)
    if kind == "DEEPSPEED":
        yield from _beside_file(root)
        yield from _offload(root)
    if kind == "FSDP":
        yield from _loading(root)
    if kind == "MULTI_GPU":
        yield from _one_gpu(root)


def _sections(root: YamlNode, kind: str) -> Iterator[Contradiction]:
    """commands/launch.py reads only distributed_type for the kind of training. A job of one process needs none."""
    if kind == "NO" and root.word("num_processes") == "1":
        return
    for name, owner in _SECTIONS.items():
        place, section = root.key(name), root.get(name)
        if kind == owner or place is None or section is None:
            continue
        if any(value.pairs or value.items or section.word(key.text or "") for key, value in section.pairs or ()):
            yield Contradiction(
                place,
                f"{name} is ignored, because distributed_type is {kind}",
                f"Set `distributed_type: {owner}`, or `{name}: {{}}`.",
                is_refused=False,
                confidence=_UNLESS_ASKED,
            )


def _beside_file(root: YamlNode) -> Iterator[Contradiction]:
    """`When using deepspeed_config_file, the following accelerate config variables will be ignored`, as an error."""
    file, section = root.get("deepspeed_config", "deepspeed_config_file"), root.get("deepspeed_config")
    if file is None or section is None or root.word("deepspeed_config", "deepspeed_config_file") is None:
        return
    names = [name for name in _NOT_BESIDE_A_FILE if section.get(name) is not None]
    named = names + (["mixed_precision"] if root.word("mixed_precision") is not None else [])
    if named:
        yield Contradiction(
            file,
            f"Accelerate rejects {conjunction(named)} together with deepspeed_config_file",
            f"Remove {conjunction(named)} here, because {file.text} replaces {'it' if len(named) == 1 else 'them'}.",
            confidence=1.0 if names else _UNLESS_ASKED,
        )


def _offload(root: YamlNode) -> Iterator[Contradiction]:
    """`Only applicable with ZeRO Stage 3`; the default stage is 2 (DeepSpeedPlugin)."""
    section = root.get("deepspeed_config")
    place = section.get("offload_param_device") if section is not None else None
    if section is None or place is None or section.word("deepspeed_config_file") is not None:
        return
    stage = section.number("zero_stage") if section.get("zero_stage") is not None else 2
    if stage is not None and stage < 3 and place.text in OFFLOADED:
        yield Contradiction(
            place,
            f"offload_param_device {place.text} has no effect with zero_stage {stage}: parameters stay on the GPU",
            "Set `zero_stage: 3`, or `offload_param_device: none`.",
            is_refused=False,
            costs_little=True,
        )


def _loading(root: YamlNode) -> Iterator[Contradiction]:
    """utils/launch.py: `When using --fsdp_cpu_ram_efficient_loading set --fsdp_sync_module_states to True`."""
    loading, states = (
        root.get("fsdp_config", f"fsdp_{name}") or root.get("fsdp_config", name)
        for name in ("cpu_ram_efficient_loading", "sync_module_states")
    )
    if loading is not None and states is not None and _is(loading, "true") and _is(states, "false"):
        yield Contradiction(
            later(loading, states),
            "Accelerate rejects fsdp_cpu_ram_efficient_loading without fsdp_sync_module_states",
            "Set `fsdp_sync_module_states: true`, because only rank 0 loads the weights and broadcasts them.",
        )


def _is(node: YamlNode, word: str) -> bool:
    """An unquoted boolean; quoted text is always true."""
    return node.plain and (node.text or "").lower() == word


def _one_gpu(root: YamlNode) -> Iterator[Contradiction]:
    """`Less than two GPU ids were configured and tried to run on multiple GPUs`; GPU002 reports fewer ids than
    processes."""
    place, listed = root.get("gpu_ids"), root.word("gpu_ids")
    if place is None or listed is None or not listed.isdigit() or (root.number("num_processes") or 1) > 1:
        return
    if (root.number("num_machines") or 1) == 1:
        yield Contradiction(
            place,
            f"Accelerate rejects distributed_type MULTI_GPU with a single GPU (gpu_ids {listed})",
            "Set `gpu_ids: all`, or `distributed_type: 'NO'` for one GPU.",
            confidence=_UNLESS_ASKED,
        )
