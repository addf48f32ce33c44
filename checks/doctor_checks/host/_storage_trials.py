"""Findings about directories that the probes wrote to: writes that failed, files that other hosts miss, slow writes."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from doctor.analysis.storage_speed import (
    NO_ANSWER,
    UNTRIED,
    SlowStorage,
    failed_trials,
    hosts_at,
    silent_readings,
    split_directories,
)
from doctor.api import Finding, Job, LocalRanks, Severity, Unknown
from doctor.facts import StorageSpeedFacts

ROLES = {"checkpoint": "Checkpoint", "flight-recorder": "Flight-recorder dump", "nccl-debug": "NCCL log"}
"""Names of the checked directories, by role. Caches and temporary directories are checked separately."""

WRITE_ERRORS = {
    "No space left on device": "is full",
    "Disk quota exceeded": "is full (user quota exceeded)",
    "Read-only file system": "is not writable",
    "Permission denied": "is not writable",
    "Stale file handle": "does not respond",
    "File exists": "is a file or below a file",
    "Not a directory": "is a file or below a file",
}
"""Messages of the C library about a failed write (errno ENOSPC, EDQUOT, EROFS, EACCES, ESTALE, EEXIST, ENOTDIR), and
their meaning for the directory."""

_SHOWN = 8
"""Groups, readings and names that a finding shows."""


def storage_findings(
    job: Job, slow: Iterable[SlowStorage], severity_of: Callable[[LocalRanks], Severity]
) -> Iterator[Finding | Unknown]:
    """Findings about all tested directories, and unknowns for those that could not be tested.

    ``slow``: from :func:`doctor.analysis.storage_speed.slow_storage`; ``severity_of``: the severity for a host whose
    checkpoint directory is not shared."""
    hosts = hosts_at(job)
    for local in job.by_host():
        missing = local.hosts[0].missing(StorageSpeedFacts)
        if missing is not None and missing.is_breakage:
            yield Unknown(f"storage was not measured: {missing.reason}", local.ranks)
    for local, trial in failed_trials(job):
        if (trial.error or "").startswith(UNTRIED):
            yield Unknown(f"{trial.path} was not measured: {trial.error}", local.ranks)
    yield from _unwritten(job)
    yield from _unread(job)
    yield from _unshared(job, hosts, severity_of)
    yield from _slow_directories(job, hosts, slow)


def _unwritten(job: Job) -> Iterator[Finding]:
    found: dict[tuple[str, str, str], list[LocalRanks]] = {}
    for local, trial in failed_trials(job):
        if trial.role in ROLES and not (trial.error or "").startswith(UNTRIED):
            found.setdefault((trial.role, trial.path, trial.error or ""), []).append(local)
    for (role, path, error), locals_ in found.items():
        answers = not error.startswith(NO_ANSWER)
        meaning = WRITE_ERRORS.get(error, f"is not writable: {error}") if answers else f"does not respond: {error}"
        yield Finding(
            f"{ROLES[role]} directory {path} {meaning} (write test on {_names(locals_)})",
            ranks=_ranks(locals_),
            severity=Severity.WARNING if role == "nccl-debug" else Severity.ERROR,
            evidence={"path": path, "error": error, **({} if answers else _exclude(job, locals_))},
            fix=f"Check on {_names(locals_)}:\n"
            + "\n".join(f"{command} {shlex.quote(path)}" for command in ("ls -ld", "df -h", "df -i", "findmnt -T"))
            + "\nquota -s",
        )


def _unread(job: Job) -> Iterator[Finding]:
    for local, reading in silent_readings(job):
        yield Finding(
            f"Directory {reading.path} does not respond on {local.name}: reading a file of {reading.writer} timed out",
            ranks=local.ranks,
            severity=Severity.ERROR,
            evidence={"path": reading.path, "writer": reading.writer, **_exclude(job, [local])},
            fix=f"Remount the directory on {local.name}, after checking it with:\n"
            f"timeout 5 ls {shlex.quote(reading.path)}\nfindmnt -T {shlex.quote(reading.path)}",
        )


def _unshared(
    job: Job, hosts: Mapping[int, LocalRanks], severity_of: Callable[[LocalRanks], Severity]
) -> Iterator[Finding]:
    for split in split_directories(job):
        faulty = [hosts[place] for place in split.places]
        if not faulty:
            continue
        some_share = any(len(set(group) - set(split.places)) > 1 for group in split.groups)
        yield Finding(
            f"Checkpoint directory {split.path} is not shared: "
            + (f"{_names(faulty)} does" if some_share and len(faulty) == 1 else "hosts do")
            + " not see files of other hosts",
            ranks=_ranks(faulty),
            severity=max(map(severity_of, faulty), key=lambda severity: severity.weight),
            evidence={
                "path": split.path,
                "hosts_that_share": [
                    [hosts[place].name for place in group[:_SHOWN]] for group in split.groups[:_SHOWN]
                ],
                "not_seen": {
                    f"{reader} reads {one.writer}": one.error or one.outcome for reader, one in split.readings[:_SHOWN]
                },
            },
            fix=f"Mount the file system of the other hosts on {_names(faulty)}; `findmnt -T {split.path}` shows it."
            if some_share
            else "Use a directory on a file system that all hosts mount (NFS, Lustre, GPFS).",
        )


def _slow_directories(job: Job, hosts: Mapping[int, LocalRanks], slow: Iterable[SlowStorage]) -> Iterator[Finding]:
    for one in slow:
        faulty = [hosts[place] for place in one.places]
        usual = "" if one.usual is None else f" ({one.usual:.2g} s on the other hosts)"
        of_each = " per host" if len(faulty) > 1 else ""
        yield Finding(
            f"{ROLES.get(one.role, one.role)} directory {one.path} is slow on {_names(faulty)}: "
            f"writing {one.bytes / (1 << 20):.0f} MiB{of_each} took {one.seconds:.2g} s{usual}",
            ranks=_ranks(faulty),
            severity=Severity.WARNING,
            evidence={
                "path": one.path,
                "bytes": one.bytes,
                "seconds": round(one.seconds, 3),
                "of_these_fsync_seconds": round(one.sync_seconds, 3),
                "megabytes_per_second": round(one.bytes / one.seconds / 1e6, 2) if one.seconds else None,
                "usual_seconds": None if one.usual is None else round(one.usual, 3),
                **({} if one.usual is None else _exclude(job, faulty)),
            },
            effect="All ranks wait at a checkpoint until the slowest host has written its part.",
            fix=f"Use another directory, or check on {_names(faulty)}:\n"
            f"iostat -x 1 3\nnfsiostat 1 3\nfindmnt -T {shlex.quote(one.path)}",
        )


def _exclude(job: Job, faulty: Sequence[LocalRanks]) -> dict[str, object]:
    some = len(faulty) < len(job.hosts)
    return {"exclude": [host.name for local in faulty for host in local.hosts]} if some else {}


def _names(faulty: Sequence[LocalRanks]) -> str:
    more = f" and {len(faulty) - _SHOWN} more hosts" if len(faulty) > _SHOWN else ""
    return ", ".join(local.name for local in faulty[:_SHOWN]) + more


def _ranks(faulty: Sequence[LocalRanks]) -> tuple[int, ...]:
    return tuple(sorted(rank for local in faulty for rank in local.ranks))
