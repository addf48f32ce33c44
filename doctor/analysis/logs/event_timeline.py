"""Events of a log before and after a message, and facts about the job from them, such as its number of hosts."""

from __future__ import annotations

import re
from weakref import WeakKeyDictionary

from doctor.core.facts import Event
from doctor.core.job import Job
from doctor.core.text import lazy_compile

_SET_UP = (
    "nccl.connected",
    "nccl.channels",
    "torch.store.barrier_done",
    "pl.all_registered",
    "pl.local_rank",
    "run.training",
    "run.ended_well",
)
"""Messages of a job whose ranks are connected."""

_EXCEPTIONS = ("python.exception", "py.exc")

_OF_CONNECTIONS = lazy_compile(
    r"(?i)\b(?:connect|connection|timed? ?out|refused|unreachable|no route|socket|store|rendezvous|nccl|gloo|resolve|"
    r"name or service|name resolution|address already|child ?failed|(?:signal ?|sigterm ?)exception|"
    r"keyboardinterrupt)\b"
)
"""Text of exceptions of ranks that could not connect, or that were terminated."""


class _LogTimeline:
    """Lookups that are asked repeatedly of one log, computed once. ``places``: the index of events, by identity."""

    def __init__(self, events: tuple[Event, ...]) -> None:
        self.places = {id(event): place for place, event in enumerate(events)}
        set_up = [place for place, event in enumerate(events) if is_set_up(event)]
        self.first_set_up, self.last_set_up = (set_up[0], set_up[-1]) if set_up else (len(events), -1)
        self.first_failure = next((place for place, event in enumerate(events) if _is_failure(event)), len(events))

    def place(self, event: Event) -> int:
        """The index of an event; -1 if it is not in the log."""
        return self.places.get(id(event), -1)


_TIMELINES: WeakKeyDictionary[Job, _LogTimeline] = WeakKeyDictionary()


def _timeline(job: Job) -> _LogTimeline:
    if job not in _TIMELINES:
        _TIMELINES[job] = _LogTimeline(job.evidence.events if job.evidence else ())
    return _TIMELINES[job]


def events_before(job: Job, event: Event) -> tuple[Event, ...]:
    """The earlier events, in order."""
    return job.evidence.events[: max(_timeline(job).place(event), 0)] if job.evidence else ()


def events_after(job: Job, event: Event) -> tuple[Event, ...]:
    """The later events, in order."""
    return job.evidence.events[_timeline(job).place(event) + 1 :] if job.evidence else ()


MOST_COUNTED = 1 << 20
"""The largest number of ranks, hosts or tasks that is accepted: a larger one is from a garbled line."""


def parse_count(text: str | None) -> int | None:
    """A rank or a number of ranks, hosts or tasks in a log; ``None`` if the text is not a valid one."""
    if text is None or not text.isdecimal() or len(text) > len(str(MOST_COUNTED)):
        return None
    return int(text) if int(text) <= MOST_COUNTED else None


_UNROUTABLE = ("101", "113")
"""Errors of connections without a route to the address: ENETUNREACH, EHOSTUNREACH."""


def unroutable_clients(job: Job) -> tuple[Event, ...]:
    """The messages of clients of the store that had no route to its address."""
    failed = events_of_kinds(job, "torch.store.connect_fail")
    return tuple(one for one in failed if {one.value("errno"), one.value("errno2")}.intersection(_UNROUTABLE))


def is_set_up(one: Event) -> bool:
    """Whether a message shows that ranks are connected: a communicator is complete, or a step is done."""
    if one.kind == "nccl.init":
        return one.value("phase") == "COMPLETE"
    return one.kind in _SET_UP


def set_up_after(job: Job, event: Event) -> bool:
    """Whether the ranks connected later."""
    return _timeline(job).last_set_up > _timeline(job).place(event)


def set_up_before(job: Job, event: Event) -> bool:
    """Whether the ranks had connected before."""
    return _timeline(job).first_set_up < _timeline(job).place(event)


