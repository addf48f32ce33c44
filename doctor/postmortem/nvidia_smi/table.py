"""The table of ``nvidia-smi`` with MIG devices and processes; drivers since 340."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import msgspec

from doctor.core.facts import Gpu, GpuProcess, MigDevice
from doctor.postmortem.nvidia_smi.fields import (
    KINDS,
    NvidiaSmiFields,
    bus_id_of,
    compute_mode,
    flag,
    number,
    size,
    trouble,
)

SHOWN_FIELDS = frozenset({"ecc_volatile_uncorrected", "compute_mode", "processes"})
WIDEST = 300
"""Maximum characters of a row: the table has 91."""
UNSEEN_MIB = 1024
"""MiB in use from which on some process must hold them: driver and desktop use less."""

_MARK = re.compile(r"^.{0,200}\| NVIDIA-SMI \d", re.MULTILINE)
_RELEASES = re.compile(r"(?:Driver|KMD) Version: ([\d.]+)(?:.*?CUDA (?:UMD )?Version: ([\d.]+))?")
_GPU = re.compile(r"^\s*(\d{1,3})\s+(\S.*)\s(On|Off|N/A|ERR!|WDDM|TCC|MCDM)$")
_BUS = re.compile(r"^\s*([0-9A-Fa-f:.]+|ERR!)(?:\s*(?:On|Off|N/A|ERR!))?$")
_MEMORY = re.compile(r"(?<!\d)(\d{1,12})MiB\s{0,40}/\s{0,40}(\d{1,12})MiB")
_POWER = re.compile(r"(?<!\d)(\d{1,9})W\s{0,40}/\s{0,40}(\d{1,9})W")
_PROCESS = re.compile(
    r"^\s*(?P<gpu>\d{1,3})\s+(?:(?P<gi>N/A|\d+)\s+(?P<ci>N/A|\d+)\s+)?(?P<pid>\d+)\s+(?P<kind>[CGM](?:\+[CGM]){0,2})\s+"
    r"(?P<name>.*?)(?:\s(?P<memory>\d{1,12})MiB|N/A|Insufficient\s{1,9}\S{0,40})?$"
)
_SLICE = re.compile(r"^\s*(\d{1,3})\s+(\d+)\s+(\d+)\s+(\d+)\s*$")


def is_marked(text: str) -> bool:
    """Return whether a text contains the beginning of the table."""
    return _MARK.search(text) is not None


def read(lines: Sequence[str]) -> NvidiaSmiFields | None:
    """Read the last table in the lines."""
    starts = [place for place, line in enumerate(lines) if len(line) <= WIDEST and _MARK.match(line)]
    if not starts:
        return None
    rows = [line for line in lines[starts[-1] :] if "|" in line and len(line) <= WIDEST]
    releases = _RELEASES.search(rows[0])
    parts = _parts(rows)
    processes = tuple(_processes(parts["processes"]))
    has_list = bool(parts["processes"])
    slices = tuple(_slices(parts["slices"]))
    return NvidiaSmiFields(
        tuple(_with_users(gpu, processes, slices, has_list) for gpu in _gpus(parts["gpus"])),
        SHOWN_FIELDS if has_list else SHOWN_FIELDS - {"processes"},
        releases[1] if releases else None,
        releases[2] if releases else None,
    )


def _parts(rows: Sequence[str]) -> dict[str, list[list[str]]]:
    parts: dict[str, list[list[str]]] = {"gpus": [], "slices": [], "processes": []}
    part = "gpus"
    for row in rows:
        if "MIG devices:" in row:
            part = "slices"
        elif "Processes:" in row:
            part = "processes"
        cells = row[row.index("|") + 1 :].rstrip().rstrip("|").split("|")
        parts[part].append([cell.rstrip() for cell in cells])
    return parts


def _gpus(rows: Sequence[list[str]]) -> Iterator[Gpu]:
    for place, cells in enumerate(rows):
        found = _GPU.match(cells[0]) if len(cells) == 3 else None
        if found is not None and (bus := _BUS.match(cells[1])):
            below = [row for row in rows[place + 1 : place + 3] if len(row) == 3 and not _GPU.match(row[0])]
            yield _gpu(found, bus[1], cells[2].strip(), below)


def _gpu(found: re.Match[str], bus: str, errors: str, below: Sequence[list[str]]) -> Gpu:
    """Parse the rows of a GPU: identity, state, and since driver 450 MIG mode."""
    state = below[0] if below else ["", "", ""]
    memory, power = _MEMORY.search(state[1]), _POWER.search(state[0])
    temperature = re.search(r"(\d+)C\b", state[0])
    use = re.match(r"\s*(\d+)%|\s*(?:N/A|ERR!)", state[2])
    words = [
        word for row in ([found[0], bus, errors], *below[:1]) for cell in row for word in re.split(r"\s{2,}| ", cell)
    ]
    lost, error, action = trouble([*words, state[1]])
    return Gpu(
        int(found[1]),
        name="" if found[2].rstrip() == "ERR!" else found[2].rstrip(),
        bus_id=bus_id_of(bus),
        memory_used=size(memory[1]) if memory else None,
        memory_total=size(memory[2]) if memory else None,
        utilization=number(use[1]) if use and use[1] else None,
        temperature=int(temperature[1]) if temperature else None,
        power=int(power[1]) * 1000 if power else None,
        power_limit=int(power[2]) * 1000 if power else None,
        compute_mode=compute_mode(state[2][use.end() :] if use else state[2]),
        persistence=flag(found[3]),
        ecc=False if errors == "Off" else True if errors.isdigit() else None,
        ecc_volatile_uncorrected=number(errors) if errors.isdigit() else None,
        mig=flag(below[1][2]) if len(below) > 1 else None,
        recovery_action=action,
        lost=lost,
        error=error,
    )


def _processes(rows: Sequence[list[str]]) -> Iterator[tuple[int, GpuProcess]]:
    for cells in rows:
        found = _PROCESS.match("|".join(cells))
        if found is None:
            continue
        memory = found["memory"]
        yield (
            int(found["gpu"]),
            GpuProcess(
                int(found["pid"][:10]),
                size(memory) if memory else None,
                found["name"].rstrip() or None,
                kind=KINDS.get(found["kind"], "compute"),
            ),
        )


def _slices(rows: Sequence[list[str]]) -> Iterator[tuple[int, MigDevice]]:
    for cells in rows:
        found = _SLICE.match(cells[0])
        if found is not None and len(cells) > 1:
            memory = _MEMORY.search(cells[1])
            yield int(found[1]), MigDevice("", int(found[4][:6]), size(memory[2]) if memory else None)


def _with_users(
    gpu: Gpu, processes: Sequence[tuple[int, GpuProcess]], slices: Sequence[tuple[int, MigDevice]], has_list: bool
) -> Gpu:
    """Add the processes and MIG devices of a GPU. In a container no process is listed."""
    own = tuple(process for index, process in processes if index == gpu.index)
    unseen = not own and (gpu.memory_used or 0) > UNSEEN_MIB << 20
    return msgspec.structs.replace(
        gpu,
        processes=own if has_list and not unseen and not gpu.lost else None,
        mig_devices=tuple(part for index, part in slices if index == gpu.index),
    )
