"""ENV012: a task gets fewer CPUs than it has ranks."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.api import FileFails, FilePasses, Severity, Violation, rule
from doctor.lint.launch.process_launches import ProcessLaunch, processes_of, starts_of
from doctor.lint.launch.shell.reader import ShellFile
from doctor.lint.launch.slurm_batch import Allocation
from doctor.testing import lines


@rule(
    id="ENV012",
    severity=Severity.WARNING,
    reads=ShellFile,
    cases=lambda: (
        FileFails(
            "one CPU for eight ranks",
            lines(
                "#SBATCH --ntasks-per-node=1",
                "#SBATCH --cpus-per-task=1",
                "#SBATCH --gres=gpu:8",
                "srun torchrun --nproc-per-node=8 train.py  # !",
            ),
            name="job.sbatch",
        ),
        FileFails(
            "one CPU for each rank",
            lines(
                "#SBATCH --ntasks-per-node=4",
                "#SBATCH --cpus-per-task=1",
                "#SBATCH --gpus-per-node=4",
                "srun python train.py  # !",
            ),
            name="job.sbatch",
        ),
        FileFails(
            "the step takes less than the job has",
            lines(
                "#SBATCH --cpus-per-task=32",
                "#SBATCH --gres=gpu:4",
                "srun --cpus-per-task=2 torchrun --nproc-per-node=4 train.py  # !",
            ),
            name="job.sbatch",
        ),
        FilePasses(
            "eight CPUs for each rank",
            lines(
                "#SBATCH --ntasks-per-node=4",
                "#SBATCH --cpus-per-task=8",
                "#SBATCH --gpus-per-node=4",
                "srun python train.py",
            ),
            name="job.sbatch",
        ),
        FilePasses(
            "nothing is said of CPUs",
            lines("#SBATCH --gres=gpu:4", "srun torchrun --nproc-per-node=4 x.py"),
            name="a.sh",
        ),
        FilePasses(
            "a batch script with the CPUs of eight tasks",
            lines(
                "#SBATCH --ntasks-per-node=8",
                "#SBATCH --cpus-per-task=4",
                "#SBATCH --gres=gpu:8",
                "torchrun --standalone --nproc-per-node=8 x.py",
            ),
            name="job.sbatch",
        ),
        FilePasses(
            "no GPU", lines("#SBATCH --ntasks=64", "#SBATCH --cpus-per-task=1", "srun python simulate.py"), name="a.sh"
        ),
        FilePasses(
            "one CPU for a single process",
            lines("#SBATCH --ntasks=1", "#SBATCH --cpus-per-task=1", "#SBATCH --gres=gpu:1", "srun python train.py"),
            name="job.sbatch",
        ),
    ),
)
def cpu_share_too_small(file: ShellFile) -> Iterator[Violation]:
    """Ask whether each task gets as many CPUs as it starts ranks, and more than one.

    Why it hurts: a rank computes, loads data and answers NCCL's proxy on a core that it shares; the slowest sets the
    pace of all.
    Fix: `#SBATCH --cpus-per-task=<CPUs of the host / tasks of the host>`, and give it to srun too:
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
            yield Violation(
                start.launch.place,
                f"{cpus} CPU{'' if cpus == 1 else 's'} for {_words(ranks)} with a GPU each",
                evidence=(("cpus_per_task", cpus), ("ranks_per_task", ranks)),
            )


def _cpus(given: Allocation, start: ProcessLaunch) -> int | None:
    """CPUs of a task of a step; a batch script has those of all tasks of its host."""
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


def _words(ranks: int) -> str:
    return "one rank" if ranks == 1 else f"{ranks} ranks"
