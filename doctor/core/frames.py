"""Python stack frames: their origin, how many are kept, and whether a rank waits for others in them."""

from __future__ import annotations

import functools
import itertools
import os
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from types import FrameType, TracebackType
from typing import Any

from doctor.core.facts import Frame
from doctor.core.text import lazy_compile
from doctor.knowledge.waiting_functions import (
    WaitingFunctions,
    forwards,
    is_of_collectives,
    synchronizes,
    transfers_objects,
    tries_lock_file,
    waiting_functions,
)
from doctor.version import PACKAGE

MOST = 60
"""Frames of one stack that are kept: Lightning's own loops take 30."""
NATIVE_CODE = "<native code>"
"""File of a frame that stands for a native stack: its function is the operation that the thread waits in, or where it
is (:mod:`doctor.core.stack_dumps.native_calls`)."""
NATIVE_WAITS = frozenset(
    """
    all_gather all_reduce all_to_all barrier broadcast collective gather init_process_group recv reduce reduce_scatter
    scatter send
    """.split()  # noqa: SIM905 - thirteen lines otherwise
)
"""Operations by which such a frame is named."""
_MAKES_GROUP = ("_new_group_with_tag", "new_group")
"""Functions of torch.distributed that make a group; the second one before torch 2.1."""
_INSTALLED = lazy_compile(r"/(?:site|dist)-packages/|/lib(?:64)?/python\d+\.\d+/")
"""Directories of packages and standard libraries of any Python installation: a file may come from another machine."""


def frame_of(file: str, line: int | None, function: str) -> Frame:
    """Return the frame of a stack line."""
    return Frame(file, line or 0, function, user=is_user_code(file))


@functools.lru_cache(maxsize=4096)
def is_user_code(file: str) -> bool:
    """Whether a file belongs to neither the standard library, an installed package nor the doctor. Cells of a notebook
    and ``python -c`` are user code."""
    if file.startswith("<"):
        return not file.startswith(("<frozen", NATIVE_CODE))
    return not _INSTALLED.search(file) and not file.startswith(_foreign())


@functools.lru_cache(maxsize=1)
def _foreign() -> tuple[str, ...]:
    """Directories of the standard library and of the doctor, as written and resolved."""
    paths = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib")]
    paths.append(PACKAGE)
    return tuple({form + os.sep for path in paths if path for form in (path, os.path.realpath(path))})


def line_of(frame: FrameType) -> int:
    """The line that a running frame is in, also at an instruction that belongs to none, as at the end of a loop."""
    if frame.f_lineno is not None:
        return frame.f_lineno
    before = [line for start, _, line in frame.f_code.co_lines() if line is not None and start <= frame.f_lasti]
    return before[-1] if before else frame.f_code.co_firstlineno


def frames_of_stack(innermost: FrameType | None) -> tuple[Frame, ...]:
    """The frames of a running stack, innermost first."""
    frames: list[Frame] = []
    while innermost is not None and len(frames) < MOST:
        code = innermost.f_code
        frames.append(frame_of(code.co_filename, line_of(innermost), code.co_name))
        innermost = innermost.f_back
    return tuple(frames)


def frames_of_traceback(traceback: TracebackType | None) -> tuple[Frame, ...]:
    """The frames of a traceback, innermost first."""
    frames: list[Frame] = []
    while traceback is not None:
        code = traceback.tb_frame.f_code
        frames.append(frame_of(code.co_filename, traceback.tb_lineno, code.co_name))
        traceback = traceback.tb_next
    return tuple(frames[::-1][:MOST])


def shorten_stack(frames: Sequence[Frame], inner: int, own: int) -> tuple[Frame, ...]:
    """The ``inner`` innermost frames and the ``own`` innermost frames of the user."""
    users = [position for position, frame in enumerate(frames) if frame.user][:own]
    return _at(frames, {*range(inner), *users})


def call_site_frames(frames: Sequence[Frame], outside: int = 5, own: int = 3) -> tuple[Frame, ...]:
    """The frames that distinguish call sites: the innermost one, the ``outside`` innermost ones that are not in torch,
    and the ``own`` innermost ones of the user."""
    foreign = [position for position, one in enumerate(frames) if not is_torch(one) and not is_doctor(one)][:outside]
    users = [position for position, frame in enumerate(frames) if frame.user][:own]
    return _at(frames, {0, *foreign, *users})


def is_torch(frame: Frame) -> bool:
    """Whether a frame is in torch."""
    return not frame.user and "/torch/" in frame.file


def is_doctor(frame: Frame) -> bool:
    """Whether a frame is in what the doctor puts around functions of torch and of trainers."""
    return not frame.user and "/doctor/monitor/" in frame.file


