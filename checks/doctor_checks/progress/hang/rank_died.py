"""RUN004: a rank failed first, and the errors of the others are consequences."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Sequence
from itertools import islice

from doctor.analysis.call_sites import place_of_frame
from doctor.analysis.hang.diagnosis import Diagnosis
from doctor.analysis.hang.diagnosis_rules import diagnose_stall
from doctor.analysis.hang.exits import RunEnd, nature_of
from doctor.analysis.logs.event_timeline import parse_count
from doctor.analysis.logs.root_event import (
    LOST_PEERS,
    TIMED_OUT,
    UNFINISHED,
    LaterEvents,
    cause_in_chain,
    exceptions,
    failure_of,
    launcher_reports,
    nature_of_exception,
)
from doctor.api import (
    EventGroup,
    Finding,
    Job,
    Scope,
    Severity,
    Source,
    Verdict,
    check,
    event_groups,
    finding_from_logs,
    line_of,
    ranks_in_words,
)
from doctor.core.text import lazy_compile
from doctor.facts import EpochEnd, Event, Failure, Frame, LogEvidence, ProgressFacts
from doctor.testing import Fails, Passes, logged, package_frame, running, stalled, user_frame
from doctor.testing.stalled_run import with_failure, with_late_ranks
from doctor_checks.progress.hang._native_crashes import FIX_OF_ILLEGAL_INSTRUCTION, native_crashes
from doctor_checks.progress.hang._ras_suspects import ras_suspects
from doctor_checks.progress.hang._stall_text import stall_evidence, stall_ranks, stall_waiters, terminated

_CLOSED = (
    "[pair.cc:553] Connection closed by peer [127.0.0.1]:27845. This is typically caused by a remote worker crashing."
)
_TIMED_OUT = "[pair.cc:1] Timed out waiting 1800000ms for recv operation to complete"
_CONSEQUENCES = ("RUN001", "RUN002", "RUN003", "RUN006", "RUN010", "RUN012", "RUN015", "RUN016")
_CRASHED = "Child process with PID 42 terminated with code -11. Forcefully terminating all other processes"
_OF_A_GAP = ("RUN001", "RUN003", "RUN012", "RUN016")
"""Consequences of a lost rank, without the causes of an abort."""
_STEP = user_frame(58)


def _from_logs(job: Job) -> Iterator[Finding]:
    for suspect in ras_suspects(job):
        if suspect.state == "dead":
            yield suspect.finding(
                "Read the end of the log of {who}, and search the kernel log of the host with `dmesg -T | grep -iE "
                "'killed process|oom|nvrm'`."
            )
    found = diagnose_stall(job)
    if job.evidence is None or (found and found.kind in ("died", "differ") and found.confidence >= _OWN):
        return
    aftermath = LaterEvents(job.evidence)
    own = [event for event in exceptions(job.evidence) if nature_of_exception(event) == "own"]
    fatal = [event for event in own if not aftermath.outlived(event)]
    exits = [event for one in event_groups(job, *_EXITS) for event in one.events]
    codes = (event for event in exits if int(event.value("code") or 1) > 0)
    logged = {event.rank for event in exceptions(job.evidence)}  # the ranks whose error is in the log
    reports = tuple(
        one
        for one in (*launcher_reports(job.evidence), *codes)
        if not aftermath.outlived(one) and not (logged and (one.rank is None or one.rank in logged))
    )
    if fatal:
        yield _of_exception(cause_in_chain(fatal), fatal)
    elif native := native_crashes(job):
        rank = native.events.first.rank
        yield finding_from_logs(
            native.events,
            f"{f'rank {rank}' if rank is not None else 'a process'} {native.claim}",
            fix=native.fix,
            confidence=0.9 if native.states_cause else 0.7,
            explains=_OF_A_GAP,
            symptoms=False,
        )
    elif own:
        yield finding_from_logs(
            EventGroup(own[0].kind, tuple(own)),
            f"An error was logged, but the run continued: {_headline(failure_of(own[0]))}",
            fix=f"Fix the cause of {_quoted(failure_of(own[0]))} ({own[0].file}:{own[0].line}), unless the program "
            "handles this error intentionally.",
            severity=Severity.INFO,
            confidence=0.6,
            symptoms=False,
        )
    elif signals := tuple(event for event in exits if _signal_of(event) in _crashes(job.evidence)):
        yield _of_exits(signals)
    elif unfinished := tuple(job.evidence.of(UNFINISHED)):
        yield _of_unfinished(unfinished)
    elif reports:
        yield finding_from_logs(
            EventGroup(reports[0].kind, reports),
            f"{_process_of(reports)} failed, but its own error is not in this log",
            fix="Run again and keep the logs of all ranks, with `torchrun --tee 3 --log-dir logs` or `srun --label`.",
            confidence=0.25,
            symptoms=False,
        )


def _of_unfinished(events: tuple[Event, ...]) -> Finding:
    """The log ends within a traceback: the last line, which names the error, is missing."""
    last = events[-1]
    what = last.value("type") or ""
    line = _line(Failure(what, "", None, last.frames))
    place = place_of_frame(line)
    if line is not None and not last.text.strip():
        shown = f'File "{line.file}", line {line.line}, in {line.function}'
        events = (*events[:-1], last.with_text(shown))
    who = f"rank {last.rank}" if last.rank is not None else "a process"
    at, error = f" at {place}" if place else "", f": {what}" if what else ""
    return finding_from_logs(
        EventGroup(last.kind, events),
        f"{who} failed{at}{error}; the log ends within the traceback",
        ranks=(last.rank,) if last.rank is not None else (),
        fix="Run `doctor diagnose` on the complete log, because the last line of the traceback names the error.",
        confidence=0.25,
        symptoms=False,
    )


def _process_of(reports: tuple[Event, ...]) -> str:
    """The process that the first report with a local rank names, which is its rank on one host only."""
    local = next((rank for one in reports if (rank := one.value("lr")) is not None), None)
    return f"the process of local rank {local}" if local is not None else "a process"


def _signal_of(event: Event) -> int:
    codes = (event.value(name) for name in ("code", "code2", "code3"))
    code = int(next((one for one in codes if one), 0))
    # "died with <Signals.SIGSEGV: 11>" has the signal itself.
    return code if event.value("sig") else -code if code < 0 else code - 128


_CRASHES = {4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE", 9: "SIGKILL", 11: "SIGSEGV", 24: "SIGXCPU"}


def _crashes(evidence: LogEvidence) -> frozenset[int]:
    """Signals that indicate a fault of the process: watchdogs abort theirs after a timeout or the loss of a peer."""
    is_aborted = bool(evidence.of(*TIMED_OUT, *LOST_PEERS))
    return frozenset(_CRASHES) - ({signal.SIGABRT} if is_aborted else set())


def _of_exits(events: tuple[Event, ...]) -> Finding:
    number = _signal_of(events[0])
    local = events[0].value("lr")
    pid = events[0].value("pid")
    who = f"process {pid}" if pid else "a process"
    if local is not None:
        who = f"the process of local rank {local}{f' (PID {pid})' if pid else ''}"
    message = f"ended by signal {number} ({_CRASHES[number]})"
    return finding_from_logs(
        EventGroup(events[0].kind, events),
        f"{who} was {terminated(message)}; its log shows no error",
        fix=_fix_of_message(Failure(_CRASHES[number], message)),
        confidence=0.65,
        explains=("RUN001", "RUN003", "RUN012", "RUN016"),
        symptoms=False,
    )


_EXITS = ("elastic.failed", "pl.child", "launch.exit_code", "launch.failed")
"""Messages with the exit code of a process, but not its rank."""
_OWN = 0.6
"""Confidence of a diagnosis below which an error in a log is more specific."""


def _of_exception(cause: Event, fatal: list[Event]) -> Finding:
    failure = failure_of(cause)
    same = [event for event in fatal if event.values == cause.values]
    line = _line(failure)
    at = f" at {place_of_frame(line)}" if line else ""
    times = sum(event.count for event in same)
    several = f" ({times} times)" if times > 1 else ""
    local = f"the process of local rank {cause.local_rank}" if cause.local_rank is not None else "a process"
    rank = _rank_of(cause, same)
    who = f"rank {rank}" if rank is not None else local
    return finding_from_logs(
        EventGroup(cause.kind, (cause, *(event for event in fatal if event is not cause))),
        f"{who} failed{several}: {_headline(failure)}{at}",
        ranks=(rank,) if rank is not None else (),
        evidence={"error": _unlike(failure.message[:2000], _headline(failure)), "raised_at": _way(failure.frames)},
        fix=_fix_of_message(failure) or _fix_of_error(failure, who if rank is not None or cause.local_rank else "", at),
        confidence=0.85 if any(frame.user for frame in failure.frames) else 0.7,
        explains=("RUN001", "RUN003", "RUN012", "RUN016"),
        symptoms=False,
    )


def _unlike(error: str, headline: str) -> str | None:
    """The error unless the headline contains all of it."""
    return None if error.rstrip(".") in headline else error


def _rank_of(cause: Event, same: list[Event]) -> int | None:
    """The rank of an error, also if only a copy of it names the rank: `torchrun --tee` writes each line twice."""
    if cause.rank is not None or cause.local_rank is None:
        return cause.rank
    ranks = {event.rank for event in same if event.rank is not None and event.local_rank == cause.local_rank}
    return ranks.pop() if len(ranks) == 1 else None


@check(
    id="RUN004",
    severity=Severity.ERROR,
    scope=Scope.JOB,
    when="RM",
    needs=(ProgressFacts,),
    compares_ranks=False,
    from_logs=_from_logs,
    impacts={
        r"the run continued": "The run is not affected if the program handles this error intentionally.",
        r"which had already finished": (
            "The lost connection ends the job with an error, although the other rank ended normally."
        ),
        r"failed with the same error|^Ranks .* exited with": (
            "All ranks fail at the same point, so the job ends without waiting for a timeout."
        ),
        r"^(?:A process|Process \d+) (?:crashed|aborted|was terminated by)|terminated first, by signal"
        r"|without a Python error": (
            "The process ends without a Python traceback. Other ranks only report a lost connection or a timeout."
        ),
    },
    cases=lambda: (
        Passes("a run that moves", running(hosts=2, per_host=2)),
        Passes("a run that ended", running().alter(ProgressFacts, state="ended", point="ended")),
        Passes("interrupted by its user", with_failure(running(), (0, 1), "KeyboardInterrupt", "")),
        Fails(
            "one rank is interrupted, the others lose it",
            with_failure(
                with_failure(running(1, 3), (0, 1), "RuntimeError", _CLOSED, at=0.2),
                (2,),
                "KeyboardInterrupt",
                "",
                _STEP,
            ),
            ranks=(2,),
        ),
        Fails(
            "log of an interrupt on one rank, and of peers that lose it",
            logged(
                "[rank2]: KeyboardInterrupt",
                f"[rank0]: RuntimeError: {_CLOSED}",
                f"[rank1]: RuntimeError: {_CLOSED}",
            ),
            ranks=(2,),
        ),
        Passes(
            "log of an interrupt that the launcher passes on, and of a rank that loses its peers by it",
            logged(
                "[rank2]: KeyboardInterrupt",
                f"[rank0]: RuntimeError: {_CLOSED}",
                "torch.distributed.elastic.multiprocessing.api.SignalException: Process 3688 got signal: 2",
            ),
            silent=False,
        ),
        Passes("log of an interrupt on all ranks", logged(*(f"[rank{rank}]: KeyboardInterrupt" for rank in range(3)))),
        Passes("ended by its scheduler", with_failure(running(), (0, 1), "SIGTERMException", "")),
        Passes(
            "all ranks leave by sys.exit(0), to make room", with_failure(running(1, 3), (0, 1, 2), "SystemExit", "0")
        ),
        Passes("the first of them leaves", with_failure(running(1, 3), (2,), "SystemExit", "None")),
        Passes("a lone process leaves", with_failure(running(1, 1), (0,), "SystemExit", "")),
        Passes(
            "time-outs of ranks that wait for one that sleeps",
            with_failure(with_late_ranks(stalled(1, 3), (1,), _STEP), (0, 2), "RuntimeError", _TIMED_OUT),
        ),
        Passes(
            "an error that the run outlived",
            logged("ValueError: no such sample", *(f"step {step}" for step in range(200))),
            silent=False,
        ),
        Fails(
            "log of an error on one rank, and of peers that lose it",
            logged(
                "[rank2]: ValueError: the loss is not finite",
                f"[rank0]: RuntimeError: {_CLOSED}",
                f"[rank1]: RuntimeError: {_CLOSED}",
            ),
            ranks=(2,),
        ),
        Fails("log of a crash, by Lightning's launcher", logged(_CRASHED)),
        Fails(
            "log of a crash, by mp.spawn",
            logged("torch.multiprocessing.spawn.ProcessExitedException: process 1 terminated with signal SIGSEGV"),
            ranks=(1,),
        ),
        Fails("log of an error without a rank", logged("KeyError: 'label'")),
        Fails("log of an abort", logged("terminate called after throwing an instance of 'std::bad_alloc'", "Aborted")),
        Passes(
            "an optional command that is missing, in a run that goes on",
            logged("job.sh: line 3: nvtop: command not found", "step 1: loss 0.3", "step 2: loss 0.2"),
        ),
        Passes(
            "C++ that ends a process after a timeout of its watchdog",
            logged(
                "[rank1]: torch.distributed.DistBackendError: Watchdog caught collective operation timeout",
                "terminate called after throwing an instance of 'c10::DistBackendError'",
                "Aborted (core dumped)",
            ),
        ),
        Fails(
            "a log that ends within a traceback",
            logged(
                "Traceback (most recent call last):",
                '  File "train.py", line 12, in <module>',
                "    torch.save(model.state_dict(), path)",
            ),
            ranks=(),
        ),
        Fails(
            "torchrun's table alone",
            logged(
                "Failures:",
                "[1]:",
                "  time      : 2026-01-02_03:04:09",
                "  host      : node1",
                "  rank      : 0 (local_rank: 0)",
                "  exitcode  : -15 (pid: 4320)",
                "Root Cause (first observed failure):",
                "[0]:",
                "  time      : 2026-01-02_03:04:05",
                "  host      : node1",
                "  rank      : 3 (local_rank: 3)",
                "  exitcode  : -11 (pid: 4323)",
            ),
            ranks=(3,),
        ),
        Fails(
            "one rank raises, the others lose it",
            with_failure(
                with_failure(stalled(1, 3), (0, 2), "RuntimeError", _CLOSED, at=0.2),
                (1,),
                "ValueError",
                "the loss is not finite",
                _STEP,
            ),
            ranks=(1,),
        ),
        Fails("sys.exit(0) on one rank alone", with_failure(stalled(), (1,), "SystemExit", "0"), ranks=(1,)),
        Fails(
            "sys.exit(0) on one rank alone, which the other loses",
            with_failure(with_failure(running(), (0,), "RuntimeError", _CLOSED, at=0.2), (1,), "SystemExit", "0"),
            ranks=(1,),
        ),
        Fails("sys.exit(1) on all ranks", with_failure(running(), (0, 1), "SystemExit", "1"), ranks=(0, 1)),
        Fails(
            "one rank is gone",
            with_failure(stalled(2, 2), (0, 1, 2), "RuntimeError", _CLOSED).alter(
                ProgressFacts, ranks=(3,), state="gone", seen_by=2
            ),
            ranks=(3,),
        ),
        Fails(
            "one rank is gone, and the others wait",
            stalled().alter(ProgressFacts, ranks=(1,), state="gone"),
            ranks=(1,),
        ),
        Fails(
            "the same error on all ranks",
            with_failure(running(1, 3), (0, 1, 2), "TypeError", "no such argument", _STEP),
            ranks=(0, 1, 2),
        ),
        Fails(
            "a rank that was left",
            with_late_ranks(
                with_failure(running(), (1,), "RuntimeError", _CLOSED),
                (0,),
                state="ended",
                point="ended",
                ended=(EpochEnd("train", 0, 1, 40),),
            ),
            ranks=(1,),
        ),
        Passes(
            "a rank that left its loop early, and was lost by the other",
            with_failure(running(), (1,), "RuntimeError", _CLOSED).alter(
                ProgressFacts, ranks=(0,), state="ended", point="ended"
            ),
        ),
        Fails(
            "a data worker that was killed",
            with_failure(
                stalled(),
                (0,),
                "RuntimeError",
                "DataLoader worker (pid 4242) is killed by signal: Killed.",
                package_frame("torch/utils/data/dataloader.py", 1285, "_try_get_data"),
            ),
            ranks=(0,),
        ),
        Fails("a lone process", with_failure(running(1, 1), (0,), "ValueError", "no", _STEP), ranks=(0,)),
    ),
)
def rank_died(job: Job) -> Iterator[Verdict]:
    """Ask whether a rank failed, and which one was first.

    Why it hurts: the process ends, and ranks that wait for it then report lost connections or timeouts.
    Fix: Fix the first error; the later errors of other ranks are consequences.
    """
    found = diagnose_stall(job)
    if found is not None and found.kind == "died" and found.ending and found.ending.nature != "mismatch":
        if found.ending.nature == "outside" and _is_launcher_signalled(job.evidence):
            return
        failure = found.ending.failure
        line = _line(failure)
        sure = min(found.confidence, _certainty(failure))
        events = exceptions(job.evidence) if job.evidence else ()
        raised = [event for event in events if event.rank in found.ending.ranks]
        own = [line_of(event) for event in raised]
        claim = _claim(found, found.ending)
        error = terminated(failure.message[:2000]).rstrip(": ") if failure else ""
        yield Finding(
            claim,
            ranks=found.ending.ranks,
            evidence={
                "first": found.ending.first if len(found.ending.ranks) > 1 else None,
                "error": _unlike(error.removeprefix("terminated "), claim),
                "raised_at": _way(failure.frames if failure else ()),
                "consequences": list(found.ending.consequences[:64]),
                "others_were_in": _others_were_in(found),
                **stall_evidence(found),
                **({"said": own[:4]} if (own := own or _reports(job.evidence, found.ending.ranks)) else {}),
            },
            effect=_effect(job, found, found.ending),
            fix=_fix(found, found.ending, _code_of(raised)),
            # A lost peer, or a general NCCL error, in a log is a failure without its cause.
            severity=Severity.WARNING if job.evidence is not None and sure < 0.5 else None,
            confidence=sure,
            explains=_CONSEQUENCES if failure else _OF_A_GAP,
            source=Source(line.file, line.line) if line else None,
        )


def _reports(evidence: LogEvidence | None, ranks: tuple[int, ...]) -> list[str]:
    """What launchers log about the end of these ranks."""
    events = evidence.of("elastic.entry", "launch.spawn_died") if evidence else ()
    return [
        line_of(one) for one in events if (parse_count(one.value("rank")) if one.rank is None else one.rank) in ranks
    ]


def _is_launcher_signalled(evidence: LogEvidence | None) -> bool:
    """Whether a log shows that the launcher got a signal, such as by Ctrl-C, which it passes on to all ranks."""
    if evidence is None:
        return False
    interrupts = (event.value("sig") in _INTERRUPTS for event in evidence.of("elastic.closing"))
    return bool(evidence.of("elastic.sigexc", "elastic.sigrecv")) or any(interrupts)


_INTERRUPTS = ("2", "SIGINT", "Signals.SIGINT")
_GENERAL = lazy_compile(
    r"NCCL error in: .{0,200}?(?:unhandled \w+ error|internal error|remote process exited|invalid usage)"
)
"""NCCL errors whose cause is in NCCL's own log lines."""


