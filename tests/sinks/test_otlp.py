"""Telemetry for OpenTelemetry: through the real SDK, to a real receiver, and to collectors that do not answer."""

# ruff: noqa: E402 - what is imported needs what the tests are skipped without

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

sdk = pytest.importorskip("opentelemetry.sdk.metrics", reason="needs the extra otel")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs the extra otel")

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.sdk._logs import export as logs
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from doctor.monitor.sinks.otlp import OtlpSink
from doctor.monitor.sinks.otlp_messages import TelemetryMessage
from doctor.monitor.sinks.otlp_process import EVENT, TelemetryRecorder
from doctor.monitor.sinks.prometheus import GAUGES
from doctor.testing import running
from tests.lab.needs import ROOT
from tests.lab.ports import free_port
from tests.lab.speed import NEVER, patience
from tests.sinks.reports import DIED, SLOW, all_news, report_of, result_of

SKETCH = running(2, 2)
Values = dict[str, dict[tuple[str, ...], float]]


class Receiver(ThreadingHTTPServer):
    """A collector: keeps what it is sent, by path. ``status``: of its answers."""

    def __init__(self, status: int = 200) -> None:
        self.status = status
        self.received: list[tuple[str, bytes]] = []
        super().__init__(("127.0.0.1", 0), _Answer)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def metrics(self) -> list[Any]:
        bodies = [body for path, body in self.received if path == "/v1/metrics"]
        return [ExportMetricsServiceRequest.FromString(body) for body in bodies]

    def values(self) -> Values:
        """The newest values, by name and attributes."""
        found: Values = {}
        for resource in self.metrics()[-1].resource_metrics:
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    for point in metric.gauge.data_points:
                        labels = tuple(one.value.string_value for one in point.attributes)
                        found.setdefault(metric.name, {})[labels] = point.as_double
        return found

    def events(self) -> list[Any]:
        bodies = [body for path, body in self.received if path == "/v1/logs"]
        return [
            record
            for body in bodies
            for resource in ExportLogsServiceRequest.FromString(body).resource_logs
            for scope in resource.scope_logs
            for record in scope.log_records
        ]


class _Answer(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.received.append((self.path, body))
        self.send_response(self.server.status if self.headers["Content-Type"] == "application/x-protobuf" else 415)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: Any) -> None:
        """Be silent."""


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    server = Receiver()
    yield server
    server.shutdown()


def _round(sink: OtlpSink, *findings: Any) -> None:
    report = report_of(*findings, sketch=SKETCH)
    sink.found(all_news(report), report)
    sink.round(SKETCH.job(), report)


def test_metrics_of_a_round_reach_the_collector(receiver: Receiver) -> None:
    sink = OtlpSink(receiver.address, pytest.fail, last_seconds=patience(30))
    _round(sink, result_of("RUN004", "rank-died", DIED))
    sink.close()
    values = receiver.values()
    ranks = {("0", "node0"), ("1", "node0"), ("2", "node1"), ("3", "node1")}
    assert {gauge.name: set(values[gauge.name]) for gauge in GAUGES} == {gauge.name: ranks for gauge in GAUGES}
    assert values["rankdoctor_step_seconds"]["2", "node1"] == 0.4
    assert values["rankdoctor_findings"] == {("RUN004", "rank-died", "error"): 1.0}
    assert 0 < values["rankdoctor_scaling_efficiency"][()] <= 1


def test_each_finding_is_an_event_and_is_sent_once(receiver: Receiver) -> None:
    sink = OtlpSink(receiver.address, pytest.fail, last_seconds=patience(30))
    _round(sink, result_of("RUN004", "rank-died", DIED), result_of("RUN003", "slow", SLOW))
    sink.round(SKETCH.job(), report_of(sketch=SKETCH))
    sink.close()
    events = {record.body.string_value: record for record in receiver.events()}
    assert len(receiver.events()) == 2
    died = events[DIED.summary]
    attributes = {one.key: one.value.string_value for one in died.attributes}
    assert (died.event_name, died.severity_text) == (EVENT, "ERROR")
    assert (attributes["id"], attributes["ranks"]) == ("RUN004", "2")


@pytest.fixture
def recorded() -> Iterator[tuple[TelemetryRecorder, InMemoryMetricReader, Any]]:
    """A recorder of this process with the readers that the SDK has for tests."""
    in_memory = getattr(logs, "InMemoryLogRecordExporter", None) or logs.InMemoryLogExporter
    reader, kept = InMemoryMetricReader(), in_memory()
    recorder = TelemetryRecorder([reader], [logs.SimpleLogRecordProcessor(kept)], "run-1")
    yield recorder, reader, kept
    recorder.meters.shutdown()
    recorder.loggers.shutdown()


def _messages(*rounds: tuple[Any, ...]) -> list[TelemetryMessage]:
    """What a sink sends for these rounds of findings."""
    sink, sent = OtlpSink(None, pytest.fail), []
    sink._send = sent.append  # type: ignore[method-assign]
    for findings in rounds:
        _round(sink, *findings)
    return sent


