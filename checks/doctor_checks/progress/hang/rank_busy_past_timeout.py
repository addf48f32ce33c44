"""RUN010: other ranks wait for a rank that is busy with local work."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.analysis.call_sites import place_of_frame
from doctor.analysis.hang.diagnosis import Diagnosis
from doctor.analysis.hang.diagnosis_rules import diagnose_stall
from doctor.analysis.hang.rank_state import LEAST_STILL
from doctor.api import (
    EventGroup,
    Finding,
    Job,
    Scope,
    Severity,
    Source,
    Verdict,
    check,
    finding_from_logs,
    ranks_in_words,
)
from doctor.facts import ChildProcess, ProgressFacts
from doctor.testing import Fails, JobBuilder, Passes, logged, package_frame, running, stalled, user_frame
from doctor.testing.stalled_run import with_failure, with_late_ranks
from doctor_checks.progress.hang._busy_ranks import busy_while_others_waited
from doctor_checks.progress.hang._stall_text import stall_evidence, stall_ranks, stall_waiters

_FETCH = package_frame("torch/utils/data/_utils/fetch.py", 54, "fetch")
_ITEM = user_frame(17, "__getitem__", file="/home/me/data.py")
_TIMED_OUT = "[pair.cc:1] Timed out waiting 1800000ms for recv operation to complete"


def _busy(rank: int, *stack: object, world: int = 4, **progress: object) -> JobBuilder:
    return with_late_ranks(stalled(1, world), (rank,), *stack, **progress)  # type: ignore[arg-type]


def _awaits(worker: ChildProcess) -> JobBuilder:
    """Rank 1 waits for a batch of a data worker."""
    wait = package_frame("torch/utils/data/dataloader.py", 1275, "_try_get_data")
    return _busy(1, wait, user_frame(30), point="data", children=(worker,))


_TRAINS = "Epoch 3:  47%|####       | 3169/6811 [30:01<38:27,  1.58it/s, loss=0.3]"
_TOKENISES = (
    "Running tokenizer on dataset:  47%|####       | 3169000/6811963 [30:01<38:27, 1578.58 examples/s]",
    "[E ProcessGroupNCCL.cpp:485] [Rank 6] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4, "
    "OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=1800000) ran for 1802246 milliseconds before timing out.",
)


def _from_logs(job: Job) -> Iterator[Finding]:
    found = diagnose_stall(job)
    busy = busy_while_others_waited(job.evidence) if job.evidence else None
    if busy is None or (found is not None and found.kind in ("busy", "died", "differ") and found.confidence > 0.8):
        return
    who = f"rank {busy.rank} was" if busy.rank is not None else "a rank was"
    took = f" for {busy.seconds / 60:.0f} min" if busy.seconds else ""
    what = _ACTIVITIES.get(busy.kind) or f'busy with "{busy.text}"'
    yield finding_from_logs(
        EventGroup(busy.events[0].kind, busy.events),
        f"{who} {what}{took}, longer than the timeout of the other ranks",
        ranks=(busy.rank,) if busy.rank is not None else (),
        evidence={
            "busy_with": busy.kind,
            "seconds": busy.seconds,
            "timeout_seconds": busy.limit,
        },
        fix=_fix(busy.kind, who.removesuffix(" was").replace("a rank", "that rank")),
        confidence=busy.confidence,
        explains=("RUN001", "RUN003", "RUN004", "RUN005", "RUN012", "RUN016", "ENV005", "ENV015", "NCCL013"),
        symptoms=False,
    )


@check(
    id="RUN010",
    severity=Severity.ERROR,
    scope=Scope.JOB,
    when="RM",
    needs=(ProgressFacts,),
    needs_peers=True,
    from_logs=_from_logs,
    impacts={
        r"debugger": "The other ranks time out in their collective while the debugger waits for input.",
        r"^Ranks? .* (?:is|are|waits) .* waited": (
            "The other ranks wait until this work ends; if their collective times out first, the job ends with an "
            "error that looks like a network fault."
        ),
    },
    cases=lambda: (
        Passes("a run that moves", running(hosts=2, per_host=2)),
        Passes("all wait for data, none for another rank", with_late_ranks(stalled(), (0, 1), _FETCH, point="data")),
        Passes(
            "rank 0 saves, for no longer than it may",
            _busy(0, package_frame("torch/serialization.py", 980, "_save"), state="running", point="checkpoint"),
            silent=False,
        ),
        Passes("a rank that sleeps in its step is RUN001's", _busy(2, user_frame(58), point="step")),
        Passes("a log of a time-out beside the bar of the training", logged(_TRAINS, _TOKENISES[1])),
        Fails("log of rank 0 tokenizing for longer than the others wait", logged(*_TOKENISES)),
        Fails(
            "log of a traceback in which the others wait for the first",
            logged(
                _TOKENISES[0],
                "Traceback (most recent call last):",
                '  File "/env/site-packages/transformers/training_args.py", line 1891, in main_process_first',
                "    torch.distributed.barrier()",
                "RuntimeError: Socket Timeout",
            ),
            ranks=(0,),
        ),
        Fails("a sample that takes for ever", _busy(1, _ITEM, _FETCH, point="data"), ranks=(1,)),
        Fails("a data worker that was stopped", _awaits(ChildProcess(7, "T", "pt_data_worker", still=8.0)), ranks=(1,)),
        Fails(
            "a data worker that waits for a server",
            _awaits(ChildProcess(7, "S", "pt_data_worker", stack=(_ITEM,), waits="data from 10.0.0.9:80", still=8.0)),
            ranks=(1,),
        ),
        Fails(
            "rank 0 saves to a file server that is slow",
            _busy(0, package_frame("torch/serialization.py", 980, "_save"), user_frame(90, "save"), point="checkpoint"),
            ranks=(0,),
        ),
        Fails(
            "rank 0 tokenises while the others wait",
            _busy(
                0,
                package_frame("tokenizers/implementations/base.py", 40, "encode_batch"),
                user_frame(12, "prepare"),
                stage="setup",
                point="setup",
            ),
            ranks=(0,),
        ),
        Fails(
            "a breakpoint on one rank",
            _busy(1, package_frame("pdb/pdb.py", 300, "interaction"), user_frame(44), world=2, point="step"),
            ranks=(1,),
        ),
        Fails(
            "the collective of the others ran out of time",
            with_failure(_busy(1, _ITEM, _FETCH, world=2, point="data"), (0,), "RuntimeError", _TIMED_OUT),
            ranks=(1,),
        ),
    ),
)
def rank_busy_past_timeout(job: Job) -> Iterator[Verdict]:
    """Ask whether ranks wait for one that is busy with data, a checkpoint or other local work.

    Why it hurts: the collective of the other ranks times out, which ends the job and looks like a network fault.
    Fix: Do that work before the run or on all ranks, shorten it, or give the process group a longer timeout.
    """
    found = diagnose_stall(job)
    if found is not None and found.work is not None and not found.driver:
        activity = "waiting for the next batch" if found.work.is_next_batch else _ACTIVITIES[found.work.kind]
        line = found.work.frame
        place = f" at {line.file.rpartition('/')[2]}:{line.line}" if line else ""
        what = f"{'are' if len(found.ranks) > 1 else 'is'} {activity}{place}{_worker_text(found)}"
        if (stopped := _stopped_worker(found)) is not None and len(found.ranks) == 1:
            what = f"waits for a stopped data worker (PID {stopped.pid})"
        yield Finding(
            f"{stall_ranks(found)} {what}{stall_waiters(found)}",
            ranks=found.ranks,
            evidence={**stall_evidence(found), "busy_with": found.work.kind, **_workers(found)},
            effect="The collective of the other ranks has timed out, which ends the job." if _is_late(found) else "",
            fix=_fix_of_worker(found) or _fix(found.work.kind, ranks_in_words(found.ranks[:1]), place, _pid(found)),
            severity=Severity.INFO if found.within_limit else Severity.ERROR,
            confidence=found.confidence,
            explains=() if found.within_limit else ("RUN001", "RUN003", "RUN005", "RUN012"),
            source=Source(line.file, line.line) if line else None,
        )


def _fix(kind: str, who: str, place: str = "", pid: int | str = "PID") -> str:
    return _FIXES.get(kind, _FIXES["working"]).format(who=who, place=place, pid=pid)


def _pid(found: Diagnosis) -> int | str:
    progress = found.first.progress if found.first else None
    return progress.pid if progress is not None and progress.pid else "PID"


def _is_late(found: Diagnosis) -> bool:
    """Whether the ranks that waited have failed."""
    return bool(found.waiting) and all(found.states.ranks[rank].state == "failed" for rank in found.waiting)


def _workers(found: Diagnosis) -> dict[str, object]:
    """Its child processes, mostly data workers, with their kernel state: T stopped, D blocked, Z dead."""
    progress = found.first.progress if found.first else None
    children = progress.children if progress else ()
    return {"children": [_child_in_words(child) for child in children[:16]]} if children else {}


def _child_in_words(child: ChildProcess) -> str:
    own = next((frame for frame in child.stack if frame.user), None)
    place = f" at {place_of_frame(own or child.stack[0])}" if child.stack else ""
    waits = f", waits for {child.waits}" if child.waits else ""
    still = f", has not run for {child.still:.0f} s" if (child.still or 0.0) >= 1.0 else ""
    return f"{child.pid} {child.name} {child.state}{place}{waits}{still}"


def _locked_worker(found: Diagnosis) -> ChildProcess | None:
    """A data worker in code of the user that waits for a lock of its own process."""
    children = found.first.progress.children if found.first and found.first.progress else ()
    return next((one for one in children if "lock" in one.waits and any(frame.user for frame in one.stack)), None)


def _stopped_worker(found: Diagnosis) -> ChildProcess | None:
    """A data worker that a signal or a debugger has stopped."""
    children = found.first.progress.children if found.first and found.first.progress else ()
    stopped = (one for one in children if one.state in ("T", "t"))
    return next(stopped, None) if found.work is not None and found.work.kind == "loading" else None


def _standing_worker(found: Diagnosis) -> ChildProcess | None:
    """A data worker in code of the user that waits, and of which no thread has run for some seconds."""
    children = found.first.progress.children if found.first and found.first.progress else ()
    standing = (one for one in children if one.waits and (one.still or 0.0) >= LEAST_STILL)
    return next((one for one in standing if any(frame.user for frame in one.stack)), None)


def _worker_text(found: Diagnosis) -> str:
    locked = _locked_worker(found)
    if locked is None:
        return ""
    own = next(frame for frame in locked.stack if frame.user)
    return f"; its data worker (PID {locked.pid}) is at {place_of_frame(own)} and waits for {locked.waits}"


def _fix_of_worker(found: Diagnosis) -> str:
    """What to do about a data worker, where that is known; else empty."""
    if (stopped := _stopped_worker(found)) is not None:
        host = next(iter(found.hosts), f"the host of {ranks_in_words(found.ranks[:1])}")
        return f"Run `kill -CONT {stopped.pid}` on {host} to resume the data worker."
    if _locked_worker(found):
        return _FORKED_LOCK
    if (standing := _standing_worker(found)) is None:
        return ""
    own = next(frame for frame in standing.stack if frame.user)
    return (
        f"Data worker PID {standing.pid} waits for {standing.waits} at {place_of_frame(own)}: find out why it does not "
        "come, and set a timeout there."
    )


_ACTIVITIES = {
    "debugger": "stopped in the debugger",
    "saving": "saving a checkpoint",
    "reading": "reading a checkpoint",
    "evaluating": "evaluating",
    "compiling": "compiling",
    "tokenizing": "tokenizing",
    "downloading": "waiting for a download",
    "loading": "loading data",
    "logging": "writing to a logger",
    "lock": "waiting for a file lock",
    "child": "waiting for a child process",
    "setup": "still setting up",
}
_TIMEOUT = (
    "raise the timeout of the process group (`init_process_group(timeout=...)`, in Lightning "
    "`DDPStrategy(timeout=...)`)"
)
_FORKED_LOCK = (
    'Start the workers with `DataLoader(..., multiprocessing_context="spawn")`, because a lock that is held during the '
    "fork is never released in the worker."
)
_FIXES = {
    "evaluating": f"Divide the evaluation data among all ranks, or {_TIMEOUT}.",
    "loading": "Check the sample and the storage that {who} reads{place}, or preprocess slow samples before the run.",
    "saving": f"Save the checkpoint to a local disk, or {_TIMEOUT}.",
    "reading": f"Read the checkpoint from a local disk, or {_TIMEOUT}.",
    "tokenizing": f"Tokenize once before the run (in Lightning, in `prepare_data()`), or {_TIMEOUT}.",
    "downloading": f"Download before the run into a cache that all hosts share (`HF_HOME`), or {_TIMEOUT}.",
    "compiling": f"Keep compiled code in a cache that survives the run (`TORCHINDUCTOR_CACHE_DIR`), or {_TIMEOUT}.",
    "debugger": "Continue in the debugger on {who} with `c`, and remove the breakpoint.",
    "logging": "Log less often on {who}, or without waiting (for example with `WANDB_MODE=offline`).",
    "lock": "Find the process that holds the lock file, and delete the file if that process is dead.",
    "child": "Run `ps -o pid,ppid,stat,wchan:32,cmd --ppid {pid}` on the host of {who} to see what the child process "
    "does.",
    "setup": f"Do the work of {{who}} before the run, or {_TIMEOUT}.",
    "working": f"Do the work of {{who}} before the run, or {_TIMEOUT}.",
}
