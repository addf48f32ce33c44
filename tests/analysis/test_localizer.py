"""Planted faults are named, healthy networks are left alone."""

from __future__ import annotations

import math
import random

import pytest

from doctor.analysis.fabric.localization.localizer import BandwidthReading, Localization, confirming, localize, rounds
from doctor.analysis.fabric.localization.noise_model import NoiseModel
from doctor.analysis.fabric.localization.pairing_rounds import rounds_to_confirm

USUAL = 1e9


class Network:
    """Hosts whose pairs are as fast as ``share(source, target)`` of the usual, with log-normal noise."""

    def __init__(self, count, share=lambda source, target: 1.0, *, noise=0.05, seed=0):
        self.count, self.share, self.noise = count, share, noise
        self.chance = random.Random(seed)
        self.readings: list[BandwidthReading] = []
        self.played = 0

    def play(self, pairs, confirms=False):
        for pair in pairs:
            for source, target in (pair, pair[::-1]):
                share = self.share(source, target) * math.exp(self.chance.gauss(0, self.noise))
                self.readings.append(BandwidthReading(source, target, USUAL * share, self.played, confirms))
        self.played += 1

    def first(self) -> Localization:
        for pairs in rounds(self.count):
            self.play(pairs)
        return localize(self.readings, self.count)

    def final(self) -> Localization:
        found = self.first()
        while planned := confirming(found, self.readings, self.count):
            self.play(planned[0], confirms=True)
            found = localize(self.readings, self.count)
        return found


def likely(found):
    return {(one.kind, one.members) for one in found.suspects if one.confidence >= 0.5}


def host(*slow, by=0.4):
    return lambda source, target: by if {source, target} & {*slow} else 1.0


def sending(slow, by=0.4):
    return lambda source, target: by if source == slow else 1.0


def receiving(slow, by=0.4):
    return lambda source, target: by if target == slow else 1.0


def link(first, second, by=0.4):
    return lambda source, target: by if {source, target} == {first, second} else 1.0


def boundary(inside, by=0.4):
    return lambda source, target: by if (source in inside) != (target in inside) else 1.0


COUNTS = [4, 7, 8, 13, 16, 50, 64, 257]


