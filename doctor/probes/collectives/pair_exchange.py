"""Messages between two ranks at a time, over the back end of the job: the very cards, links and switches that it will
use, which a probe over TCP does not touch.

Before each round all ranks say whether they can go on: rounds begin together, and nobody waits for who can't. Of a pair
the receiver asks for longer and longer messages until one takes so long that its latency does not matter, or is as long
as there is room for; it asks for that three times, and the best one counts. Then the other way round.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from doctor.analysis.fabric.pairing import NO_PARTNER
from doctor.core.facts import Exchange
from doctor.probes.runtime.cpu_starvation import RunQueueDelay

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

MEASURED = "gloo"
"""The back end that needs none of this: it sends over TCP, with which the bandwidth between hosts is measured."""
LEAST_BYTES = 8
"""For the round trip."""
FIRST_BYTES = 1 << 16
"""0.05 s at 10 Mb/s."""
GROWTH = 8
MOST_BYTES = {"cuda": 1 << 28, "cpu": 1 << 23}
"""By the kind of device: 5 ms at 400 Gb/s."""
MEMORY_SHARE = 8
"""Of the free memory of a GPU one part of so many is taken at most."""
ENOUGH_SECONDS = 0.02
REPEATS = 3
SECONDS = 4.0
"""For all rounds; a few tenths on a usual network. After that no round begins. Far below the time-out of the group,
for who rests waits for who is slow."""

NO_TIME = "no time was left for messages of pairs"


class PairExchange:
    """The exchanges of one rank, which has ``place`` among ``numbers``."""

    def __init__(self, place: int, numbers: Sequence[int], device: torch.device) -> None:
        self._place = place
        self._numbers = numbers
        self._device = device
        self.found: list[Exchange] = []

    def run(self, partners: Sequence[int]) -> str:
        """Meet each of ``partners`` (places in the group) in its round; why that ended early, empty where it did
        not. All ranks have as many rounds."""
        end = time.monotonic() + SECONDS
        failure = self._prepare()
        for turn, partner in enumerate(partners):
            if not self._all_go_on(not failure and time.monotonic() < end):
                return failure or NO_TIME
            if partner != NO_PARTNER:
                self._meet(turn, partner)
        return ""

    def _prepare(self) -> str:
        """Room for messages; what is in the way of it."""
        import torch

        try:
            self._piece = torch.zeros(self._room(), dtype=torch.uint8, device=self._device)
        except RuntimeError as error:
            return f"no room for messages: {str(error).splitlines()[0]}"
        return ""

    def _room(self) -> int:
        import torch

        most = MOST_BYTES.get(self._device.type, MOST_BYTES["cpu"])
        if self._device.type != "cuda":
            return most
        return max(FIRST_BYTES, min(most, torch.cuda.mem_get_info(self._device)[0] // MEMORY_SHARE))

    def _all_go_on(self, ready: bool) -> bool:
        import torch.distributed as dist

        word = self._word(not ready)
        dist.all_reduce(word, op=dist.ReduceOp.MAX)
        return not word.item()

    def _meet(self, turn: int, partner: int) -> None:
        """Both ways; the lower one receives first. The shorter room of both counts."""
        most = min(self._piece.numel(), self._told(partner, self._piece.numel()))
        for receives in (self._place < partner, self._place > partner):
            if receives:
                self.found.append(self._received(turn, partner, most))
            else:
                self._sent(partner)

    def _told(self, partner: int, number: int) -> int:
        """What the partner tells while it is told ``number``."""
        import torch.distributed as dist

        own, other = self._word(number), self._word(0)
        self._run(dist.P2POp(dist.isend, own, partner), dist.P2POp(dist.irecv, other, partner))
        return int(other.item())

    def _sent(self, partner: int) -> None:
        """As many messages as it asks for, as long as it asks; then for which share there was no processor."""
        import torch.distributed as dist

        waiting = RunQueueDelay()
        while length := self._heard(partner):
            self._run(dist.P2POp(dist.isend, self._piece[:length], partner))
        self._say(partner, int(waiting.share() * 1e6))

    def _received(self, turn: int, partner: int, most: int) -> Exchange:
        round_trip = min(self._took(partner, LEAST_BYTES) for _ in range(REPEATS))
        waiting = RunQueueDelay()
        length = FIRST_BYTES
        while (took := self._took(partner, length)) < ENOUGH_SECONDS and length < most:
            length = min(length * GROWTH, most)
        best = took if took >= ENOUGH_SECONDS else min(took, *(self._took(partner, length) for _ in range(REPEATS - 1)))
        own = waiting.share()
        self._say(partner, 0)
        waited = max(own, self._heard(partner) / 1e6)
        return Exchange(self._numbers[partner], length, best, turn, round(waited, 3), round_trip)

    def _took(self, partner: int, length: int) -> float:
        """Seconds from the question for a message until it is there."""
        import torch.distributed as dist

        self._say(partner, length)
        began = time.perf_counter()
        self._run(dist.P2POp(dist.irecv, self._piece[:length], partner))
        return time.perf_counter() - began

    def _say(self, partner: int, number: int) -> None:
        import torch.distributed as dist

        self._run(dist.P2POp(dist.isend, self._word(number), partner))

    def _heard(self, partner: int) -> int:
        import torch.distributed as dist

        word = self._word(0)
        self._run(dist.P2POp(dist.irecv, word, partner))
        return int(word.item())

    def _word(self, value: int) -> torch.Tensor:
        import torch

        return torch.tensor([value], dtype=torch.int64, device=self._device)

    def _run(self, *operations: dist.P2POp) -> None:
        """Batched, for NCCL would make a communicator for each pair otherwise; wait until it is done on the device."""
        import torch
        import torch.distributed as dist

        for work in dist.batch_isend_irecv([*operations]):
            work.wait()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
