"""What a factory may return, and what is said of one that can't be used."""

from textwrap import dedent

import pytest

pytest.importorskip("torch")

from doctor.core.errors import UnusableError
from doctor.estimate.data_model import TrainingPlan
from doctor.estimate.tracer_client import TracerClient
from doctor.estimate.tracer_main import LoadFactory, TracePlan, TracerReply
from doctor.probes.runtime.torch_child import TorchChild
from tests.lab.needs import clean_environ

MODULE = """
    import time
    from copy import deepcopy
    import torch
    from torch import nn
    from torch.nn import functional as F
    from torch.utils.data import DataLoader, TensorDataset

    REAL = nn.Linear(512, 512)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))

        def forward(self, data):
            return self.net(data)

    def data(): return torch.randn(128, 64), torch.randint(0, 10, (128,))
    def pair(): return Net(), data()
    def compiled(): return torch.compile(Net()), data()
    def turned(): return data(), Net()
    def three(): return Net(), *data()
    def one(): return Net(), torch.randn(128, 64)
    def named(): return Net(), {"data": torch.randn(128, 64)}
    def on_gpu():
        device = "cuda" if torch.cuda.is_available() else "cpu"
        return Net().cuda().to(device), tuple(each.to(device) for each in data())
    def loader():
        held = TensorDataset(torch.randn(1000, 64), torch.randint(0, 10, (1000,)))
        return Net(), DataLoader(held, batch_size=32, shuffle=True, num_workers=4, prefetch_factor=3, pin_memory=True)
    def real(): return REAL, torch.randn(8, 512)
    def more_named(): return Net(), {"data": torch.randn(128, 64), "id": 3, "labels": torch.randint(0, 10, (128,))}

    def raises(): raise FileNotFoundError("no such directory: /data")
    def leaves(): raise SystemExit(3)
    def number(): return 3
    def nothing(): return None
    def no_batch(): return Net()
    def wrong(): return Net(), torch.randn(8, 63)
    def needs(config): return Net(), data()
    def copied():
        net = nn.Sequential(nn.Linear(64, 10), nn.BatchNorm1d(10))
        copy = deepcopy([net, net])
        assert copy[0] is copy[1] is not net
        assert copy[0][1].running_mean is not net[1].running_mean
        return copy[0], data()
    def positions():
        class Positioned(Net):
            def forward(self, data, positions=None):
                if positions is not None:
                    raise TypeError("call set_cache() first")
                return super().forward(data)
        return Positioned(), data()
    def frozen(): return Net().requires_grad_(False), torch.randn(8, 64)
    def detached():
        class Detached(Net):
            def forward(self, data): return super().forward(data).detach()
        return Detached(), torch.randn(8, 64)
    def sleeps(): time.sleep(60)
    not_callable = 3
"""
LIGHTNING = """
    import torch
    from torch.nn import functional as F
    from lightning import pytorch as pl
    from torchmetrics.classification import MulticlassAccuracy
    from plain import Net, data

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = Net()

        def training_step(self, batch, number):
            loss = F.cross_entropy(self.model(batch[0]), batch[1])
            self.log("loss", loss, sync_dist=True)
            self.logger.experiment.add_scalar("epoch", self.current_epoch + self.trainer.global_rank)
            return {"loss": loss}

        def configure_optimizers(self):
            made = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
            steps = self.trainer.estimated_stepping_batches
            return {"optimizer": made, "lr_scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(made, steps)}

    class Manual(Module):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, number):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(F.cross_entropy(self.model(batch[0]), batch[1]))
            optimizer.step()

    class Template(Module):
        def __init__(self, net, optimizer):
            super().__init__()
            self.save_hyperparameters(logger=False)
            self.net, self.accuracy = net, MulticlassAccuracy(num_classes=10)

        def training_step(self, batch, number):
            out = self.net(batch[0])
            self.log("accuracy", self.accuracy(out.argmax(dim=1), batch[1]))
            return F.cross_entropy(out, batch[1])

        def configure_optimizers(self):
            return self.hparams.optimizer(params=self.trainer.model.parameters())

    def module(): return Module(), data()
    def template():
        net = torch.nn.Sequential(torch.nn.Linear(64, 10), torch.nn.BatchNorm1d(10))
        return Template(net, torch.optim.Adam), data()
    def manual(): return Manual(), data()
    def trainer():
        made = pl.Trainer(
            accelerator="gpu", devices=8, num_nodes=2, strategy="ddp", precision="bf16-mixed", logger=False,
            accumulate_grad_batches=4, enable_checkpointing=False,
        )
        return made, Module(), data()
"""
PARAMETERS = 4 * (64 * 256 + 256 + 256 * 10 + 10)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    made = tmp_path_factory.mktemp("factories")
    (made / "plain.py").write_text(dedent(MODULE))
    (made / "of_lightning.py").write_text(dedent(LIGHTNING))
    (made / "broken.py").write_text("def make(:\n")
    (made / "lacking.py").write_text("import no_such_package\n")
    return made


@pytest.fixture(scope="module")
def child(directory):
    made = TorchChild(clean_environ(directory), {"CUDA_VISIBLE_DEVICES": ""})
    yield made
    made.close()


@pytest.fixture
def begin(child, directory):
    return lambda factory: child.ask("estimate", LoadFactory(factory, str(directory)), TracerReply, 60.0)


@pytest.fixture
def step(begin, child):
    """A factory's first plan."""

    def run(factory, plan=TrainingPlan()):  # noqa: B008 - frozen
        begun = begin(factory)
        assert begun.unusable == ""
        answer = child.ask("estimate", TracePlan(plan, 0), TracerReply, 60.0)
        return answer.traced if answer.traced is not None else answer.unusable

    return run


