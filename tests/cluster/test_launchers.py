"""Ranks as launchers start them: by hand, by torchrun, by mpirun. Each start is looked at from several sides."""

import json
import sys

import pytest

from tests.cluster.processes import ABOUT_THE_JOB, DOCTOR, Commands, lacks_of_hosts, rank_environ, wait
from tests.lab.needs import require_tools
from tests.lab.ports import free_ports

CHECK = [*DOCTOR, "check", "--format", "json", "--timeout", "80", *ABOUT_THE_JOB]


@pytest.fixture
def commands(tmp_path):
    with Commands(tmp_path) as opened:
        yield opened


@pytest.fixture
def ports():
    return free_ports()


def documents(text):
    """The JSON documents in ``text``, one after another."""
    decoder, found = json.JSONDecoder(), []
    while text := text.strip():
        document, end = decoder.raw_decode(text)
        found.append(document)
        text = text[end:]
    return found


_JOB = """
import datetime, torch, torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
total = torch.ones(1)
dist.all_reduce(total)
assert total.item() == dist.get_world_size(), total
dist.destroy_process_group()
"""


def test_by_hand_and_the_job_starts_right_after(commands, ports):
    """Each rank checks and then trains, as in a start script: the port has to be free again, and nobody may be let go
    before the others."""
    pytest.importorskip("torch")
    port = next(ports)
    script = '"$@" > report; echo $? > code; exec "$0" -c "$JOB"'
    ranks = [
        commands.start(["bash", "-c", script, sys.executable, *CHECK], **rank_environ(number, 2, port), JOB=_JOB)
        for number in range(2)
    ]
    assert wait(*ranks) == [0, 0], [rank.stderr for rank in ranks]
    folders = [commands.folder / f"process-{number}" for number in range(2)]
    report = json.loads((folders[0] / "report").read_text())
    assert [(folder / "report").read_text() for folder in folders[1:]] == [""]
    assert {int((folder / "code").read_text()) for folder in folders} == {report["exit_code"]}
    assert report["job"]["world_size"] == 2
    assert [host["ranks"] for host in report["job"]["hosts"]] == [[0, 1]]
    assert (report["job"]["absent"], report["coverage"]["ranks_seen"]) == ([], 2)
    assert lacks_of_hosts(report) == []


_FIRST_START_FAILS = """
from doctor.api import Finding, Severity, check
from doctor.facts import LaunchFacts

@check(id="ZZZ001", severity=Severity.ERROR, needs=(LaunchFacts,), cases=lambda: ())
def first_start(job):
    '''Ask whether this is not the first start.

    Why it hurts: it does not.
    Fix: start again.
    '''
    for launch, identical in job.each(LaunchFacts):
        if launch.get("TORCHELASTIC_RESTART_COUNT") == "0":
            yield Finding("the first start", ranks=identical.ranks)
"""


def test_by_torchrun_which_starts_again(commands, ports, tmp_path):
    """It does not name its run (the run id is ``none``), and its agent's store outlives the ranks."""
    require_tools("torchrun")
    plugin = tmp_path / "plugin.py"
    plugin.write_text(_FIRST_START_FAILS)
    torchrun = ["torchrun", "--nproc-per-node", "2", "--max-restarts", "1", "--monitor-interval", "0.1"]
    where = ["--master-addr", "127.0.0.1", "--master-port", str(next(ports)), "--no-python"]
    done = commands.start([*torchrun, *where, *CHECK, "--plugin", plugin, "--select", "ENV004,ENV005,NET003,ZZZ001"])
    assert done.wait() == 0, done.stderr
    faulty, well = documents(done.stdout)
    assert [report["exit_code"] for report in (faulty, well)] == [1, 0]
    for report in (faulty, well):
        assert (report["job"]["launcher"], report["coverage"]["ranks_seen"]) == ("torchrun", 2)
        assert lacks_of_hosts(report) == []


def test_by_mpirun_which_tells_no_master(commands, tmp_path):
    """All ranks bring their facts, and one of them writes the document."""
    require_tools("mpirun")
    mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", "2"]
    output = tmp_path / "job.json"
    done = commands.start([*mpirun, *DOCTOR, "capture", "--timeout", "80", "-o", output])
    assert done.wait() == 0, done.stderr
    assert done.stdout == ""
    document = json.loads(output.read_text())
    assert (document["kind"], document["launcher"], document["world_size"]) == ("capture", "openmpi", 2)
    assert [rank["rank"] for rank in document["ranks"]] == [0, 1]
    assert [(host["name"] != "", "host" in host["facts"]) for host in document["hosts"]] == [(True, True)]
