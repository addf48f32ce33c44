"""GPU002: more ranks on a host than GPUs that they were given."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.api import FileFails, FilePasses, LaunchFile, Severity, SourceLocation, Violation, rule
from doctor.lint.launch.kubernetes import Container, Workload
from doctor.lint.launch.launch_file import Launch
from doctor.lint.launch.manifest import Manifest
from doctor.lint.launch.partial_text import whole_number
from doctor.lint.launch.process_launches import (
    ProcessLaunch,
    hosts_of,
    processes_of,
    starts_of,
    trainer_option,
    visible_devices,
)
from doctor.lint.launch.shell.reader import ShellFile
from doctor.lint.launch.slurm_batch import Allocation
from doctor.lint.launch.yaml_tree import YamlNode
from doctor.testing import lines

_POD = """\
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata: {name: llm}
spec:
  pytorchReplicaSpecs:
    Worker:
      replicas: 2
      template:
        spec:
          containers:
            - name: pytorch
              command:
                - torchrunMARK
                - --nnodes=2
                - --nproc_per_node=8
                - train.py
              resources:
                limits:
                  nvidia.com/gpu: GPUS
"""
_CONFIG = """\
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
gpu_ids: 0,1
machine_rank: 0
num_machines: 1
num_processes: COUNT
"""


@rule(
    id="GPU002",
    severity=Severity.ERROR,
    reads=LaunchFile,
    cases=lambda: (
        FileFails(
            "two visible GPUs and four ranks",
            lines("CUDA_VISIBLE_DEVICES=1,2 python -m torch.distributed.launch --nproc_per_node=4 train.py  # !"),
            name="train.sh",
        ),
        FileFails(
            "four GPUs asked for and eight ranks",
            lines(
                "#SBATCH --gres=gpu:a100:4",
                "export NGPUS=8",
                "srun torchrun --nproc-per-node=$NGPUS train.py  # !",
            ),
            name="job.sbatch",
        ),
        FileFails(
            "accelerate is told more processes than GPUs",
            lines("accelerate launch --num_machines 1 --num_processes 4 --gpu_ids 0,1 train.py  # !"),
            name="run.sh",
        ),
        FileFails(
            "Lightning is told more devices than are asked for",
            lines("#SBATCH --gres=gpu:4", "python train.py fit --trainer.devices=8  # !"),
            name="job.sbatch",
        ),
        FileFails("pods with four GPUs each", _POD.replace("MARK", "  # !").replace("GPUS", "4"), name="job.yaml"),
        FileFails("two ids and four processes", _CONFIG.replace("COUNT", "4  # !"), name="default_config.yaml"),
        FilePasses(
            "as many as are visible",
            lines("export CUDA_VISIBLE_DEVICES=1,2", "torchrun --nproc_per_node=2 train.py"),
            name="train.sh",
        ),
        FilePasses(
            "another list in each branch",
            lines(
                "export CUDA_VISIBLE_DEVICES=0,1",
                'if [ "$1" = all ]; then export CUDA_VISIBLE_DEVICES=0,1,2,3; fi',
                "torchrun --nproc_per_node=4 train.py",
            ),
            name="train.sh",
        ),
        FilePasses(
            "the command lists its own GPUs",
            lines("export CUDA_VISIBLE_DEVICES=0", "CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc_per_node=2 train.py"),
            name="train.sh",
        ),
        FilePasses(
            "GPUs of two hosts together",
            lines("#SBATCH --nodes=2", "#SBATCH --gpus=16", "srun torchrun --nnodes=2 --nproc-per-node=8 x.py"),
            name="job.sbatch",
        ),
        FilePasses("pods with eight GPUs", _POD.replace("MARK", "").replace("GPUS", "8"), name="job.yaml"),
        FilePasses("as many ids as processes", _CONFIG.replace("COUNT", "2"), name="default_config.yaml"),
        FilePasses(
            "ranks on the CPU",
            lines("CUDA_VISIBLE_DEVICES= torchrun --nproc_per_node=4 train.py"),
            name="train.sh",
        ),
    ),
)
def ordinal_out_of_range(file: LaunchFile) -> Iterator[Violation]:
    """Ask whether a host has a GPU for each rank that is started on it.

    Why it hurts: the rank dies with "CUDA error: invalid device ordinal", and the others wait for it until they time
    out.
    Fix: start as many processes a host as GPUs are asked for and visible: the same number in --nproc-per-node and in
    --gres, CUDA_VISIBLE_DEVICES or `nvidia.com/gpu`.
    """
    for start in starts_of(file):
        if _uses_gpus(start.launch):
            yield from _judge_start(start, file)
    if isinstance(file, Manifest):
        for root in file.of_kind("accelerate"):
            yield from _judge_config(root)
        for job in file.workloads:
            yield from _judge_pods(job)


def _uses_gpus(launch: Launch) -> bool:
    return launch.option("cpu") is None and "CUDA_MPS_PIPE_DIRECTORY" not in launch.settings


def _judge_start(start: ProcessLaunch, file: LaunchFile) -> Iterator[Violation]:
    ranks = processes_of(start.launch) if start.is_agent else _devices(start)
    if ranks is None:
        return
    if (visible := visible_devices(start.launch)) is not None:
        if ranks > visible[1]:
            yield _hit(start.launch.place, ranks, visible[1], f"CUDA_VISIBLE_DEVICES={visible[0]}")
        return
    listed = start.launch.told("gpu-ids")
    if listed is not None and listed != "all" and (hosts_of(start.launch) or 1) == 1:
        if ranks > len(listed.split(",")):
            yield _hit(start.launch.place, ranks, len(listed.split(",")), f"--gpu_ids {listed}")
        return
    if isinstance(file, ShellFile) and file.allocation is not None:
        yield from _judge_allocation(start, start.step or file.allocation, ranks)


def _devices(start: ProcessLaunch) -> int | None:
    """A Trainer that starts its ranks by itself; behind srun they are SLURM's tasks (ENV010)."""
    if start.launch.program != "python" or start.outer is not None:
        return None
    on_processor = trainer_option(start.launch, "accelerator") == "cpu" or "trainer=ddp_sim" in start.launch.arguments
    return None if on_processor else whole_number(trainer_option(start.launch, "devices"))


