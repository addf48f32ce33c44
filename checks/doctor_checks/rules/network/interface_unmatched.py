"""NET007 in launch files: a setting matches no network interface of the host."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.api import Severity, Violation, rule
from doctor.knowledge.interface_syntax import has_sound_entry, list_fault, repaired_list
from doctor.lint.launch.launch_file import EnvironmentSource
from doctor.testing.script_cases import fails, shell_fails, shell_passes
from doctor_checks.network.interfaces.interface_unmatched import interface_unmatched

_NAMES = ("NCCL_SOCKET_IFNAME", "NCCL_OOB_NET_IFNAME", "TP_SOCKET_IFNAME")


@rule(
    check=interface_unmatched,
    reads=EnvironmentSource,
    cases=lambda: (
        fails("in a script", 'os.environ["NCCL_SOCKET_IFNAME"] = "eth0, eth1"  # !\n'),
        shell_fails("a blank behind the comma", 'export NCCL_SOCKET_IFNAME="eth0, eth1"  # !', "torchrun x.py"),
        shell_fails("a second caret", "export NCCL_SOCKET_IFNAME=^lo,^docker0  # !", "torchrun train.py"),
        shell_fails("quotes in quotes", """export NCCL_SOCKET_IFNAME="'eth0'"  # !""", "torchrun train.py"),
        shell_passes("a list", "export NCCL_SOCKET_IFNAME=eth0,eth1", "torchrun train.py"),
        shell_passes("what to leave out", "export NCCL_SOCKET_IFNAME=^lo,docker0", "torchrun train.py"),
        shell_passes("a whole name", "export NCCL_SOCKET_IFNAME==eth0", "torchrun train.py"),
        shell_passes("found by a command", "export NCCL_SOCKET_IFNAME=$(ip route | awk '{print $5}')"),
    ),
)
def interface_unmatched_in_files(file: EnvironmentSource) -> Iterator[Violation]:
    """Ask whether each entry of an interface list is a valid name in the syntax of the library.

    Why it hurts: the library ignores the entry, so it finds no interface, or uses one that was meant to be excluded.
    Fix: Separate the names with commas only, and write ^ or = once, before the whole list.
    """
    for setting in file.settings:
        value = setting.known_value if setting.name in _NAMES and setting.is_exported else None
        if value and (why := list_fault(value)):
            yield Violation(
                setting.place,
                f"{setting.name}={value!r}: {why}",
                f"Set {setting.name} to `{plain}`." if (plain := repaired_list(value)) else "",
                severity=Severity.WARNING if value.startswith("^") or has_sound_entry(value) else None,
                effect=_effect(setting.name, value),
            )


def _effect(name: str, value: str) -> str:
    if name == "TP_SOCKET_IFNAME":
        return "TensorPipe finds no such interface and uses 127.0.0.1, so RPC workers on other hosts cannot connect."
    if value.startswith("^"):
        return "NCCL ignores entries without a match, so it may use an interface that was meant to be excluded."
    if has_sound_entry(value):
        return "NCCL uses only the interfaces that match the rest of the list, and fails if there are none."
    return "NCCL fails with `Bootstrap : no socket interface found`."
