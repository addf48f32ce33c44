"""Every NCCL that this process could load, and the one that torch would load."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from doctor.collectors.base import read_text
from doctor.collectors.software.dynamic_loader import DynamicLoader
from doctor.collectors.software.elf import ElfError, read_library, search_read_only
from doctor.collectors.software.packages import Distribution
from doctor.collectors.software.torch_build import NCCL_VERSION, TorchFiles
from doctor.core.facts import NcclLibrary
from doctor.core.text import lazy_compile

SONAME = "libnccl.so.2"
WHEEL_FOLDERS = ("nvidia/nccl/lib", "nvidia/cu11/lib", "nvidia/cu12/lib", "nvidia/cu13/lib")
_MAPS_LIMIT = 16 << 20
_NUMBERED = lazy_compile(r"libnccl\.so\.(\d+\.\d+\.\d+)")


class NcclSearch(msgspec.Struct, frozen=True):
    """The inputs that determine which NCCL is loaded. ``paths`` is sys.path; ``maps`` the text of /proc/self/maps."""

    loader: DynamicLoader
    torch: TorchFiles | None
    paths: Sequence[str]
    distributions: Mapping[str, Distribution]
    maps: str = ""

    def libraries(self) -> tuple[NcclLibrary, ...]:
        """Return all libraries that could be loaded, once each, in the order in which they would be found."""
        built_in = self._built_in()
        if built_in is not None:
            return built_in, *self._shared(None)
        return tuple(self._shared(self.chosen()))

    def chosen(self) -> Path | None:
        """Return the file that torch uses: the loaded one, else the one it would load."""
        rows = (line.split(None, 5) for line in self.maps.splitlines() if "libnccl.so" in line)
        mapped = {row[5] for row in rows if len(row) == 6 and Path(row[5]).name.startswith("libnccl.so")}
        if len(mapped) == 1:
            return Path(mapped.pop())
        user = self.torch.nccl_user() if self.torch else None
        if user is None:
            return None
        first = next((path for path in self.loader.preloads if _is_nccl(path)), None)
        return first or self._loaded_by_torch() or self.loader.find(SONAME, user)

    def _shared(self, chosen: Path | None) -> Iterator[NcclLibrary]:
        seen: set[Path] = set()
        candidates = list(self._candidates())
        if chosen is not None:
            candidates.append((chosen, "system"))
        for path, origin in candidates:
            if path.is_file() and (real := path.resolve()) not in seen:
                seen.add(real)
                yield NcclLibrary(
                    path=str(path),
                    version=self._version(path, origin),
                    origin=origin,
                    chosen=chosen is not None and chosen.resolve() == real,
                )

    def _candidates(self) -> Iterator[tuple[Path, str]]:
        yield from ((path, "LD_PRELOAD") for path in self.loader.preloads if _is_nccl(path))
        yield from ((directory / SONAME, "LD_LIBRARY_PATH") for directory in self.loader.library_path)
        for entry in dict.fromkeys(self.paths):
            root = Path(entry or ".")
            names = " and ".join(one.name for one in self._wheels_at(root)) or "unknown"
            yield from ((root / folder / SONAME, f"wheel {names}") for folder in WHEEL_FOLDERS)
        if self.torch is not None:
            yield self.torch.library_folder / SONAME, "torch"
            if (user := self.torch.nccl_user()) is not None:
                # The places of its DT_RPATH or DT_RUNPATH alone.
                own = msgspec.structs.replace(
                    self.loader, environ={}, etc=Path("/nonexistent"), executable=user.path, defaults=()
                )
                yield from ((path, "torch") for path in own.candidates(SONAME, user))
        yield from ((path, "system") for path in self.loader.candidates(SONAME))

    def _wheels_at(self, location: Path) -> list[Distribution]:
        return [
            one
            for one in self.distributions.values()
            if one.name.startswith("nvidia-nccl-") and one.location == location
        ]

    def _version(self, path: Path, origin: str) -> str | None:
        """Return the version by the name of the link target, else by the only wheel that owns it, else by its text."""
        match = _NUMBERED.fullmatch(path.resolve().name)
        if match:
            return match[1]
        if origin.startswith("wheel"):
            wheels = self._wheels_at(path.parents[3]) if len(path.parents) > 3 else []
            # Wheels for different CUDA releases overwrite each other's file; then only the file itself has the release.
            release = re.match(r"\d+\.\d+\.\d+", wheels[0].version) if len(wheels) == 1 else None
            if release:
                return release[0]
        return nccl_release(path)

    def _built_in(self) -> NcclLibrary | None:
        if self.torch is None or not self.torch.has("libtorch_cuda.so") or self.torch.nccl_user() is not None:
            return None
        version = self.torch.built_in_nccl()
        path = str(self.torch.library_folder / "libtorch_cuda.so")
        return NcclLibrary(path, version, origin="torch", chosen=True) if version else None

    def _loaded_by_torch(self) -> Path | None:
        """Return what torch/__init__.py loads by path before its own libraries, from the first entry of sys.path.

        Since 2.9 it does so whenever libtorch_global_deps.so found a libcudart; before, only if that library could not
        be loaded. It processes a list and stops at the first missing library.
        """
        if self.torch is None:
            return None
        text = read_text(self.torch.package / "__init__.py") or ""
        always = re.search(r"^\s+_preload_cuda_deps\(\)\s*$", text, re.MULTILINE) is not None
        dependencies = self.torch.read("libtorch_global_deps.so")
        needed = [name for name in dependencies.needed if name.startswith(("libcu", "libnv"))] if dependencies else []
        finds_all = all(self.loader.find(name, dependencies) is not None for name in needed)
        if not (always if finds_all else "_preload_cuda_deps" in text):
            return None
        for folder, pattern in re.findall(r"\"(\w+)\"\s*[,:]\s*\"(lib\w+\.so\.[^\"]+)\"", text):
            path = self._first_match(folder, pattern)
            if path is None or folder == "nccl":
                return path
        return None

    def _first_match(self, folder: str, pattern: str) -> Path | None:
        """Return the file that torch/__init__.py finds for a library, by the folders of wheels."""
        release = (self.torch.cuda if self.torch else None) or ""
        places = (f"nvidia/{folder}/lib", f"nvidia/cu{release.split('.')[0]}/lib", f"{folder}/lib")
        for path in self.paths:
            for place in places:
                match = next(iter(sorted(Path(path or ".", place).glob(pattern))), None)
                if match is not None:
                    return match
        return None


def nccl_release(path: Path) -> str | None:
    """Return the release in the read-only data of a libnccl."""
    match = search_read_only(path, NCCL_VERSION)
    return match[1].decode() if match else None


def _is_nccl(path: Path) -> bool:
    """Return whether the loader would use a loaded library as libnccl.so.2: by its DT_SONAME."""
    try:
        return read_library(path).soname == SONAME
    except (ElfError, OSError):
        return False


def read_maps(proc: Path) -> str:
    """Return the memory map of this process; empty if it may not be read."""
    return read_text(proc / "self/maps", _MAPS_LIMIT) or ""
