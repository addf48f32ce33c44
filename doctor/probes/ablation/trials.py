"""What is tried to find out why something fails: what a process is asked to try, and when a change counts as a cure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from doctor.analysis.trial_conclusions import NOT_TRIED, Subject
from doctor.core.facts import Trial
from doctor.core.message_bounds import Mtu, Name, Port, Rate, Text, Word
from doctor.probes.ablation.alternative_paths import MOST_WAYS, AlternativePath
from doctor.probes.ablation.experiments import SLOW_SHARE
from doctor.probes.bandwidth.schedule import TransferSchedule
from doctor.probes.base import ProbeParticipant, StageOrders

ROUNDS = 2
"""Times in a row that a change has to mend. Unchanged and changed are measured beside each other each time, so that a
fault that went away by itself is not credited to a change."""

MOST_ROUNDS = 3
"""Where speeds are compared: other work on the hosts may spoil one of them."""

USUAL_SHARE = SLOW_SHARE
"""Of what is usual among the others: a change that brings less than that does not mend."""

Ways = Annotated[tuple[AlternativePath, ...], Meta(max_length=MOST_WAYS)]

LEAST_GAIN = 1.5
"""Times as much as without the change, in each round; less is the noise of a busy machine."""


class TrialPeer(msgspec.Struct, frozen=True):
    """The host called ``name``, which answers on ``port`` to who knows the ``word``: ``way`` leads there and is sick,
    ``others`` lead there besides."""

    name: Name
    port: Port
    word: Word
    way: AlternativePath
    others: Ways


class PacketOrder(msgspec.Struct, frozen=True, tag="packet"):
    """Try packets of several sizes to ``peer`` by its way, and full-size ones by the others. ``largest``: bytes of the
    packets that are too large now; ``setting``: how they are made smaller for good, ``{}`` standing for their size."""

    peer: TrialPeer
    largest: Mtu
    setting: Text


class ReachOrder(msgspec.Struct, frozen=True, tag="reach"):
    """Try to connect to ``peer`` by its way, which is closed, and by the others."""

    peer: TrialPeer


class SpeedOrder(msgspec.Struct, frozen=True, tag="speed"):
    """Send to the host of all meetings of ``itinerary``: in each round the slow way first, then one meeting for each of
    ``knobs``. Without ``knobs``: be the one that is sent to. ``usual``: bytes a second, of other pairs; with ``lossy``
    the segments for each one that is sent again."""

    itinerary: TransferSchedule
    knobs: Ways = ()
    usual: Rate | None = None
    lossy: bool = False


class RecordTrials(msgspec.Struct, frozen=True, tag="tell"):
    """Put down what several processes tried together."""

    trials: Annotated[tuple[Trial, ...], Meta(max_length=64)]


RECORD_SECONDS = 5.0

OFFLOADS = "offloads of the interface, which root alone may change (`ethtool -K <interface> tso off gso off gro off`)"


def not_tried(subject: Subject, reason: str, peer: str | None = None) -> Trial:
    """What stands in the place of a trial that could not be made."""
    return Trial(subject, NOT_TRIED, "", restores=False, peer=peer, error=reason)


def recording_orders(posts: Sequence[ProbeParticipant], trials: tuple[Trial, ...]) -> StageOrders:
    """Orders by which ``posts`` put them down: all that had a part."""
    return StageOrders.of({post.token: RecordTrials(trials) for post in posts}, RECORD_SECONDS)


def is_improvement(before: Sequence[float | None], after: Sequence[float | None], usual: float | None = None) -> bool:
    """Whether a change mends :data:`ROUNDS` times in a row, from values of which more is better, ``None`` where it
    failed; those of one place were measured beside each other. What does not fail without the change is mended by
    nothing. ``usual``: the value of others."""
    good = [gains(one, other, usual) for one, other in zip(before, after, strict=True)]
    return any(all(good[place : place + ROUNDS]) for place in range(len(good) - ROUNDS + 1))


def gains(before: float | None, after: float | None, usual: float | None) -> bool:
    """Whether it is clearly better with a change than without, and about as good as is usual."""
    if after is None or after <= 0 or (usual is not None and after < USUAL_SHARE * usual):
        return False
    return before is None or after >= LEAST_GAIN * before
