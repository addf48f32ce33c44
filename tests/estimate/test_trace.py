"""What a traced step holds, against arithmetic that can be done by hand, torch's own trackers and real tensors."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from msgspec.structs import replace
from torch import nn
from torch.nn import functional

from doctor.estimate.data_model import TrainingPlan
from doctor.estimate.tracer_client import TracerClient
from doctor.estimate.tracer_main import LoadFactory, TracePlan, TracerReply
from doctor.probes.runtime.torch_child import TorchChild
from tests.lab.needs import clean_environ
from tests.lab.speed import patience

ROOT = Path(__file__).parents[2]
HERE = "tests.estimate.test_trace"
MIB = 1 << 20


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(512, 1024, bias=False), nn.Linear(1024, 512, bias=False)

    def forward(self, data):
        return data + self.down(functional.relu(self.up(data)))


class Layers(nn.Module):
    """12 MiB of parameters in three layers of 4 MiB."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, data):
        for layer in self.layers:
            data = layer(data)
        return data.square().mean()


def layers():
    return Layers(), torch.randn(1024, 512)


def tokens():
    model = nn.Sequential(nn.Embedding(1000, 64), nn.LayerNorm(64), nn.Dropout(0.1), nn.Linear(64, 1000))
    return model, (torch.randint(1000, (8, 32)), torch.randint(1000, (8, 32)))


def shared():
    model = nn.Sequential(nn.Linear(512, 512, bias=False), nn.Linear(512, 512, bias=False))
    model[1].weight = model[0].weight
    return model, torch.randn(8, 512)


def frozen():
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(4)))
    model[:3].requires_grad_(False)
    return model, torch.randn(8, 512)


class Chooses(nn.Module):
    """What is positive goes on: how many, depends on the data."""

    def __init__(self):
        super().__init__()
        self.map = nn.Linear(64, 64)

    def forward(self, data):
        made = self.map(data)
        if (made > 5).any():
            raise ValueError("out of range")
        return made[made > 0].sum() * made.max().item()


def chooses():
    return Chooses(), torch.randn(32, 64)


class Foreign(nn.Module):
    def __init__(self):
        super().__init__()
        self.map = nn.Linear(64, 64)

    def forward(self, data):
        return torch.ops.trace_test.foreign(self.map(data)).sum()


def foreign():
    if not hasattr(torch.ops.trace_test, "foreign"):
        library = torch.library.Library("trace_test", "FRAGMENT")
        library.define("foreign(Tensor data) -> Tensor")
        library.impl("foreign", lambda data: data.clone(), "CPU")
        foreign.library = library
    return Foreign(), torch.randn(32, 64)


def recurrent():
    return Recurrent(), (torch.randn(4, 10, 16), torch.tensor([10, 8, 5, 1]))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(16, 32, batch_first=True)

    def forward(self, data, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(data, lengths.cpu(), batch_first=True, enforce_sorted=False)
        return nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True)[0].sum()


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(256, 768)

    def forward(self, data):
        query, key, value = self.qkv(data).view(*data.shape[:2], 3, 4, 64).permute(2, 0, 3, 1, 4)
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True).sum()


def attends():
    return Attends(), torch.randn(2, 1024, 256)


@pytest.fixture(scope="module")
def child():
    made = TorchChild(clean_environ(ROOT), {"CUDA_VISIBLE_DEVICES": ""})
    yield made
    made.close()


@pytest.fixture
def traced(child):
    """A function of a factory of this file and plans: a step under each."""

    def trace(factory, *plans, workspace=0):
        begun = child.ask("estimate", LoadFactory(f"{HERE}:{factory}", str(ROOT)), TracerReply, 60.0)
        assert not begun.unusable
        answers = [child.ask("estimate", TracePlan(plan, workspace), TracerReply, 60.0) for plan in plans]
        assert not [answer.unusable for answer in answers if answer.unusable]
        steps = [answer.traced for answer in answers]
        assert all(step.reserved >= step.parts.total > 0 for step in steps)
        return steps[0] if len(steps) == 1 else steps

    return trace


def test_the_optimizer_step_holds_five_times_the_parameters(traced):
    step = traced("layers", TrainingPlan(batch_size=8))
    assert step.parts.parameters == step.parts.gradients == 12 * MIB == step.parameter_bytes
    assert step.parts.temporary == 12 * MIB + 512, "the loop still holds the loss"
    assert step.parts.optimizer == 24 * MIB, "its counters stay on the CPU"
    assert step.moment == "optimizer step"
    assert (step.batch_size, step.batch_bytes, step.bound) == (8, 8 * 512 * 4, "")


def test_a_plain_optimizer_keeps_nothing(traced):
    step = traced("layers", TrainingPlan(batch_size=8, optimizer="SGD"))
    assert step.parts.optimizer == 0
    assert step.parts.total < 25 * MIB


def test_activations_grow_with_the_batch_and_shrink_with_checkpointing(traced):
    small, large, again = traced(
        "layers",
        TrainingPlan(optimizer="sgd", batch_size=4096),
        TrainingPlan(optimizer="sgd", batch_size=8192),
        TrainingPlan(optimizer="sgd", batch_size=8192, checkpointing=True),
    )
    assert large.parts.activations == pytest.approx(2 * small.parts.activations, rel=0.02)
    assert small.parts.activations >= 2 * (8 + 16) * MIB, "of two layers at least, when the last one's go"
    assert again.parts.total < 0.8 * large.parts.total
    assert again.notes == ("activation checkpointing of 3 x Layer",)


