"""When two data sets are the same, as far as that can be seen without reading a sample of them."""

import collections
import enum
import functools
import io
import os
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.lab.cases import each_case

torch = pytest.importorskip("torch")
numpy = pytest.importorskip("numpy")

from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset, random_split  # noqa: E402 - torch may be missing

from doctor.monitor.telemetry.data.dataset_fingerprint import MOST_NODES, fingerprint  # noqa: E402
from doctor.monitor.telemetry.data.loader_inspection import read_loader  # noqa: E402


class Data(Dataset):
    """Anything as attributes; to read from it, or to ask its length, is an error."""

    def __init__(self, **attributes):
        self.__dict__.update(attributes)

    def __len__(self):
        raise AssertionError

    __getitem__ = __len__


class Colour(enum.Enum):
    RED = 1


@dataclass
class Sample:
    path: str
    label: int


class Lazy(list):
    """A list that loads what it is asked for."""

    def __getitem__(self, index):
        raise AssertionError


class Slotted:
    __slots__ = ("value",)


def _numbers(start=0):
    return numpy.arange(start, start + 1000.0).reshape(10, 100)


PAIRS = [
    ("a number", 1, 2),
    ("a path", Path("/data/a"), Path("/data/b")),
    ("a long text", "x" * 1000, "x" * 999 + "y"),
    ("a tensor", torch.arange(1000.0), torch.arange(1000.0) + 1),
    ("a tensor with gaps", torch.arange(100.0).reshape(10, 10).t(), torch.arange(100.0).reshape(10, 10)),
    ("an array", _numbers(), _numbers(1)),
    ("an array of objects", numpy.array(["a", "b"], dtype=object), numpy.array(["a", "c"], dtype=object)),
    ("files", [f"{number}.png" for number in range(10_000)], [f"{number}.png" for number in range(1, 10_001)]),
    ("every second number", range(0, 100, 2), range(1, 100, 2)),
    ("samples", [Sample("a.png", 1)], [Sample("a.png", 2)]),
    ("a set", {"a", "b", "c"}, {"a", "b", "d"}),
    ("a dictionary", {"cat": 0, "dog": 1}, {"cat": 0, "dog": 2}),
    ("an ordered one", collections.OrderedDict(a=1), collections.OrderedDict(a=2)),
    ("counts", collections.Counter("aab"), collections.Counter("abb")),
    ("a partial", functools.partial(int, base=2), functools.partial(int, base=8)),
    ("an enumeration and a function", (Colour.RED, len), (Colour.RED, max)),
    ("indices", Subset(TensorDataset(torch.zeros(9)), [0, 2, 4]), Subset(TensorDataset(torch.zeros(9)), [1, 3, 5])),
    (
        "one of two",
        ConcatDataset([TensorDataset(torch.ones(3))] * 2),
        ConcatDataset([TensorDataset(torch.ones(3))] * 3),
    ),
]


@each_case(("value", "other"), [pair[1:] for pair in PAIRS], ids=[pair[0] for pair in PAIRS])
def test_other_data_has_another_digest(value, other):
    assert fingerprint(Data(held=value)) == fingerprint(Data(held=value)) is not None
    assert fingerprint(Data(held=other)) not in (fingerprint(Data(held=value)), None)


def test_what_a_function_holds_counts():
    def make(value):
        return Data(read=lambda: value)

    assert fingerprint(make(1)) == fingerprint(make(1)) != fingerprint(make(2))


@pytest.mark.parametrize(
    "thing",
    [
        Lazy("abc"),
        Slotted(),
        iter([1]),
        io.BytesIO(b"abc"),
        bytearray(b"abc"),
        memoryview(b"abc"),
        torch.nn.Parameter(torch.zeros(2)),
        torch.zeros(2).to_sparse(),
        {("a", 1), "b"},
    ],
    ids=lambda thing: type(thing).__name__,
)
def test_what_can_not_be_looked_into_gives_no_digest(thing):
    assert fingerprint(Data(held=thing)) is None


@pytest.mark.parametrize(
    ("thing", "other"),
    [
        (threading.Lock(), threading.Lock()),
        (torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)),
        (torch.device("cuda:0"), torch.device("cuda:1")),
        (torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)),
        (numpy.random.default_rng(1), numpy.random.default_rng(2)),
    ],
    ids=lambda thing: type(thing).__name__,
)
def test_what_may_differ_between_ranks_and_is_no_data(thing, other):
    assert fingerprint(Data(held=thing)) == fingerprint(Data(held=other)) is not None


def test_a_mapped_file_is_identified_by_its_name(tmp_path):
    for name in ("a", "b"):
        numpy.arange(4.0).tofile(tmp_path / name)

    def mapped(name):
        return fingerprint(Data(held=numpy.memmap(tmp_path / name)))

    assert mapped("a") == mapped("a") != mapped("b")


def test_things_that_hold_themselves():
    data = Data()
    data.me = data
    nested = []
    for _ in range(50):
        nested = [nested]
    assert fingerprint(data) is not None
    assert fingerprint(nested) is None, "too deep to be seen through"


def test_a_digest_is_the_same_in_another_process():
    """Ranks hash texts each in their own way."""
    program = (
        "from doctor.monitor.telemetry.data.dataset_fingerprint import fingerprint;"
        "print(fingerprint({'a': {'x', 'y', 'z'}, 'b': len}, [type('Rows', (), {})()], range(3)))"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1
    assert len(outputs.pop().strip()) == 16


def test_of_large_data_only_the_ends_are_looked_at():
    """More items than may be looked at are no reason to give up."""
    data = Data(files=[("a" * 50, number) for number in range(MOST_NODES + 1)], rows=torch.zeros(3_000_000))
    assert fingerprint(data) is not None


def test_the_part_of_a_dataset_that_cannot_be_read():
    """Its rows come from an open file; a random split with the same seed is the same part."""

    class Rows(Dataset):
        def __init__(self):
            self.file = open("/dev/null")  # noqa: SIM115 - opaque, and closed with its process

        def __len__(self):
            return 100

        def __getitem__(self, index):
            return index

    def part(seed):
        halves = random_split(Rows(), [0.5, 0.5], generator=torch.Generator().manual_seed(seed))
        found = read_loader("train", 0, DataLoader(halves[0]), None, None)
        assert found.fingerprint is None
        return found.part

    assert part(11) == part(11) != part(12)
    assert read_loader("train", 0, DataLoader(Rows()), None, None).part is None
