"""VER004: the installed Lightning does not support the installed PyTorch."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from doctor.api import Finding, Job, Scope, Severity, Skip, Unknown, Verdict, check
from doctor.core.text import hosts_text
from doctor.facts import Package, Requirement, SoftwareFacts, TorchBuild
from doctor.knowledge.releases import lightning_release
from doctor.knowledge.version_specifiers import fits, minor_release
from doctor.testing import Fails, JobBuilder, Passes, healthy

LIGHTNINGS = ("lightning", "pytorch-lightning", "lightning-fabric")
"""Distributions that contain Lightning."""


def _pair(lightning: str, torch: str, requires: str = ">=2.1.0,<4.0", name: str = "lightning") -> JobBuilder:
    return healthy(hosts=2).alter(
        SoftwareFacts,
        ranks=(2, 3),
        packages=(Package(name, lightning), Package("torch", torch)),
        requirements=(Requirement(name, "torch", requires), Requirement(name, "torchmetrics", ">0.7.0")),
        torch=TorchBuild(torch, cuda="12.8"),
    )


@check(
    id="VER004",
    severity=Severity.WARNING,
    scope=Scope.RANK,
    when="P",
    needs=(SoftwareFacts,),
    impacts={
        r"requires torch": "Imports fail, or the package uses parts of PyTorch that this release does not have.",
        r"was tested up to": (
            "The package may use parts of PyTorch that have changed since, and fail with errors that look like bugs in "
            "the model."
        ),
    },
    cases=lambda: (
        Passes("both of one time", healthy(hosts=2)),
        Passes("no Lightning", healthy(hosts=2).alter(SoftwareFacts, packages=(), requirements=())),
        Passes("a vendor's build of the oldest release", _pair("2.6.1", "2.1.0a0+32f93b1")),
        Fails("torch older than required", _pair("2.6.1", "2.0.1"), ranks=(2, 3)),
        Fails(
            "an old Lightning that shuts torch 2 out",
            _pair("1.8.6", "2.8.0", ">=1.9,<2.0", "pytorch-lightning"),
            ranks=(2, 3),
        ),
        Fails(
            "one release under both of its names",
            _pair("2.4.0", "2.8.0").alter(
                SoftwareFacts,
                ranks=(2, 3),
                packages=lambda old: (*old, Package("pytorch-lightning", "2.4.0")),
                requirements=lambda old: (*old, Requirement("pytorch-lightning", "torch", ">=2.1.0")),
            ),
            ranks=(2, 3),
            severity=Severity.INFO,
        ),
        Fails("torch newer than the newest tested", _pair("2.4.0", "2.8.0"), ranks=(2, 3), severity=Severity.INFO),
    ),
)
def lightning_torch_unfit(job: Job) -> Iterator[Verdict]:
    """Ask whether the PyTorch release is in the range that the installed Lightning requires.

    Why it hurts: imports fail, or strategies and checkpoints use parts of PyTorch that have changed. Such failures
    look like bugs in the model.
    Fix: Run `pip install -U lightning`, or pin torch to the range in the finding.
    """
    found: dict[_Misfit, list[int]] = {}
    judged = False
    for software, identical in job.facts(SoftwareFacts):
        if software.torch is None:
            continue
        for requirement in software.requirements:
            version = software.version(requirement.package)
            if version is None or not _is_telling(requirement, software):
                continue
            judged = True
            inside = fits(software.torch.version, requirement.specifier)
            misfit = _Misfit(requirement.package, version, software.torch.version, requirement.specifier)
            if inside is None:
                yield Unknown(f"torch {misfit.torch} cannot be compared with {misfit.specifier!r}", identical.ranks)
            elif not inside:
                found.setdefault(misfit, []).extend(identical.ranks)
            elif tested := _newer_than_tested(version, software.torch.version):
                found.setdefault(msgspec.structs.replace(misfit, tested=tested), []).extend(identical.ranks)
    for misfit, ranks in found.items():
        yield _finding(job, misfit, tuple(ranks))
    if not judged:
        yield Skip("Lightning and torch are not both installed")


def _is_telling(requirement: Requirement, software: SoftwareFacts) -> bool:
    """Whether it is Lightning's requirement of torch. lightning installs pytorch-lightning of the same release with
    the same requirement, so one of them is enough."""
    if requirement.package not in LIGHTNINGS or requirement.requires != "torch":
        return False
    others = {one.package for one in software.requirements if one.requires == "torch"}
    is_twin = software.version(requirement.package) == software.version("lightning") and "lightning" in others
    return requirement.package == "lightning" or not is_twin


class _Misfit(msgspec.Struct, frozen=True):
    """``tested``: the newest torch that this Lightning was tested with, if torch is in the range and newer."""

    package: str
    version: str
    torch: str
    specifier: str
    tested: str | None = None


def _newer_than_tested(lightning: str, torch: str) -> str | None:
    line = lightning_release(lightning)
    if line is None:
        return None
    tested, own = minor_release(line.release.tested), minor_release(torch)
    return line.release.tested if tested and own and own > tested else None


def _fix(job: Job, misfit: _Misfit, where: str) -> str:
    """The torch of the other ranks, a newer torch if it is older than required, else a newer Lightning."""
    builds = [software.torch for software, _ in job.facts(SoftwareFacts) if software.torch]
    usual = {torch.version.partition("+")[0] for torch in builds if fits(torch.version, misfit.specifier)}
    if len(usual) == 1:
        return f'Install the PyTorch of the other ranks{where}:\npip install "torch=={usual.pop()}"'
    parts = [part for part in misfit.specifier.split(",") if part.lstrip().startswith(">")]
    if any(fits(misfit.torch, part) is False for part in parts):
        return f'pip install "torch{misfit.specifier}"'
    return f"pip install -U {misfit.package}"


def _finding(job: Job, misfit: _Misfit, ranks: tuple[int, ...]) -> Finding:
    where = "" if len(ranks) == job.world_size else f" on {hosts_text(job.hosts_of(ranks))}"
    evidence = {misfit.package: misfit.version, "torch": misfit.torch, "requires": misfit.specifier}
    if misfit.tested:
        return Finding(
            f"{misfit.package} {misfit.version} was tested up to torch {misfit.tested}; {misfit.torch} is installed"
            f"{where}",
            ranks=ranks,
            severity=Severity.INFO,
            evidence={**evidence, "tested_up_to": misfit.tested},
            fix=f"Run `pip install -U {misfit.package}` if problems occur.",
        )
    return Finding(
        f"{misfit.package} {misfit.version} requires torch {misfit.specifier}; {misfit.torch} is installed{where}",
        ranks=ranks,
        evidence=evidence,
        fix=_fix(job, misfit, where),
    )
