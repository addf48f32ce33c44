"""What is tried over hosts of the lab: packets that are too large, closed and slow networks beside good ones."""

from __future__ import annotations

from collections.abc import Callable

from doctor.analysis.fabric.transfer_matrix import bandwidths
from doctor.collectors.runner import decode_outcome
from doctor.core.facts import PathFacts, Trial, TrialFacts
from doctor.core.job import Job, Member, build_job
from doctor.probes.ablation.experiments import trial_requests
from doctor.probes.ablation.stage import WhyStage
from doctor.probes.base import ProbeParticipant
from tests.faults.live.network_scenes import add_interface
from tests.lab import network
from tests.lab.hosts import LabHost
from tests.probes.survey import Survey, surveying
from tests.probes.transferring import transfer

Lab = Callable[[int], tuple[LabHost, ...]]


def carry_jumbo_frames(host: LabHost) -> None:
    """Packets of 9000 bytes at both ends of this host's link."""
    network.whole_frames(host)
    host.sh("ip link set eth0 mtu 9000")
    host.switch.run("ip", "link", "set", host.port, "mtu", "9000")


def try_all(survey: Survey, job: Job) -> list[Trial]:
    """All steps of the stage."""
    stage, trials = WhyStage(), []
    posts = [
        ProbeParticipant(str(rank.number), rank, rank.host.index, True, agent.port, agent.word)
        for rank, agent in zip(job.ranks, survey.agents, strict=True)
    ]
    while (orders := stage.plan(job, posts)) is not None:
        asked = [one for one in survey.stations if str(one.rank) in orders.by_token]
        assert asked
        for station in asked:
            station.say(order=orders.by_token[str(station.rank)].hex(), seconds=orders.seconds, stage="why")
        for station in asked:
            answer = station.heard(orders.seconds + 5)
            assert answer["took"] < orders.seconds
            sections = {key: decode_outcome(key, bytes.fromhex(one)) for key, one in answer["sections"].items()}
            trials += [trial for facts in sections.values() if isinstance(facts, TrialFacts) for trial in facts.trials]
    return trials


def transferred(survey: Survey) -> Job:
    """A job in which something looks slow: a crowded machine hides it now and then."""
    for _ in range(3):
        job = transfer(survey).job
        if trial_requests(job):
            return job
    raise AssertionError(bandwidths(job))


def test_healthy_hosts_try_nothing(lab_hosts: Lab) -> None:
    with surveying(lab_hosts(3)) as survey:
        assert try_all(survey, survey.run().job) == []


def test_the_largest_packets_that_a_path_carries(lab_hosts: Lab) -> None:
    machines = lab_hosts(3)
    for host in machines:
        carry_jumbo_frames(host)
    network.black_hole(machines[2:], passes=4106)
    with surveying(machines) as survey:
        [trial] = try_all(survey, survey.run().job)
    assert (trial.subject, trial.peer, trial.restores) == ("packet", "node0", True)
    assert (trial.before, trial.after, trial.unit) == (None, 4092.0, "bytes")
    assert trial.setting == "sudo ip link set dev eth0 mtu 4092  # on node2"


def test_a_path_that_carries_all_by_now_is_mended_by_nothing(lab_hosts: Lab) -> None:
    machines = lab_hosts(2)
    for host in machines:
        carry_jumbo_frames(host)
    with surveying(machines) as survey:
        job = survey.run().job
        members = [Member(one.rank, {**one.member.sections}) for one in survey.stations]
        samples = job.hosts[0].find(PathFacts).samples
        lost = PathFacts(samples=tuple(type(one)(one.peer, one.address, full_size_arrived=False) for one in samples))
        members[0] = members[0]._replace(sections={**members[0].sections, PathFacts.key: lost})
        [trial] = try_all(survey, build_job(members, world_size=2))
    assert (trial.knob, trial.restores, trial.after) == ("nothing changed", False, 9000.0)


def test_a_slow_host_with_one_network_has_nothing_to_try(lab_hosts: Lab) -> None:
    machines = lab_hosts(3)
    network.rate(machines[2], "10mbit")
    with surveying(machines) as survey:
        trials = try_all(survey, transferred(survey))
    assert {trial.knob for trial in trials} == {"not tried"}
    assert "none leads" in trials[0].error


def test_a_closed_network_beside_an_open_one(lab_hosts: Lab) -> None:
    machines = lab_hosts(2)
    for number, host in enumerate(machines):
        add_interface(host, "eth1", f"10.1.0.{number + 1}/24")
    machines[1].sh("ip address add 10.2.0.2/24 dev eth1")
    refused = f"ip saddr {machines[0].address} tcp flags syn / syn,ack reject with tcp reset"
    machines[1].sh(
        "nft add table inet lab; nft add chain inet lab input '{ type filter hook input priority 0; }';"
        f"nft add rule inet lab input {refused}"
    )
    with surveying(machines) as survey:
        trials = try_all(survey, survey.run().job)
    assert [(trial.knob, trial.restores) for trial in trials] == [
        ("other interface eth1 (10.1.0.1 -> 10.1.0.2)", True),
        ("other interface eth1 (to 10.2.0.2)", False),
    ]
    assert {trial.setting for trial in trials} == {"export GLOO_SOCKET_IFNAME=eth1  # on all hosts"}


def test_a_slow_network_beside_a_fast_one(lab_hosts: Lab) -> None:
    machines = lab_hosts(3)
    for number, host in enumerate(machines):
        add_interface(host, "eth1", f"10.1.0.{number + 1}/24")
    network.rate(machines[2], "10mbit")
    with surveying(machines) as survey:
        trial, *_ = try_all(survey, transferred(survey))
    assert trial.setting == "export GLOO_SOCKET_IFNAME=eth1  # on all hosts"
    assert trial.before < 3e6
    assert trial.after > 20 * trial.before
