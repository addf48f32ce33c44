"""``nvidia-smi topo -m`` and ``nvidia-smi nvlink`` with ``--status`` or ``--errorcounters``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from doctor.core.facts import Gpu, NvLink, PeerLink
from doctor.postmortem.nvidia_smi.fields import NvidiaSmiFields

MOST_LINKS = 64

_ESCAPES = re.compile(r"\x1b\[[\d;]*m")
_MATRIX = re.compile(r"^\s+GPU0(?:\s+(?:GPU|NIC|mlx)\S*)*(?:\s|$)")
_ROW = re.compile(r"^GPU(\d{1,3})\s")
_GPU = re.compile(r"^GPU (\d{1,3}): (.*?)(?: \(UUID: (GPU-[\w-]{1,60})\))?$")
_LINK = re.compile(r"^\s*Link (\d{1,3}): (.+)$")
_ERRORS = re.compile(r"^(Replay|Recovery|CRC|CRC Flit|CRC Data)(?: Flit| Data)? Errors?: (\d{1,15})$", re.IGNORECASE)

PATHS = {
    "PIX": "single-switch",
    "PXB": "multiple-switches",
    "PHB": "host-bridge",
    "NODE": "numa-node",
    "SYS": "system",
    "SOC": "system",
}
"""Types of paths in the legend of ``topo -m``, and their names in facts."""


def is_marked(text: str) -> bool:
    """Return whether a text contains the beginning of such an output."""
    lines = [_ESCAPES.sub("", line).rstrip() for line in text.splitlines()[:500]]
    if any(_MATRIX.match(line) for line in lines) and any(_ROW.match(line) for line in lines):
        return True
    return any(_GPU.match(line) for line in lines) and any(_LINK.match(line) for line in lines)


def read(lines: Sequence[str]) -> NvidiaSmiFields | None:
    """Read the NVLinks of GPUs and the paths between GPUs."""
    lines = [_ESCAPES.sub("", line).rstrip() for line in lines]
    links, gpus = tuple(_matrix(lines)), tuple(_gpus(lines))
    if not links and not gpus:
        return None
    return NvidiaSmiFields(gpus, frozenset({"nvlinks"} if gpus else ()), links=links)


def _matrix(lines: Sequence[str]) -> Iterator[PeerLink]:
    count = 0
    for line in lines:
        if _MATRIX.match(line):
            count = len(re.findall(r"\bGPU\d+\b", line))
        elif count and (found := _ROW.match(line)):
            cells = line.split()[1 : count + 1]
            for other, word in enumerate(cells):
                path = "nvlink" if re.fullmatch(r"NV\d+", word) else PATHS.get(word)
                if other > int(found[1]) and path:
                    yield PeerLink(int(found[1]), other, path)


def _gpus(lines: Sequence[str]) -> Iterator[Gpu]:
    """Yield the GPUs with their links; status and errors of one GPU may be in two lists."""
    heads: dict[str, Gpu] = {}
    states: dict[str, dict[int, bool]] = {}
    errors: dict[str, dict[int, dict[str, int]]] = {}
    key = ""
    for line in lines:
        if found := _GPU.match(line):
            key = found[1]
            heads.setdefault(key, Gpu(int(key), uuid=found[3] or "", name=found[2]))
        elif key and (link := _LINK.match(line)) and int(link[1]) < MOST_LINKS:
            counted = _ERRORS.match(link[2])
            if counted:
                known = errors.setdefault(key, {}).setdefault(int(link[1]), {})
                known[counted[1].lower()] = int(counted[2])
            elif (speed := re.match(r"[\d.]+ GB/s", link[2])) or "inactive" in link[2].lower():
                states.setdefault(key, {})[int(link[1])] = speed is not None
    for key, gpu in heads.items():
        found_links = tuple(_links(states.get(key, {}), errors.get(key, {})))
        if found_links:
            yield Gpu(gpu.index, uuid=gpu.uuid, name=gpu.name, nvlinks=found_links)


def _links(states: Mapping[int, bool], errors: Mapping[int, Mapping[str, int]]) -> Iterator[NvLink]:
    """Yield the links; those with counters are up."""
    for index in sorted({*states, *errors}):
        counts = errors.get(index)
        yield NvLink(
            index,
            states.get(index, True),
            errors=sum(counts.values()) if counts else None,
            fatal=counts.get("recovery") if counts else None,
        )
