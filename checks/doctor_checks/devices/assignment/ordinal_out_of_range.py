"""GPU002: a local rank exceeds the number of visible devices."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.analysis.visible_devices import asks_to_share, has_own_gpus, on_processor, ordinal_of, uses_nccl, visible_to
from doctor.api import (
    EventGroup,
    Finding,
    Job,
    Rank,
    Severity,
    Unknown,
    Verdict,
    check,
    event_groups,
    finding_from_logs,
    ranks_in_words,
)
from doctor.facts import EnvironmentFacts, GpuFacts, LaunchFacts, NcclFacts, SoftwareFacts, TrainerFacts, TrainingFacts
from doctor.testing import Fails, Passes, healthy, logged, running


def _from_logs(job: Job) -> Iterator[Finding]:
    for group in event_groups(job, "gpu.ordinal"):
        has, text = group.value("has"), group.first.text
        seen = f" ({len(has.split(',')) if has.strip() else 0} visible)" if has is not None else ""
        names = {
            "asked": "asked_for",
            "asked2": "asked_for",
            "slot": "asked_for",
            "index": "asked_for",
            "count": "visible",
            "seen": "visible",
            "seen2": "visible",
            "has": "visible_devices",
        }
        values = {name: group.value(name) or "" for name in ("asked", "seen", "slot", "has")}
        values["host"] = group.value("slot_host") or "the host"
        words, summary, fix = next((one for one in _STARTS if one[0] in text), ("", "", ""))
        yield finding_from_logs(
            group,
            summary.format(**values) or f"{_who(group)}{seen}",
            effect="The job ends at startup." if words else "",
            fix=fix.format(**values),
            evidence={key: value for name, key in names.items() if (value := group.value(name)) is not None},
            confidence=0.75 if has is not None else 0.95,
            hosts=(values["host"],) if values["host"] not in ("the host", "localhost") else (),
        )


def _who(group: EventGroup) -> str:
    """``Ranks 4 and 5 requested GPUs that are not visible to them``."""
    if len(group.ranks) > 1:
        return f"{ranks_in_words(group.ranks).capitalize()} requested GPUs that are not visible to them"
    who = ranks_in_words(group.ranks).capitalize() if group.ranks else "A process"
    return f"{who} requested a GPU that is not visible to it"


_STARTS = (
    (
        "your machine only has",
        "The Trainer requests a GPU that is not visible",
        "Request only visible GPUs ({has}) in `Trainer(devices=...)`, or extend CUDA_VISIBLE_DEVICES.",
    ),
    (
        "cannot be larger than the number of available GPUs",
        "Tensor parallel size {asked} exceeds the number of visible GPUs ({seen})",
        "Lower the tensor parallel size from {asked} to {seen}, or make more GPUs visible.",
    ),
    (
        "No slot '",
        "`--include` or `--exclude` of DeepSpeed names slot {slot}, which {host} does not have",
        "Remove slot {slot} of {host} from `--include` or `--exclude`, or correct the slots of {host} in the hostfile.",
    ),
)
"""Words of errors of launchers and frameworks before ranks use CUDA -> a summary and a fix."""


@check(
    id="GPU002",
    severity=Severity.ERROR,
    when="PM",
    needs=(LaunchFacts, EnvironmentFacts, GpuFacts),
    from_logs=_from_logs,
    impacts={
        r"checkpoint was saved": (
            "torch.load() raises an error on this rank, and the other ranks wait for it until their timeout."
        ),
    },
    cases=lambda: (
        Passes("as many GPUs as ranks", healthy(hosts=2, per_host=4)),
        Passes(
            "a GPU of its own for each rank, used as device 0",
            healthy(per_host=2)
            .environ(ranks=(0,), CUDA_VISIBLE_DEVICES="0")
            .environ(ranks=(1,), CUDA_VISIBLE_DEVICES="1"),
        ),
        Passes("ranks on the CPU", healthy(per_host=4, gpus=1).environ(CUDA_VISIBLE_DEVICES="-1")),
        Passes(
            "two ranks that share the only GPU through MPS",
            healthy(per_host=2, gpus=1).environ(CUDA_MPS_PIPE_DIRECTORY="/tmp/nvidia-mps"),  # noqa: S108 - its default
        ),
        Passes(
            "two ranks on the only GPU that talk by Gloo",
            healthy(per_host=2, gpus=1).put(TrainerFacts(source="LT_*", backend="gloo")),
        ),
        Passes("a left-over LOCAL_RANK in a lone process", healthy(per_host=1).alter(LaunchFacts, local_rank=3)),
        Fails(
            "torchrun inside a SLURM task that was given one GPU",
            healthy(per_host=2, gpus=1).launched(SLURM_GPUS_PER_TASK="1").environ(CUDA_VISIBLE_DEVICES="0"),
            ranks=(1,),
        ),
        Fails("more ranks than GPUs", healthy(per_host=4, gpus=2), ranks=(2, 3)),
        Fails(
            "one device left visible for all ranks",
            healthy(per_host=4).environ(CUDA_VISIBLE_DEVICES="0"),
            ranks=(1, 2, 3),
        ),
        Fails(
            "a shorter list on one host",
            healthy(hosts=2, per_host=4).environ(ranks=(4, 5, 6, 7), CUDA_VISIBLE_DEVICES="0,1,2"),
            ranks=(7,),
        ),
        Fails(
            "four ranks that share two GPUs on purpose",
            healthy(per_host=4, gpus=2).environ(NCCL_MULTI_RANK_GPU_ENABLE="1"),
            ranks=(2, 3),
            severity=Severity.WARNING,
        ),
        Passes("a run whose ranks have their devices", running(2, 4)),
        Passes("a run on the CPU of a host with one GPU", running(1, 4, gpus=1).alter(TrainingFacts, device="cpu")),
        Passes(
            "a run that shares the devices out by itself",
            running(1, 4, gpus=2)
            .alter(TrainingFacts, ranks=(2,), device="cuda:0", device_id=None, backend="gloo")
            .alter(TrainingFacts, ranks=(3,), device="cuda:1", device_id=None, backend="gloo"),
        ),
        Fails(
            "a run that takes a device beyond the visible ones",
            running(1, 2).environ(CUDA_VISIBLE_DEVICES="0").alter(TrainingFacts, device_id=None),
            ranks=(1,),
        ),
        Fails(
            "logged by torch",
            logged(
                "[rank4]: torch.AcceleratorError: CUDA error: invalid device ordinal",
                "[rank5]: torch.AcceleratorError: CUDA error: invalid device ordinal",
                "[rank4]: CUDA kernel errors might be asynchronously reported at some other API call",
            ),
            ranks=(4, 5),
        ),
    ),
)
def ordinal_out_of_range(job: Job) -> Iterator[Verdict]:
    """Ask whether each local rank uses a device that is visible to its process.

    Why it hurts: each rank whose GPU is not visible fails with "CUDA error: invalid device ordinal", and the other
    ranks wait for it until their timeout.
    Fix: Start one process per visible GPU (`torchrun --nproc-per-node=gpu`), or extend CUDA_VISIBLE_DEVICES.
    """
    lists: dict[int, set[str | None]] = {}
    for environment, identical in job.each(EnvironmentFacts):
        devices = environment.get("CUDA_VISIBLE_DEVICES")
        for rank in identical.members:
            lists.setdefault(rank.host.index, set()).add(devices)
    also = (SoftwareFacts, TrainerFacts, NcclFacts, TrainingFacts)
    for environment, gpus, identical in job.each(EnvironmentFacts, GpuFacts, also=also):
        launched = [rank for rank in identical.members if _is_launched(rank)]
        seen = visible_to(identical)
        if not launched or seen is None or not gpus.gpus or on_processor(identical):
            continue
        if seen.size is None:
            ranks = tuple(rank.number for rank in launched)
            yield Unknown(seen.why, ranks, "name the devices by UUID in CUDA_VISIBLE_DEVICES (nvidia-smi -L)")
            continue
        beyond = [rank for rank in launched if _ordinal(rank) >= seen.size]
        sharing = asks_to_share(identical) or not uses_nccl(identical)
        if seen.size == 1:
            beyond = [rank for rank in beyond if not _has_own_device(rank, environment, lists[rank.host.index])]
        if beyond and not (sharing and seen.size == 1):
            yield _judge(job, environment, seen.size, beyond, Severity.WARNING if sharing else Severity.ERROR)


def _is_launched(rank: Rank) -> bool:
    launch = rank.find(LaunchFacts)
    return launch is not None and bool(launch.running_together) and launch.local_rank is not None


def _ordinal(rank: Rank) -> int:
    """The number of the rank's device: from its run, or else its local rank; -1 if the run reports the device id."""
    training = rank.find(TrainingFacts)
    if training is None or training.device is None:
        return rank.local_rank or 0
    return -1 if training.device_id else ordinal_of(training.device) or 0


