"""VER003: PyTorch has no code for the GPU."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from doctor.analysis.visible_devices import DEVICE_SECTIONS, cuda_devices, gpu_of, on_processor
from doctor.api import Finding, Job, Rank, Scope, Severity, Skip, Unknown, Verdict, check
from doctor.core.text import hosts_text
from doctor.facts import Gpu, GpuFacts, SoftwareFacts, TorchBuild
from doctor.knowledge.releases import within
from doctor.testing import Fails, JobBuilder, Passes, healthy

_BUILT = ("sm_75", "sm_80", "sm_86", "sm_90")
_MODELS = {
    "6.1": "NVIDIA GeForce GTX 1080",
    "8.0": "NVIDIA A100-SXM4-80GB",
    "8.9": "NVIDIA L40S",
    "9.0": "NVIDIA H100 80GB HBM3",
    "10.3": "NVIDIA B300",
    "12.0": "NVIDIA GeForce RTX 5090",
}


def _built(*architectures: str, capability: str = "9.0") -> JobBuilder:
    """A PyTorch build with these architectures; the second host has GPUs of that capability."""
    return (
        healthy(hosts=2)
        .alter(SoftwareFacts, torch=TorchBuild("2.8.0", cuda="12.8", architectures=architectures))
        .gpu(0, hosts=("node1",), compute_capability=capability, name=_MODELS[capability])
        .gpu(1, hosts=("node1",), compute_capability=capability, name=_MODELS[capability])
    )


@check(
    id="VER003",
    severity=Severity.ERROR,
    scope=Scope.RANK,
    when="PM",
    needs=(SoftwareFacts, GpuFacts),
    impacts={
        r"^The CUDA compiler": "The extension is not built, and the program that imports it fails.",
        r"^PyTorch or a CUDA extension": "Every kernel without code for this GPU fails, which ends the program.",
        r"^FlashAttention": "The attention call fails, which ends the program.",
    },
    cases=lambda: (
        Passes("code for this GPU", _built(*_BUILT)),
        Passes("the files do not state it", healthy(hosts=2)),
        Passes("code for an older GPU of the same generation", _built(*_BUILT, capability="8.9")),
        Passes("PTX that the driver compiles", _built(*_BUILT, "compute_90", capability="12.0")),
        Passes("code for the family", _built(*_BUILT, "sm_100f", capability="10.3")),
        Fails("a GPU newer than torch", _built(*_BUILT, capability="12.0"), ranks=(2, 3)),
        Fails("a GPU that torch dropped", _built(*_BUILT, capability="6.1"), ranks=(2, 3)),
        Fails("code for a later GPU of the generation", _built("sm_86", "sm_90", capability="8.0"), ranks=(2, 3)),
        Fails("code for one GPU alone", _built(*_BUILT, "sm_100a", capability="10.3"), ranks=(2, 3)),
    ),
)
def architecture_unsupported(job: Job) -> Iterator[Verdict]:
    """Ask whether PyTorch has code for the architecture of the rank's GPU.

    Why it hurts: PyTorch detects the GPU, but the first kernel on it fails ("no kernel image is available for execution
    on the device"), which ends the program.
    Fix: Install a PyTorch build whose `torch.cuda.get_arch_list()` includes the architecture of the GPU.
    """
    unsupported: dict[tuple[str, str], list[Rank]] = {}
    unread: list[int] = []
    devices = cuda_devices(job)
    for software, _, identical in job.each(SoftwareFacts, GpuFacts, also=DEVICE_SECTIONS):
        torch = software.torch
        if torch is None or not torch.cuda or on_processor(identical):
            continue
        for rank in identical.members:
            device = devices[rank]
            if device is None:
                continue
            capability = device.gpu.compute_capability
            if torch.architectures is None or capability is None:
                unread.append(rank.number)
            elif not _runs_on(capability, torch.architectures):
                unsupported.setdefault((capability, torch.version), []).append(rank)
    for (capability, _), ranks in unsupported.items():
        yield _finding(capability, ranks)
    if unread:
        yield Unknown(
            "the architectures of PyTorch or of the GPU could not be read",
            tuple(sorted(unread)),
            'python -c "import torch; print(torch.cuda.get_arch_list())"',
        )
    elif not unsupported and all(map(_needs_none, job.ranks)):
        yield Skip("no rank uses a GPU")


def _needs_none(rank: Rank) -> bool:
    software = rank.find(SoftwareFacts)
    return on_processor(rank) is not None or software is None or software.torch is None or not software.torch.cuda


class _Code(NamedTuple):
    """Compiled code for ``major.minor``. ``kind``: ``sm`` machine code or ``compute`` PTX; ``only``: ``a`` for exactly
    that GPU, ``f`` for its family, else empty."""

    kind: str
    major: int
    minor: int
    only: str


def _runs_on(capability: str, architectures: Iterable[str]) -> bool:
    """Machine code runs on GPUs of its major number with an equal or higher minor number; PTX on all newer GPUs; code
    marked ``a`` only on its GPU, ``f`` on its generation (CUDA programming guide, "application compatibility")."""
    major, _, minor = capability.partition(".")
    gpu = (int(major), int(minor or 0))
    found = (re.fullmatch(r"(?:(sm|compute)_)?(\d+)(\d)([af]?)", name) for name in architectures)
    codes = (_Code(match[1] or "sm", int(match[2]), int(match[3]), match[4]) for match in found if match)
    return any(_fits(gpu, code) for code in codes)


def _fits(gpu: tuple[int, int], code: _Code) -> bool:
    built = (code.major, code.minor)
    if code.only == "a":
        return gpu == built
    if code.kind == "compute" and not code.only:
        return gpu >= built
    return gpu[0] == code.major and gpu >= built


def _sufficient(capability: str) -> str:
    """``sm_80 or sm_86`` for 8.6: code for the GPU itself, or for the first one of its generation."""
    major, _, minor = capability.partition(".")
    own, first = f"sm_{major}{minor}", f"sm_{major}0"
    return own if own == first else f"{first} or {own}"


def _fix(capability: str, torch: str, hosts: tuple[str, ...]) -> str:
    where, wheels = hosts_text(hosts), _wheels(capability, torch)
    if wheels is None:
        return (
            f"On {where}, install a PyTorch build whose `torch.cuda.get_arch_list()` includes "
            f"{_sufficient(capability)}."
        )
    # With its local version: pip takes any other build of the release as "already satisfied".
    wanted = shlex.quote(f"torch=={torch.partition('+')[0]}+{wheels}")
    return (
        f"On {where}, install the build of PyTorch that has it:\npip install {wanted} "
        f"--index-url https://download.pytorch.org/whl/{wheels}"
    )


def _wheels(capability: str, torch: str) -> str | None:
    """The folder of wheels of the same release with code for a GPU (pytorch .ci/manywheel/build_cuda.sh): CUDA 12.8
    brought code for Blackwell, and builds for CUDA 12.6 kept that for Maxwell and Pascal."""
    major = int(capability.partition(".")[0])
    if major in (10, 12) and within(torch, "2.7", before="2.11"):
        return "cu128"
    return "cu126" if major in (5, 6) and within(torch, "2.7", before="2.11") else None


def _finding(capability: str, members: list[Rank]) -> Finding:
    gpu: Gpu | None = gpu_of(members[0])
    software = members[0].find(SoftwareFacts)
    torch = software.torch if software else None
    return Finding(
        f"This build of PyTorch {torch.version if torch else ''} has no code for sm_{capability.replace('.', '')}"
        f" ({gpu.name if gpu else 'GPU'})",
        ranks=tuple(sorted(rank.number for rank in members)),
        evidence={
            "compute_capability": capability,
            "gpu": gpu.name if gpu else None,
            "architectures": list(torch.architectures or ()) if torch else [],
        },
        fix=_fix(capability, torch.version if torch else "", tuple(dict.fromkeys(rank.host.name for rank in members))),
    )
