"""Whether the release of Lightning and DeepSpeed is stated, and what rules report if it is not."""

from __future__ import annotations

import json
import time

import pytest

from doctor.core.settings import Settings
from doctor.lint.engine.registry import Rulebook, builtin_rules
from doctor.lint.engine.releases import NEWEST_LIGHTNING, Releases
from doctor.lint.engine.runner import LintRequest, build_report, lint_paths
from tests.lint.linted import severities_in

BOOK = Rulebook(tuple(one for one in builtin_rules() if one.id in ("CODE018", "CODE022", "CODE038")))
HEAD = "import pytorch_lightning as pl\n\n"
TRAIN = f"{HEAD}trainer = pl.Trainer(gpus=2)\ntrainer.fit(model)\n"
TUNE = f"{HEAD}trainer = pl.Trainer(gpus=4, max_epochs=3)\ntrainer.tune(model)\n"
ENGINE = """\
import deepspeed

engine, _, loader, _ = deepspeed.initialize(model=net, config="ds.json")
for batch in loader:
    loss = engine(batch)
    loss.backward()
    engine.step()
"""


ALTERNATES = """\
import pytorch_lightning as pl

class Gan(pl.LightningModule):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        self.manual_backward(self.loss_of_d(batch))
        self.manual_backward(self.loss_of_g(batch))

pl.Trainer(accelerator="gpu", devices=2, strategy="ddp").fit(Gan())
"""
REENTRANT = """\
import torch
from torch.nn.parallel import DistributedDataParallel as DDP
from transformers import AutoModel

model = AutoModel.from_pretrained(name)
model.gradient_checkpointing_enable()
model = DDP(model, device_ids=[rank], find_unused_parameters=True)
"""


