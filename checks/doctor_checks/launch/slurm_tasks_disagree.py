"""ENV010: SLURM starts other tasks than the job needs."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from doctor.api import (
    Alike,
    Finding,
    Job,
    LaunchFacts,
    Scope,
    Severity,
    Sick,
    Sketch,
    Skip,
    SlurmFacts,
    TrainerFacts,
    Verdict,
    Well,
    check,
    has_value,
    healthy,
    inner_launcher,
    is_interactive_job,
    is_lightning_slurm,
    launch_number,
    merge,
    slurm_step,
    starts_tasks_unlaunched,
)

NUMBERS = (
    ("SLURM_PROCID", "SLURM_NTASKS", "task", "tasks"),
    ("SLURM_LOCALID", "SLURM_NTASKS", "local task", "tasks"),
    ("SLURM_NODEID", "SLURM_NNODES", "node", "nodes"),
)
"""A number of SLURM, the count that it must stay below, and both in words."""

SHOWN = (
    "SLURM_JOB_ID",
    "SLURM_JOB_NAME",
    "SLURM_STEP_ID",
    "SLURM_NTASKS",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_NODEID",
    "SLURM_NNODES",
    "SLURM_NTASKS_PER_NODE",
)
"""Variables that stand in the evidence."""


@check(
    id="ENV010",
    severity=Severity.ERROR,
    scope=Scope.JOB,
    when="PM",
    needs=(LaunchFacts,),
    peers=False,
    cases=lambda: (
        Well("as many tasks as ranks", healthy(hosts=2, per_host=4).by_srun()),
        Well("no SLURM", healthy(hosts=2, per_host=2)),
        Well(
            "one task a node, torchrun inside",
            healthy(hosts=2, per_host=2).launched(
                SLURM_STEP_ID="0", SLURM_NTASKS="2", SLURM_STEP_NUM_TASKS="2", SLURM_NTASKS_PER_NODE="1"
            ),
        ),
        Well(
            "a helper step of one task inherits the job's tasks per node",
            _task().launched(SLURM_NTASKS_PER_NODE="8", SLURM_JOB_NUM_NODES="4"),
        ),
        Well(
            "fewer tasks than tasks per node times nodes",
            healthy(hosts=2, per_host=3).by_srun().launched(SLURM_NTASKS_PER_NODE="4"),
        ),
        Well(
            "the shell of an interactive allocation, in a step of its own",
            _task().launched(SLURM_NTASKS="8", SLURM_JOB_NAME="interactive"),
        ),
        Well("a batch script of one task", _batch().launched(SLURM_NTASKS="1", SLURM_NTASKS_PER_NODE="1")),
        Well(
            "a part of a heterogeneous job, whose task numbers go on from part to part",
            _task().launched(SLURM_PROCID="5", SLURM_NTASKS="4", SLURM_STEP_NUM_TASKS="4", SLURM_HET_SIZE="2"),
        ),
        Sick("the step runs one of four tasks", _task().launched(SLURM_NTASKS="4"), ranks=(0,)),
        Sick(
            "task 5 of 4",
            _task().launched(SLURM_PROCID="5", SLURM_NTASKS="4", SLURM_STEP_NUM_TASKS="4"),
            ranks=(0,),
        ),
        Sick(
            "eight devices asked for and four tasks a node",
            healthy(hosts=2, per_host=4).by_srun().put(TrainerFacts(source="PL_TRAINER_*", devices=8)),
            ranks=(0, 1, 2, 3, 4, 5, 6, 7),
        ),
        Sick(
            "four hosts asked for and two allocated",
            healthy(hosts=2, per_host=2).by_srun().put(TrainerFacts(source="PL_TRAINER_*", node_count=4)),
            ranks=(0, 1, 2, 3),
        ),
        Sick(
            "four devices asked for in a step of one task",
            _task().launched(without=("SLURM_NTASKS_PER_NODE",)).put(TrainerFacts(source="LT_*", devices=4)),
            ranks=(0,),
        ),
        Sick(
            "python in a batch script of eight tasks, without srun",
            _batch().launched(SLURM_NTASKS="8", SLURM_NTASKS_PER_NODE="8"),
            ranks=(0,),
        ),
    ),
)
def slurm_tasks_disagree(job: Job) -> Iterator[Verdict]:
    """Ask whether SLURM starts as many tasks as the training needs.

    Why it hurts: the ranks that exist wait for tasks that SLURM never starts, or Lightning refuses the numbers.
    Fix: request one task for each GPU (`--nodes=2 --ntasks-per-node=8`) and start by `srun python train.py`; with
    torchrun, one task for each node (`srun --ntasks-per-node=1 torchrun ...`).
    """
    inside = False
    findings: list[Finding] = []
    for launch, alike in job.each(LaunchFacts, also=(TrainerFacts, SlurmFacts)):
        if not any(has_value(launch, name) for name in ("SLURM_NTASKS", "SLURM_STEP_NUM_TASKS", "SLURM_JOB_ID")):
            continue
        inside = True
        if inner_launcher(launch) is None:
            findings.extend(islice(_contradictions(job, launch, alike), 1))
    yield from merge(findings)
    if not inside:
        yield Skip("not inside a SLURM job")


def _contradictions(job: Job, launch: LaunchFacts, alike: Alike) -> Iterator[Finding]:
    """What is wrong, the plainest first; the rest follows from it."""
    yield from _judge_words(launch, alike)
    yield from _judge_numbers(launch, alike)
    yield from _judge_step(launch, alike)
    yield from _judge_trainer(launch, alike)
    yield from _judge_batch(job, launch, alike)
    yield from _judge_world(launch, alike)


def _judge_words(launch: LaunchFacts, alike: Alike) -> Iterator[Finding]:
    names = ("SLURM_NTASKS", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID")
    for name in names:
        if launch.get(name) is not None and launch_number(launch, name) is None:
            yield Finding(
                f"{name}={launch.get(name)!r} is not a number",
                ranks=alike.ranks,
                evidence={name: launch.get(name)},
                fix=f"`unset {name}`: srun and sbatch set it themselves; request tasks by --ntasks.",
            )


def _judge_numbers(launch: LaunchFacts, alike: Alike) -> Iterator[Finding]:
    """In a heterogeneous job SLURM_PROCID counts over all parts and SLURM_NTASKS is that of one (srun(1))."""
    if has_value(launch, "SLURM_HET_SIZE"):
        return
    for name, count_name, word, words in NUMBERS:
        number, count = launch_number(launch, name), launch_number(launch, count_name)
        if number is not None and count is not None and not 0 <= number < count:
            yield Finding(
                f"{name}={number}, but {count_name}={count}: there is no {word} {number} among {count} {words}",
                ranks=alike.ranks,
                evidence=_slurm_variables(launch),
                effect="Scripts and Lightning take these for rank and world size: torch refuses the rank, or hangs.",
                fix=f"`unset {name} {count_name}`, then `srun --ntasks={max(count, 1)} python train.py` sets both.",
            )


def _judge_step(launch: LaunchFacts, alike: Alike) -> Iterator[Finding]:
    """A step gets its own size as SLURM_NTASKS from srun; where they differ, somebody kept or set the job's."""
    needed, started = launch_number(launch, "SLURM_NTASKS"), launch_number(launch, "SLURM_STEP_NUM_TASKS")
    if needed is None or started is None or needed == started or is_interactive_job(launch):
        return
    yield Finding(
        f"SLURM_NTASKS={needed}, but this step runs {started} {'task' if started == 1 else 'tasks'} "
        f"(SLURM_STEP_NUM_TASKS={started})",
        ranks=alike.ranks,
        evidence=_slurm_variables(launch),
        effect=f"Lightning and scripts that read SLURM_NTASKS wait for {needed} ranks, and only {started} "
        f"{'exists' if started == 1 else 'exist'}."
        if needed > started
        else f"{started} tasks run and believe that they are {needed}: some have no rank in the group.",
        fix=f"Start all of them: `srun --ntasks={needed} python train.py` (not from inside another srun), without "
        "--preserve-env and without exporting SLURM_NTASKS; or request as many tasks as you start.",
    )


