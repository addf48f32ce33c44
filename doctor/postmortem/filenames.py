"""Ranks and hosts in the names of files, pods and containers.

Dumps of the flight recorder and memory snapshots name neither. torch appends the rank to a prefix that users choose
(``TORCH_FR_DUMP_TEMP_FILE``), and people rename the files that they collect.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

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


def name_of(path: Path) -> str:
    """Return the name that users know in valid Unicode: file names may be any bytes, and streams have another name."""
    shown: str | None = getattr(path, "shown", None)
    return os.fsencode(path).decode("utf-8", "replace") if shown is None else shown


def shown_path(path: Path) -> Path:
    """Return the path that users know: differs for copies of streams and of members of archives."""
    shown: str | None = getattr(path, "shown", None)
    return path if shown is None else Path(shown)


class DumpName(NamedTuple):
    """``rank``: ``None`` if there is none. ``rest``: the other words, except generic ones."""

    rank: int | None
    rest: str


def rank_in_name(path: Path) -> int | None:
    """Return the rank in the name of a file (``snapshot_rank3.pickle``) or its folder."""
    path = shown_path(path)
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
    names = {path: parse_name(shown_path(path).name) for path in paths}
    folders = {path: shown_path(path).parent for path in names}
    ranks: dict[tuple[Path, int], set[str]] = {}
    words: dict[Path, set[str]] = {}
    for path, name in names.items():
        if name.rank is not None:
            ranks.setdefault((folders[path], name.rank), set()).add(name.rest)
            words.setdefault(folders[path], set()).add(name.rest)
    moments = {folder for (folder, _), found in ranks.items() if len(found) > 1}
    return {
        path: name.rest
        for path, name in names.items()
        if name.rest
        and folders[path] not in moments
        and (_HOST_LIKE.match(name.rest) or len(words.get(folders[path], ())) > 1)
    }


_NameT = TypeVar("_NameT", bound=str)
STREAM = re.compile(r"(?:^|(?<=[-_./]))(?:stdout|stderr|std|out|err|output|error|log|txt)(?=$|[-_./])", re.IGNORECASE)
"""Words of a name that tell the stream of a process."""
_UUID = re.compile(r"[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}", re.IGNORECASE)
_POD_SUFFIX = re.compile(r"(?<=\d)-[bcdfghjklmnpqrstvwxz2456789]{5}(?=$|[^a-z0-9])")
"""What Kubernetes appends to the pods of an indexed Job: ``train-3-x7k2p`` (k8s.io/apimachinery/pkg/util/rand)."""
_RESTARTS = re.compile(r"/\d{1,6}\.log(?=$|\.)")
"""The files of a container under /var/log/pods, numbered by restarts (kubelet's ``BuildContainerLogsDirectory``)."""
_OF_HOSTS = re.compile(
    r"(?:^|[^a-z])(?:nodes?|hosts?|machines?|servers?|compute|nid|ip|gpus?|runs?|exp|experiment|trial|seed|version|job|sweep"
    r"|fold|try|epoch|step|attempt|part)[-_.]?$",
    re.IGNORECASE,
)
"""What a number counts that is not a rank: hosts with several ranks, or runs."""
_DIGITS = re.compile(r"(\d+)")


def without_ids(name: str) -> str:
    """Return a path or the name of a pod without the random ids that differ between processes."""
    if _UUID.search(name):
        name = _RESTARTS.sub("/", _UUID.sub("", name))
    return _POD_SUFFIX.sub("", name)


def name_series(names: Iterable[_NameT]) -> dict[_NameT, int]:
    """Return the number of each name in the only series that counts from 0; empty without one.

    At most half of the numbers may be missing: a rank that logged nothing has no file.

    Examples: ``node0/0.out`` ... ``node1/3.out``; pods ``train-worker-0`` ... Names may be those of several streams
    of a process. Kubeflow numbers workers from 0 beside ``master-0``, whose rank is 0 (Training Operator, PyTorchJob).
    """
    shapes: dict[str, dict[_NameT, list[str]]] = {}
    for name in names:
        parts = _DIGITS.split(STREAM.sub("", without_ids(name)))
        shapes.setdefault("#".join(parts[::2]), {})[name] = parts
    series = [found for shape, one in shapes.items() if (found := _numbers_in(one, shape, shapes))]
    return series[0] if len(series) == 1 else {}


def _numbers_in(
    names: dict[_NameT, list[str]], shape: str, shapes: Mapping[str, Mapping[_NameT, list[str]]]
) -> dict[_NameT, int]:
    masters = shapes.get(shape.replace("worker", "master"), {}) if "worker" in shape else {}
    first = 1 if len(masters) == 1 else 0
    distinct = {tuple(parts) for parts in names.values()}
    for place in range(1, len(next(iter(distinct))), 2):
        numbers = {int(parts[place]) for parts in distinct if len(parts[place]) < 7}
        is_dense = len(numbers) == len(distinct) and max(numbers, default=0) < 2 * len(numbers)
        is_series = is_dense and (first or 0 in numbers) and len(distinct) + first > 1
        if is_series and not any(_OF_HOSTS.search(parts[place - 1]) for parts in distinct):
            return {**dict.fromkeys(masters, 0), **{name: int(parts[place]) + first for name, parts in names.items()}}
    return {}
