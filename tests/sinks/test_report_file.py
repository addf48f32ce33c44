import json
import threading

from doctor.monitor.sinks.report_file import ReportFileSink
from tests.sinks.reports import DIED, SLOW, all_news, illness, report_of


def test_the_report_is_written_when_something_is_found_and_at_the_end(tmp_path):
    outlet = ReportFileSink(tmp_path / "rankdoctor", print)
    healthy, sick = report_of(illness("RUN003", "slow")), report_of(illness("RUN003", "slow", SLOW))
    outlet.found([], healthy)
    outlet.round(None, healthy)
    assert not outlet.path.exists()
    outlet.found(all_news(sick), sick)
    assert json.loads(outlet.path.read_text())["primary"] == "RUN003"
    outlet.ended(healthy)
    assert json.loads(outlet.path.read_text())["verdict"] == "pass"
    assert [entry.name for entry in outlet.path.parent.iterdir()] == ["report.json"]


def test_a_reader_always_sees_a_whole_report(tmp_path):
    outlet = ReportFileSink(tmp_path, print)
    report = report_of(illness("RUN004", "rank-died", *[DIED] * 50))
    outlet.ended(report)
    whole, done = outlet.path.read_bytes(), threading.Event()
    seen = set()

    def read():
        while not done.is_set():
            seen.add(outlet.path.read_bytes())

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(50):
        outlet.ended(report)
    done.set()
    reader.join()
    assert seen == {whole}


def test_a_folder_that_cannot_be_written_is_told_once(tmp_path):
    (tmp_path / "file").write_text("")
    said = []
    outlet = ReportFileSink(tmp_path / "file", said.append)
    report = report_of(illness("RUN003", "slow", SLOW))
    outlet.found(all_news(report), report)
    outlet.ended(report)
    assert said == [f"{outlet.path} can't be written: Not a directory"]