def _judge_trainer(launch: LaunchFacts, alike: Alike) -> Iterator[Finding]:
    """Lightning compares both and raises (SLURMEnvironment.validate_settings)."""
    trainer = alike.find(TrainerFacts)
    if trainer is None or not is_lightning_slurm(launch):
        return
    pairs = (
        ("devices", trainer.devices, "SLURM_NTASKS_PER_NODE", "--ntasks-per-node"),
        ("num_nodes", trainer.node_count, "SLURM_NNODES", "--nodes"),
    )
    for argument, asked, name, option in pairs:
        given = launch_number(launch, name)
        if asked is not None and given is not None and asked != given:
            yield Finding(
                f"the Trainer is told {argument}={asked}, but {name}={given}",
                ranks=alike.ranks,
                evidence={argument: asked, name: given, "source": trainer.source},
                effect="Lightning ends with a ValueError before training starts.",
                fix=f"`#SBATCH {option}={asked}`, or {argument}={given} in the Trainer.",
            )


def _judge_world(launch: LaunchFacts, alike: Alike) -> Iterator[Finding]:
    """Without --ntasks-per-node Lightning has nothing to compare; it starts with the tasks that are there."""
    trainer, step = alike.find(TrainerFacts), slurm_step(launch)
    if trainer is None or trainer.devices is None or step is None or not is_lightning_slurm(launch):
        return
    nodes = trainer.node_count or step.nodes or 1
    if step.size is None or step.size == trainer.devices * nodes or has_value(launch, "SLURM_NTASKS_PER_NODE"):
        return
    yield Finding(
        f"the Trainer is told devices={trainer.devices} on {nodes} {'host' if nodes == 1 else 'hosts'}, "
        f"but the step runs {step.size} {'task' if step.size == 1 else 'tasks'}",
        ranks=alike.ranks,
        evidence={"devices": trainer.devices, "num_nodes": nodes, **_slurm_variables(launch)},
        effect="Lightning trains with the tasks that exist and deals out the data as if there were others.",
        fix=f"`#SBATCH --nodes={nodes} --ntasks-per-node={trainer.devices}` and `srun python train.py`.",
    )


