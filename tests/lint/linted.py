"""Lints files that a test writes."""

from __future__ import annotations

import time
from pathlib import Path

from doctor.core.finding import Finding
from doctor.core.settings import Settings
from doctor.lint.engine.registry import Rulebook
from doctor.lint.engine.releases import Releases
from doctor.lint.engine.runner import LintRequest, build_report, lint_paths


def findings_in(
    folder: Path, files: dict[str, str], book: Rulebook, *, preview: bool = False
) -> list[tuple[str, Finding]]:
    """Write the files, and return the rule of each finding in the folder, and the finding; no rule may crash."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    asked = LintRequest(book, Settings(preview=preview), {one.id: one.family for one in book.rules}, Releases({}))
    report = build_report(lint_paths([folder], asked), asked, started=time.time())
    assert not [result for result in report.results if result.crash]
    return [(result.id, one) for result in report.results for one in result.findings]


def severities_in(
    folder: Path, files: dict[str, str], book: Rulebook, *, preview: bool = False
) -> list[tuple[str, str]]:
    """Write the files, and return the rule and severity of each finding in the folder; no rule may crash."""
    return [(rule, one.severity.value) for rule, one in findings_in(folder, files, book, preview=preview)]