def _certainty(failure: Failure | None) -> float:
    if failure is None:
        return 1.0
    return 0.4 if _GENERAL.search(failure.message) else _CERTAINTY.get(failure.kind, 1.0)


_CERTAINTY = {"exit code": 0.6, "SIGKILL": 0.7, "SIGSEGV": 0.85, "SIGBUS": 0.8}
"""Confidence that an error which only names how a process ended is the cause."""


def _way(frames: tuple[Frame, ...], most: int = 3) -> list[str]:
    own = [frame for frame in frames if frame.user]
    shown = (own or frames)[:most]
    left, own_left = len(frames) - len(shown), max(0, len(own) - len(shown))
    whose = f", {own_left} of them in the program" if own_left else " in installed packages or the standard library"
    rest = [f"and {left} more {'frame' if left == 1 else 'frames'}{whose}"] if left else []
    return [*(f"{frame.file}:{frame.line} {frame.function}".rstrip() for frame in shown), *rest]


def _others_were_in(found: Diagnosis, most: int = 4) -> dict[str, str]:
    """The last calls of ranks whose location is unknown."""
    others = (one for rank, one in found.states.ranks.items() if rank not in found.ranks and one.site is None)
    calls = ((one.rank, one.collectives[-1]) for one in others if one.collectives)
    return {
        str(rank): " ".join([call.operation, *map(str, map(list, call.input_sizes)), *call.types])
        for rank, call in islice(calls, most)
    }


