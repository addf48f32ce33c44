"""What the reports of NCCL's RAS service show of the ranks of a job: lost, behind in their collectives, or in error.

RAS counts launches, and the host launches ahead of the device: in a healthy job the counts of ranks differ for moments.
So a rank is behind only if two reports show the same counts, and it made no progress meanwhile.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, NamedTuple

from doctor.core.facts import Event

MOST_WORDS = 4
"""Reports that are kept of one rank."""


class RasRank(NamedTuple):
    """What RAS reports of a rank. ``lost``: its process is ``dead`` (unreachable for a minute) or does not respond
    (``silent``); ``behind``: it launched fewer collectives than most ranks; ``words``: the reports, ``node``: its host,
    as RAS knows it."""

    words: tuple[str, ...] = ()
    lost: Literal["", "dead", "silent"] = ""
    behind: bool = False
    node: str = ""


def ras_ranks(events: Iterable[Event], pids: Mapping[int, int]) -> Mapping[int, RasRank]:
    """What ``events`` report, by global rank; ``pids``: ranks by PID where that is unique, for communicators that do
    not span the job."""
    found: defaultdict[int, list[Event]] = defaultdict(list)
    chosen = list(events)
    for event in (*_lost_or_failed(chosen), *_behind(chosen)):
        rank = event.rank if event.rank is not None else pids.get(event.pid or 0)
        if rank is not None:
            found[rank].append(event)
    return {rank: _ras_rank(of_rank) for rank, of_rank in found.items()}


def _ras_rank(events: list[Event]) -> RasRank:
    kinds = {event.kind for event in events}
    lost: Literal["", "dead", "silent"] = ""
    if kinds & {"ras.rank_dead", "ras.rank_missing"}:
        lost = "dead" if "ras.rank_dead" in kinds else "silent"
    words = dict.fromkeys(map(_in_words, events))
    node = next((node for event in events if (node := event.value("node"))), "")
    return RasRank(tuple(words)[:MOST_WORDS], lost, "ras.counts_differ" in kinds, node)


def _in_words(event: Event) -> str:
    if event.kind == "ras.counts_differ":
        return f"launched {event.value('launched')} of {event.value('most')} {event.value('operation')}"
    if event.kind == "ras.rank_dead":
        return "its process is dead"
    if event.kind == "ras.rank_missing":
        return "its process does not respond"
    return f"{event.value('error') or event.value('status')}"


def _lost_or_failed(events: Iterable[Event]) -> Iterator[Event]:
    """Yield what one report is enough for; a process that has left a communicator answered."""
    for event in events:
        is_lost = event.kind in ("ras.rank_dead", "ras.rank_missing") and event.value("why") != "left"
        if is_lost or event.kind == "ras.async_error":
            yield event


def _behind(events: Iterable[Event]) -> Iterator[Event]:
    """Yield the ranks with the fewest launches of an operation in a communicator, if they are a minority."""
    groups: defaultdict[tuple[str | None, str | None], list[Event]] = defaultdict(list)
    for event in events:
        if event.kind == "ras.counts_differ" and event.value("stuck") == "yes":
            groups[event.value("communicator"), event.value("operation")].append(event)
    for group in groups.values():
        least = min(_number(event, "launched") for event in group)
        last = [event for event in group if _number(event, "launched") == least]
        size = _number(last[0], "size")
        if not size or 2 * sum(_number(event, "ranks") for event in last) < size:
            yield from last


def _number(event: Event, name: str) -> int:
    value = event.value(name) or ""
    return int(value) if value.isdecimal() and len(value) < 20 else 0
