"""A stage of measuring, played by several processes of a job inside this one: one plans, all take part."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from doctor.api import Job, Status
from doctor.cluster.gather.section_merge import merge_sections
from doctor.collectors.base import Machine
from doctor.core.check_registry import CheckRegistry, builtin_checks
from doctor.core.check_runner import examine_job
from doctor.core.job import Member, build_job
from doctor.core.report_document import CheckResult
from doctor.probes.base import ProbeContext, ProbeParticipant, Stage, StageOrders
from doctor.probes.runtime.deadline import ProbeDeadline

CHECKS = {check.id: check for check in builtin_checks()}


@dataclass
class Staged:
    """What came of it: the job with what was measured, the orders of each step, and the seconds of all."""

    job: Job
    orders: list[StageOrders] = field(default_factory=list)
    seconds: float = 0.0

    def result(self, check: str) -> CheckResult:
        """What a check says to it."""
        [result] = examine_job(self.job, CheckRegistry((CHECKS[check],)))
        assert result.status is not Status.ERROR, result.reason
        return result


def staged(
    members: Sequence[Member],
    stages: Sequence[Stage],
    environ: Mapping[str, str],
    benches: Mapping[int, ProbeContext] | None = None,
) -> Staged:
    """Play ``stages``, one of each member's process, as a gathering does; the first member's plans. ``benches``: what
    some of them have at hand, by their rank."""
    given, usual = benches or {}, Machine(environ=environ)
    at_hand = [given.get(member.rank) or ProbeContext(member.rank, None, usual) for member in members]
    measured = [dict(member.sections) for member in members]
    notes = [b""] * len(members)
    done, began = Staged(build_job(members)), time.monotonic()
    with ThreadPoolExecutor(len(members)) as pool:
        try:
            while orders := stages[0].plan(done.job, _posts(done.job, members, notes)):
                done.orders.append(orders)
                deadline = ProbeDeadline(orders.seconds)
                found = {
                    place: pool.submit(stages[place].take_part, orders.by_token[str(place)], bench, deadline)
                    for place, bench in enumerate(at_hand)
                    if str(place) in orders.by_token
                }
                for place, future in found.items():
                    measured[place] = dict(merge_sections(measured[place], future.result().sections))
                    notes[place] = future.result().note
                brought = zip(members, measured, strict=True)
                done.job = build_job([member._replace(sections=sections) for member, sections in brought])
        finally:
            for bench in at_hand:
                bench.close()
    done.seconds = time.monotonic() - began
    return done


def _posts(job: Job, members: Sequence[Member], notes: Sequence[bytes]) -> list[ProbeParticipant]:
    """One for each member, in their order; the first of each host speaks."""
    ranks = {rank.number: rank for rank in job.ranks}
    spoken: set[int] = set()
    posts = []
    for place, member in enumerate(members):
        rank = ranks[member.rank]
        speaks = rank.host.index not in spoken
        spoken.add(rank.host.index)
        posts.append(
            ProbeParticipant(str(place), rank, rank.host.index, speaks, 1 if speaks else None, "", notes[place])
        )
    return posts
