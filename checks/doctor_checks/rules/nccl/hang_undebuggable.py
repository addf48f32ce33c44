"""NCCL011 in launch files: a hang would leave no evidence."""

from __future__ import annotations

import re
from collections.abc import Iterator

from doctor.api import FileFails, FilePasses, Script, Severity, Violation, is_older, rule
from doctor.knowledge.variable_values import effective as effective_value
from doctor.lint.launch.launch_file import EnvironmentSource, LaunchFile
from doctor.lint.launch.process_launches import joins_no_group
from doctor.lint.python.project.starts.other_accelerators import uses_no_nccl
from doctor.testing.script_cases import fails, passes, shell_fails, shell_passes
from doctor_checks.nccl.hang_undebuggable import NO_DUMP, hang_undebuggable, unhandled

_OFF = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": ("0", ""),
    "NCCL_ASYNC_ERROR_HANDLING": ("0", ""),
    "TORCH_NCCL_BLOCKING_WAIT": ("1", "wait() raises at the timeout, and no rank writes a dump"),
    "NCCL_BLOCKING_WAIT": ("1", "wait() raises at the timeout, and no rank writes a dump"),
    "TORCH_NCCL_DUMP_ON_TIMEOUT": ("0", NO_DUMP),
    "TORCH_NCCL_TRACE_BUFFER_SIZE": ("0", "the flight recorder is off"),
    "TORCH_FR_BUFFER_SIZE": ("0", "the flight recorder is off"),
}


_CAPTURE = re.compile(r"\bcuda\.graph\(|\bCUDAGraph\(|\bmake_graphed_callables\(")
_CAPTURES = (
    *("torch.cuda.graph", "torch.cuda.graphs.graph", "torch.cuda.CUDAGraph", "torch.cuda.graphs.CUDAGraph"),
    *("torch.cuda.make_graphed_callables", "torch.cuda.graphs.make_graphed_callables"),
)
"""To capture DDP's backward pass, PyTorch requires that asynchronous error handling is off (docs, CUDA semantics, on
the usage of graphs with DistributedDataParallel)."""
_WORDS_OF_CAPTURES = ("cuda.graph", "CUDAGraph", "make_graphed_callables")
_MONITORS = ("TORCH_NCCL_ENABLE_MONITORING", "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_FR_DUMP_ON_TIMEOUT")
_FIXES = {
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "Set TORCH_NCCL_DUMP_ON_TIMEOUT to 1.",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "Set TORCH_NCCL_TRACE_BUFFER_SIZE to 2000.",
    "TORCH_FR_BUFFER_SIZE": "Set TORCH_FR_BUFFER_SIZE to 2000.",
}
_RECORDS = "2.2"
"""The first torch with a flight recorder (ProcessGroupNCCL.cpp of v2.2.0: TORCH_NCCL_TRACE_BUFFER_SIZE)."""
_RECORDS_BY_DEFAULT = "2.11"
"""FlightRecorder.hpp: 2,000 entries by default, none in earlier releases unless a variable asks for them."""
_BUFFERS = ("TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_FR_BUFFER_SIZE")
_CAPTURED = """\
os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
dist.init_process_group("nccl")
step = torch.cuda.CUDAGraph()
with torch.cuda.graph(step):
    model(fixed).sum().backward()
"""
_NO_DUMP_TOO = ('"0"\n', '"0"\nos.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "0"  # !\n')


