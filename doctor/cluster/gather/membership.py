"""Who has come to a gathering, and what each of them brought."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from doctor.cluster.gather.protocol import GatherAnnouncement, JoinRequest, MemberFacts, ProbeResult
from doctor.cluster.gather.section_merge import merge_sections
from doctor.cluster.transport.codec import MalformedMessage, decode, unpack_capture
from doctor.cluster.transport.store import KeyValueStore, Mailbox
from doctor.collectors import MODULES
from doctor.collectors.host.host_identity import Identity
from doctor.core.facts import SECTIONS, HostFacts, MasterFacts, Missing, MissingReason, ReachFacts
from doctor.core.job import LastSeen, Member, Sections

MOST_TIMES, SPARE = 4, 64
"""Processes that are taken in: so many times the ranks of the job, and a few more. Two launches at once are twice."""


class MemberRecord(NamedTuple):
    """A process that came with its facts. ``port`` and ``word``: where it answers probes, if it does."""

    token: str
    member: Member
    twins: int
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
    """The roll of one gathering, read from the boxes of its board. What can't be read is noted in ``damaged``.

    ``gone``: ranks that are known to have ended; whether they came before is another matter. ``disputed``: tokens of
    processes for which two different cards came, one of which is not theirs: neither counts. By token: ``measured``,
    ``steps`` (the last task that was done) and ``notes``.
    """

    def __init__(self, store: KeyValueStore, nonce: str, world_size: int) -> None:
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
        """Read what is new.

        Raises:
            BoardLost: the board is gone.
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
        """Remember who had said hello in the gathering of an earlier ``call``, the one who called among them.

        Raises:
            BoardLost: the board is gone.
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
        """Take the process that reads this roll into it: whatever else comes in its name is not from it."""
        self._own = facts.token
        self.enter(facts)

    def _note_facts(self, facts: MemberFacts) -> None:
        """A process brings its facts once."""
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
        """Take a process into the roll. It may be outside the world as this process was told it: that is for a check.

        Raises:
            Unreadable: its facts are damaged.
        """
        for member in unpack_capture(facts.capture, f"the card of rank {facts.number}").members[:1]:
            self.records[facts.token] = MemberRecord(
                facts.token, member._replace(rank=facts.number), facts.twins, facts.port, facts.word
            )

    def _note_result(self, data: bytes) -> None:
        result = decode(data, ProbeResult)
        if result.token == self._own or result.token not in self.records:
            raise MalformedMessage(f"a measurement of rank {result.number} that it did not make")
        for member in unpack_capture(result.capture, f"the probes of rank {result.number}").members[:1]:
            self.note_measured(result.token, result.step, member.sections, result.note)

    def note_measured(self, token: str, step: int, sections: Sections, note: bytes = b"") -> None:
        """Take down what a process measured in a step, beside what it measured before."""
        self.measured[token] = merge_sections(self.measured.get(token, {}), sections)
        self.notes[token] = note
        # Last: whoever keeps the gathering looks here, from another thread, whether the rest is there.
        self.steps[token] = max(step, self.steps.get(token, 0))

    def note_timeout(self, token: str, keys: Iterable[str]) -> None:
        """A process did not come back in time: what it was to measure is missing, if it had not measured it before."""
        sections = self.measured.setdefault(token, {})
        self.measured[token] = {**dict.fromkeys(keys, _TIMED_OUT), **sections}

    @property
    def numbers(self) -> set[int]:
        """The ranks of which at least one process came."""
        return {record.number for record in self.records.values()}

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks of the world of which nobody came."""
        return tuple(sorted(set(range(self.world_size)) - self.numbers))

    @property
    def awaited(self) -> tuple[int, ...]:
        """The ranks of the world of which nobody came, and somebody may."""
        return tuple(number for number in self.missing if number not in self.gone)

    @property
    def expected_soon(self) -> bool:
        """Whether somebody is on the way: has said hello, or was met by another process of its host."""
        twins = sum(record.twins for record in self.records.values())
        joining = {token for token, join_request in self.join_requests.items() if join_request.number not in self.gone}
        return bool(joining - self.records.keys() - self.disputed) or len(self.records) < len(self.numbers) + twins

    @property
    def in_order(self) -> list[MemberRecord]:
        """Those who came, by rank; of several that claim one rank by token, so that every reader has the same order."""
        return sorted(self.records.values(), key=lambda record: (record.number, record.token))

    def members(self) -> list[Member]:
        """Everybody's facts, what was measured among them."""
        joined = [(record, _with_measured(record, self.measured)) for record in self.in_order]
        shared = _reach_by_key(joined)
        read = {member.host for _, member in joined if HostFacts.key in member.sections}
        return [
            member._replace(sections={**_with_shared_reach(member, shared), **({} if member.host in read else _UNREAD)})
            for _, member in joined
        ]

    def last_seen(self, asked: Iterable[MemberRecord], listed: Mapping[int, str]) -> tuple[LastSeen, ...]:
        """Ranks that fell silent on the way: said hello and nothing more, or were ``asked`` to measure and did not; and
        those that did not even start, where it is ``listed`` on which host they were to be."""
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
"""Stands for the facts of a host whose speaker never came."""

_TIMED_OUT = Missing(MissingReason.TIMEOUT, "the process did not come back from its probes in time")

ReachKey = tuple[object, ...]


def _with_measured(record: MemberRecord, measured: Mapping[str, Sections]) -> Member:
    own, added = record.member.sections, measured.get(record.token)
    if not added:
        return record.member
    return record.member._replace(sections=merge_sections(own, added))


def _reach_key(member: Member) -> ReachKey:
    """The host, and the master that is looked for; how long its name took to resolve is each process's own."""
    master = member.sections.get(MasterFacts.key)
    if not isinstance(master, MasterFacts):
        return (member.host,)
    return member.host, master.address, master.port, master.resolved


def _reach_by_key(joined: Iterable[tuple[MemberRecord, Member]]) -> dict[ReachKey, ReachFacts]:
    """What the speaker of a host tried is true of every process there that looks for the same master."""
    return {
        _reach_key(member): reach
        for record, member in joined
        if record.port is not None and isinstance(reach := member.sections.get(ReachFacts.key), ReachFacts)
    }


def _with_shared_reach(member: Member, shared: dict[ReachKey, ReachFacts]) -> Sections:
    reach = shared.get(_reach_key(member))
    return dict(member.sections) if reach is None else {**member.sections, ReachFacts.key: reach}
