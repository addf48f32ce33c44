"""Interconnect of GPUs: NVLinks, the NVSwitch fabric, and the path between each pair."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any

from doctor.collectors.gpu.memory_state import read_fields
from doctor.collectors.gpu.nvml import FUNCTION_NOT_FOUND, INVALID_ARGUMENT, LOST, NOT_SUPPORTED, DeviceLost, Nvml
from doctor.core.facts import Fabric, NvLink, PeerLink

MAX_LINKS = 36
"""NVML_NVLINK_MAX_LINKS of nvml.h in CUDA 13; a driver returns "invalid argument" beyond its own."""

REMOTE_TYPES = {0: "gpu", 1: "cpu", 2: "switch"}
"""nvml.h nvmlIntNvLinkDeviceType_t; 1 is the IBM POWER processor."""

REPLAY, RECOVERY, CRC_FLIT, CRC_DATA = range(4)
"""nvml.h nvmlNvLinkErrorCounter_t."""

FABRIC_STATES = {0: "not-supported", 1: "not-started", 2: "in-progress", 3: "completed"}
"""nvml.h NVML_GPU_FABRIC_STATE_*."""

PATHS = {
    0: "internal",
    10: "single-switch",
    20: "multiple-switches",
    30: "host-bridge",
    40: "numa-node",
    50: "system",
}
"""nvml.h nvmlGpuTopologyLevel_t."""

PEER_READ, PEER_WRITE, PEER_NVLINK = range(3)
"""nvml.h nvmlGpuP2PCapsIndex_t."""

PEER_STATUS = {
    0: "ok",
    1: "chipset-not-supported",
    2: "gpu-not-supported",
    3: "topology-not-supported",
    4: "disabled-by-driver-setting",
    5: "not-supported",
    6: "unknown",
}
"""nvml.h nvmlGpuP2PStatus_t."""


def read_nvlinks(nvml: Nvml, handle: Any, index: int) -> tuple[NvLink, ...] | None:
    """Return the NVLinks of a GPU: empty for a card without any, ``None`` if unknown."""
    links: list[NvLink] = []
    for link in range(MAX_LINKS):
        active, code = nvml.call("nvmlDeviceGetNvLinkState", handle, link)
        if code in LOST:
            raise DeviceLost(nvml.words(code))
        if code == INVALID_ARGUMENT:
            break
        if code == NOT_SUPPORTED:
            continue
        if code:
            return None
        errors, fatal = _link_errors(nvml, handle, link, index)
        remote = None
        if active:
            code = nvml.ask("nvmlDeviceGetNvLinkRemoteDeviceType", handle, link, field="nvlinks.remote", index=index)
            remote = None if code is None else REMOTE_TYPES.get(code, "unknown")
        links.append(NvLink(link, bool(active), remote, errors, fatal))
    return tuple(links)


def _link_errors(nvml: Nvml, handle: Any, link: int, index: int) -> tuple[int | None, int | None]:
    """Return all errors and the recoveries alone: from the counters of NVLink 1 to 4, else the fields of NVLink 5."""
    counters = [
        nvml.ask("nvmlDeviceGetNvLinkErrorCounter", handle, link, counter, field="nvlinks.errors", index=index)
        for counter in (REPLAY, RECOVERY, CRC_FLIT, CRC_DATA)
    ]
    known = [count for count in counters if count is not None]
    if known:
        return sum(known), counters[RECOVERY]
    failed = nvml.constant("NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS")
    received = nvml.constant("NVML_FI_DEV_NVLINK_COUNT_RCV_ERRORS")
    if failed is None or received is None:
        return None, None
    fields = [(failed, link), (received, link)]
    values = read_fields(nvml, handle, fields, field="nvlinks.errors", index=index)
    seen = [value for value in values if value is not None]
    return sum(seen) if seen else None, values[0]


def read_fabric(nvml: Nvml, handle: Any) -> Fabric | None:
    """Return the state of the fabric from the newest structure that bindings and driver share; ``None`` without one."""
    for name in ("c_nvmlGpuFabricInfo_v3_t", "c_nvmlGpuFabricInfo_v2_t"):
        structure = nvml.constant(name)
        if structure is None:
            continue
        info = structure()
        _, code = nvml.call("nvmlDeviceGetGpuFabricInfoV", handle, ctypes.byref(info))
        if code == 0:
            return _fabric(info)
        if code == FUNCTION_NOT_FOUND:
            break
    structure = nvml.constant("c_nvmlGpuFabricInfo_t")
    if structure is None:
        return None
    info = structure()
    answer = nvml.ask("nvmlDeviceGetGpuFabricInfo", handle, ctypes.byref(info), field="gpus.fabric")
    return None if answer is None else _fabric(info)


def _fabric(info: Any) -> Fabric:
    state = FABRIC_STATES.get(info.state, f"state-{info.state}")
    if state == "not-supported":
        return Fabric(state)
    cluster = bytes(info.clusterUuid)
    return Fabric(
        state=state,
        status=info.status,
        clique=info.cliqueId,
        cluster=cluster.hex() if any(cluster) else None,
        health=getattr(info, "healthMask", None),
    )


def read_peer_links(nvml: Nvml, handles: Mapping[int, Any]) -> Iterator[PeerLink]:
    """Yield each pair of GPUs in ``handles`` (by index) once, the lower index first, without GPUs lost meanwhile."""
    for first, second in combinations(sorted(handles), 2):
        try:
            yield _peer_link(nvml, first, handles[first], second, handles[second])
        except DeviceLost:
            continue


def _peer_link(nvml: Nvml, first: int, a: Any, second: int, b: Any) -> PeerLink:
    def status(capability: int) -> str | None:
        code = nvml.ask("nvmlDeviceGetP2PStatus", a, b, capability, field="links")
        return None if code is None else PEER_STATUS.get(code, f"status-{code}")

    level = nvml.ask("nvmlDeviceGetTopologyCommonAncestor", a, b, field="links.path")
    path = PATHS.get(level) if level is not None else None
    if status(PEER_NVLINK) == "ok":
        path = "nvlink"
    return PeerLink(first, second, path, status(PEER_READ), status(PEER_WRITE))
