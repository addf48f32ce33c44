"""HOST003: the clocks of the hosts differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from doctor.api import Finding, Job, LocalRanks, Scope, Severity, Skip, Unknown, Verdict, check, conjunction
from doctor.facts import ClockFacts, HostFacts
from doctor.testing import Fails, JobBuilder, Passes, healthy

KEEP_ALIVE_SECONDS = 15.0
"""Rendezvous of torchrun removes hosts whose last of three heartbeats, one in 5 s, is older by its own clock
(torch/distributed/elastic/rendezvous/dynamic_rendezvous.py, keep_alive_interval, keep_alive_max_attempt)."""

_UNORDERED = (
    "Log lines of different hosts cannot be ordered, so the first failure cannot be distinguished from its "
    "consequences."
)
_EXPIRES = " torchrun may remove a running host from the rendezvous, and certificates may be rejected."

SHOWN = 16
"""Maximum number of hosts in the evidence."""


def _clocks(*offsets: float, uncertainty: float = 0.0005) -> JobBuilder:
    sketch = healthy(hosts=len(offsets))
    for host, offset in enumerate(offsets):
        sketch = sketch.put(
            ClockFacts(reference="node0", offset=offset, uncertainty=uncertainty), hosts=(f"node{host}",)
        )
    return sketch


def _chained(*clocks: float, uncertainty: float = 0.0005) -> JobBuilder:
    """Every host's clock relative to the previous host; ``clocks``: their values at the same moment."""
    sketch = healthy(hosts=len(clocks))
    for host, clock in enumerate(clocks):
        before = max(0, host - 1)
        facts = ClockFacts(reference=f"node{before}", offset=clock - clocks[before], uncertainty=uncertainty)
        sketch = sketch.put(facts, hosts=(f"node{host}",))
    return sketch


@check(
    id="HOST003",
    severity=Severity.WARNING,
    scope=Scope.JOB,
    when="P",
    needs=(ClockFacts,),
    cases=lambda: (
        Passes("milliseconds apart", _clocks(0.0, 0.004, -0.003)),
        Passes("two seconds apart and not measured better", _clocks(0.0, 2.0, uncertainty=0.8)),
        Fails("one of three is 37 seconds ahead", _clocks(0.0, 0.001, 37.0), ranks=(4, 5)),
        Fails("the reference itself is behind", _clocks(0.0, 90.0, 90.002), ranks=(0, 1)),
        Fails("two hosts differ, and the correct one is unknown", _clocks(0.0, 5.0), ranks=(0, 1, 2, 3)),
        Fails(
            "compared step by step: the third is ahead of the second, which is not ahead of the first",
            _chained(0.0, 0.001, 37.0, 0.002),
            ranks=(4, 5),
        ),
        Passes("compared step by step, and equal", _chained(0.0, 0.004, -0.004, 0.003)),
        Fails(
            "two hosts differ and one is not synchronised",
            _clocks(0.0, 5.0).alter(HostFacts, hosts=("node1",), clock_synchronised=False),
            ranks=(2, 3),
        ),
    ),
)
def clocks_differ(job: Job, *, apart_seconds: float = 1.0) -> Iterator[Verdict]:
    """Ask whether the clocks of all hosts agree within a second.

    Why it hurts: log lines of different hosts cannot be ordered, so the first failure cannot be distinguished from its
    consequences. Certificates may be rejected, and torchrun may consider a running host dead.
    Fix: Synchronize the clocks with `sudo chronyc makestep` (chrony) or `sudo systemctl restart systemd-timesyncd`.
    """
    if len(job.by_host()) < 2:
        reason = "one host: no other clock to compare with"
        yield Unknown("other ranks not gathered") if job.ungathered else Skip(reason)
        return
    # Each clock has a reference, which may have one itself: offsets are added along the chain.
    measured = {local.name: facts for local in job.by_host() if (facts := local.find(ClockFacts)) is not None}
    groups: dict[str, list[_Clock]] = {}
    for local in job.by_host():
        if local.name in measured:
            reference, offset, uncertainty = _follow(local.name, measured)
            groups.setdefault(reference, []).append(_Clock(offset, uncertainty, local))
    for clocks in groups.values():
        yield from _compare(sorted(clocks, key=lambda clock: clock.offset), apart_seconds)


