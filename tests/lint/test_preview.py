"""Findings in preview are reported where they are asked for, and counted where they are not."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from doctor.cli.main import app

SCRIPT = """\
import os
import torch.distributed as dist
import torch.multiprocessing as mp

def worker(rank):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "29611"
    dist.init_process_group("nccl", rank=rank, world_size=8)

mp.spawn(worker, nprocs=8)
"""
HANG = SCRIPT.replace("\nmp.spawn", "    if rank == 0:\n        dist.barrier()\n\nmp.spawn")
SHUFFLES = """\
import torch.distributed as dist
from torch.utils.data import DataLoader

dist.init_process_group()
val_loader = DataLoader(val_set, batch_size=64, shuffle=True)
for x, y in val_loader:
    results.append(model(x))
"""
PLUGIN = '''\
from doctor.api import Script, Severity, Violation, rule

@rule(id="ACME001", severity=Severity.INFO, reads=Script, state="preview")
def every_import(script):
    """Ask whether nothing is imported.

    Why it hurts: it does not.
    Fix: none.
    """
    import ast

    for node in script.all(ast.Import):
        yield Violation(node, "Something is imported")
'''


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def lint(*arguments, code=0):
    done = CliRunner().invoke(app, ["lint", *arguments])
    assert done.exit_code == code, done.output
    return done.stdout


def report(*arguments, code=0):
    return json.loads(lint("--format", "json", *arguments, code=code))


def result_of(document, name):
    return next(one for one in document["results"] if one["id"] == name)


def test_by_default_they_are_counted_and_not_shown(project):
    text = lint("train.py")
    assert "CODE025" not in text
    assert "No problems found (1 in preview not shown) in 1 file" in text
    assert "1 finding in preview not shown: --preview reports them too" in text
    hidden = result_of(report("train.py"), "CODE025")
    assert (hidden["status"], hidden["hidden"], hidden["findings"]) == ("pass", 1, [])
    assert "hidden" not in result_of(report("train.py"), "CODE029")


@pytest.mark.parametrize("asked", [["--preview"], ["--select", "CODE025"], ["--select", "code025,NCCL"]])
def test_an_option_or_the_id_shows_them(project, asked):
    text = lint(*asked, "train.py")
    assert "train.py:7:5: info CODE025 (preview) MASTER_PORT=29611" in text
    assert "not shown" not in text
    (finding,) = result_of(report(*asked, "train.py"), "CODE025")["findings"]
    assert finding["evidence"]["preview"] is True


def test_a_family_does_not_show_them(project):
    assert "1 in preview not shown" in lint("--select", "CODE", "train.py")


def test_the_settings_show_them(project):
    (project / "doctor.toml").write_text("preview = true\n")
    assert "CODE025 (preview)" in lint("train.py")
    assert "not shown" in lint("--isolated", "train.py")
    (project / "doctor.toml").write_text('preview = "yes"\n')
    assert "Expected `bool`" in str(CliRunner().invoke(app, ["lint", "train.py"]).exception)


def test_errors_are_shown_beside_them(project):
    (project / "train.py").write_text(HANG)
    text = lint("train.py", code=1)
    assert "CODE005" in text
    assert "Failed: 1 error (2 in preview not shown)" in text


def test_what_accepts_them_stays_valid(project):
    port = '["MASTER_PORT"] = "29611"'
    (project / "train.py").write_text(SCRIPT.replace(port, f"{port}  # doctor: ignore[CODE025] one job a host"))
    text = lint("train.py")
    assert "preview" not in text
    assert "No problems found in 1 file" in text
    (project / "train.py").write_text(SCRIPT)
    (project / "doctor.toml").write_text('[[ignore]]\nid = "CODE025"\nreason = "one job a host"\n')
    assert "not shown" not in lint("train.py")


def test_other_formats_count_them_too(project):
    assert "no finding (1 in preview not shown)" in lint("--format", "github", "train.py")
    assert "1 in preview not shown" in lint("--format", "markdown", "train.py")
    assert "1 in preview not shown" in lint("--format", "html", "train.py")
    (run,) = json.loads(lint("--format", "sarif", "train.py"))["runs"]
    assert run["results"] == []
    (run,) = json.loads(lint("--format", "sarif", "--preview", "train.py"))["runs"]
    (shown,) = run["results"]
    assert (shown["ruleId"], shown["properties"]["state"]) == ("CODE025", "preview")


def test_a_fix_leaves_them_alone(project):
    pytest.importorskip("libcst")
    (project / "train.py").write_text(SHUFFLES)
    lint("--fix", "train.py")
    assert (project / "train.py").read_text() == SHUFFLES
    lint("--fix", "--preview", "train.py")
    assert "shuffle=False" in (project / "train.py").read_text()


def test_a_file_that_is_not_understood_is_still_said(project):
    (project / "broken.py").write_text("import torch\ndef :\n")
    text = lint("train.py", "broken.py", code=3)
    assert "Skipped broken.py" in text
    assert "1 in preview not shown" in text
    assert "No problems found" not in text


def test_a_rule_in_preview_is_skipped_unless_it_is_asked_for(project):
    (project / "acme.py").write_text(PLUGIN)
    plain = result_of(report("--plugin", "acme.py", "train.py"), "ACME001")
    assert (plain["status"], plain["reason"], plain["hidden"]) == ("skip", "in preview: --preview applies it", 3)
    shown = result_of(report("--plugin", "acme.py", "--select", "ACME001", "train.py"), "ACME001")
    assert (shown["status"], len(shown["findings"])) == ("fail", 3)
