"""ENV003: ranks do not agree on how many they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from doctor.analysis.launch_origin import direct_launch, has_value, launch_number
from doctor.api import (
    Finding,
    Group,
    IdenticalRanks,
    Job,
    Scope,
    Severity,
    Verdict,
    check,
    correlates,
    describe,
    merge,
    ranks_in_words,
    split,
)
from doctor.facts import LaunchFacts
from doctor.testing import Fails, JobBuilder, Passes, healthy

MOST_FINDINGS = 8
"""Sizes with a finding of their own; more have one cause, such as a size computed on every host."""


def _counted_by_each_host(hosts: int) -> JobBuilder:
    sketch = healthy(hosts=hosts, per_host=1)
    for rank in range(hosts):
        sketch = sketch.alter(LaunchFacts, ranks=(rank,), world_size=hosts + rank)
    return sketch


@check(
    id="ENV003",
    severity=Severity.ERROR,
    scope=Scope.JOB,
    when="P",
    needs=(LaunchFacts,),
    cases=lambda: (
        Passes("all say the same", healthy(hosts=2, per_host=2)),
        Passes("srun started the ranks", healthy(hosts=2, per_host=2).by_srun().launched(WORLD_SIZE="4")),
        Passes(
            "one task a node that starts its ranks itself, WORLD_SIZE exported for them",
            healthy(hosts=2, per_host=1).by_srun().launched(WORLD_SIZE="16"),
        ),
        Fails(
            "one host was told another number of nodes",
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
    ),
)
def world_size_disagrees(job: Job) -> Iterator[Verdict]:
    """Ask whether all ranks expect the same number of ranks, and whether as many are started.

    Why it hurts: who expects more than come waits at init_process_group() until it times out; who expects fewer
    forms a group without the rest.
    Fix: give every host the same `--nnodes` and `--nproc-per-node`; under srun or mpirun derive WORLD_SIZE from
    SLURM_NTASKS or OMPI_COMM_WORLD_SIZE instead of writing it down.
    """
    yield from _judge_each_other(job)
    yield from merge(found for launch, alike in job.each(LaunchFacts) for found in _judge_launcher(launch, alike))


def _judge_each_other(job: Job) -> Iterator[Finding]:
    if len(job.ranks) < 2:
        return
    # No expectation: the size of another job says nothing of this one's.
    parted = split(job, LaunchFacts, lambda launch: launch.world_size)
    stated = [group for group in parted.minorities if group.value is not None]
    if len(stated) > MOST_FINDINGS:
        yield _scattered(stated, describe(parted))
        return
    for group in stated:
        common = parted.common.value if parted.common else None
        if not parted.even and common is None:
            continue
        along = correlates(job, group.ranks)
        yield Finding(
            f"{ranks_in_words(group.ranks)} expect{'s' if len(group.ranks) == 1 else ''} a world of {group.value}, "
            + (f"the others of {common}" if parted.common else describe(parted)),
            ranks=group.ranks,
            evidence={
                "world_size": group.value,
                "elsewhere": common,
                "groups": describe(parted),
                "along_with": list(along),
            },
        )


def _scattered(groups: Sequence[Group[int]], words: str) -> Finding:
    ranks = tuple(sorted(rank for group in groups for rank in group.ranks))
    return Finding(
        f"{ranks_in_words(ranks)} expect {len(groups)} different sizes of the world: {words}",
        ranks=ranks,
        evidence={"sizes": len(groups), "groups": words},
    )


def _judge_launcher(launch: LaunchFacts, alike: IdenticalRanks) -> Iterator[Finding]:
    direct, stated = direct_launch(launch), launch_number(launch, "WORLD_SIZE")
    if direct is None or direct.size is None or stated is None or stated == direct.size:
        return
    if direct.most_per_node == 1 and not has_value(launch, "RANK") and stated > direct.size:
        return  # One task a node that starts the ranks of the node itself; WORLD_SIZE is meant for those.
    yield Finding(
        f"WORLD_SIZE={stated}, but {direct.program} started {direct.size} processes ({direct.size_name}={direct.size})",
        ranks=alike.ranks,
        evidence={"WORLD_SIZE": stated, direct.size_name: direct.size, "launcher": direct.program},
        fix=f"`export WORLD_SIZE=${direct.size_name}` in the command that {direct.program} starts, or start "
        f"{stated} processes ({'srun --ntasks' if direct.program == 'srun' else 'mpirun -np'} {stated}).",
    )
