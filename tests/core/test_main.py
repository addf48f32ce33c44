"""The command as people run it: a process, its exit code, its two streams."""

import io
import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET

import msgspec
import pytest

from doctor.core.capture import encode_document, to_document, to_record
from doctor.facts import SoftwareFacts
from doctor.report import narrative
from doctor.report.formatting import fix_parts
from doctor.report.terminal import make_console
from doctor.testing import healthy, running
from tests.lab.command import run_doctor

CLEAN = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "LD_LIBRARY_PATH", "TMPDIR")}


def doctor(*arguments, cwd, code=None, **variables):
    done = run_doctor(*arguments, cwd=cwd, env={**CLEAN, **variables})
    assert "Traceback" not in done.stderr
    if code is not None:
        assert done.returncode == code, (done.returncode, done.stdout[-2000:], done.stderr[-2000:])
    return done


def put_capture(folder, sketch, name="capture.json"):
    path = folder / name
    path.write_bytes(encode_document(to_document(sketch.job())))
    return path


SICK = healthy(hosts=2, per_host=2).alter(SoftwareFacts, ranks=(2,), nccl_libraries=())


def test_version(tmp_path):
    shown = doctor("--version", cwd=tmp_path, code=0).stdout
    assert shown.startswith("rankdoctor ")
    assert doctor("version", cwd=tmp_path, code=0).stdout == shown


