"""VER002: the driver or its libraries do not support the CUDA runtime."""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

from doctor.analysis.missing_sections import lacking_verdicts
from doctor.api import (
    Finding,
    IdenticalRanks,
    Job,
    Scope,
    Severity,
    Skip,
    Unknown,
    Verdict,
    check,
    event_groups,
    finding_from_logs,
    is_older,
    merge,
)
from doctor.core.text import HERE
from doctor.facts import DriverFacts, GpuFacts, MissingReason, SoftwareFacts, TorchBuild
from doctor.knowledge.nvidia import DRIVER_MISMATCH
from doctor.knowledge.releases import minimum_driver
from doctor.testing import Fails, JobBuilder, Passes, healthy


def _drivers(
    driver: str, supports: str | None, torch_cuda: str | None = "12.8", compat: str | None = None
) -> JobBuilder:
    return (
        healthy(hosts=2)
        .alter(SoftwareFacts, ranks=(2, 3), torch=TorchBuild("2.8.0", cuda=torch_cuda))
        .alter(GpuFacts, hosts=("node1",), driver_version=driver, cuda_version=supports)
        .alter(DriverFacts, hosts=("node1",), kernel_driver=driver, forward_compatibility=compat)
    )


def _from_logs(job: Job) -> Iterator[Finding]:
    for group in event_groups(job, "version.driver"):
        found = group.value("found")
        supports = f"{int(found) // 1000}.{int(found) % 1000 // 10}" if found else ""
        known = f", which supports CUDA {supports}," if supports else ""
        claim, fix = next(
            ((claim, fix) for words, claim, fix in _OTHER_MISFITS if re.search(words, group.first.text)),
            (
                f"The driver{known} is too old for the CUDA runtime in use",
                f"Update the driver, or install a PyTorch build for {_supported(supports)}." if supports else "",
            ),
        )
        yield finding_from_logs(
            group,
            claim,
            evidence={"cuda_of_driver": supports} if supports else None,
            fix=fix,
            confidence=0.95,
            explains=_CONSEQUENCES,
        )


_OTHER_MISFITS = (
    (
        r"forward compatibility was attempted|(?i:compat_?not_?supported)",
        "The GPU does not support the loaded CUDA compat package",
        "Remove the CUDA compat directory from LD_LIBRARY_PATH or /etc/ld.so.conf.d.",
    ),
    (
        r"unsupported display driver|(?i:system_?driver_?mismatch)",
        "The loaded libcuda does not match the kernel driver",
        "Reboot the host if the driver was updated, or remove the CUDA compat directory from LD_LIBRARY_PATH.",
    ),
)
"""Messages of other causes than an old driver: a pattern, the claim and the fix (CUDA driver API, errors 803, 804)."""
_CONSEQUENCES = ("GPU021", "GPU022", "NCCL008")


