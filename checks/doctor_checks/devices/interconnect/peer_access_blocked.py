"""GPU018: GPUs cannot access each other although the machine supports it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from doctor.analysis.visible_devices import GpuSharers, is_data_centre, shares_by_host
from doctor.api import (
    Finding,
    Job,
    LocalRanks,
    Scope,
    Severity,
    Skip,
    Unknown,
    Verdict,
    check,
    event_groups,
    finding_from_logs,
    is_logged,
)
from doctor.facts import Gpu, GpuFacts, HostFacts, MigDevice, NcclFacts, PeerLink
from doctor.testing import Fails, Passes, healthy, logged

FIT = (None, "ok")
"""Access states that NVML does not report, or reports as working."""
NEAR = ("nvlink", "internal", "single-switch", "multiple-switches")
"""Paths over which NCCL uses peer access by default (NCCL src/graph/paths.cc, PATH_PXB)."""


Users = dict[int, tuple[Gpu, tuple[int, ...]]]


_STARTED = (
    "node7:41:77 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/IPC",
    "node7:42:78 [1] NCCL INFO Channel 00/0 : 1[1] -> 0[0] via P2P/IPC",
    "node7:41:77 [0] NCCL INFO comm 0x55 rank 0 nranks 2 cudaDev 0 nvmlDev 0 busId 7000 commId 0x9 - Init COMPLETE",
    "node7:42:78 [1] NCCL INFO comm 0x56 rank 1 nranks 2 cudaDev 1 nvmlDev 1 busId b000 commId 0x9 - Init COMPLETE",
)
_WATCHDOG = (
    "[rank{rank}]:[E ProcessGroupNCCL.cpp:616] [Rank {rank}] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum={sequence}, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600012 "
    "milliseconds before timing out."
)


def _pair(path: str, status: str) -> tuple[PeerLink, ...]:
    return (PeerLink(0, 1, path, status, status),)


def _from_logs(job: Job) -> Iterator[Finding]:
    for group in event_groups(job, "gpu.io_page_fault"):
        by_driver = group.value("driver") is not None
        of_a_job = is_logged(job, "nccl.", "torch.")
        at = next(iter(_ADDRESS.findall(group.first.text)), "")
        yield finding_from_logs(
            group,
            f"The IOMMU blocked a memory access by {'the GPU' if by_driver else 'the device'}"
            f"{f' at {at}' if at else ''}",
            effect="" if by_driver or of_a_job else "None unless this device is a GPU or a network adapter of the job.",
            fix="" if by_driver or not at else f"Find out which device this is:\nlspci -s {at}",
            severity=None if by_driver else Severity.WARNING if of_a_job else Severity.INFO,
            symptoms=by_driver or of_a_job,
            confidence=0.8 if by_driver else 0.5,
        )


_ADDRESS = re.compile(r"(?:nvidia |device[= ]\[?)((?:[0-9a-f]{4}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f])")


def _from_the_start(job: Job) -> Iterator[Finding]:
    """GPUs of one host use peer access, all ranks started the first collective, and none completed it: peer access
    never worked."""
    sent = {event.value("transport") for group in event_groups(job, "nccl.conn") for event in group.events}
    sizes = {int(value) for group in event_groups(job, "nccl.init") for value in group.values("nranks")}
    for group in event_groups(job, "torch.nccl.watchdog_timeout"):
        first = {event.rank for event in group.events if event.value("seq") == "1"}
        everybody = sizes == {len(first)} and first == set(range(len(first)))
        if sent == {"P2P"} and everybody and first == set(group.ranks):
            yield finding_from_logs(
                group,
                "The first collective never completed on any rank, probably because GPU peer access fails",
                confidence=0.6,
            )


@check(
    id="GPU018",
    severity=Severity.ERROR,
    scope=Scope.HOST,
    when="PM",
    needs=(GpuFacts,),
    from_logs=(_from_the_start, _from_logs),
    impacts={
        r"not supported\)": (
            'NCCL fails with "P2P is disabled between NVLINK connected GPUs", or copies through host memory, '
            "which is many times slower."
        ),
        r"corrupted": (
            "Tensors that are copied between GPUs are wrong without an error, and so are the results of training."
        ),
        r"at most eight": (
            "Peer access to further GPUs fails, and the program that requests it ends or copies through host memory."
        ),
        r"RTX 4000": "The program stops before training starts.",
        # ncclTopoCheckP2p returns ncclUnhandledCudaError (NCCL src/graph/paths.cc).
        r"refuses peer access between GPUs \d": "NCCL initialization fails, and the job ends.",
        r"requested peer": "The program that requests peer access fails, and the other ranks wait until their timeout.",
        r"cannot map": "NCCL initialization fails, and the job ends.",
        r"access control \(ACS\)": (
            "Traffic between GPUs takes the longer route through the CPU, which is slower. On bare metal, it can hang "
            "or be corrupted."
        ),
        r"never completed": "Training cannot start, and the job ends at the timeout of the collective.",
        r"IOMMU blocked": "The blocked transfer is lost: the collective that needed it hangs, or data is corrupted.",
    },
    cases=lambda: (
        Passes("peer access over NVLink", healthy(hosts=2, per_host=4)),
        Passes(
            "desktop cards, for which the driver has none",
            healthy(per_host=2)
            .gpu(0, name="NVIDIA GeForce RTX 4090", nvlinks=())
            .gpu(1, name="NVIDIA GeForce RTX 4090", nvlinks=())
            .alter(GpuFacts, links=_pair("host-bridge", "chipset-not-supported")),
        ),
        Passes(
            "cards on two sockets",
            healthy(per_host=2).alter(GpuFacts, links=_pair("system", "topology-not-supported")),
        ),
        Passes(
            "a GPU in slices beside whole ones",
            healthy(per_host=1, gpus=2)
            .gpu(0, mig=True, mig_devices=(MigDevice("MIG-a", 0, 20 << 30),))
            .alter(GpuFacts, links=_pair("nvlink", "not-supported")),
        ),
        Passes("one rank, one GPU", healthy(per_host=1, gpus=1)),
        Passes(
            "access control in a virtual machine, which needs it",
            healthy(per_host=2)
            .alter(GpuFacts, links=_pair("single-switch", "ok"))
            .alter(HostFacts, pci_access_control=True, hypervisor="kvm"),
        ),
        Fails(
            "NVLink without peer access on one host",
            healthy(hosts=2, per_host=2).alter(GpuFacts, hosts=("node1",), links=_pair("nvlink", "not-supported")),
            ranks=(2, 3),
        ),
        Fails(
            "switched off by a driver setting",
            healthy(per_host=2).alter(GpuFacts, links=_pair("system", "disabled-by-driver-setting")),
            ranks=(0, 1),
        ),
        Fails(
            "access control redirects traffic below a PCIe switch",
            healthy(per_host=2)
            .alter(GpuFacts, links=_pair("single-switch", "ok"))
            .alter(HostFacts, pci_access_control=True, iommu_groups=80),
            ranks=(0, 1),
            severity=Severity.WARNING,
        ),
        Passes(
            "NCCL goes over shared memory, as on desktop cards",
            logged(
                "node7:41:77 [0] NCCL INFO P2P is disabled between connected GPUs 1 and 0. You can repress this "
                "message with NCCL_IGNORE_DISABLED_P2P=1.",
                "node7:41:77 [0] NCCL INFO Channel 00 : 0[0] -> 1[1] via SHM/direct/direct",
                'node7:41:77 [0] NCCL WARN Missing "iommu=pt" from kernel command line which can lead to system '
                "instablity or hang!",
            ),
        ),
        Passes(
            "log of a rank missing from the first collective",
            logged(*_STARTED, _WATCHDOG.format(rank=0, sequence=1)),
        ),
        Passes(
            "log of a later collective that does not end",
            logged(*_STARTED, *(_WATCHDOG.format(rank=rank, sequence=42) for rank in (0, 1))),
        ),
        Fails(
            "log of a first collective of one host that never ends",
            logged(*_STARTED, *(_WATCHDOG.format(rank=rank, sequence=1) for rank in (0, 1))),
            ranks=(0, 1),
        ),
        Passes(
            "some device's access is stopped, by a kernel log",
            logged("AMD-Vi: Event logged [IO_PAGE_FAULT device=06:00.0 domain=0x001e address=0xd1a00000 flags=0x0020]"),
            silent=False,
        ),
        Fails(
            "the IOMMU stops the GPU, by the kernel log",
            logged(
                "kernel: nvidia 0000:41:00.0: AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x0021 address=0x10fc00000 "
                "flags=0x0030]"
            ),
        ),
    ),
)
def peer_access_blocked(job: Job) -> Iterator[Verdict]:
    """Ask whether GPUs that the topology connects can access each other's memory.

    Why it hurts: NCCL copies between these GPUs through host memory, which is many times slower, or fails at
    startup.
    Fix: Set `NCCL_P2P_DISABLE=1` until ACS is disabled in the BIOS and `iommu=pt` is set on the kernel command line.
    """
    judged = [(local, users) for local, found in shares_by_host(job) if len(users := _users(found)) > 1]
    if not judged:
        reason = "no host with ranks on several GPUs"
        yield Unknown("other ranks not gathered") if job.ungathered else Skip(reason)
    for local, users in judged:
        facts = local.find(GpuFacts)
        links = [link for link in facts.links if link.first in users and link.second in users] if facts else []
        unfit = [link for link in links if link.read not in FIT or link.write not in FIT]
        blocked = [link for link in unfit if _is_blocked(link, users[link.first][0])]
        if blocked:
            yield _finding(local, blocked, users, _words(blocked), _severity(local))
        host = local.find(HostFacts)
        if not (host and host.pci_access_control and host.hypervisor is None):
            continue
        redirected = [link for link in links if link.path in NEAR[1:] and link not in blocked]
        if redirected:
            words = "PCIe access control (ACS) on {host} redirects traffic between GPUs"
            yield _finding(local, redirected, users, words, Severity.WARNING)


def _users(found: tuple[GpuSharers, ...]) -> Users:
    """GPUs that ranks use, by index. GPUs with MIG have no peer access; another check reports them."""
    used = (share for share in found if share.ranks and not share.gpu.lost and not share.gpu.mig)
    return {share.gpu.index: (share.gpu, share.ranks) for share in used}


def _is_blocked(link: PeerLink, gpu: Gpu) -> bool:
    if not (link.path == "nvlink" or is_data_centre(gpu)):
        return False
    return link.path in NEAR or "disabled-by-driver-setting" in (link.read, link.write)


def _severity(local: LocalRanks) -> Severity:
    """A job that disables peer access runs, but more slowly."""
    settings = [nccl.get("NCCL_P2P_DISABLE") for rank in local.members if (nccl := rank.find(NcclFacts))]
    return Severity.WARNING if settings and all(value == "1" for value in settings) else Severity.ERROR


def _words(blocked: list[PeerLink]) -> str:
    first = blocked[0]
    status = next(status for status in (first.read, first.write) if status not in (None, "ok"))
    path = _PATHS.get(first.path or "", first.path or "an unknown path")
    return (
        f"GPUs {first.first} and {first.second} of {{host}} have no peer access over {path} "
        f"({_STATES.get(status or '', status)})"
    )


_STATES = {"not-supported": "not supported", "disabled-by-driver-setting": "disabled by a driver option"}
_PATHS = {
    "nvlink": "NVLink",
    "internal": "their board",
    "single-switch": "a PCIe switch",
    "multiple-switches": "PCIe switches",
    "host-bridge": "a PCIe host bridge",
    "system": "path SYS",
}

_LEVELS = {
    "single-switch": "PIX",
    "multiple-switches": "PXB",
    "host-bridge": "PHB",
    "system": "SYS",
    "nvlink": "NVLink",
}
"""The paths as ``nvidia-smi topo -m`` and NCCL_P2P_LEVEL name them."""


def _effect(links: list[PeerLink]) -> str:
    """By default, NCCL uses peer access up to PXB (ncclTopoCheckP2p in NCCL's src/graph/paths.cc)."""
    level = _LEVELS.get(links[0].path or "", "")
    if level not in ("PHB", "SYS") or any(link.path != links[0].path for link in links):
        return ""
    return (
        f"NCCL uses peer access on this path only with `NCCL_P2P_LEVEL={level}`, or with two GPUs on AMD CPUs; "
        "otherwise it copies through host memory anyway. Other programs that request peer access may fail."
    )


def _fix(link: PeerLink, host: str) -> str:
    if "disabled-by-driver-setting" in (link.read, link.write):
        return (
            f"Find and remove the nvidia driver option that disables peer access on {host}, then reboot:\n"
            "grep -rn NVreg /etc/modprobe.d"
        )
    if link.path == "nvlink" and (link.read not in FIT or link.write not in FIT):
        return (
            f"Check that the fabric manager and the NVLinks of {host} work, then reset the GPUs or reboot the host:\n"
            f"systemctl status nvidia-fabricmanager\nnvidia-smi nvlink --status -i {link.first}"
        )
    return ""


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
        f"{words.format(host=local.name)}{more}",
        ranks=tuple(sorted({rank for index in ends for rank in users[index][1]})),
        evidence={
            "pairs": [
                {"gpus": [link.first, link.second], "path": _LEVELS.get(link.path or "", link.path)}
                | {"read": _STATES.get(link.read or "", link.read), "write": _STATES.get(link.write or "", link.write)}
                for link in links[:64]
            ],
            "iommu_groups": host.iommu_groups or None if host else None,
            "iommu_setting": host.iommu_setting if host else None,
            "pci_access_control": host.pci_access_control if host else None,
        },
        effect=_effect(links),
        fix=_fix(links[0], local.name),
        severity=severity,
    )
