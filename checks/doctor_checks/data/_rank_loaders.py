"""The data loaders of all ranks, and whether two ranks read the same samples."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property

import msgspec

from doctor.analysis.stats.majority import split_values
from doctor.api import Job, Skip, Unknown, Verdict, ranks_in_words
from doctor.facts import Loader, LoaderEpoch, LoaderFacts, ProgressFacts, TrainingFacts

TRAINING = ("train",)
EVALUATION = ("validate", "test", "predict")

LEAST_DRAWN = 8
"""The minimum number of known indices of an epoch for comparing its order: fewer may be equal by chance."""

MOST_PLACES = 16
"""The number of positions compared between all ranks, enough to distinguish orders and few enough for thousands of
ranks."""

_NAMES = {"train": "training", "validate": "validation", "test": "test", "predict": "prediction"}
_ARGUMENTS = {"train": "train", "validate": "val", "test": "test", "predict": "predict"}


class RankLoader(msgspec.Struct, frozen=True):
    """A rank and one of its loaders. ``training``: empty if unknown."""

    rank: int
    loader: Loader
    training: TrainingFacts

    @property
    def data_rank(self) -> int | None:
        """Its index among the data-parallel ranks; ranks of one model replica have the same index."""
        return self.training.data_parallel_rank

    @property
    def group(self) -> int | None:
        """Identifies the ranks that train one model together; ``None`` if unknown.

        All ranks of a Trainer do; those of a custom loop if its wrapper or its samplers show it."""
        training = self.training
        if training.framework != "plain" or training.data_parallel_size == training.world_size:
            return training.data_parallel_root or 0
        return training.data_parallel_root if training.world_size > 1 else 0

    @property
    def may_leave(self) -> bool:
        """Whether the user's loop can leave the loader before its end."""
        return self.loader.has_exits or self.loader.loop_limit is not None


class PeerLoaders(msgspec.Struct, frozen=True, dict=True):
    """The same loader of a stage on all ranks that have it."""

    stage: str
    index: int
    members: tuple[RankLoader, ...]

    @property
    def name(self) -> str:
        one_of_many = self.index or any(reader.loader.combined for reader in self.members)
        return f"{_NAMES.get(self.stage, self.stage)} loader" + (f" {self.index}" if one_of_many else "")

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(reader.rank for reader in self.members)

    @cached_property
    def data_ranks(self) -> dict[int, RankLoader]:
        """One reader for each index among the data-parallel ranks."""
        return {data_rank: readers[0] for data_rank, readers in self._by_data_rank.items()}

    @cached_property
    def _by_data_rank(self) -> dict[int, list[RankLoader]]:
        data_ranks: dict[int, list[RankLoader]] = {}
        for reader in self.members:
            if reader.data_rank is not None:
                data_ranks.setdefault(reader.data_rank, []).append(reader)
        return data_ranks

    @property
    def unplaced(self) -> tuple[int, ...]:
        """Ranks of a larger world whose data-parallel index is unknown."""
        return tuple(one.rank for one in self.members if one.data_rank is None and one.training.world_size > 1)

    @property
    def is_one_job(self) -> bool:
        """Whether these ranks are known to train one model together, so that each waits for all others."""
        return all(reader.group is not None for reader in self.members)

    def by_group(self) -> tuple[PeerLoaders, ...]:
        """The same for each group of ranks that train one model together.

        Ranks without a known group stay together and come first."""
        groups: dict[int, list[RankLoader]] = {}
        for reader in self.members:
            groups.setdefault(-1 if reader.group is None else reader.group, []).append(reader)
        return tuple(PeerLoaders(self.stage, self.index, tuple(groups[key])) for key in sorted(groups))

    def at(self, data_ranks: Iterable[int]) -> tuple[int, ...]:
        """The ranks at ``data_ranks``."""
        return tuple(sorted(reader.rank for data_rank in set(data_ranks) for reader in self._by_data_rank[data_rank]))


