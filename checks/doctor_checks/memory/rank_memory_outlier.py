"""MEM002: one rank uses more memory of its GPU than its peers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from statistics import median
from typing import Any

import msgspec

from doctor.analysis.stats.outliers import outliers
from doctor.analysis.stats.rank_roles import same_role
from doctor.analysis.visible_devices import mebibytes
from doctor.api import Finding, Job, Rank, Severity, Skip, Verdict, check
from doctor.facts import MemorySample, ModelFacts, RunMemoryFacts
from doctor.testing import Fails, JobBuilder, Passes, running

GIB = 1 << 30

KINDS = {"peak_allocated": "at its peak", "allocated": "after each step", "reserved": "by PyTorch"}
"""Fields of :class:`RunMemoryFacts` that are compared, starting with the one that causes "out of memory"."""

_FIXES = {
    "holds": "Find the tensors that only rank {rank} keeps between steps, for example metrics in a list or a second "
    "model.",
    "batches": "Give rank {rank} batches of the size that its peers have, for example with a token-based batch "
    "sampler.",
    "peaks": "Call torch.cuda.memory._record_memory_history() and, after a few steps, "
    "torch.cuda.memory._dump_snapshot('memory.pickle') on ranks {rank} and {peer}, and compare both in "
    "https://pytorch.org/memory_viz.",
    "reserves": "Set `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`, or call `torch.cuda.empty_cache()` after a "
    "larger batch or validation.",
}


def _memory(rank: int, *, samples: tuple[MemorySample, ...] = (), **sizes: int) -> JobBuilder:
    more: dict[str, Any] = {**sizes, **({"samples": samples} if samples else {})}
    return running(2, 2).alter(RunMemoryFacts, ranks=(rank,), **more)


def _with_units(units: int) -> tuple[MemorySample, ...]:
    return tuple(MemorySample(step, units=units) for step in (50, 100))


@check(
    id="MEM002",
    severity=Severity.WARNING,
    when="R",
    needs=(RunMemoryFacts,),
    compares_ranks=True,
    needs_peers=True,
    cases=lambda: (
        Passes("the same on all ranks", running(2, 4)),
        Passes("a run on the CPU", running(1, 4, gpus=0)),
        Passes("rank 0 holds a copy of small weights", _memory(0, allocated=22 * GIB, peak_allocated=31 * GIB)),
        Passes(
            "twice as much of very little",
            running(1, 4)
            .alter(RunMemoryFacts, allocated=GIB, peak_allocated=2 * GIB, reserved=2 * GIB)
            .alter(RunMemoryFacts, ranks=(1,), allocated=2 * GIB, peak_allocated=4 * GIB, reserved=4 * GIB),
        ),
        Passes(
            "a pipeline's stages",
            running(1, 4)
            .alter(RunMemoryFacts, ranks=(2, 3), allocated=40 * GIB, peak_allocated=70 * GIB, reserved=72 * GIB)
            .alter(ModelFacts, ranks=(2, 3), digest="second stage"),
        ),
        Passes(
            "sequences of different lengths: all peaks differ",
            running(1, 4)
            .alter(RunMemoryFacts, ranks=(0,), peak_allocated=24 * GIB)
            .alter(RunMemoryFacts, ranks=(1,), peak_allocated=36 * GIB)
            .alter(RunMemoryFacts, ranks=(2,), peak_allocated=30 * GIB),
        ),
        Fails(
            "rank 0 keeps a second model",
            _memory(0, allocated=45 * GIB, peak_allocated=53 * GIB, reserved=55 * GIB),
            ranks=(0,),
        ),
        Fails(
            "larger batches on one rank",
            _memory(2, peak_allocated=44 * GIB, reserved=45 * GIB, samples=_with_units(64)),
            ranks=(2,),
        ),
        Fails("a cache that grew once", _memory(3, reserved=60 * GIB, peak_reserved=60 * GIB), ranks=(3,)),
        Fails(
            "the larger one of two",
            running(1, 2).alter(RunMemoryFacts, ranks=(1,), allocated=30 * GIB, peak_allocated=40 * GIB),
            ranks=(1,),
        ),
        Fails(
            "less than its peers",
            _memory(1, allocated=5 * GIB, peak_allocated=9 * GIB, reserved=10 * GIB),
            ranks=(1,),
            severity=Severity.INFO,
        ),
    ),
)
def rank_memory_outlier(job: Job, *, share: float = 0.2, device_share: float = 0.05) -> Iterator[Verdict]:
    """Ask whether ranks that do the same work use the same amount of GPU memory.

    Why it hurts: the GPU with the highest usage limits the batch size of all ranks: its rank would run out of memory
    first, while its peers still have free memory.
    Fix: Find what this rank keeps that its peers do not: rank-zero metrics, logged outputs, a second copy of the
    weights, or larger batches.
    """
    # TraceML's memory rule also starts at 20 % above the peers. Data-parallel rank 0 usually holds a few percent more
    # (metrics, checkpoints), and a larger batch would need 5 % of the device.
    roles = [
        [
            _RankMemoryTotal(rank, facts, facts.total)
            for rank in ranks
            if (facts := rank.find(RunMemoryFacts)) and facts.total and facts.allocated is not None
        ]
        for ranks in same_role(job)
    ]
    if not any(len(role) > 1 for role in roles):
        yield Skip("fewer than two ranks do the same work on GPUs")
    for role in roles:
        said: set[int] = set()
        least = device_share * min((holder.total for holder in role), default=0)
        for kind in KINDS:
            values = {one.rank.number: float(size) for one in role if (size := getattr(one.facts, kind)) is not None}
            for outlier in outliers(values, share=share, least=least):
                if outlier.rank not in said:
                    said.add(outlier.rank)
                    own = next(holder for holder in role if holder.rank.number == outlier.rank)
                    others = [holder for holder in role if holder is not own]
                    more = outlier.excess > 0
                    evidence: dict[str, object] = {
                        field: {"bytes": getattr(own.facts, field), "peers_median_bytes": _median(others, field)}
                        for field in KINDS
                    }
                    evidence["device_bytes"] = own.total
                    evidence["largest_batch_units"] = {"own": _units(own), "peers_median": _middle(map(_units, others))}
                    yield Finding(
                        f"Rank {outlier.rank} on {own.rank.host.name} {_used(kind, int(outlier.value))} (peers: "
                        f"{mebibytes(int(outlier.typical))})",
                        ranks=(outlier.rank,),
                        evidence=evidence,
                        effect=f"Rank {outlier.rank} would run out of memory first, so it limits the batch size of "
                        "all ranks while its peers have free memory."
                        if more
                        else f"GPU memory of rank {outlier.rank} stays unused.",
                        fix=_FIXES[_cause(kind, own, others)].format(rank=outlier.rank, peer=others[0].rank.number)
                        if more
                        else _fix_of_less(own, others),
                        severity=Severity.WARNING if more else Severity.INFO,
                        explains=("MEM003", "MEM004", "MEM011"),
                    )


def _fix_of_less(own: _RankMemoryTotal, others: list[_RankMemoryTotal]) -> str:
    number, units, usual = own.rank.number, _units(own), _middle(map(_units, others))
    if units and usual and units >= 0.9 * usual:
        return (
            f"Check whether rank {number} holds a smaller part of the model than its peers: its batches are as large."
        )
    return f"Give rank {number} batches of the size that its peers have."


def _used(kind: str, size: int) -> str:
    if kind == "peak_allocated":
        return f"used up to {mebibytes(size)} of GPU memory"
    if kind == "reserved":
        return f"has {mebibytes(size)} of GPU memory reserved by PyTorch"
    return f"holds {mebibytes(size)} of GPU memory {KINDS[kind]}"


class _RankMemoryTotal(msgspec.Struct, frozen=True):
    rank: Rank
    facts: RunMemoryFacts
    total: int


def _cause(kind: str, own: _RankMemoryTotal, others: list[_RankMemoryTotal]) -> str:
    if kind == "reserved":
        return "reserves"
    kept, usual = own.facts.allocated or 0, _median(others, "allocated") or 0
    excess = (own.facts.peak_allocated or 0) - (_median(others, "peak_allocated") or 0)
    if kind == "allocated" or kept - usual > excess / 2:
        return "holds"
    units, usual_units = _units(own), _middle(map(_units, others))
    return "batches" if units and usual_units and units > 1.1 * usual_units else "peaks"


def _units(holder: _RankMemoryTotal) -> int | None:
    return max((sample.units for sample in holder.facts.samples if sample.units), default=None)


def _median(holders: list[_RankMemoryTotal], field: str) -> float | None:
    return _middle(getattr(holder.facts, field) for holder in holders)


def _middle(sizes: Iterable[int | None]) -> float | None:
    known = [size for size in sizes if size is not None]
    return median(known) if known else None
