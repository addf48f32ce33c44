"""NET005: MASTER_ADDR is a loopback address, but the master is on another host."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from doctor.analysis.interface_choice import good_interfaces, is_loopback
from doctor.analysis.logs.event_timeline import set_up_after, spans_hosts
from doctor.api import (
    FileFails,
    FilePasses,
    Finding,
    IdenticalRanks,
    Job,
    LaunchFile,
    Rank,
    Scope,
    Severity,
    Unknown,
    Verdict,
    Violation,
    check,
    event_groups,
    finding_from_logs,
    is_logged,
    rule,
)
from doctor.facts import InterfaceFacts, LaunchFacts, MasterFacts, ProcessFacts
from doctor.lint.launch.kubernetes import Workload
from doctor.lint.launch.launch_file import Launch
from doctor.lint.launch.manifest import Manifest
from doctor.lint.launch.partial_text import is_known
from doctor.lint.launch.process_launches import (
    ProcessLaunch,
    endpoint_of,
    hosts_of,
    is_loopback_name,
    option_name,
    option_of,
    rank_of_host,
    starts_of,
    uses_node_rank,
)
from doctor.lint.launch.yaml_tree import YamlNode
from doctor.testing import Fails, Passes, healthy, logged
from doctor.testing.script_cases import shell_fails, shell_passes

_LOCALHOST = MasterFacts(address="localhost", port=29500, resolved=("127.0.0.1",), is_local=True, interface="lo")
_OWN_NAME = MasterFacts(address="node0", port=29500, resolved=("127.0.1.1",), is_local=True, interface="lo")


_LOOPBACK = ("localhost", "ip6-localhost", "127.0.0.1", "::1", "[::1]")


def _from_logs(job: Job) -> Iterator[Finding]:
    if not spans_hosts(job):
        return
    kinds = ("torch.store.connect_timeout", "torch.store.connect_fail", "torch.store.validate", "launch.master_given")
    gone_wrong = is_logged(job, *kinds[:3], "elastic.rdzv_timeout", "elastic.rdzv_connect", "torch.store.clients")
    for group in event_groups(job, *kinds, "elastic.launch", by=("host", "host2", "value")):
        target = group.value("host", "host2") or (
            (group.value("value") or "").rpartition(":")[0] if group.value("key") == "rdzv_endpoint" else None
        )
        if target in _LOOPBACK and gone_wrong and not set_up_after(job, group.events[-1]):
            yield finding_from_logs(
                group,
                f"The master of a multi-host job is {target}: each host connects to itself",
                evidence={"master": target},
                confidence=0.85,
                explains=("NET006", "ENV005", "ENV015"),
            )
            return


@check(
    id="NET005",
    severity=Severity.ERROR,
    scope=Scope.JOB,
    when="PM",
    needs=(MasterFacts,),
    from_logs=_from_logs,
    cases=lambda: (
        Passes("the master by its address", healthy(hosts=2, per_host=2)),
        Passes("localhost on one host", healthy(hosts=1, per_host=4).put(_LOCALHOST)),
        Passes(
            "the master's own host may know itself as 127.0.1.1",
            healthy(2, 2).put(_OWN_NAME, ranks=(0, 1)),
        ),
        Fails(
            "localhost on the master's own host alone",
            healthy(2, 2).put(_LOCALHOST, ranks=(0, 1)),
            ranks=(0, 1),
            severity=Severity.INFO,
        ),
        Fails(
            "localhost on the master's own host, seen without the other hosts",
            healthy(2, 2).put(_LOCALHOST).only((0, 1)),
            ranks=(0, 1),
            severity=Severity.INFO,
        ),
        Fails("localhost in a job of two hosts", healthy(2, 2).put(_LOCALHOST), ranks=(2, 3)),
        Fails(
            "one host takes the master's name for its own",
            healthy(hosts=3, per_host=1).put(_OWN_NAME, ranks=(2,)),
            ranks=(2,),
        ),
        Fails(
            "seen from the second host alone",
            healthy(2, 2).put(_LOCALHOST).only((2, 3)),
            ranks=(2, 3),
        ),
        Fails(
            "one rank whose host has another local rank 0 than rank 0",
            healthy(2, 2).put(_LOCALHOST).alter(LaunchFacts, node_rank=None).only((2,)),
            ranks=(2,),
        ),
        Passes(
            "one host, and rank 0 died before",
            logged(
                "torch.distributed.DistNetworkError: The client socket has timed out after 300000ms while trying to "
                "connect to (127.0.0.1, 29500)."
            ),
        ),
        Fails(
            "two hosts, each going to itself",
            logged(
                "torchrun --nnodes=2 --node-rank=1 --master-addr=127.0.0.1 train.py",
                "torch.distributed.DistNetworkError: The client socket has timed out after 300000ms while trying to "
                "connect to (127.0.0.1, 29500).",
            ),
        ),
        Fails(
            "the rendezvous of two hosts at localhost",
            logged(
                "  max_nodes        : 2",
                "  rdzv_endpoint    : localhost:29400",
                "torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError",
            ),
        ),
    ),
)
def master_loopback(job: Job) -> Iterator[Verdict]:
    """Ask whether MASTER_ADDR is a loopback address on hosts other than that of rank 0.

    Why it hurts: these ranks connect to their own host, where nothing listens, and all ranks block: `The client socket
    has timed out after 600000ms while trying to connect to (127.0.0.1, 29500)`.
    Fix: Set MASTER_ADDR on every host to the address of rank 0's host; in SLURM,
    `scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n1` prints its name.
    """
    first = next((rank for rank in job.ranks if rank.number == 0), None)
    others = [one for one, _ in job.each(MasterFacts) if not all(map(is_loopback, one.resolved))]
    at_home: list[tuple[MasterFacts, IdenticalRanks]] = []
    is_reported = False
    for master, identical in job.each(MasterFacts, also=(InterfaceFacts,)):
        if not master.resolved or not all(map(is_loopback, master.resolved)):
            continue
        judged = {rank.number: _shares_host(rank, first, job.is_multi_host) for rank in identical.members}
        strange = tuple(number for number, shares in judged.items() if shares is False)
        is_reported |= bool(strange)
        if not strange and all(judged.values()) and is_loopback_name(master.address):
            at_home.append((master, identical))
        if strange:
            yield Finding(
                (
                    f"MASTER_ADDR={master.address} is the loopback address {master.resolved[0]}, but rank 0 runs on "
                    "another host"
                )
                if master.address != master.resolved[0]
                else f"MASTER_ADDR={master.address} is a loopback address, but rank 0 runs on another host",
                ranks=strange,
                evidence={"MASTER_ADDR": master.address, "resolved": list(master.resolved), "port": master.port},
                explains=("ENV006", "NET006"),
            )
        doubtful = tuple(number for number, shares in judged.items() if shares is None)
        if doubtful:
            yield Unknown("the host of rank 0 is unknown", doubtful, "gather all ranks")
    if job.is_multi_host and not is_reported:
        yield from (_only_at_home(master, identical, others) for master, identical in at_home)


def _only_at_home(master: MasterFacts, identical: IdenticalRanks, others: list[MasterFacts]) -> Finding:
    """A loopback address on the host of rank 0. The store listens on all addresses (torch TCPStore.cpp), so its own
    ranks reach it, but no other host can use the value. A name that resolves to 127.0.1.1 there can be passed on.
    """
    interfaces = identical.find(InterfaceFacts)
    known = [one.address for one in others]
    known += [one.addresses[0].address for one in (good_interfaces(interfaces) if interfaces else ())]
    return Finding(
        f"MASTER_ADDR={master.address} on the host of rank 0: no other host can use this address",
        ranks=identical.ranks,
        severity=Severity.INFO,
        evidence={"MASTER_ADDR": master.address, "elsewhere": sorted({one.address for one in others})[:8]},
        effect="The job starts only if every other host is given an address of this host. Older releases of torchrun "
        "and scripts that are shared by all hosts pass the loopback address on to them.",
        fix=f"Use one address on all hosts:\nexport MASTER_ADDR={shlex.quote(known[0])}" if known else "",
    )


def _shares_host(rank: Rank, first: Rank | None, multi_host: bool) -> bool | None:
    """Whether ``rank`` reaches rank 0 over a loopback address; ``None`` if unknown."""
    if first is not None:
        return _shares_network(rank, first)
    if not multi_host:
        return True
    launch = rank.find(LaunchFacts)
    if launch is not None and launch.node_rank is not None:
        return launch.node_rank == 0
    # Rank 0 has local rank 0 on its own host.
    return False if launch is not None and launch.local_rank == 0 and rank.number > 0 else None


def _shares_network(one: Rank, other: Rank) -> bool:
    """Whether both share a loopback interface: it belongs to a network namespace, which containers may share."""
    if one.host.machine != other.host.machine:
        return False
    processes = (one.find(ProcessFacts), other.find(ProcessFacts))
    spaces = [process.namespace("net") for process in processes if process is not None]
    if len(spaces) == 2 and None not in spaces:
        return spaces[0] == spaces[1]
    return one.host.index == other.host.index


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
    cases=lambda: (
        shell_fails(
            "localhost for two hosts",
            "torchrun --nnodes=2 --node_rank=$1 --master_addr=localhost --master_port=29500 train.py  # !",
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
    ),
)
def master_loopback_in_files(file: LaunchFile) -> Iterator[Violation]:
    """Ask whether the master address of a multi-host job is reachable from all hosts.

    Why it hurts: each host connects to itself, where nothing listens, and all ranks block: `The client socket has timed
    out after 600000ms while trying to connect to (127.0.0.1, 29500)`.
    Fix: Use the address of rank 0's host; in SLURM, `scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n1` prints
    its name.
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
        yield _violation(launch, f"{launch.program} for {hosts} hosts uses {endpoint} as the master")
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
            launch,
            f"{launch.program} for {hosts} hosts without {name}: each uses itself as the master",
            None if start.step is not None else Severity.WARNING,
        )


