"""Log messages about files and directories that could not be written or read."""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Iterator

import msgspec

from doctor.analysis.logs.root_event import EXCEPTION, LaterEvents
from doctor.api import EventGroup, Finding, Job, Severity, event_groups, finding_from_logs, is_logged
from doctor.core.text import lazy_compile
from doctor.facts import Event, LogEvidence
from doctor_checks.host._storage_trials import remedy, uncapitalized

_KINDS = ("storage.refused", "storage.unwritten", "storage.damaged", "storage.missing")

_FAILS = "The process that {uses} the file fails, and the other ranks wait for it until the timeout."
_WRITES = _FAILS.format(uses="writes")
_USES = _FAILS.format(uses="uses")
_LOSES = "The run fails at this checkpoint, and the steps since the last complete checkpoint are lost."
_LOCKS = "The rank that locks the file fails, and the other ranks wait for it until the timeout."
_LOADS = "The ranks that load the file fail, and the other ranks wait for them until the timeout."
_RESUMES = "The job cannot be resumed from this checkpoint: the ranks that load it fail."
_SURVIVED = "The run continued without this file."

_REFUSALS = {
    "No space left on device": (
        "No space left on the file system of {path}",
        "A file could not be written: no space left on device",
    ),
    "Disk quota exceeded": ("Disk quota exceeded for {path}", "A file could not be written: disk quota exceeded"),
    "Read-only file system": ("{path} is on a read-only file system", "A file is on a read-only file system"),
    "Permission denied": ("Permission denied for {path}", "A file could not be opened: permission denied"),
    "Stale file handle": ("Stale file handle for {path}", "A file could not be used: stale file handle"),
    "Input/output error": ("I/O error on {path}", "A disk or file server returned an I/O error"),
    "Remote I/O error": ("Remote I/O error on {path}", "A file server returned an I/O error"),
    "Transport endpoint is not connected": (
        "The FUSE file system of {path} is disconnected",
        "A FUSE file system is disconnected",
    ),
    "Cannot send after transport endpoint shutdown": (
        "The Lustre server evicted the client that uses {path}",
        "The Lustre server evicted a client",
    ),
    "File too large": ("{path} exceeds the largest file size", "A file exceeds the largest file size"),
    "Is a directory": ("{path} is a directory, not a file", "The path of a checkpoint is a directory, not a file"),
}
"""Messages of the C library about a file system -> summaries with and without a path."""

_OF_THE_PATH = ("Transport endpoint is not connected", "Permission denied")
"""Errors whose commands need the path itself. A file that could not be written often does not exist."""

_LOCK_FAULTS = {
    "No locks available": (
        "the file system has no lock service",
        "Start the lock service of NFSv3 with `sudo systemctl start rpc-statd`, or put the file on a local disk.",
    ),
    "Function not implemented": (
        "the file system does not support locks",
        "Put the file on a local disk, or mount Lustre with `-o flock`.",
    ),
    "Operation not supported": (
        "the file system does not support locks",
        "Put the file on a local disk, or on a file system that supports locks.",
    ),
}
"""Messages of flock and fcntl -> the reason and a fix.

rpc-statd.service of nfs-utils is the "NFS status monitor for NFSv2/3 locking"; NFSv4 does not use it.
A Lustre client that is mounted with ``noflock`` returns ENOSYS, and ``flock`` makes locks coherent across all clients
(drivers/staging/lustre/README.txt of Linux 4.3, mount.lustre(8))."""

_NEEDED = lazy_compile(r"Needed: ([\d.]+ \w+)")
_MESSAGE = lazy_compile(r'message: "([^"]*)"')
_PLACE = lazy_compile(r"(?:writing|reading) (?:file (\S+)|zip archive): (.+)")
_SWAP = lazy_compile(r"(\S+): buffer nbytes")


