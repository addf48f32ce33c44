"""ENV009: srun or mpirun starts more launchers than hosts."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.api import FileFails, FilePasses, LaunchFile, Severity, Violation, rule
from doctor.lint.launch.process_launches import ProcessLaunch, hosts_of, processes_of, starts_of
from doctor.testing import lines

_EIGHT = ("#!/bin/bash", "#SBATCH --nodes=2", "#SBATCH --ntasks-per-node=8", "#SBATCH --gres=gpu:8")


@rule(
    id="ENV009",
    severity=Severity.ERROR,
    reads=LaunchFile,
    cases=lambda: (
        FileFails(
            "torchrun in each of eight tasks of a host",
            lines(*_EIGHT, "srun torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d train.py  # !"),
            name="job.sbatch",
        ),
        FileFails(
            "accelerate in each of four tasks",
            lines(
                "#SBATCH --ntasks-per-node=4",
                "#SBATCH --gres=gpu:4",
                "srun accelerate launch --num_machines 1 --num_processes 4 train.py  # !",
            ),
            name="job.sbatch",
        ),
        FileFails(
            "mpirun starts torchrun for each GPU",
            lines("mpirun -np 8 python -m torch.distributed.run --nproc_per_node=8 train.py  # !"),
            name="train.sh",
        ),
        FileFails(
            "deepspeed in each task",
            lines(*_EIGHT, "srun deepspeed --num_gpus 8 train.py  # !"),
            name="job.slurm",
        ),
        FilePasses(
            "one torchrun a host",
            lines(
                "#SBATCH --nodes=2",
                "#SBATCH --ntasks-per-node=1",
                "srun torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d train.py",
            ),
            name="job.sbatch",
        ),
        FilePasses(
            "a step of one task a host",
            lines(*_EIGHT, "srun --ntasks=2 --ntasks-per-node=1 torchrun --nnodes=2 --nproc-per-node=8 train.py"),
            name="job.sbatch",
        ),
        FilePasses(
            "each task is an agent of one process",
            lines(*_EIGHT, "srun torchrun --nnodes=16 --nproc-per-node=1 --rdzv-backend=c10d train.py"),
            name="job.sbatch",
        ),
        FilePasses(
            "mpirun, one a host", lines("mpirun -np 2 torchrun --nnodes=2 --nproc-per-node=8 train.py"), name="x.sh"
        ),
        FilePasses("python by srun", lines(*_EIGHT, "srun python train.py"), name="job.sbatch"),
        FilePasses(
            "how many tasks is not told", lines("srun --ntasks=$N torchrun --nproc-per-node=8 x.py"), name="x.sh"
        ),
    ),
)
def launchers_mixed(file: LaunchFile) -> Iterator[Violation]:
    """Ask whether srun or mpirun starts one launcher on each host, and not one for each rank.

    Why it hurts: each of them starts all ranks of the host again. Ranks collide at the rendezvous, and several claim
    one GPU.
    Fix: `#SBATCH --ntasks-per-node=1` and `srun torchrun --nproc-per-node=<GPUs>`; or one task for each GPU and
    `srun python train.py` without torchrun.
    """
    for start in starts_of(file):
        count = _count(start) if start.is_agent and start.outer is not None else None
        if count is not None and count > 1 and _repeats(start, count):
            assert start.outer is not None
            yield Violation(
                start.launch.place,
                f"{start.outer.program} starts {count} times {start.launch.program}, {_agents(start)}",
                evidence=(("tasks", count), ("processes_each", processes_of(start.launch))),
            )


def _count(start: ProcessLaunch) -> int | None:
    """How many launchers are started in all."""
    if start.step is not None:
        each = start.step.tasks_per_node
        return start.step.tasks if each is not None and each > 1 else None
    outer = start.outer
    return outer.number("np") if outer is not None and not {"npernode", "map-by"} & outer.options.keys() else None


def _repeats(start: ProcessLaunch, count: int) -> bool:
    """Whether that is too many; a torchrun of one process for each task is unusual, and right."""
    launch, hosts = start.launch, hosts_of(start.launch)
    if launch.program == "deepspeed":
        return start.step is not None
    if launch.program == "accelerate":
        return (processes_of(launch) or 1) > 1
    return hosts is not None and hosts != count and (processes_of(launch) or 2) > 1


def _agents(start: ProcessLaunch) -> str:
    hosts = hosts_of(start.launch)
    return f"which is to run once on each of {hosts} hosts" if (hosts or 1) > 1 else "which is to run once a host"
