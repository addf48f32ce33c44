"""ENV022: OpenMP binds the threads of several ranks to the same CPUs."""

from __future__ import annotations

import re
from collections.abc import Iterator

from doctor.api import Finding, Job, LocalRanks, Rank, Scope, Severity, Verdict, check, merge
from doctor.core.text import ranges
from doctor.facts import EnvironmentFacts, ProcessFacts
from doctor.testing import Fails, JobBuilder, Passes, healthy

_BINDING_TYPES = frozenset({"compact", "scatter", "balanced", "explicit", "logical", "physical"})
"""Types of KMP_AFFINITY that bind threads (LLVM openmp/runtime/src/kmp_settings.cpp)."""


def _apart(**variables: str) -> JobBuilder:
    own = healthy(per_host=2).environ(ranks=None, **variables)
    return own.alter(ProcessFacts, ranks=(0,), cpus_allowed=(0, 1, 2, 3)).alter(
        ProcessFacts, ranks=(1,), cpus_allowed=(4, 5, 6, 7)
    )


@check(
    id="ENV022",
    severity=Severity.WARNING,
    scope=Scope.HOST,
    needs=(EnvironmentFacts, ProcessFacts),
    cases=lambda: (
        Passes("no binding", healthy(2, 4).environ(OMP_NUM_THREADS="8")),
        Passes("binding turned off", healthy(1, 4).environ(KMP_AFFINITY="disabled", OMP_PROC_BIND="false")),
        Passes("only what is printed", healthy(1, 4).environ(KMP_AFFINITY="verbose,none", KMP_BLOCKTIME="1")),
        Passes(
            "a list that OMP_PROC_BIND turns off", healthy(1, 2).environ(GOMP_CPU_AFFINITY="0-7", OMP_PROC_BIND="false")
        ),
        Fails(
            "places of the whole host for every rank", healthy(2, 4).environ(OMP_PLACES="cores"), ranks=tuple(range(8))
        ),
        Fails("one list of CPUs for every rank", _apart(GOMP_CPU_AFFINITY="0-7"), ranks=(0, 1)),
        Fails(
            "ranks that are bound close to the first CPU",
            healthy(2, 2).environ(ranks=(2, 3), OMP_PROC_BIND="close"),
            ranks=(2, 3),
        ),
        Fails(
            "a variable of another OpenMP library, if torch is not built with it",
            healthy(1, 2).environ(KMP_AFFINITY="granularity=fine,compact,1,0"),
            ranks=(0, 1),
            severity=Severity.INFO,
        ),
        Fails(
            "the same with that library",
            healthy(1, 2).environ(KMP_AFFINITY="granularity=fine,compact,1,0", LD_PRELOAD="/opt/lib/libiomp5.so"),
            ranks=(0, 1),
        ),
        Fails(
            "ranks with CPUs of their own, whose data workers inherit one of them",
            _apart(OMP_PROC_BIND="spread", OMP_PLACES="threads"),
            ranks=(0, 1),
            severity=Severity.INFO,
        ),
        Fails("one rank", healthy(1, 1).environ(OMP_PROC_BIND="true"), ranks=(0,), severity=Severity.INFO),
    ),
)
def openmp_binding_shared(job: Job) -> Iterator[Verdict]:
    """Ask whether OpenMP binds threads so that the ranks of a host share the same CPUs.

    Why it hurts: when torch loads OpenMP, the main thread of each rank is bound to the first place of the process;
    ranks with the same CPUs then share one core. Data loader workers inherit the binding of the main thread.
    Fix: Run `unset KMP_AFFINITY GOMP_CPU_AFFINITY OMP_PLACES OMP_PROC_BIND`, or give each rank its own CPUs first
    (`srun --cpu-bind=cores`, `numactl --physcpubind` or `torchrun --numa-binding=node`).
    """
    yield from merge(finding for local in job.by_host() for finding in _judge(local))


def _judge(local: LocalRanks) -> Iterator[Finding]:
    groups: dict[tuple[str, str, tuple[int, ...]], list[Rank]] = {}
    for rank in local.members:
        environment, process = rank.find(EnvironmentFacts), rank.find(ProcessFacts)
        bound = binding(environment) if environment else None
        if bound and process:
            # A list of CPUs applies regardless of the CPU affinity of the process.
            cpus = () if bound[0] == "GOMP_CPU_AFFINITY" else process.cpus_allowed
            groups.setdefault((*bound, cpus), []).append(rank)
    for (name, value, cpus), ranks in groups.items():
        shared = len(ranks) > 1
        certain = name != "KMP_AFFINITY" or any(map(_intel_openmp, ranks))
        on = f"{len(ranks)} ranks" if shared else "each rank"
        verb = "binds" if certain else "may bind"
        yield Finding(
            f"{name}={value} {verb} OpenMP threads of {on} to {'the same CPUs' if shared else 'single CPUs'}",
            ranks=tuple(rank.number for rank in ranks),
            evidence={
                name: value,
                "ranks_with_the_same_cpus": len(ranks) if shared else None,
                "cpus": ranges(cpus) if shared and cpus else None,
                "openmp_library": next(filter(None, map(_intel_openmp, ranks)), None),
            },
            effect=_effect(name, shared=shared, certain=certain),
            severity=None if shared and certain else Severity.INFO,
            fix=f"unset {name}" if name != "OMP_PROC_BIND" else "export OMP_PROC_BIND=false",
            explains=("HOST005",) if shared else (),
        )


def _effect(name: str, *, shared: bool, certain: bool) -> str:
    if not certain:
        return (
            f"PyTorch's wheels for Linux are not affected, because their OpenMP library ignores {name}. Intel's OpenMP "
            "library binds the threads."
        )
    return "" if shared else "Data loader workers inherit the CPU of the main thread and share it."


def binding(environment: EnvironmentFacts) -> tuple[str, str] | None:
    """The variable that makes OpenMP bind threads, and its value; ``None`` if none is set.

    OMP_PROC_BIND overrides the others, and OMP_PLACES alone implies it (OpenMP 5.2, 21.1.7; libgomp affinity.c)."""
    wanted = environment.get("OMP_PROC_BIND")
    if wanted:
        return None if wanted.strip().lower() == "false" else ("OMP_PROC_BIND", wanted)
    for name in ("OMP_PLACES", "GOMP_CPU_AFFINITY"):
        if value := environment.get(name):
            return name, value
    value = environment.get("KMP_AFFINITY") or ""
    words = set(re.split(r"[,=\s]+", value.lower()))
    return ("KMP_AFFINITY", value) if words & _BINDING_TYPES else None


def _intel_openmp(rank: Rank) -> str | None:
    """The preloaded OpenMP library that reads KMP_*; torch wheels for Linux bundle GNU's, which does not."""
    environment = rank.find(EnvironmentFacts)
    found = re.search(r"[^\s:]*lib(?:iomp5|omp)\b[^\s:]*", (environment.get("LD_PRELOAD") or "") if environment else "")
    return found[0] if found else None
