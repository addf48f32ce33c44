"""All ranks of a job and what is known about each: the input of every check.

Equal sections are one object (:func:`build_job` sees to it), so a check that evaluates each *distinct* section costs
the same for 16,384 ranks of one image as for two.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any, Generic, NamedTuple, TypeVar, overload

import msgspec

from doctor.core.facts import HostFacts, LaunchFacts, LogEvidence, Missing, MissingReason, Origin, Section
from doctor.core.facts.section import harmless
from doctor.core.section_table import IdenticalRanks, Row, SectionTable
from doctor.core.text import hosts_text

S = TypeVar("S", bound=Section)
A = TypeVar("A", bound=Section)
B = TypeVar("B", bound=Section)
C = TypeVar("C", bound=Section)
K = TypeVar("K", bound=Hashable)

Sections = Mapping[str, "Section | Missing"]

UNKNOWN_HOST = "unknown host"
"""The host name of ranks whose host is unknown."""

NOT_ASKED = Missing(MissingReason.UNMEASURED, "not measured")
NOT_WATCHED = Missing(MissingReason.UNMEASURED, "needs the callback or doctor.watch() in the run")
NOT_CHOSEN = Missing(MissingReason.UNMEASURED, "no site profile was chosen")
NOT_IN_CAPTURE = Missing(MissingReason.HIDDEN, "the facts do not hold it", "collect again with this release")

_NOT_THERE: dict[Origin, Missing] = {
    "measured": NOT_ASKED,
    "watched": NOT_WATCHED,
    "chosen": NOT_CHOSEN,
    "collected": NOT_IN_CAPTURE,
}


class Group(tuple[K, tuple[int, ...]]):
    """Ranks that share a value; unpacks as ``value, ranks``.

    A subclass of ``tuple``, because Python 3.10 has no generic named tuples.
    """

    __slots__ = ()

    def __new__(cls, value: K, ranks: tuple[int, ...]) -> Group[K]:
        """Make a pair of both."""
        return super().__new__(cls, (value, ranks))

    @property
    def value(self) -> K:
        """The value that the ranks share."""
        return self[0]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that share it."""
        return self[1]


class SectionHolder:
    """A host or a rank, which has sections of facts."""

    __slots__ = ("sections",)

    def __init__(self, sections: Sections) -> None:
        self.sections = sections

    def find(self, section: type[S]) -> S | None:
        """The section of that type, or ``None`` if it is missing."""
        value = self.sections.get(section.key)
        return value if isinstance(value, section) else None

    def missing(self, section: type[Section]) -> Missing | None:
        """Why the section is missing, or ``None`` if it is present."""
        value = self.sections.get(section.key)
        if value is None:
            return _NOT_THERE[section.origin]
        return value if isinstance(value, Missing) else None


class Host(SectionHolder):
    """A host, identified by its boot id, its machine id and its host name."""

    __slots__ = ("boot_id", "index", "machine_id", "memo", "name")

    def __init__(
        self,
        name: str,
        boot_id: str | None = None,
        machine_id: str | None = None,
        sections: Sections | None = None,
        index: int = 0,
    ) -> None:
        super().__init__(sections or {})
        self.name = name if name == UNKNOWN_HOST else harmless(name)
        self.boot_id = boot_id
        self.machine_id = machine_id
        self.index = index
        self.memo: dict[Hashable, Any] = {}

    @property
    def identity(self) -> tuple[str | None, str | None, str]:
        """What distinguishes this host from others."""
        return (self.boot_id, self.machine_id, self.name)

    @property
    def machine(self) -> Hashable:
        """What distinguishes its machine from others; containers of one machine share it."""
        return self.boot_id or self.identity


