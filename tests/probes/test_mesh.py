from itertools import chain
from math import prod

import pytest

from doctor.probes.collectives.mesh import LARGEST_MESSAGE, Axis, groups_along, parse_mesh, ranks_of

MiB = 1 << 20


@pytest.mark.parametrize(
    ("text", "axes"),
    [
        ("dp=4", [Axis("dp", 4)]),
        ("dp=4,tp=2", [Axis("dp", 4), Axis("tp", 2)]),
        (" dp = 4 , tp = 2 ", [Axis("dp", 4), Axis("tp", 2)]),
        ("dp=4:25MiB,tp=2:8MB", [Axis("dp", 4, 25 * MiB), Axis("tp", 2, 8_000_000)]),
        ("pp=1:7", [Axis("pp", 1, 7)]),
        ("dp_shard=16:512kB", [Axis("dp_shard", 16, 512_000)]),
        ("dp=2:1GiB", [Axis("dp", 2, LARGEST_MESSAGE)]),
    ],
)
def test_a_mesh_is_read(text, axes):
    assert parse_mesh(text) == tuple(axes)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "is not a valid axis"),
        ("dp", "is not a valid axis"),
        ("dp=", "is not a valid axis"),
        ("dp=-2", "is not a valid axis"),
        ("dp=2.5", "is not a valid axis"),
        ("4=dp", "is not a valid axis"),
        ("dp=4,", "is not a valid axis"),
        ("dp=4 tp=2", "is not a valid axis"),
        ("dp=4:25XB", "is not a valid axis"),
        ("dp=٤", "is not a valid axis"),
        ("dp=9999999999", "is not a valid axis"),
        ("dp=4,tp=2,dp=2", "the axis dp is named twice"),
        ("dp=0", "one rank or more"),
        ("dp=2:0", "1 byte to 1 GiB"),
        ("dp=2:2GiB", "1 byte to 1 GiB"),
    ],
)
def test_what_is_no_mesh_is_refused_in_a_sentence(text, why):
    with pytest.raises(ValueError, match=why) as refused:
        parse_mesh(text)
    assert "\n" not in str(refused.value)


def test_groups_of_two_axes():
    axes = parse_mesh("dp=2,tp=4")
    assert ranks_of(axes) == 8
    assert groups_along(axes, 0) == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert groups_along(axes, 1) == ((0, 1, 2, 3), (4, 5, 6, 7))


SHAPES = [(1,), (8,), (4, 2), (2, 4), (2, 3, 4), (3, 1, 2), (2, 2, 2, 2)]


@pytest.mark.parametrize("sizes", SHAPES)
def test_each_rank_is_in_one_group_along_each_axis(sizes):
    axes = tuple(Axis(f"a{place}", size) for place, size in enumerate(sizes))
    for place, size in enumerate(sizes):
        groups = groups_along(axes, place)
        assert {len(group) for group in groups} == {size}
        assert sorted(chain.from_iterable(groups)) == list(range(prod(sizes)))


@pytest.mark.parametrize("sizes", SHAPES)
def test_ranks_are_numbered_as_torch_numbers_them(sizes):
    """``DeviceMesh`` takes ranks as ``torch.arange(world).view(sizes)``, and a group from each row along an axis."""
    torch = pytest.importorskip("torch")
    axes = tuple(Axis(f"a{place}", size) for place, size in enumerate(sizes))
    mesh = torch.arange(prod(sizes)).reshape(sizes)
    for place, size in enumerate(sizes):
        rows = mesh.movedim(place, -1).reshape(-1, size).tolist()
        assert sorted(groups_along(axes, place)) == sorted(map(tuple, rows))
