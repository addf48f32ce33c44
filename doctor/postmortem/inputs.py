"""Input files and folders of a command, classified by content.

Captures and the records of a run are read here; other evidence is sorted for :mod:`doctor.postmortem`, and the rest is
listed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from doctor.core.capture import EARLIER, Capture, read_capture, same_run
from doctor.core.errors import UnusableError
from doctor.core.report_document import ReportInput
from doctor.postmortem.file_kinds import ARCHIVES, NO_EVIDENCE, SOURCES, kind_of
from doctor.postmortem.filenames import name_of, shown_path

if TYPE_CHECKING:
    from doctor.postmortem.unpacked_archives import UnpackedArchives

MOST_FILES = 100_000


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
            "broken-json": "unknown",
            "source": "unknown",
            "archive": "unknown",
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
    paths: Iterable[Path],
    kinds: tuple[str, ...] = ("capture", "record"),
    *,
    several_runs: bool = False,
    archives: UnpackedArchives | None = None,
) -> SortedInputs:
    """Classify the inputs, and read captures and records.

    Args:
        paths: files and folders.
        kinds: kinds that the caller can read; at least one file must be of one of them.
        several_runs: each folder may hold the records of another run; else only the newest run counts.
        archives: where members of archives are kept; archives are not read without it.

    Raises:
        UnusableError: no file is readable; with the reason of the first one.
    """
    read = [one for path, named in _walk(paths) for one in _read_all(path, archives, named=named)]
    homes = [_home_of(file.path) if several_runs else None for file, _ in read]
    newest: dict[Path | None, Capture] = {}
    for home, (_, found) in zip(homes, read, strict=True):
        if found is not None and found.run is not None and (home not in newest or found.created > newest[home].created):
            newest[home] = found
    captures: list[tuple[Path, Capture]] = []
    files: list[InputFile] = []
    for home, (file, found) in zip(homes, read, strict=True):
        why = file.why if found is None else _why_skipped(found, newest.get(home))
        if file.kind == "archive" and archives is None:
            why = NO_EVIDENCE["archive"]
        if file.kind not in kinds and file.kind not in ("report", "json", "broken-json", "missing"):
            why = why if "log" in kinds else "it is not a capture"
        files.append(file._replace(why=why))
        if found is not None and why is None:
            captures.append((file.path, found))
    if all(file.why is not None for file in files):
        raise UnusableError(_nothing(files))
    return SortedInputs(tuple(one for _, one in captures), tuple(path for path, _ in captures), tuple(files))


def _home_of(path: Path) -> Path:
    """Return the folder of a record; for one that was moved to ``earlier/``, its former folder."""
    path = shown_path(path)
    parts = path.parts
    return Path(*parts[: parts.index(EARLIER)]) if EARLIER in parts else path.parent


def _read_all(
    path: Path, archives: UnpackedArchives | None, *, named: bool, depth: int = 0
) -> Iterator[tuple[InputFile, Capture | None]]:
    """Classify a file, and the members of an archive."""
    from doctor.postmortem.unpacked_archives import MOST_DEPTH, alias

    file, capture = _read(path, named=named)
    if file.kind != "archive" or archives is None:
        yield file, capture
        return
    if depth == MOST_DEPTH:
        yield file._replace(why=f"archives in archives are read {MOST_DEPTH} deep"), None
        return
    try:
        members, cut = archives.members_of(path, named=named)
    except UnusableError as error:
        yield file._replace(why=str(error)), None
        return
    if all(why is not None for _, why in members):
        first = "".join(f" ({shown_path(member).name}: {why})" for member, why in members[:1])
        yield file._replace(why=cut or f"none of its members is evidence{first}"), None
        return
    if cut is not None:
        yield file._replace(path=alias(path, name_of(path), cut)), None
    for member, why in members:
        if why is None:
            yield from _read_all(member, archives, named=False, depth=depth + 1)
        else:
            yield InputFile(member, "unknown", why), None


def _read(path: Path, *, named: bool) -> tuple[InputFile, Capture | None]:
    """Classify a file, and read captures and records. ``named``: it was given by its own name."""
    kind = kind_of(path)
    if kind == "missing" or kind in ("capture", "record"):
        try:
            return InputFile(path, kind), read_capture(path)
        except UnusableError as error:
            return InputFile(path, kind, str(error)), None
    shown = shown_path(path)
    if not named and kind in ("log", "stacks") and shown.suffix.lower() in SOURCES:
        kind = "source"
    kind = "log" if kind == "export" else kind
    if not named and kind == "archive" and not ARCHIVES.search(shown.name):
        kind = "unknown"
    if not named and kind in ("log", "flight-recorder", "snapshot", "stacks") and EARLIER in shown.parts:
        return InputFile(path, kind, "it is of an earlier run"), None
    return InputFile(path, kind, None if kind == "archive" else NO_EVIDENCE.get(kind)), None


def _why_skipped(capture: Capture, newest: Capture | None) -> str | None:
    """Return the reason to skip a record: of several runs in a folder, only the newest counts."""
    if capture.run is None or newest is None or newest.run is None or same_run(capture.run, newest.run):
        return None
    return f"it is of another run ({capture.run}, {capture.created}) than the newest record ({newest.run})"


def _nothing(files: list[InputFile]) -> str:
    if not files:
        return "there is no file to read"
    name, reason = name_of(files[0].path), str(files[0].why)
    more = f" (and {len(files) - 1} more)" if len(files) > 1 else ""
    return (reason if name in reason else f"{name}: {reason}") + more


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
