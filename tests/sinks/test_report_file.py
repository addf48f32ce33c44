import json
import threading

from doctor.monitor.sinks.report_file import ReportFileSink
from tests.sinks.reports import DIED, SLOW, all_news, report_of, result_of


def test_the_report_is_written_when_something_is_found_and_at_the_end(tmp_path):
    sink = ReportFileSink(tmp_path / "rankdoctor", print)
    healthy, faulty = report_of(result_of("RUN003", "slow")), report_of(result_of("RUN003", "slow", SLOW))
    sink.found([], healthy)
    sink.round(None, healthy)
    assert not sink.path.exists()
    sink.found(all_news(faulty), faulty)
    assert json.loads(sink.path.read_text())["primary"] == "RUN003"
    sink.ended(healthy)
    assert json.loads(sink.path.read_text())["verdict"] == "pass"
    assert [entry.name for entry in sink.path.parent.iterdir()] == ["report.json"]


def test_a_reader_always_sees_a_whole_report(tmp_path):
    sink = ReportFileSink(tmp_path, print)
    report = report_of(result_of("RUN004", "rank-died", *[DIED] * 50))
    sink.ended(report)
    whole, done = sink.path.read_bytes(), threading.Event()
    seen = set()

    def read():
        while not done.is_set():
            seen.add(sink.path.read_bytes())

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(50):
        sink.ended(report)
    done.set()
    reader.join()
    assert seen == {whole}


def test_an_unwritable_folder_is_reported_once(tmp_path):
    (tmp_path / "file").write_text("")
    said = []
    sink = ReportFileSink(tmp_path / "file", said.append)
    report = report_of(result_of("RUN003", "slow", SLOW))
    sink.found(all_news(report), report)
    sink.ended(report)
    assert said == [f"cannot write {sink.path}: Not a directory"]
