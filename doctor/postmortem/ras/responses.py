"""Answers of NCCL's RAS service, as text (``ncclras``, or port 28028 asked with ``STATUS``) and as JSON.

Both forms are those of NCCL's src/ras/client_support.cc: text since 2.24, JSON since 2.28.7, in some releases with a
comma missing. A file may hold several answers, one after the other.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from itertools import pairwise
from typing import Any, NamedTuple

MOST_ANSWERS, MOST_RANKS = 1000, 1 << 17
LONGEST = 1000
"""Characters of a line that are read."""

STATUS_TEXT = re.compile(r"^(?:NCCL|RCCL) version \S+ compiled with ", re.MULTILINE)
_SUMMARY = re.compile(r"^Job summary\s*\n=+\s*$", re.MULTILINE)
_MISSING_COMMA = re.compile(r'([\d"el}\]])([ \t]*\r?\n[ \t]*)(")')

_ERRORS = {
    1: "Unhandled CUDA error",
    2: "System error",
    3: "Internal error",
    4: "Invalid argument",
    5: "Invalid usage",
    6: "Remote process error",
}
"""nccl.h ncclResult_t; 0 is success and 7 "in progress"."""


class RasProcess(NamedTuple):
    """Who runs a rank: an address, a process id, and the GPU as CUDA and as NVML number it."""

    node: str | None = None
    pid: int | None = None
    device: int | None = None
    nvml: int | None = None


class RasMissingRank(NamedTuple):
    """A rank of which nothing came. ``why``: ``dead``, ``unresponsive``, or ``left`` where its process answered and
    does not know the communicator (any more)."""

    rank: int | None
    process: RasProcess
    why: str
    text: str
    line: int


class RasLaggingRanks(NamedTuple):
    """A rank, or ``ranks`` that nobody names, whose count of an operation is below the ``most`` of the communicator."""

    rank: int | None
    ranks: int
    process: RasProcess
    operation: str
    launched: int
    most: int
    text: str
    line: int


class RasRankStatus(NamedTuple):
    """What a rank is found in: an error (``phase`` ``init`` or ``async``), or a status unlike that of most."""

    rank: int | None
    process: RasProcess
    phase: str
    words: str
    text: str
    line: int


@dataclass
class RasCommunicator:
    """One communicator. ``size``: its ranks; ``members``: those that are known, with who runs them."""

    name: str
    size: int | None = None
    members: dict[int, RasProcess] = field(default_factory=dict)
    missing: list[RasMissingRank] = field(default_factory=list)
    behind: list[RasLaggingRanks] = field(default_factory=list)
    said: list[RasRankStatus] = field(default_factory=list)
    line: int = 1


@dataclass
class RasResponse:
    """One answer. ``gpus``: of the whole job, where it tells. ``missing``: processes that no communicator names."""

    communicators: list[RasCommunicator] = field(default_factory=list)
    missing: list[RasMissingRank] = field(default_factory=list)
    gpus: int | None = None
    at: float | None = None
    line: int = 1


def read_responses(text: str) -> list[RasResponse]:
    """All answers in a text, oldest first."""
    answers = list(_json_answers(text)) if text.lstrip()[:1] == "{" else list(_text_answers(text))
    return answers[-MOST_ANSWERS:]


# JSON.


def _json_answers(text: str) -> Iterator[RasResponse]:
    decoder = json.JSONDecoder()
    place, mended = 0, False
    while (place := text.find("{", place)) >= 0:
        try:
            found, end = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            if mended:
                return
            text, mended = text[:place] + _MISSING_COMMA.sub(r"\1,\2\3", text[place:]), True
            continue
        if isinstance(found, dict) and isinstance(found.get("communicators"), list):
            yield _answer(found, 1 + text.count("\n", 0, place))
        place = end


def _answer(found: Mapping[str, Any], line: int) -> RasResponse:
    answer = RasResponse(at=_time(found.get("timestamp")), line=line)
    for told in _mappings(found.get("communicators")):
        answer.communicators.append(_communicator(told, line))
    devices = {
        (process.node, process.pid, process.device)
        for one in answer.communicators
        for process in (*one.members.values(), *(missing.process for missing in one.missing))
    }
    answer.gpus = len(devices) or None
    return answer


def _time(value: object) -> float | None:
    """Seconds since the epoch; NCCL writes the host's local time without its zone."""
    try:
        return datetime.strptime(str(value), "%Y-%m-%d %H:%M:%S").replace(tzinfo=timezone.utc).timestamp()
    except (ValueError, OverflowError):
        return None


