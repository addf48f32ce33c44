"""Data loaders of monitored jobs, for the cases of checks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from doctor.core.facts import Loader, LoaderEpoch, LoaderFacts, TrainingFacts
from doctor.testing.cases import JobBuilder


def with_loader(
    sketch: JobBuilder, *, ranks: Iterable[int] | None = None, stage: str = "train", index: int = 0, **changes: Any
) -> JobBuilder:
    """Return the same job with fields of one loader changed on ``ranks`` (else on all). A callable value gets the old
    one. A rank without such a loader gets a copy of its training loader."""

    def change(old: tuple[Loader, ...]) -> tuple[Loader, ...]:
        like = next((one for one in old if (one.stage, one.index) == (stage, index)), None)
        base = like or msgspec.structs.replace(old[0], stage=stage, index=index)
        values = {name: new(getattr(base, name)) if callable(new) else new for name, new in changes.items()}
        return (*(one for one in old if one is not like), msgspec.structs.replace(base, **values))

    return sketch.alter(LoaderFacts, ranks=ranks, loaders=change)


def with_sampler(
    sketch: JobBuilder, *, ranks: Iterable[int] | None = None, stage: str = "train", **changes: Any
) -> JobBuilder:
    """Return the same job with fields of the sampler of a stage's loader changed on ``ranks`` (else on all)."""
    return with_loader(sketch, ranks=ranks, stage=stage, sampler=lambda old: msgspec.structs.replace(old, **changes))


def drawing(number: int, indices: Iterable[int], **more: Any) -> LoaderEpoch:
    """Return an epoch whose first samples are ``indices``."""
    return LoaderEpoch(number, first=tuple(indices), **more)


def in_a_loop(sketch: JobBuilder, *groups: tuple[int, ...]) -> JobBuilder:
    """Return the same job with a training loop of the user, with data-parallel ``groups``; those of other ranks are
    unknown."""
    sketch = sketch.alter(TrainingFacts, framework="plain", data_parallel_rank=None, data_parallel_size=None)
    for group in groups:
        size, root = len(group), group[0]
        for place, rank in enumerate(group):
            sketch = sketch.alter(
                TrainingFacts, ranks=(rank,), data_parallel_rank=place, data_parallel_size=size, data_parallel_root=root
            )
    return sketch
