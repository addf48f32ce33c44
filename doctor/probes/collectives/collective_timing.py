"""Time collectives along one axis: small messages, whose time is latency, and messages as large as those of the job.

The groups of an axis run concurrently, as in a job. All ranks run as many and as large ones as the slowest group has
time for, so that groups can be compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist

from doctor.core.clock import perf_counter
from doctor.core.facts import CollectiveTiming
from doctor.probes.collectives.group_limits import IN_A_ROW, MEMORY_SHARE, MOST_REPEATS, SCOUT, SMALL, SMALL_REPEATS
from doctor.probes.collectives.known_values import GroupMembers

AT_FIRST = 2
"""Small collectives after which all ranks agree whether there is time for as many again: with 5 % packet loss every
second one of 8 ranks takes 0.2 s, and the first does not predict the next."""
SECONDS = 0.4
"""For the large messages of one axis and turn; about twice as long with the warm-up."""
SMALL_SECONDS = 0.2
"""For the small messages of one length and turn: no more are begun after that."""
LEAST_REPEATS = 2


class TimingExtent(NamedTuple):
    """Extent along an axis: ``bytes`` of a large message, repetitions, and whether one goes before as a ``warm``-up."""

    bytes: int
    repeats: int = 1
    warm: bool = False


class AxisTimer:
    """Times collectives on an axis, with the extent that the first turn determined."""

    def __init__(self, members: GroupMembers, device: torch.device, length: int) -> None:
        self._members = members
        self._device = device
        self._length = length
        self._extent: TimingExtent | None = None

    def timings(self) -> Iterator[CollectiveTiming]:
        """Return the medians of small messages, then of a large one."""
        extent = self._extent = self._extent or self._explored()
        calls = IN_A_ROW if self._device.type == "cuda" else 1
        for length in SMALL:
            yield self._timing(length, self._small(length, calls), calls)
        if extent.bytes not in SMALL:
            message = self._message(extent.bytes)
            if extent.warm:
                self._seconds(message, 1)
            yield self._timing(extent.bytes, [self._seconds(message, 1) for _ in range(extent.repeats)], 1)

    def _small(self, length: int, calls: int) -> list[float]:
        """Return the seconds of as many as all ranks have time for."""
        message = self._message(length)
        took: list[float] = []
        while len(took) < SMALL_REPEATS:
            more = min(max(AT_FIRST, len(took)), SMALL_REPEATS - len(took))
            took += [self._seconds(message, calls) for _ in range(more)]
            if _highest(sum(took) * calls, self._device) > SMALL_SECONDS:
                break
        return took

    def _timing(self, length: int, took: Sequence[float], calls: int) -> CollectiveTiming:
        backend, axis, ranks = self._members.backend, self._members.axis, self._members.ranks
        return CollectiveTiming("all_reduce", backend, length, median(took), axis, ranks, len(took) * calls)

    def _explored(self) -> TimingExtent:
        """Determine the extent, starting with a message that all can afford.

        If that takes longer than all should, as with packet loss, a warm-up would not help.
        """
        least = min(SCOUT, self._length)
        first = self._worst(least)
        if first > SECONDS:
            return TimingExtent(least)
        scout = min(first, self._worst(least))
        length = min(self._length, self._affordable())
        while length > SCOUT and scout * length / SCOUT * LEAST_REPEATS > SECONDS:
            length //= 2
        longest = scout
        if length > SCOUT:
            self._seconds(self._message(length), 1)
            longest = self._worst(length)
        if longest > SECONDS:
            return TimingExtent(length)
        return TimingExtent(length, min(MOST_REPEATS, max(LEAST_REPEATS, int(SECONDS / longest))), warm=True)

    def _worst(self, length: int) -> float:
        """Return the seconds of a message on the slowest rank."""
        return _highest(self._seconds(self._message(length), 1), self._device)

    def _affordable(self) -> int:
        """Return the bytes that all ranks have memory for."""
        if self._device.type != "cuda":
            return self._length
        free = torch.cuda.mem_get_info(self._device)[0] // MEMORY_SHARE
        return max(SCOUT, int(-_highest(-float(free), self._device)))

    def _message(self, length: int) -> torch.Tensor:
        return torch.zeros(max(1, length // 4), dtype=torch.float32, device=self._device)

    def _seconds(self, message: torch.Tensor, calls: int) -> float:
        """Return the seconds of one of ``calls`` consecutive calls."""

        def wait() -> None:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)

        wait()
        began = perf_counter()
        for _ in range(calls):
            dist.all_reduce(message, group=self._members.handle)
        wait()
        return (perf_counter() - began) / calls


def _highest(value: float, device: torch.device) -> float:
    """Return the maximum over all ranks."""
    values = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return float(values[0])
