"""What failed or is slow is measured again with one thing changed, as a stage: the last one."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import ClassVar

import msgspec

from doctor.facts import Section, Trial, TrialFacts
from doctor.job import Job
from doctor.probes.allowed import require_peers
from doctor.probes.amounts import counted, in_bytes, in_seconds
from doctor.probes.deadline import Deadline
from doctor.probes.device_work import COPIES, COPY_BYTES
from doctor.probes.group_costs import most_sent
from doctor.probes.group_messages import ends_of
from doctor.probes.stage import Bench, Found, Orders, Post
from doctor.probes.transfers_messages import calls_of
from doctor.probes.trials import ROUNDS, PacketOrder, ReachOrder, SpeedOrder, Tell
from doctor.probes.trials_devices import DEVICE_SECONDS, DeviceOrder, device_orders, try_device
from doctor.probes.trials_ends import PATH_SECONDS, path_orders
from doctor.probes.trials_groups import PREPARE_SECONDS, RUN_SECONDS, GroupTrials, Meet, Plan, Prepare, group_plan
from doctor.probes.trials_paths import SIZES_AT_ONCE, try_connections, try_packets, try_speeds
from doctor.probes.wire import GREETING_BYTES, WELCOME_BYTES
from doctor.reasoning.knobs import MOST_KNOBS
from doctor.reasoning.why import MOST_COLLECTIVES, MOST_QUESTIONS, Question, questions

GROUP_SECONDS = (1 + 2 * (1 + MOST_KNOBS)) * (PREPARE_SECONDS + RUN_SECONDS)

HELLO_BYTES = GREETING_BYTES + WELCOME_BYTES
"""Of a connection that is opened and no more; one that gets no answer sends less."""

OwnOrder = PacketOrder | ReachOrder | SpeedOrder | DeviceOrder | Tell
"""What a process does by itself, or with one other."""


class WhyStage:
    """See :class:`doctor.probes.stage.Stage`. One question after the other, so that no trial disturbs another."""

    name: ClassVar[str] = "why"
    makes: ClassVar[tuple[type[Section], ...]] = (TrialFacts,)

    def __init__(self) -> None:
        of_groups = MOST_COLLECTIVES * GROUP_SECONDS
        self.most_seconds = MOST_QUESTIONS * max(PATH_SECONDS, DEVICE_SECONDS) + of_groups
        self._questions: deque[Question] | None = None
        self._plan: Plan | None = None
        self._groups = GroupTrials()

    def plan(self, job: Job, posts: Sequence[Post]) -> Orders | None:
        """The next step of the question at hand, else the first one of the next."""
        if self._questions is None:
            self._questions = deque(questions(job))
        orders = _sent(self._plan, posts)
        while orders is None and self._questions:
            self._plan = _plan_of(self._questions.popleft(), job, posts)
            orders = next(self._plan, None)
        return orders and orders._replace(words=_words(orders))

    def take_part(self, order: bytes, bench: Bench, deadline: Deadline) -> Found:
        """Try what this process was asked to."""
        task = _read(order)
        require_peers(_ends(task), same_host=isinstance(task, Meet))
        if isinstance(task, Prepare | Meet):
            return self._groups.take_part(task, bench, deadline)
        trials = _trials(task, bench, deadline)
        return Found({TrialFacts.key: TrialFacts(trials=trials)} if trials else {})


def _read(order: bytes) -> OwnOrder | Prepare | Meet:
    task: OwnOrder | Prepare | Meet = msgspec.msgpack.decode(order, type=OwnOrder | Prepare | Meet)
    return task


def _ends(task: OwnOrder | Prepare | Meet) -> list[tuple[str | None, int]]:
    """Addresses and ports that an order connects to."""
    if isinstance(task, PacketOrder | ReachOrder):
        return [(way.address, task.peer.port) for way in (task.peer.way, *task.peer.others)]
    if isinstance(task, SpeedOrder):
        return calls_of(task.itinerary)
    return ends_of(task.join) if isinstance(task, Meet) else []


def _words(orders: Orders) -> str:
    """What a step costs: its own words, and what these leave open. Of :class:`Tell` there are none: a process puts down
    what others tried, and nothing is sent or started."""
    tasks = [_read(order) for order in orders.by_token.values()]
    joins = [task.join for task in tasks if isinstance(task, Meet)]
    if joins:
        ranks, most = counted(len(joins), "rank"), in_bytes(max(map(most_sent, joins)))
        return f"why the collective is slow or breaks: {ranks} at once, at most {most} a rank and {_limit(orders)}"
    more = next((words for task in tasks if (words := _rest(task, len(tasks)))), "")
    return f"{orders.words}; {more}" if more else orders.words


def _limit(orders: Orders) -> str:
    return in_seconds(orders.seconds)


def _rest(task: OwnOrder | Prepare | Meet, count: int) -> str:
    """How many at once, and the bytes where the words of an order do not name them; ``count``: who got one."""
    if isinstance(task, Prepare):
        return f"{count} processes load torch at once"
    if isinstance(task, DeviceOrder):
        return f"one child at a time{_copies(task)}"
    if isinstance(task, PacketOrder):
        # One more than the other ways: packets made smaller on the sick way, and as they are (try_packets).
        return f"{max(SIZES_AT_ONCE, 2 + len(task.peer.others))} connections at once"
    if isinstance(task, ReachOrder):
        ways = 1 + len(task.peer.others)
        return f"{ways} connections at once, at most {in_bytes(ROUNDS * ways * HELLO_BYTES)} in all"
    return "one connection at a time" if isinstance(task, SpeedOrder) else ""


def _copies(order: DeviceOrder) -> str:
    """What all children copy to and from a GPU, each :data:`ROUNDS` times: unchanged, and with each change."""
    if not order.on_gpu:
        return ""
    children = 1 + bool(order.near) + (order.other is not None)
    return f", at most {in_bytes(ROUNDS * children * 2 * (COPIES + 1) * COPY_BYTES)} copied to and from the GPU"


def _sent(plan: Plan | None, posts: Sequence[Post]) -> Orders | None:
    """What a plan does next after these answers; ``None`` where it is at its end."""
    if plan is None:
        return None
    try:
        return plan.send(posts)
    except StopIteration:
        return None


def _plan_of(question: Question, job: Job, posts: Sequence[Post]) -> Plan:
    if question.subject == "collective":
        yield from group_plan(question, job, posts)
        return
    is_device = question.subject == "device"
    orders = device_orders(question, posts) if is_device else path_orders(question, job, posts)
    if orders is not None:
        yield orders


def _trials(task: OwnOrder, bench: Bench, deadline: Deadline) -> tuple[Trial, ...]:
    if isinstance(task, Tell):
        return task.trials
    if isinstance(task, DeviceOrder):
        return try_device(task, bench, deadline)
    if isinstance(task, PacketOrder):
        return try_packets(task, deadline)
    if isinstance(task, ReachOrder):
        return try_connections(task, deadline)
    return try_speeds(task, bench.responder.guests, deadline) if bench.responder is not None else ()
