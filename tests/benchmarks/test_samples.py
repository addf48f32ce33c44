"""The samples of output in README.md and docs/ are what the commands print."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from evidence_pages import pages
from samples import SAMPLES, comparable

SLOW = ("diagnose sample", "estimate sample", "configuration sample")


def shown(name):
    """The block of a sample in the page that has it."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    (text,) = [text for page in pages() if begin in (text := page.read_text(encoding="utf-8"))]
    return text.partition(begin)[2].partition(end)[0]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in SAMPLES]
)
def test_a_sample_is_what_its_command_prints(tmp_path, name):
    pytest.importorskip("torch")
    assert comparable(SAMPLES[name](tmp_path)) == comparable(shown(name))


def test_only_what_depends_on_the_machine_is_left_out():
    assert comparable("where    vm\n1 of 1 rank seen; 0.58 s") == comparable("where    node1\n1 of 1 rank seen; 1.2 s")
    assert comparable("confidence high (0.86)") != comparable("confidence high (0.92)")
    assert comparable("71 rules, 0.32 s") != comparable("70 rules, 0.32 s")
