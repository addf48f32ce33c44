"""Identity of a host: the id of its boot, of its machine, and its name."""

from __future__ import annotations

import socket

from doctor.collectors.base import Machine, read_text

Identity = tuple[str | None, str | None, str]
"""Boot id, machine id and host name."""


def host_identity(machine: Machine) -> Identity:
    """Return the identity of this host, by which :class:`doctor.core.job.Host` distinguishes hosts."""
    return read_boot_id(machine), read_machine_id(machine), socket.gethostname()


def read_boot_id(machine: Machine) -> str | None:
    """Return the id of this boot of the kernel, which containers of one machine share."""
    return read_text(machine.proc / "sys" / "kernel" / "random" / "boot_id") or None


def read_machine_id(machine: Machine) -> str | None:
    """Return the machine id; images have ``uninitialized`` until their first boot (machine-id(5))."""
    text = read_text(machine.etc / "machine-id")
    return None if text in (None, "", "uninitialized") else text
