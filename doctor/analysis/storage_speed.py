"""Measurements of directories by full probes: failed writes, files that other hosts do not see, slow writes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from doctor.analysis.stats.outliers import outliers
from doctor.core.facts import StorageFacts, StorageReading, StorageSpeedFacts, StorageTrial
from doctor.core.job import Job, LocalRanks

NO_ANSWER = "no answer"
"""The start of the error of a trial that timed out."""
UNTRIED = "not tried"
"""The start of an error of rankdoctor itself."""
SLOW_TIMES = 3.0
"""Factor over the duration on other hosts: healthy file systems differ by two between hosts."""
LEAST_SECONDS = 1.0
"""Seconds for a file of 8 MiB that do not matter."""
DEVIATIONS = 4.0
SLOW_BANDWIDTH = 5e6
"""Bytes per second of all hosts that share a directory: below it, a checkpoint of 1 GiB takes more than three minutes.
"""
LONG_SYNC = 5.0
"""Seconds until a few mebibytes are on the disk. Checkpoint writers call fsync for every file."""


class WriteResult(msgspec.Struct, frozen=True):
    """The best trial of a host in a path."""

    local: LocalRanks
    trial: StorageTrial

    @property
    def place(self) -> int:
        """The index of the host in ``Job.hosts``."""
        return self.local.hosts[0].index

    @property
    def seconds(self) -> float:
        """The time to write and sync the file."""
        return (self.trial.write_seconds or 0.0) + (self.trial.sync_seconds or 0.0)


class SlowStorage(msgspec.Struct, frozen=True):
    """Slow hosts of a directory (``places`` are indices in ``Job.hosts``): ``seconds`` of the slowest for ``bytes``.

    ``usual``: of the other hosts, ``None`` if all are slow."""

    path: str
    role: str
    places: tuple[int, ...]
    bytes: int
    seconds: float
    sync_seconds: float
    usual: float | None


class SplitDirectory(msgspec.Struct, frozen=True):
    """A directory whose files not all hosts see.

    ``places``: the faulty hosts (indices in ``Job.hosts``); ``groups``: hosts that see one another's files, the largest
    first; ``readings``: those that did not see an existing file, with the reader."""

    path: str
    places: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]
    readings: tuple[tuple[str, StorageReading], ...]


class _VisibilityTest(msgspec.Struct, frozen=True):
    reader: int
    writer: int
    seen: bool


def failed_trials(job: Job) -> Iterator[tuple[LocalRanks, StorageTrial]]:
    """Every failed write, with its host."""
    for local, facts in _measured(job):
        yield from ((local, trial) for trial in facts.trials if trial.error is not None)


def silent_readings(job: Job) -> Iterator[tuple[LocalRanks, StorageReading]]:
    """Every file of another host whose reading timed out, with the host that tried."""
    for local, facts in _measured(job):
        yield from ((local, one) for one in facts.readings if one.outcome == "silent")


def _measured(job: Job) -> Iterator[tuple[LocalRanks, StorageSpeedFacts]]:
    for local in job.by_host():
        if facts := local.find(StorageSpeedFacts):
            yield local, facts


def shared_paths(job: Job) -> dict[str, bool]:
    """Whether all hosts that read in a directory saw the others' files, by path."""
    found: dict[str, bool] = {}
    for _, facts in _measured(job):
        for one in facts.readings:
            if one.outcome != "silent":
                found[one.path] = found.get(one.path, True) and one.outcome == "whole"
    return found


def split_directories(job: Job) -> Iterator[SplitDirectory]:
    """The directories whose files some hosts do not see."""
    for path in (path for path, whole in shared_paths(job).items() if not whole):
        looks = visibility_tests(job, path)
        groups = _sharing_groups(looks)
        missed = tuple(
            (local.name, one)
            for local, facts in _measured(job)
            for one in facts.readings
            if one.path == path and one.outcome in ("absent", "other")
        )
        faulty = _faulty_hosts(looks)
        alone = tuple((place,) for place in faulty)
        sharing = tuple(kept for group in groups if (kept := tuple(one for one in group if one not in faulty)))
        yield SplitDirectory(path, faulty or sum(groups[1:], ()), (*sharing, *alone), missed)


def visibility_tests(job: Job, path: str) -> list[_VisibilityTest]:
    """Which host looked for whose file in a directory, unless the directory did not answer."""
    places = {local.name: place for place, local in hosts_at(job).items()}
    return [
        _VisibilityTest(local.hosts[0].index, places[one.writer], one.outcome == "whole")
        for local, facts in _measured(job)
        for one in facts.readings
        if one.path == path and one.outcome != "silent" and one.writer in places
    ]


