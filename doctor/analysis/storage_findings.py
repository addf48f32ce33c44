"""What is said of directories that probes wrote to: which hosts can't, do not see the others' files, or are slow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from doctor.analysis.storage_speed import (
    NO_ANSWER,
    UNTRIED,
    SlowStorage,
    SplitDirectory,
    failed_trials,
    hosts_at,
    silent_readings,
    split_directories,
)
from doctor.core.facts import StorageSpeedFacts
from doctor.core.finding import Finding, Severity, Unknown
from doctor.core.job import Job, LocalRanks

_SHOWN = 8
"""Groups, readings and names that a finding shows."""


def storage_findings(
    job: Job,
    words: Mapping[str, str],
    sayings: Mapping[str, str],
    severity_of: Callable[[LocalRanks], Severity],
    slow: Iterable[SlowStorage],
) -> Iterator[Finding | Unknown]:
    """Everything that is wrong with what was tried, and what could not be tried. ``words``: the roles of directories
    that are judged; ``sayings``: what errors of the system mean; ``severity_of``: that of a host that has a checkpoint
    directory of its own; ``slow``: as :func:`doctor.analysis.storage_speed.slow_storage` finds it."""
    yield from _untried(job)
    yield from _unwritten(job, words, sayings)
    yield from _unread(job)
    yield from _scattered_files(job, severity_of)
    yield from _slow_directories(job, slow, words)


def _untried(job: Job) -> Iterator[Unknown]:
    """Hosts of which nothing is known, though they were to measure."""
    for local in job.by_host():
        missing = local.hosts[0].missing(StorageSpeedFacts)
        if missing is not None and missing.is_breakage:
            yield Unknown(f"nothing was written to the directories: {missing.reason}", local.ranks)
    for local, trial in failed_trials(job):
        if (trial.error or "").startswith(UNTRIED):
            yield Unknown(f"nothing was written to {trial.path}: {trial.error}", local.ranks)


def _unwritten(job: Job, words: Mapping[str, str], sayings: Mapping[str, str]) -> Iterator[Finding]:
    """Directories to which nothing could be written, and why."""
    found: dict[tuple[str, str, str], list[LocalRanks]] = {}
    for local, trial in failed_trials(job):
        if trial.role in words and not (trial.error or "").startswith(UNTRIED):
            found.setdefault((trial.role, trial.path, trial.error or ""), []).append(local)
    for (role, path, error), locals_ in found.items():
        answers = not error.startswith(NO_ANSWER)
        meaning = sayings.get(error, f"can't be written to: {error}") if answers else f"does not answer: {error}"
        yield Finding(
            f"the {words[role]} directory {path} {meaning}, as {_names(locals_)} found by writing a file",
            ranks=_ranks(locals_),
            severity=Severity.WARNING if role == "nccl-debug" else Severity.ERROR,
            evidence={"path": path, "error": error, **({} if answers else _exclude(job, locals_))},
            fix=f"on {_names(locals_)}: ls -ld {path}; df -h {path}; df -i {path}; quota -s; findmnt -T {path}",
        )


def _unread(job: Job) -> Iterator[Finding]:
    """Hosts to which a directory does not answer when they read what another one wrote."""
    for local, reading in silent_readings(job):
        yield Finding(
            f"the directory {reading.path} does not answer on {local.name}: a file of {reading.writer} can't be read",
            ranks=local.ranks,
            severity=Severity.ERROR,
            evidence={"path": reading.path, "writer": reading.writer, **_exclude(job, [local])},
            fix=f"on {local.name}: timeout 5 ls {reading.path}; findmnt -T {reading.path}: mount it again",
        )


def _scattered_files(job: Job, severity_of: Callable[[LocalRanks], Severity]) -> Iterator[Finding]:
    """Directories of which hosts have their own, by what they did not see of one another's files."""
    hosts = hosts_at(job)
    for apart in split_directories(job):
        blamed = [hosts[place] for place in apart.places]
        if blamed:
            yield Finding(
                f"the checkpoint directory {apart.path} is each host's own: {_claim(apart, blamed)}",
                ranks=_ranks(blamed),
                severity=max(map(severity_of, blamed), key=lambda severity: severity.weight),
                evidence=_of_split_directory(apart, hosts),
                fix=f"on {_names(blamed)}: findmnt -T {apart.path}: mount there what the other hosts have"
                if _some_share(apart)
                else "name a directory on a file system that all hosts mount (NFS, Lustre, GPFS …)",
            )


def _some_share(apart: SplitDirectory) -> bool:
    return any(len(set(group) - set(apart.places)) > 1 for group in apart.groups)


def _claim(apart: SplitDirectory, blamed: Sequence[LocalRanks]) -> str:
    if not _some_share(apart):
        return "none sees the file that another one wrote"
    return f"{_names(blamed)} and the other hosts do not see one another's files"


def _of_split_directory(apart: SplitDirectory, hosts: Mapping[int, LocalRanks]) -> dict[str, object]:
    return {
        "path": apart.path,
        "hosts_that_share": [[hosts[place].name for place in group[:_SHOWN]] for group in apart.groups[:_SHOWN]],
        "not_seen": {
            f"{reader} reads {one.writer}": one.error or one.outcome for reader, one in apart.readings[:_SHOWN]
        },
    }


def _slow_directories(job: Job, slow: Iterable[SlowStorage], words: Mapping[str, str]) -> Iterator[Finding]:
    """Directories that are slow on some hosts, or on all."""
    hosts = hosts_at(job)
    for one in slow:
        blamed = [hosts[place] for place in one.places]
        usual = "" if one.usual is None else f", on the other hosts {one.usual:.2g} s"
        of_each = " of each" if len(blamed) > 1 else ""
        yield Finding(
            f"the {words.get(one.role, one.role)} directory {one.path} is slow on {_names(blamed)}: "
            f"{one.bytes / (1 << 20):.0f} MiB{of_each} took {one.seconds:.2g} s{usual}",
            ranks=_ranks(blamed),
            severity=Severity.WARNING,
            evidence={
                "path": one.path,
                "bytes": one.bytes,
                "seconds": round(one.seconds, 3),
                "of_these_fsync_seconds": round(one.sync_seconds, 3),
                "megabytes_per_second": round(one.bytes / one.seconds / 1e6, 2) if one.seconds else None,
                "usual_seconds": None if one.usual is None else round(one.usual, 3),
                **({} if one.usual is None else _exclude(job, blamed)),
            },
            effect="a checkpoint stops all ranks until the slowest has written its part.",
            fix=f"on {_names(blamed)}: iostat -x 1 3; nfsiostat 1 3; findmnt -T {one.path}; or name another directory",
        )


def _exclude(job: Job, blamed: Sequence[LocalRanks]) -> dict[str, object]:
    """The hosts to do without, where the others are well."""
    some = len(blamed) < len(job.hosts)
    return {"exclude": [host.name for local in blamed for host in local.hosts]} if some else {}


def _names(blamed: Sequence[LocalRanks]) -> str:
    more = f" and {len(blamed) - _SHOWN} more hosts" if len(blamed) > _SHOWN else ""
    return ", ".join(local.name for local in blamed[:_SHOWN]) + more


def _ranks(blamed: Sequence[LocalRanks]) -> tuple[int, ...]:
    return tuple(sorted(rank for local in blamed for rank in local.ranks))
