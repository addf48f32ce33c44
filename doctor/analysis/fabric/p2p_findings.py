"""What is said of slow ranks over the back end of the job, between hosts (NET014) and within them (GPU024)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from doctor.analysis.fabric.bandwidth_suspects import SlowPart
from doctor.analysis.fabric.localization.confirmation import WHOLE_HOSTS
from doctor.analysis.fabric.p2p_bandwidth import SlowNeighbour, SlowRail
from doctor.analysis.launch_origin import ranks_in_words
from doctor.analysis.trial_conclusions import with_trials
from doctor.core.facts import CollectiveFacts
from doctor.core.finding import Finding, Unknown, Verdict
from doctor.core.job import Job

SHOWN = 8


def rate_in_words(value: float) -> str:
    """Bytes a second with their unit."""
    return f"{value / 1e9:.2f} GB/s" if value >= 1e9 else f"{value / 1e6:.3g} MB/s"


def bandwidth_evidence(part: SlowPart, usual: float, spread: float) -> dict[str, object]:
    """What was measured of a slow part, and what is ``usual`` (bytes a second) with its ``spread`` (a share)."""
    return {
        "slowest": {f"{one.first} -> {one.second}": rate_in_words(one.value) for one in part.readings[:SHOWN]},
        "bandwidth": rate_in_words(part.value),
        "usual bandwidth": rate_in_words(usual),
        "spread of usual bandwidths": f"{spread:.0%}",
    }


def rail_findings(job: Job, found: Sequence[SlowRail], blamed: frozenset[str]) -> Iterator[Verdict]:
    """What messages of pairs over the back end of the job tell; hosts that are blamed already are so for this, too."""
    reasons: dict[str, list[int]] = {}
    for facts, members in job.facts(CollectiveFacts):
        if facts.exchange_error:
            reasons.setdefault(f"over {facts.backend}: {facts.exchange_error}", []).extend(members.ranks)
    for reason, own in reasons.items():
        yield Unknown(f"not all messages of pairs {reason}", tuple(sorted(own)))
    alike: dict[tuple[str, tuple[str, ...]], list[SlowRail]] = {}
    for one in found:
        if not blamed.issuperset(one.part.hosts):
            alike.setdefault((one.part.kind, one.part.hosts), []).append(one)
    for rails in alike.values():
        finding = _of_rails(job, rails)
        yield with_trials(job, finding, "collective", otherwise=finding.fix, unit="B/s")


def _of_rails(job: Job, rails: Sequence[SlowRail]) -> Finding:
    """The same part of several rails: a host has one or more cards that are slow."""
    worst = min(rails, key=lambda rail: rail.part.share)
    part = worst.part
    ranks = tuple(sorted({rank for rail in rails for rank in rail.ranks}))
    backends = {facts.backend for facts, alike in job.facts(CollectiveFacts) if set(alike.ranks).intersection(ranks)}
    over = "/".join(sorted(filter(None, backends)))
    usual = f"{rate_in_words(part.value)} over {over}, usual {rate_in_words(worst.usual)} ({part.share * 100:.2g} %)"
    seen = f"in {part.suspect.slow} of {part.suspect.readings} messages"
    evidence = bandwidth_evidence(part, worst.usual, worst.spread)
    if part.kind in WHOLE_HOSTS:
        evidence["exclude"] = list(part.hosts)
    return Finding(
        f"{_rail_named(part, ranks)} {usual}{' at times' if part.suspect.intermittent else ''}, {seen}",
        ranks=ranks,
        evidence=evidence,
        fix=_rail_fix(part),
        confidence=part.suspect.confidence,
        explains=("NET027",),
    )


def _rail_named(part: SlowPart, ranks: tuple[int, ...]) -> str:
    """Which ranks are slow, up to their bandwidth."""
    who = f"{ranks_in_words(ranks)} on {' and '.join(part.hosts)}"
    if part.kind == "link":
        return f"{who}: messages between them have"
    end = "s" if len(ranks) == 1 else ""
    sends, receives = f"send{end}", f"receive{end}"
    if part.kind == "sending":
        return f"{who}: {sends} (and {receives} as others do)"
    return (
        f"{who}: {receives} (and {sends} as others do)"
        if part.kind == "receiving"
        else f"{who}: {sends} and {receives}"
    )


def _rail_fix(part: SlowPart) -> str:
    one = part.hosts[0]
    if part.kind == "link":
        return f"Look at the way between {one} and {part.hosts[1]} for the cards of these ranks: ports and cables."
    return (
        f"`srun --exclude={one}`, then on {one}: `NCCL_DEBUG=INFO` tells which card a rank uses; `ibstat` (state and "
        "rate), `ibqueryerrors`, `lspci -vv | grep LnkSta`, for Ethernet `ethtool -S <interface>`; change cable, "
        "transceiver or port."
    )


def neighbour_finding(near: SlowNeighbour) -> Finding:
    """Devices that are slow within their host."""
    worst, usual = near.messages[0]
    others = {"sending": "to", "receiving": "from"}.get(near.way, "to and from")
    whose = "messages to each other" if len(near.ranks) > 1 else f"messages {others} the other devices of its host"
    return Finding(
        f"{ranks_in_words(near.ranks)} on {near.host}: {whose} have {near.share * 100:.2g} % of the bandwidth of "
        f"the same pairs on other hosts, {worst.value / 1e9:.1f} GB/s, usual {usual / 1e9:.1f} GB/s",
        ranks=near.ranks,
        evidence={
            "messages": {
                f"{one.source} -> {one.target}": f"{one.value / 1e9:.1f} GB/s, usual {typical / 1e9:.1f} GB/s"
                for one, typical in near.messages[:SHOWN]
            },
            "exclude": [near.host],
        },
        fix=f"on {near.host}: nvidia-smi nvlink -s; nvidia-smi topo -m; dmesg -T | grep -iE 'xid.*(74|nvlink)'; leave "
        f"the host out meanwhile (srun --exclude={near.host})",
        confidence=near.confidence,
    )
