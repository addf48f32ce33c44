"""Values that a program gives to its first rank alone."""

import pytest

from doctor.lint.engine.registry import Rulebook, builtin_rules
from tests.lint.linted import severities_in

BOOK = Rulebook(tuple(one for one in builtin_rules() if one.id == "CODE001"))
MODULE = """\
import torch
import torch.distributed as dist


class Trainer:
    def __init__(self, rank, size, weights=None):
        dist.init_process_group("nccl", rank=rank, world_size=size)
        self.weights = weights
        torch.cuda.set_device(rank)
        self.net = torch.nn.Linear(3, 3).cuda()
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        if self.weights is not None:
            self.load_file(self.weights)

    def load_file(self, path):
        checkpoint = torch.load(path)
        self.net.load_state_dict(checkpoint["state"])

    def train(self, batch):
        self.net(batch).sum().backward()
        self.optimizer.step()


if __name__ == "__main__":
    Trainer(0, 1).train(torch.ones(3))
"""
PROGRAM = """\
import torch.distributed as dist

from learn import Trainer


def main(rank, weights):
    if rank != 0:
        weights = None
    trainer = Trainer(rank, 8, weights=weights)
    dist.broadcast(trainer.net.weight, src=0)


def again(rank):
    Trainer(rank, 8, None)
"""
LATER = PROGRAM.replace("    if rank != 0:\n        weights = None\n", "")


@pytest.mark.parametrize(
    ("files", "severity"),
    [
        ({"train.py": PROGRAM}, "info"),
        ({"train.py": PROGRAM, "show.py": "from learn import Trainer\n\nTrainer(0, 1, 'last.pt')\n"}, "info"),
        ({"train.py": LATER}, "warning"),
        ({"train.py": PROGRAM, "second.py": LATER}, "warning"),
        ({"train.py": PROGRAM.replace("rank != 0", "rank == 0")}, "warning"),
        ({"train.py": f"{PROGRAM}\n\nTrainer(0, 1, 'last.pt')\n"}, "warning"),
        ({"train.py": PROGRAM.replace("8, None", "8, **kept")}, "warning"),
    ],
)
def test_weights_of_the_first_rank(tmp_path, files, severity):
    assert severities_in(tmp_path, {"learn.py": MODULE, **files}, BOOK, preview=True) == [("CODE001", severity)]