def _line(failure: Failure | None) -> Frame | None:
    frames = failure.frames if failure else ()
    lines = [frame for frame in frames if not frame.file.startswith("<frozen")]
    return next((frame for frame in frames if frame.user), next(iter(lines or frames), None))


def _claim(found: Diagnosis, ending: RunEnd) -> str:
    if found.first is not None and found.first.is_sampled and _is_of_process(ending.failure):
        return _claim_of_processes(found, ending.failure)
    who, several = stall_ranks(found), len(ending.ranks) > 1
    if ending.failure is None:
        they, were = ("they", "were") if several else ("it", "was")
        return (
            f"{who} exited without a Python error: {they} {were} killed, ended early, or native code aborted "
            f"{'them' if several else 'it'}"
        )
    error, line = _headline(ending.failure), place_of_frame(_line(ending.failure))
    at = f" at {line}" if line and len(error) <= _MOST_WITH_PLACE else ""
    if ending.nature == "peer":
        whose = "their" if several else "its"
        left = f"{ranks_in_words(ending.left)}, which had already finished"
        return (
            f"{who} lost {whose} connection to {left}{at}"
            if ending.left
            else f"{who} lost {whose} peers for an unknown reason{at}"
        )
    if ending.nature == "outside":
        then = f"{ranks_in_words(ending.consequences)} then failed"
        return f"{who} {'were' if several else 'was'} interrupted ({ending.failure.kind}){at}; {then}"
    if several and ending.failure.kind == "SystemExit":
        return f"{who} exited with {error}{at}"
    if several:
        return f"{who} failed with the same error: {error}{at}"
    if ending.failure.message.startswith("ended by signal"):
        return f"{who} was terminated first, {ending.failure.message.removeprefix('ended ')}{at}"
    first = " first" if len(found.states.ranks) > 1 else ""
    is_exit = ending.failure.kind == "SystemExit"
    return f"{who} exited{first} with {error}{at}" if is_exit else f"{who} failed{first}: {error}{at}"


