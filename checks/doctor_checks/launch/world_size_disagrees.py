"""ENV003: ranks use different world sizes."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.analysis.launch_origin import DirectLaunch, direct_launch, launch_number, may_be_direct
from doctor.analysis.logs.event_timeline import events_of_kinds, parse_count, set_up_after
from doctor.api import (
    EventGroup,
    FileFails,
    FilePasses,
    Finding,
    IdenticalRanks,
    Job,
    LaunchFile,
    Scope,
    Severity,
    Verdict,
    Violation,
    check,
    correlates,
    describe,
    event_groups,
    finding_from_logs,
    is_logged,
    merge,
    ranks_in_words,
    rule,
    split,
)
from doctor.facts import LaunchFacts
from doctor.lint.launch.kubernetes import Workload
from doctor.lint.launch.manifest import Manifest
from doctor.lint.launch.partial_text import whole_number
from doctor.lint.launch.process_launches import ProcessLaunch, hosts_of, starts_of
from doctor.lint.launch.yaml_tree import YamlNode
from doctor.testing import Fails, JobBuilder, Passes, healthy, lines, logged
from doctor.testing.script_cases import shell_fails, shell_passes
from doctor_checks.launch._restart_messages import RESTARTS

MOST_FINDINGS = 8
"""Sizes reported separately; more have a common cause, such as a size computed on every host."""


def _counted_by_each_host(hosts: int) -> JobBuilder:
    sketch = healthy(hosts=hosts, per_host=1)
    for rank in range(hosts):
        sketch = sketch.alter(LaunchFacts, ranks=(rank,), world_size=hosts + rank)
    return sketch


def _worlds_unequal(job: Job) -> Iterator[Finding]:
    """Report ranks with different world sizes that connect during the NCCL bootstrap."""
    for group in event_groups(job, "nccl.bootstrap.mismatch", "nccl.bootstrap.mismatch.old", by=("a", "b")):
        sizes = [group.value("a"), group.value("b")]
        yield finding_from_logs(
            group,
            f"Ranks with world sizes {sizes[0]} and {sizes[1]} connected to each other",
            ranks=(),
            evidence={"world_sizes": sizes},
            confidence=0.7,
            fix="Start every host with the same number of hosts and processes, and give each job its own MASTER_PORT.",
        )


def _too_many(job: Job) -> Iterator[Finding]:
    """Report a store with more processes than the world size: started more than once, or an earlier attempt counts.

    ``_store_based_barrier`` in torch/distributed/distributed_c10d.py counts all processes that reach one key."""
    if is_logged(job, *RESTARTS):
        return
    for event in events_of_kinds(job, "torch.store.barrier_timeout", "torch.store.barrier_wait"):
        came, size = parse_count(event.value("got")) or 0, parse_count(event.value("world"))
        if size is not None and came > size and not set_up_after(job, event):
            yield finding_from_logs(
                EventGroup(event.kind, (event,)),
                f"{came} processes joined a world of size {size}: started more than once, or after an earlier attempt",
                ranks=(),
                evidence={"came": came, "world_size": size},
                confidence=0.75,
                fix="Start the ranks once, and use another MASTER_PORT after a failed attempt.",
            )
            return


@check(
    id="ENV003",
    severity=Severity.ERROR,
    scope=Scope.JOB,
    when="PM",
    needs=(LaunchFacts,),
    from_logs=(_worlds_unequal, _too_many),
    impacts={
        r"started more than once|earlier attempt": (
            "Processes of two attempts register in one store: the group is never complete, or a process replaces "
            "another."
        ),
        r"connected to each other": "NCCL cannot build the communicator: the ranks fail or wait until the timeout.",
        r"mpirun started|srun started": (
            "The processes wait in init_process_group() for ranks that are not started, until the timeout."
        ),
    },
    cases=lambda: (
        Passes("the same on all ranks", healthy(hosts=2, per_host=2)),
        Passes("srun started the ranks", healthy(hosts=2, per_host=2).by_srun().launched(WORLD_SIZE="4")),
        Passes(
            "one task a node that starts its ranks itself, WORLD_SIZE exported for them",
            healthy(hosts=2, per_host=1).by_srun().launched(WORLD_SIZE="16"),
        ),
        Passes(
            "one task a node that starts its ranks itself and tells each of them its numbers, as composer does",
            healthy(hosts=2, per_host=1).by_srun().launched(WORLD_SIZE="16", RANK="0", LOCAL_WORLD_SIZE="8"),
        ),
        Fails(
            "one host was started with another number of nodes",
            healthy(hosts=3, per_host=2).alter(LaunchFacts, ranks=(4, 5), world_size=8),
            ranks=(4, 5),
        ),
        Fails(
            "two hosts, each of which believes that it is alone",
            healthy(hosts=2, per_host=2).alter(LaunchFacts, ranks=(2, 3), world_size=2),
            ranks=(0, 1, 2, 3),
        ),
        Fails(
            "each of many hosts has a number of its own: one finding",
            _counted_by_each_host(12),
            ranks=tuple(range(12)),
        ),
        Fails(
            "srun starts four tasks and the script exports WORLD_SIZE=8",
            healthy(hosts=2, per_host=2).by_srun().launched(WORLD_SIZE="8", RANK="0"),
            ranks=(0, 1, 2, 3),
        ),
        Fails(
            "mpirun starts two and WORLD_SIZE=4 is left over",
            healthy().launched(
                without=("TORCHELASTIC_RUN_ID",), OMPI_COMM_WORLD_SIZE="2", OMPI_COMM_WORLD_RANK="0", WORLD_SIZE="4"
            ),
            ranks=(0, 1),
        ),
        Fails(
            "srun starts two tasks, and each of them spawns a world of two",
            logged(
                "RuntimeError: Timed out initializing process group in store based barrier on rank: 1, for key: "
                "store_based_barrier_key:1 (world_size=2, worker_count=4, timeout=0:30:00)"
            ),
        ),
        Fails(
            "log of a store that counts more processes than there are ranks",
            logged(
                "RuntimeError: Timed out initializing process group in store based barrier on rank: 0, for key: "
                "store_based_barrier_key:1 (world_size=4, worker_count=16, timeout=0:30:00)"
            ),
            ranks=(),
        ),
    ),
)
def world_size_disagrees(job: Job) -> Iterator[Verdict]:
    """Ask whether all ranks use the same world size, and whether as many ranks are started.

    Why it hurts: ranks with a larger world size wait in init_process_group() until the timeout; ranks with a smaller
    one form a process group without the others.
    Fix: Start every host with the same number of hosts and of processes per host.
    """
    yield from _judge_each_other(job)
    yield from merge(
        found
        for launch, identical in (job.each(LaunchFacts) if may_be_direct(job) else ())
        if (direct := direct_launch(launch)) is not None
        for found in _judge_launcher(direct, launch, identical)
    )


def _judge_each_other(job: Job) -> Iterator[Finding]:
    if len(job.ranks) < 2:
        return
    # No baseline: another job may have another size.
    parted = split(job, LaunchFacts, lambda launch: launch.world_size)
    stated = [group for group in parted.minorities if group.value is not None]
    if len(stated) > MOST_FINDINGS:
        ranks = tuple(sorted(rank for group in stated for rank in group.ranks))
        yield Finding(
            f"{ranks_in_words(ranks).capitalize()} use {len(stated)} different world sizes",
            ranks=ranks,
            evidence={"sizes": len(stated), "groups": describe(parted)},
        )
        return
    for group in stated:
        common = parted.common.value if parted.common else None
        if not parted.even and common is None:
            continue
        along = correlates(job, group.ranks)
        yield Finding(
            f"{ranks_in_words(group.ranks).capitalize()} use{'s' if len(group.ranks) == 1 else ''} "
            f"world size {group.value}" + (f", the others {common}" if parted.common else f" ({describe(parted)})"),
            ranks=group.ranks,
            evidence={
                "world_size": group.value,
                "elsewhere": common,
                "groups": describe(parted),
                "along_with": list(along),
            },
        )


def _judge_launcher(direct: DirectLaunch, launch: LaunchFacts, identical: IdenticalRanks) -> Iterator[Finding]:
    stated = launch_number(launch, "WORLD_SIZE")
    if direct.size is None or stated is None or stated == direct.size:
        return
    own = "RANK" not in launch.filled or stated == direct.size * (launch_number(launch, "LOCAL_WORLD_SIZE") or 0)
    if direct.most_per_node == 1 and own and stated > direct.size:
        return  # One task per node that starts the ranks of the node itself; WORLD_SIZE is theirs.
    yield Finding(
        f"WORLD_SIZE={stated}, but {direct.program} started {direct.size} processes ({direct.size_name}={direct.size})",
        ranks=identical.ranks,
        evidence={"WORLD_SIZE": stated, direct.size_name: direct.size, "launcher": direct.program},
        fix=f"Run `export WORLD_SIZE=${direct.size_name}` in the command that {direct.program} starts, or start "
        f"{stated} processes (`{'srun --ntasks' if direct.program == 'srun' else 'mpirun -np'} {stated}`).",
    )


_FOUR = ("#!/bin/bash", "#SBATCH --nodes=2", "#SBATCH --ntasks-per-node=4")
_CONFIG = """\
compute_environment: LOCAL_MACHINE
distributed_type: KIND
num_machines: MACHINES
num_processes: COUNT
use_cpu: false
"""
_JOB = """\
apiVersion: kubeflow.org/v1
kind: PyTorchJob
spec:
  pytorchReplicaSpecs:
    Master:
      replicas: 1
      template: {spec: {containers: [{name: pytorch, command: [torchrun, "--nnodes=4", train.py]}]}}MARK
    Worker:
      replicas: REPLICAS
      template: {spec: {containers: [{name: pytorch, command: [torchrun, "--nnodes=4", train.py]}]}}MARK
