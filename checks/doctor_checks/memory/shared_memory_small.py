"""MEM010: /dev/shm is too small."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.analysis.logs.oom_events import ended_by_signal
from doctor.analysis.visible_devices import mebibytes, uses_nccl
from doctor.api import (
    EventGroup,
    Finding,
    IdenticalRanks,
    Job,
    LocalRanks,
    Rank,
    Scope,
    Severity,
    Unknown,
    Verdict,
    check,
    event_groups,
    finding_from_logs,
    is_logged,
    merge,
)
from doctor.core.text import HERE
from doctor.facts import Filesystem, GpuFacts, HostFacts, NcclFacts, PeerLink, SoftwareFacts
from doctor.knowledge.releases import within
from doctor.testing import Fails, Passes, healthy, logged

GIB = 1 << 30
MIB = 1 << 20

CONNECTION = 9_637_888
"""Bytes of the receive segment of one connection: 4096, and the LL, LL128 and Simple buffers of 524,288, 4,915,200
and 4,194,304 (NCCL src/transport/shm.cc, default buffer sizes in src/include/comm.h)."""

CHANNELS = 2
"""The fewest channels that NCCL opens in a ring over shared memory (src/graph/connect.cc)."""

PROXY_POOL = 33_030_276
"""Bytes of one process's pool of proxy operations (src/include/proxy.h ncclProxyOpsPool)."""

FAR = ("host-bridge", "numa-node", "system")
"""Paths over which NCCL does not use peer access by default (src/graph/paths.cc: at most PATH_PXB)."""


def _shm(total: int, free: int | None = None) -> Filesystem:
    return Filesystem("/dev/shm", total, total if free is None else free, "tmpfs")  # noqa: S108 - the mount itself


def _from_logs(job: Job) -> Iterator[Finding]:
    full = tuple(
        event
        for group in event_groups(job, "python.exception")
        for event in group.events
        if "[Errno 28]" in event.text and any(frame.file.endswith(_SHARING) for frame in event.frames)
    )
    if full and not is_logged(job, "shm.full"):
        yield finding_from_logs(
            EventGroup(full[0].kind, full),
            "A tensor or array could not be shared between processes: /dev/shm is full",
            fix=_FIX_OF_FULL,
            explains=_CONSEQUENCES,
        )
    for group in event_groups(job, "shm.full"):
        summary, fix = _refusal(group.first.text, group.value("pid"))
        size = group.value("bytes", "size")
        yield finding_from_logs(
            group,
            summary,
            evidence={
                name: value
                for name, value in (
                    ("segment", group.value("path", "segment")),
                    ("segment_bytes", int(size) if size and len(size) < 19 else None),
                )
                if value is not None
            },
            fix=fix,
            confidence=0.95,
            explains=_CONSEQUENCES,
        )


def _refusal(text: str, pid: str | None) -> tuple[str, str]:
    if "nccl" in text.lower() or "shared memory segment" in text or "Call to " in text:
        if "Permission denied" in text:
            return "NCCL cannot create shared memory: permission denied for /dev/shm", "sudo chmod 1777 /dev/shm"
        is_sure = "No space" in text or "Disk quota" in text
        return (
            f"NCCL cannot allocate shared memory: /dev/shm is {'' if is_sure else 'probably '}full",
            _FIX_OF_FULL if is_sure else _FIX_OF_GUESS,
        )
    if "worker" in text or "insufficient shared memory" in text.lower():
        return f"A DataLoader worker{f' (PID {pid})' if pid else ''} crashed: /dev/shm is probably full", _FIX_OF_GUESS
    return "A tensor or array could not be written to shared memory: /dev/shm is full", _FIX_OF_FULL