def _effect(job: Job, found: Diagnosis, ending: RunEnd) -> str:
    """What the other ranks do, if that is known and no kind of finding states it."""
    if ending.failure is None or ending.left or len(ending.ranks) > 1 or ending.nature == "peer":
        return ""
    who, others = ranks_in_words(ending.ranks), ending.consequences or found.waiting
    exits = ending.failure.kind == "SystemExit" and ending.failure.message in ("", "0", "None", "SystemExit: 0")
    start = f"{who.capitalize()} ends as if its work were complete, and " if exits else ""
    ends = [found.states.ranks[rank].failure for rank in ending.consequences if rank in found.states.ranks]
    if any(one is not None and one.message.startswith("ended by signal 15") for one in ends):
        rest = f"the launcher then terminates {ranks_in_words(others)}."
    elif ending.consequences:
        rest = f"{ranks_in_words(others)} then fail{'' if len(others) > 1 else 's'} with {_how_they_end(ends)}."
    elif others:
        awaited = "it" if start else who
        rest = f"{ranks_in_words(others)} wait{'' if len(others) > 1 else 's'} for {awaited} until the timeout."
    elif job.world_size == 1 and job.evidence is None:
        rest = "the run ends, and the steps since the last checkpoint are lost."
    else:
        return ""
    return start + (rest if start else rest[:1].upper() + rest[1:])


