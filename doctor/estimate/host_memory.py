"""Host memory that all ranks of a node take together, as far as the factory's Trainer and loaders tell."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from doctor.core.text import byte_size
from doctor.estimate.data_model import HostMemory, LoaderUse, TracedStep, TrainingPlan

MIB = 1 << 20

PROCESS = 2048 * MIB
"""Resident memory of a process that uses torch with CUDA: some 2.0 GB once the driver and the libraries are loaded
(pytorch/pytorch#113326)."""

WORKER = 300 * MIB
"""What a worker of a loader has for itself: its own heap, and the pages of the interpreter and of torch that it
writes to. A fresh process with torch has 320 MB (pytorch/pytorch#113326); a forked one shares a part of it."""

PREFETCH = 2
"""``prefetch_factor`` of a DataLoader with workers, where nobody set it (torch.utils.data.DataLoader)."""

FORKSERVER = (3, 14)
"""The Python from which on multiprocessing starts workers by ``forkserver`` on Linux: they get their data set by
pickle, and share no page of it (What's New In Python 3.14)."""

SHARDED = ("fsdp", "fsdp2", "deepspeed-1", "deepspeed-2", "deepspeed-3")
"""Strategies whose ranks load a part of a checkpoint each."""


def host_memory(
    plan: TrainingPlan, traced: TracedStep, loading: LoaderUse, *, python: tuple[int, int] = sys.version_info[:2]
) -> HostMemory:
    """Bytes on one node for its ranks: while the model is built on the host, the loaders run, and a checkpoint is
    loaded."""
    ranks = plan.devices * plan.ranks_per_device
    workers = loading.workers or 0
    in_flight = workers * (loading.prefetch or PREFETCH) * traced.batch_bytes
    copies = workers if python >= FORKSERVER else 0
    dataset = loading.dataset_bytes or 0
    return HostMemory(
        ranks=ranks,
        processes=ranks * (PROCESS + traced.parameter_bytes),
        dataset=ranks * dataset,
        workers=ranks * (workers * WORKER + copies * dataset + in_flight),
        checkpoint=ranks * _checkpoint(plan, loading),
        pinned=ranks * _pinned(traced, loading, in_flight),
        notes=tuple(_notes(loading, ranks, copied=bool(copies))),
    )


def _checkpoint(plan: TrainingPlan, loading: LoaderUse) -> int:
    share = plan.world_size if plan.strategy in SHARDED else 1
    return (loading.checkpoint_bytes or 0) // share


def _pinned(traced: TracedStep, loading: LoaderUse, in_flight: int) -> int:
    """Page-locked buffers: torch keeps them for later, each rounded up to a power of two (CachingHostAllocator)."""
    if not loading.pinned:
        return 0
    return 1 << (max(in_flight, traced.batch_bytes) - 1).bit_length() if traced.batch_bytes else 0


def _notes(loading: LoaderUse, ranks: int, *, copied: bool) -> Iterator[str]:
    workers, dataset = loading.workers, loading.dataset_bytes
    if workers is None:
        yield "the factory gave no loader: its workers, its data set and pinned memory are not counted"
        return
    if dataset is None:
        yield "what the data set holds in memory can't be counted; every rank holds it"
    elif dataset >= 256 * MIB and workers:
        yield from _of_copies(dataset, ranks * workers, copied=copied)


def _of_copies(dataset: int, workers: int, *, copied: bool) -> Iterator[str]:
    if copied:
        yield f"each worker gets a copy of the data set, {byte_size(dataset)}: workers are no forks from Python 3.14 on"
    else:
        yield (
            f"workers share the pages of the data set; lists and dictionaries of Python objects are copied as they are "
            f"read, up to {byte_size(dataset * workers)} more"
        )
