"""RDMA devices and their ports, from /sys/class/infiniband."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from doctor.collectors.base import Machine, NotPresent, NotVisible, collector, listed, parse_int, read_int, read_text
from doctor.collectors.host.pci import driver_name, numa_node, pci_address
from doctor.core.facts import Counter, Gid, HiddenField, RdmaDevice, RdmaFacts, RdmaPort
from doctor.core.text import lazy_compile, natural_key

_COUNTERS = """
link_downed link_error_recovery local_link_integrity_errors excessive_buffer_overrun_errors symbol_error
port_rcv_errors port_rcv_remote_physical_errors port_rcv_switch_relay_errors port_rcv_constraint_errors
port_xmit_discards port_xmit_constraint_errors port_xmit_wait VL15_dropped
out_of_sequence out_of_buffer packet_seq_err duplicate_request implied_nak_seq_err local_ack_timeout_err
rnr_nak_retry_err roce_slow_restart roce_adp_retrans roce_adp_retrans_to rx_icrc_encapsulated
req_cqe_error req_remote_access_errors req_remote_invalid_request req_transport_retries_exceeded
req_rnr_retries_exceeded resp_cqe_error resp_local_length_error resp_remote_access_errors np_cnp_sent
rp_cnp_handled np_ecn_marked_roce_packets
"""
COUNTERS = frozenset(_COUNTERS.split())
"""Counters of errors, retransmission or congestion; see sysfs-class-infiniband of the kernel and the list of mlx5
hardware counters of the vendor. Traffic counters are excluded."""

PEER_MEMORY_MODULES = ("nvidia_peermem", "nv_peer_mem")

_DMA_BUF_KERNEL = (5, 12)
"""Linux 5.12 introduced verbs over dma-buf (drivers/infiniband/core/umem_dmabuf.c)."""

_GID_LIMIT = 1024
_LIBRARY = lazy_compile(rb"(?<![^\0])/[^\0]*/libibverbs\.so(?:\.1)?(?=\0)")
_LIBRARY_FOLDERS = ("/lib", "/usr/lib", "/lib64", "/usr/lib64", "/usr/local/lib")


@collector(RdmaFacts)
def collect_rdma(machine: Machine) -> RdmaFacts:
    """Collect all RDMA devices. :class:`NotPresent` without one; :class:`NotVisible` without sysfs."""
    folder = machine.sys / "class" / "infiniband"
    try:
        names = sorted((entry.name for entry in folder.iterdir()), key=natural_key)
    except FileNotFoundError as error:
        if (machine.sys / "class").is_dir():
            raise NotPresent("no RDMA device") from error
        raise NotVisible(f"{machine.sys} is not mounted here", "mount sysfs in the container") from error
    except OSError as error:
        raise NotVisible(f"{folder}: {error.strerror}") from error
    if not names:
        raise NotPresent("no RDMA device")
    peer_memory, hidden = _peer_memory(machine)
    kernel = re.match(r"(\d{1,4})\.(\d{1,4})", read_text(machine.proc / "sys" / "kernel" / "osrelease") or "")
    return RdmaFacts(
        devices=tuple(_device(machine, folder / name) for name in names),
        peer_memory=peer_memory,
        dma_buf=(int(kernel[1]), int(kernel[2])) >= _DMA_BUF_KERNEL if kernel else None,
        verbs_library=_verbs_library(machine),
        hidden=hidden,
    )


def _in_order(folder: Path) -> list[str]:
    return sorted(listed(folder), key=natural_key)


def _device(machine: Machine, folder: Path) -> RdmaDevice:
    ports = tuple(_port(folder / "ports" / number) for number in _in_order(folder / "ports") if number.isdecimal())
    below = _in_order(folder / "device" / "net")
    named = [gid.interface for port in ports for gid in port.gids if gid.interface]
    # A PCI function can have several RDMA devices; "ibdev" names the one of a character device.
    verbs = machine.sys / "class" / "infiniband_verbs"
    nodes = _in_order(folder / "device" / "infiniband_verbs")
    nodes = [name for name in nodes if read_text(verbs / name / "ibdev") in (None, folder.name)]
    return RdmaDevice(
        name=folder.name,
        ports=ports,
        board=read_text(folder / "board_id") or read_text(folder / "hca_type") or None,
        firmware=read_text(folder / "fw_ver") or None,
        driver=driver_name(folder / "device"),
        pci=pci_address(folder / "device"),
        numa_node=numa_node(folder / "device"),
        interfaces=tuple(dict.fromkeys([*below, *named])),
        has_uverbs=any(os.access(machine.dev / "infiniband" / name, os.R_OK | os.W_OK) for name in nodes),
    )


def _port(folder: Path) -> RdmaPort:
    link_layer = read_text(folder / "link_layer") or None
    rate = re.match(r"(\d{1,5}(?:\.\d{1,3})?) Gb/sec", read_text(folder / "rate") or "")
    lid = re.fullmatch(r"(?:0x)?([0-9a-fA-F]{1,8})", read_text(folder / "lid") or "")
    groups = ("counters", "hw_counters")
    names = [(group, name) for group in groups for name in _in_order(folder / group) if name in COUNTERS]
    counts = [(name, read_int(folder / group / name)) for group, name in names]
    return RdmaPort(
        number=int(folder.name),
        state=_after_colon(read_text(folder / "state")) or "unknown",
        physical_state=_after_colon(read_text(folder / "phys_state")),
        rate=float(rate[1]) if rate else None,
        link_layer=link_layer,
        lid=int(lid[1], 16) if lid else None,
        gids=tuple(_gids(folder, link_layer)),
        counters=tuple(Counter(name, count) for name, count in counts if count is not None),
    )


def _after_colon(text: str | None) -> str | None:
    """Return ``ACTIVE`` of ``4: ACTIVE``."""
    return (text or "").rpartition(":")[2].strip() or None


def _gids(folder: Path, link_layer: str | None) -> Iterator[Gid]:
    """Yield the used entries of the GID table; unused ones are all zero or unreadable."""
    numbers = sorted(index for name in _in_order(folder / "gids") if (index := parse_int(name)) is not None)
    for index in numbers[:_GID_LIMIT]:
        gid = read_text(folder / "gids" / str(index)) or ""
        if gid.strip("0:"):
            kind = read_text(folder / "gid_attrs" / "types" / str(index)) or None
            if kind == "IB/RoCE v1":  # on both link layers (drivers/infiniband/core/cache.c of the kernel)
                kind = "RoCE v1" if link_layer == "Ethernet" else "IB"
            yield Gid(index, gid, kind, read_text(folder / "gid_attrs" / "ndevs" / str(index)) or None)


def _peer_memory(machine: Machine) -> tuple[tuple[str, ...], tuple[HiddenField, ...]]:
    text = read_text(machine.proc / "modules", 4 << 20)
    loaded = {line.split()[0] for line in (text or "").splitlines() if line.strip()}
    found = [name for name in PEER_MEMORY_MODULES if name in loaded or (machine.sys / "module" / name).is_dir()]
    if found or text is not None or (machine.sys / "module").is_dir():
        return tuple(found), ()
    return (), (HiddenField("peer_memory", f"{machine.proc}/modules cannot be read", "lsmod | grep peer"),)


def _verbs_library(machine: Machine) -> bool:
    """Return whether the loader would find libibverbs, from files alone: loading it would run its code.

    NCCL opens ``libibverbs.so`` and then ``libibverbs.so.1`` (src/misc/ibvsymbols.cc).
    """
    root = machine.etc.parent
    folders = [folder for folder in machine.environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    folders += [*_LIBRARY_FOLDERS, *(f"{top}/{os.uname().machine}-linux-gnu" for top in ("/lib", "/usr/lib"))]
    files = [f"{folder}/{name}" for folder in folders for name in ("libibverbs.so", "libibverbs.so.1")]
    with contextlib.suppress(OSError):
        # The cache of the loader is a table of strings that end with a zero byte.
        files += map(os.fsdecode, _LIBRARY.findall((machine.etc / "ld.so.cache").read_bytes()))
    return any((root / path.lstrip("/")).exists() for path in files)
