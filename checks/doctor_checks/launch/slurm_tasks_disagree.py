"""ENV010: the SLURM tasks do not match the ranks of the job."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from uuid import UUID

from doctor.analysis.launch_origin import (
    inner_launcher,
    is_interactive_job,
    is_lightning_slurm,
    joined_ranks,
    launch_kinds,
    launch_number,
    slurm_step,
    starts_tasks_unlaunched,
)
from doctor.analysis.logs.event_timeline import failed_before, parse_count, set_up_after
from doctor.api import (
    EventGroup,
    Finding,
    IdenticalRanks,
    Job,
    Scope,
    Severity,
    Skip,
    Verdict,
    check,
    event_groups,
    finding_from_logs,
    is_logged,
    merge,
)
from doctor.facts import Event, LaunchFacts, SlurmFacts, TrainerFacts
from doctor.testing import Fails, JobBuilder, Passes, healthy, logged

NUMBERS = (
    ("SLURM_PROCID", "SLURM_NTASKS"),
    ("SLURM_LOCALID", "SLURM_NTASKS"),
    ("SLURM_NODEID", "SLURM_NNODES"),
)
"""An index of SLURM, and the count that it must be below."""

SHOWN = (
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "SLURM_NTASKS",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_PROCID",
    "SLURM_NTASKS_PER_NODE",
)
"""Variables shown in the evidence, besides those that a finding compares."""


def _torchrun_per_node(world: str, run_id: str = "7") -> JobBuilder:
    """One rank of torchrun with eight ranks a node, which one task of a step on two nodes started."""
    return healthy(per_host=1).launched(
        WORLD_SIZE=world,
        LOCAL_WORLD_SIZE="8",
        TORCHELASTIC_RUN_ID=run_id,
        SLURM_JOB_ID="7",
        SLURM_NTASKS="2",
        SLURM_PROCID="0",
        SLURM_LOCALID="0",
        SLURM_STEP_ID="0",
        SLURM_STEP_NUM_NODES="2",
        SLURM_STEP_TASKS_PER_NODE="1(x2)",
    )


def _by_index(job: Job) -> Iterator[Finding]:
    """Report a Lightning local rank beyond the Trainer's list of devices: SLURM started more tasks than devices."""
    if job.evidence is None or not is_logged(job, "slurm."):
        return
    events = tuple(
        event
        for event in job.evidence.of("python.exception")
        if event.value("type") == "IndexError" and any(frame.function == "root_device" for frame in event.frames[:2])
    )
    if events:
        yield finding_from_logs(
            EventGroup(events[0].kind, events),
            "SLURM started more tasks per host than the Trainer has devices",
            ranks=(),
            evidence={"raised_in": _place(events[0])},
            confidence=0.95,
            fix="Set `--ntasks-per-node` and `--gpus-per-node` to the number of devices of the Trainer.",
        )


def _place(event: Event) -> str | None:
    frame = next((frame for frame in event.frames if frame.function == "root_device"), None)
    return f"{frame.file}:{frame.line} ({frame.function})" if frame else None


def _by_slurm(job: Job) -> Iterator[Finding]:
    """Report a step that SLURM rejects, or that waits for CPUs that its own batch script uses."""
    # Open MPI gets its slots from the SLURM allocation; without SLURM, from a list of hosts.
    of_mpi = ("mpi.slots",) if is_logged(job, "slurm.") else ()
    for group in event_groups(job, "slurm.refused", "slurm.step_waits", *of_mpi, by=("why",)):
        why = group.value("why", "why2", "why3") or "there are not enough slots"
        if not set_up_after(job, group.events[-1]):
            waits = group.kind == "slurm.step_waits"
            shown = why if why != "failed to distribute tasks" else "they could not be distributed to the CPUs"
            yield finding_from_logs(
                group,
                f"srun waits to start the step: {why}" if waits else f"SLURM did not start the tasks: {shown}",
                ranks=(),
                confidence=0.85,
                fix=_FREE_THE_NODES if waits else _fix_of(why),
            )


