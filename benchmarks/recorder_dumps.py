"""Who is to blame by dumps of flight recorders, beside torch's own analyser, and how fast a large job's are read.

    python benchmarks/recorder_dumps.py real [FOLDER]     # folders of dumps; default ../shared/traces
    python benchmarks/recorder_dumps.py planted [SEEDS]   # simulated jobs with a fault in one rank
    python benchmarks/recorder_dumps.py large [RANKS [ENTRIES]]

``real`` reads every folder of dumps below FOLDER with both analysers. Where a ``fault_injection.log`` lies beside them,
as in the sets of NVIDIA/nvidia-resiliency-ext, precision and recall are told against the ranks that it names.
``planted`` plays jobs with tensor, data and pipeline parallel groups until they stand still, by the model of hosts and
devices in tests/analysis/simulated.py, and says how many of the faults are laid on the right rank alone, from whole
dumps and from those of open calls.
``large`` writes the dumps of a job with tensor and data parallel groups in which one rank did not come and one device
did not finish, and reads them in a fresh process: seconds, and the peak of memory with all its children.
"""

from __future__ import annotations

import os
import pickle
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]

from doctor.analysis.hang.diagnosis_rules import diagnose_stall  # noqa: E402
from doctor.core.facts import RecorderFacts  # noqa: E402
from doctor.core.job import Member, build_job  # noqa: E402
from doctor.postmortem.flight_recorder.dumps import RecorderDump, read_dumps  # noqa: E402
from doctor.postmortem.flight_recorder.unpickling import looks_like_dump  # noqa: E402
from tests.analysis.simulated import KINDS, SimulatedJob  # noqa: E402

TRACES = Path(__file__).resolve().parents[2] / "shared" / "traces"
TORCHS = Path(sys.executable).parent / "torchfrtrace"
TRUTH = "fault_injection.log"
NAMED = re.compile(r"missing ranks: \{([^}]*)\}|[Cc]ulprit rank (\d+)")

TENSOR_PARALLEL = 8
CALLS_A_STEP = 24
START = 86_000
"""Steps, and calls, before the oldest one that the ring still holds."""
NOON = 1_760_000_000_000_000_000


class Verdict(NamedTuple):
    """Whom an analyser names, and what it says else."""

    ranks: frozenset[int]
    words: str


def own(folder: Path) -> Verdict:
    """Of the doctor."""
    dumps, _ = read_dumps(path for path in sorted(folder.iterdir()) if path.is_file())
    found = diagnose_stall(build_job(map(member, dumps)))
    if found is None:
        return Verdict(frozenset(), "nothing")
    return Verdict(frozenset(found.ranks), f"{found.kind}, {found.confidence:.0%}")


def member(dump: RecorderDump) -> Member:
    """A process as its dump shows it."""
    return Member(dump.rank, {RecorderFacts.key: dump.facts}, (None, None, dump.host or "unknown"))


def torchs(folder: Path, prefix: str) -> Verdict:
    """Of torch's analyser. It takes a folder with dumps of one prefix, and nothing else of that prefix."""
    with tempfile.TemporaryDirectory() as name:
        for path in dumps_in(folder):
            if re.fullmatch(re.escape(prefix) + r"\d+", path.name):
                shutil.copy(path, name)
        done = subprocess.run([TORCHS, name, "-p", prefix], capture_output=True, text=True, timeout=300, check=False)
    text = done.stdout + done.stderr
    ranks = {int(rank) for several, one in NAMED.findall(text) for rank in re.findall(r"\d+", several or one)}
    error = next((line for line in reversed(text.splitlines()) if re.match(r"\w+(?:Error|Exception)\b", line)), "")
    return Verdict(frozenset(ranks), error if done.returncode else f"exit {done.returncode}")


def dumps_in(folder: Path) -> list[Path]:
    """The dumps that lie in a folder itself."""
    return [path for path in sorted(folder.iterdir()) if path.is_file() and looks_like_dump(path.read_bytes()[:65536])]


def prefix_of(dumps: list[Path]) -> str:
    """What torch's analyser has to be told: the names of one moment's pickles without the rank."""
    return next((found[1] for path in reversed(dumps) if (found := re.fullmatch(r"(.*?)\d+", path.name))), "")


def truth_of(folder: Path) -> frozenset[int] | None:
    """The ranks that a fault was injected into, where that is told."""
    path = folder / TRUTH
    told = re.search(r"Fault ranks: \[([\d, ]*)\]", path.read_text()) if path.is_file() else None
    return frozenset(map(int, re.findall(r"\d+", told[1]))) if told else None


