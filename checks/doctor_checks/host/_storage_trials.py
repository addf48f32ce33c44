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
    "No space left on device": "is on a full file system",
    "Disk quota exceeded": "cannot be written to: disk quota exceeded",
    "Read-only file system": "is on a read-only file system",
    "Permission denied": "is not writable: permission denied",
    "Stale file handle": "does not respond: stale file handle",
    "File exists": "is an existing file",
    "Not a directory": "is a file or lies below a file",
}
"""Messages of the C library about a failed write (errno ENOSPC, EDQUOT, EROFS, EACCES, ESTALE, EEXIST, ENOTDIR), and
their meaning for the directory."""


_REMEDIES = {
    "No space left on device": (
        "Check{at} whether the file system{of} is out of space or inodes, then delete unneeded files",
        "df -h {path}",
        "df -i {path}",
    ),
    "Disk quota exceeded": ("Delete files or request a larger quota, and check the usage{at} with", "quota -s"),
    "Read-only file system": (
        "Find out{at} why the file system{of} is read-only, then remount it or use another directory",
        "findmnt -T {path}",
    ),
    "Permission denied": (
        "Find the missing permission{at}, then grant it to the job's user or use another directory",
        "namei -l {path}",
        "id",
    ),
    "File exists": ("Use another directory, or rename the file that has this name", "mv {path} {path}.old"),
    "Not a directory": (
        "Use another directory, or move the file that is part of this path, which this command shows",
        "namei -l {path}",
    ),
    "Stale file handle": ("Unmount the file system{of}{at}, mount it again, and restart the job",),
    "Transport endpoint is not connected": (
        "Unmount the FUSE file system{of}{at}, mount it again, and restart the job",
    ),
    "Cannot send after transport endpoint shutdown": (
        "Find the reason for the eviction in the kernel log{at}, then restart the job",
        "sudo dmesg -T | grep -i lustre",
    ),
    "File too large": ("Raise the limit with `ulimit -f unlimited`, or use a file system that supports larger files",),
    "Is a directory": ("Pass the path of a file instead of a directory to the function that writes the checkpoint",),
}
"""Messages of the C library -> a sentence and commands. ``{of}`` is the directory and ``{at}`` the host, if known."""

_OF_HARDWARE = (
    "Find the failing disk or file server{at}, and use another directory until it is repaired",
    "findmnt -T {path}",
    "sudo dmesg -T | tail -n 50",
)
_WITHOUT_PATH = {
    "mv {path} {path}.old": "",
    "df -h {path}": "df -h",
    "df -i {path}": "df -i",
    "findmnt -T {path}": "",
    "namei -l {path}": "",
}


def remedy(error: str, folder: str | None, place: str = "", of: str = "") -> str:
    """The fix for an ``error`` of the C library in ``folder``, if that is known.

    ``place``: ``" on node7"``; ``of``: what names the file system without a ``folder``."""
    sentence, *commands = _REMEDIES.get(error, _OF_HARDWARE)
    is_known = folder is not None and folder.isprintable()
    if not is_known:
        commands = [shown for command in commands if (shown := _WITHOUT_PATH.get(command, command))]
    text = sentence.format(of=f" of {folder}" if is_known else of, at=place)
    lines = [command.format(path=shlex.quote(folder or "")) for command in commands]
    return "\n".join((f"{text}:", *lines)) if lines else f"{text}."


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
        answers, place = not error.startswith(NO_ANSWER), f" on {_names(locals_)}"
        meaning = WRITE_ERRORS.get(error, f"cannot be written to: {uncapitalized(error)}")
        yield Finding(
            f"{ROLES[role]} directory {path} {meaning} (write test on {_names(locals_)})"
            if answers
            else f"{ROLES[role]} directory {path} does not respond: write test on {_names(locals_)} "
            f"timed out{error.removeprefix(NO_ANSWER).replace(' within', ' after')}",
            ranks=_ranks(locals_),
            severity=Severity.WARNING if role == "nccl-debug" else Severity.ERROR,
            evidence={"path": path, "error": error, **({} if answers else _exclude(job, locals_))},
            effect="NCCL cannot write its log file there." if role == "nccl-debug" else "" if answers else _BLOCKS,
            fix=remedy(error, path, place)
            if answers
            else _remount(path, place, f"timeout 20 mktemp -p {shlex.quote(path)}"),
        )


