"""Mesh of a job: axes of process groups, outermost first, as DeviceMesh of torch numbers ranks."""

from __future__ import annotations

import re
from math import prod
from typing import Annotated

import msgspec
from msgspec import Meta

from doctor.core.message_bounds import MOST_RANKS

_AXIS = re.compile(r"([a-zA-Z]\w*)\s*=\s*(\d{1,9})(?:\s*:\s*(\d{1,12})\s*(B|KiB|MiB|GiB|kB|KB|MB|GB)?)?", re.ASCII)
_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9}
LARGEST_MESSAGE = 1 << 30
"""Bytes of the largest message that is probed."""


class Axis(msgspec.Struct, frozen=True):
    """One axis: its ``name`` (dp, tp, …), number of ranks, and the bytes of the messages along it if known."""

    name: Annotated[str, Meta(pattern=r"\A\w{1,64}\Z")]
    size: Annotated[int, Meta(ge=1, le=MOST_RANKS)]
    bytes: Annotated[int, Meta(ge=1, le=LARGEST_MESSAGE)] | None = None


def parse_mesh(text: str) -> tuple[Axis, ...]:
    """Parse ``dp=4,tp=2`` or ``dp=4:25MiB,tp=2:8MiB``.

    Raises:
        ValueError: it is not a mesh; the message says why in one sentence.
    """
    axes = tuple(_axis(part.strip()) for part in text.split(","))
    names = [axis.name for axis in axes]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"the axis {twice} is named twice")
    return axes


def _axis(text: str) -> Axis:
    found = _AXIS.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is not a valid axis: write dp=4, or dp=4:25MiB with the size of its messages")
    name, size, number, unit = found.groups()
    length = int(number) * _UNITS[unit or "B"] if number else None
    if int(size) < 1 or (length is not None and not 0 < length <= LARGEST_MESSAGE):
        raise ValueError(f"{text!r}: an axis has one rank or more, and messages of 1 byte to 1 GiB")
    return Axis(name, int(size), length)


def ranks_of(axes: tuple[Axis, ...]) -> int:
    """Return the number of ranks of the mesh."""
    return prod(axis.size for axis in axes)


def groups_along(axes: tuple[Axis, ...], place: int) -> tuple[tuple[int, ...], ...]:
    """Return the groups of ranks along the axis at ``place``, each in order; the last axis varies fastest."""
    stride = prod(axis.size for axis in axes[place + 1 :])
    size, world = axes[place].size, ranks_of(axes)
    starts = (rank for rank in range(world) if rank // stride % size == 0)
    return tuple(tuple(start + stride * step for step in range(size)) for start in starts)
