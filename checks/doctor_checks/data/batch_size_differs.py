"""DATA002: ranks use different batch sizes."""

from __future__ import annotations

from collections.abc import Iterator

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
    event_groups,
    finding_from_logs,
    ranks_in_words,
)
from doctor.facts import LoaderEpoch, LoaderFacts, TrainingFacts
from doctor.testing import Fails, JobBuilder, Passes, logged, running, with_loader
from doctor_checks.data._rank_loaders import (
    EVALUATION,
    TRAINING,
    PeerLoaders,
    RankLoader,
    advice,
    divided_loaders,
    loader_hook,
    why_not_divided,
)


def _seeing(sketch: JobBuilder, rank: int, *sizes: int, samples: int = 3200) -> JobBuilder:
    epochs = (LoaderEpoch(0, batches=100, samples=samples, sizes=sizes),)
    return with_loader(sketch, ranks=(rank,), batch_size=None, epochs=epochs)


def _dynamic(samples: int) -> JobBuilder:
    sketch = with_loader(running(1, 2), batch_sampler="ByLength", dynamic=True)
    return _seeing(_seeing(sketch, 0, 8, 16, 64), 1, 8, 32, 64, samples=samples)


def _from_logs(job: Job) -> Iterator[Finding]:
    for reported in event_groups(job, "data.batch_size", by=("words",)):
        sizes = {event.rank: event.value("n") for event in reported.events if event.rank is not None}
        parted = split_values(sizes)
        words = reported.value("words") or ""
        if parted.minorities and "eval" not in words:
            groups = "; ".join(f"{ranks_in_words(group.ranks)}: {group.value}" for group in parted.groups[:4])
            yield finding_from_logs(
                reported,
                f"Ranks logged different batch sizes ({words}): {groups}",
                ranks=parted.odd or tuple(sorted(sizes)),
                confidence=0.7,
                symptoms=False,
            )


@check(
    id="DATA002",
    severity=Severity.WARNING,
    scope=Scope.JOB,
    when="RM",
    needs=(LoaderFacts,),
    needs_peers=True,
    from_logs=_from_logs,
    cases=lambda: (
        Passes("one batch size", running(hosts=2, per_host=2)),
        Passes(
            "ranks that log the same batch size",
            logged("[rank0]: local batch size: 40", "[rank1]: local batch size: 40"),
        ),
        Passes("training and evaluation", logged("[rank0]: train_batch_size=8", "[rank1]: eval_batch_size=64")),
        Fails(
            "ranks that log different batch sizes",
            logged(*(f"[rank{rank}]: local batch size: {40 + (rank == 2)}" for rank in range(4))),
            ranks=(2,),
        ),
        Passes("a dynamic batch sampler with similar batches on each rank", _dynamic(3300)),
        Passes("a dynamic batch sampler with larger batches on one rank", _dynamic(6400), silent=False),
        Passes("workers that end with a smaller batch", _seeing(_seeing(running(), 0, 4, 32), 1, 9, 32)),
        Passes("another batch size in validation", with_loader(running(), stage="validate", batch_size=64)),
        Passes(
            "validation that differs",
            with_loader(with_loader(running(), stage="validate"), ranks=(1,), stage="validate", batch_size=64),
            silent=False,
        ),
        Passes(
            "ranks of one replica, of which only the first reads",
            with_loader(running(1, 4), ranks=(1, 3), batch_size=1)
            .alter(TrainingFacts, data_parallel_size=2)
            .alter(TrainingFacts, ranks=(0, 1), data_parallel_rank=0)
            .alter(TrainingFacts, ranks=(2, 3), data_parallel_rank=1),
        ),
        Fails("one rank of four", with_loader(running(2, 2), ranks=(3,), batch_size=16), ranks=(3,)),
        Fails("two ranks", with_loader(running(), ranks=(1,), batch_size=64), ranks=(0, 1)),
        Fails(
            "observed, as the dataset makes the batches",
            _seeing(_seeing(_seeing(running(1, 3), 0, 32), 1, 32), 2, 24),
            ranks=(2,),
        ),
    ),
)
def batch_size_differs(job: Job, *, dynamic_ratio: float = 1.2) -> Iterator[Verdict]:
    """Ask whether all data-parallel ranks use the same batch size.

    Why it hurts: DDP averages gradients over ranks regardless of their number of samples, so samples in smaller batches
    weigh more. Ranks with larger batches are slower, and the others wait for them.
    Fix: Set the same `batch_size` in the data loaders of all ranks.
    """
    loaders = divided_loaders(job, (*TRAINING, *EVALUATION))
    if not loaders:
        yield Skip(why_not_divided(job, (*TRAINING, *EVALUATION)))
    for readers in loaders:
        found, compared, is_certain = _sizes(readers, dynamic_ratio)
        if found.minorities:
            severity = Severity.WARNING if is_certain else Severity.INFO
            ranks = readers.at(data_rank for group in found.minorities for data_rank in group.ranks)
            sizes = ", ".join(str(group.value) for group in found.minorities[:4])
            common = found.common.value if found.common else None
            same = (
                f"`batch_size={common}` on {ranks_in_words(ranks)}"
                if common is not None
                else "the same `batch_size` on all ranks"
            )
            what = f"The {'mean ' if compared == _MEANS else ''}batch size of the {readers.name}"
            yield Finding(
                f"{what} is {sizes} on {ranks_in_words(ranks)}, but {common} on the others"
                if common is not None
                else f"{what} differs between ranks ({describe(found, readers.at)})",
                ranks=ranks,
                evidence={"compared": compared, "goes_with": list(correlates(job, ranks))},
                effect="" if readers.stage in TRAINING else _OF_EVALUATION,
                fix="Make the batch sampler give all ranks batches of similar size."
                if any(reader.loader.dynamic for reader in readers.members)
                else f"Make the dataset yield batches of {common} on {ranks_in_words(ranks)}, as on the others."
                if compared == _OBSERVED and common is not None
                else "Make the dataset yield batches of the same size on all ranks."
                if compared == _OBSERVED
                else advice(
                    job,
                    lightning=f"Set {same} in `{loader_hook(readers.stage)}`, or broadcast the smallest size if "
                    "`Tuner.scale_batch_size` chose it.",
                    transformers="Set the same `per_device_train_batch_size` in `TrainingArguments` on all ranks, with "
                    "`auto_find_batch_size=False`.",
                    plain=f"Set {same} in the DataLoader.",
                ),
                severity=severity,
            )


