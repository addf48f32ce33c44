"""Dumps of torch's flight recorder that a job left behind: one of each rank, from files of any name.

Files are loaded in processes of their own, which may take so much memory and so much time and no more: a few bytes of a
pickle can ask for more than any machine has, and C code that does not come back can't be stopped in any other way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from doctor.core.errors import UnusableError
from doctor.core.facts import RecorderFacts
from doctor.postmortem.flight_recorder.filenames import hosts_in, parse_name
from doctor.postmortem.flight_recorder.loader_processes import load_files
from doctor.postmortem.flight_recorder.unpickling import looks_like_dump
from doctor.postmortem.rank_in_filename import rank_in_name

__all__ = ["RecorderDump", "looks_like_dump", "read_dump", "read_dumps", "world_size_in"]


class RecorderDump(NamedTuple):
    """What a rank's recorder held. ``host``: where the file's name tells."""

    rank: int
    facts: RecorderFacts
    host: str | None = None


def read_dump(path: Path) -> RecorderDump:
    """One dump.

    Raises:
        UnusableError: it can't be read, it is hostile or no dump, or its name has no rank.
    """
    dumps, failed = read_dumps([path], jobs=1)
    if failed:
        raise UnusableError(failed[0][1])
    return dumps[0]


def read_dumps(paths: Iterable[Path], jobs: int = 2) -> tuple[list[RecorderDump], list[tuple[Path, str]]]:
    """The newest dump of each rank, by rank, and the files that were passed over with the reason of each.

    Args:
        paths: dumps, in any order; several of one rank may be of several moments, or one moment's in two formats.
        jobs: processes that read at the same time.
    """
    files = list(dict.fromkeys(map(Path, paths)))
    failed: list[tuple[Path, str]] = []
    loaded: dict[Path, RecorderFacts] = {}
    for path, outcome in zip(files, load_files(files, jobs), strict=True):
        if isinstance(outcome, str):
            failed.append((path, outcome))
        elif _rank_of(path) is None:
            failed.append((path, "its name does not tell the rank"))
        else:
            loaded[path] = outcome
    chosen, passed_over = _chosen(loaded)
    hosts = hosts_in(loaded)
    dumps = [RecorderDump(rank, loaded[path], hosts.get(path)) for rank, path in sorted(chosen.items())]
    return dumps, sorted([*failed, *passed_over])


def _rank_of(path: Path) -> int | None:
    """By the file's name, else by that of its folder."""
    rank = parse_name(path.name).rank
    return rank if rank is not None else rank_in_name(path)


def _chosen(loaded: Mapping[Path, RecorderFacts]) -> tuple[dict[int, Path], list[tuple[Path, str]]]:
    """The newest dump of each rank, and why others are passed over."""
    by_rank: dict[int, list[Path]] = {}
    for path in loaded:
        if (rank := _rank_of(path)) is not None:
            by_rank.setdefault(rank, []).append(path)
    run = _newest_run(loaded, by_rank.values())
    chosen: dict[int, Path] = {}
    passed_over: list[tuple[Path, str]] = []
    for rank, paths in by_rank.items():
        own = [path for path in paths if run is None or path.parent == run]
        passed_over += [
            (path, f"it is of another run than the dumps in {_last(run)}") for path in paths if path not in own
        ]
        if own:
            chosen[rank] = max(own, key=lambda path: (_moment(loaded[path]), _detail(loaded[path]), path.name))
            passed_over += [(path, _why_not(rank, path, chosen[rank], loaded)) for path in own if path != chosen[rank]]
    return chosen, passed_over


def _newest_run(loaded: Mapping[Path, RecorderFacts], by_rank: Iterable[Sequence[Path]]) -> Path | None:
    """Where folders hold dumps of the same ranks they are of several runs: the folder of the newest; else ``None``."""
    if all(len({path.parent for path in paths}) == 1 for paths in by_rank):
        return None
    return max(loaded, key=lambda path: (_moment(loaded[path]), str(path))).parent


def _last(folder: Path | None) -> str:
    return folder.name if folder is not None else ""


_Moment = tuple[float, int, int]


def _moment(facts: RecorderFacts) -> _Moment:
    """What grows while a rank runs: when it made its newest call, how many it made, how many of these ended."""
    ended = sum(entry.retired or entry.state == "completed" for entry in facts.collectives)
    newest = max((entry.at or 0.0 for entry in facts.collectives), default=0.0)
    return (newest, sum(group.enqueued or 0 for group in facts.groups), ended)


def _detail(facts: RecorderFacts) -> int:
    """How much a dump tells of its calls; JSON has no stacks."""
    return sum(bool(entry.frames) for entry in facts.collectives) - len(facts.hidden)


def _why_not(rank: int, path: Path, chosen: Path, loaded: Mapping[Path, RecorderFacts]) -> str:
    if _moment(loaded[path]) == _moment(loaded[chosen]):
        return f"the same dump of rank {rank} as {chosen.name}"
    return f"an older dump of rank {rank} than {chosen.name}"


def world_size_in(dumps: Iterable[RecorderDump]) -> int | None:
    """How many ranks the job had at least, as far as dumps tell: by the members of groups, and those that left one."""
    highest = (max((dump.rank, *(rank for group in dump.facts.groups for rank in group.members))) for dump in dumps)
    return max((rank + 1 for rank in highest), default=None)
