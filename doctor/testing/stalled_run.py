"""Stalled jobs, for the cases of checks: a healthy monitored job whose ranks wait, and one fault."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from doctor.core.facts import Collective, Failure, Frame, ProcessGroup, ProgressFacts, RecorderFacts
from doctor.testing.cases import JobBuilder
from doctor.testing.training_run import BACKWARD, NOON, TRAIN_STEP, running

LINES = "/home/me/train.py"
_CALLS = "torch/distributed/distributed_c10d.py"


def user_frame(
    number: int, function: str = "training_step", condition: str = "", file: str = LINES, *, answered: bool = False
) -> Frame:
    """Return a frame of user code. ``answered``: it sends or receives, and its function does the other, too."""
    return Frame(file, number, function, user=True, condition=condition, answered=answered)


def package_frame(file: str, number: int, function: str) -> Frame:
    """Return a frame of an installed package, by its path below site-packages."""
    return Frame(f"/opt/env/lib/python3.11/site-packages/{file}", number, function)


def stalled(hosts: int = 1, per_host: int = 2, *, gpus: int | None = 0, idle: float = 12.0) -> JobBuilder:
    """Return a job whose ranks all wait in one all-reduce, the 140th of the default group, as with a network fault.
    The functions below add another fault."""
    return running(hosts, per_host, gpus=gpus).alter(ProgressFacts, state="stalled", idle=idle, limit=8.0)


def with_call(
    sketch: JobBuilder,
    ranks: Iterable[int],
    operation: str,
    *frames: Frame,
    ago: int = 0,
    **changes: object,
) -> JobBuilder:
    """Return the same job in which ``ranks`` made another call, with this stack, instead of their newest one (or the
    one ``ago`` calls before it). ``changes``: fields of the call."""
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


def over_gloo(sketch: JobBuilder) -> JobBuilder:
    """Return the same job with all its calls over Gloo."""

    def change(old: tuple[Collective, ...]) -> tuple[Collective, ...]:
        return tuple(msgspec.structs.replace(one, backend="gloo") for one in old)

    return sketch.alter(RecorderFacts, collectives=change)


def with_late_ranks(sketch: JobBuilder, ranks: Iterable[int], *stack: Frame, **progress: Any) -> JobBuilder:
    """Return the same job in which ``ranks`` have not reached the newest collective, but are at ``stack``.
    ``progress``: fields of their progress."""
    chosen = tuple(ranks)
    return sketch.alter(
        RecorderFacts,
        ranks=chosen,
        collectives=lambda old: old[:-1],
        groups=lambda old: tuple(msgspec.structs.replace(group, enqueued=(group.enqueued or 1) - 1) for group in old),
    ).alter(ProgressFacts, ranks=chosen, stack=stack, **progress)


def with_group_call(
    sketch: JobBuilder, ranks: Iterable[int], name: str, members: tuple[int, ...], *frames: Frame, **changes: object
) -> JobBuilder:
    """Return the same job in which ``ranks`` wait in the first all-reduce of another group instead."""
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
    """Return the same job in which ``ranks`` failed, ``at`` seconds after the others stalled."""
    error = Failure(kind, f"{kind}: {message}", NOON + at, frames or (BACKWARD, TRAIN_STEP))
    return sketch.alter(ProgressFacts, ranks=tuple(ranks), state="failed", failure=error)


def without_recorders(sketch: JobBuilder) -> JobBuilder:
    """Return the same job without torch's flight recorder."""
    return sketch.drop(RecorderFacts, reason="the flight recorder is off")
