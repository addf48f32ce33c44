"""Faults of data caused with real loaders: what each rank's loader draws and gives is watched, and all checks of the
family judge all of it. Ranks are loaders of one process here; they share nothing."""

import itertools

import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import (  # noqa: E402 - torch may be missing
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from doctor.api import Severity, Status  # noqa: E402
from doctor.core.check_registry import CheckRegistry, builtin_checks  # noqa: E402
from doctor.core.check_runner import examine_job  # noqa: E402
from doctor.facts import LoaderFacts, TrainingFacts  # noqa: E402
from doctor.monitor.telemetry.data.loader_history import LoaderHistories  # noqa: E402
from doctor.testing import running  # noqa: E402

CATALOG = CheckRegistry(tuple(check for check in builtin_checks() if check.family == "data"))


def rows(length=160, first=0):
    return TensorDataset(torch.arange(first, first + length * 2.0).reshape(length, 2), torch.arange(length) % 7)


class Opaque(Dataset):
    """Rows behind something that can't be looked into. ``constant``: all of them the same."""

    def __init__(self, length=160, first=0, constant=False):
        self.rows = iter(())
        self.length, self.values = (
            length,
            memoryview(bytes((first + (0 if constant else n)) % 251 for n in range(length))),
        )

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return torch.full((3,), self.values[index], dtype=torch.float32)


class Stream(IterableDataset):
    """Numbers, every ``step``-th from ``first`` on; ``by_worker``: workers part them. ``constant``: always the same."""

    def __init__(self, first=0, step=1, length=64, by_worker=False, constant=False):
        self.numbers = range(first, first + length * step, step)
        self.by_worker, self.constant = by_worker, constant

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        part, parts = (info.id, info.num_workers) if info and self.by_worker else (0, 1)
        for number in itertools.islice(self.numbers, part, None, parts):
            yield torch.full((2,), 0.0 if self.constant else number)


class Lengths(BatchSampler):
    """Fills batches as it likes: ``sizes`` in turn."""

    def __init__(self, rank, world, sizes=(4, 6, 2)):
        self.batches = []
        self.rank, self.world_size = rank, world
        numbers, sizes = iter(range(rank, 160, world)), itertools.cycle(sizes)
        while batch := list(itertools.islice(numbers, next(sizes))):
            self.batches.append(batch)

    def __iter__(self):
        return iter(self.batches)

    def __len__(self):
        return len(self.batches)


def parted(rank, world, data=None, **options):
    workers = {name: options.pop(name) for name in ("num_workers", "persistent_workers") if name in options}
    data = rows() if data is None else data
    return DataLoader(data, 4, sampler=DistributedSampler(data, world, rank, **options), **workers)


def seeded(rank, world, seed):
    torch.manual_seed(seed)
    return DataLoader(rows(), 4, shuffle=True)


def watched(make, *, world=2, epochs=2, told=True, stage="train", **training):
    """The job whose rank ``n`` went over the loader ``make(n, world)``; ``told``: samplers were told the epoch."""
    sketch = running(1, world).alter(TrainingFacts, **training)
    for rank in range(world):
        known = LoaderHistories()
        known.open()
        loader = make(rank, world)
        known.attach(stage, 0, loader)
        for epoch in range(epochs):
            if told and hasattr(loader.sampler, "set_epoch"):
                loader.sampler.set_epoch(epoch)
            known.epoch_start(stage, epoch)
            for batch in loader:
                known.record_batch(stage, 0, batch)
            known.epoch_end(stage, 0, ended=True)
        sketch = sketch.put(known.facts(), ranks=(rank,))
        known.close()
    return sketch.job()


def found(job):
    """Ids of what was found, at warning or above, each with the ranks to blame."""
    results = examine_job(job, CATALOG)
    assert not [result.reason for result in results if result.status is Status.ERROR]
    return {
        result.id: {rank for finding in result.findings for rank in finding.ranks}
        for result in results
        if result.findings and result.severity is not Severity.INFO
    }


def status(job, name):
    return next(result.status for result in examine_job(job, CATALOG) if result.id == name)


HEALTHY = {
    "a distributed sampler": parted,
    "with workers": lambda rank, world: parted(rank, world, num_workers=1),
    "with workers that persist": lambda rank, world: parted(rank, world, num_workers=1, persistent_workers=True),
    "not shuffled": lambda rank, world: parted(rank, world, shuffle=False),
    "the odd samples left out": lambda rank, world: parted(rank, world, rows(161), drop_last=True),
    "the odd samples repeated": lambda rank, world: parted(rank, world, rows(161)),
    "shards in order": lambda rank, world: DataLoader(rows(first=rank * 1000), 4),
    "shards, shuffled": lambda rank, world: DataLoader(rows(first=rank * 1000), 4, shuffle=True),
    "shards that can't be looked into": lambda rank, world: DataLoader(Opaque(first=rank * 77), 4),
    "indices of its own": lambda rank, world: DataLoader(
        rows(), 4, sampler=SubsetRandomSampler(range(rank, 160, world))
    ),
    "with replacement": lambda rank, world: DataLoader(rows(), 4, sampler=WeightedRandomSampler(torch.ones(160), 80)),
    "constant data, parted": lambda rank, world: parted(rank, world, TensorDataset(torch.zeros(160, 2))),
    "batches of all sizes": lambda rank, world: DataLoader(rows(), batch_sampler=Lengths(rank, world)),
    "a stream, parted": lambda rank, world: DataLoader(Stream(rank, world), 4),
    "a stream, parted between workers too": lambda rank, world: DataLoader(
        Stream(rank, world, by_worker=True), 4, num_workers=2
    ),
    "a stream that never varies": lambda rank, world: DataLoader(Stream(constant=True), 4, num_workers=2),
}


@pytest.mark.parametrize("make", HEALTHY.values(), ids=HEALTHY)
def test_healthy(make):
    assert found(watched(make)) == {}


def test_an_epoch_in_which_one_rank_is_ahead():
    """Ranks post what they know at different times."""
    behind, ahead = (watched(parted, world=1, epochs=epochs).ranks[0].find(LoaderFacts) for epochs in (1, 2))
    sketch = running(1, 2).put(behind, ranks=(0,)).put(ahead, ranks=(1,))
    assert "DATA010" not in found(sketch.job())


def test_uneven_data_sets():
    def make(rank, world):
        return DataLoader(rows(164 if rank == 1 else 160, first=rank * 1000), 4)

    assert found(watched(make, world=3)) == {"DATA001": {1}, "DATA010": {1}}
    assert found(watched(make, world=3, joins=True)) == {}


def test_another_batch_size():
    def make(rank, world):
        size = 8 if rank == 1 else 4
        return DataLoader(rows(size * 20, first=rank * 1000), size)

    assert found(watched(make, world=3)) == {"DATA002": {1}}


def test_batches_that_the_data_set_makes():
    def make(rank, world):
        batches = [torch.full((6 if rank == 1 else 4, 2), float(rank * 100 + number)) for number in range(10)]
        return DataLoader(batches, None, sampler=list(range(10)))

    assert found(watched(make, world=3)) == {"DATA002": {1}}


def test_the_same_data_set_shuffled_by_each_rank():
    assert found(watched(lambda rank, world: seeded(rank, world, rank))) == {"DATA003": {0, 1}}


def test_the_same_data_set_shuffled_alike():
    assert found(watched(lambda rank, world: seeded(rank, world, 7))) == {"DATA003": {0, 1}, "DATA005": {0, 1}}


def test_the_same_data_that_can_not_be_looked_into():
    job = watched(lambda rank, world: DataLoader(Opaque(), 4))
    assert found(job) == {"DATA003": {0, 1}, "DATA005": {0, 1}}


def test_constant_data_that_can_not_be_looked_into():
    job = watched(lambda rank, world: DataLoader(Opaque(constant=True), 4))
    assert found(job) == {}
    assert status(job, "DATA005") is status(job, "DATA003") is Status.UNKNOWN


@pytest.mark.parametrize(("replicas", "ranks"), [(4, {0, 1}), (1, {0, 1})])
def test_a_sampler_for_another_number_of_ranks(replicas, ranks):
    job = watched(lambda rank, world: parted(rank if replicas > 1 else 0, replicas))
    assert found(job)["DATA004"] == ranks
    assert ("DATA005" in found(job)) is (replicas == 1)


def test_the_part_of_another_rank():
    job = watched(lambda rank, world: parted(1 if rank == 2 else rank, world), world=3)
    assert found(job) == {"DATA004": {2}, "DATA005": {1, 2}}


def test_a_part_that_two_ranks_take_by_a_sampler_of_their_own():
    def make(rank, world):
        return DataLoader(rows(), 4, sampler=list(range(min(rank, 1), 160, world)))

    assert found(watched(make, world=3)) == {"DATA005": {1, 2}}


@pytest.mark.parametrize("options", [{}, {"num_workers": 1, "persistent_workers": True}], ids=["here", "in workers"])
def test_nobody_tells_the_epoch(options):
    job = watched(lambda rank, world: parted(rank, world, **options), told=False)
    assert found(job) == {"DATA006": {0, 1}}
    assert status(watched(parted, epochs=1, told=False), "DATA006") is Status.SKIP


def test_a_generator_that_is_made_anew():
    class Anew(DataLoader):
        def __iter__(self):
            self.generator.manual_seed(3)
            return super().__iter__()

    def make(rank, world):
        return Anew(rows(first=rank * 1000), 4, shuffle=True, generator=torch.Generator())

    assert found(watched(make)) == {"DATA006": {0, 1}}


@pytest.mark.parametrize(("length", "repeated"), [(161, 1), (160, 0)])
def test_a_tail_that_counts_twice(length, repeated):
    job = watched(lambda rank, world: parted(rank, world, rows(length), shuffle=False), stage="validate")
    assert found(job) == {}
    (result,) = [result for result in examine_job(job, CATALOG) if result.id == "DATA007"]
    summaries = [f"{repeated} of {length} samples of the validation loader count twice"] * bool(repeated)
    assert [finding.summary for finding in result.findings] == summaries


def test_one_stream_for_all():
    assert found(watched(lambda rank, world: DataLoader(Stream(), 4))) == {"DATA008": {0, 1}}


def test_one_stream_for_all_workers():
    job = watched(lambda rank, world: DataLoader(Stream(rank, world), 4, num_workers=2))
    assert found(job) == {"DATA008": {0, 1}}


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_more_workers_than_the_host_has_processors():
    job = watched(lambda rank, world: DataLoader(rows(first=rank * 1000), 4, num_workers=60), epochs=0)
    assert found(job) == {"DATA009": {0, 1}}


def test_a_stream_that_ends_early():
    def make(rank, world):
        return DataLoader(Stream(rank, world, length=56 if rank == 1 else 64), 4)

    assert found(watched(make, world=3)) == {"DATA010": {1}}


def test_a_seed_for_each_rank():
    assert found(watched(lambda rank, world: parted(rank, world, seed=rank))) == {"DATA011": {0, 1}}


def test_a_random_sampler_below_a_distributed_one():
    """Lightning's wrapper parts what the sampler draws from each rank's own random state."""
    distributed = pytest.importorskip("lightning.fabric.utilities.distributed")

    def make(seeds):
        def loader(rank, world):
            torch.manual_seed(seeds[rank])
            sampler = SubsetRandomSampler(range(160))
            wrapper = distributed.DistributedSamplerWrapper(sampler, num_replicas=world, rank=rank, shuffle=False)
            return DataLoader(rows(), 4, sampler=wrapper)

        return loader

    assert found(watched(make((1, 2)), seed=None)) == {"DATA011": {0, 1}}
    assert found(watched(make((1, 1)), seed=None)) == {}


def test_order_without_a_sampler_of_ranks():
    job = watched(lambda rank, world: DataLoader(rows(), 4, sampler=SequentialSampler(range(160))))
    assert found(job) == {"DATA003": {0, 1}, "DATA005": {0, 1}}
