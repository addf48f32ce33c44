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

    def __init__(self, board: KeyValueStore, nonce: str, world_size: int) -> None:
        self.world_size = world_size
        self.hellos: dict[str, JoinRequest] = {}
        self.arrivals: dict[str, MemberRecord] = {}
        self.measured: dict[str, Sections] = {}
        self.steps: dict[str, int] = {}
        self.notes: dict[str, bytes] = {}
        self.damaged: list[str] = []
        self.gone: set[int] = set()
        self.disputed: set[str] = set()
        self._cards: dict[str, MemberFacts] = {}
        self._own = ""
        self._board = board
        self._earlier: dict[str, JoinRequest] = {}
        self._boxes: tuple[tuple[Mailbox, Callable[[bytes], None]], ...] = (
            (board.box(f"{nonce}/hello"), lambda data: self._note_hello(data, self.hellos)),
            (board.box(f"{nonce}/card"), lambda data: self._note_card(decode(data, MemberFacts))),
            (board.box(f"{nonce}/measured"), self._note_measurement),
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

    def recall(self, call: bytes | None) -> None:
        """Remember who had said hello in the gathering of an earlier ``call``, the one who called among them.

        Raises:
            BoardLost: the board is gone.
        """
        with contextlib.suppress(MalformedMessage):
            nonce = decode(call or b"", GatherAnnouncement).nonce
            for data in self._board.box(f"{nonce}/hello").fresh():
                self._read(data, lambda data: self._note_hello(data, self._earlier))

    def _note_hello(self, data: bytes, hellos: dict[str, JoinRequest]) -> None:
        hello = decode(data, JoinRequest)
        if len(hellos) < MOST_TIMES * self.world_size + SPARE:
            hellos.setdefault(hello.token, hello)

    def enter_own(self, card: MemberFacts) -> None:
        """Take the process that reads this roll into it: whatever else comes in its name is not from it."""
        self._own = card.token
        self.enter(card)

    def _note_card(self, card: MemberFacts) -> None:
        """A process brings its facts once."""
        if card.token == self._own or card.token in self.disputed:
            raise MalformedMessage(f"another card of rank {card.number}")
        if self._cards.setdefault(card.token, card) == card:
            if card.token not in self.arrivals:
                self._require_room()
                self.enter(card)
            return
        self.disputed.add(card.token)
        self.arrivals.pop(card.token, None)
        raise MalformedMessage(f"two different cards of rank {card.number}")

    def _require_room(self) -> None:
        if len(self.arrivals) >= MOST_TIMES * self.world_size + SPARE:
            raise MalformedMessage(f"more processes than {MOST_TIMES} times the ranks of the job")

    def enter(self, card: MemberFacts) -> None:
        """Take a process into the roll. It may be outside the world as this process was told it: that is for a check.

        Raises:
            Unreadable: its facts are damaged.
        """
        for member in unpack_capture(card.capture, f"the card of rank {card.number}").members[:1]:
            self.arrivals[card.token] = MemberRecord(
                card.token, member._replace(rank=card.number), card.twins, card.port, card.word
            )

    def _note_measurement(self, data: bytes) -> None:
        measurement = decode(data, ProbeResult)
        if measurement.token == self._own or measurement.token not in self.arrivals:
            raise MalformedMessage(f"a measurement of rank {measurement.number} that it did not make")
        for member in unpack_capture(measurement.capture, f"the probes of rank {measurement.number}").members[:1]:
            self.note_measured(measurement.token, measurement.step, member.sections, measurement.note)

    def note_measured(self, token: str, step: int, sections: Sections, note: bytes = b"") -> None:
        """Take down what a process measured in a step, beside what it measured before."""
        self.measured[token] = merge_sections(self.measured.get(token, {}), sections)
        self.notes[token] = note
        # Last: whoever keeps the gathering looks here, from another thread, whether the rest is there.
        self.steps[token] = max(step, self.steps.get(token, 0))

    def note_silent(self, token: str, keys: Iterable[str]) -> None:
        """A process did not come back in time: what it was to measure is missing, if it had not measured it before."""
        sections = self.measured.setdefault(token, {})
        self.measured[token] = {**dict.fromkeys(keys, _SILENT), **sections}

    @property
    def numbers(self) -> set[int]:
        """The ranks of which at least one process came."""
        return {arrival.number for arrival in self.arrivals.values()}

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
        twins = sum(arrival.twins for arrival in self.arrivals.values())
        coming = {token for token, hello in self.hellos.items() if hello.number not in self.gone}
        return bool(coming - self.arrivals.keys() - self.disputed) or len(self.arrivals) < len(self.numbers) + twins

    @property
    def in_order(self) -> list[MemberRecord]:
        """Those who came, by rank; of several that claim one rank by token, so that every reader has the same order."""
        return sorted(self.arrivals.values(), key=lambda arrival: (arrival.number, arrival.token))

    def members(self) -> list[Member]:
        """Everybody's facts, what was measured among them."""
        brought = [(arrival, _with_measured(arrival, self.measured)) for arrival in self.in_order]
        shared = _reach_by_key(brought)
        read = {member.host for _, member in brought if HostFacts.key in member.sections}
        return [
            member._replace(sections={**_with_shared_reach(member, shared), **({} if member.host in read else _UNREAD)})
            for _, member in brought
        ]

    def last_seen(self, asked: Iterable[MemberRecord], listed: Mapping[int, str]) -> tuple[LastSeen, ...]:
        """Ranks that fell silent on the way: said hello and nothing more, or were ``asked`` to measure and did not; and
        those that did not even start, where it is ``listed`` on which host they were to be."""
        known = {**self._earlier, **self.hellos}
        missing = known.keys() - self.arrivals.keys() - self.disputed
        waiting = (known[token] for token in known if token in missing)
        half = [hello for hello in waiting if hello.number not in self.numbers]
        started = {hello.number for hello in half}
        silent = (arrival for arrival in asked if arrival.token not in self.steps)
        return (
            *(LastSeen(number, host, "listed") for number, host in listed.items() if number not in started),
            *(LastSeen(hello.number, hello.host, "joined") for hello in half),
            *(LastSeen(arrival.number, arrival.host[2] if arrival.host else "", "answered") for arrival in silent),
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

_SILENT = Missing(MissingReason.TIMEOUT, "the process did not come back from its probes in time")

ReachKey = tuple[object, ...]


def _with_measured(arrival: MemberRecord, measured: Mapping[str, Sections]) -> Member:
    own, added = arrival.member.sections, measured.get(arrival.token)
    if not added:
        return arrival.member
    return arrival.member._replace(sections=merge_sections(own, added))


def _reach_key(member: Member) -> ReachKey:
    """The host, and the master that is looked for; how long its name took to resolve is each process's own."""
    master = member.sections.get(MasterFacts.key)
    if not isinstance(master, MasterFacts):
        return (member.host,)
    return member.host, master.address, master.port, master.resolved


def _reach_by_key(brought: Iterable[tuple[MemberRecord, Member]]) -> dict[ReachKey, ReachFacts]:
    """What the speaker of a host tried is true of every process there that looks for the same master."""
    return {
        _reach_key(member): reach
        for arrival, member in brought
        if arrival.port is not None and isinstance(reach := member.sections.get(ReachFacts.key), ReachFacts)
    }


def _with_shared_reach(member: Member, shared: dict[ReachKey, ReachFacts]) -> Sections:
    reach = shared.get(_reach_key(member))
    return dict(member.sections) if reach is None else {**member.sections, ReachFacts.key: reach}
