"""The answer, over a step whose peak is a sum that can be worked out by hand."""

import pytest
from msgspec.structs import replace

from doctor.api import Status
from doctor.core.check_registry import load_registry
from doctor.core.errors import UnusableError
from doctor.core.settings import Settings
from doctor.estimate.data_model import LoaderUse, MemoryBreakdown, TracedStep, TrainingPlan, plan_of
from doctor.estimate.device_budget import DeviceBudget, device_budget_of, with_host_memory
from doctor.estimate.estimator import estimate_of, upper_end, within_range
from doctor.estimate.evaluation import report_of
from doctor.estimate.memory.non_torch import outside
from doctor.facts import HostFacts

MIB, GIB = 1 << 20, 1 << 30
WEIGHTS, SAMPLE = 4 * GIB, 700 * MIB


class Step:
    """Traces of a model of 4 GiB of weights with Adam; counts them, and takes ``seconds`` for each by its own clock."""

    def __init__(self, *, batch=16, seconds=1.0, bound="", fails=()):
        self.batch, self.seconds, self.bound, self.fails = batch, seconds, bound, fails
        self.plans, self.time = [], 0.0

    def now(self):
        return self.time

    def __call__(self, plan):
        self.plans.append(plan)
        self.time += self.seconds
        if plan.precision in self.fails or plan.optimizer in self.fails:
            raise UnusableError("an operation is not known")
        batch = plan.batch_size or self.batch
        ranks = plan.world_size if plan.strategy == "fsdp2" else 1
        sample = SAMPLE // (2 if plan.precision == "bf16-mixed" else 1) // (5 if plan.checkpointing else 1)
        parts = MemoryBreakdown(
            parameters=WEIGHTS // ranks,
            gradients=WEIGHTS // ranks,
            optimizer=0 if plan.optimizer == "adafactor" else 2 * WEIGHTS // ranks,
            activations=batch * sample,
        )
        return TracedStep(
            plan=plan,
            parts=parts,
            moment="backward",
            reserved=parts.total + 512 * MIB,
            batch_size=batch,
            parameter_count=WEIGHTS // 4,
            parameter_bytes=WEIGHTS,
            trainable_count=WEIGHTS // 4,
            batch_bytes=MIB,
            bound=self.bound,
        )


ONE, OFFER = TrainingPlan(), DeviceBudget(memory=80 * GIB, name="80GiB")


def asked(plan=ONE, offer=OFFER, step=None, seconds=600.0):
    step = step or Step()
    return estimate_of(step, LoaderUse(), plan, offer, seconds=seconds, now=step.now)


def judged(estimate, offer=OFFER, **settings):
    return report_of(estimate, offer, load_registry(plugins=False), Settings(**settings), started=0.0)


def status(report, check_id):
    return report.result(check_id).status


def by_hand(limit, base, sample):
    return (within_range(limit) - base) // sample


BASE = 4 * WEIGHTS + 512 * MIB + outside(TrainingPlan())


def test_the_peak_and_its_parts():
    estimate = asked()
    assert estimate.peak_bytes == BASE + 16 * SAMPLE
    assert estimate.peak_bytes == estimate.parts.total - estimate.parts.others
    assert estimate.parts.rounding == 512 * MIB
    assert estimate.parts.context == outside(TrainingPlan())
    assert (estimate.batch_size, estimate.plan.batch_size) == (16, 16)
    assert estimate.when.startswith("in the backward pass")
    assert estimate.fits is True


def test_the_largest_batch_is_exact_and_was_traced():
    step = Step()
    estimate = asked(step=step)
    largest = by_hand(80 * GIB, BASE, SAMPLE)
    assert (estimate.largest_batch, estimate.searched) == (largest, True)
    traced = {plan.batch_size for plan in step.plans if replace(plan, batch_size=None) == TrainingPlan()}
    assert {largest, largest + 1} <= traced
    assert estimate.sample_bytes == SAMPLE


def test_the_job_is_traced_once_for_a_batch():
    step = Step()
    asked(step=step)
    assert len(step.plans) == len(set(step.plans))


