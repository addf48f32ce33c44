"""DATA011: ranks use different seeds to shuffle one dataset or to initialize parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from doctor.analysis.stats.majority import split_values
from doctor.api import (
    Finding,
    Job,
    MajoritySplit,
    Scope,
    Severity,
    Skip,
    Verdict,
    check,
    correlates,
    describe,
    ranks_in_words,
)
from doctor.facts import LoaderFacts, ModelFacts, Sampler, TrainingFacts
from doctor.testing import Fails, JobBuilder, Passes, running, with_loader, with_sampler
from doctor.testing.loader_cases import drawing
from doctor_checks.data._rank_loaders import (
    TRAINING,
    PeerLoaders,
    RankLoader,
    advice,
    divided_loaders,
    newest_common_epoch,
    same_data_set,
    sampler_in_words,
    shared_draws,
    why_not_divided,
)

_RANDOM = ("RandomSampler", "SubsetRandomSampler", "SeedableRandomSampler")


def _wrapped(sketch: JobBuilder) -> JobBuilder:
    return with_sampler(sketch, name="DistributedSamplerWrapper", inner="SubsetRandomSampler")


def _unlike_models(sketch: JobBuilder, *, broadcast: bool) -> JobBuilder:
    sketch = sketch.alter(ModelFacts, broadcast=broadcast, initial="1f")
    return sketch.alter(ModelFacts, ranks=(1,), initial="2e")


@check(
    id="DATA011",
    severity=Severity.INFO,
    scope=Scope.JOB,
    when="R",
    needs=(LoaderFacts, TrainingFacts),
    needs_peers=True,
    impacts={
        r"Initial parameters": (
            "Replicas that start with different parameters stay different although gradients are averaged, so the "
            "ranks train different models."
        ),
        r"seed|random state": (
            "The ranks shuffle differently, so some samples are drawn by several ranks and others by none."
        ),
    },
    cases=lambda: (
        Passes("one seed for all samplers", running(hosts=2, per_host=2)),
        Passes("a different global seed on each rank", running().alter(TrainingFacts, ranks=(1,), seed=8)),
        Passes("shuffle is off", with_sampler(with_sampler(running(), shuffle=False), ranks=(1,), seed=8)),
        Passes(
            "each rank shuffles its own dataset",
            with_loader(
                with_loader(with_sampler(running(), ranks=(1,), seed=8), fingerprint="f0"), ranks=(1,), fingerprint="f1"
            ),
        ),
        Passes(
            "no distributed sampler, a separate generator on each rank",
            with_loader(
                with_loader(running(), sampler=Sampler("RandomSampler", shuffle=True, generator_seed=1)),
                ranks=(1,),
                sampler=Sampler("RandomSampler", shuffle=True, generator_seed=2),
            ),
        ),
        Passes("a wrapped sampler, and one global seed", _wrapped(running())),
        Passes("the same Subset on all ranks", with_loader(running(1, 3), part="p")),
        Passes(
            "another Subset on each rank, which no sampler divides",
            with_loader(
                with_loader(running(), part="p", sampler=Sampler("RandomSampler", shuffle=True)), ranks=(1,), part="q"
            ),
        ),
        Fails(
            "a random split with another seed on one rank",
            with_loader(with_loader(running(1, 3), part="p"), ranks=(2,), part="q"),
            ranks=(2,),
            severity=Severity.ERROR,
        ),
        Passes("the wrapper synchronizes the replicas", _unlike_models(running(), broadcast=True)),
        Passes(
            "two parts of a model, each on other data-parallel ranks",
            running(1, 4)
            .alter(TrainingFacts, ranks=(0, 2), data_parallel_root=0, data_parallel_size=2)
            .alter(TrainingFacts, ranks=(1, 3), data_parallel_root=1, data_parallel_size=2)
            .alter(ModelFacts, ranks=(0, 2), broadcast=False, initial="1f")
            .alter(ModelFacts, ranks=(1, 3), broadcast=False, initial="2e"),
        ),
        Fails(
            "the sampler of one rank has a different seed",
            with_sampler(running(1, 3), ranks=(2,), seed=7),
            ranks=(2,),
            severity=Severity.ERROR,
        ),
        Fails(
            "seed_everything(rank), which the Trainer's samplers use",
            with_sampler(running(), ranks=(1,), seed=1)
            .alter(TrainingFacts, ranks=(0,), seed=0)
            .alter(TrainingFacts, ranks=(1,), seed=1),
            ranks=(0, 1),
            severity=Severity.ERROR,
        ),
        Fails(
            "a wrapped sampler that draws from a different random state on each rank",
            _wrapped(running(1, 3)).alter(TrainingFacts, ranks=(1,), seed=8),
            ranks=(1,),
            severity=Severity.ERROR,
        ),
        Fails(
            "a wrapped sampler without any seed, whose shards overlap",
            with_loader(
                with_loader(_wrapped(running()).alter(TrainingFacts, seed=None), epochs=(drawing(0, range(0, 64, 2)),)),
                ranks=(1,),
                epochs=(drawing(0, range(64, 0, -2)),),
            ),
            ranks=(0, 1),
            severity=Severity.ERROR,
        ),
        Fails(
            "one seed, and another epoch on one rank",
            with_loader(
                with_loader(running(1, 3), epochs=(drawing(0, range(0, 64, 2), sampler_epoch=4),)),
                ranks=(1,),
                epochs=(drawing(0, range(1, 64, 2), sampler_epoch=3),),
            ),
            ranks=(1,),
            severity=Severity.ERROR,
        ),
        Passes(
            "a rank that has begun the next epoch",
            with_loader(
                with_loader(running(1, 3), epochs=(drawing(0, range(0, 64, 2), sampler_epoch=0),)),
                ranks=(1,),
                epochs=(
                    drawing(0, range(1, 64, 2), sampler_epoch=0),
                    drawing(1, range(0, 64, 3), sampler_epoch=1),
                ),
            ),
        ),
        Passes(
            "another epoch on one rank, whose sampler does not shuffle",
            with_loader(
                with_loader(
                    with_sampler(running(1, 3), shuffle=False), epochs=(drawing(0, range(0, 64, 2), sampler_epoch=4),)
                ),
                ranks=(1,),
                epochs=(drawing(0, range(1, 64, 2), sampler_epoch=3),),
            ),
        ),
        Fails(
            "a custom sampler with a seed, in a plain loop",
            with_sampler(with_sampler(running(1, 3), name="Bucketed", shuffle=None), ranks=(0,), seed=3).alter(
                TrainingFacts, framework="plain"
            ),
            ranks=(0,),
        ),
        Fails(
            "replicas that start with different parameters and are never synchronized",
            _unlike_models(running(1, 3), broadcast=False),
            ranks=(1,),
            severity=Severity.ERROR,
        ),
    ),
)
def seeds_unfit(job: Job, *, overlap: float = 0.1) -> Iterator[Verdict]:
    """Ask whether ranks that share a dataset shuffle it in the same order, and replicas start with equal parameters.

    Why it hurts: each rank selects its samples from a different order, so some samples are drawn by several ranks and
    others by none. Replicas that start with different parameters stay different, although gradients are averaged.
    Fix: Use the same seed for the samplers of all ranks.
    """
    loaders = divided_loaders(job, TRAINING)
    if not loaders:
        yield Skip(why_not_divided(job, TRAINING))
    for readers in loaders:
        data_ranks = {
            data_rank: reader for data_rank, reader in readers.data_ranks.items() if _parts_in_disorder(reader)
        }
        unlike = split_values({data_rank: reader.loader.part for data_rank, reader in readers.data_ranks.items()})
        if unlike.minorities and all(map(_divides, readers.data_ranks.values())):
            yield _of_parts(job, readers, unlike)
            continue
        parted = [reader.loader for reader in data_ranks.values()]
        if len(parted) < 2 or any(same_data_set(parted[0], other) is False for other in parted[1:]):
            continue
        found = split_values({data_rank: _seed(reader) for data_rank, reader in data_ranks.items()})
        if found.minorities:
            yield _finding(job, readers, found)
        elif (epochs := _sampler_epochs(data_ranks)).minorities:
            yield _of_epochs(job, readers, epochs)
        elif _overlapping(data_ranks, overlap) and any(
            reader.training.seed is None and reader.loader.sampler and _draws_from_the_process(reader.loader.sampler)
            for reader in data_ranks.values()
        ):
            sampler = next(iter(data_ranks.values())).loader.sampler
            assert sampler is not None
            yield Finding(
                f"{sampler.inner} in {sampler.name} shuffles with a different random state per rank",
                ranks=readers.at(data_ranks),
                evidence={"share_drawn_twice": round(max(_shared_by_rank(data_ranks).values()), 3)},
                fix=_fix(job, split_values({})),
                severity=Severity.ERROR,
                explains=("DATA005",),
            )
    yield from _unlike_replicas(job)


def _sampler_epochs(data_ranks: Mapping[int, RankLoader]) -> MajoritySplit:
    """The epochs by which the samplers of ranks shuffle in one epoch of the loader."""
    passes = newest_common_epoch({data_rank: reader.loader.epochs for data_rank, reader in data_ranks.items()})
    known = {data_rank: one.sampler_epoch for data_rank, one in passes.items() if one.sampler_epoch is not None}
    return split_values(known)


def _of_epochs(job: Job, readers: PeerLoaders, found: MajoritySplit) -> Finding:
    """Of samplers with one seed that were given different epochs."""
    ranks = readers.at(found.odd)
    sampler = readers.data_ranks[found.odd[0]].loader.sampler
    assert sampler is not None
    shown = found.common is not None and len(found.minorities) == 1
    return Finding(
        f"{sampler_in_words(sampler.name)} of the {readers.name} shuffles by "
        + (
            f"epoch {found.minorities[0].value} on {ranks_in_words(ranks)}, but by {found.common.value} on the others"
            if shown and found.common
            else f"different epochs ({describe(found, readers.at)})"
        ),
        ranks=ranks,
        evidence={"epochs": describe(found, readers.at), "goes_with": list(correlates(job, ranks))},
        effect="The seed and the epoch of a sampler determine its order, so the ranks shuffle differently: some "
        "samples are drawn by several ranks and others by none.",
        fix=f"Call `set_epoch` of `{sampler.name}` with the same number on all ranks, after a resume too.",
        severity=Severity.ERROR if sampler.shuffle is True else Severity.INFO,
        explains=("DATA005",),
    )


def _divides(reader: RankLoader) -> bool:
    sampler = reader.loader.sampler
    is_divided = sampler is not None and sampler.distributed and (sampler.replicas or 1) > 1
    return is_divided and reader.loader.part is not None


def _of_parts(job: Job, readers: PeerLoaders, found: MajoritySplit) -> Finding:
    """Of a ``Subset`` that the samplers divide among the ranks, but that holds other samples on some."""
    ranks = readers.at(found.odd)
    return Finding(
        f"The Subset of the {readers.name} holds other samples on "
        + (f"{ranks_in_words(ranks)} than on the others" if found.common else f"each of {ranks_in_words(ranks)}"),
        ranks=ranks,
        evidence={"digests": describe(found, readers.at), "goes_with": list(correlates(job, ranks))},
        effect="Each rank takes its share of another list, so some samples are drawn by several ranks and others by "
        "none; samples held back for validation may be trained on.",
        fix="Split the dataset with the same seed on all ranks: `random_split(dataset, lengths, "
        "generator=torch.Generator().manual_seed(0))`.",
        severity=Severity.ERROR,
        explains=("DATA005",),
    )


def _parts_in_disorder(reader: RankLoader) -> bool:
    sampler = reader.loader.sampler
    return sampler is not None and sampler.distributed and sampler.shuffle is not False and not sampler.independent


def _draws_from_the_process(sampler: Sampler) -> bool:
    return sampler.inner in _RANDOM and sampler.generator_seed is None


def _seed(reader: RankLoader) -> str | None:
    """The seed of the sampler, and that of the order inside it: ``0``, ``0 (sampler), 7 (inner sampler)``."""
    sampler = reader.loader.sampler
    assert sampler is not None
    inner = _inner_seed(reader)
    if inner is None:
        return None if sampler.seed is None else str(sampler.seed)
    outer = "" if sampler.seed is None else f"{sampler.seed} (sampler), "
    return f"{outer}{inner} ({'inner sampler' if sampler.inner else 'generator'})"


def _inner_seed(reader: RankLoader) -> int | None:
    """The seed of the order inside the sampler: that of the process, or of its own generator."""
    sampler = reader.loader.sampler
    assert sampler is not None
    return reader.training.seed if _draws_from_the_process(sampler) else sampler.generator_seed


def _overlapping(data_ranks: dict[int, RankLoader], overlap: float) -> bool:
    return any(share >= overlap for share in _shared_by_rank(data_ranks).values())


def _shared_by_rank(data_ranks: dict[int, RankLoader]) -> dict[int, float]:
    epochs = newest_common_epoch({data_rank: reader.loader.epochs for data_rank, reader in data_ranks.items()})
    return shared_draws(epochs)


def _finding(job: Job, readers: PeerLoaders, found: MajoritySplit) -> Finding:
    ranks = readers.at(data_rank for group in found.minorities for data_rank in group.ranks)
    sampler = readers.data_ranks[found.minorities[0].ranks[0]].loader.sampler
    assert sampler is not None
    certain = sampler.shuffle is True
    name = f"{sampler_in_words(sampler.name)} of the {readers.name}"
    compared = {number: readers.data_ranks[number] for group in found.groups for number in group.ranks}
    outer_seeds = {one.loader.sampler.seed for one in compared.values() if one.loader.sampler}
    is_inner = bool(sampler.inner) and len(outer_seeds) == 1
    if is_inner:
        name = f"{sampler.inner} in {sampler.name}"
        found = split_values({number: _inner_seed(one) for number, one in compared.items()})
    is_short = found.common is not None and len(found.minorities) == 1 and (is_inner or not sampler.inner)
    global_seeds = {data_rank: reader.training.seed for data_rank, reader in readers.data_ranks.items()}
    return Finding(
        f"{name} uses "
        + (
            f"seed {found.minorities[0].value} on {ranks_in_words(ranks)}, but {found.common.value} on the others"
            if is_short and found.common
            else f"different seeds on {ranks_in_words(ranks)}"
            if found.common
            else f"different seeds ({describe(found, readers.at)})"
        ),
        ranks=ranks,
        evidence={
            **({} if is_short or not found.common else {"seeds": describe(found, readers.at)}),
            **({"inner": sampler.inner} if sampler.inner and not is_inner else {}),
            "global_seeds": describe(split_values(global_seeds), readers.at),
            "goes_with": list(correlates(job, ranks)),
        },
        effect=""
        if certain
        else "If the sampler shuffles by this seed, some samples are drawn by several ranks and others by none.",
        fix=_fix(job, split_values(global_seeds))
        if len(set(global_seeds.values())) > 1
        else f"Give the generator of `{sampler.inner}` the same seed on all ranks."
        if is_inner
        else f"Pass `seed={found.common.value}` to `{sampler.name}` on {ranks_in_words(ranks)}, as on the others."
        if is_short and found.common and str(found.common.value).isdigit()
        else f"Pass the same `seed` to `{sampler.name}` on all ranks.",
        severity=Severity.ERROR if certain else Severity.INFO,
        explains=("DATA005",),
    )


def _fix(job: Job, seeds: MajoritySplit) -> str:
    if seeds.common is not None and str(seeds.common.value).isdigit():
        seed = seeds.common.value
        return advice(
            job,
            lightning=f"Call `seed_everything({seed})` on all ranks before the Trainer is created.",
            transformers=f"Set `data_seed={seed}` in `TrainingArguments` on all ranks.",
            plain=f"Pass `seed={seed}`, or a generator with this seed, to the sampler on all ranks.",
        )
    return advice(
        job,
        lightning="Call `seed_everything` with the same number on all ranks before the Trainer is created.",
        transformers="Set the same `data_seed` in `TrainingArguments` on all ranks.",
        plain="Pass the same seed, or a generator with the same seed, to the sampler on all ranks.",
    )


def _unlike_replicas(job: Job) -> Iterator[Finding]:
    """Those of each data-parallel group: parts of a model, as of tensor-parallel ranks, differ by design."""
    roots = {rank: facts.data_parallel_root for facts, same in job.facts(TrainingFacts) for rank in same.ranks}
    begun: dict[int | None, dict[int, str]] = {}
    for model, same in job.facts(ModelFacts):
        if model.replicated and model.broadcast is False and model.initial is not None:
            for rank in same.ranks:
                begun.setdefault(roots.get(rank), {})[rank] = model.initial
    for replicas in begun.values():
        found = split_values(replicas)
        if found.minorities:
            yield _unlike(job, found)


def _unlike(job: Job, found: MajoritySplit) -> Finding:
    return Finding(
        f"Initial parameters differ on {ranks_in_words(found.odd)} and are never synchronized",
        ranks=found.odd,
        evidence={"checksums": describe(found), "broadcast": False, "goes_with": list(correlates(job, found.odd))},
        fix="Remove `init_sync=False` from `DistributedDataParallel`, or call `torch.manual_seed` with the same number "
        "on all ranks before the model is created.",
        severity=Severity.ERROR,
        explains=("RUN007",),
    )
