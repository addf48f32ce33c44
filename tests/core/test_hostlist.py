import random
import shutil
import subprocess

import pytest

from doctor.api import Finding, Scope, Severity, check
from doctor.cluster.hostlist import EXCLUDE, as_hostlist, hosts_to_exclude
from doctor.core.check_registry import CheckRegistry
from doctor.core.settings import IgnoreEntry, Settings
from doctor.facts import HostFacts
from doctor.session import judge
from doctor.testing import healthy
from tests.lab.cases import each_case
from tests.lab.speed import patience


def report_of(*findings, ignore=()):
    """The report on a healthy job of three hosts for which one check finds these."""

    def find(job):
        yield from findings

    one = check(id="NET901", severity=Severity.ERROR, needs=(HostFacts,), scope=Scope.JOB)(find)
    return judge(healthy(hosts=3, per_host=1).job(), CheckRegistry((one,)), Settings(ignore=ignore))


def finding(*hosts):
    return Finding("slow", evidence={EXCLUDE: list(hosts)} if hosts else {"hosts": ["node2"]})


def test_hosts_of_all_findings_each_once_in_order():
    assert hosts_to_exclude(report_of(finding("node2"), finding("node1", "node2"))) == ("node1", "node2")


def test_a_finding_that_names_no_host_to_exclude_excludes_none():
    assert hosts_to_exclude(report_of(finding())) == ()


def test_what_is_ignored_does_not_count():
    known = (IgnoreEntry("NET901", "a known cable"),)
    assert hosts_to_exclude(report_of(finding("node1"), ignore=known)) == ()


def test_many_hosts_are_all_listed():
    names = tuple(f"node{number:04}" for number in range(600))
    assert hosts_to_exclude(report_of(finding(*names))) == names


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([], ""),
        (["login"], "login"),
        (["node3"], "node3"),
        (["node3", "node3"], "node3"),
        (["node7", "node9", "node8", "node3"], "node[3,7-9]"),
        (["n009", "n010", "n011"], "n[009-011]"),
        (["node9", "node10"], "node10,node9"),
        (["n1", "n01", "n001"], "n001,n01,n1"),
        (["rack2-node1", "rack2-node2", "login", "gpu7x"], "gpu7x,login,rack2-node[1-2]"),
    ],
)
def test_names_are_folded(names, text):
    assert as_hostlist(names) == text


@pytest.fixture
def unfold(tmp_path, monkeypatch):
    """SLURM's own reading of a list; it wants a configuration, and asks no controller."""
    if shutil.which("scontrol") is None:
        pytest.skip("needs scontrol of SLURM")
    configuration = tmp_path / "slurm.conf"
    configuration.write_text("ClusterName=c\nSlurmctldHost=c(192.0.2.1)\nNodeName=n\nPartitionName=p Nodes=ALL\n")
    monkeypatch.setenv("SLURM_CONF", str(configuration))

    def by_slurm(text):
        done = subprocess.run(
            ["scontrol", "show", "hostnames", text], capture_output=True, text=True, timeout=patience(20)
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    return by_slurm


def some_names(chance):
    """A few bundles of names whose numbers lie side by side or apart, with leading zeros or none, and some without."""
    names = set(chance.sample(["login", "gpu7x", "a-b", "10.0.0.3", "7", "x1y2"], chance.randint(0, 3)))
    for prefix in chance.sample(["node", "n-", "rack3-node", "gpu.c", ""], 2):
        width = chance.choice([0, 2, 4])
        start = chance.choice([0, 7, 95, 998])
        names.update(
            f"{prefix}{start + step:0{width}}" for step in range(chance.randint(1, 8)) if chance.random() < 0.7
        )
    return names


@each_case("seed", range(40))
def test_slurm_unfolds_the_same_names(unfold, seed):
    names = some_names(random.Random(seed)) or {"node0"}
    assert sorted(unfold(as_hostlist(names))) == sorted(names)


def test_what_follows_from_something_else_excludes_nobody():
    """A host that is slow because of its MTU needs another MTU."""

    def find_cause(job):
        yield Finding("another MTU", explains=("NET901",))

    def find_effect(job):
        yield finding("node1")

    cause = check(id="NET900", severity=Severity.ERROR, needs=(HostFacts,), scope=Scope.JOB)(find_cause)
    effect = check(id="NET901", severity=Severity.ERROR, needs=(HostFacts,), scope=Scope.JOB)(find_effect)
    job = healthy(hosts=3, per_host=1).job()
    assert hosts_to_exclude(judge(job, CheckRegistry((effect,)), Settings())) == ("node1",)
    assert hosts_to_exclude(judge(job, CheckRegistry((cause, effect)), Settings())) == ()
