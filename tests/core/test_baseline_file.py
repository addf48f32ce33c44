"""An expectation: where it comes from, how it travels, and what the runner makes of it."""

import datetime
import json
import os

import pytest

from doctor.api import Status
from doctor.cli.baseline_file import load_baseline
from doctor.core.capture import encode_document, from_document, merge_captures, read_capture, to_document
from doctor.core.check_registry import CheckRegistry, builtin_checks
from doctor.core.check_runner import examine_job as examine
from doctor.core.errors import UnusableError
from doctor.core.redact.placeholders import redact
from doctor.core.settings import Settings
from doctor.facts import GpuFacts, HostFacts, NcclFacts, SoftwareFacts, TorchBuild
from doctor.report.machine_formats import MACHINE_FORMATS
from doctor.report.markdown import render_markdown
from doctor.session import judge
from doctor.testing import healthy

CHECKS = sorted(builtin_checks(), key=lambda check: check.id)
WORKED_AT = datetime.datetime(2026, 11, 20, 17, 3, 11, tzinfo=datetime.timezone.utc)


def write(path, sketch, created=WORKED_AT):
    path.write_bytes(encode_document(to_document(sketch.job(), created)))
    return path


def results(job):
    return {result.id: result for result in examine(job, CheckRegistry(tuple(CHECKS)))}


def test_a_file_and_a_folder_of_the_files_of_all_ranks(tmp_path):
    write(tmp_path / "job.json", healthy(2, 2))
    job = load_baseline(tmp_path / "job.json")
    assert (len(job.ranks), job.captured) == (4, "2026-11-20T17:03:11+00:00")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "train.log").write_text("step 1\n")
    for rank in range(4):
        created = WORKED_AT + datetime.timedelta(days=rank)
        write(tmp_path / "folder" / f"rank-{rank}.json", healthy(2, 2).only((rank,)), created)
    job = load_baseline(tmp_path / "folder")
    assert [rank.number for rank in job.ranks] == [0, 1, 2, 3]
    assert job.captured == "2026-11-23T17:03:11+00:00"


