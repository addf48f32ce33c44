"""HOST008: ranks will wait for a lock that no process holds."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from doctor.api import (
    EventGroup,
    Finding,
    Job,
    LocalRanks,
    Rank,
    Scope,
    Severity,
    Unknown,
    Verdict,
    check,
    event_groups,
    finding_from_logs,
    is_older,
    ranks_in_words,
)
from doctor.facts import BuildLock, Event, Frame, ProgressFacts, SoftwareFacts, StorageFacts, TorchBuild
from doctor.testing import Fails, JobBuilder, Passes, healthy, logged, running

ADVISORY_SINCE = "2.14"
"""Since this torch, the file is locked with flock, which ends with its holder. The file remains after every build and
is harmless (torch/utils/cpp_extension.py, _jit_compile; before, torch/utils/file_baton.py)."""

_BATON = "/home/ada/.cache/torch_extensions/py311_cu128/fused_adam/lock"


def _locked(age: float, *, held: bool | None = False, blocking: bool = True) -> JobBuilder:
    lock = BuildLock(_BATON, "torch-extension", age, held=held, blocking=blocking)
    return healthy(hosts=2).put(StorageFacts(locks=(lock,)), hosts=("node1",))


TORCH = "/opt/env/lib/python3.11/site-packages/torch/utils"
WAITS = (
    Frame(f"{TORCH}/file_baton.py", 49, "wait"),
    Frame(f"{TORCH}/cpp_extension.py", 2120, "_jit_compile"),
    Frame("/home/me/train.py", 12, "__init__", user=True),
)
BUILDS = (
    Frame("/usr/lib/python3.11/subprocess.py", 550, "run"),
    Frame(f"{TORCH}/cpp_extension.py", 2575, "_run_ninja_build"),
)


def _in_run(*locks: BuildLock, **stacks: tuple[Frame, ...]) -> JobBuilder:
    """A monitored job of two hosts that is stalled; ``rank2=`` is the stack of rank 2, and all others train."""
    sketch = running(2, 2)
    for name, stack in stacks.items():
        number = int(name.removeprefix("rank"))
        sketch = sketch.alter(ProgressFacts, ranks=(number,), state="stalled", stack=stack, idle=400.0, limit=300.0)
    return sketch.put(StorageFacts(locks=locks), hosts=("node1",))


def _from_logs(job: Job) -> Iterator[Finding]:
    for group in event_groups(job, "lock.waits"):
        path = group.value(*_PATHS)
        gave_up = any("could not be acquired" in event.text or event.value("stack") for event in group.events)
        yield finding_from_logs(
            group,
            _waited(
                path,
                failed=all("could not be acquired" in event.text for event in group.events),
                seconds=_seconds(group),
            ),
            evidence={"path": path} if path else None,
            effect=""
            if gave_up or _seconds(group) >= LONG
            else "None if the process that holds the lock soon releases it.",
            fix=_fix_of_log(path),
            severity=None if gave_up else Severity.WARNING if _seconds(group) >= LONG else Severity.INFO,
            symptoms=gave_up or _seconds(group) >= LONG,
            confidence=0.85 if gave_up else 0.6,
        )
    ended = tuple(event for group in event_groups(job, "python.exception", "python.fatal") for event in group.events)
    waited = tuple(event for event in ended if any(map(_waits_for_lock, event.frames)))
    if waited:
        yield finding_from_logs(
            EventGroup(waited[0].kind, waited),
            f"{_who(waited)} ended while waiting for the lock of an extension build",
            evidence={"frames": [f"{frame.file}:{frame.line} ({frame.function})" for frame in waited[0].frames[:3]]},
            fix=_REMOVE_ALL,
            confidence=0.85,
        )


def _waited(path: str | None, *, failed: bool, seconds: float) -> str:
    if path is None:
        return "A process waited for the lock of an extension build (file_baton.py)"
    if failed:
        return f"A process failed to acquire the lock {_shown(path)}"
    return f"A process waited{f' {_age(seconds)}' if seconds else ''} for the lock {_shown(path)}"


def _shown(path: str) -> str:
    """The path, or its end if it does not fit into a summary."""
    return path if len(path) <= 50 else _tail(path)


def _who(events: tuple[Event, ...]) -> str:
    ranks = tuple(sorted({event.rank for event in events if event.rank is not None}))
    return ranks_in_words(ranks).capitalize() if ranks else "A process"


_REMOVE_ALL = (
    "Remove the lock files while no build is running:\n"
    'find "${TORCH_EXTENSIONS_DIR:-$HOME/.cache/torch_extensions}" -name lock -delete'
)


def _fix_of_log(path: str | None) -> str:
    """A file named ``lock`` is removed by the process that builds; libraries lock other files with flock."""
    if path is None:
        return _REMOVE_ALL
    shown = shlex.quote(path) if path.isprintable() else "PATH"
    if path.endswith("/lock"):
        return f"Remove the lock file while no build is running:\nrm {shown}"
    return f"Find the process that holds the lock, and end it if it hangs:\nfuser -v {shown}"


def _seconds(group: EventGroup) -> float:
    return max((float(value) for name in ("seconds", "seconds2") for value in group.values(name)), default=0.0)


LONG = 300.0
"""Seconds; a build or download holds a lock for minutes."""
_PATHS = ("path", "path2", "path3", "path4", "path5")


def _waits_for_lock(frame: Frame) -> bool:
    """Torch's wait for the process that builds (torch/utils/file_baton.py)."""
    return frame.file.endswith("file_baton.py") and frame.function == "wait"


