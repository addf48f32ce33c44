"""Real jobs over Gloo that hang, and what the checks say of them. See hanging.py for what each scene does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from doctor.core.check_registry import CheckRegistry, builtin_checks
from doctor.core.check_runner import examine_job
from doctor.core.facts import SECTIONS, Missing, RecorderFacts
from doctor.core.finding import Status
from doctor.core.job import Job, Member, build_job
from doctor.core.report_document import ReportFinding
from tests.lab.speed import patience

pytest.importorskip("torch")
pytestmark = pytest.mark.real_time

IDS = ("RUN001", "RUN002", "RUN004", "RUN006", "RUN010", "RUN015")
CHECKS = CheckRegistry(tuple(check for check in builtin_checks() if check.id in IDS))
SCENE = Path(__file__).with_name("hanging.py")

EXPECTED: dict[str, tuple[str, tuple[int, ...], str]] = {
    "gather_under_condition": ("RUN006", (0,), "if me.rank == 0"),
    "gather_without_a_word_of_ranks": ("RUN006", (1,), "all_gather"),
    "gather_after_return": ("RUN006", (2,), "after if me.rank != 2: return"),
    "most_gather": ("RUN006", (1,), "skips all_gather"),
    "skipped_batch": ("RUN006", (1,), "skips all_reduce at hanging.py"),
    "shifted_in_silence": ("RUN006", (1,), "all_reduce"),
    "one_of_a_group": ("RUN006", (1,), "all_reduce"),
    "gather_unrecorded": ("RUN006", (0,), "all_gather"),
    "other_order": ("RUN002", (0, 1), "barrier"),
    "other_operation": ("RUN002", (0, 1), "broadcast"),
    "other_type": ("RUN002", (2,), "Double"),
    "nonsense": ("RUN002", (2,), "all_reduce of 10 Int elements; ranks 0 and 1 call all_reduce of 10 Float elements"),
    "other_size": ("RUN004", (0,), "or native code aborted it"),
    "sleeps_in_step": ("RUN001", (2,), "is at hanging.py"),
    "sleeps_unrecorded": ("RUN001", (2,), "is at hanging.py"),
    "stopped": ("RUN001", (0,), "is stopped"),
    "holds_the_lock": ("RUN001", (1,), "holds the GIL at hanging.py"),
    "uneven": ("RUN001", (1,), "after 5 batches"),
    "sleeps_in_data": ("RUN010", (1,), "is loading data at hanging.py"),
    "saves_slowly": ("RUN010", (0,), "is saving a checkpoint at hanging.py"),
    "killed": ("RUN004", (1,), "exited without a Python error"),
    "raises": ("RUN004", (1,), "ValueError: the loss is not finite at hanging.py"),
    "interrupted": ("RUN004", (1,), "was interrupted (KeyboardInterrupt) at hanging.py"),
    "send_without_receive": ("RUN015", (0,), "send at hanging.py"),
    "both_receive": ("RUN015", (0, 1), "recv at hanging.py"),
    "crossed_groups": ("RUN015", (0, 1), "wait for each other"),
}

WITHOUT = ("all_busy", "all_interrupted")


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All scenes, at once: hanging costs nothing."""
    folder = tmp_path_factory.mktemp("scenes")
    command = [sys.executable, "-m", "tests.analysis.hanging", str(folder), *EXPECTED, *WITHOUT]
    subprocess.run(command, timeout=patience(55), check=True, capture_output=True, cwd=SCENE.parents[2])
    return folder


def job_of(folder: Path, scene: str) -> Job:
    records = sorted(folder.glob(f"{scene}-[0-9].json"))
    members = [Member(int(record.stem.rpartition("-")[2]), _sections(record)) for record in records]
    return build_job(members, world_size=len(members))


def _sections(record: Path) -> dict:
    return {
        key: msgspec.convert(value, Missing if "lack" in value else SECTIONS[key])
        for key, value in json.loads(record.read_bytes()).items()
    }


def findings_of(job: Job) -> dict[str, ReportFinding]:
    results = examine_job(job, CHECKS)
    assert not [result.reason for result in results if result.status is Status.ERROR]
    return {result.id: finding for result in results for finding in result.findings}


@pytest.mark.parametrize("scene", EXPECTED)
def test_one_finding_names_rank_and_line(played: Path, scene: str) -> None:
    identity, ranks, words = EXPECTED[scene]
    found = findings_of(job_of(played, scene))
    assert {name: finding.ranks for name, finding in found.items()} == {identity: ranks}
    assert words in found[identity].summary


@pytest.mark.parametrize("scene", WITHOUT)
def test_ranks_that_are_all_busy_or_interrupted_are_no_hang(played: Path, scene: str) -> None:
    assert findings_of(job_of(played, scene)) == {}


def test_recorders_tell_members_that_gloo_does_not(played: Path) -> None:
    for facts, _ in job_of(played, "crossed_groups").facts(RecorderFacts):
        assert [group.members for group in facts.groups] == [(0, 1)] * 3
    assert all(
        entry.operation in ("all_reduce", "broadcast") and entry.backend == "gloo" and entry.frames[0].file
        for facts, _ in job_of(played, "stopped").facts(RecorderFacts)
        for entry in facts.collectives
    )
