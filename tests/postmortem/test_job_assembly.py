"""What was read, as one job: ranks, hosts, records, secrets."""

import msgspec

from doctor.core.facts import Event
from doctor.core.job import UNKNOWN_HOST
from doctor.facts import Failure, Frame, HostFacts, ProgressFacts, RecorderFacts
from doctor.postmortem.job_assembly import ParsedInputs, members_of, weigh, with_evidence
from doctor.testing import logged, running

SECRETS = (
    "[rank1]: RuntimeError: 401 for https://alice:hunter22@hub.example.com/x?token=abcd1234 with "
    "WANDB_API_KEY=0123456789abcdef0123456789abcdef01234567"
)


def test_no_secret_is_kept():
    kept = msgspec.json.encode(logged(SECRETS).job().evidence).decode()
    assert "RuntimeError" in kept
    assert not [word for word in ("hunter22", "abcd1234", "0123456789abcdef") if word in kept]


def test_what_only_looks_like_one_is_kept():
    line = "torch.distributed.DistStoreError: wait timeout after 300000ms, keys: /default_pg/0//cuda//0"
    assert "/default_pg/0//cuda//0" in logged(line).job().evidence.events[0].text


def test_ranks_and_hosts_are_those_that_lines_tell():
    job = logged(
        "[rank3]: node7:41:77 [1] NCCL INFO Bootstrap : Using eth0:10.0.0.1<0>",
        "[rank3]: ValueError: x",
        "[rank0]: ValueError: y",
    ).job()
    assert {rank.number: rank.host.name for rank in job.ranks} == {0: UNKNOWN_HOST, 3: "node7"}


def test_srun_names_the_hosts_of_its_tasks():
    lines = ("srun: error: node1: tasks 2-3: Exited with exit code 1", "[rank0]: ValueError: x")
    assert {rank.number: rank.host.name for rank in logged(*lines).job().ranks} == {
        0: UNKNOWN_HOST,
        2: "node1",
        3: "node1",
    }
    agent = "E0102 03:04:05.678000 7 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1) "
    agents = logged(*lines, f"{agent}local_rank: 0 (pid: 12) of binary: /usr/bin/python").job()
    assert "node1" not in {rank.host.name for rank in agents.ranks}


def progress_of(*members):
    captured = running(1, 2).job()
    return {rank.number: rank.find(ProgressFacts) for rank in with_evidence(captured, members, None, None).ranks}


def test_a_failure_of_the_log_ends_what_the_record_tells():
    log = weigh(
        [
            Event("python.exception", "ValueError: x", "job.log", 1, rank=1, values=(("type", "ValueError"),)),
            Event("python.exception", "ValueError: x", "job.log", 2, rank=0, values=(("type", "SIGTERMException"),)),
        ],
        (),
    )
    found = progress_of(*members_of(log))
    assert found[1].state == "failed"
    assert found[1].batch is not None
    assert found[1].failure.kind == "ValueError"


def test_that_others_ended_a_rank_is_no_news_of_where_it_was():
    ended = ProgressFacts(
        state="failed", failure=Failure("SIGTERMException", "ended by signal 15", frames=(Frame("a", 1),))
    )
    (member,) = members_of(weigh([], ()), ParsedInputs({1: {ProgressFacts.key: ended}}, {}, []))
    assert progress_of(member)[1].state == "running"


def test_tables_of_a_host_go_to_its_ranks():
    told = HostFacts(hostname="node1")
    remains = ParsedInputs({0: {}, 1: {RecorderFacts.key: RecorderFacts()}}, {0: "node0", 1: "node1"}, [])
    remains.hosts.append(("logs/nvidia-smi-node1.txt", (told,)))
    sections = {member.rank: member.sections[HostFacts.key] for member in members_of(weigh([], ()), remains)}
    assert sections[1] is told
    assert sections[0] is not told
