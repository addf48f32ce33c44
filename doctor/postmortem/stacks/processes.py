"""The processes in all files of stacks of a run: their samples, hosts, roles and ranks."""

from __future__ import annotations

import datetime as dt
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from doctor.analysis.attached_job import attached_job
from doctor.core.facts import AttachedProcess, AttachFacts, ProcessSample, ProgressFacts, RecorderFacts
from doctor.core.frames import waits_in
from doctor.core.job import UNKNOWN_HOST, Member, build_job
from doctor.core.masking import mask_text
from doctor.core.text import natural_key
from doctor.knowledge.training_processes import AGENT_MODULES, AGENT_SCRIPTS
from doctor.postmortem.filenames import rank_in_name, shown_path
from doctor.postmortem.stacks.collected import NUMBER, DumpedProcess, join_samples, read_stacks
from doctor.postmortem.stacks.headings import LOCAL_VARIABLES, RANK_VARIABLES, SIZE_VARIABLES
from doctor.postmortem.stacks.py_spy_text import PARENT

BY_NAME = "file name"
BY_HEADING = "heading in the file"
BY_COMMAND = "command line"
BY_TITLE = "title of the process"
BY_LOCALS = "local variables"
BY_LABEL = "label of the lines"
BY_ORDER = "order of the PIDs"
"""``rank_from`` of numbers that no variable gave."""
MOST_RANKS = 1 << 17
LONGEST = 300
"""Characters of a refusal, a host or a program that are kept."""
_STAMP = re.compile(r"(?<!\d)(20\d{6})[-_T]?(\d{6})(?!\d)")
_GENERIC = re.compile(
    r"(?:py-?spy|pystack|gdb|bt|py|spy|stacks?|dumps?|traces?|threads?|backtraces?|tracebacks?|faulthandler|ray|rank|pid|"
    r"proc|process|local|global|log|out|err|sample|round|run|step|time|t|part|hang|hung|native|locals|json|txt){0,6}\d*$",
    re.IGNORECASE,
)
"""Words of a file name that are not a host name."""
_HOST_LIKE = re.compile(r"[A-Za-z](?=[A-Za-z.-]*\d)[A-Za-z0-9.-]*$|[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+){2,}$")
_RANK_OPTION = re.compile(r"--(?:global[-_])?rank[= ](\d{1,7})(?!\d)")
_TASK = re.compile(r"(?:\[\d{1,7},)?(\d{1,7})\]?")
"""The label of ``srun --label`` and of ``mpirun --tag-output``."""
_LOCAL_OPTION = re.compile(r"--local[-_]rank[= ](\d{1,7})(?!\d)")
_FILE = re.compile(r"\.(?:txt|log|out|err|dump|stacks?)$")
_NATIVE_GPU = re.compile(r"(?:nccl|cuda|cu[A-Z]|hip[A-Z])\w*")

_TITLE = re.compile(r"(?:sglang::scheduler|VLLM::Worker)(?P<places>(?:_[A-Z]{2,4}\d{1,5})+)\b")
_PLACE = re.compile(r"_(PP|TP)(\d{1,5})")
"""The places in pipeline and tensor parallelism in titles of workers (sglang/srt/managers/scheduler.py,
vllm/v1/executor/multiproc_executor.py); ranks count the tensor parallel ones first."""

Role = Literal["rank", "worker", "agent", "other"]


class CollectedStacks(NamedTuple):
    """The facts of each host, by its name (empty: unknown), and the files in which no process was found."""

    hosts: Mapping[str, AttachFacts]
    empty: tuple[Path, ...] = ()


@dataclass
class _FoundProcess:
    """A process with the file it was read from, its host and number."""

    dump: DumpedProcess
    path: Path
    host: str = ""
    times: tuple[float | None, ...] = ()
    role: Role = "rank"
    rank: int | None = None
    rank_from: str = ""
    guessed: bool = False


def collect_stacks(texts: Iterable[tuple[Path, str]]) -> CollectedStacks:
    """Return the processes in the texts of files of stacks."""
    files = sorted(texts, key=lambda item: (_stamp_of(item[0]) or 0.0, natural_key(item[0].as_posix())))
    found: list[_FoundProcess] = []
    empty: list[Path] = []
    for path, text in files:
        own = [_FoundProcess(dump, path) for dump in read_stacks(text, shown_path(path).name)]
        empty += [] if own else [path]
        found += own
    for process in found:
        process.role = _role_of(process.dump)
        process.times = (_stamp_of(process.path),) * len(process.dump.samples)
    _place(found)
    found = _joined(found)
    _number(found)
    hosts: dict[str, list[AttachedProcess]] = {}
    common_size = _common_size(found)
    for number, process in enumerate(found):
        # A dump shows no start times; a number keeps processes apart that have no PID.
        hosts.setdefault(process.host, []).append(_facts_of(process, number, common_size))
    facts = {host: AttachFacts(processes=tuple(each), chosen=True) for host, each in hosts.items()}
    return CollectedStacks(facts, tuple(empty))


