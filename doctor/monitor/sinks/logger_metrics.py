"""Metrics of the whole job for a Trainer's loggers. Their names are public and stable."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from doctor.core.job import Job
from doctor.core.report_document import Report
from doctor.monitor.sinks.rank_metrics import RankMetrics, all_rank_metrics

METRICS: Mapping[str, str] = {
    "doctor/step_seconds": "duration of a training step in the newest window, median over ranks",
    "doctor/data_wait_share": "share of the step that the slowest data loader blocks its rank, 0 to 1",
    "doctor/slowest_rank": "the slowest rank per step, waiting for other ranks excluded",
    "doctor/slowest_rank_excess": "how much slower than the median rank, as a share of the median step",
    "doctor/seconds_since_progress": "longest time without progress of any rank",
    "doctor/ranks_stalled": "ranks that are stalled, failed or unreachable",
    "doctor/memory_reserved_max_bytes": "memory reserved by torch's allocator on the rank that reserves most",
    "doctor/memory_skew": "how much more that is than on the median rank, as a share of it",
    "doctor/resident_max_bytes": "host memory of the rank that uses most, including its data workers",
    "doctor/lost_time_share": "share of all rank-seconds since the first training batch that were lost, 0 to 1",
    "doctor/scaling_efficiency": "share of them in which ranks did their own work, 0 to 1",
    "doctor/findings_error": "active findings of severity error",
    "doctor/findings_warning": "active findings of severity warning",
}
"""Name and meaning of each metric. Metrics that a job does not have (device memory on a CPU) are omitted, as are
comparisons of ranks with a single rank."""


def metrics(job: Job, report: Report) -> dict[str, float]:
    """Return the metrics of a job by name."""
    ranks = list(all_rank_metrics(job))
    severities = Counter(
        finding.severity.value for result in report.results for finding in result.findings if finding.stands
    )
    lost = report.lost_time if report.lost_time and report.lost_time.rank_seconds > 0 else None
    values: dict[str, float | None] = {
        "doctor/step_seconds": _median(one.window.total for one in ranks if one.window),
        "doctor/data_wait_share": _most(one.data_share for one in ranks),
        **_slowest(ranks),
        "doctor/seconds_since_progress": _most(one.progress.idle for one in ranks if one.progress),
        "doctor/ranks_stalled": float(sum(one.is_stalled for one in ranks)) if ranks else None,
        **_memory([one.memory.reserved for one in ranks if one.memory and one.memory.reserved is not None]),
        "doctor/resident_max_bytes": _most(
            one.memory.resident + (one.workers or 0) for one in ranks if one.memory and one.memory.resident is not None
        ),
        "doctor/lost_time_share": lost.lost / lost.rank_seconds if lost else None,
        "doctor/scaling_efficiency": lost.efficiency if lost else None,
        "doctor/findings_error": float(severities["error"]),
        "doctor/findings_warning": float(severities["warning"]),
    }
    return {name: value for name, value in values.items() if value is not None}


def _slowest(ranks: Sequence[RankMetrics]) -> dict[str, float | None]:
    busy = {one.rank: taken for one in ranks if (taken := one.busy) is not None}
    if len(busy) < 2:
        return {}
    slowest = max(busy, key=lambda rank: busy[rank])
    step = _median(one.window.total for one in ranks if one.window)
    excess = busy[slowest] - statistics.median(busy.values())
    return {"doctor/slowest_rank": float(slowest), "doctor/slowest_rank_excess": excess / step if step else None}


def _memory(reserved: Sequence[int]) -> dict[str, float | None]:
    usual = _median(reserved)
    most = _most(reserved)
    if usual is None or most is None:
        return {}
    skew = (most - usual) / usual if usual > 0 and len(reserved) > 1 else None
    return {"doctor/memory_reserved_max_bytes": most, "doctor/memory_skew": skew}


def _median(values: Iterable[float]) -> float | None:
    known = list(values)
    return float(statistics.median(known)) if known else None


def _most(values: Iterable[float | None]) -> float | None:
    return max((float(value) for value in values if value is not None), default=None)
