"""Node lists such as ``node[01-04,7]``: expands them within a bound, and writes lists of placeholders."""

from __future__ import annotations

import re
from collections.abc import Iterable

from doctor.core.text import number_runs

NODE_LIMIT = 65_536
"""Maximum number of names in one node list; SLURM's own limit on nodes."""
TOTAL_LIMIT = 4 * NODE_LIMIT
"""Maximum number of names in all node lists of a document: 6 KB of text can list 20 million."""

_LIST = re.compile(r"([^\[\]]*)\[([0-9,-]+)\]([^\[\]]*)")


class NodeLists:
    """Expands the node lists of one document; each distinct list once."""

    def __init__(self) -> None:
        self._names: dict[str, tuple[str, ...]] = {}
        self._left = TOTAL_LIMIT

    def names(self, text: str) -> tuple[str, ...]:
        """The names in a node list; none if it is not a node list or is too long (:meth:`is_too_long`)."""
        if text not in self._names:
            names = expand(text, min(NODE_LIMIT, self._left))
            self._names[text] = names or ()
            self._left -= len(names or ())
        return self._names[text]

    def is_too_long(self, text: str) -> bool:
        """Whether it is a node list with too many names to expand."""
        return not self.names(text) and expand(text, 0) is None


def expand(text: str, limit: int = NODE_LIMIT) -> tuple[str, ...] | None:
    """The names in ``node[01-04,7]``; none if it is not a list, ``None`` if it has more than ``limit`` names."""
    match = _LIST.fullmatch(text)
    spans = [span for part in match[2].split(",") if (span := _span(part))] if match else []
    if match is None or len(spans) != match[2].count(",") + 1:
        return ()
    if sum(last + 1 - first for first, last, _ in spans) > limit:
        return None
    return tuple(
        f"{match[1]}{number:0{width}d}{match[3]}" for first, last, width in spans for number in range(first, last + 1)
    )


def _span(part: str) -> tuple[int, int, int] | None:
    """The first and the last number of ``01-04`` or ``7``, and the digits of the first; ``None`` if it is neither."""
    first, dash, last = part.partition("-")
    last = last if dash else first
    if not (first.isdecimal() and last.isdecimal() and max(len(first), len(last)) <= 18):
        return None
    return (int(first), int(last), len(first)) if int(first) <= int(last) else None


def folded(numbers: Iterable[int]) -> str:
    """Hosts by number as a node list: ``host-[1-4]``, or ``host-3`` for one."""
    words = [str(first) if first == last else f"{first}-{last}" for first, last in number_runs(numbers)]
    return f"host-{words[0]}" if len(words) == 1 and "-" not in words[0] else f"host-[{','.join(words)}]"
