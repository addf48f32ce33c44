"""Faulty Python environments, made of real folders of metadata and files, and read by the real collectors."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from doctor.api import Severity, Status
from doctor.collectors.base import Machine
from doctor.collectors.runner import collect_facts
from doctor.core.check_registry import CheckRegistry, builtin_checks
from doctor.core.check_runner import examine_job as examine
from doctor.core.facts import DriverFacts, Missing, MissingReason, SoftwareFacts
from doctor.core.job import Job, Member, build_job
from doctor.core.report_document import CheckResult
from doctor.testing import healthy
from tests.lab.elsewhere import facts_elsewhere
from tests.lab.nvml import FakeNvml, compiler

CHECKS = {check.id: check for check in builtin_checks()}


def judged(job: Job, check: str) -> CheckResult:
    (result,) = examine(job, CheckRegistry((CHECKS[check],)))
    assert result.status is not Status.ERROR, result.reason
    return result


def blamed(result: CheckResult) -> set[int]:
    return {rank for finding in result.findings for rank in finding.ranks}


def install(site: Path, name: str, version: str, *requires: str) -> None:
    """Metadata of a distribution, as pip leaves it."""
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir(parents=True)
    lines = [
        "Metadata-Version: 2.1",
        f"Name: {name}",
        f"Version: {version}",
        *(f"Requires-Dist: {one}" for one in requires),
    ]
    (folder / "METADATA").write_text("\n".join(lines) + "\n")


def install_torch(site: Path, version: str, cuda: str | None = "12.8", architectures: str = "") -> Path:
    """A torch that nobody can import: its metadata, version.py, and the literal that tells its architectures."""
    install(site, "torch", version)
    package = site / "torch"
    (package / "lib").mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('this torch is not to be imported')\n")
    written = f"'{cuda}'" if cuda else "None"
    (package / "version.py").write_text(f"__version__ = '{version}'\ncuda = {written}\nhip = None\n")
    if architectures:
        source = site / "list.c"
        source.write_text(f'const char *list(void) {{ return "{architectures}"; }}\n')
        library = package / "lib" / "libtorch_python.so"
        subprocess.run([str(compiler()), "-shared", "-fPIC", "-o", library, source], check=True, timeout=60)
    return site


def software(site: Path, **environ: str) -> dict:
    return facts_elsewhere("software", PYTHONPATH=str(site), **environ)


def job_of(*ranks: dict) -> Job:
    """Ranks of one host each with these real sections over healthy ones."""
    members = healthy(hosts=len(ranks), per_host=1).members
    return build_job(Member(n, {**members[n].sections, **facts}) for n, facts in enumerate(ranks))


def test_versions_differ(tmp_path: Path) -> None:
    common = software(install_torch(tmp_path / "common", "2.8.0+cu128"))
    older = software(install_torch(tmp_path / "older", "2.7.1+cu126", "12.6"))
    result = judged(job_of(common, common, older), "VER001")
    assert blamed(result) == {2}
    assert "has PyTorch 2.7.1 instead of 2.8.0, CUDA 12.6 instead of 12.8" in result.findings[0].summary
    assert "all on node2" in result.findings[0].summary
    assert judged(job_of(common, common), "VER001").status is Status.PASS


def test_two_python_minor_releases_are_one_finding() -> None:
    job = healthy(hosts=2, per_host=1).alter(SoftwareFacts, ranks=(1,), python="3.12.3").job()
    assert [finding.summary for finding in judged(job, "VER001").findings] == [
        "Python versions differ between ranks (rank 0: 3.11; rank 1: 3.12)"
    ]


@pytest.mark.parametrize(("machine", "faulty"), [("old_driver", {0}), ("eight_h100", set())])
def test_driver_too_old(fake_nvml: FakeNvml, tmp_path: Path, machine: str, faulty: set[int]) -> None:
    gpus = collect_facts(("gpus",), Machine(environ=fake_nvml.environ(machine)))
    hidden = {DriverFacts.key: Missing(MissingReason.ABSENT, "no driver files in this tree")}
    facts = software(install_torch(tmp_path, "2.8.0+cu128")) | gpus | hidden
    result = judged(job_of(facts), "VER002")
    assert blamed(result) == faulty
    assert all("525.60.13" in finding.summary for finding in result.findings)


@pytest.mark.parametrize(
    ("architectures", "status"),
    [("sm_75 sm_80 sm_86 sm_90", Status.PASS), ("sm_50 sm_60 sm_70", Status.FAIL), ("", Status.UNKNOWN)],
)
def test_architecture_unsupported(fake_nvml: FakeNvml, tmp_path: Path, architectures: str, status: Status) -> None:
    gpus = collect_facts(("gpus",), Machine(environ=fake_nvml.environ("eight_h100")))
    facts = software(install_torch(tmp_path, "2.8.0+cu128", architectures=architectures)) | gpus
    result = judged(job_of(facts), "VER003")
    assert result.status is status, result.reason
    assert status is not Status.UNKNOWN or "torch.cuda.get_arch_list()" in (result.reason or "")


@pytest.mark.parametrize(
    ("lightning", "torch", "severity"),
    [("2.6.1", "2.8.0+cu128", None), ("2.6.1", "2.0.1", Severity.WARNING), ("2.4.0", "2.8.0", Severity.INFO)],
)
def test_lightning_torch_unfit(tmp_path: Path, lightning: str, torch: str, severity: Severity | None) -> None:
    install(tmp_path, "lightning", lightning, "torch<4.0,>=2.1.0", "torchmetrics>0.7.0", 'torch>=9; extra == "all"')
    result = judged(job_of(software(install_torch(tmp_path, torch))), "VER004")
    # The Python that runs the tests may have a second Lightning of its own behind this folder.
    assert {finding.severity for finding in result.findings} == ({severity} if severity else set())


@pytest.mark.parametrize(("old", "faulty"), [("1.9.5", {0}), ("2.6.1", set())])
def test_two_lightnings(tmp_path: Path, old: str, faulty: set[int]) -> None:
    install(tmp_path, "lightning", "2.6.1")
    install(tmp_path, "pytorch-lightning", old)
    assert blamed(judged(job_of(software(tmp_path)), "VER005")) == faulty


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"PL_TRAINER_GPUS": "4"}, "Lightning 2.6.1 ignores PL_TRAINER_GPUS (Trainer argument removed in 2.0.0)"),
        (
            {"PL_TRAINER_STRATEGY": "ddp_sharded"},
            "Lightning 2.6.1 does not accept the strategy ddp_sharded (removed in 2.0.0)",
        ),
        (
            {"LT_STRATEGY": "dp", "LT_CLI_USED": "1"},
            "Lightning 2.6.1 does not accept the strategy dp (removed in 2.0.0)",
        ),
        ({"PL_TRAINER_DEVICES": "4", "PL_TRAINER_STRATEGY": "fsdp"}, None),
    ],
)
def test_trainer_argument_removed(tmp_path: Path, variables: dict[str, str], words: str | None) -> None:
    install(tmp_path, "lightning", "2.6.1")
    facts = facts_elsewhere("software", "trainer", PYTHONPATH=str(tmp_path), **variables)
    result = judged(job_of(facts), "VER006")
    assert [finding.summary.startswith(words or "") for finding in result.findings] == ([True] if words else [])
