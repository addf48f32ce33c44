"""ENV009: variables of two launchers contradict each other, or stale ones are set."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.analysis.interface_choice import release_of
from doctor.analysis.launch_origin import (
    DirectLaunch,
    SlurmStep,
    devices_asked,
    direct_launch,
    is_left_alone,
    is_lightning_slurm,
    joined_ranks,
    launch_kinds,
    launch_number,
    may_be_direct,
    slurm_step,
)
from doctor.analysis.logs.event_timeline import ended_after, failed_before, parse_count, set_up_after, spans_hosts
from doctor.api import (
    EventGroup,
    Finding,
    IdenticalRanks,
    Job,
    Severity,
    Verdict,
    check,
    event_groups,
    finding_from_logs,
    is_logged,
    merge,
    ranks_in_words,
)
from doctor.facts import Event, LaunchFacts, Package, SoftwareFacts, TrainerFacts
from doctor.testing import Fails, JobBuilder, Passes, healthy, logged
from doctor_checks.launch._restart_messages import RESTARTS

LAST_THAT_WAITS = (1, 2)
"""Before this release Lightning treated any NODE_RANK, even 0, as a sign that torchelastic starts its processes
(pytorch_lightning/accelerators/accelerator_connector.py of 1.1)."""


MOST_DEVICES = 16
"""GPUs that one host may have: up to as many ranks may belong to one host."""


def _joined_twice(job: Job) -> Iterator[Finding]:
    """Report several hosts that each number their ranks from 0: some ranks join twice, the others never."""
    if is_logged(job, *RESTARTS):
        return
    for group in event_groups(job, "pl.init_dist", by=("w",)):
        times = joined_ranks(group)
        if (
            1 < len(times) < (parse_count(group.value("w")) or 0)
            and min(times.values()) > 1
            and not set_up_after(job, group.events[-1])
            and not is_logged(job, *_OF_SLURM)
        ):
            ranks = tuple(sorted(joined_ranks(group)))
            yield finding_from_logs(
                group,
                f"{ranks_in_words(ranks).capitalize()} of {group.value('w')} joined twice, and the others "
                "never joined: each host starts at rank 0",
                ranks=ranks,
                evidence={"ranks_that_came": list(ranks), "world_size": parse_count(group.value("w"))},
                confidence=0.75,
                fix="Export a different NODE_RANK on each host, starting at 0, with the same MASTER_ADDR and "
                "MASTER_PORT.",
                explains=("ENV005", "ENV004"),
            )


_OF_SLURM = ("slurm.script", "pl.slurm_requeue.harmless", "slurm.task_exit")


def _waits_alone(job: Job) -> Iterator[Finding]:
    """Report rank 0 of Lightning if it waits for ranks that are not started.

    On one host Lightning prints a line for each rank that it starts. If only rank 0 prints one and then waits, it
    assumes that a launcher started it."""
    if is_logged(job, *_OF_SLURM) or spans_hosts(job):
        return
    names = ", ".join(
        sorted({group.value("name") or "" for group in event_groups(job, "launch.left_over", by=("name",))})
    )
    for group in event_groups(job, "pl.init_dist", "pl.ddp_start"):
        size = parse_count(group.value("w")) or 0
        alone = set(group.values("rank")) <= {"0"} and (names or 1 < size <= MOST_DEVICES)
        if alone and not _goes_on(job, group.events[-1]):
            yield _alone(group, size, names)


def _alone(group: EventGroup, size: int, names: str) -> Finding:
    why = f"because {names} {'are' if ',' in names else 'is'} set"
    return finding_from_logs(
        group,
        "Lightning waits for ranks that are not started, "
        + (why if names else "probably because of a stale LOCAL_RANK or NODE_RANK"),
        ranks=(),
        evidence={"world_size": size or None, "set": names or None},
        confidence=0.8 if names else 0.5,
        fix=f"unset {names.replace(',', '')}"
        if names
        else "Check for stale variables in the shell that starts training, unset them and start again:\n"
        "env | grep -E 'RANK|WORLD_SIZE|MASTER|SLURM'\n"
        "unset LOCAL_RANK NODE_RANK GROUP_RANK",
        explains=("ENV005",),
    )


def _goes_on(job: Job, event: Event) -> bool:
    """Whether the log continues beyond the few lines that Lightning prints while it waits."""
    lines = next((file.lines for file in (job.evidence.files if job.evidence else ()) if file.path == event.file), 0)
    has_gone_on = lines - event.line > 20 or set_up_after(job, event)
    return has_gone_on or failed_before(job, event) is not None or ended_after(job, event)


@check(
    id="ENV009",
    severity=Severity.ERROR,
    when="PM",
    needs=(LaunchFacts,),
    from_logs=(_joined_twice, _waits_alone),
    impacts={
        r"joined twice": "Training never starts: all processes wait for the missing ranks until the timeout.",
        r"^Lightning waits": "Training never starts: rank 0 waits until the timeout.",
    },
    cases=lambda: (
        Passes("torchrun alone", healthy(hosts=2, per_host=2)),
        Passes(
            "a job that the scheduler ended and queued again",
            logged(
                *(f"Initializing distributed: GLOBAL_RANK: {rank}, MEMBER: {rank + 1}/4" for rank in (0, 1)),
                "Handling auto-requeue signal: 10",
                *(f"Initializing distributed: GLOBAL_RANK: {rank}, MEMBER: {rank + 1}/4" for rank in (0, 1)),
            ),
        ),
        Passes(
            "a job that SLURM queued again after a host failed",
            logged(
                *(f"Initializing distributed: GLOBAL_RANK: {rank}, MEMBER: {rank + 1}/4" for rank in (0, 1)),
                "JOB 4242 REQUEUED DUE TO NODE FAILURE",
                *(f"Initializing distributed: GLOBAL_RANK: {rank}, MEMBER: {rank + 1}/4" for rank in (0, 1)),
            ),
            silent=False,
        ),
        Passes("srun alone", healthy(hosts=2, per_host=2).by_srun()),
        Passes("torchrun once a node, under srun", _torchrun_under_srun(tasks_per_node="1(x2)", tasks="2")),
        Passes(
            "torchrun for each task, one process each, all in one world",
            healthy(hosts=1, per_host=2).launched(
                SLURM_STEP_ID="0", SLURM_STEP_NUM_TASKS="2", SLURM_STEP_TASKS_PER_NODE="2", GROUP_WORLD_SIZE="2"
            ),
        ),
        Passes(
            "a shell in a task from which ranks are started by hand",
            healthy(hosts=1, per_host=1).by_srun().launched(RANK="1", WORLD_SIZE="2"),
        ),
        Passes(
            "Lightning on several hosts without a launcher: NODE_RANK and the master are exported",
            healthy(hosts=1, per_host=1).launched(NODE_RANK="1", MASTER_ADDR="10.0.0.1", MASTER_PORT="29500"),
        ),
        Passes("NODE_RANK=0 is what Lightning assumes anyway", healthy(hosts=1, per_host=1).launched(NODE_RANK="0")),
        Fails(
            "RANK=0 is exported before srun",
            healthy(hosts=2, per_host=2).by_srun().launched(RANK="0", WORLD_SIZE="4"),
            ranks=(1, 2, 3),
        ),
        Fails(
            "torchrun started by each of two tasks a node",
            _torchrun_under_srun(tasks_per_node="2(x2)", tasks="4"),
            ranks=(0, 1, 2, 3),
        ),
        Fails("a LOCAL_RANK of an earlier run", healthy(hosts=1, per_host=1).launched(LOCAL_RANK="0"), ranks=(0,)),
        Fails(
            "a LOCAL_RANK of an earlier run, and nothing installed that waits for a launcher",
            healthy(hosts=1, per_host=1)
            .launched(LOCAL_RANK="0")
            .alter(SoftwareFacts, packages=(Package("torch", "2.8.0"),)),
            ranks=(0,),
            severity=Severity.INFO,
        ),
        Fails("a LOCAL_RANK that is set and empty", healthy(hosts=1, per_host=1).launched(LOCAL_RANK=""), ranks=(0,)),
        Fails("a NODE_RANK of another job", healthy(hosts=1, per_host=1).launched(NODE_RANK="1"), ranks=(0,)),
        Fails(
            "Lightning 1.1 and any NODE_RANK",
            healthy(hosts=1, per_host=1)
            .launched(NODE_RANK="0")
            .alter(SoftwareFacts, packages=(Package("pytorch-lightning", "1.1.8"),)),
            ranks=(0,),
        ),
        Passes(
            "every rank that Lightning starts logs its start",
            logged(
                "initializing ddp: GLOBAL_RANK: 0, MEMBER: 1/2",
                "initializing ddp: GLOBAL_RANK: 1, MEMBER: 2/2",
            ),
        ),
        Passes(
            "the output of rank 0 alone, of a run that goes on",
            logged(
                "Initializing distributed: GLOBAL_RANK: 0, MEMBER: 1/2",
                "All distributed processes registered. Starting with 2 processes",
            ),
        ),
        Passes("a run of one process", logged("Initializing distributed: GLOBAL_RANK: 0, MEMBER: 1/1")),
        Fails(
            "two hosts that both begin with rank 0",
            logged(*(f"initializing ddp: GLOBAL_RANK: {rank}, MEMBER: {rank + 1}/4" for rank in (1, 1, 0, 0))),
            ranks=(0, 1),
        ),
        Fails(
            "rank 0 of two waits alone",
            logged("GPU available: True, used: True", "initializing ddp: GLOBAL_RANK: 0, MEMBER: 1/2"),
        ),
        Fails(
            "the environment shows which variable it is",
            logged('declare -x LOCAL_RANK="0"', "Initializing distributed: GLOBAL_RANK: 0, MEMBER: 1/8"),
        ),
    ),
)
def launchers_mixed(job: Job) -> Iterator[Verdict]:
    """Ask whether exactly one launcher sets the rank variables of this process.

    Why it hurts: PyTorch reads one set of variables and Lightning another, so several processes use the same rank,
    every rank starts the whole job again, or a process waits for ranks that are not started.
    Fix: Use one launcher: list the variables with `env | grep -E 'RANK|WORLD_SIZE|SLURM_'` and unset those of others.
    """
    yield from _judge_direct(job)
    yield from merge(_judge_each(job))


LAUNCH_READERS = ("lightning", "pytorch-lightning", "accelerate")
"""Packages for which LOCAL_RANK alone indicates a launcher. accelerate (and so the Trainer of transformers) then also
requires RANK and raises without it (accelerate/state.py)."""


def _is_read(identical: IdenticalRanks) -> bool:
    software = identical.find(SoftwareFacts)
    return software is None or any(software.version(name) for name in LAUNCH_READERS)


def _judge_each(job: Job) -> Iterator[Finding]:
    if all(launch.running_together and "SLURM_STEP_ID" not in launch.filled for launch in launch_kinds(job)):
        return  # neither torchrun in a step, nor a single process
    for launch, identical in job.each(LaunchFacts, also=(SoftwareFacts, TrainerFacts)):
        if "TORCHELASTIC_RUN_ID" in launch.filled and (step := slurm_step(launch)) is not None:
            yield from _judge_torchrun(launch, step, identical)
        if is_left_alone(launch) and not is_lightning_slurm(launch):
            yield from _judge_local_rank(launch, identical)
            yield from _judge_node_rank(launch, identical)


def _judge_direct(job: Job) -> Iterator[Finding]:
    odd = [
        (launch, direct, identical)
        for launch, identical in (job.each(LaunchFacts) if may_be_direct(job) else ())
        if "RANK" in launch.filled and (direct := direct_launch(launch)) is not None and _contradicts(launch, direct)
    ]
    if not odd:
        return
    launch, direct, _ = odd[0]
    same = len({launch.get("RANK") for launch, _, _ in odd}) == 1
    numbers = ranks_in_words(tuple(one.rank for _, one, _ in odd if one.rank is not None)).partition(" ")[2]
    those = "this process" if len(odd) == 1 else "these processes"
    yield Finding(
        f"RANK={launch.get('RANK')}, but {direct.program} started {those} as {direct.rank_name}={numbers}"
        if same
        else f"RANK differs from {direct.rank_name}, the rank from {direct.program}, in {len(odd)} processes",
        ranks=tuple(number for _, _, identical in odd for number in identical.ranks),
        evidence={
            "processes": [{"RANK": launch.get("RANK"), direct.rank_name: direct.rank} for launch, direct, _ in odd[:8]],
            "WORLD_SIZE": launch.get("WORLD_SIZE"),
            direct.size_name: direct.size,
        },
        effect=f"PyTorch reads RANK, and Lightning {direct.rank_name}, so several processes use the same rank, or wait "
        "for ranks that do not exist.",
        fix=f"Run `unset RANK LOCAL_RANK` before {direct.program}, or set `RANK=${direct.rank_name}` inside each task.",
        explains=("ENV001", "ENV004"),
    )


def _contradicts(launch: LaunchFacts, direct: DirectLaunch) -> bool:
    """Whether RANK differs from the number of srun or mpirun. With another WORLD_SIZE, something else sets RANK."""
    rank = launch_number(launch, "RANK")
    if rank is None or direct.rank in (None, rank) or direct.size in (None, 1):
        return False
    return launch_number(launch, "WORLD_SIZE") in (None, direct.size)


def _judge_torchrun(launch: LaunchFacts, step: SlurmStep, identical: IdenticalRanks) -> Iterator[Finding]:
    if (step.most_per_node or 1) < 2:
        return
    agents = launch_number(launch, "GROUP_WORLD_SIZE")
    if agents is not None and agents == step.size:
        return  # One torchrun per task with a matching --nnodes: their agents form one world.
    local = launch.local_world_size or 1
    yield Finding(
        f"srun starts torchrun {step.most_per_node} times per host, and each starts {local} "
        f"process{'' if local == 1 else 'es'}",
        ranks=identical.ranks,
        evidence={
            "SLURM_STEP_TASKS_PER_NODE": launch.get("SLURM_STEP_TASKS_PER_NODE"),
            "SLURM_STEP_NUM_TASKS": step.size,
            "LOCAL_WORLD_SIZE": local,
            "processes_per_host": (step.most_per_node or 1) * local,
        },
        effect="The torchrun processes of a host compete for one port (EADDRINUSE), and their ranks for the same GPUs.",
        fix="Start torchrun once per host with `srun --ntasks-per-node=1`, or start one task per GPU with srun, "
        "without torchrun.",
        explains=("ENV004", "ENV008", "GPU001"),
    )


def _judge_local_rank(launch: LaunchFacts, identical: IdenticalRanks) -> Iterator[Finding]:
    """Report a LOCAL_RANK that no launcher set.

    Lightning starts no processes if LOCAL_RANK is set, even if empty
    (LightningEnvironment.creates_processes_externally)."""
    value = launch.get("LOCAL_RANK")
    if value is None or devices_asked(identical.members[0]) == 1:
        return
    is_read = _is_read(identical)
    yield Finding(
        f"LOCAL_RANK={value or repr(value)} is set, but no launcher started this process",
        ranks=identical.ranks,
        evidence={"LOCAL_RANK": value, "launcher": launch.launcher},
        severity=None if is_read else Severity.INFO,
        effect=_effect_of_local_rank(identical)
        if is_read
        else "None unless the script reads LOCAL_RANK: neither Lightning nor Accelerate is installed.",
        fix="unset LOCAL_RANK",
    )


def _effect_of_local_rank(identical: IdenticalRanks) -> str:
    software = identical.find(SoftwareFacts)
    if software is not None and not any(software.version(name) for name in LAUNCH_READERS[:2]):
        return "Accelerate assumes that a launcher starts the ranks, and fails if RANK or WORLD_SIZE is not set."
    return "Lightning assumes that a launcher starts the ranks, so it starts none itself and waits for them."


def _judge_node_rank(launch: LaunchFacts, identical: IdenticalRanks) -> Iterator[Finding]:
    name = next((name for name in ("NODE_RANK", "GROUP_RANK") if name in launch.filled), None)
    number = launch_number(launch, name) if name else None
    if name is None or number is None:
        return
    # Whether the host number is stale: Lightning's own multi-host launch also exports MASTER_ADDR
    trainer = identical.find(TrainerFacts)
    asked = trainer.node_count if trainer else None
    if number > 0 and (number >= asked if asked is not None else "MASTER_ADDR" not in launch.filled):
        yield Finding(
            f"{name}={number} is set, but nothing else indicates a multi-host job",
            ranks=identical.ranks,
            severity=None if _is_read(identical) else Severity.INFO,
            evidence={name: number, "MASTER_ADDR": launch.get("MASTER_ADDR"), "num_nodes": asked},
            effect=f"Lightning numbers its ranks as those of host {number}, and all of them wait for rank 0, which is "
            "never started.",
            fix=f"Run `unset {name}`, or for several hosts also export MASTER_ADDR and MASTER_PORT and set num_nodes.",
        )
        return
    software = identical.find(SoftwareFacts)
    lightning = (software.version("pytorch-lightning") or software.version("lightning")) if software else None
    release = release_of(lightning)
    if name == "NODE_RANK" and release is not None and release[:2] < LAST_THAT_WAITS:
        yield Finding(
            f"NODE_RANK={number} is set, so Lightning {lightning} waits for processes that are not started",
            ranks=identical.ranks,
            evidence={name: number, "lightning": lightning},
            effect='Training with several GPUs hangs at "initializing ddp: GLOBAL_RANK: 0".',
            fix="Run `unset NODE_RANK`, or upgrade Lightning to 1.2 or later.",
        )


def _torchrun_under_srun(tasks_per_node: str, tasks: str) -> JobBuilder:
    return healthy(hosts=2, per_host=2).launched(
        SLURM_STEP_ID="0", SLURM_STEP_NUM_TASKS=tasks, SLURM_NTASKS=tasks, SLURM_STEP_TASKS_PER_NODE=tasks_per_node
    )
