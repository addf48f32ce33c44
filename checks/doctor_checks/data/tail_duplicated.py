"""DATA007: padding makes some samples count twice in an evaluation."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.api import Finding, Job, Scope, Severity, Skip, Verdict, check
from doctor.facts import Loader, LoaderFacts, Sampler, TrainingFacts
from doctor.testing import Fails, JobBuilder, Passes, running, with_loader
from doctor_checks.data._rank_loaders import PeerLoaders, advice, peer_loaders


def _evaluating(samples: int, *, stage: str = "validate", pads: bool = True, limit: int | None = None) -> JobBuilder:
    sketch = running(1, 4)
    for rank in range(4):
        sampler = Sampler("DistributedSampler", True, 4, rank, shuffle=False, drop_last=not pads, pads=pads)
        sketch = with_loader(
            sketch, ranks=(rank,), stage=stage, dataset_length=samples, length=10, limit=limit, sampler=sampler
        )
    return sketch


@check(
    id="DATA007",
    severity=Severity.INFO,
    scope=Scope.JOB,
    when="R",
    needs=(LoaderFacts,),
    cases=lambda: (
        Passes("the same number of samples on each rank", _evaluating(1000)),
        Passes("samples are dropped, not repeated", _evaluating(1001, pads=False)),
        Passes("evaluation stops before the end", _evaluating(1001, limit=5)),
        Passes("training", running(hosts=2, per_host=2)),
        Passes("accelerate removes the padding", _evaluating(1001).alter(TrainingFacts, framework="transformers")),
        Fails("1,001 samples for four ranks", _evaluating(1001)),
        Fails("in a test, in a plain loop", _evaluating(997, stage="test").alter(TrainingFacts, framework="plain")),
    ),
)
def tail_duplicated(job: Job) -> Iterator[Verdict]:
    """Ask whether every sample of a validation or test dataset counts once.

    Why it hurts: metrics are slightly wrong and vary with the number of ranks.
    Fix: Evaluate on one device, or with a sampler that neither repeats nor drops samples.
    """
    loaders = [
        readers
        for readers in peer_loaders(job, ("validate", "test"))
        if any(loader.sampler is not None and loader.sampler.distributed for loader in _loaders(readers))
    ]
    if not loaders:
        yield Skip("no distributed sampler in validation or test")
    for readers in loaders:
        if any(reader.training.framework == "transformers" for reader in readers.members):
            continue
        padded = next((loader for loader in _loaders(readers) if _repeated(loader)), None)
        if padded is not None:
            repeated, samples = _repeated(padded), padded.dataset_length or 0
            assert padded.sampler is not None
            yield Finding(
                f"{repeated} of {samples:,} samples of the {readers.name} count twice",
                evidence={
                    "replicas": padded.sampler.replicas,
                    "share": round(repeated / samples, 6),
                    "sampler": padded.sampler.name,
                },
                fix=advice(
                    job,
                    lightning=f"Run `{readers.stage}` with `Trainer(devices=1, num_nodes=1)` for exact metrics.",
                    plain=f"Gather the predictions in the order of the dataset and keep the first {samples:,}, as "
                    "accelerate's `gather_for_metrics` does.",
                ),
            )


def _loaders(readers: PeerLoaders) -> Iterator[Loader]:
    return (reader.loader for reader in readers.members)


def _repeated(loader: Loader) -> int:
    sampler, samples = loader.sampler, loader.dataset_length
    if sampler is None or not sampler.pads or not sampler.replicas or not samples:
        return 0
    if loader.limit is not None and loader.length is not None and loader.limit < loader.length:
        return 0
    return -samples % sampler.replicas
