"""NET006: the port of the master is unreachable."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

from doctor.analysis.logs.event_timeline import (
    events_of_kinds,
    failed_before,
    set_up_after,
    set_up_before,
    unroutable_clients,
)
from doctor.api import (
    EventGroup,
    Finding,
    IdenticalRanks,
    Job,
    Severity,
    Skip,
    Unknown,
    Verdict,
    check,
    event_groups,
    finding_from_logs,
    is_logged,
    merge,
    ranks_in_words,
)
from doctor.core.text import HERE
from doctor.facts import Event, HostFacts, MasterFacts, Reach, ReachFacts
from doctor.testing import Fails, Passes, healthy, logged


def _tried(outcome: Literal["open", "refused", "silent", "unroutable"]) -> ReachFacts:
    return ReachFacts(attempts=(Reach("node0", "10.0.0.1", 29500, outcome, "master", 3.0, "eth0", "10.0.0.2"),))


_TWO_WAYS = ReachFacts(
    attempts=(
        Reach("node0", "fd00::1", 29500, "unroutable", "master", 0.0),
        Reach("node0", "10.0.0.1", 29500, "open", "master", 0.001, "eth0", "10.0.0.2"),
    )
)


_SILENT = ("torch.store.connect_timeout", "net.master.silent", "torch.store.validate")
_OLD = ("torch.store.connect_timeout.old", "torch.store.refused.old")
_MEANT_WELL = ("22", "97", "99", "115", "10049")
"""Errors of attempts that others compensate: the host cannot use the address, or the attempt is in progress."""
_FINAL = ("110", "113", "101")
"""Errors that retries do not resolve: timed out, no route, network unreachable."""


def _from_logs(job: Job) -> Iterator[Finding]:
    """Report failed connections; clients retry until rank 0 listens, so single refusals during startup are normal."""
    strangers = {event.value("port") for event in events_of_kinds(job, "torch.store.stranger")}
    groups: dict[str, list[Event]] = {}
    for event in events_of_kinds(job, *_SILENT, "torch.store.connect_fail"):
        is_timeout = event.kind == "torch.store.validate" and event.value("what") == "timed out"
        is_error = event.kind != "torch.store.validate" and event.value("errno") not in _MEANT_WELL
        if (is_timeout or is_error) and not set_up_after(job, event):
            groups.setdefault(event.value("port") or event.value("port2") or "", []).append(event)
    for port, events in groups.items():
        if port not in strangers:
            yield _logged_finding(job, EventGroup(events[0].kind, tuple(events)), port)
    for group in event_groups(job, *_OLD):
        if not set_up_after(job, group.events[-1]) and not set_up_before(job, group.first):
            yield _logged_finding(job, group, None)


def _logged_finding(job: Job, group: EventGroup, port: str | None) -> Finding:
    """If a rank failed earlier, rank 0 may have ended for that reason."""
    earlier, host = failed_before(job, group.first), group.value("host", "host2")
    why = group.value("err") if group.value("errno") or group.kind in _OLD else None
    place = f"the master {host}:{port}" if host and port else "the master"
    # Python's exceptions do not name the peer.
    guessed = group.kind == "torch.store.refused.old"
    return finding_from_logs(
        group,
        f"A connection failed, probably to the master: {why}"
        if guessed
        else f"No route to {place}: {why}"
        if why and "unreachable" in why
        else f"{place[:1].upper()}{place[1:]} is unreachable: {why or 'connection timed out'}",
        effect=f"{'If it was to the master, the' if guessed else 'The'} rank cannot join the job, and the other ranks "
        "wait for it until their timeout.",
        evidence={"earlier error": earlier.text.strip()[:160]} if earlier else None,
        severity=Severity.WARNING if earlier else None,
        confidence=0.4 if earlier else _confidence(group),
        explains=("ENV005",) if is_logged(job, "torch.store.clients") and unroutable_clients(job) else (),
        fix=f"Fix the earlier error at {earlier.file}:{earlier.line} first."
        if earlier
        else _fix_of_log(why or "", host, port, group.on_hosts),
        symptoms=not earlier,
    )


def _fix_of_log(why: str, host: str | None, port: str | None, place: str) -> str:
    if "route" in why or "unreachable" in why:
        return (
            "Set MASTER_ADDR to an address of rank 0's host to which "
            f"{place.removeprefix(' on ') or 'the host of this rank'} has a route."
        )
    target = " ".join((host or '"$MASTER_ADDR"', port or '"$MASTER_PORT"'))
    if "refused" in why:
        return f"Start rank 0 first, and start the other ranks when `nc -zv {target}` connects."
    return (
        f"Check that rank 0 is running, and allow {f'port {port}' if port else 'its port'} in the firewall until this "
        f"command connects{place}:\nnc -zv {target}"
    )


def _confidence(group: EventGroup) -> float:
    if group.kind in _OLD:
        return 0.7
    gave_up = any(
        event.kind in _SILENT or event.value("host") or event.value("errno") in _FINAL for event in group.events
    )
    return 0.85 if gave_up else 0.6


@check(
    id="NET006",
    severity=Severity.ERROR,
    when="PM",
    needs=(ReachFacts,),
    from_logs=_from_logs,
    impacts={
        r"^Nothing listens|refused": (
            "The connection is refused: init_process_group() retries until its timeout and then fails with `The "
            "client socket has timed out`."
        ),
        r"[Nn]o route|unreachable: Network": (
            "Ranks without a route to the master cannot join the job: init_process_group() fails at its timeout."
        ),
        r"No response|timed out": (
            "init_process_group() blocks until its timeout and then fails with `The client socket has timed out`."
        ),
    },
    cases=lambda: (
        Passes("not measured", healthy(hosts=2, per_host=1)),
        Passes("the master answers", healthy(2, 1).put(_tried("open"))),
        Passes("one of the master's addresses answers", healthy(2, 1).put(_TWO_WAYS)),
        Passes(
            "one rank of each host tried for the others",
            healthy(2, 2).put(_tried("open"), ranks=(0, 2)).put(ReachFacts(), ranks=(1, 3)),
        ),
        Fails(
            "a firewall swallows packets to the master's port",
            healthy(2, 2).put(_tried("open"), ranks=(0, 1)).put(_tried("silent"), ranks=(2, 3)),
            ranks=(2, 3),
        ),
        Fails("no process listens", healthy(hosts=2, per_host=1).put(_tried("refused")), ranks=(0, 1)),
        Fails(
            "no route to the master",
            healthy(2, 1).put(_tried("open"), ranks=(0,)).put(_tried("unroutable"), ranks=(1,)),
            ranks=(1,),
        ),
        Passes(
            "rank 0 started a little later",
            logged(
                "[W socket.cpp:663] [c10d] The client socket has failed to connect to [node1]:29500 (errno: 111 - "
                "Connection refused).",
                "node2:41:77 [0] NCCL INFO comm 0x55aa rank 1 nranks 2 cudaDev 0 busId 7000 - Init COMPLETE",
            ),
        ),
        Passes(
            "a host without IPv6",
            logged(
                "[W socket.cpp:663] [c10d] The client socket has failed to connect to [localhost]:29500 (errno: 99 - "
                "Cannot assign requested address)."
            ),
        ),
        Passes(
            "an address that this host has no use for",
            logged(
                "[W socket.cpp:601] [c10d] The client socket has failed to connect to [node1]:22456 (errno: 22 - "
                "Invalid argument)."
            ),
        ),
        Fails(
            "every address of the master was tried",
            logged(
                "RuntimeError: The client socket has failed to connect to any network address of (node1, 29500). The "
                "client socket has failed to connect to 10.0.0.1:29500 (errno: 110 - Connection timed out)."
            ),
        ),
        Fails(
            "rank 0 failed for another reason before",
            logged(
                "ModuleNotFoundError: No module named 'einops'",
                "torch.distributed.DistNetworkError: The client socket has timed out after 300000ms while trying to "
                "connect to (10.0.0.1, 29500).",
            ),
            severity=Severity.WARNING,
        ),
    ),
)
def master_unreachable(job: Job) -> Iterator[Verdict]:
    """Ask whether every rank can connect to MASTER_ADDR:MASTER_PORT.

    Why it hurts: init_process_group() blocks and then fails with `The client socket has timed out`, whether the port is
    closed, filtered or on another network.
    Fix: Start rank 0 first, and allow its port in the firewall: `nc -zv "$MASTER_ADDR" "$MASTER_PORT"` must connect.
    """
    every = [
        (tuple(attempt for attempt in reach.attempts if attempt.purpose == "master"), identical)
        for reach, identical in job.each(ReachFacts, also=(MasterFacts, HostFacts))
    ]
    if not any(attempts for attempts, _ in every):
        yield Skip("no connection to the master was attempted")
        return
    tried: dict[str, set[tuple[str, int]]] = {}
    for attempts, identical in every:
        for host in identical.hosts if attempts else ():
            tried.setdefault(host, set()).update((attempt.address, attempt.port) for attempt in attempts)
    untried = [rank for attempts, identical in every if not attempts for rank in _untried(identical, tried)]
    if untried:
        yield Unknown("no connection to the MASTER_ADDR of these ranks was attempted", tuple(untried))
    failed = [(attempts, identical) for attempts, identical in every if "open" not in {one.outcome for one in attempts}]
    findings = (_finding(attempts, identical.ranks) for attempts, identical in failed)
    yield from merge((finding for finding in findings if finding is not None), job.place_of)


def _untried(identical: IdenticalRanks, tried: Mapping[str, set[tuple[str, int]]]) -> tuple[int, ...]:
    master = identical.find(MasterFacts)
    if master is None or not master.resolved or master.port is None:
        return ()
    places = {(address, master.port) for address in master.resolved}
    return () if all(places & tried.get(host, set()) for host in identical.hosts) else identical.ranks


def _finding(attempts: tuple[Reach, ...], ranks: tuple[int, ...]) -> Finding | None:
    """Report the most informative attempt: refused, then silent, then no route. NET004 reports unresolved names."""
    order = ("refused", "silent", "unroutable")
    known = [attempt for attempt in attempts if attempt.outcome in order]
    if not known:
        return None
    worst = min(known, key=lambda attempt: order.index(attempt.outcome))
    way = f" (over {worst.interface} from {worst.source_address})" if worst.interface else ""
    claim = {
        "refused": f"Nothing listens on the master port {worst.address}:{worst.port}",
        "silent": f"No response from the master port {worst.address}:{worst.port}{way}",
        "unroutable": f"No route to the master {worst.address}:{worst.port}{way}",
    }
    refused = worst.outcome == "refused"
    evidence = {
        "interface": worst.interface if refused else None,
        "source_address": worst.source_address if refused else None,
        "seconds": worst.seconds,
    }
    fix = {
        "refused": f"Start rank 0 before the other ranks, with MASTER_PORT={worst.port}.",
        "silent": f"Allow TCP port {worst.port} of {worst.address} in the firewall or security group until this "
        f"command connects on {HERE}:\nnc -zv {worst.address} {worst.port}",
        "unroutable": f"Add a route to {worst.address}, or set MASTER_ADDR to an address of rank 0's host that "
        f"{ranks_in_words(ranks)} can reach.",
    }
    return Finding(claim[worst.outcome], ranks=ranks, evidence=evidence, fix=fix[worst.outcome])
