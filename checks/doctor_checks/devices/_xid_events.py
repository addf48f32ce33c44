"""Xids in kernel logs and in the logs of a job, one entry for each code and device."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import msgspec

from doctor.analysis.visible_devices import bus_key, shares
from doctor.api import EventGroup, Finding, Job, LocalRanks, Severity, event_groups, finding_from_logs
from doctor.core.text import lazy_compile
from doctor.facts import KernelEvent, KernelLogFacts
from doctor.knowledge.xid_catalog import ACTIONS, Xid, xid

UNLISTED = Xid("code not in rankdoctor's Xid table", "hardware", "reset")

_RECOVERED = lazy_compile(r"recovery action changed from \S+ \([^)]*\) to 0x0\b")
"""An Xid 154 that withdraws an earlier request."""


class XidReport(msgspec.Struct, frozen=True):
    """An Xid of one device, reported ``lines`` times. ``recent``: since this job began, ``None`` if unknown.
    ``ranks``: those that use the device, or all ranks of the host if that is unknown."""

    code: int
    known: Xid
    is_listed: bool
    device: str
    gpu: str
    lines: int
    last: KernelEvent
    recent: bool | None
    ranks: tuple[int, ...]

    def finding(self, local: LocalRanks, severity: Severity, fix: str = "") -> Finding:
        times = f", {self.lines} times" if self.lines > 1 else ""
        when = {True: "", False: " before this job", None: ""}[self.recent]
        return Finding(
            f"Xid {self.code} on {self.gpu} of {local.name}{times}{when}: {self.known.meaning}",
            ranks=self.ranks or local.ranks,
            evidence={
                "xid": self.code,
                "device": self.device,
                "lines": self.lines,
                "seconds_since_boot": self.last.time,
                "kernel_log": self.last.text,
                "process_id": self.last.pid,
            },
            effect=_effect(self.known, [self.last.text]),
            fix=fix or _fix(self.code, self.known, self.device, local.name),
            severity=severity,
        )


def xids_of(local: LocalRanks, kinds: Collection[str]) -> Iterator[XidReport]:
    """The Xids of these ``kinds`` in the kernel log of a host, by code and device, in the order of their first line.

    A code that is not in the table counts as ``hardware``."""
    log = local.find(KernelLogFacts)
    lines: dict[tuple[int, str], list[KernelEvent]] = {}
    for event in log.events if log else ():
        if event.kind == "xid" and event.code is not None and not _RECOVERED.search(event.text):
            lines.setdefault((event.code, bus_key(event.device)), []).append(event)
    chosen = [(code, device) for code, device in lines if (xid(code) or UNLISTED).kind in kinds]
    by_bus = {bus_key(share.gpu.bus_id): share for share in shares(local)} if chosen else {}
    began = log.job_started if log else None
    for code, device in chosen:
        share, last = by_bus.get(device), max(lines[code, device], key=lambda event: event.time or 0.0)
        yield XidReport(
            code=code,
            known=xid(code) or UNLISTED,
            is_listed=xid(code) is not None,
            device=last.device or "",
            gpu=f"GPU {share.gpu.index}" if share else f"the GPU at {last.device or 'an unknown address'}",
            lines=len(lines[code, device]),
            last=last,
            recent=None if began is None or last.time is None else last.time >= began,
            ranks=share.ranks if share else local.ranks,
        )


class LoggedXid(msgspec.Struct, frozen=True):
    """An Xid of one device in a log. ``device`` is empty if the log has only the number, as in a bug report."""

    code: int
    known: Xid
    is_listed: bool
    device: str
    events: EventGroup

    def finding(self, explains: tuple[str, ...], severity: Severity | None = None) -> Finding:
        where = f" on the GPU at {self.device}" if self.device else ""
        host = self.events.hosts[0] if len(self.events.hosts) == 1 else "the host"
        return finding_from_logs(
            self.events,
            f"Xid {self.code}{where}: {self.known.meaning}",
            evidence={"xid": self.code, **({"device": self.device} if self.device else {})},
            effect=_effect(self.known, [event.text for event in self.events.events]),
            fix=_fix(self.code, self.known, self.device, host),
            severity=severity,
            confidence=0.9 if self.device else 0.75,
            explains=explains,
        )


_PROCESS = lazy_compile(r"\bpid='?(?P<pid>\d{1,10})'?, name=(?P<name>[^\s,]{1,64})")


def _effect(known: Xid, lines: Sequence[str]) -> str:
    """The process that a contained error ends, if all lines name the same one."""
    found = {match[0]: match for line in lines if (match := _PROCESS.search(line))}
    if "contained to one process" not in known.meaning or len(found) != 1:
        return ""
    (process,) = found.values()
    return (
        f"Process {process['pid']} ({process['name']}) used the damaged memory and ends. If it is a rank, the other "
        "ranks wait for it until their timeout."
    )


_OF_KERNELS = (13, 31, 43, 69)
"""Codes of faults of a kernel, of which the program can find the call."""


_OF_ENDED_PROGRAMS = 45
"""The code that follows the end of a program."""


def _fix(code: int, known: Xid, device: str, host: str) -> str:
    """The action for this device; nvidia-smi takes a PCI address only with its function (``0000:3b:00.0``)."""
    if known is UNLISTED:
        catalog = "NVIDIA's Xid catalog (https://docs.nvidia.com/deploy/xid-errors/)"
        return f"Look up Xid {code} in {catalog}, and follow the action listed there."
    if code in _OF_KERNELS:
        return "Rerun the job with `CUDA_LAUNCH_BLOCKING=1` to find the call that fails."
    if code == _OF_ENDED_PROGRAMS:
        return "If the program was not stopped on purpose, find out from its log why it ended."
    text = ACTIONS[known.action].replace("the host", host)
    if not device:
        text = text.replace("run `sudo nvidia-smi --gpu-reset -i <gpu>` on the idle GPU", "reset the GPU")
        text = text.replace("run `sudo nvidia-smi --gpu-reset -i <gpu>`", "reset it")
    if device:
        text = text.replace("<gpu>", device if "." in device else f"{device}.0")
        text = text.replace("replace the GPU", f"replace the GPU at {device}")
    return text[0].upper() + text[1:] + "."


_PREVIOUS = lazy_compile(r"caused by previous Xid (\d{1,3})\b")


def logged_xids(job: Job, kinds: Collection[str]) -> Iterator[LoggedXid]:
    """The Xids of these ``kinds`` in logs, by code and device.

    A driver line with a code that is not in the table counts as ``hardware``; a number without a device must be in it.
    """
    for group in event_groups(job, "gpu.xid", by=("xid", "pci")):
        before = next((found for event in group.events if (found := _PREVIOUS.search(event.text))), None)
        code, device = int(before[1] if before else group.value("xid") or 0), group.value("pci") or ""
        known = xid(code)
        if (known is None and not device) or all(_RECOVERED.search(event.text) for event in group.events):
            continue
        if (known or UNLISTED).kind in kinds:
            yield LoggedXid(code, known or UNLISTED, known is not None, device, group)
