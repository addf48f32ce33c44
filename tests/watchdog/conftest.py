"""What the tests of the watchdog share: shorter times, and a job of real processes."""

import collections

import pytest

from doctor.cluster.transport import failover
from doctor.monitor.watchdog import abort, admission, incidents, watchdog, watchdog_loop
from doctor.monitor.watchdog.rounds import collection_round
from doctor.monitor.watchdog.rounds.collection_round import RoundTimeouts
from tests.lab.speed import slowness
from tests.watchdog.ranks import Scene

_SHORTER = {
    watchdog_loop: {"TICK": 0.1},
    failover: {"PATIENCE": slowness()},
    incidents: {"TIMES": RoundTimeouts(grace=slowness(), longest=3.0 * slowness(), broken=0.4 * slowness())},
    admission: {"LEAD": 0.8 * slowness(), "ANSWER": 0.4 * slowness()},
    abort: {"NOTIFY_SECONDS": 0.3 * slowness(), "BY_ITSELF": 0.5 * slowness()},
    collection_round: {"EVALUATION_TIMEOUT": 2.0 * slowness()},
}


@pytest.fixture(autouse=True)
def hurry(monkeypatch):
    """Everything that is waited for takes a fraction of its time, more on a slow machine, and runs are counted anew;
    ranks are forked, and take this over."""
    monkeypatch.setattr(watchdog, "_run_counts", collections.Counter())
    for module, times in _SHORTER.items():
        for name, value in times.items():
            monkeypatch.setattr(module, name, value)


@pytest.fixture
def scene(tmp_path):
    """A job of real processes, over Gloo."""
    pytest.importorskip("torch.distributed", reason="the process group is torch's")
    with Scene(tmp_path) as opened:
        yield opened
