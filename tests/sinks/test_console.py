import contextlib
import io
import os
import pty
import re
import select
import stat
import sys
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from rich.progress import Progress

from doctor.api import Finding, Severity
from doctor.core.files.own_folder import OwnFolder
from doctor.core.files.trusted_owners import TrustedOwners
from doctor.core.settings import IgnoreEntry, Settings
from doctor.monitor.sinks.console import CONCLUSION, MOST_LINES, ConsoleSink
from doctor.monitor.sinks.rate_limit import RateLimit
from doctor.testing import running
from tests.sinks.reports import DIED, SLOW, VANISHED, all_news, report_of, result_of

REPORT = Path("runs/rankdoctor/report.json")


def told(report, *, rate_limit=None):
    stream = io.StringIO()
    sink = ConsoleSink(REPORT, stream, rate_limit)
    sink.found(all_news(report), report)
    return stream.getvalue()


def ended(report):
    stream = io.StringIO()
    ConsoleSink(REPORT, stream).ended(report)
    return stream.getvalue()


def many(count):
    return [Finding(f"rank {number} is ill", ranks=(number % 4,)) for number in range(count)]


@contextlib.contextmanager
def terminal():
    """A stream into a pseudo-terminal, and a function that reads what came out of it."""
    master, slave = pty.openpty()
    with os.fdopen(slave, "w", encoding="utf-8") as stream:

        def shown():
            stream.flush()
            read = b""
            while select.select([master], [], [], 0.05)[0]:
                read += os.read(master, 65536)
            return read.decode()

        yield stream, shown
    os.close(master)


def test_a_finding_looks_as_it_does_in_the_terminal_report():
    text = told(report_of(result_of("RUN004", "rank-died", DIED)))
    assert re.match(r"\nrankdoctor \d\d:\d\d:\d\d: 1 error\n✗ error   RUN004 rank-died\n", text)
    assert "where    rank 2 (node1)" in text
    assert "error: ValueError: bad sample" in text
    assert "fix      Look at train.py:42." in text
    assert "doctor explain RUN004" in text
    assert text.endswith("\n")


def test_a_healthy_run_prints_one_line_at_the_end_and_nothing_before():
    remark = result_of("RUN013", "communication-bound", Finding("40 % of the step"), severity=Severity.INFO)
    for report in (report_of(result_of("RUN003", "rank-straggling")), report_of(remark)):
        assert told(report) == ""
        assert ended(report).count("\n") == 1
        assert str(REPORT) in ended(report)
    assert ended(report_of(result_of("RUN003", "x"))) == f"rankdoctor: no finding on 4 ranks; report: {REPORT}\n"


def test_ignored_findings_are_not_printed():
    settings = Settings(ignore=(IgnoreEntry("RUN003", "known", by="doctor.toml:3"),))
    assert told(report_of(result_of("RUN003", "rank-straggling", SLOW), settings=settings)) == ""


def test_a_flood_is_a_bounded_number_of_lines_and_one_that_counts_the_rest():
    text = told(
        report_of(result_of("RUN008", "non-finite-on-rank", *many(120)), result_of("MEM002", "outlier", *many(80)))
    )
    assert len(text.splitlines()) <= MOST_LINES + 4
    assert text.splitlines()[-1] == f"rankdoctor: 195 more findings (RUN008, MEM002); all in {REPORT}"
    assert "MEM002 outlier" in text, "a flood of one kind hides no other kind"


def test_a_flood_drop_by_drop_is_bounded_too():
    report = report_of(result_of("RUN008", "non-finite-on-rank", *many(200)))
    stream = io.StringIO()
    sink = ConsoleSink(REPORT, stream)
    for one in all_news(report):
        sink.found([one], report)
        sink.round(None, report)
    assert stream.getvalue().count("✗ error") == 5
    assert "1 more finding (RUN008)" in stream.getvalue()
    assert len(stream.getvalue().splitlines()) < MOST_LINES


