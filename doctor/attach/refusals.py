"""Why the stacks of a process could not be read, and how to allow it: one sentence each.

What the kernel requires is described in ptrace(2), "Ptrace access mode checking".
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from doctor.attach.py_spy import DumpOutput
from doctor.collectors.base import link_target, parse_int, read_pairs, read_text
from doctor.core.masking import mask_text
from doctor.core.process import ChildOwner

INSTALL = "pip install py-spy"
_PROC = Path("/proc")
_CAP_SYS_PTRACE = 19
"""Number of the capability in include/uapi/linux/capability.h."""
_DENIED = re.compile(r"permission denied|operation not permitted|\bEPERM\b|\bEACCES\b|\bENOSYS\b", re.IGNORECASE)
_NOT_PYTHON = re.compile(r"Failed to find python version|find a python interpreter", re.IGNORECASE)
_UNSUPPORTED = re.compile(r"Unsupported version of Python:?\s*(?P<version>[\w.+]{0,20})", re.IGNORECASE)
_LONGEST = 300


class Refusal(NamedTuple):
    """Why stacks could not be read (``reason``), and what allows it (``remedy``; empty if nothing is known to)."""

    reason: str
    remedy: str = ""

    def with_another(self, other: Refusal) -> Refusal:
        """Return both reasons, of this way to read stacks and of another one."""
        if other.reason == self.reason:
            return self
        return Refusal(f"{self.reason} {other.reason}", self.remedy or other.remedy)


NOT_INSTALLED = Refusal("py-spy is not installed, so Python stacks cannot be read.", INSTALL)


class Credentials(NamedTuple):
    """Who a process is: its real, effective and saved user id, and its effective capabilities as a mask.

    ``dumpable``: the kernel lets the same user trace it (PR_SET_DUMPABLE in prctl(2)); ``users``: its user namespace.
    """

    uids: tuple[int, ...]
    gid: int
    capabilities: int
    dumpable: bool
    users: str

    @property
    def may_trace_all(self) -> bool:
        """Whether it has CAP_SYS_PTRACE."""
        return bool(self.capabilities >> _CAP_SYS_PTRACE & 1)


def credentials_of(pid: int | str = "self", proc: Path = _PROC) -> Credentials | None:
    """Return who a process is; ``None`` if it is gone."""
    folder = proc / str(pid)
    rows = read_pairs(folder / "status", ":", limit=1 << 16)
    uids = tuple(number for word in rows.get("Uid", "").split()[:3] if (number := parse_int(word)) is not None)
    gid = parse_int(rows.get("Gid", "").partition("\t")[0])
    try:
        owner = (folder / "status").stat().st_uid
        capabilities = int(rows.get("CapEff", ""), 16)
    except (OSError, ValueError):
        return None
    if len(uids) < 3 or gid is None:
        return None
    # Files about a process that is not dumpable belong to root: proc(5). That does not show for a process of root.
    return Credentials(uids, gid, capabilities, owner == uids[1], link_target(folder / "ns" / "user") or "")


def explain_failure(output: DumpOutput, pid: int, owner: ChildOwner | None = None) -> Refusal:
    """Return why py-spy, run as ``owner``, could not read a process that exists."""
    if output.stopped_by == "size":
        return Refusal("Its stacks are larger than the doctor reads.")
    if output.stopped_by:
        return Refusal(
            "py-spy did not finish before its deadline.", "Run doctor attach again when the host is less busy."
        )
    if _DENIED.search(output.message):
        return explain_denial(pid, owner)
    if unsupported := _UNSUPPORTED.search(output.message):
        version = unsupported["version"] or "its version"
        return Refusal(f"This py-spy does not support Python {version}.", "pip install --upgrade py-spy")
    if _NOT_PYTHON.search(output.message):
        return Refusal("py-spy found no Python interpreter in this process.")
    return Refusal(f"py-spy failed: {_first_cause(output.message) or 'it reported no reason'}")


def explain_denial(pid: int, owner: ChildOwner | None = None, proc: Path = _PROC) -> Refusal:
    """Return why the kernel does not let this process, or its child of ``owner``, read a process that exists."""
    own, target = credentials_of("self", proc), credentials_of(pid, proc)
    if own is None or target is None:
        return Refusal("The kernel refused access to this process.", "Run doctor attach as root.")
    if owner is not None:
        own = own._replace(uids=(owner.uid,) * 3, gid=owner.gid, capabilities=0)
    if not own.may_trace_all:
        return _without_capability(own, target, pid, proc)
    if own.users != target.users:
        return Refusal(
            "The process is in another user namespace, where CAP_SYS_PTRACE of this process does not apply.",
            "Run doctor attach as root on the host, outside of containers.",
        )
    return _by_filter(proc)


def _without_capability(own: Credentials, target: Credentials, pid: int, proc: Path) -> Refusal:
    """Apply the kernel's rules for a process without CAP_SYS_PTRACE, in the kernel's order."""
    uid, as_root = own.uids[1], f"sudo doctor attach --pid {pid}"
    if uid == 0:
        return Refusal(
            "doctor attach runs as root, but without the capability CAP_SYS_PTRACE.",
            "Start the container with --cap-add SYS_PTRACE; on Kubernetes add SYS_PTRACE to"
            " securityContext.capabilities.add, or use kubectl debug --keep-labels --profile=sysadmin.",
        )
    if len(set(target.uids)) > 1:
        return Refusal("The process runs under several user ids, so only root may read it.", as_root)
    if target.uids[0] != uid:
        return Refusal(
            f"The process belongs to uid {target.uids[0]}, and doctor attach runs as uid {uid}.",
            f"sudo -u '#{target.uids[0]}' doctor attach --pid {pid}",
        )
    if not target.dumpable:
        return Refusal(
            "The process forbids other processes to read its memory (PR_SET_DUMPABLE is 0), except for root.", as_root
        )
    if target.capabilities & ~own.capabilities:
        return Refusal("The process has capabilities that doctor attach lacks, so only root may read it.", as_root)
    scope = parse_int(read_text(proc / "sys/kernel/yama/ptrace_scope")) or 0
    return _by_yama(scope, as_root) if scope else _by_filter(proc)


def _by_yama(scope: int, as_root: str) -> Refusal:
    reason = f"The host restricts ptrace: kernel.yama.ptrace_scope is {scope}."
    if scope >= 3:
        return Refusal(reason, "Set kernel.yama.ptrace_scope = 1 in /etc/sysctl.d and reboot.")
    return Refusal(reason, f"{as_root}, or: sudo sysctl kernel.yama.ptrace_scope=0")


def _by_filter(proc: Path) -> Refusal:
    mode = read_pairs(proc / "self" / "status", ":", limit=1 << 16).get("Seccomp")
    source = "A seccomp filter" if mode == "2" else "A security module of the kernel (SELinux, AppArmor)"
    return Refusal(
        f"{source} refuses ptrace and reading the memory of other processes.",
        "Allow ptrace in the security profile of the container, or run doctor attach as root on the host.",
    )


def _first_cause(message: str) -> str:
    """Return the first line of an error and its innermost cause, printable and masked."""
    lines = [line.strip() for line in message.partition("Stack backtrace")[0].splitlines() if line.strip()]
    causes = [line.partition(": ")[2] for line in lines if re.match(r"\d+: ", line)]
    return printable_text(": ".join(dict.fromkeys([*lines[:1], *causes[-1:]])))


def printable_text(text: str) -> str:
    """Return the beginning of a message of another program, printable and masked."""
    return mask_text("".join(one if one.isprintable() else "\ufffd" for one in text[:_LONGEST]))
