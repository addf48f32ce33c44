"""Applies all rules to one file. A rule that raises ends as ``crash``, in this module alone.

What comes out holds no tree, so that it can leave the process that made it.
"""

from __future__ import annotations

import ast
import contextlib
import os
import re
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, TypeVar

import msgspec

from doctor.core.check_registry import sentence_of
from doctor.core.report_document import Ignored
from doctor.lint.engine.copies import CodeAround, CodeOfScript, CodeOfShell
from doctor.lint.engine.discovery import LINE_END, LintTarget, SourceText, UnreadableFile, read_text
from doctor.lint.engine.project_files import ProjectFiles
from doctor.lint.engine.registry import Rulebook
from doctor.lint.engine.releases import Releases
from doctor.lint.engine.rule import FlowStep, Rule, SourceLocation, Violation
from doctor.lint.engine.suppressions import UNUSED_SUPPRESSION, SuppressionComment, Suppressions, comments_in
from doctor.lint.engine.worker_pool import ProcessorDeadline
from doctor.lint.launch.launch_file import EnvironmentSource, LaunchFile
from doctor.lint.launch.stale_commands import as_launched
from doctor.lint.python.notebooks import Notebook, read_notebook
from doctor.lint.python.project.one_process import as_placed
from doctor.lint.python.script import Script, parsed

T = TypeVar("T")
TOGETHER = 1800.0
"""Seconds for all files of a command; ten thousand typical files take two minutes on one core."""
DEADLINE = 30.0
"""Seconds that one file may take."""
MOST_VIOLATIONS = 1_000
"""Violations of one rule in one file that are kept."""
LONGEST_LINE = 240
"""Characters of a line that are shown."""
_SETS_ENVIRONMENT = ("environ", "putenv")
"""Every script that sets variables has one of these words."""


_TEST_FOLDERS = re.compile(r"(?:^|/)(?:tests|unit?_?tests?|test_?utils?|testing)/")
_TEST_FOLDERS_OF_PYTHON = re.compile(r"(?:^|/)(?:tests?|unit?_?tests?|test_?utils?|testing)/")
"""Scripts in ``test/`` may start the evaluation of a model."""
_TEST_NAMES = re.compile(r"(?:^|/)(?:test_[^/]*|[^/]*_test|conftest)\.py$")
_HAS_TESTS = re.compile(r"^[ \t]*(?:async )?def test_|^class Test|^(?:import|from) (?:unittest|pytest)\b", re.MULTILINE)


class FileTimeout(BaseException):
    """A file took too long; rules must not catch this."""


class LocatedViolation(NamedTuple):
    """A violation: the index of its rule, its place in the file (line 0: unknown; columns in characters). ``code``: the
    line; ``cell``: the number of the notebook cell and the line in it; ``digest``: of what makes it a copy of another
    one, or empty."""

    rule: int
    place: SourceLocation
    violation: Violation
    code: str
    ignored: Ignored | None = None
    cell: tuple[int, int] | None = None
    digest: str = ""


@dataclass
class FileResult:
    """The result of one file. ``kind``: ``python``, ``notebook``, ``launch`` or ``unknown``; ``skipped``: why it was
    not read, ``decisive``: whether that makes the report inconclusive; ``ran_out``: it timed out; ``dull``: a file of a
    folder that is not reported; ``of_tests``: a test runner finds it; ``notes``: parts that were not read. ``judged``:
    indices of the rules that finished; ``crashes``, ``seconds``, ``hidden`` (how many findings in preview are not in
    ``found``) and ``in_tests`` (how many of tests are not) by index of the rule."""

    target: LintTarget
    kind: str
    skipped: str | None = None
    decisive: bool = False
    dull: bool = False
    of_tests: bool = False
    notes: tuple[str, ...] = ()
    ran_out: bool = False
    found: list[LocatedViolation] = field(default_factory=list)
    judged: set[int] = field(default_factory=set)
    crashes: dict[int, str] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    hidden: dict[int, int] = field(default_factory=dict)
    in_tests: dict[int, int] = field(default_factory=dict)


