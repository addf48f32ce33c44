"""The table of ranks: where each was, its last collective, its error."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from doctor.core.facts import Collective, Failure, MemorySnapshotFacts, ProgressFacts, RecorderFacts, RunMemoryFacts
from doctor.core.finding import Severity
from doctor.core.job import UNKNOWN_HOST, Job, Rank
from doctor.core.report_document import Report
from doctor.core.text import byte_size

COLUMNS = {
    "host": "host",
    "state": "state",
    "collective": "last collective",
    "batch": "last batch",
    "error": "error",
    "memory": "memory",
}
"""Fields of a row, and their labels; columns that are empty for all ranks are not shown."""
_STAGES = {"train": "training", "validate": "validation", "sanity": "sanity check", "predict": "prediction"}
_POINTS = {"data": "waiting for data", "step": "step", "batch-end": "end of a batch"}
_LONGEST = 160
"""Characters of an error in a cell."""


class TableCell(NamedTuple):
    """A cell: its text, and the value by which its column is sorted."""

    text: str = ""
    order: float | str = ""


class RankRow(NamedTuple):
    """A rank. ``findings``: ids of the findings that name it, the primary one first."""

    rank: int
    host: TableCell = TableCell()
    state: TableCell = TableCell()
    collective: TableCell = TableCell()
    batch: TableCell = TableCell()
    error: TableCell = TableCell()
    memory: TableCell = TableCell()
    findings: tuple[str, ...] = ()


def rank_rows(report: Report, job: Job | None) -> list[RankRow]:
    """Return every rank of the job, absent ones included; without ``job``, only what the report holds."""
    blamed = _blamed(report)
    rows = {} if job is None else {rank.number: _row(rank, blamed) for rank in job.ranks}
    if report.job is not None:
        for host in report.job.hosts:
            for number in host.ranks:
                rows.setdefault(number, RankRow(number, _host(host.name), findings=blamed.get(number, ())))
        for number in report.job.absent:
            state = TableCell("did not join", "did not join")
            rows.setdefault(number, RankRow(number, TableCell(), state, findings=blamed.get(number, ())))
    return [rows[number] for number in sorted(rows)]


def used_columns(rows: list[RankRow]) -> dict[str, str]:
    """Return the columns that are not empty."""
    return {name: words for name, words in COLUMNS.items() if any(getattr(row, name).text for row in rows)}


def _blamed(report: Report) -> dict[int, tuple[str, ...]]:
    """Return the ids of the errors and warnings that are not ignored, by rank, the primary one first."""
    named: dict[int, dict[str, None]] = {}
    for result in sorted(report.results, key=lambda result: result.id != report.primary):
        for finding in result.findings:
            loud = finding.stands and finding.severity is not Severity.INFO
            for rank in finding.ranks if loud else ():
                named.setdefault(rank, {})[result.id] = None
    return {rank: tuple(ids) for rank, ids in named.items()}


def _row(rank: Rank, blamed: Mapping[int, tuple[str, ...]]) -> RankRow:
    progress, recorder = rank.find(ProgressFacts), rank.find(RecorderFacts)
    last = recorder.collectives[-1] if recorder is not None and recorder.collectives else None
    return RankRow(
        rank.number,
        _host(rank.host.name),
        state=_state(progress),
        collective=TableCell() if last is None else TableCell(call_words(last), last.sequence),
        batch=_batch(progress),
        error=_error(progress.failure if progress else None),
        memory=next(_memory(rank), TableCell()),
        findings=blamed.get(rank.number, ()),
    )


def _host(name: str) -> TableCell:
    return TableCell() if name == UNKNOWN_HOST else TableCell(name, name)


def _state(progress: ProgressFacts | None) -> TableCell:
    if progress is None:
        return TableCell()
    words = [progress.state, where(progress)]
    if progress.state == "stalled" and progress.idle is not None:
        words[0] = f"stalled for {progress.idle:.0f} s"
    if progress.seen_by is not None:
        words.append(f"reported by rank {progress.seen_by}")
    return TableCell(", ".join(filter(None, words)), progress.state)


def where(progress: ProgressFacts) -> str:
    """Return ``training, backward``; empty before the first report."""
    if progress == ProgressFacts(state=progress.state, failure=progress.failure):
        return ""
    return place_words(progress.stage, progress.point)


def place_words(stage: str, point: str) -> str:
    """Return a stage of a run and a point of it in words."""
    words = (_STAGES.get(stage, stage), _POINTS.get(point, point).replace("-", " "))
    return ", ".join(dict.fromkeys(word for word in words if word))


def _batch(progress: ProgressFacts | None) -> TableCell:
    if progress is None or (progress.batch is None and progress.epoch is None and progress.step is None):
        return TableCell()
    parts = (("epoch", progress.epoch), ("batch", progress.batch), ("step", progress.step))
    text = ", ".join(f"{name} {value}" for name, value in parts if value is not None)
    return TableCell(text, (progress.epoch or 0) * 1e9 + (progress.batch or progress.step or 0))


def call_words(call: Collective) -> str:
    """Return ``all_reduce 140 of the default group, not completed``."""
    ended = "" if is_done(call) else ", not completed"
    return f"{call.operation} {call.sequence} of {call.group_words}{ended}"


def is_done(call: Collective) -> bool:
    """Whether the recorder shows that the collective completed."""
    return call.retired or call.state == "completed"


def _error(failure: Failure | None) -> TableCell:
    if failure is None:
        return TableCell()
    message = failure.message.strip().splitlines()
    text = message[0] if message else failure.kind
    text = text if failure.kind.rpartition(".")[2] in text else f"{failure.kind}: {text}"
    return TableCell(text[:_LONGEST] + ("…" if len(text) > _LONGEST else ""), failure.kind)


def _memory(rank: Rank) -> Iterator[TableCell]:
    """Return the peak on the device, or else the host memory of the process."""
    snapshot = rank.find(MemorySnapshotFacts)
    if snapshot is not None and snapshot.reserved:
        yield TableCell(f"{byte_size(snapshot.reserved)} reserved", snapshot.reserved)
    used = rank.find(RunMemoryFacts)
    if used is None:
        return
    peak = used.peak_reserved or used.reserved or used.allocated
    if peak:
        total = f" of {byte_size(used.total)}" if used.total else ""
        yield TableCell(f"{byte_size(peak)}{total}", peak)
    if used.resident:
        yield TableCell(f"{byte_size(used.resident)} of the host", used.resident)
