"""A check: a function over a job, with its metadata."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, Protocol, get_args

import msgspec

from doctor.core.facts import Section
from doctor.core.finding import Scope, Severity, Verdict
from doctor.core.job import Job
from doctor.core.text import lazy_compile

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
"""Prefix of an id -> name of its family, in the order of reports."""

State = Literal["stable", "preview"]
"""``preview``: what the check finds, its severity and its name may change in any release."""

LogJudge = Callable[[Job], Iterable[Verdict]]

_ID = lazy_compile(r"[A-Z]{2,12}[0-9]{3}")
_NAME = lazy_compile(r"[\w-]+")
_HEADING = lazy_compile(r"\n[ \t]*(Why it hurts|Fix):")
_PLAIN_WORD = lazy_compile(r"[a-z]+(?:-[a-z]+)*,?(?= |$)")


class Case(Protocol):
    """A job that a check must pass or fail, as :mod:`doctor.testing.cases` builds it for tests."""

    @property
    def name(self) -> str:
        """What distinguishes the job."""

    @property
    def sketch(self) -> Any:
        """The builder of the job."""


class Check(msgspec.Struct, frozen=True):
    """One kind of fault and how to recognize it; made by :func:`check`.

    ``from_logs``: the same check over log events (:class:`doctor.core.facts.LogEvidence`), beside the findings that
    :mod:`doctor.knowledge.log_patterns` declares. ``or_needs``: sections that replace ``needs`` on a rank that has all
    of them. ``compares_ranks``: with ranks missing, a result without findings is unknown, and with one rank there is
    nothing to compare. ``needs_peers``: it can find nothing in a job of one rank, and is not called for one.
    ``uses_baseline``: ``job.expected`` is the reference, and the check itself reports that a single rank has nothing to
    be compared with. ``last_resort``: it is evaluated only if no other check has an error or a warning that may be the
    primary one. ``limits``: thresholds by name. ``origin``: ``built-in``, a distribution or a file. ``state``: how far
    it may change. ``impacts``: the effect of findings whose summary has a match of the pattern; the first one counts.

    Raises:
        ValueError: the metadata is malformed; the runner and the reports rely on its form.
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
    limits: Mapping[str, float] = msgspec.field(default_factory=dict)
    origin: str = "built-in"
    uses_baseline: bool = False
    needs_peers: bool = False
    or_needs: tuple[type[Section], ...] = ()
    from_logs: tuple[LogJudge, ...] = ()
    last_resort: bool = False
    state: State = "stable"
    impacts: Mapping[str, str] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        """Reject malformed metadata."""
        if not _ID.fullmatch(str(self.id)):
            raise ValueError(f"{self.id!r} is not a valid id: capital letters and three digits, such as NET007")
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"{self.id}: {self.name!r} is not a valid name; it comes from the function's")
        if not isinstance(self.severity, Severity) or not isinstance(self.scope, Scope):
            raise ValueError(f"{self.id}: severity and scope are members of Severity and Scope")
        if not set(str(self.when)) <= set("PRM") or not self.when:
            raise ValueError(f"{self.id}: when is made of the letters P, R and M")
        require_state(self.id, self.state)
        for name, sections in (("needs", self.needs), ("or_needs", self.or_needs)):
            kinds = sections if isinstance(sections, tuple) else (None,)
            if not all(isinstance(kind, type) and issubclass(kind, Section) for kind in kinds):
                raise ValueError(f"{self.id}: {name} is a tuple of types of sections")
        # Tests compile those of this distribution; here, it would take a tenth of the time of their import.
        for pattern in () if _is_own(self.judge) else self.impacts:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"{self.id}: impacts has an invalid pattern {pattern!r}: {error}") from None

    def effect_of(self, summary: str) -> str:
        """The effect of a finding that states none: that of its kind in ``impacts``, or else that of the check."""
        return effect_of_kind(self.impacts, summary) or self.effect

    @property
    def reads_logs(self) -> bool:
        """Whether the check evaluates log events only."""
        return self.when == "M" and not self.needs

    def judge_logs(self, job: Job) -> Iterator[Verdict]:
        """What the log events of a job show."""
        for judge in self.from_logs:
            yield from judge(job)

    @property
    def family(self) -> str:
        """The name of the check's family, from the letters of its id."""
        return family_of(self.id)


