"""Parses dumps of torch's flight recorder that are already plain values: formats 2.1 (torch 2.4) to 2.10, from pickle
or JSON, of NCCL, Gloo and other backends.

Used for the recorder of a running process and for dumps of a finished job. Invalid values are ignored, and only text
and numbers are converted to text, because a few bytes of a pickle can encode a list that takes practically forever to
print.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice

from doctor.core.facts import Collective, Frame, ProcessGroup, RecorderFacts
from doctor.core.frames import call_site_frames, frame_of, shorten_stack

WITH_STACK, WITH_SITE = 8, 64
"""Newest entries that keep their stack, and newest entries that keep their call site: facts of thousands of ranks
travel together."""
INNER, OWN = 24, 8
"""Innermost frames of a stack that are kept, and user frames beyond these."""
BEFORE, AFTER = 32, 4
"""Entries that are kept around the oldest open one of a group: a host may enqueue a thousand after it."""
MOST_RANKS = 1 << 17
"""Maximum number of group members, and highest rank: larger values are corrupt."""
LONGEST = 1000
"""Maximum length of a name or path, number of frames of a stack, and number of sizes of a call."""

NONE = -1
"""Counter value before the first collective."""

Entry = Mapping[str, object]

_OPERATIONS = {
    "_all_gather_base": "all_gather_into_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "all_reduce_barrier": "barrier",
}
"""Names that differ from those in torch.distributed."""


def parse_recorder(
    dump: Mapping[str, object],
    most: int = 200,
    known: Mapping[str, tuple[int, ...]] | None = None,
    described: Mapping[str, str] | None = None,
) -> RecorderFacts:
    """Parse a loaded dump, with its ``most`` newest collectives, those around the oldest open one of each group, and
    the newest one of each group. ``known`` and ``described``: members and descriptions of groups that the dump may not
    have."""
    raw = dump.get("entries")
    entries: list[Entry] = [entry for entry in raw if isinstance(entry, dict)] if isinstance(raw, list) else []
    by_group: dict[str, list[int]] = {}
    for position, entry in enumerate(entries):
        if (name := _name_of(entry)) is not None:
            by_group.setdefault(name, []).append(position)
    for positions in by_group.values():
        _settle(entries, positions)
    kept = _kept(entries, by_group.values(), most)
    frames: dict[int, Frame] = {}
    return RecorderFacts(
        version=_text(dump["version"]) if "version" in dump else None,
        groups=_groups(
            dump,
            {name: [entries[place] for place in places] for name, places in by_group.items()},
            known or {},
            described or {},
        ),
        collectives=tuple(
            _collective(entry, name, age, frames) for entry, age in kept if (name := _name_of(entry)) is not None
        ),
        wrapped=bool(entries and _integer(entries[0].get("record_id"))) or len(kept) < len(entries),
    )


def _settle(entries: list[Entry], positions: Sequence[int]) -> None:
    """Give the parts of coalesced calls the state of the whole: they share one number, and torch never updates them.
    If the whole is not recorded, because only open calls are shown or the backend records none, it has ended unless it
    is the newest."""
    for batch in _batches(entries, positions):
        whole = entries[batch[-1]]
        if not _text(whole.get("profiling_name")).endswith(":coalesced"):
            whole = {"state": "completed", "retired": True} if batch[-1] != positions[-1] else {}
        state = {key: whole[key] for key in ("state", "retired") if key in whole}
        for position in batch[:-1] if "profiling_name" in whole else batch:
            if _is_open(entries[position]):
                entries[position] = {**entries[position], **state}


def _batches(entries: Sequence[Entry], positions: Sequence[int]) -> Iterator[list[int]]:
    """Consecutive entries of a group with one number."""
    batch: list[int] = []
    last = (False, 0)
    for position in positions:
        is_p2p = entries[position].get("is_p2p") is True
        number = (is_p2p, _sequence(entries[position], is_p2p))
        if number == last and number[1]:
            batch.append(position)
            continue
        if len(batch) > 1:
            yield batch
        batch, last = [position], number
    if len(batch) > 1:
        yield batch


def _kept(entries: Sequence[Entry], groups: Iterable[Sequence[int]], most: int) -> list[tuple[Entry, int]]:
    """The entries to keep, each with its age: 1 for the newest one, and for the oldest open one of its group, whose
    stack matters most."""
    ages = {position: len(entries) - position for position in range(max(0, len(entries) - most), len(entries))}
    for positions in groups:
        ages.setdefault(positions[-1], len(entries) - positions[-1])
        oldest_open = next((place for place in positions if _is_open(entries[place])), None)
        if oldest_open is not None:
            for near in range(max(0, oldest_open - BEFORE), min(len(entries), oldest_open + AFTER)):
                ages[near] = min(ages.get(near, len(entries)), abs(near - oldest_open) + 1)
    return [(entries[position], ages[position]) for position in sorted(ages)]


def _is_open(entry: Entry) -> bool:
    return entry.get("state") != "completed" and entry.get("retired") is not True


def _collective(entry: Entry, group: str, age: int, known: dict[int, Frame]) -> Collective:
    backend, operation, pair = operation_of(_text(entry.get("profiling_name")))
    is_p2p = entry.get("is_p2p") is True or operation in ("send", "recv")
    milliseconds = entry.get("duration_ms")
    timeout, at = _integer(entry.get("timeout_ms")), _integer(entry.get("time_created_ns"))
    types = entry.get("input_dtypes") or entry.get("output_dtypes")
    return Collective(
        group,
        _sequence(entry, is_p2p),
        operation,
        backend=backend,
        is_p2p=is_p2p,
        source=pair[0] if pair else None,
        peer=pair[1] if pair else None,
        input_sizes=_sizes(entry.get("input_sizes")),
        output_sizes=_sizes(entry.get("output_sizes")),
        types=tuple(map(_text, types[:LONGEST])) if isinstance(types, (list, tuple)) else (),
        state=_text(entry.get("state")) or "scheduled",
        retired=entry.get("retired") is True,
        at=at / 1e9 if at else None,
        seconds=milliseconds / 1e3 if isinstance(milliseconds, float) else None,
        timeout=timeout / 1e3 if timeout else None,
        frames=_frames(entry.get("frames"), age, known),
    )


def operation_of(name: str) -> tuple[str, str, tuple[int, int] | None]:
    """Backend, operation, and for ``nccl:send 1->2`` or ``nccl:recv 2<-1`` sender and other rank, by group."""
    backend, _, rest = name.rpartition(":")
    operation, _, ends = rest.strip().partition(" ")
    pair = None
    for arrow in ("->", "<-"):
        own, found, other = ends.partition(arrow)
        if found and own.isdecimal() and other.isdecimal() and len(ends) < 20:
            pair = (int(own) if arrow == "->" else int(other), int(other))
    return backend, _OPERATIONS.get(operation.lower(), operation.lower()), pair


def _sequence(entry: Entry, is_p2p: bool) -> int:
    key = "p2p_seq_id" if is_p2p else "collective_seq_id"
    return _integer(entry.get(key, entry.get("seq_id"))) or 0


def _frames(frames: object, age: int, known: dict[int, Frame]) -> tuple[Frame, ...]:
    """``known``: frames of this dump by identity; a dump holds each of them once."""
    if age > WITH_SITE or not isinstance(frames, (list, tuple)):
        return ()
    raw = [frame for frame in frames[:LONGEST] if isinstance(frame, dict)]
    for frame in raw:
        if id(frame) not in known:
            place = _text(frame.get("filename")), _integer(frame.get("line")), _text(frame.get("name"))
            known[id(frame)] = _frame(*place)
    return _shown(tuple([known[id(frame)] for frame in raw]), age <= WITH_STACK)


_frame = functools.lru_cache(maxsize=1 << 14)(frame_of)


@functools.lru_cache(maxsize=1 << 12)
def _shown(stack: tuple[Frame, ...], is_near: bool) -> tuple[Frame, ...]:
    """The frames of a stack that are kept. Equal stacks become one object: the stacks of a job's ranks are mostly
    equal."""
    return shorten_stack(stack, INNER, OWN) if is_near else call_site_frames(stack)


def _groups(
    dump: Mapping[str, object],
    by_group: Mapping[str, Sequence[Entry]],
    known: Mapping[str, tuple[int, ...]],
    described: Mapping[str, str],
) -> tuple[ProcessGroup, ...]:
    """All known groups: from the dump's table, from entries, and from the process itself."""
    seen: dict[str, str] = {}
    members = dict(known)
    for told in _mappings(dump.get("pg_config")):
        if name := _text(told.get("name")):
            seen[name] = _description(told.get("desc"))
            members[name] = _members(told.get("ranks")) or members.get(name, ())
    for name, entries in by_group.items():
        group = entries[-1].get("process_group")
        words = _description(group[1]) if isinstance(group, (list, tuple)) and len(group) > 1 else ""
        seen[name] = seen.get(name) or words
    counters = _counters_by_name(dump, by_group)
    return tuple(
        ProcessGroup(
            name,
            seen.get(name) or _description(described.get(name)),
            members.get(name, ()),
            *counters.get(name, (None, None, None)),
        )
        for name in dict.fromkeys([*known, *seen])
    )


