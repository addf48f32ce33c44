"""NCCL007: a debug setting slows down or breaks the run."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.analysis.effective_settings import EffectiveSetting, effective_settings, group_by_value
from doctor.analysis.interface_choice import nccl_matters
from doctor.analysis.stats.baseline import expected_value
from doctor.api import Finding, IdenticalRanks, Job, Severity, Verdict, check, ranks_in_words, source_of, split
from doctor.facts import (
    EnvironmentFacts,
    GpuFacts,
    NcclFacts,
    SoftwareFacts,
    StepFacts,
    TorchBuild,
    TrainerFacts,
    TrainingFacts,
)
from doctor.knowledge.releases import within
from doctor.testing import Fails, JobBuilder, Passes, healthy, running

_TORCH_213 = TorchBuild("2.13.0+cpu", backends=("gloo",))


def _in_run(*, strategy: str | None, seen: int = 0, gpus: int | None = 0) -> JobBuilder:
    sketch = running(1, 3, gpus=gpus).environ(TORCH_DISTRIBUTED_DEBUG="DETAIL").alter(SoftwareFacts, torch=_TORCH_213)
    return sketch.alter(TrainingFacts, strategy=strategy).alter(StepFacts, seen=seen)


@check(
    id="NCCL007",
    severity=Severity.INFO,
    needs=(EnvironmentFacts,),
    uses_baseline=True,
    impacts={
        r"caching allocator": "Each tensor allocation calls the CUDA driver, which slows down every step.",
        r"compared across ranks": (
            "All ranks wait for the comparison before each collective, which slows down every step."
        ),
        r"if used, crashes": (
            "If the model uses DistributedDataParallel, every rank crashes with SIGSEGV (exit code -11) in the first "
            "forward pass."
        ),
        r"log line": "The log can grow by gigabytes, and writing it slows down every collective.",
        r"launch is synchronous": (
            "Kernels do not overlap with each other, with copies or with communication, so every step is slower."
        ),
        r"wait\(\) blocks": "The CPU cannot queue further kernels during a collective, so every step is slower.",
    },
    cases=lambda: (
        Passes("nothing set", healthy(2, 2)),
        Passes(
            "logs of a sound size",
            healthy().environ(NCCL_DEBUG="WARN", TORCH_DISTRIBUTED_DEBUG="INFO", CUDA_LAUNCH_BLOCKING="0"),
        ),
        Passes(
            "no DETAIL, and a capture with it",
            healthy(2, 2).expecting(healthy().environ(TORCH_DISTRIBUTED_DEBUG="DETAIL")),
        ),
        Passes("the level of traces, with the default subsystems", healthy().environ(NCCL_DEBUG="TRACE")),
        Passes("calls at a level without traces", healthy().environ(NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="CALL")),
        Fails(
            "every call of NCCL is traced",
            healthy().environ(NCCL_DEBUG="TRACE", NCCL_DEBUG_SUBSYS="CALL"),
            ranks=(0, 1),
        ),
        Fails("all subsystems at INFO", healthy().environ(NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="ALL"), ranks=(0, 1)),
        Fails("DETAIL on all ranks", healthy(2, 2).environ(TORCH_DISTRIBUTED_DEBUG="detail"), ranks=(0, 1, 2, 3)),
        Fails("0 turns caching off too", healthy().environ(PYTORCH_NO_CUDA_MEMORY_CACHING="0"), ranks=(0, 1)),
        Fails("wait() blocks", healthy().environ(TORCH_NCCL_BLOCKING_WAIT="1"), ranks=(0, 1)),
        Fails("every kernel launch waits", healthy().environ(ranks=(1,), CUDA_LAUNCH_BLOCKING="1"), ranks=(1,)),
        Fails(
            "DETAIL on one rank alone",
            healthy(2, 2).environ(ranks=(2,), TORCH_DISTRIBUTED_DEBUG="DETAIL"),
            ranks=(2,),
            severity=Severity.ERROR,
        ),
        Fails(
            "DETAIL on most ranks, and a capture without it",
            healthy(2, 2).environ(ranks=(0, 1, 3), TORCH_DISTRIBUTED_DEBUG="DETAIL").expecting(healthy()),
            ranks=(0, 1, 3),
            severity=Severity.ERROR,
        ),
        Fails(
            "DETAIL breaks DDP over Gloo in torch 2.13",
            healthy(1, 2, gpus=0).environ(TORCH_DISTRIBUTED_DEBUG="DETAIL").alter(SoftwareFacts, torch=_TORCH_213),
            ranks=(0, 1),
            severity=Severity.ERROR,
        ),
        Fails(
            "the same with the CUDA build of torch 2.13 on a machine without GPU",
            healthy(1, 2, gpus=0)
            .environ(TORCH_DISTRIBUTED_DEBUG="DETAIL")
            .alter(SoftwareFacts, torch=TorchBuild("2.13.0", cuda="13.0", backends=("gloo", "nccl"))),
            ranks=(0, 1),
            severity=Severity.ERROR,
        ),
        Fails("a run that is about to crash", _in_run(strategy="ddp"), ranks=(0, 1, 2), severity=Severity.ERROR),
        Fails(
            "a loop that may hold its model in DDP",
            _in_run(strategy=None),
            ranks=(0, 1, 2),
            severity=Severity.WARNING,
        ),
        Fails(
            "a loop that has taken its first steps",
            _in_run(strategy=None, seen=5),
            ranks=(0, 1, 2),
            severity=Severity.INFO,
        ),
        Fails("a run without DDP", _in_run(strategy="fsdp"), ranks=(0, 1, 2), severity=Severity.INFO),
        Fails("a run over NCCL", _in_run(strategy="ddp", gpus=None), ranks=(0, 1, 2), severity=Severity.INFO),
    ),
)
def debug_left_on(job: Job) -> Iterator[Verdict]:
    """Ask whether debug settings that slow down or break the run are still set.

    Why it hurts: kernels run one at a time, every collective is first compared over Gloo, or every call writes a log
    line. The run is many times slower, and on some releases it crashes.
    Fix: Unset NCCL_DEBUG_SUBSYS, TORCH_DISTRIBUTED_DEBUG and CUDA_LAUNCH_BLOCKING, and set NCCL_DEBUG=WARN.
    """
    for stated in effective_settings(job):
        if cost := _cost(stated):
            setting = stated.setting
            yield Finding(
                f"{setting.name}={setting.value}: {cost}",
                ranks=stated.ranks,
                evidence={"from": stated.origin},
                fix=f"Remove {setting.name} from {stated.origin}." if source_of(setting) else f"unset {setting.name}",
                source=source_of(setting),
            )
    for settings, ranks in group_by_value(job, NcclFacts, lambda nccl, _: _logs_every_call(nccl)):
        if settings:
            yield Finding(
                f"{settings}: every collective writes log lines",
                ranks=ranks,
                fix="unset NCCL_DEBUG_SUBSYS\nexport NCCL_DEBUG=WARN",
            )
    yield from _detail(job)


COSTS = {
    "CUDA_LAUNCH_BLOCKING": "every kernel launch is synchronous",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "the caching allocator is disabled",
    "TORCH_NCCL_NAN_CHECK": "every collective first checks its input for NaN",
    "TORCH_NCCL_BLOCKING_WAIT": "wait() blocks the thread until the collective has ended",
}
_BY_PRESENCE = ("PYTORCH_NO_CUDA_MEMORY_CACHING",)
"""Read by whether they are set, whatever the value (c10/cuda/CUDACachingAllocator.cpp, pytorch issue 145661)."""
_WITH_ANY_VALUE = "any value disables the caching allocator"
OFF_VALUES = ("", "0", "n", "no", "f", "false", "off")


def _cost(stated: EffectiveSetting) -> str | None:
    name, value = stated.setting.name, stated.setting.value
    if name in _BY_PRESENCE and value:
        return _WITH_ANY_VALUE if value.strip().lower() in OFF_VALUES else COSTS[name]
    return COSTS.get(name) if value.strip().lower() not in OFF_VALUES else None


_LOUD = {"INFO": {"ALL", "COLL", "PROXY"}, "TRACE": {"ALL", "CALL", "COLL", "PROXY"}}
"""Subsystems that log a line for every collective or transfer, by level. Without NCCL_DEBUG_SUBSYS, NCCL logs INIT,
BOOTSTRAP and ENV at every level, and TRACE_CALL logs only with CALL (src/debug.cc, src/include/debug.h)."""


def is_loud(level: str, subsystems: str) -> bool:
    """Whether every collective writes log lines with these values of NCCL_DEBUG and NCCL_DEBUG_SUBSYS."""
    return not _LOUD.get(level.upper(), set()).isdisjoint(subsystems.upper().split(","))


def _logs_every_call(nccl: NcclFacts) -> str | None:
    level, subsystems = nccl.get("NCCL_DEBUG") or "", nccl.get("NCCL_DEBUG_SUBSYS") or ""
    return f"NCCL_DEBUG={level} with NCCL_DEBUG_SUBSYS={subsystems}" if is_loud(level, subsystems) else None


def _is_detail(environment: EnvironmentFacts) -> bool:
    return (environment.get("TORCH_DISTRIBUTED_DEBUG") or "").strip().upper() == "DETAIL"


def _detail(job: Job) -> Iterator[Finding]:
    if not any(stated.setting.name == "TORCH_DISTRIBUTED_DEBUG" for stated in effective_settings(job)):
        return
    found = split(job, EnvironmentFacts, _is_detail, expected=expected_value(job, EnvironmentFacts, _is_detail))
    # A baseline shows which ranks deviate; if all ranks agree, DETAIL has the same cost with or without a baseline.
    if len(found.groups) > 1:
        detailed = tuple(rank for group in found.groups if group.value for rank in group.ranks)
        yield Finding(
            f"TORCH_DISTRIBUTED_DEBUG=DETAIL is set on {ranks_in_words(detailed, 4)}, but not on the other ranks",
            ranks=found.odd,
            # _create_process_group_wrapper (distributed_c10d.py) connects all ranks of the group over Gloo.
            effect=f"{ranks_in_words(detailed, 4).capitalize()} wait{'' if len(detailed) > 1 else 's'} in "
            "init_process_group() for a Gloo group that the other ranks do not create, until the timeout.",
            fix=f"Unset TORCH_DISTRIBUTED_DEBUG on {ranks_in_words(detailed, 4)}, or set it to DETAIL on all ranks.",
            severity=Severity.ERROR,
        )
        return
    sections = (SoftwareFacts, TrainerFacts, TrainingFacts, StepFacts, GpuFacts)
    for found_as, ranks in group_by_value(
        job,
        EnvironmentFacts,
        lambda environment, identical: (
            (_severity_of_detail(identical), _torch_of(identical)) if _is_detail(environment) else None
        ),
        also=sections,
    ):
        if found_as is not None:
            yield _detail_finding(ranks, *found_as)


def _torch_of(identical: IdenticalRanks) -> str | None:
    software = identical.find(SoftwareFacts)
    return software.torch.version if software and software.torch else None


def _severity_of_detail(identical: IdenticalRanks) -> Severity:
    """In torch 2.13 (observed in 2.13.0), DETAIL makes DistributedDataParallel over Gloo end with a segmentation fault
    in its first forward pass. A run that has completed a step is not affected."""
    software, training, steps = identical.find(SoftwareFacts), identical.find(TrainingFacts), identical.find(StepFacts)
    torch = software.torch if software else None
    if torch is None or not within(torch.version, first="2.13", before="2.14") or _is_over_nccl(identical, training):
        return Severity.INFO
    if training is None:
        return Severity.ERROR
    if steps is not None and steps.seen:
        return Severity.INFO
    if training.strategy is None:
        return Severity.WARNING
    return Severity.ERROR if training.strategy.lower().startswith(_DDP) else Severity.INFO


_DDP = ("ddp", "distributeddataparallel")
"""Prefixes of Lightning's strategies, and the wrapper class, that use DistributedDataParallel."""


def _is_over_nccl(identical: IdenticalRanks, training: TrainingFacts | None) -> bool:
    if training is not None and training.backend in ("nccl", "gloo"):
        return training.backend == "nccl"
    return nccl_matters(identical)


COMPARED = "every collective is first compared across ranks over Gloo"
_CRASHES = "DistributedDataParallel crashes over Gloo in PyTorch 2.13"
_MAY_CRASH = "DistributedDataParallel, if used, crashes in PyTorch 2.13"


def _detail_finding(ranks: tuple[int, ...], severity: Severity, torch: str | None) -> Finding:
    claim = {Severity.ERROR: _CRASHES, Severity.WARNING: _MAY_CRASH}.get(severity, COMPARED)
    crash = "Every rank crashes with SIGSEGV (exit code -11) in the first forward pass."
    return Finding(
        f"TORCH_DISTRIBUTED_DEBUG=DETAIL: {claim}",
        ranks=ranks,
        evidence={"torch": torch},
        effect=crash if severity is Severity.ERROR else "",
        fix="Unset TORCH_DISTRIBUTED_DEBUG, or set it to INFO.",
        severity=severity,
    )