@check(
    id="HOST008",
    severity=Severity.ERROR,
    scope=Scope.HOST,
    when="PRM",
    needs=(StorageFacts,),
    from_logs=_from_logs,
    impacts={
        r"^Ranks? .* waited": (
            "No process removes the lock, and each rank that waits for it blocks until the collective of the other "
            "ranks times out."
        ),
        r"is stale": "Every rank that needs the extension silently waits for the lock.",
        r"ended while": "The other ranks wait for this rank until their timeout.",
        r"failed to acquire": "The process fails, and the other ranks wait for it until their timeout.",
        r"^A process waited": (
            "The process blocks until the lock is released, and the other ranks wait for it until their timeout."
        ),
    },
    cases=lambda: (
        Passes("no lock", healthy(hosts=2)),
        Passes("a build is going on", _locked(7200.0, held=True)),
        Passes("a build began a minute ago, out of sight", _locked(60.0, held=None)),
        Passes("a lock of Hugging Face's hub, which ends with its holder", _locked(90_000.0, blocking=False)),
        Passes(
            "the holder is on the other host",
            _locked(7200.0).put(
                StorageFacts(locks=(BuildLock(_BATON, "torch-extension", 7200.0, held=True, blocking=True),)),
                hosts=("node0",),
            ),
        ),
        Passes(
            "a torch that waits for no file", _locked(7200.0).alter(SoftwareFacts, torch=TorchBuild("2.14.0+cu130"))
        ),
        Fails("a build was killed two hours ago", _locked(7200.0), ranks=(2, 3)),
        Fails("a lock of last week in a shared home", _locked(600_000.0, held=None), ranks=(2, 3)),
        Passes("ranks of a run wait while one of them builds", _in_run(rank2=BUILDS, rank3=WAITS)),
        Passes(
            "a run waits for a build of another process on the host",
            _in_run(BuildLock(_BATON, "torch-extension", 400.0, held=True, blocking=True), rank2=WAITS, rank3=WAITS),
        ),
        Passes("a run that stands still for another reason", _in_run(rank2=BUILDS[:1])),
        Fails(
            "ranks of a run wait for a lock that no process holds",
            _in_run(BuildLock(_BATON, "torch-extension", 400.0, held=False, blocking=True), rank2=WAITS, rank3=WAITS),
            ranks=(2, 3),
        ),
        Fails("ranks of a run wait for a lock that can't be seen", _in_run(rank3=WAITS), ranks=(3,)),
        Fails(
            "log of a build that never got the lock",
            logged(
                "[rank1]: Traceback (most recent call last):",
                '[rank1]:   File "/opt/conda/lib/python3.10/site-packages/torch/utils/file_baton.py", line 42, in wait',
                "[rank1]:     time.sleep(self.wait_seconds)",
                "[rank1]: KeyboardInterrupt",
            ),
            ranks=(1,),
        ),
        Passes(
            "log of a lock held for a moment",
            logged("Still waiting to acquire lock on /home/me/.cache/huggingface/x.lock (elapsed: 10.1 seconds)"),
            silent=False,
        ),
    ),
)
def build_lock_stale(
    job: Job, *, stale_seconds: float = 1800.0, surely_stale_seconds: float = 86_400.0
) -> Iterator[Verdict]:
    """Ask whether a leftover lock will make ranks wait indefinitely when an extension is built.

    Why it hurts: PyTorch before 2.14 builds extensions under a lock file, and other processes wait until it is removed.
    If a build is killed, nothing removes its lock file: every rank silently waits in file_baton.py until the
    collective times out on the others.
    Fix: Remove the lock file while no build is running, then restart the job.
    """
    # Building an extension takes minutes (large attention kernels up to half an hour), never a day.
    has_stalled = any(progress.state == "stalled" for progress, _ in job.each(ProgressFacts))
    stuck = {local: members for local in job.by_host() if (members := _stuck(local))} if has_stalled else {}
    for local, members in stuck.items():
        yield _stuck_finding(local, members)
    held = {lock.path for local in job.by_host() for lock in _batons(local.find(StorageFacts)) if lock.held}
    stale: dict[str, tuple[BuildLock, list[int]]] = {}
    for local in job.by_host():
        locks = () if local in stuck else tuple(_batons(local.find(StorageFacts)))
        # The ranks whose torch would wait until the file is removed.
        waiting = tuple(rank.number for rank in local.members if _waits(rank)) if locks else ()
        for lock in locks if waiting else ():
            if lock.path in held or lock.age < stale_seconds:
                continue
            if (lock.held is None or job.ungathered) and lock.age < surely_stale_seconds:
                reason = (
                    f"{lock.path} is {_age(lock.age)} old, but it is not visible from here whether a build holds it"
                )
                yield Unknown(reason, waiting, f"fuser -v {lock.path} (as root, on every host that mounts it)")
            else:
                stale.setdefault(lock.path, (lock, []))[1].extend(waiting)
    for lock, ranks in stale.values():
        yield Finding(
            f"Build lock {_tail(lock.path)} is stale: {_age(lock.age)} old"
            + (", held by no process" if lock.held is False else ""),
            ranks=tuple(ranks),
            evidence={"path": lock.path, "kind": lock.kind, "age_seconds": lock.age, "held": lock.held},
            fix=_removal([lock], job.place_of(ranks)),
            confidence=1.0 if lock.held is False else 0.8,
        )


