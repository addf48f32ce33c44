"""ENV012 in launch files: the ranks of a host have fewer CPUs than threads."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.api import Violation, rule
from doctor.lint.launch.process_launches import ProcessLaunch, processes_of, starts_of
from doctor.lint.launch.shell.reader import ShellFile
from doctor.lint.launch.slurm_batch import Allocation
from doctor.testing.script_cases import shell_fails, shell_passes
from doctor_checks.launch.cpu_share_too_small import cpu_share_too_small


@rule(
    check=cpu_share_too_small,
    reads=ShellFile,
    cases=lambda: (
        shell_fails(
            "one CPU for eight ranks",
            "#SBATCH --ntasks-per-node=1",
            "#SBATCH --cpus-per-task=1",
            "#SBATCH --gres=gpu:8",
            "srun torchrun --nproc-per-node=8 train.py  # !",
        ),
        shell_fails(
            "one CPU for each rank",
            "#SBATCH --ntasks-per-node=4",
            "#SBATCH --cpus-per-task=1",
            "#SBATCH --gpus-per-node=4",
            "srun python train.py  # !",
        ),
        shell_fails(
            "the step takes less than the job has",
            "#SBATCH --cpus-per-task=32",
            "#SBATCH --gres=gpu:4",
            "srun --cpus-per-task=2 torchrun --nproc-per-node=4 train.py  # !",
        ),
        shell_passes(
            "eight CPUs for each rank",
            "#SBATCH --ntasks-per-node=4",
            "#SBATCH --cpus-per-task=8",
            "#SBATCH --gpus-per-node=4",
            "srun python train.py",
        ),
        shell_passes("nothing is said of CPUs", "#SBATCH --gres=gpu:4", "srun torchrun --nproc-per-node=4 x.py"),
        shell_passes(
            "a batch script with the CPUs of eight tasks",
            "#SBATCH --ntasks-per-node=8",
            "#SBATCH --cpus-per-task=4",
            "#SBATCH --gres=gpu:8",
            "torchrun --standalone --nproc-per-node=8 x.py",
        ),
        shell_passes("no GPU", "#SBATCH --ntasks=64", "#SBATCH --cpus-per-task=1", "srun python simulate.py"),
        shell_passes(
            "one CPU for a single process",
            "#SBATCH --ntasks=1",
            "#SBATCH --cpus-per-task=1",
            "#SBATCH --gres=gpu:1",
            "srun python train.py",
        ),
    ),
)
def cpu_share_too_small_in_files(file: ShellFile) -> Iterator[Violation]:
    """Ask whether each task gets at least one CPU per rank that it starts, and more than one in total.

    Why it hurts: computation, data loading and NCCL's proxy threads compete for too few cores, and all ranks wait for
    the slowest.
    Fix: Set `#SBATCH --cpus-per-task` to the CPUs of the host divided by its tasks, and pass it on to srun with
    `export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK`.
    """
    job = file.allocation
    if job is None or not job.asks_for_gpus:
        return
    for start in starts_of(file):
        given = start.step or (job if start.outer is None and "exclusive" not in job.options else None)
        cpus = _cpus(given, start) if given is not None else None
        ranks = _ranks(start)
        if given is not None and cpus and ranks and _is_short(start, given, cpus, ranks):
            for_whom = "its rank, which uses a GPU" if ranks == 1 else f"its {ranks} ranks, each of which uses a GPU"
            yield Violation(
                start.launch.place,
                f"Each task has only {cpus} CPU{'' if cpus == 1 else 's'} for {for_whom}",
                fix=_fix(job, start, cpus),
                evidence=(("cpus_per_task", cpus), ("ranks_per_task", ranks)),
            )


def _fix(job: Allocation, start: ProcessLaunch, cpus: int) -> str:
    """A step that takes fewer CPUs than the job requests for each task needs no other request."""
    wanted = job.number("cpus-per-task") or 0
    return f"Use `srun --cpus-per-task={wanted}`, as the job requests." if start.step and wanted > cpus else ""


def _cpus(given: Allocation, start: ProcessLaunch) -> int | None:
    """CPUs of one task of a step; a batch script may use those of all tasks on its host."""
    each, tasks = given.number("cpus-per-task"), 1 if start.step is not None else given.tasks_per_node
    return each * tasks if each is not None and tasks is not None else None


def _ranks(start: ProcessLaunch) -> int | None:
    if start.is_agent:
        return processes_of(start.launch)
    return 1 if start.launch.program == "python" else None


def _is_short(start: ProcessLaunch, given: Allocation, cpus: int, ranks: int) -> bool:
    if start.is_agent:
        return ranks > 1 and cpus < ranks
    return start.step is not None and cpus == 1 and (given.tasks_per_node or 1) > 1
