"""Samples that are kept: the newest ones, and fewer of older ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")

KEPT, RATIO, LEVELS = 16, 8, 4
"""Of every sample, and of every 8th, 64th and 512th, the newest 16 are kept: ranks that report at different moments
have some in common."""


class SampleHistory(Generic[T]):
    """Hashable samples. One thread adds, any thread reads."""

    def __init__(self) -> None:
        self._levels = [deque[T](maxlen=KEPT) for _ in range(LEVELS)]

    def add(self, number: int, sample: T) -> None:
        """Keep sample ``number``."""
        for level, kept in enumerate(self._levels):
            if number % RATIO**level == 0:
                kept.append(sample)

    def kept(self, key: Callable[[T], Any]) -> tuple[T, ...]:
        """Return all kept samples in the order of ``key``."""
        return tuple(sorted({sample for kept in self._levels for sample in tuple(kept)}, key=key))