def _how_they_end(failures: Sequence[Failure | None]) -> str:
    natures = {nature_of(one) if one is not None else "" for one in failures}
    if natures == {"peer"}:
        return "a lost connection"
    return "a timeout" if natures == {"timeout"} else "a lost connection or a timeout"


def _is_of_process(failure: Failure | None) -> bool:
    """Whether only the end of a process is known, and no error."""
    return failure is None or failure.kind == "exit code" or failure.message.startswith("ended by signal")


def _claim_of_processes(found: Diagnosis, failure: Failure | None) -> str:
    has, was = ("have", "were") if len(found.ranks) > 1 else ("has", "was")
    how = f"{has} ended" if failure is None else f"{was} {terminated(failure.message)}"
    if failure is not None and failure.kind == "exit code":
        how = f"{has} ended with exit code {failure.message}"
    return f"The process{'es' if has == 'have' else ''} of {stall_ranks(found)} {how}{stall_waiters(found)}"


_MOST_WITH_PLACE = 60
"""Characters of an error up to which its line is part of the summary; it always is in the evidence."""


def _headline(failure: Failure, most: int = 80) -> str:
    words = failure.message.strip().partition("\n")[0].removesuffix(".")
    if failure.kind == "SystemExit" and not failure.frames and words.isdigit():
        return f"exit code {words}"  # of a process that another one observed: os._exit() raises nothing
    words = words if words.startswith(failure.kind) else f"{failure.kind}: {words}".rstrip(": ")
    return words if len(words) <= most else f"{words[:most]}…"