class _Claim(msgspec.Struct, frozen=True):
    summary: str
    effect: str
    fix: str


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
            claim = _CLAIMS[kind](group, path)
            yield finding_from_logs(
                group,
                claim.summary,
                evidence={"path": path} if path else None,
                effect=_SURVIVED if survived else claim.effect,
                fix=claim.fix,
                severity=Severity.WARNING if survived else None,
                confidence=_confidence(group, path),
                symptoms=not survived,
            )


def _is_of_parent(evidence: LogEvidence, event: Event) -> bool:
    """Whether a spawned process could not read from its parent, because the parent had exited."""
    same = (one for one in evidence.of(EXCEPTION) if (one.file, one.line) == (event.file, event.line))
    return any(frame.function == "spawn_main" for one in same for frame in one.frames)


def _refused(group: EventGroup, path: str | None) -> _Claim:
    error = (_first(group, "error", 10) or "").replace("Stale NFS file", "Stale file")
    if error == "Not enough disk space":
        return _too_large_for_cache(group)
    if error in _LOCK_FAULTS:
        reason, fix = _LOCK_FAULTS[error]
        return _Claim(f"A file could not be locked: {reason}", _LOCKS, fix)
    named, unnamed = _REFUSALS.get(error, (f"{{path}} cannot be used: {error}", f"A file cannot be used: {error}"))
    is_write = error in ("No space left on device", "Disk quota exceeded", "Read-only file system", "File too large")
    return _Claim(
        named.format(path=path) if path else unnamed,
        _WRITES if is_write else _USES,
        remedy(error, path if error in _OF_THE_PATH else path and _parent(path), _place(group), " that the job uses"),
    )


def _too_large_for_cache(group: EventGroup) -> _Claim:
    """``datasets`` (builder.py) compares the size of a dataset with the free space of its cache directory."""
    needed = _NEEDED.search(group.first.text)
    size = needed[1] if needed else "space"
    return _Claim(
        f"Not enough disk space for a dataset{f': {size} needed' if needed else ''}",
        "The process that prepares the dataset fails, and the other ranks wait for it until the timeout.",
        f"Free {size} on the file system of the `datasets` cache, or set HF_HOME to a directory on a larger one.",
    )


def _unwritten(group: EventGroup, path: str | None) -> _Claim:
    what = (_first(group, "what", 11) or "").rstrip(".")
    message = _MESSAGE.search(what)
    reason = _reason(message[1] if message else what)
    fix = (
        remedy(message[1], None, _place(group), " of the checkpoint")
        if message
        else f"Check the free space and the free inodes on the checkpoint's file system{_place(group)}:\ndf -h\ndf -i"
    )
    if group.value("path"):
        reason, fix = f"directory {path} does not exist", f"mkdir -p {shlex.quote(path or '')}"
    elif path:
        folder = shlex.quote(_parent(path))
        reason = f"{path} cannot be opened"
        fix = (
            f"Check that the directory exists, is writable and has free space{_place(group)}:\n"
            f"ls -ld {folder}\ndf -h {folder}\ndf -i {folder}"
        )
    return _Claim(f"A checkpoint could not be written: {reason}", _LOSES, fix)


def _reason(what: str) -> str:
    """``writing file data/7: file write failed`` -> ``file write failed (data/7)``."""
    if found := _PLACE.fullmatch(what):
        return f"{found[2]} ({found[1] or 'zip archive'})"
    return uncapitalized(what.removeprefix("write error: "))


