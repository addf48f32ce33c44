"""NCCL009: the NCCL version is too old for the GPU or the fabric, or has a known bug there."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.analysis.logs.event_timeline import events_of_kinds
from doctor.analysis.visible_devices import on_processor
from doctor.api import EventGroup, Finding, Job, Severity, Skip, Unknown, Verdict, check, finding_from_logs, merge
from doctor.core.text import HERE
from doctor.facts import (
    Fabric,
    Gpu,
    GpuFacts,
    NcclFacts,
    NcclLibrary,
    RdmaDevice,
    RdmaFacts,
    RdmaPort,
    SoftwareFacts,
    TorchBuild,
)
from doctor.knowledge.releases import minimum_nccl, within
from doctor.testing import Fails, Passes, healthy


def _nccl(version: str) -> tuple[NcclLibrary, ...]:
    return (NcclLibrary("/opt/env/nvidia/nccl/lib/libnccl.so.2", version, "wheel nvidia-nccl-cu12", chosen=True),)


def _blackwell(gpus: tuple[Gpu, ...]) -> tuple[Gpu, ...]:
    return tuple(Gpu(gpu.index, gpu.uuid, "NVIDIA B200", gpu.bus_id, compute_capability="10.0") for gpu in gpus)


def _many_hosts_fabric(gpus: tuple[Gpu, ...]) -> tuple[Gpu, ...]:
    fabric = Fabric("completed", 0, clique=1, cluster="6c7d8f0a-0000-0000-0000-1234567890ab")
    return tuple(
        Gpu(gpu.index, gpu.uuid, gpu.name, gpu.bus_id, compute_capability="9.0", fabric=fabric) for gpu in gpus
    )


_ROCE = RdmaFacts(devices=(RdmaDevice("mlx5_0", (RdmaPort(link_layer="Ethernet", rate=200.0),)),))


def _from_logs(job: Job) -> Iterator[Finding]:
    lacking = tuple(event for event in events_of_kinds(job, *_FAILURES) if any(word in event.text for word in _NO_CODE))
    if lacking:
        yield finding_from_logs(
            EventGroup(lacking[0].kind, lacking),
            "NCCL has no code for the architecture of the GPU",
            effect="The rank fails, and the other ranks wait for it until their timeout.",
            fix="Install a PyTorch build whose NCCL supports the GPU.",
            severity=Severity.ERROR,
            confidence=0.75,
            explains=("VER003",),
        )


_FAILURES = ("nccl.cuda_fail", "nccl.kernel_missing")
_NO_CODE = ("no kernel image is available", "named symbol not found", "invalid device function")
"""CUDA's messages about a library without code for the device."""


@check(
    id="NCCL009",
    severity=Severity.WARNING,
    when="PM",
    needs=(SoftwareFacts,),
    from_logs=_from_logs,
    impacts={
        r"does not support": "Collectives may fail with `no kernel image is available`, hang, or be slow on this GPU.",
        r"two GPUs": "A collective may hang until the timeout.",
        r"may hang": "The job may hang in NCCL when it starts, until the timeout.",
        r"does not use NVLink between hosts": (
            "Hosts in the same NVLink domain communicate over the network, which is several times slower."
        ),
        r"GID index": "RDMA connections to hosts in another subnet fail unless NCCL_IB_GID_INDEX is set.",
        r"requires? NCCL": "The call that needs the feature fails on every rank.",
    },
    cases=lambda: (
        Passes("new enough", healthy(2, 8, rdma=8)),
        Passes("no NCCL", healthy(gpus=0)),
        Passes(
            "an old release on an old GPU",
            healthy()
            .gpu(0, compute_capability="8.0")
            .gpu(1, compute_capability="8.0")
            .alter(SoftwareFacts, nccl_libraries=_nccl("2.18.3")),
        ),
        Passes(
            "RoCE with the index set",
            healthy(2, 1)
            .put(_ROCE)
            .environ(NCCL_IB_GID_INDEX="3")
            .alter(SoftwareFacts, nccl_libraries=_nccl("2.20.5")),
        ),
        Passes("one host with RoCE", healthy(1, 2).put(_ROCE).alter(SoftwareFacts, nccl_libraries=_nccl("2.20.5"))),
        Fails(
            "Blackwell with NCCL 2.21",
            healthy(2, 2)
            .alter(SoftwareFacts, nccl_libraries=_nccl("2.21.5"))
            .alter(GpuFacts, hosts=("node1",), gpus=_blackwell),
            ranks=(2, 3),
        ),
        Fails(
            "the first release for Hopper hangs",
            healthy(1, 2).alter(SoftwareFacts, nccl_libraries=_nccl("2.15.1")),
            ranks=(0, 1),
        ),
        Fails(
            "NVLink across hosts before 2.21",
            healthy(2, 2).alter(GpuFacts, gpus=_many_hosts_fabric).alter(SoftwareFacts, nccl_libraries=_nccl("2.19.3")),
            ranks=(0, 1, 2, 3),
        ),
        Fails(
            "RoCE before the GID was found by itself",
            healthy(2, 1).put(_ROCE).alter(SoftwareFacts, nccl_libraries=_nccl("2.20.5")),
            ranks=(0, 1),
        ),
        Fails(
            "torch 2.7.0 with NCCL 2.26.2",
            healthy().alter(
                SoftwareFacts,
                torch=TorchBuild("2.7.0+cu126", cuda="12.6", nccl="2.26.2"),
                nccl_libraries=_nccl("2.26.2"),
            ),
            ranks=(0, 1),
        ),
    ),
)
def version_too_old(job: Job) -> Iterator[Verdict]:
    """Ask whether the NCCL version supports the GPU and the fabric and has no known bug there.

    Why it hurts: a version that does not support the GPU may fail with `no kernel image`, hang, or be slow. One that
    does not support the fabric does not use the fast path.
    Fix: Install a PyTorch build with a newer NCCL.
    """
    if not any(software.nccl_libraries for software, _ in job.facts(SoftwareFacts)):
        yield Skip("no NCCL library was found")
        return
    yield from merge(_findings(job), job.place_of)
    for software, identical in job.each(SoftwareFacts):
        if software.nccl_libraries and software.nccl is None:
            yield Unknown("the version of the loaded NCCL could not be read", identical.ranks)


