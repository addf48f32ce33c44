"""GPU022: a GPU kernel failed because of a fault in the program."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.analysis.logs.event_timeline import events_before
from doctor.api import (
    Job,
    Severity,
    Verdict,
    check,
    event_groups,
    finding_from_logs,
    is_logged,
    line_of,
    ranks_in_words,
)
from doctor.facts import Event
from doctor.testing import Fails, Passes, logged


@check(
    id="GPU022",
    severity=Severity.ERROR,
    when="M",
    impacts={
        r"failed with an unknown error": (
            "The rank can no longer use CUDA: it exits, and the other ranks wait for it until their timeout."
        ),
    },
    cases=lambda: (
        Passes("an assertion of Python", logged("AssertionError: Assertion `len(batch) > 0` failed")),
        Fails(
            "an assertion that names its condition",
            logged(
                "[rank2]: /pytorch/aten/src/ATen/native/cuda/Indexing.cu:1141: indexSelectLargeIndex: block: "
                "[193,0,0], thread: [64,0,0] Assertion `srcIndex < srcSelectDimSize` failed.",
                "[rank2]: torch.AcceleratorError: CUDA error: device-side assert triggered",
            ),
            ranks=(2,),
        ),
    ),
)
def device_fault(job: Job) -> Iterator[Verdict]:
    """Ask whether a kernel failed with an illegal access, an assertion or a launch failure, and on which rank first.

    Why it hurts: the rank exits, and the other ranks wait for it until their timeout. The traceback may show a later
    call than the one that failed.
    Fix: Rerun the job with `CUDA_LAUNCH_BLOCKING=1`, or one process under `compute-sanitizer`, to find the call that
    fails.
    """
    yield from _of_libraries(job)
    assertions = list(event_groups(job, "gpu.assertion", by=("expression",)))
    if not assertions and is_logged(job, "amd.kernel_fault", "amd.device"):
        return  # GPU027
    for group in event_groups(job, "gpu.fault"):
        who = f" first on {ranks_in_words((group.first.rank,))}" if group.first.rank is not None else ""
        condition = assertions[0].value("expression") if assertions else None
        fault = group.value("fault", "fault2")
        words = f"the assertion `{condition}` failed" if condition else f"{fault}"
        yield finding_from_logs(
            group,
            f"A CUDA kernel failed{who}: {words}",
            evidence={"asserted": [line_of(one.first) for one in assertions]} if assertions else None,
            fix=_OF_ASSERTIONS if condition or "assert" in (fault or "").lower() else "",
            confidence=0.4 if _follows_transport(job, group.first) else 0.95,
        )


def _of_libraries(job: Job) -> Iterator[Verdict]:
    """Failed calls of cuBLAS and other libraries, unless a kernel failed before, whose error they return."""
    if is_logged(job, "gpu.fault", "gpu.assertion"):
        return
    for group in event_groups(job, "gpu.library_fault", by=("fault", "call")):
        fault, call = group.value("fault") or "", group.value("call")
        # cublasCreate allocates GPU memory; CUBLAS_STATUS_NOT_INITIALIZED often means that none was left.
        is_full = fault.endswith("NOT_INITIALIZED")
        yield finding_from_logs(
            group,
            f"{call or 'A call to a CUDA library'} failed: {fault}{', often because GPU memory is full' * is_full}",
            fix=_OF_FULL_MEMORY if is_full else _OF_CALL if call else _OF_ANY_CALL,
            confidence=0.5,
        )


_OF_FULL_MEMORY = (
    "Reduce the batch size if `nvidia-smi` shows that GPU memory is full, or rerun the job with "
    "`CUDA_LAUNCH_BLOCKING=1` to find an earlier call that failed."
)
_OF_CALL = "Rerun the job with `CUDA_LAUNCH_BLOCKING=1` to find out whether an earlier call failed."
_OF_ANY_CALL = (
    "Rerun the job with `CUDA_LAUNCH_BLOCKING=1` to find the call, or with a smaller batch if GPU memory is nearly "
    "full."
)
_OF_ASSERTIONS = (
    "Rerun the job with `CUDA_LAUNCH_BLOCKING=1` to find the call, and check whether its labels or indices are out of "
    "range."
)


_TRANSPORT = ("nccl.ib_wc", "nccl.ib_async", "nccl.peer_closed", "nccl.peer_closed.old")
"""Failures of NCCL's network."""


def _follows_transport(job: Job, fault: Event) -> bool:
    """Whether NCCL reports the fault after its network failed: its kernels then use buffers that are being freed."""
    return "Cuda failure" in fault.text and any(one.kind in _TRANSPORT for one in events_before(job, fault))
