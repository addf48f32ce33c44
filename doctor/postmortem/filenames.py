"""Ranks and hosts in the file names of flight-recorder dumps and memory snapshots.

The files themselves name neither. torch appends the rank to a prefix that users choose (``TORCH_FR_DUMP_TEMP_FILE``),
and people rename the files that they collect.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

_ENDINGS = re.compile(r"(?:\.(?:json|pkl|pickle|bin|dump|trace|pt|txt|dat))+$", re.IGNORECASE)
_RANK = re.compile(r"(?<![a-z])(?<!local[_.-])(?:global[_.-]?)?rank[_.-]?(\d{1,6})(?!\d)", re.IGNORECASE)
_LOCAL = re.compile(r"local[_.-]?rank[_.-]?\d+", re.IGNORECASE)
_LAST = re.compile(r"(?<!\d)(\d{1,6})$")
_GENERIC = re.compile(
    r"(?:ncclx?|gloo|[xhrm]ccl|comm|lib|library|traces?|dumps?|fr|flight|recorder|ranks?|global|local|torch|tmp|debug|info"
    r"|file|json|pickle|before|after|hang|hung|end|start|begin|first|last|new|old|timeout|stuck|stall|out|run|test|final"
    r"|\d+)?$",
    re.IGNORECASE,
)
"""Words of a file name that are not a host name."""
_WORDS = re.compile(r"[_\s]+")
_HOST_LIKE = re.compile(r"[A-Za-z](?=[A-Za-z.-]*\d)[A-Za-z0-9.-]*$|[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)+$")
"""A word with a number or a domain in it."""
_NAMED_AFTER = re.compile(r"(?:^|[^A-Za-z])rank[-_. ]?(\d{1,6})(?=\D|$)", re.IGNORECASE)


class DumpName(NamedTuple):
    """``rank``: ``None`` if there is none. ``rest``: the other words, except generic ones."""

    rank: int | None
    rest: str


def rank_in_name(path: Path) -> int | None:
    """Return the rank in the name of a file (``snapshot_rank3.pickle``) or its folder."""
    for name in (path.name, path.parent.name):
        if found := _NAMED_AFTER.search(name):
            return int(found[1])
    return None


def parse_name(file: str) -> DumpName:
    """Parse the name of a dump, without its folder.

    Examples: ``nccl_trace_rank_3``, ``rank-3.json``, ``node7_rank3.pkl``, ``_dump_12``, ``hostA_3``.
    """
    stem = _ENDINGS.sub("", _LOCAL.sub("", file))
    found = next(reversed(list(_RANK.finditer(stem))), None) or _LAST.search(stem)
    if found is None:
        return DumpName(None, "")
    rest = f"{stem[: found.start()]}_{stem[found.end() :]}"
    words = [word.strip("-.") for word in _WORDS.split(rest)]
    telling = [word for word in words if not all(_GENERIC.match(part) for part in re.split(r"[-.]", word))]
    return DumpName(int(found[1]), "_".join(telling))


def hosts_in(paths: Iterable[Path]) -> Mapping[Path, str]:
    """Return the host of each dump whose name contains one.

    A word of the name is a host if it looks like one, or if it differs between the dumps of a folder and no rank has
    two dumps there.
    """
    names = {path: parse_name(path.name) for path in paths}
    ranks: dict[tuple[Path, int], set[str]] = {}
    words: dict[Path, set[str]] = {}
    for path, name in names.items():
        if name.rank is not None:
            ranks.setdefault((path.parent, name.rank), set()).add(name.rest)
            words.setdefault(path.parent, set()).add(name.rest)
    moments = {folder for (folder, _), found in ranks.items() if len(found) > 1}
    return {
        path: name.rest
        for path, name in names.items()
        if name.rest
        and path.parent not in moments
        and (_HOST_LIKE.match(name.rest) or len(words.get(path.parent, ())) > 1)
    }