_OF_EVALUATION = (
    "Ranks with larger batches take longer, and metrics that are averaged over batches weigh samples in smaller "
    "batches more."
)


_CONFIGURED = "batch_size of the DataLoader"
_OBSERVED = "largest batch observed"
_MEANS = "mean size of the batches observed"


def _sizes(readers: PeerLoaders, dynamic_ratio: float) -> tuple[MajoritySplit, str, bool]:
    """Data-parallel ranks by batch size; which size that is; and whether different sizes are certainly a fault."""
    data_ranks = readers.data_ranks
    is_certain = readers.stage in TRAINING and not any(reader.loader.dynamic for reader in data_ranks.values())
    configured = {data_rank: reader.loader.batch_size for data_rank, reader in data_ranks.items()}
    if None not in configured.values() and is_certain:
        return split_values(configured), _CONFIGURED, True
    # The largest batch seen: smaller ones are the last batches of workers.
    whole = {
        data_rank: max((size for epoch in reader.loader.epochs for size in epoch.sizes), default=None)
        for data_rank, reader in data_ranks.items()
    }
    if is_certain and None not in whole.values():
        return split_values(whole), _OBSERVED, True
    means = {data_rank: mean for data_rank, reader in data_ranks.items() if (mean := _mean(reader)) is not None}
    if None not in configured.values() and len(set(configured.values())) > 1:
        return split_values(configured), _CONFIGURED, False
    same = not means or max(means.values()) <= dynamic_ratio * min(means.values())
    found = split_values({} if same else {data_rank: round(mean, 1) for data_rank, mean in means.items()})
    return found, _MEANS, False


def _mean(reader: RankLoader) -> float | None:
    counted = [(epoch.samples, epoch.batches) for epoch in reader.loader.epochs if epoch.samples and epoch.batches]
    samples, batches = (sum(column) for column in zip(*counted, strict=True)) if counted else (0, 0)
    return samples / batches if batches else None