class RanksOfStacks(NamedTuple):
    """The progress of each rank, the hosts of ranks as far as known, and the lower bound of the world size.

    ``recorders``: what tables of the debug server show of the ranks' flight recorders."""

    progress: Mapping[int, ProgressFacts]
    homes: Mapping[int, str]
    world_size: int | None
    recorders: Mapping[int, RecorderFacts] = {}


def ranks_of_stacks(stacks: CollectedStacks) -> RanksOfStacks:
    """Return what the stacks show of each rank."""
    members = [
        Member(place, {AttachFacts.key: facts}, (None, None, host or UNKNOWN_HOST))
        for place, (host, facts) in enumerate(stacks.hosts.items())
    ]
    if not members:
        return RanksOfStacks({}, {}, None)
    job = attached_job(build_job(members, world_size=len(members)))
    found = {rank.number: progress for rank in job.ranks if (progress := rank.find(ProgressFacts)) is not None}
    homes = {rank.number: rank.host.name for rank in job.ranks if rank.host.name != UNKNOWN_HOST}
    processes = (process for facts in stacks.hosts.values() for process in facts.processes)
    refused = {process.rank for process in processes if process.refused and process.rank is not None}
    if len(refused) * 2 <= len(found):
        # A process that a tool could not stop or read, unlike most of the others, is blocked in the kernel or gone.
        silent = {number for number in refused if number in found and not found[number].stack}
        found |= {number: msgspec.structs.replace(found[number], state="silent") for number in silent}
    return RanksOfStacks(found, homes, job.world_size)


def _stamp_of(path: Path) -> float | None:
    """The time in the name of a file (``stacks_20260401_192104.txt``); only differences count, so no zone matters."""
    found = _STAMP.search(shown_path(path).name)
    if found is None:
        return None
    try:
        return dt.datetime.strptime(found[1] + found[2], "%Y%m%d%H%M%S").replace(tzinfo=dt.timezone.utc).timestamp()
    except ValueError:
        return None


_ROLES: tuple[tuple[str, str, Role], ...] = (
    (r"torch/utils/data/_utils/worker\.py$|torchdata/stateful_dataloader/worker\.py$", r"_worker_loop", "worker"),
    (r"vllm/v1/executor/multiproc_executor\.py$", r"get_response|_?wait_for_response|collective_rpc", "other"),
    (r"torch/distributed/(?:run|launch)\.py$|torch/distributed/elastic/(?:agent|multiprocessing)/", r".*", "agent"),
    (r"torch/multiprocessing/spawn\.py$", r"join|start_processes|spawn", "agent"),
    (r"accelerate/commands/launch\.py$|deepspeed/launcher/", r".*", "agent"),
    (r"multiprocess(?:ing)?/(?:resource_tracker|forkserver|managers)\.py$", r".*", "other"),
    (r"multiprocess(?:ing)?/pool\.py$|concurrent/futures/process\.py$", r"worker|_process_worker", "other"),
    (r"torch/_inductor/compile_worker/", r".*", "other"),
)
"""Frames that only such processes have, in the main thread."""
_OF_RAY = re.compile(r"(?:^|/)ray/(?:_private|dashboard|workers|worker\.py|util|profiling\.py|import_thread\.py)")
_MOST_WORDS = 16
"""Words of a command line up to its program."""
_ERRORS = "torch/distributed/elastic/multiprocessing/errors/"


def _role_of(dump: DumpedProcess) -> Role:
    if _is_agent(dump.command):
        return "agent"
    main = dump.main
    threads = (main,) if main else dump.samples[-1] if dump.samples else ()
    frames = [frame for thread in threads for frame in thread.frames]
    for frame in frames if main else ():
        for file, function, role in _ROLES:
            # Ranks have torch's @record on their stack too.
            if _ERRORS not in frame.file and re.search(file, frame.file) and re.fullmatch(function, frame.function):
                return role
    # Agents and idle workers of Ray run none of the user's code.
    is_of_ray = any(_OF_RAY.search(frame.file) for frame in frames) and not any(frame.user for frame in frames)
    return "other" if is_of_ray and not waits_in(frames) else "rank"


