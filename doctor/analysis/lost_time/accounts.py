"""Enters the seconds of every rank: lost by cause, and not measured. What is left is its own work."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import msgspec

from doctor.analysis.lost_time.waits import Parts, WaitOrder, communication, parts_by_span, wait_order, waits_of
from doctor.core.facts import TIME_PARTS, ModelFacts, ProgressFacts, StepFacts, TrainingFacts, time_part
from doctor.core.job import Rank
from doctor.core.report_document import LossCause

BACKWARD_TO_FORWARD = 2.0
"""The ratio of arithmetic in the backward and forward passes: one product for the gradients of the inputs and one for
those of the weights (Kaplan et al., Scaling Laws for Neural Language Models, 2020, section 2.1)."""
MOST_CELLS = 4096
"""Spans times ranks that are compared; in larger jobs, spans are merged."""
STALLED = ("stalled", "silent", "stopped")
CAUSE_OF: Mapping[str, LossCause] = {"checkpoint": "checkpoints", "evaluation": "evaluation"}
"""The cause of waiting for a rank by the part that it was in, if not ``stragglers``."""
NO_COLLECTIVES = "on GPUs the host does not see how long collectives take: time lost in them is not counted"
NO_BACKWARD = (
    "the backward pass is not marked in this loop, so that work within a step cannot be distinguished from waiting "
    "for a rank that is slow there"
)


class Loss(msgspec.Struct, frozen=True):
    """Identity of a loss. ``culprit``: the rank that caused it, for itself or for others; ``because``: what it did."""

    cause: LossCause
    culprit: int
    because: str


class Accounts:
    """Seconds by rank: ``total`` since its first training batch, of these ``unmeasured``, and ``lost`` by identity.

    ``hidden``: what could not be measured, in words. ``knows_communication``: of at least one group of ranks.
    """

    def __init__(self) -> None:
        self.total: dict[int, float] = {}
        self.unmeasured: dict[int, float] = {}
        self.lost: dict[int, dict[Loss, float]] = defaultdict(lambda: defaultdict(float))
        self.hidden: dict[str, None] = {}
        self.knows_communication = False

    def lose(self, rank: int, cause: LossCause, seconds: float, culprit: int | None = None, because: str = "") -> None:
        """Enter a loss of a rank, which is its own without a ``culprit``."""
        if seconds > 0:
            self.lost[rank][Loss(cause, rank if culprit is None else culprit, because)] += seconds

    def of(self, rank: int, cause: LossCause) -> float:
        """Return what a rank lost by one cause."""
        return sum(seconds for loss, seconds in self.lost[rank].items() if loss.cause == cause)

    def enter(self, group: Sequence[Rank], count: int) -> None:
        """Enter all time of ranks that do the same work, of ``count`` ranks in all."""
        ranks = {rank.number: steps for rank in group if (steps := rank.find(StepFacts))}
        training = next((found for rank in group if (found := rank.find(TrainingFacts))), TrainingFacts())
        on_gpu, flag = (training.device or "").startswith("cuda"), "lightning" in training.framework
        has_backward = any(one.part("backward") for steps in ranks.values() for one in steps.spans)
        table = parts_by_span(ranks, max(1, MOST_CELLS // count), has_backward=has_backward)
        stalled = {rank.number: self._set_stall_apart(rank, table) for rank in group}
        order = wait_order(
            on_gpu=on_gpu, has_backward=has_backward, broadcasts_flag=flag, is_sharded=_is_sharded(group)
        )
        data_parts = ("data",) if flag else ("data", "epoch-start")
        waited = self._enter_waits(table, order, data_parts)
        if len(group) > 1 and has_backward and not on_gpu:
            self._enter_communication(table)
        elif len(group) > 1:
            self.hidden[NO_COLLECTIVES if on_gpu else NO_BACKWARD] = None
        for rank, steps in ranks.items():
            parts = {part: sum(cells[rank][part] for cells in table.values() if rank in cells) for part in TIME_PARTS}
            self.total[rank] = stalled[rank] + sum(parts.values())
            self.unmeasured[rank] = parts["unmeasured"]
            data = sum(parts[name] for name in data_parts) - waited.get(rank, 0.0)
            devices = [one.device for one in steps.spans if one.device is not None]
            if devices:  # its device works on what was launched while the host waits
                data = min(data, max(0.0, sum(parts.values()) - sum(devices)))
            self.lose(rank, "data", data)
            self.lose(rank, "checkpoints", parts["checkpoint"])

    def _set_stall_apart(self, rank: Rank, table: Mapping[int, dict[int, dict[str, float]]]) -> float:
        """Take the time without progress of a stalled rank out of its last part, and enter it as idle."""
        progress = rank.find(ProgressFacts)
        place = max((place for place, cells in table.items() if rank.number in cells), default=None)
        if progress is None or progress.state not in STALLED or place is None:
            return 0.0
        cells, part = table[place][rank.number], time_part(progress.stage, progress.point)
        part = part if cells[part] else max(cells, key=cells.__getitem__)
        seconds = min(cells[part], progress.idle or 0.0)
        cells[part] -= seconds
        self.lose(rank.number, "idle", seconds, because="stall")
        return seconds

    def _enter_waits(
        self, table: Mapping[int, Mapping[int, Parts]], order: WaitOrder, data_parts: tuple[str, ...]
    ) -> dict[int, float]:
        """Enter the waits of all ranks for others; return the seconds that were waits for others, not for data."""
        waited: dict[int, float] = {}
        for cells in table.values():
            for rank, waits in waits_of(cells, order).items():
                for one in waits:
                    self.lose(rank, CAUSE_OF.get(one.because, "stragglers"), one.seconds, one.culprit, one.because)
                    if one.within in data_parts:
                        waited[rank] = waited.get(rank, 0.0) + one.seconds
        return waited

    def _enter_communication(self, table: Mapping[int, Mapping[int, Parts]]) -> None:
        self.knows_communication = True
        for cells in table.values():
            if len(cells) > 1:
                each = communication(cells.values(), BACKWARD_TO_FORWARD)
                for rank in cells:
                    self.lose(rank, "communication", each)


def _is_sharded(group: Sequence[Rank]) -> bool:
    models = (rank.find(ModelFacts) for rank in group)
    return any(model is not None and model.replicated is False for model in models)
