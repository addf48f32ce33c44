"""DATA003: every rank reads the whole dataset."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from doctor.api import Finding, Job, Scope, Severity, Skip, Unknown, Verdict, check, ranks_in_words
from doctor.facts import LoaderFacts, Sampler, TrainingFacts, Variable
from doctor.testing import Fails, JobBuilder, Passes, in_a_loop, running, with_loader
from doctor.testing.loader_cases import drawing
from doctor_checks.data._rank_loaders import (
    TRAINING,
    PeerLoaders,
    RankLoader,
    advice,
    divided_loaders,
    newest_common_epoch,
    same_contents,
    same_order,
    why_not_divided,
)

_PLAIN = ("RandomSampler", "SequentialSampler", "SubsetRandomSampler")
"""Samplers of torch without ranks."""

_SHUFFLED = Sampler("RandomSampler", shuffle=True)


def _unparted(
    sketch: JobBuilder, fingerprint: str | None = "f1", *, sampler: Sampler = _SHUFFLED, stage: str = "train"
) -> JobBuilder:
    return with_loader(sketch, stage=stage, sampler=sampler, fingerprint=fingerprint, epochs=())


def _opaque(contents: dict[int, str]) -> JobBuilder:
    sketch = _unparted(running(), None, sampler=Sampler("SequentialSampler", shuffle=False))
    for rank, content in contents.items():
        epoch = drawing(0, range(32), contents=(f"{content}-aa", f"{content}{content}-aa"))
        sketch = with_loader(sketch, ranks=(rank,), epochs=(epoch,))
    return sketch


def _in_groups(sketch: JobBuilder) -> JobBuilder:
    return in_a_loop(with_loader(sketch, ranks=(3,), fingerprint="f2"), (0, 1), (2, 3))


@check(
    id="DATA003",
    severity=Severity.WARNING,
    scope=Scope.JOB,
    when="PR",
    needs=(LoaderFacts, TrainingFacts),
    needs_peers=True,
    cases=lambda: (
        Passes("a distributed sampler", running(hosts=2, per_host=2)),
        Passes("each rank has its own shard", with_loader(_unparted(running()), ranks=(1,), fingerprint="f2")),
        Passes("shards of different lengths", with_loader(_unparted(running()), ranks=(1,), dataset_length=7)),
        Passes(
            "samples with replacement",
            _unparted(running(), sampler=Sampler("WeightedRandomSampler", shuffle=True, independent=True)),
        ),
        Passes("a custom sampler", _unparted(running(), sampler=Sampler("ByLanguage"))),
        Passes(
            "one data-parallel rank",
            _unparted(running()).alter(TrainingFacts, data_parallel_size=1, data_parallel_rank=0),
        ),
        Passes("a custom loop, whose ranks may train separate models", in_a_loop(_unparted(running()))),
        Passes(
            "parts of a model on each group of ranks, which read the same",
            in_a_loop(with_loader(_unparted(running(1, 2)), ranks=(1,)), (0,), (1,)),
        ),
        Passes("validation that every rank runs on all data", _unparted(running(), stage="validate")),
        Passes("a stream", with_loader(running(), kind="iterable", sampler=None, fingerprint="f1")),
        Passes("opaque shards that hold different data", _opaque({0: "a", 1: "b"})),
        Fails("the same dataset, shuffled by each rank", _unparted(running(2, 2)), ranks=(0, 1, 2, 3)),
        Fails(
            "use_distributed_sampler=False",
            _unparted(running()).alter(
                TrainingFacts, arguments=(Variable("use_distributed_sampler", "False"), Variable("max_epochs", "3"))
            ),
            ranks=(0, 1),
        ),
        Fails("in one of two groups", _in_groups(_unparted(running(1, 4))), ranks=(0, 1)),
        Fails(
            "two of three ranks have the same files",
            with_loader(_unparted(running(1, 3)), ranks=(0,), fingerprint="f0"),
            ranks=(1, 2),
        ),
        Fails(
            "a plain loop, in order",
            _unparted(running(), sampler=Sampler("SequentialSampler", shuffle=False)).alter(
                TrainingFacts, framework="plain"
            ),
            ranks=(0, 1),
        ),
        Fails("an opaque dataset that yields the same batches", _opaque({0: "a", 1: "a"}), ranks=(0, 1)),
    ),
)
def sampler_not_distributed(job: Job) -> Iterator[Verdict]:
    """Ask whether the training dataset is divided among the ranks.

    Why it hurts: an epoch covers each sample once per rank and takes as long as on one rank, so more ranks do not
    shorten it.
    Fix: Pass a `DistributedSampler` to the DataLoader.
    """
    loaders = divided_loaders(job, TRAINING)
    if not loaders:
        yield Skip(why_not_divided(job, TRAINING))
    for readers in loaders:
        whole = {data_rank: reader for data_rank, reader in readers.data_ranks.items() if _reads_all(reader)}
        groups: dict[Hashable, list[tuple[int, RankLoader]]] = {}
        for data_rank, reader in whole.items():
            loader = reader.loader
            groups.setdefault((loader.dataset, loader.dataset_length, loader.fingerprint), []).append(
                (data_rank, reader)
            )
        for group in [group for group in groups.values() if len(group) > 1]:
            epochs = newest_common_epoch({data_rank: reader.loader.epochs for data_rank, reader in group})
            known = list(epochs.values())
            compared = [(same_order(known[0], other), same_contents(known[0], other)) for other in known[1:]]
            is_same = any(order and contents == 1.0 for order, contents in compared)
            if group[0][1].loader.fingerprint is not None or is_same:
                yield _finding(job, readers, [data_rank for data_rank, _ in group])
            # Equal indices that gave different samples on all ranks are of shards.
            elif not compared or not all(order and contents == 0.0 for order, contents in compared):
                ranks = readers.at(data_rank for data_rank, _ in group)
                yield Unknown(
                    "no distributed sampler; whether the datasets of the ranks differ could not be determined", ranks
                )


def _reads_all(reader: RankLoader) -> bool:
    sampler = reader.loader.sampler
    return (
        sampler is not None
        and reader.loader.kind == "map"
        and not sampler.distributed
        and not sampler.independent
        and sampler.name in _PLAIN
    )


def _plain_fix(training: TrainingFacts, ranks: tuple[int, ...]) -> str:
    """``DistributedSampler`` divides by all ranks of the job unless it is given the group's size and rank."""
    size, sampler, more = training.data_parallel_size, "a `DistributedSampler`", ""
    if size is not None and size < training.world_size:
        sampler = f"`DistributedSampler(dataset, num_replicas={size}, rank=torch.distributed.get_rank(group))`"
        more = f", with the process group of {ranks_in_words(ranks)}"
    return f"Pass {sampler} to the DataLoader{more}, and call its `set_epoch` at the start of each epoch."


