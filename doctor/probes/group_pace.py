"""Times collectives along one axis: small messages, whose time is latency, and messages as large as the job's.

The groups of an axis run at the same time, as they do in a job. All ranks run as many and as large ones as the slowest
group has time for, so that groups can be compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from doctor.facts import CollectiveTiming
from doctor.probes.group_values import Members

if TYPE_CHECKING:
    import torch

SMALL = (8, 4096)
"""Bytes: what a loss or a flag takes, and a small gradient."""
SMALL_REPEATS = 20
SLOW_REPEATS = 5
"""Where the network is slow: with 5 % of the packets lost every second small collective of 8 ranks takes 0.2 s."""
IN_A_ROW = 10
"""Small collectives that are timed together on a GPU: the host hands them over faster than they run, and waits once."""
SCOUT = 1 << 18
"""Bytes of the message that tells how large a one there is time for: a third of a second at 10 Mb/s."""
SECONDS = 0.4
"""For the large messages of one axis and turn; about twice as long with those that warm up."""
SMALL_SECONDS = 0.2
LEAST_REPEATS, MOST_REPEATS = 2, 5
MEMORY_SHARE = 8
"""Of the free memory of a GPU one part of so many is taken at most."""


class Extent(NamedTuple):
    """How much is run along an axis: ``bytes`` of a large message, how often, and how often each small one; whether one
    more goes before, to ``warm`` up."""

    bytes: int
    repeats: int
    small_repeats: int
    warm: bool = True


class Track:
    """An axis on which collectives are timed, with what the first turn found out."""

    def __init__(self, members: Members, device: torch.device, length: int) -> None:
        self._members = members
        self._device = device
        self._length = length
        self._extent: Extent | None = None

    def timings(self) -> Iterator[CollectiveTiming]:
        """The medians of small messages, then of a large one."""
        extent = self._extent = self._extent or self._explored()
        for length in SMALL:
            yield self._timing(length, extent.small_repeats, IN_A_ROW if self._device.type == "cuda" else 1)
        if extent.bytes not in SMALL:
            yield self._timing(extent.bytes, extent.repeats, 1)

    def _timing(self, length: int, repeats: int, calls: int) -> CollectiveTiming:
        message = self._message(length)
        if self._extent is None or self._extent.warm:
            self._seconds(message, calls)
        took = median(self._seconds(message, calls) for _ in range(repeats))
        backend, axis, ranks = self._members.backend, self._members.axis, self._members.ranks
        return CollectiveTiming("all_reduce", backend, length, took, axis, ranks, repeats * calls)

    def _explored(self) -> Extent:
        """From a message that all can afford. Where that one takes longer than all should, as it does where packets
        are lost, no warming up would show."""
        small = self._worst(SMALL[0])
        small_repeats = min(SMALL_REPEATS, max(LEAST_REPEATS, int(SMALL_SECONDS / small)))
        first = self._worst(min(SCOUT, self._length), warm=False)
        if first > SECONDS:
            return Extent(min(SCOUT, self._length), 1, min(small_repeats, SLOW_REPEATS), warm=False)
        scout = self._worst(min(SCOUT, self._length), warm=False)
        length = min(self._length, self._affordable())
        while length > SCOUT and scout * length / SCOUT * LEAST_REPEATS > SECONDS:
            length //= 2
        longest = self._worst(length) if length > SCOUT else scout
        repeats = min(MOST_REPEATS, max(LEAST_REPEATS, int(SECONDS / longest)))
        return Extent(length, repeats, small_repeats)

    def _worst(self, length: int, *, warm: bool = True) -> float:
        """Seconds of a message where it took longest, after one to warm up."""
        message = self._message(length)
        if warm:
            self._seconds(message, 1)
        return _highest(self._seconds(message, 1), self._device)

    def _affordable(self) -> int:
        """Bytes that all ranks have memory for."""
        import torch

        if self._device.type != "cuda":
            return self._length
        free = torch.cuda.mem_get_info(self._device)[0] // MEMORY_SHARE
        return max(SCOUT, int(-_highest(-float(free), self._device)))

    def _message(self, length: int) -> torch.Tensor:
        import torch

        return torch.zeros(max(1, length // 4), dtype=torch.float32, device=self._device)

    def _seconds(self, message: torch.Tensor, calls: int) -> float:
        """Of one of so many calls in a row."""
        import torch.distributed as dist

        wait = _waiter(self._device)
        wait()
        began = time.perf_counter()
        for _ in range(calls):
            dist.all_reduce(message, group=self._members.handle)
        wait()
        return (time.perf_counter() - began) / calls


def _waiter(device: torch.device) -> Callable[[], None]:
    import torch

    return (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else (lambda: None)


def _highest(value: float, device: torch.device) -> float:
    """Of the values of all ranks."""
    import torch
    import torch.distributed as dist

    values = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return float(values[0])
