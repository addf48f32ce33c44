"""What a check is: a judgement over a job, with its metadata in one typed call."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from doctor.core.facts import Section
from doctor.core.finding import Scope, Severity, Verdict
from doctor.core.job import Job

FAMILIES = {
    "ENV": "launch",
    "NET": "network",
    "NCCL": "nccl",
    "GPU": "devices",
    "MEM": "memory",
    "DATA": "data",
    "RUN": "progress",
    "HOST": "host",
    "VER": "software",
    "CODE": "code",
}
"""Prefix of an id -> word of its family, in the order of reports."""

_ID = re.compile(r"[A-Z]{2,12}[0-9]{3}")
_NAME = re.compile(r"[\w-]+")


class Case(Protocol):
    """A job that proves a check, as :mod:`doctor.testing.cases` builds it: tests alone build and judge it."""

    @property
    def name(self) -> str:
        """What is special about the job."""

    @property
    def sketch(self) -> Any:
        """What the job is built from."""


@dataclass(frozen=True)
class Check:
    """One illness and how to recognise it. Made by :func:`check`.

    ``from_logs``: the same judgement of what logs say of a job (:class:`doctor.core.facts.LogEvidence`), made where
    logs were read. ``or_needs``: sections that serve in place of ``needs`` on a rank that has them all.
    ``compares_ranks``: the judgement compares ranks, so with ranks missing a clean result is unknown, and with one
    rank there is nothing to compare. ``uses_baseline``: it takes ``job.expected`` for the reference, and says itself
    where one rank has nothing to be compared with. ``limits``: its thresholds by name. ``origin``: ``built-in``, a
    distribution or a file. ``ValueError`` for metadata out of form: the runner and the reports rely on it.
    """

    id: str
    name: str
    severity: Severity
    scope: Scope
    when: str
    needs: tuple[type[Section], ...]
    compares_ranks: bool
    judge: Callable[..., Iterable[Verdict]]
    cases: Callable[[], Iterable[Case]]
    question: str
    effect: str
    fix: str
    limits: Mapping[str, float] = field(default_factory=dict)
    origin: str = "built-in"
    uses_baseline: bool = False
    or_needs: tuple[type[Section], ...] = ()
    from_logs: Callable[[Job], Iterable[Verdict]] | None = None

    def __post_init__(self) -> None:
        """Refuse metadata out of form."""
        if not _ID.fullmatch(str(self.id)):
            raise ValueError(f"{self.id!r} is no id: capital letters and three digits, such as NET007")
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"{self.id}: {self.name!r} is no name; it comes from the function's")
        if not isinstance(self.severity, Severity) or not isinstance(self.scope, Scope):
            raise ValueError(f"{self.id}: severity and scope are members of Severity and Scope")
        if not set(str(self.when)) <= set("PRM") or not self.when:
            raise ValueError(f"{self.id}: when is made of the letters P, R and M")
        for name, sections in (("needs", self.needs), ("or_needs", self.or_needs)):
            if not isinstance(sections, tuple) or not all(_is_section(section) for section in sections):
                raise ValueError(f"{self.id}: {name} is a tuple of types of sections")

    @property
    def reads_logs(self) -> bool:
        """Whether nothing but logs can feed it."""
        return self.when == "M" and not self.needs

    @property
    def family(self) -> str:
        """The word of its family, from the letters of its id."""
        return family_of(self.id)


def family_of(check_id: str) -> str:
    """The word of the family that an id belongs to, from its letters."""
    prefix = check_id.rstrip("0123456789")
    return FAMILIES.get(prefix, prefix.lower())


def check(
    *,
    id: str,  # noqa: A002 - the field's word
    severity: Severity,
    scope: Scope = Scope.RANK,
    when: str = "P",
    needs: tuple[type[Section], ...] = (),
    or_needs: tuple[type[Section], ...] = (),
    compares_ranks: bool | None = None,
    uses_baseline: bool = False,
    from_logs: Callable[[Job], Iterable[Verdict]] | None = None,
    cases: Callable[[], Iterable[Case]] = tuple,
) -> Callable[[Callable[..., Iterable[Verdict]]], Check]:
    """Make a function ``(job, *, limit=number) -> Iterator[Verdict]`` a check, named after the function.

    Its docstring holds a question, then ``Why it hurts:`` and ``Fix:``, the defaults of a finding's effect and fix.
    ``needs``: sections without which a rank can't be judged; ``or_needs``: others that do as well, such as what a run
    shows in place of an estimate. ``when``: the doors that can feed it, of P, R and M. ``compares_ranks`` is true by
    default where the scope is the job. ``uses_baseline``: an expectation replaces the majority. ``from_logs``: judges
    what logs say, in addition. A check that only logs can feed (``when="M"``, no ``needs``) judges them itself and has
    none. ``cases`` is called by tests alone.
    ``ValueError`` for an id or name out of form.
    """

    def make(function: Callable[..., Iterable[Verdict]]) -> Check:
        question, effect, fix = read_docstring(inspect.getdoc(function) or "")
        return Check(
            id=id,
            name=function.__name__.replace("_", "-"),
            severity=severity,
            scope=scope,
            when=when,
            needs=needs,
            compares_ranks=scope is Scope.JOB if compares_ranks is None else compares_ranks,
            judge=function,
            cases=cases,
            question=question,
            effect=effect,
            fix=fix,
            limits=_read_limits(function),
            uses_baseline=uses_baseline,
            or_needs=or_needs,
            from_logs=from_logs,
        )

    return make


def _is_section(need: object) -> bool:
    return isinstance(need, type) and issubclass(need, Section)


def read_docstring(text: str) -> tuple[str, str, str]:
    """The question, the effect and the fix in a check's docstring; missing parts are empty."""
    parts = re.split(r"^(Why it hurts|Fix):\s*", text, flags=re.MULTILINE)
    named = dict(zip(parts[1::2], parts[2::2], strict=True))
    return _fold(parts[0]), _fold(named.get("Why it hurts", "")), _fold(named.get("Fix", ""))


def _fold(text: str) -> str:
    return " ".join(text.split())


def _read_limits(function: Callable[..., object]) -> dict[str, float]:
    parameters = inspect.signature(function).parameters.values()
    return {
        parameter.name: parameter.default
        for parameter in parameters
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and isinstance(parameter.default, (int, float))
    }
