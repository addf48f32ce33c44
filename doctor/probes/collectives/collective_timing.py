"""Times collectives along one axis: small messages, whose time is latency, and messages as large as the job's.

The groups of an axis run at the same time, as they do in a job. All ranks run as many and as large ones as the slowest
group has time for, so that groups can be compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from doctor.core.facts import CollectiveTiming
from doctor.probes.collectives.known_values import GroupMembers

if TYPE_CHECKING:
    import torch

SMALL = (8, 4096)
"""Bytes: what a loss or a flag takes, and a small gradient."""
SMALL_REPEATS = 20
AT_FIRST = 2
"""Small collectives after which all ask whether there is time for as many again: with 5 % of the packets lost every
second one of 8 ranks takes 0.2 s, and the first says nothing of the next."""
IN_A_ROW = 10
"""Small collectives that are timed together on a GPU: the host hands them over faster than they run, and waits once."""
SCOUT = 1 << 18
"""Bytes of the message that tells how large a one there is time for: a third of a second at 10 Mb/s."""
SECONDS = 0.4
"""For the large messages of one axis and turn; about twice as long with those that warm up."""
SMALL_SECONDS = 0.2
"""For the small messages of one length and turn: after that no more are begun."""
LEAST_REPEATS, MOST_REPEATS = 2, 5
MEMORY_SHARE = 8
"""Of the free memory of a GPU one part of so many is taken at most."""


class TimingExtent(NamedTuple):
    """How much is run along an axis: ``bytes`` of a large message, how often, and whether one more goes before, to
    ``warm`` up."""

    bytes: int
    repeats: int = 1
    warm: bool = False


class AxisTimer:
    """An axis on which collectives are timed, with what the first turn found out."""

    def __init__(self, members: GroupMembers, device: torch.device, length: int) -> None:
        self._members = members
        self._device = device
        self._length = length
        self._extent: TimingExtent | None = None

    def timings(self) -> Iterator[CollectiveTiming]:
        """The medians of small messages, then of a large one."""
        extent = self._extent = self._extent or self._explored()
        calls = IN_A_ROW if self._device.type == "cuda" else 1
        for length in SMALL:
            yield self._timing(length, self._small(length, calls), calls)
        if extent.bytes not in SMALL:
            yield self._timing(extent.bytes, self._large(extent), 1)

    def _small(self, length: int, calls: int) -> list[float]:
        """Seconds of as many as all have time for."""
        message = self._message(length)
        took: list[float] = []
        while len(took) < SMALL_REPEATS:
            more = min(max(AT_FIRST, len(took)), SMALL_REPEATS - len(took))
            took += [self._seconds(message, calls) for _ in range(more)]
            if _highest(sum(took) * calls, self._device) > SMALL_SECONDS:
                break
        return took

    def _large(self, extent: TimingExtent) -> list[float]:
        message = self._message(extent.bytes)
        if extent.warm:
            self._seconds(message, 1)
        return [self._seconds(message, 1) for _ in range(extent.repeats)]

    def _timing(self, length: int, took: Sequence[float], calls: int) -> CollectiveTiming:
        backend, axis, ranks = self._members.backend, self._members.axis, self._members.ranks
        return CollectiveTiming("all_reduce", backend, length, median(took), axis, ranks, len(took) * calls)

    def _explored(self) -> TimingExtent:
        """From a message that all can afford. Where one takes longer than all should, as it does where packets are
        lost, no warming up would show."""
        least = min(SCOUT, self._length)
        first = self._worst(least)
        if first > SECONDS:
            return TimingExtent(least)
        scout = min(first, self._worst(least))
        length = min(self._length, self._affordable())
        while length > SCOUT and scout * length / SCOUT * LEAST_REPEATS > SECONDS:
            length //= 2
        longest = self._warm_worst(length) if length > SCOUT else scout
        if longest > SECONDS:
            return TimingExtent(length)
        return TimingExtent(length, min(MOST_REPEATS, max(LEAST_REPEATS, int(SECONDS / longest))), warm=True)

    def _warm_worst(self, length: int) -> float:
        """After one to warm up."""
        self._seconds(self._message(length), 1)
        return self._worst(length)

    def _worst(self, length: int) -> float:
        """Seconds of a message where it took longest."""
        return _highest(self._seconds(self._message(length), 1), self._device)

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
