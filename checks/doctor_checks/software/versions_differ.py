"""VER001: ranks run different releases of the software."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import msgspec

from doctor.api import (
    ALONE,
    BaselineDeviation,
    BaselineValue,
    Finding,
    Group,
    Job,
    MajoritySplit,
    Scope,
    Severity,
    Skip,
    Verdict,
    baseline_values,
    check,
    correlates,
    describe,
    ranks_in_words,
    split,
    stands_alone,
)
from doctor.facts import Package, SoftwareFacts, TorchBuild
from doctor.testing import Fails, JobBuilder, Passes, healthy


def _packages(**versions: str) -> Callable[[tuple[Package, ...]], tuple[Package, ...]]:
    named = {name.replace("_", "-"): version for name, version in versions.items()}
    return lambda old: (
        *(package for package in old if package.name not in named),
        *(Package(name, version) for name, version in named.items()),
    )


def _one_host(**changes: object) -> JobBuilder:
    return healthy(hosts=3).alter(SoftwareFacts, ranks=(2, 3), **changes)  # type: ignore[arg-type]


_OLD_TORCH = TorchBuild("2.7.1", cuda="12.6")
_EMPTY: dict[str, object] = {"torch": None, "packages": ()}
"""An environment without torch, for example one made for rankdoctor only."""


@check(
    id="VER001",
    severity=Severity.ERROR,
    scope=Scope.JOB,
    when="P",
    needs=(SoftwareFacts,),
    uses_baseline=True,
    needs_peers=True,
    impacts={
        r"Python patch releases": (
            "Usually none. Objects pickled by one rank may not load on another if a class has changed."
        ),
        r"not installed|have no |has no ": (
            "Ranks without the package fail at import or take another code path, and the other ranks wait for them "
            "until the timeout."
        ),
        r"\bPython\b": ("Objects pickled by one rank may not load on another, and packages may behave differently."),
        r"PyTorch(?! for CUDA)": (
            "Ranks with different releases may call different collectives, so the job may hang or fail."
        ),
        r"CUDA": "Ranks run different kernels, so results may differ silently between ranks.",
        r"lightning|transformers|accelerate|deepspeed": (
            "The framework may call collectives in a different order on these ranks, so the job may hang."
        ),
    },
    cases=lambda: (
        Passes("one image", healthy(hosts=3)),
        Passes("torch is nowhere installed", healthy(hosts=2).alter(SoftwareFacts, torch=None, packages=())),
        Passes("one process, as in the capture", healthy(1, 1).expecting(healthy(3, 8))),
        Passes(
            "a capture that an environment without torch took",
            healthy().expecting(healthy(1, 1).alter(SoftwareFacts, **_EMPTY)),  # type: ignore[arg-type]
        ),
        Passes(
            "a capture whose own ranks disagree",
            healthy().expecting(healthy().alter(SoftwareFacts, ranks=(1,), torch=_OLD_TORCH)),
        ),
        Fails("torch 2.7.1 on one host", _one_host(torch=TorchBuild("2.7.1", cuda="12.8")), ranks=(2, 3)),
        Fails("a build for CUDA 12.6", _one_host(torch=TorchBuild("2.8.0+cu126", cuda="12.6")), ranks=(2, 3)),
        Fails("no torch in one environment", _one_host(torch=None), ranks=(2, 3)),
        Fails("Python 3.12 on one host", _one_host(python="3.12.3"), ranks=(2, 3)),
        Fails("an older Lightning on one host", _one_host(packages=_packages(lightning="2.5.0")), ranks=(2, 3)),
        Fails(
            "half and half",
            healthy(hosts=2).alter(SoftwareFacts, ranks=(2, 3), python="3.12.3"),
            ranks=(0, 1, 2, 3),
        ),
        Fails("another patch of Python", _one_host(python="3.11.9"), ranks=(2, 3), severity=Severity.INFO),
        Fails(
            "half and half, and a baseline that shows which",
            healthy(hosts=2).alter(SoftwareFacts, ranks=(2, 3), python="3.12.3").expecting(healthy(1, 1)),
            ranks=(2, 3),
        ),
        Fails(
            "most ranks unlike the capture",
            healthy(hosts=3).alter(SoftwareFacts, ranks=range(2, 6), torch=_OLD_TORCH).expecting(healthy()),
            ranks=(2, 3, 4, 5),
        ),
        Fails(
            "one process in another environment than the capture",
            healthy(1, 1).alter(SoftwareFacts, torch=_OLD_TORCH).expecting(healthy()),
            ranks=(0,),
        ),
        Fails(
            "all ranks on another patch of Python than the capture",
            healthy().alter(SoftwareFacts, python="3.11.9").expecting(healthy(1, 1)),
            ranks=(0, 1),
            severity=Severity.INFO,
        ),
    ),
)
def versions_differ(job: Job) -> Iterator[Verdict]:
    """Ask whether all ranks run the same releases of torch, CUDA, Python and Lightning.

    Why it hurts: ranks with different releases call different collectives, or call them in a different order, and
    hang. Objects pickled by one rank cannot be read by another, or results silently differ between ranks.
    Fix: Start all ranks from one image or one environment on a shared disk.
    """
    expected = baseline_values(job, _releases)
    if stands_alone(job, expected.values()):
        yield Skip(ALONE)
        return
    told: dict[tuple[int, ...], list[_Difference]] = {}
    is_python_reported = False
    for part in _PARTS:
        parted = split(job, SoftwareFacts, part.read, expected=expected.get(part.word))
        if parted.even:
            is_python_reported |= part.word == "Python"
            ranks = tuple(rank for group in parted.minorities for rank in group.ranks)
            yield Finding(
                f"{_NAMES.get(part.word, part.word)} versions differ between ranks ({describe(parted)})",
                ranks=ranks,
                evidence={
                    "releases": {str(group.value): list(group.ranks) for group in parted.minorities[:8]},
                    "goes_along_with": {
                        str(group.value): list(correlates(job, group.ranks)) for group in parted.minorities[:8]
                    },
                },
            )
        for group in () if parted.even else parted.minorities:
            told.setdefault(group.ranks, []).append(_Difference(part, group, parted))
    for differences in told.values():
        by_vote = [difference for difference in differences if difference.parted.expected is None]
        if by_vote:
            yield _unlike_others(job, by_vote)
        if len(by_vote) < len(differences):
            yield _unlike_expected(job, [difference for difference in differences if difference.parted.expected])
    if not told and not is_python_reported:
        yield from _patches(job, expected.get(_PATCH.word))


class _VersionedComponent(msgspec.Struct, frozen=True):
    word: str
    read: Callable[[SoftwareFacts], str | None]


class _Difference(msgspec.Struct, frozen=True):
    part: _VersionedComponent
    group: Group[str | None]
    parted: MajoritySplit


def _torch(software: SoftwareFacts) -> str | None:
    """The release without the suffix for CUDA or ROCm, which is compared separately."""
    return re.sub(r"\+(cu\d+|cpu|rocm[\d.]*)$", "", software.torch.version) if software.torch else None


def _cuda(software: SoftwareFacts) -> str | None:
    return (software.torch.cuda or software.torch.hip) if software.torch else None


_PARTS = (
    _VersionedComponent("torch", _torch),
    _VersionedComponent("CUDA", _cuda),
    _VersionedComponent("Python", lambda software: ".".join(software.python.split(".")[:2]) or None),
    _VersionedComponent("lightning", lambda software: software.version("lightning")),
    _VersionedComponent("pytorch-lightning", lambda software: software.version("pytorch-lightning")),
)


_NAMES = {"torch": "PyTorch"}
"""Names in summaries; the evidence has those of the packages."""

_PATCH = _VersionedComponent("Python patch release", lambda software: software.python)


def _releases(worked: Job) -> Iterator[tuple[str, str | None]]:
    """The releases of ranks with torch; an environment without it does not show what the job used."""
    for software, _ in worked.each(SoftwareFacts):
        if software.torch:
            yield from ((part.word, part.read(software)) for part in (*_PARTS, _PATCH))


def _unlike_others(job: Job, differences: list[_Difference]) -> Finding:
    ranks = differences[0].group.ranks
    along = correlates(job, ranks)
    # Without torch there is no CUDA of torch.
    shown = [one for one in differences if one.group.value or one.part.word != "CUDA"] or differences
    parts = ", ".join(map(_in_words, shown)).replace(", PyTorch for CUDA", ", CUDA")
    who, where = ranks_in_words(ranks), f" ({along[0]})" if along else ""
    return Finding(
        f"{who}{where} {'has' if len(ranks) == 1 else 'have'} {parts}",
        ranks=ranks,
        evidence={
            "own": {difference.part.word: _word(difference.group.value) for difference in differences},
            "elsewhere": {difference.part.word: _word(_common(difference)) for difference in differences},
            "goes_along_with": list(along[1:]),  # the summary has the first one
        },
        fix=f"Start {who} from the same image or environment as the other ranks.",
        # A rank with other releases usually also has another NCCL.
        explains=("NCCL008",),
    )


def _in_words(difference: _Difference) -> str:
    """``CUDA 12.6 instead of 12.8``, ``no PyTorch (2.8.0 on other ranks)``."""
    word, value, common = difference.part.word, difference.group.value, _common(difference)
    word = _NAMES.get(word, word)
    if word == "CUDA" and value:
        return f"PyTorch for CUDA {value} instead of {_word(common)}"
    return f"{word} {value} instead of {_word(common)}" if value else f"no {word} ({_word(common)} on other ranks)"


_LONGEST = 96
"""Characters of a summary with what brackets hold."""


def _unlike_expected(job: Job, differences: list[_Difference]) -> Finding:
    ranks = differences[0].group.ranks
    along = correlates(job, ranks)
    rows = tuple(one.parted.unlike(one.part.word, _word, one.group) for one in differences)
    deviation = BaselineDeviation(rows, all(one.parted.drifted for one in differences))
    who = "" if deviation.drifted else ranks_in_words(ranks, 4)
    told = ", ".join(filter(None, (who, along[0] if along else "")))
    if len(deviation.summary) + len(told) > _LONGEST:
        told = who or told
    return deviation.finding(
        ranks,
        {"goes_along_with": list(along[1:])},
        suffix=f" ({told})" if told else "",
        fix=f"Start {who} from the image or environment of the baseline job.",
        explains=("NCCL008",),
    )


def _common(difference: _Difference) -> str | None:
    common = difference.parted.common
    return common.value if common else None


def _word(value: str | None) -> str:
    return value or "not installed"


def _patches(job: Job, expected: BaselineValue | None) -> Iterator[Verdict]:
    parted = split(job, SoftwareFacts, _PATCH.read, expected=expected)
    if not parted.minorities:
        return
    if expected:
        deviation = BaselineDeviation((parted.unlike(_PATCH.word, _word),), parted.drifted)
        yield deviation.finding(parted.odd, severity=Severity.INFO)
        return
    yield Finding(
        f"Python patch releases differ between ranks ({describe(parted)})",
        ranks=parted.odd,
        severity=Severity.INFO,
        evidence={"releases": {str(group.value): list(group.ranks) for group in parted.groups[:8]}},
    )
