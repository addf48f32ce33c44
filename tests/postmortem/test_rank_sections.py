"""What logs tell of single ranks: failures, and the collectives of their watchdogs."""
# ruff: noqa: E501

import pytest

from doctor.analysis.logs import root_event
from doctor.analysis.logs.root_event import earlier, first_trouble
from doctor.core.facts import ProgressFacts, RecorderFacts
from doctor.core.logs.event_groups import line_of
from doctor.knowledge.log_patterns import known_patterns
from doctor.knowledge.software_messages import CAUSE, CONSEQUENCE, HARMLESS
from doctor.postmortem.job_assembly import weigh
from doctor.postmortem.logs import rank_sections, software_messages
from doctor.postmortem.logs.rank_sections import sections_of, world_size_of
from doctor.postmortem.logs.scanner import read_lines

WORK = "WorkNCCL(SeqNum={seq}, OpType={op}, NumelIn=98, NumelOut=98, Timeout(ms)=600000) ran for 600020 milliseconds"
CAUGHT = "Watchdog caught collective operation timeout: " + WORK + " before timing out."


def evidence_of(*lines):
    events, file = read_lines(lines, "job.log")
    return weigh(events, (file,))


def failure(evidence, rank):
    return sections_of(evidence)[rank]["progress"].failure


def recorder(evidence, rank):
    return sections_of(evidence)[rank]["flight-recorder"]


STATUS = {
    "torch 2.3": "[rank1]:[E ProcessGroupNCCL.cpp:1537] [PG 0 Rank 1] Timeout at NCCL work: 4, last enqueued NCCL work: 7, "
    "last completed NCCL work: 3.",
    "torch 2.5": "[rank1]:[E626 06:24:44.9 ProcessGroupNCCL.cpp:1785] [PG ID 0 PG GUID 0(default_pg) Rank 1] Exception "
    "(either an error or timeout) detected by watchdog at work: 4, last enqueued NCCL work: 7, last completed NCCL work: 3.",
    "torch 2.7": "[rank1]:[E626 06:24:44.9 ProcessGroupNCCL.cpp:2168] [PG ID 0 PG GUID 0(default_pg) Rank 1]  failure "
    "detected by watchdog at work sequence id: 4 PG status: last enqueued work: 7, last completed work: 3",
    "a dump": "[rank1]:[E626 06:24:44.9 ProcessGroupNCCL.cpp:1400] [PG ID 0 PG GUID 0(default_pg) Rank 1] Received a dump "
    "signal due to a collective timeout from rank 3 and we will try our best to dump the debug info. Last enqueued NCCL "
    "work: 7, last completed NCCL work: 3.This is most likely caused by incorrect usages of collectives",
}


@pytest.mark.parametrize("wording", STATUS)
def test_counters_of_a_group_in_each_wording(wording):
    found = recorder(evidence_of(STATUS[wording]), 1)
    (group,) = found.groups
    assert (group.name, group.enqueued, group.completed) == ("0", 7, 3)


def test_the_collective_that_a_watchdog_gave_up():
    evidence = evidence_of(
        f"[rank6]:[E626 06:24:44.9 ProcessGroupNCCL.cpp:616] [Rank 6] {CAUGHT.format(seq=42, op='_ALLGATHER_BASE')}"
    )
    (entry,) = recorder(evidence, 6).collectives
    assert (entry.sequence, entry.operation, entry.group, entry.backend) == (42, "all_gather_into_tensor", "0", "nccl")
    assert (entry.input_sizes, entry.timeout, entry.state) == (((98,),), 600.0, "scheduled")
    assert "Watchdog caught" in failure(evidence, 6).message


def test_a_watchdog_without_a_group_is_of_the_group_that_its_status_names():
    evidence = evidence_of(
        f"[rank1]:[E626 06:24:44.9 ProcessGroupNCCL.cpp:616] [Rank 1] {CAUGHT.format(seq=4, op='ALLREDUCE')}",
        "[rank1]:[E626 06:24:44.9 ProcessGroupNCCL.cpp:1785] [PG ID 5 PG GUID 17(TP) Rank 0] Exception (either an error or "
        "timeout) detected by watchdog at work: 4, last enqueued NCCL work: 7, last completed NCCL work: 3.",
    )
    found = recorder(evidence, 1)
    assert found.collectives[0].group == "17"
    assert found.group("17").description == "TP"


def test_groups_that_have_only_a_number_are_kept_apart():
    """A number of before torch 2.4 stands for another group on each rank, unless members are counted like ranks."""
    line = "[rank{0}]:[E ProcessGroupNCCL.cpp:1537] [PG {1} Rank {2}] Timeout at NCCL work: 4, last enqueued NCCL work: 7, last completed NCCL work: 3."
    apart = evidence_of(line.format(2, 3, 0), line.format(5, 3, 1))
    names = {recorder(apart, rank).groups[0].name for rank in (2, 5)}
    assert len(names) == 2
    shared = evidence_of(line.format(2, 3, 2), line.format(5, 3, 5))
    assert {recorder(shared, rank).groups[0].name for rank in (2, 5)} == {"3"}


def test_an_exception_goes_before_the_time_out_that_follows():
    evidence = evidence_of(
        "[rank1]: ValueError: no",
        f"[rank1]:[E ProcessGroupNCCL.cpp:616] [Rank 1] {CAUGHT.format(seq=4, op='ALLREDUCE')}",
    )
    assert failure(evidence, 1).kind == "ValueError"


