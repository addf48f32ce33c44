"""GPU014: the NVSwitch fabric is not ready."""

from __future__ import annotations

import re
from collections.abc import Iterator

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
    merge,
    ranks_in_words,
)
from doctor.facts import DriverFacts, Fabric, Gpu, GpuFacts, Service
from doctor.testing import Fails, Passes, healthy, logged

_NUMBERS = re.compile(r"\d+(?:\.\d+)*")


def _from_logs(job: Job) -> Iterator[Finding]:
    for group in event_groups(job, "gpu.multicast_fails"):
        yield finding_from_logs(
            group,
            "NCCL cannot bind multicast memory on the NVSwitches (NVLink SHARP)",
            effect="NCCL continues without NVLink SHARP, so all-reduce is slower." if _went_on(job, group) else "",
            fix=f"Restart the fabric manager{group.on_hosts} while no process uses the GPUs (`sudo systemctl restart "
            "nvidia-fabricmanager`), or set NCCL_NVLS_ENABLE=0.",
            severity=Severity.WARNING if _went_on(job, group) else None,
            confidence=0.9 if group.value("stated") else 0.7,
            explains=("GPU013", "GPU018", "GPU021", "GPU022", "GPU023"),
        )


def _unready(job: Job) -> Iterator[Finding]:
    for group in event_groups(job, "gpu.fabric_unready"):
        texts = " ".join(event.text for event in group.events)
        if re.search(r"do(?:n't|esn't| not|es not) match", texts):
            driver = re.search(r"driver version ([0-9.]*[0-9])", texts)
            own = re.search(r"interface version ([0-9.]*[0-9])", texts)
            summary = (
                f"Fabric manager {own[1]} does not match driver {driver[1]}"
                if own and driver
                else "The version of the fabric manager does not match that of the driver"
            )
            fix = (
                f"Install fabric manager {driver[1]}, which matches the driver, and restart it while no process uses "
                "the GPUs."
                if driver
                else "Install the fabric manager in the version of the driver, which this command prints:\n" + _RELEASE
            )
        elif re.search(r"service not found|not installed|NOT_PRESENT", texts):
            summary = "The fabric manager is not installed"
            fix = "Install the fabric manager in the version of the driver, which this command prints:\n" + _RELEASE
        elif _STOPPED.search(texts):
            summary = "The fabric manager is not running"
            fix = "Find out why the fabric manager does not run, and start it:\n" + "\n".join((_STATUS, _RESTART))
        else:
            summary = "CUDA reports that the NVSwitch fabric is not ready"
            fix = "Start the fabric manager, and reboot the host if CUDA still fails:\n" + "\n".join(
                (_RESTART, _STATUS)
            )
        yield finding_from_logs(
            group,
            summary,
            fix=fix,
            confidence=0.95,
            explains=("GPU013", "GPU018", "GPU021", "GPU022", "GPU023"),
        )


_STOPPED = re.compile(
    r"[Ff]ailed to start|not running|not installed|inactive|NOT_PRESENT|fabricmanager\.service:? (?:[Ff]ailed|Main)"
)
_RELEASE = "nvidia-smi --query-gpu=driver_version --format=csv,noheader"
_RESTART = "sudo systemctl restart nvidia-fabricmanager"
_STATUS = "systemctl status nvidia-fabricmanager"


def _went_on(job: Job, group: EventGroup) -> bool:
    """Whether NCCL set up the communicator without multicast, as in 2.27 and 2.28."""
    events = job.evidence.events if job.evidence else ()
    later = events[events.index(group.first) + 1 :] if group.first in events else ()
    return any(event.kind == "nccl.init" and event.value("phase") == "COMPLETE" for event in later)


