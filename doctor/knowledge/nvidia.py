"""Values of NVML that nvidia-smi prints too, by their names in facts."""

from __future__ import annotations

DRIVER_MISMATCH = "the NVIDIA libraries and the loaded kernel driver are of different releases"
"""Why the GPUs of a host are not visible after NVML_ERROR_LIB_RM_VERSION_MISMATCH."""

NVML_UNKNOWN_ERROR = "(NVML code 999)"
"""The end of the reason why NVML does not start, for NVML_ERROR_UNKNOWN."""

CLOCK_REASONS = {
    0x001: "gpu-idle",
    0x002: "application-clocks",
    0x004: "software-power-cap",
    0x008: "hardware-slowdown",
    0x010: "sync-boost",
    0x020: "software-thermal",
    0x040: "hardware-thermal",
    0x080: "hardware-power-brake",
    0x100: "display-clocks",
}
"""nvml.h nvmlClocksEventReason*."""


def reason_names(mask: int) -> tuple[str, ...]:
    """Return the names of the bits of a mask of clock event reasons; an unknown bit is named by its value."""
    return tuple(CLOCK_REASONS.get(1 << bit, f"0x{1 << bit:x}") for bit in range(64) if mask >> bit & 1)


def kernel_bus_id(bus_id: str) -> str:
    """Return ``0000:3b:00.0``, as in the kernel, lspci and Xid lines, for ``00000000:3B:00.0`` of NVML."""
    domain, _, rest = bus_id.strip().lower().partition(":")
    return f"{domain[-4:] if len(domain) == 8 and domain.startswith('0000') else domain}:{rest}"
