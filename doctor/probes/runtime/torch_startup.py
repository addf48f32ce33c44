"""Load torch in the child before anything is measured."""

from __future__ import annotations

import msgspec

from doctor.core.facts import Missing, MissingReason
from doctor.probes.runtime.torch_child import ChildLost, TorchChild, WorkRefused

NOT_INSTALLED = "torch is not installed"


class LoadedTorch(msgspec.Struct, frozen=True):
    """The torch that was loaded: version, number of visible CUDA devices, support of distributed and NCCL.

    ``backends``: those of torch and of its plugins that accept CPU tensors.
    """

    version: str
    devices: int = 0
    distributed: bool = True
    nccl: bool = False
    backends: tuple[str, ...] = ()


def loaded_in(child: TorchChild, seconds: float) -> LoadedTorch | Missing:
    """Return the torch of ``child``, or why there is none: not installed, not importable, or no answer."""
    try:
        return child.ask("load", {}, LoadedTorch, seconds)
    except WorkRefused as refusal:
        return Missing(MissingReason.ABSENT if str(refusal) == NOT_INSTALLED else MissingReason.HIDDEN, str(refusal))
    except ChildLost as lost:
        return Missing(MissingReason.FAILED, f"cannot load torch: {lost}")


def work(argument: bytes) -> LoadedTorch:
    """Import torch. ``argument`` is not read.

    Raises:
        WorkRefused: it is not installed (:data:`NOT_INSTALLED`), or cannot be imported.
    """
    try:
        import torch
        import torch.distributed
    except ImportError as error:
        absent = isinstance(error, ModuleNotFoundError) and error.name == "torch"
        raise WorkRefused(NOT_INSTALLED if absent else f"cannot import torch: {error}") from None
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not torch.distributed.is_available():
        return LoadedTorch(str(torch.__version__), devices, distributed=False)
    backends = torch.distributed.Backend.backend_capability.items()
    on_processor = tuple(sorted(name for name, kinds in backends if "cpu" in kinds))
    return LoadedTorch(str(torch.__version__), devices, True, torch.distributed.is_nccl_available(), on_processor)
