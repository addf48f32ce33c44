"""NET023: network cards cannot access GPU memory."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.analysis.interface_choice import active_rdma_ports
from doctor.api import Finding, Job, Scope, Severity, Unknown, Verdict, check, merge
from doctor.core.text import HERE
from doctor.facts import GpuFacts, HostFacts, NcclFacts, RdmaFacts
from doctor.knowledge.interface_syntax import parse_nccl_integer
from doctor.testing import Fails, Passes, healthy

_SWITCH = "NCCL_DMABUF_ENABLE"
_FIX = (
    "Load the module now and at each start of the host:\n"
    "sudo modprobe nvidia-peermem\n"
    "echo nvidia-peermem | sudo tee /etc/modules-load.d/nvidia-peermem.conf"
)


@check(
    id="NET023",
    severity=Severity.INFO,
    scope=Scope.HOST,
    needs=(RdmaFacts, GpuFacts),
    cases=lambda: (
        Passes("nvidia_peermem is loaded", healthy(hosts=2, per_host=2, rdma=2)),
        Passes("dma-buf is enough", healthy(2, 2, rdma=2).alter(RdmaFacts, peer_memory=())),
        Passes("no GPU", healthy(2, 2, gpus=0, rdma=2).alter(RdmaFacts, peer_memory=(), dma_buf=False)),
        Passes("no RDMA", healthy(hosts=2, per_host=2)),
        Fails(
            "an old kernel without the module on one host",
            healthy(2, 2, rdma=2)
            .alter(RdmaFacts, hosts=("node1",), peer_memory=(), dma_buf=False)
            .alter(HostFacts, hosts=("node1",), kernel="5.4.0-216-generic"),
            ranks=(2, 3),
        ),
        Fails(
            "dma-buf is switched off and the module is missing",
            healthy(2, 1, rdma=2).alter(RdmaFacts, peer_memory=()).environ(NCCL_DMABUF_ENABLE="0"),
            ranks=(0, 1),
        ),
    ),
)
def gpu_direct_absent(job: Job) -> Iterator[Verdict]:
    """Ask whether the network cards can access GPU memory (GPUDirect RDMA).

    Why it hurts: each message is copied through host memory, which reduces the bandwidth between hosts; no error is
    raised. The NCCL log shows `GPU Direct RDMA Disabled for HCA` and `via NET/IB/0` without `/GDRDMA`.
    Fix: Load the module nvidia-peermem, or use a kernel of 5.12 or later with NVIDIA's open kernel modules for dma-buf.
    """
    found = []
    for rdma, gpus, identical in job.each(RdmaFacts, GpuFacts, also=(NcclFacts, HostFacts)):
        # EFA accesses GPU memory through its own driver.
        is_fit = rdma.peer_memory or all(device.driver == "efa" for device in rdma.devices)
        if is_fit or not gpus.gpus or not active_rdma_ports(rdma):
            continue
        nccl = identical.find(NcclFacts)
        switched_off = nccl is not None and parse_nccl_integer(nccl.get("NCCL_DMABUF_ENABLE"), 1) == 0
        if rdma.dma_buf and not switched_off:
            continue
        note = rdma.why_hidden("peer_memory")
        if note is not None or (rdma.dma_buf is None and not switched_off):
            reason = note.reason if note else "it is unknown whether the kernel can export dma-buf"
            yield Unknown(reason, identical.ranks, note.unhide if note else "uname -r")
            continue
        why = "NCCL_DMABUF_ENABLE=0 is set" if switched_off else "the kernel is older than 5.12"
        found.append(
            Finding(
                f"No GPUDirect RDMA on {HERE}: nvidia_peermem is not loaded, and {why}",
                ranks=identical.ranks,
                evidence={
                    "kernel": host.kernel if (host := identical.find(HostFacts)) is not None else None,
                    "dma_buf": rdma.dma_buf,
                },
                fix=f"unset {_SWITCH}" if switched_off and rdma.dma_buf else _FIX,
            )
        )
    yield from merge(found, job.place_of)
