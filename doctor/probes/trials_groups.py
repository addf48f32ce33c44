"""Trials of a collective: its group again in fresh children, unchanged and with one setting changed."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import suppress

import msgspec

from doctor.bounds import Rate, Text, shortened
from doctor.facts import CollectiveFacts, Trial
from doctor.job import Job
from doctor.probes.allowed import Forbidden, require_own_interfaces
from doctor.probes.bench import ChildLost, Refused, TorchChild
from doctor.probes.deadline import Deadline
from doctor.probes.group_mesh import BUCKET, Course
from doctor.probes.group_messages import WORLD, Done, Join, Open, port_of
from doctor.probes.group_plan import Assembly
from doctor.probes.group_run import Run
from doctor.probes.loading import Loaded
from doctor.probes.stage import Bench, Found, Orders, Post
from doctor.probes.trials import USUAL_SHARE, gains, mends, not_tried, told
from doctor.reasoning.knobs import Experiment, Knob, knob_of, knobs_for
from doctor.reasoning.launch import ranks_in_words
from doctor.reasoning.why import AGAIN, Question, is_right

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


class Prepare(msgspec.Struct, frozen=True, tag="experiment"):
    """Start a child in the environment of this process with what ``experiment`` changes (``None``: nothing), and load
    torch there; ``hosts``: make the store."""

    experiment: Experiment | None
    hosts: bool


class Meet(msgspec.Struct, frozen=True, tag="meet"):
    """Join the group, and use it."""

    join: Join


GroupOrder = Prepare | Meet


class Outcome(msgspec.Struct, frozen=True):
    """What one rank saw: bytes a second of the largest messages; ``None`` where something broke, and ``error`` how."""

    value: Rate | None = None
    error: Text = "no answer in time"


Plan = Generator[Orders, Sequence[Post], None]
"""Orders one after the other; what everybody answered is sent in."""


def group_plan(question: Question, job: Job, posts: Sequence[Post]) -> Plan:
    """All steps of the trials for one collective: each knob once, then those that helped once more, always beside the
    unchanged group; then all of them are told the trials."""
    members = _members(question.ranks, posts)
    if not members:
        return
    asked = [post.rank for post in members]
    knobs = knobs_for(asked, question.backend, is_small=question.is_small) if len(members) > 1 else ()
    if not knobs:
        yield told(members, (not_tried("collective", f"no other setting of {question.backend} applies here"),))
        return
    usual = question.usual
    if question.controls:
        usual = yield from _usual(question, job, posts)
        if usual is None:
            reason = f"against what is usual: {ranks_in_words(question.controls)}, which are well, brought nothing"
            yield told(members, (not_tried("collective", reason),))
            return
    trials = _Trials(question, job, members, usual)
    before = yield from trials.run(None)
    if _is_well(before, usual):
        yield told(members, (trials.again(before),))
    else:
        yield told(members, (yield from trials.change(knobs, before)))


def _members(ranks: Sequence[int], posts: Sequence[Post]) -> list[Post]:
    chosen = set(ranks[:MOST_MEMBERS])
    return sorted((post for post in posts if post.number in chosen), key=lambda post: post.number)


def _usual(question: Question, job: Job, posts: Sequence[Post]) -> Generator[Orders, Sequence[Post], float | None]:
    """What the controls bring in the same collective."""
    controls = _members(question.controls, posts)
    if len(controls) < len(question.controls):
        return None
    outcome = yield from _Trials(question, job, controls, None).run(None)
    return outcome.value


def _is_well(outcome: Outcome, usual: float | None) -> bool:
    return outcome.value is not None and outcome.value >= USUAL_SHARE * (usual or 0.0)


class _Trials:
    """The same group again and again."""

    def __init__(self, question: Question, job: Job, members: Sequence[Post], usual: float | None) -> None:
        device = "cuda" if "nccl" in question.backend else "cpu"
        numbers = tuple(post.number for post in members)
        course = Course(WORLD, question.bytes or BUCKET, (numbers,))
        self._job = job
        self._usual = usual
        self._which = "ranks that are well" if set(numbers) == set(question.controls) else "ranks"
        self._small = question.bytes if question.is_small else None
        self._assembly = Assembly(tuple(members), question.backend, device, (course,))

    def change(self, knobs: Sequence[Knob], before: Outcome) -> Generator[Orders, Sequence[Post], tuple[Trial, ...]]:
        """Each of ``knobs`` once, then those that helped once more beside the unchanged group."""
        tried = {}
        for knob in knobs:
            tried[knob] = [(yield from self.run(knob))]
        helping = [knob for knob in knobs if gains(before.value, tried[knob][0].value, self._usual)]
        again = (yield from self.run(None)) if helping else before
        for knob in helping:
            tried[knob].append((yield from self.run(knob)))
        return tuple(self._trial(knob, (before, again), outcomes) for knob, outcomes in tried.items())

    def _trial(self, knob: Knob, befores: Sequence[Outcome], outcomes: Sequence[Outcome]) -> Trial:
        values = [outcome.value for outcome in outcomes]
        before = [outcome.value for outcome in befores[: len(values)]]
        words, last = f"{knob.name}={knob.value}", outcomes[-1]
        restores = mends(before, values, self._usual)
        return self._told(words, knob.setting, befores[len(values) - 1].value, last, restores=restores)

    def again(self, outcome: Outcome) -> Trial:
        """It went well without any change."""
        return self._told(AGAIN, "", None, outcome)

    def _told(self, words: str, setting: str, before: float | None, after: Outcome, *, restores: bool = False) -> Trial:
        """Of small messages in seconds, else in bytes a second."""
        unit, was, came = "B/s", before, after.value
        if self._small:
            unit, was, came = "s", _seconds(self._small, before), _seconds(self._small, came)
        return Trial("collective", words, setting, restores, None, was, came, unit, after.error or None)

    def run(self, knob: Knob | None) -> Generator[Orders, Sequence[Post], Outcome]:
        """New children, a store, and the group: the worst of what its ranks saw."""
        first, experiment = self._assembly.first, knob.experiment if knob else None
        what = f"{knob.name}={knob.value}" if knob else "nothing changed"
        words = (
            f"why the collective is slow or breaks: {len(self._assembly.posts)} {self._which} once more with {what}, "
            f"{PREPARE_SECONDS + RUN_SECONDS:.0f} s at most"
        )
        prepares = {post.token: Prepare(experiment, post.token == first.token) for post in self._assembly.posts}
        posts = yield _orders(prepares, PREPARE_SECONDS, words)
        note = next((post.note for post in posts if post.token == first.token), b"")
        if (port := port_of(note)) is None:
            return Outcome(error="no store for the group could be made")
        joins = self._assembly.join(self._job, port, SET_UP_SECONDS, PATIENCE, pairs=False)
        return _worst(self._outcomes((yield _orders(joins, RUN_SECONDS))))

    def _outcomes(self, posts: Sequence[Post]) -> Iterator[Outcome]:
        tokens = {post.token for post in self._assembly.posts}
        for post in posts:
            if post.token in tokens:
                yield _outcome(post.note)


def _seconds(length: int, value: float | None) -> float | None:
    """Of one message, by its bytes a second."""
    return length / value if value else None


def _orders(orders: Mapping[str, Prepare | Join], seconds: float, words: str = "") -> Orders:
    every = {token: Meet(one) if isinstance(one, Join) else one for token, one in orders.items()}
    return Orders({token: msgspec.msgpack.encode(one) for token, one in every.items()}, seconds, words)


def _outcome(note: bytes) -> Outcome:
    """Of a process that did not answer in time there is no note, or that of an earlier step."""
    try:
        return msgspec.msgpack.decode(note, type=Outcome)
    except msgspec.MsgspecError:
        return Outcome()


def _worst(outcomes: Iterator[Outcome]) -> Outcome:
    every = [*outcomes]
    broken = next((one for one in every if one.value is None), None)
    return broken or min(every, key=lambda one: one.value or 0.0, default=Outcome())


def changes_of(experiment: Experiment | None) -> dict[str, str | None]:
    """What an experiment changes in the environment, by this process's own table.

    Raises:
        Forbidden: its arguments do not fit, or this host lacks the interface.
    """
    if experiment is None:
        return {}
    require_own_interfaces([experiment.interface] if experiment.interface else [])
    try:
        knob = knob_of(experiment)
    except ValueError as error:
        raise Forbidden(str(error)) from None
    return {knob.name: knob.value}


class GroupTrials:
    """One process's part: a child at a time."""

    def __init__(self) -> None:
        self._child: TorchChild | None = None

    def take_part(self, order: GroupOrder, bench: Bench, deadline: Deadline) -> Found:
        """Start a child, or use it and end it."""
        limit = deadline.within(deadline.left() - MARGIN)
        return self._prepare(order, bench, limit) if isinstance(order, Prepare) else self._meet(order, limit)

    def _prepare(self, order: Prepare, bench: Bench, limit: Deadline) -> Found:
        self.close()
        self._child = TorchChild(bench.surroundings.environ, changes=changes_of(order.experiment))
        with suppress(ChildLost, Refused):
            self._child.ask("load", {}, Loaded, limit.left())
            if order.hosts:
                return Found({}, b"%d" % self._child.ask("group", Open(PATIENCE), Done, limit.left()).port)
        return Found({})

    def _meet(self, order: Meet, limit: Deadline) -> Found:
        if self._child is None:
            return Found({})
        facts = Run(order.join, self._child, limit).facts()
        outcome = outcome_of(facts, max(share.bytes for share in order.join.shares))
        self.close()
        return Found({}, msgspec.msgpack.encode(outcome))

    def close(self) -> None:
        """End the child."""
        if self._child is not None:
            self._child.close()
        self._child = None


def outcome_of(facts: CollectiveFacts, most: int) -> Outcome:
    """What a rank found, in short: of the largest messages of ``most`` bytes and less, as small ones of several sizes
    are timed anyway."""
    broken = facts.error or next((one.error for one in facts.timings if one.error), None)
    if broken:
        return Outcome(error=shortened(broken))
    for one in facts.results:
        if not is_right(one):
            return Outcome(error=f"{one.operation} gave {one.received}, not {one.expected}")
    largest = max((one.bytes for one in facts.timings if one.bytes <= most), default=0)
    seconds = [one.seconds for one in facts.timings if one.bytes == largest and one.seconds]
    return Outcome(largest / min(seconds), "") if seconds else Outcome(error="nothing was timed")
