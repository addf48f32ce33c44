"""A Ray cluster as its driver sees it: connect, list nodes, run a task on each, leave.

Ray's calls block for minutes if a head or node does not answer: each has a timeout here.
"""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from doctor.cluster.ray.cluster_address import RayUnreachable, check_listening, explain_no_answer
from doctor.cluster.rendezvous.connect_attempt import try_connect
from doctor.cluster.transport.store import DeadlineWorker
from doctor.core.clock import monotonic
from doctor.version import __version__

T = TypeVar("T")

ASKING, LEAVING = 5.0, 2.0
"""Seconds for one request to a connected cluster, and for leaving it."""
LONGEST = 300
"""Characters of a Ray error."""
LOST = (2, "UNEXPECTED_TERMINATION")
"""Ray's reasons for a node that died without being stopped (NodeDeathInfo in src/ray/protobuf/common.proto)."""
LACKING = (
    "rankdoctor is not installed in the Python of its Ray workers ({error}): install it there, or "
    f'`ray job submit --runtime-env-json \'{{{{"pip": ["rankdoctor=={__version__}"]}}}}\' -- doctor check --ray auto`'
)
"""Message of a node without rankdoctor."""


class RayNode(NamedTuple):
    """A running node. ``id`` is Ray's; ``host`` is its host name, or its address if unknown."""

    id: str
    host: str
    address: str

    @property
    def text(self) -> str:
        """Such as ``node1 (10.20.0.11)``."""
        return f"{self.host} ({self.address})" if self.host != self.address else self.host


class RayCluster:
    """A cluster that this process drives. Calls raise :class:`RayUnreachable` if it does not answer in time."""

    def __init__(self) -> None:
        self._worker = DeadlineWorker()
        self._tasks: dict[Any, int] = {}
        self._entered = False

    def enter(self, address: str, until: float) -> None:
        """Connect by the monotonic time ``until``."""
        check_listening(address, until)
        self._entered = True
        try:
            self._worker.run(lambda: _translate_errors(lambda: _enter(address)), max(1.0, until - monotonic()))
        except TimeoutError:
            raise RayUnreachable(
                f"the Ray cluster at {address} accepts no driver: {explain_no_answer(address)}"
            ) from None

    def nodes(self) -> list[RayNode]:
        """Return the running nodes, the head first and then by address."""
        alive = _without_stale_nodes([entry for entry in self._listed() if entry.get("Alive")])
        alive.sort(key=lambda entry: ("node:__internal_head__" not in entry.get("Resources", {}), _sort_key(entry)))
        return [_node_of(entry) for entry in alive]

    def lost(self) -> list[RayNode]:
        """Return nodes that died without being stopped and were not replaced at their addresses."""
        listed = self._listed()
        alive = {entry["NodeManagerAddress"] for entry in listed if entry.get("Alive")}
        dead = [entry for entry in listed if not entry.get("Alive") and entry.get("DeathReason") in LOST]
        found = {_sort_key(entry): _node_of(entry) for entry in dead if entry["NodeManagerAddress"] not in alive}
        return [found[key] for key in sorted(found)]

    def start(self, nodes: Sequence[RayNode], *arguments: object) -> None:
        """Run :func:`doctor.cluster.ray.node_task.join_from_node` on every node.

        Its arguments are the number of the node, the number of nodes, and ``arguments``.
        """
        self._ask(lambda: self._start(nodes, arguments))

    def _start(self, nodes: Sequence[RayNode], arguments: tuple[object, ...]) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        # A worker that has finished exits, which releases the resources of its collectors and responder.
        task = ray.remote(num_cpus=0, max_retries=0, max_calls=1)(_portable_task())
        for number, node in enumerate(nodes):
            there = NodeAffinitySchedulingStrategy(node.id, soft=False)
            options = task.options(name="rankdoctor", scheduling_strategy=there)
            self._tasks[options.remote(number, len(nodes), *arguments)] = number

    def ended(self) -> dict[int, str]:
        """Return the nodes whose task has ended since the last call, and why; none if the cluster does not answer."""
        try:
            return self._ask(self._ended)
        except RayUnreachable:
            return {}

    def _ended(self) -> dict[int, str]:
        import ray

        if not self._tasks:
            return {}
        ready, _ = ray.wait([*self._tasks], num_returns=len(self._tasks), timeout=0, fetch_local=False)
        return {self._tasks.pop(reference): _outcome(reference) for reference in ready}

    def leave(self) -> None:
        """Disconnect and end running tasks.

        A cluster that does not answer is abandoned: Ray ends the tasks of drivers that are gone.
        """
        if self._entered:
            with contextlib.suppress(RayUnreachable):
                self._bounded(self._leave, LEAVING, "")

    def _leave(self) -> None:
        import ray

        for reference in self._tasks:
            ray.cancel(reference, force=True)
        ray.shutdown()

    def _listed(self) -> list[dict[str, Any]]:
        import ray

        return self._ask(lambda: list(ray.nodes()))  # type: ignore[no-untyped-call]

    def _ask(self, work: Callable[[], T]) -> T:
        return self._bounded(work, ASKING, "the Ray cluster stopped responding")

    def _bounded(self, work: Callable[[], T], seconds: float, silent: str) -> T:
        try:
            return self._worker.run(lambda: _translate_errors(work), seconds)
        except TimeoutError:
            raise RayUnreachable(silent) from None


