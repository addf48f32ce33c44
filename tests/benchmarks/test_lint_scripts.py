"""The expectations on faulty training scripts fit the scripts, and the split of the public repositories is stable."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import lint_scripts
from lint_corpus import HALVES, Repository, read_corpus
from lint_readings import EXCEPTIONS, VERDICTS, ReadHit, read_readings, shares
from lint_scripts import BENCHMARKS, SETS, Script, read_scripts


def files(variant: str, script: Script) -> dict[str, str]:
    root = BENCHMARKS / script.set / variant
    path = root / script.name
    paths = [path] if path.is_file() else [one for one in path.rglob("*") if one.is_file()]
    return {one.relative_to(root).as_posix(): one.read_text() for one in paths if one.suffix != ".pyc"}


def saved_by_all_ranks() -> Script:
    return next(one for one in read_scripts(SETS[0]) if one.name == "saved_by_all_ranks.py")


@pytest.mark.parametrize(
    "script", [script for name in SETS for script in read_scripts(name)], ids=lambda script: script.name
)
def test_variants_differ_and_the_expected_lines_exist(script: Script):
    bad, good = files("bad", script), files("good", script)
    assert bad.keys() == good.keys()
    assert bad != good
    assert script.places
    assert all(bad[file].splitlines()[line - 1].strip() for file, line in script.places)


@pytest.mark.parametrize("name", SETS)
def test_every_script_is_expected(name: str):
    names = sorted(script.name for script in read_scripts(name))
    folder = BENCHMARKS / name / "bad"
    assert names == sorted(path.name for path in folder.iterdir() if path.name != "__pycache__")


def test_a_script_is_scored_by_line_and_id():
    script = saved_by_all_ranks()
    assert lint_scripts.score(script).found
    assert not lint_scripts.score(script._replace(ids=frozenset({"CODE011"}))).found
    assert not lint_scripts.score(script._replace(places=frozenset({(script.name, 1)}))).found


def test_fewer_scripts_than_in_the_kept_score_are_below_it(monkeypatch):
    name, scores = SETS[0], [lint_scripts.score(saved_by_all_ranks())]
    monkeypatch.setattr(lint_scripts, "kept", lambda _: [{"groups": {"script": lint_scripts.counts_of(scores)}}])
    assert not lint_scripts.below_kept(name, scores)
    assert lint_scripts.below_kept(name, [scores[0]._replace(found=())])
    assert lint_scripts.below_kept(name, [scores[0]._replace(alarms=scores[0].found)])


def test_the_half_of_a_repository_follows_from_its_address():
    one = Repository("https://github.com/owner/name", "0" * 40)
    assert (one.folder, one.half) == ("owner+name", one._replace(commit="1" * 40).half)
    corpus = read_corpus()
    assert len({one.address for one in corpus}) == len(corpus) >= 100
    assert one._replace(part="fresh").half == "fresh"
    assert {one.half for one in corpus} == set(HALVES)


def test_readings_are_of_the_corpus_and_give_reasons():
    folders = {one.folder: one.half for one in read_corpus()}
    for reading in read_readings():
        assert reading.half in HALVES
        assert {folders[hit.repository] for hit in reading.hits} == {reading.half}
        assert all(hit.verdict in VERDICTS and bool(hit.why) is (hit.verdict in EXCEPTIONS) for hit in reading.hits)
        assert len({hit[:4] for hit in reading.hits}) == len(reading.hits)


def test_shares_leave_arguable_hits_out_and_count_them_as_wrong():
    hits = [ReadHit("a+b", "c.py", 1, "CODE001", "error", verdict, "") for verdict in ("right", "arguable", "wrong")]
    assert shares(hits) == ("3", "1", "1", "1", "50.0%", "33.3%")
    assert shares([]) == ("0", "0", "0", "0", "", "")
