"""GPU025: the CUDA Multi-Process Service cannot be used."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.api import Finding, Job, Scope, Severity, Verdict, check, event_groups, finding_from_logs, merge
from doctor.facts import EnvironmentFacts, ProcessFacts
from doctor.testing import Fails, JobBuilder, Passes, healthy, logged

_RESTART = "Restart MPS as the job's user:\necho quit | nvidia-cuda-mps-control\nnvidia-cuda-mps-control -d"
_FEWER = "Start fewer processes on this GPU, or stop MPS if each rank has its own GPU."
_OTHERS = (
    "Find the first fault in the logs of all processes on this GPU, because a fault of one MPS client ends all of them."
)

REASONS = (
    (("connect", "cannot find"), "The MPS control daemon or its server is unreachable", _RESTART),
    (("remote", "rpc"), "The connection to the MPS server was lost", _RESTART),
    (("ready",), "The MPS server accepts no new clients: it is recovering from a fault or shutting down", _RESTART),
    (("create", "clients"), "The MPS server has reached the GPU's limit of clients", _FEWER),
    (("terminated",), "The MPS server terminated this client, probably after a fault of another client", _OTHERS),
)
"""Words of a result (cudaErrorMps*, CUDA_ERROR_MPS_*, 805 to 810, as cudaGetErrorString writes them), its meaning and
its fix."""

_CONNECTIONS = ("The clients of the MPS server use all connections to the GPU", _FEWER)


def _directory(daemon: bool | None) -> JobBuilder:
    return healthy(per_host=2).environ(CUDA_MPS_PIPE_DIRECTORY="/run/mps").alter(ProcessFacts, mps_daemon=daemon)


def _from_logs(job: Job) -> Iterator[Finding]:
    for group in event_groups(job, "gpu.mps_failed", by=("reason",)):
        meaning, fix = _meaning(group.value("reason") or "")
        yield finding_from_logs(group, meaning, fix=fix, confidence=0.95, explains=("GPU019", "GPU021"))


@check(
    id="GPU025",
    severity=Severity.ERROR,
    scope=Scope.HOST,
    when="PM",
    needs=(ProcessFacts,),
    from_logs=_from_logs,
    impacts={
        r"reached the GPU's limit": "Further processes cannot use the GPU until one of the MPS clients ends.",
        r"terminated this client": (
            "All clients of the server on this GPU end with an error, and the other ranks wait for them until "
            "their timeout."
        ),
        r"accepts no new clients|use all connections": (
            "CUDA does not start in this process, and the other ranks wait for it until their timeout."
        ),
        r"is unreachable": "CUDA does not start in any process that uses this MPS daemon.",
        r"connection to the MPS server was lost": (
            "The process can no longer use CUDA: it fails, and the other ranks wait for it until their timeout."
        ),
    },
    cases=lambda: (
        Passes("no MPS", healthy(per_host=2)),
        Passes("a daemon", _directory(True)),
        Passes("whether there is a daemon is unknown", _directory(None)),
        Fails("no daemon in the directory of the job", _directory(False), ranks=(0, 1), severity=Severity.INFO),
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
    Fix: Stop the daemon with `echo quit | nvidia-cuda-mps-control`, or unset CUDA_MPS_PIPE_DIRECTORY for the job.
    """
    yield from merge(_without_daemon(job))


def _without_daemon(job: Job) -> Iterator[Finding]:
    for process, environment, identical in job.each(ProcessFacts, EnvironmentFacts):
        if process.mps_daemon is False:
            folder = environment.get("CUDA_MPS_PIPE_DIRECTORY")
            yield Finding(
                f"No MPS control daemon listens in CUDA_MPS_PIPE_DIRECTORY={folder}: CUDA runs without MPS",
                ranks=identical.ranks,
                evidence={"CUDA_MPS_PIPE_DIRECTORY": folder},
                effect="Processes that share a GPU are time-sliced; in exclusive-process mode, CUDA fails to "
                "initialize in all but the first.",
                fix="Start the control daemon with this CUDA_MPS_PIPE_DIRECTORY, or unset the variable if the job "
                "needs no MPS:\nnvidia-cuda-mps-control -d",
                severity=Severity.INFO,
            )


def _meaning(reason: str) -> tuple[str, str]:
    plain = reason.lower()
    if "connections" in plain:
        return _CONNECTIONS
    return next((meaning, fix) for words, meaning, fix in REASONS if any(word in plain for word in words))
