"""Trials of a collective: its group again in fresh children, unchanged and with one setting changed."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import suppress

import msgspec

from doctor.analysis.launch_origin import ranks_in_words
from doctor.analysis.trial_conclusions import AGAIN
from doctor.core.decoding import prepared
from doctor.core.facts import CollectiveFacts, Trial
from doctor.core.job import Job
from doctor.core.message_bounds import Rate, Text, shortened
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
"""Ranks of a group that try again, those to blame first: a fault of settings shows among a few."""

PREPARE_SECONDS = 45.0
"""For a process that loads torch, a second time and later."""

RUN_SECONDS = 30.0
SET_UP_SECONDS = 10.0
PATIENCE = 5.0
"""For one collective, in seconds; it took less, or broke, a moment ago."""

MARGIN = 1.0
"""Seconds by which a child is killed before the step is over."""


class PrepareTrial(msgspec.Struct, frozen=True, tag="experiment"):
    """Start a child in the environment of this process with what ``experiment`` changes (``None``: nothing), and load
    torch there; ``hosts``: make the store."""

    experiment: ExperimentRow | None
    hosts: bool


class RunTrial(msgspec.Struct, frozen=True, tag="meet"):
    """Join the group, and use it."""

    join: JoinGroup


GroupOrder = PrepareTrial | RunTrial


class GroupTrialOutcome(msgspec.Struct, frozen=True):
    """What one rank saw: bytes a second of the largest messages; ``None`` where something broke, and ``error`` how."""

    value: Rate | None = None
    error: Text = "no answer in time"


TrialSequence = Generator[StageOrders, Sequence[ProbeParticipant], None]
"""Orders one after the other; what everybody answered is sent in."""


def group_plan(question: TrialRequest, job: Job, posts: Sequence[ProbeParticipant]) -> TrialSequence:
    """All steps of the trials for one collective: each knob once, then those that helped once more, always beside the
    unchanged group; then all of them are told the trials."""
    members = _members(question.ranks, posts)
    if not members:
        return
    asked = [post.rank for post in members]
    knobs = variants_for(asked, question.backend, is_small=question.is_small) if len(members) > 1 else ()
    if not knobs:
        yield recording_orders(
            members, (not_tried("collective", f"no other setting of {question.backend} applies here"),)
        )
        return
    usual = question.usual
    if question.controls:
        usual = yield from _usual(question, job, posts)
        if usual is None:
            reason = f"against what is usual: {ranks_in_words(question.controls)}, which are well, brought nothing"
            yield recording_orders(members, (not_tried("collective", reason),))
            return
    trials = _Trials(question, job, members, usual)
    before = yield from trials.run(None)
    if before.value is not None and before.value >= USUAL_SHARE * (usual or 0.0):
        yield recording_orders(members, (trials.again(before),))
    else:
        yield recording_orders(members, (yield from trials.change(knobs, before)))


def _members(ranks: Sequence[int], posts: Sequence[ProbeParticipant]) -> list[ProbeParticipant]:
    chosen = set(ranks[:MOST_MEMBERS])
    return sorted((post for post in posts if post.number in chosen), key=lambda post: post.number)


def _usual(
    question: TrialRequest, job: Job, posts: Sequence[ProbeParticipant]
) -> Generator[StageOrders, Sequence[ProbeParticipant], float | None]:
    """What the controls bring in the same collective."""
    controls = _members(question.controls, posts)
    if len(controls) < len(question.controls):
        return None
    outcome = yield from _Trials(question, job, controls, None).run(None)
    return outcome.value


class _Trials:
    """The same group again and again."""

    def __init__(
        self, question: TrialRequest, job: Job, members: Sequence[ProbeParticipant], usual: float | None
    ) -> None:
        device = "cuda" if "nccl" in question.backend else "cpu"
        numbers = tuple(post.number for post in members)
        course = AxisGroups(WORLD, question.bytes or BUCKET, (numbers,))
        self._job = job
        self._usual = usual
        self._which = "ranks that are well" if set(numbers) == set(question.controls) else "ranks"
        self._small = question.bytes if question.is_small else None
        self._assembly = GroupAssembly(tuple(members), question.backend, device, (course,))

    def change(
        self, knobs: Sequence[SettingVariant], before: GroupTrialOutcome
    ) -> Generator[StageOrders, Sequence[ProbeParticipant], tuple[Trial, ...]]:
        """Each of ``knobs`` once, then those that helped once more beside the unchanged group."""
        tried = {}
        for knob in knobs:
            tried[knob] = [(yield from self.run(knob))]
        helping = [knob for knob in knobs if gains(before.value, tried[knob][0].value, self._usual)]
        again = (yield from self.run(None)) if helping else before
        for knob in helping:
            tried[knob].append((yield from self.run(knob)))
        return tuple(self._trial(knob, (before, again), outcomes) for knob, outcomes in tried.items())

    def _trial(
        self, knob: SettingVariant, befores: Sequence[GroupTrialOutcome], outcomes: Sequence[GroupTrialOutcome]
    ) -> Trial:
        values = [outcome.value for outcome in outcomes]
        before = [outcome.value for outcome in befores[: len(values)]]
        words, last = f"{knob.name}={knob.value}", outcomes[-1]
        restores = is_improvement(before, values, self._usual)
        return self._told(words, knob.setting, befores[len(values) - 1].value, last, restores=restores)

    def again(self, outcome: GroupTrialOutcome) -> Trial:
        """It went well without any change."""
        return self._told(AGAIN, "", None, outcome)

    def _told(
        self, words: str, setting: str, before: float | None, after: GroupTrialOutcome, *, restores: bool = False
    ) -> Trial:
        """Of small messages in seconds, else in bytes a second."""
        unit, was, came = "B/s", before, after.value
        if self._small:
            unit, was, came = "s", _seconds(self._small, before), _seconds(self._small, came)
        return Trial("collective", words, setting, restores, None, was, came, unit, after.error or None)

    def run(self, knob: SettingVariant | None) -> Generator[StageOrders, Sequence[ProbeParticipant], GroupTrialOutcome]:
        """New children, a store, and the group: the worst of what its ranks saw."""
        first, experiment = self._assembly.first, knob.experiment if knob else None
        what = f"{knob.name}={knob.value}" if knob else "nothing changed"
        words = (
            f"why the collective is slow or breaks: {len(self._assembly.posts)} {self._which} once more with {what}, "
            f"{PREPARE_SECONDS + RUN_SECONDS:.0f} s at most"
        )
        prepares = {post.token: PrepareTrial(experiment, post.token == first.token) for post in self._assembly.posts}
        posts = yield StageOrders.of(prepares, PREPARE_SECONDS, words)
        note = next((post.note for post in posts if post.token == first.token), b"")
        if (port := port_of(note)) is None:
            return GroupTrialOutcome(error="no store for the group could be made")
        joins = self._assembly.join(self._job, port, SET_UP_SECONDS, PATIENCE, pairs=False)
        posts = yield StageOrders.of({token: RunTrial(join) for token, join in joins.items()}, RUN_SECONDS)
        return _worst([_outcome(post.note) for post in posts if post.token in joins])


def _seconds(length: int, value: float | None) -> float | None:
    """Of one message, by its bytes a second."""
    return length / value if value else None


def _outcome(note: bytes) -> GroupTrialOutcome:
    """Of a process that did not answer in time there is no note, or that of an earlier step."""
    try:
        return msgspec.msgpack.decode(note, type=prepared(GroupTrialOutcome))
    except msgspec.MsgspecError:
        return GroupTrialOutcome()


def _worst(outcomes: Sequence[GroupTrialOutcome]) -> GroupTrialOutcome:
    broken = next((one for one in outcomes if one.value is None), None)
    return broken or min(outcomes, key=lambda one: one.value or 0.0, default=GroupTrialOutcome())


def changes_of(experiment: ExperimentRow | None) -> dict[str, str | None]:
    """What an experiment changes in the environment, by this process's own table.

    Raises:
        Forbidden: its arguments do not fit, or this host lacks the interface.
    """
    if experiment is None:
        return {}
    require_own_interfaces([experiment.interface] if experiment.interface else [])
    try:
        knob = variant_of(experiment)
    except ValueError as error:
        raise Forbidden(str(error)) from None
    return {knob.name: knob.value}


class GroupTrials:
    """One process's part: a child at a time."""

    def __init__(self) -> None:
        self._child: TorchChild | None = None

    def take_part(self, order: GroupOrder, bench: ProbeContext, deadline: ProbeDeadline) -> StageResult:
        """Start a child, or use it and end it."""
        limit = deadline.within(deadline.left() - MARGIN)
        return self._prepare(order, bench, limit) if isinstance(order, PrepareTrial) else self._meet(order, limit)

    def _prepare(self, order: PrepareTrial, bench: ProbeContext, limit: ProbeDeadline) -> StageResult:
        self.close()
        self._child = TorchChild(bench.surroundings.environ, changes=changes_of(order.experiment))
        with suppress(ChildLost, WorkRefused):
            self._child.ask("load", {}, LoadedTorch, limit.left())
            if order.hosts:
                return StageResult(
                    {}, b"%d" % self._child.ask("group", OpenStore(PATIENCE), GroupStepResult, limit.left()).port
                )
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
    """What a rank found, in short: of the largest messages of ``most`` bytes and less, as small ones of several sizes
    are timed anyway."""
    broken = facts.error or next((one.error for one in facts.timings if one.error), None)
    if broken:
        return GroupTrialOutcome(error=shortened(broken))
    for one in facts.results:
        if not is_right(one):
            return GroupTrialOutcome(error=f"{one.operation} gave {one.received}, not {one.expected}")
    largest = max((one.bytes for one in facts.timings if one.bytes <= most), default=0)
    seconds = [one.seconds for one in facts.timings if one.bytes == largest and one.seconds]
    return GroupTrialOutcome(largest / min(seconds), "") if seconds else GroupTrialOutcome(error="nothing was timed")
