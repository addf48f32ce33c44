"""Messages between two ranks at a time, over the backend of the job.

They use the same cards, links and switches as the job, which a probe over TCP does not. Before each round all ranks
agree to go on, so that rounds begin together and no rank waits for one that cannot. The receiver of a pair requests
longer and longer messages until the latency of one is negligible, or memory is exhausted; it requests that length three
times and keeps the best time. Then the pair swaps roles.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from doctor.analysis.fabric.pairing import NO_PARTNER
from doctor.core.clock import monotonic, perf_counter
from doctor.core.facts import Exchange
from doctor.probes.collectives.group_limits import (
    FIRST_BYTES,
    GROWTH,
    LEAST_BYTES,
    MEMORY_SHARE,
    MOST_BYTES,
    NO_TIME,
    REPEATS,
)
from doctor.probes.runtime.cpu_starvation import RunQueueDelay

ENOUGH_SECONDS = 0.02
SECONDS = 4.0
"""For all rounds, which take a few tenths on a usual network; no round begins later. Far below the timeout of the
group, because a rank without partner waits for the slow ones."""


class PairExchange:
    """Exchanges of the rank at ``place`` among ``numbers``."""

    def __init__(self, place: int, numbers: Sequence[int], device: torch.device) -> None:
        self._place = place
        self._numbers = numbers
        self._device = device
        self.found: list[Exchange] = []

    def run(self, partners: Sequence[int]) -> str:
        """Exchange with each of ``partners`` (places in the group) in its round.

        Returns why that ended early, empty if it did not. All ranks have the same number of rounds.
        """
        end = monotonic() + SECONDS
        failure = self._prepare()
        for turn, partner in enumerate(partners):
            if not self._all_ready(not failure and monotonic() < end):
                return failure or NO_TIME
            if partner != NO_PARTNER:
                self._exchange(turn, partner)
        return ""

    def _prepare(self) -> str:
        """Allocate the messages; return the error, if any."""
        room = MOST_BYTES.get(self._device.type, MOST_BYTES["cpu"])
        try:
            if self._device.type == "cuda":
                room = max(FIRST_BYTES, min(room, torch.cuda.mem_get_info(self._device)[0] // MEMORY_SHARE))
            self._piece = torch.zeros(room, dtype=torch.uint8, device=self._device)
        except RuntimeError as error:
            return f"no room for messages: {str(error).splitlines()[0]}"
        return ""

    def _all_ready(self, ready: bool) -> bool:
        word = self._number(not ready)
        dist.all_reduce(word, op=dist.ReduceOp.MAX)
        return not word.item()

    def _exchange(self, turn: int, partner: int) -> None:
        """Measure both ways; the lower place receives first. The smaller buffer limits the messages."""
        own, other = self._number(self._piece.numel()), self._number(0)
        self._run(dist.P2POp(dist.isend, own, partner), dist.P2POp(dist.irecv, other, partner))
        most = min(self._piece.numel(), int(other.item()))
        for receives in (self._place < partner, self._place > partner):
            if receives:
                self.found.append(self._measure(turn, partner, most))
            else:
                self._serve(partner)

    def _serve(self, partner: int) -> None:
        """Send the messages that the partner requests, then the share of time without a processor."""
        waiting = RunQueueDelay()
        while length := self._receive_number(partner):
            self._run(dist.P2POp(dist.isend, self._piece[:length], partner))
        self._send_number(partner, int(waiting.share() * 1e6))

    def _measure(self, turn: int, partner: int, most: int) -> Exchange:
        round_trip = min(self._request(partner, LEAST_BYTES) for _ in range(REPEATS))
        waiting = RunQueueDelay()
        length = FIRST_BYTES
        while (took := self._request(partner, length)) < ENOUGH_SECONDS and length < most:
            length = min(length * GROWTH, most)
        if took < ENOUGH_SECONDS:
            took = min(took, *(self._request(partner, length) for _ in range(REPEATS - 1)))
        own = waiting.share()
        self._send_number(partner, 0)
        waited = max(own, self._receive_number(partner) / 1e6)
        return Exchange(self._numbers[partner], length, took, turn, round(waited, 3), round_trip)

    def _request(self, partner: int, length: int) -> float:
        """Request a message, and return the seconds until it has arrived."""
        self._send_number(partner, length)
        began = perf_counter()
        self._run(dist.P2POp(dist.irecv, self._piece[:length], partner))
        return perf_counter() - began

    def _send_number(self, partner: int, number: int) -> None:
        self._run(dist.P2POp(dist.isend, self._number(number), partner))

    def _receive_number(self, partner: int) -> int:
        word = self._number(0)
        self._run(dist.P2POp(dist.irecv, word, partner))
        return int(word.item())

    def _number(self, value: int) -> torch.Tensor:
        return torch.tensor([value], dtype=torch.int64, device=self._device)

    def _run(self, *operations: dist.P2POp) -> None:
        """Run the operations as a batch, since NCCL would create a communicator per pair otherwise, and synchronize."""
        for work in dist.batch_isend_irecv([*operations]):
            work.wait()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