def _findings(job: Job) -> Iterator[Finding]:
    is_multi_host = job.is_multi_host
    for software, identical in job.each(SoftwareFacts, also=(GpuFacts, RdmaFacts, NcclFacts)):
        version = software.nccl
        if version is None or on_processor(identical):
            continue
        gpus, nccl = identical.find(GpuFacts), identical.find(NcclFacts)
        faults = [*_for_torch(software, version), *(_for_gpus(gpus, version) if gpus else ())]
        if is_multi_host:
            faults += _for_roce(identical.find(RdmaFacts), nccl) if within(version, before="2.21.5") else ()
        for needed, why in faults:
            yield Finding(
                f"NCCL {version} {why}; use {needed} or later",
                ranks=identical.ranks,
                fix=_fix(needed, software),
                evidence={
                    "library": next((one.path for one in software.nccl_libraries if one.chosen), None),
                    "torch": software.torch.version if software.torch else None,
                },
            )


def _fix(needed: str, software: SoftwareFacts) -> str:
    if needed.startswith("PyTorch "):
        return f"pip install 'torch>={needed.removeprefix('PyTorch ')}'"
    cuda = (software.torch.cuda or "" if software.torch else "").partition(".")[0] or "12"
    wheel = f"pip install 'nvidia-nccl-cu{cuda}>={needed}'"
    return f"Install a PyTorch build with NCCL {needed} or later on {HERE}, or run `{wheel}`."


def _for_gpus(gpus: GpuFacts, version: str) -> Iterator[tuple[str, str]]:
    known = {gpu.compute_capability: gpu.name for gpu in gpus.gpus if gpu.compute_capability}
    for capability, name in sorted(known.items()):
        needed = minimum_nccl(capability)
        if needed and within(version, before=needed):
            yield needed, f"does not support {name} (compute capability {capability})"
    # NCCL 2.15.5 works around a hang of Ring with LL128 on H100.
    if within(version, first="2.15.1", before="2.15.5") and any(capability.startswith("9.") for capability in known):
        yield "2.15.5", "may hang on Hopper with two GPUs"
    if within(version, before="2.21.5") and any(map(_spans_hosts, gpus.gpus)):
        yield "2.21.5", "does not use NVLink between hosts"


def _spans_hosts(gpu: Gpu) -> bool:
    cluster = gpu.fabric.cluster if gpu.fabric else None
    return bool(cluster and cluster.strip("0-"))


def _for_roce(rdma: RdmaFacts | None, nccl: NcclFacts | None) -> Iterator[tuple[str, str]]:
    """Before 2.21 the GID index is 0 unless NCCL_IB_GID_INDEX is set (NCCL src/transport/net_ib.cc)."""
    ports = [port for device in rdma.devices for port in device.ports] if rdma else []
    active = any(port.state == "ACTIVE" and port.link_layer == "Ethernet" for port in ports)
    names = ("NCCL_IB_GID_INDEX", "NCCL_IB_DISABLE", "NCCL_NET")
    settled = nccl is not None and any(nccl.get(name) for name in names)
    if active and not settled:
        yield "2.21.5", "uses GID index 0 (RoCE v1), which is not routable"


def _for_torch(software: SoftwareFacts, version: str) -> Iterator[tuple[str, str]]:
    """With NCCL 2.26.2, torch 2.7.0 may hang: it uses NCCL's non-blocking mode if device_id is passed to
    init_process_group. torch 2.7.1 turned that mode off again."""
    is_affected = software.torch is not None and within(software.torch.version, first="2.7.0", before="2.7.1")
    if is_affected and within(version, first="2.26.2", before="2.26.3"):
        yield "PyTorch 2.7.1", "may hang with PyTorch 2.7.0 if device_id is set"
