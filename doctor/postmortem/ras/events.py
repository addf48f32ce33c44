"""Events from NCCL's RAS service: dead and unresponsive ranks, errors, different counts.

Counts differ briefly in every healthy job, because ranks do not launch at the same instant: a rank is stuck only if two
responses show the same counts. :func:`with_progress` compares the responses of one or several files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from doctor.core.facts import Event
from doctor.core.facts.log_events import LONGEST
from doctor.postmortem.ras.responses import (
    RasCommunicator,
    RasLaggingRanks,
    RasMissingRank,
    RasRankStatus,
    RasResponse,
    is_status_json,
    is_status_text,
    read_responses,
)

MOST_NAMED = 64
"""Maximum number of ranks of one communicator that are listed one by one."""


def looks_like_ras(head: str) -> bool:
    """Return whether a text with this beginning is a response of the RAS service."""
    return is_status_json(head) if head.lstrip()[:1] == "{" else is_status_text(head)


def read_ras(text: str, name: str = "") -> list[Event]:
    """Return the events of all responses in a text.

    ``rank`` is the global rank if a communicator spans the whole job, else unknown. ``values`` hold the rank within the
    communicator (``member``), its hash, size and device, and ``node``, the address known to RAS. ``ras.counts_differ``
    has ``operation``, ``launched``, ``most`` and ``stuck`` (:func:`with_progress`).
    """
    return with_progress(event for response in read_responses(text) for event in _ResponseEvents(response, name).all())


def with_progress(events: Iterable[Event]) -> list[Event]:
    """Return the events with ``stuck`` set, and the newest counts of each rank only.

    ``yes``: counts equal those of the previous response; ``no``: they increased; ``unknown``: there is one response.
    """
    kept: dict[object, Event] = {}
    for event in events:
        key: object = (event.kind, event.text, event.file, event.line)
        if event.kind == "ras.counts_differ":
            key = (event.kind, *(event.value(name) for name in ("communicator", "member", "ranks", "operation")))
        before = kept.pop(key, None)
        if event.kind == "ras.counts_differ" and before is not None:
            same = all(event.value(name) == before.value(name) for name in ("launched", "most"))
            values = {**dict(event.values), "stuck": "yes" if same else "no"}
            event = msgspec.structs.replace(event, values=tuple(values.items()), count=before.count + 1)
        kept[key] = event
    return list(kept.values())


class _ResponseEvents:
    """The events of one response. Global ranks are known if a communicator spans the job."""

    def __init__(self, response: RasResponse, file: str) -> None:
        self._response = response
        self._file = file
        whole = [one for one in response.communicators if one.size is not None and one.size == response.gpus]
        self._whole = {one.name for one in whole}
        self._by_process: dict[tuple[str | None, int | None, int | None], int] = {}
        for one in whole:
            absent = ((missing.rank, missing.process) for missing in one.missing)
            for rank, process in (*one.members.items(), *absent):
                if rank is not None:
                    self._by_process.setdefault(process[:3], rank)

    def all(self) -> Iterator[Event]:
        """Yield all events, by communicator."""
        response = self._response
        dead = {missing.process[:2] for missing in response.missing if missing.why == "dead"}
        listed = {missing.process[:2] for one in response.communicators for missing in one.missing}
        for one in response.communicators:
            for missing in one.missing[:MOST_NAMED]:
                yield self._missing(one, missing, is_dead=missing.why == "dead" or missing.process[:2] in dead)
            for status in one.statuses[:MOST_NAMED]:
                kind, field = ("status_differs", "status") if status.phase == "status" else ("async_error", "error")
                yield self._event(kind, one, status, **{field: status.words}, phase=status.phase)
            for lagging in one.lagging[:MOST_NAMED]:
                yield self._event(
                    "counts_differ",
                    one,
                    lagging,
                    operation=lagging.operation,
                    launched=str(lagging.launched),
                    most=str(lagging.most),
                    ranks=str(lagging.ranks),
                    stuck="unknown",
                )
            yield from self._shared_devices(one)
        for missing in response.missing[:MOST_NAMED]:
            if missing.process[:2] not in listed:
                yield self._missing(None, missing, is_dead=missing.why == "dead")

    def _missing(self, one: RasCommunicator | None, missing: RasMissingRank, *, is_dead: bool) -> Event:
        return self._event(
            "rank_dead" if is_dead else "rank_missing", one, missing, why="dead" if is_dead else missing.why
        )

    def _shared_devices(self, one: RasCommunicator) -> Iterator[Event]:
        """Yield devices shared by ranks of a communicator, which NCCL allows only if configured."""
        users: dict[tuple[str, int], list[int]] = {}
        for rank, process in one.members.items():
            if process.node and process.nvml is not None:
                users.setdefault((process.node, process.nvml), []).append(rank)
        for (node, device), members in users.items():
            if len(members) > 1:
                text = f"ranks {', '.join(map(str, members[:MOST_NAMED]))} use GPU {device} of {node}"
                last = RasMissingRank(members[-1], one.members[members[-1]], "", text, one.line)
                yield self._event("device_shared", one, last, members=",".join(map(str, members[:MOST_NAMED])))

    def _event(
        self,
        kind: str,
        one: RasCommunicator | None,
        about: RasMissingRank | RasRankStatus | RasLaggingRanks,
        **more: str,
    ) -> Event:
        process = about.process
        rank = about.rank
        if one is None or one.name not in self._whole:
            rank = self._by_process.get(process[:3]) if process.pid is not None else None
        values = {
            "communicator": one.name if one else None,
            "size": one.size if one else None,
            "member": about.rank,
            "node": process.node,
            "device": process.device,
            **more,
        }
        return Event(
            f"ras.{kind}",
            about.text[:LONGEST],
            self._file,
            about.line,
            rank=rank,
            pid=process.pid,
            at=self._response.at,
            values=tuple((name, str(value)) for name, value in values.items() if value is not None),
        )
