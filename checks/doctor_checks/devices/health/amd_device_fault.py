"""GPU027: an AMD GPU reported a fault."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from doctor.api import EventGroup, Finding, Job, Severity, Verdict, check, event_groups, finding_from_logs, is_logged
from doctor.testing import Fails, Passes, logged

_RESET = "The driver resets the GPU, which ends all processes on it, and the other ranks wait until their timeout."
_ABORT = "The ROCm runtime aborts the process, and the other ranks wait for it until their timeout."
_ENDS = "All processes on the GPU end, and the other ranks wait for them until their timeout."
_UNTIL_REBOOT = "Programs on the GPU fail or hang until the host is rebooted."
_UNUSABLE = "No program can use this GPU."
_LOG = (
    "Check the kernel log of {host}, and if the error recurs, exclude {host} from the next job:\n"
    "sudo dmesg -T | grep -i amdgpu"
)
_MEMORY = (
    "Exclude {host} from the next job, and check the errors of its GPUs:\n"
    "rocm-smi --showrasinfo all\nsudo dmesg -T | grep -i amdgpu"
)
_REBOOT = "Drain {host}, reboot it, and check the GPU and its power supply if the error recurs."


class _Meaning(NamedTuple):
    summary: str
    effect: str
    fix: str


_OF_HARDWARE = (
    ("uncorrectable hardware error", _Meaning("A GPU reported uncorrectable memory errors", _RESET, _MEMORY)),
    ("ecc", _Meaning("A GPU reported uncorrectable memory errors", _ABORT, _MEMORY)),
    ("poison", _Meaning("A GPU read poisoned data, the result of an uncorrectable memory error", _ABORT, _MEMORY)),
    ("lost from bus", _Meaning("A GPU has fallen off the bus", _UNTIL_REBOOT, _REBOOT)),
    ("fatal error during gpu init", _Meaning("The driver could not initialize a GPU", _UNUSABLE, _REBOOT)),
    ("hang", _Meaning("A GPU hangs and no longer processes its queues", _ABORT, _LOG)),
    ("gpu reset", _Meaning("The driver started to reset a GPU", _ENDS, _LOG)),
    ("gpu recovery failed", _Meaning("The driver could not reset a GPU", _UNTIL_REBOOT, _REBOOT)),
    ("vram is lost", _Meaning("The driver reset a GPU: all processes on it lost their GPU memory", _ENDS, _LOG)),
    ("test failed", _Meaning("A GPU failed the driver's test of a command ring", _UNTIL_REBOOT, _REBOOT)),
    ("timeout, signaled", _Meaning("A GPU did not finish its commands in time (amdgpu ring timeout)", _RESET, _LOG)),
)
"""Words of messages about a whole GPU, and their meanings: amdgpu_job.c, amdgpu_device.c, amdgpu_ras.c and
kfd_device_queue_manager.c of Linux, runtime.cpp of ROCR-Runtime."""

_QUEUES = _Meaning("A GPU stopped processing its queues, and the driver could not preempt them", _RESET, _LOG)

_VAGUE = ("unknown error", "unspecified error")


@check(
    id="GPU027",
    severity=Severity.ERROR,
    when="M",
    cases=lambda: (
        Passes(
            "a ring that recovered",
            logged("kernel: amdgpu 0000:03:00.0: amdgpu: ring gfx_0.0.0 timeout, but soft recovered"),
        ),
        Passes(
            "no errors counted", logged("amdgpu 0000:03:00.0: 0 uncorrectable hardware errors detected in umc block")
        ),
        Fails(
            "a page fault of a kernel",
            logged(
                "[rank2]: Memory access fault by GPU node-4 (Agent handle: 0x5581c4e0) on address 0x7f2b10000000. "
                "Reason: Page not present or supervisor privilege."
            ),
            ranks=(2,),
        ),
        Fails(
            "errors of the memory",
            logged("kernel: amdgpu 0000:c3:00.0: amdgpu: 2 uncorrectable hardware errors detected in umc block"),
        ),
    ),
)
def amd_device_fault(job: Job) -> Iterator[Verdict]:
    """Ask whether HIP, the ROCm runtime or the amdgpu driver reported a fault of an AMD GPU.

    Why it hurts: the ROCm runtime aborts the process, or the driver resets the GPU, which ends all processes on it.
    The other ranks wait until their timeout.
    Fix: Check `sudo dmesg -T | grep -i amdgpu` on the host, and exclude the host from the next job if the error recurs.
    """
    for group in event_groups(job, "amd.device", by=("pci", "node")):
        yield _of_device(group)
    # The failed assertion is more specific than the abort that follows it (GPU022).
    if not is_logged(job, "gpu.assertion"):
        for group in event_groups(job, "amd.kernel_fault"):
            # Errors of the memory are faults of the device, not of the kernel that read it.
            if not all("ECC failure" in event.text for event in group.events):
                yield _of_kernel(group)


def _of_device(group: EventGroup) -> Finding:
    said = (group.value("what", "what2", "what3", "what4", "what5", "what6", "what7", "what8") or "").lower()
    meaning = next((meaning for word, meaning in _OF_HARDWARE if word in said), _QUEUES)
    pci, node = group.value("pci"), group.value("node", "node2")
    which = f"the GPU at PCI address {pci}" if pci else f"the GPU of HSA node {node}" if node else "a GPU"
    summary = re.sub(r"\b[Aa] GPU\b", which, meaning.summary, count=1)
    return finding_from_logs(
        group,
        summary[:1].upper() + summary[1:],
        effect=meaning.effect,
        fix=meaning.fix.format(host=group.hosts[0] if len(group.hosts) == 1 else "the host"),
        evidence={"pci": pci} if pci else {"node": node} if node else None,
        confidence=0.95,
        explains=("GPU022",),
    )


_PCI = re.compile(r"amdgpu ([0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f])")


def _of_kernel(group: EventGroup) -> Finding:
    node, reason = group.value("node"), group.value("reason")
    fault = group.value("fault", "fault2", "fault3", "fault4", "fault5", "fault6", "fault7") or ""
    pci = _PCI.search(group.first.text)
    where = f" on the GPU at PCI address {pci[1]}" if pci else f" on HSA node {node}" if node else ""
    shown = fault[:1].lower() + fault[1:] if " " in fault else fault
    shown = f"page fault ({shown})" if shown.startswith("VM_L2_") else shown
    return finding_from_logs(
        group,
        f"A {'' if pci else 'GPU '}kernel failed{where}: {shown}"
        + (f" ({reason})" if reason and reason != "Unknown" else ""),
        effect=_ABORT,
        evidence={"pci": pci[1]} if pci else {"node": node} if node else None,
        confidence=0.5 if fault in _VAGUE else 0.9,
        fix="Rerun the job with `AMD_SERIALIZE_KERNEL=3 HIP_LAUNCH_BLOCKING=1` to find the kernel that fails.",
    )
