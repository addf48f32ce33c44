"""Checks and rules that may still change say so, wherever they are listed."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from doctor.cli.main import app
from doctor.core.check_registry import builtin_checks
from doctor.core.finding import Severity
from doctor.lint.engine.registry import builtin_rules
from doctor.report.playbook import all_pages

READINGS = Path(__file__).parents[1] / "benchmarks" / "lint_readings.json"
LEAST_READ, LEAST_RIGHT = 5, 0.9


def doctor(*arguments):
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.mark.skipif(not READINGS.is_file(), reason="needs a checkout")
def test_in_preview_is_what_the_readings_found_of_too_little_use():
    hits = [hit for reading in json.loads(READINGS.read_text()) for hit in reading["hits"]]
    read, right = Counter(hit[3] for hit in hits), Counter(hit[3] for hit in hits if hit[5] == "right")
    below = {name for name in read if read[name] >= LEAST_READ and right[name] < LEAST_RIGHT * read[name]}
    parts = {rule.id for rule in builtin_rules() if rule.state == "preview" or rule.preview_infos}
    assert parts == {
        *("CODE004", "CODE005", "CODE006", "CODE014", "CODE015", "CODE020", "CODE025", "CODE029", "NCCL007"),
    }
    assert parts <= below
    assert not [one.id for one in builtin_checks() if one.state == "preview"]


def test_errors_and_warnings_are_never_in_preview():
    for rule in builtin_rules():
        assert rule.state == "stable" or rule.severity is Severity.INFO, rule.id


def test_the_list_shows_it():
    rows = json.loads(doctor("list", "--select", "CODE014,CODE041", "--format", "json"))["rules"]
    assert {row["id"]: row["state"] for row in rows} == {"CODE014": "preview", "CODE041": "stable"}
    marked = [line for line in doctor("list", "--select", "CODE").splitlines() if line.endswith("(preview)")]
    assert marked
    checks = json.loads(doctor("list", "--format", "json"))["checks"]
    assert {row["state"] for row in checks} == {"stable"}


def test_the_page_shows_it():
    states = {page.id: page.state for page in all_pages()}
    assert (states["CODE014"], states["CODE041"], states["NET007"]) == ("preview", "stable", "stable")
    assert " · state: preview · " in doctor("explain", "CODE014")
    assert "state: " not in doctor("explain", "NET007").partition("##")[0]
    assert json.loads(doctor("explain", "CODE014", "--format", "json"))["state"] == "preview"


def test_the_site_shows_it():
    pytest.importorskip("mkdocs")
    import importlib.util

    path = Path(__file__).parents[1] / "docs" / "site_pages.py"
    spec = importlib.util.spec_from_file_location("site_pages", path)
    pages = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pages)
    lines = pages._check_index().splitlines()
    (marked,) = [line for line in lines if line.startswith("| [CODE014]")]
    (plain,) = [line for line in lines if line.startswith("| [NET007]")]
    assert "(preview)" in marked
    assert "(preview)" not in plain


@pytest.mark.parametrize(
    ("source", "copy_of"), [(builtin_checks, msgspec.structs.replace), (builtin_rules, dataclasses.replace)]
)
def test_another_state_is_refused(source, copy_of):
    one = next(iter(source()))
    with pytest.raises(ValueError, match=f"{one.id}: state is one of stable, preview"):
        copy_of(one, state="beta")


def test_a_rule_has_the_state_of_its_check():
    from doctor.core.check import check
    from doctor.core.finding import Severity
    from doctor.lint.engine.rule import rule
    from doctor.lint.python.script import Script

    @check(id="ACME001", severity=Severity.INFO, state="preview")
    def sample(job):
        """Ask whether."""
        return iter(())

    @rule(reads=Script, check=sample)
    def of_files(script):
        """Ask whether."""
        return iter(())

    assert (sample.state, of_files.state) == ("preview", "preview")
