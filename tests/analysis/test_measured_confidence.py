"""The confidence of a primary finding follows from counts of public failure texts."""

import hashlib

import pytest

from benchmarks.answer_counts import FOLDS, counts, first_answers, fold_of, with_counts
from doctor.analysis.differential.measured_confidence import SMOOTHING, measured_confidence
from doctor.core.check_registry import builtin_checks, load_registry
from doctor.core.settings import Settings
from doctor.knowledge.candidate_causes import answer_counts
from doctor.session import judge
from doctor.testing import logged

COUNTS = {"0.9": {"": (10, 14), "MEM010": (9, 9), "RUN004": (1, 5)}, "0.0": {"": (2, 4), "RUN019": (2, 4)}}


@pytest.mark.parametrize(
    ("check", "stated", "right", "number", "usual"),
    [("MEM010", 0.95, 9, 9, 10 / 14), ("RUN004", 0.9, 1, 5, 10 / 14), ("GPU001", 1.0, 0, 0, 10 / 14)],
)
def test_it_is_the_smoothed_share(check, stated, right, number, usual):
    with with_counts(COUNTS):
        expected = (right + SMOOTHING * usual) / (number + SMOOTHING)
        assert measured_confidence(check, stated) == pytest.approx(expected, abs=0.005)


def test_without_counts_it_is_that_of_the_check():
    with with_counts(COUNTS):
        assert measured_confidence("MEM010", 0.7) == 0.7


def test_only_a_primary_finding_of_a_log_has_it():
    job = logged("RuntimeError: DataLoader worker (pid 7) is killed by signal: Bus error.").job()
    counted = {least: dict.fromkeys(("", "MEM010", "RUN004"), (1, 4)) for least in ("0.9", "0.7", "0.5", "0.0")}
    found = {}
    for numbers in ({}, counted):
        with with_counts(numbers):
            report = judge(job, load_registry(()), Settings(), must_be_complete=False)
        found[bool(numbers)] = {one.id: one.findings[0].confidence for one in report.results if one.findings}
    assert found[True].pop(report.primary) == 0.25
    assert found[False].pop(report.primary) > 0.25
    assert found[True] == found[False]


def test_the_data_are_the_counts_of_the_recorded_answers():
    assert answer_counts() == counts()
    names = {name for ids in answer_counts().values() for name in ids if name}
    assert names <= {check.id for check in builtin_checks()}


def test_no_held_text_counts_and_a_fold_can_be_left_out():
    answers = first_answers()
    assert "held" not in {one.sample for one in answers}
    assert all(
        int(hashlib.sha256(one.address.encode()).hexdigest()[0], 16) % 2 == 0
        for one in answers
        if one.sample == "rules"
    )
    number = sum(ids.get("", (0, 0))[1] for ids in counts(left_out=3).values())
    assert number == sum(fold_of(one.address) != 3 for one in answers) < len(answers)
    assert {fold_of(one.address) for one in answers} == set(range(FOLDS))
