"""Where the dynamic loader of glibc would find a library, without loading it.

The order is that of ld.so(8): DT_RPATH of the requesting object and of its loaders (unless it has a DT_RUNPATH),
LD_LIBRARY_PATH, DT_RUNPATH, /etc/ld.so.cache, the default directories.
"""

from __future__ import annotations

import os
import re
import struct
import sys
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path

import msgspec

from doctor.collectors.software.elf import ElfError, ElfLibrary, bytes_at, machine_of, read_library

DEFAULT_DIRECTORIES = (
    "/lib/x86_64-linux-gnu",
    "/usr/lib/x86_64-linux-gnu",
    "/lib/aarch64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/lib64",
    "/usr/lib64",
    "/lib",
    "/usr/lib",
)
"""Built-in directories of the loaders of Debian and Red Hat."""

CACHE_LIMIT = 16 << 20
_CACHE_MAGIC = b"glibc-ld.so.cache1.1"
_CACHE_HEADER = struct.Struct("<20sIIB3xI12x")
_CACHE_ENTRY = struct.Struct("<iIIIQ")


class DynamicLoader(msgspec.Struct, frozen=True, dict=True):
    """The search of a process that was started with ``environ``.

    ``etc`` contains ld.so.cache; ``executable`` is the program, whose DT_RPATH applies to everything it loads.
    """

    environ: Mapping[str, str]
    etc: Path
    executable: Path = msgspec.field(default_factory=lambda: Path(sys.executable))
    defaults: tuple[str, ...] = DEFAULT_DIRECTORIES

    @cached_property
    def library_path(self) -> tuple[Path, ...]:
        """Directories of LD_LIBRARY_PATH; an empty entry is the working directory."""
        value = self.environ.get("LD_LIBRARY_PATH", "")
        return tuple(Path(entry or ".") for entry in re.split("[:;]", value)) if value else ()

    @cached_property
    def preloads(self) -> tuple[Path, ...]:
        """Libraries of LD_PRELOAD that would be found."""
        found = (self.find(name) for name in self._preloaded)
        return tuple(path for path in found if path is not None)

    @cached_property
    def preloads_missing(self) -> tuple[str, ...]:
        """Entries of LD_PRELOAD that would not be found; those with a token such as $LIB are not judged."""
        return tuple(name for name in self._preloaded if "$" not in name and self.find(name) is None)

    @cached_property
    def _preloaded(self) -> tuple[str, ...]:
        return tuple(name for name in re.split("[ :]", self.environ.get("LD_PRELOAD", "")) if name)

    @cached_property
    def cache(self) -> dict[bytes, list[bytes]]:
        """Paths of each name in ld.so.cache, in its order; empty without one."""
        return read_cache(self.etc / "ld.so.cache")

    def find(self, name: str, asking: ElfLibrary | None = None) -> Path | None:
        """Return the file of ``name``, requested by the library ``asking`` (by dlopen of the program without)."""
        if "/" in name:
            return Path(name) if Path(name).is_file() else None
        return next((path for path in self.candidates(name, asking) if self._fits(path)), None)

    def candidates(self, name: str, asking: ElfLibrary | None = None) -> Iterator[Path]:
        """Yield every place where the loader would look for ``name``, in its order."""
        askers = [one for one in (asking, self._program) if one is not None]
        if asking is None or not asking.runpath:
            for one in askers:
                yield from (directory / name for directory in _expanded(one.rpath, one.path))
        yield from (directory / name for directory in self.library_path)
        if askers:
            yield from (directory / name for directory in _expanded(askers[0].runpath, askers[0].path))
        yield from (Path(path.decode("utf-8", "replace")) for path in self.cache.get(os.fsencode(name), ()))
        yield from (Path(directory) / name for directory in self.defaults)

    @cached_property
    def _program(self) -> ElfLibrary | None:
        try:
            return read_library(self.executable.resolve())
        except (ElfError, OSError):
            return None

    def _fits(self, path: Path) -> bool:
        """Return whether the loader would use the file: it skips those for another machine, but not corrupt ones."""
        if not path.is_file():
            return False
        machine = machine_of(path)
        return machine is None or self._program is None or machine == self._program.machine


def _expanded(directories: tuple[str, ...], origin: Path) -> Iterator[Path]:
    here = str(origin.parent)
    for directory in directories:
        if directory:
            yield Path(directory.replace("${ORIGIN}", here).replace("$ORIGIN", here))


def read_cache(path: Path) -> dict[bytes, list[bytes]]:
    """Return names and paths of an ld.so.cache (glibc sysdeps/generic/dl-cache.h, new format); empty if unreadable.

    They stay bytes, because few of the several hundred are looked up."""
    try:
        with path.open("rb") as stream:
            data = stream.read(CACHE_LIMIT)
    except OSError:
        return {}
    start = data.find(_CACHE_MAGIC)  # an old-format table may come first
    if start < 0 or len(data) < start + _CACHE_HEADER.size:
        return {}
    data = data[start:]
    count = _CACHE_HEADER.unpack_from(data)[1]
    count = min(count, (len(data) - _CACHE_HEADER.size) // _CACHE_ENTRY.size)
    table = memoryview(data)[_CACHE_HEADER.size : _CACHE_HEADER.size + count * _CACHE_ENTRY.size]
    found: dict[bytes, list[bytes]] = {}
    for _, key, value, _, _ in _CACHE_ENTRY.iter_unpack(table):
        found.setdefault(bytes_at(data, key), []).append(bytes_at(data, value))
    return found