@check(
    id="VER002",
    severity=Severity.ERROR,
    scope=Scope.RANK,
    when="PM",
    needs=(SoftwareFacts,),
    from_logs=_from_logs,
    impacts={
        r"and compat package": (
            'CUDA initialization fails with "CUDA driver version is insufficient" or "system has unsupported display '
            'driver / cuda driver combination".'
        ),
    },
    cases=lambda: (
        Passes("newer than needed", healthy(hosts=2)),
        Passes("older within the same major release", _drivers("525.60.13", "12.0")),
        Fails(
            "LD_LIBRARY_PATH leads to the stubs of a toolkit",
            _drivers("570.124.06", "12.8").alter(
                DriverFacts, hosts=("node1",), stub_libcuda="/usr/local/cuda/lib64/stubs/libcuda.so.1"
            ),
            ranks=(2, 3),
        ),
        Passes("CUDA 11 under a driver for 12", _drivers("525.60.13", "12.0", torch_cuda="11.8")),
        Passes("too old, with a forward-compatibility package", _drivers("535.183.01", "12.2", "13.0", "580.82.07")),
        Passes("torch without CUDA on that host", _drivers("470.57.02", "11.4", torch_cuda=None)),
        Fails(
            "a forward-compatibility package for a GeForce card",
            _drivers("570.124.06", "12.8", "13.0", "580.82.07").gpu(
                0, hosts=("node1",), name="NVIDIA GeForce RTX 4090"
            ),
            ranks=(2, 3),
        ),
        Fails(
            "a forward-compatibility package for a GeForce card whose driver does not need it",
            _drivers("525.147.05", "12.0", "12.1", "545.23.08").gpu(
                0, hosts=("node1",), name="NVIDIA GeForce RTX 3060"
            ),
            ranks=(2, 3),
        ),
        Passes("the same on a data center GPU", _drivers("525.147.05", "12.0", "12.1", "545.23.08")),
        Fails(
            "a compatibility package of CUDA 11.7 under a driver for 12.8",
            _drivers("570.124.06", "12.8", "12.8", "515.65.01"),
            ranks=(2, 3),
        ),
        Fails(
            "a driver that was updated and not loaded again",
            healthy(hosts=2).drop(
                GpuFacts, MissingReason.HIDDEN, f"{DRIVER_MISMATCH} (NVML code 18)", hosts=("node1",)
            ),
            ranks=(2, 3),
        ),
        Fails("CUDA 12 under a driver for 11", _drivers("470.57.02", "11.4"), ranks=(2, 3)),
        Fails("CUDA 10.2 under a driver for 10.1", _drivers("418.87.01", "10.1", "10.2"), ranks=(2, 3)),
        Passes("CUDA 10.2 under a driver for 11", _drivers("450.51.06", "11.0", "10.2")),
        Fails("CUDA 13 under a driver for 12", _drivers("570.124.06", "12.8", "13.0"), ranks=(2, 3)),
        Fails(
            "just below the minimum, NVML silent",
            _drivers("525.60.11", None),
            ranks=(2, 3),
            severity=Severity.WARNING,
        ),
        Fails("a driver of an older branch, NVML silent", _drivers("470.57.02", None), ranks=(2, 3)),
        Fails(
            "the compatibility package is too old itself",
            _drivers("470.57.02", "11.4", "13.0", "570.86.10"),
            ranks=(2, 3),
        ),
    ),
)
def driver_too_old(job: Job) -> Iterator[Verdict]:
    """Ask whether the driver supports the CUDA release of PyTorch and matches its libraries.

    Why it hurts: PyTorch cannot use the GPU: the program fails, or continues on the CPU.
    Fix: Update the driver, or install a PyTorch build for a CUDA release that the driver supports
    (https://pytorch.org/get-started/locally).
    """
    mismatched = tuple(_mismatched(job))
    yield from merge(mismatched, job.place_of)
    built = [software.torch.cuda for software, _ in job.facts(SoftwareFacts) if software.torch]
    if not any(built):
        yield Skip("torch is built without CUDA" if built else "torch is not installed")
        return
    if not mismatched:
        yield from lacking_verdicts(job, GpuFacts)
    old: dict[_DriverRequirement, list[int]] = {}
    unfit: list[Finding] = []
    for software, gpus, identical in job.each(SoftwareFacts, GpuFacts, also=(DriverFacts,)):
        if software.torch is None or software.torch.cuda is None:
            continue
        need = _need(software.torch.cuda, gpus, identical.find(DriverFacts))
        if found := _unfit_libcuda(need, gpus, identical):
            unfit.append(found)
            continue
        if need.driver is None:
            yield Unknown("the driver version could not be read", identical.ranks, "cat /proc/driver/nvidia/version")
        elif need.minimum is None:
            yield Unknown(f"the minimum driver of CUDA {need.cuda} is unknown to this release", identical.ranks)
        elif _is_too_old(need):
            old.setdefault(need, []).extend(identical.ranks)
    yield from merge(unfit, job.place_of)
    for need, ranks in old.items():
        yield _too_old(job, need, tuple(ranks))


def _too_old(job: Job, need: _DriverRequirement, ranks: tuple[int, ...]) -> Finding:
    beside = f" and compat package {need.compatibility}" if need.compatibility else ""
    is_close = not beside and need.supports is None and _branch(need.driver) == _branch(need.minimum)
    return Finding(
        f"Driver {need.driver} is below the documented minimum of CUDA {need.cuda} ({need.minimum})"
        if is_close
        else f"Driver {need.driver}{beside} {'are' if beside else 'is'} too old for CUDA {need.cuda} "
        f"(requires {need.minimum})",
        ranks=ranks,
        evidence={"cuda_of_driver": need.supports},
        effect="CUDA initialization may fail: the program then ends, or continues on the CPU." if is_close else "",
        fix=f"On {job.place_of(ranks)}, update the driver to {need.minimum} or newer, or install a PyTorch build for "
        + (f"{_supported(need.supports)}." if need.supports else "an older CUDA release."),
        # Drivers of one branch support the same CUDA release, so this one may work although it is not documented.
        severity=Severity.WARNING if is_close else None,
    )


def _branch(driver: str | None) -> str:
    return (driver or "").partition(".")[0]


def _mismatched(job: Job) -> Iterator[Finding]:
    """Hosts whose NVML rejects the kernel driver: it was updated but not reloaded."""
    for _, identical in job.each(SoftwareFacts, also=(GpuFacts, DriverFacts)):
        missing, drivers = identical.missing(GpuFacts), identical.find(DriverFacts)
        if missing is not None and missing.reason.startswith(DRIVER_MISMATCH):
            yield Finding(
                "The installed NVIDIA libraries do not match the loaded kernel driver",
                ranks=identical.ranks,
                evidence={"nvml": missing.reason, "kernel_driver": drivers.kernel_driver if drivers else None},
                effect="CUDA and nvidia-smi fail on this host until the kernel modules are reloaded.",
                fix=f"Reboot {HERE}, or unload and reload the nvidia kernel modules.",
                explains=("GPU019", "GPU021"),
            )


