"""What users and peers see stays as recorded: the digests of the cheap parts of the corpus."""

import subprocess
import sys

import pytest

from tests.golden import record

HOW = """
Entries that differ from tests/golden/digests.txt: {names}.
To see what changed, record a tree without the change and this one, and compare them:
    git worktree add ../before main && PYTHONPATH=../before:../before/checks python ../before/tests/golden/record.py OLD
    python tests/golden/record.py NEW && python tests/golden/compare.py OLD NEW
To accept the change: python tests/golden/record.py --digests
"""


def test_what_is_seen_stays_as_recorded(tmp_path):
    """In a process of its own: what threads of other tests write to standard error is no part of an output."""
    pytest.importorskip("torch", reason="messages of modules that need torch are recorded, too")
    pytest.importorskip("lightning", reason="messages of modules that need lightning are recorded, too")
    subprocess.run([sys.executable, record.__file__, "--digests", tmp_path / "digests.txt"], check=True, timeout=600)
    recorded, found = (
        dict(line.rsplit(" ", 1) for line in path.read_text().splitlines())
        for path in (record.DIGESTS, tmp_path / "digests.txt")
    )
    changed = sorted(name for name in {*recorded, *found} if recorded.get(name) != found.get(name))
    assert not changed, HOW.format(names=", ".join(changed[:40]))
