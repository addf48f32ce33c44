from msgspec.structs import replace

from doctor.estimate.data_model import TrainingPlan
from doctor.estimate.suggestions import candidates, helps, traced_suggestion


def names(plan, batch=16, largest=None):
    return [one.name for one in candidates(plan, batch, largest)]


def test_what_can_be_tried_depends_on_what_is_done_already():
    assert names(TrainingPlan()) == ["accumulation", "bf16-mixed", "checkpointing", "adafactor"]
    assert names(TrainingPlan(strategy="ddp", devices=8)) == [
        "accumulation",
        "bf16-mixed",
        "checkpointing",
        "fsdp2",
        "adafactor",
    ]
    done = TrainingPlan(strategy="fsdp2", devices=8, precision="bf16-true", checkpointing=True, optimizer="SGD")
    assert names(done, batch=1) == []
    assert names(TrainingPlan(strategy="deepspeed-2", devices=8))[3] == "deepspeed-3"
    assert names(TrainingPlan(precision="16-mixed"))[1] == "bf16-true"


def test_sharing_is_the_first_thing_to_be_undone():
    shared = TrainingPlan(strategy="ddp", ranks_per_device=2)
    assert names(shared)[0] == "fewer ranks"
    assert "fsdp2" not in names(shared)


def test_accumulation_keeps_the_samples_of_a_step():
    (one, *_) = candidates(TrainingPlan(accumulate=2), 64)
    assert (one.plan.batch_size, one.plan.accumulate) == (32, 4)
    (one, *_) = candidates(TrainingPlan(), 64, largest=9)
    assert (one.plan.batch_size, one.plan.accumulate) == (8, 8)
    assert one.words == "8 samples per micro-batch, 8 micro-batches per step"
    (one, *_) = candidates(TrainingPlan(), 2)
    assert one.words == "1 sample per micro-batch, 2 micro-batches per step"


def test_what_saves_the_most_comes_first():
    plan = TrainingPlan()
    peaks = {"accumulation": 60, "bf16-mixed": 101, "checkpointing": 30, "adafactor": None}
    found = list(candidates(plan, 16))
    by_plan = {one.plan: peaks[one.name] for one in found}
    ways, untried = traced_suggestion(found, plan, 100, by_plan.__getitem__)
    assert [(way.name, way.saved_bytes) for way in ways] == [
        ("checkpointing", 70),
        ("accumulation", 40),
        ("bf16-mixed", -1),
    ]
    assert untried == ("adafactor",)


def test_savings_are_counted_on_the_device():
    plan = TrainingPlan(strategy="ddp", ranks_per_device=2)
    found = list(candidates(plan, 1))
    ways, _ = traced_suggestion(found, plan, 100, lambda other: 100 if other.ranks_per_device == 1 else 80)
    assert {way.name: way.saved_bytes for way in ways}["fewer ranks"] == 100
    assert {way.name: way.saved_bytes for way in ways}["bf16-mixed"] == 40


def test_what_neither_saves_nor_lets_a_larger_batch_in_is_not_told():
    (way,), _ = traced_suggestion(
        list(candidates(TrainingPlan(checkpointing=True, optimizer="sgd"), 1)), TrainingPlan(), 1000, lambda _: 999
    )
    assert not helps(way, 1000, 100)
    assert not helps(replace(way, largest_batch=104), 1000, 100)
    assert helps(replace(way, largest_batch=180), 1000, 100)
    assert helps(replace(way, saved_bytes=50), 1000, None)