def _faulty_hosts(looks: Sequence[_VisibilityTest]) -> tuple[int, ...]:
    """The fewest hosts that explain the missing files: hosts whose files no other saw, and hosts that saw no other's.

    None if the job is divided into groups that share files; all if no host saw any file."""
    if not any(look.seen for look in looks):
        return tuple(sorted({place for look in looks for place in (look.reader, look.writer)}))
    missed = [look for look in looks if not look.seen]
    hidden = {look.writer for look in missed} - {look.writer for look in looks if look.seen}
    blind = {look.reader for look in missed} - {look.reader for look in looks if look.seen}
    faulty: list[int] = []
    while missed:
        explains = Counter(
            place
            for look in missed
            for place in {look.reader, look.writer}
            if (place == look.writer and place in hidden) or (place == look.reader and place in blind)
        )
        if not explains:
            break
        faulty.append(max(explains, key=lambda place: (explains[place], place in hidden, -place)))
        missed = [look for look in missed if faulty[-1] not in (look.reader, look.writer)]
    return tuple(sorted(faulty))


def _sharing_groups(looks: Sequence[_VisibilityTest]) -> list[tuple[int, ...]]:
    """Hosts that see one another's files, the largest group first."""
    group_of = {place: {place} for look in looks for place in (look.reader, look.writer)}
    for look in looks:
        group, other = group_of[look.reader], group_of[look.writer]
        if look.seen and group is not other:
            group |= other
            group_of.update(dict.fromkeys(other, group))
    groups = {id(group): tuple(sorted(group)) for group in group_of.values()}
    return sorted(groups.values(), key=lambda group: (-len(group), group))


def slow_storage(
    job: Job,
    *,
    times: float = SLOW_TIMES,
    least: float = LEAST_SECONDS,
    deviations: float = DEVIATIONS,
    bandwidth: float = SLOW_BANDWIDTH,
    sync: float = LONG_SYNC,
) -> Iterator[SlowStorage]:
    """Hosts that are slower in a directory than the others, and directories that are slow from all hosts.

    The best trial of a host counts, so a single slow trial is not a fault."""
    shared = shared_paths(job)
    for path, written in _by_path(job).items():
        odd = {
            found.rank
            for found in outliers(
                {place: one.seconds for place, one in written.items()},
                share=times - 1,
                least=least,
                deviations=deviations,
            )
            if found.excess > 0 and len(written) > 2
        }
        rest = [one for place, one in written.items() if place not in odd]
        if odd:
            yield _slow(path, [written[place] for place in odd], rest)
        yield from _slow_for_all(path, rest, bandwidth, sync, together=shared.get(path) or _is_shared(path, rest))


def _by_path(job: Job) -> dict[str, dict[int, WriteResult]]:
    found: dict[str, dict[int, WriteResult]] = {}
    for local, facts in _measured(job):
        for trial in facts.trials:
            if trial.error is None:
                one, of_path = WriteResult(local, trial), found.setdefault(trial.path, {})
                if one.place not in of_path or one.seconds < of_path[one.place].seconds:
                    of_path[one.place] = one
    return found


def _is_shared(path: str, written: list[WriteResult]) -> bool:
    facts = (one.local.find(StorageFacts) for one in written)
    return any(folder.shared for one in facts if one for folder in one.directories if folder.path == path)


def _slow_for_all(
    path: str, written: list[WriteResult], bandwidth: float, sync: float, *, together: bool
) -> Iterator[SlowStorage]:
    """Hosts that write to one file system at the same time share its bandwidth; otherwise each has its own disk."""
    groups = [written] if together else [[one] for one in written]
    slow = [
        one
        for group in groups
        for one in group
        if sum(each.trial.bytes for each in group) < bandwidth * max(each.seconds for each in group)
        or (one.trial.sync_seconds or 0.0) > sync
    ]
    if slow:
        yield _slow(path, slow, [])


def _slow(path: str, slow: list[WriteResult], rest: list[WriteResult]) -> SlowStorage:
    worst = max(slow, key=lambda one: one.seconds)
    usual = sorted(one.seconds for one in rest)
    return SlowStorage(
        path,
        worst.trial.role,
        tuple(sorted(one.place for one in slow)),
        worst.trial.bytes,
        worst.seconds,
        worst.trial.sync_seconds or 0.0,
        usual[len(usual) // 2] if usual else None,
    )


def hosts_at(job: Job) -> Mapping[int, LocalRanks]:
    """The hosts by their index in ``Job.hosts``."""
    return {local.hosts[0].index: local for local in job.by_host()}
