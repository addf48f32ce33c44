"""DATA005: ranks draw the same samples in the same step."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

import msgspec

from doctor.api import Finding, Job, Scope, Severity, Skip, Unknown, Verdict, check, ranks_in_words
from doctor.facts import LoaderEpoch, LoaderFacts, TrainingFacts
from doctor.testing import Fails, JobBuilder, Passes, in_a_loop, running, with_loader, with_sampler
from doctor.testing.loader_cases import drawing
from doctor_checks.data._rank_loaders import (
    TRAINING,
    PeerLoaders,
    RankLoader,
    advice,
    divided_loaders,
    newest_common_epoch,
    same_contents,
    same_data_set,
    shared_draws_by_position,
    why_no_draws,
)


class _Drawn(msgspec.Struct, frozen=True):
    data_rank: int
    reader: RankLoader
    epoch: LoaderEpoch


def _of(parts: dict[int, int], fingerprint: str | None = "f", labels: str = "ab", world: int = 3) -> JobBuilder:
    """Ranks that draw every third sample, starting at ``parts`` instead of their own rank."""
    sketch = running(1, world)
    for rank in range(world):
        part = parts.get(rank, rank)
        contents = tuple(f"x{label}{part}-y{label}{part}" for label in labels)
        epoch = drawing(1, range(part, 192, 3), contents=contents)
        sketch = with_loader(sketch, ranks=(rank,), epochs=(epoch,), fingerprint=fingerprint)
    return sketch


def _shards(contents: dict[int, tuple[str, ...]], fingerprint: str | None = None) -> JobBuilder:
    sketch = running(1, 2)
    for rank, batches in contents.items():
        epoch = drawing(1, range(64), contents=batches)
        sketch = with_loader(sketch, ranks=(rank,), epochs=(epoch,), fingerprint=fingerprint)
    return sketch


@check(
    id="DATA005",
    severity=Severity.ERROR,
    scope=Scope.JOB,
    when="R",
    needs=(LoaderFacts, TrainingFacts),
    needs_peers=True,
    cases=lambda: (
        Passes("every rank has its own shard", _of({})),
        Passes("the order is unknown", running(hosts=2, per_host=2)),
        Passes("each rank has its own dataset, read in order", _shards({0: ("a-l", "b-m"), 1: ("c-n", "d-o")})),
        Passes(
            "shards known to differ",
            with_loader(_shards({0: (), 1: ()}, "f0"), ranks=(1,), fingerprint="f1"),
        ),
        Passes("constant data, whose shards cannot be distinguished", _shards({0: ("a", "a"), 1: ("a", "a")})),
        Passes(
            "the same samples on purpose, each augmented", with_sampler(_of({1: 0}), name="RASampler", repeats=True)
        ),
        Passes("ranks of one replica", _of({1: 0}).alter(TrainingFacts, ranks=(1,), data_parallel_rank=0)),
        Passes("a custom loop, whose ranks may hold parts of one model", in_a_loop(_of({1: 0, 2: 0}))),
        Passes(
            "two parts of a model, each replicated, which read the same",
            in_a_loop(_of({1: 0, 2: 1, 3: 1}, world=4), (0, 2), (1, 3)),
        ),
        Passes(
            "the same in different epochs",
            with_loader(_of({}), ranks=(1,), epochs=lambda old: (drawing(0, range(0, 192, 3)), *old)),
        ),
        Fails("two of three ranks read the same shard", _of({2: 1}), ranks=(1, 2)),
        Fails("within one of two groups", in_a_loop(_of({2: 0, 3: 0}, world=4), (0, 1), (2, 3)), ranks=(2, 3)),
        Fails("all ranks read the same shard", _of({1: 0, 2: 0}), ranks=(0, 1, 2)),
        Fails("batches are unknown, the dataset is known", _of({2: 1}, labels=""), ranks=(1, 2)),
        Fails(
            "random augmentation, and the same labels",
            _shards({0: ("a-l", "b-m"), 1: ("c-l", "d-m")}, "f"),
            ranks=(0, 1),
        ),
        Fails(
            "the dataset cannot be compared, the batches are the same",
            _shards({0: ("a-l", "b-m"), 1: ("a-l", "b-m")}),
            ranks=(0, 1),
        ),
        Fails(
            "most places, in a plain loop",
            with_loader(
                _of({}).alter(TrainingFacts, framework="plain"),
                ranks=(2,),
                epochs=(drawing(1, (*range(1, 145, 3), *range(3000, 3016))),),
            ),
            ranks=(1, 2),
        ),
    ),
)
def shards_overlap(job: Job, *, same_share: float = 0.5) -> Iterator[Verdict]:
    """Ask whether two data-parallel ranks draw the same samples in the same step.

    Why it hurts: these ranks compute the same gradient, so the effective batch size is smaller than configured. Some
    samples are read several times, others never.
    Fix: Divide the samples among the data-parallel ranks, with each rank's own `rank` in its sampler.
    """
    loaders = [readers for readers in divided_loaders(job, TRAINING) if any(map(_can_tell, readers.members))]
    if not loaders:
        yield Skip("no map-style dataset is divided among ranks")
    for readers in loaders:
        data_ranks = {data_rank: reader for data_rank, reader in readers.data_ranks.items() if _can_tell(reader)}
        epochs = newest_common_epoch({data_rank: reader.loader.epochs for data_rank, reader in data_ranks.items()})
        drawn = [_Drawn(data_rank, data_ranks[data_rank], epoch) for data_rank, epoch in sorted(epochs.items())]
        if not drawn:
            yield from why_no_draws(job, "two ranks have not drawn enough samples of an epoch yet")
            continue
        same, unclear = _pair_up(drawn, same_share)
        for group in same:
            yield _finding(job, readers, group)
        if unclear:
            yield Unknown(
                "ranks draw the same indices; whether these are the same samples is unknown (separate shards or random "
                "augmentation)",
                readers.at(one.data_rank for one in unclear),
            )


def _can_tell(reader: RankLoader) -> bool:
    sampler = reader.loader.sampler
    return reader.loader.kind == "map" and sampler is not None and not sampler.repeats


def _pair_up(drawn: list[_Drawn], same_share: float) -> tuple[list[list[_Drawn]], list[_Drawn]]:
    """Ranks that share draws at equal positions, in groups, and ranks for which that is unknown."""
    shares = shared_draws_by_position({one.data_rank: one.epoch for one in drawn})
    suspects = [one for one in drawn if shares.get(one.data_rank, 0.0) >= same_share]
    batches = min((len(one.epoch.contents) for one in suspects), default=0)
    groups: list[list[_Drawn]] = []
    alone: list[_Drawn] = []
    unclear: list[_Drawn] = []
    # Ranks with equal order and, as far as known, equal data. Within a bucket each rank is compared with the first one
    # only, which keeps the check linear.
    places = min((len(one.epoch.first) for one in suspects), default=0)
    buckets: dict[Hashable, list[_Drawn]] = {}
    for one in suspects:
        loader, epoch = one.reader.loader, one.epoch
        seen = loader.fingerprint or ("", *epoch.contents[:batches])
        order = epoch.first[:places] or epoch.drawn
        buckets.setdefault((order, loader.dataset, loader.dataset_length, seen), []).append(one)
    for bucket in buckets.values():
        verdicts = {one.data_rank: _read_the_same(bucket[0], one, same_share) for one in bucket[1:]}
        same = [bucket[0], *(one for one in bucket[1:] if verdicts[one.data_rank])]
        loose = [one for one in bucket[1:] if verdicts[one.data_rank] is None]
        unclear += [bucket[0], *loose] if loose and len(same) == 1 else loose
        groups += [same] if len(same) > 1 else []
        alone += bucket if len(bucket) == 1 else []
    # Add ranks whose order is partly that of another, compared with the first of `most` groups.
    for one in alone:
        near = next((group for group in groups[:32] if _read_the_same(group[0], one, same_share)), None)
        if near is not None:
            near.append(one)
        else:
            groups.append([one])
    return [group for group in groups if len(group) > 1], unclear


def _read_the_same(one: _Drawn, other: _Drawn, same_share: float) -> bool | None:
    """``None`` if unknown: the data never varies, or varies at random."""
    if shared_draws_by_position({0: one.epoch, 1: other.epoch}).get(0, 0.0) < same_share:
        return False
    data_sets = same_data_set(one.reader.loader, other.reader.loader)
    contents = same_contents(one.epoch, other.epoch)
    if data_sets is False:
        return False
    if data_sets is None:
        return None if contents is None or 0.0 < contents < 1.0 else contents == 1.0
    return True if contents is None or contents > 0.0 else None


def _finding(job: Job, readers: PeerLoaders, group: list[_Drawn]) -> Finding:
    ranks = readers.at(one.data_rank for one in group)
    share = shared_draws_by_position({one.data_rank: one.epoch for one in group})
    first = group[0]
    sampler = first.reader.loader.sampler
    assert sampler is not None
    return Finding(
        f"{ranks_in_words(ranks)} draw the same samples in the same steps of epoch {first.epoch.epoch}",
        ranks=ranks,
        evidence={
            "share_of_places": round(min(share.values()), 3),
            "first_indices": {str(one.reader.rank): list(one.epoch.first[:8]) for one in group[:4]},
            "contents_alike": same_contents(first.epoch, group[1].epoch),
            "sampler": sampler.name,
            "num_replicas": sampler.replicas,
            "seed": sampler.seed,
        },
        fix=advice(
            job,
            lightning="Return a DataLoader without a sampler from `train_dataloader`, or create the sampler in that "
            "hook with `rank=self.trainer.global_rank` and `num_replicas=self.trainer.world_size`.",
            transformers="Let the Trainer create the loader; a custom sampler in `_get_train_sampler` must return the "
            "same order on all ranks, which accelerate then divides.",
            plain="Create the `DistributedSampler` after `init_process_group`, or divide the data by "
            "`torch.distributed.get_rank()` in a custom sampler.",
        ),
    )
