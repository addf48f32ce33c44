"""What NCCL's RAS service knew of a job: ranks that are dead or silent, errors, and counts that differ.

Counts differ for moments in every healthy job, as ranks do not launch at the same instant: only where two answers show
the same numbers, somebody waits. :func:`with_progress` compares answers, of one file or of several.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import msgspec

from doctor.core.facts import Event
from doctor.core.facts.log_events import LONGEST
from doctor.postmortem.ras.responses import (
    RasCommunicator,
    RasLaggingRanks,
    RasMissingRank,
    RasProcess,
    RasResponse,
    is_status_json,
    is_status_text,
    read_responses,
)

KINDS = (
    "ras.rank_missing",
    "ras.rank_dead",
    "ras.counts_differ",
    "ras.async_error",
    "ras.status_differs",
    "ras.device_shared",
)
MOST_NAMED = 64
"""Ranks of one communicator that are named one by one."""


def looks_like_ras(head: str) -> bool:
    """Whether a text that begins so is an answer of the RAS service, as text or as JSON."""
    return is_status_json(head) if head.lstrip()[:1] == "{" else is_status_text(head)


def read_ras(text: str, name: str = "") -> list[Event]:
    """The events of all answers in a text.

    ``rank`` is the global one where a communicator spans the whole job, and else unknown; ``values`` hold the number
    within the communicator (``member``), its hash, size and device, and ``node``, the address that RAS knows.
    ``ras.counts_differ`` has ``operation``, ``launched``, ``most`` and ``stuck`` (:func:`with_progress`).
    """
    answers = read_responses(text)
    return with_progress(event for answer in answers for event in _events(answer, name))


def with_progress(events: Iterable[Event]) -> list[Event]:
    """The events with ``stuck`` told: ``yes`` for counts that were the same in the answer before, ``no`` for those that
    went on, ``unknown`` for those of one answer alone. Of one rank's counts the newest event is kept."""
    kept: dict[object, Event] = {}
    for event in events:
        key: object = (event.kind, event.text, event.file, event.line)
        if event.kind == "ras.counts_differ":
            key = (event.kind, *(event.value(name) for name in ("communicator", "member", "ranks", "operation")))
        kept[key] = _after(event, kept.pop(key, None))
    return list(kept.values())


def _after(event: Event, before: Event | None) -> Event:
    if event.kind != "ras.counts_differ" or before is None:
        return event
    same = all(event.value(name) == before.value(name) for name in ("launched", "most"))
    values = tuple((name, value) for name, value in event.values if name != "stuck")
    return msgspec.structs.replace(event, values=(*values, ("stuck", "yes" if same else "no")), count=before.count + 1)


class _GlobalRanks:
    """The global rank of a process and its device, by a communicator that spans the job."""

    def __init__(self, answer: RasResponse) -> None:
        whole = [one for one in answer.communicators if one.size is not None and one.size == answer.gpus]
        self._whole = {one.name for one in whole}
        self._by_process: dict[tuple[str | None, int | None, int | None], int] = {}
        for one in whole:
            for rank, process in _everyone(one):
                self._by_process.setdefault(process[:3], rank)

    def of(self, one: RasCommunicator | None, member: int | None, process: RasProcess) -> int | None:
        """The rank, or ``None`` where no communicator tells it."""
        if one is not None and one.name in self._whole:
            return member
        return self._by_process.get(process[:3]) if process.pid is not None else None


def _everyone(one: RasCommunicator) -> Iterator[tuple[int, RasProcess]]:
    yield from one.members.items()
    yield from ((missing.rank, missing.process) for missing in one.missing if missing.rank is not None)


def _events(answer: RasResponse, file: str) -> Iterator[Event]:
    ranks = _GlobalRanks(answer)
    dead = {missing.process[:2] for missing in answer.missing if missing.why == "dead"}
    named = {missing.process[:2] for one in answer.communicators for missing in one.missing}
    for one in answer.communicators:
        for missing in one.missing[:MOST_NAMED]:
            is_dead = missing.why == "dead" or missing.process[:2] in dead
            yield _absent(answer, file, ranks, one, missing, is_dead)
        yield from _status_events(answer, file, ranks, one)
        for behind in one.behind[:MOST_NAMED]:
            yield _count(answer, file, ranks, one, behind)
        yield from _shared(answer, file, ranks, one)
    for missing in answer.missing[:MOST_NAMED]:
        if missing.process[:2] not in named:
            yield _absent(answer, file, ranks, None, missing, missing.why == "dead")


def _absent(
    answer: RasResponse,
    file: str,
    ranks: _GlobalRanks,
    one: RasCommunicator | None,
    missing: RasMissingRank,
    is_dead: bool,
) -> Event:
    kind = "ras.rank_dead" if is_dead else "ras.rank_missing"
    more = {"why": "dead" if is_dead else missing.why}
    return _event(kind, answer, file, ranks, one, missing.rank, missing.process, missing.text, missing.line, more)


def _status_events(answer: RasResponse, file: str, ranks: _GlobalRanks, one: RasCommunicator) -> Iterator[Event]:
    for said in one.said[:MOST_NAMED]:
        kind = "ras.status_differs" if said.phase == "status" else "ras.async_error"
        more = {"status" if said.phase == "status" else "error": said.words, "phase": said.phase}
        yield _event(kind, answer, file, ranks, one, said.rank, said.process, said.text, said.line, more)


def _count(answer: RasResponse, file: str, ranks: _GlobalRanks, one: RasCommunicator, behind: RasLaggingRanks) -> Event:
    more = {
        "operation": behind.operation,
        "launched": str(behind.launched),
        "most": str(behind.most),
        "ranks": str(behind.ranks),
        "stuck": "unknown",
    }
    kind, line = "ras.counts_differ", behind.line
    return _event(kind, answer, file, ranks, one, behind.rank, behind.process, behind.text, line, more)


def _shared(answer: RasResponse, file: str, ranks: _GlobalRanks, one: RasCommunicator) -> Iterator[Event]:
    """Ranks of one communicator on one device, which NCCL allows only where it is told to."""
    users: dict[tuple[str, int], list[int]] = {}
    for rank, process in one.members.items():
        if process.node and process.nvml is not None:
            users.setdefault((process.node, process.nvml), []).append(rank)
    for (node, device), members in users.items():
        if len(members) > 1:
            text = f"ranks {', '.join(map(str, members[:MOST_NAMED]))} use GPU {device} of {node}"
            last = members[-1]
            more = {"members": ",".join(map(str, members[:MOST_NAMED]))}
            process = one.members[last]
            yield _event("ras.device_shared", answer, file, ranks, one, last, process, text, one.line, more)


def _event(
    kind: str,
    answer: RasResponse,
    file: str,
    ranks: _GlobalRanks,
    one: RasCommunicator | None,
    member: int | None,
    process: RasProcess,
    text: str,
    line: int,
    more: Mapping[str, str],
) -> Event:
    values = {
        "communicator": one.name if one else None,
        "size": one.size if one else None,
        "member": member,
        "node": process.node,
        "device": process.device,
        **more,
    }
    return Event(
        kind,
        text[:LONGEST],
        file,
        line,
        rank=ranks.of(one, member, process),
        pid=process.pid,
        at=answer.at,
        values=tuple((name, str(value)) for name, value in values.items() if value is not None),
    )
