"""Reads a Jupyter notebook as one script of its Python code cells."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from doctor.lint.engine.discovery import UnreadableFile
from doctor.lint.python.script import is_python

_CELL_MAGIC = re.compile(r"\s*%%(?!time\b|timeit\b|capture\b|prun\b)")
"""Cell magics of other languages; the ones left out run Python."""
_MAGIC = re.compile(r"\s*(?:[%!?]|[\w,][\w, ]*=\s*[%!])|.*\?\s*$")

_INSTALLER = re.compile(r"\b(?:pip3?|conda|mamba|uv)\b")
_INSTALLS = re.compile(r"\binstall\b")
_COMMAND = re.compile(r"\s*!")
_HEADING = re.compile(
    r"\s*(?:(?P<quotes>\"{3}|'{3}|\"|')\s*(?:[\w.-]+/)*(?P<name>[\w-]+\.py)\s*(?P=quotes)|"
    r"#\s*(?:[\w.-]+/)*(?P<comment>[\w-]+\.py)\s*$)",
    re.MULTILINE,
)


class Notebook(NamedTuple):
    """``script``: the text; ``places``: for each of its lines the line in the file (0 if unknown), the cell from 1, and
    the line in the cell."""

    script: str
    places: tuple[tuple[int, int, int], ...]


def read_notebook(text: str) -> Notebook:
    """The cells as a script, without those that show several other programs; raises :class:`UnreadableFile` for other
    files and languages."""
    finder = _LineFinder(text)
    script: list[str] = []
    places: list[tuple[int, int, int]] = []
    cells = list(_code_cells(text))
    commands = [line for _, lines, _ in cells for line in lines if _COMMAND.match(line)]
    listings = [number for number, lines, is_run in cells if not is_run and _is_listing(lines, commands)]
    are_apart = len(listings) > 1  # a single one is what the notebook is about
    for number, lines, _ in cells:
        places += [(finder.line_of(line), number, inner) for inner, line in enumerate(lines, 1)]
        script += [""] * len(lines) if are_apart and number in listings else _python_of(lines)
    return Notebook("\n".join(script) + "\n", tuple(places))


def _is_listing(lines: list[str], commands: list[str]) -> bool:
    """Whether a cell only shows a program that another cell starts: it begins with a string, or a comment, that is the
    path of a file, and a command has the name of that file. Cells of different programs never run together."""
    named = _HEADING.match("\n".join(lines))
    if named is None:
        return False
    name = re.compile(rf"(?<![\w.-]){re.escape(named['name'] or named['comment'])}(?![\w-])")
    return any(map(name.search, commands))


def _code_cells(text: str) -> Iterator[tuple[int, list[str], bool]]:
    """The number and the lines of each cell with code, and whether the notebook has kept that it was run."""
    try:
        document: Any = json.loads(text)
    except (ValueError, RecursionError):
        raise UnreadableFile("it is not valid JSON") from None
    cells = document.get("cells") if isinstance(document, dict) else None
    if not isinstance(cells, list):
        raise UnreadableFile("it is not a notebook of format 4")
    if _language(document) not in ("python", ""):
        raise UnreadableFile(f"its language is {_language(document)}")
    for number, cell in enumerate(cells, 1):
        if isinstance(cell, dict) and cell.get("cell_type") == "code":
            source = cell.get("source", "")
            joined = "".join(map(str, source)) if isinstance(source, list) else str(source)
            yield number, joined.split("\n"), bool(cell.get("execution_count") or cell.get("outputs"))


def _language(document: dict[str, Any]) -> str:
    metadata = document.get("metadata")
    info = metadata.get("language_info") or metadata.get("kernelspec") if isinstance(metadata, dict) else None
    named = info.get("name" if "file_extension" in info else "language", "") if isinstance(info, dict) else ""
    return "python" if str(named).lower().startswith(("python", "ipython")) else str(named).lower()


def _python_of(lines: list[str]) -> list[str]:
    """The lines of a cell without magics; blank if it is not Python."""
    if lines and _CELL_MAGIC.match(lines[0]):
        return [""] * len(lines)
    plain = [re.sub(r"\S.*", _kept_of, line) if _MAGIC.match(line) else line for line in lines]
    return next((one for one in (lines, plain) if is_python("\n".join(one))), [""] * len(lines))


def _kept_of(magic: re.Match[str]) -> str:
    """A statement for a magic; what it installs stays as a comment, which may name a release."""
    installer = _INSTALLER.search(magic[0])
    return f"pass  # {magic[0]}" if installer and _INSTALLS.search(magic[0], installer.end()) else "pass"


class _LineFinder:
    def __init__(self, text: str) -> None:
        self._lines = text.split("\n")
        self._next = 0

    def line_of(self, line: str) -> int:
        """The line in the file from 1, or 0 if unknown. Empty lines are searched nearby only."""
        wanted = tuple(json.dumps(line, ensure_ascii=ascii_)[:-1] for ascii_ in (False, True))
        reach = len(self._lines) if line.strip() else min(self._next + 2, len(self._lines))
        for number in range(self._next, reach):
            if self._lines[number].strip().startswith(wanted):
                self._next = number + 1
                return number + 1
        return 0
