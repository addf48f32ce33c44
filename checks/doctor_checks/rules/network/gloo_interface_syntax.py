"""NET011 in launch files: GLOO_SOCKET_IFNAME uses NCCL syntax."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.api import Violation, rule
from doctor.knowledge.interface_syntax import looks_like_nccl_syntax
from doctor.lint.launch.launch_file import EnvironmentSource
from doctor.testing.script_cases import fails, shell_fails, shell_passes
from doctor_checks.network.interfaces.gloo_interface_syntax import fix_of_value, gloo_interface_syntax, quoted


@rule(
    check=gloo_interface_syntax,
    reads=EnvironmentSource,
    cases=lambda: (
        fails("in a script", 'os.environ["GLOO_SOCKET_IFNAME"] = "^lo"  # !\n'),
        shell_fails("what to leave out", "export GLOO_SOCKET_IFNAME=^docker0,lo  # !", "torchrun train.py"),
        shell_fails("a whole name", "GLOO_SOCKET_IFNAME==eth0 torchrun train.py  # !"),
        shell_fails(
            "the value of NCCL's variable",
            "export NCCL_SOCKET_IFNAME=^lo",
            "export GLOO_SOCKET_IFNAME=$NCCL_SOCKET_IFNAME  # !",
            "srun x.py",
        ),
        shell_passes("a name", "export GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=^lo", "torchrun train.py"),
        shell_passes("two names", "export GLOO_SOCKET_IFNAME=eth0,eth1", "torchrun train.py"),
        shell_passes("from outside", "export GLOO_SOCKET_IFNAME=$IFACE", "torchrun train.py"),
    ),
)
def gloo_interface_syntax_in_files(file: EnvironmentSource) -> Iterator[Violation]:
    """Ask whether GLOO_SOCKET_IFNAME contains only exact interface names.

    Why it hurts: every rank fails in init_process_group() with `Unable to find address for`.
    Fix: Set GLOO_SOCKET_IFNAME to the exact name of an interface that `ip -br address` shows.
    """
    for setting in file.settings:
        if setting.name == "GLOO_SOCKET_IFNAME" and setting.is_exported and looks_like_nccl_syntax(setting.value):
            shown = quoted(setting.known_value or "…")
            yield Violation(
                setting.place,
                f"GLOO_SOCKET_IFNAME={shown} uses NCCL syntax, but Gloo accepts only exact names",
                fix_of_value(setting.known_value or ""),
            )