@rule(
    check=hang_undebuggable,
    reads=EnvironmentSource,
    cases=lambda: (
        fails("in a script", 'os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] = str(0)  # !\n'),
        passes("a CUDA graph of a whole backward pass", _CAPTURED),
        fails("a dump is no matter of CUDA graphs", _CAPTURED.replace(*_NO_DUMP_TOO)),
        shell_fails("errors are not handled", "export TORCH_NCCL_ASYNC_ERROR_HANDLING=0  # !", "torchrun train.py"),
        shell_fails("wait() blocks", "TORCH_NCCL_BLOCKING_WAIT=1 torchrun train.py  # !"),
        shell_fails("no dump", "export TORCH_NCCL_DUMP_ON_TIMEOUT=0  # !", "srun python train.py"),
        shell_passes(
            "recorded and dumped",
            "export TORCH_NCCL_TRACE_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1",
            "torchrun train.py",
        ),
        shell_passes("as torchrun sets it", "export TORCH_NCCL_ASYNC_ERROR_HANDLING=1", "torchrun x.py"),
        FileFails(
            "errors are not handled, in a torch whose heartbeat monitor ends the job, as an info",
            "export TORCH_NCCL_ASYNC_ERROR_HANDLING=0  # !\ntorchrun train.py\n",
            name="job.sbatch",
            releases=(("torch", "2.9"),),
        ),
        FilePasses(
            "wait() blocks in a torch without a flight recorder",
            "NCCL_BLOCKING_WAIT=1 torchrun train.py\n",
            name="job.sbatch",
            releases=(("torch", "1.12"),),
        ),
        FilePasses(
            "wait() blocks in a torch whose flight recorder is off by default",
            "export NCCL_BLOCKING_WAIT=1\ntorchrun train.py\n",
            name="job.sbatch",
            releases=(("torch", "2.2"),),
        ),
        FileFails(
            "wait() blocks in such a torch, and the flight recorder is on",
            "export TORCH_NCCL_TRACE_BUFFER_SIZE=2000\nNCCL_BLOCKING_WAIT=1 torchrun train.py  # !\n",
            name="job.sbatch",
            releases=(("torch", "2.2"),),
        ),
        FileFails(
            "wait() blocks in a torch whose flight recorder is on",
            "NCCL_BLOCKING_WAIT=1 torchrun train.py  # !\n",
            name="job.sbatch",
            releases=(("torch", "2.11"),),
        ),
        shell_passes("from outside", "export TORCH_NCCL_BLOCKING_WAIT=$WAIT", "torchrun train.py"),
    ),
)
def hang_undebuggable_in_files(file: EnvironmentSource) -> Iterator[Violation]:
    """Ask whether a launch file keeps the evidence of a hang: a flight-recorder dump of every rank.

    Fix: Remove the variable.
    """
    if uses_no_nccl(file) or (isinstance(file, LaunchFile) and joins_no_group(file)):
        return
    captures = _captures(file)
    asks = any(one.name in _BUFFERS and one.value != "0" for one in file.settings)
    records = is_older(file.releases.get("torch", ""), _RECORDS if asks else _RECORDS_BY_DEFAULT) is not True
    for setting in file.settings:
        if not records and setting.name.endswith("BLOCKING_WAIT"):
            continue
        if captures and setting.name.endswith("ASYNC_ERROR_HANDLING"):
            continue
        value, why = _OFF.get(setting.name, ("", ""))
        leaves_evidence = setting.name.endswith("BLOCKING_WAIT")
        if setting.name.endswith("ASYNC_ERROR_HANDLING"):
            why, leaves_evidence = _unhandled(file)
        if (
            setting.is_exported
            and setting.known_value
            and value
            and effective_value(setting.name, setting.known_value) == value
        ):
            yield Violation(
                setting.place,
                f"{setting.name}={setting.known_value}: {why}",
                _FIXES.get(setting.name, f"Remove {setting.name}."),
                severity=Severity.INFO if leaves_evidence else None,
            )


def _captures(file: EnvironmentSource) -> bool:
    """Whether a script captures CUDA graphs, or another file of its project does, which runs in the same process."""
    if not isinstance(file, Script):
        return False
    modules = file.modules
    texts = () if modules is None else (text for word in _WORDS_OF_CAPTURES for _, text in modules.mentioning(word))
    return any(True for _ in file.calls(*_CAPTURES)) or any(map(_CAPTURE.search, texts))


def _unhandled(file: EnvironmentSource) -> tuple[str, bool]:
    """What follows from errors that are not handled, with the releases of torch that the project permits."""
    oldest, newest = file.permitted_torch
    is_off = any(one.name in _MONITORS and one.value == "0" for one in file.settings)
    return unhandled(newest, oldest=oldest, is_monitored=not is_off)