def _bus_error(job: Job) -> Iterator[Finding]:
    for group in event_groups(job, "exit.bus_error"):
        if not is_logged(job, "shm.full"):
            yield finding_from_logs(
                group,
                "A process crashed with a bus error, often because /dev/shm is full",
                ranks=group.ranks or ended_by_signal(job, "SIGBUS"),
                fix=_FIX_OF_GUESS,
                confidence=0.75,
                explains=_CONSEQUENCES,
            )


def _started_with_little(job: Job) -> Iterator[Finding]:
    """A warning about /dev/shm that does not name it as the cause of a failure."""
    if is_logged(job, "shm.full"):
        return
    failures = tuple(
        event
        for group in event_groups(job, "nccl.result")
        for event in group.events
        if "unhandled system error" in event.text
    )
    for group in event_groups(job, "host.shm_default", "ray.shm_small"):
        matters = bool(failures) and group.kind == "host.shm_default"
        yield finding_from_logs(
            EventGroup(group.kind, (*group.events, *failures[:1])) if matters else group,
            "NCCL failed with a system error in a container with only 64 MB of shared memory"
            if matters
            else _little(group),
            severity=None if matters else Severity.WARNING if group.kind == "ray.shm_small" else Severity.INFO,
            confidence=0.6 if matters else 0.9,
            symptoms=matters,
        )


def _little(group: EventGroup) -> str:
    if group.kind != "ray.shm_small":
        return "The container has only 64 MB of shared memory, the default"
    free = group.value("bytes") or ""
    size = f", which has only {mebibytes(int(free))} free" if free and len(free) < 19 else ""
    return f"Ray's object store uses {group.value('path') or 'a disk'} instead of /dev/shm{size}"


_CONSEQUENCES = ("DATA012", "MEM012")
_FIX_OF_GUESS = (
    "Check with `df -h /dev/shm` while the job runs whether it is full, and if so, enlarge it: in a container with "
    "`docker run --ipc=host`, in Kubernetes with an emptyDir of `medium: Memory`."
)
"""For messages that do not show that it is full, or that the process runs in a container."""
_FIX_OF_FULL = (
    "Enlarge /dev/shm (in a container with `docker run --ipc=host`, in Kubernetes with an emptyDir of "
    "`medium: Memory`), or remove files from it that no process uses."
)


_SHARING = ("multiprocessing/heap.py", "multiprocessing/shared_memory.py", "multiprocessing/reductions.py")


