"""Whole jobs of two ranks with other frameworks below ``doctor run``: the same numbers, and faults of rank 1 named.

``python benchmarks/frameworks.py`` runs these and the rest, also with what the tests do not install.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark import ParameterSet

pytest.importorskip("torch")

from benchmarks import frameworks as benchmark
from tests.frameworks.jobs import NEEDS, JobOutcome, run_job
from tests.lab.ray_nodes import OVERDUE
from tests.lab.sample import long_only

IN_BENCHMARK = long_only("benchmarks/frameworks.py plays it")
OWN_ENVIRONMENT = "; benchmarks/frameworks/environment makes an environment with it"


IMPORTED_BY_THE_DOCTOR_ONLY = {
    "msgspec": "its documents and messages",
    "packaging": "releases and requirements",
    "psutil": "child processes, interfaces and memory",
    "pynvml": "NVIDIA GPUs",
    "jinja2": "the report as a page, on rank 0",
    "markupsafe": "of jinja2",
    "markdown_it": "the report as a page, on rank 0",
    "mdurl": "of markdown_it",
}
"""Packages of others that the doctor may bring into a job, with the reason. None draws while it is imported."""
IMPORT_EACH = """
import importlib, json, random, sys
import numpy, torch
def states():
    return random.getstate(), numpy.random.get_state()[1].tobytes(), torch.get_rng_state().numpy().tobytes()
before = states()
for name in json.load(sys.stdin):
    importlib.import_module(name)
    if states() != before:
        print(name)
        before = states()
"""


def assert_nothing_of_others(new: set[str]) -> None:
    """Of the modules that only the job below ``doctor run`` imports, none is of the frameworks, and none draws."""
    own = {name for name in new if name.partition(".")[0] in ("doctor", "doctor_checks")}
    others = {name for name in new - own if name.partition(".")[0] not in sys.stdlib_module_names}
    assert {name.partition(".")[0] for name in others} <= set(IMPORTED_BY_THE_DOCTOR_ONLY)
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_EACH], input=json.dumps(sorted(new)), capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def case(framework: str, *marks: pytest.MarkDecorator) -> ParameterSet:
    package = NEEDS.get(framework)
    reason = f"needs {package}{OWN_ENVIRONMENT if package in ('deepspeed', 'trl') else ''}"
    lacks = pytest.mark.skipif(package is not None and find_spec(package) is None, reason=reason)
    return pytest.param(framework, marks=(lacks, *marks))


def started_job(*arguments: Any, **options: Any) -> JobOutcome:
    """The outcome of a job; on a machine too busy for Ray's own deadlines there is none."""
    done = run_job(*arguments, **options)
    if OVERDUE in done.output:
        pytest.skip("Ray was not ready within its own 30 s")
    return done


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "framework",
    [
        *map(case, ("lightning", "transformers", "zero1", "zero2", "zero3", "trl_sft", "trl_dpo", "ray")),
        *(case(name, IN_BENCHMARK) for name in ("late_rich", "fsdp2", "accelerate", "fabric")),
    ],
)
def test_the_numbers_are_those_of_the_job_without_it(framework: str, tmp_path: Path) -> None:
    bare = started_job(tmp_path / "bare", framework, watched=False)
    assert bare.code == 0, bare.output[-3000:]
    watched = started_job(tmp_path / "watched", framework)
    assert watched.code == 0, watched.output[-3000:]
    assert bare.traces() == watched.traces()
    assert bare.report is None
    assert watched.report is not None
    assert watched.report["coverage"]["ranks_seen"] == 2
    assert watched.findings() == {}
    assert_nothing_of_others(watched.modules() - bare.modules())


@pytest.mark.timeout(900)
def test_the_benchmark_compares_numbers_and_finds_a_crash(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = benchmark.RESULTS.read_bytes()
    assert benchmark.main(["--part", "--only", "fsdp1", "--folder", str(tmp_path)]) == 0
    name, _, line = capsys.readouterr().out.partition(": ")
    row = json.loads(line)
    assert (name, row["identical"], row["alarms"]) == ("fsdp1", True, [])
    assert (row["crash"]["id"], row["crash"]["ranks"]) == ("RUN004", [1])
    assert benchmark.RESULTS.read_bytes() == before
    bare, watched = (
        JobOutcome(tmp_path / "fsdp1" / kind, code=0, output="", report=None, waited=None)
        for kind in ("bare", "healthy")
    )
    assert_nothing_of_others(watched.modules() - bare.modules())


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "framework", [*map(case, ("zero2", "zero3", "zero_edited", "trl_sft")), case("ray", IN_BENCHMARK)]
)
def test_a_crash_of_rank_1_is_named(framework: str, tmp_path: Path) -> None:
    done = started_job(tmp_path, framework, "crash", watched=framework != "zero_edited")
    assert done.culprits("crash") == [1], done.output[-3000:]
