"""Messages of NCCL, torch, launchers, schedulers, kernels: how each is recognised in a line of a log.

``log_lines/*.json``, one file a speaker, hold ``{"kind", "cues", "pattern", "examples"}``. ``cues``: texts of which at
least one stands in every such line, so that lines are told apart without a regular expression; ``pattern`` is searched
in the line without its prefixes (:mod:`doctor.postmortem.logs.prefixes`), its named groups are what the message names.
``examples`` are lines that it matches, in the wordings of different releases: tests read them.

A kind that ends in ``.harmless`` looks like a failure and is none. A kind may have several entries.
"""

from __future__ import annotations

import functools
from importlib.resources import files

import msgspec

from doctor.core.decoding import prepared
from doctor.knowledge.linear_regex import Pattern, linear


class LogPattern(msgspec.Struct, frozen=True):
    """One message. See above."""

    kind: str
    cues: tuple[str, ...]
    pattern: str
    examples: tuple[str, ...] = ()

    @property
    def compiled(self) -> Pattern:
        """The pattern, made once."""
        return _compiled(self.pattern)


@functools.cache
def _compiled(pattern: str) -> Pattern:
    return linear(pattern)


@functools.cache
def known_patterns() -> tuple[LogPattern, ...]:
    """All of them, by file and place."""
    folder = files(__package__) / "log_lines"
    found = sorted((entry for entry in folder.iterdir() if entry.name.endswith(".json")), key=lambda entry: entry.name)
    return tuple(
        message
        for entry in found
        for message in msgspec.json.decode(entry.read_bytes(), type=prepared(tuple[LogPattern, ...]))
    )