def _quoted(failure: Failure) -> str:
    """The headline as inline code, unless it contains such code itself."""
    error = _headline(failure)
    return error if "`" in error else f"`{error}`"


def _code_of(raised: Sequence[Event]) -> str:
    """The source line that raised these exceptions, if all of them have the same one and it can be quoted."""
    lines = {event.value("source_line") or "" for event in raised}
    code = lines.pop() if len(lines) == 1 else ""
    return code if len(code) <= _LONGEST_CODE and "`" not in code else ""


_LONGEST_CODE = 100
"""Characters of a source line that a fix quotes; the location is named in any case."""


def _fix(found: Diagnosis, ending: RunEnd, code: str = "") -> str:
    if ending.left:
        return (
            f"Make {ranks_in_words(ending.left)} leave the loop after the same batch as "
            f"{ranks_in_words(ending.ranks)}: look for a data loader whose length differs between ranks, or for a "
            "`return` or `break` that depends on the rank."
        )
    if ending.failure is None:
        host = next(iter(found.hosts), "its host")
        return (
            f"Run `dmesg -T | grep -iE 'killed process|oom|nvrm'` on {host}, or search the stderr of "
            f"{ranks_in_words(ending.ranks)} for `terminate called`, to find out what ended the "
            f"{'processes' if len(ending.ranks) > 1 else 'process'}."
        )
    if ending.nature == "outside":
        line = place_of_frame(_line(ending.failure))
        return (
            f"Find out what sent SIGINT to {ranks_in_words(ending.ranks)} alone: the program itself"
            f"{f' at {line}' if line else ''}, a user, or another process on {next(iter(found.hosts), 'its host')}."
        )
    known = _fix_of_message(ending.failure, next(iter(found.hosts), "the host of the rank"))
    if known or ending.nature == "peer":
        return known or "Find the rank that closed the connection: read the end of the log of every other rank."
    line = place_of_frame(_line(ending.failure))
    at = f" at {line}" + (f", in `{code}`" if code and ending.failure.kind != "SystemExit" else "") if line else ""
    fix = _fix_of_error(ending.failure, ranks_in_words(ending.ranks), at)
    return f"{fix.rstrip('.')}; {_consequences(ending)}." if ending.consequences else fix


