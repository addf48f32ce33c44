"""What a traced step leaves out is said in one sentence, and activations that are offloaded are seen."""

from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from doctor.estimate.data_model import TrainingPlan
from doctor.estimate.tracer_client import TracerClient
from doctor.estimate.tracing.factory import FactoryOutput
from doctor.estimate.tracing.scope import left_out
from tests.lab.speed import patience

MIB = 1 << 20
ROOT = Path(__file__).parents[2]


class Float8Linear(nn.Linear):
    """Named as torchao's."""


def made(module=None, **trainer):
    return FactoryOutput(
        nn.Linear(2, 2) if module is None else module,
        torch.zeros(2, 2),
        SimpleNamespace(**trainer) if trainer else None,
    )


def test_a_plain_step_leaves_nothing_out():
    assert left_out(made()) == ""
    strategy = SimpleNamespace(config={"zero_optimization": {"stage": 3, "offload_param": {"device": "none"}}})
    assert left_out(made(strategy=strategy, args=SimpleNamespace(torch_compile=False, fsdp=""))) == ""


@pytest.mark.parametrize(
    ("output", "named"),
    [
        (made(args=SimpleNamespace(torch_compile=True)), "torch.compile"),
        (made(nn.Sequential(Float8Linear(2, 2), Float8Linear(2, 2))), "float8"),
        (made(precision="transformer-engine"), "float8"),
        (
            made(args=SimpleNamespace(parallelism_config=SimpleNamespace(tp_size=2, cp_size=4))),
            "context parallelism",
        ),
        (made(strategy=SimpleNamespace(_tensor_parallel_size=8)), "tensor parallelism"),
        (made(strategy=SimpleNamespace(cpu_offload=SimpleNamespace(offload_params=True))), "offload to host memory"),
        (made(args=SimpleNamespace(fsdp="full_shard offload")), "offload to host memory"),
        (
            made(args=SimpleNamespace(deepspeed={"zero_optimization": {"offload_optimizer": {"device": "cpu"}}})),
            "offload to host memory",
        ),
    ],
)
def test_what_is_left_out_is_named_once(output, named):
    assert_named_once(output, named)


def test_a_compiled_module_is_named_once():
    """Not one of the cases above: torch.compile takes seconds to import, in every worker that collects them."""
    assert_named_once(made(torch.compile(nn.Linear(2, 2))), "torch.compile")


def assert_named_once(output, named):
    words = left_out(output)
    assert words.startswith("not covered")
    assert named in words
    assert words.count(named) == 1


class Offloads(nn.Module):
    def __init__(self, offloads):
        super().__init__()
        self.offloads = offloads
        self.layers = nn.ModuleList(nn.Linear(256, 256, bias=False) for _ in range(8))

    def forward(self, data):
        for layer in self.layers:
            data = layer(data).relu()
        return data.sum()

    def __call__(self, data):
        if not self.offloads:
            return super().__call__(data)
        with torch.autograd.graph.save_on_cpu():
            return super().__call__(data)


def keeps():
    return Offloads(offloads=False), torch.zeros(4096, 256)


def offloads():
    return Offloads(offloads=True), torch.zeros(4096, 256)


def test_activations_that_are_saved_on_the_host_take_no_memory_of_the_device():
    found = {}
    for name in ("keeps", "offloads"):
        factory = f"tests.estimate.test_trace_scope:{name}"
        with TracerClient(factory, directory=ROOT, seconds=patience(100), workspace=0) as tracer:
            found[name] = tracer.run(TrainingPlan(optimizer="sgd"))
    assert found["keeps"].parts.activations >= 6 * 4 * MIB
    assert found["offloads"].parts.total < found["keeps"].parts.total - 4 * 4 * MIB
    assert not found["offloads"].bound
