"""A child process with torch loaded, for calls that may block or use a driver: it can be killed at any time."""

from __future__ import annotations

import os
import queue
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from subprocess import PIPE, Popen
from typing import IO, TypeVar

import msgspec

from doctor.core.background import start_daemon
from doctor.core.decoding import prepared
from doctor.core.process import abandon_child, start_python

R = TypeVar("R")

KEPT_LINES = 40
"""Lines of the output of the child that are kept to explain its end."""


class ChildLost(Exception):
    """The child ended, does not answer, or could not be started; the message says why."""


class WorkRefused(Exception):
    """The child is alive and could not do the work; the message says why in one line."""


class WorkRequest(msgspec.Struct, frozen=True):
    """Work for the child: a name of :data:`doctor.probes.runtime.torch_child_main.WORKS`, and its argument."""

    work: str
    argument: msgspec.Raw


class WorkReply(msgspec.Struct, frozen=True):
    """Result of the work; ``error`` is empty if there is a ``result``."""

    result: msgspec.Raw = msgspec.Raw(b"null")
    error: str = ""


class TorchChild:
    """A fresh interpreter that does one work at a time.

    ``environ``: its environment, with ``changes`` applied (``None`` removes a variable). ``processors``: those that it
    may use, if not all of this process. It is killed with this interpreter, and by :meth:`close`.
    """

    def __init__(
        self,
        environ: Mapping[str, str],
        changes: Mapping[str, str | None] | None = None,
        processors: tuple[int, ...] = (),
    ) -> None:
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._answers: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.is_lost = False
        self._child: Popen[bytes] | None = None
        merged = {**environ, **(changes or {})}
        self._start({name: value for name, value in merged.items() if value is not None}, processors)

    def _start(self, environ: Mapping[str, str], processors: tuple[int, ...]) -> None:
        own = os.sched_getaffinity(0)
        try:
            if processors:
                # Inherited: a child that changed its own would have started its threads elsewhere.
                os.sched_setaffinity(0, processors)
            self._child = start_python("doctor.probes.runtime.torch_child_main", stdin=PIPE, stderr=PIPE, env=environ)
        except (OSError, ValueError) as error:
            self.is_lost = True
            self._lines.append(f"cannot start a process: {error}")
            return
        finally:
            if processors:
                os.sched_setaffinity(0, own)
        self._listen(self._child.stdout, self._answers.put, partial(self._answers.put, None))
        self._listen(
            self._child.stderr,
            lambda line: self._lines.append(line.decode("utf-8", "replace").rstrip()),
            lambda: None,
        )

    def _listen(self, pipe: IO[bytes] | None, take: Callable[[bytes], None], end: Callable[[], None]) -> None:
        def read() -> None:
            with suppress(OSError, ValueError):  # closed under our hands
                for line in pipe or ():
                    take(line)
            end()

        start_daemon("doctor-child", read)

    def ask(self, work: str, argument: object, kind: type[R], seconds: float) -> R:
        """Return the result of ``work`` for ``argument`` (a msgspec Struct or plain data), decoded as ``kind``.

        Raises:
            ChildLost: it ended or did not answer in time; it is killed then, and later calls raise this too.
            WorkRefused: it could not do it.
        """
        if self.is_lost or self._child is None or self._child.stdin is None:
            raise ChildLost(self.last_words)
        order = msgspec.json.encode(WorkRequest(work, msgspec.Raw(msgspec.json.encode(argument))))
        try:
            self._child.stdin.write(order + b"\n")
            self._child.stdin.flush()
            line = self._answers.get(timeout=max(0.0, seconds))
        except queue.Empty:
            self.close()
            raise ChildLost(f"no answer within {seconds:.0f} s") from None
        except OSError:
            line = None
        if line is None:
            self.close()
            raise ChildLost(self.last_words)
        return self._result(line, kind)

    def _result(self, line: bytes, kind: type[R]) -> R:
        try:
            answer = msgspec.json.decode(line, type=prepared(WorkReply))
            if answer.error:
                raise WorkRefused(answer.error)
            return msgspec.json.decode(answer.result, type=prepared(kind))
        except msgspec.MsgspecError as error:
            self.close()
            raise ChildLost(f"invalid response: {error}") from None

    @property
    def last_words(self) -> str:
        """The last line that it wrote to stderr, or its exit status."""
        code = self._child.poll() if self._child is not None else None
        last_line = next((line for line in reversed(self._lines) if line.strip()), "")
        return last_line or (f"the process exited with {code}" if code is not None else "the process has exited")

    @property
    def lines(self) -> tuple[str, ...]:
        """Its last lines on stderr, and on stdout besides the answers: NCCL warns there."""
        return tuple(self._lines)

    def close(self) -> None:
        """Kill it."""
        if self._child is not None and not self.is_lost:
            with suppress(OSError):
                if self._child.stdin is not None:
                    self._child.stdin.close()
            abandon_child(self._child)
        self.is_lost = True
