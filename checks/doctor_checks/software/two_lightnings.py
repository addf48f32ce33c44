"""VER005: lightning and pytorch-lightning are installed in different releases."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from doctor.api import Finding, Job, Scope, Severity, Skip, Verdict, check
from doctor.facts import Package, SoftwareFacts, TrainingFacts
from doctor.testing import Fails, JobBuilder, Passes, healthy, running


def _installed(**versions: str) -> JobBuilder:
    packages = tuple(Package(name.replace("_", "-"), version) for name, version in versions.items())
    return healthy(hosts=2).alter(SoftwareFacts, ranks=(2, 3), packages=packages)


@check(
    id="VER005",
    severity=Severity.WARNING,
    scope=Scope.RANK,
    when="P",
    needs=(SoftwareFacts,),
    impacts={
        r"^The program uses": (
            'The Trainer rejects the object of the other package ("model must be a LightningModule"), or never '
            "calls it."
        ),
        r"both installed": (
            "If a program imports both packages, each rejects the classes of the other, or never calls them. A program "
            "that imports only one is not affected."
        ),
    },
    cases=lambda: (
        Passes("lightning alone", healthy(hosts=2)),
        Passes("pytorch-lightning alone", _installed(pytorch_lightning="2.5.0")),
        Passes("both in one release", _installed(lightning="2.6.1", pytorch_lightning="2.6.1")),
        Passes("a build of the same release", _installed(lightning="2.6.1", pytorch_lightning="2.6.1.post0")),
        Fails("an old pytorch-lightning", _installed(lightning="2.6.1", pytorch_lightning="1.9.5"), ranks=(2, 3)),
        Fails("another patch release", _installed(lightning="2.6.1", pytorch_lightning="2.6.0"), ranks=(2, 3)),
        Passes("a run with objects of one Lightning", running(1, 2)),
        Fails(
            "a run in which a Trainer of one meets a callback of the other, of the same release",
            running(1, 2)
            .alter(SoftwareFacts, packages=(Package("lightning", "2.6.1"), Package("pytorch-lightning", "2.6.1")))
            .alter(TrainingFacts, mixed="EarlyStopping of pytorch-lightning with the Trainer of lightning"),
            ranks=(0, 1),
        ),
    ),
)
def two_lightnings(job: Job) -> Iterator[Verdict]:
    """Ask whether lightning and pytorch_lightning have the same release if both are installed, and are not mixed.

    Why it hurts: each package has its own classes. A Trainer of one rejects modules, callbacks and loggers of the
    other ("model must be a LightningModule"), or silently never calls them. Each import line decides which package is
    used.
    Fix: Run `pip install -U lightning pytorch-lightning`, and import only one of them everywhere (`from lightning
    import pytorch as pl`).
    """
    found: dict[tuple[str, str], list[int]] = {}
    installed = False
    for software, identical in job.facts(SoftwareFacts):
        new, old = software.version("lightning"), software.version("pytorch-lightning")
        installed = installed or bool(new or old)
        if new and old and _release(new) != _release(old):
            found.setdefault((new, old), []).extend(identical.ranks)
    for (new, old), ranks in found.items():
        install = f"pip install {shlex.quote(f'pytorch-lightning=={new}')}"
        yield Finding(
            f"lightning {new} and pytorch-lightning {old} are both installed",
            ranks=tuple(ranks),
            evidence={"lightning": new, "pytorch-lightning": old},
            fix=f"Run `{install}` on {job.place_of(ranks)}, or uninstall pytorch-lightning if nothing imports it.",
        )
    yield from _mixed(job)
    if not installed:
        yield Skip("Lightning is not installed")


def _mixed(job: Job) -> Iterator[Finding]:
    """Objects of both in one run; their classes differ even if the releases are equal."""
    mixed: dict[str, list[int]] = {}
    for training, identical in job.facts(TrainingFacts):
        if training.mixed:
            mixed.setdefault(training.mixed, []).extend(identical.ranks)
    for words, ranks in mixed.items():
        yield Finding(
            f"The program uses {words}",
            ranks=tuple(sorted(ranks)),
            evidence={"mixed": words},
            fix="Import only one of the two packages in all files that this command lists:\n"
            "grep -rnE 'import (pytorch_lightning|lightning)|from (pytorch_lightning|lightning)' .",
        )


def _release(version: str) -> str:
    """Without local and post-release parts, which do not change the code."""
    return version.partition("+")[0].partition(".post")[0]
