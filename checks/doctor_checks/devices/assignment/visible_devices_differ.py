"""GPU004: ranks of one host see different devices."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.analysis.visible_devices import has_own_gpus, visible_to
from doctor.api import (
    Finding,
    Job,
    LocalRanks,
    Rank,
    Scope,
    Severity,
    Skip,
    Unknown,
    Verdict,
    check,
    event_groups,
    finding_from_logs,
)
from doctor.facts import EnvironmentFacts, GpuFacts, MissingReason
from doctor.testing import Fails, Passes, healthy, logged

View = tuple[str, ...]


def _from_logs(job: Job) -> Iterator[Finding]:
    for group in event_groups(job, "pl.local_rank"):
        views: dict[str, set[View]] = {}
        for event in group.events:
            listed = tuple(word.strip() for word in (event.value("dev") or "").split(",") if word.strip())
            views.setdefault(event.value("lr") or "", set()).add(listed)
        lists = {view for seen in views.values() for view in seen}
        # Two lists of one local rank come from two hosts, which the log does not distinguish.
        one_host = all(len(seen) == 1 for seen in views.values())
        own = all(len(view) == 1 for view in lists)
        if one_host and not own and len(lists) > 1:
            yield finding_from_logs(
                group,
                f"Ranks on one host see {len(lists)} different lists of GPUs",
                ranks=(),
                evidence={"visible_devices_by_local_rank": {rank: list(*seen) for rank, seen in views.items()}},
                confidence=0.7,
                explains=("GPU001", "GPU002"),
                symptoms=False,
            )


@check(
    id="GPU004",
    severity=Severity.WARNING,
    scope=Scope.HOST,
    when="PM",
    needs=(EnvironmentFacts,),
    from_logs=_from_logs,
    compares_ranks=True,
    needs_peers=True,
    cases=lambda: (
        Passes("all ranks see all devices", healthy(hosts=2, per_host=4)),
        Passes("the same list on all ranks of a host", healthy(per_host=2).environ(CUDA_VISIBLE_DEVICES="1,0")),
        Passes(
            "the same devices by index and by default",
            healthy(per_host=2).environ(ranks=(1,), CUDA_VISIBLE_DEVICES="0,1"),
        ),
        Passes(
            "bound by SLURM, which another check covers",
            healthy(per_host=2)
            .by_srun()
            .launched(SLURM_GPUS_PER_TASK="1")
            .environ(ranks=(0,), CUDA_VISIBLE_DEVICES="0")
            .environ(ranks=(1,), CUDA_VISIBLE_DEVICES="1"),
        ),
        Passes(
            "no GPU, left-over lists",
            healthy(per_host=2, gpus=0).environ(ranks=(1,), CUDA_VISIBLE_DEVICES="1"),
        ),
        Fails(
            "one device for each rank, addressed by local rank",
            healthy(per_host=2)
            .environ(ranks=(0,), CUDA_VISIBLE_DEVICES="0")
            .environ(ranks=(1,), CUDA_VISIBLE_DEVICES="1"),
            ranks=(1,),
        ),
        Passes(
            "Lightning shows one list",
            logged("LOCAL_RANK: 0 - CUDA_VISIBLE_DEVICES: [0,1]", "LOCAL_RANK: 1 - CUDA_VISIBLE_DEVICES: [0,1]"),
        ),
        Passes(
            "Lightning shows a device of its own for each task",
            logged("LOCAL_RANK: 0 - CUDA_VISIBLE_DEVICES: [0]", "LOCAL_RANK: 1 - CUDA_VISIBLE_DEVICES: [1]"),
        ),
        Fails(
            "Lightning shows a shorter list",
            logged("LOCAL_RANK: 0 - CUDA_VISIBLE_DEVICES: [0,1]", "LOCAL_RANK: 1 - CUDA_VISIBLE_DEVICES: [1]"),
        ),
        Fails(
            "one rank with a shorter list",
            healthy(per_host=4).environ(ranks=(2,), CUDA_VISIBLE_DEVICES="0,1,3"),
            ranks=(2,),
        ),
        Fails(
            "one rank hides its devices",
            healthy(hosts=2, per_host=4).environ(ranks=(5,), CUDA_VISIBLE_DEVICES=""),
            ranks=(5,),
        ),
    ),
)
def visible_devices_differ(job: Job) -> Iterator[Verdict]:
    """Ask whether the ranks of a host see the same devices in the same order.

    Why it hurts: ranks that use `cuda:LOCAL_RANK` share a GPU, or fail with "invalid device ordinal".
    Fix: Give all ranks of a host the same CUDA_VISIBLE_DEVICES, or give each rank one device and use `cuda:0` in all of
    them.
    """
    hosts = [local for local in job.by_host() if len(local.members) > 1 and not _without_gpu(local)]
    if not hosts:
        reason = "no host with GPUs and several ranks"
        yield Unknown("other ranks not gathered") if job.ungathered else Skip(reason)
    for local in hosts:
        if len({id(rank.find(EnvironmentFacts)) for rank in local.members}) == 1:
            continue
        views: dict[View, list[Rank]] = {}
        # Equal environments are one object: most hosts have one.
        known: dict[int, View] = {}
        for rank in local.members:
            environment = rank.find(EnvironmentFacts)
            if environment and not has_own_gpus(rank):
                view = known.get(id(environment)) or known.setdefault(id(environment), _view(rank, environment))
                views.setdefault(view, []).append(rank)
        if len(views) < 2:
            continue
        blamed = _blamed(views)
        if blamed:
            yield Finding(
                f"Ranks on {local.name} see {len(views)} different lists of GPUs",
                ranks=tuple(sorted(rank.number for rank in blamed)),
                evidence={
                    "visible_devices_by_rank": {
                        str(rank.number): list(view) for view, ranks in views.items() for rank in ranks
                    }
                },
                fix=f"Give all ranks on {local.name} the same CUDA_VISIBLE_DEVICES, or give each of them one device "
                "and use `cuda:0` in all of them.",
                explains=("GPU001", "GPU002"),
            )


def _without_gpu(local: LocalRanks) -> bool:
    missing = local.hosts[0].missing(GpuFacts)
    return missing is not None and missing.lack is MissingReason.ABSENT


def _blamed(views: dict[View, list[Rank]]) -> list[Rank]:
    """The ranks at fault. If each rank sees one different device: those that would use another one; else the smaller
    groups, or all. A baseline does not help, because schedulers assign devices for every job."""
    if all(len(view) == 1 and len(ranks) == 1 for view, ranks in views.items()):
        return [ranks[0] for ranks in views.values() if ranks[0].local_rank]
    ordered = sorted(views.values(), key=len, reverse=True)
    others = ordered if len(ordered[0]) == len(ordered[1]) else ordered[1:]
    return [rank for ranks in others for rank in ranks]


def _view(rank: Rank, environment: EnvironmentFacts) -> View:
    seen = visible_to(rank)
    if seen is not None and seen.devices is not None:
        return tuple(device.label for device in seen.devices)
    text = environment.get("CUDA_VISIBLE_DEVICES")
    return ("all",) if text is None else tuple(word.strip() for word in text.split(",") if word.strip())
