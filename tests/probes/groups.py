"""Groups of real children on this machine, led by real stages as a gathering leads them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from doctor.api import Finding, Job
from doctor.cluster.gather.probe_schedule import ProbeSchedule
from doctor.cluster.gather.protocol import MemberFacts, ProbeTask
from doctor.cluster.gather.section_merge import merge_sections
from doctor.collectors.base import Machine
from doctor.core.check_registry import builtin_checks
from doctor.core.job import Sections, build_job
from doctor.facts import CollectiveFacts
from doctor.probes.base import StageResult
from doctor.probes.collectives.mesh import parse_mesh
from doctor.probes.collectives.stage import GroupsStage
from doctor.probes.runtime.torch_child import TorchChild
from doctor.testing import healthy
from doctor.testing.cases import JobBuilder
from tests.lab.needs import ROOT, clean_environ

WRONG_SUM = Path(__file__).parents[1] / "faults" / "live" / "wrong_sum"
"""A plug-in of torch; see its wrong_sum.py."""
JOIN = 3
"""The step in which the group is set up and used."""
CHECKS = {check.id: check for check in builtin_checks()}


def environ_of(rank: int, world: int, **more: str) -> dict[str, str]:
    """Of a rank of a job on one machine, whose children find this machine by its loopback."""
    return {**clean_environ(ROOT), "RANK": str(rank), "WORLD_SIZE": str(world), "GLOO_SOCKET_IFNAME": "lo", **more}


class Party:
    """Processes of one job, each with a child that is kept from survey to survey."""

    def __init__(self, environs: Sequence[dict[str, str]]) -> None:
        self._environs = environs
        self._children = [TorchChild(environ) for environ in environs]

    def child(self, place: int) -> TorchChild:
        """A child that lives."""
        if self._children[place].is_lost:
            self._children[place] = TorchChild(self._environs[place])
        return self._children[place]

    def close(self) -> None:
        """End all."""
        for child in self._children:
            child.close()

    def survey(
        self,
        sketch: JobBuilder,
        *,
        mesh: str = "",
        without: Iterable[int] = (),
        before: Callable[[int], None] = lambda step: None,
    ) -> tuple[Job, list[str]]:
        """The job with what its processes found, and what was said before. ``without``: those that do no third step:
        they are gone when the group is set up. ``before`` is called before each step with its number."""
        told: list[str] = []
        axes = parse_mesh(mesh) if mesh else ()
        surveys = [self._process(axes, place, told) for place in range(len(sketch.members))]
        measured = [{} for _ in sketch.members]
        notes: dict[str, bytes] = {}
        while True:
            job = self._job(sketch, measured)
            plan = surveys[0].next(job, _arrivals(job), notes, 60.0)
            if plan is None:
                return job, told
            step = max(task.step for task in plan.tasks.values())
            before(step)
            found = _at_once(surveys, plan.tasks, without=tuple(without) if step == JOIN else ())
            notes = {_token(place): one.note for place, one in found.items()}
            for place, one in found.items():
                measured[place] = merge_sections(measured[place], one.sections)

    def _job(self, sketch: JobBuilder, measured: Sequence[Sections]) -> Job:
        known = [
            member._replace(sections={**member.sections, **own})
            for member, own in zip(sketch.members, measured, strict=True)
        ]
        return build_job(known, world_size=sketch.world_size)

    def _process(self, axes, place: int, told: list[str]) -> ProbeSchedule:
        stage, machine = GroupsStage(axes), Machine(environ=self._environs[place])
        tell = told.append if place == 0 else lambda _: None
        survey = ProbeSchedule(place, (stage,), machine, leads_host=False, write_line=tell)
        survey._context._child = self.child(place)
        return survey


def _arrivals(job: Job) -> list[MemberFacts]:
    return [MemberFacts(_token(place), rank.number, rank.host.name, b"") for place, rank in enumerate(job.ranks)]


def _at_once(
    surveys: Sequence[ProbeSchedule], tasks: Mapping[str, ProbeTask], without: tuple[int, ...]
) -> dict[int, StageResult]:
    found: dict[int, StageResult] = {}

    def take_part(place: int, task: ProbeTask) -> None:
        found[place] = surveys[place].take_part(task)

    asked = [(place, tasks[_token(place)]) for place in range(len(surveys)) if _token(place) in tasks]
    threads = [threading.Thread(target=take_part, args=one) for one in asked if one[0] not in without]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def _token(place: int) -> str:
    return f"{place:016x}"


def on_one_host(ranks: int) -> JobBuilder:
    """A healthy job on one host without GPUs."""
    return healthy(1, ranks, gpus=0)


def facts(job: Job) -> list[CollectiveFacts]:
    """Of all ranks, in order."""
    return [rank.find(CollectiveFacts) for rank in job.ranks]


def findings(job: Job, check: str) -> list[Finding]:
    """What a check says of the job."""
    return [verdict for verdict in CHECKS[check].judge(job) if isinstance(verdict, Finding)]
