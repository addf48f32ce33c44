"""The Xids in a host's kernel log, folded: one entry for each code and device."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import NamedTuple

from doctor.analysis.visible_devices import GpuSharers, bus_key, shares
from doctor.core.facts import KernelEvent, KernelLogFacts
from doctor.core.job import Job, LocalRanks
from doctor.core.logs.event_groups import EventGroup, event_groups
from doctor.knowledge.xid_catalog import ACTIONS, Xid, xid

UNLISTED = Xid("a code that is not in our table; see NVIDIA's Xid catalogue", "hardware", "reset")

_RECOVERED = re.compile(r"recovery action changed from \S+ \([^)]*\) to 0x0\b")
"""Xid 154 that takes an earlier request back."""


class XidReport(NamedTuple):
    """An Xid of one device, ``lines`` times. ``recent``: since this job began, ``None`` where that can't be told.
    ``ranks``: those that use the device; all of the host where it is not known which they are."""

    code: int
    known: Xid
    is_listed: bool
    device: str
    gpu: str
    lines: int
    last: KernelEvent
    recent: bool | None
    ranks: tuple[int, ...]

    @property
    def summary(self) -> str:
        """Code, device and meaning."""
        times = f", {self.lines} times" if self.lines > 1 else ""
        when = {True: "", False: " before this job began", None: ""}[self.recent]
        return f"Xid {self.code} on {self.gpu}{times}{when}: {self.known.meaning}"

    @property
    def fix(self) -> str:
        """What to do."""
        return _fix(self.known)

    @property
    def evidence(self) -> dict[str, object]:
        """The last line, and how often and when."""
        return {
            "xid": self.code,
            "device": self.device,
            "lines": self.lines,
            "seconds_since_boot": self.last.time,
            "kernel_log": self.last.text,
            "process_id": self.last.pid,
        }


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
    for code, device in chosen:
        yield _fold(code, device, lines[code, device], log.job_started if log else None, by_bus.get(device), local)


def _fold(
    code: int, device: str, events: list[KernelEvent], began: float | None, share: GpuSharers | None, local: LocalRanks
) -> XidReport:
    last = max(events, key=lambda event: event.time or 0.0)
    return XidReport(
        code=code,
        known=xid(code) or UNLISTED,
        is_listed=xid(code) is not None,
        device=last.device or "",
        gpu=f"GPU {share.gpu.index}" if share else f"the GPU at {last.device or 'an unknown address'}",
        lines=len(events),
        last=last,
        recent=None if began is None or last.time is None else last.time >= began,
        ranks=share.ranks if share else local.ranks,
    )


class LoggedXid(NamedTuple):
    """An Xid that a log names, of one device. ``device`` is empty where only the number is told, as in somebody's
    report of a fault."""

    code: int
    known: Xid
    is_listed: bool
    device: str
    told: EventGroup

    @property
    def summary(self) -> str:
        """Code, device and meaning."""
        where = f" on the GPU at {self.device}" if self.device else ""
        return f"the driver reported Xid {self.code}{where}: {self.known.meaning}"

    @property
    def fix(self) -> str:
        """What to do."""
        return _fix(self.known)

    @property
    def evidence(self) -> dict[str, object]:
        """The code, and where."""
        return {"xid": self.code, **({"device": self.device} if self.device else {})}

    @property
    def confidence(self) -> float:
        """That it is what it says: the driver's own line, or a number in a text."""
        return 0.9 if self.device else 0.75


def _fix(known: Xid) -> str:
    text = ACTIONS[known.action]
    return text[0].upper() + text[1:] + "."


_PREVIOUS = re.compile(r"caused by previous Xid (\d{1,3})\b")


def _code(told: EventGroup) -> int:
    """The Xid that it is about: one that a channel was torn down for stands behind the other."""
    before = next((found for event in told.events if (found := _PREVIOUS.search(event.text))), None)
    return int(before[1] if before else told.value("xid") or 0)


def logged_xids(job: Job, kinds: Collection[str]) -> Iterator[LoggedXid]:
    """The Xids of these ``kinds`` that logs name, by code and device. A line of the driver with a code that is not in
    the table counts as ``hardware``; a number without a device has to be in it."""
    for told in event_groups(job, "gpu.xid", by=("xid", "pci")):
        code, device = _code(told), told.value("pci") or ""
        known = xid(code)
        if (known is None and not device) or all(_RECOVERED.search(event.text) for event in told.events):
            continue
        if (known or UNLISTED).kind in kinds:
            yield LoggedXid(code, known or UNLISTED, known is not None, device, told)