def compare(root: Path) -> None:
    """Print a line for each folder of dumps, and precision and recall over all of them."""
    scores: dict[str, list[tuple[frozenset[int], frozenset[int]]]] = {"doctor": [], "torch": []}
    for folder in sorted({path.parent for path in root.rglob("*") if path.is_file()}):
        dumps = dumps_in(folder)
        if not dumps:
            continue
        truth = truth_of(folder)
        verdicts = {"doctor": own(folder), "torch": torchs(folder, prefix_of(dumps))}
        print(f"{folder.relative_to(root)}: {len(dumps)} dumps, to blame: {listed(truth) if truth else 'not told'}")
        for name, verdict in verdicts.items():
            print(f"    {name:7s} {listed(verdict.ranks):40s} {verdict.words}")
            if truth is not None:
                scores[name].append((verdict.ranks, truth))
    for name, score in scores.items():
        if score:
            print(f"{name:7s} {rated(score)}")


def rated(score: list[tuple[frozenset[int], frozenset[int]]]) -> str:
    """``precision 1.00, recall 1.00 (4 of 4 named, 4 right)``."""
    right = sum(len(named & truth) for named, truth in score)
    named, true = sum(len(named) for named, _ in score), sum(len(truth) for _, truth in score)
    return f"precision {right / max(named, 1):.2f}, recall {right / true:.2f} ({named} named, {right} right of {true})"


def listed(ranks: frozenset[int]) -> str:
    """Ranks in order."""
    return ", ".join(map(str, sorted(ranks))) or "nobody"


# Simulated jobs.


def planted(seeds: int) -> None:
    """Print a line for each kind of fault, and precision and recall over all of them."""
    score: list[tuple[frozenset[int], frozenset[int]]] = []
    for kind in KINDS:
        own_score = [
            (blamed(job.dumps(only_open=only_open)), frozenset({job.fault.rank}))
            for job in (SimulatedJob(seed, kind) for seed in range(seeds))
            for only_open in (False, True)
        ]
        score += own_score
        print(f"{kind:12s} {rated(own_score)}")
    print(f"{'all':12s} {rated(score)}")


def blamed(dumps: dict[int, RecorderFacts]) -> frozenset[int]:
    """Whom the doctor names by these dumps."""
    found = diagnose_stall(build_job(member(RecorderDump(rank, facts)) for rank, facts in dumps.items()))
    return frozenset(found.ranks) if found is not None and found.kind != "undetermined" else frozenset()


# A large job.


class Fault(NamedTuple):
    """``late`` did not come to a call of its tensor parallel group; the device of ``behind`` stopped some calls before
    all others."""

    late: int
    behind: int


