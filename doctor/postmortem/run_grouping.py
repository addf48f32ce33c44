"""Which of the files that were given belong to one run.

Files of several runs must not be read as one: a failure of one job would become the cause of another job's. What
speaks for one run, from strong to weak: the id of a job or of a torchrun agent, a communicator or a process that two
files name, the two streams of one process, names that differ by rank, host or process alone, and complementary ranks of
one folder and time. What speaks against it: different ids, times that are far apart, a rank that writes to both. A log
that tells of a run by itself (it has steps, an end or an exception) and is bound to no other is a run of its own;
kernel logs, tables and dumps are no runs: they go to the run that they are nearest to.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from doctor.core.facts import Event, LogFile

APART = 600.0
"""Seconds between the last line of one log and the first one of another from which on they are of different runs: the
processes of a run start together."""
SMALL = 1000
"""Numbers in names from which on they are taken for ids of jobs, not for those of ranks or hosts."""

Link = tuple[str, ...]
Span = tuple[float, float]


class RunIdentity(NamedTuple):
    """What one file tells of the run that left it. ``ids``: of jobs; ``links``: what only one run has; ``is_run``: it
    tells of a run by itself."""

    path: Path
    ids: frozenset[Link] = frozenset()
    links: frozenset[Link] = frozenset()
    ranks: frozenset[int] = frozenset()
    hosts: frozenset[str] = frozenset()
    span: Span | None = None
    is_run: bool = False


_IN_NAME = re.compile(
    r"(?:^|[^a-z0-9])(?P<scheme>slurm|job(?:[-_]?id)?|pbs|lsf|sge)[-_.]?(?P<id>\d{1,12}(?:_\d{1,7})?)(?!\d)",
    re.IGNORECASE,
)
_IN_TEXT = re.compile(r"\b(?:JOB |job |JobI[dD]=|jobid[ =]|StepI[dD]=|STEP )(?P<id>\d{1,12})\b")
_AGENT = re.compile(r"(?:^|/)(?P<id>[^/]{1,200}_[a-z0-9_]{8})/attempt_\d{1,4}/")
"""The folder that torchrun --log-dir makes for a run: its id and eight random letters."""
_BY_ITSELF = ("python.", "elastic.", "pl.", "hf.", "mark.step", "mark.end")
"""Kinds of messages that come from the training program or its launcher."""


def identity_of(path: Path, events: Iterable[Event], file: LogFile) -> RunIdentity:
    """What a log tells of its run."""
    own = list(events)
    span = (file.first_at, file.last_at) if file.first_at is not None and file.last_at is not None else None
    return RunIdentity(
        path,
        ids=ids_in_path(path) | {("job", found["id"]) for event in own for found in _jobs_in(event)},
        links=frozenset(link for event in own for link in _links_in(event)),
        ranks=frozenset(file.ranks),
        hosts=frozenset(event.host for event in own if event.host),
        span=span,
        is_run=any(event.kind.startswith(_BY_ITSELF) for event in own),
    )


def ids_in_path(path: Path) -> frozenset[Link]:
    """The id of a job counts in the last part of the path that names one: folders may bear those of others."""
    for part in reversed(path.parts):
        if found := _IN_NAME.search(part):
            return frozenset({("job", found["id"])})
    found = _AGENT.search(path.as_posix())
    return frozenset({("agent", found["id"])}) if found else frozenset()


def _jobs_in(event: Event) -> Iterable[re.Match[str]]:
    return _IN_TEXT.finditer(event.text) if event.kind.startswith("slurm.") else ()


def _links_in(event: Event) -> Iterable[Link]:
    communicator = event.value("commid")
    if communicator:
        yield ("communicator", communicator)
    if event.host and event.pid is not None:
        yield ("process", event.host, str(event.pid))


def group_by_run(traces: Sequence[RunIdentity]) -> list[list[int]]:
    """The places of the traces, by run, in the order in which they were given."""
    groups = _RunGroups(traces)
    groups.join_same(lambda trace: trace.ids)
    groups.join_same(lambda trace: trace.links)
    groups.join_same(lambda trace: [(_without_stream(trace.path),)])
    groups.join_alike(lambda trace: _series(trace.path))
    groups.join_alike(lambda trace: str(trace.path.parent) if trace.ranks and trace.span else None)
    groups.attach()
    return groups.in_order()


class _RunGroup:
    """Files of one run, as far as is known."""

    def __init__(self, place: int, trace: RunIdentity) -> None:
        self.places = [place]
        self.ids = {*trace.ids}
        self.ranks = {*trace.ranks}
        self.hosts = {*trace.hosts}
        self.span = trace.span
        self.is_run = trace.is_run
        self.folders = {trace.path.parent}

    def may_be_of(self, other: _RunGroup) -> bool:
        """Whether nothing speaks against one run: not its ids, nor its time."""
        if any(mine[0] == theirs[0] for mine in self.ids for theirs in other.ids) and not self.ids & other.ids:
            return False
        if self.span is None or other.span is None or self.ids & other.ids:
            return True
        return max(self.span[0], other.span[0]) - min(self.span[1], other.span[1]) <= APART

    def take(self, other: _RunGroup) -> None:
        """Add the files of another one."""
        self.places += other.places
        self.ids |= other.ids
        self.ranks |= other.ranks
        self.hosts |= other.hosts
        self.folders |= other.folders
        self.is_run = self.is_run or other.is_run
        spans = [one for one in (self.span, other.span) if one is not None]
        self.span = (min(begin for begin, _ in spans), max(end for _, end in spans)) if spans else None

    def nearness(self, other: _RunGroup) -> tuple[int, int]:
        """How near another one is: hosts that both name, and folders above both."""
        common = max(_common(mine, theirs) for mine in self.folders for theirs in other.folders)
        return len(self.hosts & other.hosts), common


def _common(one: Path, other: Path) -> int:
    return sum(1 for _ in _while_equal(one.parts, other.parts))


def _while_equal(one: Sequence[str], other: Sequence[str]) -> Iterable[str]:
    for mine, theirs in zip(one, other, strict=False):
        if mine != theirs:
            return
        yield mine


class _RunGroups:
    """Files while they are put together."""

    def __init__(self, traces: Sequence[RunIdentity]) -> None:
        self._traces = traces
        self._group = [_RunGroup(place, trace) for place, trace in enumerate(traces)]

    def join_same(self, keys: Callable[[RunIdentity], Iterable[Link]]) -> None:
        """Put together what has a key in common, unless something speaks against it."""
        first: dict[Link, int] = {}
        for place, trace in enumerate(self._traces):
            for key in keys(trace):
                self._join(first.setdefault(key, place), place)

    def join_alike(self, key: Callable[[RunIdentity], str | None]) -> None:
        """Put together what has the same key, other ranks, and nothing that speaks against it."""
        buckets: dict[str, list[int]] = {}
        for place, trace in enumerate(self._traces):
            name = key(trace)
            if name is not None:
                buckets.setdefault(name, []).append(place)
        for places in buckets.values():
            self._fold(places)

    def _fold(self, places: Iterable[int]) -> None:
        leaders: list[int] = []
        for place in places:
            group = self._group[place]
            for leader in leaders:
                there = self._group[leader]
                if there is group or (not there.ranks & group.ranks and self._join(leader, place)):
                    break
            else:
                leaders.append(place)

    def _join(self, one: int, other: int) -> bool:
        into, away = self._group[one], self._group[other]
        if into is away:
            return True
        if not into.may_be_of(away):
            return False
        if len(into.places) < len(away.places):
            into, away = away, into
        into.take(away)
        for place in away.places:
            self._group[place] = into
        return True

    def attach(self) -> None:
        """Give what is no run by itself to the run that it is nearest to; where there are several, or none, it stays
        with what is like it."""
        runs = [group for group in self._distinct() if group.is_run]
        rest = [group for group in self._distinct() if not group.is_run]
        for group in rest:
            near = [(run.nearness(group), run) for run in runs or rest[:1] if run is not group and run.may_be_of(group)]
            best = max((nearness for nearness, _ in near), default=None)
            nearest = [run for nearness, run in near if nearness == best]
            if len(nearest) == 1:
                self._join(nearest[0].places[0], group.places[0])

    def _distinct(self) -> list[_RunGroup]:
        return list({id(group): group for group in self._group}.values())

    def in_order(self) -> list[list[int]]:
        """The places by group, the first ones first."""
        return [sorted(group.places) for group in sorted(self._distinct(), key=lambda group: min(group.places))]


_STREAM = re.compile(r"(?:^|(?<=[-_./]))(?:stdout|stderr|std|out|err|output|error|log|txt)(?=$|[-_./])", re.IGNORECASE)
_OF_RUNS = re.compile(
    r"(?:^|(?<=[^a-z]))(?P<word>runs?|exp|experiment|trial|seed|version|job|sweep|fold|try)(?P<gap>[-_.]?)(?P<n>\d+)",
    re.IGNORECASE,
)
_NUMBER = re.compile(r"\d+")


def _without_stream(path: Path) -> str:
    """The path without what says which stream of a process a file holds, and without its ending."""
    return _STREAM.sub("", path.with_suffix("").as_posix() if _STREAM.search(path.suffix[1:]) else path.as_posix())


def _series(path: Path) -> str | None:
    """The path with its numbers left out, where these are of ranks, hosts or processes; ``None`` without any number."""
    text = _without_stream(path)
    kept = _OF_RUNS.sub(lambda found: f"{found['word']}{found['gap']}\0{found['n'].translate(_LETTERS)}", text)
    numbers = _NUMBER.findall(kept)
    if not numbers or any(len(number) > 9 or int(number) >= SMALL for number in numbers):
        return None
    return _NUMBER.sub("#", kept)


_LETTERS = str.maketrans("0123456789", "abcdefghij")
"""Digits that are kept, while others are left out."""


def name_of_run(traces: Sequence[RunIdentity]) -> str:
    """A word for a run: its job, else its only file, else the folder of its files."""
    jobs = sorted({link[1] for trace in traces for link in trace.ids if link[0] == "job"})
    if len(jobs) == 1:
        return f"job {jobs[0]}"
    if len(traces) == 1:
        return traces[0].path.name
    folders = {trace.path.parent for trace in traces}
    parts = _shared(folders)
    return parts or traces[0].path.name


def _shared(folders: Iterable[Path]) -> str:
    first, *rest = folders
    parts: Sequence[str] = first.parts
    for folder in rest:
        parts = list(_while_equal(parts, folder.parts))
    return str(Path(*parts)) if parts else ""


def names_of_runs(runs: Iterable[Sequence[RunIdentity]]) -> list[str]:
    """A word for each run, no two alike."""
    names: list[str] = []
    seen: dict[str, int] = {}
    for traces in runs:
        name = name_of_run(traces)
        seen[name] = seen.get(name, 0) + 1
        names.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return names
