"""Composition root of a watched run: telemetry, watchdog, evaluator and sinks."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from doctor.cluster.transport.secret_file import secret_from_environ
from doctor.cluster.transport.signing import Secret
from doctor.core.background import join_threads
from doctor.core.capture import REPORT
from doctor.core.errors import UnusableError
from doctor.core.files.own_folder import OwnFolder
from doctor.monitor.evaluator import RunEvaluator, run_settings
from doctor.monitor.findings_error import Findings
from doctor.monitor.sinks.console import CONCLUSION, ConsoleSink, print_status
from doctor.monitor.sinks.finding_sink import FindingSink
from doctor.monitor.sinks.python_warnings import WarningSink
from doctor.monitor.sinks.report_file import ReportFileSink
from doctor.monitor.sinks.report_page import SHORT_RUN, ReportPageSink
from doctor.monitor.static_facts import StaticFacts
from doctor.monitor.telemetry.flight_recorder import take_dumps
from doctor.monitor.telemetry.progress import Stall
from doctor.monitor.telemetry.rank_telemetry import RankTelemetry, Sections
from doctor.monitor.watch_options import WatchOptions, absolute
from doctor.monitor.watchdog.local_peers.worker_stacks import with_worker_stacks
from doctor.monitor.watchdog.watchdog import Watchdog

if TYPE_CHECKING:
    from doctor.monitor.sinks.prometheus import PrometheusSink

STARTUP_TIMEOUT = 20.0
"""Seconds that the first batch may be delayed by the startup check; usually it takes a fraction of one."""
MEETING_TIMEOUT = 8.0
"""The same in an optimizer step, which ranks that train alike reach together: one that is late there waits for another
in a call that this one will not make before it goes on."""
FACTS_TIMEOUT = 5.0
"""Seconds of :data:`STARTUP_TIMEOUT` for this rank's own facts; slower ones are evaluated in the first periodic
round."""
FINAL_TIMEOUT = 5.0
"""Seconds for the final round at the end of a run, and after an exception."""
THREAD_TIMEOUT = 1.0
"""Seconds for remaining threads to end after the last watched run of this process."""


class WatchSession:
    """Watches this process from :meth:`open` to :meth:`close`.

    ``directory``: for report and records. ``sinks``: additional sinks, besides the usual ones. ``series``: see
    :class:`.Watchdog`. ``open_sessions``: the open sessions of this process, whose threads :meth:`close` must not join.
    """

    open_sessions: ClassVar[set[WatchSession]] = set()

    def __init__(
        self,
        options: WatchOptions,
        *,
        rank: int,
        world_size: int,
        directory: Path | OwnFolder,
        sinks: Sequence[FindingSink] = (),
        series: str = "",
    ) -> None:
        self.telemetry = RankTelemetry(hang_after=options.hang_after, every_n_steps=options.every_n_steps)
        self.rank = rank
        self._folder = directory if isinstance(directory, OwnFolder) else OwnFolder(absolute(directory))
        self.directory = self._folder.path
        self._options = options
        self._series = series
        self._world_size = world_size
        self._extra_sinks = tuple(sinks)
        self._static_facts: StaticFacts | None = None
        self._evaluator: RunEvaluator | None = None
        self._watchdog: Watchdog | None = None
        self._prometheus: PrometheusSink | None = None
        self._probe_sections: Sections = {}
        self._secret: Secret | None = None

    def open(self) -> None:
        """Start watching. ``telemetry.training`` must be set, and the process group exist, if any."""
        settings = run_settings(self._options, report_notes=self.rank == 0)
        checkpoints = self.telemetry.training.checkpoints
        self._secret = _secret()
        self.open_sessions.add(self)
        self.telemetry.open()
        self.telemetry.progress.has_peers = self._world_size > 1
        self._static_facts = StaticFacts(
            str(self.directory),
            settings.directories,
            (("checkpoint", checkpoints),) if checkpoints else (),
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
            on_recovery=self._evaluator.report_recovery,
            write_line=print_status,
            secret=self._secret,
            on_delay=self.telemetry.pauses.note_delay,
            sample=self.telemetry.sample,
            training_thread=self.telemetry.progress.training_thread,
            series=self._series,
        )
        self.telemetry.progress.run = self._watchdog.run
        self._watchdog.start()

    @staticmethod
    def write_line(line: str) -> None:
        """Write one status line to stderr, with secrets masked. For any thread."""
        print_status(line)

    def check_start(self, *, meets: bool = False) -> None:
        """Have all ranks evaluated before the next batch.

        ``meets``: all ranks are expected here at once.

        Raises:
            Findings: an error was found and ``on_error="raise"``.
        """
        if self._watchdog is None or self._static_facts is None:
            return
        if self._options.probe == "light" and self._world_size > 1 and not self._probe_sections:
            from doctor.monitor.startup_probe import probe_hosts  # takes long to import, and one process needs none

            self._probe_sections = probe_hosts(
                self._static_facts,
                rank=self.rank,
                world_size=self._world_size,
                directory=self._folder,
                write_line=print_status,
                secret=self._secret,
            )
        is_short = meets and self._options.on_error != "raise"
        decision = self._watchdog.check_start(MEETING_TIMEOUT if is_short else STARTUP_TIMEOUT)
        self.telemetry.progress.run = self._watchdog.run
        if decision is not None and decision.has_errors and self._options.on_error == "raise":
            more = f" (see: doctor explain {decision.ids[0]})" if decision.ids else ""
            raise Findings(
                f"rankdoctor stopped this run before its first batch (on_error='raise'): {decision.words}{more}",
                decision.ids,
            )

    def fail(self, error: BaseException) -> None:
        """Report that an exception ends this rank, await the decision, and close."""
        self.telemetry.failed(error)
        self.await_decision()
        self.close()

    def await_decision(self) -> None:
        """Await an evaluation after a failure, of this process or one that the launcher reported.

        Also through a signal whose handler raises: torchrun sends SIGTERM at once when a rank has died; Lightning's
        handler then broadcasts, which fails because that rank is missing. May be called from any thread.
        """
        watchdog = self._watchdog
        for _ in range(2):
            with contextlib.suppress(Exception):
                if watchdog is not None:
                    watchdog.fail(FINAL_TIMEOUT)
                return

    def close(self, seconds: float = FINAL_TIMEOUT) -> None:
        """End the session in whatever state it is, and restore everything it changed.

        ``seconds``: for the final round.
        """
        self.telemetry.ended()
        watchdog, self._watchdog = self._watchdog, None
        if watchdog is not None:
            watchdog.stop(seconds)
        if self._evaluator is not None:
            self._evaluator.close()
        self.telemetry.close()
        if self._static_facts is not None:
            self._static_facts.close()
        self.open_sessions.discard(self)
        if not self.open_sessions:
            join_threads(THREAD_TIMEOUT, print_status)

    def metrics(self) -> Mapping[str, float]:
        """Return a new mapping for each round, empty on ranks that do not evaluate."""
        return self._evaluator.metrics if self._evaluator is not None else {}

    # RankSource, called by the watchdog.

    def stall(self) -> Stall | None:
        """Return the current stall of this rank, if any."""
        return self.telemetry.stall()

    def startup_facts(self) -> Sections:
        """Return everything known before the first batch."""
        return {**self._static_sections(FACTS_TIMEOUT), **self._probe_sections, **self.telemetry.current_facts()}

    def current_facts(self) -> Sections:
        """Return everything known now."""
        sections = {**self._static_sections(), **self.telemetry.current_facts()}
        if self._prometheus is not None:
            self._prometheus.own_facts(sections)
        return sections

    def look_facts(self) -> Sections:
        """Return what a look compares; everything where a scrape may read it meanwhile."""
        return self.telemetry.look_facts() if self._prometheus is None else self.current_facts()

    def position(self) -> Sections:
        """Return the facts with stacks, children and the newest collectives."""
        storage = self._static_facts.storage() if self._static_facts else {}
        return {
            **self._static_sections(),
            **storage,
            **with_worker_stacks(self.telemetry.position(), self._folder, self.rank),
        }

    def dumps(self) -> dict[str, bytes]:
        """Return the flight recorder dumps taken with the last position."""
        return take_dumps()

    def _static_sections(self, timeout: float = 0.0) -> Sections:
        return self._static_facts.now(timeout) if self._static_facts else {}

    def _make_sinks(self) -> list[FindingSink]:
        files = ReportFileSink(self._folder, print_status)
        page = None
        if self._options.html_report is not False:
            page = ReportPageSink(
                self._folder,
                print_status,
                is_wanted=lambda: files.is_written,
                short_run=0.0 if self._options.html_report else SHORT_RUN,
            )
        sinks: list[FindingSink] = [
            files,
            *([page] if page is not None else ()),
            ConsoleSink(
                files.path,
                is_written=lambda: files.is_written,
                page=lambda: page.written if page is not None else None,
                printed=self._folder.file(CONCLUSION) if self._world_size > 1 else None,
                leads=self.rank == 0,
            ),
            WarningSink(),
            *self._extra_sinks,
        ]
        if self._options.otlp:
            sinks += self._otlp_sinks(self._options.otlp)
        port = self._options.prometheus_port
        if port is not None and self._static_facts is not None and self._static_facts.leads_host:
            from doctor.monitor.sinks.prometheus import PrometheusSink

            try:
                self._prometheus = PrometheusSink(
                    port, rank=self.rank, host=socket.gethostname(), write_line=print_status
                )
                sinks.append(self._prometheus)
            except ImportError as error:
                print_status(str(error))
        return sinks

    def _otlp_sinks(self, otlp: bool | str) -> list[FindingSink]:
        from doctor.monitor.sinks.otlp import OtlpSink, why_not_otlp

        if (reason := why_not_otlp()) is None:
            return [OtlpSink(otlp if isinstance(otlp, str) else None, print_status)]
        if self.rank == 0:
            print_status(reason)
        return []


def _secret() -> Secret | None:
    try:
        return secret_from_environ(os.environ)
    except UnusableError as error:
        print_status(f"{error}; continuing without a key: messages of the ranks are not signed")
        return None
