"""Two runs by their figures, and two reports by what they say."""

import json

import msgspec
import pytest

from doctor.core.capture import encode_document, to_record
from doctor.core.diff.captures import compare
from doctor.core.diff.reports import compare_reports
from doctor.core.finding import Severity
from doctor.facts import Failure, Loader, LoaderFacts, ProgressFacts, RecorderFacts, StepFacts, TrainingFacts, Window
from doctor.report.machine_formats import render_json
from doctor.session import examine
from doctor.testing import running, stalled
from tests.lab.command import run_doctor

RUN = running(2, 2)


def paced(total, data=0.01):
    windows = tuple(Window(first, 50, total, data) for first in range(0, 500, 50))
    return RUN.put(StepFacts(windows=windows, seen=500))


def paths(before, after):
    return {f"{one.section} {one.path}" for one in compare(before.job(), after.job())}


def test_two_runs_of_one_script_do_not_differ():
    later = (
        paced(0.105)
        .alter(ProgressFacts, batch=99, epoch=3, passed=1000, at=9e9, pid=5)
        .alter(RecorderFacts, collectives=())
    )
    assert paths(paced(0.1), later) == set()


def test_a_run_that_became_slower_says_where():
    assert paths(paced(0.1), paced(0.2, data=0.11)) == {"steps seconds a step", "steps seconds of data a step"}


def test_what_was_set_otherwise_is_told():
    before = RUN.put(LoaderFacts(loaders=(Loader("train", length=100, batch_size=32, workers=4),)))
    after = RUN.put(LoaderFacts(loaders=(Loader("train", length=200, batch_size=16, workers=4),)))
    assert paths(before, after.alter(TrainingFacts, precision="bf16-mixed")) == {
        "loaders train[0].length",
        "loaders train[0].batch_size",
        "training precision",
    }


def test_a_rank_that_failed_this_time_is_told():
    after = RUN.alter(ProgressFacts, ranks=(3,), state="failed", failure=Failure("ValueError", "no such row"))
    told = {f"{one.section} {one.path}": one for one in compare(RUN.job(), after.job())}
    assert set(told) == {"progress state", "progress failure"}
    assert told["progress failure"].after == "ValueError: no such row"
    assert told["progress failure"].ranks == (3,)


def test_reports_differ_by_their_findings():
    healthy, faulty = examine(RUN.job()), examine(stalled(1, 4).only((0, 1, 2), absent=(3,)).job())
    assert compare_reports(faulty, faulty) == []
    told = compare_reports(healthy, faulty)
    assert ("report", "verdict", "pass", "fail") in {(one.section, one.path, one.before, one.after) for one in told}
    assert {one.path for one in told if one.section == "finding"} >= {"RUN001"}
    assert all(one.before is None for one in told if one.path == "RUN001")


def test_numbers_in_the_words_of_a_finding_are_no_difference():
    report = examine(stalled(1, 4).only((0, 1, 2), absent=(3,)).job())

    def later(finding):
        return msgspec.structs.replace(finding, summary=finding.summary.replace("3", "3").replace("4", "17"))

    results = tuple(msgspec.structs.replace(one, findings=tuple(map(later, one.findings))) for one in report.results)
    assert compare_reports(report, msgspec.structs.replace(report, results=results)) == []


@pytest.fixture
def doctor(tmp_path):
    def run(*arguments):
        done = run_doctor(*arguments, cwd=tmp_path)
        assert "Traceback" not in done.stderr
        return done

    return run


def put_records(folder, sketch, run):
    folder.mkdir()
    for member in sketch.members:
        document = to_record(sketch.only((member.rank,)).job(), run)
        (folder / f"rank-{member.rank}.json").write_bytes(encode_document(document))


def test_folders_of_records_on_the_command_line(doctor, tmp_path):
    put_records(tmp_path / "before", paced(0.1), "aa-1")
    put_records(tmp_path / "after", paced(0.3), "bb-2")
    done = doctor("diff", "before", "after", "--format", "json")
    assert done.returncode == 1, done.stderr
    told = [(one["section"], one["path"], one["ranks"]) for one in json.loads(done.stdout)["differences"]]
    assert told == [("steps", "seconds a step", [0, 1, 2, 3])]


def test_reports_on_the_command_line_and_not_mixed(doctor, tmp_path):
    (tmp_path / "one.json").write_text(render_json(examine(RUN.job())))
    (tmp_path / "two.json").write_text(render_json(examine(stalled(1, 4).only((0, 1, 2), absent=(3,)).job())))
    put_records(tmp_path / "records", RUN, "aa-1")
    assert doctor("diff", "one.json", "one.json").returncode == 0
    done = doctor("diff", "one.json", "two.json")
    assert done.returncode == 1
    assert "RUN001" in done.stdout
    mixed = doctor("diff", "one.json", "records/rank-0.json")
    assert (mixed.returncode, mixed.stdout, len(mixed.stderr.splitlines())) == (2, "", 1)


def test_severities_weigh():
    faulty = examine(stalled(1, 4).only((0, 1, 2), absent=(3,)).job())
    weights = {one.weight for one in compare_reports(examine(RUN.job()), faulty) if one.path == "RUN001"}
    assert weights == {"high"}
    assert Severity.ERROR.weight > Severity.WARNING.weight
