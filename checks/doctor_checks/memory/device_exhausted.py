"""MEM011: a GPU ran out of memory."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.analysis.call_sites import place_of_frame
from doctor.analysis.logs.oom_events import OomEvent, as_event_groups, exhaustions, numbers_of
from doctor.analysis.logs.oom_message import LEAST_UNALLOCATED
from doctor.api import Finding, Job, Rank, Severity, Verdict, check, finding_from_logs, ranks_in_words
from doctor.core.text import byte_size
from doctor.facts import Frame, Holder, MemorySnapshotFacts, RefusedAllocation
from doctor.testing import Fails, JobBuilder, Passes, logged, running
from doctor_checks.memory._device_memory_settings import (
    as_sentence,
    defragmenting,
    end_processes,
    smaller_batch,
    uses_expandable_segments,
)

_REASONS = {
    "demand": "tensors of this process hold {allocated}",
    "size": "it has only {total}",
    "others": "other processes hold {others}",
    "skew": "other ranks hold {others}",
    "fragmented": "{unused} are reserved but unallocated (fragmented)",
    "limit": "this process is limited to {allowed}",
    "unknown": "the message does not show what filled it",
}

_FIXES = {
    "skew": "Call `torch.cuda.set_device(local_rank)` before any other CUDA call, and pass "
    '`map_location="cpu"` to each `torch.load` of a checkpoint.',
    "limit": "Raise the limit that `torch.cuda.set_per_process_memory_fraction()` sets.",
}

_OF_VLLM = {
    "on startup is less than desired": (
        "vLLM requests {wanted} of GPU memory, but {free} are free",
        "End other processes on the GPU (`nvidia-smi` lists them), or lower `gpu_memory_utilization`.",
    ),
    "No available memory for the cache blocks": (
        "vLLM has no GPU memory left for its cache blocks",
        "Raise `gpu_memory_utilization`, or lower `max_model_len`.",
    ),
}
"""Errors at the start of vLLM, which reserves memory instead of allocating it on demand."""

GIB = 1 << 30
_HOLDER = Holder(31 * GIB, 640, Frame("/home/me/model.py", 112, "forward", True), "forward")


def _traceback(file: str, function: str) -> JobBuilder:
    return logged(
        "[rank0]: Traceback (most recent call last):",
        '[rank0]:   File "/home/me/train.py", line 57, in <module>',
        "[rank0]:     main()",
        f'[rank0]:   File "/opt/env/lib/python3.11/site-packages/{file}", line 812, in {function}',
        "[rank0]:     loss = step(batch)",
        "[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity "
        "of 79.15 GiB of which 1.02 GiB is free. Including non-PyTorch memory, this process has 78.10 GiB memory in "
        "use. Of the allocated memory 74.00 GiB is allocated by PyTorch, and 2.60 GiB is reserved by PyTorch but "
        "unallocated.",
    )


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
        *(
            Fails(f"in {name}", _traceback(file, function), ranks=(0,))
            for name, file, function in (
                ("a training step of transformers", "transformers/trainer.py", "training_step"),
                ("an evaluation by transformers", "transformers/trainer.py", "evaluation_loop"),
                ("a training step of Lightning", "lightning/pytorch/loops/fit_loop.py", "advance"),
                ("a step of DeepSpeed", "deepspeed/runtime/engine.py", "backward"),
            )
        ),
    ),
)
def device_exhausted(job: Job) -> Iterator[Verdict]:
    """Ask whether a GPU ran out of memory, and why: demand, other processes, other ranks or fragmentation.

    Why it hurts: the rank fails, and the other ranks wait for it until their timeout.
    Fix: Use a smaller batch per rank with more gradient accumulation, or activation checkpointing.
    """
    spoken = {one.rank for one in exhaustions(job)}
    for snapshot, identical in job.facts(MemorySnapshotFacts):
        silent = tuple(rank for rank in identical.ranks if rank not in spoken)
        if snapshot.refused and silent and None not in spoken:
            refused = snapshot.refused[-1]
            most = snapshot.holders[0] if snapshot.holders else None
            holder = (
                f"; tensors from {place_of_frame(most.frame)} hold {byte_size(most.size)}"
                if most and most.frame
                else ""
            )
            whose = f" of rank {silent[0]}" if len(silent) == 1 else ""
            yield Finding(
                f"GPU {refused.device}{whose} ran out of memory allocating {byte_size(refused.size)}{holder}",
                ranks=silent,
                evidence={
                    "snapshot": snapshot.path,
                    "wanted_bytes": refused.size,
                    "free_bytes": refused.device_free,
                    "allocated_bytes": snapshot.allocated or None,
                    "reserved_bytes": snapshot.reserved or None,
                    "failed_allocation_at": place_of_frame(refused.frame),
                    "holds_most": _holders(snapshot),
                },
                effect=_effect(silent),
                fix=as_sentence(smaller_batch(job)),
                confidence=0.8,
                explains=("RUN001", "RUN004", "RUN012", "GPU022"),
            )


def _size(count: int | None) -> str:
    """As in the evidence, so that both have the same figure."""
    return "an unknown size" if count is None else byte_size(count)


def _effect(ranks: tuple[int, ...]) -> str:
    """The impact, which names the ranks if they are known and do not end the job all together."""
    if not ranks:
        return ""
    who, them = ranks_in_words(ranks, 4), "it" if len(ranks) == 1 else "them"
    fail = "fails" if len(ranks) == 1 else "fail"
    return f"{who[:1].upper()}{who[1:]} {fail}, and the other ranks wait for {them} until their timeout."


def _holders(snapshot: MemorySnapshotFacts) -> list[str]:
    named = [holder for holder in snapshot.holders if holder.frame][:3]
    return [f"{place_of_frame(holder.frame)}: {byte_size(holder.size)} in {holder.blocks} blocks" for holder in named]


def _finding(job: Job, found: tuple[OomEvent, ...]) -> Finding:
    first = found[0]
    group = first.shortage
    ranks = as_event_groups(found).ranks
    gpu = f"GPU {group.device}" if group.device is not None else "A GPU"
    gpu += f" of rank {ranks[0]}" if len(ranks) == 1 else ""
    wanted = f" allocating {byte_size(group.wanted)}" if group.wanted else ""
    reason = _REASONS["size" if first.cause == "demand" and group.allocated is None else first.cause].format(
        allocated=_size(group.allocated),
        total=_size(group.total),
        others=_size(group.other_bytes),
        unused=_size(group.reserved_unallocated),
        allowed=_size(group.allowed),
    )
    rank = next((rank for rank in job.ranks if rank.number == first.rank), None)
    snapshot = rank.find(MemorySnapshotFacts) if rank else None
    held = {"snapshot": snapshot.path, "holds_most": _holders(snapshot)} if snapshot else {}
    summary, fix = f"{gpu} ran out of memory{wanted}; {reason}", _FIXES.get(first.cause) or _fix(job, first, rank)
    effect = _effect(ranks)
    for words, (claim, advice) in _OF_VLLM.items():
        if words in first.event.text:
            summary, fix = claim.format(wanted=_size(group.wanted), free=_size(group.free)), advice
            effect = "The engine of vLLM does not start."
    caught = all(one.is_caught for one in found)
    return finding_from_logs(
        as_event_groups(found),
        summary,
        evidence={**numbers_of(first), **held},
        effect="The program caught the error and continued without this batch." if caught else effect,
        fix=fix,
        severity=Severity.WARNING if caught else None,
        confidence=(0.8 if first.cause == "unknown" else 0.9) if first.is_certain else 0.5,
        explains=("GPU022",),
    )


def _fix(job: Job, one: OomEvent, rank: Rank | None) -> str:
    if one.cause == "others":
        hosts = as_event_groups((one,)).hosts
        return end_processes([pid for pid, _ in one.shortage.others[:4]], hosts[0] if len(hosts) == 1 else "")
    advice = smaller_batch(job, one.event.frames)
    first, *_ = advice.partition(", or ")
    if one.cause == "unknown":
        return f"End processes of other jobs on the GPU (`nvidia-smi` lists them), or {first}."
    unused = one.shortage.reserved_unallocated or 0
    # Private pools are reserved for CUDA graphs; other allocations cannot use them.
    is_large = unused - (one.shortage.in_private_pools or 0) >= max(one.shortage.wanted or 0, LEAST_UNALLOCATED)
    command = defragmenting(one.event.text)
    if one.cause == "fragmented" and command:
        return command
    if is_large and command and not uses_expandable_segments(rank):
        use = f"and let the allocator use the {byte_size(unused)} that are reserved but unallocated"
        return f"{as_sentence(first).rstrip('.')}, {use}:\n{command}"
    return as_sentence(advice)
