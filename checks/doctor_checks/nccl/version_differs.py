"""NCCL008: ranks load different NCCL releases."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.api import Finding, Job, Scope, Severity, Sick, SoftwareFacts, Verdict, Well, check, healthy


@check(
    id="NCCL008",
    severity=Severity.ERROR,
    scope=Scope.JOB,
    when="PM",
    needs=(SoftwareFacts,),
    cases=lambda: (
        Well("one release everywhere", healthy(hosts=2, per_host=2)),
        Sick(
            "one rank loads an older NCCL",
            healthy(hosts=2, per_host=2).alter(
                SoftwareFacts,
                ranks=(2,),
                nccl_libraries=lambda old: tuple(type(one)(one.path, "2.21.5", one.origin, chosen=True) for one in old),
            ),
            ranks=(2,),
        ),
    ),
)
def version_differs(job: Job) -> Iterator[Verdict]:
    """Ask whether every rank loads the same NCCL.

    Why it hurts: NCCL refuses to form a communicator of different releases, or hangs in it; no rank names the other.
    Fix: start every rank from one image or one environment; compare `pip list | grep nccl` and LD_LIBRARY_PATH.
    """
    common, *others = job.facts(SoftwareFacts).group(lambda software: software.nccl)
    for release, ranks in others:
        yield Finding(
            f"NCCL {release or 'not found'}, elsewhere {common.value or 'not found'}",
            ranks=ranks,
            evidence={"release": release, "elsewhere": common.value, "ranks_elsewhere": list(common.ranks)},
        )