def _translate_errors(work: Callable[[], T]) -> T:
    try:
        from ray.exceptions import RayError

        try:
            return work()
        except RayError as error:
            raise OSError(str(error)) from None
    except (OSError, RuntimeError, ValueError, ImportError) as error:
        raise RayUnreachable(f"Ray reports: {_on_one_line(error)}") from None


def _enter(address: str) -> None:
    import ray

    try:
        ray.init(address=address, log_to_driver=False)
    except ConnectionError:
        if address != "auto":
            raise
        raise RayUnreachable(
            "no Ray cluster runs on this host, and RAY_ADDRESS is not set: use --ray HOST:PORT"
        ) from None


def _sort_key(entry: Mapping[str, Any]) -> tuple[int, int, str]:
    """Sort key that puts 10.0.0.9 before 10.0.0.10, and names last."""
    text = str(entry["NodeManagerAddress"])
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return 9, 0, text
    return address.version, int(address), str(entry["NodeID"])


def _without_stale_nodes(alive: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Drop nodes that were stopped and started again while Ray still lists both.

    Ray detects a stopped node only after seconds. The port of the stale one refuses connections.
    """
    addresses = [entry["NodeManagerAddress"] for entry in alive]
    return [
        entry
        for entry in alive
        if addresses.count(entry["NodeManagerAddress"]) == 1
        or try_connect(entry["NodeManagerAddress"], entry["NodeManagerPort"], ASKING) != "refused"
    ]


def _node_of(entry: Mapping[str, Any]) -> RayNode:
    address = str(entry["NodeManagerAddress"])
    return RayNode(str(entry["NodeID"]), str(entry.get("NodeManagerHostname") or address), address)


def _portable_task() -> Callable[..., str]:
    """Return the task; Ray serializes it by value, so nodes without rankdoctor can run it."""
    lacking = LACKING

    def rankdoctor(*arguments: Any) -> str:
        try:
            from doctor.cluster.ray.node_task import join_from_node
        except ImportError as error:
            return lacking.format(error=error)
        return join_from_node(*arguments)

    return rankdoctor


def _outcome(reference: Any) -> str:
    """Return why a task ended; empty if it succeeded."""
    import ray
    from ray import exceptions

    try:
        return str(ray.get(reference, timeout=1))
    except (exceptions.NodeDiedError, exceptions.TaskUnschedulableError):
        return "the node is dead"
    except exceptions.WorkerCrashedError:
        return "the Ray worker there was killed"
    except exceptions.RayTaskError as error:
        return f"rankdoctor failed there: {_on_one_line(error.cause if error.cause else error)}"
    except exceptions.RayError as error:
        return f"Ray reports: {_on_one_line(error)}"


def _on_one_line(error: BaseException) -> str:
    """Return an error as one line; those of Ray have many, and some end in a traceback."""
    words = " ".join(str(error).split()) or type(error).__name__
    return words if len(words) <= LONGEST else f"{words[:LONGEST]} …"
