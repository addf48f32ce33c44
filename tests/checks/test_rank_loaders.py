"""Who reads what: loaders side by side, equal orders, equal contents, and who deviates by a count."""

import pytest

from doctor.facts import Loader, LoaderEpoch, LoaderFacts, MissingReason, TrainingFacts
from doctor.testing import in_a_loop, running, with_loader
from doctor.testing.loader_cases import drawing
from doctor_checks.data._rank_loaders import (
    advice,
    divided_loaders,
    effect_of_waiting,
    limit_argument,
    loader_hook,
    newest_common_epoch,
    odd_by_count,
    peer_loaders,
    same_contents,
    same_data_set,
    same_order,
    shared_draws,
    shared_draws_by_position,
    why_not_divided,
)


@pytest.mark.parametrize(
    ("counts", "odd"),
    [
        ({0: 20, 1: 20, 2: 21}, (2,)),
        ({0: 20, 1: 21, 2: 21}, (0,)),
        ({0: 20, 1: 21}, (1,)),
        ({0: 21, 1: 20, 2: 21, 3: 20}, (0, 2)),
        ({0: 20, 1: 21, 2: 22}, (1, 2)),
        ({0: 20, 1: 20}, ()),
        ({}, ()),
    ],
)
def test_who_deviates(counts, odd):
    assert odd_by_count(counts) == odd


@pytest.mark.parametrize(
    ("batches", "trains", "effect"),
    [
        ({0: 20, 1: 21}, False, "After 20 batches, rank 1 waits for rank 0 until a collective times out."),
        (
            {0: 20, 1: 21, 2: 22},
            True,
            "After 20 batches, ranks 1 and 2 wait for rank 0 until a collective times out. "
            "If rank 0 continues with another epoch, gradients of different steps are averaged without an error.",
        ),
    ],
)
def test_who_waits_for_whom(batches, trains, effect):
    assert effect_of_waiting(batches, trains=trains) == effect


@pytest.mark.parametrize(
    ("length", "limit", "batches"), [(10, None, 10), (10, 4, 4), (10, 40, 10), (None, 4, None), (None, None, None)]
)
def test_batches_of_an_epoch(length, limit, batches):
    assert Loader("train", length=length, limit=limit).batches == batches


def test_readers_by_stage_and_index():
    job = with_loader(with_loader(running(1, 3), stage="validate", index=1), ranks=(2,), length=7).job()
    train, validate = peer_loaders(job, ("train", "validate"))
    assert (train.stage, train.name, train.ranks) == ("train", "training loader", (0, 1, 2))
    assert (validate.name, validate.index) == ("validation loader 1", 1)
    assert [reader.loader.length for reader in train.members] == [100, 100, 7]
    assert train.at([2, 0]) == (0, 2)
    assert peer_loaders(job, ("test",)) == ()


def test_readers_without_a_trainer():
    job = running().drop(TrainingFacts, MissingReason.FAILED).job()
    (readers,) = peer_loaders(job, ("train",))
    assert readers.data_ranks == {}
    assert divided_loaders(job, ("train",)) == ()


def test_one_reader_for_ranks_of_one_replica():
    sketch = running(1, 4).alter(TrainingFacts, ranks=(2, 3), data_parallel_rank=1)
    (readers,) = peer_loaders(sketch.alter(TrainingFacts, ranks=(0, 1), data_parallel_rank=0).job(), ("train",))
    assert {data_rank: reader.rank for data_rank, reader in readers.data_ranks.items()} == {0: 0, 1: 2}
    assert readers.at([1]) == (2, 3)


def test_each_group_of_a_loop_by_itself():
    job = in_a_loop(running(1, 5), (0, 2), (1, 3)).job()
    (readers,) = peer_loaders(job, ("train",))
    groups = [(group.ranks, group.is_one_job) for group in readers.by_group()]
    assert groups == [((4,), False), ((0, 2), True), ((1, 3), True)]
    assert [(one.ranks, one.at([1])) for one in divided_loaders(job, ("train",))] == [((0, 2), (2,)), ((1, 3), (3,))]


def test_ranks_that_part_the_data_between_all_of_them_do_one_job():
    sketch = running(1, 2).alter(TrainingFacts, framework="plain")
    (readers,) = peer_loaders(sketch.job(), ("train",))
    assert readers.is_one_job
    (readers,) = peer_loaders(sketch.alter(TrainingFacts, data_parallel_size=1).job(), ("train",))
    assert not readers.is_one_job


