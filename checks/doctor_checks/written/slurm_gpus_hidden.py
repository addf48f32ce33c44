"""ENV011: each task sees GPUs of its own alone, and ranks address them by local rank."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.api import FileFails, FilePasses, Severity, Violation, rule
from doctor.lint.launch.partial_text import whole_number
from doctor.lint.launch.process_launches import ProcessLaunch, processes_of, starts_of, trainer_option
from doctor.lint.launch.shell.reader import ShellFile
from doctor.lint.launch.slurm_batch import Allocation
from doctor.testing import lines

_EACH = ("#!/bin/bash", "#SBATCH --ntasks-per-node=4", "#SBATCH --gpus-per-task=1")


@rule(
    id="ENV011",
    severity=Severity.ERROR,
    reads=ShellFile,
    cases=lambda: (
        FileFails(
            "Lightning with four devices, of which a task sees one",
            lines(*_EACH, "srun python train.py fit --trainer.devices=4  # !"),
            name="job.sbatch",
        ),
        FileFails(
            "LOCAL_RANK from SLURM_LOCALID",
            lines(*_EACH, "srun bash -c 'LOCAL_RANK=$SLURM_LOCALID RANK=$SLURM_PROCID python train.py'  # !"),
            name="job.sbatch",
        ),
        FileFails(
            "torchrun starts four ranks in a task with one GPU",
            lines(
                "#SBATCH --nodes=2",
                "#SBATCH --ntasks-per-node=1",
                "#SBATCH --gpus-per-task=1",
                "srun torchrun --nnodes=2 --nproc-per-node=4 train.py  # !",
            ),
            name="job.sbatch",
        ),
        FileFails(
            "bound to the nearest GPU",
            lines(
                "#SBATCH --ntasks-per-node=4",
                "#SBATCH --gpus-per-node=4",
                "srun --gpu-bind=single:1 python train.py --trainer.devices 4  # !",
            ),
            name="job.sbatch",
        ),
        FilePasses(
            "binding taken back", lines(*_EACH, "srun --gpu-bind=none python train.py --trainer.devices=4"), name="a.sh"
        ),
        FilePasses("each task uses device 0", lines(*_EACH, "srun python train.py"), name="job.sbatch"),
        FilePasses(
            "one task a host has all GPUs",
            lines("#SBATCH --ntasks-per-node=1", "#SBATCH --gpus-per-task=4", "srun torchrun --nproc-per-node=4 x.py"),
            name="job.sbatch",
        ),
        FilePasses(
            "GPUs by host",
            lines("#SBATCH --ntasks-per-node=4", "#SBATCH --gres=gpu:4", "srun python train.py --trainer.devices=4"),
            name="job.sbatch",
        ),
    ),
)
def slurm_gpus_hidden(file: ShellFile) -> Iterator[Violation]:
    """Ask whether every task of SLURM sees the GPU that its local rank addresses.

    Why it hurts: torch.cuda.set_device(LOCAL_RANK) ends with "invalid device ordinal", Lightning says "You requested
    gpu: [0, 1] But your machine only has: [0]"; and GPUs in separate device cgroups can't reach each other by P2P.
    Fix: request GPUs by node, `--gpus-per-node=8` (or `--gres=gpu:8`) in place of `--gpus-per-task=1`, with
    `--gpu-bind=none`.
    """
    for start in starts_of(file):
        step = start.step
        if step is not None and step.splits_gpus and (why := _why(file, start, step)):
            yield Violation(
                start.launch.place,
                f"{why}, and SLURM shows each task {_seen(step)}",
                evidence=tuple(
                    (name, step.options[name]) for name in ("gpus-per-task", "gpu-bind") if name in step.options
                ),
            )


def _seen(step: Allocation) -> str:
    each = step.gpus_per_task
    if each is None:
        return f"the GPUs of --gpu-bind={step.options.get('gpu-bind', '')} alone"
    return f"{each} GPU{'' if each == 1 else 's'}"


def _why(file: ShellFile, start: ProcessLaunch, step: Allocation) -> str:
    each, tasks = step.gpus_per_task, step.tasks_per_node
    if start.is_agent:
        ranks = processes_of(start.launch)
        return f"{start.launch.program} starts {ranks} ranks" if each and ranks and ranks > each else ""
    devices = whole_number(trainer_option(start.launch, "devices"))
    if devices is not None and devices > (each or 1):
        return f"trainer.devices={devices}"
    local = start.launch.settings.get("LOCAL_RANK")
    by_task = local is not None and any(name.endswith("SLURM_LOCALID") for name in local.reads)
    return "ranks take LOCAL_RANK from SLURM_LOCALID" if by_task and (tasks or 1) > 1 else ""