def test_help_is_a_command(tmp_path):
    assert doctor("help", cwd=tmp_path, code=0).stdout == doctor("--help", cwd=tmp_path, code=0).stdout
    for name in ("check", "lint", "help", "version"):
        assert doctor("help", name, cwd=tmp_path, code=0).stdout == doctor(name, "--help", cwd=tmp_path, code=0).stdout
    assert "Did you mean 'diagnose'?" in doctor("help", "diagnse", cwd=tmp_path, code=2).stderr
    assert "No such command" in doctor("help", "zzz", cwd=tmp_path, code=2).stderr.replace("no such", "No such")


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("doctor he", "help"),
        ("doctor help di", "diagnose diff"),
        ("doctor explain net01", "NET010 NET011 NET012 NET013 NET014 NET015 NET016 NET017 NET018 NET019"),
        ("doctor explain interface-u", "interface-unmatched interface-unroutable"),
        ("doctor explain CODE04", "CODE040 CODE041 CODE042 CODE043 CODE044 CODE045"),
        ("doctor explain laun", "launch launchers-mixed"),
        ("doctor check --select NET007,NCCL00", " ".join(f"NET007,NCCL00{number}" for number in range(1, 10))),
        ("doctor check --select A", "ALL"),
        ("doctor run --ignore NET00", " ".join(f"NET00{number}" for number in range(1, 10))),
        ("doctor check --profile aws-g", "aws-gb200"),
        ("rankdoctor explain interface-unm", "interface-unmatched"),
    ],
)
def test_commands_ids_and_names_are_completed(tmp_path, typed, offered):
    program = typed.partition(" ")[0]
    (tmp_path / program).write_text("from doctor.__main__ import main\nmain()")
    asked = {
        "COMP_WORDS": typed,
        "COMP_CWORD": str(typed.count(" ")),
        f"_{program.upper()}_COMPLETE": "bash_complete",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run(
        [sys.executable, tmp_path / program], cwd=tmp_path, env={**CLEAN, **asked}, capture_output=True, text=True
    )
    assert done.stdout.split() == [f"plain,{name}" for name in offered.split()]


@pytest.mark.parametrize("typed", ["doctor estimate tr", "doctor diagnose lo", "doctor run -- tr"])
def test_files_are_completed_by_the_shell(tmp_path, typed):
    asked = {"COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" ")), "_DOCTOR_COMPLETE": "bash_complete"}
    done = subprocess.run(
        [sys.executable, "-m", "doctor"], cwd=tmp_path, env={**CLEAN, **asked}, capture_output=True, text=True
    )
    assert done.stdout.split() == [f"file,{typed.rpartition(' ')[2]}"]


def test_the_second_name_of_the_command_is_the_one_that_help_shows(tmp_path):
    script = "import sys\nfrom doctor.__main__ import main\nmain()"
    path = tmp_path / "rankdoctor"
    path.write_text(script)
    done = subprocess.run([sys.executable, path, "-h"], cwd=tmp_path, env=CLEAN, capture_output=True, text=True)
    assert done.stdout.startswith("Usage: rankdoctor ")
    assert doctor("-V", cwd=tmp_path, code=0).stdout == doctor("--version", cwd=tmp_path, code=0).stdout


def test_a_stream_in_ascii_gets_ascii(tmp_path):
    done = doctor("check", "--select", "HOST", cwd=tmp_path, code=0, PYTHONIOENCODING="ascii")
    assert "?" not in done.stdout
    assert done.stdout.splitlines()[0].startswith("rankdoctor ")
    assert "\n------" in done.stdout
    assert "+ pass" in done.stdout


def test_patterns_of_the_settings_are_checked_although_an_option_replaces_them(tmp_path):
    (tmp_path / "doctor.toml").write_text('select = ["NOPE"]\n')
    done = doctor("check", "--select", "HOST", cwd=tmp_path, code=2)
    assert done.stderr == "doctor: unknown check or family 'NOPE'. Run 'doctor list' to see all checks\n"


def test_a_process_of_its_own_names_the_option_that_has_no_effect(tmp_path):
    done = doctor("check", "--select", "HOST", "--share", "x", "--exclude-list", "bad", cwd=tmp_path, code=0)
    assert done.stderr == "doctor: --share is ignored: no launcher is in use, and this is a single process\n"
    assert (tmp_path / "bad").read_text() == ""


def test_every_summary_of_a_command_is_whole(tmp_path):
    usage, _, rest = doctor("--help", cwd=tmp_path, code=0).stdout.partition("\n")
    assert usage.endswith("[ARGS]...")
    assert "..." not in rest


def test_usage_errors_end_with_2(tmp_path):
    done = doctor("check", "--no-such-option", cwd=tmp_path, code=2)
    assert done.stdout == ""


def test_check_prints_one_document_on_stdout(tmp_path):
    done = doctor("check", "--format", "json", cwd=tmp_path)
    report = json.loads(done.stdout)
    assert report["schema"] == 1
    assert report["exit_code"] == done.returncode
    assert report["job"]["world_size"] == 1
    counts = report["coverage"]["checks"]
    assert sum(counts.values()) == len(report["results"])
    assert len({result["id"] for result in report["results"]}) == len(report["results"])
    assert counts["error"] == 0


def test_no_torch_is_imported_by_a_check(tmp_path):
    code = (
        "import sys; sys.argv = ['doctor', 'check', '--quiet']\n"
        "from doctor.__main__ import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'lightning', 'numpy', 'pytorch_lightning'}\n"
        "loaded = heavy & {name.partition('.')[0] for name in sys.modules}\n"
        "assert not loaded, loaded"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=CLEAN, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_version_and_explain_load_no_check(tmp_path):
    for arguments in (["--version"], ["explain", "NCCL008"]):
        code = (
            f"import sys; sys.argv = ['doctor', *{arguments!r}]\n"
            "from doctor.__main__ import main\n"
            "try: main()\nexcept SystemExit as end: assert not end.code, end.code\n"
            "assert 'doctor_checks' not in sys.modules"
        )
        done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=CLEAN, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_capture_then_diagnose_elsewhere(tmp_path):
    doctor("capture", "-o", "here.json", cwd=tmp_path)
    capture = json.loads((tmp_path / "here.json").read_text())
    assert (capture["schema"], capture["kind"]) == (1, "capture")
    judged = json.loads(doctor("diagnose", "here.json", "--format", "json", cwd=tmp_path).stdout)
    assert judged["inputs"] == [{"path": "here.json", "kind": "capture", "skipped": None}]
    assert judged["job"]["hosts"][0]["name"] == capture["hosts"][0]["name"]


def test_capture_into_a_folder(tmp_path):
    doctor("capture", "-o", tmp_path, cwd=tmp_path)
    (name,) = (path.name for path in tmp_path.iterdir())
    assert name.startswith("host-")
    place = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533", "LOCAL_RANK": "3"}
    doctor("capture", "-o", tmp_path, cwd=tmp_path, **place)
    assert (tmp_path / "rank-3.json").is_file()


def test_a_rank_that_the_launcher_numbers_otherwise_overwrites_nobody(tmp_path):
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2"}
    for task in ("0", "1"):
        own = {"SLURM_PROCID": task, "SLURM_LOCALID": task}
        doctor("capture", "-o", tmp_path, cwd=tmp_path, RANK="0", WORLD_SIZE="2", **step, **own)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank-0-task-1.json", "rank-0.json"]


def test_a_redacted_capture_does_not_name_its_host(tmp_path):
    doctor("capture", "-o", tmp_path, "--redact", cwd=tmp_path)
    (path,) = tmp_path.iterdir()
    assert path.name != f"host-{os.uname().nodename}.json"


def test_diagnose_names_the_rank(tmp_path):
    put_capture(tmp_path, SICK)
    report = json.loads(doctor("diagnose", ".", "--format", "json", cwd=tmp_path, code=1).stdout)
    (result,) = (result for result in report["results"] if result["id"] == "NCCL008")
    assert result["findings"][0]["ranks"] == [2]
    assert result["findings"][0]["hosts"] == ["node1"]
    assert report["verdict"] == "fail"


def test_ignored_findings_stay_visible(tmp_path):
    put_capture(tmp_path, SICK)
    (tmp_path / "doctor.toml").write_text('[[ignore]]\nid = "NCCL"\nreason = "rolling upgrade"\n')
    done = doctor("diagnose", "capture.json", "--select", "NCCL008", cwd=tmp_path, code=0)
    assert "rolling upgrade (doctor.toml:2)" in done.stdout
    done = doctor("diagnose", "capture.json", "--select", "NCCL008", "--format", "json", cwd=tmp_path, code=0)
    assert json.loads(done.stdout)["results"][0]["findings"][0]["ignored"]["by"] == "doctor.toml:2"


def test_fail_on(tmp_path):
    put_capture(tmp_path, SICK)
    doctor("diagnose", "capture.json", "--select", "NCCL008", cwd=tmp_path, code=1)
    doctor("diagnose", "capture.json", "--select", "NCCL008", "--fail-on", "never", cwd=tmp_path, code=0)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{\n", "it is not valid JSON"),
        ('{\n "kind": "other",\n', "it is not valid JSON"),
        ('{\n "loss": 1.0\n}\n', "it is not a rankdoctor capture, report or flight-recorder dump"),
    ],
)
def test_json_that_is_cut_is_told_apart_from_other_json(tmp_path, text, says):
    (tmp_path / "some.json").write_text(text)
    assert doctor("diagnose", "some.json", cwd=tmp_path, code=2).stderr == f"doctor: some.json: {says}\n"


def test_one_bad_input_among_good_ones_is_listed(tmp_path):
    put_capture(tmp_path, SICK)
    (tmp_path / "train.log").write_text("Epoch 1\n" * 1000)
    (tmp_path / "old.json").write_text('{"schema": 2, "kind": "capture"}')
    (tmp_path / "deep.json").write_text('{"kind": "capture", "schema": 1, "x":' + "[" * 200_000)
    (tmp_path / "report.json").write_text('{"schema": 1, "verdict": "pass"}')
    os.mkfifo(tmp_path / "pipe")
    report = json.loads(doctor("diagnose", ".", "--format", "json", cwd=tmp_path, code=1).stdout)
    why = {one["path"]: (one["kind"], one["skipped"]) for one in report["inputs"]}
    assert why["capture.json"] == ("capture", None)
    assert why["train.log"] == ("log", None)
    assert "schema 2" in why["old.json"][1]
    assert "nested too deeply" in why["deep.json"][1]
    assert why["report.json"] == ("report", "a report is a verdict, not evidence")
    assert why["pipe"] == ("special", "it is not a regular file")


def test_records_of_the_newest_run_are_judged(tmp_path):
    """Earlier ones lie beside them or below; a rank that heard no other has the part of the id that all derive."""
    sketch = running(hosts=1, per_host=3)
    for name, rank, run, date in (
        ("rank-0.json", 0, "abc-2", "2026-02-02"),
        ("rank-1.json", 1, "abc-2", "2026-02-01"),
        ("apart/rank-2.json", 2, "abc", "2026-02-01"),
        ("rank-5.json", 2, "abc-1", "2026-01-01"),
        ("earlier/abc-1/rank-0.json", 0, "abc-1", "2026-01-01"),
    ):
        document = {**to_record(sketch.only((rank,)).job(), run), "created": f"{date}T00:00:00+00:00"}
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(encode_document(document))
    report = json.loads(doctor("diagnose", ".", "--format", "json", "--select", "ENV004", cwd=tmp_path).stdout)
    assert report["job"]["hosts"][0]["ranks"] == [0, 1, 2]
    why = {one["path"]: (one["kind"], one["skipped"]) for one in report["inputs"]}
    assert [path for path, (_, skipped) in why.items() if skipped is None] == [
        "rank-0.json",
        "rank-1.json",
        "apart/rank-2.json",
    ]
    assert why["rank-5.json"] == why["earlier/abc-1/rank-0.json"]
    assert why["rank-5.json"] == (
        "record",
        "it is of another run (abc-1, 2026-01-01T00:00:00+00:00) than the newest record (abc-2)",
    )


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("none.json", None, "No such file"),
        ("empty.log", " \n", "it is empty"),
        ("core", "\x00\x01\x02" * 99, "neither text"),
        ("new.json", '{"schema": 2, "kind": "capture"}', "schema 2"),
        ("cut.json", '{"schema": 1, "kind": "capture", "hosts": [', "truncated"),
    ],
)
def test_inputs_of_which_none_can_be_read(tmp_path, name, content, words):
    if content is not None:
        (tmp_path / name).write_text(content)
    done = doctor("diagnose", name, cwd=tmp_path, code=2)
    assert done.stdout == ""
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_broken_configuration_is_one_sentence(tmp_path):
    (tmp_path / "doctor.toml").write_text("select = [")
    done = doctor("check", cwd=tmp_path, code=2)
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1


