"""ENV012: the ranks of a host have fewer CPUs than threads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from doctor.analysis.launch_origin import direct_launch, slurm_step
from doctor.api import Finding, Job, LocalRanks, Scope, Severity, Unknown, Verdict, check, merge
from doctor.facts import EnvironmentFacts, HostFacts, LaunchFacts, ProcessFacts, SlurmFacts
from doctor.testing import Fails, JobBuilder, Passes, healthy


def _unread(threads: str) -> JobBuilder:
    return healthy(per_host=2).environ(OMP_NUM_THREADS=threads).alter(ProcessFacts, threads_per_process=None)


@check(
    id="ENV012",
    severity=Severity.WARNING,
    scope=Scope.HOST,
    when="P",
    needs=(ProcessFacts,),
    compares_ranks=True,
    impacts={
        r"not a positive number": (
            "The threads of the ranks on a host compete for its CPUs, and all ranks wait for the slowest."
        ),
    },
    cases=lambda: (
        Fails("a number of threads that OpenMP cannot read", _unread("all"), ranks=(0, 1)),
        Fails("no threads", _unread("0"), ranks=(0, 1)),
        Passes("an empty value, which counts as unset", _unread("")),
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
            healthy(per_host=4)
            .environ(OMP_NUM_THREADS="")
            .alter(ProcessFacts, cpus_allowed=(0,), threads_per_process=None),
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
            "SLURM has 16 CPUs for each task, and srun did not ask for them",
            healthy(per_host=2)
            .put(SlurmFacts(job_id="7", cpus_per_task=16))
            .alter(ProcessFacts, ranks=(0,), cpus_allowed=(0,))
            .alter(ProcessFacts, ranks=(1,), cpus_allowed=(1,)),
            ranks=(0, 1),
        ),
        Passes(
            "as many CPUs as SLURM has for each task",
            healthy(per_host=2)
            .put(SlurmFacts(job_id="7", cpus_per_task=16))
            .alter(ProcessFacts, ranks=(0,), cpus_allowed=tuple(range(16)))
            .alter(ProcessFacts, ranks=(1,), cpus_allowed=tuple(range(16, 32))),
        ),
        Passes(
            "one of the two hardware threads of each core",
            healthy(per_host=1)
            .put(SlurmFacts(job_id="7", cpus_per_task=16))
            .alter(ProcessFacts, cpus_allowed=tuple(range(8))),
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
    """Ask whether the ranks of each host have as many CPUs as threads, and OpenMP can read their number.

    Why it hurts: threads that share a core are time-sliced, so computation, data loading and NCCL's proxy thread slow
    down on every rank, and all ranks wait for the slowest.
    Fix: Set OMP_NUM_THREADS to the CPUs of the host divided by its ranks, and give the ranks more CPUs.
    """
    yield from merge(_unreadable(job))
    yield from merge(_not_inherited(job))
    hosts = [(local, _processes(local)) for local in job.by_host()]
    for _, known in hosts:
        if blind := tuple(number for number, process in known if not process.cpus_allowed):
            yield Unknown("the CPU affinity of the process is unknown", blind, "taskset -cp $$")
    crowded = [(local, group) for local, known in hosts for group in _crowded(local, known, threads_per_cpu)]
    names = {local.name for local, _ in crowded}
    place = names.pop() if len(names) == 1 else "a host"  # hosts with the same fault have one finding
    yield from merge(_report(group, place, local) for local, group in crowded)


def _unreadable(job: Job) -> Iterator[Finding]:
    """Report a value that libgomp calls invalid; it then takes the number of CPUs (OpenMP 5.2, 21.1.2)."""
    for environment, process, identical in job.each(EnvironmentFacts, ProcessFacts):
        value = (environment.get("OMP_NUM_THREADS") or "").strip()
        if value and process.threads_per_process is None:
            yield Finding(
                f"OMP_NUM_THREADS={value} is not a positive number: each rank starts a thread for every CPU",
                ranks=identical.ranks,
                evidence={"OMP_NUM_THREADS": value},
                fix="export OMP_NUM_THREADS=4",
            )


def _not_inherited(job: Job) -> Iterator[Finding]:
    """Report tasks that are pinned to less than half of the CPUs that the job has for each: srun of Slurm 22.05 and
    23.02 does not read SLURM_CPUS_PER_TASK (RELEASE_NOTES of 22.05), and mpirun pins small jobs to cores. Half may be
    one hardware thread of each core."""
    for slurm, process, identical in job.each(SlurmFacts, ProcessFacts, also=(HostFacts,)):
        host, cpus = identical.find(HostFacts), len(process.cpus_allowed)
        wanted = slurm.cpus_per_task or 0
        if not cpus or 2 * cpus >= wanted or host is None or not host.cpu_count or cpus >= host.cpu_count:
            continue
        yield Finding(
            f"Each task may use {cpus} CPU{'' if cpus == 1 else 's'}, but SLURM_CPUS_PER_TASK is {wanted}",
            ranks=identical.ranks,
            evidence={"cpus": cpus, "cpus_per_task": wanted, "cpus_of_host": host.cpu_count},
            fix="export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK",
            explains=("HOST005",),
        )


_RAISE = "raise the CPU limit of the container or cgroup"


def _unpinned(local: LocalRanks) -> str:
    launch = local.find(LaunchFacts)
    direct = direct_launch(launch) if launch else None
    program = direct.program if direct else "srun" if launch and slurm_step(launch) else ""
    options = {"srun": "`srun --cpus-per-task`", "mpirun": "`mpirun --bind-to none`"}
    return f"give each rank more CPUs with {options.get(program, ' or '.join(options.values()))}"


def _processes(local: LocalRanks) -> list[tuple[int, ProcessFacts]]:
    return [(rank.number, process) for rank in local.members if (process := rank.find(ProcessFacts)) is not None]


class Crowd(NamedTuple):
    """Ranks with more threads than CPUs, by number, and what limits the CPUs."""

    ranks: list[tuple[int, ProcessFacts]]
    cpus: float
    limited_by: str


def _crowded(local: LocalRanks, known: list[tuple[int, ProcessFacts]], threads_per_cpu: float) -> Iterator[Crowd]:
    pinned: dict[tuple[int, ...], list[tuple[int, ProcessFacts]]] = {}
    for number, process in known:
        if process.cpus_allowed:
            pinned.setdefault(process.cpus_allowed, []).append((number, process))
    crowded = False
    for cpus, ranks in pinned.items():
        if _threads(ranks) > len(cpus) * threads_per_cpu:
            crowded = True
            yield Crowd(ranks, len(cpus), _how(cpus, local, shared=len(pinned) > 1))
    host = local.find(HostFacts)
    if not crowded and host and host.cpu_quota and _threads(known) > host.cpu_quota * threads_per_cpu:
        yield Crowd(known, host.cpu_quota, "cgroup quota")


def _threads(ranks: list[tuple[int, ProcessFacts]]) -> int:
    """Compute threads: OMP_NUM_THREADS per rank; one if it is not set, because torch then uses the number of cores."""
    return sum(process.threads_per_process or 1 for _, process in ranks)


def _how(cpus: tuple[int, ...], local: LocalRanks, *, shared: bool) -> str:
    host = local.find(HostFacts)
    if shared or (host and host.cpu_count and len(cpus) < host.cpu_count):
        return f"pinned to {_cores(cpus)}"
    return "all CPUs of the host"


def _cores(cpus: tuple[int, ...]) -> str:
    if len(cpus) == 1:
        return f"CPU {cpus[0]}"
    if cpus[-1] - cpus[0] == len(cpus) - 1:
        return f"CPUs {cpus[0]}-{cpus[-1]}"
    return "CPUs " + ",".join(map(str, cpus[:8])) + (f" and {len(cpus) - 8} more" if len(cpus) > 8 else "")


def _report(crowd: Crowd, place: str, local: LocalRanks) -> Finding:
    ranks, cpus, how = crowd
    numbers, threads = tuple(number for number, _ in ranks), _threads(ranks)
    each = max(1, int(cpus // len(ranks)))
    who = f"1 rank on {place} runs" if len(ranks) == 1 else f"{len(ranks)} ranks on {place} run"
    threads_fit = all(process.threads_per_process in (None, each) for _, process in ranks)
    more = _RAISE if "quota" in how else _unpinned(local)
    return Finding(
        f"{who} {threads} thread{'' if threads == 1 else 's'} on {cpus:g} CPU{'' if cpus == 1 else 's'} ({how})",
        ranks=numbers,
        evidence={
            "cpus": cpus,
            "ranks": len(ranks),
            "threads": threads,
            "threads_per_rank": ranks[0][1].threads_per_process,
            "limited_by": how,
        },
        fix=f"export OMP_NUM_THREADS={each}"
        if cpus >= 4 * len(ranks)
        else f"{more[0].upper()}{more[1:]}."
        if threads_fit
        else f"Run `export OMP_NUM_THREADS={each}`, and {more}.",
        explains=("HOST005",),
    )
