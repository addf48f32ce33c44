from msgspec.structs import replace

from doctor.estimate.plan import Plan
from doctor.estimate.ways import candidates, helps, tried


def names(plan, batch=16, largest=None):
    return [one.name for one in candidates(plan, batch, largest)]


def test_what_can_be_tried_depends_on_what_is_done_already():
    assert names(Plan()) == ["accumulation", "bf16-mixed", "checkpointing", "adafactor"]
    assert names(Plan(strategy="ddp", devices=8)) == [
        "accumulation",
        "bf16-mixed",
        "checkpointing",
        "fsdp2",
        "adafactor",
    ]
    done = Plan(strategy="fsdp2", devices=8, precision="bf16-true", checkpointing=True, optimizer="SGD")
    assert names(done, batch=1) == []
    assert names(Plan(strategy="deepspeed-2", devices=8))[3] == "deepspeed-3"
    assert names(Plan(precision="16-mixed"))[1] == "bf16-true"


def test_sharing_is_the_first_thing_to_be_undone():
    shared = Plan(strategy="ddp", ranks_per_device=2)
    assert names(shared)[0] == "fewer ranks"
    assert "fsdp2" not in names(shared)


def test_accumulation_keeps_the_samples_of_a_step():
    (one, *_) = candidates(Plan(accumulate=2), 64)
    assert (one.plan.batch_size, one.plan.accumulate) == (32, 4)
    (one, *_) = candidates(Plan(), 64, largest=9)
    assert (one.plan.batch_size, one.plan.accumulate) == (8, 8)


def test_what_saves_the_most_comes_first():
    plan = Plan()
    peaks = {"accumulation": 60, "bf16-mixed": 101, "checkpointing": 30, "adafactor": None}
    found = list(candidates(plan, 16))
    by_plan = {one.plan: peaks[one.name] for one in found}
    ways, untried = tried(found, plan, 100, by_plan.__getitem__)
    assert [(way.name, way.saved_bytes) for way in ways] == [
        ("checkpointing", 70),
        ("accumulation", 40),
        ("bf16-mixed", -1),
    ]
    assert untried == ("adafactor",)


def test_savings_are_counted_on_the_device():
    plan = Plan(strategy="ddp", ranks_per_device=2)
    found = list(candidates(plan, 1))
    ways, _ = tried(found, plan, 100, lambda other: 100 if other.ranks_per_device == 1 else 80)
    assert {way.name: way.saved_bytes for way in ways}["fewer ranks"] == 100
    assert {way.name: way.saved_bytes for way in ways}["bf16-mixed"] == 40


def test_what_neither_saves_nor_lets_a_larger_batch_in_is_not_told():
    (way,), _ = tried(list(candidates(Plan(checkpointing=True, optimizer="sgd"), 1)), Plan(), 1000, lambda _: 999)
    assert not helps(way, 1000, 100)
    assert not helps(replace(way, largest_batch=104), 1000, 100)
    assert helps(replace(way, largest_batch=180), 1000, 100)
    assert helps(replace(way, saved_bytes=50), 1000, None)