"""


def _config(kind: str, machines: str, count: str) -> str:
    return _CONFIG.replace("KIND", kind).replace("MACHINES", machines).replace("COUNT", count)


@rule(
    check=world_size_disagrees,
    reads=LaunchFile,
    impacts={
        r"^num_processes": "Accelerate starts fewer processes than num_processes.",
        r"^train_batch_size": "DeepSpeed fails at startup, because no number of ranks fits these sizes.",
        r"^WORLD_SIZE=": "Ranks beyond the world size are rejected, or the job waits for ranks that are not started.",
        r"Only one process": "The script trains on one GPU, and the others are idle.",
        r"waits for \d+ hosts": "torchrun waits at its rendezvous for hosts that do not exist, until its timeout.",
    },
    cases=lambda: (
        shell_fails(
            "WORLD_SIZE written down",
            *_FOUR,
            "export WORLD_SIZE=4",
            "srun bash -c 'RANK=$SLURM_PROCID python train.py'  # !",
        ),
        FileFails("eight processes on three machines", _config("MULTI_GPU", "3", "8  # !"), name="config.yaml"),
        FileFails("several processes that are not distributed", _config("'NO'", "1", "4  # !"), name="config.yaml"),
        FileFails(
            "four hosts expected of three pods", _JOB.replace("REPLICAS", "2").replace("MARK", "  # !"), name="j.yaml"
        ),
        FileFails(
            "a batch that no number of ranks gives",
            lines(
                "{",
                '  "train_batch_size": 100,',
                '  "train_micro_batch_size_per_gpu": 8,',
                '  "gradient_accumulation_steps": 2,',
                '  "zero_optimization": {"stage": 2}',
                "}",
            ).replace("100,", "100, # !"),
            name="ds_config.yaml",
        ),
        shell_passes(
            "from SLURM", *_FOUR, "export WORLD_SIZE=$SLURM_NTASKS", "srun bash -c 'RANK=$SLURM_PROCID python train.py'"
        ),
        shell_passes(
            "a step for each rank",
            *_FOUR,
            "export WORLD_SIZE=8",
            "for i in $(seq 0 7); do",
            "RANK=$i srun -n1 python t.py &",
            "done",
        ),
        shell_passes("hosts, for a script of one's own", *_FOUR, "export WORLD_SIZE=2", "srun bash run_node.sh"),
        FilePasses("sixteen processes on two machines", _config("FSDP", "2", "16"), name="config.yaml"),
        FilePasses("one process", _config("'NO'", "1", "1"), name="config.yaml"),
        FilePasses("four pods", _JOB.replace("REPLICAS", "3").replace("MARK", ""), name="job.yaml"),
        FilePasses(
            "eight ranks",
            '{"train_batch_size": 128, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 2, '
            '"zero_optimization": {"stage": 2}}\n',
            name="ds_config.json",
        ),
        FilePasses(
            "left to the framework",
            '{"train_batch_size": "auto", "train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": 2}}\n',
            name="ds_config.json",
        ),
    ),
)
def world_size_disagrees_in_files(file: LaunchFile) -> Iterator[Violation]:
    """Ask whether the configured number of ranks is the number that is started.

    Why it hurts: ranks with a larger world size wait in init_process_group() until the timeout; ranks with a smaller
    one form a process group without the others.
    Fix: Derive the world size (`WORLD_SIZE=$SLURM_NTASKS`), make num_processes a multiple of num_machines, and use as
    many pods as --nnodes.
    """
    for start in starts_of(file):
        yield from _judge_task(start)
    if not isinstance(file, Manifest):
        return
    for root in file.of_kind("accelerate"):
        yield from _judge_accelerate(root)
    for root in file.of_kind("deepspeed"):
        yield from _judge_batch(root)
    for job in file.workloads:
        yield from _judge_pods(job)


def _judge_task(start: ProcessLaunch) -> Iterator[Violation]:
    """Report a WORLD_SIZE other than the number of ranks of srun, if the script uses RANK and WORLD_SIZE."""
    size = whole_number(start.launch.setting("WORLD_SIZE"))
    tasks = start.step.tasks if start.step is not None and start.launch.program == "python" else None
    if start.is_part:
        return
    if size is not None and tasks is not None and size != tasks and "RANK" in start.launch.settings:
        yield Violation(
            start.launch.place,
            f"WORLD_SIZE={size}, but srun starts {tasks} task{'' if tasks == 1 else 's'}",
            fix="Set `export WORLD_SIZE=$SLURM_NTASKS` instead of a fixed number.",
            evidence=(("WORLD_SIZE", size), ("tasks", tasks)),
        )


def _judge_accelerate(root: YamlNode) -> Iterator[Violation]:
    """accelerate/commands/launch.py: `NO` starts one process whatever num_processes says; several machines start
    num_processes // num_machines each."""
    ranks, machines, place = root.number("num_processes"), root.number("num_machines") or 1, root.get("num_processes")
    if ranks is None or place is None:
        return
    if machines > 1 and ranks % machines:
        yield Violation(
            place.place,
            f"num_processes ({ranks}) is not a multiple of num_machines ({machines})",
            evidence=(("num_processes", ranks), ("num_machines", machines)),
        )
    elif ranks > 1 and (root.word("distributed_type") or "").upper() == "NO" and not root.flag("use_cpu"):
        yield Violation(
            place.place,
            f"Only one process is started: num_processes is {ranks}, but distributed_type is 'NO'",
            fix="Set `distributed_type: MULTI_GPU` (or FSDP, DEEPSPEED), or `num_processes: 1`.",
            severity=Severity.WARNING,
            evidence=(("num_processes", ranks),),
        )


