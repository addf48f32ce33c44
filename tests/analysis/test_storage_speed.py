"""Who is to blame where hosts do not see one another's files."""

from __future__ import annotations

import pytest

from doctor.analysis.storage_speed import split_directories
from doctor.facts import StorageReading, StorageSpeedFacts
from doctor.testing import healthy

PATH = "/data/runs"


def blamed(hosts: int, looks: dict[tuple[int, int], str]) -> tuple[int, ...]:
    """``looks``: what a reader saw of a writer's file."""
    sketch = healthy(hosts, 1)
    for reader in range(hosts):
        own = tuple(
            StorageReading(PATH, f"node{writer}", outcome) for (who, writer), outcome in looks.items() if who == reader
        )
        sketch = sketch.put(StorageSpeedFacts(readings=own), hosts=(f"node{reader}",))
    return next((apart.places for apart in split_directories(sketch.job())), ())


def ring(hosts: int, group: list[int]) -> dict[tuple[int, int], str]:
    """All hosts read those of both neighbours; ``group``: the number of the directory that each has."""
    looks = {}
    for reader in range(hosts):
        for writer in {(reader + 1) % hosts, (reader - 1) % hosts}:
            looks[reader, writer] = "whole" if group[reader] == group[writer] else "absent"
    return looks


@pytest.mark.parametrize(
    ("group", "expected"),
    [
        ([0, 0, 0, 0], ()),
        ([0, 0, 1, 0, 0], (2,)),
        ([1, 0, 0, 0, 0], (0,)),
        ([0, 0, 1, 0, 0, 2, 0, 0], (2, 5)),
        ([0, 1, 2, 3], (0, 1, 2, 3)),
        ([0, 0, 0, 0, 0, 1, 1, 1], (5, 6, 7)),
    ],
)
def test_directories_of_hosts(group: list[int], expected: tuple[int, ...]) -> None:
    assert blamed(len(group), ring(len(group), group)) == expected


def test_a_host_whose_files_nobody_sees_though_it_sees_theirs() -> None:
    """An overlay: a container's own layer above what all share."""
    looks = dict.fromkeys(ring(5, [0] * 5), "whole")
    looks |= {(reader, writer): "absent" for reader, writer in looks if writer == 3}
    assert blamed(5, looks) == (3,)


def test_a_host_that_sees_nothing_new() -> None:
    looks = {(reader, writer): "absent" if reader == 3 else "whole" for reader, writer in ring(5, [0] * 5)}
    assert blamed(5, looks) == (3,)


def test_two_hosts_are_both_named() -> None:
    assert blamed(2, {(0, 1): "absent", (1, 0): "absent"}) == (0, 1)


def test_one_that_got_no_answer_says_nothing_of_the_others() -> None:
    assert blamed(3, {(0, 1): "silent", (1, 2): "whole", (2, 0): "whole"}) == ()