def test_the_ration_comes_back():
    report = report_of(result_of("RUN008", "non-finite-on-rank", *many(3)))
    assert told(report, rate_limit=RateLimit(burst=1, regain=3600)).count("is ill") == 1
    stream = io.StringIO()
    sink = ConsoleSink(REPORT, stream, RateLimit(burst=1, regain=1e-9))
    for one in all_news(report):
        sink.found([one], report)
    assert stream.getvalue().count("is ill") == 3


def test_long_evidence_is_cut():
    tall = Finding("much to see", evidence={f"value {number}": number for number in range(500)})
    text = told(report_of(result_of("RUN001", "rank-stalled", tall)))
    assert len(text.splitlines()) == MOST_LINES + 3
    assert re.fullmatch(r"… 4\d\d more lines in the report", text.splitlines()[-1])


def test_causes_precede_consequences_and_errors_precede_warnings():
    report = report_of(
        result_of("DATA002", "batch-size-differs", SLOW, severity=Severity.WARNING),
        result_of("RUN004", "rank-died", DIED),
        result_of("RUN012", "peer-vanished", VANISHED),
    )
    assert report.result("RUN012").findings[0].explained_by == "RUN004"
    text = told(report)
    assert text.index("RUN004") < text.index("DATA002") < text.index("RUN012 peer")


def test_the_end_of_a_failed_run_names_who_failed_first_and_not_the_consequences():
    text = ended(report_of(result_of("RUN004", "rank-died", DIED), result_of("RUN012", "peer-vanished", VANISHED)))
    assert text == (
        "\nrankdoctor: 2 errors on 4 ranks\n"
        "  start with RUN004 rank-died: Rank 2 failed first: ValueError: bad sample (rank 2 (node1))\n"
        f"  report: {REPORT}\n"
    )


def test_an_explained_failure_is_printed_with_its_cause():
    short = Finding("the batches of rank 2 are too large", ranks=(2,), explains=("RUN004",))
    text = ended(report_of(result_of("MEM004", "exhaustion-forecast", short), result_of("RUN004", "rank-died", DIED)))
    assert text.index("failed first RUN004") < text.index("start with MEM004")


def test_the_end_says_what_stands_in_the_way_of_a_verdict():
    report = report_of(result_of("RUN003", "rank-straggling"), sketch=_without_rank_3())
    assert "no finding on 4 ranks, but 1 of 4 ranks was not gathered" in ended(report)


def _without_rank_3():
    from doctor.testing import running

    return running(2, 2).only((0, 1, 2))


def test_nothing_in_a_finding_steers_the_terminal():
    text = told(report_of(result_of("RUN004", "rank-died", Finding("bad\x1b[2Jname\x07"))))
    assert "\x1b" not in text
    assert "\x07" not in text


def test_a_block_begins_on_a_line_of_its_own_where_a_bar_left_its_line_open():
    with terminal() as (stream, shown):
        stream.write("Epoch 0:  40%|████      | 40/100")
        report = report_of(result_of("RUN004", "rank-died", DIED))
        sink = ConsoleSink(REPORT, stream)
        sink.found(all_news(report), report)
        sink.ended(report_of(result_of("RUN003", "rank-straggling")))
        lines = shown().splitlines()
    assert lines[0].endswith("40/100")
    assert lines[1].startswith("rankdoctor ")
    assert lines[-1].startswith("rankdoctor: no finding")


