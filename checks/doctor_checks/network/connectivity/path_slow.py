"""NET014: a path between hosts is slower than the others."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Literal

from doctor.analysis.fabric.bandwidth_suspects import SlowPart, SlowParts, is_reachable, slow_parts, unmeasured_pairs
from doctor.analysis.fabric.localization.confirmation import WHOLE_HOSTS
from doctor.analysis.fabric.p2p_bandwidth import slow_rails
from doctor.analysis.fabric.peak_bandwidth import SlowMessages, messages_below, paths_below
from doctor.analysis.fabric.sent_samples import sent_samples
from doctor.analysis.fabric.slow_paths import MeasuredPath, slow_paths
from doctor.analysis.fabric.transfer_matrix import HostBandwidths, bandwidths, subnets_of
from doctor.api import Finding, Job, Scope, Severity, Skip, Unknown, Verdict, check
from doctor.facts import (
    Interface,
    InterfaceFacts,
    MissingReason,
    PathFacts,
    PathSample,
    RdmaFacts,
    Reach,
    ReachFacts,
    TransferFacts,
)
from doctor.testing import Fails, JobBuilder, Passes, healthy
from doctor.testing.collective_timings import exchanged
from doctor.testing.host_transfers import across, at_times, between, received_by, sent_by, touching, transferred
from doctor_checks._trial_conclusions import with_trials
from doctor_checks.network.connectivity._slow_rails import bandwidth_evidence, rail_findings, rate_in_words

_NOISE = 500e-6
"""Seconds by which a slow round trip must also be longer. Interrupt moderation and sleeping CPUs add up to 200 µs to a
healthy path, and half a millisecond does not affect a training step."""

_LEAST_PATHS = 3
_SHOWN = 8


def _trips(
    hosts: int, far: Callable[[int, int], bool] | None = None, times: float = 30.0, job: JobBuilder | None = None
) -> JobBuilder:
    sketch = job or healthy(hosts, 1)
    for own in range(hosts):
        samples = tuple(
            PathSample(
                f"node{peer}", round_trip=100e-6 * (times if far and far(own, peer) else 1.0) + 1e-6 * (peer % 3)
            )
            for peer in range(hosts)
            if peer != own
        )
        sketch = sketch.put(PathFacts(samples=samples), hosts=(f"node{own}",))
    return sketch


def _reached(sketch: JobBuilder, host: int, outcome: Literal["open", "silent"]) -> JobBuilder:
    attempt = Reach(f"node{host}", f"10.0.0.{host + 1}", 40000, outcome)
    others = [member.rank for member in sketch.members if member.rank != host]
    return sketch.put(ReachFacts(attempts=(attempt,)), ranks=others)


def _over_nccl(*slow: int, share: float = 0.1) -> JobBuilder:
    def is_slow(source: int, target: int) -> bool:
        return source // 4 != target // 4 and bool({source, target}.intersection(slow))

    return _trips(4, job=exchanged(is_slow, share=share))


def _fabric(share: float, *, ports: int = 2, ranks: int = 2) -> JobBuilder:
    return _trips(2, job=exchanged(hosts=2, per_host=ranks, rdma=ports, between=share * 50e9))


def _sockets(share: float) -> JobBuilder:
    return _trips(2, job=exchanged(hosts=2, per_host=1, between=share * 12.5e9))


def _no_speed(interfaces: Iterable[Interface]) -> tuple[Interface, ...]:
    return tuple(Interface(one.name, addresses=one.addresses) for one in interfaces)


@check(
    id="NET014",
    severity=Severity.WARNING,
    scope=Scope.JOB,
    needs=(PathFacts,),
    or_needs=(TransferFacts,),
    impacts={
        r"^Traffic between|messages between hosts are slow": (
            "Collectives between hosts are limited to this bandwidth; no error is raised."
        ),
        r"[Rr]ound trip": (
            "Each message on these paths takes longer, so collectives of small tensors slow down the whole job."
        ),
    },
    cases=lambda: (
        Passes("not measured", healthy(hosts=4, per_host=1)),
        Passes("all paths equally fast", transferred(8)),
        Passes("all round trips equally fast", _trips(4)),
        Passes("a single pair has nothing to be compared with", transferred(2, touching(1), share=0.5)),
        Passes("a single pair at 60 % of what one stream carries", transferred(2, usual=0.75e9)),
        Fails(
            "a single pair at a tenth of what one stream carries",
            transferred(2, usual=0.125e9),
            ranks=(0, 1),
            severity=Severity.INFO,
        ),
        Passes("one host has 80 % of the usual bandwidth", transferred(8, touching(4), share=0.8)),
        Passes(
            "one host that has a processor for a tenth of the time", transferred(8, touching(4), share=0.1, waited=0.9)
        ),
        Passes("one transfer of one pair was slow", transferred(8, lambda *way: way == (1, 2, 0), share=0.3)),
        Passes("one host that light probes do not reach", _reached(transferred(6, failed=touching(2)), 2, "silent")),
        Fails("one host is slow to all", transferred(6, touching(4)), ranks=(4,)),
        Fails("one host has half of the usual bandwidth", transferred(8, touching(4), share=0.5), ranks=(4,)),
        Fails("one host is slow, and busy", transferred(8, touching(4), waited=0.5), ranks=(4,)),
        Fails("one host of three is slow", transferred(3, touching(2)), ranks=(2,)),
        Fails("one host sends slowly", transferred(6, sent_by(1)), ranks=(1,)),
        Fails("one host receives slowly", transferred(6, received_by(1)), ranks=(1,)),
        Fails("one host is slow at times", transferred(8, at_times(touching(5))), ranks=(5,)),
        Fails("one link is slow", transferred(6, between(1, 2)), ranks=(1, 2)),
        Fails("a boundary between two halves", transferred(8, across(range(4))), ranks=tuple(range(8))),
        Fails(
            "one host that no other can exchange bytes with",
            _reached(transferred(6, failed=touching(2)), 2, "open"),
            ranks=(2,),
        ),
        Fails(
            "all hosts far below what their interfaces carry",
            transferred(4, usual=12e6),
            ranks=(0, 1, 2, 3),
            severity=Severity.INFO,
        ),
        Passes("messages of all pairs over NCCL equally fast", _over_nccl()),
        Passes("one card has 80 % of the usual bandwidth", _over_nccl(5, share=0.8)),
        Fails("one card of one host is slow over NCCL", _over_nccl(5), ranks=(5,)),
        Fails("all cards of one host are slow over NCCL", _over_nccl(4, 5, 6, 7), ranks=(4, 5, 6, 7)),
        Passes("two hosts at 60 % of their InfiniBand", _fabric(0.6)),
        Fails("two hosts at a tenth of their InfiniBand", _fabric(0.1), ranks=(0, 1, 2, 3), severity=Severity.INFO),
        Passes("ports that are shared are no slow ones", _fabric(0.1, ports=1, ranks=8)),
        Passes("ports of unknown rate", _fabric(0.1).drop(RdmaFacts, MissingReason.HIDDEN, "no /sys")),
        Passes("two hosts at 60 % of their interface", _sockets(0.6)),
        Fails("two hosts at a tenth of their interface", _sockets(0.1), ranks=(0, 1), severity=Severity.INFO),
        Passes("an interface of unknown speed", _sockets(0.1).alter(InterfaceFacts, interfaces=_no_speed)),
        Fails("one host is far away", _trips(5, lambda one, other: 0 in (one, other)), ranks=(0,)),
    ),
)
def path_slow(
    job: Job,
    *,
    bandwidth_share: float = 0.6,
    least_confidence: float = 0.5,
    interface_share: float = 0.2,
    round_trip_times: float = 3.0,
    sigmas: float = 5.0,
) -> Iterator[Verdict]:
    """Ask whether all measured paths between the hosts are similarly fast.

    Why it hurts: every collective waits for the slowest path, so one faulty cable, NIC or switch port slows down the
    whole job; no error is raised.
    Fix: Check the NIC, the cable and the switch port of the slow host, or exclude it from the job.
    """
    known = bandwidths(job)
    trips = _both_ways(_round_trips(job))
    ranks = {local.name: local.ranks for local in job.by_host()}
    if max(len(known.readings), len(trips)) < _LEAST_PATHS:
        yield Skip("fewer than three paths were measured")
    slow = None
    if len(known.readings) >= _LEAST_PATHS:
        slow = slow_parts(known, least_share=bandwidth_share, least_confidence=least_confidence)
        for part in slow.parts:
            yield with_trials(job, _finding(part, slow, ranks), "path", otherwise=_fix(part))
    # Two hosts cannot be compared with others, but with the known rates of their links.
    below = [*_below_interfaces(job, known, interface_share)]
    yield from below
    failed = unmeasured_pairs(sent_samples(job))
    for host, ways in failed.hosts:
        if host in failed.cut_off and is_reachable(job, host):
            yield Finding(
                f"{host} is reachable, but no transfer with it succeeded in any round",
                ranks=ranks.get(host, ()),
                evidence={"transfers": list(ways[:_SHOWN]), "failed transfers": len(ways), "exclude": [host]},
                effect=f"Collectives that include {host} block until their timeout.",
                fix=f"Exclude {host} (`srun --exclude={host}` in SLURM), and check whether its CPUs are overloaded.",
            )
        else:
            yield Unknown(f"no bandwidth measured for {host}: {', '.join(ways[:_SHOWN])}", ranks.get(host, ()))
    for source, sample in failed.ways:
        both = (*ranks.get(source, ()), *ranks.get(sample.peer, ()))
        yield Unknown(f"no bandwidth measured from {source} to {sample.peer}: {sample.outcome}", both)
    blamed = frozenset(host for part in slow.parts if part.kind in WHOLE_HOSTS for host in part.hosts) if slow else ()
    rails = slow_rails(job, least_share=bandwidth_share, least_confidence=least_confidence)
    yield from rail_findings(job, rails, frozenset(blamed))
    yield from _below_links(job, interface_share, by_tcp=bool(below))
    least = 1 / round_trip_times
    far = slow_paths(trips, lower_is_worse=False, factor=least, sigmas=sigmas, groups=subnets_of(job), least=_NOISE)
    yield from _far(far.hosts, far.boundaries, far.links, ranks, far.typical)


def _finding(part: SlowPart, slow: SlowParts, ranks: Mapping[str, tuple[int, ...]]) -> Finding:
    hosts = (*part.hosts, *part.others)
    suspect = part.suspect
    times = " at times" if suspect.intermittent else ""
    others = "other paths" if part.kind in ("boundary", "link") else "other hosts"
    usual = f"only {rate_in_words(part.value)}{times} ({others}: {rate_in_words(slow.typical)})"
    evidence = bandwidth_evidence(part, slow.spread) | {
        "slow transfers": f"{suspect.slow} of {suspect.readings}",
        "rounds": slow.rounds,
    }
    if part.kind == "boundary":
        evidence |= {"one side": list(part.hosts), "other side": list(part.others)}
    elif part.kind != "link":
        evidence["exclude"] = list(part.hosts)
    return Finding(
        f"{_named(part)} {usual}{_OTHER_DIRECTION.get(part.kind, '')}",
        ranks=tuple(sorted(rank for host in hosts for rank in ranks.get(host, ()))),
        evidence=evidence,
        fix=_fix(part),
        confidence=suspect.confidence,
        explains=("NET027",),
    )


def _named(part: SlowPart) -> str:
    first = part.hosts[0]
    if part.kind == "boundary":
        return f"Paths between {_side(part.hosts)} and {_side(part.others)} carry"
    if part.kind == "link":
        return f"The path between {first} and {part.hosts[1]} carries"
    does = {"sending": "sends", "receiving": "receives"}.get(part.kind, "sends and receives")
    return f"{first} {does} at"


_OTHER_DIRECTION = {"sending": ", but receives at normal speed", "receiving": ", but sends at normal speed"}


def _side(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{names[0]} … {names[-1]}"


def _fix(part: SlowPart) -> str:
    one, *others = part.hosts
    if part.kind == "boundary":
        return (
            "Keep the job on one side of the boundary (`sbatch --switches=1` in SLURM), and check the number, speed "
            "and errors of the uplinks between the switches of both sides."
        )
    if part.kind == "link":
        return (
            f"Check the ports and cables between the switches of {one} and {others[0]}, or exclude one of the two "
            f"hosts (`srun --exclude={one}` in SLURM)."
        )
    return (
        f"Exclude {one} (`srun --exclude={one}` in SLURM), and check its NIC, cable and switch port (`ip -s link` "
        "shows the error counters)."
    )


def _below_interfaces(job: Job, known: HostBandwidths, share: float) -> Iterator[Finding]:
    """Report paths that are all far slower than the interfaces at both ends, which a comparison of paths misses."""
    slow = paths_below(job, known, share)
    if slow is not None:
        best, roofline = rate_in_words(slow.best), rate_in_words(slow.roofline)
        who = " and ".join(sorted(known.hosts)) if len(known.hosts) == 2 else f"all {len(known.hosts)} hosts"
        yield Finding(
            f"Traffic between {who} is slow: at most {best}, but the interfaces support {roofline}",
            ranks=tuple(rank.number for rank in job.ranks),
            evidence={"paths measured": len(known.readings)},
            fix="Check whether traffic control (`tc qdisc show`), the switch ports or the instance type limits the "
            "rate.",
            severity=Severity.INFO,
        )


def _below_links(job: Job, share: float, *, by_tcp: bool) -> Iterator[Finding]:
    """Report NCCL messages that are all far slower than the links. ``by_tcp``: TCP was already found slow."""
    slow = messages_below(job, share)
    if slow is None or (by_tcp and not slow.by_rdma):
        return
    best, roofline = rate_in_words(slow.best.value), rate_in_words(slow.roofline)
    links = "RDMA ports" if slow.by_rdma else "interfaces"
    yield Finding(
        f"NCCL messages between hosts are slow: at most {best}, but the {links} support {roofline}",
        ranks=slow.ranks,
        evidence={
            "best path": f"rank {slow.best.source} -> rank {slow.best.target}",
            "messages": slow.messages,
        },
        fix=_fix_of_links(slow),
        severity=Severity.INFO,
    )


def _fix_of_links(slow: SlowMessages) -> str:
    if slow.by_rdma:
        return (
            "Run once with `NCCL_DEBUG=INFO`, and check that the log contains `Using network IB` (RDMA is used) and "
            "`GDRDMA` (without copies through host memory)."
        )
    return "Open several connections between each pair of ranks:\nexport NCCL_SOCKET_NTHREADS=4 NCCL_NSOCKS_PERTHREAD=4"


def _far(
    hosts: Sequence[tuple[str, Sequence[MeasuredPath]]],
    boundaries: Sequence[tuple[Hashable, Hashable, Sequence[MeasuredPath]]],
    links: Sequence[MeasuredPath],
    ranks: Mapping[str, tuple[int, ...]],
    typical: float,
) -> Iterator[Finding]:
    for host, paths in hosts:
        text = f"Round trips on {len(paths)} paths of {host} take {_longest(paths, typical)}"
        fix = (
            f"Check the network path to {host} with `tracepath {host}` on another host, or exclude it "
            f"(`srun --exclude={host}` in SLURM)."
        )
        yield Finding(text, ranks=ranks.get(host, ()), evidence=_evidence(paths), fix=fix)
    for one, other, paths in boundaries:
        text = f"Round trips between {one} and {other} take {_longest(paths, typical)}"
        fix = "Keep the job on one side of the boundary (`sbatch --switches=1` in SLURM)."
        yield Finding(text, ranks=_of_paths(paths, ranks), evidence=_evidence(paths), fix=fix)
    if links:
        more = f" and on {len(links) - 1} more path{'s' if len(links) > 2 else ''}" if len(links) > 1 else ""
        first, second = links[0].first, links[0].second
        text = f"Round trips between {first} and {second}{more} take {_longest(links, typical)}"
        fix = f"Check the switches between {first} and {second} (`tracepath {second}` on {first} shows the path)."
        yield Finding(text, ranks=_of_paths(links, ranks), evidence=_evidence(links), fix=fix)


def _longest(paths: Sequence[MeasuredPath], typical: float) -> str:
    return f"{_micro(max(path.value for path in paths))} (other paths: {_micro(typical)})"


def _evidence(paths: Sequence[MeasuredPath]) -> dict[str, object]:
    shown = {f"{path.first} -> {path.second}": _micro(path.value) for path in paths[:_SHOWN]}
    return {"paths": shown}


def _micro(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} µs"


def _of_paths(paths: Iterable[MeasuredPath], ranks: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(sorted({rank for path in paths for name in path.pair for rank in ranks.get(name, ())}))


def _round_trips(job: Job) -> list[MeasuredPath]:
    return [
        MeasuredPath(name, sample.peer, sample.round_trip)
        for paths, identical in job.each(PathFacts)
        for name in identical.hosts
        for sample in paths.samples
        if sample.round_trip is not None
    ]


def _both_ways(trips: Sequence[MeasuredPath]) -> list[MeasuredPath]:
    """The round trips, each with the shorter of both directions: they use the same path, and only a busy CPU makes one
    longer."""
    shortest: dict[tuple[str, str], float] = {}
    for trip in trips:
        shortest[trip.pair] = min(trip.value, shortest.get(trip.pair, trip.value))
    return [trip._replace(value=shortest[trip.pair]) for trip in trips]
