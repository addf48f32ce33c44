"""Installed software according to its metadata, and the effective NCCL settings."""

from __future__ import annotations

from typing import ClassVar, Literal

import msgspec

from doctor.core.facts.section import Section


class Package(msgspec.Struct, frozen=True, gc=False):
    """An installed distribution, by its normalized name."""

    name: str
    version: str


class Requirement(msgspec.Struct, frozen=True, gc=False):
    """What an installed distribution requires of another: ``lightning`` requires ``torch`` ``>=2.1.0,<4.0``."""

    package: str
    requires: str
    specifier: str


class TorchBuild(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """torch, read from its files without importing it. ``cuda``: the CUDA release it was built with, ``None`` in a
    build without CUDA; ``nccl``: the NCCL that it was built with or requires; ``backends``: of torch.distributed, as
    far as the libraries beside it show. ``architectures``: sm numbers, ``None`` if the files do not show them."""

    version: str
    cuda: str | None = None
    hip: str | None = None
    nccl: str | None = None
    backends: tuple[str, ...] = ()
    architectures: tuple[str, ...] | None = None


class NcclLibrary(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A libnccl.so.2 that this process could load. ``origin``: ``LD_PRELOAD``, ``LD_LIBRARY_PATH``, ``wheel <name>``,
    ``torch`` (bundled), ``system`` or ``TORCH_NCCL``; ``chosen``: the one that torch would load."""

    path: str
    version: str | None = None
    origin: str = ""
    chosen: bool = False


class SoftwareFacts(Section, frozen=True, kw_only=True):
    """The Python environment of this process. ``torch`` is ``None`` if it is not installed. ``packages``: the relevant
    ones (torch, CUDA wheels, Lightning under both names, DeepSpeed, Transformers, Accelerate, Ray …).
    ``preloads_missing``: entries of LD_PRELOAD that the loader does not find."""

    key: ClassVar[str] = "software"

    python: str = ""
    implementation: str = "CPython"
    prefix: str | None = None
    packages: tuple[Package, ...] = ()
    requirements: tuple[Requirement, ...] = ()
    torch: TorchBuild | None = None
    nccl_libraries: tuple[NcclLibrary, ...] = ()
    preloads_missing: tuple[str, ...] = ()

    def version(self, name: str) -> str | None:
        """The installed version of the distribution ``name`` (normalized: lower case, ``-``)."""
        return next((package.version for package in self.packages if package.name == name), None)

    @property
    def nccl(self) -> str | None:
        """The release of the NCCL that torch would load."""
        return next((library.version for library in self.nccl_libraries if library.chosen), None)


Layer = Literal["environment", "user file", "system file"]


class Setting(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """An effective setting: its value and its origin. ``source`` is ``environment`` or a file's path; ``line`` counts
    from 1. ``overrides``: the same name in lower-priority layers, as ``path:line=value``."""

    name: str
    value: str
    layer: Layer = "environment"
    source: str = "environment"
    line: int | None = None
    overrides: tuple[str, ...] = ()


class SettingsFile(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A configuration file that NCCL would read, with the number of settings in it."""

    path: str
    layer: Layer
    exists: bool = True
    settings: int = 0
    error: str | None = None


class ReferencedFile(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A file that a setting names (NCCL_TOPO_FILE, NCCL_GRAPH_FILE …). ``gpus`` and ``devices``: PCI bus ids of GPUs
    and names of network devices in a topology file, numbers of GPUs in a graph file. ``error``: why it cannot be read,
    or what NCCL refuses in it."""

    variable: str
    path: str
    exists: bool | None = None
    readable: bool | None = None
    error: str | None = None
    gpus: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()


class NcclPlugin(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A plugin library: ``kind`` net, tuner, profiler or env; ``requested``: the value of the setting, empty if it is
    only the default name; ``path``: where the loader would find it; ``symbols``: exported interface versions."""

    kind: str
    name: str
    requested: str = ""
    path: str | None = None
    symbols: tuple[str, ...] = ()
    error: str | None = None


class NcclFacts(Section, frozen=True, kw_only=True):
    """NCCL's effective settings: the environment overrides the user's file, which overrides the system's file."""

    key: ClassVar[str] = "nccl"

    settings: tuple[Setting, ...] = ()
    files: tuple[SettingsFile, ...] = ()
    references: tuple[ReferencedFile, ...] = ()
    plugins: tuple[NcclPlugin, ...] = ()

    def setting(self, name: str) -> Setting | None:
        """The effective setting ``name``."""
        for setting in self.settings:  # dozens of checks ask every host; a generator would cost twice as much
            if setting.name == name:
                return setting
        return None

    def get(self, name: str) -> str | None:
        """The effective value of ``name``, or ``None`` if it is not set."""
        setting = self.setting(name)
        return setting.value if setting else None
