"""One process of a watched run: when the job is judged, who hears what, and what a run bears."""

import contextlib
import json
import os
import signal
import time
from pathlib import Path

import pytest

from doctor.core.settings import Settings
from doctor.monitor import watch_session
from doctor.monitor.evaluator import RunEvaluator
from doctor.monitor.findings_error import Findings
from doctor.monitor.telemetry.flight_recorder import load_dump, parse_recorder
from doctor.monitor.watch_options import WatchOptions
from doctor.monitor.watch_session import WatchSession
from doctor.report.machine_formats import render_json
from doctor.testing import running
from tests.lab.ports import free_port
from tests.lab.speed import patience
from tests.watchdog.ranks import fork, open_group, wait_for, warm_up

GUESTS = """
from doctor.api import Finding, Scope, Severity, check
from doctor.facts import LaunchFacts

@check(id="RUN901", severity=Severity.ERROR, scope=Scope.RANK, when="PR", needs=(LaunchFacts,))
def planted(job):
    '''Ask whether something was planted.'''
    ranks = [rank.number for rank in job.ranks]
    yield Finding("it stands still", ranks=ranks, effect="it hurts", fix="mend it")

@check(id="NET901", severity=Severity.ERROR, scope=Scope.JOB, when="PR", needs=(LaunchFacts,))
def cable(job):
    '''Ask whether a cable was planted.'''
    yield Finding("the cable is loose", ranks=(0,), effect="it hurts", fix="mend it")

@check(id="DATA901", severity=Severity.WARNING, scope=Scope.JOB, when="PR", needs=(LaunchFacts,))
def slow(job):
    '''Ask whether a slow loader was planted.'''
    yield Finding("it is slow", ranks=(0,), effect="it hurts", fix="mend it")

@check(id="RUN902", severity=Severity.ERROR, scope=Scope.JOB, when="PR", needs=(LaunchFacts,))
def broken(job):
    '''Ask nothing.'''
    raise RuntimeError("of my own")
"""


class RecordingSink:
    """An sink that writes down what it is told."""

    def __init__(self):
        self.told = []

    def found(self, news, report):
        self.told.append(("found", *sorted(one.result.id for one in news)))

    def round(self, job, report):
        self.told.append(("round", job.world_size))

    def ended(self, report):
        self.told.append(("ended", report.verdict))

    def close(self):
        self.told.append(("close",))


class BrokenSink(RecordingSink):
    """One that breaks when something is found."""

    def found(self, news, report):
        raise OSError("the medium is gone")


@pytest.fixture
def guests(tmp_path):
    """A plug-in with checks that find what they are told to."""
    path = tmp_path / "guests.py"
    path.write_text(GUESTS)
    return path


@pytest.fixture
def make_evaluator(tmp_path, guests):
    """Makes judges of those checks."""

    def make(*select, rank=0, sinks=None):
        recording = RecordingSink()
        settings = Settings(select=select, plugins=(guests,))
        return RunEvaluator(
            settings, [recording] if sinks is None else sinks, tmp_path / "report.json", rank
        ), recording

    return make


def job():
    """A healthy job of two ranks."""
    return running(1, 2).job()


def said(capsys):
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("rankdoctor: ")]


def test_a_report_on_every_occasion_and_news_once(make_evaluator):
    evaluate, recording = make_evaluator("RUN901")
    assert evaluate.metrics == {}
    for occasion in ("before", "round", "stall", "end"):
        evaluate(job(), occasion)
    evaluate.close()
    assert recording.told == [("found", "RUN901"), *[("round", 2)] * 4, ("ended", "fail"), ("close",)]
    assert evaluate.metrics["doctor/findings_error"] == 1


def test_a_decision_covers_errors_and_a_stall_is_explained_by_related_families(make_evaluator):
    evaluate, _ = make_evaluator("RUN901", "NET901", "DATA901")
    before, stall = evaluate(job(), "before"), evaluate(job(), "stall")
    assert (before.has_errors, {*before.ids}, before.ranks) == (True, {"RUN901", "NET901"}, (0, 1))
    assert (stall.has_errors, stall.ids, stall.words) == (True, ("RUN901",), "RUN901 it stands still")
    assert not make_evaluator("DATA901")[0](job(), "before").has_errors, "a warning"
    assert not make_evaluator("NET901")[0](job(), "stall").has_errors, "a loose cable does not tell why this stall is"


