"""GPU003: CUDA_VISIBLE_DEVICES is not valid."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import takewhile

from doctor.analysis.visible_devices import VisibleListFault, parse_visible_devices, visible_to
from doctor.api import Finding, IdenticalRanks, Job, Severity, Unknown, Verdict, check, merge
from doctor.core.text import HERE, lazy_compile
from doctor.facts import EnvironmentFacts, GpuFacts, MissingReason, SoftwareFacts, TorchBuild
from doctor.knowledge.releases import within
from doctor.testing import Fails, JobBuilder, Passes, healthy


def _amd() -> JobBuilder:
    return healthy(per_host=2, gpus=0).alter(SoftwareFacts, torch=TorchBuild("2.8.0", hip="6.4"))


@check(
    id="GPU003",
    severity=Severity.ERROR,
    needs=(EnvironmentFacts,),
    impacts={
        r"repeats": 'Ranks fail with "No CUDA GPUs are available".',
        r"ignores|stops there|reads only": (
            'CUDA shows fewer devices than listed, and ranks that use a missing one fail with "invalid device ordinal".'
        ),
    },
    cases=lambda: (
        Passes("not set", healthy(per_host=2)),
        Passes("a list of indices", healthy(per_host=2).environ(CUDA_VISIBLE_DEVICES="1, 0")),
        Passes("hides all by an empty value", healthy(per_host=2).environ(CUDA_VISIBLE_DEVICES="")),
        Passes("hides all by -1", healthy(per_host=2).environ(CUDA_VISIBLE_DEVICES="-1")),
        Passes("a SLURM task without GPUs", healthy(per_host=2).environ(CUDA_VISIBLE_DEVICES="NoDevFiles")),
        Passes("indices on a machine without GPU", healthy(per_host=2, gpus=0).environ(CUDA_VISIBLE_DEVICES="0,1")),
        Passes("the beginning of a UUID", healthy(per_host=1).environ(CUDA_VISIBLE_DEVICES="GPU-00000000")),
        Fails(
            "UUIDs under PyTorch 1.13, which counts none",
            healthy(per_host=1)
            .alter(SoftwareFacts, torch=TorchBuild("1.13.1+cu117", cuda="11.7"))
            .environ(CUDA_VISIBLE_DEVICES="GPU-00000000"),
            ranks=(0,),
            severity=Severity.WARNING,
        ),
        Passes("AMD devices by both levels", _amd().environ(ROCR_VISIBLE_DEVICES="2,3", HIP_VISIBLE_DEVICES="0,1")),
        Passes(
            "SLURM's variables on NVIDIA GPUs",
            healthy(per_host=4).environ(ROCR_VISIBLE_DEVICES="2,3", CUDA_VISIBLE_DEVICES="2,3"),
        ),
        Fails(
            "a device that ROCr hides",
            _amd().environ(ROCR_VISIBLE_DEVICES="1", CUDA_VISIBLE_DEVICES="0,1"),
            ranks=(0, 1),
        ),
        Fails(
            "one list at both levels, which counts from 0 at the second",
            _amd().environ(ROCR_VISIBLE_DEVICES="2,3", HIP_VISIBLE_DEVICES="2,3"),
            ranks=(0, 1),
        ),
        Fails(
            "two names with two lists",
            _amd().environ(HIP_VISIBLE_DEVICES="0,1", CUDA_VISIBLE_DEVICES="2,3"),
            ranks=(0, 1),
            severity=Severity.WARNING,
        ),
        Fails(
            "a device twice, without a driver",
            healthy(per_host=2, gpus=0).environ(ranks=(1,), CUDA_VISIBLE_DEVICES="0,0"),
            ranks=(1,),
        ),
        Fails("cut short at -1", healthy(per_host=2).environ(CUDA_VISIBLE_DEVICES="0,-1,1"), ranks=(0, 1)),
        Fails(
            "names a device that is not there", healthy(per_host=2).environ(CUDA_VISIBLE_DEVICES="0,2"), ranks=(0, 1)
        ),
        Fails("blanks instead of commas", healthy(per_host=2).environ(CUDA_VISIBLE_DEVICES="0 1"), ranks=(0, 1)),
        Fails(
            "a UUID of another host",
            healthy(hosts=2, per_host=1).environ(CUDA_VISIBLE_DEVICES="GPU-00000000-0000-0000-0000-000000000000"),
            ranks=(1,),
        ),
    ),
)
def visible_devices_invalid(job: Job) -> Iterator[Verdict]:
    """Ask whether CUDA reads CUDA_VISIBLE_DEVICES as intended.

    Why it hurts: CUDA silently ignores an invalid entry and shows fewer devices or none. Ranks then fail with
    "invalid device ordinal" or "No CUDA GPUs are available".
    Fix: List each device once, separated by commas (`nvidia-smi -L` shows the devices), or unset the variable to use
    all devices.
    """
    yield from merge(
        finding
        for environment, identical in job.each(EnvironmentFacts, also=(GpuFacts, SoftwareFacts))
        if _may_run_rocm(identical)
        for finding in _of_rocm(environment, identical)
    )
    yield from merge(_uuids_for_torch_1_13(job))
    for environment, identical in job.each(EnvironmentFacts, also=(GpuFacts,)):
        text = environment.get("CUDA_VISIBLE_DEVICES")
        listed, gpus, seen = parse_visible_devices(text), identical.find(GpuFacts), visible_to(identical)
        fault = listed.fault or (seen.fault if seen and gpus and gpus.gpus else None)
        if fault:
            hosts = job.hosts_of(identical.ranks)
            words = fault_text(fault, len(gpus.gpus) if gpus else 0)
            if len(hosts) == 1:
                words = words.replace(HERE, hosts[0])
            summary = f"{shown_list(text or '')} {words}"
            yield Finding(
                summary if len(summary) <= 100 else f"CUDA_VISIBLE_DEVICES {words}",
                ranks=identical.ranks,
                evidence={
                    "CUDA_VISIBLE_DEVICES": text,
                    "read_by_cuda": _before(listed.entries, fault),
                    "gpus_of_host": [gpu.uuid or gpu.index for gpu in gpus.gpus] if gpus else None,
                },
                effect=_effect_of_absent(listed.entries, fault),
                fix=(fix_of_fault(fault, text or "") or _fix_of_absent(fault, len(gpus.gpus) if gpus else 0)).replace(
                    HERE, job.place_of(identical.ranks)
                ),
                explains=("GPU002", "GPU004"),
            )
        elif listed.entries and (missing := identical.missing(GpuFacts)) and missing.lack is not MissingReason.ABSENT:
            reason = f"the devices of CUDA_VISIBLE_DEVICES={text} could not be verified: {missing.reason}"
            yield Unknown(reason, identical.ranks, missing.unhide)


def _before(entries: Sequence[str], fault: VisibleListFault) -> list[str]:
    """The entries that CUDA uses: those before one that does not exist."""
    if fault.kind != "absent":
        return list(entries)
    return list(takewhile(lambda entry: entry != fault.entry, entries))


def _effect_of_absent(entries: Sequence[str], fault: VisibleListFault) -> str:
    if fault.kind != "absent":
        return ""
    left = len(_before(entries, fault))
    if not left:
        return f'CUDA ignores {fault.entry} and all entries after it: ranks find no GPU ("No CUDA GPUs are available").'
    visible = "only cuda:0 is visible" if left == 1 else f"only cuda:0 to cuda:{left - 1} are visible"
    return (
        f"CUDA ignores {fault.entry} and all entries after it, so {visible}. A rank that selects cuda:{left} fails "
        'with "invalid device ordinal".'
    )


def _fix_of_absent(fault: VisibleListFault, there: int) -> str:
    if fault.kind != "absent" or not there:
        return ""
    if fault.entry.isdigit():
        return f"List only device{' 0' if there == 1 else f's 0-{there - 1}'} in CUDA_VISIBLE_DEVICES."
    return "List devices of this host, which `nvidia-smi -L` shows, or unset CUDA_VISIBLE_DEVICES."


def _uuids_for_torch_1_13(job: Job) -> Iterator[Finding]:
    """PyTorch 1.13 counts devices by NVML and reads entries as numbers; 2.0 reads UUIDs (pytorch/pytorch#92315)."""
    for environment, identical in job.each(EnvironmentFacts, also=(SoftwareFacts,)):
        text, software = environment.get("CUDA_VISIBLE_DEVICES") or "", identical.find(SoftwareFacts)
        torch = software.torch.version if software and software.torch else ""
        if text.startswith(("GPU-", "MIG-")) and torch and within(torch, "1.13", before="2.0"):
            yield Finding(
                f"{shown_list(text)} lists UUIDs, which PyTorch {torch} does not support",
                ranks=identical.ranks,
                evidence={"CUDA_VISIBLE_DEVICES": text, "torch": torch},
                effect="`torch.cuda.device_count()` returns 0, and the ranks find no GPU.",
                fix="List the devices by index, or install PyTorch 2.0 or later.",
                severity=Severity.WARNING,
            )


def _may_run_rocm(identical: IdenticalRanks) -> bool:
    """Whether the host has no NVIDIA driver and torch is not built for CUDA; SLURM sets ROCR_VISIBLE_DEVICES on all."""
    missing, software = identical.missing(GpuFacts), identical.find(SoftwareFacts)
    built_for_cuda = software is not None and software.torch is not None and software.torch.cuda is not None
    return missing is not None and missing.lack is MissingReason.ABSENT and not built_for_cuda


def _of_rocm(environment: EnvironmentFacts, identical: IdenticalRanks) -> Iterator[Finding]:
    """ROCr applies ROCR_VISIBLE_DEVICES first and renumbers the remaining devices; HIP selects from those by
    HIP_VISIBLE_DEVICES, or by CUDA_VISIBLE_DEVICES if that is empty (clr rocclr/device/rocm/rocdevice.cpp)."""
    rocr, hip, cuda = (environment.get(f"{name}_VISIBLE_DEVICES") or "" for name in ("ROCR", "HIP", "CUDA"))
    name, text = ("HIP_VISIBLE_DEVICES", hip) if hip else ("CUDA_VISIBLE_DEVICES", cuda)
    listed = [entry.strip() for entry in text.split(",")]
    left = len([entry for entry in rocr.split(",") if entry.strip()])
    beyond = [entry for entry in listed if rocr and entry.isdigit() and int(entry) >= left]
    evidence = {
        "ROCR_VISIBLE_DEVICES": rocr or None,
        "HIP_VISIBLE_DEVICES": hip or None,
        "CUDA_VISIBLE_DEVICES": cuda or None,
    }
    if beyond:
        summary = f"{name}={text} names device {beyond[0]}, but ROCR_VISIBLE_DEVICES={rocr} {_devices(left)}"
        yield Finding(
            summary
            if len(summary) <= 100
            else f"{name} names device {beyond[0]}, but ROCR_VISIBLE_DEVICES {_devices(left)}",
            ranks=identical.ranks,
            evidence=evidence,
            effect='HIP shows fewer GPUs than listed, or none, and ranks fail with "invalid device ordinal" or '
            '"No HIP GPUs are available".',
            fix=f"unset {name}",
            explains=("GPU002", "GPU004"),
        )
    elif hip and cuda and hip != cuda:
        yield Finding(
            f"HIP_VISIBLE_DEVICES={hip} and CUDA_VISIBLE_DEVICES={cuda} differ: HIP uses the former",
            ranks=identical.ranks,
            evidence=evidence,
            effect="Programs that read CUDA_VISIBLE_DEVICES, such as Ray, see other GPUs than HIP.",
            fix=f"export CUDA_VISIBLE_DEVICES={hip}",
            severity=Severity.WARNING,
        )


def _devices(count: int) -> str:
    """HIP counts the devices that ROCr leaves from 0."""
    return "renumbers its device to 0" if count == 1 else f"renumbers its devices to 0-{count - 1}"


def fix_of_fault(fault: VisibleListFault, text: str) -> str:
    """The command that sets a list without the fault, if the intended list is clear."""
    entries = [entry for entry in re.split(r"[\s,]+", text) if entry]
    better = list(dict.fromkeys(entries)) if fault.kind == "repeated" else entries
    if fault.kind == "ends":
        better = [entry for entry in entries if entry != fault.entry]
    if fault.kind in ("repeated", "partly read", "ends") and better and all(map(_ENTRY.fullmatch, better)):
        return f"export CUDA_VISIBLE_DEVICES={','.join(better)}"
    return ""


_ENTRY = lazy_compile(r"[0-9]{1,3}|(?:GPU|MIG)-[0-9A-Za-z-]{1,80}")


def shown_list(text: str) -> str:
    """``CUDA_VISIBLE_DEVICES=0,1``: the subject of :func:`fault_text`; the name alone if the value is long."""
    shown = repr(text) if " " in text else text
    return f"CUDA_VISIBLE_DEVICES={shown}" if len(text) <= 32 else "CUDA_VISIBLE_DEVICES"


def fault_text(fault: VisibleListFault, there: int) -> str:
    """The predicate of a sentence whose subject is the value; ``there``: the number of GPUs of the host."""
    match fault.kind:
        case "ends":
            after = f" and ignores {', '.join(fault.others)}" if fault.others else ""
            return f"contains {fault.entry!r}, which is not a device: CUDA stops there{after}"
        case "repeated":
            return f"repeats device {_short(fault.entry)}: CUDA then shows no device"
        case "partly read":
            return f"has the invalid entry {fault.entry!r}, of which CUDA reads only {fault.others[0]}"
        case "absent" if fault.entry.isdigit():
            return f"names device {fault.entry}, but this host has {there} GPU{'' if there == 1 else 's'}"
        case "absent":
            return f"names {_short(fault.entry)}, which does not exist on this host"
        case _:
            return f"names {_short(fault.entry)}, which matches several devices"


def _short(entry: str) -> str:
    """A UUID cut to its first part: the evidence has the whole value."""
    return entry if len(entry) <= 16 else f"{entry[:12]}…"
