"""Recorded jobs with all their files: the folder that a user finds leads to the fault that was planted."""

import pytest

from tests.postmortem.whole_jobs.jobs import JOBS
from tests.postmortem.whole_jobs.play import ARCHIVES
from tests.postmortem.whole_jobs.score import diagnose, unpack


def test_every_job_is_recorded():
    archives = {path.name.removesuffix(".tar.xz"): path.stat().st_size for path in ARCHIVES.iterdir()}
    assert archives.keys() == {job.name for job in JOBS}
    assert sum(archives.values()) < 1_000_000


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
def test_the_fault_is_found(job):
    assert diagnose(job).complaints == []


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
def test_no_path_of_the_machine_that_played_it(job, tmp_path):
    unpack(job, tmp_path)
    for file in (path for path in tmp_path.rglob("*") if path.is_file()):
        text = file.read_text(errors="replace")
        assert not [word for word in ("/root/", "rankdoctor", "/work/") if word in text], file.name
