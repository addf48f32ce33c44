"""What an Xid of the NVIDIA kernel driver means, and what to do about it.

Sources: NVIDIA "Xid Errors" (Xid catalogue, immediate and investigatory actions) and nverror.h of NVIDIA's open kernel
modules. Meanings are in our own words.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from doctor.knowledge.data_files import read

XidKind = Literal["application", "hardware", "memory", "nvlink", "lost", "notice"]
XidAction = Literal["restart", "reset", "reboot", "replace", "none"]


class Xid(msgspec.Struct, frozen=True):
    """One code. ``kind``: ``application`` faults come from the program's own GPU code, ``notice`` asks for nothing;
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
"""What each action means, for a finding's fix."""


def xid(code: int) -> Xid | None:
    """What ``code`` means, or ``None`` for one that is not in the table."""
    table: dict[int, Xid] = read("xids.json", dict[int, Xid])
    return table.get(code)
