"""Plays the jobs in the lab and packs what they leave.

Paths of this machine are replaced by those of a user's machine: the folder of the project, the Python environment, the
homes of the lab's hosts. Nothing else of the output is changed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.lab.hosts import LabHost, hosts
from tests.lab.ray_nodes import ray_nodes
from tests.lab.slurm import slurm
from tests.postmortem.whole_jobs.jobs import RANK_SCRIPT, WholeJob

HERE = Path(__file__).parent
ARCHIVES = HERE / "archives"
LIMIT = 400.0
"""Seconds that a job may take."""
CPUS = 6
"""Of each SLURM node: 16 tasks fill the first two of three."""
EXTRA_PACKAGES = os.environ.get("EXTRA_PACKAGES", "")
"""A folder of packages that are not dependencies: DeepSpeed, what Ray Train imports."""
ENVIRONMENT = {"PYTHONPATH": EXTRA_PACKAGES, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}


class PlayError(Exception):
    """A job did not leave what it should."""


def make(job: WholeJob) -> Path:
    """Play ``job`` and write its archive."""
    with tempfile.TemporaryDirectory(prefix="rankdoctor-jobs-") as name:
        project = Path(name) / "project"
        _lay_out(project)
        with _machines(job) as (lab, environ):
            _play(job, lab, project, environ)
            masks = _masks(project, lab)
        _mask(project / "output", masks)
        return _pack(job, project / "output")


def _lay_out(project: Path) -> None:
    shutil.copytree(HERE / "programs", project, ignore=shutil.ignore_patterns("__pycache__"))
    (project / "rank.sh").write_text(RANK_SCRIPT)
    for folder in ("output", "checkpoints"):
        (project / folder).mkdir()


@contextmanager
def _machines(job: WholeJob) -> Iterator[tuple[tuple[LabHost, ...], Mapping[str, str]]]:
    """The hosts, and what the environment has in addition there."""
    if _on_slurm(job):
        with slurm(job.hosts, cpus=CPUS) as cluster:
            yield cluster.hosts, {}
    elif job.launcher == "ray":
        with ray_nodes(job.hosts) as nodes:
            yield nodes.hosts, nodes.environ
    else:
        with hosts(job.hosts) as lab:
            yield lab, {}


def _on_slurm(job: WholeJob) -> bool:
    return "#SBATCH" in job.script


def _play(job: WholeJob, lab: tuple[LabHost, ...], project: Path, environ: Mapping[str, str]) -> None:
    for number, script in job.on_hosts.items():
        lab[number].sh(f"cd {project}\n{script}")
    faults = {"FAULT": job.fault, "FAULTY_RANKS": ",".join(map(str, job.ranks))}
    script = project / "job.sh"
    script.write_text(job.script)
    command = "sbatch job.sh" if _on_slurm(job) else "bash job.sh"
    started = lab[0].start(
        ["bash", "-c", f"cd {project}; {command}"],
        env={**environ, **ENVIRONMENT, **faults},
        stdout=subprocess.DEVNULL,
        stderr=None,
    )
    interrupt, until = job.interrupt, time.monotonic() + LIMIT
    while _runs(job, lab[0], started):
        if time.monotonic() > until:
            raise PlayError(f"{job.name} did not end: {_text(project)[-3000:]}")
        if interrupt is not None and interrupt[0] in _text(project):
            lab[0].sh(interrupt[1])
            interrupt = None
        if job.copied_at and job.copied_at in _text(project):
            started.kill()
            return
        time.sleep(0.3)
    if interrupt is not None or job.copied_at:
        raise PlayError(f"{job.name} ended too early: {_text(project)[-3000:]}")


def _runs(job: WholeJob, first: LabHost, started: subprocess.Popen[str]) -> bool:
    if started.poll() is None:
        return True
    if not _on_slurm(job):
        return False
    if started.returncode != 0:
        raise PlayError(f"{job.name} was not submitted")
    queue = first.run(["squeue", "--noheader"])
    return queue.returncode != 0 or bool(queue.stdout.strip())


def _text(project: Path) -> str:
    """All that the job has written."""
    files = (path for path in sorted((project / "output").rglob("*")) if path.is_file())
    return "".join(path.read_text(errors="replace") for path in files)


def _masks(project: Path, lab: tuple[LabHost, ...]) -> dict[str, str]:
    """What is replaced, longest first, as one may contain another."""
    masks = {str(project): "/home/user/project", sys.prefix: "/home/user/venv", sys.base_prefix: "/usr/local"}
    masks |= {str(host.folder): "/home/user" for host in lab}
    masks[str(lab[0].switch.folder)] = "/tmp"
    if EXTRA_PACKAGES:
        masks[EXTRA_PACKAGES] = "/home/user/venv/lib/python3.11/site-packages"
    return dict(sorted(masks.items(), key=lambda pair: -len(pair[0])))


def _mask(output: Path, masks: Mapping[str, str]) -> None:
    for file in (path for path in output.rglob("*") if path.is_file()):
        times = file.stat()
        text = file.read_bytes()
        for path, replacement in masks.items():
            text = text.replace(path.encode(), replacement.encode())
        file.write_bytes(text)
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


def _pack(job: WholeJob, output: Path) -> Path:
    """Write the files that are not empty, with their times and without an owner."""

    def cleaned(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        member.mtime = int(member.mtime)
        return member

    archive = ARCHIVES / f"{job.name}.tar.xz"
    ARCHIVES.mkdir(exist_ok=True)
    with tarfile.open(archive, "w:xz", preset=9) as tar:
        for path in sorted(output.rglob("*")):
            tar.add(path, path.relative_to(output), recursive=False, filter=cleaned)
    return archive
