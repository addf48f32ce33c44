"""Finds and summarizes the Python files of a project that other files import. Nothing is imported or run."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import PurePath
from typing import Any

from doctor.lint.engine.discovery import LintTarget, UnreadableFile, read_text
from doctor.lint.python.project.imported_functions import ModuleSummary
from doctor.lint.python.project.module_summary import summary_of
from doctor.lint.python.script import Script

LONGEST_MODULE = 300_000
"""Characters of a module that is followed; longer ones are generated, or data."""
MOST_FOLDERS = 12
"""Folders above a file in which an absolute import is searched."""
_SOURCE_FOLDERS = ("", "src")
_FRAMEWORKS = frozenset({"torch", "lightning", "pytorch_lightning", "accelerate", "transformers", "deepspeed", "numpy"})


class ProjectFiles:
    """The modules among the files to lint, which are the only ones that imports are followed to. Summaries are kept,
    and so is ``memo``, what rules derived from them."""

    def __init__(self, targets: Iterable[LintTarget]) -> None:
        python = (one for one in targets if one.kind == "python" and one.skipped is None)
        self._targets = {os.path.abspath(one.path): one for one in python}  # noqa: PTH100 - Path.absolute keeps ".."
        self._summaries: dict[str, ModuleSummary | None] = {}
        self._located: dict[tuple[str, str], str | None] = {}
        self.memo: dict[tuple[str, ...], Any] = {}

    def has(self, importer: str, module: str) -> bool:
        """Whether there is a module of that dotted name, as a file at ``importer`` imports it."""
        return self._locate(importer, module) is not None

    def find(self, importer: str, module: str) -> ModuleSummary | None:
        """Its summary; ``None`` if there is none, or it cannot be read."""
        location = self._locate(importer, module)
        if location is None:
            return None
        if location not in self._summaries:
            self._summaries[location] = None  # while it is made, and if it fails
            self._summaries[location] = self._summarized(location)
        return self._summaries[location]

    def _summarized(self, location: str) -> ModuleSummary | None:
        target = self._targets[location]
        try:
            text = read_text(target).text
            if len(text) > LONGEST_MODULE:
                return None
            return summary_of(Script(target.shown, text, location=location))
        except (UnreadableFile, SyntaxError, ValueError, RecursionError, MemoryError):
            return None

    def _locate(self, importer: str, module: str) -> str | None:
        folder = os.path.dirname(importer)  # noqa: PTH120 - called for each import of each file
        key = (folder, module)
        if key not in self._located:
            found = (path for path in _candidates(folder, module) if path in self._targets)
            self._located[key] = next(found, None)
        return self._located[key]


def _candidates(folder: str, module: str) -> Iterator[str]:
    """The files that may be a module, the likeliest first: beside the file, then below each folder above it."""
    dots = len(module) - len(module.lstrip("."))
    parts = [one for one in module[dots:].split(".") if one]
    if not all(one.isidentifier() for one in parts) or (not dots and (not parts or parts[0] in _FRAMEWORKS)):
        return
    above = [folder, *map(str, PurePath(folder).parents)]
    if dots:
        roots = above[dots - 1 : dots]
    else:
        roots = [os.path.join(one, source) for one in above[:MOST_FOLDERS] for source in _SOURCE_FOLDERS]  # noqa: PTH118
    for root in roots:
        path = os.path.join(root, *parts).rstrip(os.sep)  # noqa: PTH118 - as above
        yield f"{path}.py"
        yield os.path.join(path, "__init__.py")  # noqa: PTH118 - as above
