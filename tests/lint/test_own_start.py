"""Parts of modules that only their own start as one process reaches."""

import pytest

from doctor.lint.engine.registry import Rulebook, builtin_rules
from tests.lint.linted import severities_in

BOOK = Rulebook(tuple(one for one in builtin_rules() if one.id == "CODE002"))
MODULE = """\
import torch
import torch.distributed as dist


class Trainer:
    def __init__(self, rank, size, dist=True):
        self.net = torch.nn.Linear(3, 3).cuda()
        if dist:
            start(rank, size)


def start(rank, size):
    dist.init_process_group("nccl", rank=rank, world_size=size)
    print("local_rank", rank)


def train_single(steps):
    torch.cuda.set_device(0)
    trainer = Trainer(0, 1, dist=False)
    for _ in range(steps):
        trainer.net(torch.ones(3)).sum().backward()


if __name__ == "__main__":
    train_single(10)
"""
PROGRAM = """\
import torch.distributed as dist

from learn import Trainer
from tools import *

dist.init_process_group("nccl")
Trainer(dist.get_rank(), dist.get_world_size(), dist=False)
"""
WHOLE = {"train.py": PROGRAM, "tools.py": "LIMIT = 3\n", "run.sh": "torchrun --nproc_per_node=8 train.py\n"}


@pytest.mark.parametrize(
    ("files", "severity"),
    [
        ({"learn.py": MODULE}, "info"),
        ({"learn.py": MODULE.replace("Trainer(0, 1, dist=False)", "Trainer(0, 1)")}, "error"),
        ({"learn.py": MODULE.replace("Trainer(0, 1, dist=False)", "Trainer(0, 1, dist=True)")}, "error"),
        ({"learn.py": MODULE, "run.sh": "torchrun --nproc_per_node=8 learn.py\n"}, "error"),
        ({"learn.py": MODULE, "train.py": PROGRAM.replace("tools import", "learn import")}, "error"),
        ({"learn.py": MODULE, "train.py": f"{PROGRAM}\nlearn.train_single(3)\n"}, "error"),
    ],
)
def test_a_module_that_trains_by_itself_in_one_process(tmp_path, files, severity):
    assert severities_in(tmp_path, {**WHOLE, **files}, BOOK, preview=True) == [("CODE002", severity)]