class Rank(SectionHolder):
    """One process of the job.

    ``number`` is its global rank; two processes may claim the same one. If a host shows different parts of itself
    to its processes, a rank has the section of its own part (:meth:`doctor.core.facts.Section.part`). ``memo``:
    results of :func:`doctor.core.section_table.once_per_rank`.
    """

    __slots__ = ("host", "memo", "number")

    def __init__(self, number: int, host: Host, sections: Sections | None = None) -> None:
        super().__init__(sections or {})
        self.number = number
        self.host = host
        self.memo: dict[Hashable, Any] = {}

    def find(self, section: type[S]) -> S | None:
        """The section of that type, of the rank itself or of its host."""
        # Repeats SectionHolder.find instead of calling it: checks of a large job call this a million times.
        value = self.sections.get(section.key)
        if value is None:
            if section.level != "host":
                return None
            value = self.host.sections.get(section.key)
        return value if isinstance(value, section) else None

    def missing(self, section: type[Section]) -> Missing | None:
        """Why the section is missing, or ``None`` if it is present."""
        of_host = section.level == "host" and section.key not in self.sections
        return self.host.missing(section) if of_host else super().missing(section)

    @property
    def local_rank(self) -> int | None:
        """The local rank as the launcher states it."""
        launch = self.find(LaunchFacts)
        return launch.local_rank if launch else None


class LocalRanks:
    """The ranks of one host, or of one machine with several hosts (containers)."""

    def __init__(self, hosts: tuple[Host, ...], members: tuple[Rank, ...]) -> None:
        self.hosts = hosts
        self.members = members

    @functools.cached_property
    def name(self) -> str:
        """The host's name, or the names of the machine's hosts."""
        return ", ".join(dict.fromkeys(host.name for host in self.hosts))

    @functools.cached_property
    def ranks(self) -> tuple[int, ...]:
        """The numbers of the ranks."""
        return tuple(rank.number for rank in self.members)

    def find(self, section: type[S]) -> S | None:
        """A section of the host; for a machine, of its first host that has it."""
        first = self.hosts[0].sections.get(section.key)
        if isinstance(first, section):
            return first
        return next((found for host in self.hosts[1:] if (found := host.find(section)) is not None), None)


class Facts(Generic[S]):
    """One section over all ranks that have it."""

    def __init__(self, job: Job, section: type[S]) -> None:
        self._job = job
        self._section = section

    def __iter__(self) -> Iterator[tuple[S, IdenticalRanks]]:
        """Iterate over every distinct section with the ranks that have it."""
        return iter(self._job.each(self._section))

    def group(self, key: Callable[[S], K]) -> list[Group[K]]:
        """Ranks by ``key`` of their section, the largest group first.

        Groups of equal size are in the order of their lowest rank.
        """
        groups: dict[K, list[int]] = {}
        for section, identical in self._job.each(self._section):
            groups.setdefault(key(section), []).extend(identical.ranks)
        ordered = [Group(value, tuple(sorted(ranks))) for value, ranks in groups.items()]
        return sorted(ordered, key=lambda group: (-len(group.ranks), group.ranks[0]))


