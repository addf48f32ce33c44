"""HOST009: the container lacks a device file that the job needs."""

from __future__ import annotations

import re
from collections.abc import Iterator

from doctor.analysis.interface_choice import what_forces_sockets
from doctor.analysis.visible_devices import on_processor
from doctor.api import (
    EventGroup,
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
)
from doctor.facts import (
    DriverFacts,
    Event,
    GpuFacts,
    HostFacts,
    MissingReason,
    NcclFacts,
    RdmaDevice,
    RdmaFacts,
    SoftwareFacts,
    TorchBuild,
)
from doctor.knowledge.nvidia import NVML_UNKNOWN_ERROR
from doctor.testing import Fails, JobBuilder, Passes, healthy

_FIXES = {
    "infiniband": "Start the container with `docker run --device /dev/infiniband`.",
    "/dev/kfd": "Start the container with `docker run --device /dev/kfd --device /dev/dri --group-add video`.",
    "/dev/dri": "Start the container with `docker run --device /dev/kfd --device /dev/dri --group-add video`.",
}
_WSL = "5.15.167.4-microsoft-standard-WSL2"


def _container(*missing: str, hosts: int = 2, rdma: int = 2) -> JobBuilder:
    """Containers without the device files that start with ``missing`` on the last host."""
    last = (f"node{hosts - 1}",)
    sketch = healthy(hosts=hosts, rdma=rdma).alter(HostFacts, container="docker")
    return sketch.alter(
        DriverFacts,
        hosts=last,
        device_files=lambda old: tuple(file for file in old if not missing or not file.startswith(missing)),
    )


def _without_verbs(layer: str = "InfiniBand", hosts: int = 2) -> JobBuilder:
    return _container("/dev/infiniband", hosts=hosts).alter(
        RdmaFacts,
        hosts=(f"node{hosts - 1}",),
        devices=lambda old: tuple(
            RdmaDevice(
                device.name,
                tuple(type(port)(port.number, port.state, link_layer=layer, gids=port.gids) for port in device.ports),
                has_uverbs=False,
            )
            for device in old
        ),
    )


def _rocm(*files: str) -> JobBuilder:
    """Containers with torch for ROCm, on hosts with AMD GPUs, of which they have ``files``."""
    return (
        healthy(hosts=2, gpus=0)
        .alter(HostFacts, container="docker")
        .alter(SoftwareFacts, torch=TorchBuild("2.5.1+rocm6.2", hip="6.2"))
        .put(DriverFacts(amd_gpus=1, device_files=files))
    )


_SHUT = 'NVML fails with "Unknown Error": the container has lost access to its GPUs'
_INJECT = (
    "Restart the container with its GPUs injected by CDI, so that `systemctl daemon-reload` does not remove them again."
)


def _from_logs(job: Job) -> Iterator[Finding]:
    for group in event_groups(job, "device_file.absent"):
        files = tuple(f"/dev/{value}" for name in ("file", "file2", "file3") for value in group.values(name))
        # A host without RDMA or without a GPU may lack them on purpose.
        is_rdma = bool(files) and all("infiniband" in file for file in files)
        yield finding_from_logs(
            group,
            f"{files[0]} {_lack(group)}" if files else _claim(group.first),
            evidence={"files": files} if files else None,
            fix=_fix_of_log(group.first, files),
            severity=Severity.WARNING if is_rdma or all(event.value("environment") for event in group.events) else None,
            confidence=0.85 if any(event.value("environment") is None for event in group.events) else 0.5,
            explains=("GPU019", "GPU021"),
        )


def _lack(group: EventGroup) -> str:
    if all(re.search("No such file|does not exist|not found", event.text) for event in group.events):
        return "is missing"
    if all(re.search("[Pp]ermi", event.text) for event in group.events):
        return "is not accessible: no permission"
    return "is missing or inaccessible"


_UNKNOWN_DEVICE = re.compile(r"device error: (?P<device>[\w:.-]{1,80}): unknown device")


def _claim(event: Event) -> str:
    if "NVML: Unknown Error" in event.text:
        return _SHUT
    if event.value("environment"):
        return "CUDA initialization failed with an unknown error"
    if event.value("capability"):
        return "Docker cannot start containers with GPUs"
    if "nvidia-container-cli" in event.text:
        unknown = _UNKNOWN_DEVICE.search(event.text)
        return (
            f"The NVIDIA container runtime failed: unknown device (GPU {unknown['device']})"
            if unknown
            else "The NVIDIA container runtime failed to set up the GPUs of a container"
        )
    return "The container has no access to its GPUs"


def _fix_of_log(event: Event, files: tuple[str, ...]) -> str:
    if files:
        return _fix(files[0])
    if "NVML: Unknown Error" in event.text:
        return _INJECT
    if event.value("environment"):
        return "Check the driver and the device files on the host of the rank:\nnvidia-smi\nls -l /dev/nvidia*"
    if "nvidia-container-cli" in event.text:
        return "Check on the container's host that the driver works and that the requested GPUs exist:\nnvidia-smi -L"
    if event.value("capability"):
        # https://docs.nvidia.com/datacenter/cloud-native/container-toolkit/latest/install-guide.html
        return (
            "Install the NVIDIA Container Toolkit, and register it with Docker:\n"
            "sudo nvidia-ctk runtime configure --runtime=docker\nsudo systemctl restart docker"
        )
    return "Restart the container with `docker run --gpus all`, or request GPUs from the Kubernetes device plugin."