def test_a_plugin_that_cannot_be_used_is_one_sentence(tmp_path):
    (tmp_path / "guest.py").write_text("raise RuntimeError('boom')")
    done = doctor("check", "--plugin", "guest.py", cwd=tmp_path, code=2)
    assert done.stdout == ""
    assert "boom" in done.stderr


def test_diff(tmp_path):
    good = put_capture(tmp_path, healthy(hosts=2, per_host=2), "good.json")
    bad = put_capture(tmp_path, SICK, "bad.json")
    assert "no difference" in doctor("diff", good, good, cwd=tmp_path, code=0).stdout
    document = json.loads(doctor("diff", good, bad, "--format", "json", cwd=tmp_path, code=1).stdout)
    assert {(one["section"], tuple(one["ranks"])) for one in document["differences"]} == {("software", (2,))}
    doctor("diff", good, tmp_path / "none.json", cwd=tmp_path, code=2)


def test_explain(tmp_path):
    done = doctor("explain", "nccl008", cwd=tmp_path, code=0)
    assert done.stdout.startswith("# NCCL008 version-differs")
    page = json.loads(doctor("explain", "version-differs", "--format", "json", cwd=tmp_path, code=0).stdout)
    assert (page["id"], page["family"], page["severity"]) == ("NCCL008", "nccl", "error")
    done = doctor("explain", "NCLL008", cwd=tmp_path, code=2)
    assert "NCCL008" in done.stderr
    assert done.stdout == ""


