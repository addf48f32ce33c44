"""GPU021: PyTorch lacks the backend that the job requests."""

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
    hosts_text,
    ranks_in_words,
)
from doctor.core.text import conjunction
from doctor.facts import EnvironmentFacts, GpuFacts, MissingReason, SoftwareFacts, TorchBuild, TrainerFacts
from doctor.testing import Fails, JobBuilder, Passes, healthy, logged

BUILT_IN = frozenset({"nccl", "gloo", "mpi", "ucc", "xccl"})
"""Built-in backends of torch (torch/distributed/distributed_c10d.py, class Backend); plugins provide the others."""


def _processor_build(sketch: JobBuilder, ranks: tuple[int, ...] | None = None) -> JobBuilder:
    return sketch.alter(
        SoftwareFacts, ranks=ranks, torch=TorchBuild("2.8.0+cpu", backends=("gloo",)), nccl_libraries=()
    )


def _from_logs(job: Job) -> Iterator[Finding]:
    for group in event_groups(job, "gpu.backend_absent", by=("backend", "device")):
        summary, confidence = _summary_and_confidence(group)
        only_warned = all("CUDA initialization:" in event.text for event in group.events)
        severity = Severity.INFO if only_warned else None  # as on any machine without a GPU
        yield finding_from_logs(
            group,
            summary,
            effect=_effect_of_log(group, only_warned=only_warned),
            fix=_fix_of_log(group),
            severity=severity,
            confidence=confidence,
            symptoms=not only_warned,
        )


def _effect_of_log(group: EventGroup, *, only_warned: bool) -> str:
    if only_warned:
        return "None if the job is meant to run on the CPU."
    raised = all(re.search("(?:Error|Exception): ", event.text) for event in group.events)
    return _FAILS if raised and not group.value("backend") and not group.value("device2") else ""


_FAILS = "The ranks that logged this fail, and the job ends."

_NOT_SEEN = (
    "Check on the affected host that the driver works and which GPUs are visible:\n"
    "nvidia-smi -L\necho $CUDA_VISIBLE_DEVICES"
)
_NO_DRIVER = (
    "Check on the affected host that the driver works, and in a container start it with `--gpus all`:\nnvidia-smi -L"
)
_NO_MPI = "Request the backend nccl or gloo instead of mpi, which PyTorch wheels do not contain."


def _fix_of_log(group: EventGroup) -> str:
    backend, device = (group.value("backend") or "").lower(), (group.value("device") or "").lower()
    if backend == "mpi":
        return _NO_MPI
    if device == "xpu":
        return (
            "Install a build with XPU support, or select the installed backend if this host has no Intel GPU:\n"
            "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/xpu"
        )
    if group.value("driver"):
        return _NO_DRIVER
    if other := group.value("device2"):
        return f"Install a PyTorch build or extension that has a torch.distributed backend for {other}."
    return "" if backend or device or "_cuda_setDevice" in group.first.text else _NOT_SEEN


def _summary_and_confidence(group: EventGroup) -> tuple[str, float]:
    """What is missing, and the confidence that the torch build causes it: torch cannot distinguish hidden devices from
    absent ones."""
    if backend := group.value("backend"):
        return f"The job requests {backend}, but PyTorch is built without {backend} support", 0.95
    if "_cuda_setDevice" in group.first.text:
        return "The job requests CUDA, but PyTorch is built without CUDA support", 0.7
    if device := group.value("device"):
        return f"The job requests {device.upper()}, but PyTorch is built without {device.upper()} support", 0.95
    if device := group.value("device2"):
        return f"No torch.distributed backend is registered for the device type {device}", 0.8
    if group.value("driver"):
        return "PyTorch finds no NVIDIA driver", 0.6
    if group.value("hidden"):
        return "PyTorch sees no GPU: the host has none, it is hidden, or the driver does not start", 0.4
    return "The job requests GPUs, but PyTorch sees none", 0.7


@check(
    id="GPU021",
    severity=Severity.ERROR,
    when="PM",
    needs=(SoftwareFacts,),
    from_logs=_from_logs,
    impacts={
        r"finds no NVIDIA driver|sees no GPU|sees none": (
            "The job fails at its first use of CUDA, or silently trains on the CPU."
        ),
        r"requests (?:\w+, )*(?:NCCL|MPI|UCC|XCCL|GLOO)\b": "init_process_group() fails, and the job ends at startup.",
        r"No torch.distributed backend": "Collectives on tensors of this device type fail, and the job ends.",
        r"without CUDA, but": (
            'The ranks fail with "Torch not compiled with CUDA enabled", or silently train on the CPU.'
        ),
        r"is built without": _FAILS,
    },
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
    """Ask whether PyTorch has the backend that the job requests, and CUDA if the host has GPUs.

    Why it hurts: the job fails with "Distributed package doesn't have NCCL built in", or silently trains on the CPU.
    Fix: Run `pip install --force-reinstall torch` on all hosts with the index URL that
    https://pytorch.org/get-started/locally lists for their CUDA release.
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
            yield _finding(
                torch,
                identical,
                f"The job requests {conjunction(lacking).upper()}, but PyTorch {torch.version} is built without "
                f"{f'{lacking[0].upper()} support' if len(lacking) == 1 else 'them'}",
            )
        elif without_cuda and _has_gpus(identical):
            yield _finding(
                torch,
                identical,
                f"PyTorch {torch.version} is built without CUDA, but "
                f"{hosts_text(job.hosts_of(identical.ranks))} {'has' if _is_one_host(job, identical) else 'have'} GPUs",
            )
        elif without_cuda and missing and missing.lack is not MissingReason.ABSENT:
            words = f"PyTorch {torch.version} is built without CUDA, and the GPUs of the host are not visible"
            yield Unknown(f"{words}: {missing.reason}", identical.ranks, missing.unhide)


def _is_one_host(job: Job, identical: IdenticalRanks) -> bool:
    return len(set(job.hosts_of(identical.ranks))) == 1


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
        fix=_fix(summary, identical, has_gpus=bool(gpus and gpus.gpus)),
    )


def _fix(summary: str, identical: IdenticalRanks, *, has_gpus: bool) -> str:
    if "requests MPI" in summary:
        return _NO_MPI
    if not has_gpus:
        return "Request the gloo backend, because the host has no GPUs."
    return (
        f"Run `pip install --force-reinstall torch` in the environment of {ranks_in_words(identical.ranks)} with the "
        "index URL that https://pytorch.org/get-started/locally lists for the CUDA release."
    )
