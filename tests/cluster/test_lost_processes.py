"""Ranks that are killed, stopped, ended or interrupted, as processes. The others leave together and in time.

Most of the time goes by waiting, so all jobs run side by side; each test looks at some of them.
"""

import importlib.util
import signal

import pytest

from tests.cluster.processes import ABOUT_THE_JOB, Commands, posted, until, wait
from tests.lab.ports import free_ports
from tests.lab.speed import slowness

TIMEOUT = 9.0 * slowness()
"""Seconds of the gatherings in a folder: longer than a keeper may be silent."""
PORTS = free_ports()
LONGEST = "3600"
"""Seconds, the most that the option takes: whoever waited for them would hang the test."""


class Job:
    """A job of three ranks that gather in a folder of their own; the last one is yet to come."""

    def __init__(self, commands, name):
        self._commands, self._port = commands, next(PORTS)
        self._share = commands.folder / name
        self.ranks = [self._rank(number) for number in range(2)]

    def _rank(self, number):
        options = ["--share", self._share, "--timeout", str(TIMEOUT), "--format", "json", *ABOUT_THE_JOB]
        return self._commands.rank(number, 3, self._port, "check", *options)

    def is_waiting(self):
        """Whether all who are there have brought their facts. Whoever keeps has its own at hand."""
        return posted(self._share) == 1

    def send(self, number, sent):
        """Send a signal to a rank once all wait."""
        until(self.is_waiting)
        self.ranks[number].send(sent)

    def complete(self):
        """Let the last rank come."""
        self.ranks.append(self._rank(2))


class Stored:
    """The same with torch's store, whose host is lost; the third rank never comes."""

    def __init__(self, commands, sent):
        self.port = next(PORTS)
        self.ranks = [
            commands.rank(number, 3, self.port, "check", "--timeout", LONGEST, *ABOUT_THE_JOB) for number in range(2)
        ]
        self._sent = sent

    def lose_rank_0(self):
        until(lambda: "2 of 3 ranks joined; waiting for rank 2" in self.ranks[0].stderr)
        self.ranks[0].send(self._sent)


NAMES = ("killed", "stopped", "ended", "interrupted", "all ended", "first killed", "first stopped", "absent")


@pytest.fixture(scope="module")
def commands(tmp_path_factory):
    with Commands(tmp_path_factory.mktemp("ranks")) as opened:
        yield opened


@pytest.fixture(scope="module")
def jobs(commands):
    return {name: Job(commands, name) for name in NAMES}


@pytest.fixture(scope="module")
def stored(commands):
    torch_is_here = importlib.util.find_spec("torch") is not None
    return [Stored(commands, sent) for sent in (signal.SIGKILL, signal.SIGSTOP) if torch_is_here]


@pytest.fixture(scope="module")
def signalled(jobs, stored):
    """What happens to a rank happens when its facts are there, and before the last rank has come."""
    jobs["killed"].send(1, signal.SIGKILL)
    jobs["stopped"].send(1, signal.SIGSTOP)
    jobs["first killed"].send(0, signal.SIGKILL)
    jobs["first stopped"].send(0, signal.SIGSTOP)
    jobs["ended"].send(0, signal.SIGTERM)
    jobs["interrupted"].send(0, signal.SIGINT)
    jobs["all ended"].send(0, signal.SIGTERM)
    jobs["all ended"].send(1, signal.SIGTERM)
    for name in ("killed", "stopped", "first killed", "first stopped"):
        jobs[name].complete()
    for job in stored:
        job.lose_rank_0()
    return jobs


@pytest.mark.parametrize(("name", "codes"), [("ended", [143]), ("interrupted", [130]), ("all ended", [143])])
def test_rank_0_gets_a_signal_to_end(signalled, name, codes):
    ranks = signalled[name].ranks
    first, second = wait(*ranks)
    assert [first] == codes
    assert second in ((143, 3) if name == "all ended" else (3,))
    assert [rank.stdout for rank in ranks] == ["", ""]


def test_a_rank_is_killed_whose_facts_are_there(signalled):
    ranks = signalled["killed"].ranks
    assert wait(*ranks) == [0, -9, 0]
    assert ranks[0].report["coverage"]["ranks_seen"] == 3


def test_a_rank_is_stopped_and_goes_on_when_all_have_left(signalled):
    first, stopped, last = signalled["stopped"].ranks
    assert wait(first, last) == [0, 0]
    assert first.report["coverage"]["ranks_seen"] == 3
    stopped.send(signal.SIGCONT)
    assert stopped.wait() == 0


@pytest.mark.parametrize("name", ["first killed", "first stopped"])
def test_rank_0_is_lost_and_the_next_one_judges(signalled, name):
    first, second, third = signalled[name].ranks
    assert wait(second, third) == [1, 1]
    assert (second.report["job"]["absent"], second.report["coverage"]["ranks_seen"]) == ([0], 2)
    assert second.report["seconds"] >= TIMEOUT
    assert third.stdout == ""
    if name == "first stopped":
        first.send(signal.SIGCONT)
        assert first.wait() == 1  # of all others it hears nothing more


def test_a_rank_that_never_joins_is_reported_in_time(jobs):
    ranks = jobs["absent"].ranks
    assert wait(*ranks) == [1, 1]
    report = ranks[0].report
    assert (report["job"]["absent"], report["primary"]) == ([2], "ENV005")
    assert report["seconds"] >= TIMEOUT


@pytest.mark.parametrize(("number", "words"), [(0, "is no longer reachable: "), (1, "does not respond: ")])
def test_the_host_of_the_store_is_lost(signalled, stored, number, words):
    """Its client in another rank notices at once when it is killed, and by a limit of its own when it is stopped."""
    pytest.importorskip("torch")
    rank = stored[number].ranks[1]
    assert rank.wait() == 3
    [line] = rank.stderr.splitlines()[-1:]
    assert f"the store at 127.0.0.1:{stored[number].port} {words}" in line
    assert line.endswith("rank 0 exited or stopped before it reached a verdict (doctor explain ENV005)")