def test_list(tmp_path):
    document = json.loads(doctor("list", "--format", "json", cwd=tmp_path, code=0).stdout)
    (one,) = (one for one in document["checks"] if one["id"] == "NCCL008")
    assert one == {
        "id": "NCCL008",
        "name": "version-differs",
        "family": "nccl",
        "severity": "error",
        "title": "Whether all ranks load the same NCCL version.",
        "scope": "job",
        "when": "PM",
        "needs": ["software"],
        "state": "stable",
        "origin": "built-in",
        "limits": {},
    }
    assert "NCCL008" in doctor("list", "--select", "nccl", cwd=tmp_path, code=0).stdout


def test_junit_and_markdown_and_github(tmp_path):
    put_capture(tmp_path, SICK)
    suites = ET.fromstring(doctor("diagnose", "capture.json", "--format", "junit", cwd=tmp_path, code=1).stdout)
    failed = [case.get("name") for case in suites.iter("testcase") if case.find("failure") is not None]
    assert "NCCL008 version-differs" in failed
    assert "NCCL008" in doctor("diagnose", ".", "--format", "markdown", cwd=tmp_path).stdout
    assert (
        "::error title=NCCL008 version-differs::" in doctor("diagnose", ".", "--format", "github", cwd=tmp_path).stdout
    )


