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

from doctor.background import settle
from doctor.bounds import shortened
from doctor.capture import REPORT
from doctor.errors import UnusableError
from doctor.finding import Severity
from doctor.folders import OwnFile, OwnFolder
from doctor.gather.secret_file import secret_of
from doctor.gather.signing import Secret
from doctor.integrations.base_facts import BaseFacts, Sections
from doctor.integrations.chart import Chart, Named, named
from doctor.integrations.findings import Findings
from doctor.integrations.options import Options, absolute
from doctor.integrations.probing import probe_between
from doctor.job import Job
from doctor.masking import mask_text
from doctor.monitor.monitor import Monitor
from doctor.monitor.progress import Stall
from doctor.monitor.recorder import take_dumps
from doctor.outlets.console import ConsoleOutlet
from doctor.outlets.files import FileOutlet
from doctor.outlets.outlet import News, Outlet
from doctor.outlets.prometheus import PrometheusOutlet
from doctor.outlets.python_warnings import WarningOutlet
from doctor.result import Report
from doctor.sentinel.sentinel import Occasion, Ruling, Sentinel
from doctor.sentinel.terms import MOST_IDS
from doctor.session import judge, load_checks
from doctor.settings import IgnoreEntry, Settings, read_settings

if TYPE_CHECKING:
    from doctor.catalog import Catalog

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


def tell(line: str) -> None:
    """Say one line on stderr, whole, whatever else is written there."""
    try:
        sys.stderr.write(f"rankdoctor: {mask_text(line.removeprefix('rankdoctor: '))}\n")
        sys.stderr.flush()
    except (OSError, ValueError):  # nobody reads any more
        return


