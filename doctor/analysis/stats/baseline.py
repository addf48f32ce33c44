"""Values of a baseline job, which replace the majority as the reference.

A capture of a job that worked is given with ``--expect`` and becomes ``job.expected``. A check may compare values that
carry over from one job to another (releases, drivers, models, MTUs, settings), but not values that belong to one job
(its size, addresses, ports, devices granted by a scheduler).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

import msgspec

from doctor.core.facts import Section
from doctor.core.finding import Finding, Severity
from doctor.core.job import Job

LONGEST = 100
"""Characters of a summary."""
ROOM = 20
"""Characters that two differences leave for a suffix."""

S = TypeVar("S", bound=Section)
K = TypeVar("K", bound=Hashable)


class BaselineValue(NamedTuple):
    """A value that the baseline job had on all ranks; ``None`` if the thing was absent or not set.

    ``source``: such as ``capture of node0, 2026-11-20``."""

    value: Any
    source: str


def baseline_value(job: Job, values: Callable[[Job], Iterable[Hashable]]) -> BaselineValue | None:
    """The one value that ``values`` reads in the baseline job; ``None`` without one, or if its ranks disagree."""
    return baseline_values(job, lambda worked: ((None, value) for value in values(worked))).get(None)


def baseline_values(job: Job, pairs: Callable[[Job], Iterable[tuple[K, Hashable]]]) -> dict[K, BaselineValue]:
    """:func:`baseline_value` for many names at once: ``pairs`` reads names with their values."""
    known: dict[K, set[Hashable]] = {}
    for name, value in pairs(job.expected) if job.expected else ():
        known.setdefault(name, set()).add(value)
    source = _source(job.expected) if job.expected and known else ""
    return {name: BaselineValue(values.pop(), source) for name, values in known.items() if len(values) == 1}


def expected_value(job: Job, section: type[S], key: Callable[[S], Hashable]) -> BaselineValue | None:
    """The ``key`` of ``section`` in the baseline job, whose ranks without the section do not count."""
    return baseline_value(job, lambda worked: (key(facts) for facts, _ in worked.each(section)))


def _source(worked: Job) -> str:
    name, more = worked.hosts[0].name, len(worked.hosts) - 1
    hosts = name + (f" and {more:,} other host{'s' if more > 1 else ''}" if more else "")
    date = re.match(r"\d{4}-\d\d-\d\d(?=T)", worked.captured)
    return f"capture of {hosts}" + (f", {date[0]}" if date else "")


def stands_alone(job: Job, expected: Iterable[object]) -> bool:
    """Whether there is one process, no baseline value, and so nothing to compare."""
    return len(job.ranks) == 1 and not job.ungathered and not job.absent and not any(expected)


class BaselineDifference(msgspec.Struct, frozen=True):
    """A difference from the baseline as text: ``torch``, ``2.8.0``, ``2.7.1``, ``capture of node0``."""

    what: str
    expected: str
    found: str
    source: str

    @property
    def name(self) -> str:
        """What is compared, as in texts."""
        return "PyTorch" if self.what == "torch" else self.what

    def text(self, note: str = "") -> str:
        """``torch: expected 2.8.0, found 2.7.1``, with a ``note`` on the expected value."""
        given = "but it is not set" if self.found == "not set" else f"found {self.found}"
        return f"{self.name}: expected {self.expected}{note}, {given}"


class BaselineDeviation(NamedTuple):
    """How ranks differ from the baseline job, as a finding reports it; ``drifted``: all have the same difference."""

    rows: tuple[BaselineDifference, ...]
    drifted: bool

    @property
    def summary(self) -> str:
        """``torch: expected 2.8.0 (baseline), found 2.7.1``, with ``; CUDA: expected 12.8, found 12.6`` for a second
        difference if it is short, else ``; CUDA differs``; the evidence names the baseline and has all of them."""
        first, *others = self.rows
        text = first.text(" (baseline)")
        if others and len(text) + len(others[0].text()) <= LONGEST - ROOM:
            text += f"; {others.pop(0).text()}"
        verb = "differ" if len(others) > 1 else "differs"
        names = f"; {' and '.join(one.what for one in others)} {verb}" if others else ""
        return text + (names if len(text) + len(names) <= LONGEST else f"; {len(others)} more")

    @property
    def evidence(self) -> dict[str, object]:
        """``expected`` and ``found``, each by what is compared, and ``expected_from``."""
        return {
            "expected": {row.what: row.expected for row in self.rows},
            "expected_from": self.rows[0].source,
            "found": {row.what: row.found for row in self.rows},
        }

    @property
    def effect(self) -> str:
        """The impact if all ranks have the same difference; else empty, for the check's own."""
        return _DRIFT_EFFECT if self.drifted else ""

    @property
    def fix(self) -> str:
        """The fix if all ranks have the same difference; else empty, as ``effect``."""
        if not self.drifted:
            return ""
        shown = "; ".join(f"{row.name}: {row.expected}" for row in self.rows[:4])
        return or_new_baseline(f"Restore the values of the baseline ({shown}{'; …' if len(self.rows) > 4 else ''})")

    def finding(
        self,
        ranks: tuple[int, ...],
        evidence: Mapping[str, object] | None = None,
        *,
        suffix: str = "",
        fix: str = "",
        severity: Severity | None = None,
        explains: tuple[str, ...] = (),
    ) -> Finding:
        """The finding about these ranks, with further evidence and a ``suffix`` of the summary. ``fix``: if only some
        ranks differ."""
        return Finding(
            self.summary + suffix,
            ranks=ranks,
            evidence={**self.evidence, **(evidence or {})},
            effect=self.effect,
            fix=self.fix or fix,
            severity=severity,
            explains=explains,
        )


_DRIFT_EFFECT = "This job may fail or behave differently, although the baseline job worked."


def or_new_baseline(action: str) -> str:
    """The fix of a difference that all ranks have: an imperative clause such as ``Set the MTU of eth0 to 9000``, or a
    new baseline."""
    return f"{action}, or, if the change is intended, record a new baseline with `doctor capture -o expected.json`."
