"""The committed JSON Schemas are those of the types, and what commands write satisfies them."""

from __future__ import annotations

import contextlib
import copy
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import click
import msgspec
import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner

from doctor.cli import schema as schema_command
from doctor.cli.main import app
from doctor.core.errors import UnusableError
from doctor.core.facts import SECTIONS
from doctor.core.settings import read_settings
from doctor.report import json_schemas
from doctor.version import PACKAGE
from tests.golden import record
from tests.lab.cases import each_case
from tests.lab.needs import clean_environ
from tests.lab.sample import ALL
from tests.lab.speed import patience

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

pytestmark = pytest.mark.skipif(find_spec("jsonschema") is None, reason="needs jsonschema")
NAMES = list(json_schemas.SCHEMAS)
FORMS = ("json", "json-redacted") if ALL else ("json",)
"""Redacted reports of a few commands are judged by default too, below."""


def committed(name):
    return json.loads(Path(PACKAGE, "schemas", f"{name}.json").read_text(encoding="utf-8"))


def closed(node):
    """The schema without room for unknown fields: what is written but not described would otherwise go unnoticed."""
    if isinstance(node, list):
        return [closed(one) for one in node]
    if not isinstance(node, dict):
        return node
    inner = {name: closed(value) for name, value in node.items()}
    if node.get("type") == "object" and "properties" in node and "additionalProperties" not in node:
        inner["additionalProperties"] = False
    return inner


def validator_of(schema):
    """The class of validators for the draft of ``schema``, imported here: it takes a second, in every worker."""
    from jsonschema.validators import validator_for

    return validator_for(schema)


@pytest.fixture(scope="module")
def judges():
    """A validator for each schema, closed."""
    return {name: validator_of(committed(name))(closed(committed(name))) for name in NAMES}


def errors(judge, document):
    return [f"{error.json_path}: {error.message[:200]}" for error in judge.iter_errors(document)]


def kind_of(document):
    return {"capture": "capture", "record": "records"}.get(document.get("kind", ""), "report")


@pytest.mark.parametrize("name", NAMES)
def test_the_committed_schema_is_that_of_the_types(name):
    text = Path(PACKAGE, "schemas", f"{name}.json").read_text(encoding="utf-8")
    assert text == json_schemas.schema_text(name), "run: python -m doctor.report.json_schemas"


@pytest.mark.parametrize("name", NAMES)
def test_a_schema_is_valid_itself(name):
    schema = committed(name)
    validator_of(schema).check_schema(schema)
    assert "``" not in json.dumps(schema)


def test_settings_use_what_the_language_server_of_toml_promises():
    """Draft 4 has neither of these words."""
    words = json.dumps(committed("settings"))
    assert not [word for word in ('"const"', '"$defs"', '"prefixItems"', '"if"', '"propertyNames"') if word in words]


# --- what commands write


def without_differences(run):
    """The function that runs a command, for all but ``diff``, which writes no report."""
    return lambda command, *arguments: "" if command == "diff" else run(command, *arguments)


def with_new_results(document, seen):
    """A report with those of its results that no earlier one had: most reports share most of them."""
    new = {json.dumps(result, sort_keys=True): result for result in document["results"]}
    document["results"] = [result for text, result in new.items() if text not in seen]
    seen.update(new)
    return document


@pytest.mark.parametrize("part", ["captures", "reported", "faults", "lint"])
def test_every_report_of_the_corpus(judges, part, monkeypatch):
    forms = {form: options for form, options in record.REPORT_FORMATS.items() if form in FORMS}
    monkeypatch.setattr(record, "REPORT_FORMATS", forms)
    monkeypatch.setattr(record, "LINT_FORMATS", ("json",))
    monkeypatch.setattr(record, "_lint_cases", lambda: ())
    monkeypatch.setattr(record, "run", without_differences(record.run))
    seen = set()

    def documents():
        for name, text in record.PARTS[part]():
            if name.rpartition(".")[2] in forms:
                yield name, with_new_results(json.loads(text.partition("--- stdout\n")[2]), seen)

    found = dict(record.in_clean_surroundings(lambda: list(documents())))
    assert len(found) >= {"captures": 10, "reported": 150, "faults": 100, "lint": 1}[part] * len(FORMS)
    wrong = {name: told for name, document in found.items() if (told := errors(judges["report"], document))}
    assert not wrong


def written(*arguments, cwd):
    command = [sys.executable, "-m", "doctor", *map(str, arguments)]
    done = subprocess.run(
        command, cwd=cwd, env=clean_environ(cwd), capture_output=True, text=True, timeout=patience(60), check=False
    )
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