@check(
    id="MEM010",
    severity=Severity.ERROR,
    scope=Scope.HOST,
    when="PM",
    needs=(HostFacts,),
    from_logs=(_from_logs, _started_with_little, _bus_error),
    impacts={
        r"^NCCL needs": (
            'NCCL initialization fails with "failed to extend /dev/shm/nccl-…" or "unhandled system error".'
        ),
        r"DataLoader worker": (
            "The rank of the worker fails with a DataLoader error, and the other ranks wait for it until their timeout."
        ),
        r"bus error": (
            "The process ends without a Python traceback, and the other ranks wait for it until their timeout."
        ),
        r"NCCL cannot|^NCCL failed": "NCCL initialization fails, and the job ends.",
        r"could not open another rank's": "NCCL initialization fails on these ranks, and the job ends.",
        r"^Ray": "Ray keeps its objects on disk, so passing data between its workers is slower.",
        r"^The container has": "NCCL or DataLoader workers that need more shared memory fail.",
        r"^A tensor": "The process that shares the tensor fails, and the other ranks wait for it until their timeout.",
        r"is nearly full": "NCCL initialization may fail, and DataLoader workers that return a batch crash with a "
        "bus error.",
    },
    cases=lambda: (
        Passes("half of the memory, as on a bare host", healthy(hosts=2, per_host=8)),
        Passes(
            "1 GiB in a container without GPU",
            healthy(per_host=8, gpus=0).alter(HostFacts, container="docker", shm=_shm(GIB)),
        ),
        Passes(
            "1 GiB for eight ranks over NVLink", healthy(per_host=8).alter(HostFacts, container="docker", shm=_shm(GIB))
        ),
        Passes(
            "256 MiB where NCCL does not use it",
            healthy(per_host=8)
            .alter(HostFacts, shm=_shm(256 * MIB))
            .environ(NCCL_P2P_DISABLE="1", NCCL_SHM_DISABLE="1"),
        ),
        Fails(
            "Docker's default of 64 MiB",
            healthy(hosts=2, per_host=4).alter(HostFacts, hosts=("node1",), container="docker", shm=_shm(64 * MIB)),
            ranks=(4, 5, 6, 7),
        ),
        Fails(
            "too small for eight ranks without peer access",
            healthy(per_host=8)
            .alter(HostFacts, shm=_shm(256 * MIB))
            .environ(NCCL_P2P_DISABLE="1", NCCL_CUMEM_HOST_ENABLE="0"),
            ranks=tuple(range(8)),
        ),
        Fails(
            "filled by files of killed jobs",
            healthy(per_host=8)
            .alter(HostFacts, shm=_shm(GIB, 100 * MIB), nccl_shm_files=90, nccl_shm_bytes=900 * MIB)
            .alter(
                GpuFacts,
                cuda_version="12.4",
                links=tuple(PeerLink(first, first + 1, "system", "ok", "ok") for first in range(7)),
            ),
            ranks=tuple(range(8)),
        ),
        Fails(
            "filled by tensors of killed data workers, beside NVLink",
            healthy(per_host=8).alter(HostFacts, shm=_shm(64 * GIB, 20 * MIB)),
            ranks=tuple(range(8)),
            severity=Severity.WARNING,
        ),
        Fails(
            "filled by files of killed jobs, beside NVLink",
            healthy(per_host=8).alter(
                HostFacts, shm=_shm(256 * MIB, 2 * MIB), nccl_shm_files=1, nccl_shm_bytes=254 * MIB
            ),
            ranks=tuple(range(8)),
            severity=Severity.WARNING,
        ),
        Passes("log of another full disk", logged("OSError: [Errno 28] No space left on device: '/data/last.ckpt'")),
        Passes(
            "log of a container's notice at its start",
            logged("NOTE: The SHMEM allocation limit is set to the default of 64MB.  This may be"),
            silent=False,
        ),
        Fails(
            "log of that notice, and then of a system error",
            logged(
                "NOTE: The SHMEM allocation limit is set to the default of 64MB.  This may be",
                "RuntimeError: NCCL error in: ProcessGroupNCCL.cpp:784, unhandled system error, NCCL version 2.7.8",
            ),
        ),
        Fails(
            "logged by Python",
            logged(
                "Traceback (most recent call last):",
                '  File "/usr/lib/python3.10/multiprocessing/heap.py", line 81, in __init__',
                "    os.ftruncate(self.fd, size)",
                "OSError: [Errno 28] No space left on device",
            ),
        ),
    ),
)
def shared_memory_small(job: Job, *, smallest_mebibytes: float = 128) -> Iterator[Verdict]:  # Docker gives 64
    """Ask whether /dev/shm is large enough for NCCL and the DataLoader workers.

    Why it hurts: when /dev/shm is full, NCCL fails at startup ("failed to extend /dev/shm/nccl-…", "unhandled system
    error"), or DataLoader workers crash with a bus error.
    Fix: Start the container with `docker run --ipc=host`, or in Kubernetes mount an emptyDir with `medium: Memory` at
    /dev/shm.
    """
    findings = []
    users = {
        rank
        for identical in job.identical(NcclFacts, SoftwareFacts, GpuFacts)
        if not _elsewhere(identical)
        for rank in identical.members
    }
    for local in job.by_host():
        host = local.find(HostFacts)
        if host is None:
            continue
        if host.shm is None:
            note = host.why_hidden("shm")
            yield Unknown(
                note.reason if note else "the size of shared memory is unknown",
                local.ranks,
                note.unhide if note else "",
            )
            continue
        need = _need(local, users)
        if host.shm.total < smallest_mebibytes * MIB:
            words = f"Shared memory (/dev/shm) of {HERE} has only {mebibytes(host.shm.total)}"
            findings.append(_finding(local, host, words, need))
        elif need > host.shm.free:
            words = f"NCCL needs {mebibytes(need)} of /dev/shm on {HERE}, but {mebibytes(host.shm.free)} are free"
            findings.append(_finding(local, host, words, need))
        elif host.shm.free < smallest_mebibytes * MIB:
            words = f"/dev/shm of {HERE} is nearly full: {mebibytes(host.shm.free)} of {mebibytes(host.shm.total)} free"  # noqa: S108 - the mount itself
            findings.append(_finding(local, host, words, need, Severity.WARNING))
    yield from merge(findings, job.place_of)