def test_a_check_that_breaks_is_a_line_of_the_report(make_evaluator):
    evaluate, recording = make_evaluator("RUN902", "DATA901")
    assert not evaluate(job(), "end").has_errors
    (crash,) = [result for result in evaluate.history.report.results if result.status.value == "error"]
    assert (crash.id, "of my own" in crash.reason) == ("RUN902", True)
    assert recording.told[0] == ("found", "DATA901")


def test_a_sink_that_raises_is_disabled(make_evaluator, capsys):
    broken, recording = BrokenSink(), RecordingSink()
    evaluate, _ = make_evaluator("RUN901", sinks=[broken, recording])
    for occasion in ("before", "end"):
        assert evaluate(job(), occasion).has_errors
    evaluate.close()
    assert broken.told == [("close",)]
    assert [word for word, *_ in recording.told] == ["found", "round", "round", "ended", "close"]
    assert said(capsys) == ["rankdoctor: sink BrokenSink failed and is disabled: OSError: the medium is gone"]


def test_errors_of_a_stall_that_is_over_are_taken_back(make_evaluator, capsys):
    """Those that it brought, and what speaks of it; not what was known before."""
    evaluate, recording = make_evaluator("RUN901", "NET901", "DATA901")
    decision = evaluate(job(), "stall")
    evaluate.report_recovery(decision, 11.6)
    report = evaluate.history.report
    severities = {result.id: result.severity.value for result in report.results}
    assert severities == {"RUN901": "info", "NET901": "error", "DATA901": "warning"}
    assert recording.told[-1] == ("found", "RUN901"), "the report is written again"
    (line,) = said(capsys)
    assert line == "rankdoctor: training resumed after 12 s; RUN901 downgraded to info"


def test_errors_that_were_known_before_a_stall_stay(make_evaluator):
    evaluate, recording = make_evaluator("RUN901")
    evaluate(job(), "round")
    evaluate.report_recovery(evaluate(job(), "stall"), 12.0)
    assert evaluate.history.report.verdict == "fail"
    assert [one for one in recording.told if one[0] == "found"] == [("found", "RUN901")]


@pytest.mark.parametrize(("age", "heard"), [(0, []), (3600, [("found", "RUN901")])])
def test_another_evaluating_rank_continues_where_the_last_one_stopped(make_evaluator, tmp_path, age, heard):
    """Of this run; what an earlier run found is no matter of this one."""
    first, _ = make_evaluator("RUN901")
    first(job(), "round")
    path = tmp_path / "report.json"
    path.write_text(render_json(first.history.report))
    os.utime(path, (time.time() - age, time.time() - age))
    second, recording = make_evaluator("RUN901", rank=1)
    second(job(), "round")
    assert [one for one in recording.told if one[0] == "found"] == heard


def test_settings_that_do_not_fit_the_checks_are_gone_without(tmp_path, capsys):
    settings = Settings(limits={"MEM003.no_such": 1.0})
    evaluate = RunEvaluator(settings, [], tmp_path / "report.json", 0)
    assert not any(evaluate(job(), occasion).has_errors for occasion in ("before", "end"))
    (line,) = said(capsys)
    assert "MEM003.no_such" in line
    assert line.endswith("; continuing without settings")


