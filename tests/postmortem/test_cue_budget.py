"""The search for marks costs little in any log, and finds those that matter."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from doctor.core.facts import Event, LogFile
from doctor.knowledge.linear_regex import linear, loose
from doctor.postmortem.logs.multi_match import CueMatcher
from doctor.postmortem.logs.outcome_marks import cue_budget, marks
from doctor.postmortem.logs.scanner import read_lines

LINES = 40_000


def _read(lines: Iterator[str] | list[str]) -> tuple[list[Event], LogFile]:
    return read_lines(lines, "train.log")


def _of(events: list[Event], kind: str) -> list[Event]:
    return [event for event in events if event.kind == kind]


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lines that were looked at for marks."""
    seen: list[str] = []
    for name in ("read", "read_step"):
        original = getattr(marks.Marks, name)

        def counting(self: object, said: object, whole: str, line: int, original: object = original) -> bool:
            seen.append(whole)
            return bool(original(self, said, whole, line))  # type: ignore[operator]

        monkeypatch.setattr(marks.Marks, name, counting)
    return seen


def test_words_of_errors_in_every_line_lead_to_few_reads(reads: list[str]) -> None:
    line = "INFO epoch 1 error_rate: 0.25 failed_samples=0 loss is not nan, training: timeout"
    _, file = _read([f"{line} step {number}" for number in range(LINES)])
    assert len(reads) < LINES / 10
    assert file.recognized > 0.95 * LINES


def test_an_end_is_found_after_its_rarer_text_although_a_common_one_is_spent() -> None:
    lines = [f"training: step {number} error_rate=0.1" for number in range(LINES)]
    lines[LINES // 2] = "rank 3: loss: nan"
    lines += ["cleaning up"] * 5000
    events, _ = _read([*lines[: LINES - 5], "Training finished", *lines[LINES:]])
    assert _of(events, marks.NAN)
    assert _of(events, marks.END)


def test_the_last_step_and_an_error_behind_it_are_found() -> None:
    lines = [f"loss=0.5, step={number}, error=0.1" for number in range(LINES)]
    events, _ = _read([*lines, "ERROR: the disk is full"])
    (step,) = _of(events, marks.STEP)
    assert step.line == LINES
    assert step.value("step") == str(LINES - 1)
    (error,) = _of(events, marks.ERROR)
    assert error.line == LINES + 1


def test_a_step_far_before_the_end_is_found_at_its_line() -> None:
    lines = [f"step {number}" for number in range(5000)] + ["idle"] * 300_000
    events, file = _read(lines)
    (step,) = _of(events, marks.STEP)
    assert step.line == 5000
    assert 4900 <= file.recognized <= 5100


def test_the_lines_of_steps_are_counted_once() -> None:
    lines = [text for number in range(LINES) for text in (f"step {number} loss 0.5", "reading a shard")]
    assert _read(lines)[1].recognized == pytest.approx(LINES, rel=0.02)


def test_a_spent_cue_does_not_spend_the_others() -> None:
    budget = cue_budget.CueBudget({1, 2})
    for _ in range(cue_budget.MOST_MISSES):
        budget.charge([1, 7], is_mark=False)
    assert (budget.active, budget.spent) == ({2}, {1})


def test_texts_that_are_not_looked_for_keep_their_numbers() -> None:
    cues = CueMatcher(["ab", "bc", "cd"])
    assert [cue for cue, _, _ in cues.find(b"abcd")] == [0, 1, 2]
    assert [cue for cue, _, _ in cues.without({1}).find(b"abcd")] == [0, 2]


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (r"(?<![\d(])(?P<a>\d)(?=x|(?:y|z))", "1x"),
        (r"(?i)\berror\b(?! ?[:=])", "an ERROR here"),
        (r"[(?=]a(?!\))b", "(ab"),
        (r"\((?!a)b", "(b"),
    ],
)
def test_a_loose_pattern_finds_what_its_pattern_finds(pattern: str, text: str) -> None:
    assert re.search(pattern, text)
    assert re.search(loose(pattern), text)
    assert linear(loose(pattern)).search(text)
    assert not re.search(r"\(\?<?[=!]", loose(pattern).replace("[(?=]", ""))
