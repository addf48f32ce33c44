"""Faulty hosts, caused with limits, users, mounts, files and fake device trees, and read by the real collectors."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from doctor.api import Severity, Status
from doctor.collectors.base import Machine
from doctor.collectors.runner import collect_facts
from doctor.core.check_registry import CheckRegistry, builtin_checks
from doctor.core.check_runner import examine_job as examine
from doctor.core.facts import Missing
from doctor.core.job import Job, Member, build_job
from doctor.core.report_document import CheckResult
from doctor.facts import HostFacts, MissingReason, ProcessFacts, SoftwareFacts, TorchBuild
from doctor.testing import healthy
from tests.lab.elsewhere import facts_elsewhere
from tests.lab.nvml import FakeNvml

CHECKS = {check.id: check for check in builtin_checks()}
NOBODY = "setpriv --reuid=65534 --regid=65534 --clear-groups"

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="takes root: becomes another user or mounts")
needs_setpriv = pytest.mark.skipif(shutil.which("setpriv") is None, reason="setpriv of util-linux is not installed")


def judged(job: Job, check: str) -> CheckResult:
    (result,) = examine(job, CheckRegistry((CHECKS[check],)))
    assert result.status is not Status.ERROR, result.reason
    return result


def blamed(result: CheckResult) -> set[int]:
    return {rank for finding in result.findings for rank in finding.ranks}


def beside(rank: int, facts: dict, hosts: int = 2, **shape: int) -> Job:
    """A healthy job of one rank a host in which ``rank`` has these real sections."""
    members = list(healthy(hosts=hosts, per_host=1, **shape).members)
    members[rank] = Member(rank, {**members[rank].sections, **facts})
    return build_job(members)


@pytest.mark.parametrize(("limit", "faulty"), [(256, {1}), (4096, set())])
def test_open_files_limit(limit: int, faulty: set[int]) -> None:
    facts = facts_elsewhere("process", before=f"ulimit -Sn {limit}")
    result = judged(beside(1, facts), "HOST002")
    assert blamed(result) == faulty
    assert all(f"ulimit -n {facts['process'].limit('open_files').hard}" in finding.fix for finding in result.findings)


@needs_root
@needs_setpriv
def test_locked_memory_limit_binds_users_and_not_root() -> None:
    low = "ulimit -l 64"
    user = beside(1, facts_elsewhere("process", before=low, wrap=NOBODY), rdma=2)
    root = beside(1, facts_elsewhere("process", before=low), rdma=2)
    dropped = facts_elsewhere("process", before=low, wrap="setpriv --bounding-set=-ipc_lock --inh-caps=-ipc_lock")
    assert blamed(judged(user, "HOST001")) == {1}
    assert judged(root, "HOST001").status is Status.PASS
    assert blamed(judged(beside(1, dropped, rdma=2), "HOST001")) == {1}


@needs_root
@needs_setpriv
@pytest.mark.parametrize(("limit", "faulty"), [(24, {1}), (2000, set())])
def test_process_limit(limit: int, faulty: set[int]) -> None:
    facts = facts_elsewhere("process", wrap=f"prlimit --nproc={limit} {NOBODY}")
    assert blamed(judged(beside(1, facts), "HOST007")) == faulty


@needs_root
def test_root_is_exempt_from_the_process_limit() -> None:
    facts = facts_elsewhere("process", wrap="prlimit --nproc=24")
    assert judged(beside(1, facts), "HOST007").status is Status.PASS


def test_a_missing_checkpoint_directory(tmp_path: Path) -> None:
    gone = facts_elsewhere("storage", directories={"checkpoint": tmp_path / "gone"}, HOME=str(tmp_path))
    there = facts_elsewhere("storage", directories={"checkpoint": tmp_path}, HOME=str(tmp_path))
    assert blamed(judged(beside(0, gone, hosts=1), "HOST004")) == {0}
    assert judged(beside(0, there, hosts=1), "HOST004").status is Status.PASS


def test_a_checkpoint_directory_of_one_host_alone(tmp_path: Path) -> None:
    facts = facts_elsewhere("storage", directories={"checkpoint": tmp_path}, HOME=str(tmp_path))
    if facts["storage"].directories[0].shared is not False:
        pytest.skip("the temporary folder is on a shared file system")
    result = judged(beside(1, facts), "HOST004")
    assert blamed(result) == {1}
    assert "is not shared between hosts" in result.findings[0].summary


@needs_root
@needs_setpriv
def test_a_dump_directory_that_is_not_writable(tmp_path: Path) -> None:
    folder = tmp_path / "dumps"
    folder.mkdir(mode=0o755)
    for parent in (folder, *folder.parents):
        if not parent.stat().st_mode & 0o001:
            parent.chmod(parent.stat().st_mode | 0o011)
    dumps = {"TORCH_FR_DUMP_TEMP_FILE": f"{folder}/trace_", "HOME": str(folder)}
    facts = facts_elsewhere("storage", wrap=NOBODY, **dumps)
    result = judged(beside(1, facts), "HOST004")
    assert blamed(result) == {1}
    assert "is not writable" in result.findings[0].summary
    assert judged(beside(1, facts_elsewhere("storage", **dumps)), "HOST004").status is Status.PASS


@needs_root
def test_a_full_dump_directory(tmp_path: Path) -> None:
    probe = subprocess.run(["unshare", "-m", "true"], capture_output=True)
    if probe.returncode != 0:
        pytest.skip("mount namespaces are not allowed here")
    filled = f"mount -t tmpfs -o size=70m none {tmp_path} && head -c 60m /dev/zero > {tmp_path}/full"
    facts = facts_elsewhere(
        "storage",
        wrap=f'unshare -m bash -c \'{filled} && exec "$0" "$@"\'',
        TORCH_FR_DUMP_TEMP_FILE=f"{tmp_path}/trace_",
        HOME=str(tmp_path),
    )
    result = judged(beside(1, facts), "HOST004")
    assert blamed(result) == {1}
    assert "has less than 64 MiB free" in result.findings[0].summary


def locked(folder: Path, age: float) -> Path:
    lock = folder / "py311_cpu" / "my_extension" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    os.utime(lock, (time.time() - age,) * 2)
    return lock


def test_a_lock_that_a_killed_build_left(tmp_path: Path) -> None:
    lock = locked(tmp_path, 100_000.0)
    torch = {"software": SoftwareFacts(torch=TorchBuild("2.13.0+cpu"))}
    environ = {"TORCH_EXTENSIONS_DIR": str(tmp_path), "HOME": str(tmp_path)}
    left = facts_elsewhere("storage", **environ) | torch
    result = judged(beside(1, left), "HOST008")
    assert blamed(result) == {1}
    assert result.findings[0].fix.splitlines()[1:] == [f"rm {lock}"]
    with lock.open():
        held = facts_elsewhere("storage", **environ) | torch
    assert judged(beside(1, held), "HOST008").status is Status.PASS
    newer = left | {"software": SoftwareFacts(torch=TorchBuild("2.14.0+cpu"))}
    assert judged(beside(1, newer), "HOST008").status is Status.PASS


def device_tree(folder: Path, *names: str) -> Path:
    folder.mkdir()
    for name in names:
        (folder / name).touch()
    return folder


@pytest.mark.parametrize(("with_uvm", "faulty"), [(True, set()), (False, {1})])
def test_a_container_without_nvidia_uvm(fake_nvml: FakeNvml, tmp_path: Path, with_uvm: bool, faulty: set[int]) -> None:
    names = ["nvidiactl", "nvidia0", "nvidia1", *(["nvidia-uvm"] if with_uvm else [])]
    dev = device_tree(tmp_path / "dev", *names)
    environ = fake_nvml.environ("eight_h100", "count=2") | {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    facts = collect_facts(("gpus", "drivers", "host"), Machine(environ=environ, dev=dev))
    result = judged(beside(1, facts), "HOST009")
    assert blamed(result) == faulty
    assert all("/dev/nvidia-uvm" in finding.summary for finding in result.findings)


@pytest.mark.parametrize(("threads", "faulty"), [("8", {1}), ("2", set())])
def test_a_quota_below_the_threads(threads: str, faulty: set[int]) -> None:
    """The reading of cgroups has tests of its own; here the rank's own threads are real."""
    facts = facts_elsewhere("process", OMP_NUM_THREADS=threads)
    tight = healthy(hosts=2, per_host=1).alter(HostFacts, cpu_quota=4.0).members
    job = build_job([tight[0], Member(1, {**tight[1].sections, **facts})])
    assert blamed(judged(job, "HOST005")) == faulty


