"""Full probes of one process: what needs no other."""

from __future__ import annotations

import time
from collections.abc import Callable

from doctor.collectors.base import Surroundings
from doctor.gather.adding import joined_sections
from doctor.gather.roll import Arrival
from doctor.gather.survey import Survey
from doctor.gather.wanted import Wanted, full_stages
from doctor.job import Job, Member, Sections, build_job

_TOKEN = "0" * 16


def measured_alone(job: Job, surroundings: Surroundings, tell: Callable[[str], None], *, why: bool = False) -> Job:
    """``job``, which is one process, with what it measures of itself; ``why``: and what mends it. ``tell`` gets what
    each step costs."""
    member = member_of(job)
    survey = Survey(member.rank, tuple(full_stages(Wanted("full", why=why))), surroundings, speaks=True, tell=tell)
    end = time.monotonic() + survey.seconds
    measured: Sections = {}
    notes: dict[str, bytes] = {}
    try:
        while True:
            known = member._replace(sections=joined_sections(member.sections, measured))
            job = build_job([known], world_size=job.world_size)
            arrival = Arrival(_TOKEN, known, 0, *(survey.answers_at or (None, "")))
            plan = survey.next(job, [arrival], notes, end - time.monotonic())
            if plan is None or _TOKEN not in plan.tasks:
                return job
            found = survey.take_part(plan.tasks[_TOKEN])
            measured, notes = joined_sections(measured, found.sections), {_TOKEN: found.note}
    finally:
        survey.close()


def member_of(job: Job) -> Member:
    """The one process of ``job``, as it would come to a gathering."""
    (rank,) = job.ranks
    return Member(rank.number, {**rank.host.sections, **rank.sections}, rank.host.identity)
