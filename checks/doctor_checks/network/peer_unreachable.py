"""NET013: hosts can't open connections to one another."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.api import (
    Finding,
    HostFacts,
    Job,
    MeasuredPath,
    Reach,
    ReachFacts,
    Scope,
    Severity,
    Sick,
    Skip,
    Verdict,
    Well,
    check,
    healthy,
    take_hosts,
)


def _reached(*failing: str, own: int, hosts: int) -> ReachFacts:
    """What the host ``own`` of ``hosts`` would report if connections to ``failing`` got no answer."""
    peers = [f"node{number}" for number in range(hosts) if number != own]
    return ReachFacts(
        attempts=tuple(
            Reach(peer, f"10.0.0.{int(peer[4:]) + 1}", 40000, "silent" if peer in failing else "open") for peer in peers
        )
    )


@check(
    id="NET013",
    severity=Severity.ERROR,
    scope=Scope.JOB,
    when="PM",
    needs=(ReachFacts,),
    cases=lambda: (
        Well("nobody measured", healthy(hosts=2, per_host=1)),
        Well(
            "all pairs connect",
            healthy(2, 1).put(_reached(own=0, hosts=2), ranks=(0,)).put(_reached(own=1, hosts=2), ranks=(1,)),
        ),
        Sick(
            "a firewall on one host of four",
            healthy(4, 1)
            .put(_reached("node2", own=0, hosts=4), ranks=(0,))
            .put(_reached("node2", own=1, hosts=4), ranks=(1,))
            .put(_reached(own=2, hosts=4), ranks=(2,))
            .put(_reached("node2", own=3, hosts=4), ranks=(3,)),
            ranks=(2,),
        ),
        Sick(
            "two hosts that never meet",
            healthy(2, 2)
            .put(_reached("node1", own=0, hosts=2), ranks=(0, 1))
            .put(_reached("node0", own=1, hosts=2), ranks=(2, 3)),
            ranks=(0, 1, 2, 3),
        ),
        Sick(
            "one pair of four hosts",
            healthy(4, 1)
            .put(_reached("node3", own=1, hosts=4), ranks=(1,))
            .put(_reached(own=0, hosts=4), ranks=(0,))
            .put(_reached(own=2, hosts=4), ranks=(2,))
            .put(_reached(own=3, hosts=4), ranks=(3,)),
            ranks=(1, 3),
        ),
    ),
)
def peer_unreachable(job: Job) -> Iterator[Verdict]:
    """Ask whether every pair of hosts can open connections on ephemeral ports.

    Why it hurts: NCCL and Gloo listen on ports that the kernel picks (32768 to 60999) in both directions; the store
    works and the first collective waits until the time-out, or ends with `No route to host`.
    Fix: allow all TCP traffic between the hosts of the job: a security group that admits itself,
    `sudo firewall-cmd --zone=trusted --add-source=<subnet>` or `sudo ufw allow from <subnet>`.
    """
    outcomes = _outcomes(job)
    if not outcomes:
        yield Skip("no connection between hosts was tried")
        return
    every = [MeasuredPath(first, second, 0.0) for first, second in outcomes]
    failing = [path for path in every if outcomes[path.first, path.second] != "open"]
    ranks = _ranks_by_host(job)
    hosts, rest = take_hosts(every, failing, share=0.5)
    for host, paths in hosts:
        evidence = {"pairs": _words(paths, outcomes), "tried": sum(host in path.pair for path in every)}
        yield Finding(
            f"{host} cannot be reached from, or cannot reach, {len(paths)} hosts",
            ranks=ranks.get(host, ()),
            hosts=(host,),
            evidence=evidence,
        )
    if rest:
        names = tuple(dict.fromkeys(name for path in rest for name in path.pair))
        more = f" and {len(rest) - 1} more" if len(rest) > 1 else ""
        yield Finding(
            f"{rest[0].first} gets no connection to {rest[0].second}{more}",
            ranks=tuple(sorted(rank for name in names for rank in ranks.get(name, ()))),
            evidence={"pairs": _words(rest, outcomes)},
        )


def _outcomes(job: Job) -> dict[tuple[str, str], str]:
    """By pair of hosts: ``open`` where one attempt was, else the last failure. Names that do not resolve are left to
    others."""
    outcomes: dict[tuple[str, str], str] = {}
    for reach, alike in job.each(ReachFacts, also=(HostFacts,)):
        for attempt in reach.attempts:
            if attempt.purpose == "peer":
                for host in alike.hosts:
                    _note(outcomes, host, attempt)
    return outcomes


def _note(outcomes: dict[tuple[str, str], str], host: str, attempt: Reach) -> None:
    pair = (host, attempt.peer)
    if host != attempt.peer and outcomes.get(pair) != "open":
        outcomes[pair] = attempt.outcome


def _ranks_by_host(job: Job) -> dict[str, tuple[int, ...]]:
    ranks: dict[str, tuple[int, ...]] = {}
    for local in job.by_host():
        ranks[local.hosts[0].name] = ranks.get(local.hosts[0].name, ()) + local.ranks
    return ranks


def _words(paths: list[MeasuredPath] | tuple[MeasuredPath, ...], outcomes: dict[tuple[str, str], str]) -> list[str]:
    return [f"{path.first} -> {path.second}: {outcomes[path.first, path.second]}" for path in paths[:16]]