_Counters = tuple["int | None", "int | None", "int | None"]


def _counters_by_name(dump: Mapping[str, object], by_group: Mapping[str, Sequence[Entry]]) -> dict[str, _Counters]:
    """The last operations enqueued, started and completed in each group, numbered like its collectives. The recorder
    files them under a number local to the process, which entries show; otherwise the creation order of groups does."""
    status = dump.get("pg_status")
    if not isinstance(status, dict):
        return {}
    numbers = {name: _text(entries[-1].get("pg_id")) for name, entries in by_group.items()}
    numbers = {**_by_order(dump, status, numbers), **numbers}
    return {name: _counters(status.get(number), by_group.get(name, ())) for name, number in numbers.items()}


def _by_order(
    dump: Mapping[str, object], status: Mapping[object, object], told: Mapping[str, str]
) -> Mapping[str, str]:
    """The numbers of groups without an entry in the dump. Names and numbers both count created groups, of the job and
    of the process; if both tables have equally many, and entries do not contradict it, they are paired in order."""
    names = sorted({int(name) for one in _mappings(dump.get("pg_config")) if _is_count(name := _text(one.get("name")))})
    numbers = sorted({int(number) for number in map(_text, status) if _is_count(number)})
    if len(names) != len(numbers) or len(numbers) != len(status):
        return {}
    paired = {str(name): str(number) for name, number in zip(names, numbers, strict=True)}
    return paired if all(paired.get(name, number) == number for name, number in told.items()) else {}


