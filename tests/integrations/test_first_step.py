"""What the first step of a loop shows, and that nothing of the observation remains."""

import pytest

torch = pytest.importorskip("torch")

from torch.nn.utils import clip_grad_norm_  # noqa: E402 - imported by name, as users do

from doctor.core.facts import Variable  # noqa: E402
from doctor.monitor.integrations.first_step import FirstStepObserver  # noqa: E402
from doctor.monitor.telemetry.replica.step_settings import StepSettingsTracker  # noqa: E402


def step(module, optimizer, clips=None):
    loss = module(torch.ones(2, 2)).sum()
    loss.backward()
    if clips:
        clip_grad_norm_(module.parameters(), clips)
    optimizer.step()
    return loss


def hooks(module):
    found = [__import__("sys").modules["torch.optim.optimizer"]._global_optimizer_post_hooks]
    return [*map(len, found), len(module._forward_pre_hooks)]


def test_it_sees_optimizer_clipping_and_autocast_and_leaves_nothing():
    module, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    clip = __import__("sys").modules["torch.nn.utils.clip_grad"]._clip_grads_with_norm_
    before = hooks(module)
    observer = FirstStepObserver()
    observer.start(module)
    step(other, torch.optim.SGD(other.parameters(), lr=0.5))
    assert observer.optimizers == []
    with torch.autocast("cpu", torch.bfloat16):
        step(module, optimizer, clips=0.5)
    observer.finish()
    assert observer.optimizers == [optimizer]
    assert observer.settings == (Variable("gradient clipping", "by norm, at most 0.5"),)
    assert observer.precision == "autocast to bfloat16"
    assert hooks(module) == before
    assert __import__("sys").modules["torch.nn.utils.clip_grad"]._clip_grads_with_norm_ is clip


def test_settings_of_a_step_and_parameters_without_gradient():
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(), torch.nn.Linear(2, 2))
    module[2].requires_grad_(False)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    tracker = StepSettingsTracker()
    tracker.attach(module)
    tracker.use_optimizers([optimizer])
    module[1].eval()
    tracker.take_sample(1, 50)
    [sample] = tracker.kept()
    assert sample.step == 50
    assert {Variable("lr", "0.1"), Variable("momentum", "0.9"), Variable("modules in eval mode", "1")} <= {
        *sample.values
    }
    assert Variable("dropout", "0.5") in sample.values
    assert tracker.unfrozen() == ()
    module[2].requires_grad_(True)
    assert tracker.unfrozen() == ("2.weight", "2.bias")


def test_parameters_that_are_frozen_after_the_model_was_attached():
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    module[0].requires_grad_(False)
    tracker = StepSettingsTracker()
    tracker.attach(module)
    tracker.take_sample(1, 50)
    module[1].weight.requires_grad_(False)
    tracker.take_sample(2, 100)
    frozen = [
        {one.name: one.value for one in sample.values}["parameters frozen in training"] for sample in tracker.kept()
    ]
    assert frozen == ["none", "1.weight"]


def test_a_layer_left_out_is_found_by_the_graph_after_gradients_were_cleared():
    module = torch.nn.ModuleDict({"used": torch.nn.Linear(2, 2), "unused": torch.nn.Linear(2, 2)})
    tracker = StepSettingsTracker()
    tracker.attach(module)
    loss = module["used"](torch.ones(2, 2)).sum()
    loss.backward()
    assert tracker.without_gradient() == ("unused.weight", "unused.bias")
    module.zero_grad()
    assert tracker.without_gradient() == ()
    tracker.last_loss = lambda: loss
    assert tracker.without_gradient() == ("unused.weight", "unused.bias")
