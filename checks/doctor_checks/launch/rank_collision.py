"""ENV004: two processes claim one rank."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.analysis.launch_origin import direct_launch
from doctor.analysis.logs.event_timeline import parse_count
from doctor.api import Finding, Job, Rank, Scope, Severity, Verdict, check, event_groups, finding_from_logs
from doctor.facts import LaunchFacts, ProcessFacts
from doctor.testing import Fails, Passes, healthy, logged


def _told(job: Job) -> Iterator[Finding]:
    for told in event_groups(job, "nccl.bootstrap.dup_rank", by=("rank",)):
        rank, size = parse_count(told.value("rank")), told.value("nranks")
        yield finding_from_logs(
            told,
            f"two processes claim rank {rank} of {size}, says NCCL",
            ranks=() if rank is None else (rank,),
            evidence={"rank": rank, "world_size": size},
            confidence=0.95,
        )


@check(
    id="ENV004",
    severity=Severity.ERROR,
    scope=Scope.JOB,
    when="PM",
    told=_told,
    cases=lambda: (
        Passes("every rank once", healthy(hosts=2, per_host=2)),
        Fails("two processes of a host are rank 2", healthy(hosts=2, per_host=2).renumbered(3, 2), ranks=(2,)),
        Fails(
            "both hosts were started as node 0",
            healthy(hosts=2, per_host=2).renumbered(2, 0).renumbered(3, 1),
            ranks=(0, 1),
        ),
        Fails(
            "RANK exported before srun, which numbers its tasks itself",
            healthy(hosts=1, per_host=2).by_srun().alter(LaunchFacts, ranks=(1,), rank=0),
            ranks=(0, 1),
        ),
        Passes(
            "each rank checks in once",
            logged("node1:41:77 [1] NCCL INFO comm 0x55aa rank 1 nranks 2 cudaDev 1 busId 8000 - Init COMPLETE"),
        ),
        Fails(
            "NCCL says that a rank came twice",
            logged(
                "node1:41:77 [0] bootstrap.cc:172 NCCL WARN Bootstrap Root : rank 3 of 8 ranks has already checked in",
                "node1:41:77 [0] NCCL INFO bootstrap.cc:180 -> 3",
            ),
            ranks=(3,),
        ),
    ),
)
def rank_collision(job: Job) -> Iterator[Verdict]:
    """Ask whether every rank is claimed by one process.

    Why it hurts: both register under one number; the group never becomes complete, or the two answer for each other
    and NCCL reports that a rank has already checked in.
    Fix: give each host its own `--node-rank`, and do not export RANK before srun or mpirun.
    """
    claims: dict[int, list[Rank]] = {}
    for rank in job.ranks:
        claims.setdefault(_claimed(rank), []).append(rank)
    doubled = {number: claimants for number, claimants in claims.items() if len(claimants) > 1}
    if doubled:
        yield _report(doubled)


def _claimed(rank: Rank) -> int:
    """The rank that a process tells torch: where srun or mpirun counts it, RANK may be exported all the same."""
    launch = rank.find(LaunchFacts)
    direct = direct_launch(launch) if launch else None
    if launch is None or direct is None or direct.rank != rank.number or launch.rank is None:
        return rank.number
    return launch.rank


def _is_counted(rank: Rank) -> bool:
    """Whether srun or mpirun started this process and gave it a number."""
    launch = rank.find(LaunchFacts)
    return launch is not None and direct_launch(launch) is not None


def _report(doubled: dict[int, list[Rank]]) -> Finding:
    number, claimants = next(iter(doubled.items()))
    homes = list(dict.fromkeys(rank.host.name for rank in claimants))
    places = f"on {homes[0]}" if len(homes) == 1 else f"on {', '.join(homes[:4])}"
    more = f" (and {len(doubled) - 1} more ranks are claimed twice)" if len(doubled) > 1 else ""
    return Finding(
        f"rank {number} is claimed by {len(claimants)} processes {places}{more}",
        ranks=tuple(rank.number for claimants in doubled.values() for rank in claimants),
        evidence={
            "claims": [
                {"rank": _claimed(rank), "host": rank.host.name, "pid": _pid(rank)}
                for claimants in list(doubled.values())[:8]
                for rank in claimants
            ],
            "ranks_claimed_twice": len(doubled),
        },
        fix=_fix(homes, claimants),
    )


def _fix(homes: list[str], claimants: list[Rank]) -> str:
    if len(homes) > 1 and not any(map(_is_counted, claimants)):
        numbered = ", ".join(f"{host}: --node-rank={index}" for index, host in enumerate(homes[:4]))
        return f"Start each host with its own number ({numbered}), or use `--rdzv-backend=c10d`."
    return (
        "Under srun or mpirun do not export RANK once for all: set it in the command that is started, for example "
        "`srun bash -c 'RANK=$SLURM_PROCID exec python train.py'`; stop a left-over process of an earlier run."
    )


def _pid(rank: Rank) -> int | None:
    process = rank.find(ProcessFacts)
    return process.pid if process else None
