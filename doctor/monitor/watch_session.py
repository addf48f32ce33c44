"""One process of a run that is watched: its monitor, its sentinel, the judge, and where findings go."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import msgspec

from doctor.cluster.transport.secret_file import secret_from_environ
from doctor.cluster.transport.signing import Secret
from doctor.core.background import join_threads
from doctor.core.capture import REPORT
from doctor.core.errors import UnusableError
from doctor.core.files.own_folder import OwnFile, OwnFolder
from doctor.core.finding import Severity
from doctor.core.job import Job
from doctor.core.masking import mask_text
from doctor.core.message_bounds import shortened
from doctor.core.report_document import Report
from doctor.core.settings import IgnoreEntry, Settings, read_settings
from doctor.monitor.finding_history import FindingHistory, FindingKey, finding_key
from doctor.monitor.findings_error import Findings
from doctor.monitor.sinks.console import ConsoleSink
from doctor.monitor.sinks.finding_sink import FindingEvent, FindingSink
from doctor.monitor.sinks.prometheus import PrometheusSink
from doctor.monitor.sinks.python_warnings import WarningSink
from doctor.monitor.sinks.report_file import ReportFileSink
from doctor.monitor.startup_probe import probe_hosts
from doctor.monitor.static_facts import Sections, StaticFacts
from doctor.monitor.telemetry.flight_recorder import take_dumps
from doctor.monitor.telemetry.progress import Stall
from doctor.monitor.telemetry.rank_telemetry import RankTelemetry
from doctor.monitor.watch_options import WatchOptions, absolute
from doctor.monitor.watchdog.decision import MOST_IDS
from doctor.monitor.watchdog.watchdog import Decision, Trigger, Watchdog
from doctor.session import judge, load_checks

if TYPE_CHECKING:
    from doctor.core.check_registry import CheckRegistry

MEETING = 20.0
"""Seconds that the first batch may be held up while the ranks' facts are judged; usually it is a fraction of one."""
FACTS = 5.0
"""Seconds of these in which a rank waits for its own facts; slower ones are judged in the first round."""
PARTING = 5.0
"""Seconds for a last look at the end of a run, and after an exception."""
THREADS = 1.0
"""Seconds for threads that have nothing left to do, or a reading to finish, at the end of the last run that is
watched."""
CALLBACK = "callback"
"""By whom findings are ignored that its arguments name."""


def print_status(line: str) -> None:
    """Say one line on stderr, whole, whatever else is written there."""
    try:
        sys.stderr.write(f"rankdoctor: {mask_text(line.removeprefix('rankdoctor: '))}\n")
        sys.stderr.flush()
    except (OSError, ValueError):  # nobody reads any more
        return


