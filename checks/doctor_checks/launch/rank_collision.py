"""ENV004: two processes use the same rank."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.analysis.launch_origin import direct_launch
from doctor.analysis.logs.event_timeline import parse_count
from doctor.api import (
    Finding,
    Job,
    Rank,
    Scope,
    Severity,
    Verdict,
    check,
    conjunction,
    event_groups,
    finding_from_logs,
    ranks_in_words,
)
from doctor.core.text import lazy_compile
from doctor.facts import LaunchFacts, ProcessFacts
from doctor.testing import Fails, Passes, healthy, logged

MOST_SHOWN = 8
"""Ranks whose processes the evidence lists."""

_WAITED = "torch.distributed.DistStoreError: wait timeout after 12000ms, keys: /default_pg/0//cpu//0/"


def _from_logs(job: Job) -> Iterator[Finding]:
    for group in event_groups(job, "nccl.bootstrap.dup_rank", by=("rank",)):
        rank, size = parse_count(group.value("rank")), group.value("nranks")
        yield finding_from_logs(
            group,
            f"Two processes use rank {rank} of {size} (reported by NCCL)",
            ranks=() if rank is None else (rank,),
            evidence={"rank": rank, "world_size": size},
            confidence=0.95,
            effect="NCCL cannot build the communicator: the ranks fail or wait until the timeout.",
        )
    for group in event_groups(job, "torch.store.wait", by=("keys",)):
        key = _GLOO_ADDRESS.search(group.value("keys") or "")
        awaited = parse_count(key["rank"]) if key else None
        if awaited is not None and awaited in group.ranks:
            yield finding_from_logs(
                group,
                f"No process uses rank {awaited}: process {awaited} of the launcher runs with another RANK",
                ranks=(),
                effect="Two processes use the same rank, and all ranks fail when the store times out.",
                evidence={"awaited": awaited, "waiting": list(group.ranks[:64])},
                confidence=0.7,
                explains=("RUN004", "RUN012"),
                symptoms=False,
            )


_GLOO_ADDRESS = lazy_compile(r"//\w{1,20}//\d{1,9}/(?P<rank>\d{1,9})$")
"""The store key of a rank's address: prefixes of the group, device and context, then the rank.

Source: gloo/transport/context.cc and gloo/transport/tcp/context.cc.
"""


@check(
    id="ENV004",
    severity=Severity.ERROR,
    scope=Scope.JOB,
    when="PM",
    needs_peers=True,
    from_logs=_from_logs,
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
        Fails("RANK from SLURM_LOCALID", logged(*(f"{task}: {_WAITED}3" for task in range(4)))),
        Passes("rank 3 is late", logged(*(f"{task}: {_WAITED}3" for task in range(3)))),
    ),
)
def rank_collision(job: Job) -> Iterator[Verdict]:
    """Ask whether every rank is used by exactly one process.

    Why it hurts: two processes register with the same rank, so the process group is never complete, or NCCL reports
    that a rank has already checked in.
    Fix: Pass a different --node-rank to each host, or set RANK inside each task of srun or mpirun.
    """
    claims: dict[int, list[Rank]] = {}
    for rank in job.ranks:
        claims.setdefault(_claimed(rank), []).append(rank)
    doubled = {number: claimants for number, claimants in claims.items() if len(claimants) > 1}
    if doubled:
        yield _report(doubled)


def _claimed(rank: Rank) -> int:
    """The rank that a process passes to torch: RANK may be exported even if srun or mpirun numbers the process."""
    launch = rank.find(LaunchFacts)
    if launch is None or launch.rank in (None, rank.number):
        return rank.number
    direct = direct_launch(launch)
    return launch.rank if direct and direct.rank == rank.number else rank.number


def _is_counted(rank: Rank) -> bool:
    launch = rank.find(LaunchFacts)
    return launch is not None and direct_launch(launch) is not None


def _report(doubled: dict[int, list[Rank]]) -> Finding:
    claimants = next(iter(doubled.values()))
    homes = list(dict.fromkeys(rank.host.name for rank in claimants))
    places = f"on {conjunction(homes) if len(homes) <= 4 else f'{len(homes)} hosts'}"
    counts = {len(same) for same in doubled.values()}
    verb = "is used" if len(doubled) == 1 else "are each used"
    return Finding(
        f"{ranks_in_words(tuple(sorted(doubled))).capitalize()} {verb} by "
        f"{counts.pop() if len(counts) == 1 else 'several'} processes {places}",
        ranks=tuple(rank.number for claimants in doubled.values() for rank in claimants),
        evidence={
            "claims": [
                {"rank": _claimed(rank), "host": rank.host.name, "pid": process.pid if process else None}
                for claimants in list(doubled.values())[:MOST_SHOWN]
                for rank in claimants
                for process in (rank.find(ProcessFacts),)
            ],
            "ranks_claimed_twice": len(doubled) if len(doubled) > MOST_SHOWN else None,
        },
        fix=_fix(homes, claimants),
    )


def _fix(homes: list[str], claimants: list[Rank]) -> str:
    if len(homes) > 1 and not any(map(_is_counted, claimants)):
        numbered = ", ".join(f"{host}: --node-rank={index}" for index, host in enumerate(homes[:4]))
        return f"Start each host with its own node rank ({numbered}), or use --rdzv-backend=c10d."
    launches = [rank.find(LaunchFacts) for rank in claimants]
    if direct := next((found for launch in launches if launch and (found := direct_launch(launch))), None):
        return f"Run `unset RANK` before {direct.program}, and set `RANK=${direct.rank_name}` inside each task."
    numbers = [process.pid for rank in claimants if (process := rank.find(ProcessFacts)) and process.pid is not None]
    which = f" (PID {' or '.join(map(str, numbers))})" if 1 < len(numbers) <= 4 else ""
    return f"End the process of an earlier run on {homes[0]}{which}, or give each process its own RANK."
