"""Jobs that stand still, for the cases of checks: a healthy watched job, its ranks waiting, and one fault planted."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from doctor.core.facts import Collective, Failure, Frame, ProcessGroup, ProgressFacts, RecorderFacts
from doctor.testing.cases import JobBuilder
from doctor.testing.training_run import BACKWARD, NOON, TRAIN_STEP, running

LINES = "/home/me/train.py"
_CALLS = "torch/distributed/distributed_c10d.py"


def user_frame(number: int, function: str = "training_step", condition: str = "", file: str = LINES) -> Frame:
    """A line of the user's."""
    return Frame(file, number, function, user=True, condition=condition)


def package_frame(file: str, number: int, function: str) -> Frame:
    """A line of an installed package, by its path below site-packages."""
    return Frame(f"/opt/env/lib/python3.11/site-packages/{file}", number, function)


def stalled(hosts: int = 1, per_host: int = 2, *, gpus: int | None = 0, idle: float = 12.0) -> JobBuilder:
    """A job whose ranks all wait in one all-reduce, the 140th of the default group: by itself a fault of the network.
    The functions below plant another one."""
    return running(hosts, per_host, gpus=gpus).alter(ProgressFacts, state="stalled", idle=idle, limit=8.0)


def with_call(
    sketch: JobBuilder,
    ranks: Iterable[int],
    operation: str,
    *frames: Frame,
    ago: int = 0,
    **changes: object,
) -> JobBuilder:
    """The same job in which ``ranks`` made another call, with this stack, in place of their newest one (``ago``: of the
    one so many before it); further arguments are fields of it."""
    chosen = tuple(ranks)

    def change(old: tuple[Collective, ...]) -> tuple[Collective, ...]:
        position = len(old) - 1 - ago
        called = msgspec.structs.replace(old[position], operation=operation, frames=frames, **changes)
        return (*old[:position], called, *old[position + 1 :])

    return sketch.alter(RecorderFacts, ranks=chosen, collectives=change).alter(
        ProgressFacts,
        ranks=chosen,
        stack=(package_frame(_CALLS, 3245, operation), *frames),
    )


def with_late_ranks(sketch: JobBuilder, ranks: Iterable[int], *stack: Frame, **progress: Any) -> JobBuilder:
    """The same job in which ``ranks`` have not come to the newest collective, but stand where ``stack`` says; further
    arguments are fields of their progress."""
    chosen = tuple(ranks)
    return sketch.alter(
        RecorderFacts,
        ranks=chosen,
        collectives=lambda old: old[:-1],
        groups=lambda old: tuple(_before(group) for group in old),
    ).alter(ProgressFacts, ranks=chosen, stack=stack, **progress)


def with_group_call(
    sketch: JobBuilder, ranks: Iterable[int], name: str, members: tuple[int, ...], *frames: Frame, **changes: object
) -> JobBuilder:
    """The same job in which ``ranks`` wait in the first all-reduce of another group, and not in the default one."""
    chosen = tuple(ranks)
    call = Collective(name, 1, "all_reduce", backend="nccl", at=NOON, frames=frames)
    return with_late_ranks(sketch, chosen, package_frame(_CALLS, 3245, "all_reduce"), *frames).alter(
        RecorderFacts,
        ranks=chosen,
        groups=lambda old: (*old, ProcessGroup(name, "", members, 1)),
        collectives=lambda old: (*old, msgspec.structs.replace(call, **changes)),
    )


def with_failure(
    sketch: JobBuilder, ranks: Iterable[int], kind: str, message: str, *frames: Frame, at: float = 0.0
) -> JobBuilder:
    """The same job in which ``ranks`` ended in an error, ``at`` seconds after the others stood still."""
    error = Failure(kind, f"{kind}: {message}", NOON + at, frames or (BACKWARD, TRAIN_STEP))
    return sketch.alter(ProgressFacts, ranks=tuple(ranks), state="failed", failure=error)


def without_recorders(sketch: JobBuilder) -> JobBuilder:
    """The same job with torch's flight recorder off."""
    return sketch.drop(RecorderFacts, reason="the flight recorder is off")


def _before(group: ProcessGroup) -> ProcessGroup:
    return msgspec.structs.replace(group, enqueued=(group.enqueued or 1) - 1)
