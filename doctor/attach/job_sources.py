"""Stacks that the job itself provides, for processes whose memory may not be read.

A rank that runs the doctor's callback has a stack file open, which names the signal that requests its stacks
(:mod:`doctor.monitor.watchdog.local_peers.stack_dump`). The rules of a local peer hold here, too: the signal goes only
to a process of this user that catches it and has that file open, and only while its training thread does not run.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from doctor.collectors.base import link_target
from doctor.core.capture import parse_capture
from doctor.core.errors import UnusableError
from doctor.core.facts import Frame, ProcessSample, ProgressFacts, StackThread
from doctor.core.files.own_folder import OwnFile
from doctor.core.stack_dumps.threads import dumped_frame, dumped_thread
from doctor.monitor.telemetry.stacks.stack_files import read_request, read_stack_file
from doctor.monitor.watchdog.local_peers.stack_dump import FOLDER, StackSignal
from doctor.monitor.watchdog.local_peers.stack_request import MOST_FILES, LocalPeer, request_stacks

LARGEST_RECORD = 4 << 20
"""Maximum bytes of a record; those of a few ranks that did not respond are larger and are left out."""
SECONDS = 1.0
"""Timeout for the answer of a process."""
_TICK = 0.02
_STACK_FILE = re.compile(rf"/.*/{re.escape(FOLDER)}/rank-\d{{1,10}}\.txt")


def stands(samples: Sequence[ProcessSample]) -> bool:
    """Return whether the main thread used no CPU time from the first sample to the last; stacks that change while
    faulthandler walks them can end a process."""
    times = {one.kernel.main_cpu for one in samples}
    return len(samples) > 1 and len(times) == 1 and None not in times and samples[-1].kernel.state in ("S", "D")


def callback_threads(pid: int, started: float) -> tuple[StackThread, ...]:
    """Return the training thread of a process with the doctor's callback; none if it has none or does not respond."""
    path = _stack_file(pid)
    request = read_request(path) if path is not None else None
    if path is None or request is None:
        return ()
    number, thread = request
    before = _size(path)
    if not request_stacks(LocalPeer(pid, started, StackSignal(thread, number), path)):
        return ()
    until = time.monotonic() + SECONDS
    while _size(path) == before and time.monotonic() < until:
        time.sleep(_TICK)
    if _size(path) == before:
        return ()
    frames = [dumped_frame(one.file, one.line, one.function) for one in _settled_stack(path)]
    return (dumped_thread(frames, is_main=True),) if frames else ()


def recorded_step_rate(pid: int) -> float | None:
    """Return the training steps per second by the points that the newest record of the doctor's callback names.

    The record (:mod:`doctor.monitor.watchdog.run_records`) lies beside the folder of the stack file that the process
    has open; it is written every minute.
    """
    path = _stack_file(pid)
    if path is None:
        return None
    try:
        record = OwnFile.of(path.parent.parent / f"{path.stem}.json").read(LARGEST_RECORD)
        members = parse_capture(record, path.stem).members
    except (OSError, UnusableError):
        return None
    progress = (
        found for member in members if isinstance(found := member.sections.get(ProgressFacts.key), ProgressFacts)
    )
    return next(filter(None, map(_step_rate, progress)), None)


def _step_rate(progress: ProgressFacts) -> float | None:
    """Steps per second over the newest points of one epoch of training."""
    begun = [one for one in progress.recent if one.stage == "train" and one.point == "step" and one.at is not None]
    if len(begun) < 2:
        return None
    (first, since), (last, until) = ((one.batch or 0, one.at or 0.0) for one in (begun[0], begun[-1]))
    return (last - first) / (until - since) if last > first and until > since else None


def _stack_file(pid: int) -> Path | None:
    """Return the path of the stack file that a process has open."""
    try:
        with os.scandir(f"/proc/{pid}/fd") as entries:
            links = (link_target(Path(entry.path)) or "" for entry in islice(entries, MOST_FILES))
            return next((Path(link) for link in links if _STACK_FILE.fullmatch(link)), None)
    except OSError:
        return None


def _settled_stack(path: Path) -> tuple[Frame, ...]:
    """Return the newest stack once the file does not grow any more: the training thread is written last."""
    size = -1
    until = time.monotonic() + SECONDS
    while size != (size := _size(path)) and time.monotonic() < until:
        time.sleep(_TICK)
    return read_stack_file(path)


def _size(path: Path) -> int:
    seen = OwnFile.of(path).look()
    return -1 if seen is None else seen.st_size