def _fix(files: str) -> str:
    fix = next((fix for word, fix in _FIXES.items() if word in files), "")
    if fix:
        return fix
    if "nvidia-caps" in files:
        # https://docs.nvidia.com/datacenter/cloud-native/container-toolkit/latest/docker-specialized.html
        return (
            "Start the container with `docker run --gpus all`, or request MIG slices from the Kubernetes device plugin."
        )
    # nvidia-modprobe.c: -c creates the file with this minor number (255: nvidiactl), with -u that of nvidia-uvm.
    options = " ".join(f"-c {minor}" for minor in re.findall(r"nvidia(\d+)", files.replace("nvidiactl", "nvidia255")))
    options = options or "-u -c 0"
    return (
        f"Run `sudo nvidia-modprobe {options}` on the container's host, then start the container with `docker run "
        "--gpus all` or request its GPUs from the Kubernetes device plugin."
    )


@check(
    id="HOST009",
    severity=Severity.ERROR,
    scope=Scope.HOST,
    when="PM",
    needs=(HostFacts, DriverFacts),
    from_logs=_from_logs,
    impacts={
        r"infiniband|uverbs": "NCCL finds no RDMA device and silently uses TCP sockets, which are many times slower.",
        r"kfd|renderD": "ROCm does not start, so the job fails or trains on the CPU.",
        r"nvidia-caps": "CUDA finds no device, and the rank fails at its first use of the GPU.",
        r"uvm": 'CUDA fails to start ("CUDA unknown error") although nvidia-smi works.',
        r"dev/nvidia\d": (
            'The rank that uses this GPU fails with "invalid device ordinal" or "no CUDA-capable device".'
        ),
        r"lost access to its GPUs": "No process that is started in this container can use a GPU.",
        r"cannot start containers|container runtime failed": "The container does not start, and neither do its ranks.",
        r"no access to its GPUs|CUDA initialization failed": (
            "The job fails at its first use of CUDA, or trains on the CPU."
        ),
    },
    cases=lambda: (
        Passes("a container with every file", _container()),
        Passes("no container", healthy(hosts=2, rdma=2)),
        Passes("RDMA devices are of no use on one host", _without_verbs(hosts=1)),
        Passes("RDMA is switched off", _without_verbs().environ(NCCL_IB_DISABLE="1")),
        Passes("the ranks use the CPU", _container("/dev/nvidia-uvm").environ(CUDA_VISIBLE_DEVICES="")),
        Passes(
            "a container under WSL, whose GPUs use /dev/dxg",
            _container("/dev/nvidia").alter(HostFacts, kernel=_WSL),
        ),
        Passes(
            "the driver does not answer",
            _container("/dev/nvidia-uvm").drop(GpuFacts, MissingReason.TIMEOUT, "reading gpus took longer than 10 s"),
        ),
        Fails(
            "the device cgroup no longer admits the GPUs",
            _container().drop(GpuFacts, MissingReason.HIDDEN, "NVML does not start: Unknown Error (NVML code 999)"),
            ranks=tuple(range(4)),
        ),
        Fails("nvidia-uvm is missing", _container("/dev/nvidia-uvm"), ranks=(2, 3)),
        Fails("the file of one GPU is missing", _container("/dev/nvidia1"), ranks=(2, 3)),
        Fails("InfiniBand without its verbs files", _without_verbs(), ranks=(2, 3)),
        Fails(
            "cards that can do RoCE without their verbs files",
            _without_verbs("Ethernet"),
            ranks=(2, 3),
            severity=Severity.WARNING,
        ),
        Fails("RoCE that the settings ask for", _without_verbs("Ethernet").environ(NCCL_IB_HCA="mlx5"), ranks=(2, 3)),
        Passes("AMD GPUs with their files", _rocm("/dev/kfd", "/dev/dri/renderD128")),
        Fails("AMD GPUs that were not passed", _rocm(), ranks=tuple(range(4))),
        Fails("AMD GPUs without their render nodes", _rocm("/dev/kfd"), ranks=tuple(range(4))),
        Fails("MIG without its capability files", _container().gpu(0, hosts=("node1",), mig=True), ranks=(2, 3)),
    ),
)
def container_device_absent(job: Job) -> Iterator[Verdict]:
    """Ask whether the container has the device files of its GPUs and network cards.

    Why it hurts: without nvidia-uvm, CUDA fails to start ("CUDA unknown error") although nvidia-smi works. Without
    /dev/infiniband, NCCL finds no RDMA device and silently uses TCP, which is many times slower.
    Fix: Start the container with `docker run --gpus all --device /dev/infiniband --ulimit memlock=-1`, or request the
    resources of the GPU and RDMA device plugins in Kubernetes.
    """
    contained = [local for local in job.by_host() if _is_contained(local)]
    if not contained:
        yield Skip("not in a container of a Linux host")
        return
    missing: dict[tuple[str, str, Severity], list[int]] = {}
    for local in contained:
        lack = local.hosts[0].missing(GpuFacts)
        if lack and NVML_UNKNOWN_ERROR in lack.reason:
            yield _shut(local, lack.reason)
        elif lack and lack.lack is not MissingReason.ABSENT:
            yield Unknown(f"the GPUs of the container are unknown: {lack.reason}", local.ranks, lack.unhide)
        for files, words, severity in (*_missing(job, local), *_missing_of_amd(local)):
            missing.setdefault((files, words, severity), []).extend(local.ranks)
    for (files, words, severity), ranks in missing.items():
        yield Finding(
            f"{files} missing in the container ({job.place_of(ranks)}): {words}",
            ranks=tuple(ranks),
            severity=severity,
            evidence={"missing": files.rpartition(" ")[0]},
            fix=_fix(files),
        )


