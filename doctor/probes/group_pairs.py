"""Messages between two ranks at a time, over the back end of the job: the very cards, links and switches that it will
use, which a probe over TCP does not touch.

Both say first whether they still have time. Then the receiver asks for longer and longer messages until one took so
long that its latency does not matter, and the last one counts; after that the other way round.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from doctor.facts import Exchange
from doctor.reasoning.partners import NOBODY

if TYPE_CHECKING:
    import torch

MEASURED = "gloo"
"""The back end that needs none of this: it sends over TCP, with which the bandwidth between hosts is measured."""
FIRST_BYTES = 1 << 16
"""0.05 s at 10 Mb/s."""
GROWTH = 8
MOST_BYTES = {"cuda": 1 << 26, "cpu": 1 << 23}
"""By the kind of device: 1.3 ms at 400 Gb/s."""
ENOUGH_SECONDS = 0.02
SECONDS = 8.0
"""For all rounds; a few tenths on a usual network. After that nobody begins another one."""


def exchanges(partners: Sequence[int], place: int, numbers: Sequence[int], device: torch.device) -> Iterator[Exchange]:
    """Meet each of ``partners`` (places in the group) in its round, and yield what was received from it."""
    wire = _Wire(device)
    end = time.monotonic() + SECONDS
    for turn, partner in enumerate(partners):
        if partner == NOBODY or not wire.agree(partner, time.monotonic() < end):
            continue
        for receives in (place < partner, place > partner):
            if receives:
                yield Exchange(numbers[partner], *wire.receive(partner), turn)
            else:
                wire.send(partner)


class _Wire:
    """What this rank says to another one, and hears from it. Nobody but these two takes part."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self._device = device
        most = MOST_BYTES.get(device.type, MOST_BYTES["cpu"])
        self._piece = torch.zeros(most, dtype=torch.uint8, device=device)

    def agree(self, partner: int, is_ready: bool) -> bool:
        """Whether both are ready."""
        import torch.distributed as dist

        own, other = self._word(is_ready), self._word(0)
        self._run(dist.P2POp(dist.isend, own, partner), dist.P2POp(dist.irecv, other, partner))
        return is_ready and bool(other.item())

    def send(self, partner: int) -> None:
        """As many messages as it asks for, as long as it asks."""
        import torch.distributed as dist

        while length := self._asked(partner):
            self._run(dist.P2POp(dist.isend, self._piece[:length], partner))

    def _asked(self, partner: int) -> int:
        import torch.distributed as dist

        word = self._word(0)
        self._run(dist.P2POp(dist.irecv, word, partner))
        return int(word.item())

    def receive(self, partner: int) -> tuple[int, float]:
        """The length of the longest message that was asked for, and its seconds."""
        length, took = FIRST_BYTES, self._received(partner, FIRST_BYTES)
        while took < ENOUGH_SECONDS and length < self._piece.numel():
            length = min(length * GROWTH, self._piece.numel())
            took = self._received(partner, length)
        self._ask(partner, 0)
        return length, took

    def _received(self, partner: int, length: int) -> float:
        import torch.distributed as dist

        self._ask(partner, length)
        began = time.perf_counter()
        self._run(dist.P2POp(dist.irecv, self._piece[:length], partner))
        return time.perf_counter() - began

    def _ask(self, partner: int, length: int) -> None:
        import torch.distributed as dist

        self._run(dist.P2POp(dist.isend, self._word(length), partner))

    def _word(self, value: int) -> torch.Tensor:
        import torch

        return torch.tensor([value], dtype=torch.int64, device=self._device)

    def _run(self, *operations: object) -> None:
        """Batched, for NCCL would make a communicator for each pair otherwise; wait until it is done on the device."""
        import torch
        import torch.distributed as dist

        for work in dist.batch_isend_irecv([*operations]):  # type: ignore[list-item]
            work.wait()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
