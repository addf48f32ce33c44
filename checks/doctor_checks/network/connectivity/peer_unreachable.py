"""NET013: hosts cannot connect to each other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

from doctor.analysis.fabric.slow_paths import MeasuredPath, take_hosts
from doctor.analysis.logs.event_timeline import failed_before, set_up_after
from doctor.api import (
    EventGroup,
    Finding,
    Job,
    Scope,
    Severity,
    Skip,
    Unknown,
    Verdict,
    check,
    conjunction,
    event_groups,
    finding_from_logs,
    is_logged,
)
from doctor.core.text import natural_key
from doctor.facts import Event, HostFacts, Reach, ReachFacts, Trial, TrialFacts
from doctor.testing import Fails, Passes, healthy, logged
from doctor_checks._trial_conclusions import with_trials

FAILURES = {
    "refused": "refused",
    "silent": "no response",
    "unroutable": "no route",
    "stranger": "answered by another process",
}


def _reached(
    *failing: str, own: int, hosts: int, outcome: Literal["silent", "stranger", "unanswered"] = "silent"
) -> ReachFacts:
    peers = [f"node{number}" for number in range(hosts) if number != own]
    return ReachFacts(
        attempts=tuple(
            Reach(peer, f"10.0.0.{int(peer[4:]) + 1}", 40000, outcome if peer in failing else "open") for peer in peers
        )
    )


_BY_NCCL = (
    Reach("node1", "10.0.0.2", 40000, "open", library="NCCL"),
    Reach("node1", "10.0.0.2", 40000, "silent", library="NCCL"),
)
_GLOO_APART = ReachFacts(attempts=(_BY_NCCL[0], Reach("node1", "192.168.0.2", 40000, "silent", library="Gloo")))


_TRIED = TrialFacts(
    trials=(
        Trial(
            "path",
            "other interface eth1 (10.1.0.2 -> 10.1.0.4)",
            "export NCCL_SOCKET_IFNAME='=eth1'",
            True,
            peer="node3",
            after=1.0,
            unit="open",
        ),
    )
)
_OTHERWISE = "allow all TCP traffic between the hosts of the job on the network it uses now."
_FIX_OF_GLOO = "Set GLOO_SOCKET_IFNAME to the interface that NCCL uses, or allow all TCP traffic on Gloo's network."


_EFFECT_OF_STRANGERS = (
    "The ranks join the store, but the first collective connects to another process, and fails or blocks until the "
    "timeout."
)


_SILENT = (
    "Connection timed out",
    "timed out connecting",
    "No route to host",
    "Network is unreachable",
    "imeout",
    "POLLOUT",
)


def _from_logs(job: Job) -> Iterator[Finding]:
    """Report failed connections. A refusal comes from a host that is up: its process ended, or a firewall rejects."""
    for group in event_groups(
        job, "net.peer.connect_failed", by=("host", "host2", "host3", "remote", "err", "call", "mesh")
    ):
        if set_up_after(job, group.events[-1]) or (
            all("retrying" in event.text for event in group.events) and sum(event.count for event in group.events) < 2
        ):
            continue
        yield _logged_finding(job, group)
    for group in event_groups(job, "host.ssh_failed", by=("host", "err")):
        yield _logged_finding(job, group)
    for group in event_groups(job, "nccl.recv_fail", by=("host", "err")):
        if any(word in (group.value("err") or "") for word in _SILENT):
            yield _logged_finding(job, group)
    if not is_logged(job, *_MORE_EXACT):
        for group in event_groups(job, "gloo.mesh"):
            yield _logged_finding(job, group)


def _logged_finding(job: Job, group: EventGroup) -> Finding:
    target = group.value("remote", "host") or group.value("host2", "host3")
    error, earlier = group.value("err") or "", failed_before(job, group.first)
    silent = any(word in error for word in _SILENT)
    confidence = 0.85 if silent and target else 0.7 if silent else 0.6
    by_ssh, by_gloo = group.kind == "host.ssh_failed", "gloo" in group.first.text.lower()
    host = group.hosts[0] if len(group.hosts) == 1 else None
    who = "SSH cannot connect" if by_ssh else f"{host} cannot connect" if host else "Cannot connect"
    claim = "Gloo could not connect all ranks" if by_gloo and not target else f"{who} to {target or 'a peer'}"
    return finding_from_logs(
        group,
        claim + (f": {error}" if error and error not in _NO_REASONS else ""),
        effect="" if by_ssh else _RANK_FAILS,
        evidence={"earlier error": earlier.text.strip()[:160]} if earlier else None,
        severity=_severity(group, earlier, silent),
        confidence=0.4 if earlier else confidence,
        fix=f"Fix the earlier error at {earlier.file}:{earlier.line} first."
        if earlier
        else _ssh_fix(group, error)
        if by_ssh
        else _logged_fix(target, host, error, "GLOO_SOCKET_IFNAME" if by_gloo else "NCCL_SOCKET_IFNAME"),
        symptoms=not earlier,
    )


_NO_REASONS = ("no error", "Caught unexpected exception while connecting")
"""Texts of Gloo that name no reason (gloo/transport/tcp/pair.cc)."""


def _ssh_fix(group: EventGroup, error: str) -> str:
    host, port = group.value("host"), group.value("port")
    first = f"Start an SSH server on {host}" if "refused" in error else f"Check that {host} is running"
    return f"{first}, and verify on the host that launches the job that this command connects:\nnc -zv {host} {port}"


def _logged_fix(target: str | None, host: str | None, error: str, variable: str) -> str:
    if "refused" in error:
        return (
            f"Find the first error of the process on {target or 'the peer'}, which has ended or listens on another "
            "address."
        )
    if not target:
        return (
            f"Set {variable} to an interface on a network that all hosts share, then run `doctor check --probe light` "
            "on all ranks."
        )
    between = f"between {host} and {target}" if host else f"to and from {target}"
    return f"Set {variable} to the interface that reaches {target}, or allow all TCP traffic {between}."


_RANK_FAILS = "The rank fails when it connects to its peer, and the other ranks wait for it until the timeout."


def _severity(group: EventGroup, earlier: Event | None, silent: bool) -> Severity | None:
    """A refusal after a failure is a consequence; retries in the last lines may have succeeded later."""
    if earlier:
        return Severity.WARNING if silent else Severity.INFO
    return Severity.WARNING if all("retrying" in event.text for event in group.events) else None


_MORE_EXACT = (
    "nccl.shm_extend",
    "nccl.shm_create",
    "nccl.shm_attach",
    "shm.full",
    "host.shm_full",
    "limit.memlock",
    "limit.files",
    "nccl.ibv_fail",
    "nccl.modify_qp",
    "nccl.ib_wc",
    "nccl.syscall_fail",
    "nccl.cuda_fail",
    "nccl.dup_gpu",
    "nccl.plugin.fail",
    "nccl.plugin.ofi",
    "nccl.bootstrap.noif",
    "nccl.bootstrap.oob_missing",
    "nccl.peer_closed",
    "nccl.peer_closed.old",
    "nccl.recv_fail",
    "net.peer.connect_failed",
)


@check(
    id="NET013",
    severity=Severity.ERROR,
    scope=Scope.JOB,
    when="PM",
    needs=(ReachFacts,),
    from_logs=_from_logs,
    impacts={
        r"MPICH|Open MPI|^SSH": (
            "The launcher cannot start all processes, and the job ends before the training begins."
        ),
        r"over Gloo's network": (
            "The store works, but Gloo cannot create its connections: init_process_group() or the first "
            "collective fails."
        ),
    },
    cases=lambda: (
        Passes("not measured", healthy(hosts=2, per_host=1)),
        Passes(
            "all pairs connect",
            healthy(2, 1).put(_reached(own=0, hosts=2), ranks=(0,)).put(_reached(own=1, hosts=2), ranks=(1,)),
        ),
        Fails(
            "a firewall on one host of four",
            healthy(4, 1)
            .put(_reached("node2", own=0, hosts=4), ranks=(0,))
            .put(_reached("node2", own=1, hosts=4), ranks=(1,))
            .put(_reached(own=2, hosts=4), ranks=(2,))
            .put(_reached("node2", own=3, hosts=4), ranks=(3,)),
            ranks=(2,),
        ),
        Fails(
            "two hosts that never meet",
            healthy(2, 2)
            .put(_reached("node1", own=0, hosts=2), ranks=(0, 1))
            .put(_reached("node0", own=1, hosts=2), ranks=(2, 3)),
            ranks=(0, 1, 2, 3),
        ),
        Fails(
            "one pair of four hosts",
            healthy(4, 1)
            .put(_reached("node3", own=1, hosts=4), ranks=(1,))
            .put(_reached(own=0, hosts=4), ranks=(0,))
            .put(_reached(own=2, hosts=4), ranks=(2,))
            .put(_reached(own=3, hosts=4), ranks=(3,)),
            ranks=(1, 3),
        ),
        Fails(
            "one pair of four hosts, which has another network",
            healthy(4, 1)
            .put(_reached("node3", own=1, hosts=4), ranks=(1,))
            .put(_reached(own=0, hosts=4), ranks=(0,))
            .put(_TRIED, ranks=(1,)),
            ranks=(1, 3),
        ),
        Fails(
            "a firewall on all of three hosts",
            healthy(3, 1)
            .put(_reached("node1", "node2", own=0, hosts=3), ranks=(0,))
            .put(_reached("node0", "node2", own=1, hosts=3), ranks=(1,))
            .put(_reached("node0", "node1", own=2, hosts=3), ranks=(2,)),
            ranks=(0, 1, 2),
        ),
        Passes(
            "a process that was busy",
            healthy(2, 1).put(_reached("node1", own=0, hosts=2, outcome="unanswered"), ranks=(0,)),
        ),
        Fails(
            "a bridge of that address on both hosts",
            healthy(2, 1)
            .put(_reached("node1", own=0, hosts=2, outcome="stranger"), ranks=(0,))
            .put(_reached("node0", own=1, hosts=2, outcome="stranger"), ranks=(1,)),
            ranks=(0, 1),
        ),
        Fails(
            "NCCL's network is open and Gloo's is not",
            healthy(2, 1).put(_GLOO_APART, ranks=(0,)).put(_reached(own=1, hosts=2), ranks=(1,)),
            ranks=(0, 1),
            severity=Severity.WARNING,
        ),
        Fails(
            "neither NCCL's network nor Gloo's is open",
            healthy(2, 1)
            .put(ReachFacts(attempts=(_BY_NCCL[1], _GLOO_APART.attempts[1])), ranks=(0,))
            .put(_reached(own=1, hosts=2), ranks=(1,)),
            ranks=(0, 1),
        ),
        Passes(
            "a connection that was tried again, and made",
            logged(
                "node1:41:77 [0] NCCL INFO socketPollConnect: connect to 10.0.0.2<41234> returned Connection refused, "
                "retrying (1/34) after sleep for 100 msec",
                "node1:41:77 [0] NCCL INFO comm 0x55aa rank 0 nranks 2 cudaDev 0 busId 7000 - Init COMPLETE",
            ),
        ),
        Fails(
            "the peer's port is filtered",
            logged(
                "node1:41:77 [0] misc/socket.cc:484 NCCL WARN socketPollConnect: connect to node2<41234> returned "
                "Connection timed out, exceeded error retry count after 35 attempts"
            ),
        ),
        Fails(
            "ssh of a launcher",
            logged("ssh: connect to host worker-1 port 22: No route to host"),
        ),
        Fails(
            "attempts that go on when the log ends",
            logged(
                *(
                    "node1:41:77 [0] NCCL INFO socketPollConnect: connect to 10.0.0.2<41234> returned Connection "
                    f"timed out, retrying ({number}/34) after sleep for {number}00 msec"
                    for number in (1, 2, 3)
                )
            ),
            severity=Severity.WARNING,
        ),
        Fails(
            "a peer that may have ended for a reason of its own",
            logged(
                "ModuleNotFoundError: No module named 'einops'",
                "node1:41:77 [0] misc/socket.cc:484 NCCL WARN socketPollConnect: connect to 10.0.0.2<41234> returned "
                "Connection refused, exceeded error retry count after 35 attempts",
            ),
            severity=Severity.INFO,
        ),
    ),
)
def peer_unreachable(job: Job) -> Iterator[Verdict]:
    """Ask whether every pair of hosts can connect on ephemeral ports.

    Why it hurts: the ranks join the store, but the first collective blocks until the timeout or fails with `No route
    to host`.
    Fix: Allow all TCP traffic between the hosts of the job in their firewalls and security groups.
    """
    outcomes = _outcomes(job)
    if not outcomes:
        yield Skip("no connection between hosts was attempted")
        return
    ranks: dict[str, tuple[int, ...]] = {}
    for local in job.by_host():
        ranks[local.hosts[0].name] = ranks.get(local.hosts[0].name, ()) + local.ranks
    # The training backend first; a job on NCCL may also have Gloo groups, which need not be used.
    aside = {way: outcome for way, outcome in outcomes.items() if way.library == "Gloo" and way.by("NCCL") in outcomes}
    main = {way: outcome for way, outcome in outcomes.items() if way not in aside}
    works = {way: outcome for way, outcome in aside.items() if outcomes[way.by("NCCL")].outcome not in FAILURES}
    for finding in (*_judge(main, ranks, Severity.ERROR), *_judge(works, ranks, Severity.WARNING)):
        yield with_trials(job, finding, "path", otherwise=_OTHERWISE if not finding.fix else finding.fix)
    for way, reach in main.items():
        if reach.outcome == "unanswered":
            reason = f"{way.second} accepted a connection from {way.first}, but its process did not answer in time"
            yield Unknown(reason, ranks.get(way.second, ()))
        elif reach.outcome == "unresolved":
            yield Unknown(f"{way.first} has no address for {way.second}", ranks.get(way.first, ()))


class _DialedPath(NamedTuple):
    first: str
    second: str
    library: str | None

    def by(self, library: str) -> _DialedPath:
        return self._replace(library=library)


_Outcomes = dict[_DialedPath, Reach]


def _judge(outcomes: _Outcomes, ranks: dict[str, tuple[int, ...]], severity: Severity) -> Iterator[Finding]:
    reached = {(way.first, way.second): reach for way, reach in outcomes.items()}
    every = [MeasuredPath(first, second, 0.0) for first, second in reached]
    failing = [path for path in every if reached[path.first, path.second].outcome in FAILURES]
    which = " over Gloo's network" if severity is Severity.WARNING else ""
    explains = ("NET014", "NET015", "NET027") if severity is Severity.ERROR else ()
    names = {name for path in every for name in path.pair}
    fix = _FIX_OF_GLOO if which else ""
    effect = ""
    if failing and all(reached[path.first, path.second].outcome == "stranger" for path in failing):
        effect = _EFFECT_OF_STRANGERS
        fix = "Set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME to an interface whose address is different on every host."
    if len(failing) == len(every) and len(names) > 2:
        yield Finding(
            f"None of the {len(names)} hosts can connect to another host{which}",
            ranks=tuple(sorted(rank for name in names for rank in ranks.get(name, ()))),
            severity=severity,
            effect=effect,
            fix=fix,
            explains=explains,
            evidence={"pairs": _words(failing, reached)},
        )
        return
    hosts, rest = take_hosts(every, failing, share=0.5)
    for host, paths in hosts:
        yield Finding(
            f"Connections between {host} and {len({path.pair for path in paths})} other hosts fail{which}",
            ranks=ranks.get(host, ()),
            severity=severity,
            effect=effect,
            fix=fix or f"Allow all TCP traffic between {host} and the other hosts in the firewall or security group.",
            explains=explains,
            hosts=(host,),
            evidence={"pairs": _words(paths, reached), "tried": sum(host in path.pair for path in every)},
        )
    if rest:
        apart = {name for path in rest for name in path.pair}
        first, second = rest[0].first, rest[0].second
        yield Finding(
            f"{first} cannot connect to {second}{which}"
            if len(rest) == 1
            else f"{first} and {second} cannot connect to each other{which}"
            if len(apart) == 2
            else f"{len(rest)} connections between hosts fail{which}, for example from {first} to {second}",
            ranks=tuple(sorted(rank for name in apart for rank in ranks.get(name, ()))),
            severity=severity,
            effect=effect,
            fix=fix or _allowing(apart),
            explains=explains,
            evidence={"pairs": _words(rest, reached)},
        )


def _allowing(hosts: Iterable[str]) -> str:
    """Empty, for that of the check, if there are many hosts."""
    names = sorted(hosts, key=natural_key)
    return (
        f"Allow all TCP traffic between {conjunction(names)} in their firewalls and security groups."
        if len(names) <= 4
        else ""
    )


def _outcomes(job: Job) -> _Outcomes:
    outcomes: _Outcomes = {}
    for reach, identical in job.each(ReachFacts, also=(HostFacts,)):
        for attempt in reach.attempts:
            if attempt.purpose == "peer":
                for host in identical.hosts:
                    way = _DialedPath(host, attempt.peer, attempt.library)
                    known = outcomes.get(way)
                    if way.first != way.second and (known is None or known.outcome != "open"):
                        outcomes[way] = attempt
    return outcomes


def _words(paths: Sequence[MeasuredPath], reached: dict[tuple[str, str], Reach]) -> list[str]:
    return [f"{path.first} -> {path.second} {_attempt(reached[path.first, path.second])}" for path in paths[:16]]


def _attempt(reach: Reach) -> str:
    """``(10.0.0.4 from eth0): no response``."""
    source = f" from {reach.interface}" if reach.interface else ""
    return f"({reach.address}{source}): {FAILURES[reach.outcome]}"
