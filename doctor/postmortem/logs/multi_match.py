"""Where a block of a log holds one of many texts, in one pass over its bytes."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import ahocorasick_rs

_NEVER = b"\n\0%d\n"
"""Stands for a text that is not looked for: no line holds it."""


class CueMatch(NamedTuple):
    """A text that was found: its number, and where it begins and ends."""

    cue: int
    start: int
    end: int


class CueMatcher:
    """Texts to look for. Hits overlap, and are ordered by their ends."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts: tuple[str, ...] = tuple(dict.fromkeys(texts))
        self._automaton = _automaton([text.encode() for text in self.texts])

    def without(self, numbers: Collection[int]) -> CueMatcher:
        """The same texts with the same numbers, of which these are not looked for."""
        fewer = copy.copy(self)
        fewer._automaton = _automaton(
            [_NEVER % number if number in numbers else text.encode() for number, text in enumerate(self.texts)]
        )
        return fewer

    def find(self, block: bytes) -> Sequence[tuple[int, int, int]]:
        """The hits in a block, as ``(number of the text, start, end)``."""
        found: list[tuple[int, int, int]] = self._automaton.find_matches_as_indexes(block, overlapping=True)
        return found


def _automaton(texts: list[bytes]) -> ahocorasick_rs.BytesAhoCorasick:
    return ahocorasick_rs.BytesAhoCorasick(texts, implementation=ahocorasick_rs.Implementation.DFA)
