"""The hosts to exclude from a job, in the format of its launcher."""

from __future__ import annotations

from collections.abc import Iterable

from doctor.core.report_document import Report
from doctor.core.text import number_runs
from doctor.knowledge.launcher_index import BY_NAME

EXCLUDE = "exclude"
"""Key of a finding's evidence that lists hosts to exclude."""
MOST_DIGITS = 9
"""Digits of a number that SLURM folds into a list."""


def hosts_to_exclude(report: Report) -> tuple[str, ...]:
    """Return the hosts that findings say to exclude, each once, sorted.

    Ignored findings do not count, nor consequences of others: a host with a wrong MTU is slow, and needs another MTU
    rather than exclusion.
    """
    found: set[str] = set()
    for result in report.results:
        for finding in result.findings:
            named = finding.evidence.get(EXCLUDE) if finding.stands and not finding.explained_by else None
            found.update(str(name) for name in (named if isinstance(named, (list, tuple)) else ()))
    return tuple(sorted(found))


def as_hostlist(names: Iterable[str], launcher: str = "") -> str:
    """Format names as the launcher excludes them, by default for ``srun --exclude``: ``node[003,007-009],login``."""
    row = BY_NAME.get(launcher)
    if row is not None and not row.folds_hosts:
        return ",".join(sorted(set(names)))
    bundles: dict[tuple[str, int], list[int]] = {}
    plain = []
    for name in names:
        prefix = name.rstrip("0123456789")
        digits = name[len(prefix) :]
        if digits and len(digits) <= MOST_DIGITS:
            bundles.setdefault((prefix, len(digits)), []).append(int(digits))
        else:
            plain.append(name)
    for (prefix, width), numbers in bundles.items():
        runs = number_runs(sorted(set(numbers)))
        words = [f"{first:0{width}}" + (f"-{last:0{width}}" if last > first else "") for first, last in runs]
        plain.append(f"{prefix}{words[0]}" if len(set(numbers)) == 1 else f"{prefix}[{','.join(words)}]")
    return ",".join(sorted(plain))
