"""The doctor's metrics in the loggers of Lightning and Transformers, read back with the package of each.

See ``logger_program.py``. ``python benchmarks/loggers.py`` runs all of them in an environment with the packages that
the tests do not install.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("lightning")

from benchmarks import loggers as benchmark
from doctor.monitor.sinks.logger_metrics import METRICS
from tests.frameworks.logger_program import NEEDS
from tests.lab.needs import ROOT, clean_environ
from tests.lab.speed import patience

OF_SEVERAL_RANKS = {"doctor/slowest_rank", "doctor/slowest_rank_excess", "doctor/memory_skew"}
OF_DEVICES = {"doctor/memory_reserved_max_bytes"}


def lacks(name: str) -> pytest.MarkDecorator:
    reason = f"needs {NEEDS[name]}; benchmarks/frameworks/environment makes an environment with it"
    return pytest.mark.skipif(find_spec(NEEDS[name]) is None, reason=reason)


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(name, marks=lacks(name)) for name in NEEDS if name != "csv"])
def test_a_logger_keeps_what_the_doctor_measured(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.frameworks.logger_program", str(tmp_path), name, "18"]
    done = subprocess.run(
        command, env=clean_environ(tmp_path), cwd=ROOT, capture_output=True, text=True, timeout=patience(120)
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    handed, kept = found["handed"], found["kept"]
    assert set(kept) == set(METRICS) - OF_SEVERAL_RANKS - OF_DEVICES
    assert {metric: [step for step, _ in rows] for metric, rows in kept.items()} == {
        metric: [step for step, _ in rows] for metric, rows in handed.items()
    }
    for metric, rows in handed.items():  # TensorBoard keeps 32 bits
        assert [value for _, value in kept[metric]] == pytest.approx([value for _, value in rows], rel=1e-6)


@pytest.mark.slow
def test_the_csv_logger_by_the_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    """All metrics of one process on the CPU, each with its steps and values, and what is kept stays as it is."""
    before = benchmark.RESULTS.read_bytes()
    assert benchmark.main(["--part"]) == 0
    name, _, row = capsys.readouterr().out.partition(": ")
    found = json.loads(row)
    assert (name, found["metrics"]) == ("csv", len(set(METRICS) - OF_SEVERAL_RANKS - OF_DEVICES))
    assert found["values"] >= found["metrics"]
    assert (found["lost"], found["more"], found["changed"]) == ([], 0, [])
    assert benchmark.RESULTS.read_bytes() == before
