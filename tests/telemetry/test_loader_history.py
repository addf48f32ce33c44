"""What loaders are, drew and gave, seen at real loaders of torch: with and without workers, samplers of all kinds."""

import gc
import itertools
import random
import sys
import tracemalloc
import weakref

import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import (  # noqa: E402 - torch may be missing
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.dataloader import _BaseDataLoaderIter  # noqa: E402

from doctor.monitor.telemetry.data import sample_trace  # noqa: E402
from doctor.monitor.telemetry.data.loader_history import KEPT_EPOCHS, LoaderHistories  # noqa: E402

ROWS = TensorDataset(torch.arange(600.0).reshape(200, 3), torch.arange(200) % 7)


class Stream(IterableDataset):
    """Twenty rows that say nothing of their number."""

    def __iter__(self):
        return iter(torch.arange(60.0).reshape(20, 3))


class Shuffling:
    """A batch sampler of somebody's own that draws from the random state of the process, also to know its length."""

    def __init__(self, batches, size=4):
        self.batches, self.size = batches, size

    def __iter__(self):
        for _ in range(self.batches):
            yield torch.randint(0, 200, (self.size,)).tolist()

    def __len__(self):
        random.random()
        return len(list(iter(self)))


@pytest.fixture
def loaders():
    known = LoaderHistories()
    known.open()
    yield known
    known.close()


def go(loaders, loader, epochs=1, *, stage="train", told=None, limit=None):
    """Go over ``loader`` as a framework does, and return what is known of it."""
    loaders.attach(stage, 0, loader, limit)
    for epoch in range(epochs):
        if told is not None:
            told(epoch)
        loaders.epoch_start(stage, epoch)
        for batch in itertools.islice(loader, limit):
            loaders.record_batch(stage, 0, batch)
        loaders.epoch_end(stage, 0, ended=limit is None)
    return next(one for one in loaders.facts().loaders if one.stage == stage)


@pytest.mark.parametrize(
    ("workers", "persistent"), [(0, False), (2, False), (2, True)], ids=["none", "workers", "persistent"]
)
def test_indices_by_epoch(loaders, workers, persistent):
    sampler = DistributedSampler(ROWS, 2, 1, shuffle=True)
    loader = DataLoader(ROWS, 4, sampler=sampler, num_workers=workers, persistent_workers=persistent)
    known = go(loaders, loader, 3, told=sampler.set_epoch)
    for epoch in known.epochs:
        sampler.set_epoch(epoch.epoch)
        order = list(sampler)
        assert epoch.drawn.startswith("100:")
        assert epoch.first in ((), tuple(order[:64]))
        assert (epoch.batches, epoch.samples, epoch.sizes, epoch.ended) == (25, 100, (4,), True)
    assert len({epoch.drawn for epoch in known.epochs}) == 3
    assert known.epochs[-1].first
    assert known.sampler.epoch == 2


@pytest.mark.parametrize("workers", [0, 1])
def test_an_epoch_that_is_not_set_repeats(loaders, workers):
    loader = DataLoader(ROWS, 4, sampler=DistributedSampler(ROWS, 2, 0), num_workers=workers)
    first, second = go(loaders, loader, 2).epochs
    assert first.drawn == second.drawn is not None
    assert first.first == second.first
    assert first.contents == second.contents


def test_workers_that_drew_before_the_loader_was_attached(loaders):
    """Lightning makes the first iterator before it says that training starts."""
    sampler = DistributedSampler(ROWS, 2, 0)
    loader = DataLoader(ROWS, 4, sampler=sampler, num_workers=1)
    iterator = iter(loader)
    loaders.attach("train", 0, loader)
    loaders.epoch_start("train", 0)
    for batch in iterator:
        loaders.record_batch("train", 0, batch)
    loaders.epoch_end("train", 0, ended=True)
    (epoch,) = loaders.facts().loaders[0].epochs
    assert epoch.first == tuple(list(sampler)[:64])


def test_a_loader_that_is_begun_again_within_the_epoch_of_another_stage(loaders):
    """The first epoch goes on with what it drew, though a validation goes over the same loader in between."""
    loader = DataLoader(ROWS, 4, shuffle=True)
    loaders.attach("train", 0, loader)
    loaders.attach("validate", 0, loader)
    loaders.epoch_start("train", 0)
    batches = []
    for number, batch in enumerate(loader):
        batches.append(batch)
        loaders.record_batch("train", 0, batch)
        if number == 1:
            loaders.epoch_start("validate", 0)
            for other in loader:
                loaders.record_batch("validate", 0, other)
            loaders.epoch_end("validate", 0, ended=True)
    trained, validated = loaders.facts().loaders
    rows = torch.cat([rows for rows, _ in batches])[:8, 0] / 3
    assert trained.epochs[0].first[:8] == tuple(int(row) for row in rows)
    assert trained.epochs[0].first != validated.epochs[0].first


def test_a_limit_ends_no_loader(loaders):
    known = go(loaders, DataLoader(ROWS, 4, sampler=SequentialSampler(ROWS)), 2, limit=5)
    assert [(epoch.batches, epoch.ended, epoch.sizes) for epoch in known.epochs] == [(5, False, (4,))] * 2
    assert known.epochs[0].drawn == known.epochs[1].drawn == known.epochs[0].drawn is not None
    assert (known.length, known.limit) == (50, 5)


def test_the_last_batch_tells_no_size(loaders):
    assert go(loaders, DataLoader(ROWS, 64)).epochs[0].sizes == (64,)
    assert go(loaders, DataLoader(ROWS, 64), limit=2, stage="validate").epochs[0].sizes == (64,)


def test_how_many_batches_there_were_is_returned(loaders):
    loaders.attach("train", 0, DataLoader(ROWS, 50))
    loaders.epoch_start("train", 3)
    for batch in DataLoader(ROWS, 50):
        loaders.record_batch("train", 0, batch)
    assert loaders.epoch_end("train", 0, ended=True) == 4
    assert loaders.epoch_end("validate", 0, ended=True) == 0
    assert loaders.facts().loaders[0].epochs[0].epoch == 3


@pytest.mark.parametrize(
    ("batch", "units"),
    [
        (torch.zeros(8, 5, dtype=torch.int64), 40),
        ({"labels": torch.zeros(8), "input_ids": torch.zeros(8, 16, dtype=torch.int32)}, 128),
        ((torch.zeros(8, 5), torch.zeros(8, dtype=torch.int64)), 8),
        (torch.zeros(8, 4, dtype=torch.uint8), 8),
        (["a text"], None),
        (None, None),
    ],
)
def test_units(loaders, batch, units):
    loaders.attach("train", 0, [batch])
    loaders.record_batch("train", 0, batch)
    loaders.record_batch("validate", 0, torch.zeros(10_000, 7, dtype=torch.int64))
    assert loaders.units() == units
    assert loaders.units() is None


def test_the_largest_batch_counts(loaders):
    for size in (3, 9, 4):
        loaders.record_batch("train", 0, torch.zeros(size, 2))
    assert loaders.units() == 9


def test_streams(loaders):
    known = go(loaders, DataLoader(Stream(), 4), 2)
    assert (known.kind, known.length, known.sampler, known.sharded) == ("iterable", None, None, None)
    first, second = known.epochs
    assert first.drawn is None
    assert first.first == ()
    assert first.contents == second.contents
    assert len(set(first.contents)) == 4
    assert first.content == first.contents[0]


def test_workers_that_read_the_same_stream_give_each_batch_twice(loaders):
    contents = go(loaders, DataLoader(Stream(), 4, num_workers=2)).epochs[0].contents
    assert contents[0] == contents[1] != contents[2] == contents[3]


def test_a_batch_that_is_changed_in_place_later(loaders):
    batch = torch.arange(8.0)
    loaders.record_batch("train", 0, batch)
    expected = LoaderHistories()
    expected.record_batch("train", 0, torch.arange(8.0))
    batch.zero_()
    assert loaders.facts().loaders[0].epochs[0].content == expected.facts().loaders[0].epochs[0].content


def test_a_step_count_is_no_data(loaders):
    known = go(loaders, range(5))
    assert (known.kind, known.length, known.loader, known.epochs[0].batches) == ("other", 5, "range", 5)
    assert known.epochs[0].contents == ()


def _share(sampler):
    return (sampler.distributed, sampler.replicas, sampler.rank)


@pytest.mark.parametrize(
    ("sampler", "told"),
    [
        (DistributedSampler(ROWS, 4, 3, seed=7), {"shuffle": True, "seed": 7, "pads": True, "drop_last": False}),
        (DistributedSampler(ROWS, 4, 3, shuffle=False, drop_last=True), {"shuffle": False, "pads": False}),
        (RandomSampler(ROWS), {"shuffle": True, "generator_seed": None, "independent": False}),
        (RandomSampler(ROWS, generator=torch.Generator().manual_seed(5)), {"generator_seed": 5}),
        (RandomSampler(ROWS, num_samples=20), {"independent": True}),
        (RandomSampler(ROWS, replacement=True), {"independent": True}),
        (WeightedRandomSampler([1.0] * 200, 50), {"independent": True, "shuffle": True}),
        (SubsetRandomSampler(range(10)), {"shuffle": True, "independent": False}),
        (SequentialSampler(ROWS), {"shuffle": False}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_samplers(loaders, sampler, told):
    loaders.attach("train", 0, DataLoader(ROWS, 4, sampler=sampler))
    known = loaders.facts().loaders[0].sampler
    assert known.name == type(sampler).__name__
    assert _share(known) == ((True, 4, 3) if isinstance(sampler, DistributedSampler) else (False, None, None))
    assert {name: getattr(known, name) for name in told} == told


def test_a_sampler_of_its_own_that_parts_by_other_words(loaders):
    class Megatron(Shuffling):
        data_parallel_rank, data_parallel_size = 1, 4

        def __init__(self):
            super().__init__(3)
            self.repeat_count = 2

    loaders.attach("train", 0, DataLoader(ROWS, batch_sampler=Megatron()))
    (known,) = loaders.facts().loaders
    assert _share(known.sampler) == (True, 4, 1)
    assert (known.dynamic, known.sampler.repeats, known.batch_size, known.length) == (True, True, None, 3)


def test_the_samplers_of_lightning(loaders):
    distributed = pytest.importorskip("lightning.fabric.utilities.distributed")
    overrides = pytest.importorskip("lightning.pytorch.overrides.distributed")
    wrapper = distributed.DistributedSamplerWrapper(SubsetRandomSampler(range(9)), num_replicas=2, rank=1, seed=3)
    loaders.attach("train", 0, DataLoader(ROWS, 4, sampler=wrapper))
    unrepeated = overrides.UnrepeatedDistributedSampler(ROWS, num_replicas=3, rank=2, shuffle=False)
    predicting = overrides._IndexBatchSamplerWrapper(BatchSampler(unrepeated, 4, False))
    loaders.attach("predict", 0, DataLoader(ROWS, batch_sampler=predicting))
    predict, train = (one.sampler for one in loaders.facts().loaders)
    assert (train.name, train.inner, _share(train)) == (
        "DistributedSamplerWrapper",
        "SubsetRandomSampler",
        (True, 2, 1),
    )
    assert (train.shuffle, train.seed) == (True, 3)
    assert (predict.name, predict.pads, _share(predict)) == ("UnrepeatedDistributedSampler", False, (True, 3, 2))
    assert not loaders.facts().loaders[0].dynamic


def test_the_loaders_of_accelerate(loaders):
    accelerate = pytest.importorskip("accelerate.data_loader")
    loader = DataLoader(ROWS, 4, shuffle=True, generator=torch.Generator().manual_seed(5))
    shard = accelerate.prepare_data_loader(loader, num_processes=2, process_index=1, put_on_device=False)
    known = go(loaders, shard, 2)
    assert (known.loader, known.kind, known.batch_size, known.length) == ("DataLoaderShard", "map", 4, 25)
    assert (known.sampler.name, known.sampler.inner, _share(known.sampler)) == (
        "BatchSamplerShard",
        "RandomSampler",
        (True, 2, 1),
    )
    assert known.sampler.generator_seed is None, "accelerate gives all ranks the same state"
    assert not known.dynamic
    assert all(epoch.drawn for epoch in known.epochs)
    assert len({epoch.drawn for epoch in known.epochs}) == 2
    stream = accelerate.prepare_data_loader(
        DataLoader(Stream(), 4), num_processes=2, process_index=1, put_on_device=False, dispatch_batches=False
    )
    loaders.attach("validate", 0, stream)
    assert loaders.facts().loaders[1].sharded


@pytest.mark.parametrize(
    ("options", "first", "length"),
    [
        ({"batch_size": None}, tuple(range(64)), 200),
        ({"batch_sampler": [[5, 6], [7, 8], [9, 1], [2, 3]]}, (5, 6, 7, 8, 9, 1, 2, 3), 4),
        ({"batch_sampler": [torch.tensor([5, 6, 7, 8]), torch.tensor([1, 2, 3, 4])]}, (5, 6, 7, 8, 1, 2, 3, 4), 2),
        ({"batch_size": 4, "sampler": list(range(10, 20))}, tuple(range(10, 20)), 3),
    ],
    ids=["samples", "lists", "tensors", "a list as sampler"],
)
def test_samplers_of_all_shapes(loaders, options, first, length):
    class Numbers(Dataset):
        def __len__(self):
            return 200

        def __getitem__(self, index):
            return int(index)

    known = go(loaders, DataLoader(Numbers(), **options))
    assert known.epochs[0].first == first
    assert known.epochs[0].drawn
    assert known.length == length


def test_numbers_that_are_no_indices(loaders):
    class Named(Dataset):
        def __getitem__(self, name):
            return len(name)

    names = [f"part-{number}" for number in range(12)]
    first, second = go(loaders, DataLoader(Named(), 4, sampler=names), 2).epochs
    assert first.drawn == second.drawn is not None
    other = go(loaders, DataLoader(Named(), 4, sampler=names[::-1]), stage="validate").epochs[0]
    assert other.drawn != first.drawn


def test_a_loader_whose_length_can_not_be_had(loaders):
    class Endless:
        def __iter__(self):
            return itertools.repeat(torch.zeros(3))

        def __len__(self):
            raise NotImplementedError

    loaders.attach("train", 0, Endless())
    loaders.attach("validate", 0, DataLoader(ROWS, batch_sampler=Endless()))
    assert [one.length for one in loaders.facts().loaders] == [None, None]


class Sized(Stream):
    def __len__(self):
        return 18


@pytest.mark.parametrize(("drop_last", "length"), [(False, 5), (True, 4)])
def test_the_length_of_a_stream_is_not_asked_of_its_loader(loaders, drop_last, length):
    """It would remember it, and warn of each batch beyond it."""
    loader = DataLoader(Sized(), 4, drop_last=drop_last)
    loaders.attach("train", 0, loader)
    assert loaders.facts().loaders[0].length == length
    assert loader._IterableDataset_len_called is None


def _states():
    numpy = sys.modules.get("numpy.random")
    return (random.getstate(), torch.get_rng_state().tolist(), numpy and numpy.get_state()[1].tolist())


@pytest.mark.parametrize("workers", [0, 2])
def test_random_state_is_the_same_with_and_without(workers):
    def train(watched):
        random.seed(3)
        torch.manual_seed(3)
        known = LoaderHistories()
        if watched:
            known.open()
        batches = []
        for stage, loader in (
            ("train", DataLoader(ROWS, batch_sampler=Shuffling(5), num_workers=workers)),
            ("validate", DataLoader(ROWS, 4, shuffle=True)),
        ):
            if watched:
                known.attach(stage, 0, loader)
            for epoch in range(2):
                known.epoch_start(stage, epoch)
                for batch in loader:
                    if watched:
                        known.record_batch(stage, 0, batch)
                    batches.append(batch[0].tolist())
                known.epoch_end(stage, 0, ended=True)
        known.facts()
        known.close()
        return batches, _states()

    assert train(False) == train(True)


def test_torch_is_as_it_was():
    for (
        left_behind
    ) in sample_trace._observers:  # by runs of other tests that were switched off and close in the background
        left_behind.close()
    before = {name: getattr(_BaseDataLoaderIter, name) for name in sample_trace.BEGINS}
    one, other = LoaderHistories(), LoaderHistories()
    one.open()
    other.open()
    assert all(getattr(_BaseDataLoaderIter, name) is not before[name] for name in sample_trace.BEGINS)
    one.close()
    one.close()
    known = go(other, DataLoader(ROWS, 4))
    assert known.epochs[0].first
    other.close()
    assert {name: getattr(_BaseDataLoaderIter, name) for name in sample_trace.BEGINS} == before
    assert sample_trace._observers == ()


def test_an_iterator_is_restored_once_enough_is_known_and_freed_when_abandoned():
    known, long = LoaderHistories(), DataLoader(range(1000), 4)
    known.open()
    iterator = iter(long)
    next(iterator)
    assert "_next_index" in vars(iterator)
    for _ in range(sample_trace.HASHED // 4):
        next(iterator)
    assert "_next_index" not in vars(iterator)
    followed = iter(long)
    next(followed)
    alive = weakref.ref(followed)
    del followed
    assert alive() is None
    known.close()


def test_two_at_once_see_the_same():
    one, other = LoaderHistories(), LoaderHistories()
    loader = DataLoader(ROWS, 4, shuffle=True)
    for known in (one, other):
        known.open()
        known.attach("train", 0, loader)
    for batch in loader:
        one.record_batch("train", 0, batch)
        other.record_batch("train", 0, batch)
    for known in (one, other):
        known.epoch_end("train", 0, ended=True)
        known.close()
    assert one.facts() == other.facts()
    assert one.facts().loaders[0].epochs[0].drawn.startswith("200:")


def test_somebody_who_wraps_the_wrapper(monkeypatch):
    """Theirs stays where it is, and opening again counts nothing twice."""
    known = LoaderHistories()
    known.open()
    ours = _BaseDataLoaderIter.__init__
    monkeypatch.setattr(_BaseDataLoaderIter, "__init__", lambda self, *args: ours(self, *args))
    theirs = _BaseDataLoaderIter.__init__
    known.close()
    assert _BaseDataLoaderIter.__init__ is theirs
    known.open()
    seen = go(known, DataLoader(ROWS, 4))
    known.close()
    assert _BaseDataLoaderIter.__init__ is theirs
    assert seen.epochs[0].first == tuple(range(64))
    assert len(list(DataLoader(ROWS, 4))) == 50


def test_without_the_method_nothing_is_seen_and_a_note_says_so(monkeypatch):
    monkeypatch.delattr(_BaseDataLoaderIter, "_next_index")
    known = LoaderHistories()
    known.open()
    loader = DataLoader(ROWS, 4)
    known.attach("train", 0, loader)
    known.record_batch("train", 0, torch.zeros(4, 3))
    note = known.facts().why_hidden("drawn")
    assert "_next_index" in note.reason
    assert known.facts().loaders[0].epochs[0].drawn is None
    known.close()


def test_an_iterator_that_is_made_otherwise_goes_on(loaders, monkeypatch):
    """Nothing of ours may come out of a user's loader."""
    monkeypatch.setattr(sample_trace, "_is_first", lambda iterator: iterator.no_such_thing)
    before = list(DataLoader(ROWS, 50))
    assert len(before) == 4
    assert "AttributeError" in loaders.facts().why_hidden("drawn").reason
    assert sample_trace._observers == ()


def test_nothing_grows(loaders):
    loader = DataLoader(ROWS, 100, shuffle=True)
    go(loaders, loader, 20)
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.take_snapshot()
    known = go(loaders, loader, 100)
    for _ in range(100):
        list(DataLoader(ROWS, 100, shuffle=True))
    gc.collect()
    after = tracemalloc.take_snapshot()
    tracemalloc.stop()
    ours = [tracemalloc.Filter(True, "*/doctor/monitor/*")]
    growth = sum(one.size_diff for one in after.filter_traces(ours).compare_to(before.filter_traces(ours), "filename"))
    assert growth < 50_000
    assert [epoch.epoch for epoch in known.epochs] == list(range(100 - KEPT_EPOCHS, 100))
    assert sum(bool(epoch.first) for epoch in known.epochs) == 2


def test_loaders_are_freed_when_their_owner_lets_go(loaders):
    data = TensorDataset(torch.zeros(4, 2))
    loader = DataLoader(data, 2)
    go(loaders, loader)
    gone = weakref.ref(data)
    del loader, data
    gc.collect()
    assert gone() is None
    assert loaders.facts().loaders[0].epochs[0].batches == 2


def test_a_loader_attached_anew_keeps_its_record(loaders):
    go(loaders, DataLoader(ROWS, 50), 2)
    loaders.attach("train", 0, DataLoader(ROWS, 25), 3)
    loaders.epoch_start("train", 2)
    loaders.record_batch("train", 0, torch.zeros(25, 3))
    known = loaders.facts().loaders[0]
    assert (known.batch_size, known.limit) == (25, 3)
    assert [epoch.epoch for epoch in known.epochs] == [0, 1, 2]


def test_an_epoch_that_begins_anew_replaces_what_was_known_of_it(loaders):
    """A second ``fit`` counts from 0 again."""
    go(loaders, DataLoader(ROWS, 50), 3)
    known = go(loaders, DataLoader(ROWS, 100), 2)
    assert [(epoch.epoch, epoch.batches) for epoch in known.epochs] == [(0, 2), (1, 2)]