@pytest.mark.parametrize("name", ["pair", "turned", "three", "one", "named", "on_gpu", "loader", "more_named"])
def test_what_a_factory_may_return(name, step):
    traced = step(f"plain:{name}")
    assert traced.parameter_bytes == PARAMETERS
    assert traced.batch_size == (32 if name == "loader" else 128)
    assert PARAMETERS * 4 < traced.parts.total < PARAMETERS * 9
    assert traced.bound == ""
    assert traced.notes == ()


def test_a_compiled_module_has_no_truth_value(step):
    traced = step("plain:compiled")
    assert traced.parameter_bytes == PARAMETERS
    assert any("torch.compile" in note for note in traced.notes)


def test_a_file_is_a_module_too(step):
    assert step("plain.py:pair").parts == step("plain:pair").parts


def test_another_batch_size(step):
    assert step("plain:loader", TrainingPlan(batch_size=500)).batch_size == 500


def test_what_a_loader_says(begin):
    loading = begin("plain:loader").loading
    assert (loading.workers, loading.prefetch, loading.pinned) == (4, 3, True)
    assert loading.dataset_bytes == pytest.approx(1000 * (64 * 4 + 8), rel=0.01)
    assert loading.checkpoint_bytes == 3 * PARAMETERS
    assert begin("plain:pair").loading.workers is None


def test_real_weights_are_said_to_be_outside_the_bound(step):
    assert "1 MiB of real weights" in step("plain:real").notes[0]


def test_a_lightning_module(step):
    pytest.importorskip("lightning")
    traced = step("of_lightning:module")
    assert traced.parts.optimizer == pytest.approx(PARAMETERS, abs=2048), "momentum, by the module's own choice"
    assert step("of_lightning:module", TrainingPlan(optimizer="adam")).parts.optimizer == pytest.approx(
        2 * PARAMETERS, abs=4096
    )
    assert step("of_lightning:manual").parts.optimizer == traced.parts.optimizer


def test_shards_of_a_lightning_module_are_gathered_though_nobody_calls_its_forward(step):
    pytest.importorskip("lightning")
    plan = TrainingPlan(strategy="fsdp", devices=4)
    assert step("of_lightning:module", plan).parts.gathered == step("plain:pair", plan).parts.gathered > 0


def test_a_module_may_be_copied_with_its_buffers(step):
    traced = step("plain:copied")
    assert not isinstance(traced, str), traced
    assert traced.parts.buffers > 0


def test_a_module_as_templates_of_lightning_have_it(step):
    pytest.importorskip("lightning")
    traced = step("of_lightning:template")
    assert not traced.bound
    assert "the metrics of torchmetrics are not run" in traced.notes
    assert traced.parts.optimizer == pytest.approx(2 * 4 * (64 * 10 + 10 + 20), abs=8 * 512)


def test_a_trainer_for_gpus_is_made_without_one(begin):
    pytest.importorskip("lightning")
    asked = begin("of_lightning:trainer").loading.asked
    assert (asked.strategy, asked.devices, asked.nodes) == ("ddp", 8, 2)
    assert (asked.precision, asked.accumulate) == ("bf16-mixed", 4)


@pytest.mark.parametrize(
    ("factory", "said"),
    [
        ("plain", "expected MODULE:FACTORY"),
        ("plain:", "expected MODULE:FACTORY"),
        ("no_such:make", "no module named 'no_such'"),
        ("no_such.py:make", "no such file"),
        ("plain:no_such", "plain has no function 'no_such'"),
        ("plain:not_callable", "plain has no function 'not_callable'"),
        ("broken:make", "importing broken failed: SyntaxError"),
        ("lacking:make", "no module named 'no_such_package'"),
        ("lacking:make", "run this in the environment of the training"),
        ("no_such:make", "run this in the folder where its imports start"),
        ("plain:needs", "it cannot be called without arguments (config): name a function without any"),
        ("plain:Net", "the factory returned Net, which contains no batch with a tensor"),
        ("plain:raises", "the factory raised FileNotFoundError: no such directory: /data (plain.py:"),
        ("plain:leaves", "the factory raised SystemExit"),
        ("plain:number", "the factory returned int"),
        ("plain:nothing", "the factory returned NoneType"),
        ("plain:no_batch", "no batch with a tensor"),
    ],
)
def test_a_factory_that_can_not_be_used(factory, said, begin):
    unusable = begin(factory).unusable
    assert said in unusable
    assert "\n" not in unusable
    assert factory in unusable


@pytest.mark.parametrize(
    ("factory", "said"),
    [
        ("plain:wrong", "a training step raised RuntimeError"),
        (
            "plain:positions",
            "the batch went to data, positions: if the module does not take targets, return a dictionary",
        ),
        ("plain:frozen", "nothing to train"),
        ("plain:detached", "no loss with a gradient"),
    ],
)
def test_a_step_that_can_not_be_traced(factory, said, step):
    unusable = step(factory)
    assert said in unusable
    assert factory in unusable


def test_an_optimizer_that_is_none(step):
    assert "not an optimizer of torch.optim or bitsandbytes; available:" in step(
        "plain:pair", TrainingPlan(optimizer="adamx")
    )


def test_the_whole_way(directory):
    with TracerClient("plain:pair", directory=directory, seconds=60, workspace=0) as tracer:
        small, large = (tracer.run(TrainingPlan(batch_size=size)) for size in (1, 4096))
    assert tracer.loading.asked is None
    assert small.parts.total < large.parts.total
    assert large.seconds > 0


def test_a_factory_that_takes_too_long_is_killed(directory):
    with pytest.raises(UnusableError, match="not loaded within 4 s"):
        TracerClient("plain:sleeps", directory=directory, seconds=4)