def write(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def found(path, given=()):
    asked = LintRequest(BOOK, Settings(), {one.id: one.family for one in BOOK.rules}, Releases(dict(given)))
    report = build_report(lint_paths([path], asked), asked, started=time.time())
    assert not [result for result in report.results if result.crash]
    return [one for result in report.results for one in result.findings]


def severities(path, given=()):
    return [one.severity.value for one in found(path, given)]


@pytest.fixture(autouse=True)
def lightning_2_is_installed(monkeypatch):
    installed = {"lightning": "2.6.6", "pytorch-lightning": "2.6.6", "deepspeed": "0.17.0", "transformers": "4.57.1"}
    monkeypatch.setattr("doctor.lint.engine.releases._installed", installed.get)


def test_a_project_that_states_no_release_gets_one_warning(tmp_path):
    write(tmp_path, {"a/train.py": TRAIN, "b/tune.py": TUNE, "requirements.txt": "torch>=1.10\nwandb\n"})
    [finding] = found(tmp_path)
    assert finding.severity.value == "warning"
    assert finding.source.file.endswith("a/train.py")
    assert finding.summary.endswith("and no release is pinned (also in 2 other lines)")
    assert finding.evidence["also"] == [f"{tmp_path}/b/tune.py:3", f"{tmp_path}/b/tune.py:4"]
    assert "older than 2.0.0" in finding.fix
    assert "fixable" not in finding.evidence


def test_one_that_is_accepted_stands_for_itself(tmp_path):
    accepted = TRAIN.replace("gpus=2)", "gpus=2)  # doctor: ignore[CODE022] the cluster has 1.9")
    write(tmp_path, {"a.py": accepted, "b.py": TUNE})
    ignored, reported = found(tmp_path)
    assert ignored.ignored is not None
    assert reported.source.file.endswith("b.py")
    assert reported.evidence["also"] == [f"{tmp_path}/b.py:4"]


STATED = {
    "required without a bound": {"requirements.txt": "torch\npytorch-lightning>=1.5\n"},
    "required from 2.0": {"pyproject.toml": '[project]\ndependencies = ["lightning>=2.0"]\n'},
    "installed by a page": {"README.md": "```\npip install pytorch-lightning\n```\n"},
    "an environment inside the project": {
        ".venv/pyvenv.cfg": "home = /usr/bin\n",
        ".venv/lib/python3.12/site-packages/pytorch_lightning-2.1.0.dist-info/METADATA": "",
    },
    "an argument that 2.0 added": {"tune.py": f'{HEAD}import train\n\npl.Trainer(precision="bf16-mixed").fit(model)\n'},
}


@pytest.mark.parametrize("name", STATED)
def test_what_the_project_states_makes_an_error(tmp_path, name):
    write(tmp_path, {"train.py": TRAIN, **STATED[name]})
    assert severities(tmp_path) == ["error"]


OLDER = {
    "an environment inside the project": {
        "venv/pyvenv.cfg": "home = /usr/bin\n",
        "venv/lib/python3.9/site-packages/pytorch_lightning-1.9.5.dist-info/METADATA": "",
        "requirements.txt": "pytorch-lightning\n",
    },
    "a list in a page": {"README.md": "# Requirements\n\n- torch 1.10\n- PyTorch Lightning 1.5.10\n"},
    "a row of a page": {"README.md": "| package | version |\n|---|---|\n| pytorch-lightning | 1.6 |\n"},
    "a sentence of a page": {"README.md": "Tested with PyTorch Lightning 1.4.2.\n"},
    "a folder of its own": {
        "deploy/images/requirements.txt": "pytorch-lightning==1.7.7\n",
        "README.md": "pip install pytorch-lightning\n",
    },
    "a program": {"deploy.py": 'image = Image(pip_packages=["torch", "pytorch-lightning==0.8.0rc4"])\n'},
}


@pytest.mark.parametrize("name", OLDER)
def test_an_older_release_may_be_stated_in_many_places(tmp_path, name):
    write(tmp_path, {"train.py": TRAIN, **OLDER[name]})
    assert severities(tmp_path) == []


def test_a_limit_of_a_whole_major_release_is_above_one_of_a_minor_release(tmp_path):
    train = f"import pl_bolts\n{HEAD}pl.Trainer(progress_bar_refresh_rate=0).fit(model)\n"  # removed in 1.7
    setup = 'from setuptools import setup\nsetup(install_requires=["pytorch-lightning==1.6.*"])\n'
    write(tmp_path, {"train.py": train, "setup.py": setup, "requirements-test.txt": "lightning-bolts==0.3.3\n"})
    assert severities(tmp_path) == []


def test_the_requirements_of_another_program_are_not_those_of_the_project(tmp_path):
    other = {"other/requirements.txt": "pytorch-lightning==1.7.7\n", "other/train.py": TRAIN}
    write(tmp_path, {"own/train.py": TRAIN, **other})
    [finding] = found(tmp_path)
    assert (finding.severity.value, finding.source.file) == ("warning", f"{tmp_path}/own/train.py")
    assert "also" not in finding.evidence


def test_code_that_serves_both_releases_proves_none(tmp_path):
    other = f'{HEAD}import train\n\nNEW = pl.__version__ >= "2"\npl.Trainer(precision="bf16-mixed" if NEW else 16)\n'
    write(tmp_path, {"train.py": TRAIN, "other.py": other})
    assert severities(tmp_path) == ["warning"]


def test_a_requirement_without_a_bound_permits_what_is_installed(tmp_path):
    write(tmp_path, {"train.py": TRAIN, "requirements.txt": "pytorch-lightning>=1.5\n"})
    [finding] = found(tmp_path)
    assert finding.summary.endswith("(allowed: 2.6.x)")


@pytest.mark.parametrize(
    ("install", "severity"), [("!pip install -q pytorch-lightning", "error"), ("x = 1", "warning")]
)
def test_a_notebook_may_install_the_newest_release(tmp_path, install, severity):
    code = json.dumps([f"{install}\n", *TRAIN.splitlines(keepends=True)])
    page = f'{{"cells": [{{"cell_type": "code", "source": {code}}}], "metadata": {{}}, "nbformat": 4}}'
    write(tmp_path, {"train.ipynb": page})
    assert severities(tmp_path) == [severity]


def test_a_file_that_is_given_runs_in_the_environment_at_hand(tmp_path):
    write(tmp_path, {"train.py": TRAIN, "tune.py": TUNE})
    assert severities(tmp_path / "train.py") == ["error"]


def test_a_given_release_is_certain(tmp_path):
    write(tmp_path, {"train.py": TRAIN})
    assert severities(tmp_path, {"lightning": "2.6.6", "pytorch-lightning": "2.6.6"}) == ["error"]


def test_the_newest_release_is_that_of_an_unbounded_requirement_where_none_is_installed(tmp_path, monkeypatch):
    monkeypatch.setattr("doctor.lint.engine.releases._installed", lambda name: None)
    write(tmp_path, {"train.py": TRAIN, "requirements.txt": "pytorch-lightning\n"})
    [finding] = found(tmp_path)
    assert finding.severity.value == "error"
    assert finding.summary.endswith(f"(allowed: {NEWEST_LIGHTNING}.x)")


@pytest.mark.parametrize(("requirement", "severity"), [("deepspeed==0.17.0", "error"), ("deepspeed", "warning")])
def test_the_deepspeed_of_this_interpreter_is_not_that_of_a_project(tmp_path, requirement, severity):
    write(tmp_path, {"train.py": ENGINE, "requirements.txt": f"{requirement}\n"})
    assert severities(tmp_path) == [severity]


@pytest.mark.parametrize(("requirement", "severity"), [("lightning>=2.0", "error"), ("torch", "warning")])
def test_strategies_that_search_depend_on_the_release(tmp_path, requirement, severity):
    write(tmp_path, {"train.py": ALTERNATES, "requirements.txt": f"{requirement}\n"})
    assert severities(tmp_path) == [severity]


@pytest.mark.parametrize(("requirement", "expected"), [("transformers<5", ["error"]), ("transformers", [])])
def test_the_transformers_of_this_interpreter_is_not_that_of_a_project(tmp_path, requirement, expected):
    write(tmp_path, {"train.py": REENTRANT, "requirements.txt": f"{requirement}\n"})
    assert severities(tmp_path) == expected


LIGHTNING = Rulebook(tuple(one for one in builtin_rules() if one.id == "CODE022"))
ASIDE = """\
import pytorch_lightning as pl


class Net(pl.LightningModule):
    def training_epoch_end(self, outputs):
        print(outputs)


if __name__ == "__main__":
    pl.Trainer(max_epochs=3).fit(Net())
"""
PAGE = {"README.md": "```\ntorchrun --nproc-per-node=8 train.py\n```\n", "train.py": "import torch\n\nprint(torch)\n"}
LISTED = {"requirements.txt": "torch\nnumpy\n"}


@pytest.mark.parametrize(
    ("files", "severity"),
    [
        (PAGE | LISTED, "info"),
        (PAGE, "warning"),
        (LISTED, "warning"),
        (PAGE | {"requirements.txt": "torch\npytorch-lightning\n"}, "error"),
        (PAGE | LISTED | {"run.sh": "#!/bin/bash\npython tools/light_net.py\n"}, "warning"),
        (PAGE | LISTED | {"docs/use.md": "`python tools/light_net.py`\n"}, "warning"),
    ],
)
def test_a_program_beside_those_that_a_project_starts(tmp_path, files, severity):
    found = severities_in(tmp_path, {"tools/light_net.py": ASIDE} | files, LIGHTNING, preview=True)
    assert found == [("CODE022", severity)]
