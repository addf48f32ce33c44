"""Commands that select another interface."""

from __future__ import annotations

from doctor.analysis.interface_choice import good_interfaces
from doctor.facts import InterfaceFacts


def export_line(variable: str, interfaces: InterfaceFacts) -> str:
    """A command that sets ``variable`` to a usable interface of the host; empty if there is none."""
    good = good_interfaces(interfaces)
    if not good:
        return ""
    return (
        f"export {variable}='={good[0].name}'" if variable.startswith("NCCL_") else f"export {variable}={good[0].name}"
    )


def selecting_fix(variable: str, interfaces: InterfaceFacts) -> str:
    """A fix that selects a usable interface of the host."""
    command = export_line(variable, interfaces)
    others = [one.name for one in good_interfaces(interfaces)[1:4]]
    if others:
        verb = "is" if len(others) == 1 else "are"
        return f"Select the interface that connects the hosts ({', '.join(others)} {verb} also up):\n{command}"
    return command or f"Bring up an interface that connects the hosts, and set {variable} to its name."
