"""A job as a JSON document and back, so that it can be checked later or elsewhere; nothing in it is ever executed.

``{"schema": 1, "kind": "capture", "tool", "created", "launcher", "world_size", "absent", "last_seen",
"hosts": [{"name", "boot_id", "machine_id", "facts", "missing"}], "ranks": [{"rank", "host", "facts", "missing"}]}``;
``facts`` holds sections by their key, ``missing`` the reasons for missing ones, ``host`` is an index of ``hosts``. The
baseline of a job is ``"expected"``, a capture within the capture, so that both get the same placeholders.

The record that a rank keeps in a run is the same document with ``"kind": "record"`` and ``"run"``, the id of that run.
It holds that rank, and the ranks that stopped responding, as this rank observed them.
"""

from __future__ import annotations

import datetime
import hashlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from doctor.core.clock import time
from doctor.core.decoding import prepared
from doctor.core.errors import UnusableError
from doctor.core.facts import SECTIONS, HostFacts, LaunchFacts, Level, LogEvidence, Missing, ProcessFacts, Section
from doctor.core.job import Job, LastSeen, Member, SectionHolder, build_job
from doctor.core.masking import holds_secret, mask_document, mask_text, masked_builtins
from doctor.core.report_document import ReportTool

SCHEMA = 1
RANK_LIMIT = 4 << 20
"""The largest size of the facts of one rank and its host, in bytes. Real ones take some tens of kilobytes."""
FILE_LIMIT = 1 << 30
"""The largest size of a capture file, in bytes."""
WORLD_LIMIT = 1 << 22
"""The largest world size of a document: far beyond any job, and small enough to iterate over."""
LARGEST_NUMBER = 1 << 62
"""A rank may be out of range, which is a finding, but every reader of JSON must be able to hold it."""


class SectionData(msgspec.Struct):
    """Sections by their keys: the ``facts``, and for ``missing`` ones the reasons."""

    facts: dict[str, msgspec.Raw] = {}
    missing: dict[str, Missing] = {}


class CapturedHost(SectionData):
    """A host of a document: its ids, and the sections that its processes share."""

    name: str = ""
    boot_id: str | None = None
    machine_id: str | None = None


class CapturedRank(SectionData, kw_only=True):
    """A process of a document: its ``rank``, the index of its ``host`` in ``hosts``, and its own sections."""

    rank: int
    host: int = 0


class CapturedLastSeen(msgspec.Struct):
    """A rank that stopped responding: its ``host``, and the last ``step`` that it reported."""

    rank: int
    host: str = ""
    step: str = ""


class JobDocument(msgspec.Struct, kw_only=True):
    """The processes of a job, as readers accept them; writers leave no field out but ``last_seen``."""

    hosts: list[CapturedHost]
    ranks: list[CapturedRank]
    kind: str = ""
    run: str = ""
    created: str = ""
    launcher: str = "none"
    world_size: int = 1
    absent: list[int] = []
    last_seen: list[CapturedLastSeen] = []


class CaptureDocument(JobDocument, kw_only=True):
    """The facts that the processes of a job collected.

    ``created``: ISO 8601. ``absent``: ranks that were not gathered. ``last_seen``: ranks that stopped responding.
    ``run``: the id of a monitored run, in records. ``expected``: the baseline of the job. ``evidence``: events of its
    logs."""

    schema: object = None
    expected: JobDocument | None = None
    evidence: LogEvidence | None = None


class Capture(msgspec.Struct, frozen=True):
    """The processes of a capture and its statements about the job. ``run``: the id of the run, for a record."""

    members: tuple[Member, ...]
    world_size: int
    launcher: str
    absent: tuple[int, ...]
    created: str
    last_seen: tuple[LastSeen, ...] = ()
    expected: Capture | None = None
    run: str | None = None
    evidence: LogEvidence | None = None

    def job(self) -> Job:
        """Return the job of this capture alone."""
        return build_job(
            self.members,
            world_size=self.world_size,
            launcher=self.launcher,
            absent=self.absent,
            last_seen=self.last_seen,
            expected=self.expected.job() if self.expected else None,
            captured=self.created,
            evidence=self.evidence,
        )


class EncodedSections:
    """Sections as JSON with secrets masked, which are encoded again only if they differ from those of the last time.

    For a document of one process that is written again and again: most of its facts never change.
    """

    def __init__(self) -> None:
        self._known: dict[str, tuple[Section | Missing, msgspec.Raw]] = {}

    def encoded(self, key: str, section: Section | Missing) -> msgspec.Raw:
        """Return the section under that key as JSON."""
        known = self._known.get(key)
        if known is None or (known[0] is not section and known[0] != section):
            shown = section if not holds_secret([section]) else masked_builtins(section)
            known = self._known[key] = section, msgspec.Raw(msgspec.json.encode(shown))
        return known[1]


