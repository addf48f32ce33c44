"""What the tests leave out by default, with the reason that is printed; DOCTOR_LONG_TESTS=1 runs all of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable
from typing import Protocol, TypeVar

import pytest
from _pytest.mark import ParameterSet

ALL = "DOCTOR_LONG_TESTS" in os.environ


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
