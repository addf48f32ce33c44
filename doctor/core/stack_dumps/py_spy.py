"""The JSON that ``py-spy dump --json`` prints: a list of threads, each with its frames, innermost first.

py-spy 0.3.4 to 0.4.3 (https://github.com/benfred/py-spy/blob/master/src/stack_trace.rs). A thread has ``pid``,
``thread_name``, ``os_thread_id``, ``active``, ``owns_gil`` and ``frames``; a frame has ``name``, ``filename``,
``line``, ``module`` (a shared library: a native frame) and ``locals`` (``null`` unless they were asked for).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence

from doctor.core.errors import UnusableError
from doctor.core.facts import Frame, StackThread
from doctor.core.stack_dumps.threads import (
    MOST_FRAMES,
    MOST_LOCALS,
    MOST_THREADS,
    dumped_frame,
    dumped_thread,
    is_training_thread,
)

MOST_PIDS = 1 << 22
"""``PID_MAX_LIMIT`` of Linux."""
RANK_NAMES = frozenset({"rank", "global_rank", "local_rank", "world_size"})
"""Names of locals that number a rank."""
_LIBRARY = re.compile(r"\.so(?:\.[\d.]+)?$")
_NUMBER = re.compile(r"\d{1,7}", re.ASCII)


def threads_of_py_spy_json(document: bytes | str, main_id: int | None = None) -> tuple[StackThread, ...]:
    """Return the threads in the output of ``py-spy dump --json`` for one process.

    ``main_id``: kernel id of its main thread in its own PID namespace, if that is not the process's PID here.

    Raises:
        UnusableError: it is not such output.
    """
    return threads_of_traces(_decoded(document), main_id)


def rank_locals_of_py_spy_json(document: bytes | str) -> Mapping[str, int]:
    """Return the locals of the main thread that number a rank (``--locals``), those of the outermost function first.

    Raises:
        UnusableError: it is not such output.
    """
    return rank_locals_of_traces(_decoded(document))


def rank_locals_of_traces(document: object) -> Mapping[str, int]:
    """Return the locals that number a rank, of a decoded document."""
    main = _main_of(list(_traces(document)))
    frames = main.get("frames") if main else None
    found: dict[str, int] = {}
    for frame in reversed(frames[:MOST_FRAMES]) if isinstance(frames, list) else ():
        for name, value in _numbers_in(frame):
            found.setdefault(name, value)
    return found


def _decoded(document: bytes | str) -> object:
    try:
        decoded: object = json.loads(document)
    except (ValueError, RecursionError):
        raise UnusableError("it is not the JSON of py-spy dump") from None
    if not is_traces(decoded):
        raise UnusableError("it is not the JSON of py-spy dump")
    return decoded


def is_traces(document: object) -> bool:
    """Return whether a decoded document has the form of ``py-spy dump --json``; a process may have no thread."""
    if not isinstance(document, list):
        return False
    return all(isinstance(one, dict) and "frames" in one and "thread_id" in one for one in document[:MOST_THREADS])


def threads_of_traces(document: object, main_id: int | None = None) -> tuple[StackThread, ...]:
    """Return the threads of a decoded document; parts of another form are left out."""
    traces = list(_traces(document))
    main = _main_of(traces, main_id)
    return tuple(_thread(trace, is_main=trace is main) for trace in traces)


def pid_of_traces(document: object) -> int | None:
    """Return the process that a decoded document is about; ``None`` if it names none."""
    pids = (_number(trace.get("pid"), MOST_PIDS) for trace in _traces(document))
    return next((pid for pid in pids if pid), None)


def _traces(document: object) -> Iterator[Mapping[str, object]]:
    listed = document if isinstance(document, list) else []
    yield from (one for one in listed[:MOST_THREADS] if isinstance(one, dict))


def _thread(trace: Mapping[str, object], *, is_main: bool) -> StackThread:
    frames: list[Frame] = []
    native: list[str] = []
    variables: list[tuple[int, str, str]] = []
    listed = trace.get("frames")
    for frame in listed[:MOST_FRAMES] if isinstance(listed, list) else ():
        if not isinstance(frame, dict):
            continue
        file, name = _text(frame.get("filename")), _text(frame.get("name"))
        if frame.get("module") is None and not _LIBRARY.search(file):
            variables += ((len(frames), name, value) for name, value in _locals_of(frame))
            frames.append(dumped_frame(file, _number(frame.get("line"), 1 << 31), name))
        elif not frames:
            native.append(name)
    active = trace.get("active")
    return dumped_thread(
        frames,
        native,
        name=_text(trace.get("thread_name")),
        native_id=_number(trace.get("os_thread_id"), 1 << 32),
        is_main=is_main,
        active=active if isinstance(active, bool) else None,
        holds_gil=trace.get("owns_gil") is True,
        variables=variables,
    )


def _main_of(traces: Sequence[Mapping[str, object]], main_id: int | None = None) -> Mapping[str, object] | None:
    """The thread that a framework trains in, or the one whose kernel id is that of the process; without one, by its
    name, which programs may change."""
    trains = (one for one in traces if is_training_thread(_text(one.get("thread_name")), _calls_of(one)))
    by_id = (one for one in traces if one.get("pid") and one.get("os_thread_id") == (main_id or one.get("pid")))
    by_name = (one for one in traces if one.get("thread_name") == "MainThread")
    return next(trains, None) or next(by_id, None) or next(by_name, None) or (traces[0] if len(traces) == 1 else None)


def _calls_of(trace: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """The files and functions of a thread's frames."""
    frames = trace.get("frames")
    for frame in frames[:MOST_FRAMES] if isinstance(frames, list) else ():
        if isinstance(frame, dict):
            yield _text(frame.get("filename")), _text(frame.get("name"))


def _locals_of(frame: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """The names and values of a frame's local variables."""
    listed = frame.get("locals")
    for one in listed[:MOST_LOCALS] if isinstance(listed, list) else ():
        if isinstance(one, dict) and (name := _text(one.get("name"))):
            yield name, _text(one.get("repr"))


def _numbers_in(frame: object) -> Iterator[tuple[str, int]]:
    for name, value in _locals_of(frame) if isinstance(frame, dict) else ():
        if name in RANK_NAMES and _NUMBER.fullmatch(value):
            yield name, int(value)


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _number(value: object, below: int) -> int:
    return value if type(value) is int and 0 <= value < below else 0