def _consequences(ending: RunEnd) -> str:
    """``the errors on ranks 0 and 1 are consequences``."""
    others, several = ranks_in_words(ending.consequences), len(ending.consequences) > 1
    return f"the {'errors' if several else 'error'} on {others} {'are consequences' if several else 'is a consequence'}"


def _fix_of_error(failure: Failure, who: str, at: str) -> str:
    on = f" on {who}" if who.startswith("rank") else f" in {who}" if who else ""
    if failure.kind == "SystemExit" and at and who.startswith("rank "):
        return f"Remove the exit of {who}{at}, or make all ranks exit after the same batch."
    if failure.kind == "SystemExit" and at:
        return (
            f"Find the condition under which {who or 'the process'} exit{'' if who.startswith('ranks') else 's'}{at}."
        )
    if failure.kind in ("SystemExit", "exit code"):
        return f"Find out why {who or 'the process'} exited{at}."
    if not on and not at:
        return f"Find the traceback of this {failure.kind} in the complete log, and fix the line that raised it."
    return f"Fix the error{on}{at}."


def _fix_of_message(failure: Failure, host: str = "its host") -> str:
    fix = next((fix for pattern, fix in _FIXES if re.search(pattern, failure.message)), "")
    return fix.replace(" on its host", f" on {host}")


