"""Parses YAML and JSON from parser events into a tree with line numbers: tags are ignored, nothing is constructed, and
an alias refers to the same node.

Bounds: :data:`MOST_BYTES` of text, :data:`MOST_NODES`, :data:`DEPTH`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from doctor.core.text import lazy_compile
from doctor.lint.engine.discovery import UnreadableFile
from doctor.lint.engine.rule import SourceLocation
from doctor.lint.launch.partial_text import whole_number

MOST_BYTES = 512 << 10
MOST_NODES = 60_000
DEPTH = 100
MERGES = 64
"""Mappings that are searched for one key through ``<<``."""


@dataclass
class YamlNode:
    """A mapping, a list or a scalar. ``line`` counts from 1; ``plain``: an unquoted scalar; ``block``: one that begins
    on the next line (``|``, ``>``)."""

    line: int
    end_line: int
    text: str | None = None
    plain: bool = False
    block: bool = False
    pairs: list[tuple[YamlNode, YamlNode]] | None = None
    items: list[YamlNode] | None = None
    _index: dict[str, YamlNode] | None = field(default=None, repr=False)

    @property
    def place(self) -> SourceLocation:
        """Where it stands."""
        return SourceLocation(self.line, 0, self.end_line)

    @property
    def is_mapping(self) -> bool:
        """Whether it has keys."""
        return self.pairs is not None

    def get(self, *path: str) -> YamlNode | None:
        """The value under nested keys."""
        node: YamlNode | None = self
        for key in path:
            node = node._child(key) if node is not None else None
        return node

    def _child(self, key: str) -> YamlNode | None:
        """The value of a key, directly or through ``<<``: depth first, each mapping once, at most :data:`MERGES`."""
        waiting: list[YamlNode] = [self]
        seen: set[int] = set()
        while waiting and len(seen) < MERGES:
            node = waiting.pop()
            if id(node) in seen:
                continue
            seen.add(id(node))
            if node._index is None:
                node._index = {one.text: other for one, other in node.pairs or () if one.text is not None}
            index = node._index
            if (found := index.get(key)) is not None:
                return found
            if (base := index.get("<<")) is not None:
                bases = base.items[:MERGES] if base.items is not None else [base]
                waiting.extend(reversed(bases))
        return None

    def key(self, name: str) -> YamlNode | None:
        """The key itself, for its place; ``None`` if it is missing or merged by ``<<``."""
        return next((key for key, _ in self.pairs or () if key.text == name), None)

    def keys(self) -> Iterator[str]:
        """The keys of a mapping."""
        return (key.text for key, _ in self.pairs or () if key.text is not None)

    def children(self) -> list[YamlNode]:
        """The items of a list; empty for anything else."""
        return self.items or []

    def word(self, *path: str) -> str | None:
        """The text of a scalar under keys; ``None`` if it is missing or null."""
        node = self.get(*path)
        if node is None or node.text is None or (node.plain and node.text.lower() in ("", "~", "null", "none")):
            return None
        return node.text

    def number(self, *path: str) -> int | None:
        """An integer under keys, quoted or not."""
        return whole_number(self.word(*path))

    def flag(self, *path: str) -> bool | None:
        """A boolean under keys, as YAML 1.1 writes it."""
        word = (self.word(*path) or "").lower()
        return True if word in ("true", "yes", "on") else False if word in ("false", "no", "off") else None


def read_trees(text: str) -> list[YamlNode]:
    """The documents of a text; raises :class:`UnreadableFile` if it is not YAML, or too large."""
    import yaml

    if len(text) > MOST_BYTES:
        raise UnreadableFile(f"it is larger than {MOST_BYTES >> 10} KiB")
    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        return _Builder().run(yaml.parse(text, Loader=loader))
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" (line {mark.line + 1})" if mark is not None else ""
        raise UnreadableFile(f"it is not valid YAML{where}") from None


class _Builder:
    def __init__(self) -> None:
        self._open: list[tuple[YamlNode, list[YamlNode]]] = []
        self._anchors: dict[str, YamlNode] = {}
        self._documents: list[YamlNode] = []
        self._count = 0

    def run(self, events: Any) -> list[YamlNode]:
        for event in events:
            kind = type(event).__name__
            if kind in ("SequenceStartEvent", "MappingStartEvent"):
                self._begin(event, is_mapping=kind == "MappingStartEvent")
            elif kind in ("SequenceEndEvent", "MappingEndEvent"):
                self._finish(event)
            elif kind == "ScalarEvent":
                self._scalar(event)
            elif kind == "AliasEvent":
                self._put(
                    self._anchors.get(event.anchor) or YamlNode(event.start_mark.line + 1, event.end_mark.line + 1)
                )
        return self._documents

    def _begin(self, event: Any, *, is_mapping: bool) -> None:
        node = YamlNode(event.start_mark.line + 1, event.end_mark.line + 1)
        node.pairs, node.items = ([], None) if is_mapping else (None, [])
        self._new(node, event)
        self._open.append((node, []))
        if len(self._open) > DEPTH:
            raise UnreadableFile(f"it is nested deeper than {DEPTH}")

    def _finish(self, event: Any) -> None:
        node, parts = self._open.pop()
        node.end_line = max(node.line, event.end_mark.line + (event.end_mark.column > 0))
        if node.pairs is None:
            node.items = parts
        else:
            node.pairs = list(zip(parts[::2], parts[1::2]))  # noqa: B905 - a broken text ends in an error before
        self._put(node)

    def _scalar(self, event: Any) -> None:
        node = YamlNode(event.start_mark.line + 1, event.end_mark.line + 1, event.value)
        node.plain = bool(event.implicit[0]) and not event.style
        node.block = event.style in ("|", ">")
        self._new(node, event)
        self._put(node)

    def _new(self, node: YamlNode, event: Any) -> None:
        self._count += 1
        if self._count > MOST_NODES:
            raise UnreadableFile(f"it has more than {MOST_NODES} values")
        if event.anchor:
            self._anchors[event.anchor] = node

    def _put(self, node: YamlNode) -> None:
        if self._open:
            self._open[-1][1].append(node)
        else:
            self._documents.append(node)


_TEMPLATE = lazy_compile(r"\{\{|\{%|<%|\$\{\{")


def is_template(text: str) -> bool:
    """Whether it is a template of Helm, Jinja or the like."""
    return bool(_TEMPLATE.search(text))
