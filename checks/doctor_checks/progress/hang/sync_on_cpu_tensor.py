"""RUN011: a tensor in host memory is passed to a backend that accepts only device tensors."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.api import Job, Severity, Verdict, check, event_groups, finding_from_logs
from doctor.facts import Frame
from doctor.testing import Fails, Passes, logged

_NEW = "RuntimeError: No backend type associated with device type cpu"


@check(
    id="RUN011",
    severity=Severity.ERROR,
    when="M",
    cases=lambda: (
        Passes("a different tensor error", logged("RuntimeError: Tensors must be contiguous")),
        Fails(
            "log of Lightning",
            logged(
                '[rank0]:   File "/env/lib/python3.11/site-packages/lightning/fabric/utilities/distributed.py", '
                "line 229, in _sync_ddp",
                f"[rank0]: {_NEW}",
            ),
            ranks=(0,),
        ),
    ),
)
def sync_on_cpu_tensor(job: Job) -> Iterator[Verdict]:
    """Ask whether collectives receive only tensors on devices that the backend supports.

    Why it hurts: the call raises RuntimeError, which ends the job.
    Fix: Move the tensor to the device of the backend before the call, or initialize both backends with
    `init_process_group("cpu:gloo,cuda:nccl")` (Lightning: `DDPStrategy(process_group_backend="cpu:gloo,cuda:nccl")`).
    """
    for group in event_groups(job, "torch.cpu_tensor", "run.cpu_tensor"):
        device = group.value("device") or "cpu"
        if device not in ("cpu", "cuda"):
            continue  # GPU021: this build has no backend for the accelerator
        frames = next((event.frames for event in group.events if event.frames), ())
        who, fix = _caller(frames)
        yield finding_from_logs(
            group,
            f"The process group has no backend for the {device.upper()} tensor of a collective{who}",
            fix=fix,
            confidence=0.95,
        )


def _caller(frames: tuple[Frame, ...]) -> tuple[str, str]:
    for path, words, fix in _CALLERS:
        if any(path in frame.file for frame in frames):
            return words, fix
    return "", ""


_CALLERS = (
    (
        "logger_connector/",
        " in self.log(..., sync_dist=True)",
        "Move the value to the device before it is logged (`value.to(self.device)`), or omit `sync_dist` for a "
        "torchmetrics metric.",
    ),
    (
        "callbacks/",
        " in a callback that compares a metric",
        "Move the monitored value to the device before it is logged (`value.to(self.device)`).",
    ),
    (
        "clip_grad",
        " in gradient clipping",
        'Initialize both backends with `init_process_group("cpu:gloo,cuda:nccl")`, because parameters are offloaded to '
        "host memory.",
    ),
)
