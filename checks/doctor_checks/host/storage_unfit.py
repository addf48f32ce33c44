"""HOST004: a directory that the job writes to cannot be used."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping

import msgspec

from doctor.analysis.storage_speed import shared_paths, slow_storage
from doctor.analysis.visible_devices import mebibytes
from doctor.api import Finding, Job, LocalRanks, Rank, Scope, Severity, Unknown, Verdict, check
from doctor.facts import Directory, Failure, ProgressFacts, StorageFacts, TrainerFacts, TrainingFacts
from doctor.testing import Fails, JobBuilder, Passes, healthy, logged, running
from doctor.testing.storage_trials import storage_apart, storage_tried, storage_unread
from doctor_checks.host._scratch_directories import scratch_findings
from doctor_checks.host._storage_messages import storage_messages
from doctor_checks.host._storage_trials import (
    ONLY_OF_RANK_0,
    ROLES,
    WRITE_ERRORS,
    on_shared_storage,
    remedy,
    storage_findings,
)

WHOLE = ("ddp", "ddp_find_unused_parameters_true", "ddp_find_unused_parameters_false")
"""Strategies with which only rank 0 writes checkpoints, so that separate folders of the hosts only affect resuming."""

OF_A_PATH = ("File exists", "Not a directory")
"""Errors of :data:`WRITE_ERRORS` that apply to the directory only if they name it."""


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


def _with(directory: Directory, hosts: int = 2) -> JobBuilder:
    return healthy(hosts=hosts).put(StorageFacts(directories=(directory,)), hosts=(f"node{hosts - 1}",))


def _cache(source: str, **changes: object) -> Directory:
    return _folder(path="/home/me/.triton/cache", role="cache", source=source, shared=False, **changes)


def _with_scratch(**changes: object) -> JobBuilder:
    return _with(
        _folder(**{"path": "/scratch/tmp", "role": "temporary", "source": "TMPDIR", "shared": False, **changes})
    )


_EXT4 = StorageFacts(directories=(_folder(filesystem="ext4", shared=False),))


def _in_run(folder: Directory, strategy: str = "ddp") -> JobBuilder:
    """A monitored job of two hosts whose checkpoints go to ``folder``, as node1 sees it."""
    sketch = running(2, 2).alter(TrainingFacts, checkpoints=folder.path, strategy=strategy)
    return sketch.put(StorageFacts(directories=(folder,)), hosts=("node1",))


def _failed(kind: str, message: str, point: str) -> JobBuilder:
    failure = Failure(kind, message)
    return running(2, 2).alter(ProgressFacts, ranks=(0,), state="failed", point=point, failure=failure)


_DUMPS = {"path": "/scratch/dumps", "role": "flight-recorder", "source": "TORCH_FR_DUMP_TEMP_FILE", "shared": False}


@check(
    id="HOST004",
    severity=Severity.ERROR,
    scope=Scope.HOST,
    when="PRM",
    needs=(StorageFacts,),
    from_logs=storage_messages,
    impacts={
        r"^Flight-recorder dump": "If a collective times out, no dump shows which rank did not reach it.",
        r"different directories": "No directory has all parts of a checkpoint, so the job cannot resume from it.",
        r"not shared": ("No host can read all parts of a checkpoint, so the job cannot resume from it."),
        r"could not write a checkpoint": (
            "The run fails at this checkpoint, and the steps since the last complete checkpoint are lost."
        ),
        r"does not respond": (
            "A process that reads or writes there fails or blocks, and the other ranks wait for it until the timeout."
        ),
        r"^Checkpoint .* has less than": "The run fails when it saves a checkpoint that is larger than the free space.",
        r"^Checkpoint": "The run fails when it saves its first checkpoint.",
    },
    cases=lambda: (
        Passes("a shared directory with room", _with(_folder())),
        Passes("no directory is named", healthy(hosts=2)),
        Passes("a local directory on one host", _with(_folder(shared=False, filesystem="ext4"), hosts=1)),
        Passes("dumps on each host's own disk", _with(_folder(**_DUMPS))),
        Passes("a temporary directory and caches with room", _with_scratch()),
        Passes("a default cache that is made on demand", _with(_cache("", exists=False))),
        Passes("a model cache on a file system without programs", _with(_cache("HF_HOME", noexec=True))),
        Fails("TMPDIR is missing", _with_scratch(exists=False), ranks=(2, 3), severity=Severity.WARNING),
        Fails("TMPDIR is full", _with_scratch(free=1 << 20), ranks=(2, 3), severity=Severity.WARNING),
        Fails("TMPDIR has no inodes left", _with_scratch(free_inodes=0), ranks=(2, 3), severity=Severity.WARNING),
        Fails("TMPDIR is read-only", _with_scratch(writable=False), ranks=(2, 3), severity=Severity.WARNING),
        Fails("TMPDIR loads no libraries", _with_scratch(noexec=True), ranks=(2, 3), severity=Severity.INFO),
        Fails(
            "TMPDIR is a file",
            _with_scratch(exists=False, error="not a directory"),
            ranks=(2, 3),
            severity=Severity.WARNING,
        ),
        Fails(
            "a path that leaves no room for the name of a socket",
            _with_scratch(path="/scratch/" + "job.471100/" * 7),
            ranks=(2, 3),
            severity=Severity.INFO,
        ),
        Fails(
            "a compiler cache loads no libraries",
            _with(_cache("TORCHINDUCTOR_CACHE_DIR", noexec=True)),
            ranks=(2, 3),
            severity=Severity.WARNING,
        ),
        Fails(
            "a compiler cache is full",
            _with(_cache("TRITON_CACHE_DIR", free=0)),
            ranks=(2, 3),
            severity=Severity.WARNING,
        ),
        Fails(
            "a compiler cache cannot be created",
            _with(_cache("TORCH_EXTENSIONS_DIR", exists=False, writable=False)),
            ranks=(2, 3),
            severity=Severity.WARNING,
        ),
        Fails(
            "a model cache is read-only, which is often intended",
            _with(_cache("HF_HOME", writable=False)),
            ranks=(2, 3),
            severity=Severity.INFO,
        ),
        Fails(
            "the home directory is read-only",
            _with(_cache("", exists=False, writable=False)),
            ranks=(2, 3),
            severity=Severity.INFO,
        ),
        Passes("a file system that counts no inodes", _with(_folder(free_inodes=None, filesystem="btrfs"))),
        Fails("the checkpoint directory is missing on one host", _with(_folder(exists=False)), ranks=(2, 3)),
        Fails("the dump directory is missing", _with(_folder(**_DUMPS | {"exists": False})), ranks=(2, 3)),
        Fails("not writable", _with(_folder(writable=False)), ranks=(2, 3)),
        Fails("no bytes left", _with(_folder(free=0)), ranks=(2, 3)),
        Fails("no inodes left", _with(_folder(free_inodes=0)), ranks=(2, 3)),
        Fails("each host has its own", _with(_folder(shared=False, filesystem="xfs")), ranks=(2, 3)),
        Fails(
            "the mount does not answer",
            _with(_folder(exists=None, free=None, free_inodes=None, error="no answer within 2 s")),
            ranks=(2, 3),
        ),
        Fails(
            "each host has its own, and rank 0 alone writes",
            _with(_folder(shared=False, filesystem="xfs")).put(TrainerFacts(strategy="ddp")),
            ranks=(2, 3),
            severity=Severity.WARNING,
        ),
        Passes("all hosts wrote, and read what the others did", storage_tried(_folder())),
        Passes("a disk that all share, whose file system type does not show it", storage_tried(_folder()).put(_EXT4)),
        Passes("a host that takes half a second longer", storage_tried(_folder(), odd=1, sync_seconds=0.6)),
        Passes("slow once, and not when it wrote again", storage_tried(_folder(), odd=1, before=6.0)),
        Fails("a quota that is spent", storage_tried(_folder(), odd=2, error="Disk quota exceeded"), ranks=(4, 5)),
        Fails(
            "writing ends with an error of the disk",
            storage_tried(_folder(), odd=2, error="Input/output error"),
            ranks=(4, 5),
        ),
        Fails("writing does not end", storage_tried(_folder(), odd=2, error="no answer within 20 s"), ranks=(4, 5)),
        Fails("reading does not end", storage_unread(_folder(), 4, reader=3), ranks=(6, 7)),
        Fails("one host has a directory of its own", storage_apart(_folder(), 4, (2,)), ranks=(4, 5)),
        Fails("every host has its own", storage_apart(_folder(), 3, (0, 1, 2)), ranks=(0, 1, 2, 3, 4, 5)),
        Fails(
            "one host is slow",
            storage_tried(_folder(), odd=1, sync_seconds=6.0),
            ranks=(2, 3),
            severity=Severity.WARNING,
        ),
        Fails(
            "a host that stands alone is slow",
            storage_tried(_folder(), 1, odd=0, sync_seconds=9.0),
            ranks=(0, 1),
            severity=Severity.WARNING,
        ),
        Passes("the Trainer of a run makes the directory with its first checkpoint", _in_run(_folder(exists=False))),
        Passes(
            "a Trainer's root directory, which it makes when it first writes there",
            _in_run(_folder(path="/data/new", source="trainer", exists=False)).alter(
                TrainingFacts, checkpoints="/data/new/checkpoints"
            ),
        ),
        Fails("a directory that the run can't make", _in_run(_folder(exists=False, writable=False)), ranks=(2, 3)),
        Fails("a directory that the run makes on a full disk", _in_run(_folder(exists=False, free=0)), ranks=(2, 3)),
        Fails(
            "a directory that the run can't make below a file",
            _in_run(_folder(exists=False, writable=None, error="not a directory")),
            ranks=(2, 3),
        ),
        Passes("a run that fails elsewhere", _failed("OSError", "[Errno 28] No space left on device", "step")),
        Fails("the directory of a run is full", _in_run(_folder(free=0)), ranks=(2, 3)),
        Fails("shards go to each host's own directory", _in_run(_folder(shared=False), strategy="fsdp"), ranks=(2, 3)),
        Fails(
            "rank 0 of a run writes to its own disk",
            _in_run(_folder(shared=False)),
            ranks=(2, 3),
            severity=Severity.WARNING,
        ),
        Fails(
            "a checkpoint that could not be written",
            _failed(
                "RuntimeError",
                "[enforce fail at inline_container.cc:820] . PytorchStreamWriter failed writing "
                "file data/7: OSError: [Errno 28] No space left on device",
                "checkpoint",
            ),
            ranks=(0,),
        ),
        Fails(
            "a file in the place of the directory",
            _failed("FileExistsError", "[Errno 17] File exists: '/home/me/runs/checkpoints'", "checkpoint"),
            ranks=(0,),
        ),
        Fails(
            "a file above it",
            _failed("NotADirectoryError", "[Errno 20] Not a directory: '/home/me/runs/checkpoints'", "checkpoint"),
            ranks=(0,),
        ),
        Passes(
            "a hook of the user's that makes a directory twice",
            _failed("FileExistsError", "[Errno 17] File exists: 'plots'", "checkpoint"),
        ),
        Passes(
            "shared memory that is full is another matter",
            logged("OSError: [Errno 28] No space left on device: '/dev/shm/torch_12'"),
            silent=False,
        ),
        Fails(
            "the log of a checkpoint that could not be written",
            logged(
                "[rank0]: OSError: [Errno 122] Disk quota exceeded",
                "[rank0]: During handling of the above exception, another exception occurred:",
                "[rank0]: RuntimeError: [enforce fail at inline_container.cc:820] . PytorchStreamWriter failed writing "
                "file data/7: file write failed",
            ),
            ranks=(0,),
        ),
        Fails(
            "the log of a checkpoint that ends early",
            logged("RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory"),
        ),
        Fails(
            "shards in a directory of each host",
            running(2, 2)
            .alter(TrainingFacts, strategy="fsdp")
            .alter(TrainingFacts, ranks=(2, 3), checkpoints="/home/me/runs/node1/checkpoints"),
            ranks=(0, 1, 2, 3),
        ),
    ),
)
def storage_unfit(
    job: Job,
    *,
    checkpoint_bytes: float = 1 << 30,
    dump_bytes: float = 64 << 20,
    slow_times: float = 3.0,
    slow_bandwidth: float = 5e6,
    sync_seconds: float = 5.0,
    scratch_bytes: float = 64 << 20,
) -> Iterator[Verdict]:
    """Ask whether the directories for checkpoints, dumps, temporary files and caches can be used on every host.

    Why it hurts: the run fails at its first checkpoint or compilation, or the evidence of a hang is lost. A
    checkpoint whose parts are on local disks of several hosts cannot be resumed from.
    Fix: Create the directory, free space in it, or use one on a file system that all hosts mount.
    """
    # 1 GiB is a small checkpoint (weights and Adam's moments of 90 million parameters). 64 MiB is far more than the
    # flight recorder's 2,000 entries of every rank of a host need.
    tried = shared_paths(job)
    found: dict[tuple[str, str, str, Severity], list[int]] = {}
    evidence: dict[tuple[str, str, str, Severity], Directory] = {}
    for local in job.by_host():
        storage = local.find(StorageFacts)
        for folder in storage.directories if storage else ():
            if folder.role not in ROLES:
                continue
            least = checkpoint_bytes if folder.role == "checkpoint" else dump_bytes
            if folder.exists is None and folder.error and not _hangs(folder):
                unseen, path = f"{folder.path} could not be accessed: {folder.error}", _quoted(folder.path)
                yield Unknown(unseen, local.ranks, f"ls -ld {path}; df -h {path}")
            for words, severity in _faults(job, local, folder, least, tried):
                key = (folder.role, folder.path, words, severity)
                found.setdefault(key, []).extend(local.ranks)
                evidence.setdefault(key, folder)
    for key, ranks in found.items():
        hosts = job.hosts_of(ranks)
        place = f" on {hosts[0]}" if len(hosts) == 1 and job.is_multi_host and key[2] != _UNSHARED else ""
        yield _finding(key[2], key[3], evidence[key], tuple(ranks), ", ".join(hosts[:8]), place)
    yield from _failed_to_write(job)
    yield from _scattered(job)
    # The kernels that torch.compile caches for one model take tens of mebibytes.
    yield from scratch_findings(job, scratch_bytes)
    # Below 5 MB/s a checkpoint of a gibibyte takes minutes; writers of checkpoints call fsync for every file.
    slow = slow_storage(job, times=slow_times, bandwidth=slow_bandwidth, sync=sync_seconds)
    yield from storage_findings(job, slow, _unshared_severity)


def _failed_to_write(job: Job) -> Iterator[Finding]:
    """Ranks of a run that failed with a file system error while writing a checkpoint."""
    failed = [
        rank
        for progress, identical in job.each(ProgressFacts)
        if progress.failure and progress.point == "checkpoint"
        for rank in identical.members
    ]
    for rank in sorted(failed, key=lambda rank: rank.number):
        progress, training = rank.find(ProgressFacts), rank.find(TrainingFacts)
        failure = progress.failure if progress else None
        named = training.checkpoints if training else None
        if failure and (said := _said_of(named, failure)):
            path = named or "its directory"
            yield Finding(
                f"Rank {rank.number} could not write a checkpoint: {path} {said.meaning}",
                ranks=(rank.number,),
                evidence={"error": failure.kind, "message": failure.message[:500], "path": named},
                fix=remedy(said.words, named, f" on {rank.host.name}"),
                explains=("RUN001", "RUN004", "RUN010", "RUN012"),
            )


class _Said(msgspec.Struct, frozen=True):
    words: str
    meaning: str


def _said_of(path: str | None, failure: Failure) -> _Said | None:
    return next(
        (
            _Said(words, meaning)
            for words, meaning in WRITE_ERRORS.items()
            if words in failure.message and (words not in OF_A_PATH or (path and path in failure.message))
        ),
        None,
    )


def _scattered(job: Job) -> Iterator[Finding]:
    """Ranks that write parts of one checkpoint to several directories."""
    paths: dict[str, list[int]] = {}
    for training, identical in job.facts(TrainingFacts):
        if training.checkpoints and training.strategy and not _writes_whole(training.strategy):
            paths.setdefault(training.checkpoints, []).extend(identical.ranks)
    if len(paths) > 1:
        yield Finding(
            f"Ranks write parts of one checkpoint to {len(paths)} different directories",
            ranks=tuple(sorted(rank for ranks in paths.values() for rank in ranks)),
            evidence={"directories": {path: ranks[:32] for path, ranks in list(paths.items())[:8]}},
            fix="Use the same directory on all ranks, without the host name, rank or time in its path.",
        )


def _writes_whole(strategy: str | None) -> bool:
    """Whether only rank 0 writes checkpoints with this strategy of a run, by its name or the wrapper's class."""
    return (strategy or "").lower().startswith(("ddp", "distributeddataparallel", "auto", "single"))


