"""Places that no start of a project reaches with several ranks: options that none gives, notebooks whose processes
cannot start, programs that see one GPU."""

from __future__ import annotations

import json

import pytest

from doctor.lint.engine.registry import Rulebook, builtin_rules
from tests.lint.linted import severities_in

BOOK = Rulebook(tuple(one for one in builtin_rules() if one.id in ("CODE001", "CODE003", "CODE005", "CODE008")))
HEAD = """\
import argparse
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

"""
LOADS = (
    HEAD
    + """\
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
parser.add_argument(
    "--load_optimizer",
    default=False,
    action="store_true",
)
args = parser.parse_args()
dist.init_process_group("nccl")
model = build().cuda()
if os.path.isfile("runs/optimizer.pt") and args.load_optimizer:
    optimizer.load_state_dict(torch.load("runs/optimizer.pt"))
train(DDP(model), optimizer)
"""
)


def found(folder, files, rule):
    hits = severities_in(folder, {"README.md": "# Nets\n", **files}, BOOK, preview=True)
    return [severity for id_, severity in hits if id_ == rule]


@pytest.mark.parametrize(
    ("files", "severity"),
    [
        ({"run.sh": "torchrun --nproc_per_node=8 train.py --lr 3\n"}, "info"),
        ({"README.md": "    torchrun --nproc_per_node=8 train.py --lr 3\n"}, "info"),
        ({"run.sh": "torchrun --nproc_per_node=8 train.py --lr 3 --load_optimizer\n"}, "warning"),
        ({"README.md": "    torchrun train.py --lr 3\n\nResume with `--load_optimizer`.\n"}, "warning"),
        ({"other.sh": "torchrun --nproc_per_node=8 other.py --lr 3\n"}, "warning"),
    ],
)
def test_a_branch_of_an_option_that_no_start_gives(tmp_path, files, severity):
    assert found(tmp_path, {"train.py": LOADS, "net.py": "print()\n", **files}, "CODE001") == [severity]


SPAWNS = (
    HEAD
    + """\
def main(rank, world_size):
    dist.init_process_group("nccl", rank=rank, world_size=world_size)
    model = DDP(torch.nn.Linear(8, 8).cuda())
    model(torch.ones(8, 8).cuda()).sum().backward()

if __name__ == "__main__":
    count = torch.cuda.device_count()
    torch.multiprocessing.spawn(main, args=(count,), nprocs=count)
"""
)


@pytest.mark.parametrize(
    ("command", "severity"),
    [
        ("CUDA_VISIBLE_DEVICES=0 python main.py --lr 3\n", "info"),
        ("CUDA_VISIBLE_DEVICES=0 python main.py\nCUDA_VISIBLE_DEVICES=1 python main.py\n", "info"),
        ("CUDA_VISIBLE_DEVICES=0,1 python main.py\n", "error"),
        ("CUDA_VISIBLE_DEVICES=0 python main.py\npython main.py\n", "error"),
        ("CUDA_VISIBLE_DEVICES=0 python other.py\n", "error"),
    ],
)
def test_a_rank_for_each_gpu_of_a_process_that_sees_one(tmp_path, command, severity):
    files = {"main.py": SPAWNS, "other.py": "print(1)\n", "run.sh": command}
    assert found(tmp_path, files, "CODE003") == [severity]


def notebook(source):
    return json.dumps(
        {
            "cells": [{"cell_type": "code", "source": source.splitlines(keepends=True), "metadata": {}, "outputs": []}],
            "metadata": {"kernelspec": {"language": "python", "name": "python3"}},
            "nbformat": 4,
            "nbformat_minor": 5,
        }
    )


@pytest.mark.parametrize(
    ("source", "severity"),
    [
        (SPAWNS, "info"),
        (
            SPAWNS.replace("nprocs=count", 'nprocs=count, start_method="fork"').replace(".spawn(", ".start_processes("),
            "error",
        ),
    ],
)
def test_a_new_interpreter_has_no_function_of_a_notebook(tmp_path, source, severity):
    assert found(tmp_path, {"ranks.ipynb": notebook(source)}, "CODE003") == [severity]


