"""The plays of ``benchmarks/framework_faults.py``: each can be played, and is scored by ranks, seconds and alarms."""

import sys

import pytest

pytest.importorskip("torch")

from tests.frameworks import planted, training
from tests.lab.needs import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import framework_faults as bench

PLAYS = bench.plays()
FAULT = {"name": "a", "framework": "ddp", "ids": ["RUN001"], "ranks": [1], "within": 15}


def finding(check, ranks, explained_by=None):
    return {"id": check, "ranks": ranks, "explained_by": explained_by, "summary": "words"}


def test_each_play_has_a_name_of_its_own_and_a_program():
    assert len({play["name"] for play in PLAYS}) == len(PLAYS)
    assert {play["framework"] for play in PLAYS} == set(training.FRAMEWORKS)
    source = "".join(path.read_text() for path in (ROOT / "tests" / "frameworks").glob("*.py"))
    for play in PLAYS:
        name = play["play"]["plant"]
        assert f'"{name}"' in source or hasattr(planted.Plant, name) or name in ("restarts",), name


def test_each_fault_expects_known_checks_on_ranks_of_its_job():
    known = {path.stem for path in (ROOT / "playbooks").glob("*.md")}
    for play in (one for one in PLAYS if "ids" in one):
        assert set(play["ids"]) <= known
        assert play["ranks"]
        assert max(play["ranks"]) < play["play"].get("world", 2)
        assert play["within"] in (15, 60, 240)


def test_each_framework_has_faults_and_five_healthy_runs():
    for framework in {name.rstrip("123") for name in training.FRAMEWORKS}:  # fsdp1 and fsdp2, ZeRO 1 to 3
        own = [play for play in PLAYS if play["framework"].rstrip("123") == framework]
        assert sum("ids" in play for play in own) >= 4
        assert sum("ids" not in play for play in own) >= 5


@pytest.mark.parametrize(
    ("findings", "ranks", "others"),
    [
        ([finding("RUN001", [1])], [1], []),
        ([finding("RUN001", [1]), finding("RUN010", [0], "RUN001")], [1], []),
        ([finding("RUN001", [0, 1]), finding("RUN007", [0])], [0, 1], ["RUN007 [0]: words"]),
        ([], [], []),
    ],
    ids=["the fault", "a consequence", "another alarm", "nothing"],
)
def test_who_is_named_and_what_else_is_reported(findings, ranks, others):
    assert bench.named_ranks(FAULT, findings) == ranks
    assert bench.unexplained(FAULT, findings) == others


@pytest.mark.parametrize(
    ("result", "good"),
    [
        ({"right": True, "seconds": 8.5}, True),
        ({"right": True, "seconds": 15.1}, False),
        ({"right": True, "seconds": None}, False),
        ({"right": False, "seconds": 8.5}, False),
    ],
)
def test_a_fault_counts_on_the_right_ranks_in_time(result, good):
    assert bench.is_good(FAULT, result) is good


def test_a_healthy_run_counts_without_alarms_and_errors():
    healthy = {"name": "b", "framework": "ddp"}
    assert bench.is_good(healthy, {"alarms": []})
    assert not bench.is_good(healthy, {"alarms": ["RUN001 [1]: words"]})
    assert not bench.is_good(healthy, {"alarms": [], "error": "no report"})
