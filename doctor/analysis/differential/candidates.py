"""Ranks the causes that the evidence leaves open, with what speaks for and against each."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

from doctor.analysis.differential.measured_confidence import measured_confidence
from doctor.analysis.differential.observed import Observed, observed
from doctor.core.facts import LogEvidence
from doctor.core.finding import Severity
from doctor.core.job import Job
from doctor.core.report_document import CandidateCause, CheckResult, ReportFinding
from doctor.knowledge import candidate_causes
from doctor.knowledge.candidate_causes import Cause, Symptom, case_counts, known_causes, known_symptoms

MOST = 5
"""Candidates of a report."""
FEW = 2
"""Alternatives to a verdict that are named by counts of wrong verdicts alone."""
MOST_REASONS = 3
"""Observations that are named for a candidate, beside the number of cases, and as many against it."""
LEAST = 0.01
"""Confidence below which a cause is not a candidate."""
CERTAIN = 0.7
"""Confidence from which a finding that is not a symptom carries the verdict."""
SMOOTHING = 1.0
"""Cases added to each cause that can produce a symptom, so that none is impossible."""
OTHER = 0.2
"""Prior of all causes that are not listed, against those that are."""
TELLING = 2.5
"""Least factor of an observation that makes a cause a candidate for an error that is not known."""
REPORTED = 10.0
"""Factor of a cause that a finding of full confidence reports."""


def candidates_of(
    job: Job, results: Sequence[CheckResult], primary: str | None, counts: Mapping[str, Mapping[str, int]] | None = None
) -> tuple[CandidateCause, ...]:
    """The likeliest causes if the evidence does not carry one verdict, the likeliest first; else nothing.

    ``primary``: the id of the primary cause. ``counts``: cases by symptom and cause, by default
    :func:`doctor.knowledge.candidate_causes.case_counts`. The confidence is the share of a cause in the product of
    counts and factors, of all causes and :data:`OTHER`."""
    if job.evidence is None:
        return ()
    standing = {
        result.id: one for result in results for one in reversed(result.findings) if one.stands and not one.explained_by
    }
    finding = standing.get(primary) if primary is not None else None
    reported = {result.id for result in results if result.findings}
    symptom = _open_symptom(job.evidence, standing, primary)
    if symptom is None:
        return tuple(_counted_alternatives(primary, finding, reported, ()))
    is_verdict = primary is not None and (primary not in symptom.checks or primary in symptom.verdicts)
    seen = [*_of_findings(standing, symptom), *observed(job, symptom)]
    cases = (case_counts() if counts is None else counts).get(symptom.name, {})
    shares = _shares(symptom, seen, cases)
    left = 1.0
    if finding is not None and primary is not None and is_verdict:
        shares = _without(shares, primary)
        left = 1 - measured_confidence(primary, finding.confidence)
    ordered = sorted(shares.items(), key=lambda share: (-share[1], share[0]))
    # An error that is not known can have any cause: only a telling observation makes one a candidate.
    least = 1.0 if symptom.kinds else TELLING
    backed = {name for name in shares if cases.get(name) or any(one.factors.get(name, 1) > least for one in seen)}
    found = (
        _candidate(known_causes()[name], left * share, *_reasons(name, seen, cases))
        for name, share in ordered
        if left * share >= LEAST and name in backed
    )
    ranked = tuple(itertools.islice(found, MOST))
    return (*ranked, *_counted_alternatives(primary, finding, reported, ranked))


def _counted_alternatives(
    check: str | None, finding: ReportFinding | None, reported: Set[str], ranked: Sequence[CandidateCause]
) -> Iterator[CandidateCause]:
    """What the cause was of public texts in which such a finding was wrong, until the report has :data:`FEW`
    alternatives: candidates and other findings."""
    missing = FEW - len(ranked) - len(reported - {check})
    if check is None or finding is None or missing <= 0:
        return
    known = known_causes()
    wrong = candidate_causes.wrong_answers()
    own, of_all = wrong.get(check, {}), wrong.get("", {})
    named = {*reported, *(one.id for one in ranked)}
    weights = {
        name: own.get(name, 0) + of_all[name] / sum(of_all.values())
        for name in of_all
        if name in known and not named.intersection((known[name].check, *known[name].checks))
    }
    left = (1 - measured_confidence(check, finding.confidence)) / (sum(weights.values()) or 1)
    ordered = sorted(weights.items(), key=lambda weight: (-weight[1], weight[0]))
    for name, weight in ordered[:missing]:
        if left * weight >= LEAST / 2:  # which rounds to it
            cases = (own if own.get(name) else of_all).get(name, 0)
            logs = f"{cases} public {'log' if cases == 1 else 'logs'}"
            first = f"{check} was reported" if own.get(name) else "another finding was reported"
            counted = f"It was the real cause in {logs} for which {first} first"
            yield _candidate(known[name], left * weight, (counted,))


def _open_symptom(evidence: LogEvidence, standing: Mapping[str, ReportFinding], primary: str | None) -> Symptom | None:
    """The symptom whose cause is open, or ``None``."""
    if primary is not None:
        finding = standing.get(primary)
        if finding is None:
            return None
        names = [one for one in known_symptoms() if primary in one.checks]
        if not names and finding.confidence < CERTAIN:
            return next((one for one in known_symptoms() if one.kinds and evidence.of(*one.kinds)), None)
        symptoms = [one for one in names if not _states_cause(one, primary, finding)]
    else:
        loud = {name: one for name, one in standing.items() if one.severity is not Severity.INFO}
        symptoms = [
            one
            for one in known_symptoms()
            if any(name in loud and not _states_cause(one, name, loud[name]) for name in one.checks)
        ]
    logged = (one for one in symptoms if one.kinds and evidence.of(*one.kinds))
    return next(logged, next(iter(symptoms), None))


def _states_cause(symptom: Symptom, check: str, finding: ReportFinding) -> bool:
    if finding.confidence >= symptom.checks[check]:
        return True
    values = (finding.evidence.get(name) for name in symptom.telling)
    return any(value and not _is_end_of_process(str(value)) for value in values)


def _is_end_of_process(error: str) -> bool:
    """Whether an error names only how a process ended."""
    return error.startswith("ended by signal") or error.lstrip("-").isdecimal()


def _of_findings(standing: Mapping[str, ReportFinding], symptom: Symptom) -> Iterator[Observed]:
    """Findings that report a cause, as observations."""
    for name, finding in sorted(standing.items()):
        causes = [one.name for one in known_causes().values() if name in one.checks and name not in symptom.checks]
        if causes:
            factor = 1 + (REPORTED - 1) * finding.confidence
            yield Observed(f"{name}: {finding.summary}", dict.fromkeys(causes, factor))


def _shares(symptom: Symptom, seen: Iterable[Observed], cases: Mapping[str, int]) -> dict[str, float]:
    weights = {name: cases.get(name, 0) + SMOOTHING for name in symptom.causes}
    other = OTHER * sum(weights.values())
    for one in seen:
        for name in weights:
            weights[name] *= one.factors.get(name, 1.0)
    total = other + sum(weights.values())
    return {name: weight / total for name, weight in weights.items()}


def _without(shares: Mapping[str, float], primary: str) -> dict[str, float]:
    """The shares of the alternatives to a verdict, which is no candidate itself."""
    own = {one.name for one in known_causes().values() if primary in one.checks}
    left = 1 - sum(share for name, share in shares.items() if name in own)
    return {name: share / left for name, share in shares.items() if name not in own}


def _reasons(name: str, seen: Iterable[Observed], cases: Mapping[str, int]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What speaks for a cause, and what against it, the most telling observation first."""
    weighed = [(one.factors.get(name, 1.0), one.text) for one in seen]
    supports = sorted((one for one in weighed if one[0] > 1), key=lambda one: -one[0])
    number = cases.get(name, 0)
    counted = (
        (f"It was the cause in {number} of {sum(cases.values())} public cases of this kind of failure",)
        if number
        else ()
    )
    against = sorted((one for one in weighed if one[0] < 1), key=lambda one: one[0])
    return (
        (*(text for _, text in supports[:MOST_REASONS]), *counted),
        tuple(text for _, text in against[:MOST_REASONS]),
    )


def _candidate(cause: Cause, share: float, supports: tuple[str, ...], against: tuple[str, ...] = ()) -> CandidateCause:
    return CandidateCause(
        id=cause.check,
        cause=cause.name,
        title=cause.title,
        confidence=round(share, 2),
        supports=supports,
        against=against,
        next_command=cause.command,
        confirmed_by=cause.confirmed_by,
    )
