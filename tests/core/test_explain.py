"""``doctor explain`` and ``doctor list``: limits, and checks that came with a plugin."""

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest
from click.testing import CliRunner

from doctor.cli.main import app
from tests.lab.command import run_doctor

CLEAN = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "LD_LIBRARY_PATH", "TMPDIR")}
BARE = """
from doctor.api import Finding, Severity, check
from doctor.facts import SoftwareFacts

@check(id="ACME001", severity=Severity.WARNING, needs=(SoftwareFacts,))
def old_python(job, *, most: float = 3.5):
{docstring}
    for software, identical in job.each(SoftwareFacts):
        yield Finding("Python is old", ranks=identical.ranks)
"""
DOCSTRING = '''    """Ask whether every rank runs the Python that we support.

    Why it hurts: our data pipeline needs 3.11.
    Fix: module load python/3.11
    """'''
RULE = """
from doctor.api import Script, Severity, Violation, rule

@rule(id="ACME101", severity=Severity.WARNING, reads=Script, mentions=("torch",))
def torch_imported(script):
    '''Ask whether torch is imported.

    Why it hurts: it is an example.
    Fix: leave it out.
    '''
    yield Violation(script.tree.body[0], "torch is imported")
"""


def doctor(*arguments, cwd, code):
    done = run_doctor(*arguments, cwd=cwd, env=CLEAN)
    assert "Traceback" not in done.stderr
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    return done


@pytest.fixture
def plugin(tmp_path):
    path = tmp_path / "our checks.py"
    path.write_text(BARE.format(docstring=DOCSTRING))
    return path


def check_with(plugin, form, cwd):
    options = ("--select", "ACME", "--gather", "none", "--fail-on", "never", "--format", form)
    return doctor("check", "--plugin", plugin.name, *options, cwd=cwd, code=0).stdout


def test_the_command_that_a_report_names_explains_the_check(plugin, tmp_path):
    text = check_with(plugin, "text", tmp_path)
    (line,) = [line for line in text.splitlines() if line.split()[:1] == ["more"]]
    command = line.split(maxsplit=1)[1]
    assert command == "doctor explain ACME001 --plugin 'our checks.py'"
    shell = command.replace("doctor", f"{sys.executable} -m doctor", 1)
    done = subprocess.run(shell, shell=True, cwd=tmp_path, env=CLEAN, capture_output=True, text=True, check=True)
    assert done.stdout == (
        "# ACME001 old-python\n\nWhether every rank runs the Python that we support.\n\n"
        "severity: warning · family: acme · scope: rank · detected: before a run\n\n"
        "limits: `ACME001.most = 3.5`\n\n"
        "## Impact\n\nOur data pipeline needs 3.11.\n\n## Fix\n\nmodule load python/3.11\n\n## From\n\nour checks.py\n"
    )


@pytest.mark.parametrize("form", ["text", "markdown", "html", "junit"])
def test_a_check_without_a_docstring_has_no_blank_rows(plugin, tmp_path, form):
    plugin.write_text(BARE.format(docstring="    ''"))
    shown = check_with(plugin, form, tmp_path)
    assert "Python is old" in shown
    if form == "junit":
        shown = "\n".join(ET.fromstring(shown).itertext())
    rest = [line.strip(" *-#:").lower() for line in shown.splitlines()]
    assert not {"impact", "fix", "effect"} & set(rest)
    assert "<strong>Fix:</strong> </p>" not in shown


def test_redaction_hides_the_folder_of_a_plugin(plugin, tmp_path):
    options = ("--plugin", plugin, "--select", "ACME", "--gather", "none", "--fail-on", "never", "--redact")
    for form in ("text", "json"):
        assert str(tmp_path) not in doctor("check", *options, "--format", form, cwd=tmp_path, code=0).stdout


def test_explain_finds_checks_and_rules_of_plugins_by_id_and_name(plugin, tmp_path):
    rules = tmp_path / "rules.py"
    rules.write_text(RULE)
    options = ("--plugin", plugin, "--plugin", rules, "--format", "json")
    page = json.loads(doctor("explain", "old-python", *options, cwd=tmp_path, code=0).stdout)
    assert (page["id"], page["limits"]) == ("ACME001", {"ACME001.most": 3.5})
    assert json.loads(doctor("explain", "acme101", *options, cwd=tmp_path, code=0).stdout)["name"] == "torch-imported"
    done = doctor("explain", "ACME01", *options, cwd=tmp_path, code=2)
    assert "unknown check 'ACME01'; did you mean ACME" in done.stderr
    assert "Run 'doctor list' to see all checks" in done.stderr


