"""Helpers that ask for a process group, called before a program makes one: they wait for nobody."""

from __future__ import annotations

import pytest

from doctor.lint.engine.registry import Rulebook, builtin_rules
from tests.lint.linted import severities_in

BOOK = Rulebook(tuple(one for one in builtin_rules() if one.id == "CODE005"))
WAITS = """\
import os
import torch.distributed as dist


def is_dist_avail_and_initialized():
{asks}


def get_rank():
    return int(os.environ.get("RANK", 0))


def is_main_process():
    return get_rank() == 0


def barrier():
{waits}
"""
ASKS = "    return dist.is_available() and dist.is_initialized()"
IN_BRANCH = "    if is_dist_avail_and_initialized():\n        dist.barrier()"
STAR = "from utils.dist import *\n"
PROGRAM = """\
import utils
from transformers import HfArgumentParser, Trainer, TrainingArguments

from build import Arguments, agent, dataset, model


class Tokenizer:
    def image_setup(self, count):
        self.count = count


def main():
    tokenizer = Tokenizer()
{before}
    if utils.is_main_process():
        utils.barrier()
    trainer = Trainer(model, TrainingArguments("out"))
    trainer.train()


if __name__ == "__main__":
    main()
"""
OF_TORCH = """\
    if not dist.is_available():
        return False
    if not dist.is_initialized():
        return False
    return True"""
GROUP = """\
import torch
import torch.distributed as dist


def make():
    dist.init_process_group("nccl")


setup_distributed = make
"""


def found(folder, before="    pass", asks=ASKS, waits=IN_BRANCH):
    files = {
        "train.py": PROGRAM.format(before=before),
        "utils/__init__.py": STAR,
        "utils/dist.py": WAITS.format(asks=asks, waits=waits),
        "group.py": GROUP,
        "build.py": "Arguments = agent = dataset = model = object()\n",
        "start.sh": "torchrun --nproc_per_node=8 train.py\n",
    }
    return [severity for _, severity in severities_in(folder, files, BOOK, preview=True)]


@pytest.mark.parametrize(
    ("before", "asks", "waits"),
    [
        ("    pass", ASKS, IN_BRANCH),
        ("    pass", OF_TORCH, IN_BRANCH),
        ("    pass", ASKS, "    if not is_dist_avail_and_initialized():\n        return\n    dist.barrier()"),
        (
            "    pass",
            ASKS,
            "    if not dist.is_available() or not dist.is_initialized():\n        return\n    dist.barrier()",
        ),
        ("    model.train()", ASKS, IN_BRANCH),
        ("    dataset.setup()", ASKS, IN_BRANCH),
        ("    tokenizer.image_setup(2)", ASKS, IN_BRANCH),
        ("    print(utils.is_dist_avail_and_initialized())", ASKS, IN_BRANCH),
    ],
)
def test_a_barrier_before_the_group_is_made(tmp_path, before, asks, waits):
    assert found(tmp_path, before, asks, waits) == []


@pytest.mark.parametrize(
    ("before", "asks", "waits"),
    [
        ("    from group import make\n    make()", ASKS, IN_BRANCH),
        ("    agent.train()", ASKS, IN_BRANCH),
        ("    model.setup()", ASKS, IN_BRANCH),
        ("    TrainingArguments('out')", ASKS, IN_BRANCH),
        ("    args = HfArgumentParser(Arguments).parse_args_into_dataclasses()", ASKS, IN_BRANCH),
        ("    pass", ASKS, "    dist.barrier()"),
        ("    pass", "    return True", IN_BRANCH),
        ("    pass", "    return dist.is_available()", IN_BRANCH),
        ("    pass", ASKS, "    if is_dist_avail_and_initialized():\n        pass\n    dist.barrier()"),
    ],
)
def test_a_barrier_that_may_wait(tmp_path, before, asks, waits):
    assert found(tmp_path, before, asks, waits) == ["error"]