def test_every_way_is_traced_and_has_its_largest_batch():
    ways = {way.name: way for way in asked(TrainingPlan(strategy="ddp", devices=8)).ways}
    assert set(ways) == {"accumulation", "bf16-mixed", "checkpointing", "fsdp2", "adafactor"}
    assert ways["bf16-mixed"].saved_bytes == 16 * SAMPLE // 2
    assert ways["adafactor"].saved_bytes == 2 * WEIGHTS
    assert ways["fsdp2"].saved_bytes == 4 * WEIGHTS - 4 * WEIGHTS // 8
    outside_eight = outside(TrainingPlan(strategy="fsdp2", devices=8))
    exact = by_hand(80 * GIB, WEIGHTS // 2 + 512 * MIB + outside_eight, SAMPLE)
    assert 0.97 * exact <= ways["fsdp2"].largest_batch <= exact


def test_time_is_kept_and_what_there_was_none_for_is_said():
    step = Step(seconds=10.0)
    estimate = asked(step=step, seconds=45.0)
    assert step.time <= 60.0
    assert estimate.largest_batch
    assert any("the --timeout expired" in note for note in estimate.notes)


def test_a_search_that_takes_long_leaves_time_for_the_ways():
    step = Step(seconds=10.0)
    estimate = asked(step=step, seconds=25.0)
    assert not estimate.searched
    assert len(estimate.ways) == 1


def test_no_time_at_all_still_gives_the_peak():
    step = Step(seconds=10.0)
    estimate = asked(step=step, seconds=1.0)
    assert len(step.plans) == 1
    assert estimate.peak_bytes == BASE + 16 * SAMPLE
    assert estimate.fits
    assert (estimate.largest_batch, estimate.searched) == (16, False)
    assert "cut short, the --timeout expired" in " ".join(estimate.notes)


def test_what_the_time_was_spent_on_is_said():
    step = Step(seconds=10.0)
    estimate = estimate_of(step, LoaderUse(), ONE, OFFER, seconds=45.0, loading_seconds=7.0, now=step.now)
    spent = "loading the model 7 s; the job itself 10 s; the largest batch 20 s, 2 traces; suggestions 20 s, 2 traces"
    assert f"the --timeout was spent on: {spent}" in estimate.notes
    assert estimate.seconds == 57.0
    assert not any(way.searched for way in estimate.ways if way.largest_batch)
    assert "spent on" not in " ".join(asked().notes)


def test_the_peak_alone_takes_one_trace():
    step = Step()
    estimate = estimate_of(step, LoaderUse(), ONE, OFFER, seconds=600.0, peak_only=True, notes=("read",), now=step.now)
    assert len(step.plans) == 1
    assert (estimate.peak_bytes, estimate.fits) == (BASE + 16 * SAMPLE, True)
    assert (estimate.largest_batch, estimate.searched, estimate.ways) == (None, None, ())
    assert estimate.notes[0] == "read"


def test_a_variant_that_fails_is_said_and_the_rest_stands():
    estimate = asked(step=Step(fails=("bf16-mixed",)))
    assert "not tried, it cannot be traced: bf16-mixed" in estimate.notes
    assert {way.name for way in estimate.ways} == {"accumulation", "checkpointing", "adafactor"}


def test_a_job_that_can_not_be_traced_is_an_error():
    with pytest.raises(UnusableError, match="not known"):
        asked(step=Step(fails=("32-true",)))


def test_without_a_device_there_is_a_peak_and_what_a_sample_takes():
    estimate = asked(offer=DeviceBudget())
    assert (estimate.fits, estimate.largest_batch) == (None, None)
    assert estimate.sample_bytes == SAMPLE
    assert all(way.largest_batch is None for way in estimate.ways)
    report = judged(estimate, DeviceBudget())
    assert {result.status for result in report.results} == {Status.UNKNOWN}
    assert report.exit_code == 0


def test_what_fits_is_ok_and_its_twin_is_not():
    largest = by_hand(80 * GIB, BASE, SAMPLE)
    for batch, code, state in ((largest, 0, Status.PASS), (largest + 1, 1, Status.FAIL)):
        report = judged(asked(TrainingPlan(batch_size=batch)))
        assert (report.exit_code, status(report, "MEM005")) == (code, state)
    assert f"at most {largest} per rank (now" in report.result("MEM005").findings[0].fix


def test_nothing_fits():
    estimate = asked(offer=DeviceBudget(memory=10 * GIB))
    assert (estimate.fits, estimate.largest_batch) == (False, None)
    assert estimate.searched


def test_what_others_hold_counts():
    offer = DeviceBudget(memory=80 * GIB, others=40 * GIB)
    estimate = asked(offer=offer)
    assert estimate.largest_batch == by_hand(40 * GIB, BASE, SAMPLE)
    assert estimate.parts.others == 40 * GIB
    full = DeviceBudget(memory=80 * GIB, others=70 * GIB)
    report = judged(asked(offer=full), full)
    assert status(report, "MEM005") is Status.FAIL


def test_ranks_on_one_device_share_it():
    plan = TrainingPlan(strategy="ddp", ranks_per_device=2)
    estimate = asked(plan)
    alone = 4 * WEIGHTS + 512 * MIB + outside(plan)
    assert estimate.largest_batch == by_hand(40 * GIB, alone, SAMPLE)
    assert estimate.parts.others == estimate.peak_bytes
    assert estimate.fits
    assert any("NCCL refuses" in note for note in estimate.notes)
    assert status(judged(estimate), "GPU007") is Status.PASS
    report = judged(asked(replace(plan, batch_size=estimate.largest_batch + 1)))
    assert status(report, "GPU007") is Status.FAIL
    assert report.result("GPU007").findings[0].ranks == (0, 1)
    assert {way.name: way for way in estimate.ways}["fewer ranks"].largest_batch > estimate.largest_batch


def test_ranks_on_one_device_share_what_others_leave():
    offer = DeviceBudget(memory=80 * GIB, others=30 * GIB)
    plan = TrainingPlan(strategy="ddp", ranks_per_device=2, batch_size=16)
    estimate = asked(plan, offer)
    assert estimate.fits is False
    assert status(judged(estimate, offer), "GPU007") is Status.FAIL


def test_several_devices_with_several_ranks_each():
    plan = TrainingPlan(strategy="ddp", devices=2, ranks_per_device=2, batch_size=40)
    report = judged(asked(plan))
    assert [finding.ranks for finding in report.result("GPU007").findings] == [(0, 2), (1, 3)]


def test_a_bound_that_fits_is_an_answer():
    estimate = asked(step=Step(bound="a data-dependent operation"))
    assert estimate.fits is True
    assert judged(estimate).exit_code == 0


def test_a_bound_that_does_not_fit_proves_nothing():
    estimate = asked(TrainingPlan(batch_size=400), step=Step(bound="a data-dependent operation"))
    report = judged(estimate)
    assert estimate.fits is None
    assert (report.exit_code, report.verdict) == (3, "inconclusive")
    assert status(report, "MEM005") is Status.UNKNOWN
    assert "a data-dependent operation" in report.result("MEM005").reason


def test_a_batch_without_a_size_gives_the_peak_alone():
    class Odd(Step):
        def __call__(self, plan):
            return replace(super().__call__(plan), batch_size=0)

    estimate = asked(step=Odd())
    assert estimate.batch_size == 0
    assert estimate.largest_batch is None
    assert estimate.fits
    assert "no common first dimension" in " ".join(estimate.notes)


def test_the_memory_of_the_node_is_judged():
    offer = DeviceBudget(memory=80 * GIB)
    eight = TrainingPlan(strategy="ddp", devices=8)
    estimate = asked(eight, offer)
    assert estimate.host.total == 8 * 6 * GIB
    assert status(judged(estimate, offer), "MEM008") is Status.UNKNOWN
    assert status(judged(estimate, with_host_memory(offer, "64GiB")), "MEM008") is Status.PASS
    assert status(judged(estimate, with_host_memory(offer, "32GiB")), "MEM008") is Status.FAIL
    assert with_host_memory(offer, "32GiB").host == HostFacts(
        hostname="node", ram_total=32 * GIB, ram_available=32 * GIB
    )


def test_the_document():
    report = judged(asked())
    assert report.job is None
    assert [result.id for result in report.results] == ["GPU007", "MEM005", "MEM008"]
    assert report.estimate["peak_bytes"] == BASE + 16 * SAMPLE
    assert set(report.estimate["parts"]) >= {"parameters", "gradients", "optimizer", "activations", "context"}
    assert {"when", "largest_batch", "ways", "host", "fits"} <= set(report.estimate)


def test_what_is_selected_and_ignored_counts():
    report = judged(asked(TrainingPlan(batch_size=400)), fail_on="never")
    assert (report.exit_code, report.verdict) == (0, "fail")


def test_the_plan_is_what_was_typed_over_what_the_trainer_says():
    trainer = TrainingPlan(strategy="fsdp", devices=4, precision="bf16-mixed", accumulate=2)
    assert plan_of({"devices": None, "precision": "16-mixed"}, trainer) == replace(trainer, precision="16-mixed")
    assert plan_of({"devices": 8}, None).strategy == "ddp"
    assert plan_of({"devices": 8, "strategy": "none"}, None).strategy == "none"
    assert plan_of({"ranks_per_device": 2}, None).strategy == "ddp"
    assert plan_of({}, None) == TrainingPlan()
    with pytest.raises(UnusableError, match="too large to estimate"):
        plan_of({"devices": 1 << 20, "nodes": 1 << 20}, None)


def test_a_named_device():
    offer = device_budget_of(None, "H100 80GB", None)
    estimate = asked(offer=offer)
    assert (estimate.device_name, estimate.device_memory) == ("H100 80GB", offer.memory)
    assert estimate.parts.context == outside(TrainingPlan(), "9.0")


def test_a_job_fits_where_the_upper_end_of_its_range_does():
    peak = BASE + 16 * SAMPLE
    estimate = asked()
    assert (estimate.allocated_bytes, estimate.reserved_bytes) == (peak - outside(ONE) - 512 * MIB, peak - outside(ONE))
    assert estimate.low_bytes < estimate.peak_bytes == peak < estimate.high_bytes == upper_end(peak)
    just, short = (DeviceBudget(memory=upper_end(peak) + more, name="") for more in (0, -1))
    assert asked(offer=just).fits
    assert asked(offer=short).fits is False
    assert upper_end(within_range(80 * GIB)) <= 80 * GIB < upper_end(within_range(80 * GIB) + 2)
