"""Texts of a launch file of which parts can't be told: variables that the file does not set, output of commands.

Such a part stands in the text as a mark with its name, so that `--nnodes=$N` is still an option with a value that
somebody gave. No text of a shell holds the characters of the mark.
"""

from __future__ import annotations

import re

OPEN, CLOSE = "\x00", "\x01"
OUTPUT = "…"
"""The name of what a command prints, and of all else that has none."""
IN_STEP = "step."
"""Begins the name in a mark that a task of SLURM fills in by itself, each its own."""

_MARK = re.compile(f"{OPEN}([^{OPEN}{CLOSE}]*){CLOSE}")


def unknown_mark(name: str) -> str:
    """A mark for what ``name``, a word without blanks and brackets, stands for."""
    return f"{OPEN}{name}{CLOSE}"


def is_known(text: str) -> bool:
    """Whether all of ``text`` is known."""
    return OPEN not in text


def is_all_unknown(text: str) -> bool:
    """Whether nothing of ``text`` is known: it may be several words or none."""
    return bool(text) and not _MARK.sub("", text)


def names_in(text: str) -> tuple[str, ...]:
    """What is not known in ``text``, by name."""
    return tuple(_MARK.findall(text))


def shown(text: str) -> str:
    """The text as a reader may see it: ``$NAME``, ``$(…)``."""
    return _MARK.sub(lambda match: "$(…)" if match[1] == OUTPUT else f"${match[1].removeprefix(IN_STEP)}", text)


def whole_number(text: str | None) -> int | None:
    """The number that ``text`` is; ``None`` where it is none or can't be told."""
    return int(text) if text is not None and re.fullmatch(r"\d{1,9}", text) else None