def to_document(
    job: Job, created: datetime.datetime | None = None, encoded: EncodedSections | None = None
) -> dict[str, Any]:
    """Return the job as builtins with secrets masked. ``created``: by default when its facts were collected, or now.
    ``encoded``: of a job of one process, which has each section once; they are returned as JSON then."""
    moment = created or datetime.datetime.fromtimestamp(time(), datetime.timezone.utc)
    collected = job.captured if created is None else ""
    head = {
        "schema": SCHEMA,
        "kind": "capture",
        "tool": msgspec.to_builtins(ReportTool()),
        "created": collected or moment.isoformat(timespec="seconds"),
        "launcher": job.launcher,
        "world_size": job.world_size,
        "absent": list(job.absent),
        **({"last_seen": [msgspec.structs.asdict(seen) for seen in job.last_seen]} if job.last_seen else {}),
    }
    names = [{"name": host.name, "boot_id": host.boot_id, "machine_id": host.machine_id} for host in job.hosts]
    return {
        **mask_document(head),
        "hosts": [
            mask_document(name) | _section_data(host, encoded) for name, host in zip(names, job.hosts, strict=True)
        ],
        "ranks": [{"rank": rank.number, "host": rank.host.index, **_section_data(rank, encoded)} for rank in job.ranks],
        **({"expected": to_document(job.expected)} if job.expected else {}),
        **({"evidence": masked_builtins(job.evidence)} if job.evidence else {}),
    }


def to_record(job: Job, run: str) -> dict[str, Any]:
    """Return the record that a process keeps of the job, as it observed it, in the run of that id."""
    document = to_document(job) | {"kind": "record"}
    return {"schema": SCHEMA, "kind": "record", "run": run, **document}


REPORT, PAGE, EARLIER = "report.json", "report.html", "earlier"
"""In the directory of a watched run: its report, the same as a page, and the folder that those and records of earlier
runs are moved to, each run to one by its id."""


def same_run(one: str, other: str) -> bool:
    """Whether two ids may be of one run. A rank without contact to others has only the part that all ranks derive."""
    apart = "-" in one and "-" in other
    return one == other or (not apart and bool(one) and one.partition("-")[0] == other.partition("-")[0])


def _section_data(bearer: SectionHolder, encoded: EncodedSections | None) -> dict[str, Any]:
    sections = bearer.sections.items()
    shown = _masked if encoded is None else encoded.encoded
    return {
        "facts": {key: shown(key, value) for key, value in sections if isinstance(value, Section)},
        "missing": {key: shown(key, value) for key, value in sections if isinstance(value, Missing)},
    }


def _masked(_: str, section: Section | Missing) -> Any:
    return masked_builtins(section)


def encode_document(document: Mapping[str, Any]) -> bytes:
    """Return the document as indented JSON with a final line break."""
    return msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n"


def file_name(job: Job, *, redacted: bool = False) -> str:
    """Return the file name of a process's capture in a folder that its job shares, such as ``rank-3.json``.

    If the launcher's number differs from RANK (RANK exported before srun), the name contains both, so that no process
    overwrites the file of another. A process without a rank is named after its host; a gathered job is ``job.json``.
    """
    if len(job.ranks) != 1:
        return "job.json"
    rank = job.ranks[0]
    launch = rank.find(LaunchFacts)
    if launch is None or launch.rank is None:
        identity = hashlib.sha256(repr(rank.host.identity).encode()).hexdigest()[:12]
        return f"host-{identity if redacted else re.sub(r'[^A-Za-z0-9.-]', '_', rank.host.name)}.json"
    own = launch.claim(launch.launcher)
    task = f"-task-{own.rank}" if own and own.rank not in (None, launch.rank) else ""
    return f"rank-{launch.rank}{task}.json"


def from_document(document: Mapping[str, Any]) -> Job:
    """Return the job in a document of :func:`to_document`."""
    return parse_capture(msgspec.json.encode(document), "document", masked=True).job()


def read_capture(path: Path) -> Capture:
    """Read the capture in a file.

    Raises:
        UnusableError: it can't be read, is not a capture, has another schema, is too large or malformed.
    """
    try:
        if path.stat().st_size > FILE_LIMIT:
            raise UnusableError(f"{path} is larger than {FILE_LIMIT >> 30} GiB")
        data = path.read_bytes()
    except OSError as error:
        raise UnusableError(f"cannot read {path}: {error.strerror or error}") from error
    return parse_capture(data, str(path))


