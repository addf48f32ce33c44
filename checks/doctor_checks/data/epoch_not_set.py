"""DATA006: every epoch uses the same shuffle order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from doctor.analysis.stats.rank_roles import uses_lightning
from doctor.api import Finding, Job, Scope, Severity, Skip, Verdict, check, merge, ranks_in_words
from doctor.facts import LoaderEpoch, LoaderFacts, Sampler, TrainingFacts
from doctor.testing import Fails, JobBuilder, Passes, running, with_loader, with_sampler
from doctor.testing.loader_cases import drawing
from doctor_checks.data._rank_loaders import (
    LEAST_DRAWN,
    TRAINING,
    PeerLoaders,
    RankLoader,
    advice,
    peer_loaders,
    same_order,
    sampler_in_words,
    why_no_draws,
)

_SHUFFLED = (40, 7, 93, 12, 66, 5, 81, 30, 54, 19)
_OTHERWISE = (12, 93, 5, 40, 30, 7, 54, 66, 19, 81)


def _drawn(
    *orders: Iterable[int], ranks: tuple[int, ...] | None = None, sketch: JobBuilder | None = None
) -> JobBuilder:
    epochs = tuple(drawing(number, order) for number, order in enumerate(orders))
    return with_loader(sketch or running(), ranks=ranks, epochs=epochs)


@check(
    id="DATA006",
    severity=Severity.WARNING,
    scope=Scope.JOB,
    when="R",
    needs=(LoaderFacts,),
    compares_ranks=False,
    cases=lambda: (
        Passes("a different order in each epoch", running(hosts=2, per_host=2)),
        Passes("known orders that differ", _drawn(_SHUFFLED, _OTHERWISE)),
        Passes("the first epoch", _drawn(_SHUFFLED)),
        Passes("shuffle is off", with_sampler(_drawn(range(9), range(9)), shuffle=False)),
        Passes("in order, by a custom sampler", with_sampler(_drawn(range(9), range(9)), shuffle=None)),
        Passes(
            "by length, without a seed",
            with_loader(_drawn(_SHUFFLED, _SHUFFLED), sampler=Sampler("ByLength", True, 2, 0)),
        ),
        Passes("too few samples to decide", _drawn(_SHUFFLED[:3], _SHUFFLED[:3])),
        Fails("set_epoch is missing", _drawn(_SHUFFLED, _SHUFFLED), ranks=(0, 1)),
        Fails("on one rank", with_sampler(_drawn(_SHUFFLED, _SHUFFLED, ranks=(1,)), epoch=0), ranks=(1,)),
        Fails(
            "an epoch that the order of a custom sampler does not use",
            with_sampler(_drawn(_SHUFFLED, _SHUFFLED), name="Chunks"),
            ranks=(0, 1),
        ),
        Fails(
            "by hashes, in a plain loop",
            with_loader(
                running().alter(TrainingFacts, framework="plain"),
                epochs=(LoaderEpoch(3, drawn="256:aa"), LoaderEpoch(4, drawn="256:aa")),
            ),
            ranks=(0, 1),
        ),
        Fails(
            "a custom sampler with a seed",
            with_sampler(_drawn(_SHUFFLED, _SHUFFLED), name="Part", shuffle=None, seed=0, epoch=None),
            ranks=(0, 1),
        ),
        Fails(
            "a generator created again with the same seed",
            with_loader(
                _drawn(_SHUFFLED, _SHUFFLED, sketch=running(1, 1)),
                sampler=Sampler("RandomSampler", shuffle=True, generator_seed=7),
            ),
            ranks=(0,),
        ),
    ),
)
def epoch_not_set(job: Job) -> Iterator[Verdict]:
    """Ask whether each epoch uses a new shuffle order.

    Why it hurts: every epoch has the same batches in the same order, so the model may generalize worse. No error is
    raised.
    Fix: Call `sampler.set_epoch(epoch)` before each epoch.
    """
    loaders = [readers for readers in peer_loaders(job, TRAINING) if any(map(_may_shuffle, readers.members))]
    if not loaders:
        yield Skip("no map-style dataset is shuffled")
    compared = False
    for readers in loaders:
        pairs = [(reader, pair) for reader in readers.members if (pair := _newest_two(reader))]
        compared |= bool(pairs)
        found = merge(
            _finding(job, readers, reader, *pair)
            for reader, pair in pairs
            if _may_shuffle(reader) and same_order(*pair) and _is_shuffled(reader.loader.sampler, pair[1])
        )
        yield from (_with_ranks(one, readers) for one in found)
    if loaders and not compared:
        yield from why_no_draws(job, "fewer than two epochs have been drawn")


def _may_shuffle(reader: RankLoader) -> bool:
    sampler = reader.loader.sampler
    return reader.loader.kind == "map" and sampler is not None and sampler.shuffle is not False


def _newest_two(reader: RankLoader) -> tuple[LoaderEpoch, LoaderEpoch] | None:
    known = [one for one in reader.loader.epochs if one.drawn is not None or len(one.first) >= LEAST_DRAWN]
    return (known[-2], known[-1]) if len(known) > 1 and known[-2].epoch != known[-1].epoch else None


def _is_shuffled(sampler: Sampler | None, epoch: LoaderEpoch) -> bool:
    """An unknown sampler shuffles if it has a seed and draws in no sorted order."""
    if sampler is None or sampler.shuffle is not None:
        return sampler is not None and sampler.shuffle is True
    has_seed = sampler.seed is not None or sampler.generator_seed is not None
    return has_seed and list(epoch.first) != sorted(epoch.first)


def _finding(job: Job, readers: PeerLoaders, reader: RankLoader, first: LoaderEpoch, second: LoaderEpoch) -> Finding:
    sampler = reader.loader.sampler
    assert sampler is not None
    return Finding(
        f"{sampler_in_words(sampler.name)} of the {readers.name} uses the same order in epochs {first.epoch} and "
        f"{second.epoch}",
        ranks=(reader.rank,),
        evidence={
            "first_indices": list(second.first[:8]),
            "epoch_of_sampler": sampler.epoch,
            "seed": sampler.seed if sampler.seed is not None else sampler.generator_seed,
        },
        fix=_fix(job, sampler, second),
    )


def _with_ranks(finding: Finding, readers: PeerLoaders) -> Finding:
    """Name the ranks if the others shuffle."""
    if len(finding.ranks) == len(readers.members):
        return finding
    return msgspec.structs.replace(finding, summary=f"{finding.summary} on {ranks_in_words(finding.ranks, 4)}")


def _fix(job: Job, sampler: Sampler, epoch: LoaderEpoch) -> str:
    if sampler.epoch is not None and sampler.epoch == epoch.epoch and sampler.name != "DistributedSampler":
        return f"Make the order of `{sampler.name}.__iter__` depend on `self.epoch`."
    if not sampler.distributed and sampler.generator_seed is not None:
        return "Create the generator once, not in each epoch, so that its state advances from epoch to epoch."
    if not sampler.distributed and sampler.name in ("RandomSampler", "SubsetRandomSampler"):
        return "Call `torch.manual_seed` once, not in each epoch."
    if sampler.epoch is None:
        called = "the Trainer calls it" if uses_lightning(job) else "call it before each epoch"
        return f"Define `set_epoch(epoch)` in `{sampler.name}` and make its order depend on the epoch; {called}."
    return advice(
        job,
        lightning="Call `set_epoch(self.current_epoch)` of the sampler in `on_train_epoch_start`, because the Trainer "
        "calls it only on `loader.sampler` and `loader.batch_sampler.sampler`.",
        transformers="Define `set_epoch(epoch)` in the sampler of `_get_train_sampler`: the Trainer calls it through "
        "accelerate's loader.",
        plain="Call `sampler.set_epoch(epoch)` before each epoch.",
    )