def _judge_batch(root: YamlNode) -> Iterator[Violation]:
    """DeepSpeed asserts train_batch_size = micro batch x accumulation x ranks
    (https://www.deepspeed.ai/docs/config-json/#batch-size-related-parameters)."""
    total, micro = root.number("train_batch_size"), root.number("train_micro_batch_size_per_gpu")
    steps = root.number("gradient_accumulation_steps") if root.get("gradient_accumulation_steps") is not None else 1
    place = root.get("train_batch_size")
    if total and micro and steps and place is not None and total % (micro * steps):
        yield Violation(
            place.place,
            f"train_batch_size ({total}) is not a multiple of micro batch × accumulation ({micro} × {steps})",
            fix=f"Set train_batch_size to a multiple of {micro * steps}, or remove it.",
            evidence=(("train_batch_size", total), ("micro_batch", micro), ("accumulation", steps)),
        )


def _judge_pods(job: Workload) -> Iterator[Violation]:
    pods = job.pods
    if job.kind != "PyTorchJob" or job.is_elastic or pods is None:
        return
    for role in job.roles:
        for box in role.containers:
            for launch in box.chain():
                command, expected = launch.command, hosts_of(launch)
                is_given = bool(command.variable_prefix) and launch.option(command.hosts) is not None
                if expected is not None and is_given and expected != pods:
                    yield Violation(
                        launch.place,
                        f"{launch.program} waits for {expected} hosts, but the job has {pods} pods",
                        fix=f"Use --nnodes={pods}, or remove the option: the operator sets PET_NNODES.",
                        evidence=(("nnodes", expected), ("pods", pods)),
                    )
