"""ENV011 in launch files: SLURM tasks see only some GPUs of the node, but ranks select their GPU by local rank."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.api import Violation, rule
from doctor.lint.launch.partial_text import whole_number
from doctor.lint.launch.process_launches import ProcessLaunch, processes_of, starts_of, trainer_option
from doctor.lint.launch.shell.reader import ShellFile
from doctor.lint.launch.slurm_batch import Allocation
from doctor.testing.script_cases import shell_fails, shell_passes
from doctor_checks.launch.slurm_gpus_hidden import slurm_gpus_hidden

_EACH = ("#!/bin/bash", "#SBATCH --ntasks-per-node=4", "#SBATCH --gpus-per-task=1")


@rule(
    check=slurm_gpus_hidden,
    reads=ShellFile,
    cases=lambda: (
        shell_fails(
            "Lightning with four devices, of which a task sees one",
            *_EACH,
            "srun python train.py fit --trainer.devices=4  # !",
        ),
        shell_fails(
            "LOCAL_RANK from SLURM_LOCALID",
            *_EACH,
            "srun bash -c 'LOCAL_RANK=$SLURM_LOCALID RANK=$SLURM_PROCID python train.py'  # !",
        ),
        shell_fails(
            "torchrun starts four ranks in a task with one GPU",
            "#SBATCH --nodes=2",
            "#SBATCH --ntasks-per-node=1",
            "#SBATCH --gpus-per-task=1",
            "srun torchrun --nnodes=2 --nproc-per-node=4 train.py  # !",
        ),
        shell_fails(
            "bound to the nearest GPU",
            "#SBATCH --ntasks-per-node=4",
            "#SBATCH --gpus-per-node=4",
            "srun --gpu-bind=single:1 python train.py --trainer.devices 4  # !",
        ),
        shell_passes("binding taken back", *_EACH, "srun --gpu-bind=none python train.py --trainer.devices=4"),
        shell_passes("each task uses device 0", *_EACH, "srun python train.py"),
        shell_passes(
            "one task a host has all GPUs",
            "#SBATCH --ntasks-per-node=1",
            "#SBATCH --gpus-per-task=4",
            "srun torchrun --nproc-per-node=4 x.py",
        ),
        shell_passes(
            "GPUs by host",
            "#SBATCH --ntasks-per-node=4",
            "#SBATCH --gres=gpu:4",
            "srun python train.py --trainer.devices=4",
        ),
    ),
)
def slurm_gpus_hidden_in_files(file: ShellFile) -> Iterator[Violation]:
    """Ask whether every SLURM task sees the GPU that its local rank selects."""
    for start in starts_of(file):
        step = start.step
        if step is not None and step.splits_gpus and (why := _why(file, start, step)):
            yield Violation(
                start.launch.place,
                f"{why}, but each SLURM task sees only {_seen(step)}",
                fix=_fix(start, step),
                evidence=tuple(
                    (name, step.options[name]) for name in ("gpus-per-task", "gpu-bind") if name in step.options
                ),
            )


def _fix(start: ProcessLaunch, step: Allocation) -> str:
    """Give each task the GPUs of all ranks that it starts; tasks that are ranks see all GPUs of their host."""
    if step.gpus_per_task is None:
        return "Pass `--gpu-bind=none` to srun."
    ranks = processes_of(start.launch) if start.is_agent else None
    if ranks:
        return f"Replace `--gpus-per-task={step.gpus_per_task}` with `--gpus-per-task={ranks}`."
    each = step.gpus_per_task * step.tasks_per_node if step.tasks_per_node else 0
    on_node = f"`--gpus-per-node={each}`" if each else "`--gpus-per-node`"
    return f"Replace `--gpus-per-task={step.gpus_per_task}` with {on_node}, and add `--gpu-bind=none` to srun."


def _seen(step: Allocation) -> str:
    each = step.gpus_per_task
    if each is None:
        return f"the GPUs of --gpu-bind={step.options.get('gpu-bind', '')}"
    return f"{each} GPU{'' if each == 1 else 's'}"


def _why(file: ShellFile, start: ProcessLaunch, step: Allocation) -> str:
    each, tasks = step.gpus_per_task, step.tasks_per_node
    if start.is_agent:
        ranks = processes_of(start.launch)
        some = file.modules is not None and file.modules.hides_gpus(start.launch.script)  # others need none
        return f"{start.launch.program} starts {ranks} ranks" if each and ranks and ranks > each and not some else ""
    devices = whole_number(trainer_option(start.launch, "devices"))
    if devices is not None and devices > (each or 1):
        return f"trainer.devices={devices}"
    local = start.launch.settings.get("LOCAL_RANK")
    by_task = local is not None and any(name.endswith("SLURM_LOCALID") for name in local.reads)
    if not by_task or (tasks or 1) == 1:
        return ""
    takes_it = file.modules is not None and file.modules.takes_only_gpu(start.launch.script)
    return "" if takes_it else "LOCAL_RANK is set from SLURM_LOCALID"
