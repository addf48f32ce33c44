"""GPU021: torch lacks what the job asks for."""

from __future__ import annotations

import re
from collections.abc import Iterator

from doctor.analysis.visible_devices import backend_asked, processor_asked
from doctor.api import (
    EventGroup,
    Finding,
    IdenticalRanks,
    Job,
    Severity,
    Skip,
    Unknown,
    Verdict,
    check,
    event_groups,
    finding_from_logs,
)
from doctor.facts import EnvironmentFacts, GpuFacts, MissingReason, SoftwareFacts, TorchBuild, TrainerFacts
from doctor.testing import Fails, JobBuilder, Passes, healthy, logged

BUILT_IN = frozenset({"nccl", "gloo", "mpi", "ucc", "xccl"})
"""Backends that are part of torch or not at all (torch/distributed/distributed_c10d.py, class Backend); any other name
is a plug-in's."""


def _processor_build(sketch: JobBuilder, ranks: tuple[int, ...] | None = None) -> JobBuilder:
    return sketch.alter(
        SoftwareFacts, ranks=ranks, torch=TorchBuild("2.8.0+cpu", backends=("gloo",)), nccl_libraries=()
    )


def _from_logs(job: Job) -> Iterator[Finding]:
    for group in event_groups(job, "gpu.backend_absent", by=("backend", "device")):
        summary, confidence = _summary_and_confidence(group)
        only_warned = all("CUDA initialization:" in event.text for event in group.events)
        severity = Severity.INFO if only_warned else None  # as on any machine without a GPU
        yield finding_from_logs(group, summary, severity=severity, confidence=confidence, symptoms=not only_warned)


def _summary_and_confidence(group: EventGroup) -> tuple[str, float]:
    """What lacks, and how surely it is this torch that lacks it: a build states it, hidden devices look the same to
    torch as absent ones."""
    if backend := group.value("backend"):
        return f"this torch is built without {backend}, which is asked for", 0.95
    if device := group.value("device"):
        return f"this torch is built without {device}, which is asked for", 0.95
    if device := group.value("device2"):
        return f"no backend of torch.distributed is registered for the device type {device}", 0.8
    if group.value("driver"):
        return "torch finds no NVIDIA driver", 0.6
    if group.value("hidden"):
        return "torch sees no GPU: there is none, it is hidden, or the driver does not start", 0.4
    return "GPUs are asked for, and torch sees none", 0.7


@check(
    id="GPU021",
    severity=Severity.ERROR,
    when="PM",
    needs=(SoftwareFacts,),
    from_logs=_from_logs,
    cases=lambda: (
        Passes("CUDA build on GPUs", healthy(hosts=2, per_host=2)),
        Passes("CPU build without GPU", healthy(per_host=2, gpus=0)),
        Passes(
            "CPU asked for on a host with GPUs",
            _processor_build(healthy(per_host=2)).put(TrainerFacts(source="fabric run", accelerator="cpu")),
        ),
        Passes("CPU build, GPUs hidden", _processor_build(healthy(per_host=2)).environ(CUDA_VISIBLE_DEVICES="")),
        Passes("Gloo asked for", healthy(per_host=2, gpus=0).put(TrainerFacts(source="fabric run", backend="gloo"))),
        Passes("a plug-in's backend", healthy(per_host=2).put(TrainerFacts(source="fabric run", backend="smddp"))),
        Passes(
            "CPU build, and the driver does not answer",
            _processor_build(healthy(per_host=2)).drop(
                GpuFacts, MissingReason.TIMEOUT, "reading gpus took longer than 10 s"
            ),
        ),
        Fails("CPU build on one rank", _processor_build(healthy(hosts=2, per_host=2), (3,)), ranks=(3,)),
        Fails(
            "NCCL asked for in a CPU build",
            healthy(per_host=2, gpus=0).put(TrainerFacts(source="fabric run", backend="nccl")),
            ranks=(0, 1),
        ),
        Fails(
            "MPI asked for, which wheels do not have",
            healthy(per_host=2).put(TrainerFacts(source="fabric run", backend="cpu:mpi,cuda:nccl")),
            ranks=(0, 1),
        ),
        Passes(
            "log of a machine without a GPU",
            logged("UserWarning: CUDA initialization: Found no NVIDIA driver on your system. (Triggered internally)"),
            silent=False,
        ),
    ),
)
def backend_unavailable(job: Job) -> Iterator[Verdict]:
    """Ask whether this torch has the backend that is asked for, and CUDA where there are GPUs.

    Why it hurts: the job stops with "Distributed package doesn't have NCCL built in", or trains on the CPU, silently
    and a hundred times slower.
    Fix: install the build for your CUDA, the same on all hosts: `pip install --force-reinstall torch` with the index
    that https://pytorch.org/get-started/locally names for it; or ask for `gloo` where you want the CPU.
    """
    also = (GpuFacts, TrainerFacts, EnvironmentFacts)
    builds = [
        (software.torch, identical) for software, identical in job.each(SoftwareFacts, also=also) if software.torch
    ]
    if not builds:
        yield Skip("torch is not installed")
    for torch, identical in builds:
        lacking = [
            name
            for name in re.findall(r"(?:^|[,:])\s*([a-z0-9_]+)\s*(?=,|$)", backend_asked(identical) or "")
            if name in BUILT_IN and torch.backends and name not in torch.backends
        ]
        without_cuda = not torch.cuda and not torch.hip and processor_asked(identical) is None
        missing = identical.missing(GpuFacts)
        if lacking:
            yield _finding(torch, identical, f"torch {torch.version} has no {', '.join(lacking)}, which is asked for")
        elif without_cuda and _has_gpus(identical):
            yield _finding(torch, identical, f"torch {torch.version} is built without CUDA, and the host has GPUs")
        elif without_cuda and missing and missing.lack is not MissingReason.ABSENT:
            words = f"torch {torch.version} is built without CUDA, and whether there are GPUs can't be seen"
            yield Unknown(f"{words}: {missing.reason}", identical.ranks, missing.unhide)


def _has_gpus(identical: IdenticalRanks) -> bool:
    gpus = identical.find(GpuFacts)
    return gpus is not None and bool(gpus.gpus)


def _finding(torch: TorchBuild, identical: IdenticalRanks, summary: str) -> Finding:
    gpus = identical.find(GpuFacts)
    return Finding(
        summary,
        ranks=identical.ranks,
        evidence={
            "torch": torch.version,
            "cuda": torch.cuda,
            "backends": list(torch.backends),
            "asked_for": backend_asked(identical),
            "gpus": len(gpus.gpus) if gpus else 0,
        },
    )
