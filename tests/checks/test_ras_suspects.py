"""Ranks that NCCL's RAS service reports as dead, unresponsive or behind, read by the real reader."""

from pathlib import Path

from doctor.core.facts import LogEvidence
from doctor.core.job import build_job
from doctor.postmortem.ras.events import read_ras
from doctor_checks.progress.hang._ras_suspects import ras_suspects

DATA = Path(__file__).parents[1] / "data" / "ras"
STALLED = (DATA / "stalled.txt").read_text()
HEALTHY = (DATA / "healthy.txt").read_text()
NOBODY_DEAD = STALLED[: STALLED.index("INCOMPLETE\n")] + STALLED[STALLED.index("#0-0 (cf264af53edbe986) ERROR") :]
NO_ERROR = NOBODY_DEAD[: NOBODY_DEAD.index("#0-0")] + NOBODY_DEAD[NOBODY_DEAD.index("Warnings") :]


def suspects(*answers):
    events = read_ras("\n".join(answers), "ras.txt")
    return list(ras_suspects(build_job([], world_size=8, evidence=LogEvidence(events=tuple(events)))))


def test_nobody_in_a_healthy_job():
    assert suspects(HEALTHY) == []


def test_counts_that_differ_once_give_no_suspect():
    assert suspects(NO_ERROR) == []


def test_counts_that_advance_give_no_suspect():
    later = NO_ERROR.replace("6650", "6750").replace("6649", "6749").replace("6648", "6748")
    later = later.replace("Rank 3 has not launched any operations", "Rank 3 has launched up to operation 11")
    assert suspects(NO_ERROR, later) == []


def test_counts_that_stand_still():
    found = suspects(NO_ERROR, NO_ERROR)
    assert [(one.state, one.ranks) for one in found] == [("behind", (1,)), ("behind", (3,))]
    assert found[0].claim == "rank 1 launched 6648 of 6650 AllReduce, with no progress between two RAS reports"


def test_most_of_them_behind_are_not_the_odd_ones():
    most = NO_ERROR.replace("  3 ranks have launched up to operation 12\n", "").replace("6649", "6640")
    ahead = most.replace("  4 ranks have launched", "  1 ranks have launched").replace("  Rank 1 has launched", "  x")
    ahead = ahead.replace("  2 ranks have launched", "  7 ranks have launched")
    start, end = ahead.index("  Rank 2 -- "), ahead.index("  x")
    assert suspects(ahead[:start] + ahead[end:], ahead[:start] + ahead[end:]) == []


def test_who_is_dead_is_the_reason_for_the_rest():
    (one,) = suspects(STALLED, STALLED)
    assert (one.state, one.ranks, one.events.first.file) == ("dead", (7,), "ras.txt")
    assert one.claim == "rank 7 is dead: NCCL's RAS service can no longer reach it"


def test_a_silent_process_of_an_unknown_rank():
    start, end = STALLED.index("DEAD"), STALLED.index("Warnings")
    (one,) = suspects(STALLED[:start] + STALLED[end:])
    assert (one.state, one.ranks) == ("silent", ())
    assert one.claim == "process 487984 on 10.0.0.2 did not respond to NCCL's RAS service in time"