def test_near_names_are_told_as_they_are_written(tmp_path):
    (tmp_path / "doctor.toml").write_text('[limits]\n"MEM003.USED_SHARE" = 0.9\n')
    done = doctor("check", cwd=tmp_path, code=2)
    assert "unknown limit 'MEM003.USED_SHARE'; did you mean MEM003.used_share" in done.stderr
    done = doctor("explain", "interface-umatched", cwd=tmp_path, code=2)
    assert "did you mean interface-unmatched" in done.stderr


def test_limits_are_shown_as_settings_take_them(tmp_path):
    assert "limits: `MEM003.used_share = 0.9`" in doctor("explain", "MEM003", cwd=tmp_path, code=0).stdout
    page = json.loads(doctor("explain", "MEM003", "--format", "json", cwd=tmp_path, code=0).stdout)
    assert page["limits"] == {"MEM003.used_share": 0.9}
    listed = json.loads(doctor("list", "--format", "json", cwd=tmp_path, code=0).stdout)["checks"]
    assert {one["id"]: one["limits"] for one in listed}["MEM003"] == {"MEM003.used_share": 0.9}
    text = doctor("list", cwd=tmp_path, code=0).stdout
    block = text[text.index("[limits]") :].split("\n\n")[0]
    (tmp_path / "doctor.toml").write_text(block)
    doctor("list", cwd=tmp_path, code=0)
    assert block.count("\n") == sum(len(one["limits"]) for one in listed)


def test_explain_lists_a_family_and_finds_an_error_message(tmp_path):
    family = doctor("explain", "network", cwd=tmp_path, code=0).stdout
    assert family == doctor("explain", "NET", cwd=tmp_path, code=0).stdout
    assert family.startswith("NET001  hostname-unresolvable: ")
    message = "Duplicate GPU detected : rank 2 and rank 0 both on CUDA device 1b000"
    assert doctor("explain", message, cwd=tmp_path, code=0).stdout.startswith("GPU001 ")
    doctor("explain", "xyzzy foo bar", cwd=tmp_path, code=2)


def test_the_list_shows_titles_and_explains_its_letters(tmp_path):
    text = doctor("list", "--select", "NET007", cwd=tmp_path, code=0).stdout
    assert text.startswith("when: P before a run, R during training, M post-mortem\n")
    assert "interface-unmatched: Whether NCCL_SOCKET_IFNAME" in text


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("Duplicate GPU detected", "GPU001"),
        ("unhandled system error", "NCCL013"),
        ("Connection reset by peer", "RUN012"),
        ("Broken pipe", "RUN012"),
        ("NCCL timeout", "RUN001"),
        ("No route to host", "NET013"),
        ("Address already in use", "ENV008"),
        ("oom-kill", "MEM012"),
        ("GPU has fallen off the bus", "GPU019"),
        ("weights diverge across replicas", "RUN007"),
        ("parameters that were not used in producing loss", "RUN009"),
        ("find_unused_parameters=True", "RUN009"),
        ("Mismatched NCCL version detected : rank 3 version 22105 expected 22304", "NCCL008"),
        ("Signal 15 (SIGTERM) received by PID 4711", "ENV017"),
        ("Detected mismatch between collectives on ranks", "RUN002"),
        ("RuntimeError: Tensors must be CUDA and dense", "RUN011"),
        ("RuntimeError: CUDA error: no kernel image is available for execution on the device", "VER003"),
        ("OSError: [Errno 122] Disk quota exceeded", "HOST004"),
        ("Heartbeat monitor timed out! Process will be terminated after dumping debug info", "RUN016"),
        ("slurmstepd: error: *** JOB 12 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE TO TIME LIMIT ***", "ENV017"),
        ("RuntimeError: DataLoader worker (pid(s) 1234) exited unexpectedly", "DATA012"),
        ("KeyError: 'label'", "RUN004"),
    ],
)
def test_the_first_check_is_the_one_that_a_message_is_about(text, first):
    rows = json.loads(CliRunner().invoke(app, ["explain", "--isolated", text, "--format", "json"]).stdout)
    assert rows[0]["id"] == first, [row["id"] for row in rows]


def test_a_text_of_no_check_is_told_apart_from_a_misspelled_id(tmp_path):
    done = doctor("explain", "Missing key(s) in state_dict", cwd=tmp_path, code=2)
    assert done.stderr.startswith("doctor: no check is about 'Missing key(s) in state_dict'. 'doctor diagnose FILE'")
