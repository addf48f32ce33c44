"""CSV of nvidia-smi: ``--query-gpu``, ``--query-remapped-rows``, ``--query-compute-apps``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from doctor.core.facts import Gpu, GpuProcess
from doctor.knowledge.nvidia import reason_names
from doctor.postmortem.nvidia_smi.fields import (
    REASONS,
    NvidiaSmiFields,
    bus_id_of,
    compute_mode,
    flag,
    milliwatts,
    number,
    size,
    trouble,
)

_NAME = r"[a-z][a-z0-9_]*(?:\.[a-z0-9_]+)*"
_HEADER = re.compile(rf"^\s*{_NAME}(?: \[[\w%/]+\])?(?:, ?{_NAME}(?: \[[\w%/]+\])?)+\s*$", re.IGNORECASE)
_ALIASES = {"gpu_name": "name", "gpu_uuid": "uuid", "gpu_bus_id": "pci.bus_id", "gpu_serial": "serial"}

_FIELDS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "uuid": ("uuid", str),
    "name": ("name", str),
    "pci.bus_id": ("bus_id", bus_id_of),
    "compute_cap": ("compute_capability", str),
    "memory.total": ("memory_total", size),
    "memory.used": ("memory_used", size),
    "memory.free": ("memory_free", size),
    "utilization.gpu": ("utilization", number),
    "temperature.gpu": ("temperature", number),
    "power.draw": ("power", milliwatts),
    "power.draw.instant": ("power", milliwatts),
    "power.limit": ("power_limit", milliwatts),
    "enforced.power.limit": ("power_limit", milliwatts),
    "clocks.current.sm": ("clock", number),
    "clocks.sm": ("clock", number),
    "clocks.max.sm": ("clock_max", number),
    "compute_mode": ("compute_mode", compute_mode),
    "persistence_mode": ("persistence", flag),
    "ecc.mode.current": ("ecc", flag),
    "ecc.errors.uncorrected.volatile.total": ("ecc_volatile_uncorrected", number),
    "ecc.errors.uncorrected.aggregate.total": ("ecc_aggregate_uncorrected", number),
    "retired_pages.pending": ("retired_pages_pending", flag),
    "remapped_rows.correctable": ("remapped_correctable", number),
    "remapped_rows.uncorrectable": ("remapped_uncorrectable", number),
    "remapped_rows.pending": ("remap_pending", flag),
    "remapped_rows.failure": ("remap_failed", flag),
    "pcie.link.gen.current": ("pcie_generation", number),
    "pcie.link.gen.gpucurrent": ("pcie_generation", number),
    "pcie.link.gen.max": ("pcie_generation_max", number),
    "pcie.link.width.current": ("pcie_width", number),
    "pcie.link.width.max": ("pcie_width_max", number),
    "mig.mode.current": ("mig", flag),
}
"""Columns (``nvidia-smi --help-query-gpu``) with the field of a GPU that each fills, and its parser."""

_REASON = re.compile(r"^clocks_(?:event|throttle)_reasons\.(\w+)$")
_TOO_LARGE = 1 << 63


def is_marked(text: str) -> bool:
    """Return whether a text contains a header with known columns."""
    return any(_columns(line) for line in text.splitlines()[:200])


def read(lines: Sequence[str]) -> NvidiaSmiFields | None:
    """Read all lists in the lines; for a GPU in several of them, the last one counts."""
    by_key: dict[str, Gpu] = {}
    shown: set[str] = set()
    users: dict[str, list[GpuProcess]] = {}
    driver = None
    for columns, values in _rows(lines):
        row = dict(zip(columns, values, strict=True))
        driver = row.get("driver_version") or driver
        key = row.get("uuid") or bus_id_of(row.get("pci.bus_id")) or row.get("index") or str(len(by_key))
        if "pid" in row:
            listed = users.setdefault(key, [])
            if (pid := number(row["pid"])) is not None:
                memory = size(row.get("used_gpu_memory") or row.get("used_memory"))
                listed.append(GpuProcess(pid, memory, row.get("process_name") or None))
            continue
        known = by_key.get(key) or Gpu(number(row.get("index")) or (0 if "index" in row else len(by_key)))
        fields = _fields(row)
        shown.update(_FIELDS[column][0] for column in columns if column in _FIELDS)
        shown.update(["clock_reasons"] if "clock_reasons" in fields else [])
        by_key[key] = msgspec.structs.replace(known, **fields)
    if not by_key and not users:
        return None
    for key in users:
        by_key.setdefault(key, Gpu(len(by_key), uuid=key if key.startswith("GPU-") else ""))
    gpus = tuple(
        msgspec.structs.replace(gpu, processes=tuple(users[key])) if key in users else gpu
        for key, gpu in by_key.items()
    )
    return NvidiaSmiFields(gpus, frozenset(shown | ({"processes"} if users else set())), driver)


def _columns(line: str) -> tuple[str, ...]:
    if not _HEADER.match(line) or len(line) > 4000:
        return ()
    names = tuple(re.sub(r"\s*\[.*?\]", "", part).strip().lower() for part in line.split(","))
    known = sum(name in _FIELDS or name in _ALIASES or name in _OTHERS for name in names)
    # Any table may have columns called "index" and "name".
    is_own = any(name in _ALIASES or ("." in name and (name in _FIELDS or _REASON.match(name))) for name in names)
    return tuple(_ALIASES.get(name, name) for name in names) if known >= 2 and is_own else ()


_OTHERS = ("index", "pid", "timestamp", "driver_version")


def _rows(lines: Sequence[str]) -> Iterator[tuple[tuple[str, ...], list[str]]]:
    columns: tuple[str, ...] = ()
    for line in lines:
        if found := _columns(line):
            columns = found
        elif columns and line.count(",") == len(columns) - 1:
            yield columns, [value.strip() for value in line.split(",")]
        elif line.strip():
            columns = ()


def _fields(row: Mapping[str, str]) -> dict[str, Any]:
    known = {_FIELDS[column][0]: _FIELDS[column][1](value) for column, value in row.items() if column in _FIELDS}
    fields = {field: value for field, value in known.items() if value is not None}
    lost, error, action = trouble(list(row.values()))
    if (reasons := _reasons(row)) is not None:
        fields["clock_reasons"] = reasons
    return {**fields, "lost": lost, "error": error, "recovery_action": action}


def _reasons(row: Mapping[str, str]) -> tuple[str, ...] | None:
    """Return the active reasons, from the mask or from one column per reason."""
    columns = {found[1]: value for name, value in row.items() if (found := _REASON.match(name))}
    if "active" in columns:
        try:
            mask = int(columns["active"], 16)
        except ValueError:
            return None
        return reason_names(mask) if 0 <= mask < _TOO_LARGE else None
    single = {REASONS.get(name.replace("_", " "), name): flag(value) for name, value in columns.items()}
    stated = [(name, active) for name, active in single.items() if active is not None]
    return tuple(name for name, active in stated if active) if stated else None
