"""Files that forges and citation tools read have the form that they want."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from doctor.version import __version__

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[1]
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("[0-9]*.yml"))
CITATION = ROOT / "CITATION.cff"
TYPES = {
    "markdown": {"value"},
    "input": {"label"},
    "textarea": {"label"},
    "dropdown": {"label", "options"},
    "checkboxes": {"label", "options"},
}
"""Types of elements and the attributes that each needs, by GitHub's "Syntax for GitHub's form schema"."""

pytestmark = pytest.mark.skipif(not CITATION.is_file(), reason="needs a checkout")


def fits(file, schema):
    """Whether a file is as the schema that check-jsonschema carries wants it."""
    command = pytest.importorskip("check_jsonschema.cli").main
    with pytest.raises(SystemExit) as ended:
        command(["--builtin-schema", schema, str(file)])
    return ended.value.code == 0


def faults_of(form):
    """What GitHub would refuse in an issue form: it then shows no form at all."""
    faults = [f"no {key}" for key in ("name", "description", "body") if not form.get(key)]
    body = form.get("body") or []
    ids = [element["id"] for element in body if "id" in element]
    faults += ["an id is used twice"] if len({*ids}) < len(ids) else []
    faults += ["nothing to fill in"] if all(element.get("type") == "markdown" for element in body) else []
    labels = [element["attributes"]["label"] for element in body if "label" in element.get("attributes", {})]
    faults += ["a label is used twice"] if len({*labels}) < len(labels) else []
    for element in body:
        kind, attributes = element.get("type"), element.get("attributes", {})
        if kind not in TYPES:
            faults.append(f"unknown type {kind}")
            continue
        faults += [f"{kind} without {key}" for key in TYPES[kind] if not attributes.get(key)]
        options = attributes.get("options", [])
        if kind == "dropdown" and (len({*options}) < len(options) or not all(isinstance(one, str) for one in options)):
            faults.append("options are different texts")
        if kind == "checkboxes" and not all("label" in one for one in options):
            faults.append("a checkbox has no label")
        if kind == "markdown" and "validations" in element:
            faults.append("markdown has no validations")
        if not re.fullmatch(r"[\w-]+", element.get("id", "x")):
            faults.append(f"{element['id']} is not an id")
    return faults


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_an_issue_form_is_one(path):
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert faults_of(form) == []
    assert fits(path, "vendor.github-issue-forms")
    assert "doctor capture --redact" in path.read_text(encoding="utf-8")


def test_there_are_three_forms_and_no_blank_issue():
    assert [path.stem for path in FORMS] == ["1-wrong-verdict", "2-false-alarm", "3-bug"]
    config = ROOT / ".github" / "ISSUE_TEMPLATE" / "config.yml"
    assert yaml.safe_load(config.read_text()) == {"blank_issues_enabled": False}
    assert fits(config, "vendor.github-issue-config")


def spoilt(change):
    form = yaml.safe_load(FORMS[1].read_text(encoding="utf-8"))
    change(form)
    return form


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda form: form.pop("description"), "no description"),
        (lambda form: form["body"][0].update(type="select"), "unknown type select"),
        (lambda form: form["body"][0]["attributes"].pop("options"), "dropdown without options"),
        (lambda form: form["body"][1].update(id="version"), "an id is used twice"),
        (lambda form: form["body"][1]["attributes"].pop("label"), "input without label"),
        (lambda form: form["body"][1].update(id="a b"), "a b is not an id"),
        (lambda form: form["body"][-1]["attributes"].update(options=[{"required": True}]), "a checkbox has no label"),
        (lambda form: form["body"][0]["attributes"].update(options=["a", True]), "options are different texts"),
    ],
)
def test_a_broken_form_is_noticed(change, fault):
    assert fault in faults_of(spoilt(change))


def test_the_citation_has_what_the_format_requires_and_nothing_invented():
    citation = yaml.safe_load(CITATION.read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert citation["version"] == __version__
    assert citation["authors"] == [{"name": "rankdoctor contributors"}]
    assert not {"doi", "identifiers", "url", "repository-code", "repository"} & set(citation)
    assert fits(CITATION, "vendor.citation-file-format")


@pytest.mark.parametrize("name", ["SECURITY.md", "CODE_OF_CONDUCT.md", "CITATION.cff", "docs/reference/versioning.md"])
def test_no_address_is_invented(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    assert not re.findall(r"[\w.+-]+@[\w-]+\.\w+", text)
    hosts = {found[1] for found in re.finditer(r"https?://([\w.-]+)", text)}
    assert hosts <= {"www.contributor-covenant.org", "creativecommons.org", "semver.org"}
