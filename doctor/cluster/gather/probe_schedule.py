"""Schedules the probes of a gather, one stage after another."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

from doctor.cluster.gather.protocol import MOST_STEPS, MemberFacts, ProbeTask
from doctor.cluster.transport.codec import MalformedMessage
from doctor.collectors.base import Machine
from doctor.core.facts import Missing, MissingReason, Section
from doctor.core.job import Job
from doctor.probes.authorization import Forbidden
from doctor.probes.base import ProbeContext, ProbeParticipant, Stage, StageOrders, StageResult
from doctor.probes.collectives.mesh import Axis
from doctor.probes.reachability.stage import LIMIT_SECONDS, LightStage
from doctor.probes.responder.listener import Responder
from doctor.probes.runtime.deadline import ProbeDeadline

MARGIN = 1.5
"""Seconds to transfer tasks and results."""


class ProbeOptions(msgspec.Struct, frozen=True):
    """Probes that the user wants.

    ``probe``: how many; ``mesh``: the axes of the job, outermost first, empty if they have to be detected; ``why``: try
    to find the setting that fixes a slow or failing probe.
    """

    probe: Literal["light", "full"] = "light"
    mesh: tuple[Axis, ...] = ()
    why: bool = False


class ProbeRound(NamedTuple):
    """The next step: tasks by the token of the process that runs them. ``seconds``: the timeout for all results."""

    tasks: Mapping[str, ProbeTask]
    seconds: float
    makes: tuple[str, ...]


class ProbeSchedule:
    """All stages, on the coordinator of a gather and on its members.

    ``seconds``: for all of them; ``overtime``: of these, seconds after the gather is closed. ``leads_host``: this
    process measures for its host and answers the probes of others from now on; if no port can be opened, it measures
    what needs none. ``write_line`` gets the cost of each step before it starts. ``sections``: measured by this process.
    """

    def __init__(
        self,
        number: int,
        stages: Sequence[Stage],
        machine: Machine,
        *,
        leads_host: bool,
        write_line: Callable[[str], None],
        within: float | None = None,
    ) -> None:
        most = sum(stage.most_seconds + MARGIN for stage in stages)
        self.seconds = most if within is None else min(most, within)
        self.overtime = 0.0 if within is not None else most
        self.sections: dict[str, Section | Missing] = {}
        self._stages = {stage.name: stage for stage in stages}
        self._waiting = list(stages)
        self._steps = 0
        self._write_line = write_line
        responder = None
        if leads_host:
            with contextlib.suppress(OSError):
                responder = Responder()
        self._context = ProbeContext(number, responder, machine)

    @property
    def answers_at(self) -> tuple[int, str] | None:
        """Port and secret word of this process's responder."""
        responder = self._context.responder
        return (responder.port, responder.word) if responder else None

    def next(
        self, job: Job, members: Sequence[MemberFacts], notes: Mapping[str, bytes], seconds: float
    ) -> ProbeRound | None:
        """Return the next step; ``None`` when all is measured or no time is left.

        ``members``: in the order of the ranks of ``job``; ``notes``: what they returned from the last step;
        ``seconds``: that are left.
        """
        participants = probe_addresses(job, members, notes)
        while self._waiting and self._steps < MOST_STEPS and seconds > MARGIN:
            stage = self._waiting[0]
            try:
                orders = stage.plan(job, participants)
            except Exception as error:  # noqa: BLE001 - as in take_part: it may raise on the facts of others
                self._write_line(_broken(stage, error).reason)
                orders = None
            if orders is not None and orders.by_token:
                return self._plan(stage, orders, min(orders.seconds, seconds - MARGIN))
            self._waiting.pop(0)
            participants = [participant._replace(note=b"") for participant in participants]
        return None

    def _plan(self, stage: Stage, orders: StageOrders, seconds: float) -> ProbeRound:
        self._steps += 1
        if orders.words:
            self._write_line(orders.words)
        tasks = {token: ProbeTask(self._steps, stage.name, seconds, order) for token, order in orders.by_token.items()}
        return ProbeRound(tasks, seconds + MARGIN, tuple(section.key for section in stage.makes))

    def take_part(self, task: ProbeTask) -> StageResult:
        """Run a task of this process, and keep the sections. Raises :class:`MalformedMessage` for a damaged order."""
        stage = self._stages.get(task.stage)
        if stage is None:
            return StageResult({})
        try:
            found = stage.take_part(task.order, self._context, ProbeDeadline(min(task.seconds, stage.most_seconds)))
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise MalformedMessage(str(error)) from None
        except Forbidden as error:
            self._write_line(f"refused an order of the {stage.name} probe: {error}")
            return StageResult({})
        except Exception as error:  # noqa: BLE001 - probes are collectors: one that breaks is missing, and the report goes on
            broken = _broken(stage, error)
            self._write_line(broken.reason)
            found = StageResult({section.key: broken for section in stage.makes})
        self.sections.update(found.sections)
        return found

    def close(self) -> None:
        """Stop what still runs for it."""
        self._context.close()


def _broken(stage: Stage, error: Exception) -> Missing:
    lines = str(error).strip().splitlines()
    reason = lines[0] if lines else "no words"
    return Missing(MissingReason.FAILED, f"the probe {stage.name} raised {type(error).__name__}: {reason}")


def probe_addresses(job: Job, members: Sequence[MemberFacts], notes: Mapping[str, bytes]) -> list[ProbeParticipant]:
    """Return the members as stages see them, in the order of the ranks of ``job``; one process per host leads it."""
    led_hosts: set[int] = set()
    participants = []
    for facts, rank in zip(members, job.ranks, strict=True):
        host, note = rank.host.index, notes.get(facts.token, b"")
        leads_host = facts.port is not None and host not in led_hosts
        if leads_host:
            led_hosts.add(host)
        participants.append(ProbeParticipant(facts.token, rank, host, leads_host, facts.port, facts.word, note))
    return participants


def light_schedule(
    number: int, timeout: float, machine: Machine, *, leads_host: bool, write_line: Callable[[str], None]
) -> ProbeSchedule:
    """Return the light probes of a gather with that ``timeout``, which end within it."""
    within = min(LIMIT_SECONDS, timeout / 2)
    return ProbeSchedule(number, (LightStage(),), machine, leads_host=leads_host, write_line=write_line, within=within)


def probe_schedule(
    probe_options: ProbeOptions,
    number: int,
    timeout: float,
    machine: Machine,
    *,
    leads_host: bool,
    write_line: Callable[[str], None],
) -> ProbeSchedule:
    """Return the schedule of the process ``number`` in a gather of ``timeout`` seconds.

    Light probes end within these; full ones start when all have joined or the time is up.
    """
    if probe_options.probe == "light":
        return light_schedule(number, timeout, machine, leads_host=leads_host, write_line=write_line)
    return ProbeSchedule(
        number, tuple(full_stages(probe_options)), machine, leads_host=leads_host, write_line=write_line
    )


def full_stages(probe_options: ProbeOptions) -> Iterator[Stage]:
    """Yield all stages of full probes: quiet ones before loud ones, and the why stage last."""
    # Imported here: a watched training process loads this module for light probes alone.
    from doctor.probes.ablation.stage import WhyStage
    from doctor.probes.bandwidth.stage import TransfersStage
    from doctor.probes.collectives.stage import GroupsStage
    from doctor.probes.devices.stage import DevicesStage
    from doctor.probes.storage.stage import StorageStage

    yield LightStage()
    yield TransfersStage()
    yield StorageStage()
    yield DevicesStage()
    yield GroupsStage(probe_options.mesh)
    if probe_options.why:
        yield WhyStage()
