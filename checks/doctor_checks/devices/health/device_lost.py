"""GPU019: a GPU no longer responds."""

from __future__ import annotations

import re
from collections.abc import Iterator

from doctor.analysis.visible_devices import GpuSharers, bus_key, is_data_centre, shares_by_host
from doctor.api import (
    EventGroup,
    Finding,
    Job,
    LocalRanks,
    Scope,
    Severity,
    Unknown,
    Verdict,
    check,
    event_groups,
    finding_from_logs,
    is_logged,
)
from doctor.facts import (
    DriverFacts,
    Gpu,
    GpuFacts,
    HostFacts,
    KernelEvent,
    KernelLogFacts,
    LaunchFacts,
    MissingReason,
    SlurmFacts,
)
from doctor.testing import Fails, Passes, healthy, logged
from doctor_checks.devices._xid_events import logged_xids, xids_of

TAKEN_OUT = ("gpu-reset", "node-reboot", "drain-and-reset", "bus-reset", "system-reboot")
"""nvml.h nvmlDeviceGpuRecoveryAction_t: actions that the driver requires before it accepts new work on the GPU."""

BATCH_JOBS = ("SLURM_JOB_ID", "LSB_JOBID", "PBS_JOBID", "FLUX_JOB_ID")
"""Variables that batch systems set in a job: SLURM, LSF, PBS and Flux."""


def _told(job: Job) -> Iterator[Finding]:
    for group in event_groups(job, "gpu.lost"):
        summary, fix = _claim(group)
        host = group.hosts[0] if len(group.hosts) == 1 else "the host"
        yield finding_from_logs(group, summary, fix=fix.format(host=host), confidence=0.95, explains=_CONSEQUENCES)
    if is_logged(job, "gpu.lost"):
        return
    for reported in logged_xids(job, {"lost"}):
        yield reported.finding(_CONSEQUENCES)


_CONSEQUENCES = ("GPU002", "GPU010", "GPU013", "GPU021", "GPU022")
_REBOOT = "Drain {host}, reboot it, and check the GPU and its power supply if the fault recurs."
_RESET = "End all processes on the GPU, then reset it with `sudo nvidia-smi --gpu-reset` or reboot {host}."


def _claim(group: EventGroup) -> tuple[str, str]:
    text, pci = group.first.text, (group.value("pci") or "").strip(":.")
    if "equires" in text or "RESET_REQUIRED" in text:
        return "The driver requires a reset of a GPU", _RESET
    if "nitAdapter" in text or "init_adapter" in text:
        at = re.search(r"GPU ([0-9a-fA-F]{4,8}:[0-9a-fA-F:.]+): R", text)
        return f"The driver cannot initialize {f'the GPU at {at[1]}' if at else 'a GPU'}", _REBOOT
    if "GSP Timeout" in text or "Heartbeat timed out" in text:
        index = re.search(r"NVRM: GPU(\d+)\b", text)
        which = f"GPU {index[1]}" if index else "a GPU"
        return f"The system processor (GSP) of {which} did not respond in time", _RESET
    found = re.search(r"(?:Xid \(PCI:|GPU (?:at )?(?:PCI:)?)([0-9a-fA-F]{4,8}:[0-9a-fA-F:.]+)", text)
    pci = pci or (found[1].strip(":.") if found else "")
    return f"{f'The GPU at {pci}' if pci else 'A GPU'} was lost: the driver cannot reach it", _REBOOT


