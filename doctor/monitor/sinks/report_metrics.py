"""Metrics that follow from the report of a run: findings and lost time, for all exporters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from doctor.core.report_document import Report


class ReportGauge(NamedTuple):
    """A metric of the whole job, served by the evaluating rank only."""

    name: str
    meaning: str
    labels: tuple[str, ...] = ()


class GaugeSample(NamedTuple):
    """A value of a metric, and the values of its labels."""

    gauge: ReportGauge
    labels: tuple[str, ...]
    value: float


FINDINGS = ReportGauge("rankdoctor_findings", "Active findings.", ("id", "name", "severity"))
LOST_SECONDS = ReportGauge(
    "rankdoctor_lost_seconds",
    "Seconds that the rank has lost since its first training batch.",
    ("rank", "host", "cause"),
)
LOST_SHARE = ReportGauge("rankdoctor_lost_time_share", "Share of all rank-seconds that were lost, 0 to 1.")
EFFICIENCY = ReportGauge(
    "rankdoctor_scaling_efficiency",
    "Share of all rank-seconds in which ranks did their own work, 0 to 1; an upper bound if waiting in collectives "
    "can't be seen.",
)
REPORT_GAUGES = (FINDINGS, LOST_SECONDS, LOST_SHARE, EFFICIENCY)


def report_samples(report: Report) -> Iterator[GaugeSample]:
    """Yield all samples that a report has."""
    counts = Counter(
        (result.id, result.name, finding.severity.value)
        for result in report.results
        for finding in result.findings
        if finding.stands
    )
    yield from (GaugeSample(FINDINGS, labels, float(count)) for labels, count in counts.items())
    lost = report.lost_time
    if lost is None:
        return
    hosts = {rank: host.name for host in (report.job.hosts if report.job else ()) for rank in host.ranks}
    for one in lost.by_rank:
        for cause, seconds in one.lost.items():
            yield GaugeSample(LOST_SECONDS, (str(one.rank), hosts.get(one.rank, ""), cause), seconds)
    if lost.rank_seconds > 0:
        yield GaugeSample(LOST_SHARE, (), lost.lost / lost.rank_seconds)
        yield GaugeSample(EFFICIENCY, (), lost.efficiency)
