"""Serves the newest metrics of a run to Prometheus: one port per host, off by default."""

from __future__ import annotations

import contextlib
import socket
import socketserver
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from doctor.core.background import start_thread
from doctor.core.job import Job, SectionHolder, Sections
from doctor.core.report_document import Report
from doctor.monitor.sinks.finding_sink import FindingEvent, FindingSink
from doctor.monitor.sinks.rank_metrics import RankMetrics, all_rank_metrics, rank_metrics
from doctor.monitor.sinks.report_metrics import REPORT_GAUGES, GaugeSample, report_samples

if TYPE_CHECKING:
    from prometheus_client.core import GaugeMetricFamily

PATIENCE = 10.0
"""Seconds of silence after which a client's connection is closed."""

MOST_RANKS = 1024
"""Maximum number of ranks that one process serves. Writing this many takes a tenth of a second of the interpreter,
shared with the training; in larger jobs every host serves its own ranks."""


class RankGauge(NamedTuple):
    """A metric with the labels ``rank`` and ``host``.

    ``source``: an attribute of :class:`.RankMetrics`, or of one of its sections; without the section, or if the value
    is ``None``, the rank is omitted.
    """

    name: str
    meaning: str
    source: str

    def read(self, metrics: RankMetrics) -> float | None:
        """Return the value of one rank."""
        section, _, field = self.source.rpartition(".")
        holder = getattr(metrics, section) if section else metrics
        return None if holder is None else getattr(holder, field)


GAUGES = (
    RankGauge("rankdoctor_epoch", "Epoch, from 0.", "progress.epoch"),
    RankGauge("rankdoctor_step", "Optimizer steps so far.", "progress.step"),
    RankGauge(
        "rankdoctor_seconds_since_progress",
        "Seconds without progress when the rank last reported.",
        "progress.idle",
    ),
    RankGauge("rankdoctor_stalled", "1 if the rank is stalled, failed or unreachable.", "is_stalled"),
    RankGauge(
        "rankdoctor_last_seen_timestamp_seconds",
        "Time of the rank's last report, seconds since the epoch.",
        "progress.at",
    ),
    RankGauge("rankdoctor_step_seconds", "Median training step of the newest window.", "window.total"),
    RankGauge("rankdoctor_data_wait_seconds", "Seconds per step spent waiting for the batch.", "window.data"),
    RankGauge("rankdoctor_forward_seconds", "Of a step, as the host sees it.", "window.forward"),
    RankGauge(
        "rankdoctor_backward_seconds",
        "Of a step, as the host sees it; waiting for other ranks may lie in here.",
        "window.backward",
    ),
    RankGauge("rankdoctor_optimizer_seconds", "Of a step, as the host sees it.", "window.optimizer"),
    RankGauge(
        "rankdoctor_memory_allocated_bytes", "Bytes allocated by torch on the rank's device.", "memory.allocated"
    ),
    RankGauge(
        "rankdoctor_memory_reserved_bytes",
        "Bytes reserved by torch's allocator on the rank's device.",
        "memory.reserved",
    ),
    RankGauge(
        "rankdoctor_memory_reserved_peak_bytes",
        "Peak of the bytes reserved by torch's allocator.",
        "memory.peak_reserved",
    ),
    RankGauge("rankdoctor_device_memory_bytes", "Total memory of the rank's device.", "memory.total"),
    RankGauge(
        "rankdoctor_device_free_bytes",
        "Free memory of the rank's device, as the driver reports it.",
        "memory.device_free",
    ),
    RankGauge("rankdoctor_resident_bytes", "Host memory of the rank's process.", "memory.resident"),
    RankGauge("rankdoctor_workers_resident_bytes", "Host memory of all data workers of the rank.", "workers"),
)
"""The metrics of each rank."""


class PrometheusSink(FindingSink):
    """Serves the metrics of this host's ``rank`` and, on the evaluating rank, of the whole job.

    It uses a registry of its own. ``port`` 0 takes any free port; :attr:`port` is the port in use, ``None`` if it could
    not be opened, which is reported by ``write_line``. Only the lowest local rank of a host should have one.

    Raises:
        ImportError: prometheus-client is not installed.
    """

    def __init__(self, port: int, *, rank: int, host: str, write_line: Callable[[str], None]) -> None:
        try:
            from prometheus_client import CollectorRegistry, make_wsgi_app
        except ImportError as error:
            raise ImportError("prometheus_port needs prometheus-client: pip install prometheus-client") from error
        self.port: int | None = None
        self._rank, self._host = rank, host
        self._ranks: dict[tuple[int, str], RankMetrics] = {}
        self._samples: tuple[GaugeSample, ...] = ()
        self._server: _Server | None = None
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server = _Server(("", port), _Handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            write_line(f"no metrics for Prometheus: port {port} of this host: {reason}")
            return
        self._server.set_app(make_wsgi_app(registry))
        self.port = self._server.server_port
        start_thread("doctor-prometheus", self._server.serve_forever)

    def found(self, events: Sequence[FindingEvent], report: Report) -> None:
        """Take the metrics of the report: standing findings by check and severity, and lost time."""
        self._samples = tuple(report_samples(report))

    def round(self, job: Job, report: Report) -> None:
        """Take the metrics of all ranks in the job; of a very large job, of this host's only."""
        few = len(job.ranks) <= MOST_RANKS
        self._ranks = {(one.rank, one.host): one for one in all_rank_metrics(job) if few or one.host == self._host}
        self.found((), report)

    def own_facts(self, sections: Sections) -> None:
        """Take the metrics of this rank from its own facts."""
        own = rank_metrics(SectionHolder(sections), self._rank, self._host)
        self._ranks = {**self._ranks, (self._rank, self._host): own}

    def ended(self, report: Report) -> None:
        """Take the final findings."""
        self.found((), report)

    def close(self) -> None:
        """Close the port."""
        if self._server is not None:
            self._server.stop()
            self._server, self.port = None, None

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the metrics; called by prometheus-client in the thread of a scrape."""
        from prometheus_client.core import GaugeMetricFamily

        ranks, samples = self._ranks, self._samples
        for gauge in GAUGES:
            family = GaugeMetricFamily(gauge.name, gauge.meaning, labels=("rank", "host"))
            for one in ranks.values():
                value = gauge.read(one)
                if value is not None:
                    family.add_metric((str(one.rank), one.host), float(value))
            yield family
        for own in REPORT_GAUGES:
            family = GaugeMetricFamily(own.name, own.meaning, labels=own.labels)
            for sample in samples:
                if sample.gauge is own:
                    family.add_metric(sample.labels, sample.value)
            yield family


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True
    allow_reuse_port = False  # the port of another run must not be shared silently

    def server_bind(self) -> None:
        """Bind without WSGIServer's lookup of this host's name, which may block."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = "", self.server_address[1]
        self.setup_environ()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnect."""

    def stop(self) -> None:
        """Stop listening, also for processes that inherited the socket.

        Data loader workers outlive a run. The shutdown also wakes the serving thread, which then ends.
        """
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.shutdown()
        self.server_close()


class _Handler(WSGIRequestHandler):
    timeout = PATIENCE

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - as the base class has it
        """Write no access log."""