class WatchSession:
    """Watches this process from :meth:`open` to :meth:`close`. ``directory``: where report and records go. ``watched``:
    the attendances of this process that are open, whose threads :meth:`close` leaves alone.

    ``outlets``: further places for findings, beside the usual ones.
    """

    watched: ClassVar[set[WatchSession]] = set()

    def __init__(
        self,
        options: WatchOptions,
        *,
        rank: int,
        world_size: int,
        directory: Path | OwnFolder,
        outlets: Sequence[FindingSink] = (),
    ) -> None:
        self.monitor = RankTelemetry(hang_after=options.hang_after, every_n_steps=options.every_n_steps)
        self.rank = rank
        self._folder = directory if isinstance(directory, OwnFolder) else OwnFolder(absolute(directory))
        self.directory = self._folder.path
        self._options = options
        self._world_size = world_size
        self._more_outlets = tuple(outlets)
        self._facts: StaticFacts | None = None
        self._judge: RunEvaluator | None = None
        self._sentinel: Watchdog | None = None
        self._prometheus: PrometheusSink | None = None
        self._measured: Sections = {}
        self._secret: Secret | None = None

    def open(self) -> None:
        """Begin to watch. The process group, where there is one, is there; ``monitor.training`` is told."""
        settings = self._settings()
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
        self._judge = RunEvaluator(settings, self._make_outlets(), report, self.rank, lambda: sentinel.run)
        self._sentinel = sentinel = Watchdog(
            self.rank,
            self._world_size,
            self,
            self._folder,
            self._judge,
            on_hang=self._options.on_hang,
            goes_on=self._judge.goes_on,
            tell=print_status,
            secret=self._secret,
        )
        self.monitor.progress.run = self._sentinel.run
        self._sentinel.start()

    def meet(self) -> None:
        """Have all ranks judged before the next batch.

        Raises:
            Findings: an error was found, and the options say that it ends the run.
        """
        if self._sentinel is None or self._facts is None:
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
        ruling = self._sentinel.meet(MEETING)
        self.monitor.progress.run = self._sentinel.run
        if ruling is not None and ruling.sick and self._options.on_error == "raise":
            raise Findings(_abort_reason(ruling), ruling.ids)

    def fail(self, error: BaseException) -> None:
        """An exception ends this rank: say so to the others before it leaves, and close."""
        self.monitor.failed(error)
        if self._sentinel is not None:
            self._be_heard(self._sentinel)
        self.close()

    def lost(self) -> None:
        """Another process of the run has failed, by what the launcher says, which ends this one next: have it judged
        before. For any thread."""
        sentinel = self._sentinel
        if sentinel is not None:
            self._be_heard(sentinel)

    def _be_heard(self, sentinel: Watchdog) -> None:
        """Wait for the ruling, through a signal whose handler raises: torchrun sends SIGTERM at once where a rank has
        died, and Lightning's handler broadcasts, which fails for want of that rank."""
        for _ in range(2):
            with contextlib.suppress(Exception):
                sentinel.fail(PARTING)
                return

    def close(self) -> None:
        """The end, whichever way. Leaves everything as it was."""
        self.monitor.ended()
        sentinel, self._sentinel = self._sentinel, None
        if sentinel is not None:
            sentinel.stop(PARTING)
        if self._judge is not None:
            self._judge.close()
        self.monitor.close()
        if self._facts is not None:
            self._facts.close()
        self.watched.discard(self)
        if not self.watched:
            join_threads(THREADS, print_status)

    def metrics(self) -> Mapping[str, float]:
        """Numbers for the run's loggers, as of the last round, which makes them anew; empty on ranks that do not
        judge."""
        return self._judge.metrics if self._judge is not None else {}

    # What the sentinel asks.

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

    def _settings(self) -> Settings:
        try:
            found = read_settings(Path.cwd())
        except UnusableError as error:
            print_status(f"{error}; going on without settings")
            found = Settings()
        except FileNotFoundError:
            print_status("the working directory was removed; going on without settings")
            found = Settings()
        if not self.rank:
            for note in found.notes:
                print_status(note)
        ignored = tuple(IgnoreEntry(name, "given to the callback", by=CALLBACK) for name in self._options.ignore)
        return Settings(
            select=tuple(self._options.select) or found.select,
            ignore=ignored + found.ignore,
            plugins=found.plugins,
            limits=found.limits,
            directories=found.directories,
            withheld=found.withheld,
            typed=frozenset((*self._options.select, *self._options.ignore)),
        )

    def _outputs(self) -> tuple[tuple[str, str], ...]:
        checkpoints = self.monitor.training.checkpoints
        return (("checkpoint", checkpoints),) if checkpoints else ()

    def _make_outlets(self) -> list[FindingSink]:
        files = ReportFileSink(self._folder, print_status)
        outlets: list[FindingSink] = [
            files,
            ConsoleSink(files.path, is_written=lambda: files.is_written),
            WarningSink(),
            *self._more_outlets,
        ]
        port = self._options.prometheus_port
        if port is not None and self._facts is not None and self._facts.speaks:
            try:
                self._prometheus = PrometheusSink(port, rank=self.rank, host=socket.gethostname(), tell=print_status)
                outlets.append(self._prometheus)
            except ImportError as error:
                print_status(str(error))
        return outlets


