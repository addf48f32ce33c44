import itertools

import pytest

from doctor.estimate.batch_search import bytes_a_sample, largest_batch

MIB = 1 << 20


class Curve:
    """The peak over the batch as the highest of some lines (bytes at batch 0, bytes a sample), and what was asked."""

    def __init__(self, *lines, step=1):
        self.lines, self.step, self.asked = lines, step, []

    def __call__(self, batch):
        self.asked.append(batch)
        value = max(base + slope * batch for base, slope in self.lines)
        return -(-int(value) // self.step) * self.step

    def largest(self, limit):
        return next(batch - 1 for batch in itertools.count(1) if Curve(*self.lines, step=self.step)(batch) > limit)


CURVES = {
    "a line": Curve((3000 * MIB, 700 * MIB)),
    "the optimizer step first, the backward pass later": Curve((40_000 * MIB, MIB), (3000 * MIB, 700 * MIB)),
    "three moments": Curve((40_000 * MIB, 0), (20_000 * MIB, 300 * MIB), (1000 * MIB, 900 * MIB)),
    "segments of 20 MiB": Curve((3000 * MIB, 37.3 * MIB), step=20 * MIB),
    "small samples": Curve((5000 * MIB, 0.01 * MIB), step=2 * MIB),
}


@pytest.mark.parametrize("name", CURVES)
@pytest.mark.parametrize("start", [1, 16, 500])
@pytest.mark.parametrize("limit", [16_000 * MIB, 81_000 * MIB])
def test_the_largest_batch_is_traced_and_the_next_one_does_not_fit(name, start, limit):
    curve = Curve(*CURVES[name].lines, step=CURVES[name].step)
    found = largest_batch(curve, limit, {start: curve(start)}, traces=40)
    if curve(1) > limit:
        assert found.batch == 0
        assert found.exact
    elif found.batch < 1 << 20:
        assert found.exact
        assert found.points[found.batch] <= limit < found.points[found.batch + 1]


@pytest.mark.parametrize("name", ["a line", "the optimizer step first, the backward pass later", "three moments"])
def test_it_takes_few_traces(name):
    curve = Curve(*CURVES[name].lines)
    found = largest_batch(curve, 81_000 * MIB, {16: curve(16)}, traces=8)
    assert found.exact
    assert found.batch == curve.largest(81_000 * MIB)


def test_a_good_first_guess_saves_traces():
    curve = Curve(*CURVES["a line"].lines)
    found = largest_batch(curve, 81_000 * MIB, {16: curve(16)}, traces=3, sample=720 * MIB)
    assert found.exact
    assert found.batch == curve.largest(81_000 * MIB)


@pytest.mark.parametrize("sample", [1, 7000 * MIB])
def test_a_bad_first_guess_does_no_harm(sample):
    curve = Curve(*CURVES["three moments"].lines)
    found = largest_batch(curve, 81_000 * MIB, {16: curve(16)}, traces=12, sample=sample)
    assert found.exact
    assert found.batch == curve.largest(81_000 * MIB)


def test_what_was_not_searched_to_the_end_says_so():
    curve = Curve(*CURVES["segments of 20 MiB"].lines, step=20 * MIB)
    found = largest_batch(curve, 81_000 * MIB, {1: curve(1)}, traces=1)
    assert not found.exact
    assert found.points[found.batch] <= 81_000 * MIB


def test_a_batch_that_can_not_be_had_ends_the_search():
    found = largest_batch(lambda _: None, 10, {4: 8}, traces=9)
    assert (found.batch, found.exact) == (4, False)


def test_a_batch_that_costs_nothing_is_not_searched_for_ever():
    curve = Curve((100, 0))
    found = largest_batch(curve, 200, {1: curve(1)}, traces=40)
    assert (found.batch, found.exact) == (1 << 20, True)


def test_slack_ends_the_search_early():
    curve = Curve(*CURVES["segments of 20 MiB"].lines, step=20 * MIB)
    found = largest_batch(curve, 81_000 * MIB, {16: curve(16)}, traces=40, slack=0.05)
    assert len(curve.asked) < 6
    assert found.batch >= 0.95 * curve.largest(81_000 * MIB)


def test_what_a_sample_takes():
    points = {1: 110, 10: 200, 20: 400}
    assert bytes_a_sample(points) == 20
    assert bytes_a_sample({1: 110}) is None
