"""One process of a run that is watched: its monitor, its watchdog, the judge, and where findings go."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from doctor.cluster.transport.secret_file import secret_from_environ
from doctor.cluster.transport.signing import Secret
from doctor.core.background import join_threads
from doctor.core.capture import REPORT
from doctor.core.errors import UnusableError
from doctor.core.files.own_folder import OwnFolder
from doctor.monitor.evaluator import RunEvaluator, run_settings
from doctor.monitor.findings_error import Findings
from doctor.monitor.sinks.console import ConsoleSink, print_status
from doctor.monitor.sinks.finding_sink import FindingSink
from doctor.monitor.sinks.prometheus import PrometheusSink
from doctor.monitor.sinks.python_warnings import WarningSink
from doctor.monitor.sinks.report_file import ReportFileSink
from doctor.monitor.startup_probe import probe_hosts
from doctor.monitor.static_facts import Sections, StaticFacts
from doctor.monitor.telemetry.flight_recorder import take_dumps
from doctor.monitor.telemetry.progress import Stall
from doctor.monitor.telemetry.rank_telemetry import RankTelemetry
from doctor.monitor.watch_options import WatchOptions, absolute
from doctor.monitor.watchdog.watchdog import Decision, Watchdog

MEETING = 20.0
"""Seconds that the first batch may be held up while the ranks' facts are judged; usually it is a fraction of one."""
FACTS = 5.0
"""Seconds of these in which a rank waits for its own facts; slower ones are judged in the first round."""
PARTING = 5.0
"""Seconds for a last look at the end of a run, and after an exception."""
THREADS = 1.0
"""Seconds for threads that have nothing left to do, or a reading to finish, at the end of the last run that is
watched."""


