"""``doctor lint`` as people run it."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.lab.command import run_doctor

CLEAN = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "LD_LIBRARY_PATH", "TMPDIR")}

SICK = """\
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
sampler = DistributedSampler(data)
loader = DataLoader(data, sampler=sampler)
for epoch in range(3):
    for batch in loader:
        model(batch).sum().backward()
if dist.get_rank() == 0:
    dist.barrier()
"""
WELL = SICK.replace("    for batch", "    sampler.set_epoch(epoch)\n    for batch").replace(
    "if dist.get_rank() == 0:\n    dist.barrier()\n", "dist.barrier()\n"
)


def lint(*arguments, cwd, code=None):
    done = run_doctor("lint", *arguments, cwd=cwd, env=CLEAN)
    assert "Traceback" not in done.stderr
    if code is not None:
        assert done.returncode == code, (done.returncode, done.stdout[-2000:], done.stderr[-2000:])
    return done


@pytest.fixture
def faulty(tmp_path):
    (tmp_path / "train.py").write_text(SICK)
    return tmp_path


def test_parts_that_are_not_read_are_told(tmp_path):
    (tmp_path / "job.sh").write_text("#!/bin/bash\n#PBS -l select=2\npython train.py\n")
    (tmp_path / "well.sh").write_text("#!/bin/bash\n#SBATCH --nodes=1\npython train.py\n")
    words = "lines that begin with #PBS are not read: of what they ask for nothing is known"
    assert f"job.sh: {words}" in lint("job.sh", "well.sh", cwd=tmp_path).stdout
    inputs = json.loads(lint("job.sh", "well.sh", "--format", "json", cwd=tmp_path).stdout)["inputs"]
    assert [one.get("notes") for one in inputs] == [[words], None]
    [run] = json.loads(lint("job.sh", "--format", "sarif", cwd=tmp_path).stdout)["runs"]
    assert [one["message"]["text"] for one in run["invocations"][0]["toolExecutionNotifications"]] == [words]


def test_text(faulty):
    shown = lint("--explain-flow", "train.py", cwd=faulty, code=1).stdout
    assert "train.py:11:5: error CODE005 " in shown
    assert "1. train.py:10  if dist.get_rank() == 0:\n" in shown
    assert "2. train.py:11  dist.barrier()\n       barrier: waits for all ranks\n" in shown
    assert "    11 |     dist.barrier()\n       |     ^^^^^^^^^^^^^^\n" in shown
    assert "doctor explain CODE005" in shown
    assert "Apply with --fix" in shown
    assert "Failed: 1 error, 1 warning in 1 of 1 file" in shown


def test_quiet_is_a_line_a_finding(faulty):
    first, second, *rest = lint("-q", "--explain-flow", "train.py", cwd=faulty, code=1).stdout.splitlines()
    assert first.startswith("train.py:5:")
    assert second.startswith("train.py:11:5: error CODE005")
    assert len(rest) == 1


def test_the_corrected_twin_is_silent(tmp_path):
    (tmp_path / "train.py").write_text(WELL)
    assert lint(".", cwd=tmp_path, code=0).stdout.startswith("No problems found in 1 file;")


def test_verbose_shows_what_is_ignored_and_every_rule(faulty):
    shown = lint("-v", "--ignore", "CODE005", "train.py", cwd=faulty, code=0).stdout
    assert "ignored CODE005" in shown
    assert "typed on the command line" in shown
    assert "pass    CODE001 " in shown
    assert "CODE005" not in lint("--ignore", "CODE005", "train.py", cwd=faulty, code=0).stdout


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ("github", "::error file=train.py,line=11,"),
        ("markdown", "CODE005"),
        ("junit", '<failure message="dist.barrier'),
        ("html", "CODE005"),
    ],
)
def test_formats(faulty, form, words):
    shown = lint("--format", form, "train.py", cwd=faulty, code=1).stdout
    assert words in shown
    assert "the whole job" not in shown


def test_json_is_the_report_document(faulty):
    document = json.loads(lint("--format", "json", ".", cwd=faulty, code=1).stdout)
    assert (document["schema"], document["job"], document["exit_code"]) == (1, None, 1)
    assert document["inputs"] == [{"path": "train.py", "kind": "python", "skipped": None}]
    ids = [result["id"] for result in document["results"]]
    assert len(set(ids)) == len(ids)
    assert {"CODE000", "CODE001", "CODE005", "ENV010"} <= set(ids)


def test_relative_uris_in_sarif(faulty):
    document = json.loads(lint("--format", "sarif", "-o", "out.sarif", ".", cwd=faulty, code=1).stdout or "null")
    assert document is None
    run = json.loads((faulty / "out.sarif").read_text())["runs"][0]
    assert run["artifacts"] == [{"location": {"uri": "train.py"}}]


def test_diff_shows_and_changes_nothing(faulty):
    done = lint("--diff", "train.py", cwd=faulty, code=1)
    assert "+    sampler.set_epoch(epoch)\n" in done.stdout
    assert "1 finding would be fixed in train.py" in done.stderr
    assert (faulty / "train.py").read_text() == SICK
    subprocess.run(["patch", "-p0"], input=done.stdout, text=True, cwd=faulty, check=True, capture_output=True)
    assert "sampler.set_epoch(epoch)" in (faulty / "train.py").read_text()


def test_fix_writes_and_judges_again(faulty):
    done = lint("--fix", "train.py", cwd=faulty, code=1)
    assert "1 finding was fixed in train.py" in done.stderr
    assert "Failed: 1 error in 1 of 1 file" in done.stdout
    assert "    sampler.set_epoch(epoch)\n    for batch in loader:" in (faulty / "train.py").read_text()
    assert "0 findings were fixed" in lint("--fix", "train.py", cwd=faulty, code=1).stderr


def test_fix_leaves_what_is_ignored_and_links_that_lead_away(tmp_path):
    (tmp_path / "away.py").write_text(SICK)
    folder = tmp_path / "given"
    folder.mkdir()
    (folder / "link.py").symlink_to(tmp_path / "away.py")
    kept = SICK.replace("DistributedSampler(data)\n", "DistributedSampler(data)  # doctor: ignore[CODE011] one epoch\n")
    (folder / "kept.py").write_text(kept)
    done = lint("--fix", "given", cwd=tmp_path, code=1)
    assert "not fixed: given/link.py: it is a link" in done.stderr
    assert (tmp_path / "away.py").read_text() == SICK
    assert (folder / "kept.py").read_text() == kept


def test_fix_without_libcst_is_one_sentence(faulty):
    code = "import sys; sys.modules['libcst'] = None; from doctor.__main__ import main; main()"
    command = [sys.executable, "-c", code, "lint", "--fix", "train.py"]
    done = subprocess.run(command, cwd=faulty, env=CLEAN, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "doctor: --fix and --diff need LibCST, which is not installed: pip install libcst\n"


def test_libcst_and_torch_are_not_loaded(faulty):
    code = (
        "import sys; from doctor.__main__ import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'lightning', 'libcst', 'jinja2'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code, "lint", "train.py"], cwd=faulty, capture_output=True, text=True)
    assert done.stderr == "[]\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["gone.py"], "gone.py: it can't be read: No such file or directory"),
        (["--select", "CODE99", "."], "no rule or family is called CODE99"),
        (["--lightning", "two", "."], "two is not a release of Lightning"),
        (["--plugin", "gone.py", "."], "gone.py"),
        (["--fix", "--diff", "."], "exclude each other"),
        (["--cores", "0", "."], "--cores"),
        ([], "PATHS"),
    ],
)
def test_what_can_not_be_used_is_one_sentence(faulty, arguments, words):
    done = lint(*arguments, cwd=faulty, code=2)
    assert words in done.stderr
    assert done.stdout == ""


def test_one_bad_file_among_good_ones_is_listed(faulty):
    (faulty / "old.py").write_text("print 'rank torch.load DistributedSampler'\n")
    shown = lint(".", "gone.py", cwd=faulty, code=1).stdout
    assert "Skipped old.py: it is not valid Python for this interpreter: line 1" in shown
    assert "Skipped gone.py: it can't be read" in shown


def test_warnings_of_python_are_not_told(faulty):
    (faulty / "train.py").write_text(SICK + "rank = 0 if rank is 0 else '\\d'\n")
    assert lint("train.py", cwd=faulty, code=1).stderr == ""


def test_settings_serve_both_sides(faulty):
    (faulty / "doctor.toml").write_text(
        'select = ["CODE", "NET"]\nfail-on = "warning"\n'
        '[[ignore]]\nid = "CODE005"\nreason = "examples"\npath = "train.py"\n'
        '[[ignore]]\nid = "NET007"\nreason = "one host"\n'
    )
    document = json.loads(lint("--format", "json", ".", cwd=faulty, code=1).stdout)
    (ignored,) = next(one["findings"] for one in document["results"] if one["id"] == "CODE005")
    assert ignored["ignored"] == {"reason": "examples", "by": "doctor.toml:4"}
    listed = [sys.executable, "-m", "doctor", "check", "--probe", "none", "--gather", "none", "--format", "json"]
    done = subprocess.run(listed, cwd=faulty, env=CLEAN, capture_output=True, text=True, timeout=60)
    assert done.returncode in (0, 1), done.stderr
    assert {result["family"] for result in json.loads(done.stdout)["results"]} == {"network"}


def test_list_and_explain_know_rules(tmp_path):
    listed = subprocess.run(
        [sys.executable, "-m", "doctor", "list", "--format", "json"], cwd=tmp_path, capture_output=True, text=True
    )
    rules = {rule["id"]: rule for rule in json.loads(listed.stdout)["rules"]}
    assert rules["CODE001"] == {
        "id": "CODE001",
        "name": "checkpoint-loaded-to-saved-device",
        "family": "code",
        "severity": "warning",
        "reads": "script",
        "title": rules["CODE001"]["title"],
        "foreshadows": ["MEM001"],
        "state": "stable",
        "origin": "built-in",
    }
    assert rules["CODE001"]["title"].startswith("Whether ")
    page = subprocess.run([sys.executable, "-m", "doctor", "explain", "ignore-in-vain"], capture_output=True, text=True)
    assert page.stdout.startswith("# CODE000 ignore-in-vain")


def test_the_hook_of_pre_commit(faulty):
    hook, fixing = yaml.safe_load((Path(__file__).parent.parent.parent / ".pre-commit-hooks.yaml").read_text())
    assert (hook["id"], fixing["id"]) == ("doctor-lint", "doctor-lint-fix")
    assert fixing["entry"] == f"{hook['entry']} --fix"
    program, *arguments = shlex.split(hook["entry"])
    assert program == "doctor"
    command = [sys.executable, "-m", "doctor", *arguments, "train.py"]
    done = subprocess.run(command, cwd=faulty, env=CLEAN, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "train.py:11:5: error CODE005" in done.stdout
