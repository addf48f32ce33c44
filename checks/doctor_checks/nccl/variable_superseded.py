"""NCCL004: a renamed or removed variable is set."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.analysis.effective_settings import EffectiveSetting, effective_settings, only_nccl, only_torch
from doctor.api import Finding, Job, Severity, Verdict, check, merge, source_of
from doctor.facts import EnvironmentFacts, NcclLibrary, SoftwareFacts, TorchBuild
from doctor.knowledge.environment_variables import VariableInfo, without_loss
from doctor.knowledge.environment_variables import known as known_variable
from doctor.knowledge.releases import within
from doctor.testing import Fails, Passes, healthy

_OLD_NCCL = (NcclLibrary("/usr/lib/libnccl.so.2", "2.20.5", "system", chosen=True),)


@check(
    id="NCCL004",
    severity=Severity.WARNING,
    needs=(EnvironmentFacts,),
    impacts={
        r"was deprecated": "None yet: the old name is still read, but a later version may silently ignore it.",
        r"replaces it": "The variable is silently ignored, and its replacement keeps its default.",
        r"was removed": "The variable is silently ignored.",
    },
    cases=lambda: (
        Passes("nothing set", healthy()),
        Passes("the new names", healthy().environ(TORCH_NCCL_BLOCKING_WAIT="0", NCCL_NET_GDR_LEVEL="PHB")),
        Passes(
            "the old name under a release that has no other",
            healthy().environ(NCCL_MNNVL="1").alter(SoftwareFacts, nccl_libraries=_OLD_NCCL),
        ),
        Passes(
            "torch's old name under an old torch",
            healthy().environ(NCCL_BLOCKING_WAIT="1").alter(SoftwareFacts, torch=TorchBuild("2.1.2", cuda="12.1")),
        ),
        Fails(
            "dropped by a release newer than any that is known to be in use",
            healthy(gpus=0).alter(SoftwareFacts, torch=None, nccl_libraries=()).environ(NCCL_SHM_USE_CUDA_MEMCPY="1"),
            ranks=(0, 1),
            severity=Severity.INFO,
        ),
        Fails(
            "dropped before the oldest supported release, whichever is in use",
            healthy(gpus=0).alter(SoftwareFacts, torch=None, nccl_libraries=()).environ(NCCL_IB_GDR_LEVEL="3"),
            ranks=(0, 1),
        ),
        Fails("no longer read", healthy(2, 2).environ(NCCL_IB_GDR_LEVEL="3", ranks=(2, 3)), ranks=(2, 3)),
        Fails("removed without a successor", healthy().environ(NCCL_SHARED_BUFF_COUNT="16"), ranks=(0, 1)),
        Fails(
            "a size at which NCCL changed its algorithm",
            healthy().environ(NCCL_TREE_THRESHOLD="0"),
            ranks=(0, 1),
            severity=Severity.INFO,
        ),
        Fails(
            "checks that are off by default since",
            healthy().environ(NCCL_CHECKS_DISABLE="1"),
            ranks=(0, 1),
            severity=Severity.INFO,
        ),
        Fails(
            "the size of a queue, which has a default",
            healthy().environ(NCCL_WORK_FIFO_DEPTH="1048576"),
            ranks=(0, 1),
            severity=Severity.INFO,
        ),
        Fails("renamed in 2.21", healthy().environ(NCCL_MNNVL="1"), ranks=(0, 1)),
        Fails(
            "torch's old spelling is still read",
            healthy().environ(NCCL_ASYNC_ERROR_HANDLING="1"),
            ranks=(0, 1),
            severity=Severity.INFO,
        ),
        Fails(
            "deprecated and still read", healthy().environ(NCCL_MIN_NCHANNELS="8"), ranks=(0, 1), severity=Severity.INFO
        ),
    ),
)
def variable_superseded(job: Job) -> Iterator[Verdict]:
    """Ask whether any variable is set that was renamed or removed.

    Why it hurts: a version that no longer reads the variable silently ignores it, and one that still reads it may be
    the last to do so.
    Fix: Set the variable that replaced it, and unset the old one.
    """
    yield from merge(_findings(job))


def _findings(job: Job) -> Iterator[Finding]:
    releases = {"nccl": only_nccl(job), "torch": only_torch(job)}
    for stated in effective_settings(job):
        info = known_variable(stated.setting.name)
        if info is None or info.superseded is None:
            continue
        release = releases.get(info.reader)
        if release is None or not within(release, before=info.superseded):
            since = f"{'NCCL' if info.reader == 'nccl' else 'PyTorch'} {info.superseded}"
            if release is None and not info.is_superseded_everywhere:
                yield _perhaps(stated, since, info.replaced_by)
            else:
                yield Finding(
                    superseded_summary(stated.setting.name, info),
                    ranks=stated.ranks,
                    evidence=_evidence(stated),
                    fix=_fix(stated, info.replaced_by),
                    effect=without_loss(stated.setting.name, stated.setting.value),
                    severity=Severity.INFO
                    if info.still_read or without_loss(stated.setting.name, stated.setting.value)
                    else None,
                    source=source_of(stated.setting),
                )


def superseded_summary(name: str, info: VariableInfo) -> str:
    """What a finding says about a variable that was renamed or removed."""
    state = "deprecated" if info.still_read else "removed"
    reader = "NCCL" if info.reader == "nccl" else "PyTorch"
    instead = f": {info.replaced_by} replaces it" if info.replaced_by else " without a replacement"
    return f"{name} was {state} in {reader} {info.superseded}{instead}"


def _perhaps(stated: EffectiveSetting, since: str, replacement: str | None) -> Finding:
    """For a job whose release is unknown: it may still read the variable."""
    name, (reader, _, version) = stated.setting.name, since.partition(" ")
    change = f"replace {name} with {replacement}" if replacement else f"unset {name}"
    look = (
        "with `NCCL_DEBUG=VERSION`" if reader == "NCCL" else "with `python -c 'import torch; print(torch.__version__)'`"
    )
    return Finding(
        f"{since} and later ignore {name}, and the job's {reader} version is unknown",
        ranks=stated.ranks,
        evidence=_evidence(stated),
        effect=f"None with an older {reader}; otherwise the setting is silently ignored.",
        fix=f"Look up the job's {reader} version {look}, and {change} if that is {version} or later.",
        severity=Severity.INFO,
        source=source_of(stated.setting),
    )


def _evidence(stated: EffectiveSetting) -> dict[str, object]:
    return {"value": stated.setting.value, "from": stated.origin}


_SAME_VALUES = {
    "NCCL_IB_GDR_LEVEL",
    "NCCL_MAX_NCHANNELS",
    "NCCL_MAX_NRINGS",
    "NCCL_MIN_NCHANNELS",
    "NCCL_MIN_NRINGS",
    "NCCL_MNNVL",
    "NCCL_NCCL_ALLOC_P2P_NET_LL_BUFFERS",
}
"""Old names whose values are also valid for the new name."""


def _fix(stated: EffectiveSetting, replacement: str | None) -> str:
    name = stated.setting.name
    in_file = source_of(stated.setting) is not None
    if replacement is None or without_loss(stated.setting.name, stated.setting.value):
        return f"Remove {name} from {stated.origin}." if in_file else f"unset {name}"
    if "=" in replacement:
        return f"Replace {name} with {replacement} in {stated.origin}." if in_file else _replace(name, replacement)
    if (replacement == f"TORCH_{name}" or name in _SAME_VALUES) and not in_file:
        return _replace(name, f'{replacement}="${name}"')
    remove = f"Remove {name} from {stated.origin}" if in_file else f"Unset {name}"
    return f"{remove}, and set {replacement} if it is still needed."


def _replace(name: str, assignment: str) -> str:
    return f"export {assignment}\nunset {name}"