def is_backward_engine(frame: Frame) -> bool:
    """Whether a frame is the one that runs the backward pass; before torch 2.2 it has no function of its own."""
    if frame.file.endswith("torch/autograd/graph.py"):
        return frame.function == "_engine_run_backward"
    return frame.file.endswith("torch/autograd/__init__.py") and frame.function == "backward"


def waits_in(stack: Sequence[Frame]) -> str:
    """The operation that a rank with this stack waits in; empty if the stack shows none. In ``backward`` it may also
    compute: see :func:`doctor.analysis.call_sites.is_in_backward`."""
    if stack and stack[0].file == NATIVE_CODE:
        return stack[0].function if stack[0].function in NATIVE_WAITS else ""
    row = waiting_row(stack)
    if row is None:
        return ""
    inner, *outer = [frame for frame in stack if not forwards(frame.file, frame.function)]
    for frame in itertools.takewhile(lambda frame: is_of_collectives(frame.file), outer):
        if transfers_objects(frame.function) or (inner.function.startswith("_") and not frame.function.startswith("_")):
            return frame.function
    return row.operation or inner.function.strip("_")


def waiting_row(stack: Sequence[Frame]) -> WaitingFunctions | None:
    """The row of the function that a rank with this stack waits in; ``None`` if it shows none."""
    frame = next((frame for frame in stack if not forwards(frame.file, frame.function)), None)
    return waiting_functions(frame.file, frame.function) if frame is not None else None


def waits_now(innermost: FrameType | None) -> bool:
    """Whether a running stack shows a call that waits for other ranks: :func:`waits_in`, in a tenth of its time."""
    innermost = _without_forwards(innermost)
    return innermost is not None and bool(waiting_functions(innermost.f_code.co_filename, innermost.f_code.co_name))


def root_in(innermost: FrameType | None) -> int | None:
    """The source or destination, within its group, of the call of torch.distributed that a running stack is in.

    torch.distributed computes that number before it waits (``_canonicalize_group_rank``); ``None`` of a release that
    does not, or of a call without a root.
    """
    innermost = _without_forwards(innermost)
    if innermost is None or not is_of_collectives(innermost.f_code.co_filename):
        return None
    given = innermost.f_locals
    root = given.get("group_src", given.get("group_dst"))
    if root is None and innermost.f_code.co_name == "recv":
        root = _source_in_group(given, innermost.f_globals)
    return root if isinstance(root, int) else None


def new_group_in(innermost: FrameType | None) -> str:
    """``4 of ranks 0, 1, 2``: number and ranks of the group that a running stack makes with others; empty if none.

    torch.distributed numbers the calls of ``new_group`` (``_process_group_name``), all of which all ranks make with the
    same ranks, members or not. One with ``use_local_synchronization`` is made, and numbered, by its members alone.
    """
    frame = _without_forwards(innermost)
    while frame is not None and is_of_collectives(frame.f_code.co_filename):
        given = frame.f_locals if frame.f_code.co_name in _MAKES_GROUP else {}
        number, ranks = given.get("group_name"), given.get("ranks")
        if isinstance(number, str) and number.isdecimal() and isinstance(ranks, (list, tuple, range)):
            return "" if given.get("use_local_synchronization") else f"{number} of ranks {', '.join(map(str, ranks))}"
        frame = frame.f_back
    return ""


def _source_in_group(given: Mapping[str, Any], names: Mapping[str, Any]) -> object:
    """The source of a receive, which is numbered in the job and may be any rank, within its group."""
    source, group, number_of = given.get("src"), given.get("group"), names.get("get_group_rank")
    if source is None or group is None or number_of is None:
        return source
    try:
        return number_of(group, source)
    except (ValueError, KeyError, RuntimeError):  # a group that was destroyed meanwhile
        return None


def _without_forwards(innermost: FrameType | None) -> FrameType | None:
    """The innermost frame of a running stack that does not merely call on."""
    while innermost is not None and forwards(innermost.f_code.co_filename, innermost.f_code.co_name):
        innermost = innermost.f_back
    return innermost


def waits_for_lock_file(file: str) -> bool:
    """Whether the functions of a file do nothing but wait until a lock file is gone, or its lock free."""
    return tries_lock_file(file)


def waits_for_device(stack: Sequence[Frame]) -> bool:
    """Whether the innermost frame is a synchronization with the device."""
    return bool(stack) and synchronizes(stack[0].file, stack[0].function)


def _at(frames: Sequence[Frame], positions: Iterable[int]) -> tuple[Frame, ...]:
    return tuple(frames[position] for position in sorted(positions) if position < len(frames))
