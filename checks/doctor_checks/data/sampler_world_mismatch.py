"""DATA004: a sampler divides the data by a wrong number of ranks, or reads the shard of another rank."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.api import Finding, Job, Scope, Severity, Skip, Unknown, Verdict, check, merge
from doctor.facts import LoaderFacts, Sampler, TrainingFacts
from doctor.testing import Fails, JobBuilder, Passes, in_a_loop, running, with_loader, with_sampler
from doctor_checks.data._rank_loaders import (
    EVALUATION,
    TRAINING,
    PeerLoaders,
    RankLoader,
    advice,
    loader_hook,
    peer_loaders,
    sampler_in_words,
)


def _by_node(sketch: JobBuilder, fingerprints: tuple[str | None, ...]) -> JobBuilder:
    for rank in range(4):
        sketch = with_sampler(sketch, ranks=(rank,), replicas=2, rank=rank % 2)
        sketch = with_loader(sketch, ranks=(rank,), fingerprint=fingerprints[rank // 2])
    return sketch


def _of_replicas(sketch: JobBuilder) -> JobBuilder:
    for rank in range(4):
        sketch = sketch.alter(TrainingFacts, ranks=(rank,), data_parallel_size=2, data_parallel_rank=rank // 2)
    return sketch


@check(
    id="DATA004",
    severity=Severity.ERROR,
    scope=Scope.RANK,
    when="PR",
    needs=(LoaderFacts, TrainingFacts),
    cases=lambda: (
        Passes("one shard per rank", running(hosts=2, per_host=2)),
        Passes("no distributed sampler", with_loader(running(), sampler=Sampler("RandomSampler"))),
        Passes("each host has its own data, divided among its ranks", _by_node(running(2, 2), ("f0", "f1"))),
        Passes("each host may have its own data", _by_node(running(2, 2), (None, None))),
        Passes(
            "ranks of one replica read the same shard",
            with_sampler(
                with_sampler(_of_replicas(running(1, 4)), ranks=(0, 1), replicas=2, rank=0),
                ranks=(2, 3),
                replicas=2,
                rank=1,
            ),
        ),
        Passes(
            "a model on two ranks each, replicated twice",
            in_a_loop(
                with_sampler(with_sampler(running(1, 4), replicas=2, rank=0), ranks=(2, 3), rank=1), (0, 2), (1, 3)
            ),
        ),
        Fails("made for four ranks", with_sampler(running(), replicas=4), ranks=(0, 1)),
        Fails("the shard of rank 0 on all ranks", with_sampler(running(1, 3), rank=0), ranks=(1, 2)),
        Fails("created before the ranks were known", with_sampler(running(), replicas=1, rank=0), ranks=(0, 1)),
        Fails("divided among the ranks of a host", _by_node(running(2, 2), ("f0", "f0")), ranks=(0, 1, 2, 3)),
        Fails("divided among all ranks, of which two share a replica", _of_replicas(running(1, 4)), ranks=(0, 1, 2, 3)),
        Fails("a single process that reads half of the data", with_sampler(running(1, 1), replicas=2), ranks=(0,)),
        Fails(
            "in validation, in a plain loop",
            with_sampler(running().alter(TrainingFacts, framework="plain"), stage="validate", replicas=3),
            ranks=(0, 1),
            severity=Severity.WARNING,
        ),
    ),
)
def sampler_world_mismatch(job: Job) -> Iterator[Verdict]:
    """Ask whether each rank's sampler uses the rank and the size of its data-parallel group.

    Why it hurts: with too many replicas, part of the data is never read. With too few replicas or a wrong rank, several
    ranks read the same samples.
    Fix: Create the sampler after `init_process_group`, without `num_replicas` and `rank` or with the size and the rank
    of the data-parallel group.
    """
    loaders = peer_loaders(job, (*TRAINING, *EVALUATION))
    parted = [readers for readers in loaders if any(_parts(reader) for reader in readers.members)]
    if not parted:
        yield Skip("no distributed sampler is in use")
    for readers in parted:
        if readers.unplaced:
            yield Unknown("the ranks' indices in the data-parallel group are unknown", readers.unplaced)
        groups = readers.by_group()
        yield from merge(finding for group in groups for finding in _judge(job, group))
        if unclear := tuple(one.rank for group in groups for one in group.members if _is_unclear(job, group, one)):
            yield Unknown(
                "samplers divide the data per host; whether the hosts hold different data is unknown", unclear
            )


def _parts(reader: RankLoader) -> bool:
    sampler = reader.loader.sampler
    return sampler is not None and sampler.distributed and sampler.replicas is not None


def _is_off(reader: RankLoader) -> bool:
    sampler, training = reader.loader.sampler, reader.training
    if sampler is None or not _parts(reader) or reader.data_rank is None or training.data_parallel_size is None:
        return False
    return (sampler.replicas, sampler.rank) != (training.data_parallel_size, reader.data_rank)


def _judge(job: Job, readers: PeerLoaders) -> Iterator[Finding]:
    for reader in readers.members:
        if _is_off(reader) and not _parts_its_own(readers, reader) and not _is_unclear(job, readers, reader):
            sampler, size = reader.loader.sampler, reader.training.data_parallel_size
            assert sampler is not None
            wrong_size, name = sampler.replicas != size, sampler_in_words(sampler.name)
            summary = (
                f"{name} of the {readers.name} has num_replicas={sampler.replicas}, but the data-parallel size "
                f"is {size}"
                if wrong_size
                else f"{name} of the {readers.name} has rank={sampler.rank} on rank {reader.rank} "
                f"instead of rank={reader.data_rank}"
            )
            yield Finding(
                summary,
                ranks=(reader.rank,),
                evidence={
                    **({} if wrong_size else {"num_replicas": sampler.replicas, "data_parallel_size": size}),
                    "world_size": world if (world := reader.training.world_size) != size else None,
                    "may_mean": _cause(reader),
                },
                effect=_effect(sampler, reader),
                fix=_fix(job, readers, reader),
                severity=Severity.ERROR if readers.stage in TRAINING else Severity.WARNING,
                explains=("DATA001", "DATA005", "DATA010"),
            )


def _parts_its_own(readers: PeerLoaders, reader: RankLoader) -> bool:
    """Whether the ranks with this rank's dataset, a part of all ranks, split it among themselves."""
    if reader.loader.fingerprint is None:
        return False
    data_ranks = readers.data_ranks.values()
    fellows = [one for one in data_ranks if one.loader.fingerprint == reader.loader.fingerprint]
    shares = [(one.loader.sampler.replicas, one.loader.sampler.rank) for one in fellows if one.loader.sampler]
    return len(fellows) < len(data_ranks) and sorted(shares, key=str) == [
        (len(fellows), n) for n in range(len(fellows))
    ]


