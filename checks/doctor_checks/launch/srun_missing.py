"""ENV014: a process in a SLURM allocation that srun did not start."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice

from doctor.analysis.launch_origin import launch_number, starts_tasks_unlaunched
from doctor.api import Finding, Job, Severity, Verdict, Violation, check, rule
from doctor.facts import LaunchFacts
from doctor.lint.launch.launch_file import Launch
from doctor.lint.launch.process_launches import ProcessLaunch, hosts_of, starts_of, trainer_option
from doctor.lint.launch.shell.reader import ShellFile
from doctor.lint.launch.slurm_batch import Allocation
from doctor.testing import Fails, JobBuilder, Passes, healthy
from doctor.testing.script_cases import shell_fails, shell_passes


@check(
    id="ENV014",
    severity=Severity.ERROR,
    when="P",
    needs=(LaunchFacts,),
    cases=lambda: (
        Passes("srun started the ranks", healthy(hosts=2, per_host=2).by_srun()),
        Passes("torchrun in a batch script", healthy().launched(SLURM_NTASKS="2", SLURM_JOB_NAME="train")),
        Passes("an interactive allocation", _allocation().launched(SLURM_JOB_NAME="interactive")),
        Passes("salloc of an older SLURM names the job after the shell", _allocation().launched(SLURM_JOB_NAME="bash")),
        Passes("a batch script of one task", _allocation().launched(SLURM_NTASKS="1")),
        Passes("a batch script that requests no tasks", _allocation().launched(without=("SLURM_NTASKS",))),
        Passes("no SLURM", healthy(hosts=1, per_host=1)),
        Fails("python in a batch script of four tasks", _allocation(), ranks=(0,)),
        Fails(
            "RANK and the master are exported, and the other ranks are never started",
            _allocation().launched(RANK="0", WORLD_SIZE="4", MASTER_ADDR="node0", MASTER_PORT="29500"),
            ranks=(0,),
        ),
        Fails("the shell of salloc in a named job", _allocation().launched(without=("SLURM_PROCID",)), ranks=(0,)),
    ),
)
def srun_missing(job: Job) -> Iterator[Verdict]:
    """Ask whether a process in an allocation of several tasks was started by srun or another launcher.

    Why it hurts: Lightning reads SLURM_NTASKS, assumes that this process is task 0, starts no others, and waits at
    'Initializing distributed: GLOBAL_RANK: 0, MEMBER: 1/N' until the timeout.
    Fix: Start with `srun python train.py`, or with torchrun in a job with `--ntasks-per-node=1`.
    """
    for launch, identical in job.each(LaunchFacts):
        if not starts_tasks_unlaunched(job, launch):
            continue
        tasks, name = launch_number(launch, "SLURM_NTASKS"), launch.get("SLURM_JOB_NAME")
        yield Finding(
            f"SLURM_NTASKS={launch.get('SLURM_NTASKS')}, but srun did not start this process (no SLURM_STEP_ID)",
            ranks=identical.ranks,
            evidence={
                "SLURM_NTASKS": launch.get("SLURM_NTASKS"),
                "SLURM_STEP_ID": launch.get("SLURM_STEP_ID"),
                "SLURM_JOB_NAME": name,
                "launcher": launch.launcher,
            },
            fix=f"Start all {tasks or 'the'} tasks with `srun python train.py`, or in an interactive shell run "
            "`export SLURM_JOB_NAME=interactive` first.",
            explains=() if "SLURM_STEP_NUM_TASKS" in launch.filled else ("ENV010",),
        )


def _allocation() -> JobBuilder:
    return healthy(hosts=1, per_host=1).launched(
        SLURM_JOB_ID="7", SLURM_JOB_NAME="train", SLURM_NTASKS="4", SLURM_PROCID="0", SLURM_LOCALID="0"
    )


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
        yield from islice((found for start in starts for found in _judge_python(start.launch, job)), 1)


def _judge_agent(start: ProcessLaunch, job: Allocation) -> Iterator[Violation]:
    hosts = hosts_of(start.launch)
    if not start.launch.command.reaches_hosts and (job.nodes or 1) > 1 and (hosts or 1) > 1:
        yield Violation(
            start.launch.place,
            f"{start.launch.program} waits for {hosts} hosts, but the batch script starts it only on the first",
            fix=f"Put `srun` before `{start.launch.program}`, in a job with `#SBATCH --ntasks-per-node=1`.",
            evidence=(("nodes", job.nodes), ("expected", hosts)),
        )


def _judge_python(launch: Launch, job: Allocation) -> Iterator[Violation]:
    if launch.program != "python" or not _TRAINS.search(launch.script.rpartition("/")[2]):
        return
    tasks, nodes = job.tasks or 1, job.nodes or 1
    gpus = (job.gpus_per_node or 0) * nodes
    is_lightning = any(trainer_option(launch, name) for name in ("devices", "num_nodes", "strategy", "accelerator"))
    if tasks < 2 or gpus < 2 or (job.number("ntasks-per-node") is None and nodes < 2):
        return
    where = f"on {nodes} hosts" if nodes > 1 else "on one host"
    yield Violation(
        launch.place,
        f"The job has {tasks} tasks {where}, but the batch script starts one process",
        severity=None if is_lightning else Severity.WARNING,
        confidence=1.0 if is_lightning else 0.8,
        evidence=(("tasks", tasks), ("nodes", nodes), ("script", launch.script)),
    )
