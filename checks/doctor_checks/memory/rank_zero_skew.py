"""MEM001: other ranks hold memory on the first GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from doctor.analysis.logs.oom_events import as_event_groups, exhaustions, numbers_of, on_first_device
from doctor.analysis.stats.rank_roles import uses_lightning
from doctor.analysis.visible_devices import VisibleDevice, devices_of, mebibytes, process_ids, sees_host_processes
from doctor.api import (
    EventGroup,
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
    ranks_in_words,
)
from doctor.facts import (
    Event,
    Gpu,
    GpuFacts,
    GpuProcess,
    HostFacts,
    MemorySample,
    ModelFacts,
    ProcessFacts,
    RunMemoryFacts,
    TensorShape,
)
from doctor.testing import Fails, JobBuilder, Passes, healthy, logged, running

GIB = 1 << 30
MIB = 1 << 20

BYTES = {"float64": 8, "int64": 8, "bfloat16": 2, "float16": 2, "half": 2, "int8": 1, "uint8": 1, "bool": 1}
"""Bytes per element of a type; 4 for other types."""

_CAUSES = {
    "contexts": "CUDA contexts only, due to a missing or late torch.cuda.set_device(), pinned memory, or barrier() "
    "without device_ids",
    "checkpoint": "a checkpoint loaded without map_location",
    "grows": "tensors that the training loop sends to cuda:0",
    "tensors": "tensors, smaller than the model, that are sent to cuda:0",
}

_SIGNATURES = {
    "contexts": "CUDA contexts only",
    "checkpoint": "the size of a checkpoint",
    "grows": "growing with each step",
    "tensors": "tensors smaller than the model",
}


def _held(*pids: int, size: int = 500 * MIB) -> tuple[GpuProcess, ...]:
    return tuple(GpuProcess(pid, size, "python") for pid in pids)


def _seen_in_run(*strangers: int, size: int, foreign: int = GIB, **more: object) -> JobBuilder:
    own = GpuProcess(10_000, 31 * GIB, "python")
    held = (own, *_held(*(10_000 + rank for rank in strangers), size=size))
    return running(1, 4).alter(RunMemoryFacts, ranks=(0,), processes=held, foreign=foreign, **more)  # type: ignore[arg-type]


def _growing(*sizes: int) -> tuple[MemorySample, ...]:
    return tuple(
        MemorySample(50 * place, reserved=30 * GIB, device_used=30 * GIB + size) for place, size in enumerate(sizes, 1)
    )


def _of_parameters(count: int) -> tuple[TensorShape, ...]:
    return (TensorShape("weight", (count,), "float32"),)


def _from_logs(job: Job) -> Iterator[Finding]:
    found = tuple(one for one in exhaustions(job) if on_first_device(one))
    if not found:
        return
    first = found[0]
    gpu = f"GPU {first.shortage.device or 0}"
    others = mebibytes(first.shortage.other_bytes) if first.shortage.other_bytes else "memory"
    what = (
        f"{gpu} is full, and every rank loads a checkpoint to it"
        if first.is_loading
        else f"{gpu} is full, and other processes, probably ranks, hold {others} of it"
    )
    ranks = tuple(sorted({one.rank for one in found if one.rank is not None}))
    who = f"Rank {ranks[0]}" if len(ranks) == 1 else "The rank of this GPU"
    yield finding_from_logs(
        as_event_groups(found),
        what,
        ranks=ranks,
        evidence={**numbers_of(first), "likely_cause": _CAUSES["checkpoint" if first.is_loading else "contexts"]},
        effect=f'{who} fails with "CUDA out of memory", while other GPUs may have free memory.',
        fix=_fix(job, "checkpoint" if first.is_loading else "contexts"),
        severity=Severity.ERROR,
        confidence=0.8 if first.is_loading or (first.cause == "skew" and len(first.shortage.others) > 1) else 0.6,
        explains=("MEM002", "MEM003", "MEM004", "MEM006", "MEM011"),
    )


def _by_processes(job: Job) -> Iterator[Finding]:
    """By a table of nvidia-smi: processes that hold less memory on the first GPU than on another one, which is their
    own. A single process on several GPUs uses all of them."""
    rows = [event for group in event_groups(job, "gpu.process") for event in group.events]
    if not rows:
        return
    held = {(event.value("pid"), int(event.value("gpu") or 0)): int(event.value("mebibytes") or 0) for event in rows}
    first = {pid: size for (pid, gpu), size in held.items() if gpu == 0}
    strangers = {pid: size for pid, size in first.items() if any(_is_home(held, pid, gpu) for _, gpu in held)}
    probably = "" if strangers else "probably "
    strangers = strangers or _contexts(rows, first)
    if not strangers or len(first) == len(strangers):
        return
    use = "processes that {}use other GPUs hold" if len(strangers) > 1 else "process that {}uses another GPU holds"
    yield finding_from_logs(
        EventGroup("gpu.process", tuple(event for event in rows if event.value("pid") in strangers)),
        f"{len(strangers)} {use.format(probably)} {mebibytes(sum(strangers.values()) * MIB)} on GPU 0",
        evidence={"memory_bytes_by_process": {pid: size * MIB for pid, size in strangers.items()}},
        fix=_fix(job, "contexts"),
        severity=Severity.WARNING,
        confidence=0.85,
        explains=("MEM002", "MEM003", "MEM004", "MEM011"),
    )


def _contexts(rows: list[Event], first: Mapping[str | None, int]) -> dict[str | None, int]:
    """If the table shows only the first GPU: small processes of one size next to a large one of the same program."""
    names = {event.value("name") for event in rows if event.value("gpu") == "0"}
    largest = max(first.values(), default=0)
    small = {pid: size for pid, size in first.items() if 250 <= size < min(1500, largest / 2)}
    identical = bool(small) and max(small.values()) <= 1.1 * min(small.values())
    only_first = all(event.value("gpu") == "0" for event in rows)
    return small if only_first and identical and len(names) == 1 and len(small) == len(first) - 1 >= 2 else {}


def _is_home(held: Mapping[tuple[str | None, int], int], pid: str | None, gpu: int) -> bool:
    return gpu > 0 and held.get((pid, gpu), 0) > held.get((pid, 0), 0)


@check(
    id="MEM001",
    severity=Severity.WARNING,
    scope=Scope.HOST,
    when="PRM",
    needs=(GpuFacts, ProcessFacts),
    compares_ranks=True,
    from_logs=(_by_processes, _from_logs),
    impacts={
        r"uses? (?:an)?other GPU": (
            "The rank of GPU 0 has less memory than the other ranks, and may run out of memory first."
        ),
    },
    cases=lambda: (
        Passes(
            "every rank on its own GPU",
            healthy(per_host=2).gpu(0, processes=_held(10_000)).gpu(1, processes=_held(10_001)),
        ),
        Passes("nothing started yet", healthy(hosts=2, per_host=4)),
        Passes("another process on the first GPU", healthy(per_host=2).gpu(0, processes=_held(4242))),
        Passes(
            "ranks that share the first GPU on purpose",
            healthy(per_host=2).environ(CUDA_VISIBLE_DEVICES="0").gpu(0, processes=_held(10_000, 10_001)),
        ),
        Passes(
            "a container in which process ids mean something else",
            healthy(per_host=2)
            .alter(HostFacts, container="docker")
            .gpu(0, processes=(GpuProcess(10_000, GIB), GpuProcess(10_001, GIB))),
        ),
        Fails(
            "bare contexts of three ranks on the first GPU",
            healthy(hosts=2, per_host=4).gpu(0, hosts=("node1",), processes=_held(10_000, 10_001, 10_002, 10_003)),
            ranks=(5, 6, 7),
        ),
        Fails(
            "a checkpoint loaded to the first GPU by every rank",
            healthy(per_host=2).gpu(0, processes=_held(10_000, 10_001, size=9 * GIB)),
            ranks=(1,),
        ),
        Passes("a run on its own GPUs", running(2, 4)),
        Passes("a run on the CPU", running(2, 2, gpus=0)),
        Passes("ranks that share the first GPU by choice in a run", running(1, 2, gpus=1)),
        Fails("contexts created during the run", _seen_in_run(1, 2, 3, size=530 * MIB), ranks=(1, 2, 3)),
        Fails(
            "the whole checkpoint in a run",
            _seen_in_run(2, size=5 * GIB).alter(ModelFacts, parameters=10**9, tensors=_of_parameters(10**9)),
            ranks=(2,),
        ),
        Fails(
            "tensors sent to cuda:0 in every step",
            _seen_in_run(3, size=2 * GIB, samples=_growing(GIB, GIB + 300 * MIB, GIB + 700 * MIB, 2 * GIB)),
            ranks=(3,),
        ),
        Fails(
            "in a container that shows no names, by their number and size",
            running(1, 4)
            .alter(HostFacts, container="docker")
            .alter(
                RunMemoryFacts,
                ranks=(0,),
                processes=tuple(GpuProcess(77 + number) for number in range(4)),
                foreign=GIB + 3 * 520 * MIB,
            )
            .alter(RunMemoryFacts, ranks=(1, 2, 3), processes=(GpuProcess(99),)),
            ranks=(1, 2, 3),
        ),
        Passes(
            "log of a rank that fills its own GPU",
            logged(
                "[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total "
                "capacity of 79.15 GiB of which 1.02 GiB is free. Including non-PyTorch memory, this process has 78.10 "
                "GiB memory in use. Of the allocated memory 76.50 GiB is allocated by PyTorch, and 512.00 MiB is "
                "reserved by PyTorch but unallocated."
            ),
        ),
        Passes(
            "a process a GPU, by a table of nvidia-smi",
            logged(
                "|    0     62250      C   /usr/bin/python3                            4903MiB |",
                "|    1     62251      C   /usr/bin/python3                            4903MiB |",
            ),
        ),
        Passes(
            "one process on all GPUs, by a table of nvidia-smi",
            logged(
                "|    0     62250      C   /usr/bin/python3                            4903MiB |",
                "|    1     62250      C   /usr/bin/python3                            6903MiB |",
            ),
        ),
        Fails(
            "contexts beside the rank at home, by rows of a table",
            logged(
                "|    0   N/A  N/A     62250      C   ./train.par                     26167MiB |",
                "|    0   N/A  N/A     62251      C   ./train.par                       871MiB |",
                "|    0   N/A  N/A     62252      C   ./train.par                       871MiB |",
            ),
        ),
        Fails(
            "contexts of two ranks, by a table of nvidia-smi",
            logged(
                "|    0   N/A  N/A     62250      C   /usr/bin/python3                 4903MiB |",
                "|    0   N/A  N/A     62251      C   /usr/bin/python3                  725MiB |",
                "|    0   N/A  N/A     62252      C   /usr/bin/python3                  725MiB |",
                "|    1   N/A  N/A     62251      C   /usr/bin/python3                 4903MiB |",
                "|    2   N/A  N/A     62252      C   /usr/bin/python3                 4903MiB |",
            ),
        ),
        Fails(
            "contexts of the other ranks, by the message of rank 0",
            logged(
                "[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total "
                "capacity of 79.15 GiB of which 512.00 MiB is free. Process 4243 has 520.00 MiB memory in use. Process "
                "4244 has 520.00 MiB memory in use. Process 4245 has 520.00 MiB memory in use. Process 4246 has 520.00 "
                "MiB memory in use. Including non-PyTorch memory, this process has 76.50 GiB memory in use. Of the "
                "allocated memory 74.00 GiB is allocated by PyTorch, and 512.00 MiB is reserved by PyTorch but "
                "unallocated."
            ),
            ranks=(0,),
            severity=Severity.ERROR,
        ),
    ),
)
def rank_zero_skew(
    job: Job, *, context_mebibytes: float = 800, least_context_mebibytes: float = 250
) -> Iterator[Verdict]:
    """Ask whether the first GPU of each host holds memory of its own rank only.

    Why it hurts: the other ranks use memory of the first GPU, whose own rank runs out of it while other GPUs have free
    memory.
    Fix: Call `torch.cuda.set_device(local_rank)` before any other CUDA call, and pass `map_location="cpu"` to each
    `torch.load` of a checkpoint.
    """
    # A context takes 300 to 800 MiB, depending on the architecture and the loaded kernels.
    judged = [local for local in job.by_host() if len(local.members) > 1]
    if not judged:
        yield Unknown("other ranks not gathered") if job.ungathered else Skip("one rank per host")
    devices = devices_of(job)
    for local in judged:
        if (first := _first(local, devices)) and first.processes:
            yield from _judge(job, local, first, context_mebibytes * MIB, least_context_mebibytes * MIB)


class _First(NamedTuple):
    """The first GPU that ranks of a host use. ``homes``: each rank's own GPU; ``owner``: the rank of the first GPU,
    ``memory``: its memory in a run; ``processes``: those that hold memory on it, in the newest reading."""

    gpu: Gpu
    homes: Mapping[int, Gpu]
    owner: Rank
    memory: RunMemoryFacts | None
    processes: tuple[GpuProcess, ...]

    def is_home(self, rank: int) -> bool:
        """Whether that rank uses this GPU for its work."""
        return self.homes.get(rank, self.gpu) is self.gpu


def _first(local: LocalRanks, devices: Mapping[Rank, VisibleDevice | None]) -> _First | None:
    homes = {rank.number: device.gpu for rank in local.members if (device := devices[rank])}
    if not homes:
        return None
    gpu = min(homes.values(), key=lambda gpu: gpu.index)
    owner = next(rank for rank in local.members if homes.get(rank.number) is gpu)
    memory = owner.find(RunMemoryFacts)
    newest = memory.processes if memory and memory.processes is not None else gpu.processes or ()
    return _First(gpu, homes, owner, memory, tuple(process for process in newest if process.kind != "graphics"))


def _judge(job: Job, local: LocalRanks, first: _First, context: float, least: float) -> Iterator[Verdict]:
    processes = first.processes
    if not sees_host_processes(local) and any(process.name is None for process in processes):
        at_home = sum(gpu is first.gpu for gpu in first.homes.values())
        if len(processes) > at_home:
            yield _by_number(job, local, first, context, least) or _unseen(local, first)
        return
    own = process_ids(local)
    strangers = {
        own[process.pid]: process.memory
        for process in processes
        if process.pid in own and not first.is_home(own[process.pid])
    }
    if strangers:
        yield _finding(job, local, first, strangers, context, 1.0)


def _unseen(local: LocalRanks, first: _First) -> Unknown:
    reason = f"the owners of the processes on GPU {first.gpu.index} are not visible in this container"
    return Unknown(reason, local.ranks, "start the container with --pid=host")


def _by_number(job: Job, local: LocalRanks, first: _First, context: float, least: float) -> Finding | None:
    """If the owners of the processes are unknown: the first GPU has as many processes as the host has ranks, and its
    memory outside its own rank exceeds that of the peers' GPUs by at least a context for each other rank."""
    others = [rank for rank in local.members if not first.is_home(rank.number)]
    told = [memory.foreign for rank in others if (memory := rank.find(RunMemoryFacts)) and memory.foreign is not None]
    if first.memory is None or first.memory.foreign is None or len(told) < len(others) or not others:
        return None
    excess = first.memory.foreign - median(told)
    if len(first.processes) != len(local.members) or excess < least * len(others):
        return None
    sizes = {rank.number: int(excess / len(others)) for rank in others}
    return _finding(job, local, first, sizes, context, 0.7)


