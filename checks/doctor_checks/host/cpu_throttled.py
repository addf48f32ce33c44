"""HOST005: a quota or governor throttles the CPUs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from doctor.api import Finding, Job, LocalRanks, Rank, Scope, Severity, Unknown, Verdict, check, hosts_text
from doctor.facts import HostFacts, HostUseFacts, ProcessFacts
from doctor.testing import Fails, Passes, healthy, running

SHOWN = 16
"""Maximum number of hosts in the evidence."""

FREE_UNDER_POWERSAVE = ("intel_pstate", "amd-pstate-epp")
"""Drivers that select the frequency themselves: their powersave corresponds to schedutil (kernel documentation,
admin-guide/pm/intel_pstate.rst and amd-pstate.rst, active mode)."""


@check(
    id="HOST005",
    severity=Severity.WARNING,
    scope=Scope.HOST,
    when="PR",
    needs=(HostFacts,),
    impacts={
        r"throttled": (
            "The kernel stops the threads of the ranks until the throttled period (100 ms) ends, and all other ranks "
            "wait for these ranks."
        ),
        r"governor": (
            "The CPUs run at a fraction of their speed, so kernels are launched late and batches arrive late. All "
            "ranks wait for the slowest one."
        ),
    },
    cases=lambda: (
        Passes("no quota and the performance governor", healthy(hosts=2)),
        Passes(
            "powersave under intel_pstate",
            healthy(hosts=2).alter(HostFacts, cpu_governor="powersave", cpu_driver="intel_pstate"),
        ),
        Passes(
            "powersave under amd-pstate-epp",
            healthy(hosts=2).alter(HostFacts, cpu_governor="powersave", cpu_driver="amd-pstate-epp"),
        ),
        Passes("a virtual machine without a governor", healthy(hosts=2).alter(HostFacts, cpu_governor=None)),
        Passes(
            "a quota with room",
            healthy(hosts=2).alter(HostFacts, cpu_quota=16.0, cpu_periods=100_000, cpu_throttled_periods=900),
        ),
        Passes(
            "throttled in most of the first few periods",
            healthy().alter(HostFacts, cpu_quota=16.0, cpu_periods=20, cpu_throttled_periods=15),
        ),
        Fails(
            "throttled in half of the periods",
            healthy(hosts=2).alter(
                HostFacts, hosts=("node1",), cpu_quota=16.0, cpu_periods=10_000, cpu_throttled_periods=5_000
            ),
            ranks=(2, 3),
        ),
        Fails(
            "a quota of 2 CPUs for 2 ranks of 4 threads",
            healthy(hosts=2).alter(HostFacts, hosts=("node1",), cpu_quota=2.0),
            ranks=(2, 3),
        ),
        Fails(
            "powersave under acpi-cpufreq",
            healthy(hosts=2).alter(HostFacts, hosts=("node0",), cpu_governor="powersave", cpu_driver="acpi-cpufreq"),
            ranks=(0, 1),
        ),
        Fails(
            "powersave under intel_pstate in its passive mode",
            healthy().alter(HostFacts, cpu_governor="powersave", cpu_driver="intel_cpufreq"),
            ranks=(0, 1),
        ),
        Passes(
            "throttled long ago, and not in the run",
            running(2, 2)
            .alter(HostFacts, cpu_quota=16.0, cpu_periods=10_000, cpu_throttled_periods=5_000)
            .put(HostUseFacts(seconds=300.0, cpu_periods=3000, cpu_throttled_periods=40)),
        ),
        Passes(
            "the first seconds of a run",
            running(2, 2).put(HostUseFacts(seconds=20.0, cpu_periods=200, cpu_throttled_periods=120)),
        ),
        Fails(
            "throttled in a third of a run",
            running(2, 2)
            .alter(HostFacts, cpu_quota=16.0, cpu_periods=1_000_000, cpu_throttled_periods=900)
            .put(HostUseFacts(seconds=120.0, cpu_periods=1200, cpu_throttled_periods=400), hosts=("node1",)),
            ranks=(2, 3),
        ),
    ),
)
def cpu_throttled(job: Job, *, throttled_share: float = 0.25, least_periods: float = 600) -> Iterator[Verdict]:
    """Ask whether CPU quota and governor allow the processes to use the CPUs that they expect.

    Why it hurts: when the quota of a period (100 ms) is used up, the kernel stops all threads of the ranks until the
    next period, and all other ranks wait for these ranks.
    Fix: Raise the CPU limit (`docker run --cpus`, `resources.limits.cpu`, `--cpus-per-task`), or lower OMP_NUM_THREADS.
    """
    # 25 % of the periods is the threshold of kubernetes-mixin's CPUThrottlingHigh alert; 600 periods are a minute.
    hosts = [(local, facts) for local in job.by_host() if (facts := local.find(HostFacts)) is not None]
    periods = {local: _periods(local, facts) for local, facts in hosts}
    shares = {local: throttled / count for local, (count, throttled) in periods.items() if count >= least_periods}
    held = [local for local, share in shares.items() if share > throttled_share]
    if held:
        worst = max(held, key=lambda local: shares[local])
        yield Finding(
            f"CPU quota throttled the processes on {worst.name} in {shares[worst]:.0%} of all periods",
            ranks=_ranks(held),
            evidence={"throttled_share": {local.name: round(shares[local], 3) for local in held[:SHOWN]}},
            fix=f"{_raise(held)} on {_hosts(held)}, or lower OMP_NUM_THREADS.",
            explains=("RUN003", "RUN005"),
        )
    yield from _small_quota(hosts)
    yield from _slow_governor(hosts)


_LIMITS = {
    "docker": "the CPU limit (`docker run --cpus`)",
    "podman": "the CPU limit (`podman run --cpus`)",
    "kubernetes": "the CPU limit of the pod (`resources.limits.cpu`)",
}
"""Container managers -> the setting from which the quota comes."""


def _raise(held: Sequence[LocalRanks]) -> str:
    host = held[0].find(HostFacts)
    return f"Raise {_LIMITS.get(host.container or '' if host else '', 'the CPU quota of the cgroup')}"


def _hosts(held: Sequence[LocalRanks]) -> str:
    return hosts_text(local.name for local in held)


Hosts = list[tuple[LocalRanks, HostFacts]]


def _periods(local: LocalRanks, host: HostFacts) -> tuple[int, int]:
    """Periods of the quota, and the number of throttled ones: those of a monitored run, else all since the cgroup was
    created."""
    facts: HostFacts | HostUseFacts = local.find(HostUseFacts) or host
    return max(1, facts.cpu_periods or 0), facts.cpu_throttled_periods or 0


def _small_quota(hosts: Hosts) -> Iterator[Verdict]:
    small: dict[tuple[float, int], list[LocalRanks]] = {}
    for local, facts in hosts:
        if facts.cpu_quota is None:
            continue
        threads = sum(map(_threads, local.members))
        if facts.cpu_quota < threads:
            small.setdefault((facts.cpu_quota, threads), []).append(local)
    for (quota, threads), held in small.items():
        each = max(1, int(quota) // max(1, len(held[0].members)))
        yield Finding(
            f"{_count(len(held[0].members), 'rank')} on {'each of ' if len(held) > 1 else ''}{_hosts(held)} "
            f"{'runs' if len(held[0].members) == 1 else 'run'} "
            f"{_count(threads, 'thread')} on a quota of {quota:g} CPU{'' if quota == 1 else 's'}",
            ranks=_ranks(held),
            evidence={"quota_cpus": quota, "threads": threads, "ranks_per_host": len(held[0].members)},
            fix=f"{_raise(held)} to {_count(threads, 'CPU')} on {_hosts(held)}, or set OMP_NUM_THREADS={each}.",
        )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _threads(rank: Rank) -> int:
    process = rank.find(ProcessFacts)
    return max(1, (process.threads_per_process or 1) if process else 1)


def _slow_governor(hosts: Hosts) -> Iterator[Verdict]:
    slow: dict[str, list[LocalRanks]] = {}
    unsure: list[LocalRanks] = []
    for local, facts in hosts:
        if facts.cpu_governor != "powersave" or facts.cpu_driver in FREE_UNDER_POWERSAVE:
            continue
        if facts.cpu_driver is None:
            unsure.append(local)
        else:
            slow.setdefault(facts.cpu_driver, []).append(local)
    for driver, held in slow.items():
        yield Finding(
            f"CPU governor powersave ({driver}) keeps the CPUs of {_hosts(held)} at their lowest frequency",
            ranks=_ranks(held),
            evidence={"governor": "powersave", "driver": driver, "hosts": len(held)},
            fix=f"Select the performance governor on {_hosts(held)}:\nsudo cpupower frequency-set -g performance",
        )
    if unsure:
        unhide = "cat /sys/devices/system/cpu/cpu0/cpufreq/scaling_driver"
        yield Unknown("the governor is powersave, but its driver is unknown", _ranks(unsure), unhide)


def _ranks(locals_: list[LocalRanks]) -> tuple[int, ...]:
    return tuple(rank for local in locals_ for rank in local.ranks)