def _unread(job: Job) -> Iterator[Finding]:
    for local, reading in silent_readings(job):
        yield Finding(
            f"Directory {reading.path} does not respond on {local.name}: reading a file of {reading.writer} timed out",
            ranks=local.ranks,
            severity=Severity.ERROR,
            evidence={"path": reading.path, "writer": reading.writer, **_exclude(job, [local])},
            fix=_remount(reading.path, f" on {local.name}", f"timeout 20 ls -l {shlex.quote(reading.path)}"),
        )


_BLOCKS = "A process that reads or writes there fails or blocks, and the other ranks wait for it until the timeout."


def _remount(path: str, place: str, test: str) -> str:
    return f"Remount the file system of {path}{place}, and test it there with:\n{test}"


def uncapitalized(words: str) -> str:
    """A message of a library within a sentence: names such as ``MetadataIncompleteBuffer`` keep their capitals."""
    first = words.partition(" ")[0]
    return words[:1].lower() + words[1:] if first[1:].islower() or "/" in first else words


def _unshared(
    job: Job, hosts: Mapping[int, LocalRanks], severity_of: Callable[[LocalRanks], Severity]
) -> Iterator[Finding]:
    for split in split_directories(job):
        faulty = [hosts[place] for place in split.places]
        if not faulty:
            continue
        severity = max(map(severity_of, faulty), key=lambda severity: severity.weight)
        some_share = any(len(set(group) - set(split.places)) > 1 for group in split.groups)
        yield Finding(
            f"Checkpoint directory {split.path} is not shared: "
            + (
                f"{_names(faulty)} cannot read files of other hosts"
                if some_share and len(faulty) == 1
                else "the hosts cannot read each other's files"
            ),
            ranks=_ranks(faulty),
            severity=severity,
            evidence={
                "path": split.path,
                "hosts_that_share": [
                    [hosts[place].name for place in group[:_SHOWN]] for group in split.groups[:_SHOWN]
                ],
                "not_seen": {
                    f"{reader} reads {one.writer}": one.error or one.outcome for reader, one in split.readings[:_SHOWN]
                },
            },
            effect="" if severity is Severity.ERROR else ONLY_OF_RANK_0,
            fix=f"On {_names(faulty)}, mount the file system that the other hosts use "
            f"(`findmnt -T {shlex.quote(split.path)}` shows it on them)."
            if some_share
            else on_shared_storage(split.path),
        )


ONLY_OF_RANK_0 = "Only the host of rank 0 has the checkpoints, so ranks on other hosts cannot load them to resume."


def on_shared_storage(path: str) -> str:
    """The fix for a checkpoint directory that each host has for itself."""
    return f"Replace {path} with a directory on a file system that all hosts mount (NFS, Lustre, GPFS)."


def _slow_directories(job: Job, hosts: Mapping[int, LocalRanks], slow: Iterable[SlowStorage]) -> Iterator[Finding]:
    for one in slow:
        faulty = [hosts[place] for place in one.places]
        usual = "" if one.usual is None else f" (others: {one.usual:.2g} s)"
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
                "fsync_seconds": round(one.sync_seconds, 3),
                "speed": f"{one.bytes / one.seconds / 1e6:.2g} MB/s" if one.seconds else None,
                "usual_seconds": None if one.usual is None else round(one.usual, 3),
                **({} if one.usual is None else _exclude(job, faulty)),
            },
            effect="All ranks wait at each checkpoint until it is written.",
            fix=f"Use another directory, or check the load and the mount of {one.path} on {_names(faulty)}:\n"
            f"iostat -x 1 3\nfindmnt -T {shlex.quote(one.path)}",
        )


def _exclude(job: Job, faulty: Sequence[LocalRanks]) -> dict[str, object]:
    some = len(faulty) < len(job.hosts)
    return {"exclude": [host.name for local in faulty for host in local.hosts]} if some else {}


def _names(faulty: Sequence[LocalRanks]) -> str:
    more = f" and {len(faulty) - _SHOWN} more hosts" if len(faulty) > _SHOWN else ""
    return ", ".join(local.name for local in faulty[:_SHOWN]) + more


def _ranks(faulty: Sequence[LocalRanks]) -> tuple[int, ...]:
    return tuple(sorted(rank for local in faulty for rank in local.ranks))
