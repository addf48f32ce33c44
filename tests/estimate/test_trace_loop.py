"""What the user's loop holds, when it clears gradients, and what kernels of a GPU allocate inside one operation."""

import types
from contextlib import ExitStack
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.nn import functional

from doctor.estimate.data_model import TrainingPlan
from doctor.estimate.tracer_client import TracerClient
from doctor.estimate.tracing.kernel_temporaries import temporaries_of
from tests.lab.speed import patience

MIB = 1 << 20
ROOT = Path(__file__).parents[2]
HERE = "tests.estimate.test_trace_loop"
SCORES = 8 * 512 * 512
"""Numbers of a matrix of scores: eight heads of 512 tokens."""


class Wide(nn.Module):
    """An output of 64 MiB whose loss is calculated from a copy of it."""

    def __init__(self):
        super().__init__()
        self.map = nn.Linear(64, 4096, bias=False)

    def forward(self, data):
        logits = self.map(data)
        return {"loss": (logits * 2).square().mean(), "logits": logits}


def wide():
    return Wide(), torch.randn(4096, 64)


class Trainer:
    """Named as Transformers' Trainer, whose loop refers to the loss alone."""

    def __init__(self, model):
        self.model, self.args = model, types.SimpleNamespace(optim="adamw_torch")

    def get_train_dataloader(self):
        return [torch.randn(4096, 64)]


def trained_by_trainer():
    return Trainer(Wide()), torch.randn(4096, 64)


class Layers(nn.Module):
    """Parameters of 16 MiB whose activations of 16 MiB are largest at the end of the forward pass."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(4)))

    def forward(self, data):
        return self.layers(data).sum()


def layers():
    return Layers(), torch.randn(1024, 1024)


class Scores(nn.Module):
    """Attention as Transformers' ``eager_attention_forward`` writes it, without what surrounds the scores."""

    def __init__(self, dtype):
        super().__init__()
        self.map = nn.Linear(64, 64, bias=False, dtype=dtype)

    def forward(self, data):
        heads = self.map(data)
        scores = heads @ heads.transpose(1, 2)
        weights = functional.softmax(scores, dim=-1, dtype=torch.float32).to(scores.dtype)
        return (weights @ heads).sum()


def scores():
    return Scores(torch.float16), torch.randn(8, 512, 64, dtype=torch.float16)


def brain_scores():
    return Scores(torch.bfloat16), torch.randn(8, 512, 64, dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def traced():
    """A function of a factory of this file and fields of its plan: a step."""
    with ExitStack() as stack:
        tracers = {}

        def trace(factory, **plan):
            if factory not in tracers:
                client = TracerClient(f"{HERE}:{factory}", directory=ROOT, seconds=patience(100), workspace=0)
                tracers[factory] = stack.enter_context(client)
            return tracers[factory].run(TrainingPlan(**{"optimizer": "sgd", **plan}))

        yield trace


def test_an_output_that_the_loop_holds_lives_through_the_backward_pass(traced):
    held, released = traced("wide", outputs="held"), traced("wide", outputs="released")
    assert held.parts.total - released.parts.total == 64 * MIB
    assert traced("wide").parts == held.parts, "a loop without a Trainer holds it"


def test_a_trainer_of_transformers_holds_the_loss_alone(traced):
    assert traced("trained_by_trainer").parts == traced("wide", outputs="released").parts
    assert traced("trained_by_trainer", outputs="held").parts == traced("wide", outputs="held").parts


def test_gradients_that_are_cleared_late_live_through_the_forward_pass(traced):
    early, late, kept = (traced("layers", zero_grad=when) for when in ("early", "late", "in-place"))
    assert early.parts.gradients + 4 * MIB <= late.parts.total - early.parts.total + 16 * MIB
    assert late.parts.gradients == kept.parts.gradients == 16 * MIB
    assert early.parts.total < late.parts.total <= kept.parts.total
    assert traced("layers").parts == early.parts


def test_softmax_s_backward_pass_multiplies_gradient_and_output(traced):
    peak = traced("scores").parts
    # Gradient, output and their product in float32, and the gradient of the scores in float16.
    assert 3 * 4 * SCORES + 2 * SCORES <= peak.total < 3 * 4 * SCORES + 3 * 2 * SCORES + MIB


def test_a_softmax_of_float16_reads_no_copy_in_float32_and_one_of_bfloat16_does(traced):
    half, brain = traced("scores").parts.total, traced("brain_scores").parts.total
    assert brain - half == 2 * SCORES, "the gradient of the scores is float32 at first"


def attention_args(dtype, rows=1000, head=64, groups=4):
    query = torch.empty(2, 4, rows, head, dtype=dtype, device="meta")
    key = torch.empty(2, groups, rows, head, dtype=dtype, device="meta")
    return query, query, key, key


FLASH = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
EFFICIENT = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default


def test_flash_attention_accumulates_the_gradient_of_the_queries_in_float32():
    rows = 2 * 4 * 1024
    assert temporaries_of(FLASH, attention_args(torch.bfloat16), "9.0") == [4 * rows, 4 * rows * 64]
    wider = temporaries_of(FLASH, attention_args(torch.bfloat16, head=80, groups=2), "9.0")
    assert wider == [4 * rows, 4 * rows * 96, *2 * [2 * 1000 * 4 * 80 * 2]]


def test_the_memory_efficient_kernel_accumulates_what_it_can_t_keep_in_registers():
    rows = 2 * 4
    assert temporaries_of(EFFICIENT, attention_args(torch.float32), "8.0") == [4 * rows * 1000]
    assert temporaries_of(EFFICIENT, attention_args(torch.float16), "7.5") == [4 * rows * 1000, 4 * rows * 1024 * 64]
    old, new = (temporaries_of(EFFICIENT, attention_args(torch.float16, head=128), each) for each in ("7.5", "8.0"))
    assert new == [4 * rows * 1000, 4 * rows * 1024 * 128]
    assert old[1] == 4 * rows * (1024 * 128 + 1024 * 256)


def test_other_operations_have_no_such_buffers():
    assert temporaries_of(torch.ops.aten.mm.default, (), "8.0") == []