_FIXES = (
    (
        r"^ended by signal 9 ",
        "Run `dmesg -T | grep -iE 'killed process|oom'` on its host, or `sacct -j JOBID -o State,ExitCode` under "
        "SLURM, to find out what killed the process.",
    ),
    (
        r"^ended by signal 7 ",
        "Check with `df -h /dev/shm` on its host whether shared memory is full, and enlarge it.",
    ),
    (
        r"^ended by signal 24 ",
        "Raise the limit of CPU time on its host (`ulimit -t unlimited`, or in `/etc/security/limits.conf`).",
    ),
    (
        r"^ended by signal 4 ",
        FIX_OF_ILLEGAL_INSTRUCTION,
    ),
    (
        r"^ended by signal (?:8|11) ",
        "Set `PYTHONFAULTHANDLER=1` and rerun the job to see which call crashes.",
    ),
    (
        r"OutOfMemoryError|CUDA out of memory",
        "Reduce the batch size or the length of the longest sample, or end other processes that `nvidia-smi` shows on "
        "the GPU.",
    ),
    (
        r"DataLoader worker .*(?:killed by signal: Killed|exited unexpectedly)",
        "Run `dmesg -T | grep -i 'killed process'` on its host, and use fewer DataLoader workers if the OOM killer "
        "killed the worker.",
    ),
    (
        r"DataLoader worker .*(?:Bus error|shared memory)",
        "Enlarge shared memory (`docker run --ipc=host`, or a larger `--shm-size`), or use fewer DataLoader workers.",
    ),
    (
        r"by returning None in distributed training",
        "Return a loss on every rank in every batch (`loss * 0` for a skipped one), or skip the batch on all ranks.",
    ),
    (
        r"Expected to mark a variable ready only once",
        "Call `checkpoint(..., use_reentrant=False)` (Hugging Face: `gradient_checkpointing_kwargs={'use_reentrant': "
        "False}`), or call the model only once in each step.",
    ),
    (
        r"Expected to have finished reduction|unused parameters",
        "Set `find_unused_parameters=True` (Lightning: `DDPStrategy(find_unused_parameters=True)`), or remove the "
        "parameters without gradient from the model.",
    ),
)