def _unfit_libcuda(need: _DriverRequirement, gpus: GpuFacts, identical: IdenticalRanks) -> Finding | None:
    """A libcuda that is not the driver's: a stub, or a forward-compatibility package that CUDA rejects, unless the
    driver is too old without one."""
    older = _stub_libcuda(identical) or _older_libcuda(need.driver, identical)
    return older or (None if _is_too_old(need) else _unsupported_libcuda(need.driver, gpus, identical))


def _stub_libcuda(identical: IdenticalRanks) -> Finding | None:
    """A libcuda of a toolkit's stubs, against which programs are linked on hosts without a driver (CUDA driver API,
    CUDA_ERROR_STUB_LIBRARY)."""
    drivers = identical.find(DriverFacts)
    if drivers is None or drivers.stub_libcuda is None:
        return None
    return Finding(
        f"The loader finds the stub library {drivers.stub_libcuda}",
        ranks=identical.ranks,
        evidence={"libcuda": drivers.stub_libcuda},
        effect="CUDA fails: `Error 34: CUDA driver is a stub library`.",
        fix=f"Remove {drivers.stub_libcuda.rpartition('/')[0]} from LD_LIBRARY_PATH or /etc/ld.so.conf.d on {HERE}.",
    )


def _older_libcuda(driver: str | None, identical: IdenticalRanks) -> Finding | None:
    """A forward-compatibility package that is older than the kernel driver, which CUDA rejects (error 803)."""
    drivers = identical.find(DriverFacts)
    package = drivers.forward_compatibility if drivers else None
    if not package or not driver or not is_older(package, driver):
        return None
    return Finding(
        f"The loader finds libcuda {package} from a CUDA compat package older than driver {driver}",
        ranks=identical.ranks,
        evidence={"driver": driver, "forward_compatibility": package},
        effect="CUDA fails: `Error 803: system has unsupported display driver / cuda driver combination`.",
        fix=f"Remove the CUDA compat directory from LD_LIBRARY_PATH or /etc/ld.so.conf.d on {HERE}.",
    )


def _unsupported_libcuda(driver: str | None, gpus: GpuFacts, identical: IdenticalRanks) -> Finding | None:
    """A forward-compatibility package that is newer than the driver, on a GPU that CUDA does not support it on."""
    drivers = identical.find(DriverFacts)
    package = drivers.forward_compatibility if drivers else None
    if not package or not driver or not _is_desktop(gpus) or not is_older(driver, package):
        return None
    return Finding(
        f"The loader finds libcuda {package} from a CUDA compat package, which GeForce GPUs do not support",
        ranks=identical.ranks,
        evidence={"driver": driver, "forward_compatibility": package, "gpus": sorted({one.name for one in gpus.gpus})},
        effect="CUDA fails: `Error 804: forward compatibility was attempted on non supported HW`.",
        fix=f"Remove the CUDA compat directory from LD_LIBRARY_PATH or /etc/ld.so.conf.d on {HERE}, and update the "
        "driver if PyTorch needs a newer one.",
    )


def _is_desktop(gpus: GpuFacts) -> bool:
    return any("GeForce" in gpu.name for gpu in gpus.gpus)


class _DriverRequirement(msgspec.Struct, frozen=True):
    """PyTorch's CUDA and its minimum driver; the driver, the CUDA that it supports, and a compatibility package."""

    cuda: str
    minimum: str | None
    driver: str | None
    supports: str | None
    compatibility: str | None


def _need(cuda: str, gpus: GpuFacts, drivers: DriverFacts | None) -> _DriverRequirement:
    driver = gpus.driver_version or (drivers.kernel_driver if drivers else None)
    # Forward compatibility supports data center GPUs and some workstation GPUs (CUDA compatibility guide); on others,
    # CUDA fails with error 804.
    compatibility = drivers.forward_compatibility if drivers and not _is_desktop(gpus) else None
    return _DriverRequirement(cuda, minimum_driver(cuda), driver, gpus.cuda_version, compatibility)


_BEFORE_COMPATIBILITY = ("8", "9", "10")
"""Major releases of CUDA of which each minor release needs a separate driver."""


def _supported(cuda: str) -> str:
    """The CUDA releases whose builds run on a driver that reports this one (minor version compatibility)."""
    major = cuda.partition(".")[0]
    return f"CUDA {cuda} or older" if major in _BEFORE_COMPATIBILITY else f"CUDA {major} (any minor release) or older"


def _is_too_old(need: _DriverRequirement) -> bool:
    """Compares the major CUDA release that the driver reports: every driver of a major release supports all of its
    minor releases (CUDA compatibility guide, "minor version compatibility"). Without it, compares the driver's
    version, which is numbered differently under WSL and on Jetson."""
    if need.compatibility and need.minimum and is_older(need.compatibility, need.minimum) is False:
        return False
    if need.supports and need.cuda.partition(".")[0] in _BEFORE_COMPATIBILITY:
        return bool(is_older(need.supports, need.cuda))
    if need.supports:
        return bool(is_older(need.supports.partition(".")[0], need.cuda.partition(".")[0]))
    return bool(need.driver and need.minimum and is_older(need.driver, need.minimum))
