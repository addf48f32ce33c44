"""Reads the messages of other software from its source code, and writes what the package knows of them.

    python benchmarks/software_messages.py                              the commands that fetch the source code
    python benchmarks/software_messages.py --sources DIR [NAME…]        reads it and writes doctor/knowledge/messages/
    python benchmarks/software_messages.py --unclassified NAME          messages without a class

``benchmarks/message_sources/components.py`` lists the components. The class of a message is that of the first rule of
``benchmarks/message_sources/rules/<component>.json`` that matches it: a list of regular expressions and classes. A
class is the id of a check, or ``cause``, ``consequence`` or ``harmless`` (:mod:`doctor.knowledge.software_messages`).
``benchmarks/message_sources/classes.md`` says in words where the border between two classes is.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from message_sources.components import COMPONENTS, EVERY_YEAR, SourceComponent

from doctor.knowledge.software_messages import LEAST_LETTERS, UNCLASSIFIED

ROOT = Path(__file__).resolve().parents[1]
MESSAGES = ROOT / "doctor" / "knowledge" / "messages"
RULES = Path(__file__).parent / "message_sources" / "rules"


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sources", type=Path)
    parser.add_argument("--unclassified", action="store_true")
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    chosen = [one for one in COMPONENTS if not options.names or one.file in options.names]
    if options.unclassified:
        for component in chosen:
            print("\n".join(json.loads(_file(component).read_text()).get(UNCLASSIFIED, ())))
    elif options.sources is None:
        for address, folder in dict.fromkeys(
            (one.source, one.checkout) for one in chosen if not Path(one.checkout).is_absolute()
        ):
            print(f"git clone {address} DIR/{folder}")
    else:
        for component in chosen:
            update(component, options.sources)
    return 0


def update(component: SourceComponent, sources: Path) -> None:
    """Read the source code of a component and write its messages, by class."""
    found: dict[str, None] = {}
    releases = []
    for release, files in _releases(component, sources / component.checkout):
        try:
            for source in files:
                found.update(dict.fromkeys(map(one_line, component.read(source))))
        except subprocess.CalledProcessError:
            print(f"{component.name}: {release} is not complete in this clone")
        else:
            releases.append(release)
    if not releases:
        sys.exit(f"{sources / component.checkout} has no release that matches {component.tags!r}")
    for text in _texts_of(component.besides):
        found.pop(text, None)
    by_class = classified(component, found)
    _write(_file(component), by_class)
    _describe(component, (releases[0], releases[-1]))
    total = sum(map(len, by_class.values()))
    open_ones = len(by_class.get(UNCLASSIFIED, ()))
    print(f"{component.name}: {len(releases)} releases, {total} messages, {open_ones} without a class")


def _texts_of(file: str) -> Iterator[str]:
    for texts in json.loads((MESSAGES / f"{file}.json").read_text()).values() if file else ():
        yield from texts


def one_line(text: str) -> str:
    """The first line of a message that has words, with single spaces: logs are read line by line."""
    lines = [" ".join(line.split()) for line in text.split("\n")]
    return next((line for line in lines if sum(map(str.isalpha, line)) >= LEAST_LETTERS), " ".join(lines).strip())


def classified(component: SourceComponent, texts: Iterable[str]) -> dict[str, list[str]]:
    """The messages by their class, each list in alphabetical order."""
    paths = (RULES / f"{name}.json" for name in (component.file, component.rules) if name)
    every = (rule for path in paths if path.exists() for rule in json.loads(path.read_text()))
    rules = [(re.compile(pattern), about) for pattern, about in every]
    by_class: dict[str, list[str]] = {}
    for text in sorted(texts):
        about = next((about for pattern, about in rules if pattern.search(text)), UNCLASSIFIED)
        by_class.setdefault(about, []).append(text)
    return dict(sorted(by_class.items()))


def _releases(component: SourceComponent, folder: Path) -> Iterator[tuple[str, Iterator[str]]]:
    """Every release with the text of its files: those of a clone by tag, or a folder whose release a file names."""
    if not component.tags:
        release = (folder / "RELEASE").read_text().strip()
        files = (path for path in sorted(folder.rglob("*")) if path.is_file())
        chosen = (path for path in files if re.match(component.paths, path.relative_to(folder).as_posix()))
        yield release, (path.read_text(errors="replace") for path in chosen)
        return
    seen: set[str] = set()
    for release, commit in _yearly(folder) if component.tags == EVERY_YEAR else _tagged(component, folder):
        yield release, _files_of(component, folder, commit, seen)


def _tagged(component: SourceComponent, folder: Path) -> Iterator[tuple[str, str]]:
    tags = _git(folder, "tag", "--sort=version:refname").decode().split()
    return ((tag, tag) for tag in tags if re.fullmatch(component.tags, tag))


def _yearly(folder: Path) -> Iterator[tuple[str, str]]:
    """The last commit of every year, with its date."""
    years: dict[str, tuple[str, str]] = {}
    for line in reversed(_git(folder, "log", "--first-parent", "--format=%cs %H").decode().splitlines()):
        date, commit = line.split()
        years[date[:4]] = date, commit
    yield from years.values()


def _files_of(component: SourceComponent, folder: Path, commit: str, seen: set[str]) -> Iterator[str]:
    """The files of a commit that no earlier one had. Clones without large files lack some of the others."""
    for line in _git(folder, "ls-tree", "-r", commit).decode(errors="replace").splitlines():
        about, _, path = line.partition("\t")
        _, kind, blob = about.split()
        if kind == "blob" and blob not in seen and re.match(component.paths, path):
            seen.add(blob)
            yield _git(folder, "cat-file", "blob", blob).decode(errors="replace")


def _git(folder: Path, *arguments: str) -> bytes:
    return subprocess.run(["git", "-C", str(folder), *arguments], check=True, capture_output=True).stdout


def _file(component: SourceComponent) -> Path:
    return MESSAGES / f"{component.file}.json"


def _describe(component: SourceComponent, releases: tuple[str, str]) -> None:
    path = MESSAGES / "components.json"
    described = {one["file"]: one for one in json.loads(path.read_text())} if path.exists() else {}
    described[component.file] = {
        "name": component.name,
        "file": component.file,
        "cues": component.cues,
        "line": component.line,
        "releases": releases,
        "source": component.source,
        "is_raised": component.is_raised,
        "packages": component.packages,
        "is_chatty": component.is_chatty,
        "is_bare": component.is_bare,
    }
    order = [one.file for one in COMPONENTS]
    _write(path, sorted(described.values(), key=lambda one: order.index(str(one["file"]))))


def _write(path: Path, document: object) -> None:
    path.write_text(json.dumps(document, indent=0, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    sys.exit(main())
