"""What a check yields: findings, skips and unknowns."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum

import msgspec

from doctor.core.facts import Setting
from doctor.core.text import HERE, lazy_compile

_ORDINARY = lazy_compile(r"(?:an?|all|the|ranks?|process) ")

ALONE = "one process: nothing to compare it with"
"""Why a check that compares ranks is skipped for a job of one process."""

PRIMARY_CONFIDENCE = 0.3
"""Confidence that a primary cause needs: below it several other causes are as likely."""


class Severity(str, Enum):
    """``error`` will break or corrupt the run, ``warning`` will slow it or may break it, ``info`` is good to know."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"

    @property
    def weight(self) -> int:
        """2 for an error, 1 for a warning, 0 for info."""
        return {"error": 2, "warning": 1, "info": 0}[self.value]


class Scope(str, Enum):
    """What one evaluation of a check covers."""

    RANK = "rank"
    HOST = "host"
    JOB = "job"


class Status(str, Enum):
    """How a check ended; only ``pass`` is green."""

    PASS = "pass"  # noqa: S105 - no password
    FAIL = "fail"
    UNKNOWN = "unknown"
    SKIP = "skip"
    ERROR = "error"


class Source(msgspec.Struct, frozen=True):
    """The location of a fault in a file; ``line`` counts from 1."""

    file: str
    line: int | None = None


class Finding(msgspec.Struct, frozen=True):
    """One fault. Checks fill it in; the runner adds the id, the severity and empty texts.

    ``summary``: one line, the claim first. ``ranks``: the ranks at fault (empty: the whole job). ``hosts``: names,
    only if they do not follow from the ranks. ``effect`` and ``fix`` default to the check's docstring. ``severity``
    overrides the declared one. ``explains``: ids of findings that are consequences of this one.
    """

    summary: str
    ranks: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    evidence: Mapping[str, object] = {}
    effect: str = ""
    fix: str = ""
    severity: Severity | None = None
    confidence: float = 1.0
    explains: tuple[str, ...] = ()
    source: Source | None = None

    def extended(self, evidence: Mapping[str, object], fix: str) -> Finding:
        """This finding with more evidence, and another fix unless that is empty."""
        return msgspec.structs.replace(self, evidence={**self.evidence, **evidence}, fix=fix or self.fix)

    def reworded(self, reword: Callable[[str], str]) -> Finding:
        """This finding with another summary and fix, each made from its own."""
        return msgspec.structs.replace(self, summary=reword(self.summary), fix=reword(self.fix))


def capitalized(summary: str) -> str:
    """The summary with a capital if it starts with an ordinary word; names and variables are kept."""
    return summary[0].upper() + summary[1:] if _ORDINARY.match(summary) else summary


class Skip(msgspec.Struct, frozen=True):
    """The check does not apply."""

    reason: str


class Unknown(msgspec.Struct, frozen=True):
    """The check can't evaluate ``ranks`` (empty: all of them), why, and how to make it visible."""

    reason: str
    ranks: tuple[int, ...] = ()
    unhide: str = ""


Verdict = Finding | Skip | Unknown
"""What a check may yield."""


def merge(findings: Iterable[Finding], place_of: Callable[[Iterable[int]], str] | None = None) -> Iterator[Finding]:
    """Merge findings with equal summary, fix, effect, severity and source; the first one supplies the other fields.

    ``place_of``: the hosts of ranks in words, which replace :data:`HERE` in the summary and the fix. Drafts with these
    words merge, whereas drafts with names would be a finding for each host."""
    groups: dict[tuple[object, ...], list[Finding]] = {}
    for finding in findings:
        key = (finding.summary, finding.fix, finding.effect, finding.severity, finding.source)
        groups.setdefault(key, []).append(finding)
    for first, *others in groups.values():
        ranks = sorted({rank for one in (first, *others) for rank in one.ranks})
        hosts = dict.fromkeys(host for one in (first, *others) for host in one.hosts)
        merged = msgspec.structs.replace(first, ranks=tuple(ranks), hosts=tuple(hosts))
        place = place_of(ranks) if place_of else ""
        yield merged.reworded(functools.partial(_placed, place=place)) if place else merged


def _placed(text: str, place: str) -> str:
    return text.replace(HERE, place)


def source_of(setting: Setting | None) -> Source | None:
    """The file and line that a setting comes from; ``None`` for the environment."""
    if setting is None or setting.layer == "environment":
        return None
    return Source(setting.source, setting.line)
