"""Releases that belong together: Lightning and torch, CUDA and the driver, NCCL and the GPU.

Sources: metadata of the lightning and torch wheels for Linux x86_64; NVIDIA's CUDA release notes, table of minimum
drivers under minor-version compatibility; NCCL makefiles/common.mk by tag for the architectures; the support matrix of
NVIDIA's containers (docs.nvidia.com/deeplearning/frameworks/support-matrix) for the torch in an image.
"""

from __future__ import annotations

import math
from functools import cache, lru_cache

import msgspec

from doctor.core.text import lazy_compile
from doctor.knowledge.data_files import read

Release = tuple[int, ...]


class LightningRelease(msgspec.Struct, frozen=True):
    """A Lightning release: the torch that it requires, as a specifier, and the newest ``x.y`` it was tested with."""

    torch: str
    tested: str


class _Releases(msgspec.Struct, frozen=True):
    minimum_driver: dict[str, str]
    minimum_nccl: dict[str, str]
    bundled_nccl: dict[str, str]
    ngc_images: dict[str, str]
    lightning: dict[str, LightningRelease]


@cache
def _table() -> _Releases:
    return read("releases.json", _Releases)


_NUMBERS = lazy_compile(r"\s*[vVrR]?(\d{1,9}(?:\.\d{1,9})*)")


@lru_cache(maxsize=4096)
def release(text: str) -> Release:
    """Return the leading numbers of a version, if any: (2, 27, 3) for ``2.27.3+cuda12.8``, (570, 124, 6) for
    ``570.124.06``."""
    match = _NUMBERS.match(text)
    return tuple(map(int, match.group(1).split("."))) if match else ()


def end_of_line(text: str) -> tuple[float, ...]:
    """Return what sorts releases that each stand for the newest of their line: ``1.6`` is before ``1``, which has 1.9,
    and after ``1.6.4``; nothing sorts before a text without numbers."""
    numbers = release(text)
    return (*numbers, math.inf) if numbers else ()


def is_older(one: str, other: str) -> bool | None:
    """Return whether ``one`` is older than ``other`` over the numbers that both have.

    ``2.27`` is not older than ``2.27.3``. ``None`` if one of them is not a version.
    """
    first, second = release(one), release(other)
    length = min(len(first), len(second))
    return first[:length] < second[:length] if length else None


def within(version: str, first: str | None = None, before: str | None = None) -> bool:
    """Return whether ``first`` <= ``version`` < ``before``, each end open if ``None``; false without a version."""
    numbers = release(version)
    if not numbers:
        return False
    return (first is None or numbers >= release(first)) and (before is None or numbers < release(before))


def minimum_driver(cuda: str) -> str | None:
    """Return the oldest Linux driver for a CUDA release (``12.8``) under minor-version compatibility, if known.

    Releases before 11, which have no such compatibility, have a driver each (CUDA release notes, table of drivers)."""
    drivers = _table().minimum_driver
    return drivers.get(".".join(cuda.split(".")[:2])) or drivers.get(cuda.partition(".")[0])


def minimum_nccl(compute_capability: str) -> str | None:
    """Return the first NCCL with code for a GPU of this compute capability (``9.0``); ``None`` if unknown."""
    return _table().minimum_nccl.get(compute_capability.partition(".")[0])


def nccl_of_rocm(rocm: str) -> str | None:
    """Return an NCCL that chooses algorithms as the RCCL of a ROCm release does; ``None`` if unknown.

    RCCL is a fork of NCCL, with the numbers of what it was forked from: 2.21.5 in ROCm 6.3 (its CHANGELOG.md)."""
    return "2.21.5" if within(rocm, before="6.4") else None


def bundled_nccl(torch: str) -> str | None:
    """Return the newest NCCL that wheels of a torch release may come with (``2.4.0``, or ``2.4`` for all of its line).

    Torch before 1.4 has that of 1.4 or an older one, and what is called 1 that of 1.13. ``None`` for newer lines than
    the table's, and without a version.
    """
    numbers, table = release(torch)[:2], _table().bundled_nccl
    if numbers and numbers < (2,):
        return table["1.13"] if numbers == (1,) else table.get(".".join(map(str, numbers)), table["1.4"])
    return table.get(".".join(map(str, numbers)))


def torch_of_ngc(tag: str) -> str | None:
    """Return the line of torch in ``nvcr.io/nvidia/pytorch:<tag>``; ``None`` if it is older than the table, or no date.

    An image has an alpha of its line. Those of 2.2 (23.11 to 24.01) count as 2.1, because they are older than the
    variables that 2.2 renamed."""
    since = [first for first in _table().ngc_images if release(first) <= release(tag)[:2]]
    return _table().ngc_images[since[-1]] if since and len(release(tag)) > 1 else None


class LightningMatch(msgspec.Struct, frozen=True):
    """The entry of the table for a Lightning release."""

    since: str
    release: LightningRelease


def lightning_release(version: str) -> LightningMatch | None:
    """Return the newest entry of the ``x.y`` of ``version`` that is not newer than it."""
    numbers = release(version)
    fitting = [
        LightningMatch(since, line)
        for since, line in _table().lightning.items()
        if release(since)[:2] == numbers[:2] and release(since) <= numbers
    ]
    return max(fitting, key=lambda match: release(match.since), default=None)