def _finding(job: Job, readers: PeerLoaders, data_ranks: list[int]) -> Finding:
    ranks = readers.at(data_ranks)
    loader = readers.data_ranks[data_ranks[0]].loader
    sampler = loader.sampler.name if loader.sampler else ""
    disabled = any(facts.argument("use_distributed_sampler") == "False" for facts, _ in job.facts(TrainingFacts))
    lightning = (
        "Remove `use_distributed_sampler=False` from the Trainer, or pass a `DistributedSampler` to the DataLoader in "
        "`train_dataloader`."
        if disabled
        else "Return a DataLoader without a sampler from `train_dataloader`, so that the Trainer adds a "
        "`DistributedSampler`."
    )
    return Finding(
        f"{ranks_in_words(ranks)} each read the whole dataset{f' {loader.dataset}' if loader.dataset else ''} "
        f"({sampler}, not distributed)",
        ranks=ranks,
        evidence={
            "shuffle": loader.sampler.shuffle if loader.sampler else None,
            "samples": loader.dataset_length,
            "fingerprint": loader.fingerprint,
            "use_distributed_sampler": not disabled if disabled else None,
        },
        effect="Apart from random augmentation and dropout, these ranks compute the same gradient, and an epoch takes "
        "as long as on one rank."
        if loader.sampler is not None and loader.sampler.shuffle is False
        else "",
        fix=advice(
            job,
            lightning=lightning,
            transformers="Let `Trainer.get_train_dataloader` create the loader, or pass your own to "
            "`self.accelerator.prepare(loader)` in it.",
            plain=_plain_fix(readers.data_ranks[data_ranks[0]].training, ranks),
        ),
        explains=("DATA005",),
    )
