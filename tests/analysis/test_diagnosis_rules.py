"""One diagnosis a job: which cause comes before which, and what is told where parts are missing."""

import gc
import weakref

import pytest
from msgspec import structs
from msgspec.structs import replace

from doctor.analysis.hang.diagnosis_rules import diagnose_stall, silent_mismatches
from doctor.api import Severity, Status
from doctor.core.check_registry import CheckRegistry, builtin_checks
from doctor.core.check_runner import examine_job
from doctor.core.facts import MissingReason
from doctor.core.report_summary import primary_of
from doctor.facts import Collective, EpochEnd, LoaderFacts, ProgressFacts, RecorderFacts
from doctor.testing import Fails, healthy, package_frame, running, stalled, user_frame, with_loader
from doctor.testing.stalled_run import (
    over_gloo,
    with_call,
    with_failure,
    with_group_call,
    with_late_ranks,
    without_recorders,
)
from doctor_checks.progress.hang._stall_text import stall_evidence
from tests.lab.cases import each_case

IDS = ("RUN001", "RUN002", "RUN004", "RUN006", "RUN010", "RUN015")
CHECKS = tuple(check for check in builtin_checks() if check.id in IDS)
CASES = [(check, case) for check in CHECKS for case in check.cases()]

CLOSED = "Connection closed by peer [10.0.0.1]:1234"
TIMED_OUT = "Timed out waiting 1800000ms for recv operation to complete"
ABORTED = "NCCL communicator was aborted on rank 3."
SLEEPS = user_frame(58)
IF = "if rank == 0, line 56"


def told(sketch):
    found = diagnose_stall(sketch.job())
    return (found.kind, found.ranks) if found else None


def results_of(sketch, checks=CHECKS):
    results = examine_job(sketch.job(), CheckRegistry(tuple(checks)))
    assert not [result.reason for result in results if result.status is Status.ERROR]
    return results


@each_case(("check", "case"), CASES, ids=[f"{check.id}-{case.name}" for check, case in CASES])
def test_no_two_checks_speak_of_one_stall(check, case):
    loud = [
        (result.id, finding.summary)
        for result in results_of(case.sketch)
        for finding in result.findings
        # Logs tell of symptoms too; what explains them is one finding.
        if finding.severity is not Severity.INFO and not (case.sketch.evidence and finding.explained_by)
    ]
    if isinstance(case, Fails):
        assert [name for name, _ in loud] == [check.id], loud
    else:
        assert len(loud) <= 1, loud


LATE = with_late_ranks(stalled(1, 4), (2,), SLEEPS, point="step")


