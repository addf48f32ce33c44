"""Orders of trials, and the rule by which a change counts as a fix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from doctor.analysis.trial_selection import NOT_TRIED, Subject
from doctor.core.facts import Trial
from doctor.core.message_bounds import Mtu, Name, Port, Rate, Text, Word
from doctor.probes.ablation.alternative_paths import MOST_WAYS, AlternativePath
from doctor.probes.ablation.experiments import SLOW_SHARE
from doctor.probes.bandwidth.schedule import TransferSchedule
from doctor.probes.base import ProbeParticipant, StageOrders

ROUNDS = 2
"""Consecutive successes that a change needs. Unchanged and changed are measured beside each other, so that a fault that
disappears by itself is not credited to a change."""

MOST_ROUNDS = 3
"""For speeds: other load on the hosts may spoil one of them."""

USUAL_SHARE = SLOW_SHARE
"""Share of the usual value that a change has to reach."""

Ways = Annotated[tuple[AlternativePath, ...], Meta(max_length=MOST_WAYS)]

LEAST_GAIN = 1.5
"""Times the value without the change, in each round; less is noise of a busy machine."""


class TrialPeer(msgspec.Struct, frozen=True):
    """The host called ``name``, whose responder on ``port`` knows the ``word``.

    ``way`` is the faulty path to it, ``others`` are alternatives.
    """

    name: Name
    port: Port
    word: Word
    way: AlternativePath
    others: Ways


class PacketOrder(msgspec.Struct, frozen=True, tag="packet"):
    """Try packets of several sizes to ``peer`` on its path, and full-size ones on the others.

    ``largest``: bytes of the packets that are too large; ``setting``: command that makes them smaller, ``{}`` for their
    size.
    """

    peer: TrialPeer
    largest: Mtu
    setting: Text


class ReachOrder(msgspec.Struct, frozen=True, tag="reach"):
    """Try to connect to ``peer`` on its path, which is closed, and on the others."""

    peer: TrialPeer


class SpeedOrder(msgspec.Struct, frozen=True, tag="speed"):
    """Send to the host of all pairings of ``itinerary``: in each round on the slow path, then on each of ``knobs``.

    Without ``knobs``: be the receiver. ``usual``: bytes per second of other pairs; with ``lossy`` segments per
    retransmitted one.
    """

    itinerary: TransferSchedule
    knobs: Ways = ()
    usual: Rate | None = None
    lossy: bool = False


class RecordTrials(msgspec.Struct, frozen=True, tag="tell"):
    """Record the trials of several processes."""

    trials: Annotated[tuple[Trial, ...], Meta(max_length=64)]


RECORD_SECONDS = 5.0

OFFLOADS = "offloads of the interface, which only root may change (`ethtool -K INTERFACE tso off gso off gro off`)"


def not_tried(subject: Subject, reason: str, peer: str | None = None) -> Trial:
    """Return the record of a trial that could not be made."""
    return Trial(subject, NOT_TRIED, "", restores=False, peer=peer, error=reason)


def recording_orders(processes: Sequence[ProbeParticipant], trials: tuple[Trial, ...]) -> StageOrders:
    """Return orders by which all of ``processes`` record the trials."""
    return StageOrders.of({process.token: RecordTrials(trials) for process in processes}, RECORD_SECONDS)


def is_improvement(before: Sequence[float | None], after: Sequence[float | None], usual: float | None = None) -> bool:
    """Return whether a change fixes the fault :data:`ROUNDS` times in a row.

    Of the values more is better, ``None`` is a failure; those of one index were measured beside each other. What
    succeeds without the change is fixed by nothing. ``usual``: the value of others.
    """
    good = [gains(one, other, usual) for one, other in zip(before, after, strict=True)]
    return any(all(good[place : place + ROUNDS]) for place in range(len(good) - ROUNDS + 1))


def gains(before: float | None, after: float | None, usual: float | None) -> bool:
    """Return whether the value is clearly better with a change than without, and about as good as usual."""
    if after is None or after <= 0 or (usual is not None and after < USUAL_SHARE * usual):
        return False
    return before is None or after >= LEAST_GAIN * before
