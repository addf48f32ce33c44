"""Which job of a host is read, how hosts are numbered without a launcher, and what fits into a message."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from doctor.attach import host_reading
from doctor.attach.host_reading import HostRequest, HostTargets, collector_of, identity_of, read_targets, targets_of
from doctor.attach.processes import Process
from doctor.attach.sampler import SamplingOptions
from doctor.attach.targets import Target, TargetJob, TargetList, TargetRequest
from doctor.core.errors import UnusableError
from doctor.core.facts import AttachedProcess, StackThread
from tests.attach.attached import LOADER, WORKER, at, inside, process, with_threads, worker

ALL_REDUCE = inside("all_reduce")


def _targets(*processes: AttachedProcess) -> HostTargets:
    return HostTargets(None, processes)


def _rank(rank: int, **numbers: Any) -> AttachedProcess:
    return process(rank, ALL_REDUCE, world=8, **{"job": "4711", **numbers})


def test_a_host_is_numbered_by_what_its_ranks_state() -> None:
    first = identity_of(_targets(_rank(0, local_world_size=4, node=0)))
    second = identity_of(_targets(_rank(4, local_world_size=4, node=1)))
    assert first is not None
    assert second is not None
    assert (first[:2], second[:2]) == ((0, 2), (1, 2))
    assert first[2] == second[2]
    other = identity_of(_targets(_rank(4, local_world_size=4, node=1, job="4712")))
    assert other is not None
    assert other[2] != first[2]


def test_without_a_node_number_the_rank_shows_the_host() -> None:
    found = identity_of(_targets(_rank(6, local_world_size=2)))
    assert found is not None
    assert found[:2] == (3, 4)


def test_a_job_of_one_host_needs_no_others() -> None:
    assert identity_of(_targets(_rank(0, local_world_size=8, node=0))) is None


@pytest.mark.parametrize(
    ("rank", "hosts", "message"),
    [
        (_rank(0), None, "add --hosts N"),
        (_rank(4), 2, "do not show which of the hosts it is"),
        (_rank(4, local_world_size=2, node=5), 4, "do not show which of the hosts it is"),
    ],
)
def test_a_host_that_cannot_be_numbered_is_an_error(rank: AttachedProcess, hosts: int | None, message: str) -> None:
    with pytest.raises(UnusableError, match=message):
        identity_of(_targets(rank), hosts)


def _job(number: int, found_by: str, *facts: AttachedProcess) -> TargetJob:
    targets = tuple(Target(Process(one.pid, 1, one.started, 0), one) for one in facts)
    return TargetJob(f"{number}", frozenset({f"{number}"}), "torchrun", "train.py", 4, 0, found_by, targets)


def test_of_several_jobs_one_has_to_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = (_job(1, "variables", process(0)), _job(2, "parent", process(0, pid=7)), _job(3, "libraries", process(0)))
    monkeypatch.setattr(host_reading, "find_targets", lambda *_: TargetList(jobs, others=3))
    with pytest.raises(
        UnusableError, match=r"name one with --job ID or --pid PID \(train.py, 1 rank, job 1; .* job 2\)"
    ):
        targets_of(TargetRequest())
    found = targets_of(TargetRequest(), alone=False)
    assert [one.pid for one in found.ranks] == [1000]
    assert found.notes == (
        "not read: train.py, 1 rank, job 2",
        "not read: 3 training processes of other users (root reads them with --all-users)",
    )


def test_a_launched_job_is_read_and_not_what_only_has_torch_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = (_job(1, "variables", process(0)), _job(3, "libraries", process(0, pid=9)))
    monkeypatch.setattr(host_reading, "find_targets", lambda *_: TargetList(jobs))
    assert [one.pid for one in targets_of(TargetRequest()).ranks] == [1000]


def test_only_workers_of_ranks_that_wait_for_them_are_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [process(0, ALL_REDUCE), process(1, LOADER), worker(0, WORKER), worker(1, WORKER)]
    unread = [msgspec.structs.replace(one, samples=()) for one in found]
    monkeypatch.setattr(
        host_reading,
        "sample",
        lambda targets, _: tuple(one for target in targets for one in found if one.pid == target.pid),
    )
    read = read_targets(_targets(*unread), SamplingOptions()).processes
    assert [(one.pid, bool(one.samples)) for one in read] == [(1000, True), (1001, True), (2000, False), (2001, True)]


def test_stacks_of_other_threads_are_kept_once_and_only_while_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = [StackThread(f"thread {number}", number, frames=(at(number, "wait"),) * 50) for number in range(100)]
    full = with_threads(process(0, ALL_REDUCE), *threads)
    monkeypatch.setattr(host_reading, "sample", lambda targets, _: tuple(targets))
    (kept,) = read_targets(_targets(full), SamplingOptions()).processes
    assert [len(sample.threads) for sample in kept.samples] == [1, 1, 101]
    monkeypatch.setattr(host_reading, "MOST_BYTES", 10_000)
    (kept,) = read_targets(_targets(full), SamplingOptions()).processes
    assert [len(sample.threads) for sample in kept.samples] == [1, 1, 1]


def test_a_process_that_does_not_lead_its_host_reads_nothing() -> None:
    request = HostRequest(TargetRequest((1,), "4711"), SamplingOptions(rounds=2), 5.0)
    assert collector_of(msgspec.json.encode(request).decode())(("launch", "process")) == {}
