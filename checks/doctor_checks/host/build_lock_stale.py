"""HOST008: ranks will wait on a lock that nobody holds."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.api import (
    BuildLock,
    Finding,
    Job,
    LocalRanks,
    Rank,
    Scope,
    Severity,
    Sick,
    Sketch,
    SoftwareFacts,
    StorageFacts,
    TorchBuild,
    Unknown,
    Verdict,
    Well,
    check,
    healthy,
    is_older,
)

ADVISORY_SINCE = "2.14"
"""From this torch on the file is locked with flock, which ends with its holder; it stays behind after every build and
means nothing (torch/utils/cpp_extension.py, _jit_compile; before, torch/utils/file_baton.py)."""

_BATON = "/home/ada/.cache/torch_extensions/py311_cu128/fused_adam/lock"


def _locked(age: float, *, held: bool | None = False, blocking: bool = True) -> Sketch:
    lock = BuildLock(_BATON, "torch-extension", age, held=held, blocking=blocking)
    return healthy(hosts=2).put(StorageFacts(locks=(lock,)), hosts=("node1",))


@check(
    id="HOST008",
    severity=Severity.ERROR,
    scope=Scope.HOST,
    when="PRM",
    needs=(StorageFacts,),
    cases=lambda: (
        Well("no lock", healthy(hosts=2)),
        Well("a build is going on", _locked(7200.0, held=True)),
        Well("a build began a minute ago, out of sight", _locked(60.0, held=None)),
        Well("a lock of Hugging Face's hub, which ends with its holder", _locked(90_000.0, blocking=False)),
        Well(
            "the holder is on the other host",
            _locked(7200.0).put(
                StorageFacts(locks=(BuildLock(_BATON, "torch-extension", 7200.0, held=True, blocking=True),)),
                hosts=("node0",),
            ),
        ),
        Well("a torch that waits for no file", _locked(7200.0).alter(SoftwareFacts, torch=TorchBuild("2.14.0+cu130"))),
        Sick("a build was killed two hours ago", _locked(7200.0), ranks=(2, 3)),
        Sick("a lock of last week in a shared home", _locked(600_000.0, held=None), ranks=(2, 3)),
    ),
)
def build_lock_stale(
    job: Job, *, stale_seconds: float = 1800.0, surely_stale_seconds: float = 86_400.0
) -> Iterator[Verdict]:
    """Ask whether a left-over lock will make ranks wait for ever when an extension is built.

    Why it hurts: torch before 2.14 builds extensions under a lock file, and whoever comes later waits until it is gone.
    One that a killed build left behind is never removed: every rank sleeps in file_baton.py, silently, until the
    collective's time-out kills the others.
    Fix: remove the lock file when no build is running (the path is in the evidence), then start again.
    """
    # Building an extension takes minutes (large attention kernels up to half an hour); nothing builds for a day.
    held = {lock.path for local in job.by_host() for lock in _batons(local.find(StorageFacts)) if lock.held}
    stale: dict[str, tuple[BuildLock, list[int]]] = {}
    for local in job.by_host():
        waiting = _waiting(local)
        for lock in _batons(local.find(StorageFacts)) if waiting else ():
            if lock.path in held or lock.age < stale_seconds:
                continue
            if lock.held is None and lock.age < surely_stale_seconds:
                reason = f"{lock.path} is {_age(lock.age)} old, and whether a build holds it can't be seen from here"
                yield Unknown(reason, waiting, f"fuser -v {lock.path} (as root, on every host that mounts it)")
            else:
                stale.setdefault(lock.path, (lock, []))[1].extend(waiting)
    for lock, ranks in stale.values():
        yield _finding(lock, tuple(ranks))


def _batons(storage: StorageFacts | None) -> Iterator[BuildLock]:
    """The locks whose mere existence makes others wait; advisory locks end with their holder."""
    return (lock for lock in (storage.locks if storage else ()) if lock.blocking)


def _waiting(local: LocalRanks) -> tuple[int, ...]:
    """The ranks whose torch would wait for the file to be gone."""
    return tuple(rank.number for rank in local.members if _waits(rank))


def _waits(rank: Rank) -> bool:
    software = rank.find(SoftwareFacts)
    if software is None:
        return True
    return software.torch is not None and is_older(software.torch.version, ADVISORY_SINCE) is not False


def _finding(lock: BuildLock, ranks: tuple[int, ...]) -> Finding:
    return Finding(
        f"{lock.path} is {_age(lock.age)} old and "
        + ("nobody holds it" if lock.held is False else "no build lasts so long"),
        ranks=ranks,
        evidence={"path": lock.path, "kind": lock.kind, "age_seconds": lock.age, "held": lock.held},
        fix=f"rm {lock.path}",
        confidence=1.0 if lock.held is False else 0.8,
    )


def _age(seconds: float) -> str:
    for unit, size in (("days", 86_400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} seconds"
