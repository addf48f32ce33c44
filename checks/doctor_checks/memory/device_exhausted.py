"""MEM011: a GPU ran out of memory."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.analysis.call_sites import place_of_frame
from doctor.analysis.logs.oom_events import OomEvent, as_event_groups, exhaustions, numbers_of
from doctor.analysis.visible_devices import mebibytes
from doctor.api import Finding, Job, Severity, Verdict, check, finding_from_logs
from doctor.facts import Frame, Holder, MemorySnapshotFacts, RefusedAllocation
from doctor.testing import Fails, Passes, running

_WORDS = {
    "demand": "its own tensors fill it",
    "others": "other processes hold {others} of it",
    "skew": "other ranks hold {others} of it",
    "fragmented": "{unused} of what the allocator holds lies in pieces that are too small",
    "limit": "this process may use {allowed} of it at most",
    "unknown": "the numbers do not say what filled it",
}

_HOLDERS = "`nvidia-smi --query-compute-apps=pid,used_memory,gpu_uuid --format=csv`"
_FIXES = {
    "others": f"List the processes that hold memory of the GPU with {_HOLDERS}, and end those that were left over, or "
    "choose another GPU; one process may also hold several contexts.",
    "unknown": f"List the processes that hold memory of the GPU with {_HOLDERS} while the job runs, and end those that "
    "are not part of it; if only this job holds it, use a smaller batch per rank with more accumulation, activation "
    "checkpointing, bf16, or sharding (FSDP, ZeRO).",
    "skew": 'torch.cuda.set_device(local_rank) before anything touches CUDA; torch.load(path, map_location="cpu").',
    "fragmented": "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before the start.",
    "limit": "Raise what torch.cuda.set_per_process_memory_fraction or the allocator's setting allows.",
}

GIB = 1 << 30
_HOLDER = Holder(31 * GIB, 640, Frame("/home/me/model.py", 112, "forward", True), "forward")


def _from_logs(job: Job) -> Iterator[Finding]:
    by_cause: dict[str, list[OomEvent]] = {}
    for one in exhaustions(job):
        by_cause.setdefault(one.cause, []).append(one)
    for found in by_cause.values():
        yield _finding(job, tuple(found))


@check(
    id="MEM011",
    severity=Severity.ERROR,
    when="M",
    needs=(MemorySnapshotFacts,),
    from_logs=_from_logs,
    cases=lambda: (
        Passes(
            "a snapshot of a rank that had room",
            running(1, 2).put(MemorySnapshotFacts(path="rank1.pickle", holders=(_HOLDER,)), ranks=(1,)),
        ),
        Fails(
            "a snapshot with an allocation that was refused",
            running(1, 2).put(
                MemorySnapshotFacts(
                    path="rank1.pickle",
                    holders=(_HOLDER,),
                    refused=(
                        RefusedAllocation(2 * GIB, 1, GIB, Frame("/home/me/train.py", 57, "training_step", True)),
                    ),
                ),
                ranks=(1,),
            ),
            ranks=(1,),
        ),
    ),
)
def device_exhausted(job: Job) -> Iterator[Verdict]:
    """Ask whether a GPU ran out of memory, and what its numbers say of why: demand, others, skew or fragmentation.

    Why it hurts: the rank ends with an error, and the others wait for it until their time-out.
    Fix: a smaller batch per rank with more accumulation, activation checkpointing, bf16, or sharding (FSDP, ZeRO);
    in a run, DoctorCallback warns while memory grows (MEM004); torch.cuda.memory._record_memory_history() records
    what holds most.
    """
    spoken = {one.rank for one in exhaustions(job)}
    for snapshot, identical in job.facts(MemorySnapshotFacts):
        silent = tuple(rank for rank in identical.ranks if rank not in spoken)
        if snapshot.refused and silent and None not in spoken:
            refused = snapshot.refused[-1]
            most = snapshot.holders[0] if snapshot.holders else None
            holder = f"; {place_of_frame(most.frame)} holds most, {mebibytes(most.size)}" if most and most.frame else ""
            yield Finding(
                f"GPU {refused.device} had no room for {mebibytes(refused.size)}, by a memory snapshot{holder}",
                ranks=silent,
                evidence={
                    "snapshot": snapshot.path,
                    "wanted_bytes": refused.size,
                    "free_bytes": refused.device_free,
                    "allocated_bytes": snapshot.allocated,
                    "reserved_bytes": snapshot.reserved,
                    "place": place_of_frame(refused.frame),
                    "holds_most": _holders(snapshot),
                },
                confidence=0.8,
                explains=("RUN001", "RUN004", "RUN012", "GPU022"),
            )


def _holders(snapshot: MemorySnapshotFacts) -> list[str]:
    named = [holder for holder in snapshot.holders if holder.frame][:3]
    return [f"{place_of_frame(holder.frame)}: {mebibytes(holder.size)} in {holder.blocks} pieces" for holder in named]


def _finding(job: Job, found: tuple[OomEvent, ...]) -> Finding:
    first = found[0]
    group = first.shortage
    gpu = f"GPU {group.device}" if group.device is not None else "a GPU"
    wanted = f", {mebibytes(group.wanted)} were wanted" if group.wanted else ""
    reason = _WORDS[first.cause].format(
        others=mebibytes(group.other_bytes),
        unused=mebibytes(group.reserved_unallocated),
        allowed=mebibytes(group.allowed),
    )
    where = f" (at {first.place})" if first.place else ""
    rank = next((rank for rank in job.ranks if rank.number == first.rank), None)
    snapshot = rank.find(MemorySnapshotFacts) if rank else None
    held = {"snapshot": snapshot.path, "holds_most": _holders(snapshot)} if snapshot else {}
    return finding_from_logs(
        as_event_groups(found),
        f"{gpu} ran out of memory{wanted}: {reason}{where}",
        evidence={**numbers_of(first), **held},
        fix=_FIXES.get(first.cause, ""),
        severity=Severity.WARNING if all(one.is_caught for one in found) else None,
        confidence=(0.8 if first.cause == "unknown" else 0.9) if first.is_certain else 0.5,
        explains=("GPU022",),
    )
