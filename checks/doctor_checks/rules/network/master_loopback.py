"""NET005 in launch files: MASTER_ADDR is a loopback address, but the master is on another host."""

from __future__ import annotations

import re
from collections.abc import Iterator

from doctor.api import FileFails, FilePasses, LaunchFile, Severity, Violation, rule
from doctor.knowledge.interface_syntax import is_loopback_name
from doctor.lint.launch.kubernetes import Workload
from doctor.lint.launch.launch_file import Launch
from doctor.lint.launch.manifest import Manifest
from doctor.lint.launch.partial_text import is_known
from doctor.lint.launch.process_launches import (
    ProcessLaunch,
    endpoint_of,
    hosts_of,
    option_name,
    option_of,
    rank_of_host,
    starts_of,
    uses_node_rank,
)
from doctor.lint.launch.yaml_tree import YamlNode
from doctor.testing.script_cases import shell_fails, shell_passes
from doctor_checks.network.name_resolution.master_loopback import OWN_RENDEZVOUS, master_loopback

_TWO = ("#!/bin/bash", "#SBATCH --nodes=2", "#SBATCH --ntasks-per-node=8")
_CONFIG = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
machine_rank: 1
main_process_ip: ADDRESS
main_process_port: 29500
num_machines: 2
num_processes: 16
"""
_JOB = """\
apiVersion: kubeflow.org/v1
kind: PyTorchJob
spec:
  pytorchReplicaSpecs:
    Master:
      replicas: 1
      template: {spec: {containers: [{name: pytorch, image: a}]}}
    Worker:
      replicas: 3
      template:
        spec:
          containers:
            - name: pytorch
              env:
