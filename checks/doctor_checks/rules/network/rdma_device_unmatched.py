"""NET018 in launch files: NCCL_IB_HCA matches no active port."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.api import Severity, Violation, rule
from doctor.knowledge.interface_syntax import has_sound_entry, list_fault, misplaced_signs, repaired_list
from doctor.lint.launch.launch_file import EnvironmentSource
from doctor.testing.script_cases import fails, shell_fails, shell_passes
from doctor_checks.network.rdma.rdma_device_unmatched import rdma_device_unmatched


@rule(
    check=rdma_device_unmatched,
    reads=EnvironmentSource,
    cases=lambda: (
        fails("in a script", 'os.environ["NCCL_IB_HCA"] = "mlx5_0, mlx5_1"  # !\n'),
        shell_fails("a blank behind the comma", 'export NCCL_IB_HCA="mlx5_0, mlx5_1"  # !', "torchrun x.py"),
        shell_fails("a second caret", "export NCCL_IB_HCA=^mlx5_0,^mlx5_3  # !", "torchrun x.py"),
        shell_fails("a second equals sign", "NCCL_IB_HCA==mlx5_0:1,=mlx5_1:1 srun python x.py  # !"),
        shell_passes("a list", "export NCCL_IB_HCA=mlx5_0,mlx5_1:1", "torchrun train.py"),
        shell_passes("whole names", "export NCCL_IB_HCA==mlx5_0:1,mlx5_1:1", "torchrun train.py"),
        shell_passes("found by a command", "export NCCL_IB_HCA=$(ibdev2netdev | cut -d' ' -f1)", "torchrun x.py"),
    ),
)
def rdma_device_unmatched_in_files(file: EnvironmentSource) -> Iterator[Violation]:
    """Ask whether each entry of NCCL_IB_HCA is a valid device name in NCCL syntax.

    Why it hurts: NCCL silently ignores the entry, so it uses other ports than intended, or sockets.
    Fix: Separate the names with commas only, and write ^ or = once, before the whole list.
    """
    for setting in file.settings:
        value = setting.known_value if setting.name == "NCCL_IB_HCA" and setting.is_exported else None
        if value and (why := list_fault(value)):
            fix = f"Set NCCL_IB_HCA to `{plain}`." if (plain := repaired_list(value)) else ""
            yield Violation(
                setting.place,
                f"NCCL_IB_HCA={value!r}: {why}",
                fix,
                severity=Severity.WARNING if has_sound_entry(value) else None,
                effect=misplaced_signs(value),
            )