@check(
    id="GPU014",
    severity=Severity.ERROR,
    scope=Scope.HOST,
    when="PM",
    needs=(GpuFacts, DriverFacts),
    from_logs=(_from_logs, _unready),
    impacts={
        r"multicast": "NCCL initialization fails unless NCCL_NVLS_ENABLE=0 disables NVLink SHARP.",
        r"^CUDA reports": "CUDA does not start on this host, and its ranks fail at their first CUDA call.",
        r"do(?:es)? not match": (
            'The fabric manager does not start with this driver: after its next restart, CUDA fails with "system not '
            'yet initialized" (error 802).'
        ),
        r"not (?:running|installed)": (
            'New CUDA programs on this host fail with "system not yet initialized" (error 802).'
        ),
    },
    cases=lambda: (
        Passes("a running fabric manager of the driver's release", healthy(hosts=2, per_host=8)),
        Passes("no NVSwitch, no fabric manager", healthy(per_host=2).alter(DriverFacts, services=())),
        Passes(
            "no NVSwitch, fabric state that never completes",
            healthy(per_host=1)
            .alter(DriverFacts, services=(Service("fabric-manager", False),))
            .gpu(0, fabric=Fabric("not-started"), nvlinks=()),
        ),
        Passes(
            "a container with a completed fabric",
            healthy(per_host=8).alter(DriverFacts, services=(Service("fabric-manager", None),)),
        ),
        Passes(
            "a rack whose switches are managed elsewhere",
            healthy(per_host=4).alter(DriverFacts, nvswitches=0, services=(Service("fabric-manager", False),)),
        ),
        Fails(
            "stopped on one host",
            healthy(hosts=2, per_host=8).alter(
                DriverFacts, hosts=("node1",), services=(Service("fabric-manager", False, "570.124.06"),)
            ),
            ranks=tuple(range(8, 16)),
        ),
        Fails(
            "of an older release than the driver",
            healthy(per_host=8).alter(DriverFacts, services=(Service("fabric-manager", True, "550.54.15-1"),)),
            ranks=tuple(range(8)),
        ),
        Fails(
            "the fabric is not initialised, seen from a container",
            healthy(per_host=8)
            .alter(DriverFacts, services=(Service("fabric-manager", None),))
            .gpu(0, fabric=Fabric("in-progress"))
            .gpu(3, fabric=Fabric("completed", 999)),
            ranks=tuple(range(8)),
        ),
        Passes(
            "NCCL runs out of memory where it sets up multicast",
            logged("node7:41:77 [0] transport/nvls.cc:160 NCCL WARN Cuda failure 2 'out of memory'"),
        ),
        Fails(
            "log of NCCL continuing without multicast",
            logged(
                "node7:41:77 [0] transport/nvls.cc:160 NCCL WARN Failed to bind NVLink SHARP (NVLS) Multicast memory "
                "of size 2097152 : CUDA error 401 'the operation cannot be performed in the present state'",
                "node7:41:77 [0] NCCL INFO comm 0x55 rank 0 nranks 2 cudaDev 0 nvmlDev 0 busId 7000 commId 0x9 - Init "
                "COMPLETE",
            ),
            ranks=(0,),
            severity=Severity.WARNING,
        ),
    ),
)
def fabric_manager_absent(job: Job) -> Iterator[Verdict]:
    """Ask whether the fabric manager of an NVSwitch host runs in the driver's release and the fabric is ready.

    Why it hurts: CUDA does not start ("system not yet initialized", error 802), or GPUs cannot reach each other over
    NVLink.
    Fix: Start the fabric manager with `sudo systemctl restart nvidia-fabricmanager`, or reboot the host.
    """
    switched = [local for local in job.by_host() if _has_switches(local)]
    if not switched:
        yield Skip("no NVSwitch")
    verdicts = [verdict for local in switched for verdict in _judge(local)]
    yield from (verdict for verdict in verdicts if not isinstance(verdict, Finding))
    yield from merge(verdict for verdict in verdicts if isinstance(verdict, Finding))


def _has_switches(local: LocalRanks) -> bool:
    """Whether the host has NVSwitches, or links to those of its rack (GB200), whose fabric manager runs elsewhere."""
    drivers, gpus = local.find(DriverFacts), local.find(GpuFacts)
    if drivers and drivers.nvswitches:
        return True
    return gpus is not None and any(
        gpu.fabric
        and gpu.fabric.state != "not-supported"
        and any(link.remote == "switch" for link in gpu.nvlinks or ())
        for gpu in gpus.gpus
    )