@pytest.mark.real_time
@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        ("report", ["check", "--format", "json"]),
        ("report", ["check", "--format", "json", "--redact", "--probe", "full"]),
        ("report", ["lint", "--format", "json", "--select", "ALL", "."]),
        ("report", ["diagnose", "--format", "json", "one.log", "--redact"]),
        ("report", ["diagnose", "--format", "json", "one.log", "two.log"]),
        ("capture", ["capture"]),
        ("capture", ["capture", "--redact"]),
    ],
)
def test_what_a_command_writes_here(judges, tmp_path, kind, arguments):
    (tmp_path / "train.py").write_text("import torch.distributed as d\nif d.get_rank() == 0:\n    d.barrier()\n")
    (tmp_path / "one.log").write_text("2026-01-01 10:00:00 SLURM_JOB_ID=1 [rank0]: KeyError: 'label'\n")
    (tmp_path / "two.log").write_text("2026-02-01 10:00:00 SLURM_JOB_ID=2 OutOfMemoryError: CUDA out of memory.\n")
    document = written(*arguments, "--isolated", cwd=tmp_path)
    assert kind_of(document) == kind
    assert errors(judges[kind], document) == []


@pytest.mark.real_time
def test_what_attach_writes(judges):
    pytest.importorskip("torch")
    from tests.attach.readable import started
    from tests.attach.test_refusals import attached_from

    with started() as target:
        _, report = attached_from((), target, "--rounds", "2")
    assert report["stacks"]
    assert errors(judges["report"], report) == []


@pytest.mark.slow
def test_what_estimate_writes(judges, monkeypatch):
    pytest.importorskip("torch")
    name = "gpt_small-ddp.json"
    monkeypatch.setattr(record, "ESTIMATES", {name: record.ESTIMATES[name]})
    ((_, text),) = record.in_clean_surroundings(lambda: list(record.PARTS["estimate"]()))
    report = json.loads(text.partition("--- stdout\n")[2])
    assert report["estimate"]["peak_bytes"]
    assert errors(judges["report"], report) == []


def test_what_a_watched_run_writes(judges, tmp_path):
    from doctor.monitor.watch_options import WatchOptions
    from doctor.monitor.watch_session import WatchSession

    run = WatchSession(WatchOptions(), rank=0, world_size=1, directory=tmp_path)
    run.open()
    run.check_start()
    run.close()
    report, kept = (json.loads((tmp_path / name).read_text()) for name in ("report.json", "rank-0.json"))
    assert errors(judges["report"], report) == []
    assert (kind_of(kept), errors(judges["records"], kept)) == ("records", [])


def test_a_capture_with_all_sections(judges):
    """One of each section, with every field filled, beside those that this machine has."""
    from doctor.core.capture import section_keys, to_document
    from doctor.testing import healthy

    document = to_document(healthy(2, 2).job())
    for level, owners in (("host", document["hosts"]), ("rank", document["ranks"])):
        for key in section_keys(level):
            with contextlib.suppress(record._Unsampled):  # it refers to itself
                owners[0]["facts"][key] = msgspec.to_builtins(record._instance(SECTIONS[key], False))
    assert len(document["hosts"][0]["facts"] | document["ranks"][0]["facts"]) >= len(SECTIONS) - 2
    document["expected"] = copy.deepcopy(document)
    document = json.loads(json.dumps(document))
    assert errors(judges["capture"], document) == []
    document["ranks"][0]["facts"]["launch"]["rank"] = "three"
    assert errors(judges["capture"], document) != []


# --- what is not a document


def base(name):
    return json.loads(json.dumps(_base(name)))


def _base(name):
    from doctor.core.capture import to_document, to_record
    from doctor.session import examine
    from doctor.testing import healthy

    job = healthy(1, 2).job()
    if name == "report":
        return msgspec.to_builtins(examine(job))
    return to_document(job) if name == "capture" else to_record(job, "abc-1")


def at(document, path):
    *outer, last = path
    for step in outer:
        document = document[step]
    return document, last


@each_case(
    ("name", "path", "value"),
    [
        ("report", ["schema"], 2),
        ("report", ["verdict"], "ok"),
        ("report", ["exit_code"], "0"),
        ("report", ["job", "hosts", 0, "ranks"], [0.5]),
        ("report", ["results", 0, "status"], "well"),
        ("report", ["results", 0, "severity"], None),
        ("report", ["coverage", "checks"], [1]),
        ("report", ["candidates"], [{"id": "NET001"}]),
        ("report", ["estimate"], {"peak_bytes": 1}),
        ("capture", ["kind"], "record"),
        ("capture", ["schema"], "1"),
        ("capture", ["world_size"], None),
        ("capture", ["hosts", 0, "facts"], []),
        ("capture", ["ranks", 1, "host"], "first"),
        ("capture", ["ranks", 0, "missing"], {"gpus": {"lack": "lost", "reason": "?"}}),
        ("records", ["kind"], "capture"),
        ("records", ["run"], 7),
    ],
)
def test_a_changed_document_is_none(name, path, value):
    """By the schemas as they are published, which permit unknown fields."""
    document = base(name)
    judge = validator_of(committed(name))(committed(name))
    assert errors(judge, document) == []
    owner, last = at(document, path)
    owner[last] = value
    assert errors(judge, document) != []


