"""Reader of allocator snapshots (``torch.cuda.memory._dump_snapshot``), without torch.

Format: torch/csrc/cuda/Module.cpp (``THCPModule_memorySnapshot``) and torch/csrc/cuda/memory_snapshot.cpp:
``{"segments", "device_traces", "allocator_settings", "external_annotations"}``; before torch 2.0 a bare list of
segments, whose blocks may have a ``history`` instead of ``frames``. Allocators of other devices (XPU, Ascend) write the
same. Malformed values are ignored.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from doctor.core.errors import UnusableError
from doctor.core.facts import Frame
from doctor.core.facts.memory_snapshot import Holder, MemorySnapshotFacts, RefusedAllocation, SnapshotDevice
from doctor.core.facts.section import in_unicode
from doctor.core.files.safe_pickle import is_pickle, load_plain
from doctor.core.frames import frame_of, is_user_code
from doctor.postmortem.sandbox.child_process import limit_memory, parse_isolated, send_answer

LARGEST = 2 << 30
"""Maximum size of a snapshot in bytes: with stacks, an entry of the trace has up to some kilobytes."""
PATIENCE, PACE = 30.0, 4 << 20
"""Seconds for any snapshot, and further bytes per second: a core of a laptop reads 60 MiB/s."""
ROOM, RATIO = 1 << 30, 16
"""Bytes of memory for any snapshot, and for each of its bytes: with repeated stacks, as torch writes them, 3 are used,
else about 10."""
KEPT = 12
"""Number of source lines that hold most memory, and of refused allocations, that are kept."""
STRETCHES = 10
"""Parts of a trace, to distinguish steady growth from a single allocation."""
MOST_STACKS = 100_000

_INTEGERS = 1 << 62

_GENERATED = re.compile(r"^<eval_with_key>|^<string>|/torchinductor_|/torch_compile_debug/|^<frozen")
"""Files of code that torch generated."""

_PART_BY_FILE = (
    ("optimizer", re.compile(r"/torch/optim/|/deepspeed/runtime/zero/|/apex/optimizers/|/bitsandbytes/optim/")),
    ("backward", re.compile(r"/torch/autograd/(?!function\.py|grad_mode\.py)|torch/csrc/autograd/engine")),
    ("communication", re.compile(r"/torch/distributed/(?!fsdp|_composable|optim|checkpoint)")),
    ("load", re.compile(r"/torch/serialization\.py|/torch/distributed/checkpoint/|/safetensors/")),
)
_PART_BY_FUNCTION = {
    "torch::autograd::Engine": "backward",
    "_call_impl": "forward",
    "_wrapped_call_impl": "forward",
    "forward": "forward",
    "_apply": "build",
    "reset_parameters": "build",
}


def looks_like_snapshot(head: bytes) -> bool:
    """Return whether ``head``, the beginning of a file, is that of a pickled snapshot."""
    if not is_pickle(head):
        return False
    return b"segments" in head[:64] or (b"total_size" in head and b"segment_type" in head and b"allocated_size" in head)


def read_snapshot(path: Path) -> MemorySnapshotFacts:
    """Read a snapshot file in a child process.

    Raises:
        UnusableError: it cannot be opened, is too large, imports something, is truncated, is not a snapshot, or takes
            more time or memory than a snapshot of its size should.
    """
    try:
        deadline = PATIENCE + path.stat().st_size / PACE
        (outcome,) = parse_isolated(__name__, [str(path)], deadline, tuple[MemorySnapshotFacts | str])
    except OSError as error:
        raise UnusableError(f"it can't be read: {error.strerror or error}") from None
    if isinstance(outcome, str):
        raise UnusableError(outcome)
    return outcome


def main(path: str) -> None:
    """Answer :func:`read_snapshot` from a fresh interpreter, with limited memory."""
    file = Path(path)
    with contextlib.suppress(OSError):
        limit_memory(ROOM + RATIO * file.stat().st_size)
    try:
        send_answer((in_unicode(load_snapshot(file)),))
    except UnusableError as error:
        send_answer((str(error).encode("utf-8", "replace").decode(),))


def load_snapshot(path: Path) -> MemorySnapshotFacts:
    """Read a snapshot file in this process. Raises :class:`UnusableError` if it is not a readable snapshot."""
    try:
        with path.open("rb") as stream:
            found = load_plain(stream, limit=LARGEST)
    except OSError as error:
        raise UnusableError(f"it can't be read: {error.strerror or error}") from None
    return parse_snapshot(found, path.name)


def parse_snapshot(found: object, name: str = "") -> MemorySnapshotFacts:
    """Parse a snapshot that has been unpickled. Raises :class:`UnusableError` if it is not a snapshot."""
    whole = {"segments": found} if isinstance(found, list) else found
    if not isinstance(whole, dict) or not isinstance(whole.get("segments"), (list, tuple)):
        raise UnusableError("it is a pickle, but no memory snapshot: it has no segments")
    segments = _mappings(whole["segments"])
    traces = [_mappings(trace) for trace in _sequence(whole.get("device_traces"))]
    stacks = _AllocationSites()
    blocks = [
        _SnapshotBlock(stacks.site(_frames(block)), _integer(block.get("size")))
        for segment in segments
        for block in _mappings(segment.get("blocks"))
        if block.get("state") == "active_allocated"
    ]
    settings = whole.get("allocator_settings")
    pairs = settings.items() if isinstance(settings, dict) else ()
    # PYTORCH_CUDA_ALLOC_CONF or its equivalent for other devices.
    values = (value for name, value in pairs if isinstance(name, str) and name.endswith("ALLOC_CONF"))
    ends = (_integer(entry.get("time_us")) for trace in traces if trace for entry in (trace[0], trace[-1]))
    times = [end for end in ends if end]
    return MemorySnapshotFacts(
        path=name,
        devices=_devices(segments),
        holders=_holders(blocks),
        growth=_holders((block for trace in traces for block in _left(trace, stacks)), stretched=True),
        parts=_parts(blocks),
        refused=tuple(_refused(traces, stacks))[-KEPT:],
        traced=sum(len(trace) for trace in traces),
        seconds=(max(times) - min(times)) / 1e6 if len(times) > 1 else None,
        settings=next((value[:200] for value in values if isinstance(value, str)), ""),
    )


class _AllocationSite(NamedTuple):
    """Where memory was allocated: the user's innermost frame, and what for."""

    frame: Frame | None
    part: str | None


