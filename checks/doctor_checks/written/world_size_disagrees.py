"""ENV003: a number of ranks is written down that does not come about."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.api import FileFails, FilePasses, LaunchFile, Severity, Violation, rule
from doctor.lint.launch.kubernetes import Workload
from doctor.lint.launch.manifest import Manifest
from doctor.lint.launch.partial_text import whole_number
from doctor.lint.launch.process_launches import ProcessLaunch, hosts_of, starts_of
from doctor.lint.launch.yaml_tree import YamlNode
from doctor.testing import lines

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
    id="ENV003",
    severity=Severity.ERROR,
    reads=LaunchFile,
    cases=lambda: (
        FileFails(
            "WORLD_SIZE written down",
            lines(*_FOUR, "export WORLD_SIZE=4", "srun bash -c 'RANK=$SLURM_PROCID python train.py'  # !"),
            name="job.sbatch",
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
        FilePasses(
            "from SLURM",
            lines(*_FOUR, "export WORLD_SIZE=$SLURM_NTASKS", "srun bash -c 'RANK=$SLURM_PROCID python train.py'"),
            name="job.sbatch",
        ),
        FilePasses(
            "a step for each rank",
            lines(*_FOUR, "export WORLD_SIZE=8", "for i in $(seq 0 7); do", "RANK=$i srun -n1 python t.py &", "done"),
            name="job.sbatch",
        ),
        FilePasses(
            "hosts, for a script of one's own",
            lines(*_FOUR, "export WORLD_SIZE=2", "srun bash run_node.sh"),
            name="job.sbatch",
        ),
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
def world_size_disagrees(file: LaunchFile) -> Iterator[Violation]:
    """Ask whether the number of ranks that is written down is the number that is started.

    Why it hurts: who expects more ranks than come waits at init_process_group() until it times out; who expects fewer
    forms a group without the rest.
    Fix: derive it: `WORLD_SIZE=$SLURM_NTASKS`; num_processes a multiple of num_machines; as many pods as --nnodes.
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
    """A python that srun starts as the ranks themselves; RANK in its environment says that it goes by these."""
    size = whole_number(start.launch.setting("WORLD_SIZE"))
    tasks = start.step.tasks if start.step is not None and start.launch.program == "python" else None
    if start.is_part:
        return
    if size is not None and tasks is not None and size != tasks and "RANK" in start.launch.settings:
        yield Violation(
            start.launch.place,
            f"WORLD_SIZE={size}, and srun starts {tasks} task{'' if tasks == 1 else 's'}",
            fix="`export WORLD_SIZE=$SLURM_NTASKS`",
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
            f"num_processes is {ranks}, which {machines} machines do not divide evenly",
            evidence=(("num_processes", ranks), ("num_machines", machines)),
        )
    elif ranks > 1 and (root.word("distributed_type") or "").upper() == "NO" and not root.flag("use_cpu"):
        yield Violation(
            place.place,
            f"num_processes is {ranks} and distributed_type NO: one process is started",
            fix="`distributed_type: MULTI_GPU` (or FSDP, DEEPSPEED), or `num_processes: 1`.",
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
            f"train_batch_size {total} is no multiple of {micro} x {steps}: it fits no number of ranks",
            fix=f"A multiple of {micro * steps}: micro batch x accumulation x ranks; or leave train_batch_size out.",
            evidence=(("train_batch_size", total), ("micro_batch", micro), ("accumulation", steps)),
        )


def _judge_pods(job: Workload) -> Iterator[Violation]:
    pods = job.pods
    if job.kind != "PyTorchJob" or job.is_elastic or pods is None:
        return
    for role in job.roles:
        for box in role.containers:
            for launch in box.chain():
                expected = hosts_of(launch) if launch.program == "torchrun" else None
                if expected is not None and launch.option("nnodes") and expected != pods:
                    yield Violation(
                        launch.place,
                        f"torchrun waits for {expected} hosts, and the job has {pods} pods",
                        fix=f"`--nnodes={pods}`, or leave it out: the operator sets PET_NNODES.",
                        evidence=(("nnodes", expected), ("pods", pods)),
                    )
