"""What the names of flight-recorder dumps tell: the rank, and on some clusters the host.

The file itself tells neither. torch appends the rank to a prefix that users set as they like
(``TORCH_FR_DUMP_TEMP_FILE``), and people rename what they collect.
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
"""Words of a name that name no host."""
_WORDS = re.compile(r"[_\s]+")
_HOST_LIKE = re.compile(r"[A-Za-z](?=[A-Za-z.-]*\d)[A-Za-z0-9.-]*$|[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)+$")
"""A name with a number or a domain in it."""


class DumpName(NamedTuple):
    """``rank``: ``None`` where the name has no number that may be one. ``rest``: the other words, without those that
    every dump has."""

    rank: int | None
    rest: str


def parse_name(file: str) -> DumpName:
    """The name of a dump, without its folder: ``nccl_trace_rank_3``, ``rank-3.json``, ``node7_rank3.pkl``,
    ``_dump_12``, ``hostA_3``."""
    stem = _ENDINGS.sub("", _LOCAL.sub("", file))
    found = next(reversed(list(_RANK.finditer(stem))), None) or _LAST.search(stem)
    if found is None:
        return DumpName(None, "")
    left = f"{stem[: found.start()]}_{stem[found.end() :]}"
    words = [word.strip("-.") for word in _WORDS.split(left)]
    return DumpName(int(found[1]), "_".join(word for word in words if word and not _is_generic(word)))


def _is_generic(word: str) -> bool:
    return all(_GENERIC.match(part) for part in re.split(r"[-.]", word))


def hosts_in(paths: Iterable[Path]) -> Mapping[Path, str]:
    """The host of each dump, where names tell: where they hold a word that looks like one, or where the words of a
    folder's dumps differ and no rank has two of them."""
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
