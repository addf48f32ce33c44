"""DATA009: a host has more data workers than CPUs."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from doctor.api import Finding, Job, LocalRanks, Rank, Scope, Severity, Skip, Unknown, Verdict, check
from doctor.facts import HostFacts, Loader, LoaderFacts, ProcessFacts, TrainingFacts
from doctor.testing import Fails, Passes, running, with_loader
from doctor_checks.data._rank_loaders import advice


class _Crew(msgspec.Struct, frozen=True):
    rank: Rank
    workers: int
    cpus: tuple[int, ...]


@check(
    id="DATA009",
    severity=Severity.WARNING,
    scope=Scope.HOST,
    when="PR",
    needs=(LoaderFacts, ProcessFacts),
    compares_ranks=True,
    cases=lambda: (
        Passes("fewer workers than CPUs", running(hosts=2, per_host=8)),
        Passes("as many workers as CPUs", with_loader(running(1, 8), workers=12)),
        Passes(
            "one worker of each rank, on fewer CPUs than ranks",
            with_loader(running(1, 3), workers=1).alter(ProcessFacts, cpus_allowed=(0, 1)),
        ),
        Passes("no workers", with_loader(running(1, 8).alter(HostFacts, cpu_quota=1.0), workers=0)),
        Passes(
            "training and validation take turns",
            with_loader(with_loader(running(1, 8), workers=8), stage="validate", workers=8),
        ),
        Passes(
            "each rank has separate cores",
            with_loader(running(), workers=4)
            .alter(ProcessFacts, ranks=(0,), cpus_allowed=(0, 1, 2, 3))
            .alter(ProcessFacts, ranks=(1,), cpus_allowed=(4, 5, 6, 7)),
        ),
        Passes("the quota is enough", with_loader(running().alter(HostFacts, cpu_quota=8.0), workers=4)),
        Fails("16 workers for each of 8 ranks", with_loader(running(1, 8), workers=16), ranks=tuple(range(8))),
        Fails(
            "a container with a quota on one host of two",
            with_loader(running(2, 4), workers=8).alter(HostFacts, hosts=("node1",), cpu_quota=16.0),
            ranks=(4, 5, 6, 7),
            hosts=("node1",),
        ),
        Fails(
            "one rank is pinned to two cores",
            with_loader(running(), workers=4).alter(ProcessFacts, ranks=(1,), cpus_allowed=(0, 1)),
            ranks=(1,),
        ),
        Fails(
            "two loaders at once, in a plain loop",
            with_loader(with_loader(running(1, 8), workers=8), index=1, workers=8).alter(
                TrainingFacts, framework="plain"
            ),
            ranks=tuple(range(8)),
        ),
    ),
)
def workers_exceed_cpus(job: Job, *, workers_per_cpu: float = 1.0) -> Iterator[Verdict]:
    """Ask whether each host has a CPU for every data worker of its ranks.

    Why it hurts: workers compete for CPUs with each other and with the training processes, so batches arrive later.
    Fix: Set `num_workers` to the CPUs of the host divided by its ranks, minus one for each rank itself.
    """
    crews = {local.name: list(_crews(local)) for local in job.by_host()}
    if not any(crew.workers for host in crews.values() for crew in host):
        yield Skip("no loader has workers")
    for local in job.by_host():
        blind = tuple(crew.rank.number for crew in crews[local.name] if not crew.cpus and crew.workers)
        if blind:
            yield Unknown("the CPU affinity of the process is unknown", blind, "taskset -cp $$")
        yield from _judge(job, local, crews[local.name], workers_per_cpu)


def _crews(local: LocalRanks) -> Iterator[_Crew]:
    for rank in local.members:
        loaders, process = rank.find(LoaderFacts), rank.find(ProcessFacts)
        if loaders is not None and process is not None:
            yield _Crew(rank, _at_once(loaders.loaders), process.cpus_allowed)


def _at_once(loaders: tuple[Loader, ...]) -> int:
    """Training loaders run together, evaluation loaders one after the other; idle workers use no CPU."""
    stages: dict[str, list[int]] = {}
    for loader in loaders:
        stages.setdefault(loader.stage, []).append(loader.workers or 0)
    return max((sum(workers) if stage == "train" else max(workers) for stage, workers in stages.items()), default=0)


def _judge(job: Job, local: LocalRanks, crews: list[_Crew], workers_per_cpu: float) -> Iterator[Finding]:
    pinned: dict[tuple[int, ...], list[_Crew]] = {}
    for crew in crews:
        if crew.cpus:
            pinned.setdefault(crew.cpus, []).append(crew)
    crowded = False
    for cpus, sharing in pinned.items():
        if _workers(sharing) > len(cpus) * workers_per_cpu and _can_have_fewer(sharing, len(cpus)):
            crowded = True
            yield _finding(job, sharing, len(cpus), "CPU affinity")
    host = local.find(HostFacts)
    quota = host.cpu_quota if host else None
    if not crowded and quota and _workers(crews) > quota * workers_per_cpu and _can_have_fewer(crews, quota):
        yield _finding(job, crews, quota, "cgroup quota")


def _workers(crews: list[_Crew]) -> int:
    return sum(crew.workers for crew in crews)


def _share(crews: list[_Crew], cpus: float) -> int:
    """The workers that each rank can have: one at least, so that batches are read during a step."""
    return max(1, int(cpus // len(crews)) - 1)


def _can_have_fewer(crews: list[_Crew], cpus: float) -> bool:
    """Whether a rank has more than its share. If none has, the ranks themselves have too few CPUs (ENV012)."""
    return max(crew.workers for crew in crews) > _share(crews, cpus)


_MORE_CPUS = {"CPU affinity": "srun --cpus-per-task", "cgroup quota": "docker run --cpus"}


def _finding(job: Job, crews: list[_Crew], cpus: float, how: str) -> Finding:
    with_workers = [crew for crew in crews if crew.workers]
    each = _share(crews, cpus)
    count = len(with_workers)
    first = with_workers[0].rank
    whose = f"rank {first.number}" if count == 1 else f"the ranks on {first.host.name}"
    return Finding(
        f"{_workers(crews)} DataLoader workers of "
        f"{f'rank {first.number}' if count == 1 else f'{count} ranks'} on {first.host.name} share {cpus:g} CPU"
        f"{'' if cpus == 1 else 's'}",
        ranks=tuple(crew.rank.number for crew in with_workers),
        evidence={
            "workers_per_rank": max(crew.workers for crew in crews),
            "limited_by": how,
        },
        fix=advice(
            job,
            lightning=f"Set `num_workers={each}` in the hooks that create the loaders",
            transformers=f"Set `TrainingArguments(dataloader_num_workers={each})`",
            plain=f"Set `num_workers={each}` in each DataLoader",
        )
        + f", or give {whose} more CPUs (for example with `{_MORE_CPUS[how]}`).",
        explains=("RUN005", "HOST005"),
    )