@check(
    id="GPU019",
    severity=Severity.ERROR,
    scope=Scope.HOST,
    when="PM",
    needs=(GpuFacts,),
    from_logs=_told,
    impacts={
        r"on the PCI bus, but": "The missing GPU cannot be used, and the indices of the other GPUs may have changed.",
        r"cannot read a GPU|needs recovery|requires a reset|did not respond": (
            "Programs on this GPU hang or fail until it is reset or the host is rebooted."
        ),
        r"cannot initialize": "No program can use this GPU, and the indices of the other GPUs may have changed.",
        r"fallen off|was lost|lost$|driver cannot reach": (
            "Programs on this GPU fail or hang, and the other ranks wait for them until their timeout. The host "
            "needs a reboot."
        ),
    },
    cases=lambda: (
        Passes("all GPUs answer", healthy(hosts=2, per_host=4)),
        Passes(
            "a container that is given one GPU of eight",
            healthy(per_host=1)
            .alter(HostFacts, container="docker")
            .alter(DriverFacts, pci_gpus=tuple(f"0000:{bus:02x}:00.0" for bus in range(0x10, 0x18))),
        ),
        Passes(
            "a SLURM job that is given one GPU of two",
            healthy(per_host=1)
            .put(SlurmFacts(job_id="1"))
            .alter(DriverFacts, pci_gpus=("0000:10:00.0", "0000:11:00.0")),
        ),
        Passes(
            "a PBS job that is given one GPU of two",
            healthy(per_host=1)
            .launched(PBS_JOBID="17.head")
            .alter(DriverFacts, pci_gpus=("0000:10:00.0", "0000:11:00.0")),
        ),
        Passes(
            "a desktop card lent to a virtual machine",
            healthy(per_host=1)
            .gpu(0, name="NVIDIA GeForce RTX 3090")
            .alter(DriverFacts, pci_gpus=("0000:10:00.0", "0000:11:00.0")),
            silent=False,
        ),
        Fails(
            "fell off the bus",
            healthy(hosts=2, per_host=4).gpu(2, hosts=("node1",), lost=True, error="GPU is lost"),
            ranks=(6,),
        ),
        Fails(
            "on the PCI bus, and not in the driver's list",
            healthy(per_host=2).alter(DriverFacts, pci_gpus=lambda old: (*old, "00000000:99:00.0")),
            ranks=(0, 1),
        ),
        Fails("the driver wants a reset first", healthy(per_host=2).gpu(1, recovery_action="gpu-reset"), ranks=(1,)),
        Fails(
            "a GPU that no rank uses, lost since the job began",
            healthy(per_host=2, gpus=3)
            .environ(CUDA_VISIBLE_DEVICES="0,1")
            .alter(KernelLogFacts, events=(KernelEvent("xid", 863100.0, 79, "0000:12:00"),)),
            ranks=(0, 1),
            severity=Severity.WARNING,
        ),
        Fails(
            "Xid 79 since the job began",
            healthy(per_host=2).alter(KernelLogFacts, events=(KernelEvent("xid", 863100.0, 79, "0000:11:00"),)),
            ranks=(1,),
        ),
        Fails(
            "logged by the driver",
            logged(
                "[86400.5] NVRM: Xid (PCI:0000:b3:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the "
                "bus.",
                "[86400.6] NVRM: Xid (PCI:0000:b3:00): 154, GPU recovery action changed from 0x0 (None) to 0x2 (Node "
                "Reboot Required)",
            ),
        ),
    ),
)
def device_lost(job: Job) -> Iterator[Verdict]:
    """Ask whether every GPU of the host responds.

    Why it hurts: programs on the GPU hang or fail with "unknown error" or "no CUDA-capable device", and often no new
    CUDA program starts on the host.
    Fix: Drain the host, reboot it, and check the GPU and its power supply if the fault recurs.
    """
    for local, found in shares_by_host(job):
        told = set()
        for share in found:
            words = _words(share.gpu)
            if words:
                told.add(bus_key(share.gpu.bus_id))
                gpu = share.gpu
                yield Finding(
                    f"GPU {gpu.index} of {local.name} {words}",
                    ranks=share.ranks or local.ranks,
                    evidence={
                        "gpu_index": gpu.index,
                        "gpu": gpu.uuid,
                        "pci_bus_id": gpu.bus_id,
                        "error": gpu.error,
                        "recovery_action": gpu.recovery_action,
                    },
                    fix=_fix(gpu, local.name),
                    severity=None if share.ranks else Severity.WARNING,
                    explains=("GPU002", "GPU005", "GPU010", "GPU013"),
                )
            elif share.gpu.error and share.ranks:
                yield Unknown(f"GPU {share.gpu.index} of {local.name} cannot be read: {share.gpu.error}", share.ranks)
        yield from _absent_from_driver(local, found)
        for reported in xids_of(local, {"lost"}):
            if bus_key(reported.device) not in told:
                severity = Severity.ERROR if reported.recent and reported.ranks else Severity.WARNING
                yield reported.finding(local, severity)


def _words(gpu: Gpu) -> str | None:
    if gpu.lost:
        return f"does not respond: {gpu.error or 'lost'}"
    failing = gpu.ecc_volatile_uncorrected or gpu.remap_pending or gpu.remap_failed or gpu.retired_pages_pending
    if gpu.recovery_action in TAKEN_OUT and not failing:
        return f"needs recovery: the driver requests the action {gpu.recovery_action}"
    return None


def _fix(gpu: Gpu, host: str) -> str:
    if not gpu.lost and gpu.recovery_action in ("gpu-reset", "drain-and-reset"):
        reset = f"sudo nvidia-smi --gpu-reset -i {gpu.index}"
        return f"End all processes on GPU {gpu.index} of {host}, then reset it:\n{reset}"
    return f"Drain {host}, reboot it, and check the GPU and its power supply if the fault recurs."


def _absent_from_driver(local: LocalRanks, found: tuple[GpuSharers, ...]) -> Iterator[Verdict]:
    """GPUs on the PCI bus that NVML does not list. Containers and the device cgroups of batch systems hide GPUs from
    NVML but not from sysfs, so only a bare host is checked; a desktop card may be passed to a virtual machine."""
    drivers, gpus = local.find(DriverFacts), local.find(GpuFacts)
    if drivers is None or gpus is None or len(drivers.pci_gpus) <= len(gpus.gpus) or _may_be_restricted(local):
        return
    known = {bus_key(share.gpu.bus_id) for share in found if share.gpu.bus_id}
    absent = [bus for bus in drivers.pci_gpus if bus_key(bus) not in known]
    if absent and known:
        serious = all(is_data_centre(share.gpu) for share in found)
        yield Finding(
            f"{local.name} has {len(drivers.pci_gpus)} GPUs on the PCI bus, but the driver reports {len(gpus.gpus)}",
            ranks=local.ranks,
            evidence={"absent": absent, "pci_gpus": len(drivers.pci_gpus), "driver_gpus": len(gpus.gpus)},
            effect="" if serious else "None unless the job needs this GPU, which the driver does not provide.",
            fix=f"Drain {local.name}, reboot it, and check the missing GPU if the driver still does not report it."
            if serious
            else f"Check on {local.name} which driver the GPU uses:\nlspci -k -s {absent[0]}",
            severity=Severity.ERROR if serious else Severity.INFO,
        )


def _may_be_restricted(local: LocalRanks) -> bool:
    host, launch = local.find(HostFacts), local.members[0].find(LaunchFacts) if local.members else None
    slurm = local.hosts[0].missing(SlurmFacts)
    in_slurm = slurm is None or slurm.lack is not MissingReason.ABSENT
    in_batch = launch is not None and any(launch.get(name) for name in BATCH_JOBS)
    return host is None or host.container is not None or in_slurm or in_batch