class DecodedSections:
    """Sections of the capture that was decoded last, which are not decoded again while their bytes are the same.

    For captures of one process that arrive again and again. Bytes are compared by their hash: keeping them would double
    what the sections take.
    """

    def __init__(self) -> None:
        self.known: dict[tuple[str, bytes], Section] = {}


def parse_capture(data: bytes, name: str, *, masked: bool = False, decoded: DecodedSections | None = None) -> Capture:
    """Decode the capture in ``data``, called ``name`` in messages; the errors are those of :func:`read_capture`.

    ``masked``: its secrets are already masked, because this release wrote it; otherwise they are masked here.
    ``decoded``: sections of the capture before, replaced by those of this one.
    """
    try:
        document = _decode_document(data, name)
        decoder = _SectionDecoder(decoded)
        capture = msgspec.structs.replace(_assemble(document, name, decoder), evidence=document.evidence)
        if document.expected is not None:
            expected = _assemble(document.expected, f"{name} (what it expects)", decoder)
            capture = msgspec.structs.replace(capture, expected=expected)
        if masked or not holds_secret([document, *decoder.sections.values()]):
            return capture
        plain = mask_document(msgspec.json.decode(data))
        return parse_capture(msgspec.json.encode(plain), name, masked=True)
    except RecursionError:
        raise UnusableError(f"{name} is nested too deeply to be a capture") from None
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise UnusableError(f"cannot read {name}: not a valid capture ({mask_text(str(error))})") from None


def _decode_document(data: bytes, name: str) -> CaptureDocument:
    try:
        document = msgspec.json.decode(data, type=prepared(CaptureDocument))
    except msgspec.ValidationError:  # if it has another kind or schema, that is the better message
        plain = msgspec.json.decode(data)
        _require_schema(plain.get("kind"), plain.get("schema"), name) if isinstance(plain, dict) else None
        raise
    _require_schema(document.kind or None, document.schema, name)
    return document


def _require_schema(kind: object, schema: object, name: str) -> None:
    if kind not in ("capture", "record"):
        raise UnusableError(f"{name} is not a capture: its kind is {_short(kind)!r}")
    if schema != SCHEMA:
        raise UnusableError(f"{name} has schema {_short(schema)}; this release reads schema {SCHEMA}")


def _short(value: object) -> str:
    return " ".join(str(value).split())[:40]


def _assemble(document: JobDocument, name: str, decoder: _SectionDecoder) -> Capture:
    logs_alone = not document.ranks and isinstance(document, CaptureDocument) and document.evidence is not None
    if not (0 if logs_alone else 1) <= document.world_size <= WORLD_LIMIT or len(document.absent) > WORLD_LIMIT:
        raise UnusableError(f"{name} claims a world of {document.world_size} ranks")
    if not document.ranks and not logs_alone:
        raise UnusableError(f"{name} contains no rank")
    sizes = [sum(map(len, map(bytes, host.facts.values()))) for host in document.hosts]
    hosts = [decoder.decode(host, "host", name) for host in document.hosts]
    members = []
    for rank in document.ranks:
        if abs(rank.rank) > LARGEST_NUMBER:
            raise UnusableError(f"{name} contains a rank number that is too large")
        if not 0 <= rank.host < len(hosts):
            raise UnusableError(f"{name}: rank {rank.rank} refers to host {rank.host} of {len(hosts)}")
        size = sizes[rank.host] + sum(map(len, map(bytes, rank.facts.values())))
        if size > RANK_LIMIT:
            raise UnusableError(
                f"{name} holds {size >> 20} MB of facts for rank {rank.rank}; more than 4 MB are refused"
            )
        home = document.hosts[rank.host]
        told = (home.boot_id, home.machine_id, home.name) if home.name else None
        members.append(Member(rank.rank, {**hosts[rank.host], **decoder.decode(rank, "rank", name)}, told))
    if not all(0 <= rank < document.world_size for rank in document.absent):
        raise UnusableError(f"{name} misses ranks that a world of {document.world_size} does not have")
    absent = tuple(sorted(set(document.absent)))
    seen = tuple(LastSeen(one.rank, one.host, one.step) for one in document.last_seen)
    run = document.run if document.kind == "record" else None
    return Capture(tuple(members), document.world_size, document.launcher, absent, document.created, seen, run=run)


def section_keys(level: Level) -> list[str]:
    """The keys of the sections that a host or a rank may have. A rank may have its own part of a section of its host
    (:meth:`Section.part`)."""
    sections = SECTIONS.items()
    if level == "host":
        return [key for key, section in sections if section.level == "host"]
    return [key for key, section in sections if section.level == "rank" or section.part is not Section.part]


