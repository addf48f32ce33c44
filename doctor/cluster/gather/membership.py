"""Membership of a gather, and what each member sent."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from doctor.cluster.gather.protocol import GatherAnnouncement, JoinRequest, MemberFacts, ProbeResult
from doctor.cluster.gather.section_merge import merge_sections
from doctor.cluster.transport.codec import MalformedMessage, decode, unpack_capture
from doctor.cluster.transport.failover import Store
from doctor.cluster.transport.store import Mailbox
from doctor.collectors import MODULES
from doctor.collectors.host.host_identity import Identity
from doctor.core.facts import SECTIONS, HostFacts, MasterFacts, Missing, MissingReason, ReachFacts
from doctor.core.job import LastSeen, Member, Sections

MOST_TIMES, SPARE = 4, 64
"""Limit of members: this multiple of the world size, and a few more. Two launches at once are twice."""


class MemberRecord(NamedTuple):
    """A process that sent its facts. ``port`` and ``word``: where it answers probes, if it does."""

    token: str
    member: Member
    duplicates: int
    port: int | None
    word: str

    @property
    def number(self) -> int:
        """Its rank."""
        return self.member.rank

    @property
    def host(self) -> Identity | None:
        """Its host."""
        return self.member.host


class Membership:
    """Membership of one gather, read from the mailboxes of its store.

    Messages that cannot be read are noted in ``damaged``. ``gone``: ranks that are known to have ended, whether or not
    they had joined. ``disputed``: tokens for which two different facts messages arrived, one of which is forged:
    neither counts. By token: ``measured``, ``steps`` (the last finished task) and ``notes``.
    """

    def __init__(self, store: Store, nonce: str, world_size: int) -> None:
        self.world_size = world_size
        self.join_requests: dict[str, JoinRequest] = {}
        self.records: dict[str, MemberRecord] = {}
        self.measured: dict[str, Sections] = {}
        self.steps: dict[str, int] = {}
        self.notes: dict[str, bytes] = {}
        self.damaged: list[str] = []
        self.gone: set[int] = set()
        self.disputed: set[str] = set()
        self._facts: dict[str, MemberFacts] = {}
        self._own = ""
        self._store = store
        self._earlier: dict[str, JoinRequest] = {}
        self._boxes: tuple[tuple[Mailbox, Callable[[bytes], None]], ...] = (
            (store.mailbox(f"{nonce}/hello"), lambda data: self._note_join_request(data, self.join_requests)),
            (store.mailbox(f"{nonce}/card"), lambda data: self._note_facts(decode(data, MemberFacts))),
            (store.mailbox(f"{nonce}/measured"), self._note_result),
        )

    def look(self) -> None:
        """Read new messages.

        Raises:
            StoreLost: the store is gone.
        """
        for box, note in self._boxes:
            for data in box.fresh():
                self._read(data, note)

    def _read(self, data: bytes, note: Callable[[bytes], None]) -> None:
        try:
            note(data)
        except MalformedMessage as error:
            self.damaged.append(str(error))

    def recall(self, announcement: bytes | None) -> None:
        """Read the join requests of an earlier ``announcement``, its coordinator's among them.

        Raises:
            StoreLost: the store is gone.
        """
        with contextlib.suppress(MalformedMessage):
            nonce = decode(announcement or b"", GatherAnnouncement).nonce
            for data in self._store.mailbox(f"{nonce}/hello").fresh():
                self._read(data, lambda data: self._note_join_request(data, self._earlier))

    def _note_join_request(self, data: bytes, join_requests: dict[str, JoinRequest]) -> None:
        join_request = decode(data, JoinRequest)
        if len(join_requests) < MOST_TIMES * self.world_size + SPARE:
            join_requests.setdefault(join_request.token, join_request)

    def enter_own(self, facts: MemberFacts) -> None:
        """Add the process that reads this membership: other messages with its token are forged."""
        self._own = facts.token
        self.enter(facts)

    def _note_facts(self, facts: MemberFacts) -> None:
        """Accept the facts of a process once."""
        if facts.token == self._own or facts.token in self.disputed:
            raise MalformedMessage(f"another card of rank {facts.number}")
        if self._facts.setdefault(facts.token, facts) == facts:
            if facts.token not in self.records:
                self._require_room()
                self.enter(facts)
            return
        self.disputed.add(facts.token)
        self.records.pop(facts.token, None)
        raise MalformedMessage(f"two different cards of rank {facts.number}")

    def _require_room(self) -> None:
        if len(self.records) >= MOST_TIMES * self.world_size + SPARE:
            raise MalformedMessage(f"more processes than {MOST_TIMES} times the ranks of the job")

    def enter(self, facts: MemberFacts) -> None:
        """Add a process. Its rank may be outside the world size known here: a check reports that.

        Raises:
            MalformedMessage: its facts are damaged.
        """
        for member in unpack_capture(facts.capture, f"the card of rank {facts.number}").members[:1]:
            self.records[facts.token] = MemberRecord(
                facts.token, member._replace(rank=facts.number), facts.duplicates, facts.port, facts.word
            )

    def _note_result(self, data: bytes) -> None:
        result = decode(data, ProbeResult)
        if result.token == self._own or result.token not in self.records:
            raise MalformedMessage(f"a measurement of rank {result.number} that it did not make")
        for member in unpack_capture(result.capture, f"the probes of rank {result.number}").members[:1]:
            self.note_measured(result.token, result.step, member.sections, result.note)

    def note_measured(self, token: str, step: int, sections: Sections, note: bytes = b"") -> None:
        """Merge what a process measured in a step into its earlier results."""
        self.measured[token] = merge_sections(self.measured.get(token, {}), sections)
        self.notes[token] = note
        # Last: the coordinator polls this from another thread to see that the rest is there.
        self.steps[token] = max(step, self.steps.get(token, 0))

    def note_timeout(self, token: str, keys: Iterable[str]) -> None:
        """Mark the sections that a process did not measure in time as missing."""
        sections = self.measured.setdefault(token, {})
        self.measured[token] = {**dict.fromkeys(keys, _TIMED_OUT), **sections}

    @property
    def numbers(self) -> set[int]:
        """Ranks of which at least one process joined."""
        return {record.number for record in self.records.values()}

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks of which no process joined."""
        return tuple(sorted(set(range(self.world_size)) - self.numbers))

    @property
    def awaited(self) -> tuple[int, ...]:
        """Ranks of which no process joined and one still may."""
        return tuple(number for number in self.missing if number not in self.gone)

    @property
    def expected_soon(self) -> bool:
        """Whether a process is joining: it sent a request, or another one of its host saw it."""
        duplicates = sum(record.duplicates for record in self.records.values())
        joining = {token for token, join_request in self.join_requests.items() if join_request.number not in self.gone}
        return bool(joining - self.records.keys() - self.disputed) or len(self.records) < len(self.numbers) + duplicates

    @property
    def in_order(self) -> list[MemberRecord]:
        """Records by rank, duplicates by token, so that every reader has the same order."""
        return sorted(self.records.values(), key=lambda record: (record.number, record.token))

    def members(self) -> list[Member]:
        """Return the facts of all members, with their probe results."""
        joined = [(record, _with_measured(record, self.measured)) for record in self.in_order]
        shared = _reach_by_key(joined)
        read = {member.host for _, member in joined if HostFacts.key in member.sections}
        return [
            member._replace(sections={**_with_shared_reach(member, shared), **({} if member.host in read else _UNREAD)})
            for _, member in joined
        ]

    def last_seen(self, asked: Iterable[MemberRecord], listed: Mapping[int, str]) -> tuple[LastSeen, ...]:
        """Return the ranks that stopped answering, and where they were last seen.

        These sent a join request and nothing more, or were ``asked`` to measure and did not. Ranks that did not even
        start are included if it is ``listed`` on which host they were to run.
        """
        known = {**self._earlier, **self.join_requests}
        missing = known.keys() - self.records.keys() - self.disputed
        unfinished_requests = (known[token] for token in known if token in missing)
        unfinished = [join_request for join_request in unfinished_requests if join_request.number not in self.numbers]
        started = {join_request.number for join_request in unfinished}
        unanswered = (record for record in asked if record.token not in self.steps)
        return (
            *(LastSeen(number, host, "listed") for number, host in listed.items() if number not in started),
            *(LastSeen(join_request.number, join_request.host, "joined") for join_request in unfinished),
            *(LastSeen(record.number, record.host[2] if record.host else "", "answered") for record in unanswered),
        )


