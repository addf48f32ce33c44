"""NCCL007: a debug setting slows down or breaks the run."""

from __future__ import annotations

import re
from collections.abc import Iterator

from doctor.analysis.effective_settings import EffectiveSetting, effective_settings, group_by_value
from doctor.analysis.interface_choice import nccl_matters
from doctor.analysis.stats.baseline import expected_value
from doctor.api import (
    Finding,
    IdenticalRanks,
    Job,
    LaunchFile,
    Script,
    Severity,
    Verdict,
    Violation,
    check,
    describe,
    rule,
    source_of,
    split,
)
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
from doctor.lint.launch.launch_file import EnvironmentSource
from doctor.lint.launch.process_launches import (
    ProcessLaunch,
    hosts_of,
    processes_of,
    says_processes,
    starts_of,
    visible_devices,
)
from doctor.testing import Fails, JobBuilder, Passes, healthy, running
from doctor.testing.script_cases import fails, passes, shell_fails, shell_passes

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
        r"every tensor allocation": "Each allocation waits for the driver, so every step is many times slower.",
        r"compared over Gloo": (
            "Each collective waits for a comparison of all ranks over Gloo, so every step is many times slower."
        ),
        r"log line": "The log grows by gigabytes, and writing it slows down every collective.",
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
        Fails("every call of NCCL is traced", healthy().environ(NCCL_DEBUG="TRACE"), ranks=(0, 1)),
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
            fix = "export NCCL_DEBUG=WARN" if setting.name == "NCCL_DEBUG" else f"unset {setting.name}"
            yield Finding(
                f"{setting.name}={setting.value}: {cost}",
                ranks=stated.ranks,
                evidence={"name": setting.name, "value": setting.value, "from": stated.origin},
                fix=f"Remove {setting.name} from {stated.origin}." if source_of(setting) else fix,
                source=source_of(setting),
            )
    for subsystems, ranks in group_by_value(job, NcclFacts, lambda nccl, _: _loud_subsystems(nccl)):
        if subsystems:
            yield Finding(
                f"NCCL_DEBUG=INFO with NCCL_DEBUG_SUBSYS={subsystems}: every collective writes log lines",
                ranks=ranks,
                evidence={"NCCL_DEBUG_SUBSYS": subsystems},
                fix="unset NCCL_DEBUG_SUBSYS\nexport NCCL_DEBUG=WARN",
            )
    yield from _detail(job)


_COSTS = {
    "CUDA_LAUNCH_BLOCKING": "every kernel launch is synchronous",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "every tensor allocation calls the CUDA driver",
    "TORCH_NCCL_NAN_CHECK": "every collective first checks its input for NaN",
    "TORCH_NCCL_BLOCKING_WAIT": "wait() blocks the thread until the collective has ended",
}
_BY_PRESENCE = ("PYTORCH_NO_CUDA_MEMORY_CACHING",)
"""Read by whether they are set, whatever the value (c10/cuda/CUDACachingAllocator.cpp, pytorch issue 145661)."""
_TRACED = "every NCCL call writes a log line"
_OFF = ("", "0", "n", "no", "f", "false", "off")


def _cost(stated: EffectiveSetting) -> str | None:
    name, value = stated.setting.name, stated.setting.value
    if name == "NCCL_DEBUG" and value.upper() == "TRACE":
        return _TRACED
    if name in _BY_PRESENCE and value:
        return f"{_COSTS[name]}, whatever the value" if value.strip().lower() in _OFF else _COSTS[name]
    return _COSTS.get(name) if value.strip().lower() not in _OFF else None


_LOUD = {"ALL", "COLL", "CALL", "PROXY"}
"""Subsystems that log a line for every collective or transfer."""


def _loud_subsystems(nccl: NcclFacts) -> str | None:
    level, subsystems = (nccl.get("NCCL_DEBUG") or "").upper(), nccl.get("NCCL_DEBUG_SUBSYS") or ""
    if level != "INFO" or subsystems.startswith("^"):
        return None
    return subsystems if _LOUD.intersection(subsystems.upper().split(",")) else None


