"""A torch installation, read from its files: importing it costs seconds and memory, and may fail."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path

import msgspec

from doctor.collectors.base import read_text
from doctor.collectors.software.elf import ElfError, ElfLibrary, read_library, search_read_only
from doctor.collectors.software.packages import Distribution, requirements_of
from doctor.core.facts import TorchBuild
from doctor.core.text import lazy_compile

NCCL_VERSION = lazy_compile(rb"NCCL version (\d{1,4}\.\d{1,4}\.\d{1,4})[0-9A-Za-z.]{0,40}\+cuda")
"""The line that NCCL logs at its start (NCCL src/init.cc VERSION_STRING), a literal of its own for this purpose."""

_ARCHITECTURE = rb"(?:sm|compute)_\d{2,3}[a-z]?"
_ARCHITECTURES = lazy_compile(rb"(?:%(one)s(?: %(one)s){1,99}|(?<=\0)%(one)s)(?=\0)" % {b"one": _ARCHITECTURE})
"""What torch.cuda.get_arch_list() splits: a literal of libtorch_python.so (torch/csrc/cuda/Module.cpp)."""

USERS = ("libtorch_cuda.so", "libtorch_cuda_cpp.so", "libtorch_python.so")
"""Libraries of torch that link to NCCL: the first one since 1.13 and before 1.10, the second between."""

BACKENDS = (
    ("gloo", ("libtorch_cpu.so",)),
    ("nccl", ("libtorch_cuda.so", "libtorch_hip.so")),
    ("xccl", ("libtorch_xpu.so",)),
)
"""Backends of torch.distributed, and the libraries of a build that has them; Linux builds always have Gloo."""


class TorchFiles(msgspec.Struct, frozen=True):
    """An installed torch: its package folder."""

    package: Path

    @property
    def library_folder(self) -> Path:
        """Folder of its shared libraries."""
        return self.package / "lib"

    @property
    def cuda(self) -> str | None:
        """The CUDA release that it was built with."""
        return self.assigned("cuda")

    def assigned(self, name: str) -> str | None:
        """Return the string of ``name = '…'`` or ``name: Optional[str] = '…'`` in its version.py."""
        text = read_text(self.package / "version.py") or ""
        match = re.search(rf"^{name}\s*(?::[^=\n]+)?=\s*['\"]([^'\"\n]+)['\"]", text, re.MULTILINE)
        return match[1] if match else None

    def has(self, library: str) -> bool:
        """Return whether it contains that library."""
        return (self.library_folder / library).is_file()

    def nccl_user(self) -> ElfLibrary | None:
        """Return its library that links to a shared libnccl, ``None`` if NCCL is built in or not used."""
        for name in USERS:
            library = self.read(name)
            if library is not None and any(needed.startswith("libnccl.so") for needed in library.needed):
                return library
        return None

    def read(self, name: str) -> ElfLibrary | None:
        """Return the dynamic section of one of its libraries, ``None`` if unreadable."""
        try:
            return read_library(self.library_folder / name)
        except (ElfError, OSError):
            return None

    def built_in_nccl(self) -> str | None:
        """Return the release of an NCCL that is linked into torch itself."""
        match = search_read_only(self.library_folder / "libtorch_cuda.so", NCCL_VERSION)
        return match[1].decode() if match else None


def find_torch(paths: Sequence[str]) -> TorchFiles | None:
    """Return the torch that ``import torch`` would load on this sys.path, without importing it."""
    spec = PathFinder.find_spec("torch", list(paths))
    if (spec is None or spec.origin is None) and list(paths) == sys.path:
        # An editable install can be known to a finder of its own alone.
        try:
            spec = importlib.util.find_spec("torch")
        except (ImportError, ValueError):
            spec = None
    if spec is None or spec.origin is None:
        return None
    return TorchFiles(Path(spec.origin).parent)


def read_torch_build(torch: TorchFiles, distribution: Distribution | None) -> TorchBuild | None:
    """Return its build options; ``None`` if even its version is unknown."""
    version = torch.assigned("__version__") or (distribution.version if distribution else None)
    if version is None:
        return None
    cuda = torch.cuda
    found = search_read_only(torch.library_folder / "libtorch_python.so", _ARCHITECTURES) if cuda else None
    return TorchBuild(
        version=version,
        cuda=cuda,
        hip=torch.assigned("hip"),
        nccl=_nccl_asked_for(distribution) or (torch.built_in_nccl() if cuda else None),
        backends=tuple(name for name, libraries in BACKENDS if any(map(torch.has, libraries))),
        architectures=tuple(found[0].decode().split()) if found else None,
    )


def _nccl_asked_for(distribution: Distribution | None) -> str | None:
    if distribution is None:
        return None
    for requirement in requirements_of(distribution, ("nvidia-nccl",)):
        if re.fullmatch(r"==[0-9.]+", requirement.specifier):
            return requirement.specifier[2:]
    return None
