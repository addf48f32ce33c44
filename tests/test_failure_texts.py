"""How benchmarks/failure_texts.py grades answers, and the form of its texts."""

import hashlib
from itertools import chain

import pytest

from benchmarks.failure_texts import (
    HALVES,
    TEXTS,
    Answer,
    Text,
    answer_of,
    calibration_error,
    diagnose,
    read_texts,
    reliability,
    score,
    summary,
)
from doctor.core.check_registry import load_registry

TEXT = Text("https://example.org/1", "gpu-oom", "…", ("MEM011",), ("MEM006", "RUN004"), rank=3)
HEALTHY = Text("https://example.org/2", "healthy", "…", healthy=True)


@pytest.mark.parametrize(
    ("ids", "grade", "in_three"),
    [
        (("MEM011", "RUN004"), "right", True),
        (("RUN004", "MEM011"), "weak", True),
        (("NET001", "RUN004", "NET002", "MEM011"), "wrong", False),
        ((), "nothing found", False),
    ],
)
def test_grades_of_a_failure(ids: tuple[str, ...], grade: str, in_three: bool) -> None:
    scored = score(TEXT, Answer(1, ids[0] if ids else None, ids))
    assert (scored.grade, scored.in_three) == (grade, in_three)


@pytest.mark.parametrize(("ranks", "blame"), [((3,), "right"), ((0,), "wrong"), ((0, 3), "wrong"), ((), "none")])
def test_blame_needs_exactly_the_rank_at_fault(ranks: tuple[int, ...], blame: str) -> None:
    assert score(TEXT, Answer(1, "MEM011", ("MEM011",), ranks=ranks)).blame == blame


def test_a_warning_on_a_healthy_text_is_a_false_alarm_and_exit_3_is_not() -> None:
    assert score(HEALTHY, Answer(0, None, ("NCCL007",), alarms=("NCCL007",))).grade == "false alarm"
    assert score(HEALTHY, Answer(3, None, ())).grade == "quiet"


def test_candidates_come_after_the_primary_finding_and_before_explained_ones() -> None:
    explained = {
        "severity": "error",
        "confidence": 0.9,
        "explained_by": "MEM011",
        "ignored": None,
        "ranks": [],
        "hosts": [],
    }
    report = {
        "primary": "MEM011",
        "candidates": [{"id": "MEM001", "confidence": 0.3}],
        "results": [
            {"id": "RUN004", "findings": [explained]},
            {"id": "MEM011", "findings": [{**explained, "explained_by": None, "confidence": 0.8, "ranks": [3]}]},
        ],
    }
    answer = answer_of(report, 1)
    assert (answer.ids, answer.confidence, answer.ranks) == (("MEM011", "MEM001", "RUN004"), 0.8, (3,))


def test_calibration_error_weighs_bins_by_their_number() -> None:
    right = score(TEXT, Answer(1, "MEM011", ("MEM011",), 0.95))
    wrong = score(TEXT, Answer(1, "NET001", ("NET001",), 0.55))
    bins = reliability([right, right, right, wrong])
    assert [(one.number, one.hit_rate) for one in bins] == [(1, 0.0), (3, 1.0)]
    assert calibration_error(bins) == pytest.approx((0.55 + 3 * 0.05) / 4)
    assert calibration_error(bins, always=0.5) == pytest.approx(0.25)


def test_the_command_itself_is_scored() -> None:
    answer = diagnose("torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB.\n")
    scored = score(TEXT, answer)
    assert (scored.grade, answer.exit_code) == ("right", 1)
    assert summary([scored])["primary right"] == 1


@pytest.mark.parametrize("half", HALVES)
def test_texts_lie_in_the_half_that_their_address_gives(half: str) -> None:
    digits = [int(hashlib.sha256(text.address.encode()).hexdigest()[0], 16) for text in read_texts(half)]
    assert {digit % 2 for digit in digits} == {HALVES.index(half)}


def test_expected_ids_exist_and_threads_are_used_once() -> None:
    texts = list(chain.from_iterable(read_texts(sample.stem) for sample in TEXTS.glob("*.json")))
    assert len({text.address for text in texts}) == len(texts)
    wanted = {*chain.from_iterable((*text.expected, *text.also) for text in texts)}
    known = {*load_registry(plugins=False).ids()}
    reserved = {"RUN018", "RUN019", "RUN020", "GPU025", "GPU026", "GPU027", "NCCL015"}
    assert wanted <= known | reserved
