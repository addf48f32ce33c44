"""Sends the metrics and findings of a run to an OpenTelemetry collector, by way of a child process; off by default.

The SDK runs in the child because its exporter draws from ``random`` at every export, which would change what the
training draws (``_compute_backoff`` in ``opentelemetry.exporter.otlp.common.http``), retries for seconds, and shares
the interpreter's lock. Metrics have the names that Prometheus is served, so that dashboards and alerts fit both.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import subprocess
import threading
from collections.abc import Callable, Sequence

import msgspec

from doctor.core.background import start_daemon
from doctor.core.clock import time_ns
from doctor.core.job import Job
from doctor.core.process import abandon_child, start_python
from doctor.core.report_document import Report
from doctor.monitor.sinks.finding_sink import FindingEvent, FindingSink
from doctor.monitor.sinks.otlp_messages import TelemetryEvent, TelemetryMessage, TelemetrySample
from doctor.monitor.sinks.prometheus import GAUGES, MOST_RANKS
from doctor.monitor.sinks.rank_metrics import all_rank_metrics
from doctor.monitor.sinks.report_metrics import report_samples
from doctor.report.formatting import place, spelt_out

LAST_SECONDS = 2.0
"""Seconds for the last message to be delivered at the end of a run."""
MOST_EVENTS = 1000
"""Findings that wait to be sent."""
PACKAGES = ("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http")
MISSING = f"otlp needs OpenTelemetry: pip install {' '.join(PACKAGES)}"
GRPC = "otlp sends OTLP over HTTP, and OTEL_EXPORTER_OTLP_PROTOCOL asks for grpc: nothing is sent"


def why_not_otlp() -> str | None:
    """Return why nothing can be sent from this environment; ``None`` if it can."""
    try:
        for name in PACKAGES:  # looked up and not imported: the child imports them
            importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return MISSING
    return GRPC if os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL") == "grpc" else None


class OtlpSink(FindingSink):
    """Sends the metrics of all ranks after every round, and an event for each new finding.

    ``endpoint``: base URL of a collector, ``None`` for OTEL_EXPORTER_OTLP_ENDPOINT. ``write_line`` gets one line if
    something cannot be sent. No call waits for the collector, except :meth:`close` for ``last_seconds``.
    """

    def __init__(
        self, endpoint: str | None, write_line: Callable[[str], None], *, last_seconds: float = LAST_SECONDS
    ) -> None:
        self._endpoint = endpoint
        self._write_line = write_line
        self._last_seconds = last_seconds
        self._changed = threading.Condition()
        self._events: list[TelemetryEvent] = []
        self._message: TelemetryMessage | None = None
        self._is_closing = False
        self._has_failed = False
        self._thread: threading.Thread | None = None
        self._child: subprocess.Popen[bytes] | None = None

    def found(self, events: Sequence[FindingEvent], report: Report) -> None:
        """Keep new findings for the message of this round."""
        own = [_event(one, report) for one in events if one.finding.stands]
        self._events = [*self._events, *own][-MOST_EVENTS:]

    def round(self, job: Job, report: Report) -> None:
        """Send the metrics of the job, and the findings of this round."""
        ranks = list(all_rank_metrics(job))[:MOST_RANKS]
        samples = [
            TelemetrySample(gauge.name, gauge.meaning, float(value), {"rank": str(one.rank), "host": one.host})
            for gauge in GAUGES
            for one in ranks
            if (value := gauge.read(one)) is not None
        ]
        for gauge, labels, number in report_samples(report):
            named = dict(zip(gauge.labels, labels, strict=True))
            samples.append(TelemetrySample(gauge.name, gauge.meaning, number, named))
        self._send(TelemetryMessage(report.run or "", tuple(samples), tuple(self._events)))
        self._events = []

    def close(self) -> None:
        """Have the last message delivered, for a limited time, and end the child."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(self._last_seconds)
            if self._thread.is_alive():
                self._fail(f"the last values could not be delivered within {self._last_seconds:g} s")
        if self._child is not None:
            abandon_child(self._child)

    def _send(self, message: TelemetryMessage) -> None:
        """Replace a message that was not sent yet; its findings are kept."""
        with self._changed:
            if self._message is not None:
                events = (*self._message.events, *message.events)[-MOST_EVENTS:]
                message = msgspec.structs.replace(message, events=events)
            self._message = message
            self._changed.notify()
        if self._thread is None:
            self._thread = start_daemon("doctor-otlp", self._work)

    def _work(self) -> None:
        """Write messages to the child until the end; the child's own deadlines may delay that."""
        try:
            self._child = child = start_python(
                "doctor.monitor.sinks.otlp_process",
                [self._endpoint or ""],
                stdin=subprocess.PIPE,
                env={**os.environ, "DOCTOR_DISABLE": "1"},
            )
            start_daemon("doctor-otlp-errors", self._report_errors, child)
            pipe = child.stdin
            while pipe is not None and (message := self._next()) is not None:
                pipe.write(msgspec.json.encode(message) + b"\n")
                pipe.flush()
            if pipe is not None:
                pipe.close()
            child.wait()
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            self._fail(str(error))

    def _next(self) -> TelemetryMessage | None:
        with self._changed:
            self._changed.wait_for(lambda: self._message is not None or self._is_closing)
            message, self._message = self._message, None
            return message

    def _report_errors(self, child: subprocess.Popen[bytes]) -> None:
        with contextlib.suppress(OSError, ValueError):  # closed by the end of the run
            for line in child.stdout or ():
                self._fail(line.decode("utf-8", "replace").strip())

    def _fail(self, reason: str) -> None:
        if not self._has_failed:
            self._has_failed = True
            self._write_line(spelt_out(f"OpenTelemetry: {reason}"))


def _event(one: FindingEvent, report: Report) -> TelemetryEvent:
    finding = one.finding
    attributes = {
        "id": one.result.id,
        "name": one.result.name,
        "ranks": ",".join(map(str, finding.ranks)),
        "hosts": ",".join(finding.hosts),
        "place": place(finding, report),
        "fix": finding.fix,
    }
    return TelemetryEvent(time_ns(), finding.severity.value, finding.summary, attributes)