class _Clock(NamedTuple):
    """A host's clock: seconds ahead of the reference, and their uncertainty."""

    offset: float
    uncertainty: float
    local: LocalRanks


def _follow(name: str, measured: Mapping[str, ClockFacts]) -> tuple[str, float, float]:
    """The last reference in the chain that starts at host ``name``, with offset and uncertainty relative to it."""
    offset = uncertainty = 0.0
    seen: set[str] = set()
    while name in measured and name not in seen:
        seen.add(name)
        facts = measured[name]
        name, offset, uncertainty = facts.reference, offset + facts.offset, uncertainty + facts.uncertainty
    return name, offset, uncertainty


def _compare(clocks: Sequence[_Clock], apart: float) -> Iterator[Verdict]:
    groups = _together(clocks, apart)
    if len(groups) < 2:
        return
    largest = max(map(len, groups))
    agreed = [group for group in groups if len(group) == largest]
    middle = median(clock.offset for clock in agreed[0])
    odd = [clock for group in groups if len(agreed) > 1 or group is not agreed[0] for clock in group]
    if len(agreed) > 1:
        odd = [clock for clock in odd if _is_unsynchronised(clock)] or odd
    spread = clocks[-1].offset - clocks[0].offset
    yield Finding(
        _summary(odd, spread, len(clocks) - len(odd), agrees=len(agreed) == 1),
        ranks=tuple(rank for clock in odd for rank in clock.local.ranks),
        evidence={
            "spread_seconds": round(spread, 3),
            "offset_seconds": {clock.local.name: round(clock.offset - middle, 3) for clock in odd[:SHOWN]},
            "hosts_that_agree": largest if len(agreed) == 1 else None,
        },
        effect=_effect(spread),
        fix=f"Synchronize the clock{'' if len(odd) == 1 else 's'} of {_names(odd)} with `sudo chronyc makestep` "
        "(chrony) or `sudo systemctl restart systemd-timesyncd`.",
    )


def _effect(spread: float) -> str:
    return _UNORDERED + (_EXPIRES if spread >= KEEP_ALIVE_SECONDS else "")


def _summary(odd: Sequence[_Clock], spread: float, others: int, *, agrees: bool) -> str:
    if len(odd) == 1:
        rest = "that of the other host" if others == 1 else "those of the other hosts"
        return f"The clock of {_names(odd)} differs from {rest} by {spread:.1f} s"
    if agrees:
        return f"The clocks of {_names(odd)} differ from those of the other hosts by up to {spread:.1f} s"
    if len(odd) == 2:
        return f"The clocks of {_names(odd)} differ by {spread:.1f} s, and it is unknown which of them is correct"
    return f"The clocks of {_names(odd)} differ by up to {spread:.1f} s, and no majority of hosts agrees"


def _together(clocks: Sequence[_Clock], apart: float) -> list[list[_Clock]]:
    """Sorted clocks in groups. A clock that is certainly more than ``apart`` after the first of a group starts a new
    one."""
    groups: list[list[_Clock]] = []
    for clock in clocks:
        first = groups[-1][0] if groups else None
        if first and clock.offset - first.offset - clock.uncertainty - first.uncertainty <= apart:
            groups[-1].append(clock)
        else:
            groups.append([clock])
    return groups


def _is_unsynchronised(clock: _Clock) -> bool:
    host = clock.local.find(HostFacts)
    return host is not None and host.clock_synchronised is False


def _names(clocks: Sequence[_Clock]) -> str:
    names = [clock.local.name for clock in clocks]
    return conjunction(names if len(names) <= 4 else [*names[:4], f"{len(names) - 4} more"])
