"""ENV004: all tasks of a step are told one rank."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.api import FileFails, FilePasses, Severity, Violation, rule
from doctor.lint.launch.partial_text import names_in as untold_in
from doctor.lint.launch.partial_text import shown
from doctor.lint.launch.process_launches import ProcessLaunch, is_static, rank_of_host, starts_of
from doctor.lint.launch.shell.reader import ShellFile
from doctor.testing import lines

_TWO = ("#!/bin/bash", "#SBATCH --nodes=2", "#SBATCH --ntasks-per-node=1")
_EIGHT = ("#!/bin/bash", "#SBATCH --nodes=1", "#SBATCH --ntasks-per-node=8")
_PER_TASK = ("SLURM_PROCID", "SLURM_NODEID", "SLURM_LOCALID")
_RANKS = ("RANK", "LOCAL_RANK", "NODE_RANK", "GLOBAL_RANK", "MACHINE_RANK", "GROUP_RANK", "PET_NODE_RANK")


@rule(
    id="ENV004",
    severity=Severity.ERROR,
    reads=ShellFile,
    cases=lambda: (
        FileFails(
            "the batch script fills in its own number",
            lines(*_TWO, "srun torchrun --nnodes=2 --node_rank=$SLURM_NODEID --master_addr=$HEAD train.py  # !"),
            name="job.sbatch",
        ),
        FileFails(
            "double quotes do not help",
            lines(
                *_TWO,
                'srun bash -c "accelerate launch --num_machines 2 --machine_rank $SLURM_PROCID x.py"  # !',
            ),
            name="job.sbatch",
        ),
        FileFails(
            "RANK is exported before srun",
            lines(*_EIGHT, "export RANK=$SLURM_PROCID  # !", "export WORLD_SIZE=$SLURM_NTASKS", "srun python train.py"),
            name="job.sbatch",
        ),
        FileFails(
            "a number for all hosts",
            lines(*_TWO, "srun torchrun --nnodes=2 --node_rank=0 --master_addr=$HEAD train.py  # !"),
            name="job.sbatch",
        ),
        FilePasses(
            "each task fills in its own",
            lines(*_TWO, "srun bash -c 'torchrun --nnodes=2 --node_rank=$SLURM_NODEID --master_addr=$HEAD train.py'"),
            name="job.sbatch",
        ),
        FilePasses(
            "escaped in double quotes",
            lines(*_TWO, 'srun bash -c "torchrun --nnodes=2 --node_rank=\\$SLURM_NODEID --master_addr=$HEAD train.py"'),
            name="job.sbatch",
        ),
        FilePasses(
            "a rendezvous passes over the number",
            lines(*_TWO, "srun torchrun --nnodes=2 --node_rank=$SLURM_NODEID --rdzv_backend=c10d train.py"),
            name="job.sbatch",
        ),
        FilePasses(
            "a script that srun runs",
            lines("export RANK=$SLURM_PROCID", "export LOCAL_RANK=$SLURM_LOCALID", "python train.py"),
            name="task.sh",
        ),
        FilePasses(
            "set again in the task",
            lines(*_EIGHT, "export RANK=$SLURM_PROCID", "srun bash -c 'RANK=$SLURM_PROCID python train.py'"),
            name="job.sbatch",
        ),
        FilePasses(
            "one host", lines("#SBATCH --nodes=1", "srun torchrun --node_rank=$SLURM_NODEID x.py"), name="job.sbatch"
        ),
    ),
)
def rank_collision(file: ShellFile) -> Iterator[Violation]:
    """Ask whether each task of a step gets a number of its own.

    Why it hurts: the batch script fills $SLURM_PROCID in before srun starts anything: all tasks are told 0. They
    claim one rank, and the rest of the world never comes.
    Fix: let the task fill it in: `srun bash -c 'torchrun --node-rank=$SLURM_NODEID ...'` in single quotes, or
    `--rdzv-backend=c10d`, which needs no number.
    """
    if file.allocation is None:
        return
    for start in starts_of(file):
        yield from _judge_option(start)
    yield from _judge_settings(file)


def _judge_option(start: ProcessLaunch) -> Iterator[Violation]:
    number = rank_of_host(start.launch) if start.is_agent else None
    if number is None or start.step is None or (start.step.nodes or 1) < 2 or not _counts(start):
        return
    filled_in = set(untold_in(number)) & set(_PER_TASK)
    if filled_in or number.isdigit():
        why = "the batch script fills it in, as 0" if filled_in else "all hosts are told the same"
        yield Violation(
            start.launch.place,
            f"the number of the host is {shown(number)}, and {why}",
            evidence=(("value", shown(number)), ("nodes", start.step.nodes)),
        )


def _counts(start: ProcessLaunch) -> bool:
    """Whether the launcher goes by the number."""
    if start.launch.program == "accelerate":
        return (start.launch.option("rdzv-backend") or "static") == "static"
    return is_static(start.launch) or start.launch.program == "fabric"


def _judge_settings(file: ShellFile) -> Iterator[Violation]:
    """Variables that srun hands on to all tasks alike."""
    own = {setting.name for setting in file.settings if setting.for_task}
    steps = [start for start in starts_of(file) if start.step is not None and not start.is_agent]
    if not any((start.step.tasks or 1) > 1 for start in steps if start.step is not None):
        return
    for setting in file.settings:
        if setting.name in _RANKS and setting.is_exported and setting.name not in own and not setting.for_task:
            if set(setting.reads) & set(_PER_TASK) and _reaches(setting.name, steps):
                yield Violation(
                    setting.place,
                    f"{setting.name}={shown(setting.value)} is filled in by the batch script, as 0, for all tasks",
                    fix=f"`srun bash -c '{setting.name}={shown(setting.value)} python train.py'`: in single quotes.",
                    evidence=((setting.name, shown(setting.value)),),
                )


def _reaches(name: str, steps: list[ProcessLaunch]) -> bool:
    """Whether a python of several tasks gets it; a script in between may set it anew."""
    return any(
        start.launch.program == "python" and name in start.launch.settings and (start.step.tasks or 1) > 1
        for start in steps
        if start.step is not None
    )
