"""Versions of the plugin interfaces that each NCCL release can load.

From the tags of NVIDIA/nccl: the ``getNcclNet_v…`` and ``ncclTunerPlugin_v…`` symbols under ``src``.
"""

from __future__ import annotations

Release = tuple[int, ...]
Range = tuple[int, int]

_RANGES: dict[str, tuple[tuple[Release, Range], ...]] = {
    "net": (
        ((2, 30), (6, 12)),
        ((2, 28), (6, 11)),
        ((2, 26), (6, 10)),
        ((2, 24), (5, 9)),
        ((2, 20), (5, 8)),
        ((2, 19), (5, 7)),
        ((2, 13), (4, 6)),
        ((2, 12), (4, 5)),
    ),
    "tuner": (
        ((2, 30), (2, 6)),
        ((2, 28), (2, 5)),
        ((2, 24), (2, 4)),
        ((2, 22), (2, 3)),
        ((2, 21), (2, 2)),
        ((2, 19), (1, 1)),
    ),
}


def readable_interfaces(kind: str, release: Release | None) -> Range | None:
    """Return the oldest and newest interface version of ``kind`` (``net`` or ``tuner``) that ``release`` reads, or
    ``None``."""
    if release is None:
        return None
    return next((span for first, span in _RANGES.get(kind, ()) if release >= first), None)
