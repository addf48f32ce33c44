"""Collectives of known values: input of each rank, expected and actual output.

All values are integers that float32 and bfloat16 hold exactly, and so is every partial sum in any order: the comparison
is exact. A value depends on its rank and on its index, so that a part which is lost, duplicated or swapped shows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist

from doctor.core.facts import CollectiveResult
from doctor.probes.collectives.group_limits import ELEMENTS, MOST_GATHERED, SPANS

ADDENDS = {"float32": 1 << 20, "bfloat16": 256}
"""Ranks that add something: bfloat16 holds integers up to 256 exactly, float32 up to 2^24."""
LACKING = ("support", "No backend type")
"""Errors of torch if a backend does not have an operation: one in C++, and one in Python."""
LETTERS = 128
"""Values that are only moved are below this."""


class GroupMembers(NamedTuple):
    """A process group of ``ranks``, this process at ``place``; ``handle`` is ``None`` for the default group."""

    axis: str
    ranks: tuple[int, ...]
    place: int
    handle: dist.ProcessGroup | None = None
    backend: str = ""

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)


def known_values(members: GroupMembers, device: torch.device) -> Iterator[tuple[str, CollectiveResult | None]]:
    """Run all-reduce, all-gather and all-to-all. Yields the name of each before it runs, and its result after it."""
    for name in SPANS if device.type == "cuda" else ("float32",):
        for operation, run in (("all_reduce", _reduced), ("all_gather", _gathered), ("all_to_all", _exchanged)):
            yield operation, None
            expected, received = run(members, device, name)
            yield operation, _compared(operation, name, members, expected, received)


Pair = tuple["torch.Tensor", "torch.Tensor"]


def _reduced(members: GroupMembers, device: torch.device, dtype: str) -> Pair:
    span, most = SPANS[dtype], min(members.size, ADDENDS[dtype])
    index = torch.arange(_elements(device), device=device)
    values = (index + members.place) % span if members.place < most else torch.zeros_like(index)
    mine = values.to(getattr(torch, dtype))
    dist.all_reduce(mine, group=members.handle)
    sums = [sum((start + place) % span for place in range(most)) for start in range(span)]
    expected = torch.tensor(sums, device=device)[index % span]
    return expected.to(mine.dtype), mine


def _gathered(members: GroupMembers, device: torch.device, dtype: str) -> Pair:
    index = torch.arange(_piece(members, device), device=device)
    kind = getattr(torch, dtype)
    expected = [((index + 7 * place) % LETTERS).to(kind) for place in range(members.size)]
    received = [torch.zeros_like(one) for one in expected]
    dist.all_gather(received, expected[members.place].clone(), group=members.handle)
    return torch.cat(expected), torch.cat(received)


def _exchanged(members: GroupMembers, device: torch.device, dtype: str) -> Pair:
    """Run an all-to-all, by pairs of sending and receiving if the backend has none."""
    kind = getattr(torch, dtype)
    index = torch.arange(_piece(members, device), device=device)
    places = range(members.size)
    sent = torch.cat([(index + 7 * members.place + 3 * place) % LETTERS for place in places]).to(kind)
    expected = torch.cat([(index + 7 * place + 3 * members.place) % LETTERS for place in places]).to(kind)
    received = torch.zeros_like(expected)
    try:
        dist.all_to_all_single(received, sent, group=members.handle)
    except RuntimeError as error:
        if not any(words in str(error) for words in LACKING):
            raise
        _by_pairs(members, received, sent)
    return expected, received


def _by_pairs(members: GroupMembers, received: torch.Tensor, sent: torch.Tensor) -> None:
    """Send one and receive one at each distance along the ring."""
    group = members.handle or dist.distributed_c10d._get_default_group()
    outgoing, incoming = sent.chunk(members.size), received.chunk(members.size)
    incoming[members.place].copy_(outgoing[members.place])
    for step in range(1, members.size):
        to, source = (members.place + step) % members.size, (members.place - step) % members.size
        sending = dist.isend(outgoing[to], dist.get_global_rank(group, to), group=group)
        dist.recv(incoming[source], dist.get_global_rank(group, source), group=group)
        if sending is not None:
            sending.wait()


def _elements(device: torch.device) -> int:
    return ELEMENTS.get(device.type, ELEMENTS["cpu"])


def _piece(members: GroupMembers, device: torch.device) -> int:
    return max(1, min(_elements(device) // 4, MOST_GATHERED // members.size))


def _compared(
    operation: str, dtype: str, members: GroupMembers, expected: torch.Tensor, received: torch.Tensor
) -> CollectiveResult:
    """Return the first wrong element, else the first one."""
    wrong = (expected != received).nonzero()
    place = int(wrong[0]) if len(wrong) else 0
    value = float(received[place])
    return CollectiveResult(
        operation,
        members.backend,
        float(expected[place]),
        value if math.isfinite(value) else None,
        dtype,
        members.axis,
        members.ranks,
    )
