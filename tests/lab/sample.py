"""What the tests leave out by default, with the reason that is printed; DOCTOR_LONG_TESTS=1 runs all of it.

Of whole jobs, ``-m slow`` runs one in ``TURNS``, others for each commit; DOCTOR_ALL_SLOW=1 runs all of them."""

from __future__ import annotations

import os
import re
import subprocess
import time
import zlib
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Protocol, TypeVar

import pytest
from _pytest.mark import ParameterSet

ALL = "DOCTOR_LONG_TESTS" in os.environ
ALL_SLOW = ALL or bool(os.environ.get("DOCTOR_ALL_SLOW"))
TURNS = 3
TURN = "RANKDOCTOR_TESTS_TURN"
"""The variable with the number that decides which jobs are run: workers get it from the process that starts them, and
who wants another part sets it."""
SUBJECTS = {
    "Accelerate": {"accelerate", "accelerated", "llamafactory"},
    "DeepSpeed": {"zero1", "zero2", "zero3"},
    "FSDP": {"fsdp1", "fsdp2"},
    "Kubernetes": {"pods"},
    "Lightning": {"lightning"},
    "Open MPI": {"mpirun"},
    "Ray": {"ray"},
    "SLURM": {"slurm", "srun", "epilog", "prolog"},
    "torchrun": {"torchrun"},
    "Transformers": {"transformers"},
}
"""Launchers and frameworks, and the words in names of tests that start a job of them."""

ONE_OF_PATTERNS = 1 if ALL else 12
"""All patterns of modules take two minutes of CPU, those of messages half a minute."""
ONE_OF_EXAMPLES = 1 if ALL else 3


def examples(count: int) -> int:
    """How many of ``count`` generated examples of a slow fuzz test are tried."""
    return count // ONE_OF_EXAMPLES


class Titled(Protocol):
    """A scene of either kind."""

    @property
    def title(self) -> str:
        """The id and the name."""


SceneT = TypeVar("SceneT", bound=Titled)


def long_only(why: str) -> pytest.MarkDecorator:
    """The mark of what runs with DOCTOR_LONG_TESTS=1 alone. ``why``: what shows the same claim by default."""
    return pytest.mark.skipif(not ALL, reason=f"{why}; DOCTOR_LONG_TESTS=1 runs it")


def sampled(
    scenes: Iterable[SceneT], kind_of: Callable[[SceneT], str], benchmark: str, elsewhere: Collection[str] = ()
) -> list[ParameterSet]:
    """Every scene as a parameter; skipped are those whose kind an earlier scene has, or one ``elsewhere``.
    ``benchmark`` runs all of them."""
    skip = pytest.mark.skip(
        reason=f"another test causes this fault; DOCTOR_LONG_TESTS=1 runs all, and {benchmark} does"
    )
    seen = {*elsewhere}
    every = []
    for scene in scenes:
        is_left_out = kind_of(scene) in seen and not ALL
        seen.add(kind_of(scene))
        every.append(pytest.param(scene, id=scene.title, marks=skip if is_left_out else ()))
    return every


def turn() -> int:
    """The number of this run: the commit, or the day outside a checkout of git."""
    if TURN in os.environ:
        return int(os.environ[TURN])
    # The folder may belong to another user: .ci/run runs as root.
    asked = ["git", "-c", "safe.directory=*", "rev-parse", "HEAD"]
    try:
        done = subprocess.run(asked, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10)
        return int(done.stdout[:8], 16)
    except (OSError, subprocess.TimeoutExpired, ValueError):  # no git, or no commit
        return int(time.time()) // 86400


def of_this_turn(jobs: Iterable[str], others: Iterable[str], number: int) -> set[str]:
    """Those of the tests ``jobs`` that are run: each is in one of ``TURNS`` numbers in a row. ``others`` are run
    always. All are named by path and test: of each folder at least one test is run, of each of ``SUBJECTS`` one job."""
    folders, subjects = _grouped(jobs, _folder), _grouped(jobs, _subjects)
    # Short lists would otherwise all begin in the same turn.
    firsts = {folder: (number + zlib.crc32(folder.encode())) % TURNS for folder in folders}
    picked = {name for folder, names in folders.items() for name in names[firsts[folder] :: TURNS]}
    for groups, parts_of, always in ((folders, _folder, {*others}), (subjects, _subjects, set[str]())):
        for part, names in groups.items():
            if not any(part in parts_of(name) for name in picked | always):
                picked.add(names[number % len(names)])
    return picked


def _grouped(names: Iterable[str], parts_of: Callable[[str], Iterable[str]]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for name in sorted(names):
        for part in parts_of(name):
            groups.setdefault(part, []).append(name)
    return groups


def _folder(name: str) -> tuple[str]:
    """The folder of a test, or its module if it is in none."""
    return (name.split("/")[0].split("::")[0],)


def _subjects(name: str) -> list[str]:
    words = {*re.split(r"[^a-z0-9]+", name.lower())}
    return [subject for subject, ours in SUBJECTS.items() if words & ours]
