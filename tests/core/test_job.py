import pytest

from doctor.analysis.visible_devices import gpu_of, shares
from doctor.core.capture import from_document, to_document
from doctor.core.finding import Finding, merge
from doctor.core.job import build_job
from doctor.core.text import HERE
from doctor.facts import Gpu, GpuFacts, HostFacts, LaunchFacts, NcclFacts, PeerLink, SoftwareFacts
from doctor.testing import healthy


def test_equal_sections_are_one_object():
    job = healthy(hosts=2, per_host=2).job()
    assert len({id(rank.find(SoftwareFacts)) for rank in job.ranks}) == 1


def test_host_facts_are_held_once_a_host():
    job = healthy(hosts=2, per_host=3).job()
    assert [host.name for host in job.hosts] == ["node0", "node1"]
    assert job.ranks[0].find(HostFacts) is job.ranks[2].find(HostFacts)
    assert HostFacts.key not in job.ranks[0].sections


def test_groups_come_largest_first():
    job = healthy(hosts=2, per_host=2).alter(SoftwareFacts, ranks=(0,), python="3.12.1").job()
    common, other = job.facts(SoftwareFacts).group(lambda software: software.python)
    assert (common.value, common.ranks) == ("3.11.7", (1, 2, 3))
    assert (other.value, other.ranks) == ("3.12.1", (0,))


def test_each_tells_ranks_apart_by_all_sections_asked_for():
    job = healthy(hosts=2, per_host=2).environ(ranks=(3,), NCCL_DEBUG="INFO").job()
    groups = {identical.ranks: nccl.get("NCCL_DEBUG") for nccl, host, identical in job.each(NcclFacts, HostFacts)}
    assert groups == {(0, 1): None, (2,): None, (3,): "INFO"}


def test_sections_that_may_be_missing_do_not_drop_a_rank():
    job = healthy(hosts=1, per_host=2).drop(SoftwareFacts, ranks=(1,)).job()
    found = {
        identical.ranks: identical.find(SoftwareFacts) is None
        for _, identical in job.each(NcclFacts, also=(SoftwareFacts,))
    }
    assert found == {(0,): False, (1,): True}


def test_a_lone_process_is_a_world_of_one_whatever_variables_are_left_over():
    job = healthy(1, 1).alter(LaunchFacts, rank=5, world_size=8).job()
    assert (job.world_size, job.ungathered) == (1, 0)


def test_ranks_that_nobody_asked_are_counted():
    job = healthy(hosts=2, per_host=2).only((0, 1), absent=(3,)).job()
    assert (job.world_size, job.ungathered, job.absent) == (4, 1, (3,))
    assert job.is_multi_host


def test_containers_of_one_machine_are_hosts_of_one_machine():
    sketch = healthy(hosts=2, per_host=2).alter(HostFacts, boot_id="one boot")
    (machine,) = sketch.job().by_machine()
    assert machine.name == "node0, node1"
    assert machine.ranks == (0, 1, 2, 3)
    assert not build_job(sketch.members[:2]).hosts[1:]


def test_two_processes_may_claim_one_rank():
    job = healthy(hosts=2, per_host=2).renumbered(3, 2).job()
    assert [rank.number for rank in job.ranks] == [0, 1, 2, 2]
    assert job.hosts_of((2,)) == ("node1",)


@pytest.mark.parametrize(
    ("ranks", "place"), [((3,), "node1"), ((0, 2), "node0 and node1"), (range(6), "node0 and 2 more hosts"), ((), "")]
)
def test_the_hosts_of_ranks_in_words(ranks, place):
    assert healthy(hosts=3, per_host=2).job().place_of(ranks) == place


def test_a_fault_of_many_hosts_is_one_finding_with_their_names():
    job = healthy(hosts=3, per_host=1).job()
    drafts = [Finding(f"eth1 on {HERE} is down", ranks=(number,)) for number in (0, 2)]
    assert [one.summary for one in merge(drafts, job.place_of)] == ["eth1 on node0 and node2 is down"]


def shown(*numbers: int) -> GpuFacts:
    """What the driver shows a process behind a device cgroup: some of the host's GPUs, counted from 0."""
    gpus = tuple(Gpu(place, f"GPU-{number}", bus_id=f"0000:0{number}:00.0") for place, number in enumerate(numbers))
    links = tuple(PeerLink(place - 1, place, "nvlink") for place in range(1, len(gpus)))
    return GpuFacts(gpus=gpus, links=links)


def behind_cgroups(*parts: GpuFacts):
    """Ranks of one host, each shown these GPUs."""
    sketch = healthy(hosts=1, per_host=len(parts)).environ(CUDA_VISIBLE_DEVICES="0")
    return [
        member._replace(sections={**member.sections, GpuFacts.key: part})
        for member, part in zip(sketch.members, parts, strict=True)
    ]


def test_ranks_that_are_shown_different_gpus_keep_their_own():
    job = build_job(behind_cgroups(shown(2), shown(0), shown(1)))
    assert [gpu_of(rank).uuid for rank in job.ranks] == ["GPU-2", "GPU-0", "GPU-1"]
    everything = job.hosts[0].find(GpuFacts)
    assert [(gpu.index, gpu.uuid) for gpu in everything.gpus] == [(0, "GPU-0"), (1, "GPU-1"), (2, "GPU-2")]
    assert {share.gpu.uuid: share.ranks for share in shares(job.by_host()[0])} == {
        "GPU-0": (1,),
        "GPU-1": (2,),
        "GPU-2": (0,),
    }


def test_links_between_gpus_of_parts_are_numbered_anew():
    job = build_job(behind_cgroups(shown(2, 3), shown(0, 1)))
    assert {(link.first, link.second) for link in job.hosts[0].find(GpuFacts).links} == {(2, 3), (0, 1)}


def test_ranks_that_are_shown_the_same_gpus_share_one_section():
    job = build_job(behind_cgroups(shown(0, 1), shown(0, 1)))
    assert GpuFacts.key not in {key for rank in job.ranks for key in rank.sections}


def test_parts_of_a_host_outlive_a_capture():
    job = build_job(behind_cgroups(shown(1), shown(0)))
    again = from_document(to_document(job))
    assert [gpu_of(rank).uuid for rank in again.ranks] == ["GPU-1", "GPU-0"]
    assert again.hosts[0].find(GpuFacts) == job.hosts[0].find(GpuFacts)