class FileChecker:
    """Applies the rules of ``book`` to files. ``releases``: of distributions; ``processors``: of the machine that
    runs the scripts; ``known``: every id that a comment may name, with its family; ``project``: the files that imports
    are followed to."""

    def __init__(
        self,
        book: Rulebook,
        *,
        releases: Releases,
        processors: int | None,
        known: Mapping[str, str],
        project: Iterable[LintTarget] = (),
    ) -> None:
        self._rules = list(enumerate(book.rules))
        self._releases = releases
        self._processors = processors
        self._known = known
        self._modules = ProjectFiles(project)
        self._until = time.monotonic() + TOGETHER
        self._vain = next((number for number, rule in self._rules if rule is UNUSED_SUPPRESSION), None)

    def judge(self, target: LintTarget) -> FileResult:
        """Lint one file, within :data:`DEADLINE` seconds if the platform has alarms."""
        verdict = FileResult(target, target.kind, target.skipped)
        if target.skipped is None and time.monotonic() > self._until:
            return FileResult(target, target.kind, f"all files together took longer than {TOGETHER:g} s", ran_out=True)
        if target.skipped is None:
            try:
                with _deadline(DEADLINE):
                    look = self._look_at_launch if target.kind in ("shell", "config") else self._look_at_python
                    look(target, read_text(target), verdict)
            except UnreadableFile as why:
                verdict.skipped = str(why)
                verdict.decisive = verdict.decisive or target.is_named
            except FileTimeout:
                verdict = FileResult(target, verdict.kind, f"it took longer than {DEADLINE:g} s", ran_out=True)
        elif target.is_named and target.kind != "unknown":
            verdict.decisive = True
        return verdict

    def _look_at_launch(self, target: LintTarget, text: SourceText, verdict: FileResult) -> None:
        """If the reader of launch files raises, all their rules crash."""
        from doctor.lint.launch.file_type import read_launch_file
        from doctor.lint.launch.shell.left_exports import without_left_exports
        from doctor.lint.launch.shell.reader import ShellFile

        try:
            launch = read_launch_file(target.shown, text.text)
        except UnreadableFile:
            raise
        except Exception as error:
            crash = f"its reader: {sentence_of(error)} ({_innermost(error)})"
            of_launch_files = (one for one in self._rules if one[1].reads not in (Script, object))
            verdict.crashes = {number: crash for number, _ in of_launch_files}
            verdict.kind = "unknown"
            return
        if launch is None:
            verdict.kind, verdict.dull = "unknown", not target.is_named
            verdict.skipped = "it is not a known kind of launch file"
            return
        releases = self._releases.of_project(target.path, target.root, text.text)
        launch = replace(launch, releases=releases, modules=self._modules)
        if isinstance(launch, ShellFile):
            launch = without_left_exports(launch, text.text, self._modules)
        verdict.kind, verdict.notes = "launch", launch.notes
        verdict.of_tests = _is_of_tests(target, text.text)
        page = _LintedText(target.shown, text.text, comments_in(text.text, is_python=False))
        self._apply(lambda: launch, type(launch), page, verdict)

    def _look_at_python(self, target: LintTarget, text: SourceText, verdict: FileResult) -> None:
        notebook = read_notebook(text.text) if target.kind == "notebook" else None
        source = text.text if notebook is None else notebook.script
        page = _LintedText(target.shown, source, comments_in(source, is_python=True), notebook)

        @cache
        def script() -> Script:
            releases = self._releases.of_project(target.path, target.root)
            return _parsed(
                lambda: Script(
                    target.shown,
                    source,
                    releases=releases,
                    processors=self._processors,
                    modules=self._modules,
                    location=os.path.abspath(target.path),  # noqa: PTH100 - Path.absolute keeps ".."
                ),
                "it cannot be parsed as Python",
            )

        try:
            verdict.of_tests = _is_of_tests(target, source)
            self._apply(script, Script, page, verdict)
            # A file that no rule has any use for is still one that rules could parse.
            if not script.cache_info().currsize:
                _parsed(lambda: parsed(source), "it can't be parsed as Python")
        except UnreadableFile:
            frameworks = ("torch", "lightning", "transformers", "deepspeed", "accelerate")
            verdict.decisive = any(word in source for word in frameworks)
            raise

    def _apply(self, source: Callable[[], Any], kind: type, page: _LintedText, verdict: FileResult) -> None:
        """Apply all rules; the source is parsed for the first rule that needs it."""
        ignores = Suppressions(page.comments)

        @cache
        def around() -> CodeAround:
            return _code_around(page.text, source())

        for number, rule in self._rules:
            if not issubclass(kind, rule.reads) or rule is UNUSED_SUPPRESSION:
                continue
            mentions = _SETS_ENVIRONMENT if kind is Script and rule.reads is EnvironmentSource else rule.mentions
            if mentions and not any(map(page.has, mentions)):
                verdict.judged.add(number)
                continue
            began = time.perf_counter()
            try:
                for count, violation in enumerate(_violations(rule, source())):
                    if count >= MOST_VIOLATIONS:
                        raise OverflowError(f"it hits more than {MOST_VIOLATIONS} lines of one file")
                    reason = ignores.reason_for(rule, page.lines_of(violation))
                    found = page.found(number, violation, reason)
                    verdict.found.append(found._replace(digest=around().digest(violation)))
                verdict.judged.add(number)
            except UnreadableFile:
                raise
            except Exception as error:
                verdict.crashes[number] = f"{sentence_of(error)} ({_innermost(error)})"
            verdict.seconds[number] = time.perf_counter() - began
        if self._vain is not None:
            judged = {rule.id for number, rule in self._rules if number in verdict.judged}
            unused = ignores.unused(judged, self._known)
            verdict.found += [page.found(self._vain, violation, None) for violation in unused]
            verdict.judged.add(self._vain)
        verdict.found.sort(key=lambda one: (one.place, one.rule))


