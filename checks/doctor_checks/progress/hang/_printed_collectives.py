"""Collectives that ranks log before they call them.

PyTorch does with ``TORCH_DISTRIBUTED_DEBUG=DETAIL``, NCCL with ``NCCL_DEBUG_SUBSYS=COLL``.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from doctor.core.text import lazy_compile
from doctor.facts import Event, LogEvidence

_PARTS = lazy_compile(r"(SequenceNumber|OpType|TensorShape|TensorDtypes)=(\[[^\]]*\]|\w+?(?=OpType|\W|$))")
_SAME_ON_ALL = frozenset({"ALLREDUCE", "BROADCAST", "REDUCE", "_ALLGATHER_BASE", "_REDUCE_SCATTER_BASE"})
"""Operations to which all ranks pass the same number of elements."""


class PrintedCollective(msgspec.Struct, frozen=True):
    """A logged call; ``shape`` and ``sequence`` are empty if they are not part of the message."""

    operation: str
    shape: str = ""
    type: str = ""
    sequence: str = ""

    @property
    def text(self) -> str:
        kind = f" ({self.type})" if self.type else ""
        return self.operation + (f" of shape [{self.shape}]{kind}" if self.shape else "")

    @property
    def call(self) -> tuple[str, str, str]:
        """The part that has to be the same on all ranks."""
        return (self.operation, self.shape, self.type)


def refused_calls(evidence: LogEvidence) -> dict[int, PrintedCollective]:
    """The first call of each rank that torch rejected as different; an error names that of its rank and of another."""
    found: dict[int, PrintedCollective] = {}
    for event in evidence.of("torch.mismatch"):
        named = event.named
        for rank, call in (("a", "fa"), ("b", "fb")):
            if named.get(rank, "").isdigit():
                found.setdefault(int(named[rank]), _parsed(named[call]))
    return found


def _parsed(text: str) -> PrintedCollective:
    parts: Mapping[str, str] = {name: value.strip("[] ") for name, value in _PARTS.findall(text)}
    operation = parts.get("OpType") or text.strip(" .")[:60]
    return PrintedCollective(
        operation, parts.get("TensorShape", ""), parts.get("TensorDtypes", ""), parts.get("SequenceNumber", "")
    )


def last_calls(evidence: LogEvidence) -> dict[int, PrintedCollective]:
    """The newest call that each rank logged, if they have one sequence number and differ in what has to be the same.

    The messages do not name the group of the number: calls of several groups may differ by design."""
    found: dict[int, PrintedCollective] = {}
    for event in evidence.of("torch.fingerprint"):
        named = event.named
        rank = named.get("rank", "" if event.rank is None else str(event.rank))
        if rank.isdigit():
            shape = named.get("shape", "").strip("[]")
            found[int(rank)] = PrintedCollective(
                named.get("op", ""), shape, named.get("dtype", ""), named.get("seq", "")
            )
    calls = list(found.values())
    same_number = len({call.sequence for call in calls}) == 1 and bool(calls) and calls[0].sequence != ""
    differ = len({call.operation for call in calls}) > 1 or (
        len({call.call for call in calls}) > 1 and all(call.operation in _SAME_ON_ALL for call in calls)
    )
    return found if same_number and differ else {}


def differ_in_first_size(calls: Mapping[int, PrintedCollective]) -> bool:
    """Whether shapes differ only in the first dimension, which is the batch size in most calls."""
    shapes = {tuple(call.shape.split(", ")) for call in calls.values()}
    return len(shapes) > 1 and all(len(shape) > 1 for shape in shapes) and len({shape[1:] for shape in shapes}) == 1


_SAME_COUNT = frozenset({"AllReduce", "Broadcast", "Reduce", "AllGather", "ReduceScatter"})
"""NCCL's operations that all ranks of a communicator call with the same count."""


def differing_counts(evidence: LogEvidence) -> tuple[Event, ...]:
    """The calls with the last ``opCount`` at which processes called NCCL with different operations or counts.

    Only for jobs whose processes have one communicator each: the number belongs to a communicator, and each process
    has its own name for it."""
    calls = evidence.of("nccl.opcount")
    communicators: dict[tuple[str | None, int | None], set[str | None]] = {}
    rows: dict[str, dict[tuple[str | None, int | None], Event]] = {}
    for event in calls:
        process = (event.host, event.pid)
        communicators.setdefault(process, set()).add(event.value("comm"))
        if event.value("op") in _SAME_COUNT:
            rows.setdefault(event.value("opcount") or "", {})[process] = event
    sizes = {int(event.value("nranks") or 0) for event in calls}
    has_one_each = all(len(names) == 1 for names in communicators.values())
    if not has_one_each or len(sizes) != 1 or len(communicators) > max(sizes):
        return ()
    for row in reversed(rows.values()):
        if len({(event.value("op"), event.value("count"), event.value("dtype")) for event in row.values()}) > 1:
            return tuple(row.values())
    return ()
