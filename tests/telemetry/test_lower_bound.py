"""The floor of a training's memory is exactly what parameters, gradients and optimizer hold after a real step."""

import msgspec
import pytest

from tests.lab.cases import each_case

pytest.importorskip("torch")

import torch

from doctor.core.facts import RunMemoryFacts
from doctor.monitor.telemetry.memory.lower_bound import memory_lower_bound
from doctor.monitor.telemetry.memory.memory_samples import MemorySampler
from tests.telemetry.test_memory_samples import MIB, Card

SCALARS = 16
"""Bytes of a step counter of torch's optimizers and less, which are on the CPU or of no weight."""


def _net(**options):
    return torch.nn.Sequential(torch.nn.Linear(64, 96, **options), torch.nn.BatchNorm1d(96), torch.nn.Linear(96, 8))


def _step(module, *optimizers):
    module(torch.randn(4, 64)).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()


def _held(module, *optimizers):
    """Bytes after a step, each storage once, and how many scalars are among them."""
    states = [state for one in optimizers for state in one.state.values()]
    kept = [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
    gradients = [one.grad for one in module.parameters() if one.grad is not None]
    every = [*module.parameters(), *module.buffers(), *gradients, *kept]
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in every}
    return sum(storages.values()), sum(1 for one in kept if one.ndim == 0)


@each_case(
    ("name", "options"),
    [
        ("Adadelta", {}),
        ("Adagrad", {}),
        ("Adam", {}),
        ("Adam", {"amsgrad": True}),
        ("AdamW", {}),
        ("Adamax", {}),
        ("NAdam", {}),
        ("RAdam", {}),
        ("RMSprop", {}),
        ("RMSprop", {"centered": True, "momentum": 0.9}),
        ("SGD", {}),
        ("SGD", {"momentum": 0.9}),
    ],
)
def test_it_is_what_a_step_leaves(name, options):
    module = _net()
    optimizer = getattr(torch.optim, name)(module.parameters(), lr=1e-3, **options)
    floor = memory_lower_bound(module, [optimizer])
    _step(module, optimizer)
    held, scalars = _held(module, optimizer)
    assert 0 <= held - floor <= SCALARS * scalars


@pytest.mark.parametrize("name", ["Adafactor", "ASGD", "Rprop", "LBFGS"])
def test_of_other_optimizers_it_is_no_more_than_that(name):
    module = _net()
    optimizer = getattr(torch.optim, name)(module.parameters())
    module(torch.randn(4, 64)).square().mean().backward()
    assert memory_lower_bound(module, [optimizer]) <= _held(module)[0]


def test_a_class_of_the_users_own_may_keep_less_than_the_one_that_it_comes_from():
    class Adam(torch.optim.Adam):
        pass

    module = _net()
    assert memory_lower_bound(module, [Adam(module.parameters())]) == memory_lower_bound(
        module, [torch.optim.SGD(module.parameters())]
    )


def test_frozen_parameters_have_nothing_beside_them():
    module = _net()
    module[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(module.parameters())
    floor = memory_lower_bound(module, [optimizer])
    _step(module, optimizer)
    held, scalars = _held(module, optimizer)
    assert 0 <= held - floor <= SCALARS * scalars


def test_weights_that_are_tied_count_once():
    module = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False), torch.nn.Linear(64, 64, bias=False))
    module[1].weight = module[0].weight
    assert memory_lower_bound(module, [torch.optim.SGD(module.parameters(), momentum=0.9)]) == 3 * 64 * 64 * 4


def test_optimizers_that_take_turns_share_the_place_of_gradients():
    first, second = torch.nn.Linear(64, 96, bias=False), torch.nn.Linear(96, 8, bias=False)
    module = torch.nn.Sequential(first, second)
    optimizers = [torch.optim.Adam(one.parameters()) for one in (first, second)]
    assert memory_lower_bound(module, optimizers) == 3 * 4 * (64 * 96 + 96 * 8) + 4 * 64 * 96


def test_buckets_of_ddp_are_a_second_set_of_gradients():
    module = torch.nn.Linear(64, 96, bias=False)
    optimizer = torch.optim.SGD(module.parameters())
    assert (
        memory_lower_bound(module, [optimizer], buckets=True) == memory_lower_bound(module, [optimizer]) + 64 * 96 * 4
    )


def test_what_is_elsewhere_does_not_count():
    module = torch.nn.Sequential(torch.nn.Linear(64, 96, bias=False), torch.nn.Linear(96, 8, bias=False, device="meta"))
    assert memory_lower_bound(module, [torch.optim.Adam(module.parameters())]) == 4 * 64 * 96 * 4
    assert memory_lower_bound(torch.nn.Identity(), []) is None


def test_a_shard_counts_as_what_this_rank_holds_of_it():
    class Sharded:
        def __init__(self, whole, own):
            self._local_tensor, self.requires_grad, self._whole = own, True, whole

        def numel(self):
            return self._whole

    own = torch.zeros(96)
    module = type(
        "Module", (), {"parameters": lambda self: iter([Sharded(960, own)]), "buffers": lambda self: iter(())}
    )()
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], momentum=0.9)
    optimizer.param_groups[0]["params"] = [Sharded(960, own)]
    assert memory_lower_bound(module, [optimizer]) == 3 * 96 * 4


def test_nothing_is_drawn_or_allocated():
    module = _net()
    optimizer = torch.optim.AdamW(module.parameters())
    before = torch.get_rng_state()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        memory_lower_bound(module, [optimizer], buckets=True)
    assert not [event for event in profiler.events() if event.cpu_memory_usage > 0]
    assert torch.equal(before, torch.get_rng_state())
    assert all(one.grad is None for one in module.parameters())


def test_the_measured_peak_replaces_it_and_its_error_is_kept():
    memory = MemorySampler()
    memory.lower_bound = 6 * MIB
    memory._device = Card()
    assert (memory.facts().estimated_floor, memory.facts().estimate_error) == (6 * MIB, None)
    memory._device.now = msgspec.structs.replace(memory._device.now, peak_allocated=8 * MIB)
    memory.sample(50, None)
    assert (memory.facts().estimated_floor, memory.facts().estimate_error) == (6 * MIB, -0.25)


def test_without_a_floor_there_is_no_error():
    memory = MemorySampler()
    memory._device = Card()
    memory.sample(50, None)
    assert (memory.facts().estimated_floor, memory.facts().estimate_error) == (None, None)


def test_records_of_an_older_doctor_have_none():
    old = msgspec.json.decode(b'{"device": "cuda:0", "peak_allocated": 7}', type=RunMemoryFacts)
    assert (old.peak_allocated, old.estimated_floor, old.estimate_error) == (7, None, None)
