"""How a loop over a loader can end before it: from its source, and the values at its first batch."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from doctor.monitor.telemetry.stacks import loop_exits as module
from doctor.monitor.telemetry.stacks.loop_exits import LoopExits, loop_exits

PROGRAM = """
from itertools import islice
from types import SimpleNamespace

plant = SimpleNamespace(name="minimum", steps=60)
settings = {{"most": 60}}
step = 0


class Lazy:
    @property
    def most(self):
        raise AssertionError("was called")


lazy = Lazy()


def agreed(number):
    return False


def limited(loader, most):
    for number, batch in enumerate(loader):
        if number >= most:
            return
        yield batch


def through(loader):
    for batch in loader:
        yield batch


def repeated(loader, most):
    taken = 0
    for _ in range(2):
        for batch in loader:
            yield batch
            taken += 1
            if taken == most:
                return


def losses(loader):
    for epoch in range(2):
        for batch in loader:
            loss = batch * 2
            yield loss


class Passing:
    def __init__(self, loader):
        self.iterator = iter(loader)

    def __iter__(self):
        return self

    def __next__(self):
        return next(self.iterator)


def train(loader, most=60, step=step, unbounded=None):
{loop}
"""

NOTHING, OTHERS = (None, False), (None, True)
LOOPS = {
    "for batch in loader: pass": NOTHING,
    "known = locals()\nfor number, batch in enumerate(loader):\n    if number >= most: break": OTHERS,
    "for number, batch in enumerate(loader):\n    if number >= most: break": (60, False),
    "for number, batch in enumerate(loader, 1):\n    if number > most: break": (60, False),
    "for number, batch in enumerate(loader):\n    if most <= number: break": (60, False),
    "for number, batch in enumerate(loader):\n    if number == plant.steps: return": (60, False),
    "for number, batch in enumerate(loader):\n    used = batch\n    if number >= most: break": (61, False),
    "for number, batch in enumerate(loader):\n    used = batch\n    if number + 1 >= most: break": (60, False),
    "for number, batch in enumerate(loader):\n    if plant.name == 'minimum' and number >= plant.steps: break": (
        60,
        False,
    ),
    "for number, batch in enumerate(loader):\n    if plant.name == 'other' and number >= plant.steps: break": NOTHING,
    "for number, batch in enumerate(loader):\n    if unbounded is not None and number >= most: break": NOTHING,
    "for number, batch in enumerate(loader):\n    if agreed(number) or number >= most: break": (60, True),
    "for number, batch in enumerate(loader):\n    if agreed(number): break": OTHERS,
    "for number, batch in enumerate(loader):\n    if number >= lazy.most: break": OTHERS,
    "for number, batch in enumerate(loader):\n    if number >= settings['most'] - 10: break": (50, False),
    "for number, batch in enumerate(loader):\n    if agreed(number):\n        if number > most: break": OTHERS,
    "for batch in loader:\n    used = batch\n    step += 1\n    if step >= most: break": (60, False),
    "for batch in loader:\n    if step >= most: break\n    step += 1": (60, False),
    "for batch in loader:\n    if agreed(batch): step += 1\n    if step >= most: break": OTHERS,
    "for batch in islice(loader, 60): pass": (60, False),
    "for batch in islice(loader, None): pass": NOTHING,
    "for _, batch in zip(range(most), loader): pass": (60, False),
    "for batch, other in zip(loader, list(loader)): pass": OTHERS,
    "for batch in loader:\n    for other in range(3):\n        break": NOTHING,
    "for batch in loader:\n    def inner(): return 1": NOTHING,
    "for batch in limited(loader, 60): pass": (60, True),
    "for batch in loader:\n    if unbounded is not None and agreed(batch): break": NOTHING,
    "for batch in loader:\n    unbounded = 1\n    if unbounded is not None and agreed(batch): break": OTHERS,
    "for number, batch in enumerate(through(loader)):\n    if number >= most: break": (60, False),
    "iterator = iter(loader)\nbatch = next(iterator)": NOTHING,
}

AGAIN = {
    "iterator = iter(loader)\nbatch = next(iterator)": True,
    "for batch in repeated(loader, 60): pass": True,
    "for number, batch in zip(range(60), repeated(loader, most)): pass": True,
    "for batch in loader: pass": False,
    "for batch in through(loader): pass": False,
    "for loss in losses(loader): pass": False,
    "for epoch in range(3):\n    for batch in loader: pass": False,
    "for batch in Passing(loader): pass": False,
    "batches = list(loader)": False,
}
"""Whether a loop may begin its loader again where that ends."""


class Loader:
    """Yields one batch, and records how the loop around it ends."""

    seen: LoopExits | None = None
    kept: object = "unknown"

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> int:
        if self.seen is not None:
            raise StopIteration
        self.seen = loop_exits(sys._getframe())
        return 1


def observed(folder: Path, loop: str, loader: Loader | None = None) -> LoopExits:
    path = folder / "user_program.py"
    path.write_text(
        PROGRAM.format(loop=textwrap.indent(textwrap.dedent(loop.replace("\n    batch", "\nbatch")), "    "))
    )
    spec = importlib.util.spec_from_file_location("user_program", path)
    assert spec is not None
    assert spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    loader = loader or Loader()
    with contextlib.suppress(AssertionError):  # of the property, once the loop itself reads it
        program.train(loader)
    assert loader.seen is not None
    return loader.seen


@pytest.fixture(autouse=True)
def sources_of_now(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Files that are written during this test count as older than the process, and this file is not the user's."""
    from doctor.monitor.telemetry.stacks import rank_conditions

    monkeypatch.setattr(rank_conditions, "_STARTED", float("inf"))
    monkeypatch.setattr(module, "is_user_code", lambda file: file.startswith(str(tmp_path)))


@pytest.mark.parametrize("loop", LOOPS)
def test_exits(loop: str, tmp_path: Path) -> None:
    assert observed(tmp_path, loop)[:2] == LOOPS[loop]


@pytest.mark.parametrize("loop", AGAIN)
def test_loaders_that_may_begin_again(loop: str, tmp_path: Path) -> None:
    assert observed(tmp_path, loop).by_next is AGAIN[loop]


def test_a_file_that_is_newer_than_the_process_shows_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from doctor.monitor.telemetry.stacks import rank_conditions

    monkeypatch.setattr(rank_conditions, "_STARTED", 0.0)
    assert observed(tmp_path, "for batch in loader:\n    break")[:2] == NOTHING


def test_variables_of_the_loop_are_not_kept(tmp_path: Path) -> None:
    """Python copies them into a dictionary that the frame keeps, until 3.12."""
    loop = """import weakref
big = Lazy()
for number, batch in enumerate(loader):
    if number >= most: break
gone = weakref.ref(big)
del big
loader.kept = gone()"""
    loader = Loader()
    assert observed(tmp_path, loop, loader)[:2] == (60, False)
    assert loader.kept is None