def _judge_allocation(start: ProcessLaunch, given: Allocation, ranks: int) -> Iterator[Violation]:
    """One launcher on each host; several share the host's GPUs."""
    gpus = given.gpus_per_node
    if gpus and ranks > gpus and not given.splits_gpus and "exclusive" not in given.options:
        yield _hit(start.launch.place, ranks, gpus, "the job asks for")


def _hit(place: SourceLocation, ranks: int, gpus: int, why: str) -> Violation:
    devices = f"{gpus} GPU{'' if gpus == 1 else 's'}"
    source = f"{why} {devices}" if why == "the job asks for" else f"{why} names {devices}"
    return Violation(
        place,
        f"{ranks} ranks are started on a host, and {source}",
        evidence=(("ranks", ranks), ("gpus", gpus)),
    )


def _judge_pods(job: Workload) -> Iterator[Violation]:
    """``spec.nprocPerNode`` and the launcher's own number."""
    for role in job.roles:
        for box in role.containers:
            if box.gpus:
                yield from _judge_container(box, box.gpus)
                yield from _judge_field(job, box.gpus)


def _judge_container(box: Container, gpus: int) -> Iterator[Violation]:
    for launch in box.chain():
        ranks = processes_of(launch) if launch.program in ("torchrun", "accelerate", "deepspeed") else None
        if ranks is not None and ranks > gpus:
            yield Violation(
                launch.place,
                f"{ranks} ranks are started in a pod of {gpus} GPU{'' if gpus == 1 else 's'}",
                fix=f"`--nproc_per_node={gpus}`, or `nvidia.com/gpu: {ranks}`.",
                evidence=(("ranks", ranks), ("gpus", gpus)),
            )


def _judge_field(job: Workload, gpus: int) -> Iterator[Violation]:
    ranks = whole_number(job.processes_per_pod)
    if ranks is not None and ranks > gpus and job.processes_place is not None:
        yield Violation(
            job.processes_place,
            f"nprocPerNode is {ranks}, and a pod has {gpus} GPU{'' if gpus == 1 else 's'}",
            fix=f'`nprocPerNode: "{gpus}"`, or `nvidia.com/gpu: {ranks}`.',
            evidence=(("ranks", ranks), ("gpus", gpus)),
        )


def _judge_config(root: YamlNode) -> Iterator[Violation]:
    """Accelerate makes CUDA_VISIBLE_DEVICES of gpu_ids (accelerate/utils/launch.py)."""
    listed, ranks, place = root.word("gpu_ids"), root.number("num_processes"), root.get("num_processes")
    if listed is None or listed == "all" or ranks is None or place is None or root.flag("use_cpu"):
        return
    gpus = len([one for one in listed.split(",") if one.strip()])
    if (root.number("num_machines") or 1) == 1 and ranks > gpus:
        yield _hit(place.place, ranks, gpus, f"gpu_ids: {listed}")