class _SectionDecoder:
    """Decodes sections; equal bytes become one object, so that a job of thousands of similar ranks stays small."""

    def __init__(self, decoded: DecodedSections | None = None) -> None:
        self.sections: dict[tuple[str, bytes], Section] = {}
        self._reasons: dict[Missing, Missing] = {}
        self._known = {"host": set(section_keys("host")), "rank": set(section_keys("rank"))}
        self._before: dict[tuple[str, bytes], Section] = {}
        if decoded is not None:
            self._before, decoded.known = decoded.known, self.sections
        self._is_kept = decoded is not None

    def decode(self, raw: SectionData, level: str, name: str) -> dict[str, Section | Missing]:
        """Return the sections of ``level`` that this release knows."""
        known = self._known[level]
        found: dict[str, Section | Missing] = {}
        for key, reason in raw.missing.items():
            if key in known:
                found[key] = self._reasons.setdefault(reason, reason)
        for key, encoded in raw.facts.items():
            if key in known:
                data = bytes(encoded)
                identity = key, hashlib.blake2b(data, digest_size=16).digest() if self._is_kept else data
                section = self.sections.get(identity) or self._before.get(identity)
                found[key] = self.sections[identity] = section or self._decode_section(key, data, name)
        return found

    def _decode_section(self, key: str, data: bytes, name: str) -> Section:
        try:
            section: Section = msgspec.json.decode(data, type=prepared(SECTIONS[key]))
        except msgspec.ValidationError as error:
            raise UnusableError(f"{name} is malformed in {key}: {mask_text(str(error))}") from None
        return section


def merge_captures(captures: Iterable[Capture]) -> Job:
    """Build one job from several captures.

    Of two captures of one process, the later one counts. Processes that ran alone and have no rank (login nodes,
    laptops) are numbered in the given order. A capture of a rank from before a run fills the gaps of its record.
    """
    captures = sorted(captures, key=lambda capture: capture.created)
    watched = {one.rank: one for capture in captures if capture.run is not None for one in capture.members}
    newest: dict[object, Member] = {}
    for capture in captures:
        for member in capture.members if capture.run is None else ():
            process = member.sections.get(ProcessFacts.key)
            own = (process.pid, process.namespace("pid")) if isinstance(process, ProcessFacts) else None
            newest[member.rank, _host_of(member), own] = member
    members = [*_numbered(_apart_from(watched, newest.values())), *watched.values()]
    stated = [
        capture.world_size
        for capture in captures
        if capture.run is not None or any(launch.running_together for launch in map(_launch, capture.members) if launch)
    ]
    absent = {rank for capture in captures for rank in capture.absent} - {member.rank for member in members}
    launchers = [capture.launcher for capture in captures if capture.launcher != "none"]
    return build_job(
        members,
        world_size=max(stated, default=len(members)),
        launcher=launchers[0] if launchers else "none",
        absent=absent,
        last_seen=[seen for capture in captures for seen in capture.last_seen],
        captured=captures[-1].created if captures else "",
    )


def _apart_from(watched: dict[int, Member], captured: Iterable[Member]) -> list[Member]:
    """The captured processes without a record; the others are merged into their record if the host is the same."""
    apart = []
    for member in captured:
        record = watched.get(member.rank)
        if record is None or not _bears_rank(member) or _host_of(member) != _host_of(record):
            apart.append(member)
        else:
            read = {key: value for key, value in record.sections.items() if isinstance(value, Section)}
            watched[member.rank] = record._replace(sections={**record.sections, **member.sections, **read})
    return apart


def _host_of(member: Member) -> object:
    host = member.sections.get(HostFacts.key)
    return (host.boot_id, host.hostname) if isinstance(host, HostFacts) else None


def _numbered(members: list[Member]) -> list[Member]:
    """Give processes without a rank the unused numbers."""
    lone = [member for member in members if not _bears_rank(member)]
    if len(lone) < 2 and len(lone) == len(members):
        return members
    taken = {member.rank for member in members if _bears_rank(member)}
    free = iter(number for number in range(len(members) + len(taken)) if number not in taken)
    return [member if _bears_rank(member) else member._replace(rank=next(free)) for member in members]


def _launch(member: Member) -> LaunchFacts | None:
    launch = member.sections.get(LaunchFacts.key)
    return launch if isinstance(launch, LaunchFacts) else None


def _bears_rank(member: Member) -> bool:
    launch = _launch(member)
    return launch is not None and launch.rank is not None
