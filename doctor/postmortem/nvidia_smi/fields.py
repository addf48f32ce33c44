"""What the forms of nvidia-smi's output have in common: values, words, and what one of them showed."""

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
"""Reasons for lower clocks as ``-q`` writes them, and with underscores ``--query-gpu``."""

KINDS = {"C": "compute", "G": "graphics", "C+G": "compute", "M+C": "mps", "M": "mps", "M+C+G": "mps", "C+M": "mps"}
"""Types of processes."""

LOST_WORDS = ("gpu is lost", "unknown error")
RESET_WORDS = ("requires reset", "reset required")


class NvidiaSmiFields(NamedTuple):
    """What one form showed. ``told``: fields of the GPUs that it shows wherever a card has them."""

    gpus: tuple[Gpu, ...]
    told: frozenset[str] = frozenset()
    driver: str | None = None
    cuda: str | None = None
    links: tuple[PeerLink, ...] = ()


def number(text: str | None) -> int | None:
    """The whole number that a value begins with; ``None`` for ``N/A``, ``[Not Supported]`` and words."""
    found = _NUMBER.match(text.strip()) if text else None
    return None if found is None else int(float(found[1]))


def size(text: str | None) -> int | None:
    """Bytes: MiB unless it says otherwise."""
    found = _NUMBER.match(text.strip()) if text else None
    return None if found is None else int(float(found[1]) * _UNITS.get(found[2].lower(), MIB))


def milliwatts(text: str | None) -> int | None:
    """Power in watts, in thousandths."""
    found = _NUMBER.match(text.strip()) if text else None
    return None if found is None else int(float(found[1]) * 1000)


def flag(text: str | None) -> bool | None:
    """Yes or no; ``None`` for what is neither."""
    words = (text or "").strip().strip("[]").rstrip("*").lower()
    if words in ("yes", "enabled", "on", "active", "1"):
        return True
    return False if words in ("no", "disabled", "off", "not active", "0") else None


def compute_mode(text: str | None) -> str | None:
    """As facts name it."""
    return COMPUTE_MODES.get((text or "").strip().lower())


def bus_id_of(text: str | None) -> str:
    """As the kernel writes it, or nothing."""
    words = (text or "").strip()
    return kernel_bus_id(words) if _BUS.match(words) else ""


def trouble(texts: list[str]) -> tuple[bool, str | None, str | None]:
    """Whether a GPU is lost by the words that stand in place of its values, the words, and what recovers it. One value
    that can't be had is a sensor's own trouble."""
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
