"""Reads the inputs of ``doctor diagnose``: one job per run, and the status of each file."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import NamedTuple, TypeVar

from doctor.core.capture import merge_captures
from doctor.core.errors import UnusableError
from doctor.core.facts import Event, LogEvidence, LogFile, ProgressFacts, RecorderFacts
from doctor.core.files.read_deadline import ReadBudget
from doctor.core.files.timed_file import TimedFile
from doctor.core.job import Job
from doctor.core.report_document import ReportInput
from doctor.postmortem.file_kinds import SNIFFED
from doctor.postmortem.filenames import name_of, rank_in_name, shown_path
from doctor.postmortem.flight_recorder.dumps import read_dumps, world_size_in
from doctor.postmortem.inputs import SortedInputs, read_inputs
from doctor.postmortem.job_assembly import ParsedInputs, members_of, weigh, with_evidence
from doctor.postmortem.logs.rank_sections import stated_world_size, world_size_of
from doctor.postmortem.logs.scanner import read_log
from doctor.postmortem.memory_snapshot.snapshot_parser import read_snapshot
from doctor.postmortem.nvidia_smi.printout import read_nvidia_smi
from doctor.postmortem.ras.events import read_ras, with_progress
from doctor.postmortem.run_grouping import RunIdentity, group_by_run, identity_of, ids_in_path, names_of_runs
from doctor.postmortem.stacks.dump_text import quotes_stacks
from doctor.postmortem.stacks.processes import RanksOfStacks, collect_stacks, ranks_of_stacks
from doctor.postmortem.stacks.recorder_tables import looks_like_recorder_tables, read_recorder_tables
from doctor.postmortem.unpacked_archives import UnpackedArchives

KINDS = ("capture", "record", "log", "flight-recorder", "snapshot", "nvidia-smi", "ras", "stacks")
TOOLS = ("nvidia-smi", "ras")
TEXT_LIMIT = 8 << 20
"""Maximum bytes read of the output of a tool: a hundred times what any of them prints."""
STACKS_LIMIT = 32 << 20
"""Maximum bytes read of a file of stacks: those of a thousand processes with fifty threads each."""

T = TypeVar("T")


class FoundRun(NamedTuple):
    """One run: its name, its job, and the status of each file."""

    name: str
    job: Job
    inputs: tuple[ReportInput, ...]


def read_runs(paths: Iterable[Path], seconds: float | None = None) -> tuple[FoundRun, ...]:
    """Read all inputs, grouped by run (:mod:`doctor.postmortem.run_grouping`).

    Files of no run are listed with the first one. ``seconds``: time for all logs together; by default from their sizes.

    Raises:
        UnusableError: no file could be read; with the reason of the first one.
    """
    with UnpackedArchives(seconds) as archives:
        return _read_runs(read_inputs(paths, KINDS, several_runs=True, archives=archives), seconds)


def _read_runs(inputs: SortedInputs, seconds: float | None) -> tuple[FoundRun, ...]:
    logs = _LogReader(inputs, ReadBudget(seconds))
    files = [file for file in inputs.files if file.why is None]
    identities = _identities(inputs, logs)
    places_of_runs = group_by_run(identities)
    runs = [tuple(identities[place] for place in places) for places in places_of_runs]
    parts = [_part_of(inputs, {files[place].path for place in places}) for places in places_of_runs]
    readers = [_RunReader(part, logs) for part in parts]
    jobs = [reader.job() for reader in readers]
    listed = [reader.listed() for reader in readers]
    skipped = SortedInputs((), (), tuple(file for file in inputs.files if file.why is not None)).listed()
    read = [place for place, files in enumerate(listed) if not all(one.skipped for one in files)]
    if not read:
        first = next(one for files in (*listed, skipped) for one in files if one.skipped)
        raise UnusableError(f"{first.path}: {first.skipped}")
    rest = [one for place, files in enumerate(listed) if place not in read for one in files]
    names = names_of_runs(runs)
    found = [FoundRun(names[place], jobs[place], listed[place]) for place in read]
    order = {name_of(file.path): number for number, file in enumerate(inputs.files)}
    others = sorted((*found[0].inputs, *skipped, *rest), key=lambda one: order[one.path])
    return (found[0]._replace(inputs=tuple(others)), *found[1:])


def _part_of(inputs: SortedInputs, paths: Collection[Path]) -> SortedInputs:
    captured = [place for place, path in enumerate(inputs.captured) if path in paths]
    return SortedInputs(
        tuple(inputs.captures[place] for place in captured),
        tuple(inputs.captured[place] for place in captured),
        tuple(file for file in inputs.files if file.why is None and file.path in paths),
    )


def _identities(inputs: SortedInputs, logs: _LogReader) -> list[RunIdentity]:
    runs = {path: capture.run for path, capture in zip(inputs.captured, inputs.captures, strict=True)}
    identities = []
    for file in inputs.files:
        if file.why is not None:
            continue
        shown = shown_path(file.path)
        if (log := logs.found.get(file.path)) is not None:
            found = identity_of(shown, *log)
            identities.append(found._replace(is_run=found.is_run and file.kind == "log"))
        elif run := runs.get(file.path):
            base, _, own = run.partition("-")  # an isolated rank knows only the first part of the run id
            ids = frozenset({("record", run)}) if own else frozenset()
            identities.append(RunIdentity(shown, ids=ids, links=frozenset({("records", base)})))
        else:
            identities.append(RunIdentity(shown, ids_in_path(shown)))
    return identities


class _LogReader:
    """Reads logs and the output of tools, which may continue as the log of a job.

    ``failed``: files that could not be read, with the reason; ``cut``: unread parts of others, by their names.
    """

    def __init__(self, inputs: SortedInputs, budget: ReadBudget) -> None:
        self.failed: dict[Path, str] = {}
        self.cut: dict[str, str] = {}
        self._budget = budget
        heads = _each(inputs.of("stacks"), lambda path: _text(path, SNIFFED), self.failed)
        alone = {path for path, head in heads if not _quotes_stacks(head)}
        paths = (path for path in _logs_in(inputs) if path not in alone and path not in self.failed)
        self.found = dict(_each(paths, self._read, self.failed))
        self.ras = dict(_each(inputs.of("ras"), lambda path: read_ras(_text(path), name_of(path)), self.failed))

    def _read(self, path: Path) -> tuple[list[Event], LogFile]:
        found = read_log(path, name_of(path), self._budget)
        name, cut = found[1].path, found[1].cut
        if cut is not None:
            self.cut[name] = cut if name in cut else f"{name}: {cut}"
        return found


def _logs_in(inputs: SortedInputs) -> list[Path]:
    """The files that are read as logs: also stacks that are quoted, perhaps together with lines of a log."""
    return [path for kind in ("log", *TOOLS, "stacks") for path in inputs.of(kind)]


def _quotes_stacks(head: str) -> bool:
    return not looks_like_recorder_tables(head) and quotes_stacks(head)


class _RunReader:
    """Reads the inputs of one run. ``failed``: files that could not be read, with the reason."""

    def __init__(self, inputs: SortedInputs, logs: _LogReader) -> None:
        self.inputs = inputs
        self.failed: dict[Path, str] = {}
        self._cut: dict[str, str] = {}
        self._logs = logs

    def job(self) -> Job:
        """Read everything as one job."""
        evidence = self._evidence()
        captured = merge_captures(self.inputs.captures) if self.inputs.captures else None
        parsed = self._parsed()
        known = {member.rank for member in members_of(evidence or LogEvidence(), parsed)}
        self._add_snapshots(parsed, known | {rank.number for rank in (captured.ranks if captured else ())})
        members = members_of(evidence or LogEvidence(), parsed)
        sizes = (parsed.world_size, world_size_of(evidence) if evidence else None)
        # A log may name a rank only in its text, as srun does ("task 5: Killed").
        named = max((member.rank + 1 for member in members), default=None) if captured is None else None
        world = max(filter(None, sizes), default=named)
        stated = (parsed.world_size, stated_world_size(evidence) if evidence else None)
        return with_evidence(captured, members, evidence, world, world_is_stated=world is None or world in stated)

    def listed(self) -> tuple[ReportInput, ...]:
        """Return the status of each file."""
        return self.inputs.listed({**self._logs.failed, **self.failed}, {**self._logs.cut, **self._cut})

    def _evidence(self) -> LogEvidence | None:
        logs = [self._logs.found[path] for path in _logs_in(self.inputs) if path in self._logs.found]
        ras = [self._logs.ras[path] for path in self.inputs.of("ras") if path in self._logs.ras]
        events = [event for found, _ in logs for event in found]
        events += with_progress(event for found in ras for event in found)
        # A text that quotes stacks does not show how far a run came.
        quoting = {name_of(path) for path in self.inputs.of("stacks")}
        files = [file for _, file in logs if file.path not in quoting]
        return weigh(events, files) if files or events or ras else None

    def _parsed(self) -> ParsedInputs:
        dumps, failed = read_dumps(self.inputs.of("flight-recorder"))
        stacks = self._stacks()
        sizes = (world_size_in(dumps), stacks.world_size)
        parsed = ParsedInputs({}, dict(stacks.homes), [], max(filter(None, sizes), default=None))
        for rank, progress in stacks.progress.items():
            parsed.of_rank(rank)[ProgressFacts.key] = progress
        for rank, recorder in stacks.recorders.items():
            parsed.of_rank(rank)[RecorderFacts.key] = recorder
        self.failed.update(failed)
        for dump in dumps:
            parsed.of_rank(dump.rank)[RecorderFacts.key] = dump.facts
            if dump.host:
                parsed.homes.setdefault(dump.rank, dump.host)
        printouts = _each(
            self.inputs.of("nvidia-smi"),
            lambda path: read_nvidia_smi(_text(path).splitlines(), name_of(path)),
            self.failed,
        )
        parsed.hosts.extend((name_of(path), sections) for path, sections in printouts)
        return parsed

    def _stacks(self) -> RanksOfStacks:
        """Return the ranks whose stacks were collected."""
        paths = self.inputs.of("stacks")
        texts = _each(paths, lambda path: _text(path, STACKS_LIMIT), self.failed)
        for path, text in texts:
            if len(text) >= STACKS_LIMIT:
                self._cut[name_of(path)] = f"{name_of(path)}: only its first {STACKS_LIMIT >> 20} MiB were read"
        tables = [read_recorder_tables(text) for _, text in texts if looks_like_recorder_tables(text[:SNIFFED])]
        stacks = collect_stacks((path, text) for path, text in texts if not looks_like_recorder_tables(text[:SNIFFED]))
        self.failed.update(dict.fromkeys(stacks.empty, "no stack in it could be read"))
        # Of the tables of several moments, the newest one shows most.
        return ranks_of_stacks(stacks)._replace(recorders=tables[-1] if tables else {})

    def _add_snapshots(self, parsed: ParsedInputs, known: set[int]) -> None:
        """Add each snapshot to the rank in its name, or to the only rank of the job."""
        for path, snapshot in _each(self.inputs.of("snapshot"), read_snapshot, self.failed):
            rank = rank_in_name(path)
            if rank is None and len(known) > 1:
                self.failed[path] = "its rank is unknown: name it after its rank, such as snapshot_rank3.pickle"
            else:
                parsed.of_rank(min(known, default=0) if rank is None else rank)[snapshot.key] = snapshot


def _each(paths: Iterable[Path], read: Callable[[Path], T], failed: dict[Path, str]) -> list[tuple[Path, T]]:
    """Read each file; note those that cannot be read in ``failed``."""
    found = []
    for path in paths:
        try:
            found.append((path, read(path)))
        except UnusableError as error:
            failed[path] = str(error)
    return found


def _text(path: Path, limit: int = TEXT_LIMIT) -> str:
    try:
        with TimedFile(path) as stream:
            data = bytearray()
            while len(data) < limit and (piece := stream.read(limit - len(data))):
                data += piece
        return data.decode("utf-8", "replace")
    except OSError as error:
        raise UnusableError(f"it can't be read: {error.strerror or error}") from None