class _SnapshotBlock(NamedTuple):
    site: _AllocationSite
    size: int
    stretch: int = 0


class _AllocationSites:
    """Cache of the sites of stacks: a snapshot has thousands of entries for one line."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], _AllocationSite] = {}

    def site(self, frames: object) -> _AllocationSite:
        """Return the site of a stack, innermost frame first."""
        if not isinstance(frames, (list, tuple)) or not frames:
            return _AllocationSite(None, None)
        # torch writes a frame once and refers to it; all frames stay alive as long as the snapshot, so ids are unique.
        key = tuple(map(id, frames))
        found = self._known.get(key) or _site(frames)
        if len(self._known) < MOST_STACKS:
            self._known[key] = found
        return found


def _site(frames: Sequence[object]) -> _AllocationSite:
    lines = [
        (str(frame.get("filename"))[:500], _integer(frame.get("line")), str(frame.get("name"))[:200])
        for frame in frames
        if isinstance(frame, dict)
    ]
    # Stacks may also hold frames of C++ and of code that torch generated.
    users = (
        frame_of(file, line, function)
        for file, line, function in lines
        if file.endswith((".py", ">")) and not _GENERATED.search(file) and is_user_code(file)
    )
    return _AllocationSite(next(users, None), _part(lines))


def _part(lines: Iterable[tuple[str, int, str]]) -> str | None:
    """Return the part of a step that memory belongs to, by the innermost frame that shows it."""
    for file, _, function in lines:
        for part, pattern in _PART_BY_FILE:
            if pattern.search(file):
                return part
        for known, part in _PART_BY_FUNCTION.items():
            if function == known or ("::" in known and known in function):
                return part
    return None


# Memory in use.


def _devices(segments: Iterable[Mapping[str, object]]) -> tuple[SnapshotDevice, ...]:
    by_device: dict[int, list[SnapshotDevice]] = {}
    for segment in segments:
        device = _device(segment)
        by_device.setdefault(device.index, []).append(device)
    fields = ("reserved", "allocated", "active", "split", "segments")
    return tuple(
        SnapshotDevice(index, **{field: sum(getattr(part, field) for part in parts) for field in fields})
        for index, parts in sorted(by_device.items())
    )


def _device(segment: Mapping[str, object]) -> SnapshotDevice:
    """Return one segment as if it were the whole device."""
    blocks = _mappings(segment.get("blocks"))
    sizes = [(_integer(block.get("size")), str(block.get("state"))) for block in blocks]
    free = [size for size, state in sizes if state == "inactive"]
    active = sum(size for size, state in sizes if state.startswith("active"))
    reserved = _integer(segment.get("total_size"))
    return SnapshotDevice(
        index=_integer(segment.get("device")),
        reserved=reserved,
        allocated=sum(size for size, state in sizes if state == "active_allocated"),
        active=active,
        split=sum(free) if active else 0,
        segments=1,
    )


def _frames(block: Mapping[str, object]) -> object:
    """Return the stack of a block; older snapshots hold the history of its use, newest first."""
    history = _mappings(block.get("history"))
    return block.get("frames") or (history[0].get("frames") if history else None)


def _holders(blocks: Iterable[_SnapshotBlock], stretched: bool = False) -> tuple[Holder, ...]:
    by_frame: dict[Frame, list[_SnapshotBlock]] = {}
    for block in blocks:
        if block.site.frame is not None:
            by_frame.setdefault(block.site.frame, []).append(block)
    found = [
        Holder(
            size=sum(block.size for block in own),
            blocks=len(own),
            frame=frame,
            part=next((part for part, _ in _parts(own)), None),
            spread=len({block.stretch for block in own}) / STRETCHES if stretched else None,
        )
        for frame, own in by_frame.items()
    ]
    return tuple(sorted(found, key=lambda holder: -holder.size)[:KEPT])


def _parts(blocks: Iterable[_SnapshotBlock]) -> tuple[tuple[str, int], ...]:
    sizes: dict[str, int] = {}
    for block in blocks:
        if block.site.part is not None:
            sizes[block.site.part] = sizes.get(block.site.part, 0) + block.size
    return tuple(sorted(sizes.items(), key=lambda one: -one[1]))


# The trace.


def _left(trace: Sequence[Mapping[str, object]], stacks: _AllocationSites) -> Iterator[_SnapshotBlock]:
    """Yield the memory that was allocated during the trace and not freed by its end."""
    standing: dict[int, int] = {}
    for position, entry in enumerate(trace):
        action, address = entry.get("action"), entry.get("addr")
        if not isinstance(address, int):
            continue
        if action == "alloc":
            standing[address] = position
        elif action in ("free_requested", "free_completed", "free"):
            standing.pop(address, None)
    for position in standing.values():
        entry = trace[position]
        yield _SnapshotBlock(
            stacks.site(entry.get("frames")), _integer(entry.get("size")), position * STRETCHES // len(trace)
        )


def _refused(traces: Iterable[Sequence[Mapping[str, object]]], stacks: _AllocationSites) -> Iterator[RefusedAllocation]:
    for index, trace in enumerate(traces):
        for entry in trace:
            if entry.get("action") == "oom":
                free = entry.get("device_free")
                yield RefusedAllocation(
                    size=_integer(entry.get("size")),
                    device=index,
                    device_free=_integer(free) if isinstance(free, int) else None,
                    frame=stacks.site(entry.get("frames")).frame,
                    at=_integer(entry.get("time_us")) / 1e6 or None,
                )


def _integer(value: object) -> int:
    return value if isinstance(value, int) and 0 <= value < _INTEGERS else 0


def _sequence(value: object) -> Sequence[object]:
    return value if isinstance(value, (list, tuple)) else ()


def _mappings(value: object) -> list[Mapping[str, object]]:
    return [inner for inner in _sequence(value) if isinstance(inner, dict)]
