"""What the tests of the sentinel share: shorter times, and a job of real processes."""

import pytest

from doctor.sentinel import admission, alarms, duty, ending, hearing, lines
from doctor.sentinel.hearing import Times
from tests.lab.speed import slowness
from tests.sentinel.ranks import Scene

_SHORTER = {
    duty: {"BEAT": 0.1},
    lines: {"PATIENCE": slowness()},
    alarms: {"TIMES": Times(grace=slowness(), longest=3.0 * slowness(), broken=0.4 * slowness())},
    admission: {"LEAD": 0.8 * slowness(), "ANSWER": 0.4 * slowness()},
    ending: {"LET_OTHERS_HEAR": 0.3 * slowness(), "BY_ITSELF": 0.5 * slowness()},
    hearing: {"JUDGING": 2.0 * slowness()},
}


@pytest.fixture(autouse=True)
def hurry(monkeypatch):
    """Everything that is waited for takes a fraction of its time, more on a slow machine; ranks are forked, and take
    this over."""
    for module, times in _SHORTER.items():
        for name, value in times.items():
            monkeypatch.setattr(module, name, value)


@pytest.fixture
def scene(tmp_path):
    """A job of real processes, over Gloo."""
    pytest.importorskip("torch.distributed", reason="the process group is torch's")
    with Scene(tmp_path) as opened:
        yield opened