def _need(local: LocalRanks, users: set[Rank]) -> int:
    """The minimum that NCCL needs, in bytes: a ring of the host's ranks over shared memory; 0 with other transports."""
    using = (rank for rank in local.members if rank in users and uses_nccl(rank))
    first = next(using, None)
    if first is None or not _without_peer_access(local, first):
        return 0
    count = 1 + sum(1 for _ in using)
    return count * (CHANNELS * CONNECTION + PROXY_POOL) if count > 1 else 0


def _elsewhere(ranks: IdenticalRanks) -> bool:
    """Whether NCCL does not use /dev/shm: it is turned off, or its buffers are cuMem host allocations, which it prefers
    since 2.24 with a driver for CUDA 12.6 (src/misc/cudawrap.cc ncclCuMemHostEnable)."""
    nccl, software, gpus = ranks.find(NcclFacts), ranks.find(SoftwareFacts), ranks.find(GpuFacts)
    if gpus is None or not gpus.gpus:
        return True
    if nccl and nccl.get("NCCL_SHM_DISABLE") == "1":
        return True
    if nccl and nccl.get("NCCL_CUMEM_HOST_ENABLE") == "0":
        return False
    loaded = software.nccl if software else None
    return loaded is None or (within(loaded, "2.24") and within(gpus.cuda_version or "", "12.6"))


def _without_peer_access(local: LocalRanks, rank: Rank) -> bool:
    nccl, gpus = rank.find(NcclFacts), local.find(GpuFacts)
    if nccl and nccl.get("NCCL_P2P_DISABLE") == "1":
        return True
    links = gpus.links if gpus else ()
    return bool(links) and all(link.path in FAR or link.read not in (None, "ok") for link in links)


def _finding(local: LocalRanks, host: HostFacts, summary: str, need: int, severity: Severity | None = None) -> Finding:
    return Finding(
        summary,
        ranks=local.ranks,
        severity=severity,
        evidence={
            "total_bytes": host.shm.total if host.shm else None,
            "free_bytes": host.shm.free if host.shm else None,
            "nccl_needs_bytes": need or None,
            "left_over_nccl_files": host.nccl_shm_files or None,
            "left_over_nccl_bytes": host.nccl_shm_bytes or None,
            "container": host.container,
        },
        fix=_fix(host),
    )


def _fix(host: HostFacts) -> str:
    if host.nccl_shm_bytes and host.shm and host.nccl_shm_bytes > host.shm.total // 2:
        return f"While no job runs on {HERE}, remove the files of killed jobs:\nrm /dev/shm/nccl-*"
    if host.shm and host.shm.free < host.shm.total // 4:
        return (
            f"On {HERE}, list the files, and remove those that no process uses:\nls -lS /dev/shm | head\n"
            "fuser -v /dev/shm/*"
        )
    if host.container == "kubernetes":
        return "Mount an emptyDir with `medium: Memory` at /dev/shm."
    if host.container in ("docker", "podman"):
        return f"Start the container with `{host.container} run --ipc=host`, or set a larger `--shm-size`."
    return "sudo mount -o remount,size=50% /dev/shm"
