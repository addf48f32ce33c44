import threading
import time

from doctor.api import Severity
from doctor.monitor.sinks.report_page import ReportPageSink
from doctor.postmortem.file_kinds import kind_of
from doctor.testing import running
from tests.sinks.reports import DIED, SLOW, all_news, report_of, result_of


def test_the_page_is_written_at_the_end_with_the_facts_of_the_run(tmp_path):
    sink, sketch = ReportPageSink(tmp_path / "rankdoctor", print), running(2, 2)
    report = report_of(result_of("RUN003", "slow", SLOW), sketch=sketch)
    sink.round(sketch.job(), report)
    assert sink.written is None
    assert not sink.path.exists()
    sink.ended(report)
    text = sink.path.read_text()
    assert sink.written == sink.path
    assert "RUN003" in text
    assert 'id="lost-time"' in text
    assert 'id="ranks"' in text
    assert kind_of(sink.path) == "report"
    assert [entry.name for entry in sink.path.parent.iterdir()] == ["report.html"]


def test_a_run_in_trouble_has_a_page_before_its_end(tmp_path):
    """Its launcher may end it before anything else is evaluated."""
    sketch = running(2, 2)
    for check_id, finding, is_written in (("MEM001", DIED, False), ("RUN004", DIED, True)):
        sink = ReportPageSink(tmp_path / check_id, print)
        report = report_of(result_of(check_id, "x", finding), sketch=sketch)
        sink.found(all_news(report), report)
        sink.round(sketch.job(), report)
        assert sink.path.exists() == is_written


def test_a_short_run_has_a_page_if_there_is_something_to_read(tmp_path):
    quiet = report_of(result_of("RUN003", "slow", severity=Severity.WARNING))
    noted = report_of(result_of("RUN003", "slow", SLOW, severity=Severity.INFO))
    warned = report_of(result_of("RUN003", "slow", SLOW, severity=Severity.WARNING))
    for name, report, short_run, is_written in (
        ("quiet", quiet, 60.0, False),
        ("noted", noted, 60.0, False),
        ("warned", warned, 60.0, True),
        ("long", quiet, 0.0, True),
    ):
        sink = ReportPageSink(tmp_path / name, print, short_run=short_run)
        sink.round(running(2, 2).job(), report)
        sink.ended(report)
        assert (sink.path.exists(), sink.written is not None) == (is_written, is_written), name


def test_a_page_that_takes_too_long_is_given_up_and_never_written(tmp_path):
    said = []
    sink = ReportPageSink(tmp_path, said.append, deadline=0.0)
    began = time.monotonic()
    sink.ended(report_of(result_of("RUN003", "slow", SLOW)))
    sink.ended(report_of(result_of("RUN003", "slow", SLOW)))
    assert time.monotonic() - began < 60  # neither waits for a page
    for thread in threading.enumerate():
        if thread.name == "doctor-page":
            thread.join(60)
    assert sink.written is None
    assert [*tmp_path.iterdir()] == []
    assert len(said) == 1
    assert said[0].startswith(f"cannot write {sink.path}: it takes longer than 0 s")


def test_a_folder_that_blocks_does_not_delay_the_end(tmp_path):
    """The file system does not answer: the write is one that never returns."""
    said, never = [], threading.Event()
    sink = ReportPageSink(tmp_path, said.append, deadline=0.2)
    sink._folder.write = lambda name, data: never.wait(30)
    sink.ended(report_of(result_of("RUN003", "slow", SLOW)))
    never.set()
    assert len(said) == 1


def test_a_folder_that_can_t_be_written_to_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    said = []
    sink = ReportPageSink(tmp_path / "file", said.append, deadline=60.0, short_run=0.0)
    sink.ended(report_of())
    sink.ended(report_of())
    assert said == [f"cannot write {sink.path}: Not a directory"]
    silent = ReportPageSink(tmp_path / "file", said.append, is_wanted=lambda: False, short_run=0.0)
    silent.ended(report_of())
    assert len(said) == 1
