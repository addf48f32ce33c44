"""Devices that ran out of memory according to logs: which rank, the numbers, the line of the program, and the cause."""

from __future__ import annotations

import re

import msgspec

from doctor.analysis.call_sites import place_of_frame
from doctor.analysis.logs.oom_message import Cause, OomMessage, cause_of, parse_oom
from doctor.core.facts import Event, Frame, ProgressFacts
from doctor.core.job import Job
from doctor.core.logs.event_groups import EventGroup
from doctor.core.text import lazy_compile

KINDS = ("oom.device", "oom.device_library", "python.exception")
_LOADING = ("torch/serialization.py", "torch/storage.py", "fabric/utilities/cloud_io.py")
"""Functions that load a checkpoint's tensors to the device from which they were saved."""

_CAUGHT = lazy_compile(
    r"\b(?:skipping|retry(?:ing)?|recover(?:ing)?|reducing|halving|trying batch size)\b", re.IGNORECASE
)


class OomEvent(msgspec.Struct, frozen=True):
    """A failed allocation. ``rank`` is ``None`` if unknown. ``frame``: the innermost line of user code in a traceback.
    ``is_loading``: a checkpoint was being loaded. ``is_certain``: the message names memory; error codes of libraries
    have other causes too. ``is_caught``: the program logged that it continues."""

    event: Event
    shortage: OomMessage
    cause: Cause
    frame: Frame | None
    is_loading: bool
    is_certain: bool
    is_caught: bool

    @property
    def rank(self) -> int | None:
        """The rank that ran out of memory."""
        return self.event.rank

    @property
    def place(self) -> str:
        """``train.py:57 (training_step)``, or empty."""
        return place_of_frame(self.frame)


def exhaustions(job: Job) -> tuple[OomEvent, ...]:
    """The first failure of each process in order of time; a message with numbers replaces one without."""
    pids = {event.pid for event in job.evidence.events if event.rank is not None and event.pid} if job.evidence else ()
    best: dict[tuple[object, ...], tuple[Event, OomMessage]] = {}
    for event in job.evidence.of(*KINDS) if job.evidence else ():
        shortage = parse_oom(event.value("message") or event.text) or (OomMessage() if event.kind == KINDS[0] else None)
        if shortage is None:
            continue
        speaker = (event.file, event.rank, event.pid if event.rank is None else None)
        known = best.get(speaker)
        if known is None or _worth(event, shortage) > _worth(*known):
            best[speaker] = (event, shortage)
    return tuple(_oom_event(event, shortage, frozenset(pids)) for event, shortage in best.values())


def _worth(event: Event, shortage: OomMessage) -> tuple[bool, bool]:
    return shortage.wanted is not None, bool(event.frames)


def _oom_event(event: Event, shortage: OomMessage, pids: frozenset[int]) -> OomEvent:
    paths = [frame.file.replace("\\", "/") for frame in event.frames]
    return OomEvent(
        event=event,
        shortage=shortage,
        cause=cause_of(shortage, peers=pids - {event.pid}),
        frame=next((frame for frame in event.frames if frame.user), None),
        is_loading=any(path.endswith(_LOADING) for path in paths),
        is_certain=event.kind != "oom.device_library" and "_STATUS_ALLOC_FAILED" not in event.text,
        is_caught=_CAUGHT.search(event.text) is not None,
    )


def on_first_device(one: OomEvent) -> bool:
    """Whether a process that is not the first of its host failed on the first device.

    It loads a checkpoint there, or processes of other ranks fill it."""
    if one.shortage.device != 0 or one.cause == "demand":
        return False
    if one.is_loading and one.rank is None:
        return one.cause in ("others", "skew")
    is_stranger = bool(one.event.local_rank or (one.event.local_rank is None and one.rank))
    return one.cause == "skew" or (is_stranger and (one.is_loading or one.cause == "others"))


def ended_by_signal(job: Job, name: str) -> tuple[int, ...]:
    """The ranks that are known to have been ended by this signal (``SIGKILL``)."""
    failures = ((rank.number, facts.failure) for rank in job.ranks if (facts := rank.find(ProgressFacts)))
    return tuple(number for number, failure in failures if failure is not None and failure.kind == name)


def as_event_groups(found: tuple[OomEvent, ...]) -> EventGroup:
    """The messages, for a finding."""
    return EventGroup(found[0].event.kind, tuple(one.event for one in found))


def numbers_of(one: OomEvent) -> dict[str, object]:
    """The known numbers as evidence, in bytes."""
    message = one.shortage
    named = {
        "cause": one.cause,
        "device": message.device,
        "wanted_bytes": message.wanted,
        "total_bytes": message.total,
        "free_bytes": message.free,
        # Before training, a message does not state it: it is 0 by assumption.
        "allocated_bytes": message.allocated if message.allocated or message.reserved_unallocated is not None else None,
        "reserved_unallocated_bytes": message.reserved_unallocated,
        "held_by_others_bytes": message.other_bytes or None,
        "memory_bytes_by_process": {str(pid): size for pid, size in message.others} or None,
        "allowed_bytes": message.allowed,
        "place": one.place or None,
    }
    return {name: value for name, value in named.items() if value is not None}
