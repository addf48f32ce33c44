"""What the doctor does when its own organs fail: a whole report, exit code 3, the culprit named, nothing left."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from doctor.collectors import MODULES
from tests.faults.scenes import CUDA, alone
from tests.faults.stage import CannotPlay, Outcome, own_alarms, perform
from tests.lab.sample import long_only

INCONCLUSIVE = 3

BREAK = """
cat > sitecustomize.py <<'PY'
import importlib, os, sys
from importlib.abc import MetaPathFinder

class Breaker(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "doctor.collectors." + os.environ["BROKEN_MODULE"]:
            {deed}

sys.meta_path.insert(0, Breaker())
PY
export PYTHONPATH=$PWD:$PYTHONPATH
"""
"""Breaks one collector's module while it is loaded, as a faulty installation would."""

RAISING = """
cat > sitecustomize.py <<'PY'
import os, sys
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder

def broken(machine):
    raise ValueError("the collector is broken on purpose")

class Breaker(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "doctor.collectors." + os.environ["BROKEN_MODULE"]:
            return None
        spec = PathFinder.find_spec(name, path)
        run = spec.loader.exec_module
        def exec_module(module):
            run(module)
            from msgspec.structs import replace
            from doctor.collectors.base import COLLECTORS
            for key, known in COLLECTORS.items():
                if known.collect.__module__ == name:
                    COLLECTORS[key] = replace(known, collect=broken, isolated=False, present=None)
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Breaker())
PY
export PYTHONPATH=$PWD:$PYTHONPATH
"""
"""Lets one collector raise when it is called."""


def outcome_of(**play: object) -> Outcome:
    try:
        return perform(alone(**play))  # type: ignore[arg-type]
    except CannotPlay as why:
        pytest.skip(str(why))


BROKEN_BY_DEFAULT = frozenset({"drivers", "gpus", "host", "interfaces", "kernel-log", "nccl", "slurm", "trainer"})
OTHERS = long_only(f"{len(BROKEN_BY_DEFAULT)} other collectors are broken")


@pytest.mark.parametrize(
    "key", [pytest.param(key, marks=() if key in BROKEN_BY_DEFAULT else OTHERS) for key in MODULES]
)
def test_a_collector_that_raises(key: str) -> None:
    outcome = outcome_of(shell=RAISING, BROKEN_MODULE=MODULES[key])
    assert outcome.code == (1 if own_alarms() else INCONCLUSIVE)
    assert outcome.report["verdict"] == ("fail" if own_alarms() else "inconclusive")
    assert not outcome.crashed()
    assert not set(outcome.alarms()) - own_alarms()
    reasons = [result["reason"] for result in outcome.report["results"] if result["status"] == "unknown"]
    needed = key != "kernel-log"  # no check depends on it alone
    assert not needed or any(f"the {key} collector broke: ValueError" in reason for reason in reasons), (
        f"no check needs the section {key}: {reasons}"
    )


def test_a_collector_whose_module_can_not_be_loaded() -> None:
    outcome = outcome_of(
        shell=BREAK.format(deed="raise ImportError('half of an installation')"), BROKEN_MODULE=MODULES["host"]
    )
    assert outcome.code == (1 if own_alarms() else INCONCLUSIVE)
    assert outcome.result("MEM010")["status"] == "unknown"
    assert "half of an installation" in outcome.result("MEM010")["reason"]


def test_a_driver_that_hangs() -> None:
    outcome = outcome_of(gpus=("hanging_driver",), packages=CUDA, options=("--timeout", "2"))
    assert outcome.code == (1 if own_alarms() else INCONCLUSIVE)
    lost = outcome.result("GPU019")
    assert lost["status"] == "unknown"
    assert "gpus" in lost["reason"]
    assert not children_that_ask_a_driver()


def children_that_ask_a_driver() -> list[str]:
    """Processes of this interpreter that read GPUs, which nobody waits for any more."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().split(b"\0")
            ours = os.readlink(folder / "exe") == os.path.realpath(sys.executable)
            environ = (folder / "environ").read_bytes()
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
        except OSError:
            continue
        # Other tests play the same scene at the same time; their children have a parent.
        if ours and parent == "1" and b"gpus" in command and b"hanging_driver" in environ:
            found.append(folder.name)
    return found


def test_a_driver_of_another_release_is_found() -> None:
    outcome = outcome_of(gpus=("version_mismatch",), packages=CUDA)
    assert outcome.code == 1
    assert outcome.result("VER002")["findings"][0]["severity"] == "error"
    lost = outcome.result("GPU019")
    assert lost["status"] == "unknown"
    assert "different releases" in lost["reason"]


@pytest.mark.parametrize("machine", ["no_permission", "restricted_container", "driver_not_loaded"])
def test_what_may_not_be_seen_is_never_an_alarm(machine: str) -> None:
    outcome = outcome_of(gpus=(machine,), packages=CUDA)
    assert not set(outcome.alarms()) - own_alarms()
    assert not outcome.crashed()


def test_strict_makes_the_unknown_inconclusive() -> None:
    outcome = outcome_of(gpus=("no_permission",), packages=CUDA, options=("--strict",))
    assert outcome.code == (1 if own_alarms() else INCONCLUSIVE)


def test_ranks_that_were_not_gathered_are_inconclusive() -> None:
    outcome = outcome_of(RANK="0", WORLD_SIZE="4", MASTER_ADDR="127.0.0.1", MASTER_PORT="23456")
    assert outcome.code == (1 if own_alarms() else INCONCLUSIVE)
    assert outcome.report["coverage"]["ranks_expected"] == 4
    assert outcome.result("NCCL008")["status"] in ("unknown", "skip")
