"""The command that selects another interface."""

from __future__ import annotations

from doctor.analysis.interface_choice import good_interfaces
from doctor.facts import InterfaceFacts


def export_line(variable: str, interfaces: InterfaceFacts) -> str:
    """A line that sets ``variable`` to a usable interface of the host, or describes one."""
    good = good_interfaces(interfaces)
    if not good:
        return f"`export {variable}=<name>`, the name of an interface that `ip -br address` shows up, with an address"
    exact = "=" if variable.startswith("NCCL_") else ""
    value = f"'{exact}{good[0].name}'" if exact else good[0].name
    others = f" (also up here: {', '.join(one.name for one in good[1:4])})" if len(good) > 1 else ""
    return f"`export {variable}={value}`{others}"
