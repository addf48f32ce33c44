"""Who stands out among peers, and who does not."""

from statistics import median

import pytest

from doctor.analysis.stats.outliers import PeerValues, outliers


@pytest.mark.parametrize("values", [[1, 5], [1, 5, 9], [3, 3, 3, 8], [2, 7, 1, 8, 2, 8], list(range(40))])
def test_the_median_of_the_others_is_theirs(values):
    peers = PeerValues(values)
    for place, value in enumerate(values):
        assert peers.median(value) == median(values[:place] + values[place + 1 :])


def test_nobody_is_compared_with_himself():
    assert PeerValues([4.0]).median(4.0) == 4.0
    assert PeerValues([4.0]).spread(4.0) == 0.0
    assert outliers({3: 4.0}, share=0.1) == ()


def test_one_among_many():
    (found,) = outliers({0: 10.0, 1: 10.2, 2: 9.9, 3: 14.0}, share=0.2)
    assert (found.rank, found.typical) == (3, 10.0)
    assert found.excess == pytest.approx(4.0)


def test_the_lower_one_too_where_there_is_a_majority():
    assert [one.rank for one in outliers({0: 10.0, 1: 10.2, 2: 3.0}, share=0.2)] == [2]


def test_of_two_the_larger_one():
    assert [one.rank for one in outliers({0: 10.0, 1: 20.0}, share=0.2)] == [1]


def test_peers_that_lie_apart_themselves_make_no_outlier():
    assert outliers({0: 1.0, 1: 2.0, 2: 3.0, 3: 4.0, 4: 5.5}, share=0.2) == ()


def test_all_three_limits_count():
    values = {0: 100.0, 1: 100.0, 2: 100.0, 3: 115.0}
    assert outliers(values, share=0.1)
    assert not outliers(values, share=0.2)
    assert not outliers(values, share=0.1, least=20.0)


def test_it_is_linear_where_many_stand_out():
    values = {rank: 100.0 + (rank % 7 == 0) * 50 for rank in range(20_000)}
    assert len(outliers(values, share=0.1)) == 20_000 // 7 + 1
