"""Grouping of input files by run.

Files of several runs must not be mixed: a failure of one job would become the cause of another's. Evidence for one run,
from strong to weak: the id of a job or of a torchrun agent, a communicator or a process named in both files, the two
streams of one process, names that differ only by rank, host or process, and complementary ranks of one folder and time.
Evidence against it: different ids, times far apart, a rank that writes to both. A log of a training program (with
steps, an end or an exception) that joins no other file is a run of its own; kernel logs, tables and dumps are assigned
to the nearest run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from doctor.core.facts import Event, LogFile
from doctor.postmortem.filenames import STREAM, without_ids

APART = 600.0
"""Minimum seconds between the end of one log and the start of another if they are of different runs: the processes of a
run start together."""

Link = tuple[str, ...]
Span = tuple[float, float]


class RunIdentity(NamedTuple):
    """The properties of a file that identify its run.

    ``ids``: of jobs; ``links``: values unique to one run; ``is_run``: the log of a training program or its launcher;
    ``is_launcher``: torchrun's agent logged to it.
    """

    path: Path
    ids: frozenset[Link] = frozenset()
    links: frozenset[Link] = frozenset()
    ranks: frozenset[int] = frozenset()
    hosts: frozenset[str] = frozenset()
    span: Span | None = None
    is_run: bool = False
    is_launcher: bool = False


_IN_NAME = re.compile(
    r"(?:^|[^a-z0-9])(?P<scheme>slurm|job(?:[-_]?id)?|pbs|lsf|sge)[-_.]?(?P<id>\d{1,12}(?:_\d{1,7})?)(?!\d)",
    re.IGNORECASE,
)
_IN_TEXT = re.compile(r"\b(?:JOB |job |JobI[dD]=|jobid[ =]|StepI[dD]=|STEP )(?P<id>\d{1,12})\b")
_AGENT = re.compile(r"(?:^|/)(?P<id>[^/]{1,200}_[a-z0-9_]{8})/attempt_\d{1,4}/")
"""The folder of a run under torchrun --log-dir: its id and eight random letters."""
_BY_ITSELF = ("python.", "elastic.", "pl.", "hf.", "mark.step")
"""Kinds of messages of a training program or its launcher."""
_END = "mark.end"
"""The kind of the last line of a run, which the log of a batch script may contain alone."""


def identity_of(path: Path, events: Iterable[Event], file: LogFile) -> RunIdentity:
    """Return the identity of a log."""
    own = list(events)
    span = (file.first_at, file.last_at) if file.first_at is not None and file.last_at is not None else None
    return RunIdentity(
        path,
        ids=ids_in_path(path)
        | {
            ("job", found["id"])
            for event in own
            if event.kind.startswith("slurm.")
            for found in _IN_TEXT.finditer(event.text)
        },
        links=frozenset(link for event in own for link in _links_in(event)),
        ranks=frozenset(file.ranks),
        hosts=frozenset(event.host for event in own if event.host),
        span=span,
        is_run=any(event.kind.startswith(_BY_ITSELF) for event in own)
        or ((bool(file.ranks) or span is not None) and any(event.kind == _END for event in own)),
        is_launcher=any(event.kind.startswith("elastic.") for event in own),
    )


def ids_in_path(path: Path) -> frozenset[Link]:
    """Return the id of the job or torchrun agent in a path; its last part with an id counts."""
    for part in reversed(path.parts):
        if found := _IN_NAME.search(part):
            return frozenset({("job", found["id"])})
    found = _AGENT.search(path.as_posix())
    return frozenset({("agent", found["id"])}) if found else frozenset()


def _links_in(event: Event) -> Iterable[Link]:
    communicator = event.value("commid")
    if communicator:
        yield ("communicator", communicator)
    if event.host and event.pid is not None:
        yield ("process", event.host, str(event.pid))


def group_by_run(files: Sequence[RunIdentity]) -> list[list[int]]:
    """Return the indices of the files of each run, in their given order."""
    groups = _RunGroups(files)
    groups.join_same(lambda file: file.ids)
    groups.join_same(lambda file: file.links)
    groups.join_same(lambda file: [(_without_stream(file.path),)])
    # Numbers in the folders that all files share, such as a year, do not tell runs apart.
    common = len(_shared({file.path.parent for file in files}))
    groups.join_complementary(lambda file: _series(Path(*file.path.parts[common:])))
    groups.join_complementary(lambda file: str(file.path.parent) if file.ranks and file.span else None)
    groups.join_agents()
    groups.attach()
    return groups.in_order()


class _RunGroup:
    def __init__(self, place: int, file: RunIdentity) -> None:
        self.places = [place]
        self.ids = {*file.ids}
        self.ranks = {*file.ranks}
        self.hosts = {*file.hosts}
        self.span = file.span
        self.is_run = file.is_run
        self.is_launcher = file.is_launcher
        self.folders = {file.path.parent}

    def may_join(self, other: _RunGroup) -> bool:
        """Return whether neither ids nor times show that the groups are of different runs."""
        if any(mine[0] == theirs[0] for mine in self.ids for theirs in other.ids) and not self.ids & other.ids:
            return False
        if self.span is None or other.span is None or self.ids & other.ids:
            return True
        return max(self.span[0], other.span[0]) - min(self.span[1], other.span[1]) <= APART

    def take(self, other: _RunGroup) -> None:
        """Add the files of another group."""
        self.places += other.places
        self.ids |= other.ids
        self.ranks |= other.ranks
        self.hosts |= other.hosts
        self.folders |= other.folders
        self.is_run = self.is_run or other.is_run
        self.is_launcher = self.is_launcher or other.is_launcher
        spans = [one for one in (self.span, other.span) if one is not None]
        self.span = (min(begin for begin, _ in spans), max(end for _, end in spans)) if spans else None

    @property
    def is_agent(self) -> bool:
        """Whether the group has files that torchrun --log-dir wrote."""
        return any(link[0] == "agent" for link in self.ids)

    def launched(self, agent: _RunGroup) -> bool:
        """Return whether this may be the log of the launcher of an agent's files: by its messages, or by all ranks at
        the same time.
        """
        if self.span is None or agent.span is None:
            return self.is_launcher
        overlap = max(self.span[0], agent.span[0]) <= min(self.span[1], agent.span[1])
        return overlap and (self.is_launcher or (bool(agent.ranks) and agent.ranks <= self.ranks))

    def nearness(self, other: _RunGroup) -> tuple[int, int]:
        """Return the number of common hosts, and the depth of the deepest common folder."""
        common = max(len(_shared([mine, theirs])) for mine in self.folders for theirs in other.folders)
        return len(self.hosts & other.hosts), common


def _shared(folders: Iterable[Path]) -> Sequence[str]:
    """Return the leading parts that all folders have in common."""
    columns = zip(*(folder.parts for folder in folders), strict=False)
    return [names[0] for names in takewhile(lambda names: len(set(names)) == 1, columns)]


class _RunGroups:
    """The groups while files are joined. ``_group``: the group of each file."""

    def __init__(self, files: Sequence[RunIdentity]) -> None:
        self._files = files
        self._group = [_RunGroup(place, file) for place, file in enumerate(files)]

    def join_same(self, keys: Callable[[RunIdentity], Iterable[Link]]) -> None:
        """Join files with a common key, unless they are shown to be of different runs."""
        first: dict[Link, int] = {}
        for place, file in enumerate(self._files):
            for key in keys(file):
                self._join(first.setdefault(key, place), place)

    def join_complementary(self, key: Callable[[RunIdentity], str | None]) -> None:
        """Join files with the same key and different ranks, unless their runs differ."""
        buckets: dict[str, list[int]] = {}
        for place, file in enumerate(self._files):
            name = key(file)
            if name is not None:
                buckets.setdefault(name, []).append(place)
        for places in buckets.values():
            leaders: list[int] = []
            for place in places:
                if not any(self._complement(leader, place) for leader in leaders):
                    leaders.append(place)

    def _complement(self, leader: int, place: int) -> bool:
        there, group = self._group[leader], self._group[place]
        return there is group or (not there.ranks & group.ranks and self._join(leader, place))

    def _join(self, one: int, other: int) -> bool:
        into, away = self._group[one], self._group[other]
        if into is away:
            return True
        if not into.may_join(away):
            return False
        if len(into.places) < len(away.places):
            into, away = away, into
        into.take(away)
        for place in away.places:
            self._group[place] = into
        return True

    def join_agents(self) -> None:
        """Join the files of torchrun --log-dir with the log of the launcher, which repeats their lines under --tee."""
        runs = [group for group in self._distinct() if group.is_run and not group.is_agent]
        for group in [group for group in self._distinct() if group.is_agent and not group.is_launcher]:
            self._join_nearest(group, [run for run in runs if run.launched(group)])

    def attach(self) -> None:
        """Assign groups that are not runs to their nearest run, if there is a unique one."""
        runs = [group for group in self._distinct() if group.is_run]
        rest = [group for group in self._distinct() if not group.is_run]
        for group in rest:
            self._join_nearest(group, [run for run in runs or rest[:1] if run is not group])

    def _join_nearest(self, group: _RunGroup, candidates: Iterable[_RunGroup]) -> None:
        """Join a group with the nearest of the candidates that it may join, if there is a unique one."""
        near = [(one.nearness(group), one) for one in candidates if one.may_join(group)]
        best = max((nearness for nearness, _ in near), default=None)
        nearest = [one for nearness, one in near if nearness == best]
        if len(nearest) == 1:
            self._join(nearest[0].places[0], group.places[0])

    def _distinct(self) -> list[_RunGroup]:
        return list({id(group): group for group in self._group}.values())

    def in_order(self) -> list[list[int]]:
        """Return the indices of each group, ordered by the first index."""
        return [sorted(group.places) for group in sorted(self._distinct(), key=lambda group: min(group.places))]


_OF_RUNS = re.compile(
    r"(?:^|(?<=[^a-z]))(?P<word>runs?|exp|experiment|trial|seed|version|job|sweep|fold|try)(?P<gap>[-_.]?)(?P<n>\d+)",
    re.IGNORECASE,
)
_NUMBER = re.compile(r"\d+")


def _without_stream(path: Path) -> str:
    """Return the path without random ids, and without the words and the ending that name a stream of a process."""
    name = without_ids(path.as_posix())
    stem, dot, ending = name.rpartition(".")
    return STREAM.sub("", stem if dot and STREAM.fullmatch(ending) else name)


def _series(path: Path) -> str | None:
    """Return the path without numbers of ranks, hosts or processes; ``None`` without such a number.

    Kubeflow's pods are ``train-master-0`` and ``train-worker-0``, which has rank 1.
    """
    text = _ROLE.sub("", _without_stream(path))
    kept = _OF_RUNS.sub(lambda found: f"{found['word']}{found['gap']}\0{found['n'].translate(_LETTERS)}", text)
    kept = _OF_JOBS.sub(lambda found: found[0].translate(_LETTERS), kept)
    return _NUMBER.sub("#", kept) if _NUMBER.search(kept) else None


_ROLE = re.compile(r"(?<=[-_./])(?:master|worker)(?=[-_.]?\d)")
_OF_JOBS = re.compile(r"(?<!\d)(?:\d{4,}(?:_\d+)?)(?!\d)")
"""Ids of jobs, and of the tasks of an array: ``%A_%a`` in the name of a SLURM output file."""
_LETTERS = str.maketrans("0123456789", "abcdefghij")
"""Encodes the digits that are kept."""


def _name_of_run(files: Sequence[RunIdentity]) -> str:
    """Return the name of a run: its job, else its only file, else the folder of its files."""
    jobs = {link[1] for file in files for link in file.ids if link[0] == "job"}
    if len(jobs) == 1:
        return f"job {jobs.pop()}"
    parts = _shared({file.path.parent for file in files}) if len(files) > 1 else ()
    return str(Path(*parts)) if parts else files[0].path.name


def names_of_runs(runs: Iterable[Sequence[RunIdentity]]) -> list[str]:
    """Return a unique name for each run."""
    names: list[str] = []
    seen: dict[str, int] = {}
    for files in runs:
        name = _name_of_run(files)
        seen[name] = seen.get(name, 0) + 1
        names.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return names