_UNREAD: Sections = {
    key: Missing(
        MissingReason.HIDDEN,
        "the process that was to read this for its host fell silent",
        "run the check again when all processes of the host start",
    )
    for key in MODULES
    if SECTIONS[key].level == "host"
}
"""Sections of a host whose leading process never joined."""

_TIMED_OUT = Missing(MissingReason.TIMEOUT, "the process did not come back from its probes in time")

ReachKey = tuple[object, ...]


def _with_measured(record: MemberRecord, measured: Mapping[str, Sections]) -> Member:
    own, added = record.member.sections, measured.get(record.token)
    if not added:
        return record.member
    return record.member._replace(sections=merge_sections(own, added))


def _reach_key(member: Member) -> ReachKey:
    """Return the host and its master; the lookup time is left out, since it differs by process."""
    master = member.sections.get(MasterFacts.key)
    if not isinstance(master, MasterFacts):
        return (member.host,)
    return member.host, master.address, master.port, master.resolved


def _reach_by_key(joined: Iterable[tuple[MemberRecord, Member]]) -> dict[ReachKey, ReachFacts]:
    """Return what the leading process of a host tried, for its processes with that master."""
    return {
        _reach_key(member): reach
        for record, member in joined
        if record.port is not None and isinstance(reach := member.sections.get(ReachFacts.key), ReachFacts)
    }


def _with_shared_reach(member: Member, shared: dict[ReachKey, ReachFacts]) -> Sections:
    reach = shared.get(_reach_key(member))
    return dict(member.sections) if reach is None else {**member.sections, ReachFacts.key: reach}