@pytest.mark.parametrize("no_color", [False, True])
def test_colour_goes_to_terminals_that_want_it(no_color, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.delenv("OMPI_COMM_WORLD_RANK", raising=False)
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    report = report_of(result_of("RUN004", "rank-died", DIED))
    with terminal() as (stream, shown):
        ConsoleSink(REPORT, stream).found(all_news(report), report)
        assert ("\x1b[1;31m" in shown()) is not no_color


@pytest.mark.parametrize("width", [30, 60, 120])
def test_no_line_of_a_finding_is_longer_than_the_terminal(width, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    text = told(report_of(result_of("RUN004", "rank-died", DIED)))
    assert max(map(len, text.splitlines()[2:])) <= width


def test_a_live_progress_bar_shows_the_block_whole_above_itself(monkeypatch):
    paper = io.StringIO()
    report = report_of(result_of("RUN004", "rank-died", DIED))
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    console = Console(file=paper, force_terminal=True, width=100)
    with Progress(console=console, refresh_per_second=50, redirect_stderr=True) as progress:
        progress.add_task("training", total=10)
        ConsoleSink(REPORT).found(all_news(report), report)
    block = told(report).splitlines()[2:]
    lines = [re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", line).strip("\r").rstrip() for line in paper.getvalue().splitlines()]
    start = lines.index(block[0])
    assert lines[start : start + len(block)] == block


def test_a_stream_that_breaks_is_left_alone():
    reader, writer = os.pipe()
    os.close(reader)
    stream = os.fdopen(writer, "w")
    report = report_of(result_of("RUN004", "rank-died", DIED))
    sink = ConsoleSink(REPORT, stream)
    sink.found(all_news(report), report)
    with pytest.raises(BrokenPipeError):
        stream.close()
    sink.ended(report)
    ConsoleSink(REPORT, stream).ended(report)


def test_a_process_without_stderr_is_no_reason_to_fail(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    report = report_of(result_of("RUN004", "rank-died", DIED))
    sink = ConsoleSink(REPORT)
    sink.found(all_news(report), report)
    sink.ended(report)


def test_a_run_that_lost_much_says_so_in_its_last_lines():
    from doctor.facts import StepFacts, TimeSpan

    def sketch(data):
        spans = (TimeSpan(0, 16, (data, 0.0, 400.0 - data)),)
        return running(1, 2, gpus=0).put(StepFacts(spans=spans, span_batches=16))

    text = ended(report_of(sketch=sketch(200.0)))
    assert "lost time: 50% of 800 rank-seconds lost (2 ranks for 400 s); scaling efficiency at most 50%" in text
    assert "ranks 0 and 1 waited for data" in text
    assert "lost time" not in ended(report_of(sketch=sketch(2.0)))


def concluded(folder, report, *, leads, is_written=True):
    stream = io.StringIO()
    printed = OwnFolder(folder).file(CONCLUSION)
    ConsoleSink(REPORT, stream, is_written=lambda: is_written, printed=printed, leads=leads).ended(report)
    return stream.getvalue()


def died(run="1a2b"):
    return msgspec.structs.replace(report_of(result_of("RUN004", "rank-died", DIED)), run=run)


def test_rank_0_does_not_repeat_the_conclusion_of_a_rank_that_failed(tmp_path):
    assert "start with RUN004" in concluded(tmp_path, died(), leads=False)
    assert concluded(tmp_path, died(), leads=True) == ""


@pytest.mark.parametrize(
    "later", [died(run="9f8e"), died(run=None), msgspec.structs.replace(died(), results=(), primary=None)]
)
def test_another_conclusion_is_printed(tmp_path, later):
    concluded(tmp_path, died(), leads=False)
    assert concluded(tmp_path, later, leads=True)


def test_a_conclusion_is_printed_again_if_its_report_could_not_be_written(tmp_path):
    concluded(tmp_path, died(), leads=False)
    assert concluded(tmp_path, died(), leads=True, is_written=False)


def test_rank_0_leaves_no_conclusion(tmp_path):
    assert concluded(tmp_path, died(), leads=True)
    assert not (tmp_path / CONCLUSION).exists()


def test_a_link_or_a_file_of_another_user_hides_no_conclusion(tmp_path, monkeypatch):
    concluded(tmp_path, died(), leads=False)
    (tmp_path / "elsewhere").write_bytes((tmp_path / CONCLUSION).read_bytes())
    (tmp_path / CONCLUSION).unlink()
    (tmp_path / CONCLUSION).symlink_to(tmp_path / "elsewhere")
    assert concluded(tmp_path, died(), leads=True)
    (tmp_path / CONCLUSION).unlink()
    concluded(tmp_path, died(), leads=False)
    monkeypatch.setattr(TrustedOwners, "trusts", lambda self, seen: stat.S_ISDIR(seen.st_mode))
    assert concluded(tmp_path, died(), leads=True)
