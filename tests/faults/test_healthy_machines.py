"""Where nothing is wrong, nothing is said at severity error or warning, and something is judged."""

from __future__ import annotations

import pytest

from tests.faults.healthy_machines import MACHINES
from tests.faults.scenes import loud
from tests.faults.stage import CannotPlay, own_alarms, perform
from tests.lab.sample import long_only

LONG = {
    "eight H100, eight ranks": long_only("one process and two ranks of such machines are run"),
    "two ranks by torchrun": long_only("test_recipes.py has torchrun start healthy hosts"),
    "eight H100, one process": long_only("such a machine with the variables of a vendor's image is run"),
    "a notebook on a workstation": long_only("a workstation with the same GPU is run"),
    "a batch script of one task": long_only("one that exports the master's address, too, is run"),
    "a step of one task": long_only("steps of several tasks are run"),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=LONG.get(name, ())) for name in MACHINES])
def test_healthy(name: str) -> None:
    if name == "this machine" and own_alarms():
        pytest.skip(f"this very machine is not healthy: {', '.join(sorted(own_alarms()))}")
    try:
        outcome = perform(MACHINES[name])
    except CannotPlay as why:
        pytest.skip(str(why))
    assert not loud(MACHINES[name], outcome)
    assert outcome.report["coverage"]["checks"]["pass"] > 10
    assert outcome.code == (1 if own_alarms() else 0)