@pytest.mark.parametrize(
    ("name", "sketch", "expected"),
    [
        ("an error before those who miss it", with_failure(LATE, (1,), "ValueError", "no"), ("died", (1,))),
        (
            "a lost peer after the one who is late",
            with_failure(LATE, (0,), "RuntimeError", CLOSED),
            ("elsewhere", (2,)),
        ),
        (
            "time-outs after the one who is late",
            with_failure(LATE, (0, 1, 3), "RuntimeError", TIMED_OUT),
            ("elsewhere", (2,)),
        ),
        (
            "a time-out and those who lost that rank",
            with_failure(with_failure(LATE, (0,), "RuntimeError", TIMED_OUT), (1, 3), "RuntimeError", CLOSED),
            ("elsewhere", (2,)),
        ),
        (
            "a stopped rank before one who is late",
            LATE.alter(ProgressFacts, ranks=(3,), state="stopped"),
            ("unresponsive", (3,)),
        ),
        (
            "calls that differ before one who does not answer",
            with_call(stalled(1, 4), (0,), "all_gather", user_frame(57, condition=IF)).alter(
                ProgressFacts, ranks=(3,), state="silent", stack=()
            ),
            ("one-sided", (0,)),
        ),
        (
            "a rank that does not answer before one who waits for it",
            with_late_ranks(stalled(1, 4), (3,), state="silent"),
            ("unresponsive", (3,)),
        ),
        (
            "interrupted while it stood still",
            with_failure(stalled(1, 2), (0, 1), "KeyboardInterrupt", ""),
            None,
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_explains_what(name, sketch, expected):
    assert told(sketch) == expected


def test_the_first_error_by_the_clock():
    late, early = with_failure(running(1, 3), (0,), "ValueError", "no", SLEEPS, at=2.0), (2,)
    assert told(with_failure(late, early, "TypeError", "no", user_frame(9), at=1.0)) == ("died", (2,))


@pytest.mark.parametrize(
    "message", [CLOSED, ABORTED, "Broken pipe", "ncclRemoteError: A call failed", "recvValue failed on x"]
)
def test_errors_that_follow_from_another_rank(message):
    both = with_failure(
        with_failure(running(1, 3), (0, 2), "RuntimeError", message), (1,), "ValueError", "no", SLEEPS, at=9.0
    )
    assert told(both) == ("died", (1,))


@pytest.mark.parametrize(
    "kind", ["KeyboardInterrupt", "SIGTERMException", "lightning.pytorch.utilities.exceptions.SIGTERMException"]
)
def test_who_is_ended_from_outside_did_not_die(kind):
    assert told(with_failure(running(1, 2), (0, 1), kind, "")) is None


@pytest.mark.parametrize(
    ("interrupted", "others", "at", "expected"),
    [
        ((2,), CLOSED, 0.2, ("outside", (2,))),
        ((1, 2), CLOSED, 0.2, ("outside", (1, 2))),
        ((2,), CLOSED, -0.2, ("peer", (0,))),  # of what had happened before
        ((2,), TIMED_OUT, 0.2, None),
        ((0, 1, 2), "", 0.0, None),
    ],
    ids=str,
)
def test_an_interrupt_of_some_ranks_is_why_the_others_lose_them(interrupted, others, at, expected):
    rest = tuple(rank for rank in range(3) if rank not in interrupted)
    sketch = with_failure(running(1, 3), interrupted, "KeyboardInterrupt", "", SLEEPS)
    found = diagnose_stall(with_failure(sketch, rest, "RuntimeError", others, at=at).job())
    ending = found.ending if found is not None and found.kind == "died" else None
    assert (ending and (ending.nature, ending.ranks)) == expected


def test_an_error_of_its_own_comes_before_an_interrupt():
    sketch = with_failure(with_failure(running(1, 3), (0,), "RuntimeError", CLOSED, at=0.3), (1,), "KeyError", "a")
    assert told(with_failure(sketch, (2,), "KeyboardInterrupt", "", at=0.2)) == ("died", (1,))


def test_a_rank_that_is_gone_and_never_was_seen_again():
    gone = with_failure(stalled(1, 3).only((0, 1), absent=(2,)), (0, 1), "RuntimeError", CLOSED)
    assert told(gone) == ("died", (2,))


SHORT, LONG = EpochEnd("train", 0, 1, 41), EpochEnd("train", 0, 1, 42)


def _ended(sketch, ranks, end=SHORT, **changes):
    return sketch.alter(ProgressFacts, ranks=ranks, ended=(end,), point="epoch-end", batch=40, **changes)


def _begun(sketch, ranks, batch, point="step"):
    return sketch.alter(ProgressFacts, ranks=ranks, batch=batch, point=point)


STREAM = with_loader(stalled(1, 3), kind="iterable", length=None)


@pytest.mark.parametrize(
    ("name", "sketch", "expected"),
    [
        ("one ended early", _ended(_begun(STREAM, (0, 1, 2), 41), (1,)), ("loader-ended", (1,))),
        ("one goes on", _ended(_begun(STREAM, (0,), 41), (1, 2)), ("loader-ended", (0,))),
        ("one asks for more", _ended(_begun(STREAM, (0,), 40, "data"), (1, 2)), ("loader-ended", (0,))),
        ("all ended, after different numbers", _ended(_ended(STREAM, (0, 1)), (2,), LONG), ("loader-ended", (2,))),
        (
            "one goes on, and of another one it is not known",
            _ended(_begun(_begun(STREAM, (0,), 41), (1,), 40), (2,)),
            ("loader-ended", (2,)),
        ),
        ("lengths tell", _ended(with_loader(stalled(1, 3), ranks=(0,), length=42), (1, 2)), ("loader-ended", (0,))),
        (
            "the last batch takes its time",
            with_late_ranks(_ended(STREAM, (0, 1)), (2,), SLEEPS, point="step"),
            ("elsewhere", (2,)),
        ),
        (
            "joined",
            _ended(_begun(STREAM, (0,), 41), (1, 2)).alter(type(STREAM.members[0].sections["training"]), joins=True),
            ("together", (0, 1, 2)),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_loaders_that_ended(name, sketch, expected):
    assert told(sketch) == expected


def test_a_call_that_was_passed_over_is_no_uneven_loader():
    """Both have as many batches; one waits in its last one for a call that the other did not make."""
    same = with_loader(stalled(1, 3), length=41)
    passed = with_call(_ended(same, (1,)), (1,), "barrier", user_frame(70), input_sizes=(), output_sizes=())
    assert told(_begun(passed, (0, 2), 40)) == ("one-sided", (1,))


@pytest.mark.parametrize("known", [True, False])
def test_an_uneven_loader_is_the_primary(known):
    sketch = _ended(_begun(STREAM, (0, 1, 2), 41), (1,))
    epoch = type(running(1, 1).members[0].sections["loaders"].loaders[0].epochs[-1])
    for rank in range(3):
        length = (41 if rank == 1 else 60) if known else None
        epochs = (epoch(1, batches=41 if rank == 1 else 42, ended=rank == 1),)
        sketch = with_loader(sketch, ranks=(rank,), kind="map", length=length, epochs=epochs)
    results = results_of(sketch, builtin_checks())
    assert primary_of(results) == ("DATA001" if known else "DATA010")
    (stall,) = next(result for result in results if result.id == "RUN001").findings
    assert stall.explained_by in ("DATA001", "DATA010")
    assert stall.ranks == (1,)


def uncounted(sketch):
    """The same job whose recorders tell the groups without their counters."""
    return sketch.alter(
        RecorderFacts, groups=lambda old: tuple(type(one)(one.name, one.description, one.members) for one in old)
    )


def _shifted(world=2):
    """Rank 1 made one call more, of the same size; everything after it is paired with its neighbour's next one."""
    log, more, step = user_frame(30), user_frame(31), user_frame(40)
    rounds = [log, step] * 10

    def calls(frames):
        return tuple(
            Collective(
                "0", number, "all_reduce", "gloo", input_sizes=((1,),), types=("Float",), retired=True, frames=(frame,)
            )
            for number, frame in enumerate(frames, 1)
        )

    straight, bent = calls([*rounds, log]), calls([*rounds[:14], more, *rounds[14:]])
    newest = Collective("0", 22, "broadcast", "gloo", frames=(user_frame(50),))
    other = Collective("0", 22, "all_reduce", "gloo", input_sizes=((1,),), types=("Float",), frames=(log,))
    sketch = uncounted(stalled(1, world)).alter(RecorderFacts, collectives=(*straight, newest))
    return sketch.alter(RecorderFacts, ranks=(1,), collectives=(*bent, other))


@pytest.mark.parametrize("world", [2, 4])
def test_a_shift_is_followed_back_to_where_it_began(world):
    found = diagnose_stall(_shifted(world).job())
    assert (found.kind, found.ranks, found.divergence.sequence) == ("one-sided", (1,), 15)
    assert found.one_sided.call.site.frame.line == 31


def test_branches_for_each_ranks_part_are_not_the_beginning_of_a_shift():
    def calls(rank, last):
        frames = [user_frame(20 + rank) if number % 2 else user_frame(40) for number in range(1, 31)]
        entries = [
            Collective("0", number, "broadcast", "gloo", retired=True, frames=(frame,))
            for number, frame in enumerate(frames, 1)
        ]
        return (*entries, last)

    gather = Collective("0", 31, "all_gather", "gloo", frames=(user_frame(57, condition=IF),))
    step = Collective("0", 31, "broadcast", "gloo", frames=(user_frame(40),))
    sketch = uncounted(stalled()).alter(RecorderFacts, ranks=(0,), collectives=calls(0, gather))
    found = diagnose_stall(sketch.alter(RecorderFacts, ranks=(1,), collectives=calls(1, step)).job())
    assert (found.kind, found.ranks, found.divergence.sequence) == ("one-sided", (0,), 31)


def test_a_stretch_whose_beginning_is_out_of_sight_is_judged_by_its_newest_call():
    def calls(rank):
        return tuple(
            Collective("0", number, "all_reduce", "gloo", retired=True, frames=(user_frame(number + rank),))
            for number in range(100, 130)
        )

    ends = [Collective("0", 130, name, "gloo", frames=(user_frame(7),)) for name in ("broadcast", "all_reduce")]
    sketch = stalled()
    for rank in range(2):
        sketch = sketch.alter(RecorderFacts, ranks=(rank,), collectives=(*calls(rank), ends[rank]))
    found = diagnose_stall(sketch.job())
    assert (found.kind, found.divergence.sequence) == ("differ", 130)


@pytest.mark.parametrize(("patience", "early"), [(60.0, True), (8.0, False)])
def test_a_call_that_all_are_in_may_take_its_time_the_first_time(patience, early):
    sketch = stalled(1, 3).alter(ProgressFacts, idle=9.0, limit=8.0, patience=patience)
    found = diagnose_stall(sketch.job())
    assert (found.kind, found.within_limit) == ("together", early)


def test_a_difference_that_was_long_ago_is_not_why_it_stands_still():
    old = with_call(stalled(1, 3), (1,), "all_gather", user_frame(5), ago=3, retired=True)
    further = RecorderFacts(
        groups=old.members[0].sections["flight-recorder"].groups,
        collectives=tuple(
            Collective("0", number, "all_reduce", "gloo", retired=number < 150, frames=(user_frame(40),))
            for number in range(138, 151)
        ),
    )
    sketch = old
    for rank in range(3):
        first = old.members[rank].sections["flight-recorder"].collectives[0]
        sketch = sketch.put(structs.replace(further, collectives=(first, *further.collectives)), ranks=(rank,))
    assert told(sketch) == ("together", (0, 1, 2))


@pytest.mark.parametrize("odd", [(0,), (5,)])
def test_the_few_are_to_blame_whoever_they_are(odd):
    sketch = with_call(stalled(2, 4), range(8), "all_reduce", user_frame(40))
    assert told(with_call(sketch, odd, "broadcast", user_frame(40))) == ("differ", odd)


def test_of_two_ranks_neither_is_the_odd_one():
    sketch = with_call(stalled(), (0,), "all_reduce", user_frame(41, condition=IF))
    found = diagnose_stall(with_call(sketch, (1,), "broadcast", user_frame(44, condition=f"else of {IF}")).job())
    assert (found.kind, found.ranks, found.divergence.is_even) == ("differ", (0, 1), True)
    assert found.confidence < 0.9


def test_ranks_without_the_call_are_to_blame_where_most_make_it():
    found = diagnose_stall(
        with_call(stalled(1, 4), (0, 1, 3), "all_gather", user_frame(57, condition="if rank != 2, line 56")).job()
    )
    assert (found.kind, found.ranks, found.one_sided.extra) == ("one-sided", (2,), False)


def test_without_recorders_stacks_tell():
    gather = package_frame("torch/distributed/distributed_c10d.py", 1, "all_gather")
    late = with_late_ranks(stalled(1, 3), (1,), SLEEPS, point="step")
    by_stack = without_recorders(late).alter(ProgressFacts, ranks=(0, 2), stack=(gather, user_frame(57)))
    assert told(by_stack) == ("elsewhere", (1,))
    assert diagnose_stall(by_stack.job()).confidence < diagnose_stall(late.job()).confidence


def test_backward_alone_is_no_proof_of_a_wait():
    """Without recorders, ranks that all compute backward, or all wait in it, can't be told apart."""
    assert told(without_recorders(stalled(1, 3))) is None


def test_some_recorders_are_enough():
    assert told(LATE.drop(RecorderFacts, MissingReason.HIDDEN, "off", ranks=(1, 2))) == ("elsewhere", (2,))


def test_where_it_can_not_be_told_the_checks_say_so():
    waits = package_frame("torch/distributed/distributed_c10d.py", 1, "all_reduce")
    half = without_recorders(stalled(1, 3)).alter(ProgressFacts, ranks=(0,), stack=(waits, user_frame(40)))
    sketch = half.alter(ProgressFacts, ranks=(1, 2), stack=())
    assert told(sketch) == ("undetermined", (0,))
    status = {result.id: result.status for result in results_of(sketch)}
    assert status["RUN001"] is status["RUN002"] is Status.UNKNOWN
    assert status["RUN010"] is Status.PASS


def test_before_a_run_nothing_is_judged():
    assert {result.status for result in results_of(healthy(2, 2))} == {Status.SKIP}


def test_ranks_that_nobody_asked_make_it_less_sure():
    whole, part = diagnose_stall(LATE.job()), diagnose_stall(replace(LATE, world_size=8).job())
    assert part.ranks == whole.ranks
    assert part.confidence < whole.confidence


@pytest.mark.parametrize(
    ("changes", "severity"),
    [({"state": "running", "limit": 120.0}, Severity.INFO), ({"state": "stalled"}, Severity.ERROR)],
)
def test_a_rank_within_its_own_limit_is_a_remark(changes, severity):
    saving = with_late_ranks(stalled(1, 3), (0,), user_frame(9, "save"), point="checkpoint", **changes)
    (finding,) = [finding for result in results_of(saving) for finding in result.findings]
    assert finding.severity is severity
    if severity is Severity.INFO:
        assert primary_of(results_of(saving)) is None


def test_a_large_job_and_one_rank_of_it():
    late = with_late_ranks(stalled(128, 8), (700,), SLEEPS, point="step")
    found = diagnose_stall(late.job())
    assert (found.kind, found.ranks, len(found.waiting)) == ("elsewhere", (700,), 1023)
    evidence = stall_evidence(found)
    assert next(iter(evidence["where"])) == "700"
    assert len(evidence["where"]) == 8
    assert len(evidence["waiting_ranks"]) == 64


def test_the_lock_that_a_collective_waits_in_is_not_told():
    lock = "a lock of its own process (threading.Lock, or a lock in native code)"
    found = diagnose_stall(LATE.alter(ProgressFacts, blocked=lock).job())
    where = stall_evidence(found)["where"]
    assert "all_reduce" in where["0"]
    assert "a lock" not in where["0"]
    assert where["2"].endswith(f"waits for: {lock}")


def test_a_diagnosis_is_made_once_a_job():
    job = LATE.job()
    assert diagnose_stall(job) is diagnose_stall(job)


def test_a_diagnosis_does_not_keep_its_job_alive():
    job = LATE.job()
    seen = weakref.ref(job)
    assert diagnose_stall(job)
    del job
    gc.collect()
    assert seen() is None


def test_a_condition_that_all_are_under_tells_nobody_from_another():
    main = user_frame(200, "<module>", condition="if local_rank >= 0, line 199")
    calls = with_call(stalled(1, 3), range(3), "all_reduce", user_frame(40), main)
    assert told(with_call(calls, (1,), "broadcast", user_frame(40), main)) == ("differ", (1,))
    guarded = with_call(calls, (2,), "all_gather", user_frame(57, condition=IF), main)
    found = diagnose_stall(guarded.job())
    assert (found.kind, found.ranks, found.one_sided.call.site.condition) == ("one-sided", (2,), IF)


@pytest.mark.parametrize("kind", ["ConnectionResetError", "requests.exceptions.ConnectionError", "BrokenPipeError"])
def test_a_users_own_connection_is_no_peer(kind):
    both = with_failure(
        with_failure(running(1, 3), (0, 2), "RuntimeError", CLOSED), (1,), kind, "Connection reset by peer"
    )
    assert told(both) == ("died", (1,))


def test_a_lost_peer_alone_blames_nobody_as_long_as_others_run():
    assert told(with_failure(running(1, 3), (0,), "RuntimeError", CLOSED)) is None
    assert told(with_failure(running(1, 3), (0, 1, 2), "RuntimeError", CLOSED)) == ("died", (0,))


@pytest.mark.parametrize(
    ("frames", "way"),
    [
        ((user_frame(58),), ["/home/me/train.py:58 training_step"]),
        (
            (
                package_frame("torch/nn/modules/module.py", 1778, "_call_impl"),
                user_frame(9, "forward"),
                package_frame("lightning/pytorch/trainer/call.py", 48, "_call"),
                user_frame(58),
                user_frame(80, "main"),
                user_frame(90, "<module>"),
            ),
            [
                "/home/me/train.py:9 forward",
                "/home/me/train.py:58 training_step",
                "/home/me/train.py:80 main",
                "and 3 more frames, 1 of them in the program",
            ],
        ),
        (
            tuple(package_frame("a.py", line, "work") for line in range(20)),
            [
                *(f"/opt/env/lib/python3.11/site-packages/a.py:{line} work" for line in range(3)),
                "and 17 more frames in installed packages or the standard library",
            ],
        ),
    ],
    ids=["one", "mixed", "packages"],
)
def test_the_way_to_an_error_is_told_by_the_users_own_lines(frames, way):
    results = results_of(with_failure(stalled(1, 2), (1,), "ValueError", "no", *frames))
    (found,) = next(result.findings for result in results if result.id == "RUN004")
    assert found.evidence["raised_at"] == way


def _aborted(run, gone):
    """The same calls over Gloo, and a rank that is gone without having told its own."""
    run = run.alter(RecorderFacts, collectives=lambda old: tuple(structs.replace(one, backend="gloo") for one in old))
    return run.alter(ProgressFacts, ranks=(gone,), state="gone").drop(RecorderFacts, ranks=(gone,))


@pytest.mark.parametrize(
    ("changes", "gone", "expected"),
    [
        ({"types": ("Double",)}, 1, ("differ", (2,))),
        ({"input_sizes": ((400,),)}, 0, ("differ", (2,))),
        ({"types": ("Half",)}, 2, ("died", (2,))),
        ({"types": ("Half",)}, 1, ("differ", (0,))),
        ({}, 1, ("died", (1,))),
    ],
    ids=str,
)
def test_gloo_aborts_whoever_had_fewer_bytes(changes, gone, expected):
    """Three ranks, of which rank 2 made the newest call otherwise."""
    sketch = with_call(stalled(1, 3), range(3), "all_reduce", user_frame(50))
    assert told(_aborted(with_call(sketch, (2,), "all_reduce", user_frame(50), **changes), gone)) == expected


def _lost_in_call(rank, heard):
    """Rank 1 of three gave more elements over Gloo, rank 2 lost its peer, and ``rank`` is last known ``heard`` seconds
    after that."""
    sketch = with_call(running(1, 3), range(3), "all_reduce", user_frame(50), input_sizes=((1,),))
    sketch = with_call(sketch, (1,), "all_reduce", user_frame(50), input_sizes=((153,),))
    sketch = with_failure(over_gloo(sketch), (2,), "RuntimeError", CLOSED)
    return sketch.alter(ProgressFacts, ranks=(rank,), at=lambda at: at + heard).drop(RecorderFacts, ranks=(rank,))


def test_a_rank_that_nothing_is_heard_of_is_no_reason_for_a_tie():
    """As the last evaluation of a run sees a rank that Gloo aborted: running, as its last message said."""
    found = [one for result in results_of(_lost_in_call(0, -2.0)) for one in result.findings]
    assert [(one.severity, one.ranks) for one in found] == [(Severity.ERROR, (1,))]
    assert found[0].evidence["aborted_by_gloo"] == [0]
    assert told(_lost_in_call(0, 2.0)) is None


def _without_lines(old):
    """As a rank tells its calls on its last card, which is read without stacks."""
    return tuple(structs.replace(one, frames=()) for one in old)


@pytest.mark.parametrize("without", [(3,), (2,), (0, 3), (0, 2, 3)], ids=str)
def test_ranks_that_tell_no_lines_are_with_those_who_made_the_same_call(without):
    """Four ranks, of which rank 2 gave another type, and Gloo aborted rank 1."""
    sketch = with_call(stalled(1, 4), range(4), "all_reduce", user_frame(50))
    sketch = _aborted(with_call(sketch, (2,), "all_reduce", user_frame(60), types=("Double",)), 1)
    assert told(sketch.alter(RecorderFacts, ranks=without, collectives=_without_lines)) == ("differ", (2,))


def test_another_type_counts_and_not_the_line_that_it_comes_from():
    sketch = with_call(running(1, 4), range(4), "all_reduce", user_frame(50), ago=1)
    sketch = with_call(sketch, (3,), "all_reduce", user_frame(55), ago=1)
    sketch = with_call(sketch, (1,), "all_reduce", user_frame(60), ago=1, types=("Int",))
    assert [variant.ranks for variant in silent_mismatches(sketch.job())[0].variants] == [(0, 2, 3), (1,)]


def test_waiting_ranks_that_tell_no_lines_are_no_party_of_their_own():
    sketch = with_call(stalled(1, 4), range(4), "all_reduce", user_frame(50))
    sketch = with_call(sketch, (2,), "all_reduce", user_frame(50), input_sizes=((12,),))
    assert told(sketch.alter(RecorderFacts, ranks=(0, 3), collectives=_without_lines)) == ("differ", (2,))


def test_a_mismatch_long_before_is_not_why_a_rank_is_gone():
    sketch = with_call(stalled(1, 3), range(3), "all_reduce", user_frame(50), ago=2)
    sketch = with_call(sketch, (2,), "all_reduce", user_frame(50), ago=2, types=("Double",))
    assert told(_aborted(sketch, 1)) == ("died", (1,))


@pytest.mark.parametrize(
    ("operation", "changes", "ranks"),
    [
        ("all_reduce", {"types": ("Int",)}, (1,)),
        ("broadcast", {"input_sizes": ((7,),), "output_sizes": ((7,),)}, (1,)),
        ("all_to_all", {"input_sizes": ((7,),)}, ()),
        ("all_gather", {"input_sizes": ((7,),)}, ()),
        ("all_reduce", {"input_sizes": ((33, 10),)}, ()),
    ],
)
def test_mismatches_without_an_error(operation, changes, ranks):
    sketch = with_call(running(1, 3), range(3), operation, user_frame(50), ago=1)
    results = results_of(with_call(sketch, (1,), operation, user_frame(50), ago=1, **changes))
    found = {result.id: result.findings for result in results if result.findings}
    assert {name: findings[0].ranks for name, findings in found.items()} == ({"RUN002": ranks} if ranks else {})


def test_parts_of_a_split_group_that_share_its_name_are_not_mixed_up():
    """A mesh of two by two, whose parts all have the name of the group that was split."""
    parts = {rank: (0, 1) if rank < 2 else (2, 3) for rank in range(4)}
    sketch = stalled(1, 4)
    for rank, members in parts.items():
        group = type(sketch.members[0].sections["flight-recorder"].groups[0])
        size = 10 if rank < 2 else 20
        call = Collective(
            "0:split:1", 5, "all_reduce", "nccl", input_sizes=((size,),), types=("Float",), frames=(SLEEPS,)
        )
        mine = () if rank == 3 else (call,)
        sketch = sketch.put(RecorderFacts(groups=(group("0:split:1", "", members),), collectives=mine), ranks=(rank,))
    sketch = sketch.alter(ProgressFacts, ranks=(3,), stack=(SLEEPS,), point="step")
    assert told(sketch) == ("elsewhere", (3,))


def test_two_groups_one_of_them_never_called_before():
    usual = tuple(
        Collective("0", n, "all_reduce", "nccl", retired=n < 9, at=float(n), frames=(user_frame(40),))
        for n in range(1, 10)
    )
    sketch = with_group_call(stalled(1, 3), (1,), "7", (1, 2), user_frame(57))
    sketch = sketch.alter(RecorderFacts, ranks=(0, 2), collectives=usual)
    sketch = sketch.alter(RecorderFacts, ranks=(1,), collectives=lambda old: (*usual[:-1], old[-1]))
    sketch = uncounted(sketch).alter(
        RecorderFacts, ranks=(0, 2), groups=lambda old: (*old, type(old[0])("7", "", (1, 2)))
    )
    assert told(sketch) == ("one-sided", (1,))


def test_loaders_are_looked_up_by_their_index():
    """The second loader came to its end first, as it should."""
    ended = (EpochEnd("train", 1, 1, 30),)
    sketch = with_loader(stalled(1, 2), index=1, length=30).alter(ProgressFacts, ranks=(0,), ended=ended, batch=29)
    assert told(sketch.alter(ProgressFacts, ranks=(1,), batch=29, ended=())) == ("together", (0, 1))
    assert LoaderFacts in {type(section) for section in sketch.members[0].sections.values()}
