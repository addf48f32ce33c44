"""Entries of the configuration that Hydra loads, in the starts that a project shows."""

from __future__ import annotations

import pytest

from doctor.lint.engine.registry import Rulebook, builtin_rules
from tests.lint.linted import severities_in

BOOK = Rulebook(tuple(one for one in builtin_rules() if one.id in ("CODE022", "CODE005")))
NET = """\
import lightning.pytorch as pl

class Net(pl.LightningModule):
    def test_epoch_end(self, outputs):
        print(outputs)
"""
TRAIN = """\
import hydra
import lightning.pytorch as pl
from net import Net

@hydra.main(config_path="config", config_name="main")
def main(cfg):
    trainer = pl.Trainer(devices=2)
    trainer.fit(Net())
    if cfg.test:
        trainer.test(Net())

if __name__ == "__main__":
    main()
"""
FILES = {
    "requirements.txt": "lightning==2.5.0\n",
    "net.py": NET,
    "train.py": TRAIN,
    "config/main.yaml": "data: images\ntest: false  # afterwards\n",
    "config/experiment/first.yaml": "# @package _global_\ndata: texts\nloaders:\n  test: true\n",
    "README.md": "Run `python train.py experiment=first`.\n",
}


@pytest.mark.parametrize(
    ("changes", "severity"),
    [
        ({}, "warning"),
        ({"config/data/plain.yaml": "test: true\n"}, "warning"),  # cfg.data.test
        ({"config/main.yaml": "test: true\n"}, "error"),
        ({"config/main.yaml": "train: true\n"}, "error"),
        ({"config/experiment/second.yaml": "# @package _global_\ntest: true\n"}, "error"),
        ({"README.md": "Run `python train.py experiment=first test=true`.\n"}, "error"),
        ({"README.md": "Run `python train.py --config-name other`.\n"}, "error"),
        ({"README.md": "A program.\n"}, "error"),
        ({"run.sh": "python train.py experiment=first test=$TEST\n"}, "error"),
        ({"train.py": TRAIN.replace("    trainer.fit", "    cfg.test = True\n    trainer.fit")}, "error"),
        ({"train.py": TRAIN.replace("if cfg.test", "if cfg.data.test")}, "error"),
        ({"other.py": "def check(trainer, net):\n    trainer.test(net)\n"}, "error"),
    ],
)
def test_hook_of_tests_that_no_start_asks_for(tmp_path, changes, severity):
    assert severities_in(tmp_path, {**FILES, **changes}, BOOK) == [("CODE022", severity)]


@pytest.mark.parametrize(("default", "severity"), [("false", "info"), ("true", "error")])
def test_branch_that_no_start_takes(tmp_path, default, severity):
    hang = "    if cfg.check and trainer.global_rank == 0:\n        trainer.strategy.barrier()\n"
    files = {
        **FILES,
        "net.py": NET.replace("test_epoch_end", "on_test_epoch_end").replace(", outputs", "").replace("outputs", ""),
        "train.py": TRAIN.replace("    if cfg.test", f"{hang}    if cfg.test"),
        "config/main.yaml": f"test: false\ncheck: {default}\n",
    }
    found = severities_in(tmp_path, files, BOOK, preview=True)
    assert found == [("CODE005", severity)]
