"""GPU002: a local rank beyond the visible devices."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.api import (
    EnvironmentFacts,
    Finding,
    GpuFacts,
    Job,
    LaunchFacts,
    LocalRanks,
    Rank,
    Severity,
    Sick,
    Unknown,
    Verdict,
    Visible,
    Well,
    bound_per_task,
    check,
    healthy,
    on_processor,
    visible_gpus,
)


@check(
    id="GPU002",
    severity=Severity.ERROR,
    when="PM",
    needs=(LaunchFacts, EnvironmentFacts, GpuFacts),
    cases=lambda: (
        Well("as many GPUs as ranks", healthy(hosts=2, per_host=4)),
        Well(
            "a GPU of its own for each rank, used as device 0",
            healthy(per_host=2)
            .environ(ranks=(0,), CUDA_VISIBLE_DEVICES="0")
            .environ(ranks=(1,), CUDA_VISIBLE_DEVICES="1"),
        ),
        Well("ranks on the CPU", healthy(per_host=4, gpus=1).environ(CUDA_VISIBLE_DEVICES="-1")),
        Well("a left-over LOCAL_RANK in a lone process", healthy(per_host=1).alter(LaunchFacts, local_rank=3)),
        Sick("more ranks than GPUs", healthy(per_host=4, gpus=2), ranks=(2, 3)),
        Sick(
            "one device left visible for all ranks",
            healthy(per_host=4).environ(CUDA_VISIBLE_DEVICES="0"),
            ranks=(1, 2, 3),
        ),
        Sick(
            "a shorter list on one host",
            healthy(hosts=2, per_host=4).environ(ranks=(4, 5, 6, 7), CUDA_VISIBLE_DEVICES="0,1,2"),
            ranks=(7,),
        ),
    ),
)
def ordinal_out_of_range(job: Job) -> Iterator[Verdict]:
    """Ask whether each local rank addresses a device that its process sees.

    Why it hurts: the rank dies with "CUDA error: invalid device ordinal", and the others wait for it until they time
    out.
    Fix: start as many processes a host as GPUs are visible, or widen CUDA_VISIBLE_DEVICES; where each process sees one
    device alone, use `cuda:0` in it.
    """
    for local in job.by_host():
        yield from _judge_host(job, local)


def _judge_host(job: Job, local: LocalRanks) -> Iterator[Verdict]:
    lists = {_list_of(rank) for rank in local.members}
    beyond: dict[int, list[Rank]] = {}
    unclear: dict[str, list[Rank]] = {}
    for rank in local.members:
        seen = _seen(rank)
        if seen is None:
            continue
        if seen.size is None:
            unclear.setdefault(seen.why, []).append(rank)
        elif (rank.local_rank or 0) >= seen.size and rank.local_rank is not None:
            if seen.size != 1 or not _has_own_device(rank, lists):
                beyond.setdefault(seen.size, []).append(rank)
    for why, ranks in unclear.items():
        yield Unknown(why, _numbers(ranks), "set CUDA_VISIBLE_DEVICES to UUIDs (nvidia-smi -L)")
    for size, ranks in beyond.items():
        yield from _out_of_range(job, local, size, ranks)


def _seen(rank: Rank) -> Visible | None:
    """What a rank of a launched job sees; ``None`` where the question does not arise."""
    launch, gpus = rank.find(LaunchFacts), rank.find(GpuFacts)
    if not launch or not launch.running_together or gpus is None or not gpus.gpus or on_processor(rank):
        return None
    return visible_gpus(rank.find(EnvironmentFacts), gpus)


def _list_of(rank: Rank) -> str | None:
    environment = rank.find(EnvironmentFacts)
    return environment.get("CUDA_VISIBLE_DEVICES") if environment else None


def _has_own_device(rank: Rank, lists: set[str | None]) -> bool:
    """Whether its only visible device was given to this rank alone, so that it must be used as device 0."""
    return bound_per_task(rank) or (_list_of(rank) is not None and len(lists) > 1)


def _out_of_range(job: Job, local: LocalRanks, size: int, ranks: list[Rank]) -> Iterator[Verdict]:
    if size == 1 and job.ungathered and len(local.members) == 1 and _list_of(ranks[0]) is not None:
        reason = "one device is visible to this rank, and whether others share it is not known"
        yield Unknown(reason, _numbers(ranks), "gather all ranks of the host")
        return
    devices = "no device is" if size == 0 else "1 device is" if size == 1 else f"{size} devices are"
    wanted = ", ".join(str(rank.local_rank) for rank in ranks)
    plural = "s" if len(ranks) > 1 else ""
    yield Finding(
        f"local rank{plural} {wanted} on {local.name}, where {devices} visible",
        ranks=_numbers(ranks),
        evidence={
            "visible_devices": size,
            "local_ranks": [rank.local_rank for rank in ranks],
            "CUDA_VISIBLE_DEVICES": _list_of(ranks[0]),
        },
        explains=("GPU001",),
    )


def _numbers(ranks: list[Rank]) -> tuple[int, ...]:
    return tuple(rank.number for rank in ranks)
