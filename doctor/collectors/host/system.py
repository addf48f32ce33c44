"""The host: names, processors, memory, kernel."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Iterable
from ipaddress import ip_address

from doctor.collectors.base import (
    Machine,
    collector,
    parse_int,
    read_int,
    read_pairs,
    read_rows,
    read_text,
)
from doctor.collectors.host.cgroup import read_cgroup
from doctor.collectors.host.container import read_container, read_hypervisor, read_image
from doctor.collectors.host.host_identity import read_boot_id, read_machine_id
from doctor.collectors.host.kernel_clock import read_clock
from doctor.collectors.host.pci import count_iommu_groups, read_access_control, read_iommu_setting
from doctor.collectors.host.shared_memory import read_shared_memory
from doctor.collectors.network.dns import look_up
from doctor.collectors.network.interface_kinds import kind_of
from doctor.collectors.network.interfaces import seen_interfaces
from doctor.core.facts import HostFacts

REVERSED = 4
"""Own addresses with a reverse lookup: enough to detect a silent name server without load on it."""


@collector(HostFacts, deadline=8.0)
def collect_host(machine: Machine) -> HostFacts:
    """Collect the host as seen by this process; name lookups take at most three seconds."""
    return read_host(machine, socket.gethostname(), own_addresses())


def own_addresses() -> list[str]:
    """Return addresses that a peer could look up, at most :data:`REVERSED`, IPv4 first."""
    try:
        seen = seen_interfaces()
    except OSError:
        return []
    kinds = {name: kind_of(None, name, one.driver) for name, one in seen.items()}
    outward = [one for name, one in seen.items() if kinds[name] not in ("container-bridge", "virtual-bridge")]
    found = [ip_address(address.address) for one in outward for address in one.addresses]
    useful = [address for address in found if not (address.is_loopback or address.is_link_local)]
    return [str(address) for address in sorted(useful, key=lambda address: address.version)][:REVERSED]


def read_host(machine: Machine, hostname: str, addresses: Iterable[str]) -> HostFacts:
    """Return the facts about a host called ``hostname`` with those ``addresses``."""
    own = look_up(hostname, addresses)
    groups = read_cgroup(machine)
    rows = read_rows(machine.proc / "meminfo")
    kibibytes = {row[0].rstrip(":"): parse_int(row[1]) for row in rows if len(row) == 3 and row[2] == "kB"}
    memory = {name: value * 1024 for name, value in kibibytes.items() if value is not None}
    shared = read_shared_memory(machine)
    clock = read_clock()
    access_control, access_hidden = read_access_control(machine)
    proc = machine.proc
    words = (read_text(proc / "sys" / "net" / "ipv4" / "ip_local_port_range") or "").split()
    ports = [number for word in words if (number := parse_int(word)) is not None]
    return HostFacts(
        hostname=hostname,
        fqdn=own.fqdn,
        machine_id=read_machine_id(machine),
        boot_id=read_boot_id(machine),
        kernel=read_text(proc / "sys" / "kernel" / "osrelease") or None,
        architecture=platform.machine() or None,
        distribution=read_pairs(machine.etc / "os-release", "=").get("PRETTY_NAME", "").strip("\"' ") or None,
        container=read_container(machine),
        hypervisor=read_hypervisor(machine),
        image=read_image(machine),
        names=own.names,
        reverse=own.reverse,
        cpu_count=_cpu_count(machine),
        cpu_quota=groups.cpu_quota,
        cpu_periods=groups.cpu_periods,
        cpu_throttled_periods=groups.cpu_throttled,
        cpu_governor=_frequency(machine, "scaling_governor"),
        cpu_driver=_frequency(machine, "scaling_driver"),
        ram_total=memory.get("MemTotal"),
        ram_available=memory.get("MemAvailable"),
        memory_limit=groups.memory_limit,
        memory_used=groups.memory_used,
        shm=shared.filesystem,
        nccl_shm_files=shared.left_files,
        nccl_shm_bytes=shared.left_bytes,
        pids_limit=groups.pids_limit,
        pids_used=groups.pids_used,
        port_range=(ports[0], ports[1]) if len(ports) == 2 else None,
        unprivileged_port_start=read_int(proc / "sys" / "net" / "ipv4" / "ip_unprivileged_port_start"),
        iommu_groups=count_iommu_groups(machine),
        iommu_setting=read_iommu_setting(machine),
        pci_access_control=access_control,
        clock_synchronised=clock.synchronised,
        clock_error=clock.error,
        hidden=(*own.hidden, *groups.hidden, *shared.hidden, *access_hidden, *clock.hidden),
    )


def _cpu_count(machine: Machine) -> int | None:
    """Return the number of online processors, from ranges such as ``0-63,128-191``."""
    text = read_text(machine.sys / "devices" / "system" / "cpu" / "online") or ""
    count = 0
    for part in text.split(","):
        first, dash, last = part.partition("-")
        low, high = parse_int(first), parse_int(last if dash else first)
        if low is None or high is None or high < low:
            return os.cpu_count()
        count += high - low + 1
    return count


def _frequency(machine: Machine, name: str) -> str | None:
    """Return the value of all processors, separated by commas if they differ."""
    folders = (machine.sys / "devices" / "system" / "cpu").glob("cpu[0-9]*/cpufreq")
    return ",".join(sorted({text for folder in folders if (text := read_text(folder / name))})) or None
