"""GPU009: the memory of a GPU is failing."""

from __future__ import annotations

import re
from collections.abc import Iterator

from doctor.analysis.visible_devices import hidden_of_gpus, shares_by_host
from doctor.api import (
    EventGroup,
    Finding,
    Job,
    Scope,
    Severity,
    Unknown,
    Verdict,
    check,
    event_groups,
    finding_from_logs,
)
from doctor.facts import Event, Gpu, GpuFacts, KernelEvent, KernelLogFacts
from doctor.testing import Fails, Passes, healthy, logged
from doctor_checks.devices._xid_events import logged_xids, xids_of


def _told(job: Job) -> Iterator[Finding]:
    for reported in logged_xids(job, {"memory"}):
        yield reported.finding(_CONSEQUENCES)
    for group in event_groups(job, "gpu.memory_error"):
        failed = tuple(event for event in group.events if "emap" in event.text)
        others = tuple(event for event in group.events if event not in failed)
        if failed:
            yield finding_from_logs(
                EventGroup(group.kind, failed),
                f"{_which(failed, 'A GPU', 'The')} failed to remap a damaged row of its memory",
                fix=f"Drain {_host_of(group)}, and have {_which(failed, 'the affected GPU')} replaced.",
                confidence=0.95,
                explains=_CONSEQUENCES,
            )
        if others:
            yield finding_from_logs(
                EventGroup(group.kind, others),
                f"{_which(others, 'A GPU', 'The')} reported uncorrectable memory errors",
                fix=_reset_of(others),
                confidence=0.95,
                explains=_CONSEQUENCES,
            )


def _host_of(group: EventGroup) -> str:
    return group.hosts[0] if len(group.hosts) == 1 else "the host"


def _which(events: tuple[Event, ...], unnamed: str, article: str = "the") -> str:
    """``the GPU at 0000:3b:00``, if the lines name one address."""
    found = {address for event in events for address in _ADDRESS.findall(event.text)}
    return f"{article} GPU at {found.pop()}" if len(found) == 1 else unnamed


def _reset_of(events: tuple[Event, ...]) -> str:
    found = {address for event in events for address in _ADDRESS.findall(event.text)}
    if len(found) != 1:
        return "End all processes on the GPUs of the host, then reset them:\nsudo nvidia-smi --gpu-reset"
    address = found.pop()
    address = address if "." in address else f"{address}.0"
    return f"End all processes on this GPU, then reset it:\nsudo nvidia-smi --gpu-reset -i {address}"


_ADDRESS = re.compile(r"(?:GPU at (?:PCI:)?|\(PCI:)([0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(?:\.[0-9a-fA-F])?)")

_CONSEQUENCES = ("GPU010", "GPU019", "GPU022")


