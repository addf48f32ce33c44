"""NCCL011: a hang would leave no evidence."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from doctor.analysis.visible_devices import uses_nccl
from doctor.api import Finding, Job, Rank, Severity, Verdict, check, merge
from doctor.core.text import HERE
from doctor.facts import (
    Directory,
    EnvironmentFacts,
    LaunchFacts,
    SoftwareFacts,
    StorageFacts,
    TorchBuild,
    TrainerFacts,
    TrainingFacts,
)
from doctor.knowledge.environment_variables import known as known_variable
from doctor.knowledge.launcher_index import BY_NAME
from doctor.knowledge.releases import is_older, within
from doctor.knowledge.variable_values import effective as effective_value
from doctor.testing import Fails, Passes, healthy

_NEW_TORCH = TorchBuild("2.13.0", cuda="13.0", nccl="2.29.7", backends=("gloo", "nccl"))
_RECORDED = {"TORCH_NCCL_TRACE_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
_AS_TORCHRUN_SETS = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}


def _dumps_to(*, exists: bool = True, writable: bool | None = True) -> StorageFacts:
    variable = "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"
    folder = Directory("/shared/dumps", "flight-recorder", variable, exists=exists, writable=writable)
    return StorageFacts(directories=(folder,))


@check(
    id="NCCL011",
    severity=Severity.WARNING,
    needs=(EnvironmentFacts,),
    impacts={
        r"indefinitely": (
            "A failed or blocked collective never times out: the job occupies its hosts until the scheduler ends it."
        ),
        r"heartbeat monitor": (
            "After a failed or blocked collective, the job occupies its hosts for TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC "
            "more (8 minutes by default), and no rank raises an exception that names the collective."
        ),
        r"wait\(\) raises": (
            "After a timeout, the traceback shows where a rank was blocked, but not which rank did not reach the "
            "collective."
        ),
        r"may end the process": (
            "After a timeout, the dumps of some ranks may be missing, so the rank that did not reach the collective "
            "cannot be identified."
        ),
        r"no dump|cannot be written|does not write": (
            "If a collective times out, no dump shows which rank did not reach it."
        ),
        r"flight recorder is off|turns off the flight recorder": (
            "If a collective times out, no record shows which rank did not reach it."
        ),
    },
    cases=lambda: (
        Passes("no GPU and nothing set", healthy(1, 1, gpus=0)),
        Passes("several processes without NCCL", healthy(2, 2, gpus=0)),
        Passes("torch records by itself", healthy(2, 2).alter(SoftwareFacts, torch=_NEW_TORCH)),
        Passes(
            "recorded and dumped to a folder that can be written",
            healthy(2, 2).environ(ranks=None, **_RECORDED).put(_dumps_to()),
        ),
        Passes("old defaults are no fault of the user", healthy(2, 2), silent=False),
        Passes(
            "the mode that torchrun sets",
            healthy(2, 2).alter(SoftwareFacts, torch=_NEW_TORCH).environ(ranks=None, **_AS_TORCHRUN_SETS),
            silent=False,
        ),
        Fails("no recorder before torch 2.11", healthy(2, 2), ranks=(0, 1, 2, 3), severity=Severity.INFO),
        Fails(
            "the mode that torchrun sets, before torch 2.7",
            healthy(2, 2)
            .alter(SoftwareFacts, torch=TorchBuild("2.6.0", cuda="12.4"))
            .environ(ranks=None, **_RECORDED, **_AS_TORCHRUN_SETS),
            ranks=(0, 1, 2, 3),
            severity=Severity.INFO,
        ),
        Fails(
            "the same mode set by hand",
            healthy(1, 1, gpus=0)
            .alter(SoftwareFacts, torch=TorchBuild("2.6.0", cuda="12.4"))
            .environ(ranks=None, **_RECORDED, **_AS_TORCHRUN_SETS),
            ranks=(0,),
        ),
        Fails(
            "the recorder is turned off",
            healthy(2, 2).alter(SoftwareFacts, torch=_NEW_TORCH).environ(ranks=(1,), TORCH_FR_BUFFER_SIZE="0"),
            ranks=(1,),
        ),
        Fails(
            "no dump on time-out",
            healthy(2, 2).environ(TORCH_NCCL_TRACE_BUFFER_SIZE="2000", TORCH_NCCL_DUMP_ON_TIMEOUT="0"),
            ranks=(0, 1, 2, 3),
        ),
        Fails(
            "errors are not handled",
            healthy(1, 1, gpus=0)
            .alter(SoftwareFacts, torch=TorchBuild("2.6.0", cuda="12.4"))
            .environ(TORCH_NCCL_ASYNC_ERROR_HANDLING="0"),
            ranks=(0,),
        ),
        Fails(
            "errors are not handled, with a release of torch that is not known",
            healthy(1, 1, gpus=0).alter(SoftwareFacts, torch=None).environ(TORCH_NCCL_ASYNC_ERROR_HANDLING="0"),
            ranks=(0,),
        ),
        Fails(
            "errors are not handled, but the heartbeat monitor ends the job after the dump",
            healthy(1, 1, gpus=0).alter(SoftwareFacts, torch=_NEW_TORCH).environ(TORCH_NCCL_ASYNC_ERROR_HANDLING="0"),
            ranks=(0,),
            severity=Severity.INFO,
        ),
        Fails(
            "errors are not handled, and the heartbeat monitor ends nothing",
            healthy(1, 1, gpus=0)
            .alter(SoftwareFacts, torch=_NEW_TORCH)
            .environ(TORCH_NCCL_ASYNC_ERROR_HANDLING="0", TORCH_NCCL_ENABLE_MONITORING="0"),
            ranks=(0,),
        ),
        Fails(
            "wait() raises in place of a dump, in the old spelling",
            healthy(1, 1, gpus=0).environ(NCCL_BLOCKING_WAIT="1"),
            ranks=(0,),
            severity=Severity.INFO,
        ),
        Fails(
            "a mode that aborts first, with a release of torch that is not known",
            healthy(1, 1, gpus=0).alter(SoftwareFacts, torch=None).environ(TORCH_NCCL_ASYNC_ERROR_HANDLING="1"),
            ranks=(0,),
            severity=Severity.INFO,
        ),
        Fails(
            "the folder is missing on one host",
            healthy(2, 2)
            .environ(ranks=None, **_RECORDED, TORCH_NCCL_DEBUG_INFO_TEMP_FILE="/shared/dumps/rank_")
            .put(_dumps_to())
            .put(_dumps_to(exists=False, writable=None), hosts=("node1",)),
            ranks=(2, 3),
        ),
        Fails(
            "the folder can't be written",
            healthy(2, 2).environ(ranks=None, **_RECORDED).put(_dumps_to(writable=False)),
            ranks=(0, 1, 2, 3),
        ),
    ),
)
def hang_undebuggable(job: Job) -> Iterator[Verdict]:
    """Ask whether a hang would leave evidence: a flight-recorder dump of every rank.

    Why it hurts: the run ends at the timeout or never, and nothing shows which rank did not reach which collective.
    Fix: Set TORCH_NCCL_TRACE_BUFFER_SIZE=2000, TORCH_NCCL_DUMP_ON_TIMEOUT=1 and TORCH_NCCL_DEBUG_INFO_TEMP_FILE (a
    path prefix on shared storage) on all ranks.
    """
    yield from merge(_findings(job), job.place_of)


class _Gap(msgspec.Struct, frozen=True):
    """Why evidence would be missing. ``is_default``: not set by the user; ``is_likely``: known to happen in this
    release; ``is_silent``: no error message names the collective either.
    """

    why: str
    fix: str
    is_default: bool = False
    is_likely: bool = True
    is_silent: bool = True
    evidence: dict[str, object] = {}


def _findings(job: Job) -> Iterator[Finding]:
    elsewhere: dict[str, list[str]] = {}
    for known, identical in job.each(StorageFacts):
        for folder in _dump_folders(known):
            if folder.exists:
                elsewhere.setdefault(folder.path, []).extend(job.hosts_of(identical.ranks))
    also = (SoftwareFacts, StorageFacts, TrainerFacts, TrainingFacts)
    for environment, identical in job.each(EnvironmentFacts, also=also):
        software, storage = identical.find(SoftwareFacts), identical.find(StorageFacts)
        torch = software.torch if software else None
        version = torch.version if torch else None
        over_nccl = torch is not None and bool(torch.cuda) and uses_nccl(identical)
        for (launcher, together), ranks in _by_launch(identical.members).items():
            talks = together and over_nccl
            for gap in (*_gaps(environment, version, launcher), *_folders(storage, environment, elsewhere)):
                if talks or not gap.is_default:
                    yield Finding(
                        gap.why[:1].upper() + gap.why[1:] if gap.why.startswith("the ") else gap.why,
                        ranks=tuple(ranks),
                        evidence={"torch": version, **gap.evidence},
                        fix=gap.fix,
                        severity=None if gap.is_silent and gap.is_likely and not gap.is_default else Severity.INFO,
                        confidence=1.0 if gap.is_likely else 0.5,
                    )


def _by_launch(members: Iterable[Rank]) -> dict[tuple[str | None, bool], list[int]]:
    groups: dict[tuple[str | None, bool], list[int]] = {}
    for rank in members:
        launch = rank.find(LaunchFacts)
        together = bool(launch and launch.running_together and (launch.world_size or 1) > 1)
        groups.setdefault((launch.launcher if launch else None, together), []).append(rank.number)
    return groups


def _value(environment: EnvironmentFacts, *names: str) -> tuple[str, str] | None:
    for name in names:
        value = environment.get(name)
        if value is not None:
            return name, effective_value(name, value) or value
    return None


def _gaps(environment: EnvironmentFacts, torch: str | None, launcher: str | None) -> Iterator[_Gap]:
    # FlightRecorder.hpp: 2,000 entries by default from torch 2.11 on, none before.
    size = _value(environment, "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
    off_by_default = within(torch or "", before="2.11")
    fix = f"export {size[0] if size else 'TORCH_NCCL_TRACE_BUFFER_SIZE'}=2000"
    if size is not None and size[1].strip() == "0":
        yield _Gap(f"{size[0]}=0 turns off the flight recorder", fix, is_default=off_by_default)
    elif size is None and off_by_default:
        yield _Gap(f"the flight recorder is off by default in PyTorch {torch}", fix, is_default=True)
    yield from _dump(environment, torch)
    blocking = _value(environment, "TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")
    if blocking and blocking[1] == "1":
        why = f"{blocking[0]}=1: wait() raises at the timeout, and no rank writes a dump"
        yield _Gap(why, f"unset {blocking[0]}", is_silent=False)
    yield from _error_handling(environment, torch, launcher)


_DUMPS = ("TORCH_FR_DUMP_ON_TIMEOUT", "TORCH_NCCL_DUMP_ON_TIMEOUT")
NO_DUMP = "no dump is written on timeout"
_UNNOTICED = "the job hangs indefinitely if a collective fails"
_ABORTED_LATE = "only the heartbeat monitor aborts the job if a collective fails"
_MAY_BE_ABORTED = "a failed collective blocks the job, indefinitely before torch 2.7"
_ENDED_BY_MONITOR = "2.7"
"""The first torch that writes a dump on timeout by default, after which the heartbeat monitor aborts the process
(ProcessGroupNCCL.cpp: ``shouldDump_`` ends the loop of the monitor, then ``terminateProcess``)."""


def unhandled(torch: str | None, *, oldest: str = "", is_monitored: bool = True) -> tuple[str, bool]:
    """What follows from asynchronous errors that are not handled, and whether evidence remains. ``torch``: the newest
    release that may run, or ``None``; ``oldest``: the oldest one; ``is_monitored``: whether the heartbeat monitor and
    its dump are left on."""
    if not is_monitored or is_older(torch or "", _ENDED_BY_MONITOR) is True:
        return _UNNOTICED, False
    is_new = within(oldest or torch or "", first=_ENDED_BY_MONITOR)
    return (_ABORTED_LATE, True) if is_new else (_MAY_BE_ABORTED, False)


def _dump(environment: EnvironmentFacts, torch: str | None) -> Iterator[_Gap]:
    """ProcessGroupNCCL.hpp: on by default from torch 2.7 on."""
    dump = _value(environment, *_DUMPS)
    off_by_default = within(torch or "", before="2.7")
    fix = f"export {dump[0] if dump else 'TORCH_NCCL_DUMP_ON_TIMEOUT'}=1"
    if dump is not None and dump[1] == "0":
        yield _Gap(f"{dump[0]}=0: {NO_DUMP}", fix, is_default=off_by_default)
    elif dump is None and off_by_default:
        yield _Gap(f"PyTorch {torch} does not write a dump on timeout by default", fix, is_default=True)


def _error_handling(environment: EnvironmentFacts, torch: str | None, launcher: str | None) -> Iterator[_Gap]:
    """PyTorch's default mode is 3. torchrun and Ray export 1 to their workers, which aborts the communicator first;
    since torch 2.7, the dump is written before that."""
    mode = _value(environment, "TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING")
    if mode is None:
        return
    name, value = mode[0], mode[1].strip()
    if value == "0":
        switches = (_DUMPS, ("TORCH_NCCL_ENABLE_MONITORING",))
        given = [found[1] for names in switches if (found := _value(environment, *names)) is not None]
        why, leaves_evidence = unhandled(torch, is_monitored="0" not in given)
        yield _Gap(f"{name}=0: {why}", f"export {name}=3", is_silent=not leaves_evidence)
    elif value in ("1", "2") and _has_recorder(torch):
        row = BY_NAME.get(launcher or "")
        by_launcher = row is not None and f"{name}={value}" in row.exports
        why = f"{name}={value} may end the process before its flight recorder is dumped"
        known_to = torch is not None and within(torch, before="2.7")
        yield _Gap(why, f"export {name}=3", is_default=by_launcher, is_likely=known_to)


def _has_recorder(torch: str | None) -> bool:
    """Whether this torch can write dumps: releases before that recommend NCCL_ASYNC_ERROR_HANDLING=1."""
    info = known_variable("TORCH_NCCL_DUMP_ON_TIMEOUT")
    return torch is None or info is None or info.first is None or not within(torch, before=info.first)


_IF_ELSEWHERE = f"Check on {HERE} that the file system of {{folder}} is mounted, and create the directory:"


def _dump_folders(storage: StorageFacts | None) -> Iterator[Directory]:
    return (one for one in storage.directories if one.role == "flight-recorder") if storage else iter(())


def _folders(
    storage: StorageFacts | None, environment: EnvironmentFacts, elsewhere: Mapping[str, Sequence[str]]
) -> Iterator[_Gap]:
    """``elsewhere``: hosts on which a folder exists, by its path."""
    for folder in _dump_folders(storage):
        value = environment.get(folder.source)
        evidence: dict[str, object] = {folder.source: value} if value else {}
        if folder.exists is False:
            others = list(dict.fromkeys(elsewhere.get(folder.path, ())))
            command = f"mkdir -p {shlex.quote(folder.path)}"
            yield _Gap(
                f"{folder.path} ({folder.source}) does not exist on {HERE}: no dumps",
                f"{_IF_ELSEWHERE.format(folder=folder.path)}\n{command}" if others else command,
                evidence=evidence | {"exists_on": others[:4]},
            )
        elif folder.writable is False:
            yield _Gap(
                f"{folder.path} ({folder.source}) is not writable on {HERE}: no dumps",
                f"Make {folder.path} writable on {HERE}, or set {folder.source} to a path in a writable directory.",
                evidence=evidence,
            )
