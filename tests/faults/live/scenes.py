"""What a live scene is, how one is judged, and all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from doctor.cluster.hostlist import EXCLUDE
from tests.faults.live.stage import Outcome, Play, at_this_speed, perform, true_here
from tests.faults.scenes import Score, others_blamed, unsaid
from tests.faults.stage import LOUD, own_alarms
from tests.faults.stage import Outcome as Judged
from tests.lab.speed import patience

UNREACHED = 3
"""The exit code of a rank that could not be gathered."""
LATEST = 30.0
"""Seconds beyond the doctor's time-out in which all have ended: to start, to measure, to judge, on a busy machine."""


@dataclass(frozen=True)
class LiveScene:
    """One fault of a job, caused for real while every rank asks the doctor, and its healthy twin.

    ``id``, ``severity``, ``ranks``, ``hosts``, ``says``: what one report must hold, and whom it must blame, no others.
    ``also``: ids of further findings that are true in this scene. ``lines``: ranks that can't come, each with the id
    that its line on stderr must name; the report is about their absence then, and there is none where nobody comes.
    ``line_says``: words of such lines. ``exclude``: exactly the hosts that the report says to do without, where that is
    part of the scene. ``overtime``: as :data:`LATEST`. ``codes``: pairs of rank and exit code, where that is not 1 (0
    below severity error), nor 3 as for ``lines``.
    """

    name: str
    id: str
    faulty: Play
    twin: Play
    severity: str = "error"
    ranks: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    says: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    lines: tuple[tuple[int, str], ...] = ()
    line_says: tuple[tuple[int, str], ...] = ()
    exclude: tuple[str, ...] | None = None
    overtime: float = LATEST
    codes: tuple[tuple[int, int | None], ...] = ()

    @property
    def fault(self) -> str:
        """The id of the fault itself: what those who feel it say."""
        return self.lines[0][1] if self.lines else self.id

    @property
    def title(self) -> str:
        """The id and the name, for tables and test ids."""
        return f"{self.fault} {self.name}"

    @property
    def is_judged(self) -> bool:
        """Whether anybody is left to print a report."""
        return any(rank not in dict(self.lines) for rank, _, _ in self.faulty.started)

    def code(self, rank: int | None) -> int | None:
        """What a rank must end with."""
        usual = UNREACHED if rank in dict(self.lines) else 1 if self.severity == "error" else 0
        return dict(self.codes).get(-1 if rank is None else rank, usual)


class Judgement(NamedTuple):
    """What is wrong with a report: not ``found`` as it is, wrong ``culprit``, and ``others`` that are not true."""

    found: list[str]
    culprit: list[str]
    others: list[str]


def score(scene: LiveScene) -> Score:
    """Play ``scene`` and its twin. Raises ``CannotPlay`` where that can't be done here."""
    faulty, twin = perform(scene.faulty), perform(scene.twin)
    wrong = judged(scene, faulty)
    found = [*wrong.found, str(faulty)] if wrong.found else []
    return Score(found, wrong.culprit + wrong.others, noise(scene.twin, twin))


def judged(scene: LiveScene, faulty: Outcome) -> Judgement:
    """What is wrong with what was said of a fault."""
    found = [*_wrong_lines(scene, faulty), *_wrong_codes(scene, faulty)]
    timeout = at_this_speed(scene.faulty).timeout
    if faulty.seconds > timeout + patience(scene.overtime):
        found.append(f"it took {faulty.seconds:.0f} s with --timeout {timeout}")
    report = faulty.report
    if report is None:
        return Judgement(found + (["nobody printed a report"] if scene.is_judged else []), [], [])
    if not scene.is_judged:
        return Judgement([*found, "a report was printed though rank 0 could not come"], [], [])
    return Judgement(found + _not_found(scene, report), _wrong_culprit(scene, report), _untrue(scene, report))


def noise(play: Play, outcome: Outcome) -> list[str]:
    """What is wrong with a healthy play: an alarm, a check that broke, an exit code that is not 0."""
    report = outcome.report
    if report is None:
        return ["nobody printed a report", str(outcome)]
    alarms = {check: words for check, words in report.alarms().items() if check not in true_here(play)}
    wrong = [f"false alarm {check}: {'; '.join(words)}" for check, words in alarms.items()] + report.crashed()
    usual = 1 if own_alarms() & report.alarms().keys() else 0
    if any(code != usual for _, code in outcome.codes) or len(outcome.codes) != len(play.started):
        wrong.append(f"exit codes {outcome.codes} of {len(play.started)} processes")
    return wrong


def _wrong_lines(scene: LiveScene, outcome: Outcome) -> list[str]:
    return [
        f"the line of rank {rank} does not say {word!r}: {outcome.stderr(rank)!r}"
        for rank, word in (*scene.lines, *scene.line_says)
        if word not in outcome.stderr(rank)
    ]


def _wrong_codes(scene: LiveScene, outcome: Outcome) -> list[str]:
    wrong = [f"rank {rank} ended with {code}" for rank, code in outcome.codes if code != scene.code(rank)]
    if len(outcome.codes) != len(scene.faulty.started):
        wrong.append(f"{len(outcome.codes)} processes said something, not {len(scene.faulty.started)}")
    return wrong


def _not_found(scene: LiveScene, report: Judged) -> list[str]:
    result = report.result(scene.id)
    wrong = []
    if result["status"] != "fail" or result["severity"] != scene.severity:
        wrong.append(f"{scene.id} is {result['status']} ({result['severity']}): {result['reason']}")
    return wrong + unsaid(scene, report)


def _wrong_culprit(scene: LiveScene, report: Judged) -> list[str]:
    wrong = others_blamed(scene, report)
    if scene.exclude is not None and (named := _to_exclude(report)) != set(scene.exclude):
        wrong.append(f"hosts {sorted(named)} are to be excluded, not {sorted(scene.exclude)}")
    return wrong


def _untrue(scene: LiveScene, report: Judged) -> list[str]:
    true = {scene.id, *scene.also, *true_here(scene.faulty)}
    wrong = [f"untrue there: {words}" for check, words in _unexplained(report, scene.id) if check not in true]
    return wrong + report.crashed()


def _to_exclude(report: Judged) -> set[str]:
    """The hosts that any finding says to do without."""
    findings = [finding for result in report.report["results"] for finding in result["findings"]]
    return {host for finding in findings for host in finding["evidence"].get(EXCLUDE, ())}


def _unexplained(report: Judged, cause: str) -> list[tuple[str, str]]:
    """The alarms that are no consequences of ``cause``, nor of its consequences: each id, and its words."""
    every = [(result["id"], finding) for result in report.report["results"] for finding in result["findings"]]
    loud = [(check, finding) for check, finding in every if finding["severity"] in LOUD]
    causes = {cause}
    while more := {check for check, finding in loud if finding["explained_by"] in causes} - causes:
        causes |= more
    return [
        (check, f"{check} {finding['summary']}") for check, finding in loud if finding["explained_by"] not in causes
    ]
