"""Base of all adapters: the options, the guard around every hook, and one session per run."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Concatenate, Generic, ParamSpec, TypeVar

from doctor.core.background import start_thread
from doctor.core.clock import monotonic
from doctor.core.facts import TrainingFacts
from doctor.monitor.findings_error import Findings
from doctor.monitor.integrations.backward_pass import GradientTimer, loss_of, observe_backward
from doctor.monitor.integrations.hook_guard import HookGuard, is_disabled, value_or_default
from doctor.monitor.sinks.console import print_status
from doctor.monitor.telemetry.rank_telemetry import RankTelemetry
from doctor.monitor.watch_options import OnError, OnHang, Probes, WatchOptions
from doctor.monitor.watch_session import WatchSession

P = ParamSpec("P")
A = TypeVar("A", bound="Adapter[Any]")
R = TypeVar("R", bound="AdapterRun")
ExceptHook = Callable[[type[BaseException], BaseException, "TracebackType | None"], None]


def no_action() -> None:
    """Nothing is done after a run."""


class AdapterRun:
    """One watched run, and the state that an adapter keeps of it. ``gradients``: times them in backward passes."""

    def __init__(self, session: WatchSession) -> None:
        self.session = session
        self.telemetry: RankTelemetry = session.telemetry
        self._hook: tuple[ExceptHook, ExceptHook] | None = None
        self._at_exit: Callable[[], None] | None = None
        self.gradients = GradientTimer(self.telemetry)
        self._end_backward: Callable[[], None] | None = None
        self._loss: Any = None
        self._taken: Mapping[str, float] | None = None

    def take_metrics(self) -> Mapping[str, float]:
        """Return the metrics of a round once, for the framework's loggers; empty until the next round."""
        metrics = self.session.metrics()
        if metrics is self._taken:
            return {}
        self._taken = metrics
        return metrics

    def restore(self) -> None:
        """Restore whatever was changed in the framework's objects."""
        hook, self._hook = self._hook, None
        if hook is not None and sys.excepthook is hook[0]:  # not replaced since
            sys.excepthook = hook[1]
        if self._at_exit is not None:
            atexit.unregister(self._at_exit)
        self.leave_backward()

    def leave_backward(self) -> None:
        """Record no more backward passes."""
        end, self._end_backward = self._end_backward, None
        if end is not None:
            end()

    def watch_backward(self) -> None:
        """Have each backward pass of the training thread recorded, and the loss it begins at, until the run ends."""
        if self._end_backward is None:
            self._end_backward = observe_backward(self._backward_begins)

    def _backward_begins(self, root: Any) -> None:
        if threading.get_ident() == self.telemetry.training_thread:
            self.telemetry.mark("backward")
            self.telemetry.replica.backward_begins()
            self._loss = loss_of(root)
            if monotonic() >= self.gradients.due:
                self.gradients.begin(root)

    def take_loss(self, stated: Any = None) -> Any:
        """Return the loss that was stated for a batch, else that of the last backward pass since the last call. (step
        path)"""
        observed, self._loss = self._loss, None
        return observed if stated is None else stated

    def watch_exceptions(self, callback: Callable[[BaseException], None]) -> None:
        """Have ``callback`` called with an uncaught exception, which is then handled as before."""
        before, process = sys.excepthook, os.getpid()

        def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            if os.getpid() == process:  # not in a process that the program forked
                callback(error)
            before(kind, error, trace)

        sys.excepthook = report
        self._hook = (report, before)

    def watch_exit(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called at interpreter exit, unless this run has ended before."""
        process = os.getpid()

        def end() -> None:
            if os.getpid() == process:
                callback()

        self._at_exit = end
        atexit.register(end)

    def close(self) -> None:
        """Close the session."""
        self.session.close()

    def restore_after_close(self) -> None:
        """Restore changes that have to stay until the session is closed."""


class Adapter(Generic[R]):
    """Watches runs, one after the other.

    Only invalid arguments raise; ``DOCTOR_DISABLE=1`` turns it off.

    Args:
        dirpath: folder for ``report.json``, ``report.html`` and the records of ranks; by default ``rankdoctor`` beside
            the run's own output.
        on_error: ``raise`` ends all ranks before the first batch if an error is found that would break the run.
        on_hang: ``abort`` ends this rank once a hang has been explained.
        hang_after: seconds without progress that count as a hang; ``None`` adapts to the run's own steps.
        every_n_steps: interval of expensive samples (memory, checksums).
        probe: ``light`` probes connectivity between hosts before the first batch.
        prometheus_port: port on each host for metrics; needs prometheus-client.
        select: ids or families of the checks to run; empty: all.
        ignore: ids or families of findings that are known and accepted.
        share_group: name or GID of a group whose members may read and write the files of the run; by default only
            this user may. ``DOCTOR_SHARE_GROUP`` sets it, too.
        html_report: write ``report.html`` beside ``report.json`` at the end of the run; by default unless the run took
            less than 30 s and neither an error nor a warning was found.
        otlp: send metrics and findings to this OpenTelemetry collector (``http://HOST:4318``), or with ``True`` to that
            of OTEL_EXPORTER_OTLP_ENDPOINT; needs the extra ``otel``.

    Raises:
        ValueError: an argument is not valid.

    Attributes:
        unasked: the program did not ask for it: ``doctor run`` added it, and one that the program has takes its place.
        claimed: one that watches a framework, or that the program asked for, has begun a run in this process.
        claims: how many runs such ones have begun.
        reported: identity of the last exception that ended a run.
        after_run: called when a run of this one has ended.
        stand_in: watches a loop that nothing else watches; it makes way when ``claimed`` becomes true.
    """

    unasked = False
    claimed: ClassVar[bool] = False
    claims: ClassVar[int] = 0
    reported: ClassVar[int] = 0
    stand_in: ClassVar[Adapter[Any] | None] = None

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
        html_report: bool | None = None,
        otlp: bool | str = False,
    ) -> None:
        self._options = WatchOptions(
            dirpath,
            on_error,
            on_hang,
            hang_after,
            every_n_steps,
            probe,
            prometheus_port,
            select,
            ignore,
            share_group,
            html_report,
            otlp,
        )
        self._guard = HookGuard()
        self._run: R | None = None
        self.after_run: Callable[[], object] = no_action

    def __getstate__(self) -> dict[str, Any]:
        """Return everything but the run: threads and sockets stay with the process that made them."""
        return {**self.__dict__, "_run": None, "_guard": HookGuard()}

    def _begin(self, start: Callable[[], R]) -> None:
        """Watch a run, unless disabled or its start fails."""
        try:
            self._end_run()
            if self._guard.off or is_disabled():
                return
            self._claim()
            run = start()
            try:
                run.session.open()
            except BaseException:
                value_or_default(run.session.close, None)
                raise
            self._run = run
        except Exception as error:  # noqa: BLE001 - the callback's guard
            self._guard.switch_off("the start of a run", error)

    def _claim(self) -> None:
        stand_in = Adapter.stand_in
        if stand_in is not self:
            Adapter.claimed = True
            Adapter.claims += 1
            if stand_in is not None:
                stand_in._end_run()

    def _new_session(
        self, rank: int, world_size: int, default: Path, training: TrainingFacts, series: str = ""
    ) -> WatchSession:
        """Return a session that is not open yet. ``default``: the run's own output directory."""
        directory = self._options.folder(default, print_status)
        session = WatchSession(self._options, rank=rank, world_size=world_size, directory=directory, series=series)
        session.telemetry.training = training
        return session

    def _end_run(self, error: BaseException | None = None) -> None:
        """End the run. ``error``: the exception that ends it; :class:`Findings` is not a failure."""
        run, self._run = self._run, None
        if run is None:
            return
        Adapter.reported = id(error) if error is not None else 0
        run.restore()
        try:
            if error is None or isinstance(error, Findings):
                run.close()
            else:
                run.session.fail(error)
                from doctor.monitor.integrations.reported_error import note_report  # no healthy run needs it

                note_report()
        finally:
            run.restore_after_close()
        if error is None:
            value_or_default(self.after_run, None)

    def _failed(self, where: str, error: Exception) -> None:
        self._guard.count(where, error)
        run = self._run
        if self._guard.off and run is not None:
            self._run = None
            value_or_default(run.restore, None)
            # Closing takes seconds, and this is the training thread.
            start_thread("doctor-off", value_or_default, run.session.close, None)


def guarded(hook: Callable[Concatenate[A, R, P], None]) -> Callable[Concatenate[A, P], None]:
    """Wrap a hook to run only within a watched run, and to raise only :class:`Findings`."""

    def wrapper(self: A, /, *args: P.args, **kwargs: P.kwargs) -> None:
        run = self._run
        if run is None:
            return
        try:
            hook(self, run, *args, **kwargs)
        except Findings:
            raise
        except Exception as error:  # noqa: BLE001 - the callback's guard
            self._failed(hook.__name__, error)

    # Not functools.wraps: it would expose the hook's signature with the run, which no framework passes.
    wrapper.__name__, wrapper.__qualname__, wrapper.__doc__ = hook.__name__, hook.__qualname__, hook.__doc__
    return wrapper
