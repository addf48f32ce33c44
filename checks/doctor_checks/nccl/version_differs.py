"""NCCL008: ranks load different NCCL releases."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.api import (
    Finding,
    Group,
    Job,
    Scope,
    Severity,
    Sick,
    Skip,
    SoftwareFacts,
    Split,
    Unknown,
    Verdict,
    Well,
    check,
    correlates,
    describe,
    healthy,
    split,
)

_UNREADABLE = "release not readable"


@check(
    id="NCCL008",
    severity=Severity.ERROR,
    scope=Scope.JOB,
    when="PM",
    needs=(SoftwareFacts,),
    cases=lambda: (
        Well("one release everywhere", healthy(hosts=2, per_host=2)),
        Well("no NCCL on any rank", healthy(2, 2, gpus=0)),
        Well(
            "one release, built for another CUDA",
            healthy(2, 2).alter(
                SoftwareFacts,
                ranks=(2,),
                nccl_libraries=lambda old: tuple(
                    type(one)(one.path, "2.27.3+cuda13.0", one.origin, chosen=True) for one in old
                ),
            ),
        ),
        Sick(
            "one rank loads an older NCCL",
            healthy(hosts=2, per_host=2).alter(
                SoftwareFacts,
                ranks=(2,),
                nccl_libraries=lambda old: tuple(type(one)(one.path, "2.21.5", one.origin, chosen=True) for one in old),
            ),
            ranks=(2,),
        ),
        Sick(
            "one host of three has another image",
            healthy(hosts=3, per_host=2).alter(
                SoftwareFacts,
                hosts=("node1",),
                nccl_libraries=lambda old: tuple(type(one)(one.path, "2.30.7", one.origin, chosen=True) for one in old),
            ),
            ranks=(2, 3),
        ),
        Sick(
            "one host finds none", healthy(3, 2).alter(SoftwareFacts, hosts=("node2",), nccl_libraries=()), ranks=(4, 5)
        ),
        Sick(
            "half of the ranks",
            healthy(hosts=2, per_host=1).alter(
                SoftwareFacts,
                ranks=(1,),
                nccl_libraries=lambda old: tuple(type(one)(one.path, "2.30.7", one.origin, chosen=True) for one in old),
            ),
            ranks=(0, 1),
        ),
    ),
)
def version_differs(job: Job) -> Iterator[Verdict]:
    """Ask whether every rank loads the same NCCL.

    Why it hurts: NCCL refuses to form a communicator of different releases, or hangs in it; no rank names the other.
    Fix: start every rank from one image or one environment; compare `pip list | grep nccl` and LD_LIBRARY_PATH.
    """
    found = split(job, SoftwareFacts, _release)
    if found.common is not None and not found.minorities and found.common.value is None:
        yield Skip("no NCCL on any rank")
        return
    for group in (*found.minorities, *((found.common,) if found.common else ())):
        if group.value == _UNREADABLE:
            yield Unknown("the release of the NCCL that would be loaded could not be read", group.ranks)
    for group in found.minorities:
        if _UNREADABLE not in _values(found, group):
            yield _finding(job, found, group)


def _release(software: SoftwareFacts) -> str | None:
    chosen = next((library for library in software.nccl_libraries if library.chosen), None)
    if chosen is None:
        return None
    return chosen.version.partition("+")[0] if chosen.version else _UNREADABLE


def _values(found: Split, group: Group[object]) -> tuple[object, ...]:
    return (group.value, found.common.value if found.common else None)


def _finding(job: Job, found: Split, group: Group[object]) -> Finding:
    release = group.value or "not found"
    common = found.common.value or "not found" if found.common else None
    return Finding(
        f"NCCL {release}, elsewhere {common}" if common else f"NCCL {release}, other ranks another one, split evenly",
        ranks=group.ranks,
        evidence={"release": group.value, "releases": describe(found), "goes_with": list(correlates(job, group.ranks))},
    )
