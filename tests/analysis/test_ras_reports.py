"""Whom the RAS service of NCCL accuses: its words are read by the real reader."""

from pathlib import Path

import pytest

from doctor.analysis.hang.ras_reports import suspects_by_ras
from doctor.core.facts import LogEvidence
from doctor.core.job import build_job
from doctor.postmortem.ras.events import read_ras

DATA = Path(__file__).parents[1] / "data" / "ras"
STALLED = (DATA / "stalled.txt").read_text()
HEALTHY = (DATA / "healthy.txt").read_text()
NOBODY_DEAD = STALLED[: STALLED.index("INCOMPLETE\n")] + STALLED[STALLED.index("#0-0 (cf264af53edbe986) ERROR") :]
NO_ERROR = NOBODY_DEAD[: NOBODY_DEAD.index("#0-0")] + NOBODY_DEAD[NOBODY_DEAD.index("Warnings") :]


def accused(*answers):
    events = read_ras("\n".join(answers), "ras.txt")
    return list(suspects_by_ras(build_job([], world_size=8, evidence=LogEvidence(events=tuple(events)))))


def test_nobody_in_a_healthy_job():
    assert accused(HEALTHY) == []


def test_counts_that_differ_once_accuse_nobody():
    assert accused(NO_ERROR) == []


def test_counts_that_go_on_accuse_nobody():
    later = NO_ERROR.replace("6650", "6750").replace("6649", "6749").replace("6648", "6748")
    later = later.replace("Rank 3 has not launched any operations", "Rank 3 has launched up to operation 11")
    assert accused(NO_ERROR, later) == []


def test_counts_that_stand_still():
    found = accused(NO_ERROR, NO_ERROR)
    assert [(one.charge, one.ranks) for one in found] == [("behind", (1,)), ("behind", (3,))]
    assert found[0].words == "rank 1 launched 6648 of 6650 AllReduce, and no more between two answers"


def test_most_of_them_behind_are_not_the_odd_ones():
    most = NO_ERROR.replace("  3 ranks have launched up to operation 12\n", "").replace("6649", "6640")
    ahead = most.replace("  4 ranks have launched", "  1 ranks have launched").replace("  Rank 1 has launched", "  x")
    ahead = ahead.replace("  2 ranks have launched", "  7 ranks have launched")
    start, end = ahead.index("  Rank 2 -- "), ahead.index("  x")
    assert accused(ahead[:start] + ahead[end:], ahead[:start] + ahead[end:]) == []


def test_who_is_dead_is_the_reason_for_the_rest():
    (one,) = accused(STALLED, STALLED)
    assert (one.charge, one.ranks, one.said.first.file) == ("dead", (7,), "ras.txt")
    assert one.words == "rank 7 is dead: it is not reached any more"


def test_a_silent_process_of_an_unknown_rank():
    start, end = STALLED.index("DEAD"), STALLED.index("Warnings")
    (one,) = accused(STALLED[:start] + STALLED[end:])
    assert (one.charge, one.ranks) == ("silent", ())
    assert one.words == "process 487984 on 10.0.0.2 is silent: it did not answer in time"


@pytest.mark.parametrize(("error", "sure"), [("Remote process error", False), ("Unhandled CUDA error", True)])
def test_errors_are_those_of_others_most_often(error, sure):
    (one,) = accused(NOBODY_DEAD.replace("Remote process error", error))
    assert (one.charge, one.ranks) == ("error", (4, 5))
    assert (one.confidence > 0.5) is sure
