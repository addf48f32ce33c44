"""Texts of launch files with unknown parts: variables that the file does not set, output of commands.

An unknown part is replaced by a mark with its name, so `--nnodes=$N` is still a given option. Texts of a shell cannot
contain the characters of marks.
"""

from __future__ import annotations

import re

from doctor.core.text import lazy_compile

OPEN, CLOSE = "\x00", "\x01"
OUTPUT = "…"
"""The name of command output and of other parts without a name."""
IN_STEP = "step."
"""Prefix of names whose value differs between the tasks of a SLURM step."""

_TO_FILL = lazy_compile(
    r"<[^<>\n]+>|\{\{[^{}\n]*\}\}|^\{[A-Za-z][\w ./-]*\}?$|(?<![A-Za-z])(?:xxx+|x{1,3}(?:[.:]x{1,3})+)(?![A-Za-z])"
    r"|(?<![a-z])(?:your|todo|tbd|(?:change|replace|fill)[ _-]?(?:me|this))(?![a-z])",
    re.IGNORECASE,
)
"""What templates write for a value: ``<port>``, ``{{ port }}``, ``xxx``, ``your_address``, ``CHANGE_ME``,
``{GPU IDs}``, of which a shell reads ``{GPU`` alone."""
_SINGLE = lazy_compile(r"(?:^|[_-])(?:addr|address|ip|port|rank|host|hostname|endpoint)$", re.IGNORECASE)
"""Ends of names whose value is one word."""
_PROSE = lazy_compile(r"[^\W\d]+(?:[ \t]+[^\W\d]+)+")

_MARK = lazy_compile(f"{OPEN}([^{OPEN}{CLOSE}]*){CLOSE}")


def unknown_mark(name: str) -> str:
    """The mark for ``name``, a word without blanks and brackets."""
    return f"{OPEN}{name}{CLOSE}"


def is_known(text: str) -> bool:
    """Whether all of ``text`` is known."""
    return OPEN not in text


def is_all_unknown(text: str) -> bool:
    """Whether all of ``text`` is unknown: it may be several words or none."""
    return bool(text) and not _MARK.sub("", text)


def names_in(text: str) -> tuple[str, ...]:
    """The names of the unknown parts of ``text``."""
    return tuple(_MARK.findall(text))


def shown(text: str) -> str:
    """The text for reports: ``$NAME``, ``$(…)``."""
    return _MARK.sub(lambda match: "$(…)" if match[1] == OUTPUT else f"${match[1].removeprefix(IN_STEP)}", text)


def is_placeholder(name: str, text: str) -> bool:
    """Whether a value of ``name`` has to be filled in: a template's mark, or words where one address or number belongs.

    ``name``: a variable, or an option with dashes.
    """
    if _TO_FILL.search(text) or text.strip().lower().replace("-", "_") == name.lower().replace("-", "_"):
        return True  # ``--master_port=master_port``: the name of the option itself
    return bool(_SINGLE.search(name) and _PROSE.fullmatch(text.strip()))


def whole_number(text: str | None) -> int | None:
    """The integer in ``text``; ``None`` if it is unknown or not an integer."""
    return int(text) if text is not None and re.fullmatch(r"\d{1,9}", text) else None
