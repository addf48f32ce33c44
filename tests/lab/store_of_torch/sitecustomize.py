"""Lets a rank that gathers load the compiled half of torch alone: the store is all that it uses.

The whole of torch costs each rank of a test two seconds of processor time, this a third of one. The store is the same.
Launchers, which compute nothing, do without the kernels of the meta device, a quarter of the import. Other processes,
and those that these start, import torch as it is.
"""

import sys
import types
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

GATHERING = ("check", "capture")
"""Commands of the doctor that use nothing but the store."""
LAUNCHERS = ("torchrun", "accelerate")
META_KERNELS = "torch._meta_registrations"
USED = ("Store", "TCPStore", "PrefixStore")


class CompiledHalf(Loader):
    """Loads a package ``torch`` that has ``torch._C`` and the stores of ``torch.distributed``."""

    def create_module(self, spec: ModuleSpec) -> None:
        """As usual."""

    def exec_module(self, module: types.ModuleType) -> None:
        """Load both; ``torch._C`` adds its exceptions to ``torch.distributed``, which has to be there before."""
        distributed = types.ModuleType("torch.distributed")
        distributed.is_available = lambda: True  # type: ignore[attr-defined]
        distributed.is_initialized = lambda: False  # type: ignore[attr-defined]
        module.distributed = sys.modules["torch.distributed"] = distributed  # type: ignore[attr-defined]
        from torch import _C

        _C._c10d_init()
        for name in USED:
            setattr(distributed, name, getattr(_C._distributed_c10d, name))


class TorchFinder(MetaPathFinder):
    """Finds the torch of this interpreter where it is; another one, which a test has put on the path, is left alone."""

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        """The specification with another loader."""
        spec = PathFinder.find_spec(name) if name == "torch" else None
        if spec is None or spec.origin is None or Path(sys.prefix) not in Path(spec.origin).parents:
            return None
        spec.loader = CompiledHalf()
        return spec


def _needs_only_the_store() -> bool:
    first, second, third, *_ = *sys.orig_argv[1:4], "", "", ""
    if first == "-m":
        return second == "tests.cluster.hostile" or (second == "doctor" and third in GATHERING)
    return Path(first).name == "doctor" and second in GATHERING


if _needs_only_the_store():
    sys.meta_path.insert(0, TorchFinder())
elif Path(sys.orig_argv[1] if sys.orig_argv[1:] else "").name in LAUNCHERS:
    sys.modules[META_KERNELS] = types.ModuleType(META_KERNELS)
