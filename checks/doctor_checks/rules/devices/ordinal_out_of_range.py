"""GPU002 in launch files: a local rank exceeds the number of visible devices."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from doctor.api import FileFails, FilePasses, LaunchFile, SourceLocation, Violation, rule
from doctor.lint.launch.kubernetes import Container
from doctor.lint.launch.launch_file import Launch
from doctor.lint.launch.manifest import Manifest
from doctor.lint.launch.partial_text import whole_number
from doctor.lint.launch.process_launches import (
    ProcessLaunch,
    hosts_of,
    option_name,
    processes_of,
    starts_of,
    trainer_option,
    visible_devices,
)
from doctor.lint.launch.shell.reader import ShellFile
from doctor.lint.launch.slurm_batch import Allocation
from doctor.lint.launch.yaml_tree import YamlNode
from doctor.testing.script_cases import shell_fails, shell_passes
from doctor_checks.devices.assignment.ordinal_out_of_range import ordinal_out_of_range

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
    check=ordinal_out_of_range,
    reads=LaunchFile,
    impacts={
        # lightning/fabric/utilities/device_parser.py, _sanitize_gpu_ids
        r"^The Trainer uses": (
            'Lightning raises MisconfigurationException ("You requested gpu: …") at startup, and no rank starts '
            "training."
        ),
    },
    cases=lambda: (
        shell_fails(
            "two visible GPUs and four ranks",
            "CUDA_VISIBLE_DEVICES=1,2 python -m torch.distributed.launch --nproc_per_node=4 train.py  # !",
        ),
        shell_fails(
            "four GPUs asked for and eight ranks",
            "#SBATCH --gres=gpu:a100:4",
            "export NGPUS=8",
            "srun torchrun --nproc-per-node=$NGPUS train.py  # !",
        ),
        shell_fails(
            "accelerate starts more processes than GPUs",
            "accelerate launch --num_machines 1 --num_processes 4 --gpu_ids 0,1 train.py  # !",
        ),
        shell_fails(
            "Lightning uses more devices than are allocated",
            "#SBATCH --gres=gpu:4",
            "python train.py fit --trainer.devices=8  # !",
        ),
        FileFails("pods with four GPUs each", _POD.replace("MARK", "  # !").replace("GPUS", "4"), name="job.yaml"),
        FileFails("two ids and four processes", _CONFIG.replace("COUNT", "4  # !"), name="default_config.yaml"),
        shell_passes(
            "as many as are visible", "export CUDA_VISIBLE_DEVICES=1,2", "torchrun --nproc_per_node=2 train.py"
        ),
        shell_passes(
            "another list in each branch",
            "export CUDA_VISIBLE_DEVICES=0,1",
            'if [ "$1" = all ]; then export CUDA_VISIBLE_DEVICES=0,1,2,3; fi',
            "torchrun --nproc_per_node=4 train.py",
        ),
        shell_passes(
            "a launcher in the branch for several GPUs",
            "export CUDA_VISIBLE_DEVICES=0",
            'if [[ $CUDA_VISIBLE_DEVICES != *","* ]]; then',
            "  python train.py",
            "else",
            "  torchrun --nnodes 1 --nproc_per_node 4 train.py",
            "fi",
        ),
        shell_fails(
            "after a branch that asks for the GPUs",
            "export CUDA_VISIBLE_DEVICES=0",
            'if [ -z "$CUDA_VISIBLE_DEVICES" ]; then echo all; fi',
            "torchrun --nproc_per_node=4 train.py  # !",
        ),
        shell_passes(
            "the command lists its own GPUs",
            "export CUDA_VISIBLE_DEVICES=0",
            "CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc_per_node=2 train.py",
        ),
        shell_passes(
            "GPUs of two hosts together",
            "#SBATCH --nodes=2",
            "#SBATCH --gpus=16",
            "srun torchrun --nnodes=2 --nproc-per-node=8 x.py",
        ),
        FilePasses("pods with eight GPUs", _POD.replace("MARK", "").replace("GPUS", "8"), name="job.yaml"),
        FilePasses("as many ids as processes", _CONFIG.replace("COUNT", "2"), name="default_config.yaml"),
        shell_passes("ranks on the CPU", "CUDA_VISIBLE_DEVICES= torchrun --nproc_per_node=4 train.py"),
    ),
)
def ordinal_out_of_range_in_files(file: LaunchFile) -> Iterator[Violation]:
    """Ask whether a host has a GPU for each rank that is started on it.

    Fix: Start as many ranks per host as it has GPUs.
    """
    for start in starts_of(file):
        if _uses_gpus(start.launch):
            yield from _judge_start(start, file)
    if isinstance(file, Manifest):
        for root in file.of_kind("accelerate"):
            yield from _judge_config(root)
        for job in file.workloads:
            for role in job.roles:
                for box in role.containers:
                    if box.gpus:
                        yield from _judge_container(box, box.gpus)
                        ranks = whole_number(job.processes_per_pod)
                        if ranks is not None and ranks > box.gpus and job.processes_place is not None:
                            yield Violation(
                                job.processes_place,
                                f"nprocPerNode is {ranks}, but a pod has {box.gpus} GPU{'' if box.gpus == 1 else 's'}",
                                fix=f'Set `nprocPerNode: "{box.gpus}"` or `nvidia.com/gpu: {ranks}`.',
                                evidence=(("ranks", ranks), ("gpus", box.gpus)),
                            )


def _uses_gpus(launch: Launch) -> bool:
    return launch.option(launch.command.cpu) is None and "CUDA_MPS_PIPE_DIRECTORY" not in launch.settings


def _judge_start(start: ProcessLaunch, file: LaunchFile) -> Iterator[Violation]:
    ranks = processes_of(start.launch) if start.is_agent else _devices(start)
    if ranks is None:
        return
    if (visible := visible_devices(start.launch)) is not None:
        if ranks > visible[1]:
            yield _violation(
                start.launch.place,
                ranks,
                visible[1],
                f"CUDA_VISIBLE_DEVICES={visible[0]}",
                _fewer(start, visible[1]),
                not start.is_agent,
            )
        return
    option = start.launch.command.device_ids
    listed = start.launch.known_option(option)
    if listed is not None and listed != "all" and (hosts_of(start.launch) or 1) == 1:
        if ranks > len(listed.split(",")):
            count = len(listed.split(","))
            yield _violation(start.launch.place, ranks, count, f"--{option} {listed}", _fewer(start, count))
        return
    if isinstance(file, ShellFile) and file.allocation is not None:
        given = start.step or file.allocation
        gpus = given.gpus_per_node
        if gpus and ranks > gpus and not given.splits_gpus and "exclusive" not in given.options:
            found = _violation(
                start.launch.place, ranks, gpus, "the job requests", _fewer(start, gpus), devices=not start.is_agent
            )
            yield _with_request(found, start, given, ranks)


def _with_request(found: Violation, start: ProcessLaunch, given: Allocation, ranks: int) -> Violation:
    """The violation with the option that requests the GPUs, and its line if it is one of the batch script."""
    name = next((name for name in ("gpus-per-node", "gres") if name in given.options), None)
    if name is None:
        return found
    value, of_step = given.options[name], start.outer is not None and name in start.outer.options
    line = None if of_step else given.line(name)
    place = f" in line {line}" if line else " of srun" if of_step else ""
    more = re.sub(r"(?<=:)\d+$|^\d+$", str(ranks), value)
    option = f"`--{name}={more}`{place}"
    fix = found.fix.replace(f"`#SBATCH --gpus-per-node={ranks}`", option) if more != value else found.fix
    evidence = (*found.evidence, ("requested_by", f"--{name}={value}{place}"))
    return replace(found, fix=fix, evidence=evidence)


def _fewer(start: ProcessLaunch, gpus: int) -> str:
    """The option that starts as many ranks as there are GPUs, as a user writes it; empty if the launcher has none."""
    command = start.launch.command
    if not start.is_agent:
        return f"trainer.devices={gpus}"
    if command.all_processes:
        return f"{option_name(start.launch, command.all_processes)}={gpus * (hosts_of(start.launch) or 1)}"
    return f"{option_name(start.launch, command.processes[0])}={gpus}" if command.processes else ""


def _devices(start: ProcessLaunch) -> int | None:
    """The devices of a Trainer that starts its own ranks; under srun, they are SLURM's tasks (ENV010)."""
    if start.launch.program != "python" or start.outer is not None:
        return None
    on_processor = trainer_option(start.launch, "accelerator") == "cpu" or "trainer=ddp_sim" in start.launch.arguments
    return None if on_processor else whole_number(trainer_option(start.launch, "devices"))


