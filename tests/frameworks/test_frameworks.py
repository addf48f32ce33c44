"""Whole jobs of two ranks with other frameworks below ``doctor run``: the same numbers, and faults of rank 1 named.

``python benchmarks/frameworks.py`` runs these and the rest, also with what the tests do not install.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.frameworks.jobs import NEEDS, JobOutcome, run_job
from tests.lab.ray_nodes import OVERDUE

OWN_ENVIRONMENT = "; benchmarks/frameworks/environment makes an environment with it"


def need(framework: str) -> None:
    package = NEEDS.get(framework)
    if package is not None and find_spec(package) is None:
        pytest.skip(f"needs {package}{OWN_ENVIRONMENT if package in ('deepspeed', 'trl') else ''}")


def started_job(*arguments: Any, **options: Any) -> JobOutcome:
    """The outcome of a job; on a machine too busy for Ray's own deadlines there is none."""
    done = run_job(*arguments, **options)
    if OVERDUE in done.output:
        pytest.skip("Ray was not ready within its own 30 s")
    return done


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "framework", ["fsdp1", "fabric", "transformers", "zero1", "zero2", "zero3", "trl_sft", "trl_dpo", "ray"]
)
def test_the_numbers_are_those_of_the_job_without_it(framework: str, tmp_path: Path) -> None:
    need(framework)
    bare = started_job(tmp_path / "bare", framework, watched=False)
    assert bare.code == 0, bare.output[-3000:]
    watched = started_job(tmp_path / "watched", framework)
    assert watched.code == 0, watched.output[-3000:]
    assert bare.traces() == watched.traces()
    assert bare.report is None
    assert watched.report is not None
    assert watched.report["coverage"]["ranks_seen"] == 2
    assert watched.findings() == {}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("framework", ["zero2", "zero3", "zero_edited", "trl_sft", "ray"])
def test_a_crash_of_rank_1_is_named(framework: str, tmp_path: Path) -> None:
    need(framework)
    done = started_job(tmp_path, framework, "crash", watched=framework != "zero_edited")
    assert done.culprits("crash") == [1], done.output[-3000:]
