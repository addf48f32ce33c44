"""Dumps that real ranks over Gloo left, and what the checks say of them. See dumping.py for what each scene does."""

import subprocess
import sys
from pathlib import Path

import pytest

from doctor.core.check_registry import CheckRegistry, builtin_checks
from doctor.core.check_runner import examine_job
from doctor.core.facts import RecorderFacts
from doctor.core.finding import Severity, Status
from doctor.core.job import Member, build_job
from doctor.postmortem.flight_recorder.dumps import read_dumps

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(
    not hasattr(torch._C._distributed_c10d, "_dump_fr_trace_json"), reason="this torch does not record calls over Gloo"
)

SCENE = Path(__file__).with_name("dumping.py")
IDS = ("RUN001", "RUN002", "RUN004", "RUN006", "RUN010", "RUN015")
CHECKS = CheckRegistry(tuple(check for check in builtin_checks() if check.id in IDS))

EXPECTED = {
    "skips_a_call": ("RUN006", (2,), "Rank 2 skips all_gather at dumping.py"),
    "other_order": ("RUN002", (1,), "Rank 1 calls barrier at dumping.py"),
    "other_order_of_two": ("RUN002", (0, 1), "calls barrier at dumping.py"),
    "other_size": ("RUN002", (1,), "Rank 1 calls all_reduce of 12 Float elements; ranks 0"),
    "other_type": ("RUN002", (3,), "all_reduce of 10 Int elements"),
    "sleeps": ("RUN001", (2,), "Rank 2 has not reached all_reduce (collective"),
    "sleeps_after_other_history": ("RUN001", (2,), "Rank 2 has not reached all_reduce (collective"),
    "receives_what_nobody_sends": ("RUN001", (1,), "Rank 1 has not reached all_reduce (collective"),
    "crosses_groups": ("RUN015", (0,), "Rank 0 waits in all_reduce"),
    "crosses_new_groups": ("RUN015", (0, 1), "wait for each other in all_reduce at dumping.py"),
    "one_of_a_group": ("RUN006", (1,), "Only rank 1 calls all_reduce at dumping.py"),
    "runs_out_of_time": ("RUN001", (0,), "Rank 0 has not reached all_reduce"),
}
WARNINGS = {
    "same_shape_otherwise": (
        "RUN002",
        (1,),
        "Rank 1 calls all_reduce of 10 Float elements as 2 x 5; ranks 0, 2 and 3 call",
    ),
}
WELL = ("is_well",)


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """All scenes, at once: hanging costs nothing."""
    folder = tmp_path_factory.mktemp("scenes")
    command = [sys.executable, str(SCENE), str(folder), *EXPECTED, *WARNINGS, *WELL]
    subprocess.run(command, timeout=110, check=True, capture_output=True)
    return folder


def job_of(folder):
    dumps, skipped = read_dumps(path for path in sorted(folder.iterdir()) if not path.name.startswith("."))
    assert all(path.suffix == ".json" and "dump of rank" in why for path, why in skipped), skipped
    assert dumps
    return build_job(Member(dump.rank, {RecorderFacts.key: dump.facts}) for dump in dumps)


def findings_of(job):
    results = examine_job(job, CHECKS)
    assert not [result.reason for result in results if result.status is Status.ERROR]
    return [
        (result.id, finding.ranks, finding.summary)
        for result in results
        for finding in result.findings
        if finding.severity is not Severity.INFO
    ]


@pytest.mark.parametrize("scene", EXPECTED)
def test_a_fault(played, scene):
    name, ranks, words = EXPECTED[scene]
    ((found, blamed, summary),) = findings_of(job_of(played / scene / "hang"))
    assert (found, blamed) == (name, ranks), summary
    assert words in summary


@pytest.mark.parametrize("scene", WARNINGS)
def test_what_is_worth_a_warning(played, scene):
    name, ranks, words = WARNINGS[scene]
    ((found, meant, summary),) = findings_of(job_of(played / scene / "hang"))
    assert (found, meant) == (name, ranks)
    assert words in summary


@pytest.mark.parametrize("scene", EXPECTED)
def test_a_moment_before_the_fault(played, scene):
    assert findings_of(job_of(played / scene / "before")) == []


@pytest.mark.parametrize("scene", WELL)
def test_what_is_well(played, scene):
    assert findings_of(job_of(played / scene / "hang")) == []


def test_json_alone_names_the_same_ranks(played):
    for scene in ("sleeps", "other_order", "other_size", "crosses_groups"):
        paths = sorted((played / scene / "hang").glob("*.json"))
        dumps, skipped = read_dumps(paths)
        assert (len(dumps), skipped) == (4, [])
        job = build_job(Member(dump.rank, {RecorderFacts.key: dump.facts}) for dump in dumps)
        assert [ranks for _, ranks, _ in findings_of(job)] == [EXPECTED[scene][1]], scene
