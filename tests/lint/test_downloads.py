"""Datasets that a program of the project downloads before the ranks open them."""

from __future__ import annotations

import time

import pytest

from doctor.core.settings import Settings
from doctor.lint.engine.registry import Rulebook, builtin_rules
from doctor.lint.engine.releases import Releases
from doctor.lint.engine.runner import LintRequest, build_report, lint_paths

BOOK = Rulebook(tuple(one for one in builtin_rules() if one.id == "CODE029"))
RANKS = """\
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torchvision import datasets

dist.init_process_group("nccl")
train(DDP(build()), datasets.MNIST("data", download=True))
"""
LOADS = "from torchvision import datasets\n\ndatasets.{}('data', download=True)\n"


@pytest.mark.parametrize(
    ("name", "data", "count"),
    [
        ("download_mnist.py", "MNIST", 0),
        ("prepare_data.py", "MNIST", 0),
        ("download_data.py", "CIFAR10", 1),
        ("train_small.py", "MNIST", 1),
    ],
)
def test_a_program_that_prepares_the_data(tmp_path, name, data, count):
    for shown, text in ((name, LOADS.format(data)), ("train.py", RANKS)):
        (tmp_path / shown).write_text(text)
    asked = LintRequest(BOOK, Settings(), {one.id: one.family for one in BOOK.rules}, Releases({}))
    report = build_report(lint_paths([tmp_path], asked), asked, started=time.time())
    assert sum(len(result.findings) for result in report.results) == count
