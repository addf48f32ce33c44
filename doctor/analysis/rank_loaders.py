"""Who reads what: the loaders of all ranks side by side, and whether two ranks read the same."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from doctor.analysis.stats.majority import MajoritySplit, split_groups
from doctor.core.facts import Loader, LoaderEpoch, LoaderFacts, TrainingFacts
from doctor.core.job import Job

TRAINING = ("train",)
EVALUATION = ("validate", "test", "predict")

LEAST_DRAWN = 8
"""Indices that must be known of an epoch before its order is compared: fewer may be alike by chance."""

MOST_PLACES = 16
"""Places of an order that are compared between all ranks: enough to tell orders apart, few enough for thousands."""

_NAMES = {"train": "training", "validate": "validation", "test": "test", "predict": "prediction"}
_ARGUMENTS = {"train": "train", "validate": "val", "test": "test", "predict": "predict"}


class RankLoader(NamedTuple):
    """A rank and one loader of its. ``training``: empty where the rank does not tell."""

    rank: int
    loader: Loader
    training: TrainingFacts

    @property
    def seat(self) -> int | None:
        """Its place among the ranks that should read different data; ranks of one model replica share one."""
        return self.training.data_parallel_rank

    @property
    def group(self) -> int | None:
        """Names the ranks that it trains one model with. A Trainer's ranks all do; those of a loop of the user's own
        where its wrapper or its samplers say so. ``None``: not known, each may do something else."""
        training = self.training
        if training.framework != "plain" or training.data_parallel_size == training.world_size:
            return training.data_parallel_root or 0
        return training.data_parallel_root if training.world_size > 1 else 0


@dataclass(frozen=True)
class PeerLoaders:
    """The same loader of a stage on all ranks that have it."""

    stage: str
    index: int
    members: tuple[RankLoader, ...]

    @property
    def name(self) -> str:
        """Such as ``validation loader 1``; without a number where the stage has one loader."""
        one_of_many = self.index or any(reader.loader.combined for reader in self.members)
        return f"{_NAMES.get(self.stage, self.stage)} loader" + (f" {self.index}" if one_of_many else "")

    @property
    def ranks(self) -> tuple[int, ...]:
        """The numbers of the ranks."""
        return tuple(reader.rank for reader in self.members)

    @cached_property
    def seats(self) -> dict[int, RankLoader]:
        """One reader for each place among the data-parallel ranks."""
        return {seat: readers[0] for seat, readers in self._by_seat.items()}

    @cached_property
    def _by_seat(self) -> dict[int, list[RankLoader]]:
        seats: dict[int, list[RankLoader]] = {}
        for reader in self.members:
            if reader.seat is not None:
                seats.setdefault(reader.seat, []).append(reader)
        return seats

    @property
    def strangers(self) -> tuple[int, ...]:
        """Ranks of a larger world that do not tell their place in it."""
        return tuple(one.rank for one in self.members if one.seat is None and one.training.world_size > 1)

    @property
    def is_one_job(self) -> bool:
        """Whether these ranks are known to train one model together: each waits for all others then."""
        return all(reader.group is not None for reader in self.members)

    def by_group(self) -> tuple[PeerLoaders, ...]:
        """The same for each group of ranks that train one model together; those of which that is not known stay
        together, in front."""
        groups: dict[int, list[RankLoader]] = {}
        for reader in self.members:
            groups.setdefault(-1 if reader.group is None else reader.group, []).append(reader)
        return tuple(PeerLoaders(self.stage, self.index, tuple(groups[key])) for key in sorted(groups))

    def at(self, seats: Iterable[int]) -> tuple[int, ...]:
        """The ranks at ``seats``."""
        return tuple(sorted(reader.rank for seat in set(seats) for reader in self._by_seat[seat]))


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
    """:func:`peer_loaders` those loaders that two or more data-parallel ranks read, each group of ranks by itself."""
    groups = (group for readers in peer_loaders(job, stages) for group in readers.by_group())
    return tuple(readers for readers in groups if len(readers.seats) > 1)


def why_not_divided(job: Job, stages: Iterable[str]) -> str:
    """Why :func:`divided_loaders` has none."""
    readers = peer_loaders(job, stages)
    if not readers:
        return "no loader of this kind is in use"
    if any(one.strangers for one in readers):
        return "how the ranks share the data is not known"
    return "one data-parallel rank: it reads all there is"


def batches_of(loader: Loader) -> int | None:
    """Batches of an epoch, by the loader's length and the Trainer's limit; ``None`` where the loader does not say."""
    if loader.length is None or loader.limit is None:
        return loader.length
    return min(loader.length, loader.limit)


def odd_by_count(counts: Mapping[int, int]) -> tuple[int, ...]:
    """Who deviates, of ranks with so many batches each: all but the majority. Where there is none, those with more
    than the fewest: they are the ones that wait in vain for the others."""
    found = split_by(counts)
    if found.common is not None:
        return found.odd
    fewest = min(counts.values(), default=0)
    return tuple(sorted(rank for rank, count in counts.items() if count > fewest))


def split_by(values: Mapping[int, Hashable]) -> MajoritySplit:
    """:func:`doctor.analysis.stats.majority.split` for ranks with a value each."""
    groups: dict[Hashable, list[int]] = {}
    for rank, value in values.items():
        groups.setdefault(value, []).append(rank)
    return split_groups(groups)


def same_data_set(one: Loader, other: Loader) -> bool | None:
    """Whether two ranks have the same data set; ``None`` where that can't be seen from outside."""
    if one.dataset != other.dataset or one.dataset_length != other.dataset_length:
        return False
    if one.fingerprint is None or other.fingerprint is None:
        return None
    return one.fingerprint == other.fingerprint


