"""Drive the child of one process through the steps of a group, one request each.

The results of a step are kept even if the child has to be killed in the next one.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from doctor.core.facts import CollectiveFacts, CollectiveTiming
from doctor.probes.collectives.backend_errors import LOST, informative_line
from doctor.probes.collectives.group_limits import MEASURED, NO_TIME
from doctor.probes.collectives.group_steps import (
    WORLD,
    ExchangeMessages,
    GroupStepResult,
    JoinGroup,
    LeaveGroup,
    TimeCollectives,
    VerifyCollectives,
)
from doctor.probes.runtime.deadline import ProbeDeadline
from doctor.probes.runtime.torch_child import ChildLost, TorchChild, WorkRefused

PATIENCE = 8.0
"""Seconds for one collective, which takes one on a slow network, and to gather before a step."""
STEP_PATIENCE = 2.5
"""Factor of that for a step in the child: to gather, to run, and to fail by itself before it is killed."""
LEAVE_SECONDS = 2.0
TURNS = 3
"""Each axis of several groups is timed so often, with the others in between: one slow turn is no finding."""
MOST_AXES = 8
AXIS_SECONDS = 16.0
"""For all turns of one axis on a slow network; a second or two on a usual one."""

MEET_SECONDS = 10.0
"""For messages of pairs on a slow network."""


def set_up_seconds(backend: str) -> float:
    """Return the time limit of the setup: NCCL inspects the machine, and connects 1,000 ranks in some 10 s."""
    return 30.0 if backend == "nccl" else 15.0


def seconds_of(backend: str, axes: int) -> float:
    """Return the time limit of all steps along so many axes: on a slow network, with one failure."""
    steps = AXIS_SECONDS * (axes + 1) + (MEET_SECONDS if backend != MEASURED else 0.0)
    return set_up_seconds(backend) + steps + STEP_PATIENCE * PATIENCE + LEAVE_SECONDS


class GroupDriver:
    """Runs the part of one rank in the group of ``order``."""

    def __init__(self, order: JoinGroup, child: TorchChild, deadline: ProbeDeadline) -> None:
        self._order = order
        self._child = child
        self._deadline = deadline
        self._step_seconds = STEP_PATIENCE * order.patience
        self._found = CollectiveFacts(backend=order.backend)

    def facts(self) -> CollectiveFacts:
        """Set up, use and leave the group. After a failure the child is ended."""
        done = self._set_up()
        for step in self._steps():
            if done.error or done.over:
                break
            done = self._step(step)
        if self._order.partners and not (done.error or done.over):
            done = self._met()
        self._leave(broken=bool(done.error))
        return self._found

    def _set_up(self) -> GroupStepResult:
        done, _ = self._ask(self._order, self._order.seconds + 2 * self._order.patience)
        if done.error:
            error_words = informative_line(done.error, self._child.lines)
            awaited = done.awaited or self._awaited(error_words, self._order.numbers)
            self._note(error=error_words, awaited=awaited, device=done.device or None)
        else:
            self._note(device=done.device)
        return done

    def _note(self, **changes: object) -> None:
        self._found = msgspec.structs.replace(self._found, **changes)

    def _steps(self) -> Iterator[VerifyCollectives | TimeCollectives]:
        axes = {share.axis: share.members for share in self._order.shares}
        yield from (VerifyCollectives(axis, self._is_over) for axis in dict.fromkeys((WORLD, *axes)))
        for turn in range(TURNS):
            for axis, members in axes.items():
                # An axis of several groups is timed again, to compare them.
                if turn == 0 or 0 < len(members) < len(self._order.numbers):
                    yield TimeCollectives(axis, turn, self._is_over)

    @property
    def _is_over(self) -> bool:
        """Whether there is too little time left for a step and its failure."""
        return self._deadline.left() < self._step_seconds + LEAVE_SECONDS

    def _step(self, step: VerifyCollectives | TimeCollectives) -> GroupStepResult:
        done, error = self._ask(step, self._step_seconds)
        found, timings = self._found, done.timings
        if error:
            order, backend = self._order, self._order.backend
            members = next((share.members for share in order.shares if share.axis == step.axis), order.numbers)
            awaited = self._awaited(error, members)
            timings = (CollectiveTiming("collective", backend, 0, None, step.axis, members, 1, error, awaited),)
        self._note(results=(*found.results, *done.results), timings=(*found.timings, *timings))
        return done

    def _met(self) -> GroupStepResult:
        """Exchange messages pair by pair, last: its failure does not affect the other results."""
        done, error = self._ask(ExchangeMessages(self._is_over), self._step_seconds)
        reason = error or done.error or done.reason or (NO_TIME if done.over else "")
        self._note(exchanges=done.exchanges, exchange_error=reason or None)
        return done

    def _awaited(self, error: str, members: tuple[int, ...]) -> tuple[int, ...]:
        """Return the other members if the last output of the child says that it lost them: the watchdog of NCCL ends
        the process then."""
        own = self._order.numbers[self._order.place]
        return tuple(rank for rank in members if rank != own) if LOST.search(error) else ()

    def _leave(self, *, broken: bool) -> None:
        _, error = self._ask(LeaveGroup(LEAVE_SECONDS, broken), 2 * LEAVE_SECONDS)
        if broken or error:
            self._child.close()

    def _ask(
        self, step: JoinGroup | VerifyCollectives | TimeCollectives | ExchangeMessages | LeaveGroup, seconds: float
    ) -> tuple[GroupStepResult, str]:
        """Return the result of a step, and the most informative error if the child gave none."""
        try:
            return self._child.ask("group", step, GroupStepResult, self._deadline.left(seconds)), ""
        except (ChildLost, WorkRefused) as error:
            return GroupStepResult(error=str(error)), informative_line(str(error), self._child.lines)
