"""Real hosts and environments against a real capture of one that worked."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import sys
from pathlib import Path

from doctor.api import Status
from doctor.cli.baseline_file import load_baseline
from doctor.core.capture import merge_captures, read_capture
from doctor.core.check_registry import CheckRegistry, builtin_checks
from doctor.core.check_runner import examine_job
from doctor.core.job import Job
from doctor.core.report_document import CheckResult
from tests.checks.test_software_real import install_torch
from tests.collectors.namespaces import run_in_namespaces

CHECKS = {check.id: check for check in builtin_checks()}
ROOT = Path(__file__).parents[2]
WITHOUT_NCCL = {name: value for name, value in os.environ.items() if not name.startswith("NCCL_")}


def capture(path: Path, site: Path, **environ: str) -> Path:
    """What ``doctor capture`` writes in an environment with the packages of ``site``."""
    search = {"PYTHONPATH": f"{site}:{ROOT}:{ROOT / 'checks'}"}
    command = [sys.executable, "-m", "doctor", "capture", "-o", str(path)]
    subprocess.run(command, env={**WITHOUT_NCCL, **search, **environ}, check=True, timeout=90, capture_output=True)
    return path


def against(now: Path, worked: Path) -> Job:
    job = merge_captures([read_capture(now)])
    job.expected = load_baseline(worked)
    return job


def judged(job: Job, check: str) -> CheckResult:
    (result,) = examine_job(job, CheckRegistry((CHECKS[check],)))
    assert result.status is not Status.ERROR, result.reason
    return result


def test_this_environment_against_the_one_that_worked(tmp_path: Path) -> None:
    newer, older = install_torch(tmp_path / "newer", "2.8.0+cu128"), install_torch(tmp_path / "older", "2.7.1", "12.6")
    worked = capture(tmp_path / "worked.json", newer, NCCL_ALGO="Ring")
    same = against(capture(tmp_path / "same.json", newer, NCCL_ALGO="ring"), worked)
    for check in ("VER001", "NCCL003"):
        assert judged(same, check).status is Status.PASS
    other = against(capture(tmp_path / "other.json", older, NCCL_PROTO="Simple"), worked)
    today = datetime.datetime.now(datetime.timezone.utc).date()
    finding = judged(other, "VER001").findings[0]
    assert finding.summary == "PyTorch: expected 2.8.0 (baseline), found 2.7.1; CUDA: expected 12.8, found 12.6"
    days = (today, today - datetime.timedelta(days=1))
    assert finding.evidence["expected_from"] in {f"capture of {platform.node()}, {day}" for day in days}
    settings = judged(other, "NCCL003").findings[0]
    assert settings.evidence["expected"] == {"NCCL_ALGO": "ring", "NCCL_PROTO": "not set"}
    assert settings.evidence["found"] == {"NCCL_ALGO": "not set", "NCCL_PROTO": "simple"}


_COLLECT = """
import sys
from pathlib import Path
from doctor.core.capture import encode_document, to_document
from doctor.session import collect
Path({path!r}).write_bytes(encode_document(to_document(collect())))
"""


def _behind(path: Path, mtu: int, address: str) -> Path:
    """The capture of a host with one interface of that MTU and address."""
    setup = f"""
        ip link add eth0 type veth peer name other; ip link set other up
        echo 1 > /proc/sys/net/ipv6/conf/eth0/disable_ipv6
        ip link set eth0 mtu {mtu} up; ip address add {address} dev eth0; export NCCL_SOCKET_IFNAME==eth0
    """
    run_in_namespaces(setup, _COLLECT.format(path=str(path)))
    return path


def test_one_host_with_another_mtu_than_the_one_that_worked(tmp_path: Path) -> None:
    worked = _behind(tmp_path / "worked.json", 9000, "10.7.0.1/24")
    narrow = _behind(tmp_path / "narrow.json", 1500, "10.9.0.1/24")
    result = judged(against(narrow, worked), "NET012")
    assert [finding.evidence["found"] for finding in result.findings] == [
        {"MTU of the training interface": "1500 bytes"}
    ]
    assert [finding.evidence["expected"] for finding in result.findings] == [
        {"MTU of the training interface": "9000 bytes"}
    ]
    wide = _behind(tmp_path / "wide.json", 9000, "10.9.0.1/24")
    assert judged(against(wide, worked), "NET012").status is Status.PASS
    assert judged(against(wide, worked), "NET016").status is Status.PASS
