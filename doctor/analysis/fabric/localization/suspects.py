"""What was measured between hosts, and what it is blamed on."""

from __future__ import annotations

from typing import Literal, NamedTuple

Blame = Literal["host", "sending", "receiving", "link", "boundary"]
"""``sending`` and ``receiving``: one direction of a host's own link."""


class BandwidthReading(NamedTuple):
    """Bytes a second that arrived at host ``target`` from host ``source``, 0.0 where nothing did.

    Hosts are numbered from 0 in the order of the job. Pairs of one ``round`` were measured at the same time.
    ``confirms``: measured to confirm a suspicion, not in the first rounds.
    """

    source: int
    target: int
    value: float
    round: int
    confirms: bool = False


class Suspect(NamedTuple):
    """A part that is slower than the others of its kind.

    ``members``: the host; both hosts of a link; the smaller side of a boundary. ``share``: its typical value over the
    usual one. ``confidence``: 0 to 1, the probability that this part is to blame, against every other explanation of
    the same readings and against noise. ``slow`` of ``readings``: how many of those that touch it were slow.
    ``intermittent``: slow in some rounds and not in others.
    """

    kind: Blame
    members: tuple[int, ...]
    share: float
    confidence: float
    slow: int
    readings: int
    intermittent: bool = False


class Localization(NamedTuple):
    """``typical``: the usual value, bytes a second; ``spread``: the standard deviation of the logarithm of usual values
    (0.1 is 10 %); ``suspects``: the surest first, those that nobody would bet on (below one half) among them."""

    typical: float
    spread: float
    suspects: tuple[Suspect, ...]
