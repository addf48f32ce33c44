"""What a factory's output asks for that a traced step on one device leaves out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from doctor.estimate.tracing.factory import FactoryOutput

_CLASSES = {
    "OptimizedModule": "torch.compile",
    "Float8Linear": "float8",
    "PipelineModule": "pipeline parallelism",
    "PipelineStage": "pipeline parallelism",
}
"""What a module of this class stands for."""
_SIZES = {
    "tp_size": "tensor parallelism",
    "cp_size": "context parallelism",
    "sp_size": "sequence parallelism",
    "pp_size": "pipeline parallelism",
}
"""Fields of Accelerate's ``ParallelismConfig``."""

_OFFLOADS = ("offload_optimizer", "offload_param")
"""Fields of DeepSpeed's ``zero_optimization``."""


def left_out(made: FactoryOutput) -> str:
    """Return one sentence on what the estimate leaves out, or nothing."""
    names = list(dict.fromkeys((*_of_modules(made), *_of_trainer(made.trainer))))
    if not names:
        return ""
    return f"not covered, the step is estimated without it: {', '.join(names)}"


def _of_modules(made: FactoryOutput) -> Iterator[str]:
    for module in made.module.modules():
        kind = type(module)
        if kind.__name__ in _CLASSES:
            yield _CLASSES[kind.__name__]
        if kind.__module__.startswith("transformer_engine"):
            yield "float8"
    if any(type(each).__name__ == "DTensor" or hasattr(each, "device_mesh") for each in made.module.parameters()):
        yield "tensor parallelism"


def _of_trainer(trainer: Any) -> Iterator[str]:
    arguments, strategy = getattr(trainer, "args", None), getattr(trainer, "strategy", None)
    if getattr(arguments, "torch_compile", False) is True:
        yield "torch.compile"
    parallel = getattr(arguments, "parallelism_config", None)
    for field, name in _SIZES.items():
        if _number(parallel, field) > 1:
            yield name
    if _number(strategy, "_tensor_parallel_size") > 1:
        yield "tensor parallelism"
    if "transformer-engine" in str(getattr(trainer, "precision", "")):
        yield "float8"
    if _offloads(strategy, arguments):
        yield "offload to host memory"


def _number(owner: Any, name: str) -> int:
    value = getattr(owner, name, 1)
    return value if isinstance(value, int) else 1


def _offloads(strategy: Any, arguments: Any) -> bool:
    """Whether FSDP or DeepSpeed keeps parameters or the optimizer's state in host memory."""
    if getattr(getattr(strategy, "cpu_offload", None), "offload_params", False):
        return True
    if "offload" in str(getattr(arguments, "fsdp", "") or "").lower():
        return True
    for config in (getattr(strategy, "config", None), getattr(arguments, "deepspeed", None)):
        zero = config.get("zero_optimization") if isinstance(config, Mapping) else None
        options = [zero.get(name) for name in _OFFLOADS] if isinstance(zero, Mapping) else []
        if any(isinstance(each, Mapping) and each.get("device", "none") != "none" for each in options):
            return True
    return False