def _finding(
    job: Job, local: LocalRanks, first: _First, sizes: Mapping[int, int | None], context: float, confidence: float
) -> Finding:
    total = sum(size or 0 for size in sizes.values())
    cause = _cause(first, sizes, context)
    signature = f" ({_SIGNATURES[cause]})" if first.memory else ""
    who = ranks_in_words(tuple(sizes))
    return Finding(
        f"{who[:1].upper()}{who[1:]} also {'allocate' if len(sizes) > 1 else 'allocates'} {mebibytes(total)} on GPU "
        f"{first.gpu.index} of {local.name}{signature}",
        ranks=tuple(sizes),
        evidence={
            "gpu": first.gpu.uuid,
            "memory_bytes_by_rank": {str(rank): size for rank, size in sizes.items()},
            "process_ids": [process.pid for process in first.processes if process_ids(local).get(process.pid) in sizes],
            "likely_cause": _CAUSES[cause],
        },
        effect=f"Rank {first.owner.number}, which owns this GPU, has less memory than the other ranks and may run "
        "out of memory first.",
        fix=_fix(job, cause),
        confidence=confidence,
        explains=("MEM002", "MEM003", "MEM004", "MEM011"),
    )


def _cause(first: _First, sizes: Mapping[int, int | None], context: float) -> str:
    if first.memory and _grows(first.memory.samples):
        return "grows"
    if all(size is None or size <= context for size in sizes.values()):
        return "contexts"
    model = _model_bytes(first.owner)
    if first.memory is None or not model:
        return "checkpoint"
    # A checkpoint may contain a part of the model, or all of it with the optimizer state.
    return "checkpoint" if max(size or 0 for size in sizes.values()) >= model / 2 + context / 2 else "tensors"


