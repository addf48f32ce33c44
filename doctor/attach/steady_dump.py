"""Reads the stacks of a process, and stops the process only if they change meanwhile.

Reading its memory does not affect a process. Stopping it does, even for a moment: epoll_wait(2), and receiving from a
socket with a timeout, then fail with EINTR in any of its threads (signal(7)), which not every library expects. So a
process that hangs, whose stacks stand, is never stopped.
"""

from __future__ import annotations

import time
from pathlib import Path

from doctor.attach.py_spy import NATIVE_SECONDS, SECONDS, DumpOutput, DumpRequest, run_dump
from doctor.collectors.base import read_pairs
from doctor.core.errors import UnusableError
from doctor.core.facts import Frame
from doctor.core.stack_dumps.py_spy import threads_of_py_spy_json


class SteadyDump:
    """One reading of a process. ``request``: says whether the process may be stopped; ``until``: when it must end, by
    :func:`time.monotonic`; ``known``: the stack of its main thread at an earlier reading, which is no mixture;
    ``thread``: the thread that trains, if it is not the main one.
    ``paused``: seconds for which the process was seen stopped; ``without_native``: the attempt to read native frames
    that failed."""

    def __init__(
        self,
        program: Path,
        request: DumpRequest,
        until: float,
        known: tuple[Frame, ...] = (),
        thread: int | None = None,
    ) -> None:
        self._program = program
        self._request = request
        self._until = until
        self._known = known
        self._thread = thread or request.pid
        self.paused = 0.0
        self.without_native: DumpOutput | None = None

    def read(self) -> DumpOutput:
        """Return consistent stacks; stacks that may mix calls of a moving process if it cannot be stopped.

        Raises:
            OSError: py-spy cannot be started.
        """
        request = self._request
        if request.native:
            output = self._run(request)
            if output.status == 0:
                return output
            self.without_native = output
        before = self._switches()
        read = self._run(request._replace(blocking=False, native=False))
        stood = before is not None and before == self._switches()
        if not request.blocking or (read.status == 0 and (stood or self._is_known(read))):
            return read
        stopped = self._run(request._replace(native=False))
        return stopped if stopped.status == 0 else read

    def _is_known(self, output: DumpOutput) -> bool:
        return bool(self._known) and _main_frames(output) == self._known

    def _run(self, request: DumpRequest) -> DumpOutput:
        left = max(0.0, self._until - time.monotonic())
        limit = NATIVE_SECONDS if request.native else SECONDS
        output = run_dump(self._program, request._replace(seconds=min(limit, left)))
        self.paused = max(self.paused, output.paused)
        return output

    def _switches(self) -> tuple[str, str] | None:
        """Return the numbers of context switches of the main thread, which are the same as before if it did not run;
        ``None`` if it runs."""
        rows = read_pairs(Path(f"/proc/{self._request.pid}/task/{self._thread}/status"), ":", limit=1 << 16)
        if rows.get("State", "R")[:1] not in ("S", "D", "T", "t"):
            return None
        return rows.get("voluntary_ctxt_switches", ""), rows.get("nonvoluntary_ctxt_switches", "")


def _main_frames(output: DumpOutput) -> tuple[Frame, ...]:
    try:
        threads = threads_of_py_spy_json(output.document)
    except UnusableError:
        return ()
    return next((one.frames for one in threads if one.is_main), ())