def peer_loaders(job: Job, stages: Iterable[str]) -> tuple[PeerLoaders, ...]:
    """The loaders of ``stages``, each with the ranks that have it, by stage and index."""
    wanted = tuple(stages)
    found: dict[tuple[int, int], list[RankLoader]] = {}
    for facts, same in job.each(LoaderFacts, also=(TrainingFacts,)):
        training = same.find(TrainingFacts) or TrainingFacts()
        for loader in facts.loaders:
            if loader.stage in wanted:
                members = found.setdefault((wanted.index(loader.stage), loader.index), [])
                members.extend(RankLoader(rank, loader, training) for rank in same.ranks)
    return tuple(
        PeerLoaders(wanted[stage], index, tuple(sorted(members, key=lambda reader: reader.rank)))
        for (stage, index), members in sorted(found.items())
    )


def divided_loaders(job: Job, stages: Iterable[str]) -> tuple[PeerLoaders, ...]:
    """:func:`peer_loaders` that two or more data-parallel ranks read, separately for each group of ranks."""
    groups = (group for readers in peer_loaders(job, stages) for group in readers.by_group())
    return tuple(readers for readers in groups if len(readers.data_ranks) > 1)


def why_not_divided(job: Job, stages: Iterable[str]) -> str:
    """The reason that :func:`divided_loaders` is empty."""
    readers = peer_loaders(job, stages)
    if not readers:
        return "no loader of this kind is in use"
    if any(one.unplaced for one in readers):
        return "how the ranks share the data is unknown"
    return "a single data-parallel rank reads all data"


def odd_by_count(counts: Mapping[int, int]) -> tuple[int, ...]:
    """The ranks that deviate in their number of batches: all but the majority.

    Without a majority, those with more than the minimum, because they block waiting for the others."""
    found = split_values(counts)
    if found.common is not None:
        return found.odd
    fewest = min(counts.values(), default=0)
    return tuple(sorted(rank for rank, count in counts.items() if count > fewest))


def any_stuck(job: Job) -> bool:
    """Whether a rank makes no progress, or has failed."""
    return any(progress.state not in ("running", "ended") for progress, _ in job.facts(ProgressFacts))


def ends_by_steps(members: Iterable[RankLoader]) -> bool:
    """Whether a Trainer of transformers ends all ranks at the same step, and does nothing together after an epoch.

    Each step reduces gradients once on each rank, whatever its epoch (transformers/trainer.py,
    ``_inner_training_loop`` and ``_maybe_log_save_evaluate``)."""
    for reader in members:
        training = reader.training
        strategies = {one.value for one in training.arguments if one.name in _STRATEGIES}
        if training.framework != "transformers" or training.max_steps is None or training.accumulate != 1:
            return False
        if "epoch" in strategies:
            return False
    return True


_STRATEGIES = ("eval_strategy", "save_strategy", "logging_strategy")
AT_THE_SAME_STEP = (
    "None while `max_steps` ends all ranks at the same step, but an evaluation or a gathered metric after each epoch "
    "would hang."
)


def same_data_set(one: Loader, other: Loader) -> bool | None:
    """Whether two ranks have the same dataset; ``None`` if that can't be determined."""
    if one.dataset != other.dataset or one.dataset_length != other.dataset_length:
        return False
    if one.fingerprint is None or other.fingerprint is None:
        return None
    return one.fingerprint == other.fingerprint


def same_order(one: LoaderEpoch, other: LoaderEpoch, least: int = LEAST_DRAWN) -> bool | None:
    """Whether the same samples were drawn in the same order; ``None`` if fewer than ``least`` of them are known."""
    if one.drawn is not None and one.drawn == other.drawn:
        return True
    common = min(len(one.first), len(other.first))
    if common >= least:
        return one.first[:common] == other.first[:common]
    return None if one.drawn is None or other.drawn is None else False


def newest_common_epoch(epochs: Mapping[int, Sequence[LoaderEpoch]]) -> dict[int, LoaderEpoch]:
    """The newest epoch of which two or more ranks have drawn enough to be compared, for these ranks by index."""
    known: dict[int, dict[int, LoaderEpoch]] = {}
    for data_rank, seen in epochs.items():
        for epoch in seen:
            if len(epoch.first) >= LEAST_DRAWN or epoch.drawn is not None:
                known.setdefault(epoch.epoch, {})[data_rank] = epoch
    shared = [number for number, data_ranks in known.items() if len(data_ranks) > 1]
    return known[max(shared)] if shared else {}


