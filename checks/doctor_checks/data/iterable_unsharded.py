"""DATA008: an iterable dataset yields the same stream on several ranks or workers."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping

from doctor.api import Finding, Job, Scope, Severity, Skip, Unknown, Verdict, check, ranks_in_words
from doctor.facts import Loader, LoaderEpoch, LoaderFacts, TrainingFacts
from doctor.testing import Fails, JobBuilder, Passes, in_a_loop, running, with_loader
from doctor_checks.data._rank_loaders import (
    EVALUATION,
    TRAINING,
    PeerLoaders,
    RankLoader,
    advice,
    peer_loaders,
)


def _streams(
    streams: Mapping[int, str], *, workers: int = 0, stage: str = "train", sharded: bool | None = None
) -> JobBuilder:
    sketch = running(1, len(streams))
    for rank, letters in streams.items():
        contents = tuple(f"x{letter}-mask" for letter in letters)
        sketch = with_loader(
            sketch,
            ranks=(rank,),
            stage=stage,
            kind="iterable",
            dataset="Lines",
            sampler=None,
            workers=workers,
            sharded=sharded,
            epochs=(LoaderEpoch(0, contents=contents, batches=len(contents)),),
        )
    return sketch


@check(
    id="DATA008",
    severity=Severity.WARNING,
    scope=Scope.JOB,
    when="R",
    needs=(LoaderFacts,),
    compares_ranks=False,
    impacts={
        r"workers each read": "Each worker yields every sample, so an epoch contains every sample once per worker.",
        r"validation|test loader|predict": (
            "Every rank reads every sample, so the evaluation counts each sample once per rank and takes as long "
            "as on one rank."
        ),
        r"^Ranks": (
            "Every rank reads every sample: the ranks compute the same gradient, and an epoch takes as long as on one "
            "rank."
        ),
    },
    cases=lambda: (
        Passes("each rank has its own shard of the stream", _streams({0: "aceg", 1: "bdfh"})),
        Passes("map-style data", running(hosts=2, per_host=2)),
        Passes("data that never varies", _streams({0: "aaaa", 1: "aaaa"})),
        Passes("one batch, too little to decide", _streams({0: "a", 1: "a"})),
        Passes(
            "ranks of one replica read the same",
            _streams({0: "abcd", 1: "abcd"}).alter(TrainingFacts, data_parallel_rank=0, data_parallel_size=1),
        ),
        Passes("two workers, each with its own shard", _streams({0: "abcd", 1: "efgh"}, workers=2)),
        Passes("two workers over data that never varies", _streams({0: "aaaa", 1: "bbbb"}, workers=2)),
        Passes("one worker on each rank", _streams({0: "aabb", 1: "ccdd"}, workers=1)),
        Passes(
            "a validation that every rank runs on all data",
            _streams({0: "ab", 1: "ab"}, stage="validate"),
            silent=False,
        ),
        Passes("not sharded by the dataset, but different", _streams({0: "ab", 1: "cd"}, sharded=False)),
        Passes(
            "ranks that hold parts of one model and read the same",
            in_a_loop(_streams({0: "abcd", 1: "abcd"}), (0,), (1,)),
        ),
        Fails("two ranks", _streams({0: "abcd", 1: "abcd"}), ranks=(0, 1)),
        Fails("one rank is ahead", _streams({0: "ab", 1: "abcd"}), ranks=(0, 1)),
        Fails("two of three ranks", _streams({0: "abcd", 1: "efgh", 2: "efgh"}), ranks=(1, 2)),
        Fails("two workers of each rank", _streams({0: "aabb", 1: "ccdd"}, workers=2), ranks=(0, 1)),
        Fails(
            "an unsplit stream of Hugging Face, before the first batch",
            with_loader(_streams({0: "", 1: ""}, sharded=False), fingerprint="f", epochs=()),
            ranks=(0, 1),
        ),
        Fails("in a plain loop", _streams({0: "ab", 1: "ab"}).alter(TrainingFacts, framework="plain"), ranks=(0, 1)),
    ),
)
def iterable_unsharded(job: Job) -> Iterator[Verdict]:
    """Ask whether every data-parallel rank and every worker reads its own shard of a stream.

    Why it hurts: every rank or worker reads every sample. Ranks then compute the same gradient, an epoch takes several
    times as long, and evaluations count each sample several times.
    Fix: Shard the stream in `__iter__` by rank and by `get_worker_info()`.
    """
    loaders = [
        readers for readers in peer_loaders(job, (*TRAINING, *EVALUATION)) if any(map(_streams_data, readers.members))
    ]
    if not loaders:
        yield Skip("no iterable dataset is in use")
    for readers in loaders:
        for group in readers.by_group():
            yield from _across(job, group)
        twice = [reader for reader in readers.members if _streams_data(reader) and _is_read_by_each_worker(reader)]
        if twice:
            ranks, loader = tuple(reader.rank for reader in twice), twice[0].loader
            yield Finding(
                f"{loader.workers} DataLoader workers each read the whole stream of {_named(loader)} ({readers.name})",
                ranks=ranks,
                evidence={
                    "contents": next(list(epoch.contents[:5]) for epoch in loader.epochs if epoch.contents),
                },
                fix=f"Divide the stream among the workers in `{loader.dataset or 'the dataset'}.__iter__`, using `id` "
                "and `num_workers` of `torch.utils.data.get_worker_info()`.",
                severity=Severity.WARNING if readers.stage in TRAINING else Severity.INFO,
            )


def _across(job: Job, readers: PeerLoaders) -> Iterator[Verdict]:
    data_ranks = {data_rank: reader for data_rank, reader in readers.data_ranks.items() if _streams_data(reader)}
    for same, epoch in _same(data_ranks):
        ranks, loader = readers.at(same), readers.data_ranks[same[0]].loader
        own = (
            f"Divide the stream among ranks and workers in `{loader.dataset or 'the dataset'}.__iter__`."
            if loader.sharded is not False
            else "Divide the stream with `datasets.distributed.split_dataset_by_node`, which takes the dataset, the "
            "rank and the world size."
        )
        yield Finding(
            f"{ranks_in_words(ranks)} read the same stream of {_named(loader)} ({readers.name})",
            ranks=ranks,
            evidence={
                "sharded": loader.sharded,
                "contents": list(epoch.contents[:4]) if epoch else None,
                "epoch": epoch.epoch if epoch else None,
            },
            fix=advice(
                job,
                lightning=own,
                transformers="Keep `dispatch_batches` in `accelerator_config` at its default, or divide the stream "
                "with `datasets.distributed.split_dataset_by_node`.",
                plain=own,
            ),
            severity=Severity.WARNING if readers.stage in TRAINING else Severity.INFO,
            confidence=1.0 if epoch else 0.7,
        )
    if unknown := tuple(reader.rank for reader in data_ranks.values() if len(data_ranks) > 1 and not _tells(reader)):
        yield Unknown("fewer than two batches were observed, or they have no comparable content", unknown)


def _named(loader: Loader) -> str:
    return f"the dataset {loader.dataset}" if loader.dataset else f"{loader.loader}"


def _streams_data(reader: RankLoader) -> bool:
    return reader.loader.kind in ("iterable", "other")


def _tells(reader: RankLoader) -> bool:
    return any(len(epoch.contents) > 1 for epoch in reader.loader.epochs)


def _same(data_ranks: Mapping[int, RankLoader]) -> Iterator[tuple[tuple[int, ...], LoaderEpoch | None]]:
    """Data-parallel ranks whose first batches are equal one by one and vary, with the epoch that shows it.

    Before any batch, ranks with equal datasets that nothing shards, without an epoch."""
    counted = {data_rank: reader for data_rank, reader in data_ranks.items() if _tells(reader)}
    if len(counted) < 2:
        data_sets = {
            data_rank: (one.loader.dataset, one.loader.fingerprint)
            for data_rank, one in data_ranks.items()
            if one.loader.sharded is False and not one.loader.epochs and one.loader.fingerprint is not None
        }
        yield from ((group, None) for group in _grouped(data_sets))
        return
    shared = set.intersection(*({epoch.epoch for epoch in one.loader.epochs} for one in counted.values()))
    for number in sorted(shared, reverse=True)[:1]:
        epochs = {
            data_rank: next(epoch for epoch in one.loader.epochs if epoch.epoch == number)
            for data_rank, one in counted.items()
        }
        batches = min(len(epoch.contents) for epoch in epochs.values())
        first = {data_rank: epoch.contents[:batches] for data_rank, epoch in epochs.items()}
        keys = {data_rank: contents if len(set(contents)) > 1 else None for data_rank, contents in first.items()}
        yield from ((group, epochs[group[0]]) for group in _grouped(keys))


def _grouped(keys: Mapping[int, Hashable]) -> list[tuple[int, ...]]:
    groups: dict[Hashable, list[int]] = {}
    for data_rank, key in keys.items():
        if key is not None:
            groups.setdefault(key, []).append(data_rank)
    return [tuple(group) for group in groups.values() if len(group) > 1]


def _is_read_by_each_worker(reader: RankLoader) -> bool:
    """Workers take turns: as many consecutive batches are equal as there are workers, and the next differs."""
    workers = reader.loader.workers or 0
    return workers > 1 and any(
        len(epoch.contents) > workers
        and len(set(epoch.contents[:workers])) == 1
        and epoch.contents[workers] != epoch.contents[0]
        for epoch in reader.loader.epochs
    )
