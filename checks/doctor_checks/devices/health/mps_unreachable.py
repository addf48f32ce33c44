"""GPU025: CUDA's Multi-Process Service can't be used."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.api import Job, Scope, Severity, Verdict, check, event_groups, finding_from_logs
from doctor.testing import Fails, Passes, logged

_RESTART = "`echo quit | nvidia-cuda-mps-control`, then `nvidia-cuda-mps-control -d` as the user of the job."
_FEWER = "Start fewer processes on this GPU: its MPS server takes 48 clients, and 16 before Volta."

REASONS = (
    (("connect", "cannot find"), "the MPS control daemon or its server can't be reached", _RESTART),
    (("remote", "rpc"), "the connection to the MPS server broke", _RESTART),
    (("ready",), "the MPS server accepts no new clients: it recovers from a fault, or ends", _RESTART),
    (("create", "clients"), "the MPS server has as many clients as the GPU allows", _FEWER),
    (("terminated",), "the MPS server ended this client, as after a fault of another client on the GPU", ""),
)
"""Words of a result (cudaErrorMps*, CUDA_ERROR_MPS_*, 805 to 810, as cudaGetErrorString writes them), what it means,
and what to do."""

_CONNECTIONS = ("the clients of the MPS server use all connections to the GPU", _FEWER)


@check(
    id="GPU025",
    severity=Severity.ERROR,
    scope=Scope.HOST,
    when="M",
    cases=lambda: (
        Passes("Apple's MPS backend", logged("RuntimeError: MPS backend out of memory (MPS allocated: 8.0 GiB)")),
        Fails(
            "the daemon does not answer",
            logged(
                "[rank1]: torch.AcceleratorError: CUDA error: MPS client failed to connect to the MPS control daemon "
                "or the MPS server"
            ),
            ranks=(1,),
        ),
        Fails(
            "too many clients",
            logged(
                "node1:41:77 [0] NCCL WARN Cuda failure 808 'the hardware resources required to create MPS client "
                "have been exhausted'"
            ),
        ),
    ),
)
def mps_unreachable(job: Job) -> Iterator[Verdict]:
    """Ask whether CUDA can use the Multi-Process Service (MPS) of the host.

    Why it hurts: while a control daemon runs, every CUDA process of the host becomes a client of its server. If the
    server is gone, recovers from a fault or belongs to another user, CUDA can't start.
    Fix: `echo quit | nvidia-cuda-mps-control` ends the daemon, and `unset CUDA_MPS_PIPE_DIRECTORY` makes a process do
    without it: one rank a GPU needs no MPS. A fault of one client ends all clients of the GPU: read their logs too.
    """
    for group in event_groups(job, "gpu.mps_failed", by=("reason",)):
        meaning, fix = _meaning(group.value("reason") or "")
        yield finding_from_logs(group, meaning, fix=fix, confidence=0.95, explains=("GPU019", "GPU021"))


def _meaning(reason: str) -> tuple[str, str]:
    plain = reason.lower()
    if "connections" in plain:
        return _CONNECTIONS
    return next((meaning, fix) for words, meaning, fix in REASONS if any(word in plain for word in words))
