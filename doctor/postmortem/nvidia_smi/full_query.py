"""``nvidia-smi -q``, with all parts or those of ``-d``: values nested by indentation."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from doctor.core.facts import Fabric, Gpu, GpuProcess
from doctor.postmortem.nvidia_smi.fields import (
    KINDS,
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

Path = tuple[str, ...]
Values = Mapping[Path, str]

_MARK = re.compile(r"^\s*=+NVSMI LOG=+\s*$", re.MULTILINE)
_GPU = re.compile(r"^GPU ([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9A-Fa-f])\s*$")

TOP = 4
"""Indentation of the attributes of a GPU."""

_SHOWN_BY = {
    "clock_reasons": ("Clocks Event Reasons", "Clocks Throttle Reasons"),
    "ecc_volatile_uncorrected": ("ECC Errors",),
    "remap_failed": ("Remapped Rows",),
    "retired_pages_pending": ("Retired Pages",),
    "pcie_width": ("PCI",),
    "pcie_generation": ("PCI",),
    "compute_mode": ("Compute Mode",),
    "processes": ("Processes",),
    "fabric": ("Fabric",),
}
"""The parts of the output that show a field if the card has it."""

_FABRIC_STATES = {"not supported": "not-supported", "not started": "not-started", "in progress": "in-progress"}
_UNKNOWN = 999
"""nvml.h NVML_ERROR_UNKNOWN: the status of a fabric is printed in words."""


def is_marked(text: str) -> bool:
    """Return whether a text contains the beginning of the output."""
    return _MARK.search(text) is not None


def read(lines: Sequence[str]) -> NvidiaSmiFields | None:
    """Read the last output in the lines."""
    starts = [place for place, line in enumerate(lines) if _MARK.match(line)]
    if not starts:
        return None
    head, bodies = _split(lines[starts[-1] + 1 :])
    found = [(bus, dict(_values(body)), tuple(_processes(body))) for bus, body in bodies]
    general = dict(_values(head))
    tops = {path[0] for _, values, _ in found for path in values}
    return NvidiaSmiFields(
        tuple(_gpu(index, bus, values, processes) for index, (bus, values, processes) in enumerate(found)),
        frozenset(field for field, parts in _SHOWN_BY.items() if tops.intersection(parts)),
        general.get(("Driver Version",)),
        general.get(("CUDA Version",)),
    )


def _split(lines: Iterable[str]) -> tuple[list[str], list[tuple[str, list[str]]]]:
    head: list[str] = []
    bodies: list[tuple[str, list[str]]] = []
    for line in lines:
        if (found := _GPU.match(line)) is not None:
            bodies.append((found[1], []))
        elif bodies:
            bodies[-1][1].append(line)
        else:
            head.append(line)
    return head, bodies


def _values(lines: Iterable[str]) -> Iterator[tuple[Path, str]]:
    """Yield the path of names to each value, and the value, which is empty for a title."""
    above: list[tuple[int, str]] = []
    for line in lines:
        indent, name, value = _parsed(line)
        if not name:
            continue
        while above and above[-1][0] >= indent:
            above.pop()
        # A value may have parts as well: "HW Slowdown : Active" and its components, a process and its memory.
        above.append((indent, name))
        yield tuple(name for _, name in above), value or ""


def _parsed(line: str) -> tuple[int, str, str | None]:
    """Return indentation, name, and value, which is ``None`` for a title."""
    name, colon, value = line.partition(":")
    bare = name.strip()
    return len(name) - len(name.lstrip()), bare, value.strip() if colon else None


def _gpu(index: int, bus: str, values: Values, processes: tuple[GpuProcess, ...]) -> Gpu:
    get = values.get
    lost, error, action = trouble(list(values.values()))
    power = _first(values, ("GPU Power Readings", "Power Readings"), _DRAWS)
    limit = _first(values, ("GPU Power Readings", "Power Readings"), ("Current Power Limit", "Enforced Power Limit"))
    link = ("PCI", "GPU Link Info")
    pending = ("Pending Page Blacklist", "Pending", "Pending Page Retirement")
    page_flags = (flag(get(("Retired Pages", name))) for name in pending)
    used = size(get(("FB Memory Usage", "Used")))
    # In a container, memory is in use and no process is listed.
    users_known = bool(processes) or (("Processes",) in values and (used or 0) <= 1 << 30)
    return Gpu(
        index,
        uuid=get(("GPU UUID",), ""),
        name=get(("Product Name",), ""),
        bus_id=bus_id_of(bus),
        minor=number(get(("Minor Number",))),
        memory_total=size(get(("FB Memory Usage", "Total"))),
        memory_used=used,
        memory_free=size(get(("FB Memory Usage", "Free"))),
        processes=processes if users_known else None,
        utilization=number(get(("Utilization", "Gpu")) or get(("Utilization", "GPU"))),
        temperature=number(get(("Temperature", "GPU Current Temp"))),
        power=milliwatts(power),
        power_limit=milliwatts(limit),
        clock=number(get(("Clocks", "SM"))),
        clock_max=number(get(("Max Clocks", "SM"))),
        clock_reasons=_reasons(values),
        compute_mode=compute_mode(get(("Compute Mode",))),
        persistence=flag(get(("Persistence Mode",))),
        ecc=flag(get(("ECC Mode", "Current")) or get(("Ecc Mode", "Current"))),
        ecc_volatile_uncorrected=_uncorrected(values, "Volatile"),
        ecc_aggregate_uncorrected=_uncorrected(values, "Aggregate"),
        ecc_sram_uncorrected=_uncorrected(values, "Aggregate", "SRAM"),
        ecc_sram_threshold_exceeded=flag(get(("ECC Errors", "Aggregate", "SRAM Threshold Exceeded"))),
        retired_pages_pending=next((value for value in page_flags if value is not None), None),
        remapped_correctable=number(get(("Remapped Rows", "Correctable Error"))),
        remapped_uncorrectable=number(get(("Remapped Rows", "Uncorrectable Error"))),
        remap_pending=flag(get(("Remapped Rows", "Pending"))),
        remap_failed=flag(get(("Remapped Rows", "Remapping Failure Occurred"))),
        recovery_action=action or _recovery(values),
        pcie_generation=number(get((*link, "PCIe Generation", "Current"))),
        pcie_generation_max=number(get((*link, "PCIe Generation", "Max"))),
        pcie_width=number(get((*link, "Link Width", "Current"))),
        pcie_width_max=number(get((*link, "Link Width", "Max"))),
        mig=flag(get(("MIG Mode", "Current"))),
        fabric=_fabric(values),
        lost=lost,
        error=error,
    )


_DRAWS = ("Instantaneous Power Draw", "Power Draw", "Average Power Draw")


def _first(values: Values, parts: Iterable[str], names: Sequence[str]) -> str | None:
    """Return the first of these values that is a number."""
    found = (values.get((part, name)) for part in parts for name in names)
    return next((value for value in found if number(value) is not None), None)


def _uncorrected(values: Values, scope: str, kind: str = "") -> int | None:
    """Return the uncorrectable errors of a scope (before driver 450, of double bits)."""
    total = number(values.get(("ECC Errors", scope, "Double Bit", "Total")))
    if total is not None and not kind:
        return total
    counts = [
        count
        for path, value in values.items()
        if path[:2] == ("ECC Errors", scope)
        and len(path) == 3
        and path[2].startswith(f"{kind} Uncorr" if kind else ("SRAM ", "DRAM "))
        if "Uncorr" in path[2] and (count := number(value)) is not None
    ]
    return sum(counts) if counts else None


def _reasons(values: Values) -> tuple[str, ...] | None:
    """Return the active reasons; their counters have the same names, but are in another part."""
    reasons = [
        (path[-1].lower(), flag(value))
        for path, value in values.items()
        if path[0] in ("Clocks Event Reasons", "Clocks Throttle Reasons") and len(path) > 1
    ]
    known = [(REASONS.get(name, name.replace(" ", "-")), active) for name, active in reasons if active is not None]
    return tuple(name for name, active in known if active) if known else None


def _recovery(values: Values) -> str | None:
    action = values.get(("GPU Recovery Action",))
    if action:
        words = action.lower().replace(" ", "-").replace("_", "-")
        return None if words == "n/a" else {"reset": "gpu-reset", "reboot": "node-reboot"}.get(words, words)
    if flag(values.get(("GPU Reset Status", "Reset Required"))):
        return "gpu-reset"
    return "drain-and-reset" if flag(values.get(("GPU Reset Status", "Drain and Reset Recommended"))) else None


def _fabric(values: Values) -> Fabric | None:
    state = values.get(("Fabric", "State"), "").lower()
    if not state or state == "n/a":
        return None
    status = values.get(("Fabric", "Status"), "").lower()
    cluster = values.get(("Fabric", "ClusterUUID"), "")
    return Fabric(
        _FABRIC_STATES.get(state, state.replace(" ", "-")),
        status=None if status in ("", "n/a") else 0 if status == "success" else _UNKNOWN,
        clique=number(values.get(("Fabric", "CliqueId"))),
        cluster=cluster if re.fullmatch(r"[0-9a-fA-F-]{36}", cluster) else None,
    )


def _processes(lines: Iterable[str]) -> Iterator[GpuProcess]:
    """Yield the processes; the lines of each begin with its process id."""
    found: dict[str, str] = {}
    inside = False
    for line in lines:
        indent, name, value = _parsed(line)
        if name and indent <= TOP:
            inside = name == "Processes"
        elif inside and name == "Process ID":
            yield from _process(found)
            found = {name: value or ""}
        elif inside and found:
            found[name] = value or ""
    yield from _process(found)


def _process(fields: Mapping[str, str]) -> Iterator[GpuProcess]:
    pid = number(fields.get("Process ID"))
    if pid is not None:
        memory, kind = size(fields.get("Used GPU Memory")), KINDS.get(fields.get("Type", "C"), "compute")
        yield GpuProcess(pid, memory, fields.get("Name") or None, kind=kind)
