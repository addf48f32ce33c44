"""What real runs leave when they fail, read as a newcomer would: ``doctor diagnose DIR``."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "programs" / "fails.py"
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "TORCH_", "RANK", "PMI"))}
FAULTS = ("raise", "hang", "kill", "none")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with the output of all ranks of each run, by torchrun: three, two of the run that goes well."""
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("runs")
    launch = [sys.executable, "-m", "torch.distributed.run", "--master-port=0"]
    waiting = []
    for fault in FAULTS:
        (folder / fault).mkdir()
        with (folder / fault / "job.log").open("wb") as log:
            ranks = f"--nproc-per-node={2 if fault == 'none' else 3}"
            command = [*launch, ranks, f"--rdzv-id={fault}", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
            waiting.append(
                subprocess.Popen([*command, str(PROGRAM), fault], stdout=log, stderr=subprocess.STDOUT, env=CLEAN)
            )
    for process in waiting:
        process.wait(100)
    return folder


def diagnose(path, *options):
    command = [sys.executable, "-m", "doctor", "diagnose", str(path), "--format", "json", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=CLEAN)
    assert "Traceback" not in done.stderr
    return json.loads(done.stdout)


def primary(report):
    result = next(one for one in report["results"] if one["id"] == report["primary"])
    return report["primary"], result["findings"][0]


def test_the_rank_that_raised_is_named_with_its_line(runs):
    report = diagnose(runs / "raise")
    name, finding = primary(report)
    assert (name, finding["ranks"], report["exit_code"]) == ("RUN004", [2], 1)
    assert "KeyError" in finding["summary"]
    assert finding["source"]["file"].endswith("fails.py")
    assert "fails.py" in json.dumps(finding["evidence"])
    assert report["job"]["world_size"] == 3


def test_the_rank_that_others_waited_for_is_named(runs):
    """It says nothing itself: torchrun ended it after the others had waited in vain."""
    report = diagnose(runs / "hang")
    name, finding = primary(report)
    assert (name, finding["ranks"]) == ("RUN001", [1])


def test_a_killed_rank_is_named(runs):
    name, finding = primary(diagnose(runs / "kill"))
    assert (name in ("RUN004", "MEM012"), finding["ranks"]) == (True, [2])


def test_a_run_that_went_well_is_healthy_once_its_end_is_seen(runs, tmp_path):
    """Its last lines are steps: without the status that a shell prints, nobody can tell it from one that hangs."""
    report = diagnose(runs / "none")
    assert (report["verdict"], report["exit_code"], report["primary"]) == ("inconclusive", 3, None)
    assert report["outcome"]["last_steps"][0]["step"] == "step 9"
    (tmp_path / "job.log").write_bytes((runs / "none" / "job.log").read_bytes() + b"exit status 0\n")
    report = diagnose(tmp_path)
    assert (report["verdict"], report["exit_code"], report["outcome"]["kind"]) == ("pass", 0, "ended")


@pytest.mark.parametrize("form", ["text", "markdown", "html", "junit", "github"])
def test_every_form_says_it(runs, form):
    command = [sys.executable, "-m", "doctor", "diagnose", str(runs / "raise"), "--format", form]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=CLEAN)
    assert (done.returncode, done.stderr) == (1, "")
    assert "RUN004" in done.stdout
    assert "KeyError" in done.stdout


def test_redacted_it_names_nobody_and_still_the_rank(runs):
    report = diagnose(runs / "raise", "--redact")
    assert primary(report)[1]["ranks"] == [2]
    assert str(PROGRAM.parent) not in json.dumps(report)
    assert str(runs) not in json.dumps(report)


def test_tasks_of_srun_with_labels(slurm_cluster, tmp_path):
    pytest.importorskip("torch")
    cluster = slurm_cluster(2)
    port = {"MASTER_ADDR": "node0", "MASTER_PORT": "29611", "GLOO_SOCKET_IFNAME": "eth0"}
    done = cluster.srun(
        ["-l", "-N", "2", "--ntasks-per-node", "2"], [sys.executable, str(PROGRAM), "raise"], port, timeout=90
    )
    (tmp_path / "slurm-1.out").write_text(done.stdout + done.stderr)
    name, finding = primary(diagnose(tmp_path))
    assert (name, finding["ranks"]) == ("RUN004", [2])
