"""ENV003 in launch files: ranks use different world sizes."""

from __future__ import annotations

import re
from collections.abc import Iterator

from doctor.api import FileFails, FilePasses, LaunchFile, Severity, Violation, rule
from doctor.lint.launch.kubernetes import Workload
from doctor.lint.launch.manifest import Manifest
from doctor.lint.launch.partial_text import whole_number
from doctor.lint.launch.process_launches import ProcessLaunch, hosts_of, starts_of
from doctor.lint.launch.yaml_tree import YamlNode
from doctor.testing import lines
from doctor.testing.script_cases import shell_fails, shell_passes
from doctor_checks.launch.world_size_disagrees import world_size_disagrees

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
        r"^num_processes": "Accelerate rounds down the number per host, and starts fewer than num_processes.",
        r"^train_batch_size": "DeepSpeed fails at startup, because no number of ranks fits these sizes.",
        r"^WORLD_SIZE=.* only": "The job waits for ranks that are not started.",
        r"^WORLD_SIZE=": "PyTorch rejects the ranks beyond the world size.",
        r"Only one process": "The script trains on one GPU, and the other GPUs are idle.",
        r"waits for \d+ hosts": "torchrun waits at its rendezvous for hosts that do not exist, until its timeout.",
    },
    cases=lambda: (
        shell_fails(
            "WORLD_SIZE written down",
            *_FOUR,
            "export WORLD_SIZE=4",
            "srun bash -c 'RANK=$SLURM_PROCID python train.py'  # !",
        ),
        shell_fails(
            "a WORLD_SIZE of another job, with fewer tasks",
            *_FOUR,
            "export WORLD_SIZE=16",
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
        FilePasses("several, in a configuration for one GPU", _config("'NO'", "1", "8"), name="single_gpu.yaml"),
        FileFails("several, for one host", _config("'NO'", "1", "8  # !"), name="single_node.yaml"),
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
    one may form a process group without the others.
    Fix: Derive the world size (`WORLD_SIZE=$SLURM_NTASKS`), make num_processes a multiple of num_machines, and use as
    many pods as --nnodes.
    """
    for start in starts_of(file):
        yield from _judge_task(start)
    if not isinstance(file, Manifest):
        return
    for root in file.of_kind("accelerate"):
        yield from _judge_accelerate(root, file.path)
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
            f"WORLD_SIZE={size}, but srun starts {'only ' if tasks < size else ''}{tasks} "
            f"task{'' if tasks == 1 else 's'}",
            fix="Use `export WORLD_SIZE=$SLURM_NTASKS` instead of a fixed number.",
            evidence=(("WORLD_SIZE", size), ("tasks", tasks)),
        )


_FOR_ONE = re.compile(
    r"(?<![a-z0-9])(?:(?:single|one|1)[_-]?(?:gpu|process|proc|card|device)|single(?![_-]?(?:node|host|machine)))(?![a-z0-9])"
    r"|(?<![a-z0-9])(?:no|non)[_-]?dist"
)
"""Names of files for one process: ``single_gpu.yaml``, ``1gpu.yaml``, ``no_dist.yaml``."""


def _is_for_one(root: YamlNode, path: str) -> bool:
    """Whether a configuration is for one process by its name, or lists one GPU."""
    is_named = _FOR_ONE.search(path.rpartition("/")[2].lower()) is not None
    return is_named or re.fullmatch(r"\s*\d+\s*,?\s*", root.word("gpu_ids") or "") is not None


def _judge_accelerate(root: YamlNode, path: str) -> Iterator[Violation]:
    """accelerate/commands/launch.py: `NO` starts one process whatever num_processes says; several machines start
    num_processes // num_machines each."""
    ranks, machines, place = root.number("num_processes"), root.number("num_machines") or 1, root.get("num_processes")
    if ranks is None or place is None:
        return
    if machines > 1 and ranks % machines:
        yield Violation(
            place.place,
            f"num_processes ({ranks}) is not a multiple of num_machines ({machines})",
            fix=f"Set num_processes to a multiple of {machines}.",
            evidence=(("num_processes", ranks), ("num_machines", machines)),
        )
    elif (
        ranks > 1
        and (root.word("distributed_type") or "").upper() == "NO"
        and not root.flag("use_cpu")
        and not _is_for_one(root, path)
    ):
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
                        f"{launch.program} waits for {expected} host{'' if expected == 1 else 's'}, but the job has "
                        f"{pods} pod{'' if pods == 1 else 's'}",
                        fix=f"Use `--nnodes={pods}`, or remove the option: the operator sets PET_NNODES.",
                        evidence=(("nnodes", expected), ("pods", pods)),
                    )