def test_what_is_gone_is_not_reported_any_more(recorded: tuple[TelemetryRecorder, Any, Any]) -> None:
    recorder, reader, kept = recorded
    names = []
    for message in _messages((result_of("RUN004", "rank-died", DIED),), ()):
        recorder.record(message)
        data = json.loads(reader.get_metrics_data().to_json())
        (resource,) = data["resource_metrics"]
        metrics = resource["scope_metrics"][0]["metrics"]
        names.append({one["name"] for one in metrics if one["data"]["data_points"]})
    assert resource["resource"]["attributes"]["service.name"] == "rankdoctor"
    assert resource["resource"]["attributes"]["rankdoctor.run.id"] == "run-1"
    assert names[0] - names[1] == {"rankdoctor_findings"}
    assert [one.log_record.body for one in kept.get_finished_logs()] == [DIED.summary]


def test_names_of_the_standard_variables_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "my-training")
    reader = InMemoryMetricReader()
    recorder = TelemetryRecorder([reader], [])
    recorder.record(_messages(())[0])
    data = reader.get_metrics_data()
    assert data is not None
    assert data.resource_metrics[0].resource.attributes["service.name"] == "my-training"
    recorder.meters.shutdown()


def test_a_collector_that_refuses_is_one_line() -> None:
    said: list[str] = []
    sink = OtlpSink(f"http://127.0.0.1:{free_port()}", said.append, last_seconds=patience(30))
    for _ in range(3):
        _round(sink, result_of("RUN004", "rank-died", DIED))
    sink.close()
    assert len(said) == 1
    assert said[0].startswith("OpenTelemetry: ")


def test_a_collector_with_errors_is_one_line() -> None:
    server, said = Receiver(status=400), []
    sink = OtlpSink(server.address, said.append, last_seconds=patience(30))
    _round(sink, result_of("RUN004", "rank-died", DIED))
    sink.close()
    server.shutdown()
    assert len(said) == 1
    assert "400" in said[0]


@pytest.fixture
def black_hole() -> Iterator[str]:
    """An address that takes connections and never answers."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(64)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def test_a_collector_that_never_answers_holds_up_neither_a_round_nor_the_end(
    black_hole: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exporter itself would wait for a day."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", str(NEVER))
    said: list[str] = []
    sink = OtlpSink(black_hole, said.append, last_seconds=1.0)
    for _ in range(20):  # more than a pipe holds
        _round(sink, result_of("RUN004", "rank-died", DIED))
    sink.close()
    assert said == ["OpenTelemetry: the last values could not be delivered within 1 s"]
    assert sink._child is None or sink._child.wait(patience(10)) is not None


def test_no_random_number_is_drawn_in_the_watched_process(receiver: Receiver) -> None:
    """The exporter draws one for each export."""
    state = random.getstate()
    sink = OtlpSink(receiver.address, pytest.fail, last_seconds=patience(30))
    _round(sink)
    sink.close()
    assert receiver.metrics()
    assert random.getstate() == state


PROGRAM = """
import sys, time
import torch, doctor
model = torch.nn.Linear(2, 2)
with doctor.watch(dirpath=sys.argv[1], otlp=True, html_report=True) as watch:
    watch.model(model)
    for batch in watch.loader([torch.ones(2, 2)] * 50):
        model(batch).sum().backward()
        watch.step()
print(sorted(name for name in sys.modules if name.startswith("opentelemetry.")))
"""


def _run(folder: Path, endpoint: str, **environ: str) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("torch")
    given = {**os.environ, "OMP_NUM_THREADS": "1", "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, **environ}
    given["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder)], env=given, capture_output=True, text=True, timeout=patience(120)
    )


def test_a_watched_run_sends_to_the_endpoint_of_the_environment(receiver: Receiver, tmp_path: Path) -> None:
    done = _run(tmp_path, receiver.address)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n"  # the SDK is not loaded beside the training
    values = receiver.values()
    assert list(values["rankdoctor_last_seen_timestamp_seconds"]) == [("0", socket.gethostname())]
    assert "rankdoctor_lost_time_share" in values
    run = json.loads((tmp_path / "report.json").read_text())["run"]
    (resource,) = receiver.metrics()[-1].resource_metrics
    assert run in {one.value.string_value for one in resource.resource.attributes}


def test_a_run_ends_as_always_if_its_collector_never_answers(black_hole: str, tmp_path: Path) -> None:
    done = _run(tmp_path, black_hole, OTEL_EXPORTER_OTLP_TIMEOUT=str(NEVER))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("OpenTelemetry:") == 1
    assert (tmp_path / "report.html").exists()


def test_grpc_is_refused_in_words(tmp_path: Path) -> None:
    done = _run(tmp_path, "http://127.0.0.1:4317", OTEL_EXPORTER_OTLP_PROTOCOL="grpc")
    assert done.returncode == 0, done.stderr
    assert "asks for grpc: nothing is sent" in done.stderr
