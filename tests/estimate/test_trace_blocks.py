"""Which blocks of a model repeat, and how batches of any shape are changed."""

from dataclasses import dataclass
from typing import NamedTuple

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from doctor.estimate.tracing.blocks import in_words, repeated_blocks
from doctor.estimate.tracing.pytree import map_tensors, resized, samples_in, tensors_in


class Block(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.out = nn.Linear(width, width)


class Other(nn.Module):
    """Repeats beside larger blocks, and holds little."""

    def __init__(self):
        super().__init__()
        self.map = nn.Linear(2, 2)


def stack(*blocks, **others):
    model = nn.Module()
    model.blocks = nn.ModuleList(blocks)
    for name, module in others.items():
        setattr(model, name, module)
    return model


def mlp():
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (lambda: stack(*(Block() for _ in range(3)), head=nn.Linear(8, 8)), "3 x Block"),
        (lambda: stack(*(mlp() for _ in range(3))), "3 x Sequential"),
        (lambda: nn.Transformer(16, 2, 2, 3, 32), "5 x TransformerDecoderLayer, TransformerEncoderLayer"),
        (lambda: stack(*(Block(32) for _ in range(3)), small=stack(Other(), Other())), "3 x Block"),
        (lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), "2 x Linear"),
        (lambda: nn.Sequential(nn.Sequential(Block(), Block()), nn.Sequential(Block(16))), "3 x Block"),
    ],
)
def test_what_repeats(model, said):
    assert in_words(repeated_blocks(model())) == said


def test_blocks_beside_each_other_are_in_the_order_of_the_model():
    kinds = [type(block).__name__ for block in repeated_blocks(nn.Transformer(16, 2, 2, 2, 32))]
    assert kinds == 2 * ["TransformerEncoderLayer"] + 2 * ["TransformerDecoderLayer"]


def test_where_nothing_repeats():
    assert repeated_blocks(stack(Block(), head=nn.Linear(8, 8))) != ()  # its experts do
    assert repeated_blocks(nn.LSTM(8, 8)) == ()
    assert repeated_blocks(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.ReLU())) == ()


def test_a_block_that_is_there_twice_is_one():
    shared = Block()
    assert len(repeated_blocks(stack(shared, shared, Block()))) == 2


class Pair(NamedTuple):
    data: torch.Tensor
    name: str


@dataclass(frozen=True)
class Sample:
    data: torch.Tensor
    rest: dict


def test_batches_of_any_shape():
    data = torch.zeros(4, 2)
    batch = {"pair": Pair(data, "a"), "sample": Sample(data, {"more": [data, 3]}), "none": None}
    larger = resized(batch, 9)
    assert [tuple(each.shape) for each in tensors_in(larger)] == [(9, 2)] * 3
    assert isinstance(larger["pair"], Pair)
    assert isinstance(larger["sample"], Sample)
    assert (larger["pair"].name, larger["none"]) == ("a", None)
    assert tuple(batch["sample"].data.shape) == (4, 2)


def test_what_has_another_first_dimension_keeps_it():
    batch = (torch.zeros(4, 2), torch.zeros(4), torch.zeros(7), torch.zeros(()))
    assert samples_in(batch) == 4
    assert [tuple(each.shape) for each in resized(batch, 2)] == [(2, 2), (2,), (7,), ()]


def test_no_common_first_dimension():
    batch = tuple(torch.zeros(size) for size in (1, 2, 3))
    assert samples_in(batch) == 0
    assert [each.shape[0] for each in resized(batch, 9)] == [1, 2, 3]


def test_what_holds_no_tensor_is_kept():
    thing = object()
    assert map_tensors([thing], lambda tensor: tensor)[0] is thing
    assert list(tensors_in(nn.Linear(2, 2))) == []
