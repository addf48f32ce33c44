"""ENV012: the ranks of a host have fewer CPUs than threads."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.api import Finding, Job, LocalRanks, Rank, Scope, Severity, Unknown, Verdict, check, merge
from doctor.facts import HostFacts, ProcessFacts
from doctor.testing import Fails, Passes, healthy


@check(
    id="ENV012",
    severity=Severity.WARNING,
    scope=Scope.HOST,
    when="P",
    needs=(ProcessFacts,),
    peers=True,
    cases=lambda: (
        Passes("every rank may use all cores", healthy(hosts=2, per_host=8)),
        Passes(
            "each rank has its own four cores",
            healthy(per_host=2)
            .alter(ProcessFacts, ranks=(0,), cpus_allowed=(0, 1, 2, 3))
            .alter(ProcessFacts, ranks=(1,), cpus_allowed=(4, 5, 6, 7)),
        ),
        Passes("torchrun sets one thread a rank", healthy(per_host=8).alter(ProcessFacts, threads_per_process=1)),
        Passes("a quota that is enough", healthy().alter(HostFacts, cpu_quota=8.0)),
        Fails(
            "mpirun pins all ranks to one core",
            healthy(per_host=4).alter(ProcessFacts, cpus_allowed=(0,), threads_per_process=None),
            ranks=(0, 1, 2, 3),
            hosts=("node0",),
        ),
        Fails(
            "two ranks are pinned to the cores of one",
            healthy(hosts=2, per_host=4)
            .alter(ProcessFacts, ranks=(0, 1), cpus_allowed=(0, 1, 2, 3))
            .alter(ProcessFacts, ranks=(2,), cpus_allowed=(4, 5, 6, 7))
            .alter(ProcessFacts, ranks=(3,), cpus_allowed=(8, 9, 10, 11)),
            ranks=(0, 1),
            hosts=("node0",),
        ),
        Fails(
            "SLURM gives each task one core and OMP_NUM_THREADS is 8",
            healthy(per_host=2)
            .alter(ProcessFacts, threads_per_process=8)
            .alter(ProcessFacts, ranks=(0,), cpus_allowed=(0,))
            .alter(ProcessFacts, ranks=(1,), cpus_allowed=(1,)),
            ranks=(0, 1),
        ),
        Fails(
            "32 threads for each of 8 ranks on 96 CPUs",
            healthy(hosts=2, per_host=8).alter(ProcessFacts, ranks=range(8), threads_per_process=32),
            ranks=(0, 1, 2, 3, 4, 5, 6, 7),
            hosts=("node0",),
        ),
        Fails(
            "a container of 2 CPUs for 8 ranks",
            healthy(per_host=8).alter(HostFacts, cpu_quota=2.0),
            ranks=tuple(range(8)),
        ),
    ),
)
def cpu_share_too_small(job: Job, *, threads_per_cpu: float = 1.0) -> Iterator[Verdict]:
    """Ask whether the ranks of each host have as many CPUs as threads.

    Why it hurts: threads that share a core take turns; every rank computes, loads data and answers NCCL's proxy
    slower, and the slowest sets the pace of all.
    Fix: `export OMP_NUM_THREADS=<CPUs of the host / ranks of the host>`; request `--cpus-per-task` and give it to srun
    too (`export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK`); `mpirun --bind-to none`.
    """
    for local in job.by_host():
        if blind := tuple(rank.number for rank, process in _processes(local) if not process.cpus_allowed):
            yield Unknown("the CPUs that the process may use are not known", blind, "taskset -cp $$")
    yield from merge(found for local in job.by_host() for found in _judge(local, threads_per_cpu))


def _processes(local: LocalRanks) -> list[tuple[Rank, ProcessFacts]]:
    return [(rank, process) for rank in local.members if (process := rank.find(ProcessFacts)) is not None]


def _judge(local: LocalRanks, threads_per_cpu: float) -> Iterator[Finding]:
    known = [(rank.number, process) for rank, process in _processes(local)]
    pinned: dict[tuple[int, ...], list[tuple[int, ProcessFacts]]] = {}
    for number, process in known:
        if process.cpus_allowed:
            pinned.setdefault(process.cpus_allowed, []).append((number, process))
    crowded = False
    for cpus, ranks in pinned.items():
        if _threads(ranks) > len(cpus) * threads_per_cpu:
            crowded = True
            yield _report(ranks, len(cpus), _how(cpus, local, shared=len(pinned) > 1))
    host = local.find(HostFacts)
    if not crowded and host and host.cpu_quota and _threads(known) > host.cpu_quota * threads_per_cpu:
        yield _report(known, host.cpu_quota, "the cgroup's quota")


def _threads(ranks: list[tuple[int, ProcessFacts]]) -> int:
    """Threads that compute: OMP_NUM_THREADS for each rank; one where it is not set, since torch then counts cores."""
    return sum(process.threads_per_process or 1 for _, process in ranks)


def _how(cpus: tuple[int, ...], local: LocalRanks, *, shared: bool) -> str:
    host = local.find(HostFacts)
    if shared or (host and host.cpu_count and len(cpus) < host.cpu_count):
        return f"pinned to {_cores(cpus)}"
    return "all that the host has"


def _cores(cpus: tuple[int, ...]) -> str:
    if len(cpus) == 1:
        return f"CPU {cpus[0]}"
    if cpus[-1] - cpus[0] == len(cpus) - 1:
        return f"CPUs {cpus[0]}-{cpus[-1]}"
    return "CPUs " + ",".join(map(str, cpus[:8])) + (f" and {len(cpus) - 8} more" if len(cpus) > 8 else "")


def _report(ranks: list[tuple[int, ProcessFacts]], cpus: float, how: str) -> Finding:
    numbers, threads = tuple(number for number, _ in ranks), _threads(ranks)
    each = max(1, int(cpus // len(ranks)))
    who = "1 rank has" if len(ranks) == 1 else f"{len(ranks)} ranks of a host share"
    return Finding(
        f"{who} {cpus:g} CPU{'' if cpus == 1 else 's'} ({how}) for {threads} thread{'' if threads == 1 else 's'}",
        ranks=numbers,
        evidence={
            "cpus": cpus,
            "ranks": len(ranks),
            "threads": threads,
            "threads_per_rank": ranks[0][1].threads_per_process,
            "limited_by": how,
        },
        fix=f"`export OMP_NUM_THREADS={each}`"
        + (
            ", and give the ranks more CPUs: `srun --cpus-per-task=8`, `mpirun --bind-to none`, `docker run --cpus=16`."
            if cpus < 4 * len(ranks)
            else f" fits {len(ranks)} ranks on {cpus:g} CPUs."
        ),
        explains=("HOST005",),
    )
