"""What came before a message of a log and after it, and on how many hosts."""

import pytest

from doctor.analysis.interface_choice import leads_nowhere, names_unknown
from doctor.analysis.logs.event_timeline import (
    MOST_COUNTED,
    events_of_kinds,
    failed_before,
    has_worked,
    launch_setting,
    names_itself,
    parse_count,
    set_up_after,
    set_up_before,
    spans_hosts,
)
from doctor.testing import healthy, logged
from tests.lab.cases import each_case

COMPLETE = "node1:41:77 [0] NCCL INFO comm 0x55aa rank 0 nranks 2 cudaDev 0 busId 7000 - Init COMPLETE"
START = "node1:41:77 [0] NCCL INFO comm 0x55aa rank 0 nranks 2 cudaDev 0 busId 7000 commId 0x9f3c - Init START"
TIMEOUT = (
    "torch.distributed.DistNetworkError: The client socket has timed out after 300000ms while trying to connect to "
    "(10.0.0.1, 29500)."
)


def _job(*lines):
    return logged(*lines).job()


def _timeout(job):
    return job.evidence.of("torch.store.connect_timeout")[0]


def test_a_communicator_that_began_is_not_one_that_is_complete():
    for lines, before, after in (
        ((COMPLETE, TIMEOUT), True, False),
        ((TIMEOUT, COMPLETE), False, True),
        ((START, TIMEOUT, START), False, False),
    ):
        job = _job(*lines)
        assert (set_up_before(job, _timeout(job)), set_up_after(job, _timeout(job))) == (before, after)


@pytest.mark.parametrize(
    ("line", "is_failure"),
    [
        ("ModuleNotFoundError: No module named 'einops'", True),
        ("[rank3]: ValueError: bad sample", True),
        ("srun: error: node3: task 3: Exited with exit code 1", True),
        ("torch.distributed.DistNetworkError: Connection reset by peer", False),
        ("RuntimeError: NCCL error in: x.cpp:1, unhandled system error, NCCL version 2.7.8", False),
        ("RuntimeError: Connection refused", False),
        ("node1:41:77 [0] NCCL INFO Using network Socket", False),
    ],
)
def test_a_failure_is_not_a_word_of_lost_connections(line, is_failure):
    job = _job(line, TIMEOUT)
    assert (failed_before(job, _timeout(job)) is not None) is is_failure


def test_what_came_later_is_no_failure_before():
    job = _job(TIMEOUT, "ValueError: bad sample")
    assert failed_before(job, _timeout(job)) is None


def test_work_that_a_watchdog_counts_has_been_done():
    status = (
        "[rank0]:[E ProcessGroupNCCL.cpp:1] failure detected by watchdog at work sequence id: 9 PG status: last "
        "enqueued work: 9, last completed work: {}"
    )
    for done, worked in (("8", True), ("-1", False)):
        job = _job(TIMEOUT, status.format(done))
        assert has_worked(job, _timeout(job)) is worked


@pytest.mark.parametrize(
    ("lines", "several"),
    [
        (("  max_nodes        : 2",), True),
        (("  max_nodes        : 1",), False),
        (("torchrun --nnodes=2 train.py",), True),
        (("torchrun --nnodes 1 --node-rank 0 train.py",), False),
        (("torchrun --node-rank 1 train.py",), True),
        (("node1:1:1 [0] NCCL INFO Using network IB", "node2:1:1 [0] NCCL INFO Using network IB"), True),
        (("node1:1:1 [0] NCCL INFO Using network IB", "node1.cluster:2:2 [1] NCCL INFO Using network IB"), False),
        (("nothing",), False),
    ],
)
def test_hosts_of_a_job(lines, several):
    assert spans_hosts(_job(*lines)) is several


def test_hosts_of_captures():
    assert spans_hosts(healthy(2, 1).job())
    assert not spans_hosts(healthy(1, 2).job())


def test_a_line_that_is_known_by_two_names_is_heard_once():
    job = _job("epoch 1", "RuntimeError: Address already in use")
    kinds = ("torch.store.port_busy.old", "host.address_in_use")
    assert len(job.evidence.of(*kinds)) == 2
    assert [event.line for event in events_of_kinds(job, *kinds)] == [2]


def test_settings_of_torchrun():
    job = _job("  rdzv_endpoint    : 10.0.0.5:29400")
    assert launch_setting(job, "rdzv_endpoint") == "10.0.0.5:29400"
    assert launch_setting(job, "max_nodes") is None


def test_a_host_that_names_itself():
    (event,) = _job("node1.cluster:41:77 [0] NCCL INFO Using network IB").evidence.of("nccl.net.using")
    assert names_itself(event, "NODE1")
    assert not names_itself(event, "node2")
    assert not names_itself(event, None)


@each_case(
    ("interface", "address", "nowhere"),
    [
        ("lo", "127.0.0.1", True),
        ("docker0", "172.17.0.1", True),
        ("br-0123456789ab", "172.18.0.1", True),
        ("virbr0", "192.168.122.1", True),
        ("eth0", "172.17.0.4", False),
        ("loopy0", "10.0.0.1", False),
        ("eth0", "10.0.0.1", False),
        (None, "172.17.0.3", True),
        (None, "127.0.0.1", True),
        (None, "172.18.0.3", False),
        (None, "10.0.0.1", False),
        (None, "node1", False),
        (None, None, False),
    ],
)
def test_addresses_that_lead_nowhere(interface, address, nowhere):
    assert (leads_nowhere(interface, address) is not None) is nowhere


@pytest.mark.parametrize(
    ("line", "name", "own"),
    [
        ("ssh: Could not resolve hostname worker-1: Name or service not known", "worker-1", False),
        ("sudo: unable to resolve host node7: Name or service not known", "node7", True),
        ("hostname: Temporary failure in name resolution", None, True),
        ('pdsh@head: gethostbyname("worker-3") failed', "worker-3", False),
    ],
)
def test_names_that_do_not_resolve(line, name, own):
    (found,) = names_unknown(_job(line))
    assert (found.name, found.own) == (name, own)


@pytest.mark.parametrize(
    "line",
    [
        "curl: (6) Could not resolve host: example.com",
        "fatal: unable to access 'https://github.com/x/y.git/': Could not resolve host: github.com",
        "OSError: We couldn't connect to 'https://huggingface.co' (Name or service not known)",
    ],
)
def test_names_of_web_sites_are_no_matter_of_ranks(line):
    assert names_unknown(_job(line)) == ()


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0", 0),
        ("16", 16),
        (str(MOST_COUNTED), MOST_COUNTED),
        (str(MOST_COUNTED + 1), None),
        ("9" * 5000, None),
        ("-1", None),
        ("", None),
        (None, None),
        ("٣", 3),
        ("²", None),
    ],
)
def test_counts_in_logs(text, count):
    assert parse_count(text) == count