PUBLISHED = (
    HEAD
    + """\
dist.init_process_group("nccl")
flow = build().cuda()
flow.load_state_dict(torch.load("weights/flow_net.pth"))
train(DDP(flow))
"""
)


@pytest.mark.parametrize(
    ("line", "severity"),
    [
        ("wget https://example.com/models/flow_net.pth\n", "info"),
        ("wget https://example.com/models/other_flow_net.pth\n", "warning"),
        ("cp runs/flow_net.pth weights/\n", "warning"),
    ],
)
def test_a_file_that_the_project_downloads(tmp_path, line, severity):
    files = {"train.py": PUBLISHED, "get.sh": line, "run.sh": "torchrun --nproc_per_node=2 train.py\n"}
    assert found(tmp_path, files, "CODE001") == [severity]


RESUMES = (
    HEAD
    + """\
from options import args

dist.init_process_group("nccl")
model = build().cuda()
if os.path.isfile(args["pre"]):
    model.load_state_dict(torch.load(args["pre"])["state"])
train(DDP(model))
"""
)


@pytest.mark.parametrize(
    ("given", "severity"),
    [("--pre None", "info"), ("--lr 3", "info"), ("--pre runs/last.pth", "warning"), ("$@", "warning")],
)
def test_a_path_that_the_commands_of_a_program_leave_empty(tmp_path, given, severity):
    parser = "import argparse\n\nparser = argparse.ArgumentParser()\nparser.add_argument('--lr')\n"
    files = {
        "train.py": RESUMES,
        "test.py": "from options import args\n\nprint(args)\n",
        "options.py": f"{parser}parser.add_argument('--pre', default=None)\nargs = vars(parser.parse_args())\n",
        "run.sh": f"torchrun --nproc_per_node=2 train.py {given}\npython test.py --pre runs/best.pth\n",
    }
    assert found(tmp_path, files, "CODE001") == [severity]


LOGS = """\
import lightning as L
import torch

class Net(L.LightningModule):
    def {hook}(self, batch, batch_idx):
        self.score(batch["mask"])

    def score(self, mask):
        if torch.isnan(mask.mean()):
            return
        self.log("val_score", mask.mean(), sync_dist=True)

L.Trainer(devices=4).fit(Net())
"""


@pytest.mark.parametrize(
    ("hook", "more", "severity"),
    [
        ("validation_step", "", "info"),
        ("training_step", "", "warning"),
        ("validation_step", "class Other:\n    def validation_step(self, batch):\n        self.score(batch)\n", "info"),
        (
            "validation_step",
            "class Other:\n    def training_step(self, batch):\n        self.score(batch)\n",
            "warning",
        ),
    ],
)
def test_a_log_call_that_only_validation_steps_reach_adds_up(tmp_path, hook, more, severity):
    files = {"train.py": LOGS.format(hook=hook), "more.py": f"from train import Net\n\n{more}"}
    assert found(tmp_path, files, "CODE008") == [severity]


@pytest.mark.parametrize(("name", "severity"), [("init", "info"), ("resume", "warning")])
def test_an_empty_path_to_resume_from_is_one_to_fill_in(tmp_path, name, severity):
    files = {
        "train.py": LOADS.replace('"--load_optimizer"', f'"--{name}"')
        .replace("default=False", 'default=""')
        .replace('    action="store_true",\n', "")
        .replace('"runs/optimizer.pt"', f"args.{name}")
        .replace(" and args.load_optimizer", ""),
        "other.py": "print(1)\n",
        "run.sh": f"torchrun --nproc_per_node=2 train.py --{name} ''\npython other.py --{name} runs/best.pth\n",
    }
    assert found(tmp_path, files, "CODE001") == [severity]
