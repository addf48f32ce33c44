"""What hosts of the lab write to a directory and read there: real children in the mounts of each host."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from doctor.api import Severity, Status
from doctor.collectors.base import Machine
from doctor.core.job import Member
from doctor.facts import Directory, StorageFacts, StorageSpeedFacts
from doctor.probes.base import ProbeContext
from doctor.probes.storage import stage as stage_module
from doctor.probes.storage.file_probe import COMMAND
from doctor.probes.storage.stage import StorageStage
from doctor.testing.cases import healthy
from tests.lab import storage
from tests.lab.hosts import LabHost, hosts
from tests.lab.needs import CannotPlay
from tests.probes.staged import Staged, staged

HOSTS = 3


@pytest.fixture(scope="module")
def lab() -> Iterator[tuple[LabHost, ...]]:
    try:
        with hosts(HOSTS) as made:
            yield made
    except CannotPlay as reason:
        pytest.skip(str(reason))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "runs"
    made.mkdir()
    return made


def played(lab: tuple[LabHost, ...], *folders: Directory) -> Staged:
    members = [_member(member, folders) for member in healthy(len(lab), 1, gpus=0).members]
    named = tuple((folder.role, folder.path) for folder in folders)
    around = Machine(environ=os.environ, directories=named)
    benches = {member.rank: ProbeContext(member.rank, None, around) for member in members}
    return staged(members, [StorageStage(_inside(host)) for host in lab], os.environ, benches)


def _member(member: Member, folders: tuple[Directory, ...]) -> Member:
    return member._replace(sections={**member.sections, StorageFacts.key: StorageFacts(directories=folders)})


def _inside(host: LabHost) -> tuple[str, ...]:
    """The children of a host, which is a process here, run among its mounts."""
    return ("nsenter", "--target", str(host.pid), "--mount", "--pid", "--", *COMMAND)


def checkpoints(folder: Path, **changes: object) -> Directory:
    values = {"exists": True, "writable": True, "free": 1 << 40, "filesystem": "ext4", "shared": False, **changes}
    return Directory(str(folder), "checkpoint", "settings", **values)


def test_a_shared_directory(lab: tuple[LabHost, ...], folder: Path) -> None:
    found = played(lab, checkpoints(folder))
    result = found.result("HOST004")
    assert (result.status, result.findings) == (Status.PASS, ())
    facts = [host.find(StorageSpeedFacts) for host in found.job.hosts]
    assert [[trial.error for trial in one.trials] for one in facts] == [[None]] * HOSTS
    assert [one.readings[0].outcome for one in facts] == ["whole"] * HOSTS
    assert {one.readings[0].writer for one in facts} == {host.name for host in found.job.hosts}
    assert "8 MiB from each of 3 hosts" in found.orders[0].words
    assert list(folder.iterdir()) == []


def test_one_host_has_a_directory_of_its_own(lab: tuple[LabHost, ...], folder: Path) -> None:
    storage.own_directory(lab[1], folder)
    found = played(lab, checkpoints(folder))
    [finding] = found.result("HOST004").findings
    assert (finding.severity, finding.hosts) == (Severity.ERROR, ("node1",))
    assert finding.evidence["hosts_that_share"] == [["node0", "node2"], ["node1"]]


def test_a_directory_that_is_full_and_nobody_knew(lab: tuple[LabHost, ...], folder: Path) -> None:
    with storage.small_directory(lab[2], folder):
        found = played(lab, checkpoints(folder))
    findings = found.result("HOST004").findings
    assert [(finding.severity, finding.hosts) for finding in findings] == [(Severity.ERROR, ("node2",))]
    assert "is on a full file system" in findings[0].summary
    assert findings[0].evidence["error"] == "No space left on device"
    assert list(folder.iterdir()) == []


def test_a_directory_that_can_only_be_read(lab: tuple[LabHost, ...], folder: Path) -> None:
    with storage.read_only_directory(lab[0], folder):
        found = played(lab, checkpoints(folder))
    [finding] = found.result("HOST004").findings
    assert (finding.hosts, finding.evidence["error"]) == (("node0",), "Read-only file system")


def test_no_room_to_spare_is_left_alone(lab: tuple[LabHost, ...], folder: Path) -> None:
    found = played(lab, checkpoints(folder, free=70 << 20))
    assert found.orders == []


def test_a_slow_disk_of_one_host(lab: tuple[LabHost, ...], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each host has its own disk for dumps, one of which takes 1 MB a second."""
    monkeypatch.setattr(stage_module, "MOST_BYTES", 2 << 20)
    dumps = Directory(str(folder), "flight-recorder", "TORCH_FR_DUMP_TEMP_FILE", True, True, free=1 << 40)
    with disk((lab[1],), folder, bandwidth=1_000_000):
        found = played(lab, dumps)
    [finding] = found.result("HOST004").findings
    assert (finding.severity, finding.hosts, finding.evidence["exclude"]) == (Severity.WARNING, ("node1",), ["node1"])
    assert "is slow on node1" in finding.summary
    trials = [host.find(StorageSpeedFacts).trials for host in found.job.hosts]
    assert [len(of_host) for of_host in trials] == [2] * HOSTS, "a suspicion is confirmed, against others"


def test_a_disk_of_one_host(lab: tuple[LabHost, ...], folder: Path) -> None:
    dumps = Directory(str(folder), "flight-recorder", "TORCH_FR_DUMP_TEMP_FILE", True, True, free=1 << 40)
    with disk((lab[1],), folder):
        found = played(lab, dumps)
    assert found.result("HOST004").status is Status.PASS


def test_a_disk_that_all_hosts_share_and_that_is_slow(
    lab: tuple[LabHost, ...], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_module, "MOST_BYTES", 2 << 20)
    with disk(lab, folder, bandwidth=4_000_000):
        found = played(lab, checkpoints(folder))
    [finding] = found.result("HOST004").findings
    assert finding.severity is Severity.WARNING
    assert finding.hosts == ("node0", "node1", "node2")


def test_a_disk_that_does_not_answer(lab: tuple[LabHost, ...], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_module, "WRITE_SECONDS", 1.5)
    with disk((lab[0],), folder):
        with storage.silent(lab[0], folder):
            found = played(lab, checkpoints(folder))
        [finding] = found.result("HOST004").findings
        assert (finding.severity, finding.hosts) == (Severity.ERROR, ("node0",))
        assert "does not respond" in finding.summary
        wait_until(lambda: lab[0].sh('ls -A "$1"', str(folder)).stdout.split() == ["lost+found"])


def wait_until(done: Callable[[], bool], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end
        time.sleep(0.05)


@contextmanager
def disk(lab: Sequence[LabHost], folder: Path, bandwidth: int | None = None) -> Iterator[None]:
    with ExitStack() as stack:
        try:
            stack.enter_context(storage.disk(lab, folder, bandwidth=bandwidth))
        except CannotPlay as reason:
            pytest.skip(str(reason))
        yield
