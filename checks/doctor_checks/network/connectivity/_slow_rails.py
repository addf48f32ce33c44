"""Findings about slow messages between hosts over the backend of the job, and bandwidths as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from doctor.analysis.fabric.bandwidth_suspects import SlowPart
from doctor.analysis.fabric.localization.confirmation import WHOLE_HOSTS
from doctor.analysis.fabric.p2p_bandwidth import SlowRail
from doctor.api import Finding, Job, Unknown, Verdict, ranks_in_words
from doctor.facts import CollectiveFacts
from doctor_checks._trial_conclusions import with_trials

SHOWN = 8


def rate_in_words(value: float) -> str:
    """``1.20 GB/s`` or ``612 MB/s`` for bytes per second."""
    return f"{value / 1e9:.2f} GB/s" if value >= 1e9 else f"{value / 1e6:.3g} MB/s"


def backend_name(backend: str) -> str:
    """``NCCL`` for ``nccl``."""
    return {"nccl": "NCCL", "gloo": "Gloo"}.get(backend, backend)


def bandwidth_evidence(part: SlowPart, spread: float) -> dict[str, object]:
    """The bandwidths of a slow part, and the spread of the usual ones (a fraction)."""
    return {
        "slowest": {f"{one.first} -> {one.second}": rate_in_words(one.value) for one in part.readings[:SHOWN]},
        "spread of usual bandwidths": f"{spread:.0%}",
    }


def rail_findings(job: Job, found: Sequence[SlowRail], excluded: frozenset[str]) -> Iterator[Verdict]:
    """Findings about slow rails, except for ``excluded`` hosts, which are already reported."""
    reasons: dict[str, list[int]] = {}
    for facts, members in job.facts(CollectiveFacts):
        if facts.exchange_error:
            reasons.setdefault(f"over {facts.backend}: {facts.exchange_error}", []).extend(members.ranks)
    for reason, own in reasons.items():
        yield Unknown(f"some point-to-point messages were not measured {reason}", tuple(sorted(own)))
    by_hosts: dict[tuple[str, tuple[str, ...]], list[SlowRail]] = {}
    for one in found:
        if not excluded.issuperset(one.part.hosts):
            by_hosts.setdefault((one.part.kind, one.part.hosts), []).append(one)
    for rails in by_hosts.values():
        finding = _finding(job, rails)
        yield with_trials(job, finding, "collective", otherwise=finding.fix, unit="B/s")


def _finding(job: Job, rails: Sequence[SlowRail]) -> Finding:
    worst = min(rails, key=lambda rail: rail.part.share)
    part = worst.part
    ranks = tuple(sorted({rank for rail in rails for rank in rail.ranks}))
    backends = {facts.backend for facts, same in job.facts(CollectiveFacts) if set(same.ranks).intersection(ranks)}
    over = "/".join(backend_name(name) for name in sorted(filter(None, backends)))
    times = " at times" if part.suspect.intermittent else ""
    usual = f"{rate_in_words(part.value)} over {over}{times} (other ranks: {rate_in_words(worst.usual)})"
    evidence = bandwidth_evidence(part, worst.spread)
    evidence["slow messages"] = f"{part.suspect.slow} of {part.suspect.readings}"
    if part.kind in WHOLE_HOSTS:
        evidence["exclude"] = list(part.hosts)
    return Finding(
        f"{ranks_in_words(ranks).capitalize()} on {' and '.join(part.hosts)} {_does(part.kind, ranks)} {usual}",
        ranks=ranks,
        evidence=evidence,
        fix=_fix(part, ranks),
        confidence=part.suspect.confidence,
        explains=("NET027",),
    )


def _does(kind: str, ranks: Sequence[int]) -> str:
    single = {"link": "exchanges data at", "sending": "sends at", "receiving": "receives at"}
    several = {"link": "exchange data at", "sending": "send at", "receiving": "receive at"}
    return single.get(kind, "sends and receives at") if len(ranks) == 1 else several.get(kind, "send and receive at")


def _fix(part: SlowPart, ranks: tuple[int, ...]) -> str:
    one = part.hosts[0]
    if part.kind == "link":
        who = ranks_in_words(ranks)
        return f"Check the ports and cables between {one} and {part.hosts[1]} that connect the NICs of {who}."
    what = "NIC, cable and switch port" if len(ranks) == 1 else "NICs, cables and switch ports"
    return f"Exclude {one} (`srun --exclude={one}` in SLURM), and check the {what} of {ranks_in_words(ranks)}."
