"""The kernel log: GPU faults, processes killed by the OOM killer, PCIe errors."""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path

from doctor.collectors.base import Machine, NotVisible, collector, parse_int, read_text
from doctor.core.facts import KernelEvent, KernelLogFacts
from doctor.core.text import lazy_compile
from doctor.knowledge.launcher_index import PROCESSES

EVENTS = 200
"""Events of one kind that are kept, the latest: a failing link can log thousands of lines."""

_BYTES = 32 << 20
_TEXT = 300
_UNHIDE = "run `sudo dmesg` on the host, or let users read the log: `sudo sysctl kernel.dmesg_restrict=0`"

# "NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, name=python, GPU has fallen off the bus." The process is missing in older
# drivers, and pid='<unknown>' in newer ones; see NVIDIA's "Xid Errors" guide.
_XID = lazy_compile(
    r"NVRM: Xid \((?:PCI:)?(?P<device>[^)\s]{1,40})\): (?P<code>\d{1,6})"
    r"(?:,\s*(?:Ch \S{1,40}, )?pid='?(?P<pid>\d{1,9}))?"
)
# "nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 12028, Non-fatal, Link 32 ..."; see NVIDIA's fabric manager guide.
_SXID = lazy_compile(r"SXid \((?:PCI:)?(?P<device>[^)\s]{1,40})\): (?P<code>\d{1,6})")
# mm/oom_kill.c: "Out of memory: Killed process 12 (python) ..." and "Memory cgroup out of memory: ...".
_OOM = lazy_compile(r"[Oo]ut of memory:? .{0,120}?Kill(?:ed)? process (?P<pid>\d{1,9})")
# drivers/pci/pcie/aer.c: "pcieport 0000:00:01.0: AER: ..." or "nvidia 0000:3b:00.0: PCIe Bus Error: severity=...".
_PCIE = lazy_compile(
    r"(?P<device>[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]): (?:AER: (?!enabled)|PCIe Bus Error)", re.IGNORECASE
)
_WORDS = (b"xid (", b"ut of memory", b"aer: ", b"pcie bus error")
"""One of them is in each event, in lower case."""
_PATTERNS = (("sxid", _SXID), ("xid", _XID), ("oom", _OOM), ("pcie", _PCIE))

_STARTERS = (*PROCESSES, "doctor", "rankdoctor")
"""Prefixes of the names of processes that belong to a job."""


@collector(KernelLogFacts)
def collect_kernel_log(machine: Machine) -> KernelLogFacts:
    """Collect the events. :class:`NotVisible` if the log is missing (containers) or may not be read."""
    lines = _records(_read(machine.dev / "kmsg"))
    return KernelLogFacts(events=tuple(parse_events(lines)), job_started=job_started(machine))


def _read(path: Path) -> str:
    """Return the relevant lines of the ring buffer without blocking, one record per read
    (Documentation/ABI/testing/dev-kmsg)."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError as error:
        raise NotVisible(f"there is no {path} here, as in most containers", _UNHIDE) from error
    except OSError as error:
        raise NotVisible(f"the kernel log may not be read: {error.strerror}", _UNHIDE) from error
    try:
        return _relevant(b"".join(_chunks(handle))).decode("utf-8", "replace")
    finally:
        os.close(handle)


def _chunks(handle: int) -> Iterator[bytes]:
    size = 0
    while size < _BYTES:
        try:
            chunk = os.read(handle, 1 << 16)
        except BlockingIOError:
            return
        except BrokenPipeError:
            # Overwritten while it was read; the next read goes on with the oldest record that is left.
            continue
        except OSError as error:
            raise NotVisible(f"the kernel log may not be read: {error.strerror}", _UNHIDE) from error
        if not chunk:
            return
        size += len(chunk)
        yield chunk


def _relevant(log: bytes) -> bytes:
    """Return the lines that may be events, which are few: decoding and splitting all of them takes several times as
    long."""
    lowered = log.lower()
    if not any(word in lowered for word in _WORDS):
        return b""
    return b"\n".join(line for line in log.split(b"\n") if any(word in line.lower() for word in _WORDS))


def _records(text: str) -> Iterator[tuple[float | None, str]]:
    """Return time in seconds since boot and message of each record; lines that begin with a blank continue a record."""
    for line in text.splitlines():
        head, semicolon, message = line.partition(";")
        fields = head.split(",")
        if semicolon and len(fields) >= 3 and not line.startswith(" "):
            microseconds = parse_int(fields[2])
            yield (None if microseconds is None else microseconds / 1e6), message


def parse_events(records: Iterable[tuple[float | None, str]]) -> list[KernelEvent]:
    """Return the relevant records in order, the latest :data:`EVENTS` of each kind."""
    kept: dict[str, deque[tuple[int, KernelEvent]]] = {kind: deque(maxlen=EVENTS) for kind, _ in _PATTERNS}
    for order, (time, message) in enumerate(records):
        event = parse_event(time, message)
        if event is not None:
            kept[event.kind].append((order, event))
    return [event for _, event in sorted((pair for pairs in kept.values() for pair in pairs), key=lambda pair: pair[0])]


def parse_event(time: float | None, message: str) -> KernelEvent | None:
    """Return the event in a message, or ``None``."""
    for kind, pattern in _PATTERNS:
        if match := pattern.search(message):
            found = match.groupdict()
            return KernelEvent(
                kind=kind,
                time=time,
                code=parse_int(found.get("code")),
                device=(found.get("device") or "").lower() or None,
                pid=parse_int(found.get("pid")),
                text=message[:_TEXT],
            )
    return None


def job_started(machine: Machine) -> float | None:
    """Return the start of the job in seconds since boot: that of the oldest launcher above this process.

    Follows parents that are a launcher, a Python interpreter, or a shell directly below one (the script of a batch
    step). An interactive shell ends the search, so that a check started by hand counts as a job that has just begun.
    """
    ticks = os.sysconf("SC_CLK_TCK")
    started, pending = None, parse_int((read_text(machine.proc / "self" / "stat") or "").partition(" ")[0])
    for _ in range(32):
        name, parent, start = _stat(machine.proc / str(pending))
        if start is None:
            break
        if started is None or name.startswith(_STARTERS):
            started = start / ticks
        elif name not in ("sh", "bash", "dash"):
            break
        pending = parent
    return started


def _stat(folder: Path) -> tuple[str, int | None, int | None]:
    """Return name (which may hold blanks and parentheses), parent, and start in clock ticks since boot."""
    head, _, tail = (read_text(folder / "stat") or "").rpartition(")")
    fields = tail.split()
    if len(fields) < 20:
        return "", None, None
    return head.partition("(")[2], parse_int(fields[1]), parse_int(fields[19])