def _communicator(told: Mapping[str, Any], line: int) -> RasCommunicator:
    name = str(told.get("hash") or "")[:40].removeprefix("0x")
    one = RasCommunicator(name, _integer(told.get("size")), line=line)
    counts: dict[int, dict[str, int]] = {}
    for rank in _mappings(told.get("ranks"))[:MOST_RANKS]:
        number = _integer(rank.get("rank"))
        if number is None:
            continue
        one.members[number] = _process(rank)
        counts[number] = {
            str(name)[:40]: count
            for name, value in _mapping(rank.get("collective_counts")).items()
            if (count := _integer(value)) is not None
        }
        one.said.extend(_rank_statuses(number, one.members[number], _mapping(rank.get("status")), line))
    one.behind.extend(_behind(one, counts, line))
    one.missing.extend(_missing(rank, line) for rank in _mappings(told.get("missing_ranks"))[:MOST_RANKS])
    return one


def _rank_statuses(rank: int, process: RasProcess, status: Mapping[str, Any], line: int) -> Iterator[RasRankStatus]:
    for phase, key in (("init", "init_state"), ("async", "async_error")):
        code = _integer(status.get(key))
        if code in _ERRORS:
            yield RasRankStatus(rank, process, phase, _ERRORS[code], f"rank {rank}: {key} {code}", line)
    if status.get("abort_flag") is True:
        yield RasRankStatus(rank, process, "status", "ABORT", f"rank {rank}: abort_flag true", line)


def _behind(one: RasCommunicator, counts: Mapping[int, Mapping[str, int]], line: int) -> Iterator[RasLaggingRanks]:
    operations = dict.fromkeys(name for told in counts.values() for name in told)
    for operation in operations:
        most = max(told.get(operation, 0) for told in counts.values())
        for rank, told in counts.items():
            launched = told.get(operation, 0)
            if launched < most:
                text = f"rank {rank}: {operation} {launched} of {most}"
                yield RasLaggingRanks(rank, 1, one.members[rank], operation, launched, most, text, line)


def _missing(told: Mapping[str, Any], line: int) -> RasMissingRank:
    status = {**told, **_mapping(told.get("status"))}
    why = "dead" if status.get("considered_dead") is True else "unresponsive" if status.get("unresponsive") else "left"
    rank = _integer(told.get("rank"))
    return RasMissingRank(rank, _process(told), why, f"rank {rank} is missing: {why}", line)


def _process(told: Mapping[str, Any]) -> RasProcess:
    node = told.get("host")
    return RasProcess(
        node[:100] if isinstance(node, str) and node != "unknown" else None,
        _integer(told.get("pid")),
        _integer(told.get("cuda_dev")),
        _integer(told.get("nvml_dev")),
    )