def _is_own(function: Callable[..., object]) -> bool:
    """Whether a function, or the one that it calls with some arguments, is of this distribution."""
    module = getattr(getattr(function, "func", function), "__module__", None) or ""
    return module.partition(".")[0] in ("doctor", "doctor_checks")


def family_of(check_id: str) -> str:
    """The name of the family that an id belongs to, from its letters."""
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
    needs_peers: bool = False,
    from_logs: LogJudge | tuple[LogJudge, ...] = (),
    last_resort: bool = False,
    state: State = "stable",
    impacts: Mapping[str, str] | None = None,
    cases: Callable[[], Iterable[Case]] = tuple,
) -> Callable[[Callable[..., Iterable[Verdict]]], Check]:
    """Make a function ``(job, *, limit=number) -> Iterator[Verdict]`` a check named after it.

    Its docstring holds a question, then ``Why it hurts:`` and ``Fix:``, the defaults of a finding's effect and fix.
    ``needs``: sections without which a rank can't be checked; ``or_needs``: sections that serve as well, such as
    measurements of a run instead of an estimate. ``when``: the stages that can supply the facts, of P (preflight), R
    (run) and M (post-mortem). ``compares_ranks`` is true by default if the scope is the job. ``needs_peers``: the check
    can find nothing in a job of one rank. ``uses_baseline``: a baseline replaces the majority. ``from_logs``: functions
    that check log events in addition; a check that reads logs only (``when="M"``, no ``needs``) has none.
    ``last_resort``: the check is evaluated only if no other one has an error or a warning that may be the primary one.
    ``state``: ``preview`` while what it finds, its severity or its name may change. ``impacts``: a pattern of the
    summary -> the effect of such findings, for a check whose kinds of findings have different consequences. ``cases``
    is called by tests only.
    """

    def make(function: Callable[..., Iterable[Verdict]]) -> Check:
        question, effect, fix = read_docstring(function.__doc__ or "")
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
            needs_peers=needs_peers,
            or_needs=or_needs,
            from_logs=from_logs if isinstance(from_logs, tuple) else (from_logs,),
            last_resort=last_resort,
            state=state,
            impacts=impacts or {},
        )

    return make


def effect_of_kind(impacts: Mapping[str, str], summary: str) -> str:
    """The effect of the first pattern that has a match in a summary; empty if none has."""
    return next((effect for pattern, effect in impacts.items() if re.search(pattern, summary)), "")


def require_state(owner: str, state: str) -> None:
    """Raise ``ValueError`` if a check or a rule declares another state than those of :data:`State`."""
    if state not in get_args(State):
        raise ValueError(f"{owner}: state is one of {', '.join(get_args(State))}")


def read_docstring(text: str) -> tuple[str, str, str]:
    """The question, the effect and the fix in a check's docstring; missing parts are empty."""
    parts = _HEADING.split(text)
    named = dict(zip(parts[1::2], parts[2::2], strict=True))
    return _fold(parts[0]), _capitalized(_fold(named.get("Why it hurts", ""))), _fold(named.get("Fix", ""))


def _capitalized(sentence: str) -> str:
    """A sentence after a colon, with a capital unless a literal is first. Not for fixes, which may be commands."""
    return sentence[:1].upper() + sentence[1:] if _PLAIN_WORD.match(sentence) else sentence


def _fold(text: str) -> str:
    return " ".join(text.split())


def _read_limits(function: Callable[..., object]) -> dict[str, float]:
    defaults = getattr(function, "__kwdefaults__", None) or {}
    return {name: default for name, default in defaults.items() if isinstance(default, (int, float))}
