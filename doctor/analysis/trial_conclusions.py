"""What trials say of a finding: the changes that mend it, those that do not, and what to paste."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Literal, NamedTuple

import msgspec

from doctor.core.facts import Trial, TrialFacts
from doctor.core.finding import Finding
from doctor.core.job import Job, Rank

Subject = Literal["path", "packet", "collective", "device"]
"""What a trial is about; see :class:`doctor.core.facts.Trial`."""

AGAIN = "nothing changed"
"""The knob of a trial that went well without any change: the fault comes and goes."""

NOT_TRIED = "not tried"
"""The knob of a trial that could not be made; its error says why."""


class TrialConclusions(NamedTuple):
    """What trials say: ``restored_by`` and ``not_restored_by`` in words with numbers, ``remedies`` to be pasted;
    ``again``: what went well when nothing was changed; ``not_tried``: what could not be changed, and why."""

    restored_by: tuple[str, ...] = ()
    not_restored_by: tuple[str, ...] = ()
    again: tuple[str, ...] = ()
    not_tried: tuple[str, ...] = ()
    remedies: tuple[str, ...] = ()

    @property
    def evidence(self) -> dict[str, object]:
        """For a finding; empty where nothing was tried."""
        entries = {
            "restored by": self.restored_by,
            "not restored by": self.not_restored_by,
            "measured again": self.again,
            "not tried": self.not_tried,
        }
        return {key: list(texts) for key, texts in entries.items() if texts}

    def fix(self, otherwise: str) -> str:
        """What was seen to mend it, then ``otherwise``; empty where nothing was."""
        if not self.remedies:
            return ""
        rest = f" Otherwise: {otherwise}" if otherwise else ""
        return f"{'; or '.join(map(_pasted, self.remedies))} (tried: this mends it).{rest}"


def _pasted(setting: str) -> str:
    """Of a command with a comment that says where: ``on node2: `command```."""
    command, _, where = setting.partition("  # ")
    return f"{where}: `{command}`" if where else f"`{command}`"


def with_trials(
    job: Job, finding: Finding, *subjects: Subject, otherwise: str = "", unit: str | None = None
) -> Finding:
    """``finding`` with what trials of ``subjects`` say of the ranks that it blames, and what mends it first in its way
    out. ``otherwise``: what else can be done; the finding as it is where nothing was tried. ``unit``: trials that
    measured something else are left out."""
    tried = trial_conclusions(job, *subjects, ranks=finding.ranks, unit=unit)
    return msgspec.structs.replace(
        finding, evidence={**finding.evidence, **tried.evidence}, fix=tried.fix(otherwise) or finding.fix
    )


def trial_conclusions(
    job: Job, *subjects: Subject, ranks: Collection[int], unit: str | None = None
) -> TrialConclusions:
    """What trials of ``subjects`` say of a finding that blames ``ranks``: of paths those that begin or end on their
    hosts, of devices their own, and of collectives those in which one of them had a part. ``unit``: of these alone;
    what could not be tried has none."""
    hosts = set(job.hosts_of(ranks))
    trials = [
        trial
        for rank in job.ranks
        if (facts := rank.find(TrialFacts)) is not None
        for trial in facts.trials
        if trial.subject in subjects and (unit is None or trial.unit in ("", unit))
        if _concerns(trial, rank, hosts, ranks)
    ]
    mending = [trial for trial in trials if trial.restores]
    return TrialConclusions(
        _once(map(_words, mending)),
        _once(_words(trial) for trial in trials if not trial.restores and trial.knob not in (AGAIN, NOT_TRIED)),
        _once(_words(trial) for trial in trials if trial.knob == AGAIN),
        _once(trial.error or "" for trial in trials if trial.knob == NOT_TRIED),
        _once(trial.setting for trial in mending if trial.setting),
    )


def _concerns(trial: Trial, rank: Rank, hosts: Collection[str], ranks: Collection[int]) -> bool:
    """``rank`` made the trial: of a path, of its device, or as one of a group."""
    if trial.peer is not None:
        return rank.host.name in hosts or trial.peer in hosts
    return rank.number in ranks


def _once(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(texts))


def _words(trial: Trial) -> str:
    """Such as ``other interface eth1 (10.1.0.2 -> 10.1.0.3): 612 MB/s, was 1.2 MB/s``."""
    was = f", was {_value(trial.before, trial)}" if trial.before is not None else ""
    error = f" ({trial.error})" if trial.error else ""
    return f"{trial.knob}: {_value(trial.after, trial)}{was}{error}"


def _value(value: float | None, trial: Trial) -> str:
    if trial.unit == "segments":
        return "next to nothing is sent" if not value else f"up to {100 / value:.2g} % sent again"
    if value is None:
        return {"packet": "lost", "path": "no connection"}.get(trial.subject, "failed")
    if trial.unit == "B/s":
        return f"{value / 1e6:.3g} MB/s" if value < 1e9 else f"{value / 1e9:.3g} GB/s"
    if trial.unit == "s":
        return f"{value * 1e6:.0f} µs"
    if trial.unit == "FLOP/s":
        return f"{value / 1e9:.3g} GFLOP/s"
    return f"{value:.0f} bytes arrive" if trial.unit == "bytes" else trial.unit
