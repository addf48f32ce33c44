"""Memory of a GPU, its errors, and the recovery action that the driver requests."""

from __future__ import annotations

import ctypes
from typing import Any

from doctor.collectors.gpu.nvml import Nvml

UNCORRECTED = 1
VOLATILE = 0
AGGREGATE = 1

RECOVERY_ACTIONS = {
    0: "none",
    1: "gpu-reset",
    2: "node-reboot",
    3: "drain-p2p",
    4: "drain-and-reset",
    5: "recover-imex-domain",
    6: "bus-reset",
    7: "system-reboot",
}
"""nvml.h nvmlDeviceGpuRecoveryAction_t."""


def read_memory(nvml: Nvml, handle: Any, index: int) -> dict[str, Any]:
    """Return total, used and free bytes. ``used`` excludes the reserve of the driver, if that is reported."""
    version = nvml.constant("nvmlMemory_v2")
    memory = None
    if version is not None:
        memory = nvml.ask("nvmlDeviceGetMemoryInfo", handle, version, field="memory_used", index=index)
    if memory is None:  # drivers before 510
        memory = nvml.ask("nvmlDeviceGetMemoryInfo", handle, field="memory_used", index=index)
    if memory is None:
        return {}
    return {"memory_total": memory.total, "memory_used": memory.used, "memory_free": memory.free}


def read_memory_errors(nvml: Nvml, handle: Any, index: int) -> dict[str, Any]:
    """Return ECC mode and counters, retired pages (before Ampere) and remapped rows (since Ampere)."""

    def ask(field: str, function: str, *arguments: Any) -> Any:
        return nvml.ask(function, handle, *arguments, field=field, index=index)

    mode = ask("ecc", "nvmlDeviceGetEccMode")
    pending = ask("retired_pages_pending", "nvmlDeviceGetRetiredPagesPendingStatus")
    rows = ask("remap_failed", "nvmlDeviceGetRemappedRows")
    return {
        "ecc": bool(mode[0]) if mode else None,
        "ecc_volatile_uncorrected": ask(
            "ecc_volatile_uncorrected", "nvmlDeviceGetTotalEccErrors", UNCORRECTED, VOLATILE
        ),
        "ecc_aggregate_uncorrected": ask(
            "ecc_aggregate_uncorrected", "nvmlDeviceGetTotalEccErrors", UNCORRECTED, AGGREGATE
        ),
        "retired_pages_pending": None if pending is None else bool(pending),
        **_sram(nvml, handle, index),
        "remapped_correctable": rows[0] if rows else None,
        "remapped_uncorrectable": rows[1] if rows else None,
        "remap_pending": bool(rows[2]) if rows else None,
        "remap_failed": bool(rows[3]) if rows else None,
    }


def _sram(nvml: Nvml, handle: Any, index: int) -> dict[str, Any]:
    structure = nvml.constant("c_nvmlEccSramErrorStatus_v1_t")
    if structure is None:
        return {}
    status = structure()
    answer = nvml.ask(
        "nvmlDeviceGetSramEccErrorStatus", handle, ctypes.byref(status), field="ecc_sram_uncorrected", index=index
    )
    if answer is None:
        return {}
    return {
        "ecc_sram_uncorrected": status.aggregateUncParity + status.aggregateUncSecDed,
        "ecc_sram_threshold_exceeded": bool(status.bThresholdExceeded),
    }


def recovery_action(nvml: Nvml, handle: Any, index: int) -> str | None:
    """Return the recovery action that the driver requests; ``none`` for a healthy GPU, ``None`` if unknown."""
    field_id = nvml.constant("NVML_FI_DEV_GET_GPU_RECOVERY_ACTION")
    if field_id is None:
        return None
    action = read_fields(nvml, handle, [field_id], field="recovery_action", index=index)[0]
    return None if action is None else RECOVERY_ACTIONS.get(action, f"action-{action}")


def read_fields(nvml: Nvml, handle: Any, fields: list[Any], *, field: str, index: int) -> list[int | None]:
    """Return values of NVML fields, each an id or a pair of id and scope; ``None`` for each that the GPU lacks."""
    values = nvml.ask("nvmlDeviceGetFieldValues", handle, fields, field=field, index=index)
    if values is None:
        return [None] * len(fields)
    # The type of a value names the member of the union that holds it (nvml.h nvmlValueType_t).
    kinds = {1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal", 6: "usVal"}
    members = [None if value.nvmlReturn else kinds.get(value.valueType) for value in values]
    return [int(getattr(one.value, member)) if member else None for one, member in zip(values, members, strict=True)]
