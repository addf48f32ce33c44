"""Growth is told from everything else that memory does."""

import math
import random

import pytest

from doctor.analysis.stats.trend import change_of_level, reach, steady_rise, theil_sen, thinned


def noisy(height, count=40, noise=0.02, seed=7):
    """``count`` points of ``height(x)`` for x in 0..1, with normal noise."""
    dice = random.Random(seed)
    return [(number / count, height(number / count) + dice.gauss(0.0, noise)) for number in range(count)]


def test_a_line_is_found_through_wild_points():
    points = [(x, 3.0 + 2.0 * x) for x in range(30)]
    points[4], points[20] = (4, 1000.0), (20, -1000.0)
    line = theil_sen(points)
    assert line.slope == pytest.approx(2.0)
    assert line.low <= 2.0 <= line.high
    assert line.at(100) == pytest.approx(203.0)
    assert line.spread == pytest.approx(0.0, abs=1e-9)


def test_the_interval_holds_the_slope_as_often_as_it_says():
    lines = [theil_sen(noisy(lambda x: 1.5 * x, noise=0.3, seed=seed)) for seed in range(200)]
    held = sum(line.low <= 1.5 <= line.high for line in lines)
    assert 180 <= held <= 199


def test_too_few_points_make_no_line():
    assert theil_sen([(0, 1), (1, 2)]) is None
    assert theil_sen([(1, 1), (1, 2), (1, 3), (2, 4)]) is None
    assert steady_rise([(x, x) for x in range(6)]) is None
    assert steady_rise([(x, x) for x in range(8)]) is not None


def test_thinning_keeps_both_ends():
    kept = thinned([(x, 0.0) for x in range(1000)], 60)
    assert (len(kept), kept[0][0], kept[-1][0]) == (60, 0, 999)
    assert len(set(kept)) == 60


def test_a_change_of_level_is_found_where_it_is():
    change = change_of_level([(x, 1.0 if x < 12 else 5.0) for x in range(30)])
    assert (change.x, change.before, change.after, change.spread) == (12, 1.0, 5.0, 0.0)


RISES = {
    "a line": lambda x: x,
    "a leak of every tenth step": lambda x: math.floor(x * 10) / 10,
    "a leak that gets worse": lambda x: x + x * x,
    "a leak under a small cache": lambda x: x + 0.1 * ((x * 8) % 1),
}


@pytest.mark.parametrize("name", RISES)
def test_growth(name):
    found = [steady_rise(noisy(RISES[name], seed=seed)) for seed in range(20)]
    assert sum(line is not None for line in found) >= 19
    assert all(0.7 < line.slope < 3.2 for line in found if line)


NO_RISES = {
    "nothing happens": lambda x: 1.0,
    "it falls": lambda x: 1.0 - x,
    "warm-up, then a plateau": lambda x: min(1.0, 5 * x),
    "long warm-up, then a plateau": lambda x: min(1.0, 2 * x),
    "one jump early": lambda x: float(x > 0.3),
    "one jump in the middle": lambda x: float(x > 0.5),
    "one jump late": lambda x: float(x > 0.8),
    "a cache emptied now and then": lambda x: (x * 4.3) % 1,
    "a cache emptied once": lambda x: (x * 1.9) % 1,
    "a start that takes its time": lambda x: math.log(1 + 40 * x) / math.log(41),
    "a start that ends": lambda x: 1 - math.exp(-5 * x),
}


@pytest.mark.parametrize("name", NO_RISES)
def test_no_growth(name):
    found = [steady_rise(noisy(NO_RISES[name], noise=0.01, seed=seed)) for seed in range(40)]
    assert sum(line is not None for line in found) == 0


def test_noise_alone_hardly_ever_looks_like_growth():
    found = [steady_rise(noisy(lambda x: 0.0, noise=1.0, seed=seed)) for seed in range(300)]
    assert sum(line is not None for line in found) == 0


def test_points_at_one_place_are_no_obstacle():
    points = [(x // 2, float(x)) for x in range(40)]
    assert steady_rise(points).slope == pytest.approx(2.0, rel=0.1)


def test_the_interval_of_growth_knows_that_it_adds_up():
    """Deviations of what is kept of each step last: the interval still holds the slope as often as it says."""
    held = 0
    for seed in range(100):
        dice = random.Random(seed)
        height, points = 0.0, []
        for x in range(60):
            height += dice.uniform(0.0, 4.0)
            points.append((x, height))
        line = steady_rise(points, warm_up=0.0, fading=0.0)
        held += line.low <= 2.0 <= line.high
    assert held >= 90


def test_how_far_it_is_to_a_limit():
    line = theil_sen(noisy(lambda x: 2 * x))
    expected, soonest, latest = reach(10.0, line)
    assert soonest < expected < latest
    assert expected == pytest.approx(5.0, rel=0.05)
    assert reach(-1.0, line).expected == 0.0
    assert reach(10.0, theil_sen(noisy(lambda x: 0.0))) is None