def _shut(local: LocalRanks, reason: str) -> Finding:
    """The device cgroup of a running container was replaced by one without its GPUs, whose files are still there
    (NVIDIA Container Toolkit, troubleshooting: "Containers losing access to GPUs")."""
    return Finding(
        _SHUT.replace("the container", f"the container ({local.name})"),
        ranks=local.ranks,
        evidence={"nvml": reason},
        fix=_INJECT,
        explains=("GPU019", "GPU021"),
    )


def _is_contained(local: LocalRanks) -> bool:
    host = local.find(HostFacts)
    # The Windows driver provides GPUs through /dev/dxg, without the device files of Linux.
    return host is not None and host.container is not None and "microsoft" not in (host.kernel or "").lower()


def _missing(job: Job, local: LocalRanks) -> Iterator[tuple[str, str, Severity]]:
    drivers, gpus = local.find(DriverFacts), local.find(GpuFacts)
    if drivers is None or gpus is None or not gpus.gpus or all(map(on_processor, local.members)):
        return
    files = set(drivers.device_files)
    if "/dev/nvidia-uvm" not in files:
        yield "/dev/nvidia-uvm is", "CUDA cannot start", Severity.ERROR
    absent = [f"/dev/nvidia{gpu.minor}" for gpu in gpus.gpus if gpu.minor is not None]
    if absent := [file for file in absent if file not in files]:
        yield f"{', '.join(absent)} {'is' if len(absent) == 1 else 'are'}", "CUDA cannot open the GPU", Severity.ERROR
    if any(gpu.mig for gpu in gpus.gpus) and not any(file.startswith("/dev/nvidia-caps/") for file in files):
        yield "/dev/nvidia-caps is", "CUDA cannot open a MIG slice", Severity.ERROR
    if job.is_multi_host and (rdma := local.find(RdmaFacts)) is not None:
        yield from _missing_verbs(local, rdma, files)


def _missing_of_amd(local: LocalRanks) -> Iterator[tuple[str, str, Severity]]:
    """What ROCm opens (ROCR-Runtime, libhsakmt/src/openclose.c), if torch is built for it."""
    drivers = local.find(DriverFacts)
    builds = [rank.find(SoftwareFacts) for rank in local.members]
    if drivers is None or not drivers.amd_gpus or not any(one and one.torch and one.torch.hip for one in builds):
        return
    if all(map(on_processor, local.members)):
        return
    if "/dev/kfd" not in drivers.device_files:
        yield "/dev/kfd is", "ROCm cannot start", Severity.ERROR
    elif not any(file.startswith("/dev/dri/renderD") for file in drivers.device_files):
        yield "/dev/dri/renderD* are", "ROCm finds no GPU", Severity.ERROR


def _missing_verbs(local: LocalRanks, rdma: RdmaFacts, files: set[str]) -> Iterator[tuple[str, str, Severity]]:
    """Reports only if no active device has its file: a container with its own RDMA devices still sees the other devices
    of the machine in /sys."""
    active = [device for device in rdma.devices if any(port.state == "ACTIVE" for port in device.ports)]
    hidden = not any(device.has_uverbs is not False for device in active)
    if not active or not hidden or any(file.startswith("/dev/infiniband/uverbs") for file in files):
        return
    wishes = [rank.find(NcclFacts) for rank in local.members]
    if all(nccl is not None and what_forces_sockets(nccl) for nccl in wishes):
        return
    names = ", ".join(device.name for device in active[:4]) + (" …" if len(active) > 4 else "")
    wanted = any(nccl is not None and nccl.get("NCCL_IB_HCA") for nccl in wishes)
    layers = {port.link_layer for device in active for port in device.ports}
    severity = Severity.ERROR if wanted or "InfiniBand" in layers else Severity.WARNING
    yield "/dev/infiniband/uverbs* are", f"NCCL cannot use {names}", severity
