"""Host memory of all ranks of a node, as far as the factory's Trainer and loader show it."""

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
"""Private memory of a data loader worker: its heap, and the pages of the interpreter and of torch that it writes to. A
fresh process with torch has 320 MB (pytorch/pytorch#113326); a forked one shares a part of it."""

PREFETCH = 2
"""Default ``prefetch_factor`` of a DataLoader with workers (torch.utils.data.DataLoader)."""

FORKSERVER = (3, 14)
"""The first Python whose multiprocessing starts workers by ``forkserver`` on Linux: they get their dataset by pickle,
and share no page of it (What's New In Python 3.14)."""

SHARDED = ("fsdp", "fsdp2", "deepspeed-1", "deepspeed-2", "deepspeed-3")
"""Strategies whose ranks each load a part of a checkpoint."""


def host_memory(
    plan: TrainingPlan, traced: TracedStep, loading: LoaderUse, *, python: tuple[int, int] = sys.version_info[:2]
) -> HostMemory:
    """Return the host memory of one node while the model is built, the loaders run, and a checkpoint is loaded."""
    ranks = plan.devices * plan.ranks_per_device
    workers = loading.workers or 0
    in_flight = workers * (loading.prefetch or PREFETCH) * traced.batch_bytes
    copies = workers if python >= FORKSERVER else 0
    dataset = loading.dataset_bytes or 0
    checkpoint = (loading.checkpoint_bytes or 0) // (plan.world_size if plan.strategy in SHARDED else 1)
    # torch caches page-locked buffers, each rounded up to a power of two (CachingHostAllocator).
    is_pinned = loading.pinned and traced.batch_bytes
    pinned = 1 << (max(in_flight, traced.batch_bytes) - 1).bit_length() if is_pinned else 0
    return HostMemory(
        ranks=ranks,
        processes=ranks * (PROCESS + traced.parameter_bytes),
        dataset=ranks * dataset,
        workers=ranks * (workers * WORKER + copies * dataset + in_flight),
        checkpoint=ranks * checkpoint,
        pinned=ranks * pinned,
        notes=tuple(_notes(loading, ranks, copied=bool(copies))),
    )


def _notes(loading: LoaderUse, ranks: int, *, copied: bool) -> Iterator[str]:
    workers, dataset = loading.workers, loading.dataset_bytes
    if workers is None:
        yield "the factory returned no data loader: its workers, dataset and pinned memory are not counted"
    elif dataset is None:
        yield "the memory of the dataset is unknown; every rank holds a copy"
    elif dataset < 256 * MIB or not workers:
        return
    elif copied:
        yield f"each worker gets a copy of the dataset, {byte_size(dataset)}: since Python 3.14 workers are not forked"
    else:
        yield (
            f"workers share the pages of the dataset; lists and dictionaries of Python objects are copied as they are "
            f"read, up to {byte_size(dataset * ranks * workers)} more"
        )
