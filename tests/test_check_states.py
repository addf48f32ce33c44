"""Checks and rules that may still change say so, wherever they are listed."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path

import pytest
from click.testing import CliRunner

from doctor.cli.main import app
from doctor.core.check_registry import builtin_checks
from doctor.lint.engine.registry import builtin_rules
from doctor.report.playbook import all_pages

READINGS = Path(__file__).parents[1] / "benchmarks" / "lint_readings.json"
FIRST_NEW = 36
"""The rules from CODE036 on are the newest: they were added after the first readings of hits in public repositories."""


def doctor(*arguments):
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.mark.skipif(not READINGS.is_file(), reason="needs a checkout")
def test_preview_are_new_rules_of_which_no_hit_was_read_as_right():
    hits = [hit for reading in json.loads(READINGS.read_text()) for hit in reading["hits"]]
    right = Counter(hit[3] for hit in hits if hit[5] == "right")
    rules = {rule.id: rule for rule in builtin_rules() if rule.id.startswith("CODE")}
    expected = {name for name in rules if int(name[4:]) >= FIRST_NEW and not right[name]}
    assert {one.id for one in (*builtin_checks(), *rules.values()) if one.state == "preview"} == expected
    assert len(expected) < len(rules) / 4


def test_the_list_shows_it():
    rows = json.loads(doctor("list", "--select", "CODE040,CODE041", "--format", "json"))["rules"]
    assert {row["id"]: row["state"] for row in rows} == {"CODE040": "preview", "CODE041": "stable"}
    marked = [line for line in doctor("list", "--select", "CODE").splitlines() if line.endswith("(preview)")]
    assert marked
    checks = json.loads(doctor("list", "--format", "json"))["checks"]
    assert {row["state"] for row in checks} == {"stable"}


def test_the_page_shows_it():
    states = {page.id: page.state for page in all_pages()}
    assert (states["CODE040"], states["CODE041"], states["NET007"]) == ("preview", "stable", "stable")
    assert " · state: preview · " in doctor("explain", "CODE040")
    assert "state: " not in doctor("explain", "NET007").partition("##")[0]
    assert json.loads(doctor("explain", "CODE040", "--format", "json"))["state"] == "preview"


def test_the_site_shows_it():
    pytest.importorskip("mkdocs")
    import importlib.util

    path = Path(__file__).parents[1] / "docs" / "site_pages.py"
    spec = importlib.util.spec_from_file_location("site_pages", path)
    pages = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pages)
    lines = pages._check_index().splitlines()
    (marked,) = [line for line in lines if line.startswith("| [CODE040]")]
    (plain,) = [line for line in lines if line.startswith("| [NET007]")]
    assert "(preview)" in marked
    assert "(preview)" not in plain


@pytest.mark.parametrize("source", [builtin_checks, builtin_rules])
def test_another_state_is_refused(source):
    one = next(iter(source()))
    with pytest.raises(ValueError, match=f"{one.id}: state is one of stable, preview"):
        dataclasses.replace(one, state="beta")


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
