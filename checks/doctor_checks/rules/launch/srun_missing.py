"""ENV014 in launch files: a process in a SLURM allocation that srun did not start."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice

from doctor.api import Severity, Violation, rule
from doctor.lint.launch.launch_file import Launch
from doctor.lint.launch.process_launches import ProcessLaunch, hosts_of, starts_of, trainer_option
from doctor.lint.launch.shell.reader import ShellFile
from doctor.lint.launch.slurm_batch import Allocation
from doctor.testing.script_cases import shell_fails, shell_passes
from doctor_checks.launch.srun_missing import srun_missing

_FOUR = ("#!/bin/bash", "#SBATCH --nodes=1", "#SBATCH --ntasks-per-node=4", "#SBATCH --gres=gpu:4")
_HOSTS = ("#!/bin/bash", "#SBATCH --nodes=2", "#SBATCH --ntasks-per-node=1", "#SBATCH --gres=gpu:8")
_TRAINS = re.compile(r"(?<![a-z])(?:pre)?(?:train|fine_?tune|tune|fit|main|run|sft|dpo|experiment)", re.IGNORECASE)


@rule(
    check=srun_missing,
    reads=ShellFile,
    cases=lambda: (
        shell_fails(
            "python in a batch script of four tasks", *_FOUR, "source activate env", "python train.py --epochs 10  # !"
        ),
        shell_fails(
            "Lightning on two hosts", *_HOSTS, "python train.py fit --trainer.num_nodes=2 --trainer.devices=8  # !"
        ),
        shell_fails(
            "torchrun for two hosts, started on the first alone",
            *_HOSTS,
            "torchrun --nnodes=$SLURM_NNODES --nproc-per-node=8 --rdzv-backend=c10d train.py  # !",
        ),
        shell_passes("srun", *_FOUR, "python prepare_data.py", "srun python train.py"),
        shell_passes("torchrun on one host", *_FOUR, "torchrun --nproc-per-node=4 train.py"),
        shell_passes(
            "tasks for the CPUs of a program that uses one GPU",
            "#SBATCH --ntasks=8",
            "#SBATCH --gres=gpu:1",
            "python train.py",
        ),
        shell_passes("a script that may call srun", *_HOSTS, "bash run.sh", "python train.py"),
        shell_passes("no batch script", "torchrun --nnodes=2 --nproc-per-node=8 train.py"),
        shell_passes("one task", "#SBATCH --gres=gpu:4", "python train.py --devices 4"),
        shell_passes(
            "ssh to the others",
            *_HOSTS,
            "for host in $(scontrol show hostnames); do",
            "ssh $host torchrun --nnodes=2 x.py &",
            "done",
        ),
    ),
)
def srun_missing_in_files(file: ShellFile) -> Iterator[Violation]:
    """Ask whether a batch script of several tasks or hosts starts the training with srun or another launcher.

    Why it hurts: the other ranks are never started, because a batch script runs once, on the first host.
    Fix: Put `srun` before the command.
    """
    job = file.allocation
    programs = (one for launch in file.launches for one in launch.chain())
    if job is None or any(one.starts_tasks or one.program == "other" for one in programs):
        return
    starts = list(starts_of(file))
    for start in starts:
        if start.is_agent:
            yield from _judge_agent(start, job)
    if file.modules is not None and any(file.modules.starts_steps(start.launch.script) for start in starts):
        return
    if not any(start.is_agent for start in starts):
        launches = (start.launch for start in starts if not _is_one_process(file, start.launch, job))
        yield from islice((found for launch in launches for found in _judge_python(file, launch, job)), 1)


def _is_one_process(file: ShellFile, launch: Launch, job: Allocation) -> bool:
    """Whether the program needs one start on the only host of the job, whose tasks reserve CPUs for it."""
    return (job.nodes or 1) == 1 and file.modules is not None and file.modules.is_one_process(launch.script)


def _judge_agent(start: ProcessLaunch, job: Allocation) -> Iterator[Violation]:
    hosts = hosts_of(start.launch)
    if not start.launch.command.reaches_hosts and (job.nodes or 1) > 1 and (hosts or 1) > 1:
        yield Violation(
            start.launch.place,
            f"{start.launch.program} waits for {hosts} hosts, but the batch script starts it only on the first",
            fix=f"Put `srun` before `{start.launch.program}`, in a job with `#SBATCH --ntasks-per-node=1`.",
            evidence=(("nodes", job.nodes), ("expected", hosts)),
        )


def _judge_python(file: ShellFile, launch: Launch, job: Allocation) -> Iterator[Violation]:
    if launch.program != "python" or not _TRAINS.search(launch.script.rpartition("/")[2]):
        return
    tasks, nodes = job.tasks or 1, job.nodes or 1
    gpus = (job.gpus_per_node or 0) * nodes
    is_lightning = any(trainer_option(launch, name) for name in ("devices", "num_nodes", "strategy", "accelerator"))
    if tasks < 2 or gpus < 2 or (job.number("ntasks-per-node") is None and nodes < 2):
        return
    is_known = file.modules is None or file.modules.takes_tasks(launch.script)
    # More tasks than GPUs on one host reserve CPUs: ranks would share a GPU
    is_seen = is_lightning or nodes > 1 or (is_known and tasks <= gpus)
    where = f"on {nodes} hosts" if nodes > 1 else "on one host"
    yield Violation(
        launch.place,
        f"The job has {tasks} tasks {where}, but the batch script starts one process",
        fix=f"Put `srun` before `{launch.program} {launch.script}`.",
        severity=Severity.INFO if not is_seen else None if is_lightning else Severity.WARNING,
        preview=not is_seen,
        confidence=1.0 if is_lightning else 0.8,
        evidence=(("tasks", tasks), ("nodes", nodes), ("script", launch.script)),
    )
