"""The releases of distributions that rules judge a file by: given, required by its project, or installed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from doctor.knowledge.releases import end_of_line, release
from doctor.lint.engine.project_environment import installed_in_project
from doctor.lint.engine.project_requirements import (
    bounds_below,
    files_of_part,
    is_installed_by,
    oldest_required,
    pages_of,
    releases_in,
    required_releases,
)

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

NEWEST_LIGHTNING = "2.6"
"""The newest line of Lightning whose modules and arguments are known."""
LIMITS_OF_LIGHTNING = {"ray-lightning": "1.6", "lightning-bolts": "1"}
"""Distributions that are not released any more, and the newest Lightning that their last releases accept (the metadata
of the wheels ray_lightning 0.3.0 and lightning_bolts 0.7.0)."""


class Releases(Mapping[str, str]):
    """Releases by distribution: given ones, the newest that the project of a file permits, those in an environment
    inside it, and those installed for this interpreter."""

    def __init__(
        self, given: Mapping[str, str], project: tuple[Path, Path] | None = None, launch: str | None = None
    ) -> None:
        self._given = given
        self._project = project
        self._launch = launch
        self._found: dict[str, str | None] = {}

    def of_project(self, file: Path, root: Path, launch: str | None = None) -> Releases:
        """The releases for ``file``, which was found in the path ``root``. ``launch``: the text of a launch file."""
        return Releases(self._given, (file, root), launch)

    @property
    def is_of_folder(self) -> bool:
        """Whether they are for a file of a folder, whose programs may run in another environment than this one."""
        return self._project is not None and self._project[0] != self._project[1]

    @property
    def pages(self) -> tuple[str, ...]:
        """The texts of the pages of the project."""
        return pages_of(*self._project) if self._project is not None else ()

    def elsewhere(self, name: str) -> Iterator[tuple[Path, str]]:
        """The folders of the project whose requirement files limit a distribution, and the newest release permitted;
        without those with a file for the part of the project that has the script."""
        if self._project is None or not self.is_of_folder:
            return
        file, root = self._project
        for folder, bounds in bounds_below(root):
            if not files_of_part(file, folder):
                yield from ((folder, bounds[one]) for one in _names_of(name) if bounds.get(one))

    def oldest(self, name: str) -> str:
        """The oldest release that the project permits of a distribution; empty if it states no lower bound."""
        return oldest_required(*self._project, *_names_of(name)) if self._project is not None else ""

    def is_certain(self, name: str) -> bool:
        """Whether the release of a distribution is more than that of the interpreter that runs lint: it is bounded, or
        required without a bound, so that a fresh installation gets the newest."""
        return self.get(name) is not None and (self.is_bounded(name) or self._is_named(name))

    def is_bounded(self, name: str) -> bool:
        """Whether the release of a distribution was given, is bounded by the project, or is that of an environment
        inside it. A file that is linted alone is taken to run in the environment of this interpreter."""
        if name in self._given or not self.is_of_folder:
            return True
        return self._required(name) is not None or self._in_environment(name) is not None

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
        """The release in an environment inside the project, else the installed one; of Lightning, the newest if it is
        required and not installed, and an older one if the project pins a torch or Python that needs it, or installs a
        distribution that limits it."""
        if found := self._in_environment(name):
            return found
        known = [_installed(name)]
        if name in _RELEASED_TOGETHER:
            known += [self._newest_lightning(), *self._limits_of_lightning()]
            if known[0] is None and self._is_named(name):
                known.append(NEWEST_LIGHTNING)
        return min(filter(None, known), key=end_of_line, default=None)

    def _in_environment(self, name: str) -> str | None:
        if self._project is None:
            return None
        return next(filter(None, (installed_in_project(*self._project, one) for one in _names_of(name))), None)

    def _is_named(self, name: str) -> bool:
        """Whether the project requires a distribution, without a bound."""
        return self._project is not None and any(is_installed_by(*self._project, one) for one in _names_of(name))

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
        required = {**required_releases(*self._project), **(releases_in(self._launch) if self._launch else {})}
        if name == "torch" and name not in required:
            return min(_torch_beside(required), key=end_of_line, default=None)
        return required.get(name, required.get(_RELEASED_TOGETHER.get(name, "")))

    def __iter__(self) -> Iterator[str]:
        """The distributions whose release is known."""
        return (name for name in dict.fromkeys((*DISTRIBUTIONS, *self._given)) if name in self)

    def __len__(self) -> int:
        """The number of these distributions."""
        return sum(1 for _ in self)


_NEWEST_TORCH = {"3.6": "1.10", "3.7": "1.13", "3.8": "2.4", "3.9": "2.8"}
"""The newest torch with wheels for a line of Python (pypi.org/project/torch)."""


_TORCH_OF_VLLM = (
    *(("0.11.1", ""), ("0.10.2", "2.8"), ("0.9", "2.7"), ("0.8", "2.6"), ("0.6.4", "2.5"), ("0.5.4", "2.4")),
    *(("0.4.2", "2.3"), ("0.4.1", "2.2"), ("0.2.2", "2.1")),
)
"""Releases of vLLM that came with another line of torch, the newest first: the wheel pins one release of torch (torch
of requirements-cuda.txt, later requirements/cuda.txt). Later lines are newer than what rules ask for."""


def _torch_beside(required: Mapping[str, str]) -> Iterator[str]:
    """The lines of torch that go with a pinned torchvision, torchaudio or vLLM, which need exactly one, and with a
    Python: torchvision 0.14 is for torch 1.13, and 0.15 for 2.0."""
    vision, audio = (release(required.get(one, "")) for one in ("torchvision", "torchaudio"))
    if len(vision) > 1 and vision[0] == 0 and vision[1] >= 5:
        yield f"2.{vision[1] - 15}" if vision[1] >= 15 else f"1.{vision[1] - 1}"
    if len(audio) > 1:
        yield f"{audio[0] or 1}.{audio[1]}"
    serving = end_of_line(required.get("vllm", ""))
    if pinned := next((torch for first, torch in _TORCH_OF_VLLM if serving >= release(first)), ""):
        yield pinned
    python = release(required.get("python") or required.get("python-requires") or "")
    if newest := _NEWEST_TORCH.get(".".join(map(str, python[:2]))):
        yield newest


def _names_of(name: str) -> tuple[str, ...]:
    """A distribution, and the one that is released with it."""
    return (name, _RELEASED_TOGETHER[name]) if name in _RELEASED_TOGETHER else (name,)


@cache
def _installed(name: str) -> str | None:
    """The installed release; ``None`` if its metadata cannot be read."""
    import importlib.metadata

    try:
        return importlib.metadata.version(name)
    except (importlib.metadata.PackageNotFoundError, OSError, ValueError, KeyError):
        return None
