"""Ranks whose loader came to its end while others still train: whatever they wait in then does not meet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from doctor.analysis.hang.collective_mismatch import Divergence
from doctor.analysis.hang.rank_state import JobState, RankState
from doctor.analysis.rank_loaders import batches_of
from doctor.core.facts import EpochEnd, Frame, ProgressFacts

_NOT_COUNTED = -1


class UnevenLoaders(NamedTuple):
    """``ended`` came to the end of a loader of ``stage`` in ``epoch`` after ``batches`` (``None``: not counted), and
    ``going_on`` surely had more. ``certain``: both sides' batches are known. ``undecided``: how many other ranks are
    still in that epoch."""

    stage: str
    loader: int
    epoch: int | None
    batches: int | None
    ended: tuple[int, ...]
    going_on: tuple[int, ...]
    certain: bool
    undecided: int = 0

    @property
    def odd(self) -> tuple[int, ...]:
        """The smaller side; where they are equally large, those that wait in vain."""
        return self.ended if len(self.ended) < len(self.going_on) + self.undecided else self.going_on


class _EpochEnd(NamedTuple):
    """Of an epoch of a loader."""

    stage: str
    loader: int
    epoch: int


def uneven_of(scene: JobState) -> UnevenLoaders | None:
    """The newest loader at whose end ranks of a run that does not move any more parted; ``None`` where none did."""
    if scene.joins:
        return None
    ends: dict[_EpochEnd, dict[int, int]] = {}
    for rank, standing in scene.ranks.items():
        for end in _ends(standing.progress):
            ends.setdefault(_EpochEnd(end.stage, end.loader, end.epoch), {}).setdefault(rank, end.batches)
    newest_first = sorted(ends.items(), key=lambda item: -item[0].epoch)
    found = (_split_by_epoch(scene, end, ended) for end, ended in newest_first)
    return next((uneven for uneven in found if uneven is not None), None)


def _ends(progress: ProgressFacts | None) -> tuple[EpochEnd, ...]:
    """Ends that were seen, and the one that the point where it stands implies."""
    if progress is None:
        return ()
    if progress.point == "epoch-end" and progress.epoch is not None and progress.stage in ("train", "validate"):
        return (*progress.ended, EpochEnd(progress.stage, 0, progress.epoch, _NOT_COUNTED))
    return progress.ended


def _split_by_epoch(scene: JobState, end: _EpochEnd, ended: Mapping[int, int]) -> UnevenLoaders | None:
    counted = {rank: batches for rank, batches in ended.items() if batches != _NOT_COUNTED}
    batches = min(counted.values(), default=None)
    inside = [one for rank, one in scene.ranks.items() if rank not in ended and _is_in(one.progress, end)]
    going_on = tuple(one.rank for one in inside if _goes_on(scene, one, end, batches))
    if going_on:
        undecided = len(inside) - len(going_on)
        return UnevenLoaders(*end, batches, tuple(sorted(ended)), going_on, batches is not None, undecided)
    longer = tuple(sorted(rank for rank, count in counted.items() if batches is not None and count > batches))
    if longer and end.stage == "train":
        shorter = tuple(sorted(rank for rank, count in counted.items() if count == batches))
        return UnevenLoaders(*end, batches, shorter, longer, certain=True)
    return None


def _goes_on(scene: JobState, standing: RankState, end: _EpochEnd, batches: int | None) -> bool:
    """Whether a rank in that epoch waits for others, and has more batches than those that came to the end. One that is
    late with its last batch, or waits in it for a call that the others passed over, has not."""
    progress = standing.progress
    if progress is None or not (standing.waits or standing.may_wait_in_backward or standing.ended_waiting):
        return False
    if batches is None:
        return True
    length = _length(scene, standing.rank, end)
    if length is not None and length != batches:
        return length > batches
    begun = progress.batch + 1 if progress.batch is not None else 0
    # Lightning asks whether there is a next batch before it waits at the point "data".
    return begun > batches or (length is None and begun == batches and progress.point == "data")


def _is_in(progress: ProgressFacts | None, end: _EpochEnd) -> bool:
    return progress is not None and (progress.stage, progress.epoch) == (end.stage, end.epoch)


def _length(scene: JobState, rank: int, end: _EpochEnd) -> int | None:
    """Batches of an epoch of that loader on a rank, as far as it says."""
    loaders = scene.loaders.get(rank)
    found = (batches_of(one) for one in loaders.of(end.stage) if one.index == end.loader) if loaders else iter(())
    return next(found, None)


# Where only the stacks of calls tell.


def uneven_of_calls(scene: JobState, parting: Divergence) -> UnevenLoaders | None:
    """Whether ranks parted because some are at the end of Lightning's training epoch, and the others in one more batch
    of it; ``None`` where their stacks say nothing of the kind."""
    inside = [rank for party in parting.parties if _is_in_batch(party.entry.frames) for rank in party.ranks]
    beyond = [rank for party in parting.parties if _is_beyond_epoch(party.entry.frames) for rank in party.ranks]
    if scene.joins or not inside or not beyond:
        return None
    undecided = sum(len(party.ranks) for party in parting.parties) - len(inside) - len(beyond)
    return UnevenLoaders(
        "train", 0, None, None, tuple(sorted(beyond)), tuple(sorted(inside)), certain=False, undecided=undecided
    )


def _is_in_batch(frames: Sequence[Frame]) -> bool:
    return _passes(frames, "/loops/training_epoch_loop.py", "advance") and not _is_evaluating(frames)


def _is_beyond_epoch(frames: Sequence[Frame]) -> bool:
    return _passes(frames, "/loops/fit_loop.py", "on_advance_end") or (
        _is_evaluating(frames) and _passes(frames, "/loops/training_epoch_loop.py", "on_advance_end")
    )


def _is_evaluating(frames: Sequence[Frame]) -> bool:
    return any("/loops/evaluation_loop.py" in frame.file for frame in frames)


def _passes(frames: Sequence[Frame], file: str, function: str) -> bool:
    return any(frame.function == function and frame.file.endswith(file) for frame in frames)
