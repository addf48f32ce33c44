"""HOST001: the locked-memory limit is too low for RDMA."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from doctor.analysis.interface_choice import sends_data_by_sockets
from doctor.analysis.visible_devices import uses_nccl
from doctor.api import (
    EventGroup,
    Finding,
    Job,
    Rank,
    Scope,
    Severity,
    Skip,
    Unknown,
    Verdict,
    check,
    event_groups,
    finding_from_logs,
    hosts_text,
)
from doctor.facts import UNLIMITED, GpuFacts, Limit, MissingReason, NcclFacts, ProcessFacts, RdmaFacts
from doctor.testing import Fails, JobBuilder, Passes, healthy, logged
from doctor_checks.host._hard_limits import raise_hard_limit

NEEDED = 1 << 30
"""Bytes. One NCCL connection registers its buffers: 4 MiB (Simple), 4.7 MiB (LL128) and 0.5 MiB (LL), the defaults in
NCCL src/init.cc. A ring over 32 channels has 64 connections (0.6 GB); trees, all-to-all and queues need more."""


def _limited(soft: int, hard: int | None = None, **others: Any) -> JobBuilder:
    limit = Limit("locked_memory", soft, soft if hard is None else hard)
    return healthy(hosts=2, rdma=2).alter(ProcessFacts, ranks=(2, 3), limits=(limit,), **others)


def _from_logs(job: Job) -> Iterator[Finding]:
    limit = next((group.value("soft") for group in event_groups(job, "limit.memlock_value")), None)
    for group in event_groups(job, "limit.memlock"):
        stated = limit or group.value("bytes")
        only_warned = all("RLIMIT_MEMLOCK is" in event.text for event in group.events)
        shown = _size(int(stated)) if stated and stated.isdigit() and len(stated) < 19 else stated
        yield finding_from_logs(
            group,
            f"The locked-memory limit of {shown} is too small for RDMA"
            if only_warned
            else f"Memory could not be locked for RDMA{_calls(group)}",
            evidence={"limit": shown} if shown else None,
            effect="RDMA connections between hosts fail with `Cannot allocate memory`."
            if only_warned
            else "The rank cannot use RDMA: it fails, and the other ranks wait for it until their timeout.",
            fix="Raise the locked-memory limit before starting the job (in a container, with `docker run --ulimit "
            "memlock=-1`):\n"
            "ulimit -l unlimited",
            severity=Severity.WARNING if only_warned else None,
            confidence=0.95 if stated else 0.6 if all(event.value("weak") for event in group.events) else 0.85,
            explains=("NET020",),
        )


def _calls(group: EventGroup) -> str:
    calls = sorted({f"ibv_{call}" for call in group.values("call")})
    return f": {' and '.join(calls[:2])} failed" if calls else ""


@check(
    id="HOST001",
    severity=Severity.ERROR,
    scope=Scope.HOST,
    when="PM",
    needs=(ProcessFacts, NcclFacts, RdmaFacts),
    from_logs=_from_logs,
    cases=lambda: (
        Passes("unlimited", healthy(hosts=2, rdma=2)),
        Passes("64 KiB where there is no RDMA", healthy(hosts=2).alter(ProcessFacts, limits=_limits(65536))),
        Passes("64 KiB on one host", healthy(rdma=2).alter(ProcessFacts, limits=_limits(65536))),
        Passes("64 KiB and CAP_IPC_LOCK", _limited(65536, user_id=0, can_lock_memory=True)),
        Passes("64 KiB and RDMA switched off", _limited(65536).environ(NCCL_IB_DISABLE="1")),
        Passes("256 GiB", _limited(256 << 30)),
        Fails("64 KiB on the second host", _limited(65536), ranks=(2, 3)),
        Fails(
            "64 KiB, and a driver that does not answer",
            _limited(65536).drop(GpuFacts, MissingReason.TIMEOUT, "reading gpus took longer than 10 s"),
            ranks=(2, 3),
        ),
        Fails(
            "8 MiB, the default of newer kernels, and unlimited hard limit", _limited(8 << 20, UNLIMITED), ranks=(2, 3)
        ),
        Fails(
            "root of a container without CAP_IPC_LOCK", _limited(65536, user_id=0, can_lock_memory=False), ranks=(2, 3)
        ),
        Passes(
            "a log shows a low limit, and nothing that needs it",
            logged("max locked memory       (kbytes, -l) 64", "node7:41:77 [0] NCCL INFO NET/IB : No device found."),
        ),
    ),
)
def locked_memory_limit(job: Job, *, needed_bytes: float = NEEDED) -> Iterator[Verdict]:
    """Ask whether every process may lock enough memory for RDMA.

    Why it hurts: a collective between hosts fails with "ibv_reg_mr failed with error Cannot allocate memory" as soon as
    NCCL registers more memory than the limit.
    Fix: Set `LimitMEMLOCK=infinity` in the systemd unit of slurmd, or start the container with `docker run --ulimit
    memlock=-1`.
    """
    if not job.is_multi_host:
        yield Skip("one host: RDMA is not used")
        return
    low: dict[tuple[int, int], list[Rank]] = {}
    unread: list[int] = []
    for *_, identical in job.each(NcclFacts, RdmaFacts):
        for rank in () if sends_data_by_sockets(identical) else identical.members:
            limit = _binding_limit(rank)
            if limit is None:
                unread.append(rank.number)
            elif limit.soft != UNLIMITED and limit.soft < needed_bytes and _talks_over_rdma(rank):
                low.setdefault((limit.soft, limit.hard), []).append(rank)
    for (soft, hard), ranks in low.items():
        yield from _judge(job, soft, hard, ranks, needed_bytes)
    if unread:
        yield Unknown("the locked-memory limit could not be read", tuple(unread), "ulimit -l in the job's shell")


def _limits(soft: int) -> tuple[Limit, ...]:
    return (Limit("locked_memory", soft, soft),)


def _binding_limit(rank: Rank) -> Limit | None:
    """The limit that applies to the rank; a process with CAP_IPC_LOCK has none (ib_umem_get in the kernel's
    drivers/infiniband/core/umem.c)."""
    process = rank.find(ProcessFacts)
    if process is None:
        return None
    if process.can_lock_memory:
        return Limit("locked_memory", UNLIMITED, UNLIMITED)
    return process.limit("locked_memory")


def _talks_over_rdma(rank: Rank) -> bool:
    missing = rank.missing(GpuFacts)
    return (missing is None or missing.lack is not MissingReason.ABSENT) and uses_nccl(rank)


def _judge(job: Job, soft: int, hard: int, members: list[Rank], needed: float) -> Iterator[Verdict]:
    roots = [rank for rank in members if _may_be_exempt(rank)]
    if roots:
        reason = f"these root processes may lock {_size(soft)} unless they have CAP_IPC_LOCK, which is unknown"
        yield Unknown(reason, tuple(rank.number for rank in roots), "grep CapEff /proc/self/status; capsh --decode=…")
    if ranks := tuple(rank.number for rank in members if rank not in roots):
        places = [rank.host.name for rank in members if rank not in roots]
        yield Finding(
            f"Locked-memory limit on {hosts_text(places)} is {_size(soft)}, but NCCL over RDMA needs "
            f"about {_size(int(needed))}",
            ranks=ranks,
            evidence={
                "soft_limit_bytes": soft,
                "hard_limit_bytes": "unlimited" if hard == UNLIMITED else hard,
                "needed_bytes": int(needed),
            },
            fix=f"Raise the limit on {hosts_text(places)} before starting the job:\nulimit -l unlimited"
            if hard == UNLIMITED
            else raise_hard_limit(job, ranks, "memlock", "LimitMEMLOCK", "unlimited"),
        )


def _may_be_exempt(rank: Rank) -> bool:
    process = rank.find(ProcessFacts)
    return process is not None and process.user_id == 0 and process.can_lock_memory is None


def _size(count: int) -> str:
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= factor:
            return f"{count / factor:g} {unit}"
    return f"{count} bytes"