def _hangs(folder: Directory) -> bool:
    return folder.exists is None and (folder.error or "").startswith("no answer")


def _faults(
    job: Job, local: LocalRanks, folder: Directory, least: float, tried: Mapping[str, bool]
) -> Iterator[tuple[str, Severity]]:
    """The faults, as predicates of a sentence; only one fault if the directory is unreachable. For directories that the
    hosts ``tried``, the test decides whether they are shared, not the kind of file system."""
    worst = Severity.WARNING if folder.role == "nccl-debug" else Severity.ERROR
    if _hangs(folder):
        yield "does not respond", worst
    elif folder.exists is False and (folder.error or not _is_made_later(local, folder)):
        yield (f"is not accessible: {folder.error}" if folder.error else "is missing"), worst
    else:
        if folder.writable is False:
            yield ("is not writable" if folder.exists else "cannot be created: no write permission"), worst
        if folder.free is not None and folder.free < least:
            yield f"has less than {mebibytes(int(least))} free", worst
        if folder.free_inodes == 0:
            yield "has no free inodes", worst
        if folder.role == "checkpoint" and folder.shared is False and job.is_multi_host and folder.path not in tried:
            yield _UNSHARED, _unshared_severity(local)


def _is_made_later(local: LocalRanks, folder: Directory) -> bool:
    """Whether a run writes its checkpoints there: it creates the directory at the first write."""
    trainings = (rank.find(TrainingFacts) for rank in local.members)
    return folder.source == "trainer" or any(one and one.checkpoints == folder.path for one in trainings)


