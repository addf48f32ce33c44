"""Gradients of real models that are NaN before they are reduced."""

import pytest

from doctor.core.facts import NonFinite
from doctor.monitor.telemetry.replica.gradient_check import GradientCheck

torch = pytest.importorskip("torch")


def _model():
    """A model whose units are all active: an inactive one makes NaN of an infinite gradient."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 0.5)
    return model


def _check(model):
    check = GradientCheck()
    check.batch = lambda: 7
    check.attach(model)
    return check


def test_a_finite_loss_whose_gradient_is_not():
    model = _model()
    check = _check(model)
    loss = model(torch.ones(2, 4)).square().mean()
    loss.backward(retain_graph=True)
    assert check.first is None
    (loss + 0 * torch.sqrt(loss * 0)).backward(retain_graph=True)
    assert torch.isfinite(loss)
    assert check.first == NonFinite(7, "gradient", "0.weight", "nan")
    assert check.before(None) is None, "the next gradient may be finite"
    assert check.before(NonFinite(7, "loss")) is None, "a gradient of a loss that is not finite"
    assert check.before(NonFinite(8, "loss")) == check.first
    check.batch = lambda: 8
    (loss * float("nan")).backward()
    assert check.first.step == 7


def test_a_scaler_that_skips_a_step():
    model = _model()
    check = _check(model)
    loss = model(torch.ones(2, 4)).square().mean()
    (loss + 0 * torch.sqrt(loss * 0)).backward()
    model(torch.ones(2, 4)).square().mean().backward()
    assert check.first is None


def test_an_infinite_gradient_is_left_to_the_loss():
    model = _model()
    check = _check(model)
    (model(torch.ones(2, 4)).mean() * float("inf")).backward()
    assert check.first is None


def test_gradients_are_those_of_a_model_that_is_not_checked():
    gradients = []
    for checked in (False, True):
        torch.manual_seed(7)
        model = _model()
        check = _check(model) if checked else None
        model(torch.ones(2, 4)).square().mean().backward()
        gradients.append([one.grad.clone() for one in model.parameters()])
        if check:
            check.detach()
            assert not any(one._backward_hooks for one in model.parameters())
    assert all(map(torch.equal, *gradients))


def test_a_gathered_parameter_of_a_sharded_model(tmp_path):
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    if not hasattr(fsdp, "fully_shard"):
        pytest.skip("torch before 2.6")
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = _model()
        fsdp.fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (1,)))
        check = GradientCheck()
        check.batch = lambda: 7
        check.attach_sharded(model)
        model(torch.ones(2, 4)).square().mean().backward()
        check.batch_end()
        loss = model(torch.ones(2, 4)).square().mean()
        (loss + 0 * torch.sqrt(loss * 0)).backward()
        assert check.first == NonFinite(7, "gradient", "0.weight", "nan")
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    "model",
    [
        torch.nn.LazyLinear(3),
        torch.nn.Linear(4, 3, device="meta"),
        torch.nn.Linear(4, 3).requires_grad_(False),
        torch.nn.ReLU(),
    ],
    ids=["lazy", "meta", "frozen", "without parameters"],
)
def test_models_without_a_suitable_parameter(model):
    assert _check(model).first is None