@pytest.fixture
def project(tmp_path, guests, monkeypatch):
    """The user's directory, whose settings name the planted checks."""
    guests.with_name("doctor.toml").write_text('plugins = ["guests.py"]\nselect = ["RUN901"]\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DOCTOR_CONFIG", str(tmp_path / "doctor.toml"))
    return tmp_path


def begun(directory, *, rank=0, world_size=1, sinks=(), **options):
    """A run that has been opened."""
    run = WatchSession(WatchOptions(**options), rank=rank, world_size=world_size, directory=directory, sinks=sinks)
    run.open()
    return run


def report_in(directory):
    return json.loads((directory / "report.json").read_text())


def shown(told):
    """How often the planted finding was told; a summary at the end names it, too."""
    return [line.strip() for line in told.splitlines()].count("it stands still")


def test_a_world_of_one_process(project, capfd):
    recording = RecordingSink()
    run = begun(project / "run", sinks=[recording])
    run.check_start()
    run.close()
    run.close()
    assert recording.told[0] == ("found", "RUN901")
    assert recording.told[-2:] == [("ended", "fail"), ("close",)]
    report = report_in(project / "run")
    assert (report["verdict"], report["job"]["world_size"], report["primary"]) == ("fail", 1, "RUN901")
    record = json.loads((project / "run" / "rank-0.json").read_text())
    assert record["ranks"][0]["facts"]["progress"]["state"] == "ended"
    assert shown(capfd.readouterr().err) == 1


def test_a_run_loads_no_plugin_of_its_working_directory(project, monkeypatch, capfd):
    monkeypatch.delenv("DOCTOR_CONFIG")
    (project / "guests.py").write_text(f"open({str(project / 'proof')!r}, 'w')\n")
    (project / "doctor.toml").write_text('plugins = ["guests.py"]\nselect = ["DATA"]\n')
    run = begun(project / "run")
    run.check_start()
    run.close()
    assert not (project / "proof").exists()
    assert {result["family"] for result in report_in(project / "run")["results"]} == {"data"}
    (line,) = [line for line in said(capfd) if "plugins not loaded (guests.py)" in line]
    assert "DOCTOR_CONFIG" in line


def test_a_run_that_shall_end_with_its_findings(project):
    run = begun(project / "run", on_error="raise")
    with pytest.raises(Findings, match="RUN901 it stands still") as raised:
        run.check_start()
    run.fail(raised.value)
    assert raised.value.ids == ("RUN901",)
    assert report_in(project / "run")["verdict"] == "fail"


@pytest.mark.parametrize(
    ("on_error", "meets", "expected"),
    [
        ("warn", False, watch_session.STARTUP_TIMEOUT),
        ("warn", True, watch_session.MEETING_TIMEOUT),
        ("raise", True, watch_session.STARTUP_TIMEOUT),
    ],
)
def test_a_rank_that_is_late_where_all_meet_is_not_awaited_for_long(project, monkeypatch, on_error, meets, expected):
    """It may wait for this one, in a call that this one makes after the check."""
    run, given = begun(project / "run", on_error=on_error), []
    monkeypatch.setattr(run._watchdog, "check_start", given.append)
    run.check_start(meets=meets)
    run.close()
    assert given == [expected]


def test_findings_that_are_ignored_end_nothing(project):
    (project / "doctor.toml").write_text(
        'plugins = ["guests.py"]\nselect = ["RUN901"]\nignore = [{id = "RUN901", reason = "known"}]\n'
    )
    run = begun(project / "run", on_error="raise")
    run.check_start()
    run.close()
    assert report_in(project / "run")["verdict"] == "pass"


def test_settings_that_can_not_be_read_are_gone_without(project, capfd):
    (project / "doctor.toml").write_text("select = 7")
    run = begun(project / "run", select=("DATA",))
    run.check_start()
    run.close()
    (line,) = [line for line in said(capfd) if "without settings" in line]
    assert line.startswith(f"rankdoctor: {project / 'doctor.toml'}: ")
    assert {result["family"] for result in report_in(project / "run")["results"]} == {"data"}


def test_a_working_directory_that_was_removed(project, capfd, monkeypatch):
    gone = project / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    run = begun(project / "run")
    run.check_start()
    run.close()
    assert [line for line in said(capfd) if "without settings" in line] == [
        "rankdoctor: the working directory was removed; continuing without settings"
    ]
    assert report_in(project / "run")["verdict"] != "fail"


def test_a_directory_is_meant_from_where_the_run_began(project, capfd, monkeypatch):
    """All lines name it whole, and a program that goes elsewhere takes nothing along."""
    run = begun(Path("run"))
    monkeypatch.chdir("/")
    run.check_start()
    run.close()
    report = report_in(project / "run")
    page, later = f"{project}/run/report.html", f"moved to earlier/{report['run']}/ when the next run starts"
    assert capfd.readouterr().err.splitlines()[-1] == f"  report: {project}/run/report.json, page: {page} ({later})"
    assert "rankdoctor report</title>" in Path(page).read_text()
    assert report["run"] == json.loads((project / "run" / "rank-0.json").read_text())["run"]


def test_a_directory_that_can_not_be_written_to(project, capfd):
    """Report and record say so, once each; what is found is told all the same."""
    (project / "run").write_text("a file")
    run = begun(project / "run")
    run.check_start()
    run.close()
    told = capfd.readouterr().err
    assert (told.count("cannot write /"), told.count("cannot write its record"), shown(told)) == (1, 1, 1)
    assert "  report: not written\n" in told


def test_runs_one_after_another(project):
    """What the last one left is moved, and none is counted with another."""
    seen = []
    for _ in range(3):
        run = begun(project / "run")
        run.check_start()
        seen.append(run.telemetry.progress.run)
        run.close()
    moved = sorted(str(path.relative_to(project / "run")) for path in (project / "run" / "earlier").rglob("*.*"))
    left = ("rank-0.json", "report.html", "report.json")
    assert len({*seen}) == 3
    assert moved == sorted(f"earlier/{run}/{name}" for run in seen[:2] for name in left)
    assert json.loads((project / "run" / "rank-0.json").read_text())["run"] == seen[2]


@pytest.fixture
def pair(project):
    """Runs a script as two ranks that share the directory alone; what each returned."""
    pids = []

    def play(script):
        pids.extend(fork(lambda rank=rank: _write(project / f"said-{rank}.json", script(rank))) for rank in range(2))
        until = time.monotonic() + patience(60)
        assert [wait_for(pid, until) for pid in pids] == [0, 0]
        return [json.loads((project / f"said-{rank}.json").read_text()) for rank in range(2)]

    yield play
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _write(path, said):
    path.write_text(json.dumps(said))


def test_findings_end_every_rank(project, pair):
    """With one exception, of one text, before any of them enters a collective that the others do not come to."""

    def script(rank):
        run = begun(project / "run", rank=rank, world_size=2, on_error="raise")
        try:
            run.check_start()
        except Findings as error:
            run.fail(error)
            return str(error)
        return None

    first, second = pair(script)
    assert first == second
    assert "RUN901 it stands still" in first
    report = report_in(project / "run")
    assert report["coverage"]["ranks_seen"] == 2
    assert {*report["results"][0]["findings"][0]["ranks"]} == {0, 1}


def test_an_exception_of_one_rank_is_evaluated_with_the_other(project, pair):
    """The other one does not fail, and hears of it while it waits."""
    (project / "doctor.toml").write_text('select = ["RUN004"]\n')

    def script(rank):
        run = begun(project / "run", rank=rank, world_size=2)
        run.check_start()
        if rank == 1:
            run.fail(ValueError("bad sample"))
        else:
            deadline = time.monotonic() + patience(30)
            while "RUN004" not in _primary(project / "run") and time.monotonic() < deadline:
                time.sleep(0.05)
            run.close()
        return _primary(project / "run")

    assert pair(script) == ["RUN004", "RUN004"]
    (finding,) = report_in(project / "run")["results"][0]["findings"]
    assert (finding["ranks"], "bad sample" in finding["summary"]) == ([1], True)


def test_ranks_that_stand_still_keep_their_recorders(project, pair):
    """And the run goes on, where it does."""
    pytest.importorskip("torch.distributed")
    port = free_port()
    warm_up()

    def script(rank):
        import torch.distributed as dist

        open_group(rank, 2, port, by_agent=False)
        run = begun(project / "run", rank=rank, world_size=2, hang_after=1.0)
        run.check_start()
        deadline = time.monotonic() + patience(30)
        while rank == 1 and not all(map(_dump, range(2))) and time.monotonic() < deadline:
            time.sleep(0.05)
        named = _dump(0)
        dist.barrier()
        run.close()
        return named

    def _dump(rank):
        try:
            record = json.loads((project / "run" / f"rank-{rank}.json").read_text())
        except FileNotFoundError:
            return None
        return record["ranks"][0]["facts"].get("flight-recorder", {}).get("dump")

    _, named = pair(script)
    assert named == str(project / "run" / "flight-recorder" / "cpu" / "rank_0")
    waiting, other = (
        parse_recorder(load_dump(Path(named).with_name(f"rank_{rank}").read_bytes())) for rank in range(2)
    )
    assert [entry.operation for entry in waiting.collectives] == ["barrier"]
    assert other.collectives == ()


def _primary(directory):
    try:
        return report_in(directory)["primary"] or ""
    except FileNotFoundError:
        return ""
