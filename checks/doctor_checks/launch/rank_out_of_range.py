"""ENV002: a rank outside its world size."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.analysis.launch_origin import launch_number
from doctor.api import Finding, IdenticalRanks, Job, Severity, Verdict, check
from doctor.facts import LaunchFacts
from doctor.testing import Fails, Passes, healthy, logged


@check(
    id="ENV002",
    severity=Severity.ERROR,
    when="PM",
    needs=(LaunchFacts,),
    impacts={
        r"^NCCL rejected rank": (
            "The process fails, and the other ranks wait in NCCL's initialization until the timeout."
        ),
        r"^LOCAL_RANK": "The process selects a GPU that belongs to another rank or does not exist.",
        r"is not positive": "init_process_group() fails on every rank with this setting.",
        r"negative": ("The rank fails in init_process_group(), and the other ranks wait for it until the timeout."),
    },
    cases=lambda: (
        Fails(
            "a rank that NCCL refuses",
            logged("node1:41:77 [0] init.cc:981 NCCL WARN Invalid rank requested : 2/2"),
            ranks=(),
        ),
        Passes("numbers of torchrun", healthy(hosts=2, per_host=2)),
        Passes("the last rank of the world", healthy().only((1,))),
        Passes("nothing is set", healthy(hosts=1, per_host=1)),
        Passes(
            "LOCAL_RANK=-1, the old word for not distributed", healthy(hosts=1, per_host=1).launched(LOCAL_RANK="-1")
        ),
        Fails("a rank counted from 1", healthy().launched(ranks=(1,), RANK="2"), ranks=(1,)),
        Fails("RANK=-1", healthy().launched(ranks=(0,), RANK="-1"), ranks=(0,)),
        Fails("WORLD_SIZE=0", healthy().launched(WORLD_SIZE="0"), ranks=(0, 1)),
        Fails(
            "LOCAL_RANK is the global rank",
            healthy(hosts=2, per_host=2).launched(ranks=(3,), LOCAL_RANK="3"),
            ranks=(3,),
        ),
    ),
)
def rank_out_of_range(job: Job) -> Iterator[Verdict]:
    """Ask whether RANK is below WORLD_SIZE and LOCAL_RANK below LOCAL_WORLD_SIZE.

    Why it hurts: PyTorch rejects the rank, or the rank hosts no store and waits; the others wait for a rank that does
    not exist.
    Fix: Number the ranks from 0 to WORLD_SIZE - 1 over all hosts, and LOCAL_RANK from 0 to LOCAL_WORLD_SIZE - 1 on each
    host.
    """
    yield from _judge(job, "RANK", "WORLD_SIZE", "in the job")
    yield from _judge(job, "LOCAL_RANK", "LOCAL_WORLD_SIZE", "on the host")


def _judge(job: Job, name: str, size_name: str, whole: str) -> Iterator[Finding]:
    outside: dict[int | None, list[tuple[int, IdenticalRanks]]] = {}
    for launch, identical in job.each(LaunchFacts):
        rank, size = launch_number(launch, name), launch_number(launch, size_name)
        # By an old convention, scripts mark a process that is not distributed by a negative LOCAL_RANK
        if rank is not None and not ((rank >= 0 or name == "LOCAL_RANK") and (size is None or rank < size)):
            outside.setdefault(size, []).append((rank, identical))
    for size, found in outside.items():
        first = found[0][0]
        yield Finding(
            _summary(name, first, size_name, size),
            ranks=tuple(number for _, identical in found for number in identical.ranks),
            evidence={name: [rank for rank, _ in found[:8]], size_name: size},
            fix=_fix(name, first, size_name, size, whole),
        )


def _summary(name: str, rank: int, size_name: str, size: int | None) -> str:
    if size is not None and size < 1:
        return f"{size_name}={size} is not positive, but this process has {name}={rank}"
    if rank < 0:
        return f"{name}={rank} is negative: ranks start at 0"
    kind = {"LOCAL_RANK": "local rank", "GROUP_RANK": "group rank", "NODE_RANK": "node rank"}.get(name, "rank")
    numbers = f"the only valid {kind} is 0" if size == 1 else f"valid {kind}s are 0-{(size or 1) - 1}"
    return f"{name}={rank} is not below {size_name}={size}: {numbers}"


def _fix(name: str, rank: int, size_name: str, size: int | None, whole: str) -> str:
    if size is not None and size < 1:
        return f"Set {size_name} to the number of processes {whole}."
    if rank == size:
        return (
            f"Number the processes from {name}=0 to {name}={rank - 1}, or, if {rank + 1} processes run, set "
            f"{size_name}={rank + 1} on all of them."
        )
    if rank < 0:
        return f"Number the processes from {name}=0, or run `unset {name}` if this process is not distributed."
    return (
        f"Give every process {whole} its own {name} from 0 to {(size or 1) - 1}, or set {size_name} to the number of "
        "processes that run" + (", not of nodes or pods." if name == "RANK" else ".")
    )
