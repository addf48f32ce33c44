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
    "none": "take no action",
    "restart": "restart the job, and if the error recurs, run `sudo nvidia-smi --gpu-reset -i <gpu>` on the idle GPU",
    "reset": "end all processes on the GPU, then run `sudo nvidia-smi --gpu-reset -i <gpu>` or reboot the host",
    "reboot": "drain the host, reboot it, and check the GPU and its power supply if the error recurs",
    "replace": "drain the host, run NVIDIA's field diagnostics, and replace the GPU",
}
"""Text of each action, for the fix of a finding."""


def xid(code: int) -> Xid | None:
    """Return the entry of ``code``, or ``None``."""
    table: dict[int, Xid] = read("xids.json", dict[int, Xid])
    return table.get(code)
