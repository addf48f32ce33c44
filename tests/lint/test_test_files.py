"""Findings in files that a test runner finds are counted, and shown where they are asked for."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from doctor.cli.main import app

HANG = """\
import torch.distributed as dist

def test_barrier():
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        dist.barrier()
"""
PROGRAM = HANG.replace("def test_barrier", "def main") + "\nmain()\n"
LAUNCH = "export NCCL_ALGO=Rings\ntorchrun --nproc_per_node=8 train.py\n"


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def lint(*arguments, code=0):
    done = CliRunner().invoke(app, ["lint", *arguments])
    assert done.exit_code == code, done.output
    return done.stdout


def put(project, place, text):
    path = project / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ("tests/distributed/helpers.py", PROGRAM),
        ("pkg/test/groups.py", PROGRAM),
        ("unitest/groups.py", PROGRAM),
        ("pkg/test_groups.py", HANG),
        ("pkg/groups_test.py", HANG),
        ("conftest.py", "import pytest\n" + HANG),
    ],
)
def test_in_files_of_a_test_runner_they_are_counted(project, place, text):
    put(project, place, text)
    shown = lint(".")
    assert "No problems found (1 in tests not shown) in 1 file" in shown
    assert "1 finding in tests not shown: --tests reports them too" in shown
    result = next(one for one in json.loads(lint("--format", "json", "."))["results"] if one["id"] == "CODE005")
    assert (result["status"], result["in_tests"], result["findings"]) == ("pass", 1, [])
    assert "CODE005" in lint("--tests", ".", code=1)
    put(project, "doctor.toml", "[lint]\ntests = true\n")
    assert "CODE005" in lint(".", code=1)


@pytest.mark.parametrize(
    "place", ["test_groups.py", "evaluation/test_ddp.py", "contest.py", "latest/run.py", "unit/run.py"]
)
def test_a_program_by_such_a_name_is_no_test(project, place):
    put(project, place, PROGRAM)
    assert "CODE005" in lint(".", code=1)


def test_what_is_named_is_shown(project):
    put(project, "tests/unit/test_groups.py", HANG)
    assert "CODE005" in lint("tests", code=1)
    assert "CODE005" in lint("tests/unit", code=1)
    assert "CODE005" in lint("tests/unit/test_groups.py", code=1)


def test_launch_files_of_tests_and_of_evaluations(project):
    put(project, "train.py", PROGRAM.replace("== 0", ">= 0"))
    put(project, "tests/run.sh", LAUNCH)
    assert "NCCL" not in lint(".")
    put(project, "scripts/test/run.sh", LAUNCH)
    assert "NCCL" in lint(".", code=1)


@pytest.mark.parametrize("form", ["github", "markdown", "html"])
def test_other_formats_count_them_too(project, form):
    put(project, "tests/test_groups.py", HANG)
    assert "1 in tests not shown" in lint("--format", form, ".")


def test_what_accepts_them_stays_valid(project):
    put(
        project,
        "tests/test_groups.py",
        HANG.replace("barrier()\n", "barrier()  # doctor: ignore[CODE005] to hang\n", 2),
    )
    assert "not shown" not in lint(".")


def test_a_wrong_setting_is_said(project):
    put(project, "train.py", "import torch\n")
    put(project, "doctor.toml", "[lint]\ntest = true\n")
    assert "unknown key 'test'" in str(CliRunner().invoke(app, ["lint", "."]).exception)
