"""Output of ``nvidia-smi`` as facts of the GPUs of one host.

Formats, in any combination: the table, ``-q``, ``--query-gpu`` as CSV, ``topo -m`` and ``nvlink``. The last output of
each format counts. Fields that no output shows are noted as hidden, so that they are not taken for healthy.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import islice

import msgspec

from doctor.core.facts import Gpu, GpuFacts, HiddenField, Section
from doctor.postmortem.nvidia_smi import csv_lists, full_query, table
from doctor.postmortem.nvidia_smi import links as links_module
from doctor.postmortem.nvidia_smi.fields import NvidiaSmiFields, bus_id_of

MOST_LINES = 200_000
"""``-q`` prints 300 lines per GPU."""
LONGEST = 4000
MAIN_SHARE = 0.6
"""Minimum share of matching lines in a file that is output of nvidia-smi, and not a log that contains some."""

_LOST = re.compile(
    r"Unable to determine the device handle for (?i:gpu) ?(?P<index>\d{1,3}(?=: ))?(?:[: ]{0,2}"
    r"(?P<bus>[0-9a-fA-F]{3,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-9a-fA-F]))?: (?P<why>[^.\n]{3,60})"
)
_SHAPES = (
    re.compile(r"^[|+](?:.*[|+])?\s*$"),
    re.compile(r"^\s*[\w./ -]{2,60} : .*$"),
    re.compile(r"^    +[A-Z][\w ./-]{2,60}$"),
    re.compile(r"^GPU [0-9A-Fa-f]{4,8}:|^GPU \d+: |^=+NVSMI LOG=+$|^\s*Link \d+: "),
    re.compile(r"^(?:\x1b\[\d+m)*\s+GPU0\b|^(?:GPU|NIC|mlx5_)\d+\s|^Legend:|^  (?:X|SYS|NODE|PHB|PXB|PIX|NV#) +="),
    re.compile(r"^(?:[^,]{0,80}, ){1,60}[^,]{0,80}$"),
    re.compile(r"^(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun) [A-Z][a-z]{2} +\d+ [\d:]{8} \d{4}\s*$"),
    _LOST,
)
_READERS = (table, full_query, csv_lists, links_module)

_UNSHOWN = {
    "clock_reasons": "nvidia-smi -q -d PERFORMANCE",
    "ecc_volatile_uncorrected": "nvidia-smi -q -d ECC",
    "remap_failed": "nvidia-smi -q -d ROW_REMAPPER",
    "retired_pages_pending": "nvidia-smi -q -d PAGE_RETIREMENT",
    "pcie_width": "nvidia-smi -q",
    "pcie_generation": "nvidia-smi -q",
    "compute_mode": "nvidia-smi -q -d COMPUTE",
    "processes": "nvidia-smi on the host itself",
    "nvlinks": "nvidia-smi nvlink --status; nvidia-smi nvlink --errorcounters",
    "fabric": "nvidia-smi -q",
}
"""Fields that checks read, and the command that shows each."""


def looks_like_nvidia_smi(head: str) -> bool:
    """Return whether the beginning of a text is mostly output of nvidia-smi, not a log that contains some."""
    if not any(reader.is_marked(head) for reader in _READERS) and not _LOST.search(head):
        return False
    lines = [line[:LONGEST] for line in head.splitlines()[:2000] if line.strip()]
    shaped = sum(any(shape.match(line) for shape in _SHAPES) for line in lines)
    return shaped >= MAIN_SHARE * len(lines)


def read_nvidia_smi(text_lines: Iterable[str], name: str = "") -> tuple[Section, ...]:
    """Return the facts of the GPUs in a text; nothing if it shows none."""
    lines = [line.rstrip("\r\n")[:LONGEST] for line in islice(text_lines, MOST_LINES)]
    found = [seen for reader in _READERS if (seen := reader.read(lines)) is not None]
    gpus = _with_lost(_merged(found), lines)
    if not gpus:
        return ()
    shown = {field for seen in found for field in seen.shown}
    return (
        GpuFacts(
            driver_version=_first(seen.driver for seen in found),
            cuda_version=_first(seen.cuda for seen in found),
            gpus=tuple(gpus),
            links=next((seen.links for seen in found if seen.links), ()),
            hidden=tuple(_notes(shown, gpus, name)),
        ),
    )


def _merged(found: Sequence[NvidiaSmiFields]) -> list[Gpu]:
    """Return each GPU once, identified by its UUID or bus id, else by its index."""
    merged: list[Gpu] = []
    for seen in found:
        for gpu in seen.gpus:
            place = next((place for place, other in enumerate(merged) if _is_same(gpu, other)), None)
            if place is None:
                merged.append(gpu)
            else:
                merged[place] = _joined(merged[place], gpu)
    return sorted(merged, key=lambda gpu: gpu.index)


def _is_same(one: Gpu, other: Gpu) -> bool:
    for field in ("uuid", "bus_id"):
        ours, theirs = getattr(one, field), getattr(other, field)
        if ours and theirs:
            return bool(ours == theirs)
    return one.index == other.index


def _joined(first: Gpu, second: Gpu) -> Gpu:
    """Combine two outputs about a GPU; the longer name counts, since tables truncate it."""
    known = {field: value for field in Gpu.__struct_fields__ if (value := getattr(second, field)) not in (None, "", ())}
    for field in ("index", "lost"):
        known[field] = getattr(first, field) if field == "index" else first.lost or second.lost
    known["name"] = max(first.name, second.name, key=len)
    return msgspec.structs.replace(first, **known)


def _with_lost(gpus: list[Gpu], lines: Iterable[str]) -> list[Gpu]:
    """Add the GPUs without a device handle, which the table omits."""
    for line in lines:
        if (found := _LOST.search(line)) is None:
            continue
        bus, why = bus_id_of(found["bus"] or ""), found["why"].strip()
        at = next((place for place, gpu in enumerate(gpus) if bus and gpu.bus_id == bus), None)
        if at is not None:
            gpus[at] = msgspec.structs.replace(gpus[at], lost=True, error=why)
            continue
        taken = {gpu.index for gpu in gpus}
        free = next(number for number in range(len(taken) + 1) if number not in taken)
        index = int(found["index"]) if found["index"] else free
        if index not in taken:
            gpus.append(Gpu(index, bus_id=bus, lost=True, error=why))
    return sorted(gpus, key=lambda gpu: gpu.index)


def _notes(shown: set[str], gpus: Sequence[Gpu], name: str) -> Iterable[HiddenField]:
    where = f" in {name}" if name else ""
    for field, command in _UNSHOWN.items():
        if field not in shown:
            yield HiddenField(f"gpus.{field}", f"the output of nvidia-smi{where} does not show it", command)
        elif field == "processes" and any(gpu.processes is None and not gpu.lost for gpu in gpus):
            reason = f"memory is in use{where}, but no process is listed: a container hides them"
            yield HiddenField("gpus.processes", reason, command)


def _first(values: Iterable[str | None]) -> str | None:
    return next((value for value in values if value), None)