def _violation(place: SourceLocation, ranks: int, gpus: int, why: str, fewer: str, devices: bool = False) -> Violation:
    """``fewer``: the setting that starts as many ranks as GPUs. ``devices``: ``ranks`` are the devices of a Trainer,
    which refuses to start more ranks than it sees GPUs."""
    named = f"{gpus} GPU{'' if gpus == 1 else 's'}"
    source = f"{why} {named} per host" if why == "the job requests" else f"{why} names {named}"
    return Violation(
        place,
        f"The Trainer uses {ranks} devices per host, but {source}"
        if devices
        else f"{ranks} ranks are started per host, but {source}",
        fix=f"{f'Use `{fewer}`' if fewer else f'Start {gpus} ranks per host'}, or {_more(why, ranks)}.",
        evidence=(("ranks_per_host", ranks), ("gpus_per_host", gpus)),
    )


def _more(why: str, ranks: int) -> str:
    """How the host gets as many GPUs as ranks."""
    if why == "the job requests":
        return f"request {ranks} GPUs per host with `#SBATCH --gpus-per-node={ranks}`"
    return (
        f"list {ranks} GPUs in {why.partition('=')[0]}"
        if "=" in why
        else f"list {ranks} GPUs in `{why.split()[0].rstrip(':')}`"
    )


def _judge_container(box: Container, gpus: int) -> Iterator[Violation]:
    for launch in box.chain():
        ranks = processes_of(launch) if launch.is_agent else None
        if ranks is not None and ranks > gpus:
            yield Violation(
                launch.place,
                f"This command starts {ranks} ranks in a pod with {gpus} GPU{'' if gpus == 1 else 's'}",
                fix=f"Set `--nproc_per_node={gpus}` or `nvidia.com/gpu: {ranks}`.",
                evidence=(("ranks", ranks), ("gpus", gpus)),
            )


def _judge_config(root: YamlNode) -> Iterator[Violation]:
    """Accelerate sets CUDA_VISIBLE_DEVICES from gpu_ids (accelerate/utils/launch.py)."""
    listed, ranks, place = root.word("gpu_ids"), root.number("num_processes"), root.get("num_processes")
    if listed is None or listed == "all" or ranks is None or place is None or root.flag("use_cpu"):
        return
    gpus = len([one for one in listed.split(",") if one.strip()])
    if (root.number("num_machines") or 1) == 1 and ranks > gpus:
        yield _violation(place.place, ranks, gpus, f"gpu_ids: {listed}", f"num_processes: {gpus}")
