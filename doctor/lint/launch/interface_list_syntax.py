"""Finds entries of interface lists that cannot be names (:mod:`doctor.knowledge.interface_syntax`)."""

from __future__ import annotations


def list_fault(value: str) -> str:
    """Why an entry of ``NCCL_SOCKET_IFNAME`` or ``NCCL_IB_HCA`` is not a name; empty if all can be."""
    first, *others = value.split(",")
    for entry in (first.removeprefix("^").removeprefix("="), *others):
        if entry != entry.strip():
            return f"the space is part of the name {entry!r}"
        if entry.startswith(("'", '"')):
            return f"the quotation marks are part of the name {entry}"
    wrong = next((entry for entry in others if entry.startswith(("^", "="))), None)
    return f"{wrong} matches nothing, because {wrong[0]} must precede the whole list" if wrong else ""
