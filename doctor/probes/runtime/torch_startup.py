"""Loads torch in the child, so that what is measured later does not wait for it."""

from __future__ import annotations

import msgspec

from doctor.core.facts import Missing, MissingReason
from doctor.probes.runtime.torch_child import ChildLost, TorchChild, WorkRefused

NOT_INSTALLED = "torch is not installed here"


class LoadedTorch(msgspec.Struct, frozen=True):
    """The torch that was loaded: its version, the CUDA devices that it sees, whether it has distributed and NCCL.
    ``backends``: those of torch and of its plug-ins that take tensors of the CPU."""

    version: str
    devices: int = 0
    distributed: bool = True
    nccl: bool = False
    backends: tuple[str, ...] = ()


def loaded_in(child: TorchChild, seconds: float) -> LoadedTorch | Missing:
    """The torch of ``child``, or why there is none: it is not installed, can't be imported, or does not come up."""
    try:
        return child.ask("load", {}, LoadedTorch, seconds)
    except WorkRefused as refusal:
        return Missing(MissingReason.ABSENT if str(refusal) == NOT_INSTALLED else MissingReason.HIDDEN, str(refusal))
    except ChildLost as lost:
        return Missing(MissingReason.FAILED, f"torch can't be loaded: {lost}")


def work(argument: bytes) -> LoadedTorch:
    """Import torch. ``argument`` is not read.

    Raises:
        Refused: it is not installed (:data:`NOT_INSTALLED`), or can't be imported.
    """
    try:
        import torch
        import torch.distributed
    except ImportError as error:
        absent = isinstance(error, ModuleNotFoundError) and error.name == "torch"
        raise WorkRefused(NOT_INSTALLED if absent else f"torch can't be imported: {error}") from None
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not torch.distributed.is_available():
        return LoadedTorch(str(torch.__version__), devices, distributed=False)
    backends = torch.distributed.Backend.backend_capability.items()
    on_processor = tuple(sorted(name for name, kinds in backends if "cpu" in kinds))
    return LoadedTorch(str(torch.__version__), devices, True, torch.distributed.is_nccl_available(), on_processor)
