"""Jobs that hang, and jobs that take their time: whether ``doctor attach`` names the rank and the kind of each.

    python benchmarks/attach.py                  prints the table
    python benchmarks/attach.py sleeps killed    only scenes whose title begins with one of these words
    python benchmarks/attach.py compared         only whether scenes that make progress end with the same numbers
    python benchmarks/attach.py time             only the seconds for 8 ranks on a host and for 64 hosts
    python benchmarks/attach.py --write          keeps the figures in attach_results.json, too
    python benchmarks/attach.py killed --merge   keeps the figures of these scenes beside those of the others
    python benchmarks/attach.py --check          plays nothing: are the kept figures of these scenes, and good?

Every play starts a job over Gloo on this machine without the doctor in it, and reads it once from outside; the plays
under SLURM and Ray share a few jobs. Right: the check, exactly the ranks, the severity and the exit code are as
expected, there is no other alarm, and the processes of the job are there afterwards, none stopped or traced that was
not before. Where the kernel refuses access, the reason and one command that reads all ranks are right. A hang is right
in at least 95 % of its plays; a job that makes progress is no alarm in any. Each of these goes on to train afterwards,
and is repeated without the doctor: it ends with the same numbers.
Ends with 1 if an aim is missed.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "checks")]

from attach_times import TIMED, Timing, timing  # noqa: E402 - the path comes first

from tests.attach.places import SHARED  # noqa: E402 - the path comes first
from tests.attach.plays import HEALTHY, SCENES, AttachScene, play_shared  # noqa: E402
from tests.attach.repeated import differences  # noqa: E402
from tests.lab.needs import CannotPlay  # noqa: E402

FILE = ROOT / "benchmarks" / "attach_results.json"
LEAST_RIGHT = 0.95
LEAST_TIMES, LEAST_HEALTHY = 20, 40
"""Plays of each scene that hangs, and of all others together, from which the figures may be kept."""
JOBS_SHARED = 2
"""Jobs that the plays of a scene share if its launcher takes long to start."""
REPEATED = {
    "default": ((),),
    "with native frames": (("--native",),),
    "with locals": (("--locals",),),
    "one after the other": ((), ("--native",), ("--locals",)),
}
"""How jobs are attached to that are repeated without."""
PACE = 0.01
"""Seconds that each of their steps takes longer while the doctor is attached."""


class Row(msgspec.Struct, frozen=True, omit_defaults=True):
    """One scene, or a way to attach to a training run that is repeated. ``finding``: what is right; ``is_alarm``: it is
    a problem or a refusal; ``commit``: that it was played at, if that is not the one of all results; ``jobs``: that
    were started, if the plays share them."""

    title: str
    finding: str
    is_alarm: bool
    played: int
    right: int
    commit: str = ""
    jobs: int | None = None

    @property
    def is_good(self) -> bool:
        """Whether the aim is reached."""
        return self.right >= (LEAST_RIGHT if self.is_alarm else 1.0) * self.played


class AttachResults(msgspec.Struct, frozen=True, kw_only=True):
    """Of one machine. ``skipped``: why a scene was not played."""

    date: str
    commit: str
    machine: str
    torch: str
    rows: tuple[Row, ...]
    repeated: tuple[Row, ...]
    skipped: tuple[str, ...] = ()
    timings: tuple[Timing, ...] = ()

    @property
    def is_good(self) -> bool:
        """Whether all aims are reached."""
        rows = (*self.rows, *self.repeated)
        return all(row.is_good for row in rows) and all(one.is_good for one in self.timings)


def is_alarm(scene: AttachScene) -> bool:
    """Whether attaching to a scene does not end with 0."""
    return scene.code != 0


def reason_to_skip(scene: AttachScene) -> str:
    """Why a scene cannot be played here; empty if it can."""
    missing = [name for name in scene.needs if find_spec(name.partition(".")[0]) is None]
    return f"{scene.title}: {', '.join(missing)} is not installed" if missing else ""


def attempt(title: str, number: int, call: Callable[[Path], Sequence[list[str]]]) -> int:
    """Call with a folder of its own; print what is wrong, and return how many of the plays were right."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            plays = call(Path(folder))
        except CannotPlay:
            raise
        except (AssertionError, OSError, subprocess.SubprocessError) as error:
            plays = [[f"{type(error).__name__}: {error}"]]
    for line in (line for wrong in plays for line in wrong):
        print(f"{title}, play {number + 1}: {line}", file=sys.stderr, flush=True)
    return sum(not wrong for wrong in plays)


