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
        Passes("another complaint about tensors", logged("RuntimeError: Tensors must be contiguous")),
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
    """Ask whether tensors in host memory are handed to collectives of devices.

    Why it hurts: NCCL takes tensors of devices alone, so the first such call ends the rank, most often at the end of an
    epoch, when metrics are averaged.
    Fix: move the value to the device first (`value.to(self.device)`); leave `sync_dist=True` away for metrics of
    torchmetrics, which average by themselves; or use both back ends:
    `init_process_group("cpu:gloo,cuda:nccl")`, in Lightning
    `DDPStrategy(process_group_backend="cpu:gloo,cuda:nccl")`.
    """
    for group in event_groups(job, "torch.cpu_tensor", "run.cpu_tensor"):
        device = group.value("device") or "cpu"
        if device not in ("cpu", "cuda"):
            continue  # GPU021: this build has no backend for the accelerator
        frames = next((event.frames for event in group.events if event.frames), ())
        who, fix = _caller(frames)
        yield finding_from_logs(
            group,
            f"a tensor of the device type {device} is given to a collective{who}, and the group has no back end for it",
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
        " by self.log(..., sync_dist=True)",
        "`self.log(name, value.to(self.device), sync_dist=True)`; without `sync_dist` for metrics of torchmetrics.",
    ),
    (
        "callbacks/",
        " by a callback that compares a monitored value",
        "Log the monitored value as a tensor of the device: `self.log(name, value.to(self.device))`.",
    ),
    (
        "clip_grad",
        " while gradients are clipped, which are in host memory",
        "With parameters offloaded to the host, make the group with both back ends: "
        '`init_process_group("cpu:gloo,cuda:nccl")`.',
    ),
)
