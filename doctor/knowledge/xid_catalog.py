"""Meaning of the Xids of the NVIDIA kernel driver, and what to do about them.

Sources: NVIDIA "Xid Errors" (Xid catalog, immediate and investigatory actions) and nverror.h of the open kernel modules
of NVIDIA. Meanings are in our own words.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from doctor.knowledge.data_files import read

XidKind = Literal["application", "hardware", "memory", "nvlink", "lost", "notice"]
XidAction = Literal["restart", "reset", "reboot", "replace", "none"]


class Xid(msgspec.Struct, frozen=True):
    """One code. ``kind``: ``application`` faults come from GPU code of the program, ``notice`` requires nothing;
    ``action``: restart the job, reset the GPU, reboot the host, replace the GPU."""

    meaning: str
    kind: XidKind
    action: XidAction


ACTIONS: dict[str, str] = {
    "none": "nothing needs to be done",
    "restart": "restart the job; if it comes back on the same GPU, reset that GPU",
    "reset": "end all processes on the GPU and reset it: `sudo nvidia-smi --gpu-reset -i <gpu>`, or reboot the host",
    "reboot": "drain the host and reboot it; if it comes back, have the card, its seat and its power checked",
    "replace": "drain the host, run NVIDIA's field diagnostics and have the card replaced",
}
"""Text of each action, for the fix of a finding."""


def xid(code: int) -> Xid | None:
    """Return the entry of ``code``, or ``None``."""
    table: dict[int, Xid] = read("xids.json", dict[int, Xid])
    return table.get(code)
