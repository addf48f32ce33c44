"""All that was given to ``doctor diagnose``: one job for each run, and a list of what became of each file."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import NamedTuple, TypeVar

from doctor.core.capture import merge_captures
from doctor.core.errors import UnusableError
from doctor.core.facts import Event, LogEvidence, LogFile, RecorderFacts
from doctor.core.files.read_deadline import ReadBudget
from doctor.core.files.timed_file import TimedFile
from doctor.core.job import Job
from doctor.core.report_document import ReportInput
from doctor.postmortem.filenames import rank_in_name
from doctor.postmortem.flight_recorder.dumps import read_dumps, world_size_in
from doctor.postmortem.inputs import SortedInputs, name_of, read_inputs
from doctor.postmortem.job_assembly import HostSections, ParsedInputs, members_of, weigh, with_evidence
from doctor.postmortem.logs.rank_sections import world_size_of
from doctor.postmortem.logs.scanner import read_log
from doctor.postmortem.memory_snapshot.snapshot_parser import read_snapshot
from doctor.postmortem.nvidia_smi.printout import read_nvidia_smi
from doctor.postmortem.ras.events import read_ras, with_progress
from doctor.postmortem.run_grouping import RunIdentity, group_by_run, identity_of, ids_in_path, names_of_runs

KINDS = ("capture", "record", "log", "flight-recorder", "snapshot", "nvidia-smi", "ras")
TOOLS = ("nvidia-smi", "ras")
TEXT_LIMIT = 8 << 20
"""Bytes of the output of a tool that are read: a hundred times what any of them prints."""

T = TypeVar("T")


class FoundRun(NamedTuple):
    """One run: a word for it, its job, and what became of each file."""

    name: str
    job: Job
    inputs: tuple[ReportInput, ...]


def read_runs(paths: Iterable[Path], seconds: float | None = None) -> tuple[FoundRun, ...]:
    """Read everything that can be, each run by itself (:mod:`doctor.postmortem.run_grouping`). What is of no run is
    listed with the first one. ``seconds``: for all logs together; by their sizes otherwise.

    Raises:
        UnusableError: nothing could be read; the reason of the first file that failed.
    """
    inputs = read_inputs(paths, KINDS, several_runs=True)
    logs = _LogReader(inputs, ReadBudget(seconds))
    traces = _traces(inputs, logs)
    runs = [tuple(traces[place] for place in places) for places in group_by_run(traces)]
    readings = [_RunReader(_part_of(inputs, {trace.path for trace in run}), logs) for run in runs]
    jobs = [reading.job() for reading in readings]
    listed = [reading.listed() for reading in readings]
    passed_over = SortedInputs((), (), tuple(file for file in inputs.files if file.why is not None)).listed()
    read = [place for place, files in enumerate(listed) if not all(one.skipped for one in files)]
    if not read:
        first = next(one for files in (*listed, passed_over) for one in files if one.skipped)
        raise UnusableError(f"{first.path}: {first.skipped}")
    rest = [one for place, files in enumerate(listed) if place not in read for one in files]
    names = names_of_runs(runs)
    found = [FoundRun(names[place], jobs[place], listed[place]) for place in read]
    order = {name_of(file.path): number for number, file in enumerate(inputs.files)}
    others = sorted((*found[0].inputs, *passed_over, *rest), key=lambda one: order[one.path])
    return (found[0]._replace(inputs=tuple(others)), *found[1:])


def _part_of(inputs: SortedInputs, paths: Collection[Path]) -> SortedInputs:
    captured = [place for place, path in enumerate(inputs.captured) if path in paths]
    return SortedInputs(
        tuple(inputs.captures[place] for place in captured),
        tuple(inputs.captured[place] for place in captured),
        tuple(file for file in inputs.files if file.why is None and file.path in paths),
    )


def _traces(inputs: SortedInputs, logs: _LogReader) -> list[RunIdentity]:
    """What each file that is not passed over tells of its run."""
    runs = {path: capture.run for path, capture in zip(inputs.captured, inputs.captures, strict=True)}
    traces = []
    for file in inputs.files:
        if file.why is not None:
            continue
        shown = Path(name_of(file.path))
        if (log := logs.found.get(file.path)) is not None:
            trace = identity_of(shown, *log)
            traces.append(trace._replace(path=file.path, is_run=trace.is_run and file.kind == "log"))
        else:
            run = runs.get(file.path)
            traces.append(_trace_of_record(file.path, run) if run else RunIdentity(file.path, ids_in_path(shown)))
    return traces


def _trace_of_record(path: Path, run: str) -> RunIdentity:
    """A rank that heard no other one has only the part of the id that all derive alike."""
    base, _, own = run.partition("-")
    ids = frozenset({("record", run)}) if own else frozenset()
    return RunIdentity(path, ids=ids, links=frozenset({("records", base)}))


class _LogReader:
    """What the logs, and the output of tools, among the inputs hold. ``failed``: files that could not be read, and why;
    ``cut``: what was not read of others, by their names. A file that begins with the output of a tool may go on as the
    log of the job that called it."""

    def __init__(self, inputs: SortedInputs, allowance: ReadBudget) -> None:
        self.failed: dict[Path, str] = {}
        self.cut: dict[str, str] = {}
        self._allowance = allowance
        places = [path for kind in ("log", *TOOLS) for path in inputs.of(kind)]
        self.found = dict(_each(places, self._read, self.failed))
        answers = _each(inputs.of("ras"), lambda path: read_ras(_text(path), name_of(path)), self.failed)
        self.answers = dict(answers)

    def _read(self, path: Path) -> tuple[list[Event], LogFile]:
        found = read_log(path, name_of(path), self._allowance)
        name, cut = found[1].path, found[1].cut
        if cut is not None:
            self.cut[name] = cut if name in cut else f"{name}: {cut}"
        return found


class _RunReader:
    """The inputs of one run while they are read. ``failed``: files that could not be, and why."""

    def __init__(self, inputs: SortedInputs, logs: _LogReader) -> None:
        self.inputs = inputs
        self.failed: dict[Path, str] = {}
        self._logs = logs

    def job(self) -> Job:
        """Everything as one job."""
        evidence = self.evidence()
        captured = merge_captures(self.inputs.captures) if self.inputs.captures else None
        remains = self.remains()
        known = {member.rank for member in members_of(evidence or LogEvidence(), remains)}
        self.add_snapshots(remains, known | {rank.number for rank in (captured.ranks if captured else ())})
        members = members_of(evidence or LogEvidence(), remains)
        sizes = (remains.world_size, world_size_of(evidence) if evidence else None)
        return with_evidence(captured, members, evidence, max(filter(None, sizes), default=None))

    def listed(self) -> tuple[ReportInput, ...]:
        """What became of each file."""
        return self.inputs.listed({**self._logs.failed, **self.failed}, self._logs.cut)

    def evidence(self) -> LogEvidence | None:
        """What logs say; ``None`` where there is none."""
        places = [path for kind in ("log", *TOOLS) for path in self.inputs.of(kind)]
        read = [self._logs.found[path] for path in places if path in self._logs.found]
        answers = [self._logs.answers[path] for path in self.inputs.of("ras") if path in self._logs.answers]
        if not read and not answers:
            return None
        events = [event for found, _ in read for event in found]
        events += with_progress(event for found in answers for event in found)
        return weigh(events, (file for _, file in read))

    def remains(self) -> ParsedInputs:
        """What else was left of ranks and hosts."""
        dumps, failed = read_dumps(self.inputs.of("flight-recorder"))
        remains = ParsedInputs({}, {}, [], world_size_in(dumps))
        self.failed.update(failed)
        for dump in dumps:
            remains.of_rank(dump.rank)[RecorderFacts.key] = dump.facts
            if dump.host:
                remains.homes.setdefault(dump.rank, dump.host)
        tables = self._each("nvidia-smi", lambda path: read_nvidia_smi(_text(path).splitlines(), name_of(path)))
        remains.hosts.extend(HostSections(name_of(path), sections) for path, sections in tables)
        return remains

    def add_snapshots(self, remains: ParsedInputs, known: set[int]) -> None:
        """Snapshots, by the rank that their name tells; where the job has one rank, that."""
        for path, snapshot in self._each("snapshot", read_snapshot):
            rank = rank_in_name(path)
            if rank is None and len(known) > 1:
                self.failed[path] = "whose it is can't be told: name it after its rank, such as snapshot_rank3.pickle"
            else:
                remains.of_rank(min(known, default=0) if rank is None else rank)[snapshot.key] = snapshot

    def _each(self, kind: str, read: Callable[[Path], T]) -> list[tuple[Path, T]]:
        return _each(self.inputs.of(kind), read, self.failed)


def _each(paths: Iterable[Path], read: Callable[[Path], T], failed: dict[Path, str]) -> list[tuple[Path, T]]:
    """What the files hold; one that can't be read is noted in ``failed``."""
    found = []
    for path in paths:
        try:
            found.append((path, read(path)))
        except UnusableError as error:
            failed[path] = str(error)
    return found


def _text(path: Path) -> str:
    try:
        with TimedFile(path) as stream:
            data = b""
            while len(data) < TEXT_LIMIT and (piece := stream.read(TEXT_LIMIT - len(data))):
                data += piece
        return data.decode("utf-8", "replace")
    except OSError as error:
        raise UnusableError(f"it can't be read: {error.strerror or error}") from None
