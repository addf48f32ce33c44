"""NET009: a job of several hosts is told to talk over an interface that leads nowhere."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.api import FileFails, FilePasses, LaunchFile, Severity, Violation, rule
from doctor.lint.launch.manifest import Manifest
from doctor.lint.launch.process_launches import spans_hosts
from doctor.testing import lines

_NAMES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_OOB_NET_IFNAME")
_NOWHERE = {"lo": "the loopback interface", "docker0": "Docker's bridge", "virbr0": "a bridge of virtual machines"}
_TWO = ("#SBATCH --nodes=2", "#SBATCH --ntasks-per-node=8")


@rule(
    id="NET009",
    severity=Severity.ERROR,
    reads=LaunchFile,
    cases=lambda: (
        FileFails(
            "loopback on two hosts",
            lines(*_TWO, "export NCCL_SOCKET_IFNAME=lo  # !", "srun python train.py"),
            name="job.sbatch",
        ),
        FileFails(
            "Docker's bridge",
            lines(
                "export NCCL_SOCKET_IFNAME==docker0  # !",
                "torchrun --nnodes=2 --node_rank=$1 --master_addr=$2 --nproc_per_node=8 train.py",
            ),
            name="train.sh",
        ),
        FileFails(
            "for Gloo",
            lines(*_TWO, "srun --export=ALL,GLOO_SOCKET_IFNAME=lo python train.py  # !"),
            name="job.sbatch",
        ),
        FilePasses(
            "left out",
            lines(*_TWO, "export NCCL_SOCKET_IFNAME=^lo,docker0", "srun python train.py"),
            name="job.sbatch",
        ),
        FilePasses(
            "one host", lines("export NCCL_SOCKET_IFNAME=lo", "torchrun --nproc_per_node=8 x.py"), name="train.sh"
        ),
        FilePasses(
            "one of several",
            lines(*_TWO, "export NCCL_SOCKET_IFNAME=eth0,lo", "srun python train.py"),
            name="job.sbatch",
        ),
    ),
)
def interface_unroutable(file: LaunchFile) -> Iterator[Violation]:
    """Ask whether the interface that a job of several hosts is told to use can lead from one to another.

    Why it hurts: each host offers an address that leads to itself: connections are refused or never answered.
    Fix: the interface of the network between the hosts (`ip route get <another host>`), or leave these out:
    `export NCCL_SOCKET_IFNAME=^lo,docker0`.
    """
    several = spans_hosts(file) or (isinstance(file, Manifest) and any((one.pods or 1) > 1 for one in file.workloads))
    for setting in file.settings if several else ():
        name = (setting.told or "").removeprefix("=")
        if setting.name in _NAMES and setting.is_exported and name in _NOWHERE:
            yield Violation(
                setting.place,
                f"{setting.name}={setting.told} in a job of several hosts: {_NOWHERE[name]} leads to no other host",
                evidence=(("value", setting.told),),
            )