def _violations(rule: Rule, source: Any) -> Iterator[Violation]:
    """The violations of a rule, without those that cannot happen where they are."""
    for found in rule.violations(source):
        violation: Violation | None = found
        if isinstance(source, Script):
            violation = as_placed(source, rule.id, rule.severity, found)
        elif isinstance(source, LaunchFile):
            violation = as_launched(source, rule.id, found)
        if violation is not None:
            yield violation


def _code_around(text: str, source: object) -> CodeAround:
    from doctor.lint.launch.shell.reader import ShellFile
    from doctor.lint.launch.shell.statements import split_script

    if isinstance(source, Script):
        return CodeOfScript(text, source.tree)
    return CodeOfShell(text, split_script(text).statements) if isinstance(source, ShellFile) else CodeAround(text)


def _is_of_tests(target: LintTarget, text: str) -> bool:
    """Whether a file of a folder that is linted is one that a test runner finds, or a helper of them: by its place
    below that folder, or by its name and what it defines. In a folder of tests that was given itself, none is."""
    if target.is_named or _TEST_FOLDERS_OF_PYTHON.search(f"{target.root.as_posix()}/"):
        return False
    inner = target.path.relative_to(target.root) if target.path.is_relative_to(target.root) else target.path
    place = inner.as_posix()
    if target.kind not in ("python", "notebook"):
        return _TEST_FOLDERS.search(place) is not None
    if _TEST_FOLDERS_OF_PYTHON.search(place):
        return True
    return _TEST_NAMES.search(place) is not None and _HAS_TESTS.search(text) is not None


def _parsed(parse: Callable[[], T], complaint: str) -> T:
    try:
        return parse()
    except SyntaxError as error:
        why = f"it is not valid Python for this interpreter: line {error.lineno}: {error.msg}"
        raise UnreadableFile(why) from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise UnreadableFile(f"{complaint}: {error or type(error).__name__}") from None


