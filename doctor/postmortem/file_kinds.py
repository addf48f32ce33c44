"""Kinds of input files, by their content."""

from __future__ import annotations

import re
import stat
from pathlib import Path

import msgspec

from doctor.core.files.timed_file import TimedFile
from doctor.postmortem.sandbox.decompression import ZIP, beginning_of, is_packed, is_tar

SNIFFED = 1 << 16
"""Bytes by which a file is classified; a log may have any size and is never read whole."""
SOURCES = frozenset(
    """
    .py .sh .sbatch .slurm .yaml .yml .toml .ini .cfg .md .rst .ipynb .html .css .js .c .cc .cpp .cu .h .hpp .go .rs
    .tex .csv .tsv .xml .svg
    """.split()  # noqa: SIM905 - thirty lines otherwise
)
"""Endings of files that people write: a message quoted in a program was not logged."""
ARCHIVES = re.compile(r"\.(?:zip|tar(?:\.\w{1,5})?|t[gbx]z2?|tzst)$", re.IGNORECASE)
"""Endings of archives of evidence: checkpoints, arrays and packages are zip archives, too."""
MOST_CONTROLS = 0.02
"""Maximum share of control characters in text; random bytes have a tenth."""


NO_EVIDENCE = {
    "report": "a report is a verdict, not evidence",
    "json": "it is not a rankdoctor capture, report or flight-recorder dump",
    "broken-json": "it is not valid JSON",
    "source": "it is source text, not a log",
    "empty": "it is empty",
    "pickle": "it is a pickle of another kind; nothing in it was run",
    "unknown": "it is neither text nor anything known",
    "archive": "archives are not read here",
    "special": "it is not a regular file",
    "blocked": "reading it blocks",
}
"""Why files of these kinds are skipped."""


def kind_of(path: Path) -> str:
    """Return the kind of a file.

    ``capture``, ``record``, ``report``, ``flight-recorder``, ``snapshot``, ``log``, ``nvidia-smi``, ``ras``,
    ``stacks``, ``export`` (of a log store), ``archive``, ``json``, ``broken-json``, ``pickle``, ``empty``, ``special``,
    ``unknown``, ``blocked`` if a read timed out, or ``missing`` if it cannot be opened.
    """
    try:
        # A pipe or a device could block indefinitely or never end; opening a device may have side effects.
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            return "missing" if stat.S_ISDIR(mode) else "special"
        with TimedFile(path) as stream:
            head = _head_of(stream)
    except (TimeoutError, BlockingIOError):
        return "blocked"
    except OSError:
        return "missing"
    return kind_of_head(head)


def _head_of(stream: TimedFile) -> bytes:
    """Return the first bytes of a file after a gap of zeros, as in a log that was truncated while it was written to."""
    head = stream.read(SNIFFED)
    for _ in range(_MOST_GAP // _GAP_READ):
        if not head or head.strip(b"\0"):
            break
        head = stream.read(_GAP_READ)
    return head.lstrip(b"\0")[:SNIFFED] if head[:8] == bytes(8) else head


_GAP_READ, _MOST_GAP = 1 << 20, 1 << 28


def kind_of_head(head: bytes) -> str:
    """Return the kind of a file with this beginning."""
    from doctor.postmortem.flight_recorder.unpickling import looks_like_dump
    from doctor.postmortem.memory_snapshot.snapshot_parser import looks_like_snapshot

    if not head.strip():
        return "empty"
    if head.startswith(ZIP) or is_tar(head):
        return "archive"
    if is_packed(head):
        return "archive" if is_tar(beginning_of(head)) else "log"
    if looks_like_dump(head):
        return "flight-recorder"
    if looks_like_snapshot(head):
        return "snapshot"
    if head.lstrip()[:1] in (b"{", b"["):
        return _kind_of_json(head)
    if head.lstrip()[:15].lower() == b"<!doctype html>" and b"rankdoctor report</title>" in head:
        return "report"
    return "pickle" if head[:1] == b"\x80" and head[1:2] <= b"\x05" else _kind_of_text(head)


def _kind_of_json(head: bytes) -> str:
    from doctor.postmortem.logs.exports import looks_like_export
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
    if looks_like_export(head):
        return "export"
    if not _is_json(head):
        return _kind_of_text(head)
    return "json" if len(head) == SNIFFED or _decodes(head) else "broken-json"


def _decodes(text: bytes) -> bool:
    try:
        msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeError):
        return False
    except RecursionError:
        pass
    return True


def _is_json(head: bytes) -> bool:
    """Return whether a file is one JSON value; a log may begin with one, or hold one per line, or a single one."""
    from doctor.postmortem.logs.prefixes import TEXTS

    first, _, rest = head.strip().partition(b"\n")
    if first in (b"{", b"["):
        return True
    try:
        value = msgspec.json.decode(first)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return not rest and len(head) == SNIFFED
    is_log_entry = isinstance(value, dict) and any(isinstance(value.get(key), str) for key in TEXTS)
    return not rest.strip() and not is_log_entry


def _kind_of_text(head: bytes) -> str:
    from doctor.postmortem.logs.exports import looks_like_export
    from doctor.postmortem.logs.lines import encoding_of
    from doctor.postmortem.nvidia_smi.printout import looks_like_nvidia_smi
    from doctor.postmortem.ras.events import looks_like_ras
    from doctor.postmortem.stacks.dump_text import looks_like_stacks
    from doctor.postmortem.stacks.recorder_tables import looks_like_recorder_tables

    # Colors and progress bars use escapes, backspaces and carriage returns.
    controls = head.translate(None, bytes(range(32, 256)) + b"\t\n\r\x08\x0c\x1b\x00")
    encoding, _ = encoding_of(head)
    text = head.decode(encoding, "replace").replace("\0", "")
    garbled = text.count("\ufffd") if head.count(0) > len(head) // 100 else 0
    if len(controls) + garbled > MOST_CONTROLS * len(text):
        return "unknown"
    if looks_like_nvidia_smi(text):
        return "nvidia-smi"
    if looks_like_ras(text):
        return "ras"
    if looks_like_export(head):
        return "export"
    is_stacks = looks_like_recorder_tables(text) or looks_like_stacks(text, is_whole=len(head) < SNIFFED)
    return "stacks" if is_stacks else "log"


def why_no_evidence(name: str, head: bytes) -> str | None:
    """Return why a file with this name and beginning is no evidence; ``None`` if it may be."""
    kind = kind_of_head(head)
    if kind in ("log", "stacks") and Path(name).suffix.lower() in SOURCES:
        kind = "source"
    return None if kind == "archive" else NO_EVIDENCE.get(kind)
