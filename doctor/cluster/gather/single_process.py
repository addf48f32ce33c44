"""Full probes of a single process: those that need no other one."""

from __future__ import annotations

from collections.abc import Callable

from doctor.cluster.gather.probe_schedule import ProbeOptions, ProbeSchedule, full_stages
from doctor.cluster.gather.protocol import MemberFacts
from doctor.cluster.gather.section_merge import merge_sections
from doctor.collectors.base import Machine
from doctor.core.clock import monotonic
from doctor.core.job import Job, Member, Sections, build_job

_TOKEN = "0" * 16


def probe_single_process(job: Job, machine: Machine, write_line: Callable[[str], None], *, why: bool = False) -> Job:
    """Return ``job``, which is one process, with its probe results.

    ``why``: search for settings that fix a failing probe. ``write_line`` gets the cost of each step.
    """
    (rank,) = job.ranks
    member = Member(rank.number, {**rank.host.sections, **rank.sections}, rank.host.identity)
    schedule = ProbeSchedule(
        member.rank, tuple(full_stages(ProbeOptions("full", why=why))), machine, leads_host=True, write_line=write_line
    )
    end = monotonic() + schedule.seconds
    measured: Sections = {}
    notes: dict[str, bytes] = {}
    try:
        while True:
            known = member._replace(sections=merge_sections(member.sections, measured))
            job = build_job([known], world_size=job.world_size)
            facts = MemberFacts(_TOKEN, member.rank, "", b"", 0, *(schedule.answers_at or (None, "")))
            probe_round = schedule.next(job, [facts], notes, end - monotonic())
            if probe_round is None or _TOKEN not in probe_round.tasks:
                return job
            found = schedule.take_part(probe_round.tasks[_TOKEN])
            measured, notes = merge_sections(measured, found.sections), {_TOKEN: found.note}
    finally:
        schedule.close()
