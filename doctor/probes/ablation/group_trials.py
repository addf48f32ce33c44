"""Trials of a collective: its group again in new children, unchanged and with one setting changed."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import suppress

import msgspec

from doctor.analysis.trial_selection import AGAIN
from doctor.core.decoding import prepared
from doctor.core.facts import CollectiveFacts, Trial
from doctor.core.job import Job
from doctor.core.message_bounds import Rate, Text, shortened
from doctor.core.text import ranks_in_words
from doctor.probes.ablation.experiments import TrialRequest, is_right
from doctor.probes.ablation.setting_variants import ExperimentRow, SettingVariant, variant_of, variants_for
from doctor.probes.ablation.trials import USUAL_SHARE, gains, is_improvement, not_tried, recording_orders
from doctor.probes.authorization import Forbidden, require_own_interfaces
from doctor.probes.base import ProbeContext, ProbeParticipant, StageOrders, StageResult
from doctor.probes.collectives.group_assembly import GroupAssembly
from doctor.probes.collectives.group_driver import GroupDriver
from doctor.probes.collectives.group_steps import WORLD, GroupStepResult, JoinGroup, OpenStore, port_of
from doctor.probes.collectives.mesh_layout import BUCKET, AxisGroups
from doctor.probes.runtime.deadline import ProbeDeadline
from doctor.probes.runtime.torch_child import ChildLost, TorchChild, WorkRefused
from doctor.probes.runtime.torch_startup import LoadedTorch

MOST_MEMBERS = 16
"""Ranks of a group that try again, the suspects first: a fault of settings shows among a few."""

PREPARE_SECONDS = 45.0
"""For a process that loads torch for the second time or later."""

RUN_SECONDS = 30.0
SET_UP_SECONDS = 10.0
PATIENCE = 5.0
"""For one collective, in seconds; it took less, or failed, a moment ago."""

MARGIN = 1.0
"""Seconds by which a child is killed before the end of the step."""


class PrepareTrial(msgspec.Struct, frozen=True, tag="experiment"):
    """Start a child with the change of ``experiment`` to the environment (``None``: unchanged), and load torch.

    ``hosts``: create the store.
    """

    experiment: ExperimentRow | None
    hosts: bool


class RunTrial(msgspec.Struct, frozen=True, tag="meet"):
    """Join the group, and use it."""

    join: JoinGroup


class GroupTrialOutcome(msgspec.Struct, frozen=True):
    """Result of one rank: bytes per second of the largest messages; ``None`` after a failure, with its ``error``."""

    value: Rate | None = None
    error: Text = "no answer in time"


TrialSequence = Generator[StageOrders, Sequence[ProbeParticipant], None]
"""Orders one after the other; the replies are sent in."""


def group_plan(question: TrialRequest, job: Job, processes: Sequence[ProbeParticipant]) -> TrialSequence:
    """Yield all steps of the trials for one collective.

    Each variant is run once, those that helped once more, always beside the unchanged group; then the trials are
    recorded.
    """
    members = _members(question.ranks, processes)
    if not members:
        return
    asked = [process.rank for process in members]
    variants = variants_for(asked, question.backend, is_small=question.is_small) if len(members) > 1 else ()
    if not variants:
        reason = f"no other {question.backend} setting applies"
        yield recording_orders(members, (not_tried("collective", reason),))
        return
    usual = question.usual
    if question.controls:
        usual = None
        controls = _members(question.controls, processes)
        if len(controls) == len(question.controls):
            usual = (yield from _Trials(question, job, controls, None).run(None)).value
        if usual is None:
            reason = f"against what is usual: {ranks_in_words(question.controls)}, which are healthy, gave no result"
            yield recording_orders(members, (not_tried("collective", reason),))
            return
    trials = _Trials(question, job, members, usual)
    before = yield from trials.run(None)
    if before.value is not None and before.value >= USUAL_SHARE * (usual or 0.0):
        yield recording_orders(members, (trials.record(AGAIN, "", None, before),))
    else:
        yield recording_orders(members, (yield from trials.change(variants, before)))


def _members(ranks: Sequence[int], processes: Sequence[ProbeParticipant]) -> list[ProbeParticipant]:
    chosen = set(ranks[:MOST_MEMBERS])
    return sorted((one for one in processes if one.number in chosen), key=lambda one: one.number)


class _Trials:
    def __init__(
        self, question: TrialRequest, job: Job, members: Sequence[ProbeParticipant], usual: float | None
    ) -> None:
        device = "cuda" if "nccl" in question.backend else "cpu"
        numbers = tuple(process.number for process in members)
        course = AxisGroups(WORLD, question.bytes or BUCKET, (numbers,))
        self._job = job
        self._usual = usual
        self._which = "healthy ranks" if set(numbers) == set(question.controls) else "ranks"
        self._small = question.bytes if question.is_small else None
        self._assembly = GroupAssembly(tuple(members), question.backend, device, (course,))

    def change(
        self, variants: Sequence[SettingVariant], before: GroupTrialOutcome
    ) -> Generator[StageOrders, Sequence[ProbeParticipant], tuple[Trial, ...]]:
        """Run each of ``variants`` once, then those that helped once more beside the unchanged group."""
        tried = {}
        for variant in variants:
            tried[variant] = [(yield from self.run(variant))]
        helping = [variant for variant in variants if gains(before.value, tried[variant][0].value, self._usual)]
        again = (yield from self.run(None)) if helping else before
        for variant in helping:
            tried[variant].append((yield from self.run(variant)))
        return tuple(self._trial(variant, (before, again), outcomes) for variant, outcomes in tried.items())

    def _trial(
        self, variant: SettingVariant, befores: Sequence[GroupTrialOutcome], outcomes: Sequence[GroupTrialOutcome]
    ) -> Trial:
        values = [outcome.value for outcome in outcomes]
        before = [outcome.value for outcome in befores[: len(values)]]
        words, last = f"{variant.name}={variant.value}", outcomes[-1]
        restores = is_improvement(before, values, self._usual)
        return self.record(words, variant.setting, befores[len(values) - 1].value, last, restores=restores)

    def record(
        self, words: str, setting: str, before: float | None, after: GroupTrialOutcome, *, restores: bool = False
    ) -> Trial:
        """Return a trial; of small messages in seconds, else in bytes per second."""
        unit, was, came = "B/s", before, after.value
        if self._small:
            unit = "s"
            was, came = (self._small / value if value else None for value in (was, came))
        return Trial("collective", words, setting, restores, None, was, came, unit, after.error or None)

    def run(
        self, variant: SettingVariant | None
    ) -> Generator[StageOrders, Sequence[ProbeParticipant], GroupTrialOutcome]:
        """Run the group in new children with a new store; return the worst result of its ranks."""
        first, experiment = self._assembly.first, variant.experiment if variant else None
        what = f"{variant.name}={variant.value}" if variant else "nothing changed"
        tokens = [process.token for process in self._assembly.processes]
        words = (
            f"why the collective is slow or fails: {len(tokens)} {self._which} once more with {what}, "
            f"{PREPARE_SECONDS + RUN_SECONDS:.0f} s at most"
        )
        prepares = {token: PrepareTrial(experiment, token == first.token) for token in tokens}
        processes = yield StageOrders.of(prepares, PREPARE_SECONDS, words)
        note = next((process.note for process in processes if process.token == first.token), b"")
        if (port := port_of(note)) is None:
            return GroupTrialOutcome(error="no store could be created for the group")
        joins = self._assembly.join(self._job, port, SET_UP_SECONDS, PATIENCE, pairs=False)
        processes = yield StageOrders.of({token: RunTrial(join) for token, join in joins.items()}, RUN_SECONDS)
        outcomes = [_outcome(process.note) for process in processes if process.token in joins]
        broken = next((one for one in outcomes if one.value is None), None)
        return broken or min(outcomes, key=lambda one: one.value or 0.0, default=GroupTrialOutcome())


def _outcome(note: bytes) -> GroupTrialOutcome:
    """Decode a note; a process that did not reply in time has none, or that of an earlier step."""
    try:
        return msgspec.msgpack.decode(note, type=prepared(GroupTrialOutcome))
    except msgspec.MsgspecError:
        return GroupTrialOutcome()


def changes_of(experiment: ExperimentRow | None) -> dict[str, str | None]:
    """Return the changes of an experiment to the environment, from the table of this process.

    Raises:
        Forbidden: its arguments do not fit, or this host lacks the interface.
    """
    if experiment is None:
        return {}
    require_own_interfaces([experiment.interface] if experiment.interface else [])
    try:
        variant = variant_of(experiment)
    except ValueError as error:
        raise Forbidden(str(error)) from None
    return {variant.name: variant.value}


class GroupTrials:
    """The part of one process: one child at a time."""

    def __init__(self) -> None:
        self._child: TorchChild | None = None

    def take_part(self, order: PrepareTrial | RunTrial, context: ProbeContext, deadline: ProbeDeadline) -> StageResult:
        """Start a child, or use it and end it."""
        limit = deadline.within(deadline.left() - MARGIN)
        return self._prepare(order, context, limit) if isinstance(order, PrepareTrial) else self._meet(order, limit)

    def _prepare(self, order: PrepareTrial, context: ProbeContext, limit: ProbeDeadline) -> StageResult:
        self.close()
        self._child = TorchChild(context.machine.environ, changes=changes_of(order.experiment))
        with suppress(ChildLost, WorkRefused):
            self._child.ask("load", {}, LoadedTorch, limit.left())
            if order.hosts:
                done = self._child.ask("group", OpenStore(PATIENCE), GroupStepResult, limit.left())
                return StageResult({}, b"%d" % done.port)
        return StageResult({})

    def _meet(self, order: RunTrial, limit: ProbeDeadline) -> StageResult:
        if self._child is None:
            return StageResult({})
        facts = GroupDriver(order.join, self._child, limit).facts()
        outcome = outcome_of(facts, max(share.bytes for share in order.join.shares))
        self.close()
        return StageResult({}, msgspec.msgpack.encode(outcome))

    def close(self) -> None:
        """End the child."""
        if self._child is not None:
            self._child.close()
        self._child = None


def outcome_of(facts: CollectiveFacts, most: int) -> GroupTrialOutcome:
    """Summarize the results of a rank, of the largest messages of at most ``most`` bytes.

    Small ones of several sizes are timed in any case.
    """
    broken = facts.error or next((one.error for one in facts.timings if one.error), None)
    if broken:
        return GroupTrialOutcome(error=shortened(broken))
    for one in facts.results:
        if not is_right(one):
            return GroupTrialOutcome(error=f"{one.operation} gave {one.received}, not {one.expected}")
    largest = max((one.bytes for one in facts.timings if one.bytes <= most), default=0)
    seconds = [one.seconds for one in facts.timings if one.bytes == largest and one.seconds]
    return GroupTrialOutcome(largest / min(seconds), "") if seconds else GroupTrialOutcome(error="nothing was measured")