class WatchSession:
    """Watches this process from :meth:`open` to :meth:`close`. ``directory``: where report and records go. ``watched``:
    the attendances of this process that are open, whose threads :meth:`close` leaves alone.

    ``sinks``: further places for findings, beside the usual ones.
    """

    watched: ClassVar[set[WatchSession]] = set()

    def __init__(
        self,
        options: WatchOptions,
        *,
        rank: int,
        world_size: int,
        directory: Path | OwnFolder,
        sinks: Sequence[FindingSink] = (),
    ) -> None:
        self.monitor = RankTelemetry(hang_after=options.hang_after, every_n_steps=options.every_n_steps)
        self.rank = rank
        self._folder = directory if isinstance(directory, OwnFolder) else OwnFolder(absolute(directory))
        self.directory = self._folder.path
        self._options = options
        self._world_size = world_size
        self._more_sinks = tuple(sinks)
        self._facts: StaticFacts | None = None
        self._evaluator: RunEvaluator | None = None
        self._watchdog: Watchdog | None = None
        self._prometheus: PrometheusSink | None = None
        self._measured: Sections = {}
        self._secret: Secret | None = None

    def open(self) -> None:
        """Begin to watch. The process group, where there is one, is there; ``monitor.training`` is told."""
        settings = run_settings(self._options, report_notes=self.rank == 0)
        self._secret = _secret()
        self.watched.add(self)
        self.monitor.open()
        self._facts = StaticFacts(
            str(self.directory),
            settings.directories,
            self._outputs(),
            rank=self.rank,
            world_size=self._world_size,
        )
        report = self._folder.file(REPORT)
        self._evaluator = RunEvaluator(settings, self._make_sinks(), report, self.rank, lambda: watchdog.run)
        self._watchdog = watchdog = Watchdog(
            self.rank,
            self._world_size,
            self,
            self._folder,
            self._evaluator,
            on_hang=self._options.on_hang,
            goes_on=self._evaluator.report_recovery,
            tell=print_status,
            secret=self._secret,
        )
        self.monitor.progress.run = self._watchdog.run
        self._watchdog.start()

    def meet(self) -> None:
        """Have all ranks judged before the next batch.

        Raises:
            Findings: an error was found, and the options say that it ends the run.
        """
        if self._watchdog is None or self._facts is None:
            return
        if self._options.probe == "light" and self._world_size > 1 and not self._measured:
            self._measured = probe_hosts(
                self._facts,
                rank=self.rank,
                world_size=self._world_size,
                directory=self._folder,
                tell=print_status,
                secret=self._secret,
            )
        decision = self._watchdog.meet(MEETING)
        self.monitor.progress.run = self._watchdog.run
        if decision is not None and decision.sick and self._options.on_error == "raise":
            raise Findings(_abort_reason(decision), decision.ids)

    def fail(self, error: BaseException) -> None:
        """An exception ends this rank: say so to the others before it leaves, and close."""
        self.monitor.failed(error)
        if self._watchdog is not None:
            self._be_heard(self._watchdog)
        self.close()

    def lost(self) -> None:
        """Another process of the run has failed, by what the launcher says, which ends this one next: have it judged
        before. For any thread."""
        watchdog = self._watchdog
        if watchdog is not None:
            self._be_heard(watchdog)

    def _be_heard(self, watchdog: Watchdog) -> None:
        """Wait for the decision, through a signal whose handler raises: torchrun sends SIGTERM at once where a rank has
        died, and Lightning's handler broadcasts, which fails for want of that rank."""
        for _ in range(2):
            with contextlib.suppress(Exception):
                watchdog.fail(PARTING)
                return

    def close(self) -> None:
        """The end, whichever way. Leaves everything as it was."""
        self.monitor.ended()
        watchdog, self._watchdog = self._watchdog, None
        if watchdog is not None:
            watchdog.stop(PARTING)
        if self._evaluator is not None:
            self._evaluator.close()
        self.monitor.close()
        if self._facts is not None:
            self._facts.close()
        self.watched.discard(self)
        if not self.watched:
            join_threads(THREADS, print_status)

    def metrics(self) -> Mapping[str, float]:
        """Numbers for the run's loggers, as of the last round, which makes them anew; empty on ranks that do not
        judge."""
        return self._evaluator.metrics if self._evaluator is not None else {}

    # What the watchdog asks.

    def stall(self) -> Stall | None:
        """Whether progress has stopped here."""
        return self.monitor.stall()

    def opening(self) -> Sections:
        """All that is known before the first batch."""
        return {**self._base(FACTS), **self._measured, **self.monitor.card()}

    def card(self) -> Sections:
        """All that is known now."""
        sections = {**self._base(), **self.monitor.card()}
        if self._prometheus is not None:
            self._prometheus.card(sections)
        return sections

    def position(self) -> Sections:
        """Where this rank stands."""
        storage = self._facts.storage() if self._facts else {}
        return {**self._base(), **storage, **self.monitor.position()}

    def dumps(self) -> dict[str, bytes]:
        """What the flight recorder of this process held when its position was taken."""
        return take_dumps()

    def _base(self, patience: float = 0.0) -> Sections:
        return self._facts.now(patience) if self._facts else {}

    def _outputs(self) -> tuple[tuple[str, str], ...]:
        checkpoints = self.monitor.training.checkpoints
        return (("checkpoint", checkpoints),) if checkpoints else ()

    def _make_sinks(self) -> list[FindingSink]:
        files = ReportFileSink(self._folder, print_status)
        sinks: list[FindingSink] = [
            files,
            ConsoleSink(files.path, is_written=lambda: files.is_written),
            WarningSink(),
            *self._more_sinks,
        ]
        port = self._options.prometheus_port
        if port is not None and self._facts is not None and self._facts.speaks:
            try:
                self._prometheus = PrometheusSink(port, rank=self.rank, host=socket.gethostname(), tell=print_status)
                sinks.append(self._prometheus)
            except ImportError as error:
                print_status(str(error))
        return sinks


def _secret() -> Secret | None:
    """The key of the job, if there is one that can be used."""
    try:
        return secret_from_environ(os.environ)
    except UnusableError as error:
        print_status(f"{error}; continuing without a key: messages of the ranks are not signed")
        return None


def _abort_reason(decision: Decision) -> str:
    way_out = f" (the way out: doctor explain {decision.ids[0]})" if decision.ids else ""
    return f"the doctor ends this run before its first batch, as on_error='raise' says: {decision.words}{way_out}"
