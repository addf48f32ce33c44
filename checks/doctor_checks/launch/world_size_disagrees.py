"""ENV003: ranks use different world sizes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from doctor.analysis.launch_origin import DirectLaunch, direct_launch, launch_number, may_be_direct
from doctor.analysis.logs.event_timeline import events_of_kinds, parse_count, set_up_after
from doctor.api import (
    EventGroup,
    Finding,
    Group,
    IdenticalRanks,
    Job,
    MajoritySplit,
    Scope,
    Severity,
    Verdict,
    check,
    conjunction,
    correlates,
    describe,
    event_groups,
    finding_from_logs,
    is_logged,
    merge,
    ranks_in_words,
    split,
)
from doctor.facts import LaunchFacts
from doctor.testing import Fails, JobBuilder, Passes, healthy, logged
from doctor_checks.launch._restart_messages import RESTARTS

MOST_FINDINGS = 8
"""Sizes reported separately; more have a common cause, such as a size computed on every host."""


def _counted_by_each_host(hosts: int) -> JobBuilder:
    sketch = healthy(hosts=hosts, per_host=1)
    for rank in range(hosts):
        sketch = sketch.alter(LaunchFacts, ranks=(rank,), world_size=hosts + rank)
    return sketch


def _worlds_unequal(job: Job) -> Iterator[Finding]:
    """Report ranks with different world sizes that connect during the NCCL bootstrap."""
    for group in event_groups(job, "nccl.bootstrap.mismatch", "nccl.bootstrap.mismatch.old", by=("a", "b")):
        sizes = [group.value("a"), group.value("b")]
        yield finding_from_logs(
            group,
            f"Ranks with world sizes {sizes[0]} and {sizes[1]} connected to each other",
            ranks=(),
            evidence={"world_sizes": sizes},
            confidence=0.7,
            fix="Use the same number of hosts and processes in the launch command on every host, and give each job its "
            "own MASTER_PORT.",
        )


def _too_many(job: Job) -> Iterator[Finding]:
    """Report a store with more processes than the world size: started more than once, or an earlier attempt counts.

    ``_store_based_barrier`` in torch/distributed/distributed_c10d.py counts all processes that reach one key."""
    if is_logged(job, *RESTARTS):
        return
    for event in events_of_kinds(job, "torch.store.barrier_timeout", "torch.store.barrier_wait"):
        came, size = parse_count(event.value("got")) or 0, parse_count(event.value("world"))
        if size is not None and came > size and not set_up_after(job, event):
            yield finding_from_logs(
                EventGroup(event.kind, (event,)),
                f"{came} processes joined a process group of {size} rank{'' if size == 1 else 's'}: the job "
                "was probably launched several times",
                ranks=(),
                evidence={"came": came, "world_size": size},
                effect=f"init_process_group() waits for exactly {size} process{'' if size == 1 else 'es'}, so it fails "
                "at the timeout.",
                confidence=0.75,
                fix="Start each rank only once, and use a new MASTER_PORT after a failed attempt.",
            )
            return


@check(
    id="ENV003",
    severity=Severity.ERROR,
    scope=Scope.JOB,
    when="PM",
    needs=(LaunchFacts,),
    from_logs=(_worlds_unequal, _too_many),
    impacts={
        r"connected to each other": "NCCL cannot build the communicator: the ranks fail or wait until the timeout.",
        r"mpirun started|srun started": (
            "The processes wait in init_process_group() for ranks that are not started, until the timeout."
        ),
    },
    cases=lambda: (
        Passes("the same on all ranks", healthy(hosts=2, per_host=2)),
        Passes("srun started the ranks", healthy(hosts=2, per_host=2).by_srun().launched(WORLD_SIZE="4")),
        Passes(
            "one task a node that starts its ranks itself, WORLD_SIZE exported for them",
            healthy(hosts=2, per_host=1).by_srun().launched(WORLD_SIZE="16"),
        ),
        Passes(
            "one task a node that starts its ranks itself and tells each of them its numbers, as composer does",
            healthy(hosts=2, per_host=1).by_srun().launched(WORLD_SIZE="16", RANK="0", LOCAL_WORLD_SIZE="8"),
        ),
        Fails(
            "one host was started with another number of nodes",
            healthy(hosts=3, per_host=2).alter(LaunchFacts, ranks=(4, 5), world_size=8),
            ranks=(4, 5),
        ),
        Fails(
            "two hosts, each of which believes that it is alone",
            healthy(hosts=2, per_host=2).alter(LaunchFacts, ranks=(2, 3), world_size=2),
            ranks=(0, 1, 2, 3),
        ),
        Fails(
            "each of many hosts has a number of its own: one finding",
            _counted_by_each_host(12),
            ranks=tuple(range(12)),
        ),
        Fails(
            "srun starts four tasks and the script exports WORLD_SIZE=8",
            healthy(hosts=2, per_host=2).by_srun().launched(WORLD_SIZE="8", RANK="0"),
            ranks=(0, 1, 2, 3),
        ),
        Fails(
            "mpirun starts two and WORLD_SIZE=4 is left over",
            healthy().launched(
                without=("TORCHELASTIC_RUN_ID",), OMPI_COMM_WORLD_SIZE="2", OMPI_COMM_WORLD_RANK="0", WORLD_SIZE="4"
            ),
            ranks=(0, 1),
        ),
        Fails(
            "srun starts two tasks, and each of them spawns a world of two",
            logged(
                "RuntimeError: Timed out initializing process group in store based barrier on rank: 1, for key: "
                "store_based_barrier_key:1 (world_size=2, worker_count=4, timeout=0:30:00)"
            ),
        ),
        Fails(
            "log of a store that counts more processes than there are ranks",
            logged(
                "RuntimeError: Timed out initializing process group in store based barrier on rank: 0, for key: "
                "store_based_barrier_key:1 (world_size=4, worker_count=16, timeout=0:30:00)"
            ),
            ranks=(),
        ),
    ),
)
def world_size_disagrees(job: Job) -> Iterator[Verdict]:
    """Ask whether all ranks use the same world size, and whether as many ranks are started.

    Why it hurts: ranks with a larger world size wait in init_process_group() until the timeout; ranks with a smaller
    one may form a process group without the others.
    Fix: Use the same number of hosts and of processes per host in the launch command on every host.
    """
    yield from _judge_each_other(job)
    yield from merge(
        found
        for launch, identical in (job.each(LaunchFacts) if may_be_direct(job) else ())
        if (direct := direct_launch(launch)) is not None
        for found in _judge_launcher(direct, launch, identical)
    )


def _judge_each_other(job: Job) -> Iterator[Finding]:
    if len(job.ranks) < 2:
        return
    # No baseline: another job may have another size.
    parted = split(job, LaunchFacts, lambda launch: launch.world_size)
    stated = [group for group in parted.minorities if group.value is not None]
    if len(stated) > MOST_FINDINGS:
        ranks = tuple(sorted(rank for group in stated for rank in group.ranks))
        yield Finding(
            f"{ranks_in_words(ranks).capitalize()} use {len(stated)} different world sizes",
            ranks=ranks,
            evidence={"sizes": len(stated), "groups": describe(parted)},
        )
        return
    for group in stated:
        common = parted.common.value if parted.common else None
        if not parted.even and common is None:
            continue
        along = correlates(job, group.ranks)
        yield Finding(
            f"{ranks_in_words(group.ranks).capitalize()} use{'s' if len(group.ranks) == 1 else ''} "
            f"world size {group.value}" + (f", the others {common}" if parted.common else _others(parted, group)),
            ranks=group.ranks,
            evidence={
                "world_size": group.value,
                "groups": describe(parted),
                "along_with": list(along),
            },
            fix=_as_elsewhere(job, group.ranks) if parted.common else "",
        )


def _as_elsewhere(job: Job, ranks: tuple[int, ...]) -> str:
    """The fix on the hosts of which all ranks differ; empty, for the general one, if they are others."""
    hosts = list(dict.fromkeys(rank.host.name for rank in job.ranks if rank.number in ranks))
    mixed = {rank.host.name for rank in job.ranks if rank.number not in ranks}
    if len(hosts) > 4 or mixed.intersection(hosts):
        return ""
    return (
        f"On {conjunction(hosts)}, use the number of hosts and of processes per host from the launch command of the "
        "other hosts."
    )


def _others(parted: MajoritySplit, group: Group[Any]) -> str:
    """The other sizes of an even split: ``, ranks 2 and 3 use 2``, if there is only one."""
    others = [other for other in parted.groups if other is not group]
    if len(others) != 1 or others[0].value is None:
        return f" ({describe(parted)})"
    one = len(others[0].ranks) == 1
    return f", {ranks_in_words(others[0].ranks)} use{'s' if one else ''} {others[0].value}"


def _judge_launcher(direct: DirectLaunch, launch: LaunchFacts, identical: IdenticalRanks) -> Iterator[Finding]:
    stated = launch_number(launch, "WORLD_SIZE")
    if direct.size is None or stated is None or stated == direct.size:
        return
    own = "RANK" not in launch.filled or stated == direct.size * (launch_number(launch, "LOCAL_WORLD_SIZE") or 0)
    if direct.most_per_node == 1 and own and stated > direct.size:
        return  # One task per node that starts the ranks of the node itself; WORLD_SIZE is theirs.
    yield Finding(
        f"WORLD_SIZE={stated}, but {direct.program} started {direct.size} processes ({direct.size_name}={direct.size})",
        ranks=identical.ranks,
        evidence={"WORLD_SIZE": stated, direct.size_name: direct.size, "launcher": direct.program},
        fix=f"Run `export WORLD_SIZE=${direct.size_name}` in the command that {direct.program} starts, or start "
        f"{stated} processes (`{'srun --ntasks=' if direct.program == 'srun' else 'mpirun -np '}{stated}`).",
    )
