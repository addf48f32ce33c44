"""The child process that exports metrics and findings with the SDK of OpenTelemetry: ``main`` reads stdin.

What the SDK logs as a warning or worse is written to stdout, a line each, for the watched process to print.
"""

from __future__ import annotations

import logging
import math
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from doctor.core.background import start_daemon
from doctor.core.decoding import prepared
from doctor.monitor.sinks.otlp_messages import TelemetryEvent, TelemetryMessage, TelemetrySample

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, Observation

SCOPE = "rankdoctor"
EVENT = "rankdoctor.finding"
LINGER = 10.0
"""Seconds after which it ends if the watched process is gone."""


class TelemetryRecorder:
    """Records messages as observable gauges and log records with an event name.

    ``metric_readers``, ``log_processors``: of the SDK. Values of the newest message replace all others, so that a
    finding that is gone, or a rank, is not reported any more.
    """

    def __init__(self, metric_readers: Sequence[Any], log_processors: Sequence[Any], run: str = "") -> None:
        from opentelemetry.sdk._logs import LoggerProvider
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.resources import Resource

        resource = Resource.create(_resource_attributes(run))
        self._samples: dict[str, list[TelemetrySample]] = {}
        self._known: set[str] = set()
        self.meters = MeterProvider(metric_readers, resource=resource, shutdown_on_exit=False)
        self.loggers = LoggerProvider(resource=resource, shutdown_on_exit=False)
        for processor in log_processors:
            self.loggers.add_log_record_processor(processor)
        self._meter = self.meters.get_meter(SCOPE)
        self._logger = self.loggers.get_logger(SCOPE)

    def record(self, message: TelemetryMessage) -> None:
        """Take the values of a message, and emit its events."""
        samples: dict[str, list[TelemetrySample]] = {}
        for one in message.samples:
            samples.setdefault(one.name, []).append(one)
        self._samples = samples
        for name in samples.keys() - self._known:
            self._known.add(name)
            meaning = samples[name][0].meaning
            self._meter.create_observable_gauge(name, callbacks=[self._observer(name)], description=meaning)
        for event in message.events:
            self._emit(event)

    def flush(self) -> None:
        """Export all of it, and wait for that."""
        self.meters.force_flush()
        self.loggers.force_flush()

    def _observer(self, name: str) -> Callable[[CallbackOptions], Iterable[Observation]]:
        from opentelemetry.metrics import Observation

        def observe(options: CallbackOptions) -> Iterable[Observation]:
            return [Observation(one.value, dict(one.attributes)) for one in self._samples.get(name, ())]

        return observe

    def _emit(self, event: TelemetryEvent) -> None:
        from opentelemetry._logs import LogRecord, SeverityNumber

        severity = {"error": SeverityNumber.ERROR, "warning": SeverityNumber.WARN}.get(
            event.severity, SeverityNumber.INFO
        )
        record = LogRecord(
            timestamp=event.at,
            observed_timestamp=event.at,
            severity_text=event.severity.upper(),
            severity_number=severity,
            body=event.body,
            attributes=dict(event.attributes),
            event_name=EVENT,
        )
        self._logger.emit(record)


def _resource_attributes(run: str) -> dict[str, str]:
    """Return what the standard variables do not set: they are overridden by what is passed."""
    named = "OTEL_SERVICE_NAME" in os.environ or "service.name" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    return {**({} if named else {"service.name": SCOPE}), **({"rankdoctor.run.id": run} if run else {})}


def otlp_recorder(endpoint: str, run: str) -> TelemetryRecorder:
    """Return a recorder that exports over OTLP/HTTP. ``endpoint``: base URL, empty for that of the environment."""
    from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk._logs.export import BatchLogRecordProcessor
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

    base = endpoint.rstrip("/")
    metrics = OTLPMetricExporter(endpoint=f"{base}/v1/metrics" if base else None)
    logs = OTLPLogExporter(endpoint=f"{base}/v1/logs" if base else None)
    reader = PeriodicExportingMetricReader(metrics, export_interval_millis=math.inf)
    return TelemetryRecorder([reader], [BatchLogRecordProcessor(logs)], run)


class _LineHandler(logging.Handler):
    """Writes each record to stdout as one line."""

    def emit(self, record: logging.LogRecord) -> None:
        _tell(record.getMessage())


def _tell(text: str) -> None:
    try:
        sys.stdout.write(" ".join(text.split()) + "\n")
        sys.stdout.flush()
    except (OSError, ValueError):  # the watched process is gone
        os._exit(1)


def main(endpoint: str) -> None:
    """Export the messages on stdin until it ends."""
    logging.getLogger().addHandler(_LineHandler(logging.WARNING))
    recorder: TelemetryRecorder | None = None
    try:
        for line in sys.stdin.buffer:
            message = msgspec.json.decode(line, type=prepared(TelemetryMessage))
            recorder = recorder or otlp_recorder(endpoint, message.run)
            recorder.record(message)
            recorder.flush()
    except Exception as error:  # noqa: BLE001 - said to the watched process, which prints it
        _tell(f"{type(error).__name__}: {error}")
    start_daemon("linger", _end_later)
    if recorder is not None:
        recorder.loggers.shutdown()
    os._exit(0)


def _end_later() -> None:
    import time

    time.sleep(LINGER)
    os._exit(1)
