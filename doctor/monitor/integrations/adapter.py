"""What the adapters of all frameworks share: the options, the guard around every hook, one attendance a run."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from doctor.core.background import start_thread
from doctor.core.facts import TrainingFacts
from doctor.monitor.findings_error import Findings
from doctor.monitor.integrations.hook_guard import HookGuard, is_disabled, value_or_default
from doctor.monitor.sinks.console import print_status
from doctor.monitor.telemetry.rank_telemetry import RankTelemetry
from doctor.monitor.watch_options import OnError, OnHang, Probes, WatchOptions
from doctor.monitor.watch_session import WatchSession

P = ParamSpec("P")
A = TypeVar("A", bound="Adapter[Any]")
R = TypeVar("R", bound="AdapterRun")


class AdapterRun:
    """One run while it is watched, and what an adapter keeps of it."""

    def __init__(self, attendance: WatchSession) -> None:
        self.attendance = attendance
        self.monitor: RankTelemetry = attendance.monitor

    def let_go(self) -> None:
        """Put back whatever was changed in the framework's objects."""

    def left(self) -> None:
        """The same of what has to stay until the attendance is over."""


class Adapter(Generic[R]):
    """Watches runs, one after the other. Nothing in it fails but by what the user gave; DOCTOR_DISABLE=1 turns it off.

    Args:
        dirpath: where ``report.json`` and the records of ranks go; by default ``rankdoctor`` beside the run's own
            output.
        on_error: ``raise`` ends all ranks before the first batch where an error is found that would break the run.
        on_hang: ``abort`` ends this rank once a hang has been explained.
        hang_after: seconds without progress that are a hang; ``None`` adapts to the run's own steps.
        every_n_steps: how often the dearer looks (memory, checksums) are taken.
        probe: ``light`` tries the ways between hosts before the first batch.
        prometheus_port: port on each host for metrics; needs prometheus-client.
        select: ids or families of the checks to run; empty: all.
        ignore: ids or families of findings that are known and accepted.
        share_group: name or GID of a group whose members may read and write the files of the run; by default they are
            this user's alone. ``DOCTOR_SHARE_GROUP`` names it too.

    Raises:
        ValueError: an argument can't be meant.
    """

    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        on_error: OnError = "warn",
        on_hang: OnHang = "report",
        hang_after: float | None = None,
        every_n_steps: int = 50,
        probe: Probes = "none",
        prometheus_port: int | None = None,
        select: Sequence[str] = (),
        ignore: Sequence[str] = (),
        share_group: str | int | None = None,
    ) -> None:
        self._options = WatchOptions(
            dirpath, on_error, on_hang, hang_after, every_n_steps, probe, prometheus_port, select, ignore, share_group
        )
        self._guard = HookGuard()
        self._run: R | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the run: threads and sockets stay with the process that made them."""
        return {**self.__dict__, "_run": None, "_guard": HookGuard()}

    def _begin(self, start: Callable[[], R]) -> None:
        """Watch a run from now on, unless the doctor is off; what can't be watched from the start is left alone."""
        try:
            self._leave()
            if not self._guard.off and not is_disabled():
                self._open(start())
        except Exception as error:  # noqa: BLE001 - the callback's guard
            self._guard.switch_off("the beginning of a run", error)

    def _open(self, run: R) -> None:
        try:
            run.attendance.open()
        except BaseException:
            value_or_default(run.attendance.close, None)
            raise
        self._run = run

    def _attendance(self, rank: int, world_size: int, default: Path, training: TrainingFacts) -> WatchSession:
        """An attendance that is not open yet. ``default``: the run's own directory of output."""
        directory = self._options.folder(default, print_status)
        attendance = WatchSession(self._options, rank=rank, world_size=world_size, directory=directory)
        attendance.monitor.training = training
        return attendance

    def _leave(self, error: BaseException | None = None) -> None:
        """The run is over; ``error``: it ends by this exception. What the doctor itself raised is no news to it."""
        run, self._run = self._run, None
        if run is None:
            return
        run.let_go()
        try:
            if error is None or isinstance(error, Findings):
                run.attendance.close()
            else:
                run.attendance.fail(error)
        finally:
            run.left()

    def _failed(self, where: str, error: Exception) -> None:
        """A hook of ours has failed."""
        self._guard.count(where, error)
        run = self._run
        if self._guard.off and run is not None:
            self._run = None
            value_or_default(run.let_go, None)
            # Its last look takes seconds, and this is the training's own thread.
            start_thread("doctor-off", value_or_default, run.attendance.close, None)


def guarded(hook: Callable[Concatenate[A, R, P], None]) -> Callable[Concatenate[A, P], None]:
    """A hook that runs only while a run is watched, is handed that run, and fails only by :class:`Findings`."""

    def shielded(self: A, /, *args: P.args, **kwargs: P.kwargs) -> None:
        run = self._run
        if run is None:
            return
        try:
            hook(self, run, *args, **kwargs)
        except Findings:
            raise
        except Exception as error:  # noqa: BLE001 - the callback's guard
            self._failed(hook.__name__, error)

    # Not functools.wraps: it would tell the hook's signature, which has the run that no framework knows of.
    shielded.__name__, shielded.__qualname__, shielded.__doc__ = hook.__name__, hook.__qualname__, hook.__doc__
    return shielded
