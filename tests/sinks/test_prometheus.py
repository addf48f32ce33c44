import multiprocessing
import socket
import sys
import urllib.error
import urllib.request

import pytest

from doctor.api import Finding, Severity
from doctor.facts import ProgressFacts
from doctor.monitor.sinks.prometheus import GAUGES, PrometheusSink
from doctor.monitor.sinks.report_metrics import FINDINGS
from doctor.monitor.watch_options import WatchOptions
from doctor.testing import running
from doctor.testing.cases import GIB
from tests.sinks.reports import DIED, SLOW, all_news, report_of, result_of

parser = pytest.importorskip("prometheus_client.parser", reason="needs prometheus-client")

LABELS = ("rank", "host", "id", "name", "severity")


@pytest.fixture
def sink():
    sink = PrometheusSink(0, rank=0, host="node0", write_line=pytest.fail)
    yield sink
    sink.close()


def scraped(sink):
    """What a scrape gives: name -> values of labels -> value."""
    with urllib.request.urlopen(f"http://127.0.0.1:{sink.port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    samples = {}
    for family in parser.text_string_to_metric_families(text):
        for sample in family.samples:
            labels = tuple(sample.labels[name] for name in LABELS if name in sample.labels)
            samples.setdefault(sample.name, {})[labels] = sample.value
    return samples


def test_every_gauge_is_served_for_every_rank_of_the_job(sink):
    sketch = running(2, 2).alter(ProgressFacts, ranks=(3,), state="stalled", idle=31.5)
    sink.round(sketch.job(), report_of(sketch=sketch))
    samples = scraped(sink)
    ranks = {("0", "node0"), ("1", "node0"), ("2", "node1"), ("3", "node1")}
    assert {gauge.name: set(samples[gauge.name]) for gauge in GAUGES} == {gauge.name: ranks for gauge in GAUGES}
    assert samples["rankdoctor_stalled"] == {key: float(key[0] == "3") for key in ranks}
    assert samples["rankdoctor_seconds_since_progress"]["3", "node1"] == 31.5
    assert samples["rankdoctor_memory_reserved_bytes"]["0", "node0"] == 30 * GIB
    assert samples["rankdoctor_step_seconds"]["2", "node1"] == 0.4


def test_what_a_rank_does_not_show_is_left_out(sink):
    sketch = running(1, 2, gpus=0)
    sink.round(sketch.job(), report_of(sketch=sketch))
    assert "rankdoctor_memory_reserved_bytes" not in scraped(sink)
    assert len(scraped(sink)["rankdoctor_resident_bytes"]) == 2


def test_findings_are_counted_by_check_and_severity_and_go_when_they_are_gone(sink):
    slow = result_of("RUN003", "rank-straggling", SLOW, Finding("another"), severity=Severity.WARNING)
    report = report_of(slow, result_of("RUN004", "rank-died", DIED))
    sink.found(all_news(report), report)
    assert scraped(sink)[FINDINGS.name] == {
        ("RUN003", "rank-straggling", "warning"): 2.0,
        ("RUN004", "rank-died", "error"): 1.0,
    }
    sink.ended(report_of())
    assert FINDINGS.name not in scraped(sink)


def test_a_rank_that_does_not_evaluate_shows_itself():
    sink = PrometheusSink(0, rank=4, host="node2", write_line=pytest.fail)
    member = running(3, 2).members[4]
    sink.own_facts(member.sections)
    try:
        assert scraped(sink)["rankdoctor_step"] == {("4", "node2"): 140.0}
    finally:
        sink.close()


def test_its_own_card_renews_the_rank_of_the_last_round(sink):
    job = running(1, 2)
    sink.round(job.job(), report_of(sketch=job))
    sink.own_facts(job.alter(ProgressFacts, step=999).members[0].sections)
    assert scraped(sink)["rankdoctor_step"] == {("0", "node0"): 999.0, ("1", "node0"): 140.0}


def test_of_a_very_large_job_each_host_serves_its_own(sink, monkeypatch):
    monkeypatch.setattr("doctor.monitor.sinks.prometheus.MOST_RANKS", 3)
    sketch = running(2, 2)
    sink.round(sketch.job(), report_of(sketch=sketch))
    assert set(scraped(sink)["rankdoctor_step"]) == {("0", "node0"), ("1", "node0")}


def test_two_processes_that_claim_one_rank_do_not_break_the_scrape(sink):
    sketch = running(1, 2).renumbered(1, 0)
    sink.round(sketch.job(), report_of(sketch=sketch))
    assert len(scraped(sink)["rankdoctor_step"]) == 1


def test_a_port_that_is_taken_is_one_line_and_no_failure():
    said = []
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        sink = PrometheusSink(port, rank=0, host="node0", write_line=said.append)
        sink.round(running().job(), report_of())
        sink.close()
    assert sink.port is None
    assert said == [f"no metrics for Prometheus: port {port} of this host: Address already in use"]


def test_a_port_that_is_none_is_one_line():
    said = []
    PrometheusSink(70000, rank=0, host="node0", write_line=said.append).close()
    assert len(said) == 1
    assert "port 70000" in said[0]


def test_two_runs_of_one_host_do_not_share_a_port(sink):
    said = []
    PrometheusSink(sink.port, rank=0, host="node0", write_line=said.append).close()
    assert len(said) == 1


def test_a_data_worker_that_outlives_the_run_does_not_hold_the_port():
    sink = PrometheusSink(0, rank=0, host="node0", write_line=pytest.fail)
    port = sink.port
    fork = multiprocessing.get_context("fork")
    leave = fork.Event()
    worker = fork.Process(target=leave.wait, args=(30,))
    worker.start()
    try:
        sink.close()
        with pytest.raises(urllib.error.URLError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5)
        PrometheusSink(port, rank=0, host="node0", write_line=pytest.fail).close()
    finally:
        leave.set()
        worker.join(10)


def test_the_registry_is_its_own(sink):
    from prometheus_client import REGISTRY, generate_latest

    assert b"rankdoctor" not in generate_latest(REGISTRY)
    assert not [name for name in scraped(sink) if not name.startswith("rankdoctor_")]


def test_a_client_that_goes_away_says_nothing(sink, capfd):
    sketch = running(64, 8)
    sink.round(sketch.job(), report_of(sketch=sketch))
    for _ in range(5):
        with socket.create_connection(("127.0.0.1", sink.port)) as client:
            client.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    assert len(scraped(sink)["rankdoctor_step"]) == 512
    assert capfd.readouterr().err == ""


def test_without_prometheus_client_the_reason_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ImportError, match="prometheus_port needs prometheus-client: pip install prometheus-client"):
        PrometheusSink(0, rank=0, host="node0", write_line=print)


def test_the_option_is_refused_where_it_stands(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ValueError, match="prometheus_port needs prometheus-client: pip install prometheus-client"):
        WatchOptions(prometheus_port=9500)


def test_the_sentences_of_the_metrics_end():
    assert all(gauge.meaning.endswith(".") and gauge.name.startswith("rankdoctor_") for gauge in GAUGES)
    assert len({gauge.name for gauge in GAUGES} | {FINDINGS}) == len(GAUGES) + 1
