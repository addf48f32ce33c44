"""Any bytes into a reader, guided by coverage. Not a test: it runs until it is stopped.

pip install atheris
python tests/fuzz/fuzz_readers.py READER [-max_total_time=600] [CORPUS], READER one of READERS below

Without a CORPUS it begins with the recorded files of tests/data and the examples of all messages. An exception fails,
and so does an input that takes more work than :data:`BOUND` times that of a reference.

Pickles whose few bytes ask for more memory than there is are known, and bounded by the process that reads them; they
are left out here, or nothing else would be found.
"""

from __future__ import annotations

import functools
import gzip
import io
import pickletools
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import atheris

with atheris.instrument_imports():
    from doctor.core.capture import parse_capture
    from doctor.core.errors import UnusableError
    from doctor.core.facts.log_events import LONGEST
    from doctor.core.files.read_deadline import ReadBudget
    from doctor.core.files.safe_pickle import load_plain
    from doctor.core.settings import read_settings
    from doctor.core.stack_dumps.recorder_dump import parse_recorder
    from doctor.knowledge.log_patterns import known_patterns
    from doctor.lint.engine.discovery import UnreadableFile
    from doctor.lint.launch.shell.lexer import tokens
    from doctor.lint.launch.yaml_tree import read_trees
    from doctor.postmortem.file_kinds import kind_of_head
    from doctor.postmortem.flight_recorder.unpickling import load_values
    from doctor.postmortem.logs.scanner import read_stream
    from doctor.postmortem.memory_snapshot.snapshot_parser import parse_snapshot
    from doctor.postmortem.nvidia_smi.printout import read_nvidia_smi
    from doctor.postmortem.ras.events import read_ras
    from doctor.postmortem.sandbox.decompression import RATIO, UNSUSPECTED
    from doctor.postmortem.stacks.dump_text import looks_like_stacks
    from doctor.postmortem.stacks.processes import collect_stacks, ranks_of_stacks

DATA = Path(__file__).resolve().parents[1] / "data"
LARGEST = 1 << 13
"""Bytes of an input: a line that is looked at as a whole."""
REFERENCE = "a" * 4000
"""A search that backtracks over these takes 5 ms where the bounds of patterns were set."""
BOUND = 400
"""References that an input may take: 2 s there. Instrumented Python is several times slower than the plain one."""


def read_log(data: bytes) -> None:
    """Nothing may be raised, and what is read stays within the file."""
    events, file = read_stream(io.BytesIO(data), len(data), "fuzzed.log")
    for event in events:
        if not (1 <= event.line <= max(file.lines, 1) and len(event.text) <= LONGEST):
            raise AssertionError(event)


def asks_for_much(data: bytes) -> bool:
    """Whether a pickle names a place or a length far beyond itself."""
    try:
        return any(isinstance(value, int) and value > 100_000 for _, value, _ in pickletools.genops(data))
    except (ValueError, UnicodeError, OverflowError, IndexError, KeyError):
        return any(opcode in data for opcode in (b"\x8d", b"\x8e", b"\x96"))  # lengths of eight bytes


def read_recorder(data: bytes) -> None:
    """It is refused in words, or gives facts."""
    if asks_for_much(data):
        return
    try:
        parse_recorder(load_values(data).values)
    except UnusableError:
        return


def read_memory(data: bytes) -> None:
    """It is refused in words, or gives facts."""
    if asks_for_much(data):
        return
    try:
        parse_snapshot(load_plain(data, limit=1 << 20))
    except UnusableError:
        return


def read_archive(data: bytes) -> None:
    """Nothing may be raised, and what it unpacks to is bounded by what it is."""
    for head in (b"", b"\x1f\x8b\x08\x00", b"\x28\xb5\x2f\xfd"):
        _, file = read_stream(io.BytesIO(head + data), len(head + data), "fuzzed.gz", None, ReadBudget(5).for_file(0))
        if file.bytes > max(UNSUSPECTED, RATIO * len(head + data)):
            raise AssertionError(file)