def _is_detail(environment: EnvironmentFacts) -> bool:
    return (environment.get("TORCH_DISTRIBUTED_DEBUG") or "").strip().upper() == "DETAIL"


def _detail(job: Job) -> Iterator[Finding]:
    if not any(stated.setting.name == "TORCH_DISTRIBUTED_DEBUG" for stated in effective_settings(job)):
        return
    found = split(job, EnvironmentFacts, _is_detail, expected=expected_value(job, EnvironmentFacts, _is_detail))
    # A baseline shows which ranks deviate; if all ranks agree, DETAIL has the same cost with or without a baseline.
    if len(found.groups) > 1:
        yield Finding(
            "TORCH_DISTRIBUTED_DEBUG=DETAIL is set on some ranks only, which then wait for the others",
            ranks=found.odd,
            evidence={"is_detail": describe(found)},
            effect="The ranks with DETAIL wait in a comparison that the other ranks never join: the run hangs.",
            fix="Unset TORCH_DISTRIBUTED_DEBUG on all ranks, or set it to the same value on all of them.",
            severity=Severity.ERROR,
        )
        return
    sections = (SoftwareFacts, TrainerFacts, TrainingFacts, StepFacts, GpuFacts)
    for severity, ranks in group_by_value(
        job,
        EnvironmentFacts,
        lambda environment, identical: _severity_of_detail(identical) if _is_detail(environment) else None,
        also=sections,
    ):
        if severity is not None:
            yield _detail_finding(ranks, severity)


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


_COMPARED = "every collective is first compared over Gloo"
_CRASHES = "DistributedDataParallel crashes over Gloo in torch 2.13"
_MAY_CRASH = "DistributedDataParallel, if used, crashes in torch 2.13"


