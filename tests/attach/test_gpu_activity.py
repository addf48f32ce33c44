"""What utilization and power of GPUs add to what stacks show of ranks: evidence, and which rank waits for which."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from doctor.analysis.attach_outcome import rank_stacks
from doctor.analysis.attached_job import attached_job
from doctor.analysis.gpu_activity import activities_text, activity_text, gpu_activity
from doctor.core.facts import AttachedGpu, AttachedProcess, GpuActivity, GpuProcess, GpuSample
from doctor.core.finding import Severity
from doctor.core.job import Job
from tests.attach.attached import SAVING, at, inside, members, process
from tests.attach.test_attached_job import SLEEP, findings, judged

SPINS, COMPUTES, IDLE, BETWEEN = (100, 85_000), (98, 610_000), (0, 70_000), (100, 290_000)
STEP = (at(41),)


def gpu(index: int, *readings: tuple[int | None, int | None], pids: tuple[int, ...] = (), **more: Any) -> AttachedGpu:
    """A GPU with a limit of 700 W; ``readings``: utilization and power."""
    samples = tuple(GpuSample(1000.0 + number, *reading, 1 << 30) for number, reading in enumerate(readings * 2))
    known = {"power_limit": 700_000, "processes": tuple(map(GpuProcess, pids or (1000 + index,)))}
    return AttachedGpu(index, samples=samples, **{**known, **more})


def on_gpus(*ranks: AttachedProcess, readings: tuple[tuple[int, int], ...]) -> Job:
    """The job of these ranks, each on a GPU of its own."""
    using = [msgspec.structs.replace(rank, uses_gpu=True, gpu=number) for number, rank in enumerate(ranks)]
    return members(*using, gpus=tuple(gpu(number, reading) for number, reading in enumerate(readings)))


def syncing(rank: int) -> AttachedProcess:
    """A rank whose host thread spins in a synchronization with its GPU, on one line."""
    return process(rank, STEP, cpu=1.0)


@pytest.mark.parametrize(
    ("one", "kind"),
    [
        (gpu(0, SPINS), "waits"),
        (gpu(0, COMPUTES), "computes"),
        (gpu(0, (60, 400_000)), "computes"),
        (gpu(0, IDLE), "idle"),
        (gpu(0, BETWEEN), ""),
        (gpu(0, SPINS, COMPUTES), ""),
        (gpu(0, SPINS, IDLE), ""),
        (gpu(0, (None, None)), ""),
        (gpu(0, (100, None)), ""),
        (gpu(0, SPINS, power_limit=None), ""),
        (gpu(0, (100, 35_000), power_limit=70_000), ""),
        (gpu(0, SPINS, pids=(1000, 4711)), ""),
        (gpu(0, SPINS, processes=None), "waits"),
        (msgspec.structs.replace(gpu(0, SPINS), samples=gpu(0, SPINS).samples[:1]), ""),
    ],
)
def test_only_samples_that_agree_show_what_a_gpu_does(one: AttachedGpu, kind: str) -> None:
    found = gpu_activity(process(0, STEP, gpu=0), [one])
    assert found is not None
    assert found.kind == kind


def test_a_rank_whose_gpu_is_unknown_has_no_activity() -> None:
    assert gpu_activity(process(0, STEP), [gpu(0, SPINS)]) is None
    assert gpu_activity(process(0, STEP, gpu=1), [gpu(0, SPINS)]) is None
    assert gpu_activity(process(0, STEP, gpu=0), [AttachedGpu(0)]) is None


def test_activity_in_words() -> None:
    spins = GpuActivity(3, "waits", 100, 85, 700, xids=(31, 43))
    idle = GpuActivity(1, "idle", 0, 70, 700, assumed_by="LOCAL_RANK")
    assert activity_text(spins) == (
        "GPU 3: 100 % busy at 85 W of 700 W: it waits in a kernel, as in a collective; in the kernel log: Xid 31, 43"
    )
    assert activity_text(idle) == "GPU 1 (by LOCAL_RANK): 0 % busy at 70 W of 700 W: it is idle"
    assert activity_text(GpuActivity(0)) == "GPU 0"
    assert activities_text([GpuActivity(0, "waits", 100, 92, 700), GpuActivity(3, "waits", 100, 85, 700), idle]) == (
        "2 GPUs: 100 % busy at 85-92 W of 700 W: each waits in a kernel, as in a collective; " + activity_text(idle)
    )


def test_ranks_whose_gpus_poll_wait_for_the_one_whose_gpu_is_idle() -> None:
    on_host = process(3, (at(12, "prepare"),), cpu=1.0)
    found = on_gpus(*map(syncing, range(3)), on_host, readings=(SPINS, SPINS, SPINS, IDLE))
    (finding,) = judged(found).result("RUN001").findings  # type: ignore[union-attr]
    assert (finding.ranks, finding.severity) == ((3,), Severity.INFO)
    where = finding.evidence["where"]
    assert where["3"] == "running; is at train.py:12 (prepare); GPU 3: 0 % busy at 70 W of 700 W: it is idle"
    assert "GPU 0: 100 % busy at 85 W of 700 W: it waits in a kernel" in where["0"]
    assert judged(found).exit_code == 0


def test_a_rank_whose_gpu_computes_is_waited_for() -> None:
    found = on_gpus(*map(syncing, range(4)), readings=(SPINS, COMPUTES, SPINS, SPINS))
    assert findings(found) == [("RUN001", (1,), Severity.INFO)]


@pytest.mark.parametrize("readings", [(SPINS,) * 4, (COMPUTES,) * 4, (BETWEEN,) * 4, (IDLE,) * 4])
def test_gpus_alone_are_no_reason_for_a_finding(readings: tuple[tuple[int, int], ...]) -> None:
    report = judged(on_gpus(*map(syncing, range(4)), readings=readings))
    assert (report.exit_code, [one for result in report.results for one in result.findings]) == (0, [])


def test_with_a_rank_that_stands_those_that_compute_do_not_wait() -> None:
    ranks = (*map(syncing, range(3)), process(3, SLEEP))
    found = on_gpus(*ranks, readings=(SPINS, SPINS, COMPUTES, IDLE))
    assert findings(found) == [("RUN001", (3,), Severity.ERROR)]
    (finding,) = judged(found).result("RUN001").findings  # type: ignore[union-attr]
    assert finding.evidence["waiting_ranks"] == [0, 1]
    encodes = (process(2, (at(15),), cpu=1.0), process(3, SLEEP))
    (finding,) = judged(on_gpus(*map(syncing, range(2)), *encodes, readings=(SPINS, SPINS, IDLE, IDLE))).result("RUN001").findings  # type: ignore[union-attr]  # fmt: skip # noqa: E501
    assert (finding.ranks, finding.evidence["waiting_ranks"]) == ((3,), [0, 1])


def test_without_stacks_the_gpus_show_which_rank_is_elsewhere() -> None:
    refused = [process(rank, stack_source="", refused="ptrace is not permitted") for rank in range(4)]
    found = on_gpus(*refused, readings=(SPINS, SPINS, IDLE, SPINS))
    assert findings(found) == [("RUN001", (2,), Severity.INFO)]
    assert judged(found).exit_code == 3
    assert findings(on_gpus(*refused, readings=(SPINS, IDLE, IDLE, SPINS))) == []
    assert findings(on_gpus(*refused, readings=(BETWEEN, SPINS, IDLE, SPINS))) == []


def test_a_checkpoint_on_one_rank_stays_a_remark() -> None:
    ranks = [process(rank, inside("barrier")) for rank in range(3)]
    found = on_gpus(*ranks, process(3, SAVING, cpu=0.5), readings=(SPINS, SPINS, SPINS, IDLE))
    assert {severity for *_, severity in findings(found)} == {Severity.INFO}


def test_groups_of_ranks_show_their_gpus() -> None:
    ranks = [process(rank, inside("all_reduce")) for rank in range(3)]
    found = on_gpus(*ranks, process(3, SLEEP), readings=(SPINS, (100, 92_000), SPINS, IDLE))
    groups = rank_stacks(found, attached_job(found)).groups
    assert [group.gpus for group in groups] == [
        "3 GPUs: 100 % busy at 85-92 W of 700 W: each waits in a kernel, as in a collective",
        "GPU 3: 0 % busy at 70 W of 700 W: it is idle",
    ]