def read_document(data: bytes) -> None:
    """It is refused in words, or is a capture."""
    try:
        parse_capture(data, "fuzzed.json")
    except UnusableError:
        return


def read_options(data: bytes) -> None:
    """They are refused in words, or are settings."""
    with tempfile.NamedTemporaryFile(suffix="doctor.toml") as file:
        file.write(data)
        file.flush()
        try:
            read_settings(Path(file.name).parent, config=Path(file.name))
        except UnusableError:
            return


def read_shell(data: bytes) -> None:
    """Nothing may be raised."""
    for _ in tokens(data.decode("utf-8", "replace")):
        pass


def read_yaml(data: bytes) -> None:
    """It is refused in words, or is a tree."""
    try:
        for tree in read_trees(data.decode("utf-8", "replace")):
            tree.number("spec", "nodes")
    except UnreadableFile:
        return


def read_table(data: bytes) -> None:
    """Nothing may be raised."""
    read_nvidia_smi(data.decode("utf-8", "replace").splitlines())


def read_answer(data: bytes) -> None:
    """Nothing may be raised."""
    read_ras(data.decode("utf-8", "replace"))


def read_dump_of_stacks(data: bytes) -> None:
    """Nothing may be raised."""
    text = data.decode("utf-8", "replace")
    looks_like_stacks(text)
    ranks_of_stacks(collect_stacks([(Path("node1.txt"), text), (Path("rank2.txt"), text)]))


READERS = {
    "logs": read_log,
    "recorder": read_recorder,
    "snapshots": read_memory,
    "nvidia-smi": read_table,
    "ras": read_answer,
    "stacks": read_dump_of_stacks,
    "kinds": kind_of_head,
    "archives": read_archive,
    "captures": read_document,
    "settings": read_options,
    "shell": read_shell,
    "yaml": read_yaml,
}
UNTIMED = frozenset({"archives"})
"""Readers whose work is not bounded by the size of the input, but by a deadline."""


def bounded(read: Callable[[bytes], object]) -> Callable[[bytes], None]:
    """A reader that fails where an input takes too much CPU time. The reference is measured anew then."""

    @functools.wraps(read)
    def checked(data: bytes) -> None:
        started = time.thread_time()
        read(data)
        taken = time.thread_time() - started
        if taken > 0.2:
            started = time.thread_time()
            re.search("a*b", REFERENCE)
            if taken > BOUND * (time.thread_time() - started):
                raise AssertionError(f"{len(data)} bytes took {taken:.1f} s")

    return checked


def seeds() -> Iterator[bytes]:
    """Files that were recorded, packed ones of them, and lines of all messages."""
    for path in sorted(DATA.rglob("*")):
        if path.is_file():
            content = path.read_bytes()[:LARGEST]
            yield content
            yield gzip.compress(content[:2048])
    examples = [example for message in known_patterns() for example in message.examples]
    for start in range(0, len(examples), 20):
        yield "\n".join(examples[start : start + 20]).encode()
    yield b'[ignore]\nids = ["NET007"]\n[limits]\n"MEM003.used_share" = 0.9\n'
    yield b"#!/bin/bash\n#SBATCH -N2\nsrun torchrun --nproc_per_node=${N:-8} train.py\n"
    yield b"kind: PyTorchJob\nspec: &a {nodes: 2}\nother: {<<: *a}\n"


def main() -> None:
    """Fuzz one reader."""
    reader, *options = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        if all(option.startswith("-") for option in options):
            for number, seed in enumerate(seeds()):
                Path(folder, str(number)).write_bytes(seed)
            options.append(folder)
        read = READERS[reader] if reader in UNTIMED else bounded(READERS[reader])
        atheris.Setup([sys.argv[0], f"-max_len={LARGEST}", *options], read)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
