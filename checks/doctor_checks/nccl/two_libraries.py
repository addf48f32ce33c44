"""NCCL010: more than one NCCL can be loaded."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.api import (
    Finding,
    Job,
    NcclLibrary,
    Package,
    Severity,
    Sick,
    Skip,
    SoftwareFacts,
    TorchBuild,
    Unknown,
    Verdict,
    Well,
    check,
    group_alike,
    healthy,
    is_older,
)

_WHEEL = "/opt/env/lib/python3.11/site-packages/nvidia/nccl/lib/libnccl.so.2"


def _libraries(version: str, origin: str = "LD_LIBRARY_PATH") -> tuple[NcclLibrary, ...]:
    found = NcclLibrary("/usr/lib/x86_64-linux-gnu/libnccl.so.2", version, origin, chosen=True)
    return (found, NcclLibrary(_WHEEL, "2.27.3", "wheel nvidia-nccl-cu12"))


def _two_wheels(version: str) -> tuple[tuple[Package, ...], tuple[NcclLibrary, ...]]:
    packages = (Package("torch", "2.8.0"), Package("nvidia-nccl-cu12", "2.27.3"), Package("nvidia-nccl-cu11", "2.21.5"))
    return packages, (NcclLibrary(_WHEEL, version, "wheel nvidia-nccl-cu12", chosen=True),)


@check(
    id="NCCL010",
    severity=Severity.ERROR,
    when="PM",
    needs=(SoftwareFacts,),
    cases=lambda: (
        Well("the wheel alone", healthy()),
        Well("no NCCL", healthy(gpus=0)),
        Well(
            "the system has an older one, which torch does not get",
            healthy().alter(
                SoftwareFacts,
                nccl_libraries=lambda old: (*old, NcclLibrary("/usr/lib/x86_64-linux-gnu/libnccl.so.2", "2.18.3", "system")),
            ),
        ),
        Well(
            "a newer wheel, installed on purpose",
            healthy().alter(SoftwareFacts, nccl_libraries=(NcclLibrary(_WHEEL, "2.30.7", "wheel nvidia-nccl-cu12", chosen=True),)),
        ),
        Well("linked into torch", healthy().alter(SoftwareFacts, nccl_libraries=(NcclLibrary("libtorch_cuda.so", "2.27.3", "torch", chosen=True),))),
        Sick("LD_LIBRARY_PATH leads to an older one", healthy(2, 2).alter(SoftwareFacts, ranks=(2, 3), nccl_libraries=_libraries("2.18.3")), ranks=(2, 3)),
        Sick("LD_PRELOAD brings a newer one", healthy().alter(SoftwareFacts, nccl_libraries=_libraries("2.30.7", "LD_PRELOAD")), ranks=(0, 1), severity=Severity.WARNING),
        Sick(
            "two wheels share one folder, and the older one is there",
            healthy().alter(SoftwareFacts, packages=_two_wheels("2.21.5")[0], nccl_libraries=_two_wheels("2.21.5")[1]),
            ranks=(0, 1),
        ),
        Sick(
            "two wheels, and the right one is there by luck",
            healthy().alter(SoftwareFacts, packages=_two_wheels("2.27.3")[0], nccl_libraries=_two_wheels("2.27.3")[1]),
            ranks=(0, 1),
            severity=Severity.INFO,
        ),
        Sick(
            "an older wheel than torch asks for",
            healthy().alter(SoftwareFacts, nccl_libraries=(NcclLibrary(_WHEEL, "2.21.5", "wheel nvidia-nccl-cu12", chosen=True),)),
            ranks=(0, 1),
        ),
    ),
)
def two_libraries(job: Job) -> Iterator[Verdict]:
    """Ask whether torch gets the NCCL that it was built with, where several can be found.

    Why it hurts: an older one lacks functions (`undefined symbol: ncclCommRegister` when torch is imported) or brings
    back faults that were mended; which one is loaded hangs on variables and on the order of imports.
    Fix: take the other one out of LD_PRELOAD and LD_LIBRARY_PATH, and keep one nvidia-nccl wheel.
    """
    if not any(software.nccl_libraries for software, _ in job.facts(SoftwareFacts)):
        yield Skip("no NCCL can be found")
        return
    for verdict, ranks in group_alike(job, SoftwareFacts, lambda software, _: _Case.of(software)):
        if verdict is not None:
            yield verdict.judge(ranks)


class _Case(tuple[TorchBuild, NcclLibrary, "tuple[NcclLibrary, ...]", "tuple[str, ...]"]):
    """placeholder"""
