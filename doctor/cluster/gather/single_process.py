"""Full probes of one process: what needs no other."""

from __future__ import annotations

import time
from collections.abc import Callable

from doctor.cluster.gather.membership import MemberRecord
from doctor.cluster.gather.probe_schedule import ProbeOptions, ProbeSchedule, full_stages
from doctor.cluster.gather.section_merge import merge_sections
from doctor.collectors.base import Machine
from doctor.core.job import Job, Member, Sections, build_job

_TOKEN = "0" * 16


def probe_single_process(job: Job, surroundings: Machine, tell: Callable[[str], None], *, why: bool = False) -> Job:
    """``job``, which is one process, with what it measures of itself; ``why``: and what mends it. ``tell`` gets what
    each step costs."""
    member = sole_member(job)
    survey = ProbeSchedule(
        member.rank, tuple(full_stages(ProbeOptions("full", why=why))), surroundings, speaks=True, tell=tell
    )
    end = time.monotonic() + survey.seconds
    measured: Sections = {}
    notes: dict[str, bytes] = {}
    try:
        while True:
            known = member._replace(sections=merge_sections(member.sections, measured))
            job = build_job([known], world_size=job.world_size)
            arrival = MemberRecord(_TOKEN, known, 0, *(survey.answers_at or (None, "")))
            plan = survey.next(job, [arrival], notes, end - time.monotonic())
            if plan is None or _TOKEN not in plan.tasks:
                return job
            found = survey.take_part(plan.tasks[_TOKEN])
            measured, notes = merge_sections(measured, found.sections), {_TOKEN: found.note}
    finally:
        survey.close()


def sole_member(job: Job) -> Member:
    """The one process of ``job``, as it would come to a gathering."""
    (rank,) = job.ranks
    return Member(rank.number, {**rank.host.sections, **rank.sections}, rank.host.identity)
