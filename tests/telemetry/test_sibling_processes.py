"""Whether another process of a node of Ray computes, from a folder like /proc."""

import os

import pytest

from doctor.core.facts.telemetry import AT_WORK
from doctor.monitor.telemetry.stacks.sibling_processes import work_in_siblings

WAITS = "a result of another process (ray.get)"


@pytest.fixture
def node(tmp_path):
    """A raylet with this rank, its peer, and an actor; returns what sets the state of the last two."""

    def set_states(peer, actor, blocked=WAITS):
        rows = {1: ("raylet", "S"), os.getpid(): ("ray::RayTrainWorker.run", "S"), 8: ("ray::RayTrainWorker.run", peer)}
        for pid, (name, state) in {**rows, 9: ("ray::Scorer.score", actor)}.items():
            thread = tmp_path / str(pid) / "task" / str(pid)
            thread.mkdir(parents=True, exist_ok=True)
            (tmp_path / str(pid) / "cmdline").write_text(name)
            (thread / "stat").write_text(f"{pid} ({name}) {state} 1 1")
            (thread / "children").write_text(f"{os.getpid()} 8 9" if pid == 1 else "")
        return work_in_siblings(blocked, 1, tmp_path)

    return set_states


@pytest.mark.parametrize(
    ("peer", "actor", "expected"), [("S", "R", AT_WORK), ("S", "S", ""), ("R", "S", ""), ("R", "R", AT_WORK)]
)
def test_an_actor_that_computes_and_a_peer_that_polls(node, peer, actor, expected):
    assert node(peer, actor) == expected


def test_other_waits_are_not_asked_about(node):
    assert node("S", "R", "an item of a queue (queue.get)") == ""