def _detail_finding(ranks: tuple[int, ...], severity: Severity) -> Finding:
    claim = {Severity.ERROR: _CRASHES, Severity.WARNING: _MAY_CRASH}.get(severity, _COMPARED)
    crash = "Every rank crashes with SIGSEGV (exit code -11) in the first forward pass."
    return Finding(
        f"TORCH_DISTRIBUTED_DEBUG=DETAIL: {claim}",
        ranks=ranks,
        evidence={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"},
        effect="" if severity is Severity.INFO else crash,
        fix="Unset TORCH_DISTRIBUTED_DEBUG, or set it to INFO.",
        severity=severity,
    )


_LEVELS = {("NCCL_DEBUG", "TRACE"): _TRACED, ("TORCH_DISTRIBUTED_DEBUG", "DETAIL"): _COMPARED}

_RANKS = re.compile(
    r"rank|world_?size|distributed|ddp\b|nccl|torchrun|accelerat|deepspeed|lightning|fabric|horovod|trainer|\bspawn\b|"
    r"data_?parallel|device_count|\bfit\(|backward|main\(",
    re.IGNORECASE,
)
"""Words of scripts that may be for several ranks, or leave that to another module."""
_ONE_PROCESS = """\
import os
import kernels
os.environ["CUDA_LAUNCH_BLOCKING"] = "1"
print(kernels.time_matmul(4096))
"""
_DETERMINISTIC = """\
def repeatable():
    os.environ["CUDA_LAUNCH_BLOCKING"] = "1"
    torch.use_deterministic_algorithms(True)

repeatable()
Trainer(devices=4).fit(model)
"""


def _is_one_process(file: EnvironmentSource) -> bool:
    """Whether the file runs one process, or is a script that mentions neither ranks nor training."""
    if isinstance(file, Script):
        return _RANKS.search(file.text) is None
    starts = list(starts_of(file)) if isinstance(file, LaunchFile) else []
    return bool(starts) and all(_is_alone(file, one) for one in starts)


def _is_alone(file: EnvironmentSource, start: ProcessLaunch) -> bool:
    """Whether a command starts one process on one GPU, one rank, or a script of the project without a group."""
    launch = start.launch
    if launch.is_agent:
        one = says_processes(launch) and start.outer is None and processes_of(launch) == 1 and hosts_of(launch) == 1
    else:
        one = launch.program == "python" and (visible_devices(launch) or ("", 0))[1] == 1
    modules = file.modules if isinstance(file, LaunchFile) else None
    return one or (modules is not None and launch.script.endswith(".py") and modules.runs_alone(launch.script))


_OTHER_DEVICES = re.compile(r"^(?:HCCL_|ASCEND_|HABANA_|NEURON_|XLA_)")
"""Variables of accelerators that read neither the variables of CUDA nor those of NCCL."""


def _is_for_determinism(file: EnvironmentSource, line: int) -> bool:
    """Whether a function sets a variable where it turns on PyTorch's switch for deterministic algorithms."""
    if not isinstance(file, Script):
        return False
    switches = file.calls("torch.use_deterministic_algorithms")
    functions = [file.function_of(one) for one in switches]
    return any(one is not None and one.lineno <= line <= (one.end_lineno or line) for one in functions)


@rule(
    check=debug_left_on,
    reads=EnvironmentSource,
    state="preview",
    cases=lambda: (
        fails("in a script", 'os.putenv("CUDA_LAUNCH_BLOCKING", "1")  # !\nTrainer().fit(model)\n'),
        passes("in a script, on demand", 'if args.debug:\n    os.environ["CUDA_LAUNCH_BLOCKING"] = "1"\n'),
        passes("a script of one process", _ONE_PROCESS),
        shell_passes(
            "one process on one GPU",
            "export CUDA_VISIBLE_DEVICES=0",
            "export CUDA_LAUNCH_BLOCKING=1",
            "python serve.py",
        ),
        passes("for deterministic results", _DETERMINISTIC),
        shell_passes("one rank", "export CUDA_LAUNCH_BLOCKING=1", "torchrun --nproc-per-node=1 train.py"),
        shell_passes(
            "devices of another kind",
            "export HCCL_CONNECT_TIMEOUT=1800 CUDA_LAUNCH_BLOCKING=1",
            "torchrun --nproc-per-node=8 train.py",
        ),
        shell_fails("launches wait", "export CUDA_LAUNCH_BLOCKING=1  # !", "torchrun train.py"),
        shell_fails("all is compared", "TORCH_DISTRIBUTED_DEBUG=DETAIL torchrun train.py  # !"),
        shell_fails("all is logged", "export NCCL_DEBUG=TRACE  # !", "srun python train.py"),
        shell_passes("a quiet level", "export NCCL_DEBUG=WARN TORCH_DISTRIBUTED_DEBUG=INFO", "torchrun x.py"),
        shell_passes("off", "export CUDA_LAUNCH_BLOCKING=0", "torchrun train.py"),
        shell_passes("on demand", "if [ $DEBUG ]; then", "  export CUDA_LAUNCH_BLOCKING=1", "fi", "torchrun x.py"),
    ),
)
def debug_left_on_in_files(file: EnvironmentSource) -> Iterator[Violation]:
    """Ask whether a launch file sets debug variables that slow down the run.

    Why it hurts: every kernel launch or collective waits or writes a log line. The run is many times slower, and on
    some releases it crashes.
    Fix: Remove CUDA_LAUNCH_BLOCKING and TORCH_DISTRIBUTED_DEBUG, and set NCCL_DEBUG=WARN.
    """
    if _is_one_process(file) or any(_OTHER_DEVICES.match(one.name) for one in file.settings):
        return
    for setting in file.settings:
        if _is_for_determinism(file, setting.place.line):
            continue
        if not setting.is_exported or not setting.is_certain or setting.known_value is None:
            continue
        value = setting.known_value.strip()
        cost = _COSTS.get(setting.name) if value.lower() not in _OFF else None
        cost = cost or _LEVELS.get((setting.name, value.upper()))
        if cost:
            fix = "Set NCCL_DEBUG=WARN." if setting.name == "NCCL_DEBUG" else f"Remove {setting.name}."
            yield Violation(
                setting.place, f"{setting.name}={value}: {cost}", fix=fix, evidence=((setting.name, value),)
            )
