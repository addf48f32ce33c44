"""Comparing two corpora with listed changes: these are no differences, anything else is, and so is a stale entry."""

import json
import sys

import pytest

from tests.golden import compare

CASES = [
    {"case": "in a log", "findings": [{"severity": "error", "summary": 'no room for "x"'}], "status": "sick"},
    {"case": "nothing to see", "findings": [], "status": "ok"},
]
OLD = {
    "cases/NET001.jsonl": "".join(json.dumps(one) + "\n" for one in CASES),
    "captures/a.text": 'No room for "x",\n         on rank 1\n',
    "captures/a.html": "<p>no room for &#34;x&#34;</p>\n",
}
LISTED = [
    {"why": "width", "in": "*.text", "masks": {r"\n {4,}": " "}},
    {"why": "words", "patterns": {'"sick"': '"fail"', '"ok"': '"pass"'}},
    {"why": "wording", "sentences": {'no room for "x"': '"x" is too small'}},
    {"why": "titles", "cases": {"NET001 in a log": "port that is down", "NET001 nothing to see": None}},
    {"why": "parts", "added": {"log-lines/*": None}},
]
NEW_CASE = {
    "case": "port that is down",
    "findings": [{"severity": "error", "summary": '"x" is too small'}],
    "status": "fail",
}
NEW = {
    "cases/NET001.jsonl": json.dumps(NEW_CASE) + "\n",
    "captures/a.text": '"x" is too small, on\n         rank 1\n',
    "captures/a.html": "<p>&#34;x&#34; is too small</p>\n",
    "log-lines/NET001.jsonl": '{"case": "no socket"}\n',
}


@pytest.fixture
def compared(tmp_path, monkeypatch, capsys):
    def run(new, listed):
        for folder, corpus in (("old", OLD), ("new", new)):
            for name, text in corpus.items():
                path = tmp_path / folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
        (tmp_path / "changes.json").write_text(json.dumps(listed))
        arguments = [str(tmp_path / "old"), str(tmp_path / "new"), "--listed", str(tmp_path / "changes.json")]
        monkeypatch.setattr(sys, "argv", ["compare.py", *arguments])
        return compare.main(), capsys.readouterr().out

    return run


def test_listed_changes_are_no_differences(compared):
    assert compared(NEW, LISTED) == (0, "\n0 of 3 entries differ\n")


@pytest.mark.parametrize(
    ("name", "was", "now"),
    [
        ("cases/NET001.jsonl", '"error"', '"warning"'),
        ("cases/NET001.jsonl", '"fail"', '"pass"'),
        ("cases/NET001.jsonl", "port that", "link that"),
        ("captures/a.text", "rank 1", "rank 2"),
        ("captures/a.html", "too small", "smaller"),
    ],
)
def test_any_other_change_is_a_difference(compared, name, was, now):
    code, out = compared({**NEW, name: NEW[name].replace(was, now)}, LISTED)
    assert code == 1
    assert "1 of 3 entries differ" in out


@pytest.mark.parametrize(
    "group",
    [
        {"why": "stale", "sentences": {"a sentence that was reverted": "another"}},
        {"why": "stale", "in": "help/*", "patterns": {"sick": "fail"}},
        {"why": "stale", "cases": {"NET002 in a log": None}},
        {"why": "stale", "added": {"lint/*": None}},
    ],
)
def test_a_listed_change_that_is_not_found_is_reported(compared, group):
    code, out = compared(NEW, [*LISTED, group])
    assert code == 1
    assert f"listed, but not found: {next(iter(list(group.values())[-1]))}\n" in out
    assert "0 of 3 entries differ" in out
