"""Too little memory, caused on this machine: a small /dev/shm, and a cgroup with a limit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.collectors.namespaces import run_in_namespaces

ROOT = Path(__file__).parents[2]

JUDGE = """
import json, sys
sys.path[:0] = [{root!r}, {checks!r}]
from doctor.core.check_registry import CheckRegistry, builtin_checks
from doctor.collectors.base import Machine
from doctor.collectors.runner import collect_facts
from doctor.core.check_runner import examine_job as examine
from doctor.core.facts import EstimateFacts
from doctor.core.job import Member, build_job
facts = collect_facts(("host",), Machine())
if {peak}:
    facts["estimate"] = EstimateFacts(host_peak={peak})
job = build_job([Member(rank, facts) for rank in range({ranks})])
(result,) = examine(job, CheckRegistry(tuple(check for check in builtin_checks() if check.id == {check!r})))
print(json.dumps(dict(status=result.status.value, severity=result.severity.value, reason=result.reason,
    ranks=sorted(rank for finding in result.findings for rank in finding.ranks),
    evidence=[dict(finding.evidence) for finding in result.findings])))
"""


def program(check: str, *, ranks: int, peak: int = 0) -> str:
    return JUDGE.format(root=str(ROOT), checks=str(ROOT / "checks"), check=check, ranks=ranks, peak=peak)


@pytest.mark.parametrize(("mebibytes", "ranks"), [(64, [0, 1]), (127, [0, 1]), (128, []), (1024, [])])
def test_size_of_shared_memory(mebibytes: int, ranks: list[int]) -> None:
    setup = f"mount -t tmpfs -o size={mebibytes}m none /dev/shm"
    found = json.loads(run_in_namespaces(setup, program("MEM010", ranks=2)))
    assert found["ranks"] == ranks
    assert found["status"] == ("fail" if ranks else "pass")


def test_shared_memory_that_killed_jobs_filled() -> None:
    setup = "mount -t tmpfs -o size=100m none /dev/shm; head -c 60000000 /dev/zero > /dev/shm/nccl-Xa1b2c"
    found = json.loads(run_in_namespaces(setup, program("MEM010", ranks=1)))
    (evidence,) = found["evidence"]
    assert evidence["left_over_nccl_files"] == 1
    assert evidence["left_over_nccl_bytes"] >= 60_000_000
    assert evidence["free_bytes"] < evidence["total_bytes"] == 100 << 20


LIMIT = 512 << 20


@pytest.fixture
def limited() -> Iterator[Path]:
    """A cgroup whose processes may take 512 MiB."""
    parent, limit = Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"
    if not parent.is_dir():
        parent, limit = Path("/sys/fs/cgroup"), "memory.max"
    group = parent / f"rankdoctor-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / limit).write_text(str(LIMIT))
    except OSError as error:
        if group.is_dir():
            group.rmdir()
        pytest.skip(f"needs root and a writable memory cgroup: {error}")
    yield group
    group.rmdir()


@pytest.mark.parametrize(("ranks", "faulty"), [(2, False), (4, True)])
def test_a_cgroup_that_is_too_small_for_its_ranks(limited: Path, ranks: int, faulty: bool) -> None:
    enter = f'echo $$ > {limited}/cgroup.procs; exec "$0" -c "$1"'
    command = ["bash", "-c", enter, sys.executable, program("MEM008", ranks=ranks, peak=160 << 20)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["status"], found["ranks"]) == (("fail", list(range(ranks))) if faulty else ("pass", []))
    if faulty:
        assert found["severity"] == "error"
        assert found["evidence"][0]["cgroup_limit_bytes"] == LIMIT


def test_nobody_estimated() -> None:
    done = subprocess.run(
        [sys.executable, "-c", program("MEM008", ranks=2)], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    found = json.loads(done.stdout)
    assert (found["status"], found["reason"]) == ("skip", "not measured")
