"""NCCL008: ranks load different NCCL versions."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from doctor.analysis.logs.event_timeline import parse_count
from doctor.analysis.stats.baseline import or_new_baseline
from doctor.api import (
    ALONE,
    BaselineDeviation,
    EventGroup,
    Finding,
    Group,
    Job,
    MajoritySplit,
    Scope,
    Severity,
    Skip,
    Unknown,
    Verdict,
    baseline_value,
    check,
    correlates,
    describe,
    event_groups,
    finding_from_logs,
    ranks_in_words,
    split,
    stands_alone,
)
from doctor.facts import NcclLibrary, SoftwareFacts
from doctor.testing import Fails, Passes, healthy, logged

_UNREADABLE = "release not readable"


def _loading(release: str | None) -> Callable[[tuple[NcclLibrary, ...]], tuple[NcclLibrary, ...]]:
    return lambda old: tuple(NcclLibrary(one.path, release, one.origin, chosen=True) for one in old)


def _from_logs(job: Job) -> Iterator[Finding]:
    """Mismatches that NCCL reports when ranks connect."""
    for group in event_groups(job, "nccl.version.mismatch", by=("r0", "r1")):
        ranks = tuple(parse_count(group.value(name)) or 0 for name in ("r0", "r1"))
        releases = [_in_words(group.value(name)) for name in ("v0", "v1")]
        yield finding_from_logs(
            group,
            f"Rank {ranks[0]} loads NCCL {releases[0]}, rank {ranks[1]} loads NCCL {releases[1]}",
            ranks=ranks,
            confidence=0.95,
        )
    for group in event_groups(job, "nccl.netver.mismatch"):
        local, remote = _in_words(group.value("local")), _in_words(group.value("remote"))
        host, peer = group.hosts[0] if group.hosts else "One host", group.value("peer") or "its peer"
        yield finding_from_logs(
            group,
            f"{host} runs NCCL {local}, but {peer.partition('<')[0]} runs NCCL {remote}",
            confidence=0.9,
        )


def _by_ranks(job: Job) -> Iterator[Finding]:
    releases: dict[int, str] = {}
    events = [event for group in event_groups(job, "torch.nccl.error", "torch.nccl.env_dump") for event in group.events]
    for event in events:
        if event.rank is not None and event.value("ver"):
            releases[event.rank] = str(event.value("ver"))
    groups: dict[str, list[int]] = {}
    for rank, release in releases.items():
        groups.setdefault(release, []).append(rank)
    if len(groups) < 2:
        return
    common = max(groups, key=lambda release: len(groups[release]))
    tied = sum(len(ranks) == len(groups[common]) for ranks in groups.values()) > 1
    odd = [rank for release, ranks in groups.items() if tied or release != common for rank in ranks]
    shown = ", ".join(f"{release} ({ranks_in_words(tuple(ranks), 4)})" for release, ranks in sorted(groups.items())[:3])
    yield finding_from_logs(
        EventGroup("torch.nccl.error", tuple(event for event in events if event.rank in releases)),
        f"Ranks load different NCCL versions: {shown}",
        ranks=tuple(sorted(odd)),
        fix="" if tied else _fix(tuple(odd)),
        evidence={"releases": {release: sorted(ranks) for release, ranks in sorted(groups.items())}}
        if len(groups) > 3
        else None,
        confidence=0.9,
    )


def _in_words(number: str | None) -> str:
    """22703 as 2.27.3, and 2708 as 2.7.8: the encodings of ncclGetVersion() since 2.9 and before it."""
    if not (number or "").isdigit():
        return number or "unknown"
    whole = int(number or 0)
    scale = 10_000 if whole >= 10_000 else 1_000
    return f"{whole // scale}.{whole % scale // 100}.{whole % 100}"


@check(
    id="NCCL008",
    severity=Severity.ERROR,
    scope=Scope.JOB,
    when="PM",
    needs=(SoftwareFacts,),
    uses_baseline=True,
    needs_peers=True,
    from_logs=(_from_logs, _by_ranks),
    impacts={
        r"not found on": (
            "Ranks without NCCL cannot create the communicator, and the other ranks wait for them until their timeout."
        ),
    },
    cases=lambda: (
        Passes("one release everywhere", healthy(hosts=2, per_host=2)),
        Passes("no NCCL on any rank", healthy(2, 2, gpus=0)),
        Passes(
            "one release, built for another CUDA",
            healthy(2, 2).alter(SoftwareFacts, ranks=(2,), nccl_libraries=_loading("2.27.3+cuda13.0")),
        ),
        Passes("the release of the capture", healthy(1, 1).expecting(healthy(2, 2))),
        Passes(
            "a capture whose release could not be read",
            healthy(2, 2).expecting(healthy(1, 1).alter(SoftwareFacts, nccl_libraries=_loading(None))),
        ),
        Passes(
            "a capture that an environment without torch took",
            healthy(2, 2).expecting(healthy(1, 1).alter(SoftwareFacts, torch=None, nccl_libraries=())),
        ),
        Fails(
            "one rank loads an older NCCL",
            healthy(hosts=2, per_host=2).alter(SoftwareFacts, ranks=(2,), nccl_libraries=_loading("2.21.5")),
            ranks=(2,),
        ),
        Fails(
            "one host of three has another image",
            healthy(hosts=3, per_host=2).alter(SoftwareFacts, hosts=("node1",), nccl_libraries=_loading("2.30.7")),
            ranks=(2, 3),
        ),
        Fails(
            "one host finds none", healthy(3, 2).alter(SoftwareFacts, hosts=("node2",), nccl_libraries=()), ranks=(4, 5)
        ),
        Fails(
            "half of the ranks",
            healthy(hosts=2, per_host=1).alter(SoftwareFacts, ranks=(1,), nccl_libraries=_loading("2.30.7")),
            ranks=(0, 1),
        ),
        Fails(
            "half of the ranks, and a baseline that shows which",
            healthy(2, 1).alter(SoftwareFacts, ranks=(1,), nccl_libraries=_loading("2.30.7")).expecting(healthy(1, 1)),
            ranks=(1,),
        ),
        Fails(
            "all but one unlike the capture",
            healthy(2, 2).alter(SoftwareFacts, ranks=(0, 1, 3), nccl_libraries=_loading("2.21.5")).expecting(healthy()),
            ranks=(0, 1, 3),
        ),
        Fails(
            "one process, another release than in the capture",
            healthy(1, 1).alter(SoftwareFacts, nccl_libraries=_loading("2.21.5")).expecting(healthy(2, 2)),
            ranks=(0,),
        ),
        Fails(
            "each rank names another in its error",
            logged(
                *(
                    f"[rank{rank}]: torch.distributed.DistBackendError: NCCL error in: "
                    "/pytorch/torch/csrc/distributed/c10d/NCCLUtils.hpp:318, internal error - please report this "
                    f"issue to the NCCL developers, NCCL version {ver}"
                    for rank, ver in ((0, "2.27.3"), (1, "2.21.5"), (2, "2.27.3"))
                )
            ),
            ranks=(1,),
        ),
    ),
)
def version_differs(job: Job) -> Iterator[Verdict]:
    """Ask whether all ranks load the same NCCL version.

    Why it hurts: NCCL fails or hangs when ranks with different versions create a communicator.
    Fix: Start all ranks from one image or one Python environment.
    """
    # An environment without torch, for example one made for rankdoctor only, does not show which NCCL the job loads.
    known = baseline_value(job, lambda worked: (_release(one) for one, _ in worked.each(SoftwareFacts) if one.torch))
    expected = None if known is None or known.value == _UNREADABLE else known
    found = split(job, SoftwareFacts, _release, expected=expected)
    if stands_alone(job, [expected]):
        yield Skip(ALONE)
    if found.common is not None and not found.minorities and found.common.value is None:
        yield Skip("no NCCL on any rank")
        return
    for group in found.groups:
        if group.value == _UNREADABLE:
            yield Unknown("the version of the loaded NCCL could not be read", group.ranks)
    for group in found.minorities:
        if _UNREADABLE not in (group.value, found.common.value if found.common else None):
            yield _finding(job, found, group)


def _release(software: SoftwareFacts) -> str | None:
    chosen = next((library for library in software.nccl_libraries if library.chosen), None)
    if chosen is None:
        return None
    return chosen.version.partition("+")[0] if chosen.version else _UNREADABLE


def _word(release: object) -> str:
    return str(release or "not found")


def _finding(job: Job, found: MajoritySplit, group: Group[object]) -> Finding:
    releases = describe(found._replace(expected=None), absent="not found")
    if found.expected:
        deviation = BaselineDeviation((found.unlike("NCCL version", _word, group),), found.drifted)
        evidence = {"releases": releases, "goes_with": list(correlates(job, group.ranks))}
        fix = _fix_of_drift(group.ranks, found.expected.value) if found.drifted else _fix(group.ranks)
        return deviation.finding(group.ranks, evidence).extended({}, fix)
    others = [other for other in found.groups if other.value != group.value]
    on = ranks_in_words(group.ranks, 4)
    if group.value is None and len(others) == 1:
        return Finding(
            f"NCCL not found on {on} ({_word(others[0].value)} on "
            f"{'the others' if len(others[0].ranks) > 1 else ranks_in_words(others[0].ranks)})",
            ranks=group.ranks,
            evidence={"releases": releases, "goes_with": list(correlates(job, group.ranks))},
            fix=_fix(group.ranks) if found.common else "",
        )
    return Finding(
        f"NCCL versions differ between ranks: {_word(group.value)} on {on}, {_word(others[0].value)} on "
        f"{'the others' if len(others[0].ranks) > 1 else ranks_in_words(others[0].ranks)}"
        if len(others) == 1
        else f"NCCL versions differ between ranks: {_word(group.value)} on {on}",
        ranks=group.ranks,
        evidence={"releases": releases, "goes_with": list(correlates(job, group.ranks))},
        fix=_fix(group.ranks) if found.common else "",
    )


def _fix_of_drift(ranks: tuple[int, ...], release: object) -> str:
    environment = f"an environment with NCCL {release}" if release else "an environment without NCCL"
    return or_new_baseline(f"Start {ranks_in_words(ranks, 4)} from {environment}")


def _fix(ranks: tuple[int, ...]) -> str:
    return f"Start {ranks_in_words(ranks, 4)} from the same image or Python environment as the other ranks."