def _integer(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62 else None


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _mappings(value: object) -> list[Mapping[str, Any]]:
    return [inner for inner in value if isinstance(inner, dict)] if isinstance(value, list) else []


# Text.

_GROUP = re.compile(r"^ *(\d+) +\d+ +\d+ +[\d-]+ +(\d+) +\d+ +[A-Z]+ +[A-Z,]+$")
_TITLE = re.compile(r"^#(\d+)-(\d+) \(([0-9a-f]+)\) (INCOMPLETE|ERROR|MISMATCH)$")
_RUN_BY = r"GPU (?P<device>\d+)(?: \(NVML (?P<nvml>\d+)\))? managed by process (?P<pid>\d+) on node (?P<node>\S+)"
_RANK = re.compile(
    r"^  Rank (?P<rank>\d+)(?: (?:has status (?P<status>[A-Z]+)|reported (?P<error>[A-Z][\w ]+?)"
    r"|has launched up to operation (?P<launched>\d+)|has (?P<none>not) launched any operations))?"
    rf" -- (?:{_RUN_BY}|\[process information not found\])$"
)
_PROCESS = re.compile(r"^  Process (?P<pid>\d+) on node (?P<node>\S+) managing GPUs? (?P<device>\d+)?")
_SEVERAL = re.compile(
    r"^  (?P<ranks>\d+) ranks (?:have status (?P<status>[A-Z]+)|reported (?P<error>[A-Z][\w ]+)"
    r"|have launched up to operation (?P<launched>\d+)|have (?P<none>not) launched any operations)$"
)
_OPERATION = re.compile(r"^  Communicator ranks have different (\w+) operation counts$")
_TOTALS = re.compile(r"^ *\d+ +(?:\d+ +\d+ +)?(\d+) +(\d+)$")


def _text_answers(text: str) -> Iterator[RasResponse]:
    lines = text.splitlines()
    starts = [place for place, line in enumerate(lines) if STATUS_TEXT.match(line)]
    starts = starts or [place for place, line in enumerate(lines) if line.startswith("Job summary")]
    for start, end in pairwise([*starts, len(lines)]):
        yield _RasTextResponse(lines[start:end], start + 1).answer


class _RasTextResponse:
    """One answer while it is read, line by line."""

    def __init__(self, lines: Sequence[str], first: int) -> None:
        self.answer = RasResponse(line=first)
        self._sizes: dict[str, int] = {}
        self._by_name: dict[str, RasCommunicator] = {}
        self._one: RasCommunicator | None = None
        self._part = ""
        self._operation = ""
        self._counts: list[tuple[int | None, int, RasProcess, int, str, int]] = []
        self._several: tuple[str, str | int | None] = ("", None)
        for number, line in enumerate(lines, first):
            self._take(line[:LONGEST].rstrip(), number)
        self._settle()

    def _take(self, line: str, number: int) -> None:
        if (title := _TITLE.match(line)) is not None:
            self._begin(title, number)
        elif line in ("INCOMPLETE", "DEAD", "TIMEOUT"):
            self._settle()
            self._part, self._one = line, None
        elif found := _GROUP.match(line):
            self._sizes[found[1]] = int(found[2][:7])
        elif (found := _TOTALS.match(line)) and not self._sizes:
            self.answer.gpus = int(found[2][:7])
        elif found := _OPERATION.match(line):
            self._settle()
            self._operation = found[1]
        elif "rrors on " in line or "rror on " in line:
            self._part = "init" if line.startswith("  Init") else "async"
        elif found := _SEVERAL.match(line):
            self._many(found, line, number)
        elif found := _RANK.match(line):
            self._rank(found, line, number)
        elif (found := _PROCESS.match(line)) and self._part in ("INCOMPLETE", "DEAD"):
            process = RasProcess(found["node"], int(found["pid"][:10]), _number(found["device"]))
            why = "dead" if self._part == "DEAD" else "unresponsive"
            self.answer.missing.append(RasMissingRank(None, process, why, line.strip(), number))

    def _begin(self, title: re.Match[str], number: int) -> None:
        self._settle()
        name = title[3].lstrip("0") or "0"
        if name not in self._by_name:
            self._by_name[name] = RasCommunicator(name, self._sizes.get(title[1]), line=number)
            self.answer.communicators.append(self._by_name[name])
        self._one, self._part, self._several = self._by_name[name], title[4], ("", None)

    def _many(self, found: re.Match[str], line: str, number: int) -> None:
        """Several ranks at once; who they are follows where they are few."""
        count = 0 if found["none"] else _number(found["launched"])
        if found["status"]:
            self._several = ("status", found["status"])
        elif found["error"]:
            self._several = ("error", found["error"].strip())
        elif count is not None:
            self._several = ("launched", count)
            self._counts.append((None, int(found["ranks"][:7]), RasProcess(), count, line.strip(), number))

    def _rank(self, found: re.Match[str], line: str, number: int) -> None:
        if self._one is None:
            return
        rank = int(found["rank"][:7])
        process = RasProcess(
            found["node"], _number(found["pid"]), _number(found["device"]), _number(found["nvml"] or found["device"])
        )
        self._one.members[rank] = process
        if self._part == "INCOMPLETE":
            self._one.missing.append(RasMissingRank(rank, process, "unresponsive", line.strip(), number))
            return
        kind, value = self._kind(found)
        if kind == "launched" and isinstance(value, int):
            self._name(rank, process, value, line.strip(), number)
        elif kind == "status" and value not in ("RUNNING", None):
            self._one.said.append(RasRankStatus(rank, process, "status", str(value), line.strip(), number))
        elif kind == "error":
            self._one.said.append(RasRankStatus(rank, process, self._part, str(value), line.strip(), number))

    def _kind(self, found: re.Match[str]) -> tuple[str, str | int | None]:
        if found["status"]:
            return "status", found["status"]
        if found["error"]:
            return "error", found["error"].strip()
        if found["launched"] or found["none"]:
            self._several = ("", None)
            return "launched", 0 if found["none"] else _number(found["launched"])
        return self._several

    def _name(self, rank: int, process: RasProcess, launched: int, text: str, number: int) -> None:
        """A rank by its name, no longer one of several."""
        last = self._counts[-1] if self._counts else None
        if last and last[0] is None and last[3] == launched and last[1]:
            self._counts[-1] = (*last[:1], last[1] - 1, *last[2:])
            self._counts.insert(len(self._counts) - 1, (rank, 1, process, launched, text, number))
        else:
            self._counts.append((rank, 1, process, launched, text, number))

    def _settle(self) -> None:
        """The counts of one operation are complete."""
        most = max((one[3] for one in self._counts), default=0)
        for rank, ranks, process, launched, text, number in self._counts:
            if self._one is not None and ranks and launched < most:
                self._one.behind.append(
                    RasLaggingRanks(rank, ranks, process, self._operation, launched, most, text, number)
                )
        self._counts, self._operation, self._several = [], "", ("", None)


def _number(text: str | None) -> int | None:
    return int(text[:15]) if text else None


def is_status_text(head: str) -> bool:
    """Whether a text that begins so is an answer, and no log that holds one."""
    beginning = head[:4000]
    return STATUS_TEXT.search(beginning) is not None and _SUMMARY.search(beginning) is not None


def is_status_json(head: str) -> bool:
    """The same for JSON."""
    return '"communicators"' in head and ('"nccl_version"' in head or '"missing_ranks' in head)
