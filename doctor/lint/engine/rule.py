"""Rules: functions over one file, with metadata in one typed call, as :mod:`doctor.core.check` for jobs."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from doctor.core.check import Check, State, effect_of_kind, family_of, read_docstring, require_state
from doctor.core.finding import Severity


class SourceLocation(NamedTuple):
    """A place in a file: lines from 1, columns from 0 in characters."""

    line: int
    column: int = 0
    end_line: int | None = None
    end_column: int | None = None


class Replacement(NamedTuple):
    """Lines ``first`` to ``last`` (from 1, ``last`` not included) of ``file`` that a fix replaces by ``text``."""

    file: str
    first: int
    last: int
    text: str


class SetArgument(NamedTuple):
    """The call at ``place`` gets the keyword argument ``name=value``, in place of one that it may have."""

    place: SourceLocation
    name: str
    value: str


class DropArgument(NamedTuple):
    """The call at ``place`` loses the keyword argument ``name``."""

    place: SourceLocation
    name: str


class RenameArgument(NamedTuple):
    """The keyword argument ``name`` of the call at ``place`` is called ``to``, with its value or another one."""

    place: SourceLocation
    name: str
    to: str
    value: str | None = None


class InsertStatement(NamedTuple):
    """A statement is inserted in front of the one at ``place``, or ``inside``, at the beginning of its body."""

    place: SourceLocation
    statement: str
    inside: bool = True


class ReplaceExpression(NamedTuple):
    """The expression at ``place`` becomes another one."""

    place: SourceLocation
    expression: str


class FlowStep(NamedTuple):
    """A step of the control flow that leads to a finding: the ``code`` at a line, and the ``note`` on it."""

    file: str
    line: int
    code: str
    note: str = ""


Edit = SetArgument | DropArgument | RenameArgument | InsertStatement | ReplaceExpression
"""One step of a fix. Rules offer it only if the result is certainly correct."""


@dataclass(frozen=True)
class Violation:
    """One fault in a file. ``at``: a node of the tree, or a place in a file that is not Python.

    ``summary``: one line, the claim first. ``fix``, ``effect``: replace the rule's own words. ``severity`` overrides
    the declared one. ``confidence``: 0 to 1. ``edits``: what ``--fix`` does, all of it or nothing. ``flow``: the steps
    that lead to it, which ``--explain-flow`` shows. ``preview``: of a kind that few readers act on, or that is not
    measured yet; reported only with ``--preview``, as all findings of a rule in preview. ``once``: the name of a fault
    of the whole project, of which the first finding is reported, with the places of the others.
    """

    at: ast.AST | SourceLocation
    summary: str
    fix: str = ""
    severity: Severity | None = None
    confidence: float = 1.0
    edits: tuple[Edit, ...] = ()
    evidence: tuple[tuple[str, object], ...] = ()
    flow: tuple[FlowStep, ...] = ()
    preview: bool = False
    effect: str = ""
    once: str = ""

    @property
    def place(self) -> SourceLocation:
        """Its place; columns of nodes count bytes, as in :mod:`ast`."""
        return self.at if isinstance(self.at, SourceLocation) else location_of(self.at)


def location_of(node: ast.AST) -> SourceLocation:
    """Where a node is."""
    line, column = getattr(node, "lineno", 1), getattr(node, "col_offset", 0)
    return SourceLocation(line, column, getattr(node, "end_lineno", None), getattr(node, "end_col_offset", None))


LONGEST_SUMMARY = 100
"""Characters of a summary; longer ones name a line instead of its code."""

MARK = "# !"
"""Ends a line of a failing case that violates the rule."""


@dataclass(frozen=True)
class FileFails:
    """A file in which exactly the lines that end with :data:`MARK` violate the rule.

    ``fixed``: the text that ``--fix`` makes of it, or the parts of ``text`` that it replaces. ``name``: of the file.
    ``releases``: installed distributions and their releases. ``processors``: of the machine. ``beside``: names and
    texts of the other files of its project.
    """

    title: str
    text: str
    fixed: str | Mapping[str, str] = ""
    name: str = "train.py"
    releases: tuple[tuple[str, str], ...] = ()
    processors: int | None = None
    beside: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        """Derive the fixed text from the replaced parts."""
        if not isinstance(self.fixed, str):
            text = self.text
            for old, new in self.fixed.items():
                text = text.replace(old, new)
            object.__setattr__(self, "fixed", text)

    @property
    def lines(self) -> tuple[int, ...]:
        """The lines that violate the rule."""
        lines = enumerate(self.text.splitlines(), 1)
        return tuple(number for number, line in lines if line.rstrip().endswith(MARK))


@dataclass(frozen=True)
class FilePasses:
    """A file without violations, such as the corrected variant of a failing one."""

    title: str
    text: str
    name: str = "train.py"
    releases: tuple[tuple[str, str], ...] = ()
    processors: int | None = None
    beside: tuple[tuple[str, str], ...] = ()


FileCase = FileFails | FilePasses


@dataclass(frozen=True)
class Rule:
    """One fault of files; made by :func:`rule`.

    ``reads``: the type of its argument (:class:`doctor.lint.python.script.Script`, or a launch file). ``mentions``:
    every file that can violate it has one of these words; others are not parsed for it. ``foreshadows``: ids of the
    checks that find the same fault in a run. ``state`` and ``impacts``: as of a check; findings of a rule in
    preview are reported only with ``--preview``, or if its id is selected. ``preview_infos``: so are those of severity
    info, while the others are stable.

    Raises:
        ValueError: the state is unknown.
    """

    id: str
    name: str
    severity: Severity
    reads: type
    judge: Callable[[Any], Iterable[Violation]]
    cases: Callable[[], Iterable[FileCase]]
    question: str
    effect: str
    fix: str
    mentions: tuple[str, ...] = ()
    foreshadows: tuple[str, ...] = ()
    origin: str = "built-in"
    state: State = "stable"
    preview_infos: bool = False
    impacts: Mapping[str, str] = field(default_factory=dict)
    when: str = field(default="L", init=False)

    def __post_init__(self) -> None:
        """Reject an unknown state."""
        require_state(self.id, self.state)

    @property
    def family(self) -> str:
        """The name of its family, derived from the letters of its id."""
        return family_of(self.id)

    def effect_of(self, summary: str) -> str:
        """The effect of a violation, as :meth:`doctor.core.check.Check.effect_of`."""
        return effect_of_kind(self.impacts, summary) or self.effect

    def is_preview(self, violation: Violation) -> bool:
        """Whether a violation is reported only if findings in preview are asked for."""
        is_info = (violation.severity or self.severity) is Severity.INFO
        return self.state == "preview" or violation.preview or (self.preview_infos and is_info)

    def violations(self, source: Any) -> Iterator[Violation]:
        """The violations in a file, at most one per line."""
        seen = set()
        for violation in self.judge(source):
            if violation.place.line not in seen:
                seen.add(violation.place.line)
                yield violation


def rule(
    *,
    reads: type,
    id: str = "",  # noqa: A002 - the field's word
    severity: Severity | None = None,
    check: Check | None = None,
    mentions: tuple[str, ...] = (),
    foreshadows: tuple[str, ...] = (),
    state: State | None = None,
    preview_infos: bool = False,
    impacts: Mapping[str, str] | None = None,
    cases: Callable[[], Iterable[FileCase]] = tuple,
) -> Callable[[Callable[[Any], Iterable[Violation]]], Rule]:
    """Make a function ``(source) -> Iterator[Violation]`` a rule, named after the function.

    Its docstring holds a question, then ``Why it hurts:`` and ``Fix:``, the defaults of a violation. ``check``: the
    check that finds the same fault before or during a run. The rule has its id and its name, and
    takes its severity, its state, its impacts and each part of its docstring unless it gives its own.
    ``preview_infos``: findings of severity info are in preview. ``cases`` is called by tests only.

    Raises:
        ValueError: the rule has no check, and no id or severity of its own.
    """
    own_id = id or (check.id if check is not None else "")
    own_severity = severity or (check.severity if check is not None else None)
    if not own_id or own_severity is None:
        raise ValueError("a rule has an id and a severity, or a check")

    def make(function: Callable[[Any], Iterable[Violation]]) -> Rule:
        question, effect, fix = read_docstring(function.__doc__ or "")
        if check is not None:
            question, effect, fix = question or check.question, effect or check.effect, fix or check.fix
        return Rule(
            id=own_id,
            name=check.name if check is not None else function.__name__.replace("_", "-"),
            severity=own_severity,
            reads=reads,
            judge=function,
            cases=cases,
            question=question,
            effect=effect,
            fix=fix,
            mentions=mentions,
            foreshadows=foreshadows,
            state=state or (check.state if check is not None else "stable"),
            preview_infos=preview_infos,
            impacts=(check.impacts if check is not None and impacts is None else impacts) or {},
        )

    return make
