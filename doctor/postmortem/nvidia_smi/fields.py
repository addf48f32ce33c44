"""Values and words that the output formats of nvidia-smi share."""

from __future__ import annotations

import re
from typing import NamedTuple

from doctor.core.facts import Gpu, PeerLink
from doctor.knowledge.nvidia import kernel_bus_id

MIB = 1 << 20
_UNITS = {"kib": 1 << 10, "mib": MIB, "gib": 1 << 30, "mb": MIB, "gb": 1 << 30}
_NUMBER = re.compile(r"^\[?\s*(-?\d{1,15}(?:\.\d{1,6})?)\s*([A-Za-z%]*)")
_BUS = re.compile(r"^[0-9a-fA-F]{3,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-9a-fA-F]$")

COMPUTE_MODES = {
    "default": "default",
    "e. process": "exclusive-process",
    "exclusive_process": "exclusive-process",
    "exclusive process": "exclusive-process",
    "e. thread": "exclusive-thread",
    "exclusive_thread": "exclusive-thread",
    "prohibited": "prohibited",
}

REASONS = {
    "idle": "gpu-idle",
    "gpu idle": "gpu-idle",
    "applications clocks setting": "application-clocks",
    "sw power cap": "software-power-cap",
    "hw slowdown": "hardware-slowdown",
    "sync boost": "sync-boost",
    "sw thermal slowdown": "software-thermal",
    "hw thermal slowdown": "hardware-thermal",
    "hw power brake slowdown": "hardware-power-brake",
    "display clock setting": "display-clocks",
}
"""Reasons for reduced clocks as ``-q`` writes them; ``--query-gpu`` uses underscores."""

KINDS = {"C": "compute", "G": "graphics", "C+G": "compute", "M+C": "mps", "M": "mps", "M+C+G": "mps", "C+M": "mps"}
"""Process types."""

LOST_WORDS = ("gpu is lost", "unknown error")
RESET_WORDS = ("requires reset", "reset required")


class NvidiaSmiFields(NamedTuple):
    """The content of one output. ``shown``: fields of a GPU that its format contains."""

    gpus: tuple[Gpu, ...]
    shown: frozenset[str] = frozenset()
    driver: str | None = None
    cuda: str | None = None
    links: tuple[PeerLink, ...] = ()


def number(text: str | None) -> int | None:
    """Return the integer that a value begins with; ``None`` for ``[Not Supported]`` and words."""
    found = _NUMBER.match(text.strip()) if text else None
    return None if found is None else int(float(found[1]))


def size(text: str | None) -> int | None:
    """Return a size in bytes; without a unit, it is in MiB."""
    found = _NUMBER.match(text.strip()) if text else None
    return None if found is None else int(float(found[1]) * _UNITS.get(found[2].lower(), MIB))


def milliwatts(text: str | None) -> int | None:
    """Return power in milliwatts, from a value in watts."""
    found = _NUMBER.match(text.strip()) if text else None
    return None if found is None else int(float(found[1]) * 1000)


def flag(text: str | None) -> bool | None:
    """Return a yes or no value; ``None`` for other words."""
    words = (text or "").strip().strip("[]").rstrip("*").lower()
    if words in ("yes", "enabled", "on", "active", "1"):
        return True
    return False if words in ("no", "disabled", "off", "not active", "0") else None


def compute_mode(text: str | None) -> str | None:
    """Return the compute mode as facts name it."""
    return COMPUTE_MODES.get((text or "").strip().lower())


def bus_id_of(text: str | None) -> str:
    """Return the bus id as the kernel writes it; ``""`` if the text is not a bus id."""
    words = (text or "").strip()
    return kernel_bus_id(words) if _BUS.match(words) else ""


def trouble(texts: list[str]) -> tuple[bool, str | None, str | None]:
    """Return whether a GPU is lost, its error and recovery action, from words instead of values.

    A single unreadable value is a failure of that sensor only.
    """
    words = [text.strip().strip("[]").lower() for text in texts]
    for known in LOST_WORDS:
        count = sum(known in word for word in words)
        if count >= 3 or (count and known == "gpu is lost"):
            return True, known.replace("gpu", "GPU"), None
    if any(known in word for known in RESET_WORDS for word in words):
        return False, None, "gpu-reset"
    errors = sum(word == "err!" for word in words)
    if errors >= 3:
        return True, "ERR! instead of its values", None
    return False, "ERR! instead of a value" if errors else None, None
