"""What the checks find and what they leave alone: every named fault fixture, every healthy twin.

    python benchmarks/detection.py            prints the table
    python benchmarks/detection.py --write   writes it into docs/evidence

A fault counts as detected when its id is found, and as rightly blamed when exactly the ranks at fault are named. A
false alarm is a finding of severity error or warning on a healthy case, by its own check; whole healthy jobs are put
before all checks.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "checks"), str(ROOT / "benchmarks")]

from evidence_pages import write_between  # noqa: E402 - the path comes first

from doctor.core.check import Case, Check  # noqa: E402
from doctor.core.check_registry import CheckRegistry, load_registry  # noqa: E402
from doctor.core.check_runner import examine_job as examine  # noqa: E402
from doctor.core.finding import Severity  # noqa: E402
from doctor.core.report_document import CheckResult  # noqa: E402
from doctor.testing.cases import Fails, JobBuilder, healthy  # noqa: E402 - the path comes first


@dataclass
class Row:
    """The score of one family."""

    checks: int = 0
    faults: int = 0
    detected: int = 0
    blamed: int = 0
    healthy: int = 0
    false_alarms: int = 0
    misses: list[str] = field(default_factory=list)


def healthy_jobs() -> dict[str, JobBuilder]:
    """Whole healthy jobs that no check may complain about."""
    return {
        "one process without GPU": healthy(1, 1, gpus=0),
        "one host, 8 GPUs": healthy(1, 8),
        "two ranks on CPUs": healthy(1, 2, gpus=0),
        "2 hosts x 8 GPUs, InfiniBand": healthy(2, 8, rdma=8),
        "64 hosts x 8 GPUs, InfiniBand": healthy(64, 8, rdma=8),
        "4 hosts on Ethernet": healthy(4, 1, gpus=0),
    }


def score(catalog: CheckRegistry) -> dict[str, Row]:
    """The rows by family, and one for whole jobs."""
    rows: dict[str, Row] = {}
    for check in catalog.checks:
        row = rows.setdefault(check.family, Row())
        row.checks += 1
        for case in check.cases():
            if isinstance(case, Fails):
                _score_fault(row, check, case)
            else:
                _score_healthy(row, check, case, catalog)
    whole = rows.setdefault("whole jobs", Row())
    for name, sketch in healthy_jobs().items():
        whole.healthy += 1
        _count_alarms(whole, name, examine(sketch.job(), catalog))
    return rows


def _score_fault(row: Row, check: Check, case: Fails) -> None:
    (result,) = examine(case.sketch.job(), CheckRegistry((check,)))
    row.faults += 1
    row.detected += bool(result.findings)
    right = bool(result.findings) and {rank for one in result.findings for rank in one.ranks} == set(case.ranks)
    row.blamed += right
    if not right:
        row.misses.append(f"{check.id} {case.name}")


def _score_healthy(row: Row, check: Check, case: Case, catalog: CheckRegistry) -> None:
    row.healthy += 1
    _count_alarms(row, f"{check.id} {case.name}", examine(case.sketch.job(), CheckRegistry((check,))))


def _count_alarms(row: Row, name: str, results: Iterable[CheckResult]) -> None:
    for result in results:
        loud = [one for one in result.findings if one.severity is not Severity.INFO]
        row.false_alarms += len(loud)
        row.misses += [f"{name}: {result.id} says {one.summary}" for one in loud]


def table(rows: dict[str, Row]) -> str:
    """The rows as Markdown, with a sum."""
    lines = ["| family | checks | faults | detected | right ranks | healthy cases | false alarms |"]
    lines.append("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    names = ("checks", "faults", "detected", "blamed", "healthy", "false_alarms")
    for family, row in rows.items():
        lines.append(f"| {family} | " + " | ".join(str(getattr(row, name)) for name in names) + " |")
    sums = [sum(getattr(row, name) for row in rows.values()) for name in names]
    lines.append("| **all** | " + " | ".join(f"**{total}**" for total in sums) + " |")
    return "\n".join(lines)


def main() -> int:
    """Print (or write) the table; 1 where anything was missed or falsely alarmed."""
    rows = score(load_registry(plugins=False))
    text = table(rows)
    print(text)
    misses = [miss for row in rows.values() for miss in row.misses]
    print(*misses, sep="\n", end="\n" if misses else "")
    if "--write" in sys.argv:
        write_between("detection", text)
    return 1 if misses else 0


if __name__ == "__main__":
    sys.exit(main())
