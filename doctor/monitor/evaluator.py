"""Evaluates a watched run: runs the checks on the job, notifies the sinks and decides."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from doctor.core.clock import time
from doctor.core.errors import UnusableError
from doctor.core.files.own_folder import OwnFile
from doctor.core.finding import Severity
from doctor.core.job import Job
from doctor.core.message_bounds import shortened
from doctor.core.report_document import Report
from doctor.core.settings import IgnoreEntry, Settings, read_settings
from doctor.monitor.finding_history import FindingHistory, FindingKey, finding_key
from doctor.monitor.sinks.console import print_status
from doctor.monitor.sinks.finding_sink import FindingEvent, FindingSink
from doctor.monitor.watch_options import WatchOptions
from doctor.monitor.watchdog.decision import MOST_IDS, Decision, Trigger
from doctor.session import judge, load_checks

if TYPE_CHECKING:
    from doctor.core.check_registry import CheckRegistry

TAKEOVER_AGE = 5.0
"""Seconds before the start of this evaluator from which on a report counts as one of this run."""
MODULES_AHEAD = 4
"""Modules of checks that are imported in each periodic round, in milliseconds."""
CALLBACK = "callback"
"""Origin of the ignore entries that the callback's arguments name."""


def run_settings(options: WatchOptions, *, report_notes: bool) -> Settings:
    """Merge the settings of the working directory with the callback's own arguments.

    ``report_notes``: print the notes of the settings file; only one rank of a run does.
    """
    found = Settings()
    try:
        found = read_settings(Path.cwd())
    except UnusableError as error:
        print_status(f"{error}; continuing without settings")
    except FileNotFoundError:
        print_status("the working directory was removed; continuing without settings")
    if report_notes:
        for note in found.notes:
            print_status(note)
    ignored = tuple(IgnoreEntry(name, "given to the callback", by=CALLBACK) for name in options.ignore)
    return Settings(
        select=tuple(options.select) or found.select,
        ignore=ignored + found.ignore,
        plugins=found.plugins,
        limits=found.limits,
        directories=found.directories,
        withheld=found.withheld,
        typed=frozenset((*options.select, *options.ignore)),
    )


class RunEvaluator:
    """Evaluates the job whenever the watchdog has collected it, and notifies the sinks.

    Every rank has one; only that of the evaluating rank is called. ``run_id`` returns the id of the run, empty until it
    is known.
    """

    def __init__(
        self,
        settings: Settings,
        sinks: Sequence[FindingSink],
        report: Path | OwnFile,
        rank: int,
        run_id: Callable[[], str] = lambda: "",
    ) -> None:
        self.metrics: Mapping[str, float] = {}
        self._settings = settings
        self._all_sinks = tuple(sinks)
        self._active_sinks = list(sinks)
        self._report_file = OwnFile.of(report)
        self._rank = rank
        self._run_id = run_id
        self.history = FindingHistory()
        self._registry: CheckRegistry | None = None
        self._started = time()
        self._lock = threading.Lock()
        self._stall_findings: set[FindingKey] = set()

    def __call__(self, job: Job, trigger: Trigger) -> Decision:
        """Run the checks on ``job``, publish new findings and decide."""
        with self._lock:
            registry = self._load_registry()
            report = judge(job, registry, self._settings, must_be_complete=False, started=self._started)
            if trigger == "round":
                self._load_ahead(registry)
            events = self.history.note(msgspec.structs.replace(report, run=self._run_id() or None))
            self._publish(job, events, trigger)
            decision = _decision(report, trigger)
            if trigger == "stall":
                ids = {*decision.ids}
                self._stall_findings |= {
                    finding_key(one) for one in events if ids & {one.result.id, one.finding.explained_by}
                }
            return decision

    def report_recovery(self, decision: Decision, seconds: float) -> None:
        """Downgrade the findings of a stall that ended; what still holds is found again."""
        with self._lock:
            demoted = self.history.downgrade(self._stall_findings, seconds)
            self._stall_findings = set()
            if (report := self.history.report) is not None and demoted:
                self._notify(self._active_sinks, lambda sink: sink.found(demoted, report))
            ids = ", ".join(dict.fromkeys(one.result.id for one in demoted))
            now = f"; {ids} downgraded to info" if ids else ""
            print_status(f"training resumed after {seconds:.0f} s{now}")

    def close(self) -> None:
        """Release the resources of all sinks, including those that failed."""
        sinks, self._all_sinks = self._all_sinks, ()
        self._notify(sinks, lambda sink: sink.close())

    def _load_registry(self) -> CheckRegistry:
        if self._registry is None:
            try:
                registry = load_checks(self._settings, by_index=True)
            except UnusableError as error:  # check names and plugins, which read_settings does not resolve
                print_status(f"{error}; continuing without settings")
                own = tuple(entry for entry in self._settings.ignore if entry.by == CALLBACK)
                self._settings = Settings(ignore=own)
                registry = load_checks(self._settings, by_index=True)
            watched = tuple(check for check in registry.checks if set(check.when) & set("PR"))
            self._registry = type(registry)(watched, registry.broken)
            earlier = self._report_file.look() if self._rank else None
            if earlier is not None and earlier.st_mtime >= self._started - TAKEOVER_AGE:
                self.history.take_over(self._report_file, self._run_id())
        return self._registry

    def _load_ahead(self, registry: CheckRegistry) -> None:
        """Import some modules of checks that nothing has called yet: during a hang, their files may be out of reach."""
        from doctor.core.check_registry import load_ahead

        load_ahead(registry.checks, MODULES_AHEAD)

    def _publish(self, job: Job, events: Sequence[FindingEvent], trigger: Trigger) -> None:
        from doctor.monitor.sinks.logger_metrics import metrics

        report = self.history.report
        if report is None:
            return
        self.metrics = metrics(job, report)

        def publish(sink: FindingSink) -> None:
            if events:
                sink.found(events, report)
            sink.round(job, report)
            if trigger == "end":
                sink.ended(report)

        self._notify(self._active_sinks, publish)

    def _notify(self, sinks: Iterable[FindingSink], call: Callable[[FindingSink], None]) -> None:
        """Call sinks; one that raises is disabled and the others continue."""
        for sink in [*sinks]:
            try:
                call(sink)
            except Exception as error:
                self._active_sinks = [one for one in self._active_sinks if one is not sink]
                print_status(f"sink {type(sink).__name__} failed and is disabled: {type(error).__name__}: {error}")


def _decision(report: Report, trigger: Trigger) -> Decision:
    """Decide whether the findings of this report break the run.

    A stall or failure is only explained by findings of the families progress, data and host.
    """
    families = ("progress", "data", "host") if trigger in ("stall", "failure") else ()
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
    return Decision(has_errors=True, words=shortened(words), ids=ids[:MOST_IDS], ranks=ranks)
