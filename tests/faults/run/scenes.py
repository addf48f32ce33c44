"""What a scene of a run is, and how one is judged."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from tests.faults.run.stage import Outcome, Run, Wanted, perform
from tests.faults.stage import own_alarms

Ending = Literal["hangs", "fails", "ends"]
HANGS_FOR = 12.0
"""Seconds after which a run without the doctor that has not ended hangs: a healthy one takes three."""


@dataclass(frozen=True)
class RunScene:
    """One fault of a training, caused for real while the callback watches, and its healthy twin: the same program
    without it.

    ``id`` and ``severity``: what the report must hold; it must blame the culprits of ``run`` and nobody else, unless
    the finding is ``of_host``. ``or_id``: another id that is as true. ``also``: further ids that are true here.
    ``says``: words of the findings. ``does``: what becomes of the run by itself: it hangs, a rank fails, or it ends as
    if all were well; ``becomes``: what the doctor, who was asked for it, makes of that. ``before``: it must be said
    before the first batch.
    """

    name: str
    id: str
    run: Run
    does: Ending = "ends"
    becomes: Ending | None = None
    severity: str = "error"
    or_id: str = ""
    also: tuple[str, ...] = ()
    says: tuple[str, ...] = ()
    before: bool = False
    of_host: bool = False

    @property
    def ids(self) -> tuple[str, ...]:
        """All that are right."""
        return (self.id, self.or_id) if self.or_id else (self.id,)

    @property
    def ending(self) -> Ending:
        """What becomes of the run under the doctor's eyes."""
        return self.becomes or self.does

    @property
    def title(self) -> str:
        """For tables and tests."""
        return f"{self.id} {self.name}"


class Score(NamedTuple):
    """What the doctor made of a scene; each list holds what went wrong: nothing or something else was found, others
    were blamed, the healthy twin was not left alone."""

    outcome: Outcome
    found: list[str]
    blamed: list[str]
    silent: list[str]

    @property
    def complaints(self) -> list[str]:
        """Everything that went wrong."""
        return [*self.found, *self.blamed, *self.silent]


def score(scene: RunScene) -> Score:
    """Play ``scene`` and its twin. Raises ``CannotPlay`` where that can't be done here."""
    return Score(*judged(scene), noise(perform(scene.run.healthy)))


def judged(scene: RunScene) -> tuple[Outcome, list[str], list[str]]:
    """The outcome of the fault alone, what was not found, and who was wrongly blamed."""
    enough = scene.ending == "hangs" and not scene.run.to_the_end
    faulty = perform(scene.run, Wanted(scene.ids, scene.severity, enough))
    found = [*_not_found(scene, faulty), *_otherwise(scene, faulty)]
    return faulty, found, _wrongly_blamed(scene, faulty) if faulty.report else []


def noise(outcome: Outcome) -> list[str]:
    """What is wrong with a healthy run: an alarm, a check that broke, a rank that did not end as it should."""
    if outcome.report is None:
        return [f"no report\n{outcome.logs}"]
    here = true_here(outcome.run)
    alarms = [finding for finding in outcome.loud() if finding["id"] not in here]
    wrong = [f"false alarm {_words(finding)}" for finding in alarms] + outcome.crashed()
    if outcome.ended != "ends":
        wrong.append(f"the run {outcome.ended}: {outcome.codes}\n{outcome.logs}")
    if outcome.report["coverage"]["ranks_seen"] != outcome.run.world:
        wrong.append(f"{outcome.report['coverage']['ranks_seen']} of {outcome.run.world} ranks seen")
    return wrong


def as_described(scene: RunScene) -> list[str]:
    """What a run without the doctor does otherwise than the scene says."""
    alone = replace(scene.run, seconds=scene.run.seconds if scene.does != "hangs" else HANGS_FOR, options=())
    outcome = perform(alone, watched=False)
    twin = perform(alone.healthy, watched=False)
    wrong = [] if outcome.ended == scene.does else [f"it {outcome.ended}: {outcome.codes}\n{outcome.logs}"]
    if scene.does == "hangs" and outcome.stopped is None:
        wrong.append(f"it never came to where it hangs\n{outcome.logs}")
    return wrong + ([] if twin.ended == "ends" else [f"its twin {twin.ended}: {twin.codes}\n{twin.logs}"])


def true_here(run: Run) -> frozenset[str]:
    """Ids that are not held against a run: they are true of this machine, whatever is played on it."""
    crowded = {"ENV012"} if run.world > len(os.sched_getaffinity(0)) else set()
    return own_alarms() | crowded


def _not_found(scene: RunScene, outcome: Outcome) -> list[str]:
    if outcome.report is None:
        return [f"no report\n{outcome.logs}"]
    findings = _right(scene, outcome)
    if not findings:
        return [f"{' or '.join(scene.ids)} was not found; said: {[_words(one) for one in outcome.findings()]}"]
    words = " ".join(f"{one['summary']} {one['evidence']} {one['source']} {one['fix']}" for one in findings)
    return [f"{word!r} is not in the words: {words[:600]}" for word in scene.says if word not in words]


def _otherwise(scene: RunScene, outcome: Outcome) -> list[str]:
    """What became of the run itself, and how early it was said."""
    wrong = []
    if outcome.ended != scene.ending and not scene.run.to_the_end:
        wrong.append(f"the run {outcome.ended} under the doctor's eyes: {outcome.codes}\n{outcome.logs}")
    if scene.before and not outcome.in_time:
        wrong.append("it was not said before the first batch")
    return wrong


def _wrongly_blamed(scene: RunScene, outcome: Outcome) -> list[str]:
    findings = _right(scene, outcome)
    ranks = sorted({rank for finding in findings for rank in finding["ranks"]})
    wrong = []
    if not scene.of_host and ranks != sorted(scene.run.culprits):
        wrong.append(f"ranks {ranks} are blamed, not {sorted(scene.run.culprits)}")
    true = {*scene.ids, *scene.also, *true_here(scene.run)}
    wrong += [f"untrue there: {_words(one)}" for one in _unexplained(outcome, scene.ids) if one["id"] not in true]
    assert outcome.report is not None
    if scene.severity == "error" and findings and outcome.report["primary"] not in scene.ids:
        wrong.append(f"the primary one is {outcome.report['primary']}")
    return wrong + outcome.crashed()


def _right(scene: RunScene, outcome: Outcome) -> list[dict[str, Any]]:
    every = outcome.findings()
    return [one for one in every if one["id"] in scene.ids and one["severity"] == scene.severity]


def _unexplained(outcome: Outcome, ids: tuple[str, ...]) -> list[dict[str, Any]]:
    """The alarms that are no consequences of ``ids``, nor of their consequences."""
    loud = outcome.loud()
    causes = set(ids)
    while more := {one["id"] for one in loud if one["explained_by"] in causes} - causes:
        causes |= more
    return [one for one in loud if one["id"] not in ids and one["explained_by"] not in causes]


def _words(finding: dict[str, Any]) -> str:
    return f"{finding['id']} ({finding['severity']}, ranks {finding['ranks']}): {finding['summary']}"