@pytest.mark.parametrize("count", COUNTS)
def test_one_host(count):
    for slow in (0, count // 2, count - 1):
        found = Network(count, host(slow)).final()
        assert likely(found) == {("host", (slow,))}
        assert found.suspects[0].share == pytest.approx(0.4, rel=0.15)
        assert found.suspects[0].confidence > 0.95
        assert not found.suspects[0].intermittent
        assert found.typical == pytest.approx(USUAL, rel=0.1)


@pytest.mark.parametrize("count", [8, 16, 50, 257])
def test_one_direction_of_a_host(count):
    assert likely(Network(count, sending(count // 3)).final()) == {("sending", (count // 3,))}
    assert likely(Network(count, receiving(count // 3)).final()) == {("receiving", (count // 3,))}


@pytest.mark.parametrize("count", COUNTS)
def test_a_link(count):
    pair = rounds(count)[2][0]
    found = Network(count, link(*pair)).final()
    assert likely(found) == {("link", pair)}
    both_ways = 2 * (1 + rounds_to_confirm(count))
    assert (found.suspects[0].slow, found.suspects[0].readings) == (both_ways, both_ways)


@pytest.mark.parametrize("count", COUNTS)
def test_two_halves(count):
    half = tuple(range(count // 2))
    assert likely(Network(count, boundary(set(half))).final()) == {("boundary", half)}


@pytest.mark.parametrize(
    ("count", "start", "end"), [(8, 2, 4), (16, 5, 8), (50, 12, 25), (64, 60, 64), (257, 100, 131)]
)
def test_a_rack_of_any_size(count, start, end):
    inside = tuple(range(start, end))
    assert likely(Network(count, boundary({*inside})).final()) == {("boundary", inside)}


def test_a_known_group_that_is_no_run():
    network = Network(32, boundary({*range(0, 32, 2)}))
    network.first()
    found = localize(network.readings, 32, groups=(frozenset(range(0, 32, 2)), frozenset(range(1, 32, 2))))
    assert likely(found) == {("boundary", tuple(range(0, 32, 2)))}


@pytest.mark.parametrize(
    ("count", "slow"), [(8, (2, 3)), (16, (1, 2, 9)), (64, (3, 20, 21, 22, 40, 63)), (16, (0, 4, 5, 8, 11))]
)
def test_several_hosts_neighbours_among_them(count, slow):
    assert likely(Network(count, host(*slow)).final()) == {("host", (one,)) for one in slow}


def test_a_host_and_a_link_and_a_boundary_at_once():
    def share(source, target):
        return min(host(5, by=0.1)(source, target), boundary({*range(40, 64)}, by=0.5)(source, target))

    assert likely(Network(64, share).final()) == {("host", (5,)), ("boundary", tuple(range(40, 64)))}


def test_a_host_that_is_slow_every_other_round():
    network = Network(50, seed=3)
    network.share = lambda source, target: 0.4 if 7 in (source, target) and network.played % 2 else 1.0
    (suspect,) = network.final().suspects
    assert (suspect.kind, suspect.members, suspect.intermittent) == ("host", (7,), True)
    assert suspect.slow < suspect.readings
    assert suspect.confidence > 0.9


def test_a_host_that_gets_nothing():
    assert likely(Network(16, host(9, by=0.0)).final()) == {("host", (9,))}


@pytest.mark.parametrize("count", [4, 8, 16, 64])
def test_what_is_a_little_slow_is_no_suspect(count):
    assert Network(count, host(1, by=0.75)).final().suspects == ()
    assert likely(Network(count, boundary({0, 1}, by=0.75)).final()) == set()


HEALTHY = 40


@pytest.mark.parametrize("noise", [0.01, 0.1, 0.3])
@pytest.mark.parametrize("count", [2, 3, 4, 8, 16, 33])
def test_healthy_networks_are_left_alone(count, noise):
    """At most one of :data:`HEALTHY` healthy networks is blamed for anything, whatever the noise."""
    alarms = [seed for seed in range(HEALTHY) if likely(Network(count, noise=noise, seed=seed).final())]
    assert len(alarms) <= 1


def test_a_moment_of_work_elsewhere_is_nobodys_fault():
    """A whole round was slow, and one pair in another one."""
    network = Network(16)
    pair = rounds(16)[4][1]
    network.share = lambda source, target: (
        0.3 if network.played == 2 or (network.played == 4 and {source, target} == {*pair}) else 1.0
    )
    assert likely(network.final()) == set()


def test_what_is_not_confirmed_is_not_blamed():
    network = Network(8)
    pair = rounds(8)[1][0]
    network.share = lambda source, target: 0.3 if network.played == 1 and {source, target} == {*pair} else 1.0
    first = network.first()
    assert any(pair in pairs for pairs in confirming(first, network.readings, 8))
    assert likely(network.final()) == set()


def moments(*slow):
    """Readings of eight hosts that met each other and, of these, the sixth and four others again; ``slow``: in which
    rounds which pair was slow one way, each time by another factor."""
    chance = random.Random(4)
    met = [*enumerate(rounds(8)), *((7 + turn, ((turn, 6),)) for turn in range(4))]
    return [
        BandwidthReading(source, target, USUAL * factor * math.exp(chance.gauss(0, 0.05)), turn, turn > 6)
        for turn, pairs in met
        for pair in pairs
        for source, target in (pair, pair[::-1])
        for factor in ((chance.uniform(0.01, 0.3) if (turn, pair) in slow and (source < target) == turn % 2 else 1.0),)
    ]


def met_in(turn, host):
    """The round, and the pair of ``host`` in it."""
    return turn, next(pair for pair in rounds(8)[turn] if host in pair)


def test_a_host_that_is_slow_in_less_than_half_of_its_rounds():
    slow = [met_in(1, 6), met_in(3, 6), met_in(4, 6), (8, (1, 6)), (10, (3, 6))]
    [suspect] = localize(moments(*slow), 8).suspects
    assert (suspect.members, suspect.intermittent) == ((6,), True)
    assert suspect.confidence > 0.5


def test_as_many_slow_moments_as_others_have_are_chance():
    slow = [met_in(1, 6), met_in(3, 6), met_in(4, 6), (8, (1, 6)), (10, (3, 6))]
    others = [(turn, pair) for turn in range(7) for pair in rounds(8)[turn][turn % 2 :: 2] if 6 not in pair]
    assert likely(localize(moments(*slow, *others), 8)) == set()


def test_two_hosts_cant_tell_who_it_is():
    network = Network(2, sending(0, by=0.1))
    assert likely(network.final()) == set()


def test_nothing_measured_nothing_said():
    assert localize((), 8) == Localization(0.0, 0.0, ())
    assert localize([BandwidthReading(0, 1, 0.0, 0)], 2).suspects == ()


def test_the_order_of_readings_does_not_matter():
    network = Network(33, host(4, 9), noise=0.1)
    found = network.first()
    mixed = list(network.readings)
    random.Random(1).shuffle(mixed)
    again = localize(mixed, 33)
    assert likely(again) == likely(found)
    assert again.typical == pytest.approx(found.typical)
    assert localize(network.readings, 33) == found
    assert hash(found) == hash(localize(network.readings, 33))


@pytest.mark.parametrize(
    "slow", [host(3), host(*range(0, 500, 77)), boundary({*range(200, 300)}), boundary({*range(256)})]
)
def test_the_work_grows_with_the_readings(slow, monkeypatch):
    """Each reading is weighed a few dozen times at most, not once for every host."""
    network = Network(512, slow, noise=0.2)
    weighed = 0
    weigh = NoiseModel.log_density

    def counted(noise, ahead, back):
        nonlocal weighed
        weighed += 1
        return weigh(noise, ahead, back)

    monkeypatch.setattr(NoiseModel, "log_density", counted)
    assert len(network.first().suspects) >= 1
    assert weighed < 60 * len(network.readings)
