"""The releases of distributions that rules judge a file by: given, required by its project, or installed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from doctor.knowledge.releases import release
from doctor.lint.engine.project_requirements import is_installed_by, required_releases

DISTRIBUTIONS = ("lightning", "pytorch-lightning", "torch", "transformers", "accelerate", "deepspeed", "ray")
"""Distributions whose releases rules may query."""
_RELEASED_TOGETHER = {"lightning": "pytorch-lightning", "pytorch-lightning": "lightning"}
_NEEDS = (
    *(("2.5", "2.1", "3.9"), ("2.3", "2.0", "3.8"), ("2.2", "1.13", "3.8"), ("2.1", "1.12", "3.8")),
    *(("2.0", "1.11", "3.8"), ("1.9", "1.10", "3.7"), ("1.8", "1.9", "3.7"), ("1.6", "1.8", "3.7")),
    *(("1.5", "1.7", "3.6"), ("1.4", "1.6", "3.6"), ("1.3", "1.4", "3.6"), ("1.1", "1.3", "3.6")),
)
"""Lines of Lightning, and the oldest torch and Python that each needs, the newest first (docs/source-pytorch/
versioning.rst; of 1.8 the metadata of its wheel). Lines after 2.5 remove nothing that rules ask for."""

LIMITS_OF_LIGHTNING = {"ray-lightning": "1.6", "lightning-bolts": "1"}
"""Distributions that are not released any more, and the newest Lightning that their last releases accept (the metadata
of the wheels ray_lightning 0.3.0 and lightning_bolts 0.7.0)."""


class Releases(Mapping[str, str]):
    """Releases by distribution: given ones, the newest that the project of a file permits, and installed ones."""

    def __init__(self, given: Mapping[str, str], project: tuple[Path, Path] | None = None) -> None:
        self._given = given
        self._project = project
        self._found: dict[str, str | None] = {}

    def of_project(self, file: Path, root: Path) -> Releases:
        """The releases for ``file``, which was found in the path ``root``."""
        return Releases(self._given, (file, root))

    def __getitem__(self, name: str) -> str:
        """The release of a distribution; ``KeyError`` if it is unknown."""
        if name not in self._found:
            required = self._given.get(name) or self._required(name)
            self._found[name] = self._installable(name) if required is None else required or None
        release = self._found[name]
        if release is None:
            raise KeyError(name)
        return release

    def _installable(self, name: str) -> str | None:
        """The installed release; of Lightning, an older one if the project pins a torch or Python that needs it, or
        installs a distribution that limits it."""
        known = [_installed(name)]
        if name in _RELEASED_TOGETHER:
            known += [self._newest_lightning(), *self._limits_of_lightning()]
        return min(filter(None, known), key=release, default=None)

    def _limits_of_lightning(self) -> Iterator[str]:
        if self._project is not None:
            for name, newest in LIMITS_OF_LIGHTNING.items():
                if is_installed_by(*self._project, name):
                    yield newest

    def _newest_lightning(self) -> str | None:
        """The newest line of Lightning for the torch and Python in the requirement files of the project; ``None`` if
        any is possible. Commands of a page show one way to install it."""
        stated = required_releases(*self._project, shown=False) if self._project is not None else {}
        torch = release(stated.get("torch", ""))
        python = release(stated.get("python") or stated.get("python-requires") or "")
        pinned = [(0, torch), (1, python if len(python) > 1 else ())]
        fitting = (
            line
            for line, *needed in _NEEDS
            if not any(one and one[:2] < release(needed[place])[: len(one)] for place, one in pinned)
        )
        newest = next(fitting, None)
        return None if newest == _NEEDS[0][0] else newest

    def _required(self, name: str) -> str | None:
        if self._project is None:
            return None
        required = required_releases(*self._project)
        return required.get(name, required.get(_RELEASED_TOGETHER.get(name, "")))

    def __iter__(self) -> Iterator[str]:
        """The distributions whose release is known."""
        return (name for name in dict.fromkeys((*DISTRIBUTIONS, *self._given)) if name in self)

    def __len__(self) -> int:
        """The number of these distributions."""
        return sum(1 for _ in self)


@cache
def _installed(name: str) -> str | None:
    """The installed release; ``None`` if its metadata cannot be read."""
    import importlib.metadata

    try:
        return importlib.metadata.version(name)
    except (importlib.metadata.PackageNotFoundError, OSError, ValueError, KeyError):
        return None