def rows_of(scenes: Sequence[AttachScene], times: int, pool: ThreadPoolExecutor) -> Iterable[Row]:
    """Play every scene, all of them in turn."""
    plays = [(scene, _attaches(scene, times)) for scene in scenes]
    results: dict[str, list[Future[int]]] = {scene.title: [] for scene in scenes}
    for number in range(times):
        for scene, attaches in plays:
            if number < len(attaches):
                call = partial(play_shared, scene, times=attaches[number])
                results[scene.title].append(pool.submit(attempt, scene.title, number, call))
    for scene, attaches in plays:
        right = sum(result.result() for result in results[scene.title])
        jobs = len(attaches) if len(attaches) < times else None
        yield Row(scene.title, scene.finding, is_alarm(scene), times, right, jobs=jobs)


def _attaches(scene: AttachScene, times: int) -> list[int]:
    """How often each job of a scene is attached to."""
    jobs = min(times, JOBS_SHARED) if scene.place in SHARED else times
    return [times // jobs + (number < times % jobs) for number in range(jobs)]


def compare(folder: Path, **options: Any) -> list[list[str]]:
    """Train with the doctor attached and without; return what differs."""
    return [differences(folder, **options)]


def repeated_rows(times: int, pool: ThreadPoolExecutor) -> Iterable[Row]:
    """Train with the doctor attached and without, in every way."""
    for title, attaches in REPEATED.items():
        call = partial(compare, attaches=attaches, pace=PACE)
        jobs = [pool.submit(attempt, title, number, call) for number in range(times)]
        yield Row(f"repeated: {title}", "the same numbers", False, times, sum(job.result() for job in jobs))


def compared_rows(scenes: Sequence[AttachScene], pool: ThreadPoolExecutor) -> Iterable[Row]:
    """Train in every scene that makes progress with the doctor attached and without, once."""
    jobs = [
        pool.submit(attempt, title_compared(scene), 0, partial(compare, attaches=[()], scene=scene)) for scene in scenes
    ]
    for scene, job in zip(scenes, jobs, strict=True):
        yield Row(title_compared(scene), "the same numbers", False, 1, job.result())


def title_compared(scene: AttachScene) -> str:
    """The title of the row that compares a scene with the same one that nobody attaches to."""
    return f"compared: {scene.title}"


def table(results: AttachResults) -> str:
    """Every row as Markdown."""
    lines = ["| scene | right is | plays | right |", "| --- | --- | --- | --- |"]
    for row in (*results.rows, *results.repeated):
        played = f"{row.played} to {row.jobs} jobs" if row.jobs else f"{row.played}"
        lines.append(f"| {row.title} | {row.finding} | {played} | {row.right} |")
    lines += ["", "| time | seconds | aim | cores | load |", "| --- | --- | --- | --- | --- |"]
    for one in results.timings:
        lines.append(f"| {one.title} | {one.seconds:.1f} | {one.limit:.0f} | {one.cores} | {one.load} |")
    return "\n".join(lines)


def summary(results: AttachResults) -> str:
    """The figures that the aims are for."""
    hangs = [row for row in results.rows if row.is_alarm]
    healthy = [row for row in results.rows if not row.is_alarm]
    worst = min((row.right / row.played for row in hangs), default=1.0)
    alarms = sum(row.played - row.right for row in healthy)
    return (
        f"{len(hangs)} scenes that hang or refuse: {sum(row.right for row in hangs)} of "
        f"{sum(row.played for row in hangs)} plays right, the worst scene {worst:.0%}; {alarms} alarms over "
        f"{sum(row.played for row in healthy)} attaches to {len(healthy)} jobs that make progress; "
        f"{sum(row.right for row in results.repeated)} of {sum(row.played for row in results.repeated)} training runs "
        "end with the same numbers"
    )


def complaints_about(kept: AttachResults) -> list[str]:
    """What is wrong about figures that are kept: other scenes, too few plays, a missed aim."""
    scenes = {scene.title: scene.finding for scene in SCENES}
    rows = {row.title: row.finding for row in kept.rows}
    wrong = [
        f"{title}: not as in tests/attach/plays.py"
        for title in scenes.keys() | rows
        if scenes.get(title) != rows.get(title)
    ]
    wrong += [f"{row.title}: {row.right} of {row.played}" for row in (*kept.rows, *kept.repeated) if not row.is_good]
    wrong += sorted({title_compared(scene) for scene in HEALTHY} - {row.title for row in kept.repeated})
    wrong += sorted(TIMED.keys() - {one.title for one in kept.timings})
    wrong += [f"{one.title}: {one.seconds} s" for one in kept.timings if not one.is_good]
    wrong += [f"{row.title}: {row.played} plays" for row in kept.rows if row.is_alarm and row.played < LEAST_TIMES]
    healthy = sum(row.played for row in kept.rows if not row.is_alarm)
    return wrong + ([f"{healthy} attaches to healthy jobs"] if healthy < LEAST_HEALTHY else [])


def kept_results() -> AttachResults:
    """Read the figures that are kept."""
    return msgspec.json.decode(FILE.read_bytes(), type=AttachResults)


def merged(kept: AttachResults, found: AttachResults) -> AttachResults:
    """Replace the rows of the scenes that were played, or add them, in the order of the scenes."""
    rows = {row.title: row for row in kept.rows}
    rows |= {row.title: msgspec.structs.replace(row, commit=found.commit) for row in found.rows}
    titles = (scene.title for scene in SCENES)
    repeated = {row.title: row for row in kept.repeated}
    repeated |= {row.title: msgspec.structs.replace(row, commit=found.commit) for row in found.repeated}
    timings = {one.title: one for one in (*kept.timings, *found.timings)}
    return msgspec.structs.replace(
        kept,
        rows=tuple(rows[title] for title in titles if title in rows),
        repeated=tuple(repeated.values()),
        timings=tuple(timings.values()),
    )


def timings_of(titles: Iterable[str], commit: str) -> Iterable[Timing]:
    """Measure each of ``TIMED`` that is named, alone."""
    for title in titles:
        with tempfile.TemporaryDirectory() as folder:
            yield timing(title, Path(folder), commit)


def machine() -> str:
    """The kind of this machine."""
    names = (
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if "model name" in line
    )
    return f"{next(names, platform.machine())}, {os.cpu_count()} cores"


def main() -> int:
    """Play everything, print the table and what went wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("words", nargs="*", help="Beginnings of the titles of scenes.")
    parser.add_argument("--times", type=int, default=LEAST_TIMES, help="Plays of each scene that hangs.")
    parser.add_argument("--healthy", type=int, default=4, help="Plays of each other scene and training run.")
    parser.add_argument("--jobs", type=int, default=1, help="Plays at a time.")
    parser.add_argument("--write", action="store_true", help=f"Keep the figures in {FILE.name}.")
    parser.add_argument("--merge", action="store_true", help=f"Replace the figures of these scenes in {FILE.name}.")
    parser.add_argument("--check", action="store_true", help="Check the figures that are kept, and play nothing.")
    options = parser.parse_args()
    if options.check:
        wrong = complaints_about(kept_results())
        print(*wrong, sep="\n")
        return int(bool(wrong))
    begun = time.monotonic()
    results = played(options.words, options.times, options.healthy, options.jobs)
    print(table(results), f"{summary(results)}; {time.monotonic() - begun:.0f} s", *results.skipped, sep="\n\n")
    if options.write or options.merge:
        results_to_keep = merged(kept_results(), results) if options.merge else results
        FILE.write_bytes(msgspec.json.format(msgspec.json.encode(results_to_keep), indent=1) + b"\n")
    return int(not results.is_good)


def played(words: Sequence[str], times: int, healthy: int, jobs: int) -> AttachResults:
    """Play the scenes whose title begins with one of ``words``, or all, and the training runs."""
    begins = tuple(words) or ("",)
    scenes = [scene for scene in SCENES if scene.title.startswith(begins)]
    compared = [scene for scene in HEALTHY if title_compared(scene).startswith(begins)]
    skipped = [reason for scene in {*scenes, *compared} if (reason := reason_to_skip(scene))]
    possible = [scene for scene in scenes if not reason_to_skip(scene)]
    hangs, others = [one for one in possible if is_alarm(one)], [one for one in possible if not is_alarm(one)]
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    commit = head.stdout.strip()
    timings = [*timings_of((title for title in TIMED if title.startswith(begins)), commit)]
    with ThreadPoolExecutor(jobs) as pool:
        rows = [*rows_of(hangs, times, pool), *rows_of(others, healthy, pool)]
        repeated = [] if words and "repeated" not in words else [*repeated_rows(healthy, pool)]
        repeated += compared_rows([scene for scene in compared if not reason_to_skip(scene)], pool)
    return AttachResults(
        date=datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        commit=commit,
        machine=machine(),
        torch=version("torch"),
        rows=tuple(rows),
        repeated=tuple(repeated),
        skipped=tuple(skipped),
        timings=tuple(timings),
    )


if __name__ == "__main__":
    sys.exit(main())