def large(ranks: int, entries: int) -> None:
    """Write, read, and print what it took."""
    fault = Fault(ranks // 2 + 5, ranks // 4 + 2)
    with tempfile.TemporaryDirectory() as name:
        began = time.perf_counter()
        folder = Path(name)
        size = sum(written(folder, rank, ranks, entries, fault) for rank in range(ranks))
        print(f"{ranks} dumps of {entries} entries, {size >> 20} MiB, written in {time.perf_counter() - began:.0f} s")
        began = time.perf_counter()
        print(subprocess.check_output([sys.executable, __file__, "read", name], text=True), end="")
        print(f"    {time.perf_counter() - began:.2f} s with the start of the interpreter")
    print(f"    planted: rank {fault.late} did not come, the device of rank {fault.behind} did not finish")


def read(folder: Path) -> None:
    """Of a fresh process: analyse, and say what it took."""
    began = time.perf_counter()
    verdict = own(folder)
    seconds = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    child = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    cores, spent = len(os.sched_getaffinity(0)), sum(os.times()[:4])
    print(f"    named: {listed(verdict.ranks)} ({verdict.words})")
    print(f"    {seconds:.2f} s on {cores} cores, {spent:.2f} s of processor time with the start of the interpreter")
    print(f"    at most {(peak + 2 * child) >> 10} MiB, two children at their peak")


def written(folder: Path, rank: int, ranks: int, entries: int, fault: Fault) -> int:
    """The dump of a rank; its bytes."""
    calls = list(shown(rank, ranks, entries, fault))
    tensor, data = groups_of(rank, ranks)
    dump = {
        "version": "2.10",
        "pg_config": {name: {"name": name, "desc": words, "ranks": str(told)} for name, words, told in (tensor, data)},
        "comm_lib_version": "2.27.3",
        "pg_status": {str(number): status(calls, number) for number in (1, 2)},
        "entries": calls,
    }
    path = folder / f"comm_lib_trace_rank_{rank}"
    path.write_bytes(pickle.dumps(dump, protocol=2))
    return path.stat().st_size


def groups_of(rank: int, ranks: int) -> tuple[tuple[str, str, list[int]], ...]:
    """Name, description and members of a rank's two groups."""
    first = rank - rank % TENSOR_PARALLEL
    peers = list(range(first, min(first + TENSOR_PARALLEL, ranks)))
    replicas = list(range(rank % TENSOR_PARALLEL, ranks, TENSOR_PARALLEL))
    return (
        (str(100 + first // TENSOR_PARALLEL), "TENSOR_MODEL_PARALLEL_GROUP", peers),
        (str(100 + ranks + rank % TENSOR_PARALLEL), "DATA_PARALLEL_GROUP", replicas),
    )


def status(calls: list[dict[str, object]], number: int) -> dict[str, int]:
    """The counters of a group."""
    own_calls = [call for call in calls if call["pg_id"] == number]
    ended = [call["collective_seq_id"] for call in own_calls if call["state"] == "completed"]
    newest = own_calls[-1]["collective_seq_id"] if own_calls else -1
    return {
        "last_enqueued_collective": int(str(newest)),
        "last_started_collective": -1,
        "last_completed_collective": int(str(ended[-1])) if ended else -1,
    }


def shown(rank: int, ranks: int, entries: int, fault: Fault) -> Iterator[dict[str, object]]:
    """What the ring of a rank holds: calls of its tensor parallel group, and one of its data parallel group a step. All
    that a rank enqueues behind the call that it can't finish stays open."""
    last = START + entries
    late = last - CALLS_A_STEP // 2
    steps_end = last - last % CALLS_A_STEP
    tensor, data = groups_of(rank, ranks)
    peers_of_late = rank // TENSOR_PARALLEL == fault.late // TENSOR_PARALLEL
    stop = {True: late, False: steps_end + CALLS_A_STEP}[peers_of_late]
    if rank == fault.late:
        last = late
    opened = min(stop, late - 6 if rank == fault.behind else stop)
    for number in range(last - entries, last):
        is_data = number % CALLS_A_STEP == CALLS_A_STEP - 1
        name, words, _ = data if is_data else tensor
        sequence = number // CALLS_A_STEP if is_data else number - number // CALLS_A_STEP
        yield call(number, 2 if is_data else 1, (name, words), sequence, is_open=number >= opened)


def call(number: int, group: int, name: tuple[str, str], sequence: int, *, is_open: bool) -> dict[str, object]:
    """An entry as torch writes it."""
    operation = "all_reduce" if group == 2 else ("_all_gather_base", "_reduce_scatter_base")[number % 2]
    return {
        "record_id": number,
        "pg_id": group,
        "process_group": name,
        "collective_seq_id": sequence,
        "p2p_seq_id": 0,
        "op_id": sequence,
        "profiling_name": f"nccl:{operation}",
        "time_created_ns": NOON + number * 1_000_000,
        "input_sizes": [[4096, 1, 5120]],
        "input_dtypes": ["BFloat16"],
        "output_sizes": [[4096, 1, 5120]],
        "output_dtypes": ["BFloat16"],
        "state": "scheduled" if is_open else "completed",
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None if is_open else NOON + number * 1_000_000 + 900_000,
        "retired": not is_open,
        "timeout_ms": 600_000,
        "is_p2p": False,
        "thread_id": "140737351878656",
        "thread_name": "python3",
        "frames": STACKS[number % len(STACKS)],
    }


def stack(kind: int) -> list[dict[str, object]]:
    """A stack of a framework's depth."""
    inner = [("torch/distributed/distributed_c10d.py", 3245 + kind), ("torch/distributed/c10d_logger.py", 83)]
    layers = [(f"megatron/core/layer_{depth}.py", 100 + depth * 7 + kind) for depth in range(26)]
    lines = [(f"/opt/env/lib/python3.12/site-packages/{file}", line) for file, line in (*inner, *layers)]
    return [
        {"name": f"f{line}", "filename": file, "line": line} for file, line in (*lines, ("/home/me/pretrain.py", 57))
    ]


STACKS = [stack(kind) for kind in range(CALLS_A_STEP)]


def main(arguments: list[str]) -> None:
    """``real``, ``planted``, ``large`` or, of a process that ``large`` starts, ``read``."""
    what, *more = arguments or ["real"]
    if what == "real":
        compare(Path(more[0]) if more else TRACES)
    elif what == "planted":
        planted(int(more[0]) if more else 50)
    elif what == "large":
        large(*(int(number) for number in [*more, "1024", "2000"][:2]))
    else:
        read(Path(more[0]))


if __name__ == "__main__":
    main(sys.argv[1:])