def test_accumulation_keeps_gradients_through_the_forward_pass(traced):
    once, twice = traced("layers", TrainingPlan(batch_size=8192), TrainingPlan(batch_size=8192, accumulate=4))
    assert once.moment == twice.moment == "backward"
    assert twice.parts.total == pytest.approx(once.parts.total + 12 * MIB, rel=0.02)


def test_precision(traced):
    single, mixed, half = traced(
        "tokens", TrainingPlan(), TrainingPlan(precision="bf16-mixed"), TrainingPlan(precision="16-true")
    )
    assert mixed.parts.parameters == single.parts.parameters
    assert half.parts.parameters == pytest.approx(single.parts.parameters / 2, rel=0.02)
    assert half.parts.total < single.parts.total
    assert mixed.parts.total > 0.9 * single.parts.total, "of few layers: the loss is computed in single precision"


def test_mixed_precision_halves_what_products_keep(traced):
    single, mixed = traced(
        "attends",
        TrainingPlan(optimizer="sgd", batch_size=16),
        TrainingPlan(optimizer="sgd", batch_size=16, precision="bf16-mixed"),
    )
    assert mixed.parts.activations < 0.7 * single.parts.activations


def test_buckets_are_as_large_as_the_gradients(traced):
    alone, replicated = traced("layers", TrainingPlan(), TrainingPlan(strategy="ddp", devices=2))
    assert replicated.parts.communication == 12 * MIB
    assert replicated.parts.total == alone.parts.total + 12 * MIB


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_shards(traced, strategy):
    step = traced("layers", TrainingPlan(strategy=strategy, devices=4, nodes=2, batch_size=1024))
    assert step.parts.parameters == 12 * MIB // 8
    assert step.parts.optimizer == pytest.approx(2 * 12 * MIB // 8, abs=4096)
    assert 8 * MIB <= step.parts.gathered <= 12 * MIB, "one layer's, and the next one's that is fetched ahead"
    assert "3 x Layer" in step.notes[-1]


def test_fsdp2_reduces_gradients_in_single_precision(traced):
    plan = TrainingPlan(strategy="fsdp2", devices=8, optimizer="sgd", batch_size=8, precision="bf16-mixed")
    mixed, low = traced("layers", plan, replace(plan, precision="bf16-true"))
    assert (mixed.parts.communication, low.parts.communication) == (4 * MIB, 2 * MIB)


def test_stages_of_zero(traced):
    stages = traced(
        "layers",
        *(TrainingPlan(strategy=f"deepspeed-{stage}", devices=8, precision="bf16-mixed") for stage in (1, 2, 3)),
    )
    for stage in stages:
        assert stage.parts.communication >= 10**9, "a bucket of 5e8 elements of two bytes"
        assert "calculated" in stage.notes[-1]
    assert stages[0].parts.parameters == 6 * MIB
    assert stages[2].parts.parameters == 6 * MIB // 8
    assert stages[0].parts.optimizer == pytest.approx(3 * 12 * MIB // 8, abs=4096)


def test_shared_parameters_count_once_and_frozen_ones_have_no_gradients(traced):
    assert traced("shared", TrainingPlan()).parameter_bytes == MIB
    step = traced("frozen", TrainingPlan())
    assert (step.parameter_count, step.trainable_count) == (4 * 512 * 512, 512 * 512)
    assert step.parts.parameters == 4 * MIB
    assert step.parts.gradients + step.parts.optimizer + step.parts.temporary <= 4 * MIB + 64 * 1024


def test_what_depends_on_data_is_a_bound_and_says_where(traced):
    step = traced("chooses", TrainingPlan())
    assert "index has a data-dependent number of outputs" in step.bound
    assert "a data-dependent condition is assumed to be False" in step.bound
    assert "test_trace.py:" in step.bound
    assert traced("layers", TrainingPlan()).bound == ""


def test_an_operation_of_the_users_own_is_passed_over_and_named(traced):
    assert "trace_test::foreign cannot run on fake tensors" in traced("foreign", TrainingPlan()).bound.replace(
        ".", "::"
    )


def test_packed_sequences_are_taken_as_full(traced):
    step = traced("recurrent", TrainingPlan())
    assert "as long as the longest" in step.bound
    assert step.bound.count(";") == 0


def test_attention_keeps_no_matrix_of_all_pairs(traced):
    step = traced("attends", TrainingPlan(precision="bf16-true"))
    assert step.parts.total < 2 * 4 * 1024 * 1024 * 2, "one such matrix of 16 bits"


def test_cublas_takes_its_workspace_twice(traced):
    without = traced("layers", TrainingPlan())
    assert traced("layers", TrainingPlan(), workspace=32 * MIB).parts.total == without.parts.total + 64 * MIB


def test_one_process_answers_many_plans():
    with TracerClient(f"{HERE}:layers", directory=ROOT, seconds=60, workspace=0) as tracer:
        sizes = [tracer.run(TrainingPlan(batch_size=size, optimizer="sgd")).parts.total for size in (64, 128, 64)]
        assert tracer.loading.checkpoint_bytes == 36 * MIB
    assert sizes[0] == sizes[2] < sizes[1], "a plan leaves nothing behind"


def test_torch_s_own_trackers_and_real_tensors_agree():
    """In a process of its own: trackers and kernels are torch's globals."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("test_trace_twins.py"))],
        env=clean_environ(ROOT) | {"PYTHONPATH": f"{ROOT}:{ROOT / 'checks'}"},
        capture_output=True,
        text=True,
        timeout=patience(100),
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for name, (ours, theirs, allowed) in json.loads(done.stdout.splitlines()[-1]).items():
        assert ours == pytest.approx(theirs, rel=allowed), name
