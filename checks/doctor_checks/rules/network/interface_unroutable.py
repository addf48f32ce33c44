"""NET009 in launch files: the interface in use does not reach other hosts."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.api import LaunchFile, Violation, rule
from doctor.lint.launch.manifest import Manifest
from doctor.lint.launch.process_launches import file_spans_hosts
from doctor.testing.script_cases import shell_fails, shell_passes
from doctor_checks.network.interfaces.interface_unroutable import interface_unroutable

_NAMES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_OOB_NET_IFNAME")
_NOWHERE = {"lo": "the loopback interface", "docker0": "Docker's bridge", "virbr0": "a bridge of virtual machines"}
_TWO = ("#SBATCH --nodes=2", "#SBATCH --ntasks-per-node=8")


@rule(
    check=interface_unroutable,
    reads=LaunchFile,
    cases=lambda: (
        shell_fails("loopback on two hosts", *_TWO, "export NCCL_SOCKET_IFNAME=lo  # !", "srun python train.py"),
        shell_fails(
            "Docker's bridge",
            "export NCCL_SOCKET_IFNAME==docker0  # !",
            "torchrun --nnodes=2 --node_rank=$1 --master_addr=$2 --nproc_per_node=8 train.py",
        ),
        shell_fails("for Gloo", *_TWO, "srun --export=ALL,GLOO_SOCKET_IFNAME=lo python train.py  # !"),
        shell_passes("left out", *_TWO, "export NCCL_SOCKET_IFNAME=^lo,docker0", "srun python train.py"),
        shell_passes("one host", "export NCCL_SOCKET_IFNAME=lo", "torchrun --nproc_per_node=8 x.py"),
        shell_passes("one of several", *_TWO, "export NCCL_SOCKET_IFNAME=eth0,lo", "srun python train.py"),
    ),
)
def interface_unroutable_in_files(file: LaunchFile) -> Iterator[Violation]:
    """Ask whether the interface configured for a multi-host job connects the hosts.

    Why it hurts: each host advertises an address that is local to it: connections are refused or time out.
    Fix: Set the variable to the interface that connects the hosts (`ip -br address` lists the interfaces).
    """
    has_pods = isinstance(file, Manifest) and any((one.pods or 1) > 1 for one in file.workloads)
    for setting in file.settings if has_pods or file_spans_hosts(file) else ():
        value = setting.known_value
        name = (value or "").removeprefix("=")
        if setting.name in _NAMES and setting.is_exported and name in _NOWHERE:
            yield Violation(
                setting.place,
                f"{setting.name} selects {_NOWHERE[name]} ({name}), which does not reach other hosts",
                f"Set {setting.name} to the interface that connects the hosts (`ip -br address` lists the interfaces).",
            )