def shared_draws_by_position(epochs: Mapping[int, LoaderEpoch]) -> dict[int, float]:
    """By index, the share of the draws of a rank that another rank drew at the same position, as far as known."""
    known = min(MOST_PLACES, *(len(epoch.first) for epoch in epochs.values())) if epochs else 0
    if known < LEAST_DRAWN:
        return _shared({data_rank: (epoch.drawn,) for data_rank, epoch in epochs.items() if epoch.drawn is not None})
    return _shared({data_rank: tuple(enumerate(epoch.first[:known])) for data_rank, epoch in epochs.items()})


def shared_draws(epochs: Mapping[int, LoaderEpoch]) -> dict[int, float]:
    """By index, the share of the draws of a rank that another rank drew too, at any position."""
    return _shared({data_rank: tuple(set(epoch.first)) for data_rank, epoch in epochs.items()})


def _shared(drawn: Mapping[int, Sequence[Hashable]]) -> dict[int, float]:
    owners: dict[Hashable, int] = {}
    for things in drawn.values():
        for thing in things:
            owners[thing] = owners.get(thing, 0) + 1
    return {
        data_rank: sum(owners[thing] > 1 for thing in things) / len(things)
        for data_rank, things in drawn.items()
        if len(things)
    }


def same_contents(one: LoaderEpoch, other: LoaderEpoch) -> float | None:
    """The share of equal parts (tensors) in the first batches of two epochs.

    Parts that never vary between batches (masks, synthetic data) do not count; ``None`` if there are no others."""
    batches = min(len(one.contents), len(other.contents))
    both = zip(_parts(one, batches), _parts(other, batches), strict=False)
    varying = [mine == theirs for mine, theirs in both if len(set(mine)) > 1 or len(set(theirs)) > 1]
    return sum(varying) / len(varying) if varying else None


def _parts(epoch: LoaderEpoch, batches: int) -> list[tuple[str, ...]]:
    return list(zip(*(content.split("-") for content in epoch.contents[:batches]), strict=False))


def advice(job: Job, *, lightning: str, plain: str, transformers: str = "") -> str:
    """The advice for the framework that runs the loop of this job."""
    frameworks = {training.framework for training, _ in job.facts(TrainingFacts)}
    if frameworks & {"lightning", "pytorch_lightning"}:
        return lightning
    return (transformers or plain) if "transformers" in frameworks else plain


def batches_in_words(*counts: int) -> str:
    """``1 batch``, ``60, 65 batches``; at most four numbers."""
    words = ", ".join(f"{count:,}" for count in counts[:4])
    rest = len(counts) - 4
    more = f" and {rest} other {'number' if rest == 1 else 'numbers'} of" if rest > 0 else ""
    return f"{words}{more} {'batch' if counts == (1,) else 'batches'}"


def effect_of_waiting(batches: Mapping[int, int], *, trains: bool) -> str:
    """What ranks with more batches do after the shortest loader has ended."""
    fewest = min(batches.values())
    ended = tuple(rank for rank, count in batches.items() if count == fewest)
    longer = tuple(rank for rank in batches if rank not in ended)
    waiting, others = ranks_in_words(longer, 4), ranks_in_words(ended, 4)
    apart = f" If {others} continue{'s' if len(ended) == 1 else ''} with another epoch, gradients of different steps "
    return (
        f"After {batches_in_words(fewest)}, {waiting} wait{'s' if len(longer) == 1 else ''} for {others} until a "
        f"collective times out.{f'{apart}are averaged without an error.' if trains else ''}"
    )


def sampler_in_words(name: str) -> str:
    """``The DistributedSampler``, ``The sampler Part``."""
    return f"The {name}" if "Sampler" in name else f"The sampler {name}"


def loader_hook(stage: str) -> str:
    """Lightning's hook that creates the loaders of a stage."""
    return f"{_ARGUMENTS.get(stage, stage)}_dataloader"


def why_no_draws(job: Job, otherwise: str) -> Iterator[Verdict]:
    """Why the draws of samplers are unknown: ranks could not observe them, or ``otherwise``."""
    for facts, same in job.facts(LoaderFacts):
        if (note := facts.why_hidden("drawn")) is not None:
            yield Unknown(note.reason, same.ranks, note.unhide)
            return
    yield Skip(otherwise)


def limit_argument(stage: str) -> str:
    """Lightning's argument that limits the batches of a stage."""
    return f"limit_{_ARGUMENTS.get(stage, stage)}_batches"