def _judge_task(start: ProcessLaunch) -> Iterator[Violation]:
    address = start.launch.setting("MASTER_ADDR")
    nodes = start.step.nodes if start.step is not None else None
    if start.launch.program == "python" and nodes and nodes > 1 and address is not None and is_loopback_name(address):
        yield _violation(start.launch, f"MASTER_ADDR={address} for srun tasks on {nodes} hosts")


def _violation(launch: Launch, summary: str, severity: Severity | None = None) -> Violation:
    return Violation(launch.place, summary, severity=severity, confidence=1.0 if severity is None else 0.7)


def _judge_config(root: YamlNode) -> Iterator[Violation]:
    address, machines, place = root.word("main_process_ip"), root.number("num_machines"), root.get("main_process_ip")
    if root.get("mpirun_config") is not None or root.number("machine_rank") == 0:
        return
    if address is not None and place is not None and (machines or 1) > 1 and is_loopback_name(address):
        yield Violation(place.place, f"main_process_ip is {address} for {machines} machines")


def _judge_pods(job: Workload) -> Iterator[Violation]:
    """Report a loopback MASTER_ADDR that overrides the value of the operator."""
    if job.kind not in ("PyTorchJob", "JobSet") or (job.pods or 1) < 2:
        return
    for role in job.roles:
        for box in role.containers:
            for setting in box.settings:
                if setting.name == "MASTER_ADDR" and is_loopback_name(setting.value):
                    yield Violation(setting.place, f"MASTER_ADDR is {setting.value} in a job of {job.pods} pods")
