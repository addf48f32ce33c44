"""Candidate causes of symptoms that many faults share, for a differential diagnosis.

``causes/causes.json`` names the causes, ``causes/symptoms.json`` the symptoms and the causes that can produce each,
``causes/observations.json`` what makes a cause more or less likely. ``causes/case_counts.json`` holds the numbers of
public cases by symptom and cause; ``benchmarks/cause_counts.py`` writes it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import msgspec

from doctor.knowledge.data_files import read


class Cause(msgspec.Struct, frozen=True):
    """A cause. ``check``: the id whose page describes it; ``checks``: the ids that report it.

    ``command`` tells it from the others: a command, or a setting for the next run, in which nothing of a log is filled
    in; ``confirmed_by`` is the result that speaks for this cause."""

    name: str
    check: str
    checks: tuple[str, ...]
    title: str
    command: str
    confirmed_by: str


class Symptom(msgspec.Struct, frozen=True):
    """A symptom and the ``causes`` that can produce it.

    ``checks``: the ids that report it, each with the confidence from which its finding states a cause; those of
    ``verdicts`` name a cause below it, too. ``telling``: names of values in the evidence of a finding that state the
    cause whatever the confidence. ``kinds``: log events."""

    name: str
    checks: Mapping[str, float]
    kinds: tuple[str, ...]
    causes: tuple[str, ...]
    verdicts: tuple[str, ...] = ()
    telling: tuple[str, ...] = ()


class Observation(msgspec.Struct, frozen=True):
    """Something in the evidence, and how many times more (or less) often it is seen with a cause than without.

    It is there if a log event or mark of ``kinds`` is (with words that begin with one of ``contains``, if any), if no
    event of ``absent`` is, or if the ``structure`` of the evidence has that name."""

    says: str
    factors: Mapping[str, float]
    kinds: tuple[str, ...] = ()
    contains: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    structure: str = ""


@functools.cache
def known_causes() -> Mapping[str, Cause]:
    """All causes, by name."""
    return {cause.name: cause for cause in read("causes/causes.json", tuple[Cause, ...])}


@functools.cache
def known_symptoms() -> tuple[Symptom, ...]:
    """All symptoms, the most specific first."""
    return read("causes/symptoms.json", tuple[Symptom, ...])


@functools.cache
def known_observations() -> tuple[Observation, ...]:
    """All observations."""
    return read("causes/observations.json", tuple[Observation, ...])


@functools.cache
def case_counts() -> Mapping[str, Mapping[str, int]]:
    """The number of public cases by symptom and cause."""
    return read("causes/case_counts.json", dict[str, dict[str, int]])


@functools.cache
def answer_counts() -> Mapping[str, Mapping[str, tuple[int, int]]]:
    """Of public failure texts, how many primary findings were right, and how many there were.

    By the level of the confidence that the check states, and by id; ``""``: of all ids. They are written by
    ``benchmarks/answer_counts.py``."""
    return read("causes/answer_counts.json", dict[str, dict[str, tuple[int, int]]])


@functools.cache
def wrong_answers() -> Mapping[str, Mapping[str, int]]:
    """Of public failure texts whose primary finding was wrong, how many had each cause, by the id of the finding.

    ``""``: of all ids. They are written by ``benchmarks/answer_counts.py``."""
    return read("causes/wrong_answers.json", dict[str, dict[str, int]])


def cause_of(check: str) -> str | None:
    """The name of the cause that a check reports, the most general one of several; ``None`` if it reports a symptom."""
    causes = [one for one in known_causes().values() if check in one.checks]
    return min(causes, key=lambda one: (one.check != check, one.name != "program-error")).name if causes else None
