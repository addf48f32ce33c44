"""What ranks print of the collectives that they are about to call: torch with ``TORCH_DISTRIBUTED_DEBUG=DETAIL``, NCCL
with ``NCCL_DEBUG_SUBSYS=COLL``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from doctor.core.facts import Event, LogEvidence

_SIDES = (("a", "fa"), ("b", "fb"))
_PARTS = re.compile(r"(SequenceNumber|OpType|TensorShape|TensorDtypes)=(\[[^\]]*\]|\w+?(?=OpType|\W|$))")
_ALIKE_ON_ALL = frozenset({"ALLREDUCE", "BROADCAST", "REDUCE", "_ALLGATHER_BASE", "_REDUCE_SCATTER_BASE"})
"""Operations in which all ranks give as many elements."""


class PrintedCollective(NamedTuple):
    """A call as it is printed: ``shape`` and ``sequence`` empty where they are not."""

    operation: str
    shape: str = ""
    type: str = ""
    sequence: str = ""

    @property
    def words(self) -> str:
        """``ALLREDUCE of [77, 1] Float``."""
        return self.operation + (f" of [{self.shape}] {self.type}".rstrip() if self.shape else "")

    @property
    def call(self) -> tuple[str, str, str]:
        """What has to be the same on all ranks."""
        return (self.operation, self.shape, self.type)


def refused_calls(evidence: LogEvidence) -> dict[int, PrintedCollective]:
    """The calls of ranks that torch refused as different, as each rank's error tells of its own and of another's; the
    first of each rank."""
    found: dict[int, PrintedCollective] = {}
    for event in evidence.of("torch.mismatch"):
        for rank, call in _both(event):
            found.setdefault(rank, call)
    return found


def _both(event: Event) -> list[tuple[int, PrintedCollective]]:
    named = event.named
    return [(int(named[rank]), _parsed(named[call])) for rank, call in _SIDES if named.get(rank, "").isdigit()]


def _parsed(text: str) -> PrintedCollective:
    parts: Mapping[str, str] = {name: value.strip("[] ") for name, value in _PARTS.findall(text)}
    operation = parts.get("OpType") or text.strip(" .")[:60]
    return PrintedCollective(
        operation, parts.get("TensorShape", ""), parts.get("TensorDtypes", ""), parts.get("SequenceNumber", "")
    )


def last_calls(evidence: LogEvidence) -> dict[int, PrintedCollective]:
    """The newest call that each rank says it is about to make; empty unless they all bear one number and differ in what
    has to be the same. (Numbers are of a group that is not named: those of small groups may differ by right.)"""
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
        len({call.call for call in calls}) > 1 and all(call.operation in _ALIKE_ON_ALL for call in calls)
    )
    return found if same_number and differ else {}


def differ_in_first_size(calls: Mapping[int, PrintedCollective]) -> bool:
    """Whether shapes are the same but for the first size, which is that of the batch in most calls."""
    shapes = {tuple(call.shape.split(", ")) for call in calls.values()}
    return len(shapes) > 1 and all(len(shape) > 1 for shape in shapes) and len({shape[1:] for shape in shapes}) == 1


_COUNTED_ALIKE = frozenset({"AllReduce", "Broadcast", "Reduce", "AllGather", "ReduceScatter"})
"""NCCL's operations that all ranks of a communicator call with one count."""


def differing_counts(evidence: LogEvidence) -> tuple[Event, ...]:
    """The calls of the last number (``opCount``) at which processes call NCCL with another operation or count; empty
    where there is none. Only of jobs whose processes have one communicator each: numbers are of a communicator, and its
    name is another one in each process."""
    calls = evidence.of("nccl.opcount")
    communicators: dict[tuple[str | None, int | None], set[str | None]] = {}
    rows: dict[str, dict[tuple[str | None, int | None], Event]] = {}
    for event in calls:
        process = (event.host, event.pid)
        communicators.setdefault(process, set()).add(event.value("comm"))
        if event.value("op") in _COUNTED_ALIKE:
            rows.setdefault(event.value("opcount") or "", {})[process] = event
    sizes = {int(event.value("nranks") or 0) for event in calls}
    has_one_each = all(len(names) == 1 for names in communicators.values())
    if not has_one_each or len(sizes) != 1 or len(communicators) > max(sizes):
        return ()
    for row in reversed(rows.values()):
        if len({(event.value("op"), event.value("count"), event.value("dtype")) for event in row.values()}) > 1:
            return tuple(row.values())
    return ()
