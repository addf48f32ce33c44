"""ENV014: a process in a SLURM allocation that srun did not start."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.analysis.launch_origin import launch_number, starts_tasks_unlaunched, whole_number
from doctor.api import Finding, Job, Severity, Verdict, check
from doctor.facts import LaunchFacts
from doctor.testing import Fails, JobBuilder, Passes, healthy


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
        Fails(
            "a batch script of four tasks per host",
            _allocation().launched(SLURM_NTASKS_PER_NODE="4", SLURM_NNODES="1"),
            ranks=(0,),
        ),
        Fails(
            "the shell of salloc in a named job with tasks per host",
            _allocation().launched(SLURM_NTASKS_PER_NODE="4", SLURM_NNODES="1", without=("SLURM_PROCID",)),
            ranks=(0,),
        ),
    ),
)
def srun_missing(job: Job) -> Iterator[Verdict]:
    """Ask whether a process in an allocation of several tasks was started by srun or another launcher.

    Why it hurts: Lightning assumes that this process is the task of SLURM_PROCID, starts no others, and waits at
    "Initializing distributed: GLOBAL_RANK: 0, MEMBER: 1/N" until the timeout. Without SLURM_NTASKS_PER_NODE, it raises
    RuntimeError.
    Fix: Start with `srun --ntasks-per-node=N python train.py`, or with torchrun in a job with `--ntasks-per-node=1`.
    """
    for launch, identical in job.each(LaunchFacts):
        if not starts_tasks_unlaunched(job, launch):
            continue
        names = ("SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "SLURM_PROCID", "SLURM_STEP_ID", "SLURM_JOB_NAME")
        yield Finding(
            f"SLURM_NTASKS={launch.get('SLURM_NTASKS')}, but srun did not start this process (no SLURM_STEP_ID)",
            ranks=identical.ranks,
            evidence={**{name: launch.get(name) for name in names}, "launcher": launch.launcher},
            effect=_effect(launch),
            fix=_fix(launch),
            explains=() if "SLURM_STEP_NUM_TASKS" in launch.filled else ("ENV010",),
        )


def _effect(launch: LaunchFacts) -> str:
    """What SLURMEnvironment of Lightning 2.6 does (lightning/fabric/plugins/environments/slurm.py)."""
    if not launch.get("SLURM_NTASKS_PER_NODE"):
        return "Lightning raises RuntimeError, because SLURM_NTASKS is set without SLURM_NTASKS_PER_NODE."
    task = launch.get("SLURM_PROCID")
    if task is None:
        return "Lightning reads the number of the task from SLURM_PROCID, which is not set, and raises KeyError."
    return (
        f"Lightning assumes that this process is task {task} (SLURM_PROCID), starts no others, and waits at "
        f'"Initializing distributed: GLOBAL_RANK: {task}, MEMBER: '
        f'{_member(task)}/{launch.get("SLURM_NTASKS")}" until the timeout.'
    )


def _member(task: str) -> str:
    number = whole_number(task)
    return "N" if number is None else str(number + 1)


def _fix(launch: LaunchFacts) -> str:
    tasks, hosts = launch_number(launch, "SLURM_NTASKS"), launch_number(launch, "SLURM_NNODES")
    per_host = tasks // hosts if tasks and hosts and tasks % hosts == 0 else None
    how = f"`srun --ntasks-per-node={per_host}`" if per_host else "`srun --ntasks-per-node` and one task per GPU"
    return (
        f"Start {f'all {tasks}' if tasks else 'the'} tasks with {how}, or in an interactive shell run `export "
        "SLURM_JOB_NAME=interactive` first."
    )


def _allocation() -> JobBuilder:
    return healthy(hosts=1, per_host=1).launched(
        SLURM_JOB_ID="7", SLURM_JOB_NAME="train", SLURM_NTASKS="4", SLURM_PROCID="0", SLURM_LOCALID="0"
    )
