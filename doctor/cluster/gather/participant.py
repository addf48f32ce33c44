"""Local side of a gather: facts collected in the background, and a responder for probes."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from doctor.analysis.visible_devices import states_binding
from doctor.cluster.gather.host_lease import HostLease
from doctor.cluster.gather.protocol import MemberFacts
from doctor.cluster.membership.protocol import JoinRequest
from doctor.cluster.rendezvous.process_identity import ProcessIdentity
from doctor.cluster.transport.codec import pack_member
from doctor.collectors import keys_to_collect
from doctor.collectors.base import Machine
from doctor.collectors.host.host_identity import Identity, host_identity
from doctor.collectors.launch.launcher import launch_facts
from doctor.collectors.launch.rank_variables import Environ
from doctor.collectors.runner import collect_facts
from doctor.core.background import start_daemon
from doctor.core.facts import Missing, ReachFacts, Section
from doctor.core.job import Member

if TYPE_CHECKING:
    from doctor.cluster.gather.probe_schedule import ProbeOptions, ProbeSchedule

Sections = dict[str, Section | Missing]


class HostCollector(msgspec.Struct, frozen=True):
    """What a gather collects that is not a check of the processes themselves.

    ``collect``: takes the keys that a check would collect, which include those of the host only in the process that
    leads it. ``environ``: where the launcher of the processes is looked up. ``identity``: of a process that no
    launcher numbers. ``turn``: number of earlier gathers of the same processes. ``remote``: ``module:function``
    that makes the collector on a node of a Ray cluster, and its argument.
    """

    collect: Callable[[tuple[str, ...]], Sections]
    environ: Environ
    identity: ProcessIdentity | None = None
    turn: int = 0
    remote: tuple[str, str] = ("", "")


class Participant:
    """This process in a gather; ``collect`` runs at once, in the background."""

    def __init__(
        self,
        identity: ProcessIdentity,
        host: Identity,
        host_lease: HostLease,
        collect: Callable[[tuple[str, ...]], Sections],
        *,
        answers_at: tuple[int, str] | None = None,
        own_gpus: bool = False,
    ) -> None:
        self.identity = identity
        self.join_request = JoinRequest(secrets.token_hex(8), identity.number, host[2])
        self._host = host
        self._answers_at = answers_at
        self._host_lease = host_lease  # held, so that no other process gets the lease
        self._rank_lease = HostLease(identity.key_here, host, f"rank {identity.number}")
        self._facts: Sections | None = None
        self._reach = ReachFacts()
        self._ready = threading.Event()
        keys = keys_to_collect(leads_host=host_lease.granted, own_gpus=own_gpus)

        def run() -> None:
            try:
                self._facts = collect(keys)
            finally:
                self._ready.set()

        start_daemon("doctor-facts", run)

    def release(self) -> None:
        """Release its leases, for another gather of this process."""
        self._host_lease.close()
        self._rank_lease.close()

    def set_reach(self, reach: ReachFacts) -> None:
        """Record the connection attempts made to reach the store."""
        self._reach = reach

    def member(self) -> Member:
        """Return this process with its facts; blocks until they are collected."""
        self._ready.wait()
        sections: Sections = {**(self._facts or {}), ReachFacts.key: self._reach}
        return Member(self.identity.number, sections, self._host)

    def member_facts(self) -> MemberFacts | None:
        """Return the facts message of this process, or ``None`` until the facts are collected."""
        if not self._ready.is_set():
            return None
        request, (port, word) = self.join_request, self._answers_at or (None, "")
        capture, duplicates = pack_member(self.member()), self._rank_lease.rivals()
        return MemberFacts(request.token, request.number, request.host, capture, duplicates, port, word)


def start_participant(
    identity: ProcessIdentity,
    machine: Machine,
    *,
    timeout: float,
    probe_options: ProbeOptions | None,
    write_line: Callable[[str], None],
    announce: Callable[[str], None] | None = None,
    collect: Callable[[tuple[str, ...]], Sections] | None = None,
) -> tuple[Participant, ProbeSchedule | None]:
    """Start collecting and return this process's side of the gather and of its probes.

    ``timeout``: seconds of the gather, and the limit of each collector; ``announce`` gets the collectors that still run
    after a second. ``collect``: returns the sections of this process in place of the collectors.
    """
    host = host_identity(machine)
    host_lease = HostLease(identity.key_here, host, "the host")
    schedule = None
    if probe_options is not None:
        from doctor.cluster.gather.probe_schedule import probe_schedule

        schedule = probe_schedule(
            probe_options, identity.number, timeout, machine, leads_host=host_lease.granted, write_line=write_line
        )
    participant = Participant(
        identity,
        host,
        host_lease,
        collect or (lambda keys: collect_facts(keys, machine, timeout=timeout, announce=announce)),
        answers_at=schedule.answers_at if schedule else None,
        own_gpus=states_binding(launch_facts(machine.environ)),
    )
    return participant, schedule
