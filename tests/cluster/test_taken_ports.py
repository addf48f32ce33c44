"""MASTER_PORT taken by somebody else, or not to be reached: what the ranks do, and what they say.

They run side by side, since most of their time goes by waiting.
"""

import sys

import pytest

from tests.cluster.processes import ABOUT_THE_JOB, Commands, is_taken, until, wait
from tests.lab.ports import free_ports
from tests.lab.speed import slowness

PORTS = free_ports()
LONGEST = "3600"
"""Seconds, the most that the option takes: whoever waited for them would hang the test."""
CHECK = ("check", "--format", "json", *ABOUT_THE_JOB)
TIMEOUT = ("--timeout", str(20 * slowness()))


@pytest.fixture(scope="module")
def commands(tmp_path_factory):
    pytest.importorskip("torch")
    with Commands(tmp_path_factory.mktemp("ranks")) as opened:
        yield opened


@pytest.fixture(scope="module")
def by_a_web_server(commands):
    """A job with a folder for those who do not reach the store."""
    port, share = next(PORTS), commands.folder / "share"
    server = commands.start([sys.executable, "-u", "-m", "http.server", str(port)])
    until(lambda: "Serving HTTP" in server.stdout)
    return commands.ranks(2, port, *CHECK, *TIMEOUT, "--gather", "store", "--share", share)


@pytest.fixture(scope="module")
def two_ports(commands):
    """A job whose rank 1 is told a port on which nobody listens; a folder is there for such cases."""
    together = ["--gather", "store", "--share", commands.folder / "lost", *TIMEOUT]
    return [commands.rank(number, 2, next(PORTS), *CHECK, *together) for number in range(2)]


@pytest.fixture(scope="module")
def at_one_port(commands):
    """Two jobs that were told one port. The first one is there, and waits for its last rank."""
    port = next(PORTS)
    first = [commands.rank(number, 3, port, *CHECK, "--timeout", LONGEST, PBS_JOBID="1") for number in range(2)]
    until(lambda: is_taken(port))
    second = commands.ranks(2, port, *CHECK, "--timeout", str(10 * slowness()), PBS_JOBID="2")
    return port, first, second


@pytest.fixture(scope="module")
def all_started(by_a_web_server, two_ports, at_one_port):
    """So that they wait side by side."""


@pytest.mark.usefixtures("all_started")
def test_by_a_job_that_is_left_alone(commands, at_one_port):
    port, first, second = at_one_port
    assert wait(*second) == [1, 3]
    assert second[0].report["primary"] == "ENV008"
    assert "no coordinator is running there" in second[1].stderr
    first.append(commands.rank(2, 3, port, *CHECK, "--timeout", LONGEST, PBS_JOBID="1"))
    assert wait(*first) == [0, 0, 0]
    assert first[0].report["coverage"]["ranks_seen"] == 3


@pytest.mark.usefixtures("all_started")
def test_by_a_web_server_and_the_ranks_meet_in_the_folder(by_a_web_server):
    first, second = by_a_web_server
    assert wait(first, second) == [1, 1]
    assert "on this host: Address already in use" in first.stderr
    assert "what listens on 127.0.0.1:" in second.stderr
    assert first.report["primary"] == "ENV008"
    assert first.report["coverage"]["ranks_seen"] == 2
    assert second.stdout == ""


@pytest.mark.usefixtures("all_started")
def test_a_rank_that_cannot_reach_the_store_joins_through_the_folder(two_ports):
    first, second = two_ports
    assert wait(first, second) == [0, 0]
    assert first.report["coverage"]["ranks_seen"] == 2
    assert "nothing listens there" in second.stderr
    assert second.stdout == ""
