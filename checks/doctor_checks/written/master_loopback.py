"""NET005: a job of several hosts is told a loopback address as its master."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.api import FileFails, FilePasses, LaunchFile, Severity, Violation, rule
from doctor.lint.launch.kubernetes import Workload
from doctor.lint.launch.launch_file import Launch
from doctor.lint.launch.manifest import Manifest
from doctor.lint.launch.partial_text import is_known
from doctor.lint.launch.process_launches import (
    ProcessLaunch,
    endpoint_of,
    hosts_of,
    is_loopback,
    is_static,
    option_of,
    rank_of_host,
    starts_of,
)
from doctor.lint.launch.yaml_tree import YamlNode
from doctor.testing import lines

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
    id="NET005",
    severity=Severity.ERROR,
    reads=LaunchFile,
    cases=lambda: (
        FileFails(
            "localhost for two hosts",
            lines("torchrun --nnodes=2 --node_rank=$1 --master_addr=localhost --master_port=29500 train.py  # !"),
            name="train.sh",
        ),
        FileFails(
            "no address at all",
            lines("torchrun --nnodes=2 --node_rank=$RANK --nproc_per_node=8 train.py  # !"),
            name="train.sh",
        ),
        FileFails(
            "MASTER_ADDR for srun",
            lines(*_TWO, "export MASTER_ADDR=127.0.0.1", "export MASTER_PORT=29500", "srun python train.py  # !"),
            name="job.sbatch",
        ),
        FileFails("Accelerate for two machines", _CONFIG.replace("ADDRESS", "127.0.0.1  # !"), name="config.yaml"),
        FileFails(
            "in a pod",
            _JOB + "                - {name: MASTER_ADDR, value: localhost}  # !\n",
            name="job.yaml",
        ),
        FilePasses(
            "the first host of the allocation",
            lines(
                *_TWO,
                'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
                "srun python train.py",
            ),
            name="job.sbatch",
        ),
        FilePasses(
            "one host",
            lines("torchrun --nnodes=1 --nproc_per_node=8 --master_addr=localhost --master_port=29500 train.py"),
            name="train.sh",
        ),
        FilePasses(
            "two hosts played on one",
            lines(
                "torchrun --nnodes=2 --node_rank=0 --master_addr=127.0.0.1 --master_port=29501 a.py &",
                "torchrun --nnodes=2 --node_rank=1 --master_addr=127.0.0.1 --master_port=29501 a.py",
            ),
            name="train.sh",
        ),
        FilePasses(
            "on the master itself",
            lines("torchrun --nnodes=2 --node_rank=0 --master_addr=127.0.0.1 --master_port=29501 train.py"),
            name="node0.sh",
        ),
        FilePasses("to be filled in", _CONFIG.replace("ADDRESS", "null"), name="config.yaml"),
        FilePasses(
            "by the name of the service",
            _JOB + "                - {name: MASTER_ADDR, value: llm-master-0}\n",
            name="job.yaml",
        ),
        FilePasses("options that can't be told", lines("torchrun --nnodes=2 $RDZV train.py"), name="train.sh"),
    ),
)
def master_loopback(file: LaunchFile) -> Iterator[Violation]:
    """Ask whether a job of several hosts is told an address that all of them can reach.

    Why it hurts: each host dials itself. Nobody listens there, and both sides wait: `The client socket has timed out
    after 600000ms while trying to connect to (127.0.0.1, 29500)`.
    Fix: the address of rank 0's host, taken from `scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n1` or the
    scheduler's host list.
    """
    starts = list(starts_of(file))
    if not _plays_hosts(starts):
        for start in starts:
            yield from _judge_agent(start) if start.is_agent else _judge_task(start)
    if isinstance(file, Manifest):
        for root in file.of_kind("accelerate"):
            yield from _judge_config(root)
        for job in file.workloads:
            yield from _judge_pods(job)


def _plays_hosts(starts: list[ProcessLaunch]) -> bool:
    """Whether the hosts of one job are started side by side on this one."""
    numbers = [rank_of_host(start.launch) for start in starts if (hosts_of(start.launch) or 1) > 1]
    told = {number for number in numbers if number is not None and number.isdigit()}
    return len(told) > 1


def _judge_agent(start: ProcessLaunch) -> Iterator[Violation]:
    launch, hosts = start.launch, hosts_of(start.launch)
    if not hosts or hosts < 2 or rank_of_host(launch) == "0":
        return  # the master itself finds itself there
    endpoint = endpoint_of(launch)
    if endpoint is not None and is_known(endpoint[1]) and is_loopback(endpoint[1]):
        yield _hit(launch, f"{launch.program} for {hosts} hosts looks for its master at {endpoint[1]}")
    elif endpoint is None and launch.program == "torchrun" and not launch.is_open:
        yield from _judge_default(start, hosts)
    elif launch.program == "llamafactory" and is_loopback(launch.setting("MASTER_ADDR") or ""):
        yield _hit(launch, f"llamafactory for {hosts} hosts looks for its master at {launch.setting('MASTER_ADDR')}")


def _judge_default(start: ProcessLaunch, hosts: int) -> Iterator[Violation]:
    """Without an address torchrun takes 127.0.0.1, and c10d localhost (torch/distributed/run.py,
    elastic/rendezvous/c10d_rendezvous_backend.py); without a number for the host that comes first (ENV001)."""
    launch = start.launch
    told = rank_of_host(launch) is not None if is_static(launch) else option_of(launch, "rdzv-backend") == "c10d"
    if not told:
        return
    name = "--master-addr" if is_static(launch) else "--rdzv-endpoint"
    yield _hit(
        launch,
        f"torchrun for {hosts} hosts without {name}: each looks for its master on itself",
        None if start.step is not None else Severity.WARNING,
    )


def _judge_task(start: ProcessLaunch) -> Iterator[Violation]:
    address = start.launch.setting("MASTER_ADDR")
    nodes = start.step.nodes if start.step is not None else None
    if start.launch.program == "python" and nodes and nodes > 1 and address is not None and is_loopback(address):
        yield _hit(start.launch, f"srun starts tasks on {nodes} hosts with MASTER_ADDR={address}")


def _hit(launch: Launch, summary: str, severity: Severity | None = None) -> Violation:
    return Violation(launch.place, summary, severity=severity, confidence=1.0 if severity is None else 0.7)


def _judge_config(root: YamlNode) -> Iterator[Violation]:
    address, machines, place = root.word("main_process_ip"), root.number("num_machines"), root.get("main_process_ip")
    if root.get("mpirun_config") is not None or root.number("machine_rank") == 0:
        return
    if address is not None and place is not None and (machines or 1) > 1 and is_loopback(address):
        yield Violation(place.place, f"main_process_ip is {address} for {machines} machines")


def _judge_pods(job: Workload) -> Iterator[Violation]:
    """The operator sets MASTER_ADDR itself; a value of one's own takes its place."""
    if job.kind not in ("PyTorchJob", "JobSet") or (job.pods or 1) < 2:
        return
    for role in job.roles:
        for box in role.containers:
            for setting in box.settings:
                if setting.name == "MASTER_ADDR" and is_loopback(setting.value):
                    yield Violation(setting.place, f"MASTER_ADDR is {setting.value} in a job of {job.pods} pods")