def _damaged(group: EventGroup, path: str | None) -> _Claim:
    what = _reason((_first(group, "what", 11) or "").rstrip("."))
    if swapped := _SWAP.search(group.first.text):
        file, (expected, found) = shlex.quote(swapped[1]), re.findall(r"\d+", what)
        return _Claim(
            f"{_short(swapped[1])} has {found} bytes instead of {expected}",
            "DeepSpeed cannot load this tensor from disk, and the rank fails.",
            "Remove the file, and free space on its file system before restarting the job:\n"
            f"rm {file}\ndf -h {shlex.quote(_parent(swapped[1]))}",
        )
    if what == "invalid load key, 'v'":
        return _Claim(
            "A file is probably a Git LFS pointer instead of the data: invalid load key, 'v'",
            _LOADS,
            "Replace the pointer with the data by running this command in the file's repository:\ngit lfs pull",
        )
    if any(group.value(f"what{number}") for number in (6, 7, 8, 9)):
        fix = "Replace the file named in the traceback with a complete copy."
    else:
        fix = "Resume from an older checkpoint, or download the file again."
    return _Claim(f"A file is incomplete or damaged: {what}", _LOADS, fix)


def _missing(group: EventGroup, path: str | None) -> _Claim:
    path = path or "an unknown path"
    folder = shlex.quote(path)
    if target := group.value("target"):
        # On a shared file system, the first rank that renames the folder takes it from the others. transformers 4.36
        # does so on every rank; since 4.37.0, one rank renames (huggingface/transformers, issue 27925 and pull request
        # 28364).
        once = (
            "Install transformers 4.37 or later, in which one rank renames the checkpoint"
            if posixpath.basename(path).startswith("tmp-checkpoint-")
            else "Rename the checkpoint on one rank only"
        )
        return _Claim(
            f"A checkpoint could not be renamed from {path} to {target}",
            _LOSES,
            f"{once}, and resume from the newest complete checkpoint that this command lists:\n"
            f"ls -lt {shlex.quote(_parent(target))}",
        )
    if group.value("path5"):
        return _Claim(
            f"Directory {path if '/' in path else repr(path)} contains no valid checkpoint",
            "The Trainer cannot resume, and the ranks fail at startup.",
            "Pass the directory of a checkpoint as `resume_from_checkpoint` to `trainer.train()`, or omit the argument "
            "to start without a checkpoint.",
        )
    if group.value("path7"):
        return _Claim(
            f"{path} contains no {_TRACKER}: no checkpoint was loaded",
            "The job ends at startup.",
            f"Correct `--load`, write the number of an existing iteration to {_TRACKER}, or remove "
            "`--exit-on-missing-checkpoint` to start without a checkpoint.",
        )
    if group.value("path6"):
        return _Claim(
            f"Directory {path} contains no model weights",
            "The ranks that load the model fail at startup.",
            f"Copy the weights to this directory on every host, and verify them with:\nls -l {folder}",
        )
    return _Claim(
        f"No valid checkpoint was found at {path}" if group.value("path4") else f"Checkpoint file {path} is missing",
        _RESUMES,
        f"Make the checkpoint available under this path on every host, and verify it there with:\nls -l {folder}",
    )


_TRACKER = "latest_checkpointed_iteration.txt"
"""The file in which Megatron names the checkpoint to load (megatron/training/checkpointing.py)."""
_CLAIMS = dict(zip(_KINDS, (_refused, _unwritten, _damaged, _missing), strict=True))


def _short(path: str) -> str:
    """The last two parts of a long path, which fit into a summary."""
    parts = path.rsplit("/", 2)
    return f"…/{'/'.join(parts[1:])}" if len(path) > 40 and len(parts) == 3 else path


def _place(group: EventGroup) -> str:
    """The host on which to run a command, if it is known."""
    if len(group.hosts) == 1:
        return f" on {group.hosts[0]}"
    return f" on the host of rank {group.ranks[0]}" if len(group.ranks) == 1 else ""


def _parent(path: str) -> str:
    """The directory of a file, which often does not exist if it could not be written."""
    return posixpath.dirname(path.rstrip("/")) or "."


def _confidence(group: EventGroup, path: str | None) -> float:
    # A closed terminal also returns EIO.
    return 0.5 if not path and "[Errno 5]" in group.first.text else 0.9


def _first(group: EventGroup, name: str, most: int) -> str | None:
    return group.value(name, *(f"{name}{number}" for number in range(2, most + 1)))
