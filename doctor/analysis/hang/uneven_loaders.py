"""Ranks whose data loader ended while others still train, so that their collectives no longer match."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from doctor.analysis.hang.collective_mismatch import Divergence
from doctor.analysis.hang.rank_state import JobState, RankState
from doctor.core.facts import EpochEnd, Frame, ProgressFacts

_NOT_COUNTED = -1


class UnevenLoaders(msgspec.Struct, frozen=True):
    """The ranks ``ended`` exhausted a loader after ``batches`` (``None``: unknown), and ``continuing`` had more.

    ``certain``: the batches of both are known. ``undecided``: the number of other ranks that are still in that
    epoch. From stacks alone: ``loop``, the frame around which the ranks part, and ``by_data``, whether only the end of
    the data can have ended it."""

    stage: str
    loader: int
    epoch: int | None
    batches: int | None
    ended: tuple[int, ...]
    continuing: tuple[int, ...]
    certain: bool
    undecided: int = 0
    loop: Frame | None = None
    by_data: bool = False

    @property
    def odd(self) -> tuple[int, ...]:
        """The minority; the continuing ranks if both have the same number."""
        return self.ended if len(self.ended) < len(self.continuing) + self.undecided else self.continuing


def uneven_of(states: JobState) -> UnevenLoaders | None:
    """The newest loader that ended on some ranks of a stuck run and not on others; ``None`` if there is none."""
    if states.joins:
        return None
    ends: dict[tuple[str, int, int], dict[int, int]] = {}
    for rank, rank_state in states.ranks.items():
        for end in _ends(rank_state.progress):
            ends.setdefault((end.stage, end.loader, end.epoch), {}).setdefault(rank, end.batches)
    newest_first = sorted(ends.items(), key=lambda item: -item[0][2])
    found = (_split_by_epoch(states, *end, ended) for end, ended in newest_first if not _goes_on(states, *end))
    return next((uneven for uneven in found if uneven is not None), None)


def _goes_on(states: JobState, stage: str, loader: int, epoch: int) -> bool:
    """Whether a rank has started a loader anew where it ended: its program takes batches by ``next()``."""
    for rank, facts in states.loaders.items():
        progress = states.ranks[rank].progress if rank in states.ranks else None
        by_next = any(one.by_next for one in facts.of(stage) if one.index == loader)
        if by_next and progress is not None and (progress.epoch or 0) > epoch:
            return True
    return False


def _ends(progress: ProgressFacts | None) -> tuple[EpochEnd, ...]:
    if progress is None:
        return ()
    has_left = any((one.stage, one.epoch) == (progress.stage, progress.epoch) for one in progress.left)
    if (
        progress.point == "epoch-end"
        and progress.state != "ended"
        and not has_left
        and progress.epoch is not None
        and progress.stage in ("train", "validate")
    ):
        return (*progress.ended, EpochEnd(progress.stage, 0, progress.epoch, _NOT_COUNTED))
    return progress.ended


def _split_by_epoch(
    states: JobState, stage: str, loader: int, epoch: int, ended: Mapping[int, int]
) -> UnevenLoaders | None:
    counted = {rank: batches for rank, batches in ended.items() if batches != _NOT_COUNTED}
    batches = min(counted.values(), default=None)
    inside = [
        one
        for rank, one in states.ranks.items()
        if rank not in ended and one.progress and (one.progress.stage, one.progress.epoch) == (stage, epoch)
    ]
    continuing = tuple(one.rank for one in inside if _continues(states, one, stage, loader, batches))
    if continuing:
        undecided = len(inside) - len(continuing)
        return UnevenLoaders(
            stage, loader, epoch, batches, tuple(sorted(ended)), continuing, batches is not None, undecided
        )
    longer = tuple(sorted(rank for rank, count in counted.items() if batches is not None and count > batches))
    if longer and stage == "train":
        shorter = tuple(sorted(rank for rank, count in counted.items() if count == batches))
        return UnevenLoaders(stage, loader, epoch, batches, shorter, longer, certain=True)
    return None


def _continues(states: JobState, rank_state: RankState, stage: str, loader: int, batches: int | None) -> bool:
    """Whether a rank in that epoch waits for others and has more batches than the ranks that ended it.

    A rank that is late with its last batch, or waits in it for a call that the others skipped, has not."""
    progress = rank_state.progress
    if progress is None or not (rank_state.waits or rank_state.may_wait_in_backward or rank_state.ended_waiting):
        return False
    if batches is None:
        return True
    loaders = states.loaders.get(rank_state.rank)
    lengths = (one.batches for one in loaders.of(stage) if one.index == loader) if loaders else iter(())
    length = next(lengths, None)
    if length is not None and length != batches:
        return length > batches
    begun = progress.batch + 1 if progress.batch is not None else 0
    # Lightning asks whether there is a next batch before it waits at the point "data".
    return begun > batches or (length is None and begun == batches and progress.point == "data")


def uneven_of_calls(states: JobState, divergence: Divergence) -> UnevenLoaders | None:
    """The uneven loaders if stacks show that ranks ended Lightning's training epoch while others are in a batch."""
    inside: set[int] = set()
    beyond: set[int] = set()
    for one in divergence.variants:
        frames = one.entry.frames
        is_evaluating = any("/loops/evaluation_loop.py" in frame.file for frame in frames)
        if not is_evaluating and _passes(frames, "/loops/training_epoch_loop.py", "advance"):
            inside.update(one.ranks)
        if is_past_training_epoch(frames) or (
            is_evaluating and _passes(frames, "/loops/training_epoch_loop.py", "on_advance_end")
        ):
            beyond.update(one.ranks)
    if states.joins or not inside or not beyond:
        return None
    undecided = sum(len(one.ranks) for one in divergence.variants) - len(inside) - len(beyond)
    return UnevenLoaders(
        "train", 0, None, None, tuple(sorted(beyond)), tuple(sorted(inside)), certain=False, undecided=undecided
    )


def is_past_training_epoch(frames: Sequence[Frame]) -> bool:
    """Whether a stack is in what Lightning does after the last batch of a training epoch."""
    return _passes(frames, "/loops/fit_loop.py", "on_advance_end")


def _passes(frames: Sequence[Frame], file: str, function: str) -> bool:
    return any(frame.function == function and frame.file.endswith(file) for frame in frames)
