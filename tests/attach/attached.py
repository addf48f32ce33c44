"""Processes that were read from outside, in a few words: for tests of what follows from them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from doctor.core.facts import AttachedProcess, AttachFacts, Frame, HostFacts, KernelView, ProcessSample, StackThread
from doctor.core.job import Job, Member, build_job
from doctor.testing import package_frame

INTERVAL = 1.5
"""Seconds between samples."""


def at(line: int, function: str = "train", file: str = "/home/me/train.py", condition: str = "") -> Frame:
    """A frame of the user's program."""
    return Frame(file, line, function, user=True, condition=condition)


MAIN = at(90, "main")
_DIST = "torch/distributed/distributed_c10d.py"


def inside(operation: str, *outer: Frame) -> tuple[Frame, ...]:
    """The stack of a rank in a collective."""
    wrapper = package_frame("torch/distributed/c10d_logger.py", 81, "wrapper")
    return (package_frame(_DIST, 3007, operation), wrapper, *(outer or (at(41),)), MAIN)


BACKWARD = (
    package_frame("torch/autograd/graph.py", 841, "_engine_run_backward"),
    package_frame("torch/_tensor.py", 648, "backward"),
    at(44),
    MAIN,
)
LOADER = (
    package_frame("multiprocessing/queues.py", 113, "get"),
    package_frame("torch/utils/data/dataloader.py", 1284, "_try_get_data"),
    package_frame("torch/utils/data/dataloader.py", 1491, "_next_data"),
    package_frame("torch/utils/data/dataloader.py", 734, "__next__"),
    at(38),
    MAIN,
)
WORKER = (
    at(12, "__getitem__", "/home/me/data.py"),
    package_frame("torch/utils/data/_utils/fetch.py", 54, "fetch"),
    package_frame("torch/utils/data/_utils/worker.py", 351, "_worker_loop"),
)
IDLE_WORKER = (
    package_frame("multiprocessing/queues.py", 113, "get"),
    package_frame("torch/utils/data/_utils/worker.py", 340, "_worker_loop"),
)
SAVING = (package_frame("torch/serialization.py", 980, "_save"), at(60, "save"), MAIN)


def process(
    rank: int | None,
    *stacks: Sequence[Frame],
    cpu: float = 0.0,
    threads_cpu: float = 0.0,
    switches: int = 2,
    transferred: int = 0,
    state: str = "S",
    wchan: str = "",
    gil: bool = False,
    rounds: int = 3,
    world: int | None = 4,
    **fields: Any,
) -> AttachedProcess:
    """A process that was sampled: at each of the ``stacks``, the last one again and again.

    ``cpu`` of the main thread and ``threads_cpu`` of the others: shares of the time. ``switches`` and ``transferred``:
    for one sample."""
    samples = []
    for number in range(rounds):
        stack = tuple(stacks[min(number, len(stacks) - 1)]) if stacks else ()
        seconds = number * INTERVAL
        kernel = KernelView(
            state=state,
            wchan=wchan,
            cpu=(cpu + threads_cpu) * seconds,
            main_cpu=cpu * seconds,
            switches=number * switches,
            transferred=number * transferred,
        )
        threads = (StackThread("MainThread", 100, is_main=True, holds_gil=gil, frames=stack),) if stack else ()
        samples.append(ProcessSample(1000.0 + seconds, kernel, threads))
    pid = fields.pop("pid", 1000 + rank if rank is not None else 5000)
    known = {"launcher": "torchrun", "program": "train.py", "stack_source": "py-spy", "started": 10.0 + pid}
    return AttachedProcess(pid=pid, rank=rank, world_size=world, samples=tuple(samples), **{**known, **fields})


def worker(parent: int, *stacks: Sequence[Frame], **options: Any) -> AttachedProcess:
    """A data worker of the rank ``parent``."""
    pid = options.pop("pid", 2000 + parent)
    options = {"role": "worker", **options}
    return process(None, *stacks, parent=1000 + parent, pid=pid, world=None, **options)


def with_threads(one: AttachedProcess, *threads: StackThread) -> AttachedProcess:
    """The process with further threads in all samples."""
    samples = tuple(msgspec.structs.replace(sample, threads=(*sample.threads, *threads)) for sample in one.samples)
    return msgspec.structs.replace(one, samples=samples)


def attached_to(*processes: AttachedProcess, host: str = "node0", number: int = 0, **fields: Any) -> Member:
    """A process that attached to a host."""
    return Member(
        number,
        {
            HostFacts.key: HostFacts(hostname=host, boot_id=f"boot of {host}"),
            AttachFacts.key: AttachFacts(processes=processes, **fields),
        },
    )


def members(*processes: AttachedProcess, **fields: Any) -> Job:
    """The gathered job of one attaching process."""
    return build_job([attached_to(*processes, **fields)])


def of_hosts(*hosts: Iterable[AttachedProcess]) -> Job:
    """The gathered job of one attaching process for each host."""
    return build_job([attached_to(*found, host=f"node{number}", number=number) for number, found in enumerate(hosts)])