class RunEvaluator:
    """Judges the job whenever the sentinel has gathered it, and tells the outlets. Lives on every rank; works on the
    one that is asked. ``run``: its id, once it is known."""

    def __init__(
        self,
        settings: Settings,
        outlets: Sequence[FindingSink],
        report: Path | OwnFile,
        rank: int,
        run: Callable[[], str] = lambda: "",
    ) -> None:
        self.metrics: Mapping[str, float] = {}
        self._settings = settings
        self._all_outlets = tuple(outlets)
        self._outlets = list(outlets)
        self._file = OwnFile.of(report)
        self._rank = rank
        self._run = run
        self._chart = FindingHistory()
        self._catalog: CheckRegistry | None = None
        self._started = time.time()
        self._lock = threading.Lock()
        self._stood: set[FindingKey] = set()

    def __call__(self, job: Job, occasion: Trigger) -> Decision:
        """The ruling on ``job``."""
        with self._lock:
            catalog = self._begin()
            report = judge(job, catalog, self._settings, must_be_complete=False, started=self._started)
            news = self._chart.note(msgspec.structs.replace(report, run=self._run() or None))
            self._publish(job, news, occasion)
            ruling = _decision(report, occasion)
            if occasion == "stall":
                self._stood |= {finding_key(one) for one in news if _is_of(one, ruling)}
            return ruling

    def goes_on(self, ruling: Decision, seconds: float) -> None:
        """A stall that was judged sick is over after so many seconds: what was found for it is a remark from now on.
        What holds all the same is found again."""
        with self._lock:
            demoted = self._chart.went_on(self._stood, seconds)
            self._stood = set()
            if (report := self._chart.report) is not None and demoted:
                for outlet in [*self._outlets]:
                    self._guarded(outlet, lambda outlet: outlet.found(demoted, report))
            ids = ", ".join(dict.fromkeys(one.result.id for one in demoted))
            now = f"; no error any more: {ids}" if ids else ""
            print_status(f"progress goes on after all, after {seconds:.0f} s{now}")

    def close(self) -> None:
        """Give back what the outlets hold, those that broke included."""
        outlets, self._all_outlets = self._all_outlets, ()
        for outlet in outlets:
            self._guarded(outlet, lambda outlet: outlet.close())

    def _begin(self) -> CheckRegistry:
        if self._catalog is None:
            catalog = self._load()
            watched = tuple(check for check in catalog.checks if set(check.when) & set("PR"))
            self._catalog = type(catalog)(watched, catalog.broken)
            seen = self._file.look() if self._rank else None
            if seen is not None and seen.st_mtime >= self._started - PARTING:
                self._chart.take_over(self._file, self._run())
        return self._catalog

    def _load(self) -> CheckRegistry:
        try:
            return load_checks(self._settings)
        except UnusableError as error:  # names and plug-ins that read_settings does not look up
            print_status(f"{error}; going on without settings")
            own = tuple(entry for entry in self._settings.ignore if entry.by == CALLBACK)
            self._settings = Settings(ignore=own)
            return load_checks(self._settings)

    def _publish(self, job: Job, news: Sequence[FindingEvent], occasion: Trigger) -> None:
        from doctor.monitor.sinks.logger_metrics import metrics

        report = self._chart.report
        if report is None:
            return
        self.metrics = metrics(job, report)

        def publish(outlet: FindingSink) -> None:
            if news:
                outlet.found(news, report)
            outlet.round(job, report)
            if occasion == "end":
                outlet.ended(report)

        for outlet in list(self._outlets):
            self._guarded(outlet, publish)

    def _guarded(self, outlet: FindingSink, call: Callable[[FindingSink], None]) -> None:
        """An outlet that breaks is left out from then on; the others go on."""
        try:
            call(outlet)
        except Exception as error:
            self._outlets = [one for one in self._outlets if one is not outlet]
            print_status(f"{type(outlet).__name__} is switched off: {type(error).__name__}: {error}")


def _secret() -> Secret | None:
    """The key of the job, if there is one that can be used."""
    try:
        return secret_from_environ(os.environ)
    except UnusableError as error:
        print_status(f"{error}; continuing without a key: messages of the ranks are not signed")
        return None


def _abort_reason(ruling: Decision) -> str:
    way_out = f" (the way out: doctor explain {ruling.ids[0]})" if ruling.ids else ""
    return f"the doctor ends this run before its first batch, as on_error='raise' says: {ruling.words}{way_out}"


def _decision(report: Report, occasion: Trigger) -> Decision:
    """Whether what was found this time breaks the run. A stall is explained only by what speaks of progress or data."""
    families = ("progress", "data", "host") if occasion in ("stall", "failure") else ()
    errors = [
        (result, finding)
        for result in report.results
        for finding in result.findings
        if finding.stands and finding.severity is Severity.ERROR and (not families or result.family in families)
    ]
    if not errors:
        return Decision()
    errors.sort(key=lambda pair: (pair[0].id != report.primary, pair[1].explained_by is not None))
    ids = tuple(dict.fromkeys(result.id for result, _ in errors))
    words = "; ".join(f"{result.id} {finding.summary}" for result, finding in errors[:3])
    ranks = tuple(sorted({rank for _, finding in errors for rank in finding.ranks}))
    return Decision(sick=True, words=shortened(words), ids=ids[:MOST_IDS], ranks=ranks)


def _is_of(news: FindingEvent, ruling: Decision) -> bool:
    """Whether a finding is one of those that the ruling was for, or a consequence of one."""
    return bool({news.result.id, news.finding.explained_by} & {*ruling.ids})
