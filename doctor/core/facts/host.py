"""The host: names, CPUs, memory, storage, kernel."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from doctor.core.facts.section import Level, Section, harmless


class NameLookup(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """What a name resolves to here, in the resolver's order. ``role``: ``hostname`` or ``fqdn``."""

    name: str
    role: str = "hostname"
    addresses: tuple[str, ...] = ()
    error: str | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        """Remove characters with a meaning to a shell from the name."""
        msgspec.structs.force_setattr(self, "name", harmless(self.name).replace("/", "_"))


class ReverseLookup(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """The reverse lookup of one of the host's own addresses."""

    address: str
    name: str | None = None
    error: str | None = None
    seconds: float | None = None


class Filesystem(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Sizes of a mounted file system, in bytes."""

    path: str
    total: int
    free: int
    kind: str | None = None


class HostFacts(Section, frozen=True, kw_only=True):
    """This host, or this container if it has its own host name. Sizes in bytes, times in seconds.

    ``cpu_quota``: the CPUs that the cgroup grants (1.5 means one and a half), ``None`` without a quota.
    ``memory_limit``: the cgroup's, ``None`` without one. ``container``: docker, podman, kubernetes, apptainer, enroot,
    lxc or ``unknown``; ``None`` outside. ``iommu_groups`` is 0 where no IOMMU is active. ``port_range``: the kernel's
    ephemeral ports, both ends included. ``nccl_shm_files`` and ``nccl_shm_bytes``: left in /dev/shm by earlier jobs.
    """

    key: ClassVar[str] = "host"
    level: ClassVar[Level] = "host"

    hostname: str = ""
    fqdn: str | None = None
    machine_id: str | None = None
    boot_id: str | None = None
    kernel: str | None = None
    architecture: str | None = None
    distribution: str | None = None
    container: str | None = None
    hypervisor: str | None = None
    image: str | None = None
    names: tuple[NameLookup, ...] = ()
    reverse: tuple[ReverseLookup, ...] = ()
    cpu_count: int | None = None
    cpu_quota: float | None = None
    cpu_periods: int | None = None
    cpu_throttled_periods: int | None = None
    cpu_governor: str | None = None
    cpu_driver: str | None = None
    ram_total: int | None = None
    ram_available: int | None = None
    memory_limit: int | None = None
    memory_used: int | None = None
    shm: Filesystem | None = None
    nccl_shm_files: int | None = None
    nccl_shm_bytes: int | None = None
    pids_limit: int | None = None
    pids_used: int | None = None
    port_range: tuple[int, int] | None = None
    unprivileged_port_start: int | None = None
    iommu_groups: int | None = None
    iommu_setting: str | None = None
    pci_access_control: bool | None = None
    clock_synchronised: bool | None = None
    clock_error: float | None = None


class Directory(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A directory that the job will write to. ``role``: ``flight-recorder``, ``nccl-debug``, ``checkpoint``, ``cache``
    or ``temporary``; ``source``: the variable or setting that names it. ``free``: bytes available to this user;
    ``noexec``: no library can be loaded from it."""

    path: str
    role: str
    source: str = ""
    exists: bool | None = None
    writable: bool | None = None
    total: int | None = None
    free: int | None = None
    free_inodes: int | None = None
    filesystem: str | None = None
    shared: bool | None = None
    noexec: bool | None = None
    error: str | None = None


class BuildLock(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A lock file in an extension, Triton or model cache. ``held``: some process has it open or locked, ``None`` if
    unknown. ``age`` in seconds. ``blocking``: other processes wait as long as it exists."""

    path: str
    kind: str
    age: float
    held: bool | None = None
    blocking: bool = False


class StorageFacts(Section, frozen=True, kw_only=True):
    """Directories of the job, and locks in its caches."""

    key: ClassVar[str] = "storage"
    level: ClassVar[Level] = "host"

    directories: tuple[Directory, ...] = ()
    locks: tuple[BuildLock, ...] = ()


class KernelEvent(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A relevant line of the kernel log. ``kind``: ``xid``, ``sxid``, ``oom``, ``pcie``; ``code`` is the Xid; ``time``
    seconds since boot; ``device`` a PCI bus id; ``pid`` the process named in the line."""

    kind: str
    time: float | None = None
    code: int | None = None
    device: str | None = None
    pid: int | None = None
    text: str = ""


class KernelLogFacts(Section, frozen=True, kw_only=True):
    """The kernel log, if it is readable. ``job_started``: start of this job's first process, in seconds since boot."""

    key: ClassVar[str] = "kernel-log"
    level: ClassVar[Level] = "host"

    events: tuple[KernelEvent, ...] = ()
    job_started: float | None = None
