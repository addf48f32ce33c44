"""NCCL011: a launch file turns off what a hang would leave behind."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.api import FileFails, FilePasses, LaunchFile, Severity, Violation, rule
from doctor.knowledge.variable_values import effective as effective_value
from doctor.testing import lines

_OFF = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": ("0", "a failed collective is never noticed, and the run hangs for ever"),
    "NCCL_ASYNC_ERROR_HANDLING": ("0", "a failed collective is never noticed, and the run hangs for ever"),
    "TORCH_NCCL_BLOCKING_WAIT": ("1", "wait() raises at the timeout, and no rank writes a dump"),
    "NCCL_BLOCKING_WAIT": ("1", "wait() raises at the timeout, and no rank writes a dump"),
    "TORCH_NCCL_DUMP_ON_TIMEOUT": ("0", "no dump is written at the time-out"),
    "TORCH_NCCL_TRACE_BUFFER_SIZE": ("0", "the flight recorder is off"),
    "TORCH_FR_BUFFER_SIZE": ("0", "the flight recorder is off"),
}


@rule(
    id="NCCL011",
    severity=Severity.WARNING,
    reads=LaunchFile,
    cases=lambda: (
        FileFails(
            "errors are not handled",
            lines("export TORCH_NCCL_ASYNC_ERROR_HANDLING=0  # !", "torchrun train.py"),
            name="train.sh",
        ),
        FileFails("wait() blocks", lines("TORCH_NCCL_BLOCKING_WAIT=1 torchrun train.py  # !"), name="train.sh"),
        FileFails("no dump", lines("export TORCH_NCCL_DUMP_ON_TIMEOUT=0  # !", "srun python train.py"), name="job.sh"),
        FilePasses(
            "recorded and dumped",
            lines("export TORCH_NCCL_TRACE_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1", "torchrun train.py"),
            name="train.sh",
        ),
        FilePasses(
            "as torchrun sets it", lines("export TORCH_NCCL_ASYNC_ERROR_HANDLING=1", "torchrun x.py"), name="train.sh"
        ),
        FilePasses(
            "from outside", lines("export TORCH_NCCL_BLOCKING_WAIT=$WAIT", "torchrun train.py"), name="train.sh"
        ),
    ),
)
def hang_undebuggable(file: LaunchFile) -> Iterator[Violation]:
    """Ask whether a launch file keeps what a hang would leave behind: a flight-recorder dump of every rank.

    Why it hurts: the run ends at the time-out, or never, and nothing tells which rank was missing from which
    collective.
    Fix: remove the variable, and `export TORCH_NCCL_TRACE_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1`.
    """
    for setting in file.settings:
        value, why = _OFF.get(setting.name, ("", ""))
        if setting.is_exported and setting.told and value and effective_value(setting.name, setting.told) == value:
            yield Violation(
                setting.place,
                f"{setting.name}={setting.told}: {why}",
                severity=Severity.INFO if setting.name.endswith("BLOCKING_WAIT") else None,
                evidence=(("name", setting.name), ("value", setting.told)),
            )