class _LintedText:
    """The text that rules read, by lines, and the places of its lines in the file."""

    def __init__(
        self, path: str, text: str, comments: tuple[SuppressionComment, ...], notebook: Notebook | None = None
    ) -> None:
        self.text = text
        self.comments = comments
        self._path = path
        self._notebook = notebook
        self._words: dict[str, bool] = {}

    def has(self, word: str) -> bool:
        """Whether the text contains a word; many rules ask for the same ones."""
        if word not in self._words:
            self._words[word] = word in self.text
        return self._words[word]

    @cached_property
    def _lines(self) -> list[str]:
        return LINE_END.split(self.text)

    def lines_of(self, violation: Violation) -> tuple[int, ...]:
        """The lines whose comments suppress it: its first line, and the last one of an expression."""
        is_simple = isinstance(violation.at, (ast.expr, ast.keyword, ast.Expr, ast.Assign))
        return (violation.place.line, (violation.place.end_line if is_simple else None) or violation.place.line)

    def found(self, number: int, violation: Violation, ignored: tuple[str, int] | None) -> LocatedViolation:
        place = violation.place
        if isinstance(violation.at, ast.AST):  # its columns count bytes of UTF-8
            end = place.end_column
            if end is not None and place.end_line is not None:
                end = _characters(self._line(place.end_line), end)
            place = place._replace(column=_characters(self._line(place.line), place.column), end_column=end)
        code = self._line(place.line).rstrip()[:LONGEST_LINE]
        reason = None
        if ignored is not None:
            reason = Ignored(ignored[0], f"{self._path}:{self._told(ignored[1])[0]}")
        line, cell = self._told(place.line)
        if cell is not None:
            place = SourceLocation(line, place.column)
        flow = tuple(self._step(one) for one in violation.flow)
        return LocatedViolation(number, place, portable(replace(violation, flow=flow)), code, reason, cell)

    def _step(self, step: FlowStep) -> FlowStep:
        """A step of this file by the line in the file, as text without a tree."""
        line = self._told(step.line)[0] if step.file == self._path else step.line
        return FlowStep(str(step.file), line, str(step.code)[:LONGEST_LINE], str(step.note))

    def _told(self, line: int) -> tuple[int, tuple[int, int] | None]:
        """The line in the file, and the cell and the line in it."""
        if self._notebook is None or not 0 < line <= len(self._notebook.places):
            return line, None
        of_file, cell, inner = self._notebook.places[line - 1]
        return of_file, (cell, inner)

    def _line(self, number: int) -> str:
        return self._lines[number - 1] if 0 < number <= len(self._lines) else ""


def _characters(line: str, column: int) -> int:
    if line.isascii():
        return column
    return len(line.encode("utf-8", "replace")[:column].decode("utf-8", "ignore"))


def portable(violation: Violation) -> Violation:
    """The violation without its syntax tree, with evidence that JSON can represent.

    Raises:
        TypeError: it cannot.
    """
    if not isinstance(violation, Violation):
        raise TypeError(f"a rule yields Hit, not {type(violation).__name__}")
    evidence = tuple((str(name), msgspec.to_builtins(value)) for name, value in violation.evidence)
    return Violation(
        violation.place,
        str(violation.summary),
        str(violation.fix),
        violation.severity,
        float(violation.confidence),
        tuple(violation.edits),
        evidence,
        tuple(violation.flow),
        bool(violation.preview),
        str(violation.effect),
        str(violation.once),
    )


def _innermost(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "no frame"


@contextlib.contextmanager
def _deadline(seconds: float) -> Iterator[None]:
    """Raise :class:`FileTimeout` in the block after so many seconds in which a processor was free for this process;
    only the main thread receives signals."""
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    deadline = ProcessorDeadline(os.getpid(), seconds)

    def ring(_number: int, _frame: FrameType | None) -> None:
        if not (left := deadline.left()):
            raise FileTimeout
        signal.setitimer(signal.ITIMER_REAL, left)

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
