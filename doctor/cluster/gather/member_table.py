"""The members of a gather, and what each of them sent."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from doctor.cluster.gather.protocol import MemberFacts, ProbeResult
from doctor.cluster.gather.section_merge import merge_sections
from doctor.cluster.membership.protocol import JOIN_REQUESTS, MOST_TIMES, JoinRequest, LeaderAnnouncement, has_room
from doctor.cluster.transport.codec import MalformedMessage, decode, decode_or_none, unpack_capture
from doctor.cluster.transport.failover import Store
from doctor.cluster.transport.store import Mailbox
from doctor.collectors import MODULES
from doctor.core.facts import SECTIONS, HostFacts, MasterFacts, Missing, MissingReason, ReachFacts
from doctor.core.job import LastSeen, Member, Sections


class MemberTable:
    """All processes of one gather, read from the mailboxes of its store.

    Messages that cannot be read are noted in ``damaged``. ``gone``: ranks that are known to have ended, whether or not
    they had joined. ``disputed``: tokens for which two different facts messages arrived, one of which is forged:
    neither counts. By token: ``join_requests``, ``joined`` (what a member sent), ``measured``, ``steps`` (the last
    finished task) and ``notes``.
    """

    def __init__(self, store: Store, nonce: str, world_size: int) -> None:
        self.world_size = world_size
        self.join_requests: dict[str, JoinRequest] = {}
        self.joined: dict[str, MemberFacts] = {}
        self.measured: dict[str, Sections] = {}
        self.steps: dict[str, int] = {}
        self.notes: dict[str, bytes] = {}
        self.damaged: list[str] = []
        self.gone: set[int] = set()
        self.disputed: set[str] = set()
        self._members: dict[str, Member] = {}
        self._own = ""
        self._store = store
        self._earlier: dict[str, JoinRequest] = {}
        self._boxes: tuple[tuple[Mailbox, Callable[[bytes], None]], ...] = (
            (store.mailbox(f"{nonce}/{JOIN_REQUESTS}"), lambda data: self._note_request(data, self.join_requests)),
            (store.mailbox(f"{nonce}/facts"), lambda data: self._note_facts(decode(data, MemberFacts))),
            (store.mailbox(f"{nonce}/measured"), self._note_result),
        )

    def look(self) -> None:
        """Read new messages."""
        for box, note in self._boxes:
            for data in box.fresh():
                self._read(data, note)

    def _read(self, data: bytes, note: Callable[[bytes], None]) -> None:
        try:
            note(data)
        except MalformedMessage as error:
            self.damaged.append(str(error))

    def recall(self, announcement: bytes | None) -> None:
        """Read the join requests of an earlier ``announcement``, its coordinator's among them."""
        earlier = decode_or_none(announcement, LeaderAnnouncement)
        for data in self._store.mailbox(f"{earlier.nonce}/{JOIN_REQUESTS}").fresh() if earlier else ():
            self._read(data, lambda data: self._note_request(data, self._earlier))

    def _note_request(self, data: bytes, requests: dict[str, JoinRequest]) -> None:
        request = decode(data, JoinRequest)
        if has_room(requests, self.world_size):
            requests.setdefault(request.token, request)

    def enter_own(self, facts: MemberFacts) -> None:
        """Add the process that reads this table: other messages with its token are forged."""
        self._own = facts.token
        self.enter(facts)

    def _note_facts(self, facts: MemberFacts) -> None:
        if facts.token == self._own or facts.token in self.disputed:
            raise MalformedMessage(f"other facts of rank {facts.number}")
        known = self.joined.get(facts.token)
        if known == facts:
            return
        if known is None:
            if not has_room(self.joined, self.world_size):
                raise MalformedMessage(f"more processes than {MOST_TIMES} times the ranks of the job")
            self.enter(facts)
            return
        self.disputed.add(facts.token)
        del self.joined[facts.token], self._members[facts.token]
        raise MalformedMessage(f"two different sets of facts of rank {facts.number}")

    def enter(self, facts: MemberFacts) -> None:
        """Add a process. Its rank may be outside the world size known here: a check reports that.

        Raises:
            MalformedMessage: its facts are damaged.
        """
        for member in unpack_capture(facts.capture, f"the facts of rank {facts.number}").members[:1]:
            self.joined[facts.token] = facts
            self._members[facts.token] = member._replace(rank=facts.number)

    def _note_result(self, data: bytes) -> None:
        result = decode(data, ProbeResult)
        if result.token == self._own or result.token not in self.joined:
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
        return {facts.number for facts in self.joined.values()}

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
        duplicates = sum(facts.duplicates for facts in self.joined.values())
        joining = {token for token, request in self.join_requests.items() if request.number not in self.gone}
        return bool(joining - self.joined.keys() - self.disputed) or len(self.joined) < len(self.numbers) + duplicates

    @property
    def in_order(self) -> list[MemberFacts]:
        """What the members sent, by rank, duplicates by token, so that every reader has the same order."""
        return sorted(self.joined.values(), key=lambda facts: (facts.number, facts.token))

    def members(self) -> list[Member]:
        """Return the facts of all members, with their probe results."""
        joined = []
        for facts in self.in_order:
            member, added = self._members[facts.token], self.measured.get(facts.token, {})
            joined.append((facts, member._replace(sections=merge_sections(member.sections, added))))
        # What the leading process of a host tried, for its processes with that master.
        shared: dict[tuple[object, ...], Sections] = {
            _reach_key(member): {ReachFacts.key: member.sections[ReachFacts.key]}
            for facts, member in joined
            if facts.port is not None and isinstance(member.sections.get(ReachFacts.key), ReachFacts)
        }
        read = {member.host for _, member in joined if HostFacts.key in member.sections}
        return [
            member._replace(
                sections={
                    **member.sections,
                    **shared.get(_reach_key(member), {}),
                    **({} if member.host in read else _UNREAD),
                }
            )
            for _, member in joined
        ]

    def last_seen(self, asked: Iterable[MemberFacts], listed: Mapping[int, str]) -> tuple[LastSeen, ...]:
        """Return the ranks that stopped answering, and where they were last seen.

        These sent a join request and nothing more, or were ``asked`` to measure and did not. Ranks that did not even
        start are included if it is ``listed`` on which host they were to run.
        """
        known = {**self._earlier, **self.join_requests}
        missing = known.keys() - self.joined.keys() - self.disputed
        unfinished = [known[token] for token in known if token in missing and known[token].number not in self.numbers]
        started = {request.number for request in unfinished}
        unanswered = (facts for facts in asked if facts.token not in self.steps)
        return (
            *(LastSeen(number, host, "listed") for number, host in listed.items() if number not in started),
            *(LastSeen(request.number, request.host, "joined") for request in unfinished),
            *(LastSeen(facts.number, facts.host, "answered") for facts in unanswered),
        )


_UNREAD: Sections = {
    key: Missing(
        MissingReason.HIDDEN,
        "the process that collects this for its host stopped responding",
        "run the check again once all processes of the host are running",
    )
    for key in MODULES
    if SECTIONS[key].level == "host"
}
"""Sections of a host whose leading process never joined."""

_TIMED_OUT = Missing(MissingReason.TIMEOUT, "the process did not finish its probes in time")


def _reach_key(member: Member) -> tuple[object, ...]:
    """Return the host and its master; the lookup time is left out, since it differs by process."""
    master = member.sections.get(MasterFacts.key)
    if not isinstance(master, MasterFacts):
        return (member.host,)
    return member.host, master.address, master.port, master.resolved
