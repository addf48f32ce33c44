"""Memory of a GPU that torch can use, by the name of the GPU.

It is less than the name says: the driver reserves a part (ECC, its own tables), which grows with releases. Sources:
``total_memory`` as torch prints it (``torch.cuda.get_device_properties``) and the "total capacity" of its out-of-memory
messages in public logs; of several values the smallest, so that what fits here fits on all of them.
"""

from __future__ import annotations

import difflib
import re
from functools import cache
from typing import NamedTuple

import msgspec

from doctor.knowledge.data_files import read

MIB = 1 << 20


class DeviceMemory(NamedTuple):
    """A GPU by its short name: bytes usable by torch, and its compute capability (``9.0``; empty without CUDA)."""

    name: str
    total: int
    capability: str


class _MemoryRow(msgspec.Struct, frozen=True):
    mib: int
    capability: str


_MAKERS = frozenset(("nvidia", "geforce", "tesla", "quadro", "amd", "instinct", "gpu", "generation"))
_KINDS = re.compile("hbm[0-9]e?|pcie|sxm[0-9]?")
"""Words in the name of a GPU in a driver that do not affect its memory."""


@cache
def _table() -> dict[str, _MemoryRow]:
    return read("device_memory.json", dict[str, _MemoryRow])


def known_devices() -> tuple[str, ...]:
    """Return the short names of all GPUs in the table."""
    return tuple(_table())


def find_devices(name: str) -> tuple[DeviceMemory, ...]:
    """Return the GPUs that ``name`` may mean: one for ``H100 80GB`` or ``NVIDIA H100 80GB HBM3``, two for ``A100``,
    none for an unknown name."""
    asked = _words(name)
    found = [known for known in _table() if asked and asked <= _words(known)]
    return tuple(DeviceMemory(one, _table()[one].mib * MIB, _table()[one].capability) for one in found)


def near_devices(name: str) -> tuple[str, ...]:
    """Return names in the table that resemble ``name``, the nearest first."""
    by_words = {" ".join(sorted(_words(known))): known for known in _table()}
    asked = " ".join(sorted(_words(name)))
    return tuple(by_words[near] for near in difflib.get_close_matches(asked, by_words, n=3, cutoff=0.5))


def _words(name: str) -> frozenset[str]:
    joined = re.sub(r"(\d+)\s*gi?b\b", r"\1gb", name.lower())
    return frozenset(word for word in re.findall("[a-z0-9]+", joined) if not _KINDS.fullmatch(word)) - _MAKERS