def _judge_batch(job: Job, launch: LaunchFacts, alike: Alike) -> Iterator[Finding]:
    """The script itself has SLURM_PROCID=0 from sbatch; a shell of salloc has none."""
    slurm = alike.find(SlurmFacts)
    batch = has_value(launch, "SLURM_PROCID") or (slurm is not None and slurm.batch)
    tasks = launch_number(launch, "SLURM_NTASKS")
    if batch and tasks and slurm_step(launch) is None and starts_tasks_unlaunched(job, launch):
        yield Finding(
            f"a batch script of {tasks} tasks starts 1 process: {tasks - 1} of its ranks will never exist",
            ranks=alike.ranks,
            evidence=_slurm_variables(launch),
            effect="SLURM runs the script once, on the first node; only srun starts the other tasks.",
            fix="`srun python train.py` in the script in place of `python train.py`.",
        )


def _slurm_variables(launch: LaunchFacts) -> dict[str, object]:
    return {name: launch.get(name) for name in SHOWN if launch.get(name) is not None}


def _task() -> Sketch:
    return healthy(hosts=1, per_host=1).by_srun()


def _batch() -> Sketch:
    return healthy(hosts=1, per_host=1).launched(
        SLURM_JOB_ID="7", SLURM_JOB_NAME="train", SLURM_PROCID="0", SLURM_LOCALID="0", SLURM_NODEID="0"
    )
