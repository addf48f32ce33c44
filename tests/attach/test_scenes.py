"""Real jobs that hang, and jobs that take their time: ``doctor attach`` tells the rank and the kind."""

from __future__ import annotations

import pytest

from tests.attach.jobs import running

pytest.importorskip("torch")
pytestmark = [pytest.mark.timeout(240)]


@pytest.mark.parametrize(
    ("scene", "check", "ranks"),
    [
        ("sleeps", "RUN001", [2]),
        ("ddp-sleeps", "RUN001", [2]),
        ("gathers", "RUN006", [2]),
        ("waits-for-a-lock", "RUN001", [2]),
        ("holds-the-interpreter", "RUN016", [2]),
        ("is-stopped", "RUN001", [2]),
        ("leaves", "RUN001", [2]),
        ("ddp-uneven", "RUN001", [2]),
        ("crosses", "RUN015", [0, 1]),
        ("row-never-comes", "RUN010", [2]),
    ],
)
def test_a_hang_is_explained(tmp_path, scene, check, ranks):
    with running(scene, tmp_path) as job:
        attached = job.attach()
        assert (check, ranks, "error") in attached.findings, attached
        assert attached.code == 1
        assert all(process.poll() is None for process in job.processes)


@pytest.mark.parametrize("scene", ["moves", "ddp-moves", "row-moves", "computes", "saves", "row-is-long"])
def test_a_job_that_takes_its_time_is_left_alone(tmp_path, scene):
    with running(scene, tmp_path) as job:
        attached = job.attach()
        assert attached.code == 0, attached
        assert {severity for _, _, severity in attached.findings} <= {"info"}
        assert all(process.poll() is None for process in job.processes)
