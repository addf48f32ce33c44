"""Selects the trials that a finding refers to."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from doctor.core.facts import Trial, TrialFacts
from doctor.core.job import Job

Subject = Literal["path", "packet", "collective", "device"]
"""The subject of a trial; see :class:`doctor.core.facts.Trial`."""

AGAIN = "nothing changed"
"""The knob of a trial that succeeded without any change: the fault is intermittent."""

NOT_TRIED = "not tried"
"""The knob of a trial that could not be made; its error has the reason."""


def trials_of(job: Job, *subjects: Subject, ranks: Collection[int], unit: str | None = None) -> list[tuple[str, Trial]]:
    """The trials of ``subjects`` for a finding about ``ranks``, with the names of their hosts.

    Trials of paths count if they start or end on the hosts of the ranks, trials of devices for the ranks themselves,
    trials of collectives if one of the ranks took part. ``unit``: only trials with it, or without any (those that could
    not be made)."""
    hosts = set(job.hosts_of(ranks))
    return [
        (rank.host.name, trial)
        for rank in job.ranks
        if (facts := rank.find(TrialFacts)) is not None
        for trial in facts.trials
        if trial.subject in subjects and (unit is None or trial.unit in ("", unit))
        if (rank.number in ranks if trial.peer is None else not hosts.isdisjoint((rank.host.name, trial.peer)))
    ]
