"""The job of training ranks, from processes that were read from outside: each kind of hang, and what is none."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from doctor.analysis.attach_outcome import outcome_of_attach, rank_stacks
from doctor.analysis.attached_job import StandingTimes, attached_job
from doctor.analysis.process_movement import blocked_call, driver_call, movement_of
from doctor.core.capture import from_document, to_document
from doctor.core.facts import AttachedProcess, Frame, LocalVariable, LogEvidence, ProgressFacts, StackThread
from doctor.core.finding import Severity
from doctor.core.job import Job, build_job
from doctor.core.redact.placeholders import redact
from doctor.core.report_document import Report
from doctor.core.settings import Settings
from doctor.core.stack_dumps.native_calls import DEVICE_WAIT
from doctor.session import judge, load_checks
from doctor.testing import package_frame
from tests.attach.attached import (
    BACKWARD,
    IDLE_WORKER,
    LOADER,
    MAIN,
    SAVING,
    WORKER,
    at,
    attached_to,
    inside,
    members,
    of_hosts,
    process,
    with_threads,
    worker,
)

ALL_REDUCE = inside("all_reduce")
UPLOADS = (Frame("/usr/lib/python3.11/ssl.py", 1100, "write"), at(61, "upload"), MAIN)
JOINS = (Frame("/usr/lib/python3.11/threading.py", 327, "wait"), at(63, "join"), MAIN)
CHILD = (Frame("/usr/lib/python3.11/subprocess.py", 1209, "wait"), at(62, "pack"), MAIN)
SLEEP = (at(58, "step"), MAIN)


def others(*but: int, stack: tuple[Frame, ...] = ALL_REDUCE, world: int = 4, **options: Any) -> list[AttachedProcess]:
    """All ranks but these, waiting."""
    return [process(rank, stack, world=world, **options) for rank in range(world) if rank not in but]


def judged(found: Job) -> Report:
    settings = Settings()
    return judge(attached_job(found), load_checks(settings), settings, outcome_of=outcome_of_attach(found))


def findings(found: Job) -> list[tuple[str, tuple[int, ...], Severity]]:
    return [(result.id, one.ranks, one.severity) for result in judged(found).results for one in result.findings]


@pytest.mark.parametrize(
    ("kind", "culprit", "check"),
    [
        ("asleep", process(3, SLEEP), "RUN001"),
        ("stopped", process(3, ALL_REDUCE, state="T"), "RUN001"),
        ("in a debugger of another process", process(3, SLEEP, state="t"), "RUN001"),
        ("at a breakpoint", process(3, (Frame("/usr/lib/python3.11/pdb.py", 300, "interaction"), *SLEEP)), "RUN010"),
        ("lock held in native code", process(3, SLEEP, gil=True), "RUN016"),
        (
            "in a lock file",
            process(3, (Frame("/env/site-packages/filelock/_api.py", 300, "acquire"), *SLEEP)),
            "RUN010",
        ),
        ("left its loop", process(3, (Frame("/usr/lib/python3.11/threading.py", 1590, "_shutdown"),)), "RUN001"),
        ("sends what nobody receives", process(3, inside("send", at(70))), "RUN015"),
        ("in another collective", process(3, inside("all_gather", at(70))), "RUN002"),
        (
            "in a collective of its own",
            process(3, inside("all_gather", at(70, condition="if rank == 3, line 69"))),
            "RUN006",
        ),
        ("a zombie", process(3, ended="zombie"), "RUN004"),
        ("a zombie that a signal ended", process(3, ended="zombie", exit_code=-9), "RUN004"),
        ("a zombie that was asked to end", process(3, ended="zombie", exit_code=-15), "RUN004"),
        ("a zombie that failed", process(3, ended="zombie", exit_code=1), "RUN004"),
        ("a zombie that ended its program", process(3, ended="zombie", exit_code=0), "RUN001"),
        (
            "waits for a server that is silent",
            process(3, (Frame("/usr/lib/python3.11/socket.py", 720, "readinto"), *SLEEP)),
            "RUN001",
        ),
        (
            "waits for a child that is silent",
            process(3, (Frame("/usr/lib/python3.11/subprocess.py", 1209, "wait"), *SLEEP)),
            "RUN010",
        ),
        ("waits for threads that do nothing", process(3, JOINS, threads_cpu=0.02), "RUN001"),
        (
            "waits for a thread that sleeps",
            with_threads(process(3, JOINS), StackThread("pool", 101, active=False, frames=SLEEP)),
            "RUN001",
        ),
        ("asleep in its data", process(3, (at(12, "__getitem__"), *WORKER[1:2], MAIN)), "RUN010"),
    ],
)
def test_the_rank_that_the_others_wait_for_is_found(kind: str, culprit: AttachedProcess, check: str) -> None:
    found = findings(members(*others(3), culprit))
    assert found == [(check, (3,), Severity.ERROR)], kind
    assert judged(members(*others(3), culprit)).exit_code == 1


@pytest.mark.parametrize(
    ("kind", "processes"),
    [
        ("all move", [process(rank, (at(40),), (at(41),), cpu=0.9) for rank in range(4)]),
        ("all in a slow step", [process(rank, (at(40),), cpu=0.9) for rank in range(4)]),
        ("one in a slow step", [*others(3), process(3, (at(40),), cpu=0.9)]),
        ("all call again on one line", others(switches=900)),
        ("a large transfer", others(transferred=500 << 20)),
        ("rank 0 saves", [*others(0, stack=inside("barrier")), process(0, SAVING, transferred=90 << 20)]),
        ("rank 0 syncs its file", [*others(0, stack=inside("barrier")), process(0, SAVING, state="D")]),
        ("rank 0 validates", [*others(0), process(0, (at(80, "validate"),), (at(82, "validate"),), cpu=0.5)]),
        ("threads compute for it", [*others(3), process(3, (at(40),), threads_cpu=3.0)]),
        ("its threads get a part of a CPU", [*others(3), process(3, JOINS, threads_cpu=0.3)]),
        (
            "its threads are runnable and get hardly any CPU time",
            [*others(3), with_threads(process(3, JOINS), StackThread("pool", 101, active=True, frames=SLEEP))],
        ),
        ("its worker reads", [*others(3), process(3, LOADER), worker(3, WORKER, transferred=20 << 20)]),
        ("its worker computes", [*others(3), process(3, LOADER), worker(3, WORKER, cpu=0.8)]),
        ("its worker moves", [*others(3), process(3, LOADER), worker(3, WORKER, IDLE_WORKER)]),
        ("rank 0 uploads", [*others(0), process(0, UPLOADS, switches=60)]),
        ("a child of rank 0 works", [*others(0), process(0, CHILD), worker(0, cpu=0.5, role="other", program="tar")]),
        ("rank 0 waits for a file server", [*others(0), process(0, (at(70, "load"),), wchan="rpc_wait_bit_killable")]),
        ("all in backward", [process(rank, BACKWARD, cpu=0.9) for rank in range(4)]),
    ],
)
def test_a_job_that_moves_is_no_alarm(kind: str, processes: list[AttachedProcess]) -> None:
    report = judged(members(*processes))
    assert report.exit_code == 0, kind
    assert {severity for _, _, severity in findings(members(*processes))} <= {Severity.INFO}


def test_of_two_late_ranks_the_one_without_progress_is_the_cause() -> None:
    busy = process(2, (at(40),), (at(43),), cpu=0.9)
    assert findings(members(*others(2, 3), busy, process(3, SLEEP))) == [("RUN001", (3,), Severity.ERROR)]


def test_ranks_that_wait_in_backward_wait_for_the_rank_that_is_asleep() -> None:
    report = judged(members(*others(3, stack=BACKWARD), process(3, SLEEP)))
    (finding,) = report.result("RUN001").findings  # type: ignore[union-attr]
    assert finding.ranks == (3,)
    assert finding.summary == (
        "Rank 3 is stuck at train.py:58 (step); ranks 0-2 have waited at least 3 s in all_reduce"
    )


def test_a_worker_without_progress_is_what_its_rank_stands_in() -> None:
    found = members(*others(3), process(3, LOADER), worker(3, WORKER), worker(3, IDLE_WORKER, pid=2103))
    (finding,) = judged(found).result("RUN010").findings  # type: ignore[union-attr]
    assert finding.ranks == (3,)
    assert "Rank 3 is loading data at data.py:12" in finding.summary
    assert finding.evidence["children"] == ["2003 data worker at data.py:12 S", "2103 data worker S"]


def test_a_stopped_worker_holds_its_rank_up() -> None:
    found = members(*others(3), process(3, LOADER), worker(3, WORKER, state="T"))
    assert findings(found) == [("RUN010", (3,), Severity.ERROR)]


def test_work_on_rank_0_while_others_wait_is_a_remark_until_the_timeout() -> None:
    tokenises = (Frame("/env/site-packages/tokenizers/implementations/base.py", 40, "encode_batch"), at(12, "prepare"))
    processes = [*others(0, stack=inside("barrier")), process(0, tokenises, cpu=0.9)]
    assert findings(members(*processes)) == [("RUN010", (0,), Severity.INFO)]

    times = StandingTimes()
    attached_job(members(*processes), times)
    later = [_later(one, 1900.0) for one in processes]
    job = attached_job(members(*later), times)
    progress = [rank.find(ProgressFacts) for rank in job.ranks]
    assert [one.idle for one in progress if one] == [1903.0] * 4
    assert [one.state for one in progress if one] == ["stalled"] * 4


def _later(one: AttachedProcess, seconds: float) -> AttachedProcess:
    samples = tuple(msgspec.structs.replace(sample, at=sample.at + seconds) for sample in one.samples)
    return msgspec.structs.replace(one, samples=samples)


def test_standing_times_forget_what_went_on() -> None:
    times = StandingTimes()
    attached_job(members(process(0, SLEEP, world=1)), times)
    attached_job(members(_later(process(0, (at(59, "step"),), world=1), 60)), times)
    job = attached_job(members(_later(process(0, SLEEP, world=1), 120)), times)
    assert job.ranks[0].find(ProgressFacts).idle == 3.0  # type: ignore[union-attr]


def test_a_thread_that_holds_the_lock_is_named_by_its_line() -> None:
    holder = StackThread("writer", 7, holds_gil=True, frames=(at(7, "compress", "/home/me/native.py"),))
    report = judged(members(*others(3), with_threads(process(3, SLEEP), holder)))
    (finding,) = report.result("RUN016").findings  # type: ignore[union-attr]
    assert finding.ranks == (3,)
    assert finding.summary.startswith(
        "Native code holds the interpreter lock (GIL) of rank 3 at native.py:7 (compress)"
    )
    assert report.result("RUN001").findings == ()  # type: ignore[union-attr]


def test_a_rank_that_is_blocked_in_the_driver_is_an_error_once_the_heartbeat_would_end_it() -> None:
    blocked = process(3, (at(40),), state="D", wchan="uvm_va_block_lock")
    report = judged(members(*others(3), blocked))
    (finding,) = report.result("RUN016").findings  # type: ignore[union-attr]
    assert finding.summary.startswith("Rank 3 is blocked in the GPU driver (uvm_va_block_lock) at train.py:40 (train)")
    assert findings(members(*others(3), blocked)) == [("RUN016", (3,), Severity.INFO)]
    times = StandingTimes()
    processes = [*others(3), blocked]
    attached_job(members(*processes), times)
    later = attached_job(members(*(_later(one, 500.0) for one in processes)), times)
    results = judge(later, load_checks(Settings()), Settings()).results
    found = [(result.id, one.severity) for result in results for one in result.findings]
    assert found == [("RUN016", Severity.ERROR)]
    assert driver_call(process(3, (at(40),), wchan="nfs_wait_bit_killable")) == ""
    assert driver_call(process(3, (at(40),), wchan="dma_fence_wait", cpu=0.5)) == ""


def test_rank_that_waits_for_a_file_server_names_what_blocks_it() -> None:
    blocked = process(3, (at(40),), wchan="nfs_wait_bit_killable")
    assert blocked_call(blocked) == "nfs_wait_bit_killable"
    [result] = [
        one
        for one in judge(attached_job(members(*others(3), blocked)), load_checks(Settings()), Settings()).results
        if one.findings
    ]
    assert "blocked in the kernel: nfs_wait_bit_killable" in result.findings[0].evidence["where"]["3"]
    assert blocked_call(process(3, (at(40),), wchan="futex_wait_queue")) == ""


def test_all_ranks_in_one_call_may_still_be_in_a_first_call() -> None:
    report = judged(members(*others()))
    assert [(one.severity, one.ranks) for one in report.result("RUN001").findings] == [  # type: ignore[union-attr]
        (Severity.INFO, (0, 1, 2, 3))
    ]
    assert (report.exit_code, report.verdict) == (3, "inconclusive")


def test_ranks_of_other_hosts_are_named_and_never_the_cause() -> None:
    here = [process(rank, ALL_REDUCE, world=8, local_rank=rank, local_world_size=4, node=0) for rank in range(4)]
    found = members(*here)
    assert findings(found) == []
    job = attached_job(found)
    assert (job.world_size, job.ungathered, job.absent) == (8, 4, ())
    assert rank_stacks(found, job).notes == ("not attached: ranks 4-7 (1 host)",)
    assert judged(found).exit_code == 3


def test_a_rank_that_is_missing_on_its_host_has_ended() -> None:
    here = [process(rank, ALL_REDUCE, local_rank=rank, local_world_size=4) for rank in range(3)]
    assert findings(members(*here)) == [("RUN004", (3,), Severity.ERROR)]
    assert findings(members(*here, unreadable=1)) == []
    assert findings(members(*here, chosen=True)) == []
    moving = [msgspec.structs.replace(one, samples=process(0, (at(1),), (at(2),)).samples) for one in here]
    assert judged(members(*moving)).exit_code == 0


def test_a_rank_that_refused_is_not_the_cause() -> None:
    refused = process(3, stack_source="", refused="ptrace is not permitted", remedy="Run it as root")
    report = judged(members(*others(3), refused))
    assert report.exit_code == 3
    assert not [one for result in report.results for one in result.findings]
    assert report.outcome is not None
    assert report.outcome.reason == "the stack of rank 3 could not be read: ptrace is not permitted"
    assert report.outcome.collect == ("Run it as root",)


def test_a_stopped_rank_is_named_without_any_stack() -> None:
    refused = {"stack_source": "", "refused": "ptrace is not permitted"}
    found = members(*(process(rank, state="T" if rank == 3 else "S", **refused) for rank in range(4)))
    assert findings(found) == [("RUN001", (3,), Severity.ERROR)]
    assert judged(found).exit_code == 1


def test_one_command_a_host_reads_all_its_ranks_that_refused() -> None:
    def refusing(rank: int) -> AttachedProcess:
        remedy = f"sudo doctor attach --pid {1000 + rank}, or: sudo sysctl kernel.yama.ptrace_scope=0"
        return process(rank, stack_source="", refused="ptrace is restricted", remedy=remedy)

    def remedies(job: Job) -> tuple[str, ...]:
        outcome = judged(job).outcome
        return outcome.collect if outcome is not None else ()

    ranks = [refusing(rank) for rank in range(4)]
    more = ", or: sudo sysctl kernel.yama.ptrace_scope=0"
    assert remedies(members(*ranks)) == (f"sudo doctor attach --pid 1000 --pid 1001 --pid 1002 --pid 1003{more}",)
    assert remedies(of_hosts(ranks[:2], ranks[2:])) == (
        f"sudo doctor attach --pid 1000 --pid 1001{more}  # on node0",
        f"sudo doctor attach --pid 1002 --pid 1003{more}  # on node1",
    )


def test_two_hosts_and_two_attaching_processes_on_one_of_them() -> None:
    first, second = others(2, 3), [process(2, ALL_REDUCE), process(3, SLEEP)]
    twice = build_job(
        [
            attached_to(*first, number=0),
            attached_to(*second, host="node1", number=1),
            attached_to(*second, host="node1", number=2),
        ]
    )
    job = attached_job(twice)
    assert [(rank.number, rank.host.name) for rank in job.ranks] == [
        (0, "node0"),
        (1, "node0"),
        (2, "node1"),
        (3, "node1"),
    ]
    assert findings(of_hosts(first, second)) == [("RUN001", (3,), Severity.ERROR)]


def test_ranks_on_gpus_that_spin_wait_for_the_rank_that_is_asleep() -> None:
    spinning = [process(rank, (at(41),), cpu=1.0, uses_gpu=True) for rank in range(3)]
    assert findings(members(*spinning, process(3, SLEEP, uses_gpu=True))) == [("RUN001", (3,), Severity.ERROR)]
    healthy = [*spinning, process(3, (at(41),), cpu=1.0, uses_gpu=True)]
    assert judged(members(*healthy)).exit_code == 0


def test_processes_without_a_number_take_the_free_ones() -> None:
    found = [process(None, ALL_REDUCE, pid=70 + number, world=None) for number in range(2)]
    assert [rank.number for rank in attached_job(members(process(1, SLEEP, world=None), *found)).ranks] == [0, 1, 2]


def test_one_sample_shows_where_ranks_are_and_not_for_how_long() -> None:
    found = members(*others(3, rounds=1), process(3, SLEEP, rounds=1))
    (finding,) = judged(found).result("RUN001").findings  # type: ignore[union-attr]
    assert (finding.ranks, finding.severity) == ((3,), Severity.ERROR)
    assert " s in " not in finding.summary


def test_guessed_numbers_of_several_hosts_do_not_collide() -> None:
    hosts = [[process(rank, ALL_REDUCE, guessed=True, world=None) for rank in range(2)] for _ in range(2)]
    found = of_hosts(*hosts)
    assert [(rank.number, rank.host.name) for rank in attached_job(found).ranks] == [
        (0, "node0"),
        (1, "node0"),
        (2, "node1"),
        (3, "node1"),
    ]
    assert rank_stacks(found, attached_job(found)).notes[0].endswith("ranks 0-3")


def test_a_native_frame_that_waits_for_the_device_is_a_wait() -> None:
    synchronizes = [_with_native(process(rank, (at(41),)), "cudaStreamSynchronize") for rank in range(3)]
    assert findings(members(*synchronizes, process(3, SLEEP))) == [("RUN001", (3,), Severity.ERROR)]
    alone = [*synchronizes, _with_native(process(3, (at(41),)), "cuStreamSynchronize_v2")]
    assert {severity for *_, severity in findings(members(*alone))} <= {Severity.INFO}


def _with_native(one: AttachedProcess, *native: str) -> AttachedProcess:
    last = one.samples[-1]
    threads = tuple(msgspec.structs.replace(thread, native=native) for thread in last.threads)
    return msgspec.structs.replace(one, samples=(*one.samples[:-1], msgspec.structs.replace(last, threads=threads)))


FSDP = (package_frame("torch/distributed/fsdp/_flat_param.py", 1200, "_get_shard"), at(41), MAIN)
HOROVOD = (package_frame("horovod/torch/mpi_ops.py", 1266, "synchronize"), at(41), MAIN)
SYNCHRONIZE = (package_frame("torch/cuda/streams.py", 108, "synchronize"), at(41), MAIN)


def test_a_rank_that_computes_in_a_file_of_fsdp_is_busy_and_one_without_cpu_time_waits() -> None:
    kinds = [movement_of(process(0, FSDP, cpu=cpu)).kind for cpu in (0.9, 0.0)]
    assert kinds == ["busy", "waiting"]
    assert findings(members(*others(3), process(3, FSDP, cpu=0.9))) == [("RUN001", (3,), Severity.INFO)]
    tensor_parallel = (package_frame("megatron/core/tensor_parallel/random.py", 40, "forward"), at(41), MAIN)
    assert movement_of(process(0, tensor_parallel)).operation == "collective"


def test_a_rank_that_computes_in_backward_is_busy_while_the_others_wait_in_it() -> None:
    found = members(*others(3, stack=BACKWARD), process(3, BACKWARD, cpu=0.9))
    assert findings(found) == [("RUN001", (3,), Severity.INFO)]
    assert judged(found).exit_code == 0


def test_a_thread_that_polls_waits_although_it_wakes_up() -> None:
    assert movement_of(process(0, HOROVOD, switches=1500)).kind == "waiting"
    assert movement_of(process(0, ALL_REDUCE, switches=1500)).kind == "moving"


def test_ranks_in_a_synchronization_of_torch_wait_for_the_rank_that_stands() -> None:
    spinning = [process(rank, SYNCHRONIZE, cpu=1.0, uses_gpu=True) for rank in range(3)]
    assert findings(members(*spinning, process(3, SLEEP, uses_gpu=True))) == [("RUN001", (3,), Severity.ERROR)]
    assert movement_of(process(0, SYNCHRONIZE)).operation == DEVICE_WAIT


def _awaiting(one: AttachedProcess, operation: str) -> AttachedProcess:
    threads = tuple(msgspec.structs.replace(thread, awaits=operation) for thread in one.samples[-1].threads)
    samples = tuple(msgspec.structs.replace(sample, threads=threads) for sample in one.samples)
    return msgspec.structs.replace(one, samples=samples)


def test_a_rank_that_copies_a_value_from_its_gpu_waits_for_the_gpu() -> None:
    copies = [_awaiting(process(rank, (at(45), MAIN), uses_gpu=True), DEVICE_WAIT) for rank in range(3)]
    assert {movement_of(one).kind for one in copies} == {"waiting"}
    assert findings(members(*copies, process(3, SLEEP, uses_gpu=True))) == [("RUN001", (3,), Severity.ERROR)]
    spins = _awaiting(process(0, (at(45), MAIN), cpu=1.0, uses_gpu=True), DEVICE_WAIT)
    assert (movement_of(spins).kind, movement_of(spins).on_device) == ("busy", True)
    assert movement_of(_awaiting(process(0, (at(45), MAIN)), DEVICE_WAIT)).kind == "standing"


def test_an_operator_of_a_compiled_program_that_rests_waits_for_others() -> None:
    compiled = (package_frame("torch/_ops.py", 1200, "__call__"), Frame("/tmp/torchinductor_me/ab/cab.py", 90, "call"))
    assert movement_of(process(0, compiled)).operation == "collective"
    assert movement_of(process(0, compiled, cpu=0.9)).kind == "busy"


def test_a_rank_that_waits_for_the_handle_of_a_collective_is_not_the_cause() -> None:
    one = process(3, (at(52), MAIN))
    assert findings(members(*others(3), one)) == [("RUN001", (3,), Severity.ERROR)]
    waiting = _awaiting(one, "all_reduce")
    assert movement_of(waiting).operation == "all_reduce"
    assert findings(members(*others(3), waiting, process(4, SLEEP))) == [("RUN001", (4,), Severity.ERROR)]


def test_ranks_that_wait_in_groups_of_other_names_wait_for_one_another() -> None:
    crossed = [
        _in_group(process(0, inside("all_reduce", at(65))), "one"),
        _in_group(process(1, inside("all_reduce", at(67))), "two"),
    ]
    found = members(*crossed, *others(0, 1))
    assert findings(found) == [("RUN015", (0, 1), Severity.ERROR)]
    same = [_in_group(one, "tensor_group") for one in crossed]
    assert [check for check, *_ in findings(members(*same, *others(0, 1)))] == ["RUN002"]


def _in_group(one: AttachedProcess, group: str) -> AttachedProcess:
    samples = tuple(
        msgspec.structs.replace(
            sample, threads=tuple(msgspec.structs.replace(thread, group=group) for thread in sample.threads)
        )
        for sample in one.samples
    )
    return msgspec.structs.replace(one, samples=samples)


def test_a_rank_that_is_runnable_and_gets_no_cpu_is_busy() -> None:
    starved = process(3, (at(40),), state="R")
    assert judged(members(*others(3), starved)).exit_code == 0


def test_with_placeholders_nothing_names_users_hosts_or_folders() -> None:
    found = members(*others(3), process(3, SLEEP, program="/home/me/train.py", job="4711"), host="node17.example.org")
    redacted = from_document(redact(to_document(found), paths=True))
    job = attached_job(redacted)
    report = judge(job, load_checks(Settings()), Settings(), outcome_of=outcome_of_attach(redacted))
    text = msgspec.json.encode((report, rank_stacks(redacted, job), job.ranks[0].find(ProgressFacts))).decode()
    assert "train.py:58" in text
    assert not [name for name in ("/home/me", "node17", "example.org") if name in text]


def test_ranks_that_wait_behind_the_loop_of_the_others_ended_it_earlier() -> None:
    in_loop = tuple(msgspec.structs.replace(frame, loop=(40, 46)) if frame.user else frame for frame in BACKWARD[:-1])
    behind = process(3, inside("barrier", at(48)))
    (finding,) = judged(members(*others(3, stack=(*in_loop, MAIN)), behind)).result("RUN001").findings  # type: ignore[union-attr]
    assert (finding.ranks, finding.severity) == ((3,), Severity.ERROR)
    assert finding.summary == "Rank 3 has left the loop that ranks 0-2 are still in"
    assert "waits in barrier at train.py:48 (train)" in finding.evidence["where"]["3"]
    before = process(3, inside("barrier", at(38)))
    assert [check for check, *_ in findings(members(*others(3, stack=(*in_loop, MAIN)), before))] == ["RUN002"]


def _in_loop(*stack: Frame, data: str = "") -> tuple[Frame, ...]:
    """The stack with its innermost user frame in a loop over lines 40 to 46."""
    at_user = next(number for number, frame in enumerate(stack) if frame.user)
    inner = msgspec.structs.replace(stack[at_user], loop=(40, 46), loop_data=data)
    return (*stack[:at_user], inner, *stack[at_user + 1 :])


def test_ranks_whose_data_ended_are_named_by_the_loop_over_it() -> None:
    training = others(3, stack=_in_loop(*BACKWARD, data="loader"))
    report = judged(members(*training, process(3, inside("barrier", at(48)))))
    (finding,) = report.result("DATA010").findings  # type: ignore[union-attr]
    assert (finding.ranks, finding.severity, finding.source.line) == ((3,), Severity.ERROR, 44)  # type: ignore[union-attr]
    assert finding.summary == (
        "Rank 3 ended the loop over `loader` while ranks 0-2 are still in it: rank 3 waits in barrier at train.py:48 "
        "(train); rank 0 waits in all_reduce in the backward pass, called at train.py:44 (train)"
    )
    assert [result.id for result in report.results for _ in result.findings] == ["DATA010"]


def test_a_loop_in_a_function_that_others_have_returned_from() -> None:
    def calls(line: int, **fields: Any) -> Frame:
        return msgspec.structs.replace(at(line, "main"), loop=(88, 95), **fields)

    step = _in_loop(*BACKWARD[:-1], data="enumerate(loader)")
    inside_loop = others(3, stack=(*step, calls(90)))
    validates = process(3, (*inside("all_reduce", at(20, "validate"))[:-1], calls(92)))
    assert findings(members(*inside_loop, validates)) == [("DATA010", (3,), Severity.ERROR)]
    by_role = process(3, (*inside("all_reduce", at(20, "validate"))[:-1], calls(92, condition="if rank == 3, line 91")))
    assert [check for check, *_ in findings(members(*inside_loop, by_role))] == ["RUN006"]
    stage = process(3, (*inside("recv", at(20, "last_stage"))[:-1], calls(92)))
    sending = others(3, stack=(*_in_loop(*inside("send", at(44))[:-1], data="loader"), calls(90)))
    assert "DATA010" not in [check for check, *_ in findings(members(*sending, stage))]
    training = process(3, (*BACKWARD[:-2], at(30, "train_other"), calls(92)))
    assert "DATA010" not in [check for check, *_ in findings(members(*inside_loop, training))]
    earlier = process(3, (*inside("all_reduce", at(20, "validate"))[:-1], calls(89)))
    assert [check for check, *_ in findings(members(*inside_loop, earlier))] == ["RUN002"]


def test_ranks_that_ended_lightnings_training_epoch() -> None:
    def fit(*frames: tuple[str, str]) -> tuple[Frame, ...]:
        return tuple(package_frame(f"lightning/pytorch/loops/{file}", 1, function) for file, function in frames)

    step = (*BACKWARD[:2], *fit(("training_epoch_loop.py", "advance"), ("fit_loop.py", "advance")), at(90, "main"))
    ended = (*ALL_REDUCE[:2], *fit(("fit_loop.py", "on_advance_end")), at(90, "main"))
    report = judged(members(*others(3, stack=step), process(3, ended)))
    (finding,) = report.result("DATA010").findings  # type: ignore[union-attr]
    assert finding.summary.startswith("Rank 3 ended the training epoch while ranks 0-2 are still in it")
    assert [result.id for result in report.results for _ in result.findings] == ["DATA010"]


def test_a_rank_that_torchrun_started_and_that_is_missing_ended_its_program() -> None:
    here = [process(rank, ALL_REDUCE, local_rank=rank, local_world_size=4) for rank in range(3)]
    agent = process(None, role="agent", program="torchrun", world=None)
    report = judged(members(*here, agent))
    (finding,) = report.result("RUN001").findings  # type: ignore[union-attr]
    assert (finding.ranks, finding.severity) == ((3,), Severity.ERROR)
    assert finding.summary.startswith("Rank 3 has finished; ranks 0-2 have waited")
    by_srun = [msgspec.structs.replace(one, launcher="srun") for one in here]
    assert findings(members(*by_srun, agent)) == [("RUN004", (3,), Severity.ERROR)]


def test_how_a_zombie_ended_is_told() -> None:
    report = judged(members(*others(3), process(3, ended="zombie", exit_code=-9)))
    (finding,) = report.result("RUN004").findings  # type: ignore[union-attr]
    assert "SIGKILL" in finding.summary


def test_a_job_that_ends_while_it_is_read_passes_only_if_all_ranks_moved_before() -> None:
    report = judged(members(*(process(rank, (at(40),), ended="ended") for rank in range(4))))
    assert (report.exit_code, report.verdict) == (3, "inconclusive")
    assert report.outcome is not None
    assert report.outcome.reason == "the job ended while it was read: ranks 0-3 could not be seen to make progress"
    moved = [process(rank, (at(40),), (at(41),), ended="ended") for rank in range(4)]
    assert (judged(members(*moved)).exit_code, judged(members(*moved)).outcome.kind) == (0, "ended")  # type: ignore[union-attr]
    one_unknown = [*moved[:3], process(3, ended="zombie")]
    assert judged(members(*one_unknown)).exit_code == 3
    finished = [process(rank, ended="zombie", exit_code=0) for rank in range(4)]
    assert judged(members(*finished)).exit_code == 0
    failed = [*moved[:3], process(3, ended="zombie", exit_code=1)]
    assert findings(members(*failed)) == [("RUN004", (3,), Severity.ERROR)]
    leaving = [process(rank, (at(40),), (at(41),)) for rank in range(3)]
    assert judged(members(*leaving, process(3, (at(40),), ended="zombie"))).exit_code == 0


def _counting(rank: int, *counts: int, name: str = "global_step", **fields: Any) -> AttachedProcess:
    """A rank that moves, with a local variable in the frame around the innermost one."""
    stacks = [(at(40 + number, "step"), at(38)) for number in range(3)]
    moving = process(rank, *stacks, **fields)
    samples = []
    for sample, count in zip(moving.samples, counts, strict=True):
        variables = (LocalVariable(1, name, str(count)), LocalVariable(0, "loss", "0.5"), LocalVariable(1, "step", "x"))
        threads = tuple(msgspec.structs.replace(thread, locals=variables) for thread in sample.threads)
        samples.append(msgspec.structs.replace(sample, threads=threads))
    return msgspec.structs.replace(moving, samples=tuple(samples))


def test_steps_per_second_follow_from_local_variables() -> None:
    found = members(*(_counting(rank, 100, 103, 106 + rank) for rank in range(3)))
    report = judged(found)
    assert report.outcome is not None
    assert report.outcome.reason == "ranks 0-2 make progress, 2.33 steps/s"
    stacks = rank_stacks(found, attached_job(found))
    assert (stacks.steps_per_second, stacks.steps_from) == (2.333, "locals")


@pytest.mark.parametrize(
    "processes",
    [
        [_counting(0, 100, 100, 100)],
        [_counting(0, 9, 0, 12)],
        [_counting(0, 100, 103, 106, name="i")],
        [process(0, (at(40),), (at(41),))],
    ],
)
def test_steps_per_second_are_absent_where_they_cannot_be_seen(processes: list[AttachedProcess]) -> None:
    found = members(*processes)
    assert "steps/s" not in judged(found).outcome.reason  # type: ignore[union-attr]
    assert rank_stacks(found, attached_job(found)).steps_per_second is None


def test_a_rank_that_counts_steps_moves_although_it_is_always_seen_on_one_line() -> None:
    one = process(0, SLEEP)
    kinds = []
    for counts in ((5, 6, 7), (5, 5, 5)):
        samples = []
        for sample, count in zip(one.samples, counts, strict=True):
            variables = (LocalVariable(0, "step", str(count)),)
            threads = tuple(msgspec.structs.replace(thread, locals=variables) for thread in sample.threads)
            samples.append(msgspec.structs.replace(sample, threads=threads))
        kinds.append(movement_of(msgspec.structs.replace(one, samples=tuple(samples))).kind)
    assert kinds == ["moving", "standing"]


def test_steps_per_second_of_the_callbacks_record() -> None:
    found = members(*(process(rank, (at(40),), (at(41),), step_rate=4.0 + rank, world=3) for rank in range(3)))
    assert judged(found).outcome.reason == "ranks 0-2 make progress, 5 steps/s"  # type: ignore[union-attr]
    assert rank_stacks(found, attached_job(found)).steps_from == "callback"
    hanging = members(*others(3), process(3, SLEEP, step_rate=4.0))
    assert rank_stacks(hanging, attached_job(hanging)).steps_per_second is None


def _summary(check: str, *processes: AttachedProcess) -> str:
    (finding,) = judged(members(*processes)).result(check).findings  # type: ignore[union-attr]
    return finding.summary


def test_each_call_site_of_the_waiting_ranks_is_named_if_there_are_few() -> None:
    asleep = process(3, SLEEP)
    two = [process(0, ALL_REDUCE), process(1, inside("barrier", at(70, "validate"))), process(2, ALL_REDUCE)]
    assert _summary("RUN001", *two, asleep) == (
        "Rank 3 is stuck at train.py:58 (step); ranks 0 and 2 have waited at least 3 s in all_reduce at train.py:41 "
        "(train), rank 1 in barrier at train.py:70 (validate)"
    )
    many = [process(rank, inside("barrier", at(70 + rank)), world=6) for rank in range(5)]
    assert _summary("RUN001", *many, process(5, SLEEP, world=6)).endswith(
        "rank 0 has waited at least 3 s in barrier at train.py:70 (train), rank 1 in barrier at train.py:71 (train), "
        "rank 2 in barrier at train.py:72 (train), 2 more elsewhere"
    )


def test_how_processes_ended_is_said_in_a_sentence() -> None:
    waited = "; ranks 0-2 have waited at least 3 s in all_reduce"
    for code, how in (
        (None, "has ended"),
        (-9, "was terminated by signal 9 (SIGKILL)"),
        (1, "has ended with exit code 1"),
    ):
        summary = _summary("RUN004", *others(3), process(3, ended="zombie", exit_code=code))
        assert summary == f"The process of rank 3 {how}{waited}"


def test_a_rank_that_left_its_program_waits_for_its_threads() -> None:
    left = process(3, (Frame("/usr/lib/python3.11/threading.py", 1590, "_shutdown"),))
    assert _summary("RUN001", *others(3), left).startswith(
        "Rank 3 is at the end of its program and waits for its threads"
    )


def test_what_to_do_depends_on_where_the_stacks_came_from() -> None:
    here = attached_to(*others(3), process(3, (at(40),), cpu=0.9))
    jobs = [build_job([here]), build_job([here], evidence=LogEvidence())]
    reports = [judge(attached_job(job), load_checks(Settings()), Settings()) for job in jobs]
    attached, collected = (report.result("RUN001").findings[0].fix for report in reports)  # type: ignore[union-attr]
    assert attached.startswith("Attach again later, or with `--watch 60`, to see whether rank 3 ")
    assert collected.startswith("Collect the stacks again later, to see whether rank 3 ")


def test_a_call_that_other_ranks_may_never_reach_is_hinted_at_without_source() -> None:
    found = members(*others(3), process(3, inside("all_gather", at(70))))
    (finding,) = judged(found).result("RUN002").findings  # type: ignore[union-attr]
    assert finding.fix == (
        "If only rank 3 reaches train.py:70 (train), as under `if rank == 0:`, make that call on all ranks (RUN006)."
    )


def test_ranks_that_may_have_left_the_training_loop_are_hinted_at_without_source() -> None:
    found = members(*others(3, stack=BACKWARD), process(3, inside("barrier", at(48))))
    (finding,) = judged(found).result("RUN002").findings  # type: ignore[union-attr]
    assert finding.fix == (
        "Give all ranks the same number of batches if rank 3 has left the training loop (DATA001, DATA010)."
    )


def test_ranks_that_ended_are_not_said_to_have_made_no_progress() -> None:
    report = judged(members(process(0, (at(40),), (at(41),), world=2), process(1, ended="zombie", exit_code=0)))
    assert report.outcome is not None
    assert report.outcome.reason == "rank 0 made progress, rank 1 ended"
    one_sample = judged(members(*others(rounds=1)))
    assert one_sample.outcome is not None
    assert one_sample.outcome.reason == "one sample does not show whether ranks move"