def _is_agent(command: str) -> bool:
    """Whether a command line begins a launcher: ``python -m torch.distributed.run``, ``/opt/bin/torchrun``."""
    words = command.split(None, _MOST_WORDS)[:_MOST_WORDS]
    for place, word in enumerate(words):
        if word.startswith("-m"):
            return (word[2:] or next(iter(words[place + 1 :]), "")) in AGENT_MODULES
        name = word.rpartition("/")[2]
        if not word.startswith("-") and not name.startswith("python"):
            return name in AGENT_SCRIPTS
    return False


def _place(found: Sequence[_FoundProcess]) -> None:
    """Give each process its host: by what the dump says, the label of its lines, or the name of its file."""
    for process in found:
        dump = process.dump
        label = dump.label if _HOST_LIKE.match(dump.label) and not _FILE.search(dump.label) else ""
        process.host = mask_text((dump.host or label or _host_in_name(_named(process)))[:LONGEST])


def _named(process: _FoundProcess) -> Path:
    """The file of a process: the one that ``grep`` found its lines in, or the one that was read."""
    return Path(process.dump.label) if _FILE.search(process.dump.label) else process.path


def _host_in_name(path: Path) -> str:
    stem = _STAMP.sub("", path.name).partition(".")[0] if path.name.count(".") < 3 else path.stem
    for word in re.split(r"[_\s]+", stem):
        parts = word.split("-")
        while parts and _GENERIC.match(parts[0]):
            parts.pop(0)
        name = "-".join(parts).strip(".-")
        if _HOST_LIKE.match(name) and not _GENERIC.match(name):
            return name
    return ""


def _joined(found: Sequence[_FoundProcess]) -> list[_FoundProcess]:
    """The processes with their samples from all files, each from the dumps of one form with most samples."""
    groups: list[list[_FoundProcess]] = []
    known: dict[tuple[object, ...], list[list[_FoundProcess]]] = {}
    for process in found:
        rank, dump = _explicit(process), process.dump
        key: tuple[object, ...] = (process.path, dump.order)
        if rank is not None:
            key = ("rank", rank)
        elif dump.pid:
            key = ("pid", process.host, dump.pid, process.role)
        same = (group for group in known.get(key, ()) if rank is None or _may_be_one(group, process))
        group = next(same, None)
        if group is None:
            group = []
            groups.append(group)
            known.setdefault(key, []).append(group)
        group.append(process)
    return [_with_all_samples(group) for group in groups]


def _may_be_one(group: Sequence[_FoundProcess], process: _FoundProcess) -> bool:
    """Whether a process that is stated to be of the same rank is the same process."""
    pids = {one.dump.pid for one in group if one.dump.pid}
    return not process.dump.pid or not pids or process.dump.pid in pids


def _with_all_samples(group: Sequence[_FoundProcess]) -> _FoundProcess:
    forms = Counter(_form_of(one.dump) for one in group for _ in one.dump.samples)
    best = max(forms, key=lambda form: forms[form], default=None)
    first = next((one for one in group if _form_of(one.dump) == best), group[0])
    for other in group:
        if other is first:
            continue
        samples = other.dump.samples
        if _form_of(other.dump) != best:
            other.dump.samples = []
        join_samples(first.dump, other.dump)
        first.times = (*first.times, *other.times) if other.dump.samples is samples else first.times
        first.host = first.host or other.host
        first.dump.pid = first.dump.pid or other.dump.pid
    first.times = first.times[-len(first.dump.samples) :]
    return first


def _form_of(dump: DumpedProcess) -> tuple[object, ...]:
    """What has to be equal for stacks to be comparable: the tool, the form of its paths, native frames alone."""
    main = dump.main
    frames = main.frames if main else ()
    return dump.tool, any(frame.file.startswith("/") for frame in frames), bool(frames)


def _explicit(process: _FoundProcess) -> int | None:
    """The rank that its heading, its environment or the name of its file states."""
    if process.role != "rank":
        return None
    stated = (process.dump.rank, _number_in(process.dump.variables, RANK_VARIABLES), rank_in_name(_named(process)))
    return next((rank for rank in stated if rank is not None), None)


def _number_in(values: Mapping[str, str], names: Iterable[str]) -> int | None:
    return next((int(values[name]) for name in names if NUMBER.fullmatch(values.get(name, ""))), None)


