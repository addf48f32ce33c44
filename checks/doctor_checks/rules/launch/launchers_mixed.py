"""ENV009 in launch files: variables of two launchers contradict each other, or stale ones are set."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.api import LaunchFile, Violation, rule
from doctor.lint.launch.process_launches import ProcessLaunch, hosts_of, processes_of, starts_of
from doctor.testing.script_cases import shell_fails, shell_passes
from doctor_checks.launch.launchers_mixed import launchers_mixed

_EIGHT = ("#!/bin/bash", "#SBATCH --nodes=2", "#SBATCH --ntasks-per-node=8", "#SBATCH --gres=gpu:8")


@rule(
    check=launchers_mixed,
    reads=LaunchFile,
    impacts={
        r"once per job": (
            "Each launcher starts the ranks of all its hosts again: the ranks of different launchers compete for the "
            "master port and the GPUs."
        ),
    },
    cases=lambda: (
        shell_fails(
            "torchrun in each of eight tasks of a host",
            *_EIGHT,
            "srun torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d train.py  # !",
        ),
        shell_fails(
            "accelerate in each of four tasks",
            "#SBATCH --ntasks-per-node=4",
            "#SBATCH --gres=gpu:4",
            "srun accelerate launch --num_machines 1 --num_processes 4 train.py  # !",
        ),
        shell_fails(
            "mpirun starts torchrun for each GPU",
            "mpirun -np 8 python -m torch.distributed.run --nproc_per_node=8 train.py  # !",
        ),
        shell_fails("deepspeed in each task", *_EIGHT, "srun deepspeed --num_gpus 8 train.py  # !"),
        shell_passes(
            "one torchrun a host",
            "#SBATCH --nodes=2",
            "#SBATCH --ntasks-per-node=1",
            "srun torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d train.py",
        ),
        shell_passes(
            "a step of one task a host",
            *_EIGHT,
            "srun --ntasks=2 --ntasks-per-node=1 torchrun --nnodes=2 --nproc-per-node=8 train.py",
        ),
        shell_passes(
            "each task is an agent of one process",
            *_EIGHT,
            "srun torchrun --nnodes=16 --nproc-per-node=1 --rdzv-backend=c10d train.py",
        ),
        shell_passes("mpirun, one a host", "mpirun -np 2 torchrun --nnodes=2 --nproc-per-node=8 train.py"),
        shell_passes("python by srun", *_EIGHT, "srun python train.py"),
        shell_passes("the number of tasks is unknown", "srun --ntasks=$N torchrun --nproc-per-node=8 x.py"),
    ),
)
def launchers_mixed_in_files(file: LaunchFile) -> Iterator[Violation]:
    """Ask whether srun or mpirun starts the launcher once per host, and not once per rank.

    Why it hurts: each launcher starts all ranks of the host again: the launchers compete for the master port or the
    places in the rendezvous, and several ranks use the same GPU.
    Fix: Start the launcher once per host, or start one task per GPU without it.
    """
    for start in starts_of(file):
        count = _count(start) if start.is_agent and start.outer is not None else None
        if count is not None and count > 1 and _repeats(start, count):
            assert start.outer is not None
            hosts = hosts_of(start.launch) or 1
            alone = start.launch.command.reaches_hosts
            where = "once per job" if alone else f"once on each of {hosts} hosts" if hosts > 1 else "once per host"
            yield Violation(
                start.launch.place,
                f"{start.outer.program} starts {start.launch.program} {count} times, but it must run {where}",
                fix=_fix(start),
                evidence=(("tasks", count), ("processes_each", processes_of(start.launch))),
            )


def _fix(start: ProcessLaunch) -> str:
    """The deepspeed launcher starts the ranks of the other hosts itself, by pdsh or ssh
    (https://www.deepspeed.ai/getting-started/#resource-configuration-multi-node)."""
    program = start.launch.program
    if start.launch.command.reaches_hosts:
        return f"Start {program} once, without srun: it starts the ranks on all hosts of its `--hostfile`."
    if start.step is not None:
        return f"Use `#SBATCH --ntasks-per-node=1`, so that {program} starts once per host."
    return f"Use `mpirun --map-by ppr:1:node` without a number of processes, so that {program} starts once per host."


def _count(start: ProcessLaunch) -> int | None:
    if start.step is not None:
        each = start.step.tasks_per_node
        return start.step.tasks if each is not None and each > 1 else None
    outer = start.outer
    if outer is None or outer.option(*outer.command.placement) is not None:
        return None
    return outer.number(outer.command.tasks)


def _repeats(start: ProcessLaunch, count: int) -> bool:
    """Whether ``count`` is too many; one torchrun process with one rank per task is unusual, but valid."""
    launch, hosts = start.launch, hosts_of(start.launch)
    if launch.command.reaches_hosts:
        return start.step is not None
    if launch.command.has_config:
        return (processes_of(launch) or 1) > 1
    return hosts is not None and hosts != count and (processes_of(launch) or 2) > 1
