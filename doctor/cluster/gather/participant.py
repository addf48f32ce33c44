"""What one process brings to a gathering: facts that are collected in the background, and a responder for probes."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable

from doctor.cluster.gather.host_lease import HostLease
from doctor.cluster.gather.protocol import JoinRequest, MemberFacts, pack_member
from doctor.cluster.rendezvous.process_identity import ProcessIdentity
from doctor.collectors import MODULES
from doctor.collectors.host.host_identity import Identity
from doctor.core.facts import SECTIONS, GpuFacts, Missing, ReachFacts, Section
from doctor.core.job import Member

Sections = dict[str, Section | Missing]

COLLECTED_BY_ALL = ("slurm",)
"""Host sections that every process collects: SLURM is asked by the first task of a node, whoever speaks for it."""


def keys_to_collect(*, speaks: bool, own_gpus: bool = False) -> tuple[str, ...]:
    """The sections that a process collects: those of its host only where it speaks for it. ``own_gpus``: it may be
    shown other GPUs than its neighbours."""
    of_host = (*COLLECTED_BY_ALL, GpuFacts.key) if own_gpus else COLLECTED_BY_ALL
    return tuple(key for key in MODULES if speaks or SECTIONS[key].level == "rank" or key in of_host)


class Participant:
    """This process in a gathering. ``collect`` may take seconds; it runs at once, in the background."""

    def __init__(
        self,
        seat: ProcessIdentity,
        identity: Identity,
        speaker: HostLease,
        collect: Callable[[tuple[str, ...]], Sections],
        *,
        answers_at: tuple[int, str] | None = None,
        own_gpus: bool = False,
    ) -> None:
        self.seat = seat
        self.hello = JoinRequest(secrets.token_hex(8), seat.number, identity[2])
        self._identity = identity
        self._answers_at = answers_at
        self._speaker = speaker  # kept, so that nobody else gets the claim
        self._place = HostLease(seat.key_here, identity, f"rank {seat.number}")
        self._facts: Sections | None = None
        self._reach = ReachFacts()
        self._ready = threading.Event()
        keys = keys_to_collect(speaks=speaker.granted, own_gpus=own_gpus)
        threading.Thread(target=self._collect, args=(collect, keys), name="doctor-facts", daemon=True).start()

    def _collect(self, collect: Callable[[tuple[str, ...]], Sections], keys: tuple[str, ...]) -> None:
        try:
            self._facts = collect(keys)
        finally:
            self._ready.set()

    def tried(self, reach: ReachFacts) -> None:
        """Note the connections that were tried on the way to the others."""
        self._reach = reach

    def member(self) -> Member:
        """This process with its facts; waits for them."""
        self._ready.wait()
        sections: Sections = {**(self._facts or {}), ReachFacts.key: self._reach}
        return Member(self.seat.number, sections, self._identity)

    def card(self) -> MemberFacts | None:
        """The card of this process, or ``None`` as long as its facts are not there."""
        if not self._ready.is_set():
            return None
        port, word = self._answers_at or (None, "")
        capture, twins = pack_member(self.member()), self._place.rivals()
        return MemberFacts(self.hello.token, self.seat.number, capture, twins, port, word)
