"""Show how two recorded corpora differ, by entry.

    python tests/golden/compare.py OLD NEW [--only WORD] [--limit N] [--replace PATTERN TEXT]... [--listed FILE]

Differences in JSON are grouped: where one value became another in many entries, it is shown once, with their number and
the first of them. ``--replace`` rewrites OLD first (a regular expression), for words that were changed on purpose.
``--listed`` first applies the changes that a file lists, see :func:`apply_listed`. Exit 1 if anything differs, or if a
listed change is not found.
"""

from __future__ import annotations

import argparse
import difflib
import fnmatch
import json
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import markupsafe

sys.path.insert(0, str(Path(__file__).resolve().parent))
from record import as_lines, masked

NAMES = ("case", "id", "name", "path")
"""Fields by which items of a list are told apart, the first that is there."""
WIDTH = 300
ABSENT = "(absent)"


def flat(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Each leaf of a document with its path."""
    if isinstance(value, dict) and value:
        for key, one in value.items():
            yield from flat(one, f"{path}.{key}" if path else key)
    elif isinstance(value, list) and value:
        for number, one in enumerate(value):
            yield from flat(one, f"{path}[{_label(one, number)}]")
    else:
        yield path, json.dumps(value, ensure_ascii=False)


def _label(item: Any, number: int) -> object:
    names = (item[name] for name in NAMES if isinstance(item.get(name), str)) if isinstance(item, dict) else iter(())
    return next(names, number)


def leaves(name: str, text: str) -> dict[tuple[str, str], str] | None:
    """Entry and path -> value, of JSON and JSON lines; ``None`` for other text."""
    if name.endswith(".jsonl"):
        found: dict[tuple[str, str], str] = {}
        for line in text.splitlines():
            entry = json.loads(line)
            found.update({(f"{name} {entry['case']!r}", path): value for path, value in flat(entry)})
        return found
    head, mark, body = text.partition("--- stdout\n")
    try:
        document = json.loads(body) if mark else None
    except ValueError:
        document = None
    if document is None:
        return None
    return {(name, "head"): json.dumps(head), **{(name, path): value for path, value in flat(document)}}


def read(folder: Path) -> dict[str, str]:
    """The entries of a corpus."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): masked(path.read_text(encoding="utf-8")) for path in sorted(files)}


def apply_listed(groups: list[dict[str, Any]], old: dict[str, str], new: dict[str, str]) -> list[str]:
    """Apply listed changes to two corpora in place, and return those that are not found.

    A group says ``why``, optionally ``in`` which entries (a glob), and what becomes what, by kind: ``masks``, regular
    expressions for both corpora; ``patterns``, the same for OLD; ``sentences``, exact texts of OLD; ``cases`` of OLD,
    by name of the file and title, with their title in NEW or ``null``; ``added``, cases or entries that only NEW has.
    """
    unused = []
    for group in groups:
        for kind in (kind for kind in group if kind in KINDS):
            corpora = {"masks": (old, new), "added": (new,)}.get(kind, (old,))
            for was, now in group[kind].items():
                before = [dict(corpus) for corpus in corpora]
                for corpus in corpora:
                    names = fnmatch.filter(corpus, group.get("in", "*"))
                    corpus.update({name: KINDS[kind](name, corpus[name], was, now) for name in names})
                if before == list(corpora):
                    unused.append(f"listed, but not found: {was}")
    for corpus in (old, new):
        for name in fnmatch.filter(corpus, "*.jsonl"):  # lines are sorted, and may have been rewritten
            corpus[name] = as_lines(map(json.loads, corpus[name].splitlines()))
        for name in [name for name, text in corpus.items() if not text]:
            del corpus[name]
    return unused


def _matched(name: str, text: str, was: str, now: str) -> str:
    return re.sub(was, now, text)


def _reworded(name: str, text: str, was: str, now: str) -> str:
    """The text with a sentence replaced, also at the beginning of a headline, spelled as the format has it."""
    spelled = _in_html if name.endswith("html") else _in_json if "json" in name else str
    for case in (str, _capital):
        text = text.replace(spelled(case(was)), spelled(case(now)))
    return text


def _in_html(text: str) -> str:
    return str(markupsafe.escape(text))


def _in_json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _retitled(name: str, text: str, was: str, now: str | None) -> str:
    """The JSON lines with that case under another title, or without it; no text if ``was`` is an entry."""
    file, _, title = was.partition(" ")
    if not title:
        return "" if fnmatch.fnmatch(name, file) else text
    if Path(name).name != f"{file}.jsonl" or _in_json(title) not in text:
        return text
    entries = [json.loads(line) for line in text.splitlines()]
    kept = (one for one in entries if now is not None or one["case"] != title)
    return as_lines({**one, "case": now if one["case"] == title else one["case"]} for one in kept)


KINDS: dict[str, Callable[[str, str, str, Any], str]] = {
    "masks": _matched,
    "patterns": _matched,
    "sentences": _reworded,
    "cases": _retitled,
    "added": _retitled,
}
"""Kinds of listed changes, and what each makes of an entry: called with its name, its text, the old and the new."""


def main() -> int:
    """Print the differences; 1 where there are any."""
    parser = argparse.ArgumentParser(description="Show how two recorded corpora differ.")
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--only", default="", help="entries whose name contains this")
    parser.add_argument("--limit", type=int, default=200, help="differences shown (default: 200)")
    parser.add_argument("--replace", nargs=2, action="append", default=[], metavar=("PATTERN", "TEXT"))
    parser.add_argument("--listed", type=Path, metavar="FILE", help="changes that were made on purpose, as JSON")
    asked = parser.parse_args()
    old, new = read(asked.old), read(asked.new)
    if not old or not new:
        parser.error("a corpus is empty")
    for pattern, text in asked.replace:
        old = {name: re.sub(pattern, text, one) for name, one in old.items()}
    groups = json.loads(asked.listed.read_text(encoding="utf-8")) if asked.listed else []
    unused = apply_listed(groups, old, new)
    names = [name for name in sorted({*old, *new}) if asked.only in name and old.get(name) != new.get(name)]
    blocks = [*unused, *_blocks(old, new, names)]
    print("\n".join(blocks[: asked.limit]))
    if len(blocks) > asked.limit:
        print(f"... and {len(blocks) - asked.limit} more differences (--limit)")
    print(f"{len(names)} of {len({*old, *new})} entries differ")
    return 1 if names or unused else 0


def _blocks(old: dict[str, str], new: dict[str, str], names: list[str]) -> Iterator[str]:
    """Whole entries that are on one side only, then changed values by frequency, then changed texts."""
    changes: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    texts = []
    for name in names:
        if name not in old or name not in new:
            yield f"{name}: only in {'NEW' if name in new else 'OLD'}"
            continue
        before, after = leaves(name, old[name]), leaves(name, new[name])
        if before is None or after is None:
            texts.append(name)
            continue
        there, here = ({entry for entry, _ in found} for found in (before, after))
        for entry in sorted(there ^ here):
            yield f"{entry}: only in {'NEW' if entry in here else 'OLD'}"
        places = [place for place in {**before, **after} if place[0] in there & here]
        changed = [place for place in places if before.get(place) != after.get(place)]
        for entry, path in changed:
            was, now = before.get((entry, path), ABSENT), after.get((entry, path), ABSENT)
            changes[re.sub(r"\[[^\]]*\]", "[]", path), was, now].append(f"{entry} at {path}")
        if not changed and there == here:  # only the order or the layout
            texts.append(name)
    for (path, was, now), where in sorted(changes.items(), key=lambda change: -len(change[1])):
        yield f"{len(where)} x {path}: {where[0]}\n  - {was[:WIDTH]}\n  + {now[:WIDTH]}"
    for name in texts:
        lines = difflib.unified_diff(old[name].splitlines(), new[name].splitlines(), name, name, "OLD", "NEW", 1, "")
        yield "\n".join(line[:WIDTH] for line in lines)


if __name__ == "__main__":
    sys.exit(main())
