"""``--fix``: which edits are applied, and how files are written."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Sequence
from pathlib import Path

from doctor.core.errors import UnusableError
from doctor.core.files.atomic_write import replace_whole
from doctor.lint.engine.rule import Edit
from doctor.lint.python.script import is_python

MISSING = "--fix and --diff need LibCST, which is not installed: pip install libcst"


def require_libcst() -> None:
    """Raise ``UnusableError`` if LibCST is not installed, or cannot be loaded."""
    try:
        import doctor.lint.fix.rewriter  # noqa: F401
    except ImportError:
        raise UnusableError(MISSING) from None


def changed_lines(before: str, after: str) -> list[tuple[int, int, str]]:
    """The changed lines: first, last (exclusive, from 1), and the new text."""
    old, new = _lines(before), _lines(after)
    changes = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    return [(a + 1, b + 1, "".join(new[c:d])) for kind, a, b, c, d in changes if kind != "equal"]


def _lines(text: str) -> list[str]:
    return [line for line in re.split(r"(?<=\n)|(?<=\r)(?!\n)", text) if line]


def fixed_text(text: str, wishes: Sequence[Sequence[Edit]]) -> tuple[str, tuple[int, ...]]:
    """The text with the edits of each violation, all or none of them, and the indices of the fixed ones.

    The text is unchanged if the result would not be valid Python."""
    require_libcst()
    import libcst

    from doctor.lint.fix.rewriter import rewrite

    try:
        fixed, granted = rewrite(text, wishes)
    except (libcst.ParserSyntaxError, libcst.CSTValidationError):
        return text, ()
    return (fixed, granted) if granted and is_python(fixed) else (text, ())


def difference(path: str, before: str, after: str) -> str:
    """The patch that ``--diff`` prints, for ``patch -p0``."""
    lines = difflib.unified_diff(_lines(before), _lines(after), fromfile=path, tofile=path)
    return "".join(line if line.endswith("\n") else line + "\n\\ No newline at end of file\n" for line in lines)


def why_untouched(path: Path, root: Path) -> str | None:
    """Why a file is not written: it is a link out of the given folder."""
    real, home = Path(os.path.realpath(path)), Path(os.path.realpath(root if root.is_dir() else root.parent))
    if real.is_relative_to(home):
        return None
    return f"it is a link to {real}, outside of what was given"


def write_whole(path: Path, content: bytes) -> None:
    """Replace a file atomically and keep its mode."""
    path = Path(os.path.realpath(path))
    replace_whole(path, content, path.stat().st_mode & 0o7777)