def _number(found: Sequence[_FoundProcess]) -> None:
    """Number the ranks: by what states their numbers, the surest first, else by the order of their PIDs."""
    ranks = [process for process in found if process.role == "rank"]
    several = len({process.host for process in ranks}) > 1
    tensor_size = 1 + max((places.get("TP", 0) for one in ranks if (places := _places(one))), default=0)
    sources: tuple[tuple[str, bool, Callable[[_FoundProcess], int | None]], ...] = (
        (BY_HEADING, False, lambda one: one.dump.rank),
        (RANK_VARIABLES[0], False, lambda one: _number_in(one.dump.variables, RANK_VARIABLES)),
        (BY_NAME, False, lambda one: rank_in_name(_named(one))),
        (BY_COMMAND, False, lambda one: _option(_RANK_OPTION, one)),
        (BY_COMMAND, False, lambda one: None if several else _local_rank(one)),
        (BY_TITLE, True, lambda one: _of_title(one, tensor_size)),
        (BY_LOCALS, True, lambda one: _of_locals(one)),
        (BY_LABEL, True, lambda one: _of_label(one)),
    )
    taken: set[int] = set()
    for name, guessed, number_of in sources:
        claims = {id(one): number for one in ranks if one.rank is None and (number := number_of(one)) is not None}
        counts = Counter(claims.values())
        for process in ranks:
            number = claims.get(id(process))
            # A number that two processes claim is inherited, or counts something else.
            if number is not None and counts[number] == 1 and number not in taken and number < MOST_RANKS:
                process.rank, process.rank_from, process.guessed = number, name, guessed
        taken = {process.rank for process in ranks if process.rank is not None}
    rest = sorted((one for one in ranks if one.rank is None), key=lambda one: (natural_key(one.host), *_order(one)))
    free = (number for number in range(len(ranks) + len(taken)) if number not in taken)
    for process, number in zip(rest, free, strict=False):
        process.rank, process.rank_from, process.guessed = number, BY_ORDER, True


def _option(pattern: re.Pattern[str], process: _FoundProcess) -> int | None:
    found = pattern.search(process.dump.command)
    return int(found[1]) if found else None


def _local_rank(process: _FoundProcess) -> int | None:
    stated = _number_in(process.dump.variables, LOCAL_VARIABLES)
    return _option(_LOCAL_OPTION, process) if stated is None else stated


def _places(process: _FoundProcess) -> dict[str, int]:
    found = _TITLE.match(process.dump.command)
    return {name: int(number) for name, number in _PLACE.findall(found["places"])} if found else {}


def _of_title(process: _FoundProcess, tensor_size: int) -> int | None:
    places = _places(process)
    return places.get("PP", 0) * tensor_size + places.get("TP", 0) if places else None


def _of_locals(process: _FoundProcess) -> int | None:
    named = process.dump.rank_locals
    return next((named[name] for name in ("global_rank", "rank") if name in named), None)


def _of_label(process: _FoundProcess) -> int | None:
    found = _TASK.fullmatch(process.dump.label)
    return int(found[1]) if found else None


def _order(process: _FoundProcess) -> tuple[object, ...]:
    local = _local_rank(process)
    pid = process.dump.pid
    return (local is None, local or 0, not pid, pid, natural_key(process.path.as_posix()), process.dump.order)


def _facts_of(process: _FoundProcess, number: int, common_size: int | None) -> AttachedProcess:
    dump = process.dump
    size = _number_in(dump.variables, SIZE_VARIABLES) or common_size
    return AttachedProcess(
        pid=dump.pid,
        started=float(number),
        role=process.role,
        parent=_number_in(dump.variables, (PARENT,)) if process.role != "rank" else None,
        rank=process.rank if process.role == "rank" else None,
        rank_from=process.rank_from,
        guessed=process.guessed,
        local_rank=_local_rank(process),
        world_size=size if size and size <= MOST_RANKS else None,
        samples=_samples_of(process),
        stack_source=dump.source,
        refused=mask_text(dump.refused[:LONGEST]) if dump.refused and not dump.samples else "",
        uses_gpu=_uses_gpu(dump),
    )


def _common_size(found: Iterable[_FoundProcess]) -> int | None:
    """The world size in the locals of all ranks that have one."""
    sizes = {one.dump.rank_locals.get("world_size") for one in found if one.role == "rank"} - {None}
    return sizes.pop() if len(sizes) == 1 else None


def _samples_of(process: _FoundProcess) -> tuple[ProcessSample, ...]:
    """The samples, at times of which only the differences count; all at 0 if these are unknown."""
    dump = process.dump
    times: Sequence[float | None] = process.times
    if dump.seconds is not None and len(set(times)) <= 1:
        times = [place * dump.seconds for place in range(len(dump.samples))]
    if None in times or len(times) != len(dump.samples):
        times = [0.0] * len(dump.samples)
    return tuple(ProcessSample(at or 0.0, threads=one) for at, one in zip(times, dump.samples, strict=True))


def _uses_gpu(dump: DumpedProcess) -> bool:
    threads = dump.samples[-1] if dump.samples else ()
    return any(_NATIVE_GPU.match(name) for thread in threads for name in thread.native) or any(
        "torch/cuda/" in frame.file for thread in threads for frame in thread.frames
    )