_FREE_THE_NODES = "End the step that uses these nodes, or start this one with `srun --overlap`."
_FIXES = (
    (
        ("layout tasks", "distribute tasks", "cpu bind"),
        "Remove the CPU binding of an outer step:\nunset SLURM_CPU_BIND SLURM_CPU_BIND_TYPE SLURM_CPU_BIND_LIST",
    ),
    (("generic resource", "gres", "tres"), "Request GPUs by a name that `sinfo -o '%N %G'` lists."),
    (
        ("processors", "node count", "tasks"),
        "Request no more nodes, tasks and CPUs in srun than `#SBATCH` requests for the job.",
    ),
    (("slots",), "Request as many tasks as processes with `#SBATCH --ntasks`, or lower `mpirun -np`."),
)
"""Words of SLURM's reason, and what to change."""
_FIT_THE_NODES = (
    "Request no more CPUs, memory and GPUs per node than a node of the partition has (`sinfo -o '%P %c %m %G'`)."
)


def _fix_of(why: str) -> str:
    reason = why.lower()
    return next((fix for words, fix in _FIXES if any(word in reason for word in words)), _FIT_THE_NODES)


def _by_waiting(job: Job) -> Iterator[Finding]:
    """Report a job in which Lightning detects SLURM and only some ranks join."""
    for group in event_groups(job, "pl.init_dist", by=("w",)):
        size, last, times = parse_count(group.value("w")) or 0, group.events[-1], joined_ranks(group)
        came = len(times)
        alone = is_logged(job, "pl.slurm_requeue.harmless") and came == 1 < size
        twice = is_logged(job, "slurm.script") and 0 < came < size and min(times.values()) > 1
        if not alone and not twice:
            continue
        if not set_up_after(job, last) and not failed_before(job, last):
            yield finding_from_logs(
                group,
                f"Only {came} of {size} ranks joined, probably because SLURM started another number of tasks",
                ranks=(),
                evidence={"came": came, "world_size": size},
                confidence=0.6,
                fix=f"Set `#SBATCH --nodes` and `#SBATCH --ntasks-per-node` so that {size} tasks start, and start "
                "the script with `srun`.",
                explains=("ENV005", "ENV009"),
            )