def test_output_goes_whole_into_the_file(tmp_path):
    put_capture(tmp_path, SICK)
    done = doctor("diagnose", "capture.json", "--format", "json", "-o", "report.json", cwd=tmp_path, code=1)
    assert done.stdout == ""
    assert json.loads((tmp_path / "report.json").read_text())["verdict"] == "fail"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["capture.json", "report.json"]
    doctor("diagnose", "capture.json", "-o", "no/such/folder.txt", cwd=tmp_path, code=2)


def test_a_process_of_several_that_is_judged_alone_is_inconclusive(tmp_path):
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533", "LOCAL_RANK": "0"}
    done = doctor("check", "--gather", "none", "--format", "json", cwd=tmp_path, **place, LOCAL_WORLD_SIZE="2")
    report = json.loads(done.stdout)
    assert (report["job"]["world_size"], report["coverage"]["ranks_seen"]) == (2, 1)
    reasons = {result["id"]: result["reason"] for result in report["results"]}
    assert reasons["VER001"] == "other ranks not gathered"
    assert done.returncode == 3, [r for r in report["results"] if r["status"] == "fail"]


def test_strict_makes_the_unknown_count(tmp_path):
    hidden = msgspec.json.decode(encode_document(to_document(healthy(1, 2).job())))
    del hidden["ranks"][1]["facts"]["software"]
    (tmp_path / "capture.json").write_bytes(msgspec.json.encode(hidden))
    doctor("diagnose", "capture.json", "--select", "NCCL008", cwd=tmp_path, code=0)
    doctor("diagnose", "capture.json", "--select", "NCCL008", "--strict", cwd=tmp_path, code=3)


def test_no_colour_where_nobody_looks(tmp_path):
    put_capture(tmp_path, SICK)
    assert "\x1b" not in doctor("diagnose", "capture.json", cwd=tmp_path, FORCE_COLOR="").stdout


def test_narrow_and_wide(tmp_path):
    put_capture(tmp_path, SICK)
    report = json.loads(doctor("diagnose", "capture.json", "--format", "json", cwd=tmp_path).stdout)
    fixes = [finding["fix"] for result in report["results"] for finding in result["findings"]]
    for columns in (40, 80, 200):
        text = doctor("diagnose", "capture.json", cwd=tmp_path, COLUMNS=str(columns)).stdout
        commands = {command for fix in fixes for command in (*narrative.commands(fix), *fix_parts(fix)[1])}
        prose = [line for line in text.splitlines() if not any(command in line for command in commands)]
        assert max(map(len, prose)) <= columns
        assert not [line for line in text.splitlines() if line != line.rstrip()]


def test_a_terminal_that_knows_ascii_alone(tmp_path):
    put_capture(tmp_path, SICK)
    assert "NCCL008" in doctor("diagnose", "capture.json", cwd=tmp_path, code=1, PYTHONIOENCODING="ascii").stdout


def test_a_capture_that_worked_replaces_the_vote(tmp_path):
    older = healthy(1, 2).alter(SoftwareFacts, python="3.10.9")
    put_capture(tmp_path, older, "good.json")
    job = put_capture(tmp_path, healthy(1, 2), "job.json")
    doctor("diagnose", job, "--select", "VER001", cwd=tmp_path, code=0)
    done = doctor(
        "diagnose", job, "--select", "VER001", "--expect", "good.json", "--format", "json", cwd=tmp_path, code=1
    )
    (result,) = json.loads(done.stdout)["results"]
    assert result["findings"][0]["ranks"] == [0, 1]
    assert result["findings"][0]["evidence"]["expected"] == {"Python": "3.10"}


def test_an_expectation_that_is_not_there_is_one_sentence(tmp_path):
    done = doctor("check", "--expect", "nowhere.json", cwd=tmp_path, code=2)
    assert (done.stdout, len(done.stderr.splitlines())) == ("", 1)


def test_no_colours_for_the_terminal_that_mpirun_pretends(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert not make_console(Terminal()).no_color
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    console = make_console(Terminal())
    assert (console.no_color, console.is_terminal) == (True, False)
