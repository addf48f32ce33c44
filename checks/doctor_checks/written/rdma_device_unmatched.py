"""NET018: an entry of NCCL_IB_HCA can be no device's name."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.api import FileFails, FilePasses, LaunchFile, Severity, Violation, rule
from doctor.lint.launch.interface_list_syntax import list_fault
from doctor.testing import lines


@rule(
    id="NET018",
    severity=Severity.ERROR,
    reads=LaunchFile,
    cases=lambda: (
        FileFails(
            "a blank behind the comma", lines('export NCCL_IB_HCA="mlx5_0, mlx5_1"  # !', "torchrun x.py"), name="a.sh"
        ),
        FileFails("a second caret", lines("export NCCL_IB_HCA=^mlx5_0,^mlx5_3  # !", "torchrun x.py"), name="a.sh"),
        FileFails("a second equals sign", lines("NCCL_IB_HCA==mlx5_0:1,=mlx5_1:1 srun python x.py  # !"), name="a.sh"),
        FilePasses("a list", lines("export NCCL_IB_HCA=mlx5_0,mlx5_1:1", "torchrun train.py"), name="train.sh"),
        FilePasses("whole names", lines("export NCCL_IB_HCA==mlx5_0:1,mlx5_1:1", "torchrun train.py"), name="train.sh"),
        FilePasses(
            "found by a command",
            lines("export NCCL_IB_HCA=$(ibdev2netdev | cut -d' ' -f1)", "torchrun x.py"),
            name="a.sh",
        ),
    ),
)
def rdma_device_unmatched(file: LaunchFile) -> Iterator[Violation]:
    """Ask whether each entry of NCCL_IB_HCA can be the name of a device, by NCCL's own grammar.

    Why it hurts: nothing is trimmed: an entry that matches no device selects none, or leaves none out, and NCCL goes
    by fewer ports or by sockets without a message.
    Fix: names with commas between and no blanks; one ^ or = before the whole list: `=mlx5_0:1,mlx5_1:1`.
    """
    for setting in file.settings:
        if setting.name == "NCCL_IB_HCA" and setting.is_exported and setting.told and (why := list_fault(setting.told)):
            yield Violation(setting.place, f"NCCL_IB_HCA={setting.told!r}: {why}", evidence=(("value", setting.told),))