class Job:
    """A job as far as it is known; built by :func:`build_job`.

    ``world_size`` is what the ranks state about the job that runs now; 1 for a lone process. ``absent``: ranks that
    did not report in time. ``last_seen``: the last sign of ranks that stopped responding. ``expected``: the
    baseline job (:mod:`doctor.analysis.stats.baseline`). ``captured``: when the facts were collected, as ISO 8601;
    otherwise empty. ``evidence``: log events; ``None`` if no log was read. ``world_is_stated``: whether
    ``world_size`` is the size of the job, and not only a lower bound that follows from a rank in a log.
    """

    def __init__(
        self,
        ranks: tuple[Rank, ...],
        hosts: tuple[Host, ...],
        *,
        world_size: int,
        world_is_stated: bool = True,
        launcher: str = "none",
        absent: tuple[int, ...] = (),
        last_seen: tuple[LastSeen, ...] = (),
        expected: Job | None = None,
        captured: str = "",
        evidence: LogEvidence | None = None,
    ) -> None:
        self.ranks = ranks
        self.hosts = hosts
        self.world_size = world_size
        self.world_is_stated = world_is_stated
        self.launcher = launcher
        self.absent = absent
        self.last_seen = last_seen
        self.expected = expected
        self.captured = captured
        self.evidence = evidence
        self._rows: dict[tuple[str, ...], list[Row]] = {}
        self._by_host: tuple[LocalRanks, ...] | None = None
        self._by_machine: tuple[LocalRanks, ...] | None = None
        self._multi_host: bool | None = None

    @functools.cached_property
    def ungathered(self) -> int:
        """The number of ranks of the world that are neither present nor known to be absent."""
        return max(0, self.world_size - len({rank.number for rank in self.ranks}) - len(self.absent))

    @property
    def is_multi_host(self) -> bool:
        """Whether the job spans several machines, according to facts, launcher and world size."""
        if self._multi_host is None:
            self._multi_host = len({host.machine for host in self.hosts}) > 1 or self._stated_hosts() > 1
        return self._multi_host

    def _stated_hosts(self) -> int:
        stated = 1
        for launch, _ in self.each(LaunchFacts):
            if launch.running_together:
                # Only the launcher's own claim: variables of an outer one (SLURM around torchrun) count its nodes.
                own = launch.claim(launch.launcher)
                stated = max(stated, (own.node_count or 1) if own else 1)
                if launch.local_world_size and launch.world_size:
                    stated = max(stated, -(-launch.world_size // launch.local_world_size))
        return stated

    def apart(self) -> Job:
        """The same job with tables of its own, for code that is not trusted.

        The sections, which are immutable, are shared.
        """
        hosts = {id(h): Host(h.name, h.boot_id, h.machine_id, dict(h.sections), h.index) for h in self.hosts}
        return Job(
            tuple(Rank(rank.number, hosts[id(rank.host)], dict(rank.sections)) for rank in self.ranks),
            tuple(hosts.values()),
            world_size=self.world_size,
            world_is_stated=self.world_is_stated,
            launcher=self.launcher,
            absent=self.absent,
            last_seen=self.last_seen,
            expected=self.expected.apart() if self.expected else None,
            captured=self.captured,
            evidence=self.evidence,
        )

    def with_quoted(self, places: Iterable[tuple[str, int]]) -> Job:
        """The same job with the files and lines of its logs that findings quote."""
        job = copy.copy(self)
        if self.evidence is not None:
            job.evidence = msgspec.structs.replace(self.evidence, quoted=tuple(sorted(places)))
        return job

    def facts(self, section: type[S]) -> Facts[S]:
        """One section over all ranks."""
        return Facts(self, section)

    @overload
    def each(
        self, first: type[A], /, *, also: tuple[type[Section], ...] = ()
    ) -> Iterator[tuple[A, IdenticalRanks]]: ...
    @overload
    def each(
        self, first: type[A], second: type[B], /, *, also: tuple[type[Section], ...] = ()
    ) -> Iterator[tuple[A, B, IdenticalRanks]]: ...
    @overload
    def each(
        self, first: type[A], second: type[B], third: type[C], /, *, also: tuple[type[Section], ...] = ()
    ) -> Iterator[tuple[A, B, C, IdenticalRanks]]: ...
    def each(self, *sections: type[Section], also: tuple[type[Section], ...] = ()) -> Iterator[tuple[object, ...]]:
        """Every distinct combination of ``sections``, with the ranks that have it.

        Ranks that lack one of them are left out (the runner counts them). ``also`` are sections that may be
        missing: ranks are divided by them too, and :meth:`IdenticalRanks.find` returns them.
        """
        key = (*(section.key for section in sections), "also", *(section.key for section in also))
        if key not in self._rows:
            self._rows[key] = self._table.rows(sections, also)
        return iter(self._rows[key])

    def identical(self, *sections: type[Section]) -> list[IdenticalRanks]:
        """All ranks, grouped by ``sections``, which may be missing."""
        return self._table.divide(sections).groups

    def lacking(
        self, needs: tuple[type[Section], ...], instead: tuple[type[Section], ...] = ()
    ) -> list[tuple[IdenticalRanks, tuple[Missing, ...]]]:
        """Groups of ranks that lack one of ``needs``, each with the reasons.

        Ranks that have all of ``instead`` do not count as lacking.
        """
        return self._table.lacking(needs, instead)

    @functools.cached_property
    def _table(self) -> SectionTable:
        return SectionTable(self.ranks)

    def by_host(self) -> tuple[LocalRanks, ...]:
        """The hosts, each with its ranks."""
        if self._by_host is None:
            members: dict[Host, list[Rank]] = {host: [] for host in self.hosts}
            for rank in self.ranks:
                members[rank.host].append(rank)
            self._by_host = tuple(LocalRanks((host,), tuple(found)) for host, found in members.items())
        return self._by_host

    def by_machine(self) -> tuple[LocalRanks, ...]:
        """The machines, each with its hosts (one, or several containers) and ranks."""
        if self._by_machine is None:
            machines: dict[Hashable, list[LocalRanks]] = {}
            for local in self.by_host():
                machines.setdefault(local.hosts[0].machine, []).append(local)
            self._by_machine = tuple(map(_joined, machines.values()))
        return self._by_machine

    def hosts_of(self, ranks: Iterable[int]) -> tuple[str, ...]:
        """The names of the hosts of ``ranks``, each once, in rank order."""
        found = [rank for number in sorted(set(ranks)) for rank in self.by_number.get(number, ())]
        return tuple(dict.fromkeys(rank.host.name for rank in found))

    def place_of(self, ranks: Iterable[int]) -> str:
        """The hosts of ``ranks`` in words, ``node1`` or ``node1 and 3 more hosts``; empty without ranks."""
        names = self.hosts_of(ranks)
        return hosts_text(names) if names else ""

    @functools.cached_property
    def by_number(self) -> dict[int, list[Rank]]:
        """The ranks by their number, which several may claim."""
        found: dict[int, list[Rank]] = {}
        for rank in self.ranks:
            found.setdefault(rank.number, []).append(rank)
        return found


def _joined(parts: list[LocalRanks]) -> LocalRanks:
    """The ranks of one machine, in the order of the job."""
    if len(parts) == 1:
        return parts[0]
    members = sorted((rank for part in parts for rank in part.members), key=lambda rank: rank.number)
    return LocalRanks(tuple(host for part in parts for host in part.hosts), tuple(members))


class LastSeen(msgspec.Struct, frozen=True):
    """A rank that stopped responding, its host, and the last ``step`` that it took.

    The steps: ``listed`` (a cluster has it on that host, but it never connected), ``joined`` (it connected, but
    never sent its facts) and ``answered`` (its facts are present, but it did not take part in a measurement).
    """

    rank: int
    host: str
    step: str


class Member(NamedTuple):
    """The sections of one process, of rank and host level together.

    ``host``: boot id, machine id and name of its host, if the sections do not contain them.
    """

    rank: int
    sections: Sections
    host: tuple[str | None, str | None, str] | None = None


def build_job(
    members: Iterable[Member],
    *,
    world_size: int | None = None,
    world_is_stated: bool = True,
    launcher: str | None = None,
    absent: Iterable[int] = (),
    last_seen: Iterable[LastSeen] = (),
    expected: Job | None = None,
    captured: str = "",
    evidence: LogEvidence | None = None,
) -> Job:
    """Build a job from its processes.

    Equal sections become one object. Host sections are kept once per host: the first process of a host supplies
    them, later ones fill its gaps. ``world_size`` and ``launcher`` default to what most ranks state.
    """
    from doctor.core.facts import SECTIONS

    pool, parts = _SectionPool(), _PartialHosts()
    hosts: dict[object, Host] = {}
    ranks: list[Rank] = []
    of_hosts = frozenset(key for key, section in SECTIONS.items() if section.level == "host")
    of_ranks = SECTIONS.keys() - of_hosts
    for member in sorted(members, key=lambda member: member.rank):
        shared = pool.share(member.sections)
        own = {key: value for key, value in shared.items() if key in of_hosts}
        host = _host_of(own, hosts, member.host)
        ranks.append(Rank(member.rank, host, {key: value for key, value in shared.items() if key in of_ranks}))
        parts.note(ranks[-1], shared)
    parts.keep()
    launches = [launch for rank in ranks if (launch := rank.find(LaunchFacts)) is not None]
    return Job(
        tuple(ranks),
        tuple(hosts.values()),
        world_size=world_size if world_size is not None else _stated_world(launches, len(ranks)),
        world_is_stated=world_is_stated,
        launcher=launcher or _most_common([launch.launcher for launch in launches]) or "none",
        absent=tuple(sorted(set(absent))),
        last_seen=tuple(last_seen),
        expected=expected,
        captured=captured,
        evidence=evidence,
    )


class _SectionPool:
    """Replaces equal sections by one object; hashes each object once, because that is slow."""

    def __init__(self) -> None:
        self._by_value: dict[object, Section | Missing] = {}
        self._by_identity: dict[int, Section | Missing] = {}
        self._originals: list[Section | Missing] = []

    def share(self, sections: Sections) -> Sections:
        known = self._by_identity
        return {key: known.get(id(value)) or self._add(value) for key, value in sections.items()}

    def _add(self, value: Section | Missing) -> Section | Missing:
        self._originals.append(value)  # because an id is unique only while its object exists
        shared = self._by_value.setdefault((type(value), value), value)
        self._by_identity[id(value)] = shared
        return shared


def _host_of(
    sections: Sections, hosts: dict[object, Host], told: tuple[str | None, str | None, str] | None = None
) -> Host:
    facts = sections.get(HostFacts.key)
    identity = told or (None, None, "this host")
    if isinstance(facts, HostFacts):
        identity = (facts.boot_id, facts.machine_id, facts.hostname)
    if identity not in hosts:
        hosts[identity] = Host(identity[2], identity[0], identity[1], sections, index=len(hosts))
    elif hosts[identity].sections != sections:
        _fill_gaps(hosts[identity], sections)
    return hosts[identity]


def _fill_gaps(host: Host, sections: Sections) -> None:
    """Add the sections that earlier processes of the host could not read or were not asked for."""
    gaps = {key: value for key, value in sections.items() if not isinstance(host.sections.get(key), Section)}
    if any(isinstance(value, Section) for value in gaps.values()):
        host.sections = {**host.sections, **gaps}


class _PartialHosts:
    """Sections of hosts that show different parts of themselves to their processes."""

    def __init__(self) -> None:
        from doctor.core.facts import SECTIONS

        self._keys = tuple(key for key, section in SECTIONS.items() if section.part is not Section.part)
        self._brought: dict[tuple[int, str], list[tuple[Rank, Section]]] = {}

    def note(self, rank: Rank, sections: Sections) -> None:
        """Record the sections of ``rank``."""
        for key in self._keys:
            value = sections.get(key)
            if isinstance(value, Section):
                self._brought.setdefault((rank.host.index, key), []).append((rank, value))

    def keep(self) -> None:
        """Where the parts differ, give every rank its own part and the host all of them."""
        for (_, key), brought in self._brought.items():
            if len({section.part() for _, section in brought}) > 1:
                host = brought[0][0].host
                joined = functools.reduce(lambda one, other: one.joined(other), (section for _, section in brought))
                host.sections = {**host.sections, key: joined}
                for rank, section in brought:
                    rank.sections = {**rank.sections, key: section}


def _stated_world(launches: list[LaunchFacts], seen: int) -> int:
    """The world size of the ranks that run together now.

    Left-over variables of a lone process do not count.
    """
    together = [launch.world_size for launch in launches if launch.running_together and launch.world_size]
    return max(_most_common(together) or 1, 1) if together else max(seen, 1)


def _most_common(values: list[K]) -> K | None:
    counts: dict[K, int] = {}
    for value in values:
        counts[value] = counts.get(value, 0) + 1
    return max(counts, key=lambda value: counts[value], default=None)