@pytest.mark.parametrize(("answer", "status"), [("True", Status.FAIL), ("False", Status.PASS)])
def test_what_torch_says_of_its_fork(tmp_path: Path, answer: str, status: Status) -> None:
    """A torch that is loaded before the doctor comes, and knows whether CUDA was in use before the fork."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, types\n"
        "torch, cuda = types.ModuleType('torch'), types.ModuleType('torch.cuda')\n"
        f"cuda._is_in_bad_fork = lambda: {answer}\n"
        "sys.modules.update({'torch': torch, 'torch.cuda': cuda})\n"
    )
    result = judged(beside(1, facts_elsewhere("process", PYTHONPATH=str(tmp_path))), "HOST006")
    assert result.status is status
    assert blamed(result) == ({1} if status is Status.FAIL else set())


def test_this_machine_is_silent() -> None:
    """The host checks on the facts of the machine that runs the tests: errors would be false alarms of ours."""
    facts = facts_elsewhere("process", "host", "storage", "drivers", "gpus", "rdma", "software", "nccl", "trainer")
    job = build_job([Member(0, facts)])
    loud = [
        finding
        for check in CHECKS
        if check.startswith(("HOST", "VER"))
        for finding in judged(job, check).findings
        if finding.severity is Severity.ERROR
    ]
    assert not loud, loud
    assert not [value for value in facts.values() if isinstance(value, Missing) and value.lack is MissingReason.FAILED]
    assert isinstance(facts["process"], ProcessFacts)
