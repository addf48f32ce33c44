"""GPU026: a GPU or its driver lacks a CUDA feature."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.api import EventGroup, Job, Scope, Severity, Verdict, check, event_groups, finding_from_logs, is_logged
from doctor.testing import Fails, Passes, logged

_OF_TRANSPORTS = ("gpu.multicast_fails", "gpu.peer_transport_fails")
"""Refusals in NCCL's setup of NVLink multicast (GPU014) or peer access (GPU018)."""

_WORDS = (
    ("license", "The virtual GPU has no license, so CUDA is disabled"),
    ("dynamic parallelism", "The program uses CUDA Dynamic Parallelism, which MPS does not support on this GPU"),
    ("affinity", "The program requests an execution affinity that this GPU does not support"),
    ("limit", "The program sets a limit that this GPU does not support"),
    ("on this os", "CUDA needs a feature that this operating system or container does not allow"),
)
"""Words of a result (cudaGetErrorString), and its meaning."""


@check(
    id="GPU026",
    severity=Severity.ERROR,
    scope=Scope.HOST,
    when="M",
    impacts={
        r"no license": "No program can use CUDA on this virtual GPU until it has a license.",
        r"^NCCL uses": "NCCL initialization fails, and the job ends.",
        r"^The program uses": (
            "The rank fails at its first such call, and the other ranks wait for it until their timeout."
        ),
        r"operating system or container": (
            "The rank fails at this CUDA call, and the other ranks wait for it until their timeout."
        ),
    },
    cases=lambda: (
        Passes("a socket refuses an option", logged("OSError: [Errno 95] Operation not supported")),
        Fails(
            "NCCL on a virtual GPU",
            logged(
                "node1:41:77 [0] include/alloc.h:212 NCCL WARN Cuda failure 801 'operation not supported'",
                "node1:41:77 [0] NCCL INFO init.cc:1358 -> 1",
            ),
        ),
        Fails(
            "a program that allocates managed memory",
            logged("[rank2]: torch.AcceleratorError: CUDA error: operation not supported"),
            ranks=(2,),
        ),
    ),
)
def gpu_feature_missing(job: Job) -> Iterator[Verdict]:
    """Ask whether CUDA rejected an operation that this GPU, its virtualization or its driver does not support.

    Why it hurts: vGPUs have no unified memory, IPC or peer access unless the hypervisor enables them, MIG instances
    have no peer access, and containers may forbid system calls that CUDA needs. A program that uses such a feature
    fails.
    Fix: Do not use the feature, or use a whole GPU on a host that is not virtual.
    """
    if is_logged(job, *_OF_TRANSPORTS):
        return
    for group in event_groups(job, "gpu.unsupported", by=("what",)):
        claim = _claim(job, group)
        yield finding_from_logs(group, claim, fix=_fix(claim), confidence=0.85, explains=("GPU021",))


def _fix(claim: str) -> str:
    if "no license" in claim:
        return (
            "Put the client token of the license server into /etc/nvidia/ClientConfigToken, restart the license "
            "client, and check the state:\nsudo systemctl restart nvidia-gridd\nnvidia-smi -q | grep -i license"
        )
    if claim.startswith("NCCL") or "operating system" in claim:
        return (
            "Disable the NCCL features that restricted systems and containers often do not support:\n"
            "export NCCL_CUMEM_ENABLE=0 NCCL_P2P_DISABLE=1 NCCL_NVLS_ENABLE=0"
        )
    if "MPS" in claim:
        return "Stop MPS, because each rank then has its own context:\necho quit | nvidia-cuda-mps-control"
    return (
        "Avoid the failing call if this command reports a virtual GPU or MIG mode, which do not support all features:\n"
        "nvidia-smi -q | grep -iE 'virtualization mode|mig mode'"
    )


def _claim(job: Job, group: EventGroup) -> str:
    said = (group.value("what", "what2", "name") or "").lower()
    meaning = next((meaning for word, meaning in _WORDS if word in said), None)
    if meaning is None:
        by = "NCCL" if "NCCL" in group.first.text or is_logged(job, "torch.nccl.error") else "The program"
        meaning = f"{by} uses a CUDA feature that this GPU or its driver does not support"
    return meaning