def _tail(path: str) -> str:
    """``…/py311_cu128/fused_adam/lock``: the end of a path, which names the extension."""
    parts = path.rsplit("/", 3)
    return f"…/{'/'.join(parts[1:])}" if len(parts) == 4 and parts[0] else path


def _stuck(local: LocalRanks) -> tuple[Rank, ...]:
    """The ranks of a run that currently wait for such a file, longer than any step so far, while no rank of the host
    and no other visible process builds."""
    waiting = tuple(rank for rank in local.members if _stands_in(rank, "file_baton.py"))
    builders = [rank for rank in local.members if _stands_in(rank, "cpp_extension.py") and rank not in waiting]
    held = any(lock.held for lock in _batons(local.find(StorageFacts)))
    return () if builders or held else waiting


def _stands_in(rank: Rank, file: str) -> bool:
    progress = rank.find(ProgressFacts)
    stack = progress.stack if progress and progress.state == "stalled" else ()
    return any(frame.file.replace("\\", "/").endswith(f"/torch/utils/{file}") for frame in stack)


def _stuck_finding(local: LocalRanks, ranks: tuple[Rank, ...]) -> Finding:
    progress = ranks[0].find(ProgressFacts)
    locks = [lock for lock in _batons(local.find(StorageFacts)) if lock.held is not True]
    frame = next((frame for frame in (progress.stack if progress else ()) if frame.user), None)
    numbers = tuple(rank.number for rank in ranks)
    return Finding(
        f"{ranks_in_words(numbers).capitalize()} on {local.name} {'has' if len(ranks) == 1 else 'have'} waited "
        f"{_age(progress.idle or 0.0 if progress else 0.0)} for a build lock"
        + (
            " that no process holds"
            if any(lock.held is False for lock in locks)
            else ", but no rank builds the extension"
        ),
        ranks=numbers,
        evidence={
            "locks": [{"path": lock.path, "age_seconds": lock.age, "held": lock.held} for lock in locks],
            "idle_seconds": progress.idle if progress else None,
            "called_at": f"{frame.file}:{frame.line}" if frame else None,
        },
        fix=_removal(locks, local.name) if locks else _REMOVE_ALL,
        confidence=1.0 if any(lock.held is False for lock in locks) else 0.8,
        explains=("RUN001", "RUN010", "RUN006"),
    )


def _batons(storage: StorageFacts | None) -> Iterator[BuildLock]:
    """The locks whose existence makes other processes wait; advisory locks end with their holder."""
    return (lock for lock in (storage.locks if storage else ()) if lock.blocking)


def _waits(rank: Rank) -> bool:
    software = rank.find(SoftwareFacts)
    torch = software.torch if software else None
    return software is None or (torch is not None and is_older(torch.version, ADVISORY_SINCE) is not False)


def _age(seconds: float) -> str:
    for unit, size in (("days", 86_400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} seconds"


def _removal(locks: Sequence[BuildLock], place: str) -> str:
    """How to remove them on a host. Other users may have named the folders of a shared cache."""
    files = f"the lock file{'' if len(locks) == 1 else 's'} on {place}"
    if not all(lock.path.isprintable() for lock in locks):
        return f"Remove {files}, whose path contains control characters."
    return f"Remove {files}:\nrm {' '.join(shlex.quote(lock.path) for lock in locks)}"