def _is_count(name: str) -> bool:
    return name.isdecimal() and len(name) < 10


def _counters(told: object, entries: Sequence[Entry]) -> _Counters:
    values = told if isinstance(told, dict) else {}
    enqueued, started, completed = (
        None if value is None or value == NONE else _sequence_of(value, entries)
        for word in ("enqueued", "started", "completed")
        for value in [_integer(values.get(f"last_{word}_collective"))]
    )
    return (enqueued, started, completed)


def _sequence_of(counter: int, entries: Sequence[Entry]) -> int:
    """Gloo also counts sends and receives, which its recorder does not show: its counters refer to an entry by
    ``op_id``, and its collectives are compared by their own sequence."""
    if not entries or not _text(entries[-1].get("profiling_name")).startswith("gloo:"):
        return counter
    entry = next((entry for entry in reversed(entries) if _integer(entry.get("op_id")) == counter), None)
    sequence = _integer(entry.get("collective_seq_id")) if entry else None
    return counter if sequence is None else sequence


def _name_of(entry: Entry) -> str | None:
    group = entry.get("process_group")
    if isinstance(group, (list, tuple)) and group:
        return _text(group[0])
    number = entry.get("pg_id")
    return None if number is None else _text(number)


def _description(value: object) -> str:
    """What a group is for; torch writes ``undefined`` if that was not given."""
    words = _text(value)
    return "" if words == "undefined" else words


def _mappings(value: object) -> Iterator[Mapping[str, object]]:
    values = value.values() if isinstance(value, dict) else ()
    return (inner for inner in values if isinstance(inner, dict))


def _members(value: object) -> tuple[int, ...]:
    """Ranks as a list, or as its text (``[0, 1]``)."""
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return ()
    ranks = set(islice(_integers(found), MOST_RANKS))
    return tuple(sorted(rank for rank in ranks if 0 <= rank < MOST_RANKS))


def _sizes(value: object) -> tuple[tuple[int, ...], ...]:
    values = value if isinstance(value, (list, tuple)) else ()
    return tuple(tuple(islice(_integers(size), LONGEST)) for size in values[:LONGEST])


def _integers(value: object) -> Iterator[int]:
    values = value if isinstance(value, (list, tuple)) else ()
    return (number for inner in values if (number := _integer(inner)) is not None)


def _integer(value: object) -> int | None:
    """A 64-bit integer; JSON has some as text."""
    if isinstance(value, str) and len(value) <= 20:
        try:
            return int(value)
        except ValueError:
            return None
    return value if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() < 64 else None


def _text(value: object) -> str:
    """Printable text, or a number as text; otherwise empty."""
    if isinstance(value, str):
        return _printable(value[:LONGEST])
    number = _integer(value)
    return "" if number is None else str(number)


@functools.lru_cache(maxsize=1 << 13)
def _printable(text: str) -> str:
    return text if text.isprintable() else "".join(letter if letter.isprintable() else "?" for letter in text)
