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


TWO_SPLITS = """\
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torchvision import datasets

dist.init_process_group("nccl")
if args.train_data:
    data = datasets.ImageFolder(args.train_data)
else:
    data = datasets.{first}("data", download=True)
{second}
train(DDP(build()), data, test)
"""
OF_TEST = """\
if args.test_data:
    test = datasets.ImageFolder(args.test_data)
else:
    test = datasets.{}({}, train=False, download=True)
"""
OPPOSITE = "if args.train_data:\n    test = datasets.MNIST('data', train=False, download=True)\n"


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ("MNIST", OF_TEST.format("MNIST", "'data'"), ["warning", "info"]),
        ("MNIST", OF_TEST.format("MNIST", "'test'"), ["warning", "warning"]),
        ("MNIST", OF_TEST.format("CIFAR10", "'data'"), ["warning", "warning"]),
        ("SVHN", OF_TEST.format("SVHN", "'data'"), ["warning", "warning"]),
        ("MNIST", OPPOSITE, ["warning", "warning"]),
    ],
)
def test_another_split_of_what_a_branch_above_downloads(tmp_path, first, second, expected):
    (tmp_path / "train.py").write_text(TWO_SPLITS.format(first=first, second=second))
    asked = LintRequest(BOOK, Settings(preview=True), {one.id: one.family for one in BOOK.rules}, Releases({}))
    report = build_report(lint_paths([tmp_path], asked), asked, started=time.time())
    assert [one.severity.value for result in report.results for one in result.findings] == expected
