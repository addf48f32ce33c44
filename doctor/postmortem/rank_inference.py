"""Ranks that no line names, inferred from the other logs of the run.

Sources, from strong to weak: local and global ranks that torchrun's table pairs; numbers in the names of files, pods or
containers that count from 0; the only process that torchrun's table lists as failed. An inference that
any line contradicts is dropped.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

import msgspec

from doctor.analysis.logs.root_event import LaterEvents, cause_in_chain, exceptions
from doctor.core.facts import Event, LogEvidence, LogFile
from doctor.postmortem.filenames import name_series
from doctor.postmortem.logs.rank_attribution import rank_of_name
from doctor.postmortem.logs.rank_sections import exit_failures, stated_world_size

_K = TypeVar("_K", bound=Hashable)
APART = 600.0
"""Minimum seconds between the beginnings of logs that are not of the ranks of one run, which start together."""
_LAUNCHERS = ("elastic.", "exit.", "slurm.", "mpi.")
"""Kinds of messages of launchers, whose output is not that of one rank."""


def with_inferred_ranks(
    events: Sequence[Event], files: Iterable[LogFile]
) -> tuple[Sequence[Event], tuple[LogFile, ...]]:
    """Return the events and files of one run, with the ranks that could be inferred."""
    files = tuple(files)
    if all(event.rank is not None for event in events):
        return events, files
    evidence = LogEvidence(events=tuple(events), files=files)
    size = stated_world_size(evidence)
    first = _first_rank(events)
    local = {file.path: number for file in files if (number := rank_of_name(file.path)[1]) is not None}
    labeled = (event for event in events if event.local_rank is not None and event.file not in local)
    if local and any(map(_is_own, labeled)):
        # torchrun --tee: these files repeat lines that have a rank.
        return _with_failed_rank(evidence), files
    by_file = _of_local_ranks(events, local, size, first) or _of_files(events, files, size)
    by_host = {} if by_file else _of_hosts(events, files, size)
    if by_file or by_host or first is not None:
        events = [_with_rank(_with_local_rank(event, first), by_file, by_host) for event in events]
        files = tuple(_with_ranks(file, by_file, by_host) for file in files)
        evidence = LogEvidence(events=tuple(events), files=files)
    return _with_failed_rank(evidence), files


def _first_rank(events: Iterable[Event]) -> int | None:
    """Return the first rank of the only host, from processes whose rank and local rank are both known."""
    known = [one for one in events if one.local_rank is not None]
    firsts = {one.rank - (one.local_rank or 0) for one in known if one.rank is not None}
    hosts = {one.host for one in known if one.host not in (None, "localhost")}
    return firsts.pop() if len(firsts) == 1 and len(hosts) <= 1 else None


def _with_local_rank(event: Event, first: int | None) -> Event:
    if event.rank is not None or event.local_rank is None or first is None:
        return event
    return msgspec.structs.replace(event, rank=first + event.local_rank)


def _with_rank(event: Event, by_file: Mapping[str, int], by_host: Mapping[str, int]) -> Event:
    if event.rank is not None or not _is_own(event):
        return event
    rank = by_file.get(event.file, by_host.get(event.host or ""))
    return event if rank is None else msgspec.structs.replace(event, rank=rank)


def _is_own(event: Event) -> bool:
    """Return whether a rank logged the event, not its launcher."""
    return not event.kind.startswith(_LAUNCHERS)


def _with_ranks(file: LogFile, by_file: Mapping[str, int], by_host: Mapping[str, int]) -> LogFile:
    found = {by_file[file.path]} if file.path in by_file else {by_host[one] for one in file.hosts if one in by_host}
    return msgspec.structs.replace(file, ranks=tuple(sorted(found))) if found and not file.ranks else file


def _of_local_ranks(
    events: Iterable[Event], local: Mapping[str, int], size: int | None, first: int | None
) -> dict[str, int]:
    """Return the ranks of the files of torchrun's ``--log-dir``, by their local ranks.

    Without a process whose both ranks are known, the first rank is 0, unless a line shows that the run has more ranks
    than the host.
    """
    if not local:
        return {}
    count = max(local.values()) + 1
    is_alone = (size is None or size <= count) and all((event.rank or 0) < count for event in events)
    begin = 0 if first is None and is_alone else first
    return {} if begin is None else {path: begin + number for path, number in local.items()}


def _of_files(events: Sequence[Event], files: Iterable[LogFile], size: int | None) -> dict[str, int]:
    """Return the rank of each file if every file has the output of one rank."""
    begins = [file.first_at for file in files if file.first_at is not None]
    if begins and max(begins) - min(begins) > APART:
        return {}  # parts of a log, one after the other
    found = name_series(file.path for file in files)
    own = {file.path: {*file.ranks} for file in files}
    for event in events:
        if event.local_rank is not None or event.kind.startswith("elastic."):
            found.pop(event.file, None)  # the output of a launcher, or of several ranks
    return _if_consistent(found, own, size)


def _of_hosts(events: Sequence[Event], files: Iterable[LogFile], size: int | None) -> dict[str, int]:
    """Return the rank of each pod or container if each of them runs one rank."""
    own: dict[str, set[int]] = {host: set() for file in files for host in file.hosts}
    for event in events:
        # A line with the id of the process is one of NCCL or of the host's journal: the host may have other ranks.
        if event.local_rank is not None or (event.host and event.pid is not None and size is None):
            return {}
        if event.host:
            own.setdefault(event.host, set()).update(() if event.rank is None else (event.rank,))
    return _if_consistent(name_series(own), own, size)


def _if_consistent(found: dict[_K, int], own: Mapping[_K, set[int]], size: int | None) -> dict[_K, int]:
    """Return the inferred ranks unless a line names another rank or another number of ranks."""
    ranks = {*found.values()}
    is_whole = bool(ranks) and size in (None, max(ranks) + 1)
    is_own = all(own.get(key, set()) <= {rank} for key, rank in found.items())
    others = {rank for key, named in own.items() if key not in found for rank in named}
    return found if is_whole and is_own and others <= ranks else {}


def _with_failed_rank(evidence: LogEvidence) -> Sequence[Event]:
    """Attribute the exception that no line gives a rank to the only rank that torchrun lists as failed."""
    aftermath = LaterEvents(evidence)
    raised = exceptions(evidence)
    alone = [event for event in raised if event.rank is None and not aftermath.outlived(event)]
    failed = {rank for rank, failure in exit_failures(evidence).items() if failure.kind == "exit code"}
    failed |= {event.rank for event in evidence.of("elastic.failed") if event.rank is not None}
    if not alone or len(failed) != 1 or any(event.rank in failed for event in raised):
        return evidence.events
    cause, (rank,) = cause_in_chain(alone), failed
    place = cause.file, cause.line
    return [
        msgspec.structs.replace(event, rank=rank) if event.rank is None and (event.file, event.line) == place else event
        for event in evidence.events
    ]