def unusable(folder):
    yield folder / "nothing.json", "nothing.json: No such file or directory"
    log = folder / "train.log"
    log.write_text("step 1\n")
    yield log, "it is not a capture"
    report = folder / "report.json"
    report.write_text('{"schema": 1, "verdict": "pass"}')
    yield report, "a report is a verdict, not evidence"
    newer = folder / "newer.json"
    newer.write_text('{"kind": "capture", "schema": 2}')
    yield newer, "has schema 2; this release reads schema 1"
    pipe = folder / "pipe"
    os.mkfifo(pipe)
    yield pipe, "it is not a capture"
    half = folder / "half"
    half.mkdir()
    text = write(half / "rank-0.json", healthy()).read_text()
    (half / "rank-1.json").write_text(text[: len(text) // 2])
    yield half, "rank-1.json: not a valid capture"
    empty = folder / "empty"
    empty.mkdir()
    yield empty, "there is no file to read"


def test_what_can_not_be_used_is_one_sentence(tmp_path):
    for path, words in unusable(tmp_path):
        with pytest.raises(UnusableError) as caught:
            load_baseline(path)
        assert words in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_document_carries_the_expectation_and_when_it_was_captured(tmp_path):
    job = healthy(2, 2).job()
    job.expected = load_baseline(write(tmp_path / "worked.json", healthy(1, 1)))
    again = from_document(to_document(job))
    assert [rank.number for rank in again.expected.ranks] == [0]
    assert again.expected.captured == "2026-11-20T17:03:11+00:00"
    assert "expected" not in to_document(healthy().job())
    hostile = to_document(job)
    hostile["expected"]["ranks"][0]["host"] = 7
    with pytest.raises(UnusableError, match="what it expects"):
        from_document(hostile)


def test_a_capture_brings_no_expectation_of_its_own_into_a_merged_job(tmp_path):
    path = write(tmp_path / "job.json", healthy().expecting(healthy(1, 1)))
    assert merge_captures([read_capture(path)]).expected is None


def _private(home, host):
    return (
        healthy(1, 2)
        .alter(HostFacts, hostname=host, fqdn=f"{host}.hpc.example.edu")
        .environ(NCCL_TOPO_FILE=f"/home/{home}/topology.xml")
    )


def test_stand_ins_are_the_same_in_a_job_and_in_what_it_expects(tmp_path):
    worked = _private("alice", "atlas07")
    for now, faulty in ((_private("alice", "atlas08"), False), (_private("bob", "atlas08"), True)):
        job = now.job()
        job.expected = load_baseline(write(tmp_path / "worked.json", worked))
        shown = from_document(redact(to_document(job)))
        (result,) = examine(shown, CheckRegistry(tuple(check for check in CHECKS if check.id == "NCCL003")))
        assert (result.status is Status.FAIL) is faulty
        for finding in result.findings:
            assert finding.evidence["expected_from"] == f"capture of {shown.expected.hosts[0].name}, 2026-11-20"
            assert finding.evidence["found"] == {"NCCL_TOPO_FILE": "/home/user-1/topology.xml"}


def test_no_name_of_the_expectation_is_in_a_redacted_report(tmp_path):
    worked = _private("alice", "atlas07").alter(SoftwareFacts, torch=TorchBuild("2.7.1", cuda="12.6"))
    job = _private("bob", "atlas08").job()
    job.expected = load_baseline(write(tmp_path / "worked.json", worked))
    catalog = CheckRegistry(tuple(CHECKS))
    for shown, named in ((job, True), (from_document(redact(to_document(job))), False)):
        report = judge(shown, catalog, Settings())
        text = "".join(make(report) for make in (render_markdown, *MACHINE_FORMATS.values()))
        assert [word in text for word in ("atlas07", "alice", "2026-11-20")] == [named, named, True]


def test_stand_ins_made_apart_are_judged_too(tmp_path):
    job = _private("bob", "atlas08").alter(SoftwareFacts, python="3.12.1").job()
    shown = from_document(redact(to_document(job)))
    shown.expected = from_document(
        redact(
            to_document(
                _private("alice", "atlas07").job(),
            )
        )
    )
    finding = results(shown)["VER001"].findings[0]
    assert finding.summary.startswith("Python: expected 3.11 (baseline)")
    assert str(finding.evidence["expected_from"]).startswith("capture of host-1")


def test_one_process_is_green_only_where_it_was_compared():
    lone = results(healthy(1, 1, rdma=2).expecting(healthy(2, 2, rdma=2)).job())
    assert {check.id for check in CHECKS if check.uses_baseline and lone[check.id].status is not Status.PASS} == {
        "NET021"
    }
    assert lone["NET021"].reason == "one host"  # InfiniBand has no kind of address to compare
    uncompared = [check.id for check in CHECKS if check.compares_ranks and not check.uses_baseline]
    assert {lone[name].status for name in uncompared} <= {Status.SKIP, Status.UNKNOWN}


@pytest.mark.parametrize(
    "worked",
    [
        healthy(1, 1).alter(SoftwareFacts, torch=None, packages=(), nccl_libraries=()),
        healthy(1, 2)
        .alter(SoftwareFacts, ranks=(1,), torch=TorchBuild("2.7.1", cuda="12.6"), python="3.12.1", packages=())
        .alter(SoftwareFacts, ranks=(1,), nccl_libraries=()),
    ],
    ids=["another environment", "ranks that disagree"],
)
def test_one_process_that_nothing_is_expected_of_is_skipped(worked):
    lone = results(healthy(1, 1).expecting(worked).job())
    assert (lone["NCCL008"].status, lone["NCCL008"].reason) == (
        Status.SKIP,
        "one process: nothing to compare it with",
    )


def test_one_rank_of_a_running_job_stays_unknown():
    lone = results(healthy(2, 1).only((0,)).expecting(healthy(1, 1)).job())
    assert lone["VER001"].status is Status.UNKNOWN


def test_one_cause_is_told_once():
    """Another machine with another image: few findings, the consequences under their causes."""
    worked = healthy(2, 2, rdma=4)
    now = (
        healthy(2, 2, rdma=2)
        .alter(GpuFacts, driver_version="550.54.15")
        .gpu(0, name="NVIDIA A100", memory_total=40 << 30)
        .gpu(1, name="NVIDIA A100", memory_total=40 << 30)
        .alter(SoftwareFacts, torch=TorchBuild("2.7.1", cuda="12.6"), python="3.12.1", nccl_libraries=())
        .environ(NCCL_ALGO="Ring", NCCL_PROTO="Simple", NCCL_MIN_NCHANNELS="8")
    )
    found = {
        name: [finding.explained_by for finding in result.findings]
        for name, result in results(now.expecting(worked).job()).items()
        if any("expected" in finding.evidence for finding in result.findings)
    }
    assert found == {
        "GPU005": [None],
        "NCCL003": [None],
        "NCCL008": ["VER001"],
        "NET022": ["GPU005"],
        "VER001": [None],
    }


def test_what_belongs_to_one_job_alone_is_not_expected_of_another():
    """A smaller job in another network, on other hosts, by another launcher, with another master."""
    elsewhere = json.loads(
        json.dumps(to_document(healthy(2, 2, rdma=2).job())).replace("10.0.", "172.16.").replace("node", "other")
    )
    job = healthy(4, 8, rdma=2).by_srun().job()
    job.expected = from_document(elsewhere)
    alone = {
        name: (result.status, result.findings)
        for name, result in results(healthy(4, 8, rdma=2).by_srun().job()).items()
    }
    assert {name: (result.status, result.findings) for name, result in results(job).items()} == alone


def test_an_expectation_of_another_release_lacks_sections():
    job = healthy(2, 2).environ(ranks=(1,), NCCL_ALGO="Ring").job()
    document = to_document(healthy().job())
    for rank in document["ranks"]:
        del rank["facts"][NcclFacts.key]
    job.expected = from_document(document)
    found = results(job)["NCCL003"].findings
    assert [finding.ranks for finding in found] == [(1,)]
    assert "ring on rank 1, not set on the others" in found[0].summary