@check(
    id="ENV010",
    severity=Severity.ERROR,
    scope=Scope.JOB,
    when="PM",
    needs=(LaunchFacts,),
    compares_ranks=False,
    from_logs=(_by_slurm, _by_waiting, _by_index),
    impacts={
        r"ignores --ntasks-per-node": (
            "A script that relies on --ntasks-per-node waits for ranks that are never started."
        ),
        r"^srun waits": "No rank starts until SLURM can place the step.",
        r"did not start the tasks": "The job or the job step does not run, so no rank starts.",
        r"as a number|not a number": "Programs that read the variable as a number fail with a ValueError at startup.",
        r"^Trainer\(|^--ntasks|requires --ntasks-per-node": "Lightning raises the error at startup, before training.",
        r"more than once|more tasks per host": "The tasks without a device fail, and the other ranks wait for them.",
        r"^The Trainer requests": "Lightning starts the missing processes itself, on this host only.",
        r"joined": "The ranks that started wait for the others until the timeout.",
    },
    cases=lambda: (
        Passes("torchrun on each of two nodes for one job", _torchrun_per_node(world="16")),
        Fails(
            "torchrun on each of two nodes for itself, because the rendezvous is localhost",
            _torchrun_per_node(world="8"),
            ranks=(0,),
            severity=Severity.WARNING,
        ),
        Fails(
            "torchrun --standalone on each of two nodes, as a sweep of independent runs has it",
            _torchrun_per_node(world="8", run_id="0e8f4d7c-52a1-4c0e-9b57-6f6f3d1f8a11"),
            ranks=(0,),
            severity=Severity.INFO,
        ),
        Fails(
            "Lightning finds no device for a task",
            logged(
                "[rank6]: Traceback (most recent call last):",
                '[rank6]:   File "/usr/lib/python3/dist-packages/lightning/pytorch/strategies/ddp.py", line 118, in '
                "root_device",
                "[rank6]:     return self.parallel_devices[self.local_rank]",
                "[rank6]: IndexError: list index out of range",
                "srun: error: node3: tasks 6-7: Exited with exit code 1",
            ),
        ),
        Fails(
            "the tasks do not fit the CPUs of the step",
            logged(
                "srun: error: JobId=125452 failed to distribute tasks (bind_type:threads,mask_cpu,one_thread) - this "
                "should never happen",
                "srun: error: Task launch for StepId=125452.4 failed on node n7: Unable to layout tasks on given cpus",
                "srun: error: Application launch failed: Unable to layout tasks on given cpus",
            ),
        ),
        Passes("as many tasks as ranks", healthy(hosts=2, per_host=4).by_srun()),
        Passes("no SLURM", healthy(hosts=2, per_host=2)),
        Passes(
            "one task a node, torchrun inside",
            healthy(hosts=2, per_host=2).launched(
                SLURM_STEP_ID="0", SLURM_NTASKS="2", SLURM_STEP_NUM_TASKS="2", SLURM_NTASKS_PER_NODE="1"
            ),
        ),
        Passes(
            "a helper step of one task inherits the job's tasks per node",
            _task().launched(SLURM_NTASKS_PER_NODE="8", SLURM_JOB_NUM_NODES="4"),
        ),
        Passes(
            "fewer tasks than tasks per node times nodes",
            healthy(hosts=2, per_host=3).by_srun().launched(SLURM_NTASKS_PER_NODE="4"),
        ),
        Passes(
            "the shell of an interactive allocation, in a step of its own",
            _task().launched(SLURM_NTASKS="8", SLURM_JOB_NAME="interactive"),
        ),
        Passes("a batch script of one task", _batch().launched(SLURM_NTASKS="1", SLURM_NTASKS_PER_NODE="1")),
        Passes(
            "a part of a heterogeneous job, whose task numbers go on from part to part",
            _task().launched(SLURM_PROCID="5", SLURM_NTASKS="4", SLURM_STEP_NUM_TASKS="4", SLURM_HET_SIZE="2"),
        ),
        Fails("the step runs one of four tasks", _task().launched(SLURM_NTASKS="4"), ranks=(0,)),
        Fails(
            "task 5 of 4",
            _task().launched(SLURM_PROCID="5", SLURM_NTASKS="4", SLURM_STEP_NUM_TASKS="4"),
            ranks=(0,),
        ),
        Fails(
            "eight devices asked for and four tasks a node",
            healthy(hosts=2, per_host=4).by_srun().put(TrainerFacts(source="PL_TRAINER_*", devices=8)),
            ranks=(0, 1, 2, 3, 4, 5, 6, 7),
        ),
        Fails(
            "four hosts asked for and two allocated",
            healthy(hosts=2, per_host=2).by_srun().put(TrainerFacts(source="PL_TRAINER_*", node_count=4)),
            ranks=(0, 1, 2, 3),
        ),
        Fails(
            "four devices asked for in a step of one task",
            _task().launched(without=("SLURM_NTASKS_PER_NODE",)).put(TrainerFacts(source="LT_*", devices=4)),
            ranks=(0,),
        ),
        Fails(
            "python in a batch script of eight tasks, without srun",
            _batch().launched(SLURM_NTASKS="8", SLURM_NTASKS_PER_NODE="8"),
            ranks=(0,),
        ),
        Passes(
            "a step that had to wait, and then ran",
            logged(
                "srun: Job 4711 step creation temporarily disabled, retrying (Requested nodes are busy)",
                "srun: Step created for job 4711",
                "All distributed processes registered. Starting with 8 processes",
            ),
        ),
        Fails(
            "one task of eight",
            logged(
                "SLURM auto-requeueing enabled. Setting signal handlers.",
                "Initializing distributed: GLOBAL_RANK: 0, MEMBER: 1/8",
            ),
        ),
    ),
)
def slurm_tasks_disagree(job: Job) -> Iterator[Verdict]:
    """Ask whether SLURM starts as many tasks as the training needs.

    Why it hurts: ranks wait for tasks that SLURM never starts, or Lightning rejects the settings.
    Fix: Request one task per GPU and start them with `srun python train.py`, or one task per node with torchrun.
    """
    inside = False
    findings: list[Finding] = []
    may_be_inside = not all(launch.filled.keys().isdisjoint(_OF_JOB) for launch in launch_kinds(job))
    for launch, identical in job.each(LaunchFacts, also=(TrainerFacts, SlurmFacts)) if may_be_inside else ():
        if launch.filled.keys().isdisjoint(_OF_JOB):
            continue
        inside = True
        if inner_launcher(launch) is None:
            findings.extend(islice(_contradictions(job, launch, identical), 1))
        else:
            findings.extend(_judge_torchrun(launch, identical))
    yield from merge(findings)
    if not inside:
        yield Skip("not inside a SLURM job")


