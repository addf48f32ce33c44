"""The guard: what it forgives, how often, and what it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from doctor.core.facts import TrainingFacts
from doctor.monitor.findings_error import Findings
from doctor.monitor.integrations.adapter import Adapter, AdapterRun, guarded
from doctor.monitor.integrations.hook_guard import SWITCH, is_disabled, value_or_default
from tests.integrations.recorded import RecordedSession

pytestmark = pytest.mark.usefixtures("recorded")


class Hooks(Adapter[AdapterRun]):
    """An adapter of nothing."""

    def begin(self) -> None:
        """A run begins."""
        self._begin(lambda: AdapterRun(self._new_session(0, 1, Path("unused"), TrainingFacts())))

    @guarded
    def hook(self, run: AdapterRun, error: BaseException | None = None) -> None:
        """Fails as it is told to."""
        run.telemetry.mark("data")
        if error is not None:
            raise error

    @guarded
    def end(self, run: AdapterRun) -> None:
        """The run is over."""
        self._end_run()


def test_after_three_failures_it_leaves_the_run_alone(capsys: pytest.CaptureFixture[str]) -> None:
    hooks = Hooks()
    hooks.begin()
    for number in range(5):
        hooks.hook(ValueError(f"number {number}\nof mine"))
    (line,) = capsys.readouterr().err.splitlines()
    assert "disabled after 3 failures; training continues" in line
    assert "hook: ValueError: number 2 of mine" in line
    assert __file__ in line
    (run,) = RecordedSession.made
    assert len(run.said("mark")) == 3
    hooks.begin()
    assert len(RecordedSession.made) == 1


def test_fewer_failures_are_forgiven_in_silence(capsys: pytest.CaptureFixture[str]) -> None:
    hooks = Hooks()
    hooks.begin()
    for error in (ValueError(), OSError(), None, None):
        hooks.hook(error)
    hooks.end()
    assert RecordedSession.made[0].calls[-1] == ("close",)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("error", [Findings("uneven"), KeyboardInterrupt(), SystemExit(1)])
def test_what_is_meant_to_end_a_run_passes(error: BaseException) -> None:
    hooks = Hooks()
    hooks.begin()
    with pytest.raises(type(error)):
        hooks.hook(error)


def test_a_run_that_cannot_begin_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(self: RecordedSession) -> None:
        raise PermissionError("not here")

    monkeypatch.setattr(RecordedSession, "open", refuse)
    hooks = Hooks()
    hooks.begin()
    hooks.hook(None)
    assert "the start of a run: PermissionError: not here" in capsys.readouterr().err
    assert RecordedSession.made[0].calls == [("close",)]


def test_nothing_happens_outside_a_run() -> None:
    Hooks().hook(ValueError("unseen"))
    assert RecordedSession.made == []


@pytest.mark.parametrize(("text", "off"), [("1", True), ("true", True), ("0", False), ("", False), (" No ", False)])
def test_one_variable_turns_everything_off(monkeypatch: pytest.MonkeyPatch, text: str, off: bool) -> None:
    monkeypatch.setenv(SWITCH, text)
    assert is_disabled() is off
    hooks: Any = Hooks()
    hooks.begin()
    assert bool(RecordedSession.made) is not off


def test_a_question_without_an_answer_has_a_default() -> None:
    nobody: Any = None
    assert value_or_default(lambda: nobody.name, "unknown") == "unknown"
    assert value_or_default(lambda: "a name", "unknown") == "a name"