def failed_before(job: Job, event: Event) -> Event | None:
    """The first earlier failure that is not only a lost connection; later messages about peers may be a consequence."""
    first = _timeline(job).first_failure
    return job.evidence.events[first] if job.evidence and first < _timeline(job).place(event) else None


def ended_after(job: Job, event: Event) -> bool:
    """Whether a launcher reported the end of a process later: no rank waits any more."""
    return any(one.kind in _PROCESS_ENDS for one in events_after(job, event))


_PROCESS_ENDS = frozenset({"pl.child", "elastic.failed", "elastic.entry", "slurm.task_exit", "mpi.peer_exit"})


def failed_in_another_log(job: Job, event: Event) -> Event | None:
    """An exception, not of a lost connection, in another log that has no order in time with the event.

    A task of srun --kill-on-bad-exit has its traceback in a file of its own, and srun then cancels the step.
    """
    others = (one for one in (job.evidence.of(*_EXCEPTIONS) if job.evidence else ()) if one.file != event.file)
    return next((one for one in others if None in (one.at, event.at) and _is_failure(one)), None)


def _is_failure(one: Event) -> bool:
    if one.kind in _EXCEPTIONS:
        text = f"{one.value('type')} {one.value('message') or one.value('msg') or ''}"
        # Class names as separate words: DistNetworkError is about the network.
        return not _OF_CONNECTIONS.search(re.sub(r"(?<=[a-z])(?=[A-Z])", " ", text))
    if one.kind in ("elastic.failed", "slurm.task_exit"):
        return one.value("code") not in ("-15", "143", "0", "-1")
    return one.kind.startswith(("oom.", "cuda.oom", "dl.killed")) or one.kind == "torch.nccl.watchdog_timeout"


def has_worked(job: Job, event: Event) -> bool:
    """Whether ranks had exchanged data before: a communicator was complete, or a watchdog counts completed work."""
    if set_up_before(job, event):
        return True
    events = job.evidence.of("torch.nccl.pg_status", "torch.nccl.pg_status.old") if job.evidence else ()
    return any((one.value("done") or "").strip("0").isdecimal() for one in events)


_COUNTS = (("nccl.nodes", "nodes"), ("launch.hosts_given", "n"), ("launch.hosts_given", "n2"))
"""Messages with the number of hosts, and the field of the number."""


def spans_hosts(job: Job) -> bool:
    """Whether captures or logs show that the job runs on several hosts."""
    if job.evidence is None:
        return len(job.hosts) > 1
    events = job.evidence.of(*(kind for kind, _ in _COUNTS), "launch.node_given")
    counts = [one.value(name) for one in events for kind, name in _COUNTS if kind == one.kind]
    if any((parse_count(count) or 0) > 1 for count in (*counts, launch_setting(job, "max_nodes"))):
        return True
    if any((one.value("node") or "0") != "0" for one in events):
        return True
    return len({_short(one.host) for one in job.evidence.events if one.host}) > 1


def launch_setting(job: Job, name: str) -> str | None:
    """A setting that torchrun printed when it started (``rdzv_endpoint``, ``max_nodes``)."""
    events = job.evidence.of("elastic.launch") if job.evidence else ()
    return next((one.value("value") for one in events if one.value("key") == name), None)


def events_of_kinds(job: Job, *kinds: str) -> tuple[Event, ...]:
    """The events of these kinds in order, each line once: a line may have several kinds."""
    events = job.evidence.of(*kinds) if job.evidence else ()
    return tuple({(one.file, one.line, one.rank): one for one in reversed(events)}.values())[::-1]


def _short(host: str) -> str:
    return host.partition(".")[0].lower()


def names_itself(event: Event, name: str | None) -> bool:
    """Whether the host that logged the message is the one that it names."""
    return bool(name and event.host) and _short(name or "") == _short(event.host or "")
