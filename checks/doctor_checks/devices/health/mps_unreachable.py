"""GPU025: the CUDA Multi-Process Service cannot be used."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.api import Job, Scope, Severity, Verdict, check, event_groups, finding_from_logs
from doctor.testing import Fails, Passes, logged

_RESTART = "Restart MPS as the user of the job:\necho quit | nvidia-cuda-mps-control\nnvidia-cuda-mps-control -d"
_FEWER = "Start fewer processes on this GPU: its MPS server accepts 48 clients (16 before Volta)."
_OTHERS = "Read the logs of the other processes on this GPU: a fault of one MPS client ends all of them."

REASONS = (
    (("connect", "cannot find"), "The MPS control daemon or its server is unreachable", _RESTART),
    (("remote", "rpc"), "The connection to the MPS server was lost", _RESTART),
    (("ready",), "The MPS server accepts no new clients: it is recovering from a fault or shutting down", _RESTART),
    (("create", "clients"), "The MPS server has reached the GPU's limit of clients", _FEWER),
    (("terminated",), "The MPS server terminated this client, usually after a fault of another client", _OTHERS),
)
"""Words of a result (cudaErrorMps*, CUDA_ERROR_MPS_*, 805 to 810, as cudaGetErrorString writes them), its meaning and
its fix."""

_CONNECTIONS = ("The clients of the MPS server use all connections to the GPU", _FEWER)


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
    server has exited, is recovering from a fault or belongs to another user, CUDA fails to start.
    Fix: Stop the daemon with `echo quit | nvidia-cuda-mps-control`, or unset CUDA_MPS_PIPE_DIRECTORY for the job;
    with one rank per GPU, MPS is not needed.
    """
    for group in event_groups(job, "gpu.mps_failed", by=("reason",)):
        meaning, fix = _meaning(group.value("reason") or "")
        yield finding_from_logs(group, meaning, fix=fix, confidence=0.95, explains=("GPU019", "GPU021"))


def _meaning(reason: str) -> tuple[str, str]:
    plain = reason.lower()
    if "connections" in plain:
        return _CONNECTIONS
    return next((meaning, fix) for words, meaning, fix in REASONS if any(word in plain for word in words))
