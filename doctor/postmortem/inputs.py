"""Input files and folders of a command, classified by content.

Captures and the records of a run are read here; other evidence is sorted for :mod:`doctor.postmortem`, and the rest is
listed.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from doctor.core.capture import EARLIER, Capture, read_capture, same_run
from doctor.core.errors import UnusableError
from doctor.core.files.timed_file import TimedFile
from doctor.core.report_document import ReportInput

SNIFFED = 1 << 16
"""Bytes by which a file is classified; a log may have any size and is never read whole."""
MOST_FILES = 100_000

SOURCES = frozenset(
    """
    .py .sh .sbatch .slurm .yaml .yml .toml .ini .cfg .md .rst .ipynb .html .css .js .c .cc .cpp .cu .h .hpp .go .rs
    .tex .csv .tsv .xml .svg
    """.split()  # noqa: SIM905 - thirty lines otherwise
)
"""Endings of files that people write: a message quoted in a program was not logged."""
_PACKED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd")
"""Magic numbers of gzip and zstd, which logs are archived with."""
MOST_CONTROLS = 0.02
"""Maximum share of control characters in text; random bytes have a tenth."""
_WIDE = (b"\xff\xfe", b"\xfe\xff")
"""Byte order marks of UTF-16."""


class InputFile(NamedTuple):
    """A file and its kind. ``why``: the reason to skip it, or ``None``."""

    path: Path
    kind: str
    why: str | None = None


class SortedInputs(msgspec.Struct, frozen=True):
    """The classified inputs.

    ``captures``: captures and the records of one run (of one run per folder, if there may be several); ``captured``:
    the files that hold them; ``files``: all files. Files of other kinds are not read yet.
    """

    captures: tuple[Capture, ...]
    captured: tuple[Path, ...]
    files: tuple[InputFile, ...]

    def of(self, kind: str) -> tuple[Path, ...]:
        """Return the files of that kind that are not skipped."""
        return tuple(file.path for file in self.files if file.kind == kind and file.why is None)

    def listed(
        self, failed: dict[Path, str] | None = None, cut: Mapping[str, str] | None = None
    ) -> tuple[ReportInput, ...]:
        """Return all files for the report.

        ``failed``: reasons why some could not be read after all; ``cut``: unread parts of others, by their names.
        """
        kinds = {
            "nvidia-smi": "log",
            "ras": "log",
            "json": "unknown",
            "source": "unknown",
            "missing": "unknown",
            "blocked": "special",
        }
        return tuple(
            ReportInput(
                name_of(file.path),
                kinds.get(file.kind, file.kind),
                file.why or (failed or {}).get(file.path),
                # The path of a file that a stream was spooled to names what was not read of the stream.
                tuple(filter(None, (getattr(file.path, "cut", None), (cut or {}).get(name_of(file.path)))))
                or msgspec.UNSET,
            )
            for file in self.files
        )


def read_inputs(
    paths: Iterable[Path], kinds: tuple[str, ...] = ("capture", "record"), *, several_runs: bool = False
) -> SortedInputs:
    """Classify the inputs, and read captures and records.

    Args:
        paths: files and folders.
        kinds: kinds that the caller can read; at least one file must be of one of them.
        several_runs: each folder may hold the records of another run; else only the newest run counts.

    Raises:
        UnusableError: no file is readable; with the reason of the first one.
    """
    read = [_read(path, named=named) for path, named in _walk(paths)]
    homes = [_home_of(file.path) if several_runs else None for file, _ in read]
    newest: dict[Path | None, Capture] = {}
    for home, (_, found) in zip(homes, read, strict=True):
        if found is not None and found.run is not None and (home not in newest or found.created > newest[home].created):
            newest[home] = found
    captures: list[tuple[Path, Capture]] = []
    files: list[InputFile] = []
    for home, (file, found) in zip(homes, read, strict=True):
        why = file.why if found is None else _why_skipped(found, newest.get(home))
        if file.kind not in kinds and file.kind not in ("report", "json", "missing"):
            why = why if "log" in kinds else "it is no capture"
        files.append(file._replace(why=why))
        if found is not None and why is None:
            captures.append((file.path, found))
    if all(file.why is not None for file in files):
        raise UnusableError(_nothing(files))
    return SortedInputs(tuple(one for _, one in captures), tuple(path for path, _ in captures), tuple(files))


def _home_of(path: Path) -> Path:
    """Return the folder of a record; for one that was moved to ``earlier/``, its former folder."""
    parts = path.parts
    return Path(*parts[: parts.index(EARLIER)]) if EARLIER in parts else path.parent


def _read(path: Path, *, named: bool) -> tuple[InputFile, Capture | None]:
    """Classify a file, and read captures and records. ``named``: it was given by its own name."""
    kind = kind_of(path)
    if kind == "missing" or kind in ("capture", "record"):
        try:
            return InputFile(path, kind), read_capture(path)
        except UnusableError as error:
            return InputFile(path, kind, str(error)), None
    if not named and kind in ("log", "stacks") and path.suffix.lower() in SOURCES:
        kind = "source"
    if not named and kind in ("log", "flight-recorder", "snapshot", "stacks") and EARLIER in path.parts:
        return InputFile(path, kind, "it is of an earlier run"), None
    return InputFile(path, kind, _NO_EVIDENCE.get(kind)), None


def _why_skipped(capture: Capture, newest: Capture | None) -> str | None:
    """Return the reason to skip a record: of several runs in a folder, only the newest counts."""
    if capture.run is None or newest is None or newest.run is None or same_run(capture.run, newest.run):
        return None
    return f"it is of another run ({capture.run}, {capture.created}) than the newest record ({newest.run})"


_NO_EVIDENCE = {
    "report": "a report is a verdict, not evidence",
    "json": "it is JSON of another kind",
    "source": "it is source text, not a log",
    "empty": "it is empty",
    "pickle": "it is a pickle of another kind; nothing in it was run",
    "unknown": "it is neither text nor anything known",
    "special": "it is no regular file",
    "blocked": "reading it blocks",
}


def _nothing(files: list[InputFile]) -> str:
    if not files:
        return "there is no file to read"
    name, reason = name_of(files[0].path), str(files[0].why)
    more = f" (and {len(files) - 1} more)" if len(files) > 1 else ""
    return (reason if name in reason else f"{name}: {reason}") + more


def name_of(path: Path) -> str:
    """Return the path as valid Unicode (file names may be any bytes); for a stream, its name."""
    shown: str | None = getattr(path, "shown", None)
    return os.fsencode(path).decode("utf-8", "replace") if shown is None else shown


def _walk(paths: Iterable[Path]) -> Iterator[tuple[Path, bool]]:
    """Yield each file once, and whether it was given itself; not hidden ones in folders, nor links to folders."""
    seen: set[str] = set()
    for path in paths:
        for file, named in _files_of(path):
            real = os.path.realpath(file)
            if real not in seen:
                seen.add(real)
                yield file, named
            if len(seen) > MOST_FILES:
                raise UnusableError(f"more than {MOST_FILES} files were given")


def _files_of(path: Path) -> Iterator[tuple[Path, bool]]:
    if not os.path.isdir(path):  # noqa: PTH112 - Path.is_dir raises where a parent may not be entered
        yield path, True
        return
    closed: list[OSError] = []
    for directory, folders, names in os.walk(path, onerror=closed.append):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from ((Path(directory, name), False) for name in sorted(names) if not name.startswith("."))
    yield from ((Path(error.filename), True) for error in closed)


def kind_of(path: Path) -> str:
    """Return the kind of a file.

    ``capture``, ``record``, ``report``, ``flight-recorder``, ``snapshot``, ``log``, ``nvidia-smi``, ``ras``,
    ``stacks``, ``json``, ``pickle``, ``empty``, ``special``, ``unknown``, ``blocked`` if a read timed out, or
    ``missing`` if it cannot be opened.
    """
    try:
        # A pipe or a device could block indefinitely or never end; opening a device may have side effects.
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            return "missing" if stat.S_ISDIR(mode) else "special"
        with TimedFile(path) as stream:
            head = stream.read(SNIFFED)
    except (TimeoutError, BlockingIOError):
        return "blocked"
    except OSError:
        return "missing"
    return kind_of_head(head)


def kind_of_head(head: bytes) -> str:
    """Return the kind of a file with this beginning."""
    from doctor.postmortem.flight_recorder.unpickling import looks_like_dump
    from doctor.postmortem.memory_snapshot.snapshot_parser import looks_like_snapshot

    if not head.strip():
        return "empty"
    if head.startswith(_PACKED):
        return "log"
    if looks_like_dump(head):
        return "flight-recorder"
    if looks_like_snapshot(head):
        return "snapshot"
    if head.lstrip()[:1] in (b"{", b"["):
        return _kind_of_json(head)
    return "pickle" if head[:1] == b"\x80" and head[1:2] <= b"\x05" else _kind_of_text(head)


def _kind_of_json(head: bytes) -> str:
    from doctor.postmortem.ras.events import looks_like_ras
    from doctor.postmortem.stacks.dump_text import looks_like_json_stacks

    compact = b"".join(head.split())
    for kind in (b"capture", b"record"):
        if b'"kind":"' + kind + b'"' in compact:
            return kind.decode()
    if b'"verdict":' in compact and b'"schema":' in compact:
        return "report"
    if looks_like_ras(head.decode("utf-8", "replace")):
        return "ras"
    if looks_like_json_stacks(head.decode("utf-8", "replace")):
        return "stacks"
    return "json" if _is_json(head) else _kind_of_text(head)


def _is_json(head: bytes) -> bool:
    """Return whether a file is one JSON value; a log may begin with one, or hold one per line."""
    first, _, rest = head.strip().partition(b"\n")
    if first in (b"{", b"["):
        return True
    try:
        msgspec.json.decode(first)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return not rest and len(head) == SNIFFED
    return not rest.strip()


def _kind_of_text(head: bytes) -> str:
    from doctor.postmortem.nvidia_smi.printout import looks_like_nvidia_smi
    from doctor.postmortem.ras.events import looks_like_ras
    from doctor.postmortem.stacks.dump_text import looks_like_stacks
    from doctor.postmortem.stacks.recorder_tables import looks_like_recorder_tables

    if head.startswith(_WIDE):
        return "log"
    # Colors and progress bars use escapes, backspaces and carriage returns.
    controls = head.translate(None, bytes(range(32, 256)) + b"\t\n\r\x08\x0c\x1b\x00")
    if head.count(0) > len(head) // 100 or len(controls) / len(head) > MOST_CONTROLS:
        return "unknown"
    text = head.decode("utf-8", "replace")
    if looks_like_nvidia_smi(text):
        return "nvidia-smi"
    if looks_like_ras(text):
        return "ras"
    is_stacks = looks_like_recorder_tables(text) or looks_like_stacks(text, is_whole=len(head) < SNIFFED)
    return "stacks" if is_stacks else "log"
