"""NCCL010: several NCCL libraries can be loaded."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

import msgspec

from doctor.analysis.effective_settings import group_by_value
from doctor.api import Finding, Job, Severity, Skip, Unknown, Verdict, check, event_groups, finding_from_logs, is_older
from doctor.facts import NcclLibrary, Package, SoftwareFacts
from doctor.testing import Fails, Passes, healthy, logged

_WHEEL = "/opt/env/lib/python3.11/site-packages/nvidia/nccl/lib/libnccl.so.2"


def _libraries(version: str, origin: str = "LD_LIBRARY_PATH") -> tuple[NcclLibrary, ...]:
    found = NcclLibrary("/usr/lib/x86_64-linux-gnu/libnccl.so.2", version, origin, chosen=True)
    return (found, NcclLibrary(_WHEEL, "2.27.3", "wheel nvidia-nccl-cu12"))


def _wheel(version: str) -> tuple[tuple[Package, ...], tuple[NcclLibrary, ...]]:
    packages = (Package("torch", "2.8.0"), Package("nvidia-nccl-cu12", version))
    return packages, (NcclLibrary(_WHEEL, version, "wheel nvidia-nccl-cu12", chosen=True),)


def _two_wheels(version: str) -> tuple[tuple[Package, ...], tuple[NcclLibrary, ...]]:
    packages = (Package("torch", "2.8.0"), Package("nvidia-nccl-cu12", "2.27.3"), Package("nvidia-nccl-cu11", "2.21.5"))
    return packages, (NcclLibrary(_WHEEL, version, "wheel nvidia-nccl-cu12", chosen=True),)


def _from_logs(job: Job) -> Iterator[Finding]:
    """PyTorch needs a function that the loaded NCCL does not have."""
    wheels = {
        f"{group.value('cuda')} {group.value('ver')}" for group in event_groups(job, "nccl.wheel", by=("cuda", "ver"))
    }
    for group in event_groups(job, "nccl.symbol_missing", by=("symbol",)):
        lib = group.value("lib")
        of_torch = lib is None or "torch" in lib
        yield finding_from_logs(
            group,
            f"The loaded NCCL lacks {group.value('symbol')}: it is older than PyTorch requires"
            if of_torch
            else f"The loaded NCCL lacks {group.value('symbol')}, which {(lib or '').rpartition('/')[2]} requires",
            evidence={"wheels": sorted(wheels)},
            effect=_effect(group.first.text) if of_torch else "The process that loads the library fails.",
            fix=""
            if of_torch
            else f"Install a {(lib or '').rpartition('/')[2]} that was built for the NCCL version of PyTorch.",
            confidence=0.95 if len(wheels) > 1 else 0.85,
            explains=("NCCL009", "VER002"),
        )


def _effect(text: str) -> str:
    if "ImportError" in text:
        return "Importing torch fails, so the rank cannot start."
    # ld.so ends a process with this message when a function is first called (glibc elf/dl-lookup.c).
    return "The process ends at the first call of this function." if "symbol lookup error" in text else ""


@check(
    id="NCCL010",
    severity=Severity.ERROR,
    when="PM",
    needs=(SoftwareFacts,),
    from_logs=_from_logs,
    impacts={
        r"installed in the same directory": (
            "Both packages write libnccl.so.2 to this directory: the one that was installed last is loaded, and an "
            "update of the other replaces it."
        ),
        r"lacks ": "Importing torch fails with `undefined symbol`, or the function fails at its first call.",
        r"NCCL received": "NCCL does not create the communicator, and the rank fails.",
    },
    cases=lambda: (
        Passes("the wheel alone", healthy()),
        Passes("no NCCL", healthy(gpus=0)),
        Passes(
            "the system has an older one, which torch does not get",
            healthy().alter(
                SoftwareFacts,
                nccl_libraries=lambda old: (
                    *old,
                    NcclLibrary("/usr/lib/x86_64-linux-gnu/libnccl.so.2", "2.18.3", "system"),
                ),
            ),
        ),
        Fails(
            "a newer wheel than torch asks for",
            healthy().alter(SoftwareFacts, packages=_wheel("2.30.7")[0], nccl_libraries=_wheel("2.30.7")[1]),
            ranks=(0, 1),
            severity=Severity.INFO,
        ),
        Passes(
            "the same release for another CUDA",
            healthy().alter(
                SoftwareFacts,
                nccl_libraries=(NcclLibrary(_WHEEL, "2.27.3+cuda12.9", "wheel nvidia-nccl-cu12", chosen=True),),
            ),
        ),
        Passes(
            "linked into torch",
            healthy().alter(
                SoftwareFacts, nccl_libraries=(NcclLibrary("libtorch_cuda.so", "2.27.3", "torch", chosen=True),)
            ),
        ),
        Fails(
            "LD_LIBRARY_PATH leads to an older one",
            healthy(2, 2).alter(SoftwareFacts, ranks=(2, 3), nccl_libraries=_libraries("2.18.3")),
            ranks=(2, 3),
        ),
        Fails(
            "LD_PRELOAD brings a newer one",
            healthy().alter(SoftwareFacts, nccl_libraries=_libraries("2.30.7", "LD_PRELOAD")),
            ranks=(0, 1),
            severity=Severity.WARNING,
        ),
        Fails(
            "two wheels share one folder, and the older one is there",
            healthy().alter(SoftwareFacts, packages=_two_wheels("2.21.5")[0], nccl_libraries=_two_wheels("2.21.5")[1]),
            ranks=(0, 1),
        ),
        Fails(
            "two wheels, and the right one is there by luck",
            healthy().alter(SoftwareFacts, packages=_two_wheels("2.27.3")[0], nccl_libraries=_two_wheels("2.27.3")[1]),
            ranks=(0, 1),
            severity=Severity.INFO,
        ),
        Fails(
            "an older wheel than torch asks for",
            healthy().alter(SoftwareFacts, packages=_wheel("2.21.5")[0], nccl_libraries=_wheel("2.21.5")[1]),
            ranks=(0, 1),
        ),
        Passes("one wheel", logged("[pip3] torch==2.8.0", "[pip3] nvidia-nccl-cu12==2.27.3")),
    ),
)
def two_libraries(job: Job) -> Iterator[Verdict]:
    """Ask whether PyTorch loads the NCCL that it was built with if several are installed.

    Why it hurts: an older NCCL lacks functions (`undefined symbol: ncclCommRegister` when torch is imported) or has
    bugs that were fixed later. Environment variables and the import order decide which one is loaded.
    Fix: Remove other NCCL libraries from LD_PRELOAD and LD_LIBRARY_PATH, and reinstall the nvidia-nccl version that
    this torch requires (`pip check` shows a mismatch).
    """
    if not any(software.nccl_libraries for software, _ in job.facts(SoftwareFacts)):
        yield Skip("no NCCL library was found")
        return
    for found, ranks in group_by_value(job, SoftwareFacts, lambda software, _: _found(software)):
        if found is not None:
            yield from _judge(found, ranks, f" on {job.place_of(ranks)}")


class _Found(msgspec.Struct, frozen=True):
    """The NCCL libraries of one environment: the release that torch was built with, the wheel that provides it, the
    library that is loaded, the others, the installed wheels.
    """

    wanted: str
    wheel: str
    chosen: NcclLibrary
    others: tuple[NcclLibrary, ...]
    wheels: tuple[str, ...]


def _found(software: SoftwareFacts) -> _Found | None:
    chosen = next((library for library in software.nccl_libraries if library.chosen), None)
    if chosen is None or software.torch is None or not software.torch.nccl:
        return None
    others = tuple(library for library in software.nccl_libraries if library != chosen)
    wheels = tuple(f"{one.name} {one.version}" for one in software.packages if one.name.startswith("nvidia-nccl-"))
    wheel = f"nvidia-nccl-cu{(software.torch.cuda or '12').partition('.')[0]}"
    return _Found(software.torch.nccl, wheel, chosen, others, wheels)


def _judge(found: _Found, ranks: tuple[int, ...], where: str) -> Iterator[Verdict]:
    version = found.chosen.version
    if version is None:
        if found.others:
            yield Unknown(f"the version of {found.chosen.path} could not be read", ranks)
        return
    several = bool(found.others) or len(found.wheels) > 1
    origin = found.chosen.origin or found.chosen.path
    summary = f"PyTorch loads NCCL {version} from {origin}, but was built with {found.wanted}"
    if is_older(version, found.wanted):
        effect = f"Functions may be missing (`undefined symbol`), and bugs that {found.wanted} fixes may occur."
        yield _finding(found, ranks, where, summary, None, effect)
    elif is_older(found.wanted, version):
        # A newer wheel is often installed on purpose, although torch requires one release exactly (Requires-Dist:
        # nvidia-nccl-cu12==2.27.3), and torch.cuda.nccl.version() keeps returning that one.
        effect = (
            f"Usually none, because the C interface is stable, but this PyTorch was tested only with {found.wanted}."
        )
        yield _finding(found, ranks, where, summary, Severity.WARNING if several else Severity.INFO, effect)
    elif len(found.wheels) > 1:
        summary = f"{' and '.join(found.wheels)} are installed in the same directory"
        yield _finding(found, ranks, where, summary, Severity.INFO)


def _finding(
    found: _Found, ranks: tuple[int, ...], where: str, summary: str, severity: Severity | None, effect: str = ""
) -> Finding:
    chosen = found.chosen
    return Finding(
        summary,
        ranks=ranks,
        evidence={
            "loaded": f"{chosen.path} {chosen.version}",
            "built_with": None if "built with" in summary else found.wanted,
            "others": [f"{one.path} {one.version} ({one.origin})" for one in found.others],
            "wheels": list(found.wheels),
        },
        effect=effect,
        fix=_fix(found, where),
        severity=severity,
    )


def _fix(found: _Found, where: str) -> str:
    origin = found.chosen.origin
    if origin == "LD_PRELOAD":
        return f"Remove {found.chosen.path} from LD_PRELOAD{where}."
    if origin == "LD_LIBRARY_PATH":
        return f"Remove {found.chosen.path.rpartition('/')[0]} from LD_LIBRARY_PATH{where}."
    wanted = shlex.quote(f"{found.wheel}=={found.wanted.partition('+')[0]}")
    install = f"pip install --force-reinstall --no-deps {wanted}"
    surplus = [wheel.split()[0] for wheel in found.wheels if wheel.split()[0] != found.wheel]
    return f"pip uninstall -y {shlex.join(surplus)}\n{install}" if surplus else install
