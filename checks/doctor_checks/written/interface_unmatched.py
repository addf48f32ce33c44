"""NET007: an entry of NCCL_SOCKET_IFNAME can be no interface's name."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.api import FileFails, FilePasses, LaunchFile, Severity, Violation, rule
from doctor.lint.launch.interface_list_syntax import list_fault
from doctor.testing import lines

_NAMES = ("NCCL_SOCKET_IFNAME", "NCCL_OOB_NET_IFNAME", "TP_SOCKET_IFNAME")


@rule(
    id="NET007",
    severity=Severity.ERROR,
    reads=LaunchFile,
    cases=lambda: (
        FileFails(
            "a blank behind the comma",
            lines('export NCCL_SOCKET_IFNAME="eth0, eth1"  # !', "torchrun x.py"),
            name="a.sh",
        ),
        FileFails(
            "a second caret", lines("export NCCL_SOCKET_IFNAME=^lo,^docker0  # !", "torchrun train.py"), name="a.sh"
        ),
        FileFails(
            "quotes in quotes", lines("""export NCCL_SOCKET_IFNAME="'eth0'"  # !""", "torchrun train.py"), name="a.sh"
        ),
        FilePasses("a list", lines("export NCCL_SOCKET_IFNAME=eth0,eth1", "torchrun train.py"), name="train.sh"),
        FilePasses(
            "what to leave out", lines("export NCCL_SOCKET_IFNAME=^lo,docker0", "torchrun train.py"), name="train.sh"
        ),
        FilePasses("a whole name", lines("export NCCL_SOCKET_IFNAME==eth0", "torchrun train.py"), name="train.sh"),
        FilePasses(
            "found by a command", lines("export NCCL_SOCKET_IFNAME=$(ip route | awk '{print $5}')"), name="a.sh"
        ),
    ),
)
def interface_unmatched(file: LaunchFile) -> Iterator[Violation]:
    """Ask whether each entry of a list of interfaces can be the name of one, by the library's own grammar.

    Why it hurts: nothing is trimmed: an entry that matches no interface selects none, or leaves none out; NCCL says
    "no socket interface found" or takes the one that was to be left out.
    Fix: names with commas between and no blanks; one ^ or = before the whole list: `^lo,docker0`.
    """
    for setting in file.settings:
        if setting.name in _NAMES and setting.is_exported and setting.told and (why := list_fault(setting.told)):
            yield Violation(
                setting.place,
                f"{setting.name}={setting.told!r}: {why}",
                severity=Severity.WARNING if setting.told.startswith("^") else None,
                evidence=(("value", setting.told),),
            )
