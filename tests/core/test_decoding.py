"""The first use of a type by several threads."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lab.speed import patience

ROOT = Path(__file__).parents[2]

PROGRAM = """
import sys, threading
import msgspec
from doctor.core.decoding import prepared

sys.setswitchinterval(1e-6)
text = b'{"field0": {"field0": {"key": [1]}}, "field29": {"field29": {"key": [1]}}}'
made = eval(sys.argv[1])

def kind(number):
    inner = msgspec.defstruct(f"Inner{number}", [(f"field{i}", "dict[str, list[int]] | None", None) for i in range(30)])
    return msgspec.defstruct(f"Outer{number}", [(f"field{i}", inner | None, None) for i in range(30)])

def decode(kind, barrier):
    barrier.wait()
    msgspec.json.decode(text, type=made(kind))

for number in range(int(sys.argv[2])):
    barrier, one = threading.Barrier(8), kind(number)
    threads = [threading.Thread(target=decode, args=(one, barrier)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


def run(made, types):
    command = [sys.executable, "-c", PROGRAM, made, str(types)]
    return subprocess.run(command, capture_output=True, cwd=ROOT, timeout=patience(60), check=False).returncode


def test_prepared_types_are_decoded_by_threads():
    assert run("prepared", 200) == 0


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the fault was seen there")
def test_msgspec_still_needs_it():
    """The day that this fails, ``prepared`` can go."""
    assert any(run("lambda kind: kind", 1000) < 0 for _ in range(5))


def test_nothing_decodes_into_a_type_that_is_not_prepared():

    calls = re.compile(r"msgspec\.(?:json|msgpack)\.decode\([^\n]*type=(?!prepared)|\.Decoder\((?!kind)")
    found = {path.name for path in (ROOT / "doctor").rglob("*.py") if calls.search(path.read_text(encoding="utf-8"))}
    assert found == set()