def _is_unclear(job: Job, readers: PeerLoaders, reader: RankLoader) -> bool:
    """Whether the sampler uses the local rank, and each host may have its own data."""
    sampler = reader.loader.sampler
    if sampler is None or reader.loader.fingerprint is not None or not _is_off(reader) or len(job.hosts) < 2:
        return False
    local = next(local for local in job.by_host() if reader.rank in local.ranks)
    here = sorted(local.ranks)
    return (sampler.replicas, sampler.rank) == (len(here), here.index(reader.rank))


def _cause(reader: RankLoader) -> str | None:
    sampler, training = reader.loader.sampler, reader.training
    assert sampler is not None
    if sampler.replicas == 1:
        return "num_replicas=1 was passed, or read before the number of ranks was known"
    if sampler.replicas == training.world_size != training.data_parallel_size:
        return "num_replicas counts all ranks, but several ranks share one model replica"
    if sampler.rank == 0 and sampler.replicas == training.data_parallel_size:
        return "rank=0 was passed, or read before the rank was known"
    return None


def _effect(sampler: Sampler, reader: RankLoader) -> str:
    replicas, size = sampler.replicas, reader.training.data_parallel_size
    if replicas is None or size is None or replicas == size:
        return f"Rank {reader.rank} reads shard {sampler.rank} of the data instead of shard {reader.data_rank}."
    if replicas > size:
        who = "rank reads" if size == 1 else "ranks read"
        return f"The {who} only {size} of {replicas} shards; the other samples are never read."
    if replicas == 1:
        return "Every rank reads the whole dataset, so an epoch takes as long as on one rank."
    return "Several ranks read the same shard of the dataset, so an epoch takes longer than necessary."


def _fix(job: Job, readers: PeerLoaders, reader: RankLoader) -> str:
    size = reader.training.data_parallel_size
    return advice(
        job,
        lightning=f"Return a DataLoader without a sampler from `{loader_hook(readers.stage)}`, because "
        + ("one rank reads all data." if size == 1 else "the Trainer adds one with the right size and rank."),
        transformers="Let the Trainer create the loader: it divides the data by `accelerator.num_processes`.",
        plain=f"Create the sampler with `num_replicas={size}` and the data-parallel rank of each process as `rank`.",
    )