"""


@rule(
    check=master_loopback,
    reads=LaunchFile,
    impacts={
        "own rendezvous": OWN_RENDEZVOUS,
        r"in a job of \d+ pods": (
            "All pods except that of rank 0 connect to themselves, where no store listens, and fail with `The client "
            "socket has timed out`."
        ),
    },
    cases=lambda: (
        shell_fails(
            "localhost for two hosts",
            "torchrun --nnodes=2 --node_rank=$1 --master_addr=localhost --master_port=29500 train.py  # !",
        ),
        shell_fails(
            "a rendezvous by c10d without an endpoint", "torchrun --nnodes=2 --rdzv_backend=c10d train.py  # !"
        ),
        shell_fails("no address at all", "torchrun --nnodes=2 --node_rank=$RANK --nproc_per_node=8 train.py  # !"),
        shell_fails(
            "MASTER_ADDR for srun",
            *_TWO,
            "export MASTER_ADDR=127.0.0.1",
            "export MASTER_PORT=29500",
            "srun python train.py  # !",
        ),
        FileFails("Accelerate for two machines", _CONFIG.replace("ADDRESS", "127.0.0.1  # !"), name="config.yaml"),
        FileFails(
            "in a pod",
            _JOB + "                - {name: MASTER_ADDR, value: localhost}  # !\n",
            name="job.yaml",
        ),
        shell_passes(
            "the first host of the allocation",
            *_TWO,
            'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            "srun python train.py",
        ),
        shell_passes(
            "one host", "torchrun --nnodes=1 --nproc_per_node=8 --master_addr=localhost --master_port=29500 train.py"
        ),
        shell_passes(
            "two hosts played on one",
            "torchrun --nnodes=2 --node_rank=0 --master_addr=127.0.0.1 --master_port=29501 a.py &",
            "torchrun --nnodes=2 --node_rank=1 --master_addr=127.0.0.1 --master_port=29501 a.py",
        ),
        shell_passes(
            "on the master itself",
            "torchrun --nnodes=2 --node_rank=0 --master_addr=127.0.0.1 --master_port=29501 train.py",
        ),
        FilePasses("to be filled in", _CONFIG.replace("ADDRESS", "null"), name="config.yaml"),
        FilePasses(
            "by the name of the service",
            _JOB + "                - {name: MASTER_ADDR, value: llm-master-0}\n",
            name="job.yaml",
        ),
        shell_passes(
            "a template that asks for the address",
            "# Change this to the host that runs rank 0",
            "HEAD=localhost",
            "torchrun --nnodes=2 --node_rank=$1 --master_addr=$HEAD train.py",
        ),
        shell_fails(
            "a comment on something else",
            "HEAD=localhost  # for torchrun",
            "torchrun --nnodes=2 --node_rank=$1 --master_addr=$HEAD train.py  # !",
        ),
        shell_passes("options that can't be told", "torchrun --nnodes=2 $RDZV train.py"),
        shell_fails(
            "mpirun for two hosts",
            "export MASTER_ADDR=localhost",
            "mpirun -np 16 -H node1:8,node2:8 -x MASTER_ADDR python train.py  # !",
        ),
        shell_fails(
            "mpirun for two hosts of one slot",
            "mpirun -np 2 -H node1,node2 -x MASTER_ADDR=127.0.0.1 python train.py  # !",
        ),
        shell_passes(
            "mpirun for the first of two hosts",
            "mpirun -np 8 -H node1:8,node2:8 -x MASTER_ADDR=127.0.0.1 python train.py",
        ),
        shell_passes("mpirun for this host", "mpirun -np 8 -H localhost:8 -x MASTER_ADDR=localhost python train.py"),
        shell_passes(
            "mpirun with the address of its first host",
            "mpirun -np 16 -H node1:8,node2:8 -x MASTER_ADDR=node1 python train.py",
        ),
    ),
)
def master_loopback_in_files(file: LaunchFile) -> Iterator[Violation]:
    """Ask whether the master address of a multi-host job is reachable from all hosts.

    Why it hurts: all hosts except that of rank 0 connect to themselves, where no store listens, and fail with `The
    client socket has timed out`.
    Fix: Use the address of rank 0's host.
    """
    starts = list(starts_of(file))
    numbers = [rank_of_host(start.launch) for start in starts if (hosts_of(start.launch) or 1) > 1]
    told = {number for number in numbers if number is not None and number.isdigit()}
    if len(told) < 2:
        for start in starts:
            yield from _judge_agent(start) if start.is_agent else _judge_task(start)
    if isinstance(file, Manifest):
        for root in file.of_kind("accelerate"):
            yield from _judge_config(root)
        for job in file.workloads:
            yield from _judge_pods(job)


def _judge_agent(start: ProcessLaunch) -> Iterator[Violation]:
    launch, hosts = start.launch, hosts_of(start.launch)
    if not hosts or hosts < 2 or rank_of_host(launch) == "0":
        return  # loopback is valid on the master itself
    endpoint = endpoint_of(launch)
    if endpoint is not None and is_known(endpoint) and is_loopback_name(endpoint):
        name = option_name(launch, launch.command.master if uses_node_rank(launch) else launch.command.host_port)
        own_store = option_of(launch, launch.command.rendezvous) == "c10d"
        does = "starts its own rendezvous" if own_store else "uses itself as the master"
        yield _violation(start, f"{launch.program} starts on {hosts} hosts with {name}={endpoint}: each {does}", name)
    elif endpoint is None and launch.command.assumes_loopback and not launch.is_open:
        # Without an address torchrun uses 127.0.0.1, and c10d localhost (torch/distributed/run.py,
        # elastic/rendezvous/c10d_rendezvous_backend.py); without a node rank, ENV001 is reported instead.
        launch, command = start.launch, start.launch.command
        is_static = uses_node_rank(launch)
        told = rank_of_host(launch) is not None if is_static else option_of(launch, command.rendezvous) == "c10d"
        if not told:
            return
        name = option_name(launch, command.master if is_static else command.host_port)
        yield _violation(
            start,
            f"{launch.program} starts on {hosts} hosts without {name}, so each host "
            + ("uses itself as the master" if is_static else "starts its own rendezvous"),
            name,
            None if start.step is not None else Severity.WARNING,
        )


def _judge_task(start: ProcessLaunch) -> Iterator[Violation]:
    address = start.launch.setting("MASTER_ADDR")
    if start.launch.program != "python" or address is None or not is_loopback_name(address):
        return
    nodes = start.step.nodes if start.step is not None else None
    if nodes and nodes > 1:
        yield _violation(start, f"srun starts tasks on {nodes} hosts with MASTER_ADDR={address}", "MASTER_ADDR")
    listed = _listed_hosts(start.outer) if start.outer is not None and start.step is None else []
    if start.outer is not None and len(listed) > 1:
        yield Violation(
            start.launch.place,
            f"{start.outer.program} starts processes on {len(listed)} hosts with MASTER_ADDR={address}",
            f"Set MASTER_ADDR to {listed[0]}, the first host of the list, if rank 0 runs there.",
        )


def _listed_hosts(launch: Launch) -> list[str]:
    """The hosts that ``mpirun -H a:8,b:8`` lists and needs for its processes; empty if they are unknown. One slot is
    meant without a number."""
    given, processes = launch.known_option("host"), launch.number("np")
    if given is None or not _HOSTS.fullmatch(given) or not processes:
        return []
    needed: dict[str, None] = {}
    for entry in given.split(","):
        host, _, slots = entry.partition(":")
        if processes > 0:
            needed[host] = None
        processes -= int(slots or 1)
    return [] if any(map(is_loopback_name, needed)) else list(needed)


_HOSTS = re.compile(r"[\w.-]+(?::\d{1,4})?(?:,[\w.-]+(?::\d{1,4})?)*")


def _violation(start: ProcessLaunch, summary: str, name: str, severity: Severity | None = None) -> Violation:
    """``name``: the option or variable that takes the address."""
    first = '"$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n1)"'
    fix = f"Set {name} to the address of rank 0's host."
    if name == "MASTER_ADDR":
        fix = f"export MASTER_ADDR={first}"
    elif start.step is not None:
        fix = f"Pass the first host of the job with `{name}={first}`."
    return Violation(start.launch.place, summary, fix, severity=severity, confidence=1.0 if severity is None else 0.7)


def _judge_config(root: YamlNode) -> Iterator[Violation]:
    address, machines, place = root.word("main_process_ip"), root.number("num_machines"), root.get("main_process_ip")
    if root.get("mpirun_config") is not None or root.number("machine_rank") == 0:
        return
    if address is not None and place is not None and (machines or 1) > 1 and is_loopback_name(address):
        yield Violation(
            place.place,
            f"main_process_ip is {address}, but num_machines is {machines}",
            "Set main_process_ip to the address of the host with machine_rank 0.",
        )


def _judge_pods(job: Workload) -> Iterator[Violation]:
    """Report a loopback MASTER_ADDR that overrides the value of the operator."""
    if job.kind not in ("PyTorchJob", "JobSet") or (job.pods or 1) < 2:
        return
    for role in job.roles:
        for box in role.containers:
            for setting in box.settings:
                if setting.name == "MASTER_ADDR" and is_loopback_name(setting.value):
                    fix = (
                        "Remove MASTER_ADDR from the pod templates, because the training operator sets it."
                        if job.kind == "PyTorchJob"
                        else "Set MASTER_ADDR to the DNS name of the pod that runs rank 0."
                    )
                    yield Violation(setting.place, f"MASTER_ADDR is {setting.value} in a job of {job.pods} pods", fix)
