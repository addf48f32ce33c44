"""Log messages about files and directories that could not be written or read."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from doctor.analysis.logs.root_event import EXCEPTION, LaterEvents
from doctor.api import EventGroup, Finding, Job, Severity, event_groups, finding_from_logs, is_logged
from doctor.facts import Event, LogEvidence
from doctor_checks.host._storage_trials import WRITE_ERRORS

_READ_ERRORS = {
    "Stale NFS file handle": "does not respond",
    "Input/output error": "returns I/O errors of its disk or server",
    "Remote I/O error": "returns I/O errors of its disk or server",
    "Transport endpoint is not connected": "is no longer mounted",
    "Cannot send after transport endpoint shutdown": "was disconnected by its Lustre server",
    "Not enough disk space": "is full",
    "No locks available": "has no lock manager (NFS without `rpc.statd`)",
    "Function not implemented": "does not support file locks",
    "Operation not supported": "does not support file locks",
}
"""Messages of the C library about a file system, in addition to :data:`WRITE_ERRORS`."""

_KINDS = ("storage.refused", "storage.unwritten", "storage.damaged", "storage.missing")


def storage_messages(job: Job) -> Iterator[Finding]:
    """Findings for files and directories that the ranks could not write or read.

    If the error of the file system is known, only that is reported, otherwise the error of the library."""
    if job.evidence is None:
        return
    aftermath = LaterEvents(job.evidence)
    for kind in _KINDS[1:] if not is_logged(job, _KINDS[0]) else _KINDS[:1]:
        for group in event_groups(job, kind):
            if all(_is_of_parent(job.evidence, one) for one in group.events):
                continue
            survived = aftermath.outlived(group.events[-1])
            path = _first(group, "path", 7)
            yield finding_from_logs(
                group,
                _claim(group, path),
                evidence={"path": path} if path else None,
                fix=_fix_of_rename(path, target) if path and (target := group.value("target")) else _fix(kind, path),
                severity=Severity.WARNING if survived else None,
                confidence=_confidence(group, path),
                symptoms=not survived,
            )


def _is_of_parent(evidence: LogEvidence, event: Event) -> bool:
    """Whether a spawned process could not read from its parent, because the parent had exited."""
    same = (one for one in evidence.of(EXCEPTION) if (one.file, one.line) == (event.file, event.line))
    return any(frame.function == "spawn_main" for one in same for frame in one.frames)


def _claim(group: EventGroup, path: str | None) -> str:
    named = path or "a directory"
    if group.kind == "storage.refused":
        error = _first(group, "error", 10) or ""
        meaning = {**WRITE_ERRORS, **_READ_ERRORS}.get(error, "cannot be used")
        return f"{path or 'A directory'} {meaning}: {error}"
    if target := group.value("target"):
        return f"A checkpoint could not be renamed from {named} to {target}"
    if group.kind == "storage.missing":
        return f"A checkpoint is missing: {named}"
    what = (_first(group, "what", 11) or "").rstrip(".")
    if group.kind == "storage.damaged":
        return f"A file is incomplete or damaged: {what}"
    return f"A checkpoint could not be written: {what or f'{named} cannot be opened'}"


def _fix(kind: str, path: str | None) -> str:
    folder = shlex.quote(path) if path else "."
    if kind == "storage.damaged":
        return "Resume from an older checkpoint; write checkpoints to a temporary name and rename them when complete."
    if kind == "storage.missing":
        return f"Make the file available under the same path on every host; compare:\nls -l {folder}"
    return f"Check on the host of the rank:\ndf -h {folder}\ndf -i {folder}\nquota -s\nfindmnt -T {folder}"


def _fix_of_rename(path: str, target: str) -> str:
    """Where ranks share the file system, the first that renames the folder takes it from the others."""
    return (
        "Let only one rank rename it (update the framework if it does the renaming), and resume from the newest "
        f"complete checkpoint:\nls -ld {shlex.quote(path)} {shlex.quote(target)}"
    )


def _confidence(group: EventGroup, path: str | None) -> float:
    # A closed terminal also returns EIO.
    return 0.5 if not path and "[Errno 5]" in group.first.text else 0.9


def _first(group: EventGroup, name: str, most: int) -> str | None:
    return group.value(name, *(f"{name}{number}" for number in range(2, most + 1)))