DEVICES = Rulebook(tuple(one for one in builtin_rules() if one.id == "CODE002"))
BY_MODE = """\
import argparse
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from group import setup_distributed


def run_alone(args):
    device = torch.device("cuda:0")
    print(build(args).to(device)(1))


def run_ranks(args):
    local_rank = int(os.environ["LOCAL_RANK"])
    dist.init_process_group("nccl")
    model = DistributedDataParallel(build(args).to(local_rank), device_ids=[local_rank])
    print(model(1))


def build(args):
    return torch.nn.Linear(args.size, 1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=["alone", "ranks"])
    parser.add_argument("--size", type=int, default=2)
    args = parser.parse_args()
{start}


if __name__ == "__main__":
    main()
"""
CHOICE = "    if args.mode == 'alone':\n        run_alone(args)\n    else:\n        run_ranks(args)"


@pytest.mark.parametrize(
    ("start", "severity"),
    [
        (CHOICE, "info"),
        ("    if args.mode == 'alone':\n        return run_alone(args)\n    run_ranks(args)", "info"),
        ("    if args.mode == 'alone':\n        run_alone(args)\n    run_ranks(args)", "error"),
        ("    run_ranks(args)\n    run_alone(args)", "error"),
        ("    setup_distributed()\n" + CHOICE, "error"),
        ("    from group import make\n    make()\n" + CHOICE, "error"),
        ("    for _ in range(2):\n" + "".join(f"    {line}\n" for line in CHOICE.splitlines()), "error"),
    ],
)
def test_a_branch_that_makes_no_group(tmp_path, start, severity):
    files = {
        "train.py": BY_MODE.format(start=start),
        "group.py": GROUP,
        "start.sh": 'torchrun --nproc_per_node=8 train.py "$@"\n',
    }
    assert [one for _, one in severities_in(tmp_path, files, DEVICES, preview=True)] == [severity]


OF_ONE = """\
    class Head(torch.nn.Module):
        def __init__(self, size):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.empty(size))
            torch.nn.init.normal_(self.weight)

        def forward(self, rows):
            return rows * self.weight

    head = Head(args.size)
    head.train()
    head(torch.ones(args.size))
"""


@pytest.mark.parametrize(
    ("before", "severity"),
    [
        (OF_ONE, "info"),
        (OF_ONE.replace("    head(torch.ones(args.size))\n", ""), "error"),  # perhaps a trainer
        (OF_ONE.replace("torch.nn.Module", "Joins"), "error"),
    ],
)
def test_a_branch_that_makes_a_module(tmp_path, before, severity):
    alone = "def run_alone(args):\n"
    files = {
        "train.py": "from group import Joins\n" + BY_MODE.format(start=CHOICE).replace(alone, alone + before),
        "group.py": GROUP + "\n\nclass Joins:\n    def __init__(self):\n        make()\n",
        "start.sh": 'torchrun --nproc_per_node=8 train.py "$@"\n',
    }
    assert [one for _, one in severities_in(tmp_path, files, DEVICES, preview=True)] == [severity]


AFTER = """\
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def evaluate(model):
    score = model(torch.ones(2)).sum()
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(score)
    return score


def main():
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("nccl")
    model = torch.nn.Linear(2, 1)
    wrapped = DistributedDataParallel(model)
    wrapped(torch.ones(2)).sum().backward()
{after}
    if rank == 0:
        print(evaluate(model))


main()
"""
ENDS = "    if world_size > 1:\n        dist.barrier()\n        dist.destroy_process_group()"


@pytest.mark.parametrize(
    ("after", "found"),
    [
        (ENDS, []),
        ("    dist.destroy_process_group()", []),
        (ENDS + "\n    dist.init_process_group('gloo')", ["error"]),
        ("    if rank == 3:\n        raise SystemExit", ["error"]),
    ],
)
def test_a_group_that_is_destroyed(tmp_path, after, found):
    files = {"train.py": AFTER.format(after=after), "start.sh": "torchrun --nproc_per_node=8 train.py\n"}
    assert [one for _, one in severities_in(tmp_path, files, BOOK, preview=True)] == found
