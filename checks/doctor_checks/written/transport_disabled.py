"""NCCL006: a batch script turns off a fast path of the GPUs that it asks for."""

from __future__ import annotations

import re
from collections.abc import Iterator

from doctor.api import FileFails, FilePasses, Severity, Violation, rule
from doctor.knowledge.variable_values import effective as effective_value
from doctor.lint.launch.launch_file import EnvironmentSetting
from doctor.lint.launch.shell.reader import ShellFile
from doctor.testing import lines

_LINKED = re.compile(r"(v100|a100|a800|h100|h200|h800|h20|gh200|b200|b300|gb200)[\w.-]*", re.IGNORECASE)
"""GPUs of data centres, whose peers reach each other by NVLink or over PCIe switches."""
_OFF = {
    "NCCL_P2P_DISABLE": ("1", "GPUs of a host do not reach each other directly"),
    "NCCL_SHM_DISABLE": ("1", "ranks of a host do not talk over shared memory"),
    "NCCL_NVLS_ENABLE": ("0", "NVLink SHARP is not used"),
    "NCCL_P2P_LEVEL": ("LOC", "GPUs of a host do not reach each other directly"),
}
_FOUR = ("#!/bin/bash", "#SBATCH --nodes=1", "#SBATCH --gres=gpu:a100:4")


@rule(
    id="NCCL006",
    severity=Severity.WARNING,
    reads=ShellFile,
    cases=lambda: (
        FileFails(
            "no peer access between A100s",
            lines(*_FOUR, "export NCCL_P2P_DISABLE=1  # !", "srun torchrun --nproc-per-node=4 train.py"),
            name="job.sbatch",
        ),
        FileFails(
            "no shared memory",
            lines("#SBATCH --gpus-per-node=h100:8", "NCCL_SHM_DISABLE=1 srun python train.py  # !"),
            name="job.sbatch",
        ),
        FileFails(
            "no NVLink SHARP",
            lines("#SBATCH -G h200:8 -N 1", "export NCCL_NVLS_ENABLE=0  # !", "srun python train.py"),
            name="job.sbatch",
        ),
        FilePasses(
            "GPUs of a workstation, which have no peer access",
            lines("#SBATCH --gres=gpu:rtx4090:4", "export NCCL_P2P_DISABLE=1", "srun python train.py"),
            name="job.sbatch",
        ),
        FilePasses(
            "which GPUs these are is not told",
            lines("#SBATCH --gres=gpu:4", "export NCCL_P2P_DISABLE=1", "srun python train.py"),
            name="job.sbatch",
        ),
        FilePasses(
            "one GPU",
            lines("#SBATCH --gres=gpu:a100:1", "export NCCL_P2P_DISABLE=1", "python train.py"),
            name="job.sbatch",
        ),
        FilePasses("on", lines(*_FOUR, "export NCCL_P2P_DISABLE=0", "srun python train.py"), name="job.sbatch"),
        FilePasses(
            "for the search of a fault",
            lines(*_FOUR, "if [ $DEBUG ]; then", "  export NCCL_P2P_DISABLE=1", "fi", "srun python train.py"),
            name="job.sbatch",
        ),
    ),
)
def transport_disabled(file: ShellFile) -> Iterator[Violation]:
    """Ask whether a batch script turns off a fast path of the GPUs that it names.

    Why it hurts: collectives take the way through the host's memory or the network, at a tenth of the rate.
    Fix: remove the variable; where a fault of this machine asks for it, say so on its line.
    """
    model = _model(file)
    if model is None:
        return
    for setting in file.settings:
        if why := _why(setting):
            yield Violation(
                setting.place,
                f"{setting.name}={setting.told} on {model} GPUs: {why}",
                confidence=0.8,
                evidence=(("name", setting.name), ("gpus", model)),
            )


def _model(file: ShellFile) -> str | None:
    """The GPUs that are asked for by name, where there are several on a host."""
    job = file.allocation
    if job is None or (job.gpus_per_node or 0) < 2:
        return None
    asked = (job.options.get(name, "") for name in ("gpus-per-node", "gres", "gpus", "gpus-per-task"))
    words = (word for text in asked for word in re.split(r"[:,]", text))
    return next((word for word in words if _LINKED.fullmatch(word)), None)


def _why(setting: EnvironmentSetting) -> str:
    value, why = _OFF.get(setting.name, ("", ""))
    off = setting.told is not None and value and effective_value(setting.name, setting.told) == value
    return why if off and setting.is_exported and setting.is_certain else ""
