"""Parser of responses of NCCL's RAS service (``ncclras``), in text and JSON.

Formats: src/ras/client_support.cc of NCCL; text since 2.24, JSON since 2.28.7, where some releases omit a comma. A file
may contain several responses.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from itertools import islice, pairwise
from typing import Any, NamedTuple

MOST_RESPONSES, MOST_RANKS, MOST_OPERATIONS = 1000, 1 << 17, 32
"""Maximum numbers of what is read; NCCL counts five operations."""
LONGEST = 1000
"""Maximum characters of a line that are read."""

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
"""ncclResult_t of nccl.h; 0 is success, 7 is "in progress"."""


class RasProcess(NamedTuple):
    """The process of a rank: address, process id, and the index of its GPU in CUDA and in NVML."""

    node: str | None = None
    pid: int | None = None
    device: int | None = None
    nvml: int | None = None


class RasMissingRank(NamedTuple):
    """A rank that did not report: ``dead``, ``unresponsive``, or ``left`` the communicator."""

    rank: int | None
    process: RasProcess
    why: str
    text: str
    line: int


class RasLaggingRanks(NamedTuple):
    """A rank, or a number of unnamed ``ranks``, with fewer launches than ``most``."""

    rank: int | None
    ranks: int
    process: RasProcess
    operation: str
    launched: int
    most: int
    text: str
    line: int


class RasRankStatus(NamedTuple):
    """The state of a rank: an error (``phase`` ``init`` or ``async``), or a deviating status."""

    rank: int | None
    process: RasProcess
    phase: str
    words: str
    text: str
    line: int


@dataclass
class RasCommunicator:
    """One communicator. ``size``: number of ranks; ``members``: processes of the known ones."""

    name: str
    size: int | None = None
    members: dict[int, RasProcess] = field(default_factory=dict)
    missing: list[RasMissingRank] = field(default_factory=list)
    lagging: list[RasLaggingRanks] = field(default_factory=list)
    statuses: list[RasRankStatus] = field(default_factory=list)
    line: int = 1


@dataclass
class RasResponse:
    """One response. ``gpus``: of the whole job; ``missing``: processes in no communicator."""

    communicators: list[RasCommunicator] = field(default_factory=list)
    missing: list[RasMissingRank] = field(default_factory=list)
    gpus: int | None = None
    at: float | None = None
    line: int = 1


def read_responses(text: str) -> list[RasResponse]:
    """Parse all responses in a text, oldest first."""
    responses = _json_responses(text) if text.lstrip()[:1] == "{" else _text_responses(text)
    return list(responses)[-MOST_RESPONSES:]


# JSON.


def _json_responses(text: str) -> Iterator[RasResponse]:
    decoder = json.JSONDecoder()
    place, repaired = 0, False
    while (place := text.find("{", place)) >= 0:
        try:
            found, end = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            if repaired:
                return
            text, repaired = text[:place] + _MISSING_COMMA.sub(r"\1,\2\3", text[place:]), True
            continue
        if isinstance(found, dict) and isinstance(found.get("communicators"), list):
            yield _response(found, 1 + text.count("\n", 0, place))
        place = end


def _response(found: Mapping[str, Any], line: int) -> RasResponse:
    communicators = [_communicator(fields, line) for fields in _mappings(found.get("communicators"))]
    devices = {
        process[:3]
        for one in communicators
        for process in (*one.members.values(), *(missing.process for missing in one.missing))
    }
    at = None
    with contextlib.suppress(ValueError, OverflowError):
        # NCCL writes the host's local time without a zone.
        moment = datetime.strptime(str(found.get("timestamp")), "%Y-%m-%d %H:%M:%S")
        at = moment.replace(tzinfo=timezone.utc).timestamp()
    return RasResponse(communicators, gpus=len(devices) or None, at=at, line=line)


def _communicator(fields: Mapping[str, Any], line: int) -> RasCommunicator:
    name = str(fields.get("hash") or "")[:40].removeprefix("0x")
    one = RasCommunicator(name, _integer(fields.get("size")), line=line)
    counts: dict[int, dict[str, int]] = {}
    for rank in _mappings(fields.get("ranks"))[:MOST_RANKS]:
        number = _integer(rank.get("rank"))
        if number is None:
            continue
        one.members[number] = _process(rank)
        counts[number] = {
            str(name)[:40]: count
            for name, value in _mapping(rank.get("collective_counts")).items()
            if (count := _integer(value)) is not None
        }
        one.statuses.extend(_rank_statuses(number, one.members[number], _mapping(rank.get("status")), line))
    one.lagging.extend(_lagging(one, counts, line))
    one.missing.extend(_missing(rank, line) for rank in _mappings(fields.get("missing_ranks"))[:MOST_RANKS])
    return one


def _rank_statuses(rank: int, process: RasProcess, status: Mapping[str, Any], line: int) -> Iterator[RasRankStatus]:
    for phase, key in (("init", "init_state"), ("async", "async_error")):
        code = _integer(status.get(key))
        if code in _ERRORS:
            yield RasRankStatus(rank, process, phase, _ERRORS[code], f"rank {rank}: {key} {code}", line)
    if status.get("abort_flag") is True:
        yield RasRankStatus(rank, process, "status", "ABORT", f"rank {rank}: abort_flag true", line)


def _lagging(one: RasCommunicator, counts: Mapping[int, Mapping[str, int]], line: int) -> Iterator[RasLaggingRanks]:
    for operation in islice(dict.fromkeys(name for own in counts.values() for name in own), MOST_OPERATIONS):
        most = max(own.get(operation, 0) for own in counts.values())
        for rank, own in counts.items():
            launched = own.get(operation, 0)
            if launched < most:
                text = f"rank {rank}: {operation} {launched} of {most}"
                yield RasLaggingRanks(rank, 1, one.members[rank], operation, launched, most, text, line)


def _missing(fields: Mapping[str, Any], line: int) -> RasMissingRank:
    status = {**fields, **_mapping(fields.get("status"))}
    why = "dead" if status.get("considered_dead") is True else "unresponsive" if status.get("unresponsive") else "left"
    rank = _integer(fields.get("rank"))
    return RasMissingRank(rank, _process(fields), why, f"rank {rank} is missing: {why}", line)


def _process(fields: Mapping[str, Any]) -> RasProcess:
    node = fields.get("host")
    return RasProcess(
        node[:100] if isinstance(node, str) and node != "unknown" else None,
        *(_integer(fields.get(key)) for key in ("pid", "cuda_dev", "nvml_dev")),
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


def _text_responses(text: str) -> Iterator[RasResponse]:
    lines = text.splitlines()
    starts = [place for place, line in enumerate(lines) if STATUS_TEXT.match(line)]
    starts = starts or [place for place, line in enumerate(lines) if line.startswith("Job summary")]
    for start, end in pairwise([*starts, len(lines)]):
        yield _RasTextResponse(lines[start:end], start + 1).response


class _RasTextResponse:
    """The parser of one response. ``_several``: the state of the ranks that the next lines list."""

    def __init__(self, lines: Sequence[str], first: int) -> None:
        self.response = RasResponse(line=first)
        self._sizes: dict[str, int] = {}
        self._by_name: dict[str, RasCommunicator] = {}
        self._one: RasCommunicator | None = None
        self._part = ""
        self._operation = ""
        self._counts: list[RasLaggingRanks] = []
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
            self.response.gpus = int(found[2][:7])
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
            self.response.missing.append(RasMissingRank(None, process, why, line.strip(), number))

    def _begin(self, title: re.Match[str], number: int) -> None:
        self._settle()
        name = title[3].lstrip("0") or "0"
        if name not in self._by_name:
            self._by_name[name] = RasCommunicator(name, self._sizes.get(title[1]), line=number)
            self.response.communicators.append(self._by_name[name])
        self._one, self._part, self._several = self._by_name[name], title[4], ("", None)

    def _many(self, found: re.Match[str], line: str, number: int) -> None:
        """Process the state of several ranks; the next lines list them if they are few."""
        kind, value = self._several = _state(found)
        if kind == "launched" and isinstance(value, int):
            ranks, process = int(found["ranks"][:7]), RasProcess()
            self._counts.append(RasLaggingRanks(None, ranks, process, self._operation, value, 0, line.strip(), number))

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
        kind, value = _state(found)
        if kind == "launched":
            self._several = ("", None)
        elif not kind:
            kind, value = self._several
        if kind == "launched" and isinstance(value, int):
            self._count(RasLaggingRanks(rank, 1, process, self._operation, value, 0, line.strip(), number))
        elif kind == "status" and value not in ("RUNNING", None):
            self._one.statuses.append(RasRankStatus(rank, process, "status", str(value), line.strip(), number))
        elif kind == "error":
            self._one.statuses.append(RasRankStatus(rank, process, self._part, str(value), line.strip(), number))

    def _count(self, one: RasLaggingRanks) -> None:
        """Add the count of a named rank, which is no longer one of several."""
        last = self._counts[-1] if self._counts else None
        if last and last.rank is None and last.launched == one.launched and last.ranks:
            self._counts[-1:] = [one, last._replace(ranks=last.ranks - 1)]
        else:
            self._counts.append(one)

    def _settle(self) -> None:
        most = max((one.launched for one in self._counts), default=0)
        if self._one is not None:
            self._one.lagging += [one._replace(most=most) for one in self._counts if one.ranks and one.launched < most]
        self._counts, self._operation, self._several = [], "", ("", None)


def _state(found: re.Match[str]) -> tuple[str, str | int | None]:
    if found["status"]:
        return "status", found["status"]
    if found["error"]:
        return "error", found["error"].strip()
    if found["launched"] or found["none"]:
        return "launched", 0 if found["none"] else _number(found["launched"])
    return "", None


def _number(text: str | None) -> int | None:
    return int(text[:15]) if text else None


def is_status_text(head: str) -> bool:
    """Return whether a text with this beginning is a response, and not a log that contains one."""
    beginning = head[:4000]
    return STATUS_TEXT.search(beginning) is not None and _SUMMARY.search(beginning) is not None


def is_status_json(head: str) -> bool:
    """Return whether ``head`` is the beginning of a response in JSON."""
    return '"communicators"' in head and ('"nccl_version"' in head or '"missing_ranks' in head)