def _has_own_device(rank: Rank, environment: EnvironmentFacts, lists: set[str | None]) -> bool:
    """Whether its only visible device belongs to this rank, which must use it as device 0."""
    return has_own_gpus(rank) or (environment.get("CUDA_VISIBLE_DEVICES") is not None and len(lists) > 1)


def _judge(
    job: Job, environment: EnvironmentFacts, size: int, ranks: list[Rank], severity: Severity
) -> Finding | Unknown:
    """Ranks that share GPUs on purpose select the device in the program, as local rank modulo devices."""
    numbers, listed = tuple(rank.number for rank in ranks), environment.get("CUDA_VISIBLE_DEVICES")
    if size == 1 and job.ungathered and len(job.ranks) == 1 and listed is not None:
        reason = "one device is visible to this rank, and it is unknown whether other ranks share it"
        return Unknown(reason, numbers, "gather all ranks of the host")
    devices = "no GPU is" if size == 0 else "only 1 GPU is" if size == 1 else f"only {size} GPUs are"
    local_ranks = sorted({rank.local_rank or 0 for rank in ranks})
    hosts = list(dict.fromkeys(rank.host.name for rank in ranks))
    more = f" and {len(hosts) - 3} more hosts" if len(hosts) > 3 else ""
    return Finding(
        f"Local {ranks_in_words(tuple(local_ranks))} on {', '.join(hosts[:3])}{more} "
        f"{'has' if len(local_ranks) == 1 else 'have'} no GPU: {devices} visible",
        ranks=numbers,
        evidence={"visible_devices": size, "local_ranks": local_ranks, "CUDA_VISIBLE_DEVICES": listed},
        effect=_SHARES if severity is Severity.WARNING else _fails(numbers),
        fix=f"Select the device of each rank with `LOCAL_RANK % {size}`."
        if severity is Severity.WARNING and size
        else _fix(size, listed),
        severity=severity,
        explains=("GPU001",),
    )


_SHARES = 'Ranks that use `cuda:LOCAL_RANK` fail with "CUDA error: invalid device ordinal".'


def _fails(ranks: tuple[int, ...]) -> str:
    verb, them = ("fail", "them") if len(ranks) > 1 else ("fails", "it")
    return (
        f'{ranks_in_words(ranks).capitalize()} {verb} with "CUDA error: invalid device ordinal", and the other ranks '
        f"wait for {them} until their timeout."
    )


def _fix(size: int, listed: str | None) -> str:
    processes = f"{size} process{'' if size == 1 else 'es'} per host"
    if size == 0:
        return "Make the GPUs of the host visible:\nunset CUDA_VISIBLE_DEVICES" if listed is not None else ""
    more = "list more GPUs in CUDA_VISIBLE_DEVICES" if listed is not None else "use a host with more GPUs"
    return f"Start {processes} (`torchrun --nproc-per-node={size}`), or {more}."
