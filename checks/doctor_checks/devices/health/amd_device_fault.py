"""GPU027: an AMD GPU reported a fault."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.api import EventGroup, Finding, Job, Severity, Verdict, check, event_groups, finding_from_logs, is_logged
from doctor.testing import Fails, Passes, logged

_OF_HARDWARE = (
    ("uncorrectable hardware error", "A GPU reported uncorrectable memory errors (RAS)"),
    ("ecc", "A GPU reported uncorrectable memory errors"),
    ("poison", "A GPU read data corrupted by an uncorrectable error (RAS poison)"),
    ("lost from bus", "A GPU has fallen off the bus"),
    ("fatal error during gpu init", "The driver could not initialize a GPU"),
    ("hang", "A GPU stopped processing its queues (GPU hang)"),
    ("gpu reset", "The driver reset a GPU: all processes on it lost their memory"),
    ("gpu recovery failed", "The driver could not reset a GPU"),
    ("vram is lost", "The driver reset a GPU: all processes on it lost their memory"),
    ("preempt", "A GPU stopped processing its queues, and the driver could not preempt them"),
    ("fence wait loop", "A GPU stopped processing its queues, and the driver could not preempt them"),
    ("evict", "A GPU stopped processing its queues, and the driver could not preempt them"),
    ("test failed", "The driver reset a GPU, but the GPU still does not work"),
    ("timeout", "A GPU did not complete the work of a ring in time"),
)
"""Words of messages about a whole GPU, and their meanings: amdgpu_job.c, amdgpu_device.c, amdgpu_ras.c and
kfd_device_queue_manager.c of Linux, runtime.cpp of ROCR-Runtime."""


_VAGUE = ("unknown error", "unspecified error")


@check(
    id="GPU027",
    severity=Severity.ERROR,
    when="M",
    impacts={
        r"fallen off": "Programs on the GPU fail or hang until the host is rebooted.",
        r"RAS": (
            "The driver resets the GPU, which ends all processes on it; the other ranks wait until their timeout."
        ),
        r"kernel failed": "The ROCm runtime aborts the process, and the other ranks wait for it until their timeout.",
    },
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
    Fix: Check `sudo dmesg -T | grep -i amdgpu` and `rocm-smi --showrasinfo all` on the host, and exclude the host from
    the next job after memory errors, a hang or a reset.
    """
    for group in event_groups(job, "amd.device", by=("pci", "node")):
        yield _of_device(group)
    # The failed assertion is more specific than the abort that follows it (GPU022).
    if not is_logged(job, "gpu.assertion"):
        for group in event_groups(job, "amd.kernel_fault"):
            yield _of_kernel(group)


def _of_device(group: EventGroup) -> Finding:
    said = (group.value("what", "what2", "what3", "what4", "what5", "what6", "what7", "what8") or "").lower()
    meaning = next((meaning for word, meaning in _OF_HARDWARE if word in said), "A GPU failed")
    pci, node = group.value("pci"), group.value("node", "node2")
    where = f" (PCI {pci})" if pci else f" (node-{node})" if node else ""
    return finding_from_logs(
        group,
        meaning + where,
        evidence={"pci": pci} if pci else {"node": node} if node else None,
        confidence=0.95,
        explains=("GPU022",),
    )


def _of_kernel(group: EventGroup) -> Finding:
    node, reason = group.value("node"), group.value("reason")
    fault = group.value("fault", "fault2", "fault3", "fault4", "fault5", "fault6", "fault7") or ""
    where = f" on node-{node}" if node else ""
    return finding_from_logs(
        group,
        f"A kernel failed{where}: {fault}" + (f" ({reason})" if reason else ""),
        evidence={"node": node} if node else None,
        confidence=0.5 if fault in _VAGUE else 0.9,
        fix="Run again with AMD_SERIALIZE_KERNEL=3 and HIP_LAUNCH_BLOCKING=1 to find the kernel that failed.",
    )