@check(
    id="GPU009",
    severity=Severity.ERROR,
    scope=Scope.HOST,
    when="PM",
    needs=(GpuFacts,),
    from_logs=_told,
    impacts={
        r"contained to one process": (
            "Only the process that used the damaged memory ends, and the other ranks wait for it until their timeout."
        ),
        r"not contained": "All programs on this GPU end, and their data may be corrupted. The GPU needs a reset.",
        r"pending": (
            "The damaged memory is still in use, and may fail again at the same address until the next reset."
        ),
        r"failed row remap|failed to remap": (
            "The GPU has no spare memory for further repairs, so errors recur until it is replaced."
        ),
        r"limit reached": (
            "Further uncorrectable errors are likely, and each terminates the process that encounters it."
        ),
        r"marked for replacement": (
            "None once a reset of the GPU or a reboot has replaced the memory. Until then, the error may recur there."
        ),
        r"before this job": (
            "Memory that failed once often fails again. The job then ends with an uncorrectable error."
        ),
        r"uncorrectable": (
            "The program that reads the damaged memory fails, and the other ranks wait for it until their timeout."
        ),
    },
    cases=lambda: (
        Passes("no errors", healthy(hosts=2, per_host=2)),
        Passes(
            "rows remapped long ago, within the limit",
            healthy(per_host=2).gpu(0, ecc_aggregate_uncorrected=3, remapped_uncorrectable=2, remapped_correctable=9),
        ),
        Passes("a card without ECC", healthy(per_host=1).gpu(0, ecc=None, ecc_volatile_uncorrected=None)),
        Passes(
            "a remap of last month that has taken effect",
            healthy(per_host=1).alter(KernelLogFacts, events=(KernelEvent("xid", 90.0, 63, "0000:10:00"),)),
            silent=False,
        ),
        Fails(
            "uncorrectable errors since the driver started",
            healthy(hosts=2, per_host=2).gpu(
                1, hosts=("node1",), ecc_volatile_uncorrected=2, ecc_aggregate_uncorrected=2
            ),
            ranks=(3,),
        ),
        Fails("a row waits for its remap", healthy(per_host=2).gpu(0, remap_pending=True), ranks=(0,)),
        Fails("no spare rows left", healthy(per_host=2).gpu(1, remap_failed=True), ranks=(1,)),
        Fails("pages wait for retirement", healthy(per_host=2).gpu(0, retired_pages_pending=True), ranks=(0,)),
        Fails(
            "SRAM errors beyond the return limit",
            healthy(per_host=2).gpu(1, ecc_sram_uncorrected=42, ecc_sram_threshold_exceeded=True),
            ranks=(1,),
        ),
        Fails("512 rows remapped", healthy(per_host=2).gpu(1, remapped_uncorrectable=512), ranks=(1,)),
        Fails(
            "Xid 95 since the job began",
            healthy(per_host=2).alter(
                KernelLogFacts,
                events=(KernelEvent("xid", 863100.0, 95, "0000:11:00", text="NVRM: Xid (PCI:0000:11:00): 95"),),
            ),
            ranks=(1,),
        ),
        Fails(
            "Xid 48 of an earlier job, and nothing reset since",
            healthy(per_host=2)
            .gpu(0, ecc_volatile_uncorrected=None)
            .alter(KernelLogFacts, events=(KernelEvent("xid", 500.0, 48, "0000:10:00"),)),
            ranks=(0,),
            severity=Severity.WARNING,
        ),
        Passes(
            "counters of a health check, all zero",
            logged("GPU 0: 0 uncorrectable ECC errors", "ECC Errors: Volatile Uncorrectable : 0", "Xid errors: 0"),
        ),
        Fails(
            "logged by the driver",
            logged(
                "[86400.5] NVRM: Xid (PCI:0000:0f:00): 94, pid=7194, name=python, Contained: SM (0x1). RST: No",
                name="dmesg.txt",
            ),
        ),
        Fails(
            "logged by the driver, without the process",
            logged("[86400.5] NVRM: Xid (PCI:0000:0f:00): 94, Contained: SM (0x1). RST: No", name="dmesg.txt"),
        ),
    ),
)
def memory_errors(job: Job, *, remapped_rows: int = 512, retired_pages: int = 60) -> Iterator[Verdict]:
    """Ask whether the memory of each GPU has no uncorrectable errors and no pending repairs.

    Why it hurts: an uncorrectable error ends the program that accesses it, or corrupts its data. A GPU with a pending
    remap fails again at the same address.
    Fix: End all processes on the GPU and reset it with `sudo nvidia-smi --gpu-reset`, or reboot the host.
    """
    for local, found in shares_by_host(job):
        faulty = set()
        for share in found:
            faults = tuple(_faults(share.gpu, remapped_rows, retired_pages))
            if faults:
                faulty.add(share.gpu.uuid)
                gpu = share.gpu
                yield Finding(
                    f"GPU {gpu.index} of {local.name} has {' and '.join(faults)}",
                    ranks=share.ranks or local.ranks,
                    evidence={
                        "gpu": gpu.uuid,
                        "pci_bus_id": gpu.bus_id,
                        "volatile_uncorrected": gpu.ecc_volatile_uncorrected or None,
                        "aggregate_uncorrected": gpu.ecc_aggregate_uncorrected or None,
                        "sram_uncorrected": gpu.ecc_sram_uncorrected,
                        "remapped_rows_uncorrectable": gpu.remapped_uncorrectable or None,
                        "remap_pending": gpu.remap_pending or None,
                        "remap_failed": gpu.remap_failed or None,
                        "retired_pages_pending": gpu.retired_pages_pending or None,
                        "recovery_action": gpu.recovery_action,
                    },
                    fix=_fix(gpu, local.name, faults)
                    if share.ranks
                    else f"Report GPU {gpu.index} of {local.name} to the cluster administrators.",
                    severity=None if share.ranks else Severity.INFO,
                    explains=("GPU010", "GPU019"),
                )
        if note := hidden_of_gpus(local, "ecc_volatile_uncorrected", "remap_failed", "retired_pages_pending"):
            yield Unknown(note.reason, local.ranks, note.unhide)
        for reported in xids_of(local, {"memory"}):
            # An Xid from before this job is resolved if the counters are zero: a reset clears them.
            gpus = local.find(GpuFacts)
            uncounted = any(gpu.ecc_volatile_uncorrected is None for gpu in gpus.gpus) if gpus else True
            severity = Severity.ERROR if reported.recent else Severity.WARNING if faulty or uncounted else Severity.INFO
            severity = severity if reported.ranks else Severity.INFO
            yield reported.finding(local, severity, _WATCH if severity is Severity.INFO else "")


_WATCH = "Report the GPU to the cluster administrators if the error recurs."


def _faults(gpu: Gpu, remapped_rows: int, retired_pages: int) -> Iterator[str]:
    """NVIDIA "GPU Memory Error Management", RMA policy: 512 remapped rows, or the SRAM threshold flag. GPUs before
    Ampere retire pages instead: NVIDIA "Dynamic Page Retirement", RMA policy, 60 pages, one for each error."""
    if gpu.ecc_volatile_uncorrected:
        errors = gpu.ecc_volatile_uncorrected
        yield f"{errors} uncorrectable memory error{'' if errors == 1 else 's'}"
    if gpu.remap_failed:
        yield "a failed row remap"
    if gpu.remap_pending:
        yield "a row remap pending until the next reset"
    if gpu.retired_pages_pending:
        yield "a page retirement pending until the next reset"
    if gpu.ecc_sram_threshold_exceeded:
        count = f"{gpu.ecc_sram_uncorrected} " if gpu.ecc_sram_uncorrected else ""
        yield f"{count}uncorrectable SRAM errors {_WORN}"
    if (gpu.remapped_uncorrectable or 0) >= remapped_rows:
        yield f"{gpu.remapped_uncorrectable} remapped rows {_WORN}"
    aggregate = gpu.ecc_aggregate_uncorrected or 0
    if aggregate >= (retired_pages if gpu.remap_failed is None else remapped_rows):
        yield f"{aggregate} uncorrectable memory errors in its lifetime {_WORN}"


_WORN = "(replacement limit reached)"


def _fix(gpu: Gpu, host: str, faults: tuple[str, ...]) -> str:
    if gpu.remap_failed or any(fault.endswith(_WORN) for fault in faults):
        return f"Drain {host}, and have GPU {gpu.index} replaced."
    reset = f"`sudo nvidia-smi --gpu-reset -i {gpu.index}`"
    return f"End all processes on GPU {gpu.index} of {host}, then reset it with {reset}, or reboot the host."
