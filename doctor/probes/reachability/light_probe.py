"""Run the light probe of one agent within its time limit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from doctor.collectors.base import Machine
from doctor.collectors.network.master_address import (
    Addresses,
    address_elsewhere,
    belongs_here,
    own_addresses,
    resolve,
    route_to,
)
from doctor.collectors.network.routes import read_interface_errors
from doctor.core.clock import sleep, time
from doctor.core.facts import ClockFacts, PathFacts, PathSample, Reach, ReachFacts
from doctor.core.facts.probe_results import ReachOutcome
from doctor.probes.reachability.assignments import Assignment, LightProbeResult, MasterTarget, ProbeTarget
from doctor.probes.reachability.dns_lookups import AT_ONCE, Lookups, NameProbe
from doctor.probes.reachability.path_probe import PathProbe, PathResult
from doctor.probes.responder.listener import Responder
from doctor.probes.runtime.deadline import ProbeDeadline
from doctor.probes.runtime.tcp_connect import affordable, connect_tcp
from doctor.probes.runtime.thread_pool import start_side_by_side, wait_for

SECONDS = 8.0
"""For one agent; 10 s with the messages before and after."""

FINISH = 0.3
"""Seconds of these that are reserved for threads to end."""

MOST_AT_ONCE = 64
"""Concurrent paths, with a thread and a connection each: all paths of a host, silent ones included."""

RESOLVE_SECONDS = 3.0

MOST_ADDRESSES = 4
"""Addresses of the master that are tried."""

MASTER_PATIENCE = 2.0
"""Seconds for the listener to start: all agents begin at about the same time."""

MASTER_PAUSE = 0.1


def probe_light(
    assignment: Assignment,
    responder: Responder | None = None,
    *,
    seconds: float = SECONDS,
    machine: Machine | None = None,
    clock: Callable[[], float] = time,
) -> LightProbeResult:
    """Run ``assignment``, all parts concurrently, and return within ``seconds``.

    Facts lack what could not be finished in time. ``responder`` holds the requested port; ``clock`` is the time of this
    host in seconds since 1970.
    """
    end = ProbeDeadline(seconds)
    if responder is not None and assignment.hold_port is not None:
        responder.hold(assignment.hold_port)
    machine = machine or Machine()
    probe = _LightProbe(assignment, ProbeDeadline(max(0.0, seconds - FINISH)), clock)
    used = probe.interfaces()
    before = read_interface_errors(machine, used)
    probe.run(end)
    after = read_interface_errors(machine, used)
    return probe.measured(None if before is None or after is None else max(0, after - before))


@dataclass
class _TargetResult:
    """Results for one target so far. ``address``: the one that was connected to."""

    target: ProbeTarget
    address: str | None
    path: PathResult = field(default_factory=PathResult)
    lookups: Lookups = field(default_factory=Lookups)


class _LightProbe:
    """A running probe; results appear in its tables as each step completes."""

    def __init__(self, assignment: Assignment, deadline: ProbeDeadline, clock: Callable[[], float]) -> None:
        self._assignment = assignment
        self._deadline = deadline
        self._own = own_addresses()
        self._paths = PathProbe(deadline, clock)
        self._names = NameProbe(deadline)
        self._found = [_TargetResult(target, target.address) for target in assignment.targets]
        self._master: list[Reach] = []

    def interfaces(self) -> set[str]:
        """Return the interfaces by which the kernel reaches the targets."""
        addresses = {found.address for found in self._found if found.address is not None}
        routes = (route_to((address,), self._own) for address in addresses)
        return {route.interface for route in routes if route.interface is not None}

    def run(self, end: ProbeDeadline) -> None:
        """Start all parts, and wait until they are done or ``end`` has passed."""
        master = self._assignment.master
        ways = [partial(self._try_master, master)] if master else []
        ways += [partial(self._try, found) for found in self._found]
        names = [
            partial(self._names.look_up, found.target.peer, found.target.address, found.lookups)
            for found in self._found
            if found.target.measured
        ]
        threads = start_side_by_side(ways, affordable(MOST_AT_ONCE), self._deadline)
        wait_for(threads + start_side_by_side(names, AT_ONCE, self._deadline), end)

    def measured(self, errors: int | None) -> LightProbeResult:
        """Return the results so far. ``errors``: counted by the interfaces meanwhile."""
        peers = (_peer_reach(found, self._own) for found in self._found)
        attempts = (*self._master, *(reach for reach in peers if reach is not None))
        return LightProbeResult(
            ReachFacts(attempts=attempts),
            _path_facts(self._found, errors),
            _clock_facts(self._assignment, self._found),
        )

    def _try(self, found: _TargetResult) -> None:
        target = found.target
        if found.address is None:
            found.address = address_elsewhere(target.peer, self._deadline.left(RESOLVE_SECONDS), self._own)
        if found.address is None:
            found.path = PathResult("unresolved")
        elif target.measured:
            found.path = self._paths.measure(found.address, target.port, target.word, self._assignment.burst)
        else:
            found.path = self._paths.reach(found.address, target.port, target.word)

    def _try_master(self, master: MasterTarget) -> None:
        addresses, _, _ = resolve(master.address, self._deadline.left(RESOLVE_SECONDS))
        if not addresses:
            self._master.append(_master_reach(master, master.address, "unresolved", None, {}))

        def connect(address: str) -> None:
            outcome, seconds = try_master_port(address, master.port, self._deadline, patient=master.held)
            if outcome is not None:
                self._master.append(_master_reach(master, address, outcome, seconds, self._own))

        attempts = [partial(connect, address) for address in addresses[:MOST_ADDRESSES]]
        wait_for(start_side_by_side(attempts, len(attempts), self._deadline), self._deadline)


def _master_reach(
    master: MasterTarget, address: str, outcome: ReachOutcome, seconds: float | None, own: Addresses
) -> Reach:
    interface, source, _ = route_to((address,), own)
    return Reach(master.peer, address, master.port, outcome, "master", _rounded(seconds), interface, source)


def _peer_reach(found: _TargetResult, own: Addresses) -> Reach | None:
    """Return the attempt to reach a peer; ``None`` if nothing was learned."""
    target, address, outcome = found.target, found.address or "", found.path.outcome
    if outcome is None:
        return None
    if outcome == "refused" and belongs_here(address, own):
        # Nobody has refused but this host itself, which bears the same address.
        outcome = "stranger"
    interface, source, _ = route_to((address,), own) if address else (None, None, None)
    seconds = _rounded(found.path.seconds)
    return Reach(target.peer, address, target.port, outcome, "peer", seconds, interface, source, target.library)


def _path_facts(every: Sequence[_TargetResult], errors: int | None) -> PathFacts:
    samples = tuple(_sample(found) for found in every if found.target.measured)
    infos = [found.path.info for found in every if found.path.info is not None]
    return PathFacts(
        samples=samples,
        segments_sent=sum(info.sent for info in infos) if infos else None,
        segments_retransmitted=sum(info.retransmitted for info in infos) if infos else None,
        interface_errors=errors,
    )


def _sample(found: _TargetResult) -> PathSample:
    path, lookups = found.path, found.lookups
    return PathSample(
        found.target.peer,
        found.address,
        round_trip=_rounded(path.round_trip),
        full_size_arrived=path.full_size_arrived,
        forward_lookup=lookups.forward,
        forward_error=lookups.forward_error,
        reverse_lookup=lookups.reverse,
        reverse_error=lookups.reverse_error,
        reverse_address=lookups.reverse_address,
    )


def _clock_facts(assignment: Assignment, every: Sequence[_TargetResult]) -> ClockFacts | None:
    """Return the clock of this host against that of the reference; ``None`` if that did not answer."""
    if assignment.reference is None:
        return ClockFacts(reference=assignment.host)
    moments = (found.path.moment for found in every if found.target.peer == assignment.reference)
    best = min((one for one in moments if one is not None), key=lambda moment: moment.round_trip, default=None)
    if best is None:
        return None
    offset, uncertainty = round(-best.ahead, 6), round(best.round_trip / 2, 6)
    return ClockFacts(reference=assignment.reference, offset=offset, uncertainty=uncertainty)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)


def try_master_port(
    address: str, port: int, deadline: ProbeDeadline, *, patient: bool
) -> tuple[ReachOutcome | None, float]:
    """Return the outcome of a connection to ``port``, and the seconds that it took to open.

    ``patient``: a listener is expected, so a refusal counts only if it lasts. Otherwise a refusal is no outcome: the
    address was reached, and no listener was required.
    """
    patience = deadline.within(MASTER_PATIENCE)
    while True:
        outcome, connection, seconds = connect_tcp(address, port, deadline)
        if connection is not None:
            # A farewell, and no reset as elsewhere: of a reset torch's store would complain.
            connection.close()
        if outcome == "stranger":
            # Accepted and then cut off: there is a listener, which is all that matters here.
            outcome = "open"
        if outcome != "refused":
            return outcome, seconds
        if not patient:
            return None, seconds
        if patience.left() <= MASTER_PAUSE:
            return "refused", seconds
        sleep(MASTER_PAUSE)
