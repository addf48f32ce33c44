"""HOST004: a checkpoint or dump directory can't be used."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.api import (
    Directory,
    Finding,
    Job,
    LocalRanks,
    Scope,
    Severity,
    Sick,
    Sketch,
    StorageFacts,
    TrainerFacts,
    Unknown,
    Verdict,
    Well,
    check,
    healthy,
)

WORDS = {"checkpoint": "checkpoint", "flight-recorder": "flight-recorder dump", "nccl-debug": "NCCL log"}
"""Roles of directories that are judged, in words. Caches and temporary folders have checks of their own subject."""

WHOLE = ("ddp", "ddp_find_unused_parameters_true", "ddp_find_unused_parameters_false")
"""Strategies under which rank 0 alone writes checkpoints, so that folders of each host's own hurt at resume only."""


def _folder(**changes: object) -> Directory:
    values: dict[str, object] = {
        "path": "/data/runs",
        "role": "checkpoint",
        "source": "settings",
        "exists": True,
        "writable": True,
        "total": 10 << 40,
        "free": 5 << 40,
        "free_inodes": 10_000_000,
        "filesystem": "lustre",
        "shared": True,
    }
    return Directory(**{**values, **changes})  # type: ignore[arg-type]


def _with(directory: Directory, hosts: int = 2) -> Sketch:
    return healthy(hosts=hosts).put(StorageFacts(directories=(directory,)), hosts=(f"node{hosts - 1}",))


_DUMPS = {"path": "/scratch/dumps", "role": "flight-recorder", "source": "TORCH_FR_DUMP_TEMP_FILE", "shared": False}


@check(
    id="HOST004",
    severity=Severity.ERROR,
    scope=Scope.HOST,
    when="PR",
    needs=(StorageFacts,),
    cases=lambda: (
        Well("a shared directory with room", _with(_folder())),
        Well("no directory is named", healthy(hosts=2)),
        Well("a local directory on one host", _with(_folder(shared=False, filesystem="ext4"), hosts=1)),
        Well("dumps on each host's own disk", _with(_folder(**_DUMPS))),
        Well("a full cache is another matter", _with(_folder(role="cache", free=0))),
        Well("a file system that counts no inodes", _with(_folder(free_inodes=None, filesystem="btrfs"))),
        Sick("the checkpoint directory is missing on one host", _with(_folder(exists=False)), ranks=(2, 3)),
        Sick("the dump directory is missing", _with(_folder(**_DUMPS | {"exists": False})), ranks=(2, 3)),
        Sick("not writable", _with(_folder(writable=False)), ranks=(2, 3)),
        Sick("no bytes left", _with(_folder(free=0)), ranks=(2, 3)),
        Sick("no inodes left", _with(_folder(free_inodes=0)), ranks=(2, 3)),
        Sick("each host has its own", _with(_folder(shared=False, filesystem="xfs")), ranks=(2, 3)),
        Sick("the mount does not answer", _with(_folder(exists=None, error="no answer within 2 s")), ranks=(2, 3)),
        Sick(
            "each host has its own, and rank 0 alone writes",
            _with(_folder(shared=False)).put(TrainerFacts(strategy="ddp")),
            ranks=(2, 3),
            severity=Severity.WARNING,
        ),
    ),
)
def storage_unfit(job: Job, *, checkpoint_bytes: float = 1 << 30, dump_bytes: float = 64 << 20) -> Iterator[Verdict]:
    """Ask whether the directories for checkpoints and dumps can be used from every host.

    Why it hurts: the run dies at its first checkpoint, or the evidence of a hang is lost when it is needed; a
    checkpoint that lies in pieces on several hosts' own disks can't be resumed from.
    Fix: make the directory, free space in it, or name one on a file system that all hosts mount.
    """
    # A gibibyte is the smallest checkpoint worth its name (weights and Adam's moments of 90 million parameters);
    # 64 MiB holds the flight recorder's 2,000 entries of every rank of a host many times over.
    found: dict[tuple[str, str, str, Severity], list[int]] = {}
    evidence: dict[tuple[str, str, str, Severity], Directory] = {}
    for local in job.by_host():
        storage = local.find(StorageFacts)
        for folder in storage.directories if storage else ():
            if folder.role not in WORDS:
                continue
            least = checkpoint_bytes if folder.role == "checkpoint" else dump_bytes
            if unseen := _why_unseen(folder):
                yield Unknown(unseen, local.ranks, f"ls -ld {folder.path}; df -h {folder.path}")
            for words, severity in _faults(job, local, folder, least):
                key = (folder.role, folder.path, words, severity)
                found.setdefault(key, []).extend(local.ranks)
                evidence.setdefault(key, folder)
    for key, ranks in found.items():
        yield _finding(key[2], key[3], evidence[key], tuple(ranks))


def _why_unseen(folder: Directory) -> str | None:
    if folder.exists is None and folder.error and not _hangs(folder):
        return f"{folder.path} could not be looked at: {folder.error}"
    return None


def _hangs(folder: Directory) -> bool:
    return folder.exists is None and (folder.error or "").startswith("no answer")


def _faults(job: Job, local: LocalRanks, folder: Directory, least: float) -> Iterator[tuple[str, Severity]]:
    """What is wrong with it, as the end of a sentence; one fault where it can't be reached at all."""
    worst = Severity.WARNING if folder.role == "nccl-debug" else Severity.ERROR
    if _hangs(folder):
        yield "does not answer", worst
    elif folder.exists is False:
        yield (f"can't be reached: {folder.error}" if folder.error else "is missing"), worst
    else:
        if folder.writable is False:
            yield "is not writable", worst
        if folder.free is not None and folder.free < least:
            yield f"is full (less than {int(least) >> 20} MiB free)", worst
        if folder.free_inodes == 0:
            yield "is full (no inodes left)", worst
        if folder.role == "checkpoint" and folder.shared is False and job.is_multi_host:
            yield "is each host's own", _unshared_severity(local)


def _unshared_severity(local: LocalRanks) -> Severity:
    trainers = (rank.find(TrainerFacts) for rank in local.members[:1])
    whole = any(trainer is not None and trainer.strategy in WHOLE for trainer in trainers)
    return Severity.WARNING if whole else Severity.ERROR


def _finding(words: str, severity: Severity, folder: Directory, ranks: tuple[int, ...]) -> Finding:
    return Finding(
        f"the {WORDS[folder.role]} directory {folder.path} {words}",
        ranks=ranks,
        severity=severity,
        evidence={
            "path": folder.path,
            "named_by": folder.source,
            "filesystem": folder.filesystem,
            "free_bytes": folder.free,
            "free_inodes": folder.free_inodes,
            "shared": folder.shared,
            "error": folder.error,
        },
        fix=_fix(words, folder),
    )


def _fix(words: str, folder: Directory) -> str:
    if words == "is missing":
        return f"mkdir -p {folder.path} on these hosts, or mount what should be there"
    if words == "is not writable":
        return f"ls -ld {folder.path}; id: give the user of the job write permission, or name another directory"
    if words.startswith("is full"):
        return f"df -h {folder.path}; df -i {folder.path}: free space, or name another directory"
    if words == "is each host's own":
        return "name a directory on a file system that all hosts mount (NFS, Lustre, GPFS …)"
    return f"stat {folder.path} on these hosts: mount it again, or name another directory"
