"""NCCL006: a leftover setting turns off a fast path between GPUs."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.api import Finding, Job, Rank, Severity, Verdict, check, merge, source_of
from doctor.core.text import HERE
from doctor.facts import Fabric, Gpu, GpuFacts, HostFacts, LaunchFacts, MissingReason, NcclFacts, PeerLink, Setting
from doctor.knowledge.interface_syntax import parse_nccl_integer
from doctor.testing import Fails, Passes, healthy

_PCIE = ("internal", "single-switch", "multiple-switches")
"""Paths over PCIe that NCCL uses for peer-to-peer by default (up to PXB, NCCL src/graph/paths.cc)."""


_SHARED = Fabric("completed", 0, 1, "8e5ca1ab-1e00-4c11-9e0b-000000000001")


def _without_peers(links: tuple[PeerLink, ...]) -> tuple[PeerLink, ...]:
    return tuple(PeerLink(one.first, one.second, "host-bridge", "not supported", "not supported") for one in links)


def _without_nvlink(gpus: tuple[Gpu, ...]) -> tuple[Gpu, ...]:
    return tuple(Gpu(gpu.index, gpu.uuid, gpu.name, gpu.bus_id, compute_capability="8.9", nvlinks=()) for gpu in gpus)


@check(
    id="NCCL006",
    severity=Severity.WARNING,
    needs=(NcclFacts,),
    impacts={
        r"NVLink SHARP": (
            "All-reduces run on the GPUs instead of in the NVSwitch, which costs part of their bandwidth."
        ),
        r"between hosts \(MNNVL\)": (
            "Hosts that share an NVLink domain communicate over the network, which is several times slower."
        ),
        r"not used: ": "None on this host, whose GPUs communicate over NVLink.",
        r"peer access \(GPUs of": (
            "GPUs that have peer access to each other communicate through host memory instead, at a fraction of the "
            "speed. Only a line logged at NCCL_DEBUG=INFO shows it."
        ),
        r"off shared memory": (
            "GPUs without peer access communicate over the network even within a host, at a fraction of the speed. "
            "Only a line logged at NCCL_DEBUG=INFO shows it."
        ),
        r"off (?:NVLink|PCIe|peer)": (
            "The GPUs of a host communicate through host memory, at a fraction of the speed. Only a line logged "
            "at NCCL_DEBUG=INFO shows it."
        ),
    },
    cases=lambda: (
        Passes("nothing set", healthy(1, 8)),
        Passes("switches that turn nothing off", healthy(1, 8).environ(NCCL_P2P_DISABLE="0", NCCL_NVLS_ENABLE="2")),
        Passes("text is read as 0", healthy(1, 8).environ(NCCL_P2P_DISABLE="true")),
        Passes(
            "cards without peer-to-peer",
            healthy(1, 2).environ(NCCL_P2P_DISABLE="1").alter(GpuFacts, links=_without_peers, gpus=_without_nvlink),
        ),
        Passes("one GPU", healthy(2, 1).environ(NCCL_P2P_DISABLE="1", NCCL_SHM_DISABLE="1")),
        Passes("one GPU, one process", healthy(1, 1).environ(NCCL_P2P_DISABLE="1", NCCL_NVLS_ENABLE="0")),
        Passes("no GPU, and one process a host", healthy(2, 1, gpus=0).environ(NCCL_P2P_DISABLE="1")),
        Passes("text is read as 0 without a GPU too", healthy(1, 2, gpus=0).environ(NCCL_SHM_DISABLE="true")),
        Passes(
            "NVLS on two GPUs, which NCCL would not use for them",
            healthy(1, 2).environ(NCCL_NVLS_ENABLE="0"),
        ),
        Passes(
            "P2P over PCIe behind access control",
            healthy(1, 2)
            .environ(NCCL_P2P_DISABLE="1")
            .alter(HostFacts, pci_access_control=True)
            .alter(GpuFacts, gpus=_without_nvlink, links=(PeerLink(0, 1, "single-switch", "ok", "ok"),)),
        ),
        Fails(
            "NVLink is there, P2P is off",
            healthy(2, 8).environ(ranks=range(8, 16), NCCL_P2P_DISABLE="1"),
            ranks=tuple(range(8, 16)),
        ),
        Passes("hosts that share no NVLink", healthy(2, 2).environ(NCCL_CUMEM_ENABLE="0")),
        Fails(
            "hosts that share NVLink, without the handles that reach over it",
            healthy(2, 1).gpu(0, fabric=_SHARED).environ(NCCL_CUMEM_ENABLE="0"),
            ranks=(0, 1),
        ),
        Fails("the nearest level alone", healthy(1, 8).environ(NCCL_P2P_LEVEL="LOC"), ranks=tuple(range(8))),
        Fails(
            "P2P over one PCIe switch is off",
            healthy(1, 2)
            .environ(NCCL_P2P_DISABLE="1")
            .alter(GpuFacts, gpus=_without_nvlink, links=(PeerLink(0, 1, "single-switch", "ok", "ok"),)),
            ranks=(0, 1),
        ),
        Fails(
            "SHM is off where cards have nothing else",
            healthy(1, 2).environ(NCCL_SHM_DISABLE="1").alter(GpuFacts, links=_without_peers, gpus=_without_nvlink),
            ranks=(0, 1),
        ),
        Fails(
            "SHM is off where all is NVLink",
            healthy(1, 8).environ(NCCL_SHM_DISABLE="1"),
            ranks=tuple(range(8)),
            severity=Severity.INFO,
        ),
        Fails(
            "NVLS is off on an NVSwitch machine, where rings and trees keep using NVLink",
            healthy(1, 8).environ(NCCL_NVLS_ENABLE="0"),
            ranks=tuple(range(8)),
            severity=Severity.INFO,
        ),
        Fails(
            "the driver does not show how the GPUs are linked",
            healthy(1, 2).environ(NCCL_P2P_DISABLE="1").alter(GpuFacts, gpus=_without_nvlink, links=()),
            ranks=(0, 1),
        ),
        Fails("on a login node, no GPU to look at", healthy(1, 1, gpus=0).environ(NCCL_P2P_DISABLE="1"), ranks=(0,)),
        Fails(
            "shared memory is off, no GPU is seen",
            healthy(2, 2, gpus=0).environ(NCCL_SHM_DISABLE="1"),
            ranks=(0, 1, 2, 3),
        ),
        Fails(
            "the driver can't be asked",
            healthy(1, 2)
            .drop(GpuFacts, MissingReason.FAILED, "the driver does not answer")
            .environ(NCCL_P2P_LEVEL="LOC"),
            ranks=(0, 1),
        ),
        Fails(
            "NVLS is off where no GPU is seen",
            healthy(1, 1, gpus=0).environ(NCCL_NVLS_ENABLE="0"),
            ranks=(0,),
            severity=Severity.INFO,
        ),
    ),
)
def transport_disabled(job: Job) -> Iterator[Verdict]:
    """Ask whether a leftover setting turns off a fast path between the GPUs of this host.

    Why it hurts: the GPUs of a host then communicate through host memory or the network card, at a fraction of the
    speed. Only a line logged at NCCL_DEBUG=INFO shows it.
    Fix: Unset NCCL_P2P_DISABLE, NCCL_P2P_LEVEL, NCCL_SHM_DISABLE and NCCL_NVLS_ENABLE; they are meant for debugging.
    """
    yield from merge(_findings(job), job.place_of)


def _findings(job: Job) -> Iterator[Finding]:
    for nccl, identical in job.each(NcclFacts, also=(GpuFacts, HostFacts)):
        if not nccl.settings:
            continue
        gpus, host = identical.find(GpuFacts), identical.find(HostFacts)
        if gpus is None or not gpus.gpus:
            losses = _lost_elsewhere(nccl)
        elif len(gpus.gpus) > 1:
            losses = _lost(nccl, gpus, guarded=bool(host and host.pci_access_control))
        else:
            losses = iter(())
        for setting, lost, severity in losses:
            if ranks := tuple(rank.number for rank in identical.members if not _is_alone(rank)):
                yield _finding(setting, lost, severity, ranks)
        off = _multi_node_nvlink_off(nccl, gpus) if gpus and job.is_multi_host else None
        if off:
            yield _finding(off, "NVLink between hosts (MNNVL)", None, identical.ranks)


def _multi_node_nvlink_off(nccl: NcclFacts, gpus: GpuFacts) -> Setting | None:
    """NCCL shares memory between hosts by cuMem handles alone (src/mnnvl.cc), in a clique of the fabric."""
    cliques = [gpu.fabric for gpu in gpus.gpus if gpu.fabric and gpu.fabric.state == "completed" and gpu.fabric.cluster]
    if not any(set(fabric.cluster or "") - set("0-") for fabric in cliques):
        return None
    return _switch(nccl, "NCCL_CUMEM_ENABLE", 0) or _switch(nccl, "NCCL_MNNVL_ENABLE", 0)


def _is_alone(rank: Rank) -> bool:
    """Whether the job has one process per host: no data is exchanged within a host."""
    launch = rank.find(LaunchFacts)
    return bool(launch and launch.running_together and launch.local_world_size == 1)


Lost = tuple[Setting, str, "Severity | None"]


def _lost(nccl: NcclFacts, gpus: GpuFacts, *, guarded: bool) -> Iterator[Lost]:
    linked = any(link.active for gpu in gpus.gpus for link in gpu.nvlinks or ())
    by_nvlink = linked or any(link.path == "nvlink" for link in gpus.links)
    by_pcie = not guarded and any(link.path in _PCIE and link.read == "ok" for link in gpus.links)
    peers = "NVLink" if by_nvlink else "PCIe peer-to-peer" if by_pcie else None
    if not gpus.links and not guarded:
        peers = peers or "peer-to-peer access (GPU links unknown)"
    off = _switch(nccl, "NCCL_P2P_DISABLE", 1) or _nearest_level(nccl)
    if off and peers:
        yield off, peers, None
    shm = _switch(nccl, "NCCL_SHM_DISABLE", 1)
    if shm:
        unused = by_nvlink and off is None and all(link.path == "nvlink" for link in gpus.links)
        yield shm, "shared memory", Severity.INFO if unused else None
    nvls = _switch(nccl, "NCCL_NVLS_ENABLE", 0)
    # NVLS needs an NVSwitch, Hopper or later, and more than two GPUs (NCCL src/transport/nvls.cc).
    switched = [gpu for gpu in gpus.gpus if any(link.active and link.remote == "switch" for link in gpu.nvlinks or ())]
    recent = [gpu for gpu in switched if (gpu.compute_capability or "").partition(".")[0] in ("9", "10")]
    # Rings and trees over NVLink remain available, and NVLS uses GPU memory for each communicator: recipes of AWS,
    # Google and NVIDIA (MLPerf training 4.0) turn it off on purpose.
    if nvls and len(recent) > 2:
        yield nvls, "NVLink SHARP (NVLS)", Severity.INFO


def _lost_elsewhere(nccl: NcclFacts) -> Iterator[Lost]:
    """If no GPU is visible (login node, batch script, no driver), the variable still reaches the training host. Most
    hosts do not support NVLS."""
    if off := _switch(nccl, "NCCL_P2P_DISABLE", 1) or _nearest_level(nccl):
        yield off, f"peer access {_UNCHECKED}", None
    if shm := _switch(nccl, "NCCL_SHM_DISABLE", 1):
        yield shm, f"shared memory {_UNCHECKED}", None
    if nvls := _switch(nccl, "NCCL_NVLS_ENABLE", 0):
        yield nvls, f"NVLink SHARP (NVLS), if the GPUs of {HERE} support it", Severity.INFO


_UNCHECKED = f"(GPUs of {HERE} could not be checked)"


def _switch(nccl: NcclFacts, name: str, value: int) -> Setting | None:
    setting = nccl.setting(name)
    return setting if setting and setting.value and parse_nccl_integer(setting.value, -1) == value else None


def _nearest_level(nccl: NcclFacts) -> Setting | None:
    setting = nccl.setting("NCCL_P2P_LEVEL")
    return setting if setting and setting.value in ("LOC", "0") else None


def _finding(setting: Setting, lost: str, severity: Severity | None, ranks: tuple[int, ...]) -> Finding:
    unused = severity is Severity.INFO and setting.name == "NCCL_SHM_DISABLE"
    fix = f"Remove {setting.name} from {setting.source}." if source_of(setting) else f"unset {setting.name}"
    return Finding(
        f"{setting.name}={setting.value} turns off {lost}"
        + (" (not used: all GPUs are connected by NVLink)" if unused else ""),
        ranks=ranks,
        evidence={"from": f"{setting.source}:{setting.line}" if setting.line else setting.source},
        fix=fix,
        severity=severity,
        source=source_of(setting),
    )
