"""For how long a thread has been in the same instruction of the same frames while its process used no CPU time.

What prepares a run moves: imports, compilation and preprocessing use CPU time and change the stack. A thread that does
neither waits for something. It may look for a file or a server again and again; then it is woken each time, and its
voluntary context switches are counted, too (proc_pid_status(5)). Before the first batch such a loop may be right.
Between steps, while other ranks wait, one that naps at the same place stands as much as one that sleeps.
"""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Hashable
from pathlib import Path

from doctor.collectors.base import parse_int, read_text
from doctor.core.clock import monotonic, process_time
from doctor.core.frames import waits_for_lock_file

MOST_FRAMES = 60
CPU_SHARE, CPU_SECONDS = 0.2, 0.3
"""CPU time of the process, as a share of the time and beside that, up to which it counts as idle: the doctor's own
threads use some."""
NAPS = 3.0
"""Switches a second up to which a thread naps; one that evaluates is woken more often, by its reads or its device."""
_OF_CHILDREN = subprocess.__file__
"""Its ``_wait`` with a timeout looks 20 times a second."""
POLLS, POLLING_SHARE = 15.0, 0.0015
"""The same for a thread that uses at most this share of a CPU: it only looks again when it is woken. A call of SQLite
that waits for a locked database is woken 10 times a second (``sqliteDefaultBusyCallback``, src/main.c) and uses 0.04 %,
a loop of small forward passes with pauses of 50 ms more than 0.5 %. So does what tries a lock file 20 times a second
(filelock), which its frames show."""

SHORT = 2.0
"""Seconds up to which it does not matter how long a thread sleeps."""
_LOADER, _AWAITS = "/torch/utils/data/dataloader.py", "_try_get_data"
LOOK_AT_WORKERS, SWITCHES_OF_LOOK, NEAR = 5.0, 4, 10
"""Seconds after which a DataLoader that waits for a batch looks whether its workers live (``MP_STATUS_CHECK_INTERVAL``,
torch/utils/data/_utils/__init__.py), switches of such a look, and the innermost frames that such a wait has."""


def nanoseconds_run(native_id: int | str, threads: Path = Path("/proc/self/task")) -> int | None:
    """Return the CPU time of a thread, by default of this process (proc_pid_schedstat); ``None`` if it is unknown."""
    return parse_int((read_text(threads / str(native_id) / "schedstat") or "").partition(" ")[0])


def nanoseconds_busy(native_id: int) -> int | None:
    """Return the time for which a thread of this process ran or was ready to run (proc_pid_schedstat)."""
    fields = (read_text(Path("/proc/self/task", str(native_id), "schedstat")) or "").split()
    known = [number for one in fields[:2] if (number := parse_int(one)) is not None]
    return sum(known) if len(known) == 2 else None


class Stillness:
    """The stillness of one thread of this process, from one look to the next."""

    def __init__(self, thread: int, native_id: int) -> None:
        self._thread = thread
        self._native_id = native_id
        self._key: Hashable = None
        self._since = 0.0
        self._cpu = 0.0
        self._switched = 0
        self._ran: int | None = None

    def look(self, *, in_one_call: bool = False, naps: bool = False) -> float:
        """Return the seconds for which the thread has been still; takes some microseconds.

        ``in_one_call``: count only the time that it has not been woken in, or with ``naps`` less than :data:`NAPS`
        times a second, or :data:`POLLS` times to do next to nothing; 0 if that is unknown, or if all of that time was
        one sleep that ends within a minute.
        """
        switches = self._switches() if in_one_call else 0
        if switches is None:
            self._key = None
            return 0.0
        now, cpu, key = monotonic(), process_time(), self._position()
        ran = nanoseconds_run(self._native_id) if naps else None
        woken = switches - self._switched > self._most_switches(now - self._since, ran, naps=naps)
        if woken or key != self._key or cpu - self._cpu > CPU_SHARE * (now - self._since) + CPU_SECONDS:
            self._key, self._since, self._cpu, self._switched, self._ran = key, now, cpu, switches, ran
        if in_one_call and switches == self._switched and now - self._since > SHORT and self._wakes_by_itself():
            return 0.0
        return now - self._since

    def _wakes_by_itself(self) -> bool:
        from doctor.monitor.telemetry.stacks.blocking_call import sleep_ends_soon  # no healthy step needs it

        return sleep_ends_soon(self._native_id)

    def _most_switches(self, seconds: float, ran: int | None, *, naps: bool) -> float:
        if not naps:
            return SWITCHES_OF_LOOK * (seconds / LOOK_AT_WORKERS + 1.0) if self._awaits_workers() else 0.0
        if self._only_looks():
            return math.inf
        polls = ran is not None and self._ran is not None and ran - self._ran <= POLLING_SHARE * (seconds + 1.0) * 1e9
        return (POLLS if polls else NAPS) * (seconds + 1.0)

    def _only_looks(self) -> bool:
        """Return whether the thread is in a function that does nothing but look for a lock file or a child process."""
        frame = sys._current_frames().get(self._thread)
        if frame is None:
            return False
        code = frame.f_code
        return waits_for_lock_file(code.co_filename) or (code.co_name == "_wait" and code.co_filename == _OF_CHILDREN)

    def _awaits_workers(self) -> bool:
        """Return whether the thread waits for a batch of a data worker."""
        frame = sys._current_frames().get(self._thread)
        for _ in range(NEAR):
            if frame is None:
                return False
            if frame.f_code.co_name == _AWAITS and frame.f_code.co_filename.endswith(_LOADER):
                return True
            frame = frame.f_back
        return False

    def _switches(self) -> int | None:
        try:
            lines = Path("/proc/self/task", str(self._native_id), "status").read_text().splitlines()
        except OSError:
            return None
        line = next((line for line in lines if line.startswith("voluntary_ctxt_switches:")), "")
        return parse_int(line.partition(":")[2])

    def _position(self) -> tuple[Hashable, ...]:
        frame = sys._current_frames().get(self._thread)
        found: list[tuple[int, int]] = []
        while frame is not None and len(found) < MOST_FRAMES:
            found.append((id(frame.f_code), frame.f_lasti))
            frame = frame.f_back
        return tuple(found)
