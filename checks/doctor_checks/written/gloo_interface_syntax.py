"""NET011: a launch file gives Gloo a list in NCCL's grammar."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.api import FileFails, FilePasses, LaunchFile, Severity, Violation, rule
from doctor.knowledge.interface_syntax import looks_like_nccl_syntax
from doctor.testing import lines


@rule(
    id="NET011",
    severity=Severity.ERROR,
    reads=LaunchFile,
    cases=lambda: (
        FileFails(
            "what to leave out", lines("export GLOO_SOCKET_IFNAME=^docker0,lo  # !", "torchrun train.py"), name="a.sh"
        ),
        FileFails("a whole name", lines("GLOO_SOCKET_IFNAME==eth0 torchrun train.py  # !"), name="train.sh"),
        FileFails(
            "the value of NCCL's variable",
            lines("export NCCL_SOCKET_IFNAME=^lo", "export GLOO_SOCKET_IFNAME=$NCCL_SOCKET_IFNAME  # !", "srun x.py"),
            name="job.sh",
        ),
        FilePasses(
            "a name", lines("export GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=^lo", "torchrun train.py"), name="a.sh"
        ),
        FilePasses("two names", lines("export GLOO_SOCKET_IFNAME=eth0,eth1", "torchrun train.py"), name="train.sh"),
        FilePasses("from outside", lines("export GLOO_SOCKET_IFNAME=$IFACE", "torchrun train.py"), name="train.sh"),
    ),
)
def gloo_interface_syntax(file: LaunchFile) -> Iterator[Violation]:
    """Ask whether GLOO_SOCKET_IFNAME holds names alone, which is all that Gloo reads.

    Why it hurts: Gloo looks for an interface of that very name, and every rank ends with "Unable to find address for".
    Fix: whole names of interfaces: `export GLOO_SOCKET_IFNAME=eth0`.
    """
    for setting in file.settings:
        if setting.name == "GLOO_SOCKET_IFNAME" and setting.is_exported and looks_like_nccl_syntax(setting.value):
            yield Violation(
                setting.place,
                f"GLOO_SOCKET_IFNAME={setting.told or '…'}: ^ and = are NCCL's grammar, which Gloo does not read",
                evidence=(("value", setting.told),),
            )