@pytest.mark.parametrize("name", ["report", "capture", "records"])
def test_a_required_field_is_missed_and_an_unknown_one_is_not(name):
    judge = validator_of(committed(name))(committed(name))
    document = base(name)
    assert errors(judge, {**document, "later": 1}) == []
    for field in ("schema", "tool"):
        assert errors(judge, {key: value for key, value in document.items() if key != field}) != []


# --- settings


TABLES = [
    ("", True),
    ('select = ["ALL", "NET007", "network", "ACME001"]', True),
    ("select = [7]", False),
    ("selects = []", False),
    ('fail-on = "warning"', True),
    ('fail-on = "warn"', False),
    ("timeout = 3600", True),
    ("timeout = 0.05", False),
    ('[[ignore]]\nid = "NET002"\nreason = "one host"\nuntil = 2030-01-01\nhost = "node*"', True),
    ('[[ignore]]\nid = "NET002"', False),
    ('[[ignore]]\nid = "NET002"\nreason = "one host"\nhosts = "node*"', False),
    ('[limits]\n"MEM003.used_share" = 0.95', True),
    ("[limits]\nMEM003.used_share = 0.95", True),
    ('[limits]\n"ACME001.minor" = 12\nACME002.minor = 12', True),
    ('[limits]\n"MEM003.used_share" = "much"', False),
    ('[limits]\n"MEM003.used_shares" = 0.95', False),
    ("[limits]\nMEM003.used_shares = 0.95", False),
    ('[directories]\ncheckpoint = "/data/runs"', True),
    ('[directories]\ncheckpoint = ""', False),
    ('plugins = [""]', False),
    ('plugins = ["ours.py"]', True),
]


@each_case(("text", "is_valid"), TABLES)
def test_the_schema_of_settings_judges_as_the_reader_does(text, is_valid, tmp_path_factory):
    from doctor.core.check_registry import load_registry
    from doctor.core.settings import require_known_limits

    judge = validator_of(committed("settings"))(committed("settings"))
    # As JSON has them: the schema describes a date by its text.
    document = json.loads(json.dumps(tomllib.loads(text), default=str))
    assert (errors(judge, document) == []) == is_valid
    file = tmp_path_factory.mktemp("settings") / "doctor.toml"
    file.write_text(text)
    if "ACME" in text:
        return  # no plugin has this check here
    try:
        require_known_limits(read_settings(file.parent, config=file), load_registry(plugins=False))
    except UnusableError:
        assert not is_valid
    else:
        assert is_valid


def test_every_setting_has_a_description():
    schema = committed("settings")
    owners = [schema, schema["definitions"]["IgnoreEntry"], schema["properties"]["limits"]]
    missing = [name for owner in owners for name, one in owner["properties"].items() if not one.get("description")]
    assert missing == []


# --- the command


@pytest.mark.parametrize("name", NAMES)
def test_the_command_prints_the_committed_file(name):
    done = CliRunner().invoke(app, ["schema", name])
    assert (done.exit_code, json.loads(done.stdout)) == (0, committed(name))


def test_the_command_writes_a_file_and_knows_no_other_name(tmp_path):
    file = tmp_path / "schema.json"
    done = CliRunner().invoke(app, ["schema", "settings", "-o", str(file)])
    assert (done.exit_code, done.stdout, json.loads(file.read_text())) == (0, "", committed("settings"))
    assert CliRunner().invoke(app, ["schema", "setting"]).exit_code == 2
    assert list(schema_command.NAMES) == NAMES


def test_a_missing_file_is_one_sentence(monkeypatch, tmp_path):
    monkeypatch.setattr(schema_command, "PACKAGE", str(tmp_path))
    with pytest.raises(UnusableError, match="the schema report is missing in the installation: No such file"):
        CliRunner().invoke(app, ["schema", "report"], catch_exceptions=False)


def test_it_is_in_the_help_and_in_the_completion():
    assert "  schema  " in CliRunner().invoke(app, ["--help"]).stdout
    complete = ShellComplete(app, {}, "doctor", "_DOCTOR_COMPLETE")
    assert [item.value for item in complete.get_completions([], "sch")] == ["schema"]
    assert [item.value for item in complete.get_completions(["schema"], "")] == NAMES
    assert app.get_command(click.Context(app), "schema") is schema_command.command