def same_order(one: LoaderEpoch, other: LoaderEpoch, least: int = LEAST_DRAWN) -> bool | None:
    """Whether the same samples were drawn in the same order, as far as both are known; ``None`` for fewer than
    ``least`` of them."""
    if one.drawn is not None and one.drawn == other.drawn:
        return True
    common = min(len(one.first), len(other.first))
    if common >= least:
        return one.first[:common] == other.first[:common]
    return None if one.drawn is None or other.drawn is None else False


def newest_common_epoch(epochs: Mapping[int, Sequence[LoaderEpoch]]) -> dict[int, LoaderEpoch]:
    """By seat, the newest epoch of which two or more have drawn enough to be compared; of those that have."""
    known: dict[int, dict[int, LoaderEpoch]] = {}
    for seat, seen in epochs.items():
        for epoch in seen:
            if len(epoch.first) >= LEAST_DRAWN or epoch.drawn is not None:
                known.setdefault(epoch.epoch, {})[seat] = epoch
    shared = [number for number, seats in known.items() if len(seats) > 1]
    return known[max(shared)] if shared else {}


def shared_draws_by_position(epochs: Mapping[int, LoaderEpoch]) -> dict[int, float]:
    """By seat, the share of its draws that another seat drew at the same place, as far as all are known."""
    known = min((len(epoch.first) for epoch in epochs.values()), default=0)
    known = min(known, MOST_PLACES)
    if known < LEAST_DRAWN:
        return _shared({seat: (epoch.drawn,) for seat, epoch in epochs.items() if epoch.drawn is not None})
    return _shared({seat: tuple(enumerate(epoch.first[:known])) for seat, epoch in epochs.items()})


def shared_draws(epochs: Mapping[int, LoaderEpoch]) -> dict[int, float]:
    """By seat, the share of its draws that another seat drew too, wherever."""
    return _shared({seat: tuple(set(epoch.first)) for seat, epoch in epochs.items()})


def _shared(drawn: Mapping[int, Sequence[Hashable]]) -> dict[int, float]:
    owners: dict[Hashable, int] = {}
    for things in drawn.values():
        for thing in things:
            owners[thing] = owners.get(thing, 0) + 1
    return {
        seat: sum(owners[thing] > 1 for thing in things) / len(things) for seat, things in drawn.items() if len(things)
    }


def same_contents(one: LoaderEpoch, other: LoaderEpoch) -> float | None:
    """The share of the parts (tensors) of their first batches in which two epochs are alike, of those that differ
    between the batches: what never varies (masks, synthetic data) tells nobody's data from another's, and ``None`` says
    that there is nothing else."""
    batches = min(len(one.contents), len(other.contents))
    both = zip(_parts(one, batches), _parts(other, batches), strict=False)
    varying = [mine == theirs for mine, theirs in both if len(set(mine)) > 1 or len(set(theirs)) > 1]
    return sum(varying) / len(varying) if varying else None


def _parts(epoch: LoaderEpoch, batches: int) -> list[tuple[str, ...]]:
    """Each part of its first batches."""
    return list(zip(*(content.split("-") for content in epoch.contents[:batches]), strict=False))


def _is_trained_by(job: Job, *frameworks: str) -> bool:
    """Whether one of ``frameworks`` runs the loop."""
    return any(training.framework in frameworks for training, _ in job.facts(TrainingFacts))


def advice(job: Job, *, lightning: str, plain: str, transformers: str = "") -> str:
    """The words for those who use what runs this job's loop."""
    if _is_trained_by(job, "lightning", "pytorch_lightning"):
        return lightning
    return (transformers or plain) if _is_trained_by(job, "transformers") else plain


def loader_hook(stage: str) -> str:
    """Lightning's hook that makes the loaders of a stage."""
    return f"{_ARGUMENTS.get(stage, stage)}_dataloader"


def limit_argument(stage: str) -> str:
    """Lightning's argument that limits the batches of a stage."""
    return f"limit_{_ARGUMENTS.get(stage, stage)}_batches"
