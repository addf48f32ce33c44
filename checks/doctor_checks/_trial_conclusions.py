"""Text for the trials of a finding: the changes that resolve it, those that do not, and commands to run."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import msgspec

from doctor.analysis.trial_selection import AGAIN, NOT_TRIED, Subject, trials_of
from doctor.api import Finding, Job
from doctor.facts import Trial


class TrialConclusions(msgspec.Struct, frozen=True):
    """``restored_by`` and ``not_restored_by``: changes as text with numbers; ``remedies``: commands, and
    ``proof``: what was observed with the first.

    ``again``: trials that succeeded without a change; ``not_tried``: why changes could not be made."""

    restored_by: tuple[str, ...] = ()
    not_restored_by: tuple[str, ...] = ()
    again: tuple[str, ...] = ()
    not_tried: tuple[str, ...] = ()
    remedies: tuple[str, ...] = ()
    proof: str = "this fixes it"

    @property
    def evidence(self) -> dict[str, object]:
        """The evidence for a finding; empty without trials."""
        entries = {
            "restored by": self.restored_by,
            "not restored by": self.not_restored_by,
            "measured again": self.again,
            "not tried": self.not_tried,
        }
        return {key: list(texts) for key, texts in entries.items() if texts}

    def fix(self, otherwise: str) -> str:
        """The changes that resolved the fault, then ``otherwise``; empty without any."""
        if not self.remedies:
            return ""
        rest = f", or {otherwise[:1].lower()}{otherwise[1:]}" if otherwise else "."
        # The comment of a command is its location: ```command` on node2``.
        parts = (remedy.partition("  # ") for remedy in self.remedies)
        commands = (f"`{command}`{_where(command, where)}" for command, _, where in parts)
        return f"Run {' or '.join(commands)} (tested: {self.proof}){rest}"


def with_trials(
    job: Job, finding: Finding, *subjects: Subject, otherwise: str = "", unit: str | None = None
) -> Finding:
    """``finding`` with the conclusions from trials of ``subjects`` on its ranks, and a fix that starts with these.

    ``otherwise``: the alternative fix. ``unit``: trials with another unit are left out."""
    tried = trial_conclusions(job, *subjects, ranks=finding.ranks, unit=unit)
    return finding.extended(tried.evidence, tried.fix(otherwise))


def trial_conclusions(
    job: Job, *subjects: Subject, ranks: Collection[int], unit: str | None = None
) -> TrialConclusions:
    """The conclusions from the trials that :func:`trials_of` selects."""
    found = trials_of(job, *subjects, ranks=ranks, unit=unit)
    trials = [trial for _, trial in found]
    restoring = [trial for trial in trials if trial.restores]
    return TrialConclusions(
        _once(map(_words, restoring)),
        _once(_words(trial) for trial in trials if not trial.restores and trial.knob not in (AGAIN, NOT_TRIED)),
        _once(_words(trial) for trial in trials if trial.knob == AGAIN),
        _once(trial.error or "" for trial in trials if trial.knob == NOT_TRIED),
        _once(trial.setting for trial in restoring if trial.setting),
        next((_proof(host, trial) for host, trial in found if trial.restores and trial.setting), "this fixes it"),
    )


def _where(command: str, where: str) -> str:
    """`` on node2``; variables without a location are for all ranks."""
    return f" {where}" if where else " on all ranks" if command.startswith("export ") else ""


def _proof(host: str, trial: Trial) -> str:
    """``node1 reaches node3 over eth1``, for a connection."""
    if trial.unit != "open" or trial.peer is None:
        return "this fixes it"
    return f"{host} reaches {trial.peer} over {trial.knob.partition(' (')[0].removeprefix('other interface ')}"


def _once(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(texts))


def _words(trial: Trial) -> str:
    """``other interface eth1 (10.1.0.2 -> 10.1.0.3): 612 MB/s, was 1.2 MB/s``."""
    was = f", was {_value(trial.before, trial)}" if trial.before is not None else ""
    error = f" ({trial.error})" if trial.error else ""
    return f"{trial.knob}: {_value(trial.after, trial)}{was}{error}"


def _value(value: float | None, trial: Trial) -> str:
    if trial.unit == "segments":
        return "almost nothing is sent" if not value else f"up to {100 / value:.2g} % retransmitted"
    if value is None:
        return {"packet": "lost", "path": "no connection"}.get(trial.subject, "failed")
    if trial.unit == "B/s":
        return f"{value / 1e6:.3g} MB/s" if value < 1e9 else f"{value / 1e9:.3g} GB/s"
    if trial.unit == "s":
        return f"{value * 1e6:.0f} µs"
    if trial.unit == "FLOP/s":
        return f"{value / 1e9:.3g} GFLOP/s"
    return f"{value:.0f} bytes arrive" if trial.unit == "bytes" else trial.unit