_OF_JOB = ("SLURM_NTASKS", "SLURM_STEP_NUM_TASKS", "SLURM_JOB_ID")


def _contradictions(job: Job, launch: LaunchFacts, identical: IdenticalRanks) -> Iterator[Finding]:
    names = ("SLURM_NTASKS", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID")
    for name in names:
        if launch.get(name) is not None and launch_number(launch, name) is None:
            yield Finding(
                f"{name}={launch.get(name)!r} is not a number",
                ranks=identical.ranks,
                evidence={name: launch.get(name)},
                fix=f"unset {name}",
            )
    yield from _judge_numbers(launch, identical)
    yield from _judge_step(launch, identical)
    yield from _judge_trainer(launch, identical)
    # sbatch sets SLURM_PROCID=0 for the batch script; a shell of salloc has none
    slurm = identical.find(SlurmFacts)
    batch = "SLURM_PROCID" in launch.filled or (slurm is not None and slurm.batch)
    tasks = launch_number(launch, "SLURM_NTASKS")
    if batch and tasks and slurm_step(launch) is None and starts_tasks_unlaunched(job, launch):
        yield Finding(
            f"The batch script requests {tasks} tasks but starts 1 process; {tasks - 1} "
            f"{'rank is' if tasks == 2 else 'ranks are'} never started",
            ranks=identical.ranks,
            evidence=_slurm_variables(launch),
            effect=f"A script that reads SLURM_NTASKS waits for {tasks} ranks until the timeout: SLURM runs the batch "
            "script once, and only srun starts all tasks.",
            fix="Put `srun` before the command that starts the training in the batch script.",
        )
    # Without --ntasks-per-node Lightning cannot compare the numbers; it starts with the tasks that exist
    trainer, step = identical.find(TrainerFacts), slurm_step(launch)
    if trainer is None or trainer.devices is None or step is None or not is_lightning_slurm(launch):
        return
    nodes = trainer.node_count or step.nodes or 1
    if step.size is None or step.size == trainer.devices * nodes or "SLURM_NTASKS_PER_NODE" in launch.filled:
        return
    yield Finding(
        f"The Trainer uses devices={trainer.devices} on {nodes} {'host' if nodes == 1 else 'hosts'}, "
        f"but the step runs {step.size} {'task' if step.size == 1 else 'tasks'}",
        ranks=identical.ranks,
        evidence={"devices": trainer.devices, "num_nodes": nodes, **_slurm_variables(launch)},
        effect="Lightning trains only on the ranks that exist, but shards the data for all configured ranks, so some "
        "samples are never read.",
        fix=f"Use `#SBATCH --nodes={nodes} --ntasks-per-node={trainer.devices}`, and start the script with `srun`.",
    )


def _judge_numbers(launch: LaunchFacts, identical: IdenticalRanks) -> Iterator[Finding]:
    """Report indices beyond their count. In a heterogeneous job SLURM_PROCID counts over all components, but
    SLURM_NTASKS is that of one component (srun(1))."""
    if "SLURM_HET_SIZE" in launch.filled:
        return
    for name, count_name in NUMBERS:
        number, count = launch_number(launch, name), launch_number(launch, count_name)
        if number is not None and count is not None and not 0 <= number < count:
            yield Finding(
                f"{name}={number} is out of range: {count_name}={count}",
                ranks=identical.ranks,
                evidence={name: number, count_name: count, **_slurm_variables(launch)},
                effect=f"Scripts and Lightning use {name} and {count_name} as rank and world size, so "
                "init_process_group() rejects the rank or blocks until the timeout.",
                fix=f"Run `unset {name} {count_name}`, and start the script with `srun`.",
            )


def _judge_step(launch: LaunchFacts, identical: IdenticalRanks) -> Iterator[Finding]:
    """Report a step whose size differs from SLURM_NTASKS. srun sets it to the size of the step; if they differ, the
    value of the job was kept or exported."""
    needed, started = launch_number(launch, "SLURM_NTASKS"), launch_number(launch, "SLURM_STEP_NUM_TASKS")
    if needed is None or started is None or needed == started or is_interactive_job(launch):
        return
    yield Finding(
        f"SLURM_NTASKS={needed}, but this step runs {started} {'task' if started == 1 else 'tasks'} "
        f"(SLURM_STEP_NUM_TASKS={started})",
        ranks=identical.ranks,
        evidence=_slurm_variables(launch),
        effect=f"Lightning and scripts that read SLURM_NTASKS wait for {needed} ranks, but only {started} "
        f"{'exists' if started == 1 else 'exist'}."
        if needed > started
        else f"{started} tasks run with a world size of {needed}: some are not in the process group.",
        fix="Start all tasks with `srun` directly in the batch script.",
    )


def _judge_torchrun(launch: LaunchFacts, identical: IdenticalRanks) -> Iterator[Finding]:
    """Report torchrun that srun started once on each of several nodes, and that forms a world of one node alone."""
    step, nodes = slurm_step(launch), launch_number(launch, "SLURM_STEP_NUM_NODES")
    world, local = launch_number(launch, "WORLD_SIZE"), launch_number(launch, "LOCAL_WORLD_SIZE")
    if "TORCHELASTIC_RUN_ID" not in launch.filled or step is None or step.most_per_node != 1 or nodes is None:
        return
    if nodes > 1 and world is not None and world == local:
        standalone = _is_standalone(launch)
        yield Finding(
            f"torchrun runs on {nodes} hosts (SLURM_STEP_NUM_NODES), but WORLD_SIZE={world} covers only one of them",
            ranks=identical.ranks,
            evidence={"SLURM_STEP_NUM_NODES": nodes, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": local},
            effect="Each host trains a separate model, which is intended only for independent runs."
            if standalone
            else "Each host trains a separate model, or waits for ranks that have joined another rendezvous.",
            fix=f"To train one model on all hosts, start torchrun with `--nnodes={nodes} --rdzv-backend=c10d "
            '--rdzv-id=$SLURM_JOB_ID --rdzv-endpoint="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n1)"`'
            f"{' instead of `--standalone`' if standalone else ''}.",
            severity=Severity.INFO if standalone else Severity.WARNING,
        )


def _is_standalone(launch: LaunchFacts) -> bool:
    """Whether torchrun got ``--standalone``, which makes a random UUID of the run (torch/distributed/run.py): a job of
    one node on purpose, for example one run of a sweep."""
    try:
        return UUID(launch.get("TORCHELASTIC_RUN_ID") or "").version == 4
    except ValueError:
        return False


def _judge_trainer(launch: LaunchFacts, identical: IdenticalRanks) -> Iterator[Finding]:
    """Report settings that Lightning compares and rejects (SLURMEnvironment.validate_settings)."""
    trainer = identical.find(TrainerFacts)
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
                f"The Trainer uses {argument}={asked}, but {name}={given}",
                ranks=identical.ranks,
                evidence={argument: asked, name: given, "source": trainer.source},
                effect="Lightning raises ValueError before training starts.",
                fix=f"Use `#SBATCH {option}={asked}`, or `Trainer({argument}={given})`.",
            )


def _slurm_variables(launch: LaunchFacts) -> dict[str, object]:
    return {name: launch.get(name) for name in SHOWN if launch.get(name) is not None}


def _task() -> JobBuilder:
    return healthy(hosts=1, per_host=1).by_srun()


def _batch() -> JobBuilder:
    return healthy(hosts=1, per_host=1).launched(
        SLURM_JOB_ID="7", SLURM_JOB_NAME="train", SLURM_PROCID="0", SLURM_LOCALID="0", SLURM_NODEID="0"
    )
