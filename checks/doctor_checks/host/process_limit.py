"""HOST007: the limit of processes and threads is too low."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from doctor.api import Finding, Job, LocalRanks, Scope, Severity, Unknown, Verdict, check, hosts_text
from doctor.facts import UNLIMITED, HostFacts, LaunchFacts, Limit, Namespace, ProcessFacts
from doctor.testing import Fails, JobBuilder, Passes, healthy, logged
from doctor_checks.host._hard_limits import raise_hard_limit

THREADS_OF_A_RANK = 32
"""Threads of a rank in addition to its OpenMP threads. A DDP rank on one GPU has about 30: Python, the autograd engine
(one per device), CUDA, c10d's watchdog, heartbeat and store, NCCL's proxies and RAS. Data workers add more."""

INITIAL_USER_NAMESPACE = "user:[4026531837]"
"""PROC_USER_INIT_INO in include/linux/proc_ns.h: user 0 of this namespace is exempt from the limit (kernel/fork.c)."""


def _limited(soft: int, **others: Any) -> JobBuilder:
    limit = Limit("processes", soft, 500_000)
    return healthy(hosts=2, per_host=8).alter(ProcessFacts, ranks=range(8, 16), limits=(limit,), **others)


def _pids(limit: int | None, used: int) -> JobBuilder:
    return healthy(hosts=2, per_host=8).alter(
        HostFacts, hosts=("node1",), container="docker", pids_limit=limit, pids_used=used
    )


_SECOND = tuple(range(8, 16))


@check(
    id="HOST007",
    severity=Severity.ERROR,
    scope=Scope.HOST,
    when="PM",
    needs=(ProcessFacts,),
    impacts={
        r"could not start another": "This process fails, and the other ranks wait for it until their timeout.",
    },
    cases=lambda: (
        Passes("half a million", healthy(hosts=2, per_host=8)),
        Passes("ulimit -u 4096, as Red Hat sets it", _limited(4096)),
        Passes("root is exempt", _limited(64, user_id=0, namespaces=(Namespace("user", INITIAL_USER_NAMESPACE),))),
        Passes("a pids cgroup with room", _pids(32_768, 900)),
        Passes("no pids cgroup", _pids(None, 900)),
        Fails("ulimit -u 128 for eight ranks", _limited(128), ranks=_SECOND),
        Fails("a container of 1,024 pids of which 900 are taken", _pids(1024, 900), ranks=_SECOND),
        Fails(
            "root of a user namespace is not exempt",
            _limited(128, user_id=0, namespaces=(Namespace("user", "user:[4026532999]"),)),
            ranks=_SECOND,
        ),
        Fails(
            "eight ranks with 64 OpenMP threads each, one of which is seen",
            healthy(per_host=8)
            .alter(ProcessFacts, limits=(Limit("processes", 512, 512),), threads_per_process=64)
            .only((0,)),
            ranks=(0,),
        ),
        Passes("log of a busy socket", logged("BlockingIOError: [Errno 11] Resource temporarily unavailable")),
    ),
)
def process_limit(job: Job, *, threads_of_a_rank: float = THREADS_OF_A_RANK) -> Iterator[Verdict]:
    """Ask whether every host allows as many processes and threads as its ranks will start.

    Why it hurts: ranks fail with "can't start new thread" or "Resource temporarily unavailable", because Linux counts
    threads as processes.
    Fix: Run `ulimit -u "$(ulimit -Hu)"` before starting the job, or start the container with `docker run
    --pids-limit=-1`.
    """
    low: dict[tuple[str, int, int, int], list[int]] = {}
    unread: list[int] = []
    for local in job.by_host():
        processes = [rank.find(ProcessFacts) for rank in local.members]
        seen = sum(
            int(threads_of_a_rank) + ((process.threads_per_process or 1) if process else 1) for process in processes
        )
        # Ranks that were not gathered start as many threads: LOCAL_WORLD_SIZE of them share the limit.
        needed = seen * max(len(processes), _stated(local)) // len(processes)
        for rank, process in zip(local.members, processes, strict=True):
            limit = process.limit("processes") if process else None
            if process and limit is None:
                unread.append(rank.number)
            elif (
                process
                and limit
                and UNLIMITED != limit.soft < needed
                and not (process.user_id == 0 and process.namespace("user") in (None, INITIAL_USER_NAMESPACE))
            ):
                low.setdefault(("ulimit -u", limit.soft, limit.hard, needed), []).append(rank.number)
        host = local.find(HostFacts)
        if host is not None and host.pids_limit is not None and host.pids_used is not None:
            room = max(0, host.pids_limit - host.pids_used)
            if room < needed:
                low.setdefault(("pids cgroup", room, room, needed), []).extend(local.ranks)
    for (kind, room, hard, needed), ranks in low.items():
        yield _finding(job, kind, room, hard, needed, tuple(ranks))
    if unread:
        yield Unknown("the process limit could not be read", tuple(unread), "ulimit -u in the job's shell")


def _stated(local: LocalRanks) -> int:
    """The ranks of the host according to the launcher."""
    launches = (rank.find(LaunchFacts) for rank in local.members)
    return max((launch.local_world_size or 1 for launch in launches if launch is not None), default=1)


def _finding(job: Job, kind: str, room: int, hard: int, needed: int, ranks: tuple[int, ...]) -> Finding:
    place = hosts_text(job.hosts_of(ranks))
    if kind == "ulimit -u":
        return Finding(
            f"`ulimit -u` allows {room:,} processes and threads, but the ranks on {place} need about {needed:,}",
            ranks=ranks,
            evidence={"soft_limit": room, "needed": needed},
            fix=f'Raise the limit on {place} before starting the job:\nulimit -u "$(ulimit -Hu)"'
            if hard == UNLIMITED or hard >= needed
            else raise_hard_limit(job, ranks, "nproc", "LimitNPROC", "unlimited"),
        )
    return Finding(
        f"The pids cgroup allows {room:,} more processes and threads, but the ranks on {place} need about {needed:,}",
        ranks=ranks,
        evidence={"room": room, "needed": needed},
        fix=_raise_pids(job, ranks, place),
    )


def _raise_pids(job: Job, ranks: tuple[int, ...], place: str) -> str:
    """The fix for the pids cgroup, by what made it: a container manager, the kubelet or systemd."""
    hosts = [host for rank in job.ranks if rank.number in ranks and (host := rank.find(HostFacts)) is not None]
    container = next((host.container for host in hosts if host.container), None)
    if container in ("docker", "podman"):
        return f"Start the container on {place} with `{container} run --pids-limit=-1`."
    if container == "kubernetes":
        return f"Raise `podPidsLimit` in the configuration of the kubelet on {place}."
    return f"Raise `TasksMax` in the systemd unit that starts the job on {place}."