def _grows(samples: tuple[MemorySample, ...], least: int = 256 * MIB) -> bool:
    """Whether the memory of other ranks on the device grows in nearly all samples; that of a context is constant."""
    beyond = [one.device_used - one.reserved for one in samples if one.device_used is not None and one.reserved]
    rises = sum(after > before for before, after in pairwise(beyond))
    return len(beyond) >= 4 and beyond[-1] - beyond[0] >= least and rises >= 0.8 * (len(beyond) - 1)


def _model_bytes(rank: Rank) -> int:
    model = rank.find(ModelFacts)
    if model is None:
        return 0
    kinds = [BYTES.get(tensor.type.removeprefix("torch."), 4) for tensor in model.tensors] or [4]
    return int(model.parameters * median(kinds))


def _fix(job: Job, cause: str) -> str:
    if cause == "checkpoint":
        lightning = ", or pass `ckpt_path` to `trainer.fit()`" if uses_lightning(job) else ""
        return f'Pass `map_location="cpu"` to each `torch.load` of a checkpoint{lightning}.'
    if cause in ("grows", "tensors"):
        own = "self.device" if uses_lightning(job) else 'torch.device("cuda", local_rank)'
        return (
            f"Find the lines that send tensors to `cuda:0`, and use `{own}` there:\ngrep -rnE 'cuda:0|\\.cuda\\(\\)' ."
        )
    if uses_lightning(job):
        return (
            "Remove CUDA calls that run before the Trainer sets the device, such as `.cuda()` at import or in "
            "a dataset."
        )
    return "Call `torch.cuda.set_device(local_rank)` before any other CUDA call."