def _judge(local: LocalRanks) -> Iterator[Verdict]:
    drivers, gpus = local.find(DriverFacts), local.find(GpuFacts)
    if drivers is None or gpus is None:
        return
    faults = list(_fabric_faults([gpu for gpu in gpus.gpus if not gpu.lost]))
    if not drivers.nvswitches:
        if faults:
            yield _finding(local, faults, drivers, gpus)
        return
    manager = drivers.service("fabric-manager")
    if manager and manager.running is False:
        faults.insert(0, f"The fabric manager on {local.name} is not running")
    elif manager and manager.running and _differs(manager.version, gpus.driver_version):
        faults.insert(
            0, f"Fabric manager {manager.version} on {local.name} does not match driver {gpus.driver_version}"
        )
    if faults:
        yield _finding(local, faults, drivers, gpus)
    elif (manager is None or manager.running is None) and not any(_is_ready(gpu) for gpu in gpus.gpus):
        note = drivers.why_hidden("services")
        reason = note.reason if note else "the state of the fabric manager is unknown"
        yield Unknown(reason, local.ranks, note.unhide if note else "systemctl status nvidia-fabricmanager")


def _is_ready(gpu: Gpu) -> bool:
    return gpu.fabric is not None and gpu.fabric.state == "completed" and not gpu.fabric.status


def _fabric_faults(gpus: list[Gpu]) -> Iterator[str]:
    waiting = [str(gpu.index) for gpu in gpus if gpu.fabric and gpu.fabric.state in ("not-started", "in-progress")]
    failed = [gpu for gpu in gpus if gpu.fabric and gpu.fabric.state == "completed" and gpu.fabric.status]
    words = [f"is not initialized on GPU {', '.join(waiting)}"] if waiting else []
    if failed:
        codes = ", ".join(f"{gpu.index} (NVML code {gpu.fabric.status})" for gpu in failed if gpu.fabric)
        words.append(f"failed on GPU {codes}")
    if words:
        yield f"The NVSwitch fabric {' and '.join(words)}"


def _differs(manager: str | None, driver: str | None) -> bool:
    """The fabric manager must have exactly the driver's release (NVIDIA Fabric Manager user guide). The version of a
    package may have a suffix: ``570.124.06-1``."""
    ours, theirs = _NUMBERS.match(manager or ""), _NUMBERS.match(driver or "")
    return ours is not None and theirs is not None and ours[0] != theirs[0]


def _finding(local: LocalRanks, faults: list[str], drivers: DriverFacts, gpus: GpuFacts) -> Finding:
    manager = drivers.service("fabric-manager")
    return Finding(
        "; ".join(faults),
        ranks=local.ranks,
        evidence={
            "nvswitches": drivers.nvswitches,
            "fabric_manager_running": manager.running if manager else None,
            "fabric_manager_version": manager.version if manager else None,
            "driver_version": gpus.driver_version,
            "fabric_state": _states(gpus),
        },
        fix=_fix(faults, local.name, gpus),
        explains=("GPU013", "GPU018", "GPU023"),
    )


def _states(gpus: GpuFacts) -> dict[str, str]:
    """The GPUs of each state: ``GPUs 0-7: completed``."""
    by_state: dict[str, list[int]] = {}
    for gpu in gpus.gpus:
        if gpu.fabric:
            failed = f", NVML code {gpu.fabric.status}" if gpu.fabric.status else ""
            by_state.setdefault(f"{gpu.fabric.state}{failed}", []).append(gpu.index)
    return {
        f"GPU{'' if len(found) == 1 else 's'} {ranks_in_words(tuple(found)).partition(' ')[2]}": state
        for state, found in by_state.items()
    }


def _fix(faults: list[str], host: str, gpus: GpuFacts) -> str:
    if "does not match" in faults[0]:
        return (
            f"Install fabric manager {gpus.driver_version}, which matches the driver, on {host}, and restart it while "
            "no process uses the GPUs."
        )
    start = "enable --now" if "not running" in faults[0] else "restart"
    verb = "Restart" if start == "restart" else "Start"
    command = f"sudo systemctl {start} nvidia-fabricmanager"
    return f"{verb} the fabric manager on {host} while no process uses the GPUs:\n{command}"