@pytest.mark.parametrize(
    ("sketch", "words"),
    [
        (running().alter(LoaderFacts, loaders=()), "no loader of this kind"),
        (running().alter(TrainingFacts, data_parallel_rank=None), "unknown"),
        (running(1, 1), "a single data-parallel rank"),
    ],
)
def test_why_nothing_is_parted(sketch, words):
    assert words in why_not_divided(sketch.job(), ("train",))


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (LoaderEpoch(0, drawn="a"), LoaderEpoch(1, drawn="a"), True),
        (LoaderEpoch(0, drawn="a"), LoaderEpoch(1, drawn="b"), False),
        (LoaderEpoch(0, drawn="a"), LoaderEpoch(1), None),
        (drawing(0, range(20)), drawing(1, range(9)), True),
        (drawing(0, range(20)), drawing(1, range(1, 21)), False),
        (drawing(0, range(7)), drawing(1, range(7)), None),
    ],
)
def test_the_same_order(one, other, same):
    assert same_order(one, other) is same


def _gave(*contents):
    return LoaderEpoch(0, contents=contents)


@pytest.mark.parametrize(
    ("one", "other", "share"),
    [
        (_gave("a-l", "b-m"), _gave("a-l", "b-m"), 1.0),
        (_gave("a-l", "b-m"), _gave("c-l", "d-m"), 0.5),
        (_gave("a-l", "b-m"), _gave("c-n", "d-o"), 0.0),
        (_gave("a-0", "b-0"), _gave("c-0", "d-0"), 0.0),
        (_gave("a-l", "b-m", "c-n"), _gave("a-l", "b-m"), 1.0),
        (_gave("0", "0"), _gave("0", "0"), None),
        (_gave("0", "0"), _gave("a", "b"), 0.0),
        (_gave("a"), _gave("a"), None),
        (_gave(), _gave("a", "b"), None),
    ],
)
def test_the_same_contents(one, other, share):
    assert same_contents(one, other) == share


def test_the_same_data_set():
    loader = Loader("train", dataset="Images", dataset_length=9, fingerprint="f")
    assert same_data_set(loader, loader)
    assert same_data_set(loader, Loader("train", dataset="Images", dataset_length=9)) is None
    assert same_data_set(loader, Loader("train", dataset="Images", dataset_length=9, fingerprint="g")) is False
    assert same_data_set(loader, Loader("train", dataset="Images", dataset_length=8)) is False
    assert same_data_set(loader, Loader("train", dataset="Texts", dataset_length=9)) is False


def test_draws_at_the_same_place_and_anywhere():
    epochs = {0: drawing(0, range(10)), 1: drawing(0, range(9, -1, -1)), 2: drawing(0, (*range(5), *range(90, 99)))}
    assert shared_draws_by_position(epochs) == {0: 0.5, 1: 0.0, 2: 0.5}
    assert shared_draws(epochs) == {0: 1.0, 1: 1.0, 2: pytest.approx(5 / 14)}
    assert shared_draws_by_position({}) == {}
    hashes = {0: LoaderEpoch(0, drawn="a"), 1: LoaderEpoch(0, drawn="a"), 2: LoaderEpoch(0, drawn="b")}
    assert shared_draws_by_position(hashes) == {0: 1.0, 1: 1.0, 2: 0.0}


def test_the_newest_epoch_that_two_have_drawn():
    old, new, newer = drawing(0, range(9)), drawing(1, range(9)), drawing(2, range(9))
    assert newest_common_epoch({0: (old, new), 1: (old, new, newer), 2: (old,)}) == {0: new, 1: new}
    assert newest_common_epoch({0: (old, new), 1: (newer,)}) == {}
    assert newest_common_epoch({0: (drawing(0, range(3)),), 1: (drawing(0, range(3)),)}) == {}


@pytest.mark.parametrize(
    ("framework", "word"),
    [("lightning", "a"), ("pytorch_lightning", "a"), ("transformers", "b"), ("plain", "c")],
)
def test_words_for_who_runs_the_loop(framework, word):
    job = running().alter(TrainingFacts, framework=framework).job()
    assert advice(job, lightning="a", transformers="b", plain="c") == word
    assert advice(job, lightning="a", plain="c") == ("a" if word == "a" else "c")


def test_names_of_lightning():
    assert [loader_hook(stage) for stage in ("train", "validate")] == ["train_dataloader", "val_dataloader"]
    assert limit_argument("predict") == "limit_predict_batches"
