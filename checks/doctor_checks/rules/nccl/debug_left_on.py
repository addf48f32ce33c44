"""NCCL007 in launch files: a debug setting slows down or breaks the run."""

from __future__ import annotations

import re
from collections.abc import Iterator

from doctor.api import LaunchFile, Script, Violation, rule
from doctor.lint.launch.launch_file import EnvironmentSource
from doctor.lint.launch.process_launches import (
    ProcessLaunch,
    hosts_of,
    processes_of,
    says_processes,
    starts_of,
    visible_devices,
)
from doctor.testing.script_cases import fails, passes, shell_fails, shell_passes
from doctor_checks.nccl.debug_left_on import COMPARED, COSTS, OFF_VALUES, debug_left_on, is_loud

_LEVELS = {("TORCH_DISTRIBUTED_DEBUG", "DETAIL"): COMPARED}

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
        shell_fails(
            "all is logged", "export NCCL_DEBUG_SUBSYS=ALL", "export NCCL_DEBUG=TRACE  # !", "srun python x.py"
        ),
        shell_passes("the subsystems that are logged by default", "export NCCL_DEBUG=TRACE", "srun python train.py"),
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
    subsystems = [one.known_value or "" for one in file.settings if one.name == "NCCL_DEBUG_SUBSYS" and one.is_exported]
    for setting in file.settings:
        if _is_for_determinism(file, setting.place.line):
            continue
        if not setting.is_exported or not setting.is_certain or setting.known_value is None:
            continue
        value = setting.known_value.strip()
        cost = COSTS.get(setting.name) if value.lower() not in OFF_VALUES else None
        cost = cost or _LEVELS.get((setting.name, value.upper()))
        if cost:
            yield Violation(setting.place, f"{setting.name}={value}: {cost}", fix=f"Remove {setting.name}.")
        if (setting.name, value.upper()) == ("NCCL_DEBUG", "TRACE"):
            for loud in [one for one in subsystems if is_loud(value, one)][:1]:
                summary = f"NCCL_DEBUG={value} with NCCL_DEBUG_SUBSYS={loud}: every collective writes log lines"
                yield Violation(setting.place, summary, fix="Set NCCL_DEBUG=WARN.")
