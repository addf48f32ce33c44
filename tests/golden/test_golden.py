"""What users and peers see stays as recorded: the digests of the cheap parts of the corpus."""

import pytest

from tests.golden import record

HOW = """
Entries that differ from tests/golden/digests.txt: {names}.
To see what changed, record a tree without the change and this one, and compare them:
    git worktree add ../before main && PYTHONPATH=../before:../before/checks python ../before/tests/golden/record.py OLD
    python tests/golden/record.py NEW && python tests/golden/compare.py OLD NEW
To accept the change: python tests/golden/record.py --digests
"""


def test_what_is_seen_stays_as_recorded():
    pytest.importorskip("torch", reason="messages of modules that need torch are recorded, too")
    pytest.importorskip("lightning", reason="messages of modules that need lightning are recorded, too")
    recorded = dict(line.rsplit(" ", 1) for line in record.DIGESTS.read_text().splitlines())
    found = record.digests()
    changed = sorted(name for name in {*recorded, *found} if recorded.get(name) != found.get(name))
    assert not changed, HOW.format(names=", ".join(changed[:40]))
