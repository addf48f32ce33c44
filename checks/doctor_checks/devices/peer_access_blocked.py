"""GPU018: GPUs can't reach each other although the machine is built for it."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.api import (
    Finding,
    Gpu,
    GpuFacts,
    HostFacts,
    Job,
    LocalRanks,
    MigDevice,
    NcclFacts,
    PeerLink,
    Scope,
    Severity,
    Share,
    Sick,
    Skip,
    Unknown,
    Verdict,
    Well,
    check,
    healthy,
    is_data_centre,
    shares_by_host,
)

NEAR = ("nvlink", "internal", "single-switch", "multiple-switches")
"""Paths over which NCCL uses peer access by default (NCCL src/graph/paths.cc, PATH_PXB)."""


Users = dict[int, tuple[Gpu, tuple[int, ...]]]
"""GPUs by index, with the ranks that use them."""


def _pair(path: str, status: str) -> tuple[PeerLink, ...]:
    return (PeerLink(0, 1, path, status, status),)


@check(
    id="GPU018",
    severity=Severity.ERROR,
    scope=Scope.HOST,
    when="PM",
    needs=(GpuFacts,),
    cases=lambda: (
        Well("peer access over NVLink", healthy(hosts=2, per_host=4)),
        Well(
            "desktop cards, for which the driver has none",
            healthy(per_host=2)
            .gpu(0, name="NVIDIA GeForce RTX 4090", nvlinks=())
            .gpu(1, name="NVIDIA GeForce RTX 4090", nvlinks=())
            .alter(GpuFacts, links=_pair("host-bridge", "chipset-not-supported")),
        ),
        Well(
            "cards on two sockets",
            healthy(per_host=2).alter(GpuFacts, links=_pair("system", "topology-not-supported")),
        ),
        Well(
            "a GPU in slices beside whole ones",
            healthy(per_host=1, gpus=2)
            .gpu(0, mig=True, mig_devices=(MigDevice("MIG-a", 0, 20 << 30),))
            .alter(GpuFacts, links=_pair("nvlink", "not-supported")),
        ),
        Well("one rank, one GPU", healthy(per_host=1, gpus=1)),
        Well(
            "access control in a virtual machine, which needs it",
            healthy(per_host=2)
            .alter(GpuFacts, links=_pair("single-switch", "ok"))
            .alter(HostFacts, pci_access_control=True, hypervisor="kvm"),
        ),
        Sick(
            "NVLink without peer access on one host",
            healthy(hosts=2, per_host=2).alter(GpuFacts, hosts=("node1",), links=_pair("nvlink", "not-supported")),
            ranks=(2, 3),
        ),
        Sick(
            "switched off by a driver setting",
            healthy(per_host=2).alter(GpuFacts, links=_pair("system", "disabled-by-driver-setting")),
            ranks=(0, 1),
        ),
        Sick(
            "access control redirects traffic below a PCIe switch",
            healthy(per_host=2)
            .alter(GpuFacts, links=_pair("single-switch", "ok"))
            .alter(HostFacts, pci_access_control=True, iommu_groups=80),
            ranks=(0, 1),
            severity=Severity.WARNING,
        ),
    ),
)
def peer_access_blocked(job: Job) -> Iterator[Verdict]:
    """Ask whether GPUs that the topology connects may reach each other's memory.

    Why it hurts: NCCL stops with "P2P is disabled between NVLINK connected GPUs", or goes through host memory; with
    PCIe access control on bare metal, peer traffic can hang or arrive corrupt.
    Fix: for NVLink, see that the fabric manager runs and reset the GPUs; for PCIe, switch off ACS in the BIOS or by
    `setpci`, and the IOMMU or set `iommu=pt`; until then NCCL_P2P_DISABLE=1 lets the job run, slower.
    """
    judged = [(local, users) for local, found in shares_by_host(job) if len(users := _users(found)) > 1]
    if not judged:
        reason = "no host with ranks on several GPUs"
        yield Unknown("other ranks not gathered") if job.ungathered else Skip(reason)
    for local, users in judged:
        yield from _judge(local, users)


def _users(found: tuple[Share, ...]) -> Users:
    """GPUs that ranks use, by index; under MIG none has peer access, which another check judges."""
    used = (share for share in found if share.ranks and not share.gpu.lost and not share.gpu.mig)
    return {share.gpu.index: (share.gpu, share.ranks) for share in used}


def _judge(local: LocalRanks, users: Users) -> Iterator[Verdict]:
    facts = local.find(GpuFacts)
    links = [link for link in facts.links if link.first in users and link.second in users] if facts else []
    blocked = [link for link in links if _is_blocked(link, users[link.first][0])]
    if blocked:
        yield _finding(local, blocked, users, _words(blocked), _severity(local))
    redirected = [link for link in links if link.path in NEAR[1:] and link not in blocked]
    host = local.find(HostFacts)
    if redirected and host and host.pci_access_control and host.hypervisor is None:
        words = "PCIe access control (ACS) redirects traffic between GPUs"
        yield _finding(local, redirected, users, words, Severity.WARNING)


def _is_blocked(link: PeerLink, gpu: Gpu) -> bool:
    bad = [status for status in (link.read, link.write) if status not in (None, "ok")]
    if not bad or not (link.path == "nvlink" or is_data_centre(gpu)):
        return False
    return link.path in NEAR or "disabled-by-driver-setting" in bad


def _severity(local: LocalRanks) -> Severity:
    """A job that does without peer access runs, slower."""
    settings = [nccl.get("NCCL_P2P_DISABLE") for rank in local.members if (nccl := rank.find(NcclFacts))]
    return Severity.WARNING if settings and all(value == "1" for value in settings) else Severity.ERROR


def _words(blocked: list[PeerLink]) -> str:
    first = blocked[0]
    status = next(status for status in (first.read, first.write) if status not in (None, "ok"))
    return f"no peer access between GPU {first.first} and {first.second} over {first.path}: {status}"


def _finding(
    local: LocalRanks,
    links: list[PeerLink],
    users: Users,
    words: str,
    severity: Severity,
) -> Finding:
    ends = {index for link in links for index in (link.first, link.second)}
    host = local.find(HostFacts)
    more = f" ({len(links)} pairs)" if len(links) > 1 else ""
    return Finding(
        f"{local.name}: {words}{more}",
        ranks=tuple(sorted({rank for index in ends for rank in users[index][1]})),
        evidence={
            "pairs": [[link.first, link.second, link.path, link.read, link.write] for link in links[:64]],
            "iommu_groups": host.iommu_groups if host else None,
            "iommu_setting": host.iommu_setting if host else None,
            "pci_access_control": host.pci_access_control if host else None,
        },
        severity=severity,
    )
