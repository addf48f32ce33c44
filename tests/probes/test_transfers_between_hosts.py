"""Bandwidth between hosts of the lab: hosts that are well, slow, lossy, silent or out of reach."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from doctor.api import Status
from doctor.core.check_registry import CheckRegistry
from doctor.core.check_runner import examine_job
from doctor.core.report_document import CheckResult
from doctor.probes.bandwidth import transfer_plan
from doctor.probes.bandwidth.transfer import MOST_BYTES
from doctor.probes.bandwidth.transfer_plan import ROUND_SECONDS
from tests.lab import network
from tests.lab.hosts import LabHost
from tests.lab.quality import heed_loss, lossy
from tests.lab.speed import patience
from tests.probes.survey import CHECKS, surveying
from tests.probes.transferring import Transferred, transfer

SHORT = 1.2
"""Seconds."""

MakeHosts = Callable[[int], tuple[LabHost, ...]]


def judged(found: Transferred, check: str) -> CheckResult:
    (result,) = examine_job(found.job, CheckRegistry((CHECKS[check],)))
    assert result.status is not Status.ERROR, result.reason
    return result


def blamed(found: Transferred) -> dict[str, list[tuple[str, ...]]]:
    """The hosts of each finding of both checks."""
    return {name: [one.hosts for one in judged(found, name).findings] for name in ("NET014", "NET015")}


def test_healthy_hosts(lab_hosts: MakeHosts) -> None:
    with surveying(lab_hosts(3)) as survey:
        found = transfer(survey)
    assert set(map(frozenset, found.outcomes().values())) == {frozenset({"done"})}
    assert len(found.outcomes()) == 6
    assert blamed(found) == {"NET014": [], "NET015": []}
    assert judged(found, "NET014").status is Status.PASS
    samples = [sample for name in ("node0", "node1", "node2") for sample in found.samples(name)]
    assert all(sample.bandwidth > 10e6 for sample in samples)
    assert all(sample.address.startswith("10.20.0.") for sample in found.samples("node0"))
    assert found.words[0].startswith("bandwidth: 3 hosts in 3 rounds, 1 pair at once")


def test_a_host_at_10_megabits(lab_hosts: MakeHosts) -> None:
    hosts = lab_hosts(4)
    network.rate(hosts[2], "10mbit")
    with surveying(hosts) as survey:
        found = transfer(survey)
    assert blamed(found) == {"NET014": [("node2",)], "NET015": []}
    (finding,) = judged(found, "NET014").findings
    assert finding.evidence["exclude"] == ["node2"]
    assert finding.confidence > 0.9
    assert all(0.3e6 < sample.bandwidth < 1.3e6 for sample in found.samples("node2"))
    assert max(found.took) < patience(3 * ROUND_SECONDS)


def test_all_hosts_at_10_megabits(lab_hosts: MakeHosts) -> None:
    hosts = lab_hosts(3)
    for host in hosts:
        network.rate(host, "10mbit")
    # All hosts share the processors of one machine: other work on it may hold up a pair now and then, a fault always.
    blames = (blamed_once(hosts)["NET014"] for _ in range(3))
    assert any(not blame for blame in blames)


def blamed_once(hosts: tuple[LabHost, ...]) -> dict[str, list[tuple[str, ...]]]:
    with surveying(hosts) as survey:
        return blamed(transfer(survey))


def test_a_host_that_loses_packets(lab_hosts: MakeHosts) -> None:
    hosts = lab_hosts(4)
    for host in hosts:
        heed_loss(host)
    lossy(hosts[1], 5)
    with surveying(hosts) as survey:
        found = transfer(survey)
    assert blamed(found)["NET015"] == [("node1",)]
    (finding,) = judged(found, "NET015").findings
    assert finding.evidence["exclude"] == ["node1"]
    assert 0.02 < finding.evidence["segments_retransmitted"] / finding.evidence["segments_sent"] < 0.15


@pytest.fixture
def short_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds that nobody waits long for."""
    monkeypatch.setattr(transfer_plan, "ROUND_SECONDS", SHORT)


@pytest.mark.usefixtures("short_rounds")
def test_a_partner_that_never_answers(lab_hosts: MakeHosts) -> None:
    hosts = lab_hosts(3)
    with surveying(hosts) as survey:
        hosts[2].signal(signal.SIGSTOP, "agent.py")
        try:
            found = transfer(survey, without=[2], light=False)
        finally:
            hosts[2].signal(signal.SIGCONT, "agent.py")
    assert found.outcomes() == {
        ("node0", "node1"): {"done"},
        ("node0", "node2"): {"late"},
        ("node1", "node0"): {"done"},
        ("node1", "node2"): {"late"},
    }
    assert max(found.took) < 3 * SHORT + patience(1)
    result = judged(found, "NET014")
    assert (result.status, result.findings) == (Status.UNKNOWN, ())
    assert "node2" in result.reason


@pytest.mark.usefixtures("short_rounds")
def test_a_host_that_lets_nobody_in(lab_hosts: MakeHosts) -> None:
    hosts = lab_hosts(3)
    for other in hosts[:2]:
        network.drop_new_from(hosts[2], other.address)
    with surveying(hosts) as survey:
        found = transfer(survey, light=False)
    closed = {way: said for way, said in found.outcomes().items() if said != {"done"}}
    assert closed == {
        **{(f"node{one}", "node2"): {"unreached"} for one in range(2)},
        **{("node2", f"node{one}"): {"late"} for one in range(2)},
    }
    result = judged(found, "NET014")
    assert (result.status, result.findings) == (Status.UNKNOWN, ())
    assert "node2" in result.reason


def test_no_more_bytes_than_announced(lab_hosts: MakeHosts) -> None:
    hosts = lab_hosts(5)
    with surveying(hosts) as survey:
        before = sum(map(sent_bytes, hosts))
        found = transfer(survey, light=False)
        sent = sum(map(sent_bytes, hosts)) - before
    assert "5 hosts in 5 rounds, 2 pairs at once" in found.words[0]
    assert 0.3e9 < sent < 1.05 * 2 * MOST_BYTES * 2 * (5 + 2 * len(found.words[1:]))


def sent_bytes(host: LabHost) -> int:
    return int(host.sh("cat /sys/class/net/eth0/statistics/tx_bytes").stdout)
