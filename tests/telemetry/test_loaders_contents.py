"""What batches hold: the same for the same, cheap for large ones, nothing for what can't be looked at."""

import collections
from dataclasses import dataclass

import pytest

from tests.lab.cases import each_case

torch = pytest.importorskip("torch")
numpy = pytest.importorskip("numpy")

from doctor.monitor.telemetry.data import batch_fingerprint  # noqa: E402 - torch may be missing
from doctor.monitor.telemetry.data.batch_fingerprint import BatchFingerprint  # noqa: E402

Pair = collections.namedtuple("Pair", "image label")


@dataclass
class Graph:
    nodes: torch.Tensor
    name: str = "a"


def digest(batch):
    return BatchFingerprint(batch).digest()


def images():
    return torch.arange(2 * 3 * 40 * 40.0).reshape(2, 3, 40, 40)


BATCHES = [
    images(),
    images().to(memory_format=torch.channels_last),
    images()[:, :, ::2],
    torch.ones(1, 5).expand(4, 5),
    torch.tensor(3),
    torch.zeros(0, 4),
    torch.zeros(300, dtype=torch.bfloat16),
    torch.zeros(300, dtype=torch.complex64),
    torch.tensor([1.0, float("nan")]),
    [torch.zeros(3), torch.ones(3)],
    Pair(torch.zeros(3), torch.ones(3) + 1),
    {"text": ["a", "b"], "label": torch.ones(2)},
    Graph(torch.ones(4)),
    numpy.arange(1000.0).reshape(10, 100),
    numpy.array(["a", "c"]),
    ["a", "b"],
    "a text",
]


@each_case("batch", BATCHES, ids=lambda batch: type(batch).__name__)
def test_the_same_batch_has_the_same_digest(batch):
    assert digest(batch) == digest(batch) is not None


def test_different_batches_have_different_digests():
    digests = [digest(batch) for batch in BATCHES]
    assert len(set(digests)) == len(digests)


@pytest.mark.parametrize("batch", [None, 3, 1.5, object(), [], {}, torch.zeros(3).to_sparse(), torch.nn.Parameter()])
def test_nothing_to_look_at(batch):
    assert digest(batch) is None


def test_parts_are_told_apart():
    augmented, labels = digest([torch.rand(8, 3), torch.arange(8)]).split("-")
    again, same_labels = digest([torch.rand(8, 3), torch.arange(8)]).split("-")
    assert augmented != again
    assert labels == same_labels


def test_a_difference_in_one_image_of_a_large_batch():
    batch = torch.zeros(64, 3, 64, 64)
    other = batch.clone()
    other[40] += 1
    assert digest(batch) != digest(other)


def test_few_values_are_copied():
    taken = BatchFingerprint([torch.zeros(1000, 1000), torch.zeros(1000, 1000).t()[:, :500], torch.zeros(100_000)])
    copies = [values for _, values in taken._parts]
    assert all(0 < values.numel() <= batch_fingerprint.MOST_VALUES for values in copies)
    assert all(values.untyped_storage().nbytes() <= batch_fingerprint.MOST_VALUES * 4 for values in copies)


def test_a_wide_batch_is_looked_at_in_its_first_parts_only():
    assert (
        len(digest({str(number): torch.zeros(2) + number for number in range(50)}).split("-"))
        == batch_fingerprint.MOST_PARTS
    )
    assert digest([[[[[torch.zeros(2)]]]]]) is None


class Late:
    """An event of a device that comes to it on the third question."""

    def __init__(self):
        self.asked = 0

    def query(self):
        self.asked += 1
        return self.asked > 2


def test_a_batch_on_a_device_is_read_when_the_device_has_come_to_it():
    taken = BatchFingerprint(torch.arange(4))
    taken._event = Late()
    assert [taken.digest() for _ in range(4)] == [None, None, digest(torch.arange(4)), digest(torch.arange(4))]
    assert taken._parts == []
