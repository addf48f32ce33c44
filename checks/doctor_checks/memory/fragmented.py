"""MEM006: reserved memory is fragmented."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.analysis.logs.oom_events import as_event_groups, exhaustions, numbers_of
from doctor.analysis.logs.oom_message import is_mostly_fragmented
from doctor.analysis.visible_devices import mebibytes
from doctor.api import Finding, Job, Rank, Severity, Skip, Verdict, check, event_groups, finding_from_logs
from doctor.facts import RunMemoryFacts
from doctor.testing import Fails, JobBuilder, Passes, logged, running
from doctor_checks.memory._device_memory_settings import (
    EXPANDABLE_SEGMENTS,
    allocations,
    defragmenting,
    uses_expandable_segments,
)

GIB = 1 << 30


def _full(
    *ranks: int, peak: int, unusable: int = 0, retries: int = 0, failures: int = 0, allocator: str = "native"
) -> JobBuilder:
    return running(2, 2).alter(
        RunMemoryFacts,
        ranks=ranks,
        reserved=78 * GIB,
        peak_reserved=78 * GIB,
        allocated=20 * GIB,
        peak_allocated=peak,
        inactive=unusable,
        retries=retries,
        failures=failures,
        device_free=GIB,
        allocator=allocator,
    )


def _from_logs(job: Job) -> Iterator[Finding]:
    all_found = exhaustions(job)
    found = tuple(one for one in all_found if one.cause == "fragmented" and is_mostly_fragmented(one.shortage))
    if not found:
        for group in event_groups(job, "cuda.pressure") if not all_found else ():
            yield finding_from_logs(
                group,
                "The allocator freed its cache and retried: GPU memory is nearly full or fragmented",
                effect="Each retry blocks the rank until the GPU is idle, so the other ranks wait too.",
                fix="Use a smaller batch per rank, or set `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`.",
                confidence=0.6,
                symptoms=False,
            )
        return
    first = found[0].shortage
    gpu = "" if first.device is None else f" on GPU {first.device}"
    ranks = as_event_groups(found).ranks
    who = f"Rank {ranks[0]}" if len(ranks) == 1 else "The rank"
    yield finding_from_logs(
        as_event_groups(found),
        f"An allocation of {mebibytes(first.wanted)}{gpu} failed with {mebibytes(first.reserved_unallocated)} reserved "
        "but unallocated",
        evidence=numbers_of(found[0]),
        effect=f'{who} fails with "CUDA out of memory" although enough memory is reserved, and the other ranks wait '
        "for it until their timeout.",
        fix=defragmenting(found[0].event.text) or "Use a smaller batch, or pad batches to a few fixed lengths.",
        severity=Severity.ERROR,
        confidence=0.75,
        explains=("MEM011",),
    )


@check(
    id="MEM006",
    severity=Severity.WARNING,
    when="RM",
    needs=(RunMemoryFacts,),
    from_logs=_from_logs,
    impacts={},
    cases=lambda: (
        Passes("room for everything", running(2, 2)),
        Passes("a run on the CPU", running(1, 2, gpus=0)),
        Passes("a full cache that never ran short", _full(1, peak=50 * GIB, unusable=12 * GIB)),
        Passes("short of memory, and all of it in use", _full(1, peak=76 * GIB, unusable=GIB, retries=40)),
        Passes("one retry while kernels were chosen", _full(1, peak=72 * GIB, unusable=2 * GIB, retries=1)),
        Passes("an allocator without blocks", _full(1, peak=50 * GIB, retries=3, allocator="cudaMallocAsync")),
        Fails("a quarter lies in unusable pieces", _full(1, peak=58 * GIB, unusable=18 * GIB, retries=12), ranks=(1,)),
        Fails("little more than a tenth", _full(2, peak=69 * GIB, unusable=7 * GIB, retries=2), ranks=(2,)),
        Fails("an allocation failed and was caught", _full(0, 3, peak=60 * GIB, failures=1), ranks=(0, 3)),
        Fails(
            "with expandable segments already",
            _full(0, peak=60 * GIB, retries=30).environ(PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True"),
            ranks=(0,),
        ),
        Passes(
            "log of exhausted memory that is all in use",
            logged(
                "[rank1]: RuntimeError: CUDA out of memory. Tried to allocate 512.00 MiB (GPU 1; 31.75 GiB total "
                "capacity; 30.10 GiB already allocated; 240.00 MiB free; 30.40 GiB reserved in total by PyTorch)"
            ),
        ),
        Fails(
            "log of a failed allocation with gigabytes unused",
            logged(
                "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.50 GiB. GPU 1 has a total "
                "capacity of 79.15 GiB of which 640.00 MiB is free. Including non-PyTorch memory, this process has "
                "78.40 GiB memory in use. Of the allocated memory 58.20 GiB is allocated by PyTorch, and 18.70 GiB is "
                "reserved by PyTorch but unallocated."
            ),
            ranks=(1,),
            severity=Severity.ERROR,
        ),
        Passes(
            "log of a request that is as large as all pieces together",
            logged(
                "[rank2]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 14.06 GiB. GPU 2 has a total "
                "capacity of 79.25 GiB of which 6.96 GiB is free. Including non-PyTorch memory, this process has "
                "72.28 GiB memory in use. Of the allocated memory 56.70 GiB is allocated by PyTorch, and 14.15 GiB is "
                "reserved by PyTorch but unallocated."
            ),
        ),
        Fails(
            "the same message of an old torch",
            logged(
                "RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 39.59 GiB total capacity; 29.51 "
                "GiB already allocated; 4.19 MiB free; 37.61 GiB reserved in total by PyTorch) If reserved memory is "
                ">> allocated memory try setting max_split_size_mb to avoid fragmentation."
            ),
            severity=Severity.ERROR,
        ),
    ),
)
def fragmented(job: Job, *, unallocated_share: float = 0.1) -> Iterator[Verdict]:
    """Ask whether allocations fail although much of the memory that the allocator has reserved is unallocated.

    Why it hurts: each retry blocks the rank until the GPU is idle and frees the cache, so all other ranks wait too.
    In the end, the rank runs out of memory with gigabytes reserved but unallocated.
    Fix: Set `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True` before the start, or pad batches to a few fixed lengths.
    """
    # The cache is normally larger than the memory allocated after a step, so only memory that is unallocated even at
    # the peak counts. PyTorch's message ("if reserved but unallocated memory is large") has no number; a tenth of the
    # device is enough for one more large activation.
    holders = [(rank, facts) for rank in job.ranks if (facts := rank.find(RunMemoryFacts)) and facts.total]
    if not holders:
        yield Skip("no rank trains on a GPU")
    for rank, facts in holders:
        at_peak = max(facts.peak_reserved or 0, facts.reserved or 0) - (facts.peak_allocated or 0)
        unused = max(at_peak if facts.peak_allocated is not None else 0, facts.inactive or 0)
        ran_short = facts.allocator in (None, "native") and (facts.retries or facts.failures)
        if ran_short and unused > unallocated_share * (facts.total or 0):
            counts = ((facts.retries, "retried"), (facts.failures, "failed"))
            attempts = ", ".join(f"{allocations(count)} {what}" for count, what in counts if count)
            yield Finding(
                f"Rank {rank.number} ran short of memory ({attempts}) with {mebibytes(unused)} reserved but "
                "unallocated",
                ranks=(rank.number,),
                evidence={
                    "reserved_bytes": facts.reserved,
                    "peak_reserved_bytes": facts.peak_reserved,
                    "allocated_bytes": facts.allocated,
                    "peak_allocated_bytes": facts.peak_allocated,
                    "inactive_split_bytes": facts.inactive,
                    "device_bytes": facts.total,
                    "allocation_retries": facts.retries,
                    "allocation_failures": facts.failures,
                },
                effect=(_FAILED if facts.failures else _RETRIED).format(rank=rank.number),
                fix=_fix(rank),
                explains=("MEM003", "MEM011"),
            )


def _fix(rank: Rank) -> str:
    if not uses_expandable_segments(rank):
        return EXPANDABLE_SEGMENTS
    return "Pad batches to a few fixed lengths, or use a smaller batch."


_FAILED = 'The program caught the error. An error that is not caught ends rank {rank} with "CUDA out of memory".'
_RETRIED = (
    "Each retry blocks rank {rank} until the GPU is idle and frees the cache, so the other ranks wait too. An "
    'allocation that still does not fit fails with "CUDA out of memory".'
)
