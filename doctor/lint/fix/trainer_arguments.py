"""Replacements for removed Trainer arguments with certainly the same meaning."""

from __future__ import annotations

import ast

from doctor.lint.engine.rule import Edit, RenameArgument, SetArgument, location_of
from doctor.lint.python.script import Script

STRATEGIES_AS_ACCELERATORS = ("ddp", "ddp_spawn", "dp", "ddp2", "ddp_cpu", "horovod", "ddp_sharded")
"""Names of strategies that Lightning before 1.7 took as accelerators."""
HALF: dict[object, str] = {16: "16-mixed", "16": "16-mixed", "bf16": "bf16-mixed"}
"""Precisions as Lightning before 2.0 spelled them."""
_RENAMED = {"replace_sampler_ddp": "use_distributed_sampler"}
_SAME_STRATEGY = {
    "fsdp_native": "fsdp",
    "fsdp_native_full_shard_offload": "fsdp_cpu_offload",
    "tpu_spawn": "xla",
    "tpu_spawn_debug": "xla_debug",
    "single_tpu": "single_xla",
}


def trainer_edits(script: Script, call: ast.Call, name: str, value: ast.expr) -> tuple[Edit, ...]:
    """The edits for the argument ``name=value`` of a Trainer; none where its meaning could change."""
    place, written = location_of(call), script.value(value)
    if script.is_open(call):
        return ()
    if name == "gpus":
        return _devices_instead(script, call, value)
    if name in _RENAMED:
        return (RenameArgument(place, name, _RENAMED[name]),)
    if name == "checkpoint_callback" and isinstance(written, bool):
        return (RenameArgument(place, name, "enable_checkpointing"),)
    if name == "progress_bar_refresh_rate" and written == 0:
        return (RenameArgument(place, name, "enable_progress_bar", "False"),)
    if name == "weights_summary" and written is None:
        return (RenameArgument(place, name, "enable_model_summary", "False"),)
    return _of_value(script, call, name, value)


def _of_value(script: Script, call: ast.Call, name: str, value: ast.expr) -> tuple[Edit, ...]:
    written = value.value if isinstance(value, ast.Constant) else None
    if name == "strategy" and written in _SAME_STRATEGY:
        return (SetArgument(location_of(call), name, f'"{_SAME_STRATEGY[str(written)]}"'),)
    if name == "precision" and written in HALF:
        return (SetArgument(location_of(call), name, f'"{HALF[written]}"'),)
    return _strategy_instead(script, call, str(written)) if name == "accelerator" else ()


def _devices_instead(script: Script, call: ast.Call, value: ast.expr) -> tuple[Edit, ...]:
    """``gpus=2`` as ``devices=2``; 0 and ``None`` meant the CPU, and other values may."""
    if not _counts_gpus(script, value) or script.argument(call, "devices") is not None:
        return ()
    rename = RenameArgument(location_of(call), "gpus", "devices")
    accelerator = script.argument(call, "accelerator")
    if accelerator is None or script.value(accelerator) in (None, "auto"):
        return (rename, SetArgument(location_of(call), "accelerator", '"gpu"'))
    return (rename,) if script.value(accelerator) in ("gpu", "cuda", *STRATEGIES_AS_ACCELERATORS) else ()


def _counts_gpus(script: Script, value: ast.expr) -> bool:
    count = script.value(value)
    if isinstance(count, bool):
        return False
    if isinstance(count, int):
        return count == -1 or count > 0
    return (isinstance(count, str) and "," in count) or (isinstance(count, tuple) and bool(count))


def _strategy_instead(script: Script, call: ast.Call, name: str) -> tuple[Edit, ...]:
    """``accelerator="ddp"`` as ``strategy="ddp"``, where GPUs are counted and nothing else names a strategy."""
    gpus = script.argument(call, "gpus")
    if name not in ("ddp", "ddp_spawn") or script.is_open(call) or script.argument(call, "strategy") is not None:
        return ()
    if gpus is None or not _counts_gpus(script, gpus) or gpus.lineno != call.lineno:
        return ()
    place = location_of(call)
    return (RenameArgument(place, "accelerator", "strategy"), SetArgument(place, "accelerator", '"gpu"'))