def test_a_time_out_goes_before_what_its_end_brings():
    evidence = evidence_of(
        f"[rank1]:[E ProcessGroupNCCL.cpp:616] [Rank 1] {CAUGHT.format(seq=4, op='ALLREDUCE')}",
        "[rank1]: torch.distributed.DistBackendError: NCCL communicator was aborted on rank 1.",
    )
    assert "Watchdog caught" in failure(evidence, 1).message


TABLE = """
============================================================
train.py FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-01-02_03:04:09
  host      : node01
  rank      : 0 (local_rank: 0)
  exitcode  : {other} (pid: 4320)
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-01-02_03:04:05
  host      : node01
  rank      : 3 (local_rank: 3)
  exitcode  : {code} (pid: 4323)
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
============================================================
"""


def table(code, other=-15):
    return TABLE.format(code=code, other=other).splitlines()


@pytest.mark.parametrize(
    ("code", "kind"), [(-9, "SIGKILL"), (-11, "SIGSEGV"), (-7, "SIGBUS"), (-24, "SIGXCPU"), (1, "exit code")]
)
def test_exit_codes_of_the_table(code, kind):
    evidence = evidence_of(*table(code))
    assert failure(evidence, 3).kind == kind
    assert failure(evidence, 0).kind == "SIGTERMException"
    assert failure(evidence, 3).at < failure(evidence, 0).at


def test_an_entry_is_quoted_without_what_it_has_in_place_of_a_traceback():
    entry, _ = sorted(evidence_of(*table(1)).of("elastic.entry"), key=lambda one: -(one.rank or 0))
    assert line_of(entry).endswith("rank 3: exitcode 1, pid 4323, host node01")


def test_a_rank_that_was_aborted_is_gone_without_an_error():
    assert sections_of(evidence_of(*table(-6)))[3]["progress"].state == "gone"


def test_an_exception_without_a_label_is_of_the_rank_that_failed_by_itself():
    evidence = evidence_of(
        "Traceback (most recent call last):", '  File "/home/me/train.py", line 3, in step', "KeyError: 'x'", *table(1)
    )
    assert failure(evidence, 3).kind == "KeyError"
    assert failure(evidence, 0).kind == "SIGTERMException"


def test_tasks_of_srun():
    evidence = evidence_of(
        "srun: error: node1: task 3: Killed", "srun: error: node1: tasks 0-2: Exited with exit code 1"
    )
    assert failure(evidence, 3).kind == "SIGKILL"
    assert {failure(evidence, rank).kind for rank in range(3)} == {"exit code"}
    assert failure(evidence_of("srun: error: node3: task 5: Out Of Memory"), 5).kind == "SIGKILL"
    assert failure(evidence_of("srun: error: node3: task 5: Floating point exception"), 5).kind == "SIGFPE"


def test_world_size():
    assert world_size_of(evidence_of("step 1")) is None
    assert world_size_of(evidence_of("Initializing distributed: GLOBAL_RANK: 0, MEMBER: 1/8")) == 8
    assert world_size_of(evidence_of("[rank5]: KeyError: 'x'")) == 6
    assert world_size_of(evidence_of("distributed init (rank 0): env://, world_size: 16")) == 16


def test_a_rank_that_alone_says_nothing_is_a_suspect():
    lines = [
        f"[rank{r}]:[E ProcessGroupNCCL.cpp:616] [Rank {r}] {CAUGHT.format(seq=4, op='ALLREDUCE')}" for r in (0, 1, 3)
    ]
    found = sections_of(evidence_of("Initializing distributed: GLOBAL_RANK: 0, MEMBER: 1/4", *lines))
    assert found[2] == {}
    assert 2 not in sections_of(evidence_of("Initializing distributed: GLOBAL_RANK: 0, MEMBER: 1/64", *lines))


def test_healthy_lines_make_no_witness():
    assert sections_of(evidence_of("[rank0]: step 1", "Epoch 0:  50%|#####     | 50/100 [00:01<00:01]")) == {}


def test_order_of_events():
    from doctor.core.job import build_job

    evidence = evidence_of("[rank1]: ValueError: no", "[rank0]: RuntimeError: Connection closed by peer")
    job = build_job((), evidence=evidence)
    one, other = evidence.events[:2]
    assert earlier(job, one, other) is True
    assert earlier(job, other, one) is False
    assert first_trouble(job) is one
    assert first_trouble(build_job((), evidence=evidence_of("all is well"))) is None


def test_kinds_that_order_is_told_by_are_known():
    classes = (CAUSE, CONSEQUENCE, HARMLESS, software_messages.OF_A_CHECK)
    known = {message.kind for message in known_patterns()} | {"python.exception", "python.fatal", "elastic.entry"}
    known |= {f"{software_messages.KIND}{name}" for name in classes}
    named = {
        *root_event.LOST_PEERS,
        *root_event.TIMED_OUT,
        *root_event.ENDS,
        *root_event.ROOTS,
        *rank_sections._WATCHDOG_KINDS,
        *rank_sections._WORLD,
    }
    assert {kind for kind in named if not kind.endswith(".")} <= known


def test_sections_are_of_their_types():
    evidence = evidence_of(f"[rank6]:[E ProcessGroupNCCL.cpp:616] [Rank 6] {CAUGHT.format(seq=42, op='ALLREDUCE')}")
    sections = sections_of(evidence)[6]
    assert isinstance(sections["progress"], ProgressFacts)
    assert isinstance(sections["flight-recorder"], RecorderFacts)
    assert (sections["progress"].stage, sections["progress"].point) == ("", "")
