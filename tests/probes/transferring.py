"""Bandwidth between hosts of the lab, with the agents of :mod:`tests.probes.survey`, as a gathering has it measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from doctor.cluster.gather.section_merge import merge_sections
from doctor.collectors.runner import decode_outcome
from doctor.core.facts import Missing, PathFacts, ReachFacts, Section, Transfer, TransferFacts
from doctor.core.job import Job, Member, build_job
from doctor.probes.bandwidth.stage import TransfersStage
from doctor.probes.base import ProbeParticipant, StageOrders
from tests.probes.survey import Survey

Sections = dict[str, "Section | Missing"]


@dataclass
class Transferred:
    """What one measurement brought. ``words``: of its steps; ``took``: the longest that a host took for each step."""

    job: Job
    words: list[str] = field(default_factory=list)
    took: list[float] = field(default_factory=list)

    def samples(self, host: str) -> tuple[Transfer, ...]:
        """What ``host`` sent."""
        found = next(one for one in self.job.hosts if one.name == host).find(TransferFacts)
        return found.samples if found is not None else ()

    def outcomes(self) -> dict[tuple[str, str], set[str]]:
        """By who sent and who received."""
        ways: dict[tuple[str, str], set[str]] = {}
        for host in self.job.hosts:
            for sample in self.samples(host.name):
                ways.setdefault((host.name, sample.peer), set()).add(sample.outcome)
        return ways


def transfer(survey: Survey, *, without: Sequence[int] = (), light: bool = True) -> Transferred:
    """All steps of the stage, after ``light`` probes. ``without``: ranks that are not told to, as those of a host that
    died."""
    stage = TransfersStage()
    measured: dict[int, Sections] = {station.rank: {} for station in survey.stations}
    for rank, one in survey.run(without=without).measured.items() if light else ():
        measured[rank] = {ReachFacts.key: one.reach, PathFacts.key: one.paths}
    found = Transferred(_job(survey, measured))
    while (orders := stage.plan(found.job, _posts(survey, found.job))) is not None:
        found.words.append(orders.words)
        found.took.append(_carry_out(survey, orders, measured, without))
        found.job = _job(survey, measured)
    return found


def _carry_out(survey: Survey, orders: StageOrders, measured: dict[int, Sections], without: Sequence[int]) -> float:
    asked = [one for one in survey.stations if str(one.rank) in orders.by_token and one.rank not in without]
    for station in asked:
        station.say(order=orders.by_token[str(station.rank)].hex(), seconds=orders.seconds)
    took = 0.0
    for station in asked:
        answer = station.heard(orders.seconds + 5)
        sections = {key: decode_outcome(key, bytes.fromhex(one)) for key, one in answer["sections"].items()}
        measured[station.rank] = dict(merge_sections(measured[station.rank], sections))
        took = max(took, answer["took"])
    return took


def _job(survey: Survey, measured: dict[int, Sections]) -> Job:
    members = [Member(one.rank, {**one.member.sections, **measured[one.rank]}) for one in survey.stations]
    return build_job(members, world_size=len(members))


def _posts(survey: Survey, job: Job) -> list[ProbeParticipant]:
    return [
        ProbeParticipant(str(rank.number), rank, rank.host.index, True, agent.port, agent.word)
        for rank, agent in zip(job.ranks, survey.agents, strict=True)
    ]
