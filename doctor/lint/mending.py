"""``--fix`` and ``--diff`` over files that were judged: what is mended, written, or left, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from doctor.lint.fixing import (
    changed_lines,
    difference,
    fixed_text,
    is_installed,
    require_libcst,
    why_untouched,
    write_whole,
)
from doctor.lint.judging import Verdict
from doctor.lint.pool import shared_work
from doctor.lint.reading import Unreadable, read_text
from doctor.lint.rule import Edit, Replacement
from doctor.lint.running import Asked, judge_targets

DEADLINE = 60.0
"""Seconds in which one file is rewritten."""
MOST_ROUNDS = 5
"""Times that files are looked at again: a fix may make room for another."""


@dataclass
class Mended:
    """``count`` of findings that were mended, the paths of the files that were written or would be, patches in place of
    writing, and what was left, with the reason."""

    count: int = 0
    files: tuple[str, ...] = ()
    patches: tuple[str, ...] = ()
    left: tuple[str, ...] = ()


@dataclass
class _Rewritten:
    """A file's new content; ``why`` there is none."""

    before: str = ""
    after: str = ""
    encoding: str = ""
    count: int = 0
    why: str = ""


def patches_for(verdicts: Sequence[Verdict], asked: Asked) -> Mended:
    """What ``--fix`` would do in its first round.

    Raises:
        UnusableError: LibCST is not there.
    """
    mended = Mended()
    for verdict, new in _rewritten(verdicts, asked):
        if new.count:
            mended.patches += (difference(verdict.target.shown, new.before, new.after),)
            _count(mended, verdict, new)
        elif new.why:
            mended.left += (f"{verdict.target.shown}: {new.why}",)
    return mended


def mend(verdicts: Sequence[Verdict], asked: Asked) -> tuple[list[Verdict], Mended]:
    """Write what can be mended, and judge those files again, until there is nothing left that can be.

    Raises:
        UnusableError: LibCST is not there.
    """
    current, mended = list(verdicts), Mended()
    for _ in range(MOST_ROUNDS):
        written = _round(current, asked, mended)
        if not written:
            break
        again = judge_targets([current[place].target for place in written], asked)
        for place, verdict in zip(written, again, strict=True):
            current[place] = verdict
    return current, mended


def _round(verdicts: Sequence[Verdict], asked: Asked, mended: Mended) -> list[int]:
    """The places of the files that were written."""
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


def _count(mended: Mended, verdict: Verdict, new: _Rewritten) -> None:
    mended.count += new.count
    mended.files = tuple(dict.fromkeys((*mended.files, verdict.target.shown)))


def _write(verdict: Verdict, new: _Rewritten) -> str | None:
    """Put the new text in place of the old one; why not, where it can't be."""
    try:
        write_whole(verdict.target.path, new.after.encode(new.encoding))
    except UnicodeEncodeError:
        return f"the fix can't be written in {new.encoding}"
    except OSError as error:
        return f"it can't be written: {error.strerror or error}"
    return None


def _rewritten(verdicts: Sequence[Verdict], asked: Asked) -> list[tuple[Verdict, _Rewritten]]:
    require_libcst()
    wanted = [verdict for verdict in verdicts if _wishes(verdict, asked)]
    outcomes = shared_work(
        wanted, lambda verdict: _rewrite(verdict, asked), lambda _, why: _Rewritten(why=why), deadline=DEADLINE
    )
    return list(zip(wanted, outcomes, strict=True))


def _wishes(verdict: Verdict, asked: Asked) -> list[tuple[Edit, ...]]:
    """The edits of each finding that counts."""
    if verdict.kind != "python":
        return []
    ignored_in = asked.settings.ignored_in
    rules = asked.book.rules
    return [
        one.hit.edits
        for one in verdict.found
        if one.hit.edits and one.ignored is None and ignored_in(rules[one.rule], verdict.target.shown) is None
    ]


def _rewrite(verdict: Verdict, asked: Asked) -> _Rewritten:
    if why := why_untouched(verdict.target.path, verdict.target.root):
        return _Rewritten(why=why)
    try:
        text = read_text(verdict.target)
    except Unreadable as error:
        return _Rewritten(why=str(error))
    after, granted = fixed_text(text.text, _wishes(verdict, asked))
    if not granted:
        return _Rewritten(why="the fix does not fit, and nothing was changed")
    return _Rewritten(text.text, after, text.encoding, len(granted))


def replacements_for(verdicts: Sequence[Verdict], asked: Asked) -> dict[tuple[str, str, int], tuple[Replacement, ...]]:
    """What each finding's own fix would replace, by rule, file and line; nothing where LibCST is not installed."""
    if not is_installed():
        return {}
    wanted = [verdict for verdict in verdicts if _wishes(verdict, asked)]
    outcomes = shared_work(wanted, lambda one: _replacements(one, asked), lambda _, why: {}, deadline=DEADLINE)
    return {key: value for found in outcomes for key, value in found.items()}


def _replacements(verdict: Verdict, asked: Asked) -> dict[tuple[str, str, int], tuple[Replacement, ...]]:
    try:
        before = read_text(verdict.target).text
    except Unreadable:
        return {}
    found: dict[tuple[str, str, int], tuple[Replacement, ...]] = {}
    for one in verdict.found:
        after, granted = fixed_text(before, [one.hit.edits]) if one.hit.edits else (before, ())
        if granted:
            key = (asked.book.rules[one.rule].id, verdict.target.shown, one.place.line)
            changes = changed_lines(before, after)
            found[key] = tuple(Replacement(verdict.target.shown, *change) for change in changes)
    return found
