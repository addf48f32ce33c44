"""Finds entries of interface lists that cannot be names (:mod:`doctor.knowledge.interface_syntax`)."""

from __future__ import annotations


def list_fault(value: str) -> str:
    """Why an entry of ``NCCL_SOCKET_IFNAME`` or ``NCCL_IB_HCA`` is not a name; empty if all can be."""
    first, *others = value.split(",")
    for entry in (first.removeprefix("^").removeprefix("="), *others):
        if entry != entry.strip():
            return f"the blank belongs to the name {entry!r}"
        if entry.startswith(("'", '"')):
            return f"the quotation marks belong to the name {entry}"
    wrong = next((entry for entry in others if entry.startswith(("^", "="))), None)
    return f"{wrong[0]} counts before the whole list alone, so {wrong} is the name of nothing" if wrong else ""
