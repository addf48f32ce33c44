"""Bandwidths measured between hosts, and the suspects that explain them."""

from __future__ import annotations

from typing import Literal, NamedTuple

Blame = Literal["host", "sending", "receiving", "link", "boundary"]
"""``sending`` and ``receiving`` are one direction of a host's own link."""


class BandwidthReading(NamedTuple):
    """Bytes per second that arrived at host ``target`` from host ``source``; 0.0 if nothing arrived.

    Hosts are numbered from 0 in the order of the job. Pairs of one ``round`` were measured at the same time.
    ``confirms``: measured to confirm a suspect, not in the first rounds."""

    source: int
    target: int
    value: float
    round: int
    confirms: bool = False


class Suspect(NamedTuple):
    """A component that is slower than the others of its kind.

    ``members``: the host; both hosts of a link; the smaller side of a boundary. ``share``: its typical value over the
    usual one. ``confidence``: 0 to 1, the probability that this component is the cause, against every other explanation
    of the same readings and against noise. ``slow`` of ``readings``: the number of its readings that were slow.
    ``intermittent``: slow in some rounds and not in others."""

    kind: Blame
    members: tuple[int, ...]
    share: float
    confidence: float
    slow: int
    readings: int
    intermittent: bool = False


class Localization(NamedTuple):
    """``typical``: the usual value in bytes per second; ``spread``: the standard deviation of the logarithm of usual
    values (0.1 is 10 %); ``suspects``: the most certain first, including those with a confidence below one half."""

    typical: float
    spread: float
    suspects: tuple[Suspect, ...]
