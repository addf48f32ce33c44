"""Flight-recorder dumps of a job: one per rank, from files of any name.

Files are loaded in child processes with limits of memory and time: a few bytes of a pickle can allocate more memory
than any machine has, and C code that does not return cannot be interrupted otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from doctor.core.facts import RecorderFacts
from doctor.postmortem.filenames import hosts_in, parse_name, rank_in_name, shown_path
from doctor.postmortem.flight_recorder.loader_processes import load_files


class RecorderDump(NamedTuple):
    """The recorder of a rank. ``host``: ``None`` unless the file's name contains it."""

    rank: int
    facts: RecorderFacts
    host: str | None = None


def read_dumps(paths: Iterable[Path], jobs: int = 2) -> tuple[list[RecorderDump], list[tuple[Path, str]]]:
    """Read the newest dump of each rank; return the dumps by rank, and why files were skipped.

    Args:
        paths: dumps, in any order. One rank may have several, of different times or in two formats.
        jobs: number of processes that read in parallel.
    """
    files = list(dict.fromkeys(map(Path, paths)))
    failed: list[tuple[Path, str]] = []
    loaded: dict[Path, RecorderFacts] = {}
    by_rank: dict[int, list[Path]] = {}
    for path, outcome in zip(files, load_files(files, jobs), strict=True):
        rank = parse_name(shown_path(path).name).rank
        rank = rank_in_name(path) if rank is None else rank
        if isinstance(outcome, str):
            failed.append((path, outcome))
        elif rank is None:
            failed.append((path, "its name does not contain the rank"))
        else:
            loaded[path] = outcome
            by_rank.setdefault(rank, []).append(path)
    chosen, skipped = _chosen(loaded, by_rank)
    hosts = hosts_in(loaded)
    dumps = [RecorderDump(rank, loaded[path], hosts.get(path)) for rank, path in sorted(chosen.items())]
    return dumps, sorted([*failed, *skipped])


def _chosen(
    loaded: Mapping[Path, RecorderFacts], by_rank: Mapping[int, Sequence[Path]]
) -> tuple[dict[int, Path], list[tuple[Path, str]]]:
    """Return the newest dump of each rank, and the reasons to skip the others."""
    progress = {path: _progress(facts) for path, facts in loaded.items()}
    # JSON has no stacks.
    detail = {
        path: sum(bool(entry.frames) for entry in facts.collectives) - len(facts.hidden)
        for path, facts in loaded.items()
    }
    run = None
    if any(len({shown_path(path).parent for path in paths}) > 1 for paths in by_rank.values()):
        run = shown_path(max(loaded, key=lambda path: (progress[path], str(path)))).parent
    chosen: dict[int, Path] = {}
    skipped: list[tuple[Path, str]] = []
    for rank, paths in by_rank.items():
        own = [path for path in paths if run is None or shown_path(path).parent == run]
        if run is not None:
            skipped += [
                (path, f"it is from a different run than the dumps in {run.name}") for path in paths if path not in own
            ]
        if not own:
            continue
        best = chosen[rank] = max(own, key=lambda path: (progress[path], detail[path], shown_path(path).name))
        for path in own:
            if path != best and progress[path] == progress[best]:
                skipped.append((path, f"the same dump of rank {rank} as {shown_path(best).name}"))
            elif path != best:
                skipped.append((path, f"an older dump of rank {rank} than {shown_path(best).name}"))
    return chosen, skipped


def _progress(facts: RecorderFacts) -> tuple[float, int, int]:
    """Return what increases during a run: time of the newest call, calls, and completed calls."""
    ended = sum(entry.retired or entry.state == "completed" for entry in facts.collectives)
    newest = max((entry.at or 0.0 for entry in facts.collectives), default=0.0)
    return (newest, sum(group.enqueued or 0 for group in facts.groups), ended)


def world_size_in(dumps: Iterable[RecorderDump]) -> int | None:
    """Return a lower bound of the world size, from members of groups and the dumps' own ranks."""
    highest = (max((dump.rank, *(rank for group in dump.facts.groups for rank in group.members))) for dump in dumps)
    return max((rank + 1 for rank in highest), default=None)
