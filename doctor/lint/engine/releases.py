"""The releases of distributions that rules judge a file by: given, required by its project, or installed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from doctor.lint.engine.project_requirements import required_releases

DISTRIBUTIONS = ("lightning", "pytorch-lightning", "torch", "transformers", "accelerate", "deepspeed", "ray")
"""Distributions whose releases rules may query."""
_RELEASED_TOGETHER = {"lightning": "pytorch-lightning", "pytorch-lightning": "lightning"}


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
            self._found[name] = _installed(name) if required is None else required or None
        release = self._found[name]
        if release is None:
            raise KeyError(name)
        return release

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