class Attendance:
    """Watches this process from :meth:`open` to :meth:`close`. ``directory``: where report and records go. ``watched``:
    the attendances of this process that are open, whose threads :meth:`close` leaves alone.

    ``outlets``: further places for findings, beside the usual ones.
    """

    watched: ClassVar[set[Attendance]] = set()

    def __init__(
        self,
        options: Options,
        *,
        rank: int,
        world_size: int,
        directory: Path | OwnFolder,
        outlets: Sequence[Outlet] = (),
    ) -> None:
        self.monitor = Monitor(hang_after=options.hang_after, every_n_steps=options.every_n_steps)
        self.rank = rank
        self._folder = directory if isinstance(directory, OwnFolder) else OwnFolder(absolute(directory))
        self.directory = self._folder.path
        self._options = options
        self._world_size = world_size
        self._more_outlets = tuple(outlets)
        self._facts: BaseFacts | None = None
        self._judge: Judge | None = None
        self._sentinel: Sentinel | None = None
        self._prometheus: PrometheusOutlet | None = None
        self._measured: Sections = {}
        self._secret: Secret | None = None

    def open(self) -> None:
        """Begin to watch. The process group, where there is one, is there; ``monitor.training`` is told."""
        settings = self._settings()
        self._secret = _secret()
        self.watched.add(self)
        self.monitor.open()
        self._facts = BaseFacts(
            str(self.directory),
            settings.directories,
            self._outputs(),
            rank=self.rank,
            world_size=self._world_size,
        )
        report = self._folder.file(REPORT)
        self._judge = Judge(settings, self._make_outlets(), report, self.rank, lambda: sentinel.run)
        self._sentinel = sentinel = Sentinel(
            self.rank,
            self._world_size,
            self,
            self._folder,
            self._judge,
            on_hang=self._options.on_hang,
            goes_on=self._judge.goes_on,
            tell=tell,
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
            self._measured = probe_between(
                self._facts,
                rank=self.rank,
                world_size=self._world_size,
                directory=self._folder,
                tell=tell,
                secret=self._secret,
            )
        ruling = self._sentinel.meet(MEETING)
        self.monitor.progress.run = self._sentinel.run
        if ruling is not None and ruling.sick and self._options.on_error == "raise":
            raise Findings(_why_it_ends(ruling), ruling.ids)

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

    def _be_heard(self, sentinel: Sentinel) -> None:
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
            settle(THREADS, tell)

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
            tell(f"{error}; going on without settings")
            found = Settings()
        except FileNotFoundError:
            tell("the working directory was removed; going on without settings")
            found = Settings()
        if not self.rank:
            for note in found.notes:
                tell(note)
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

    def _make_outlets(self) -> list[Outlet]:
        files = FileOutlet(self._folder, tell)
        outlets: list[Outlet] = [
            files,
            ConsoleOutlet(files.path, is_written=lambda: files.is_written),
            WarningOutlet(),
            *self._more_outlets,
        ]
        port = self._options.prometheus_port
        if port is not None and self._facts is not None and self._facts.speaks:
            try:
                self._prometheus = PrometheusOutlet(port, rank=self.rank, host=socket.gethostname(), tell=tell)
                outlets.append(self._prometheus)
            except ImportError as error:
                tell(str(error))
        return outlets


class Judge:
    """Judges the job whenever the sentinel has gathered it, and tells the outlets. Lives on every rank; works on the
    one that is asked. ``run``: its id, once it is known."""

    def __init__(
        self,
        settings: Settings,
        outlets: Sequence[Outlet],
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
        self._chart = Chart()
        self._catalog: Catalog | None = None
        self._started = time.time()
        self._lock = threading.Lock()
        self._stood: set[Named] = set()

    def __call__(self, job: Job, occasion: Occasion) -> Ruling:
        """The ruling on ``job``."""
        with self._lock:
            catalog = self._begin()
            report = judge(job, catalog, self._settings, must_be_complete=False, started=self._started)
            news = self._chart.note(msgspec.structs.replace(report, run=self._run() or None))
            self._publish(job, news, occasion)
            ruling = _ruling(report, occasion)
            if occasion == "stall":
                self._stood |= {named(one) for one in news if _is_of(one, ruling)}
            return ruling

    def goes_on(self, ruling: Ruling, seconds: float) -> None:
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
            tell(f"progress goes on after all, after {seconds:.0f} s{now}")

    def close(self) -> None:
        """Give back what the outlets hold, those that broke included."""
        outlets, self._all_outlets = self._all_outlets, ()
        for outlet in outlets:
            self._guarded(outlet, lambda outlet: outlet.close())

    def _begin(self) -> Catalog:
        if self._catalog is None:
            catalog = self._load()
            watched = tuple(check for check in catalog.checks if set(check.when) & set("PR"))
            self._catalog = type(catalog)(watched, catalog.broken)
            seen = self._file.look() if self._rank else None
            if seen is not None and seen.st_mtime >= self._started - PARTING:
                self._chart.take_over(self._file, self._run())
        return self._catalog

    def _load(self) -> Catalog:
        try:
            return load_checks(self._settings)
        except UnusableError as error:  # names and plug-ins that read_settings does not look up
            tell(f"{error}; going on without settings")
            own = tuple(entry for entry in self._settings.ignore if entry.by == CALLBACK)
            self._settings = Settings(ignore=own)
            return load_checks(self._settings)

    def _publish(self, job: Job, news: Sequence[News], occasion: Occasion) -> None:
        from doctor.outlets.metrics import metrics

        report = self._chart.report
        if report is None:
            return
        self.metrics = metrics(job, report)

        def publish(outlet: Outlet) -> None:
            if news:
                outlet.found(news, report)
            outlet.round(job, report)
            if occasion == "end":
                outlet.ended(report)

        for outlet in list(self._outlets):
            self._guarded(outlet, publish)

    def _guarded(self, outlet: Outlet, call: Callable[[Outlet], None]) -> None:
        """An outlet that breaks is left out from then on; the others go on."""
        try:
            call(outlet)
        except Exception as error:
            self._outlets = [one for one in self._outlets if one is not outlet]
            tell(f"{type(outlet).__name__} is switched off: {type(error).__name__}: {error}")


def _secret() -> Secret | None:
    """The key of the job, if there is one that can be used."""
    try:
        return secret_of(os.environ)
    except UnusableError as error:
        tell(f"{error}; continuing without a key: messages of the ranks are not signed")
        return None


def _why_it_ends(ruling: Ruling) -> str:
    way_out = f" (the way out: doctor explain {ruling.ids[0]})" if ruling.ids else ""
    return f"the doctor ends this run before its first batch, as on_error='raise' says: {ruling.words}{way_out}"


def _ruling(report: Report, occasion: Occasion) -> Ruling:
    """Whether what was found this time breaks the run. A stall is explained only by what speaks of progress or data."""
    families = ("progress", "data", "host") if occasion in ("stall", "failure") else ()
    errors = [
        (result, finding)
        for result in report.results
        for finding in result.findings
        if finding.stands and finding.severity is Severity.ERROR and (not families or result.family in families)
    ]
    if not errors:
        return Ruling()
    errors.sort(key=lambda pair: (pair[0].id != report.primary, pair[1].explained_by is not None))
    ids = tuple(dict.fromkeys(result.id for result, _ in errors))
    words = "; ".join(f"{result.id} {finding.summary}" for result, finding in errors[:3])
    ranks = tuple(sorted({rank for _, finding in errors for rank in finding.ranks}))
    return Ruling(sick=True, words=shortened(words), ids=ids[:MOST_IDS], ranks=ranks)


def _is_of(news: News, ruling: Ruling) -> bool:
    """Whether a finding is one of those that the ruling was for, or a consequence of one."""
    return bool({news.result.id, news.finding.explained_by} & {*ruling.ids})