def _unshared_severity(local: LocalRanks) -> Severity:
    whole = any(map(_rank_zero_writes, local.members[:1]))
    return Severity.WARNING if whole else Severity.ERROR


def _rank_zero_writes(rank: Rank) -> bool:
    trainer, training = rank.find(TrainerFacts), rank.find(TrainingFacts)
    if training is not None:
        return _writes_whole(training.strategy)
    return trainer is not None and trainer.strategy in WHOLE


def _finding(
    words: str, severity: Severity, folder: Directory, ranks: tuple[int, ...], hosts: str, place: str
) -> Finding:
    return Finding(
        f"{ROLES[folder.role]} directory {folder.path}{place} {words}",
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
        effect=_effect(words, severity, folder),
        fix=_fix(words, folder, hosts),
    )


_UNSHARED = "is not shared between hosts"


def _effect(words: str, severity: Severity, folder: Directory) -> str:
    if folder.role == "nccl-debug":
        return "NCCL cannot write its log file there."
    return ONLY_OF_RANK_0 if words == _UNSHARED and severity is Severity.WARNING else ""


def _fix(words: str, folder: Directory, hosts: str) -> str:
    path = _quoted(folder.path)
    if words == "is missing":
        return f"Create the directory on {hosts}, or mount its file system there:\nmkdir -p {path}"
    if words.startswith("cannot be created"):
        return f"Ask an administrator to create {path} on {hosts} for the job's user, or use another directory."
    if words == "is not writable":
        return remedy("Permission denied", folder.path, f" on {hosts}")
    if words == "has no free inodes":
        return (
            f"Delete files on the file system of {folder.path} on {hosts} until this command shows free inodes, or use "
            f"another directory:\ndf -i {path}"
        )
    if words.startswith("has less than"):
        return (
            f"Delete files on the file system of {folder.path} on {hosts} until this command shows enough free space, "
            f"or use another directory:\ndf -h {path}"
        )
    if words == _UNSHARED:
        return on_shared_storage(folder.path)
    if words.startswith("is not accessible"):
        return f"Use another directory, or correct this path on {hosts}:\nnamei -l {path}"
    return (
        f"Remount the file system of {folder.path} on {hosts} until this command succeeds there, or use another "
        f"directory:\ntimeout 5 ls {path}"
    )


def _quoted(path: str) -> str:
    """A path for a command: it may come from a log, or from another machine."""
    return shlex.quote(path) if path.isprintable() else "PATH"
