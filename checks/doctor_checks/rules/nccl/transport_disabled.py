"""NCCL006 in launch files: a leftover setting turns off a fast path between GPUs."""

from __future__ import annotations

import re
from collections.abc import Iterator

from doctor.api import Severity, Violation, rule
from doctor.knowledge.variable_values import effective as effective_value
from doctor.lint.launch.launch_file import EnvironmentSetting
from doctor.lint.launch.shell.reader import ShellFile
from doctor.testing.script_cases import shell_fails, shell_passes
from doctor_checks.nccl.transport_disabled import transport_disabled

_LINKED = re.compile(r"(v100|a100|a800|h100|h200|h800|h20|gh200|b200|b300|gb200)[\w.-]*", re.IGNORECASE)
"""Data center GPUs, which are connected by NVLink or PCIe switches."""
_OFF = {
    "NCCL_P2P_DISABLE": ("1", "turns off peer access within a host"),
    "NCCL_SHM_DISABLE": ("1", "turns off shared memory between ranks"),
    "NCCL_NVLS_ENABLE": ("0", "turns off NVLink SHARP (NVLS)"),
    "NCCL_P2P_LEVEL": ("LOC", "turns off peer access within a host"),
}
_FOUR = ("#!/bin/bash", "#SBATCH --nodes=1", "#SBATCH --gres=gpu:a100:4")


@rule(
    check=transport_disabled,
    reads=ShellFile,
    impacts={
        r"NVLink SHARP": "All-reduces run on the GPUs instead of in the NVSwitch, which costs part of their bandwidth.",
        r"shared memory": "GPUs without peer access communicate through the network card, at a fraction of the speed.",
        r"peer access": "The GPUs of a host communicate through host memory, at a fraction of the speed.",
    },
    cases=lambda: (
        shell_fails(
            "no peer access between A100s",
            *_FOUR,
            "export NCCL_P2P_DISABLE=1  # !",
            "srun torchrun --nproc-per-node=4 train.py",
        ),
        shell_fails(
            "no shared memory", "#SBATCH --gpus-per-node=h100:8", "NCCL_SHM_DISABLE=1 srun python train.py  # !"
        ),
        shell_fails(
            "no NVLink SHARP", "#SBATCH -G h200:8 -N 1", "export NCCL_NVLS_ENABLE=0  # !", "srun python train.py"
        ),
        shell_passes(
            "GPUs of a workstation, which have no peer access",
            "#SBATCH --gres=gpu:rtx4090:4",
            "export NCCL_P2P_DISABLE=1",
            "srun python train.py",
        ),
        shell_passes(
            "the GPU model is unknown", "#SBATCH --gres=gpu:4", "export NCCL_P2P_DISABLE=1", "srun python train.py"
        ),
        shell_passes("one GPU", "#SBATCH --gres=gpu:a100:1", "export NCCL_P2P_DISABLE=1", "python train.py"),
        shell_passes("on", *_FOUR, "export NCCL_P2P_DISABLE=0", "srun python train.py"),
        shell_passes(
            "for the search of a fault",
            *_FOUR,
            "if [ $DEBUG ]; then",
            "  export NCCL_P2P_DISABLE=1",
            "fi",
            "srun python train.py",
        ),
    ),
)
def transport_disabled_in_files(file: ShellFile) -> Iterator[Violation]:
    """Ask whether a batch script turns off a fast path of the GPUs that it requests.

    Why it hurts: collectives go through host memory or the network, at a fraction of the bandwidth.
    Fix: Remove the variable, or give the reason in a comment on its line.
    """
    model = _model(file)
    if model is None:
        return
    for setting in file.settings:
        if why := _why(setting):
            yield Violation(
                setting.place,
                f"{setting.name}={setting.known_value} {why} on {model.upper()} GPUs",
                f"Remove {setting.name}, or give the reason in a comment on its line.",
                severity=Severity.INFO if setting.name == "NCCL_NVLS_ENABLE" else None,
                confidence=0.8,
            )


def _model(file: ShellFile) -> str | None:
    """The GPU model that the script requests by name, if it requests several per host."""
    job = file.allocation
    if job is None or (job.gpus_per_node or 0) < 2:
        return None
    asked = (job.options.get(name, "") for name in ("gpus-per-node", "gres", "gpus", "gpus-per-task"))
    words = (word for text in asked for word in re.split(r"[:,]", text))
    return next((word for word in words if _LINKED.fullmatch(word)), None)


def _why(setting: EnvironmentSetting) -> str:
    value, why = _OFF.get(setting.name, ("", ""))
    off = setting.known_value is not None and value and effective_value(setting.name, setting.known_value) == value
    return why if off and setting.is_exported and setting.is_certain else ""
