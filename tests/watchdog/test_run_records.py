"""The files of a run: what earlier ones left is moved, and nothing is lost."""

import json

import pytest

from doctor.core.capture import read_capture
from doctor.core.job import Member
from doctor.facts import ProgressFacts
from doctor.monitor.watchdog.run_records import RunRecords


def member(rank, batch=1):
    return Member(rank, {"progress": ProgressFacts(batch=batch)}, ("b", "m", "here"))


def records(directory, rank=0, told=None):
    return RunRecords(directory, rank, 2, (told if told is not None else []).append)


def files(directory):
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())


def test_a_record_is_a_capture_of_its_run(tmp_path):
    records(tmp_path / "new" / "one", 1).write([member(1)], "abc-1")
    read = read_capture(tmp_path / "new" / "one" / "rank-1.json")
    assert (read.run, read.world_size, read.members[0].rank) == ("abc-1", 2, 1)
    assert read.members[0].sections["progress"].batch == 1
    assert files(tmp_path) == ["new/one/rank-1.json"]


def test_what_is_there_when_a_run_begins_is_moved(tmp_path):
    (tmp_path / "rank-0.json").write_text(json.dumps({"run": "abc-1"}))
    (tmp_path / "report.json").write_text(json.dumps({"schema": 1, "run": "abc-1"}))
    (tmp_path / "other.json").write_text("{}")
    mine = records(tmp_path)
    mine.write([member(0)], "abc-2")
    mine.write([member(0, batch=2)], "abc-2")
    moved = ["earlier/abc-1/rank-0.json", "earlier/abc-1/report.json"]
    assert files(tmp_path) == [*moved, "other.json", "rank-0.json"]


def test_a_name_that_is_taken_is_not_taken_again(tmp_path):
    for _ in range(3):
        records(tmp_path).write([member(0)], "abc")
    assert files(tmp_path) == ["earlier/abc/rank-0.1.json", "earlier/abc/rank-0.json", "rank-0.json"]


@pytest.mark.parametrize("text", ["", "no JSON", '{"run": "../../away"}', '{"run": 7}', "[" * 100_000])
def test_files_that_name_no_run_are_kept_by_their_date(tmp_path, text):
    (tmp_path / "rank-0.json").write_text(text)
    records(tmp_path).write([member(0)], "abc-1")
    (moved,) = [path for path in files(tmp_path) if path.startswith("earlier/")]
    assert moved.endswith("Z/rank-0.json")
    assert (tmp_path / moved).read_text() == text


def test_only_rank_0_moves_what_others_left(tmp_path):
    for rank, run in ((0, "abc-2"), (1, "abc-2"), (2, "abc-1"), (3, "abc"), (70, "xyz-1")):
        (tmp_path / f"rank-{rank}.json").write_text(json.dumps({"run": run}))
    records(tmp_path).move_others("abc-2")
    kept = ["rank-0.json", "rank-1.json", "rank-3.json"]
    assert files(tmp_path) == ["earlier/abc-1/rank-2.json", "earlier/xyz-1/rank-70.json", *kept]


def test_a_record_of_another_run_is_none(tmp_path):
    records(tmp_path, 1).write([member(1)], "abc-1")
    mine = records(tmp_path)
    assert mine.read(1, "abc-1").rank == 1
    assert mine.read(1, "abc").rank == 1, "nobody heard that rank, and it drew nothing"
    assert mine.read(1, "abc-2") is None
    assert mine.read(0, "abc-1") is None
    (tmp_path / "rank-1.json").write_text("{")
    assert mine.read(1, "abc-1") is None


def test_trouble_is_reported_once(tmp_path):
    told = []
    (tmp_path / "file").write_text("")
    mine = records(tmp_path / "file", told=told)
    for batch in range(3):
        mine.write([member(0, batch)], "abc-1")
    assert len(told) == 1
    assert told[0].startswith(f"rank 0 cannot write its record to {tmp_path / 'file'}: ")
