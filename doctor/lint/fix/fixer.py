"""Applies ``--fix`` and ``--diff`` to linted files."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass

from doctor.lint.engine.discovery import UnreadableFile, read_text
from doctor.lint.engine.file_check import FileResult
from doctor.lint.engine.rule import Edit, Replacement
from doctor.lint.engine.runner import LintRequest, lint_targets
from doctor.lint.engine.worker_pool import map_in_workers
from doctor.lint.fix.edits import changed_lines, difference, fixed_text, require_libcst, why_untouched, write_whole

DEADLINE = 60.0
"""Seconds in which one file is rewritten."""
MOST_ROUNDS = 5
"""Rounds: a fix may make another one possible."""


@dataclass
class FixOutcome:
    """``count`` of fixed findings; ``patches`` if nothing is written; ``left``: what was not fixed, with reasons."""

    count: int = 0
    files: tuple[str, ...] = ()
    patches: tuple[str, ...] = ()
    left: tuple[str, ...] = ()


@dataclass
class _RewrittenFile:
    """The new content of a file, or ``why`` there is none."""

    before: str = ""
    after: str = ""
    encoding: str = ""
    count: int = 0
    why: str = ""


def patches_for(verdicts: Sequence[FileResult], asked: LintRequest) -> FixOutcome:
    """What ``--fix`` would do in its first round."""
    mended = FixOutcome()
    for verdict, new in _rewritten(verdicts, asked):
        if new.count:
            mended.patches += (difference(verdict.target.shown, new.before, new.after),)
            _count(mended, verdict, new)
        elif new.why:
            mended.left += (f"{verdict.target.shown}: {new.why}",)
    return mended


def apply_fixes(verdicts: Sequence[FileResult], asked: LintRequest) -> tuple[list[FileResult], FixOutcome]:
    """Write all fixes and lint those files again, until nothing is left to fix."""
    current, mended = list(verdicts), FixOutcome()
    for _ in range(MOST_ROUNDS):
        written = _round(current, asked, mended)
        if not written:
            break
        project = [one.target for one in current]
        again = lint_targets([current[place].target for place in written], asked, project)
        for place, verdict in zip(written, again, strict=True):
            current[place] = verdict
    return current, mended


def _round(verdicts: Sequence[FileResult], asked: LintRequest, mended: FixOutcome) -> list[int]:
    places = {id(verdict): place for place, verdict in enumerate(verdicts)}
    written = []
    for verdict, new in _rewritten(verdicts, asked):
        why = new.why or (_write(verdict, new) if new.count else None)
        if why and f"{verdict.target.shown}: {why}" not in mended.left:
            mended.left += (f"{verdict.target.shown}: {why}",)
        elif new.count and not why:
            written.append(places[id(verdict)])
            _count(mended, verdict, new)
    return written


def _count(mended: FixOutcome, verdict: FileResult, new: _RewrittenFile) -> None:
    mended.count += new.count
    mended.files = tuple(dict.fromkeys((*mended.files, verdict.target.shown)))


def _write(verdict: FileResult, new: _RewrittenFile) -> str | None:
    try:
        write_whole(verdict.target.path, new.after.encode(new.encoding))
    except UnicodeEncodeError:
        return f"the fix can't be written in {new.encoding}"
    except OSError as error:
        return f"it can't be written: {error.strerror or error}"
    return None


def _rewritten(verdicts: Sequence[FileResult], asked: LintRequest) -> list[tuple[FileResult, _RewrittenFile]]:
    require_libcst()
    wanted = [verdict for verdict in verdicts if _edit_groups(verdict, asked)]
    outcomes = map_in_workers(
        wanted, lambda verdict: _rewrite(verdict, asked), lambda _, why: _RewrittenFile(why=why), deadline=DEADLINE
    )
    return list(zip(wanted, outcomes, strict=True))


def _edit_groups(verdict: FileResult, asked: LintRequest) -> list[tuple[Edit, ...]]:
    if verdict.kind != "python":
        return []
    ignored_in = asked.settings.ignored_in
    rules = asked.book.rules
    return [
        one.violation.edits
        for one in verdict.found
        if one.violation.edits and one.ignored is None and ignored_in(rules[one.rule], verdict.target.shown) is None
    ]


def _rewrite(verdict: FileResult, asked: LintRequest) -> _RewrittenFile:
    if why := why_untouched(verdict.target.path, verdict.target.root):
        return _RewrittenFile(why=why)
    try:
        text = read_text(verdict.target)
    except UnreadableFile as error:
        return _RewrittenFile(why=str(error))
    after, granted = fixed_text(text.text, _edit_groups(verdict, asked))
    if not granted:
        return _RewrittenFile(why="the fix does not fit, and nothing was changed")
    return _RewrittenFile(text.text, after, text.encoding, len(granted))


def replacements_for(
    verdicts: Sequence[FileResult], asked: LintRequest
) -> dict[tuple[str, str, int], tuple[Replacement, ...]]:
    """The replacements of each finding's own fix, by rule, file and line; empty without LibCST."""
    if importlib.util.find_spec("libcst") is None:
        return {}
    wanted = [verdict for verdict in verdicts if _edit_groups(verdict, asked)]
    outcomes = map_in_workers(wanted, lambda one: _replacements(one, asked), lambda _, why: {}, deadline=DEADLINE)
    return {key: value for found in outcomes for key, value in found.items()}


def _replacements(verdict: FileResult, asked: LintRequest) -> dict[tuple[str, str, int], tuple[Replacement, ...]]:
    try:
        before = read_text(verdict.target).text
    except UnreadableFile:
        return {}
    found: dict[tuple[str, str, int], tuple[Replacement, ...]] = {}
    for one in verdict.found:
        after, granted = fixed_text(before, [one.violation.edits]) if one.violation.edits else (before, ())
        if granted:
            key = (asked.book.rules[one.rule].id, verdict.target.shown, one.place.line)
            changes = changed_lines(before, after)
            found[key] = tuple(Replacement(verdict.target.shown, *change) for change in changes)
    return found
