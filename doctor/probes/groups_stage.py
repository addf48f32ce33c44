"""Collectives of known values and their times, on the back end of the job, along the axes of its mesh."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import msgspec

from doctor.facts import CollectiveFacts, Lack, Missing, Section
from doctor.job import Job
from doctor.probes.allowed import require_peers
from doctor.probes.amounts import in_seconds
from doctor.probes.bench import ChildLost, Refused
from doctor.probes.deadline import Deadline
from doctor.probes.group_costs import most_sent
from doctor.probes.group_mesh import launcher_mesh
from doctor.probes.group_messages import Done, Join, Load, Open, Ready, Tell, ends_of, port_of
from doctor.probes.group_plan import Assembly, assemble
from doctor.probes.group_run import MOST_AXES, PATIENCE, Run, seconds_of, set_up_seconds
from doctor.probes.loading import loaded_in
from doctor.probes.mesh import Axis
from doctor.probes.stage import Bench, Found, Orders, Post

LOAD_SECONDS = 60.0
"""To import torch from a shared file system that all ranks read at once."""
OPEN_SECONDS = 5.0
MARGIN = 1.0
"""Seconds by which a child is killed before the step is over, so that there is time to say so."""


class GroupsStage:
    """See :class:`doctor.probes.stage.Stage`. Three steps: all load torch; one makes a store; all join at it and use
    the group. ``mesh``: the axes of the job, empty where they are to be found out."""

    name: ClassVar[str] = "groups"
    makes: ClassVar[tuple[type[Section], ...]] = (CollectiveFacts,)

    def __init__(self, mesh: tuple[Axis, ...] = ()) -> None:
        self.most_seconds = LOAD_SECONDS + OPEN_SECONDS + seconds_of("nccl", MOST_AXES)
        self._mesh = mesh[:MOST_AXES]
        self._assembly: Assembly | None = None
        self._plan: Callable[[Job, Sequence[Post]], Orders | None] = self._load

    def plan(self, job: Job, posts: Sequence[Post]) -> Orders | None:
        """Load, open, join; or tell everybody why there is nothing to join."""
        return self._plan(job, posts)

    def _load(self, job: Job, posts: Sequence[Post]) -> Orders | None:
        self._plan = self._open
        order = Load(job.world_size)
        who = "one process loads torch" if len(posts) == 1 else f"{len(posts)} processes load torch at once"
        words = f"groups: {who}, at most {in_seconds(LOAD_SECONDS)}"
        return _orders({post.token: order for post in posts}, LOAD_SECONDS, words)

    def _open(self, job: Job, posts: Sequence[Post]) -> Orders | None:
        self._plan = _nothing
        found = assemble(job, posts, self._mesh)
        if isinstance(found, Tell):
            # Without words: a process puts down what it was told, and nothing is sent or started.
            told = [post for post in posts if post.note or found.error]
            return _orders({post.token: found for post in told}, OPEN_SECONDS)
        if found is None:
            return None
        self._plan, self._assembly = self._join, found
        words = f"groups: one process, rank {found.first.number}, makes a store for {len(found.posts)} to meet at"
        costs = f"{words}, nothing is sent yet, at most {in_seconds(OPEN_SECONDS)}"
        return _orders({found.first.token: Open(PATIENCE)}, OPEN_SECONDS, costs)

    def _join(self, job: Job, posts: Sequence[Post]) -> Orders | None:
        self._plan = _nothing
        assembly = self._assembly
        note = next((post.note for post in posts if assembly and post.token == assembly.first.token), b"")
        port = port_of(note)
        if assembly is None or port is None:
            return None
        seconds = seconds_of(assembly.backend, len(assembly.courses))
        orders = assembly.join(job, port, set_up_seconds(assembly.backend), PATIENCE)
        most = max(map(most_sent, orders.values()))
        return _orders(orders, seconds + MARGIN, assembly.words(seconds + MARGIN, most))

    def take_part(self, order: bytes, bench: Bench, deadline: Deadline) -> Found:
        """Do what this process was asked to."""
        task = msgspec.msgpack.decode(order, type=Load | Open | Join | Tell)
        if isinstance(task, Load):
            return _loaded(task, bench, deadline)
        if isinstance(task, Tell):
            return Found({CollectiveFacts.key: _told(task)})
        if isinstance(task, Open):
            return _opened(task, bench, deadline)
        require_peers(ends_of(task), same_host=True)
        return Found(
            {CollectiveFacts.key: Run(task, bench.torch_child(), deadline.within(deadline.left() - MARGIN)).facts()}
        )


def _nothing(job: Job, posts: Sequence[Post]) -> Orders | None:
    return None


def _orders(orders: Mapping[str, Load | Open | Join | Tell], seconds: float, words: str = "") -> Orders:
    return Orders({token: msgspec.msgpack.encode(order) for token, order in orders.items()}, seconds, words)


def _told(task: Tell) -> CollectiveFacts | Missing:
    return CollectiveFacts(error=task.error) if task.error else Missing(Lack.HIDDEN, task.reason)


def _loaded(task: Load, bench: Bench, deadline: Deadline) -> Found:
    loaded = loaded_in(bench.torch_child(), deadline.left() - MARGIN)
    if isinstance(loaded, Missing):
        return Found({CollectiveFacts.key: loaded})
    if not loaded.distributed:
        reason = f"torch {loaded.version} is built without torch.distributed"
        return Found({CollectiveFacts.key: Missing(Lack.HIDDEN, reason)})
    mesh = launcher_mesh(bench.surroundings.environ, task.world)
    return Found({}, msgspec.msgpack.encode(Ready(loaded.devices, loaded.nccl, loaded.backends, mesh)))


def _opened(task: Open, bench: Bench, deadline: Deadline) -> Found:
    """The port of the store as the note, or nothing."""
    try:
        done = bench.torch_child().ask("group", task, Done, deadline.left() - MARGIN)
    except (ChildLost, Refused) as error:
        return Found({CollectiveFacts.key: CollectiveFacts(error=f"no store for the group could be made: {error}")})
    return Found({}, b"%d" % done.port)
