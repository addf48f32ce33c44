"""A forward pass of DDP on one rank: it waits for the others only if the model has buffers."""

from __future__ import annotations

import pytest

from doctor.lint.engine.registry import Rulebook, builtin_rules
from tests.lint.linted import severities_in

BOOK = Rulebook(tuple(one for one in builtin_rules() if one.id == "CODE005"))
TRAIN = """\
import os
import torch
import torchvision
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from models import Net, build


def main(rank, loader, optimizer):
    dist.init_process_group("nccl")
    model = DDP({model}.to(rank), device_ids=[rank])
    for x, y in loader:
        model(x).sum().backward()
        optimizer.step()
        if rank == 0:
            print(model(x))


if __name__ == "__main__":
    main(int(os.environ["LOCAL_RANK"]), [], torch.optim.SGD([], 0.1))
"""
NET = """\
from torch import nn


class Net(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3)
        {layer}

    def forward(self, x):
        return self.first(x)


def build():
    return Net(nn.Identity)
"""


@pytest.mark.parametrize(
    ("model", "layer", "severity"),
    [
        ("Net(3)", "self.norm = nn.BatchNorm2d(8)", "warning"),
        ("Net(3)", 'self.register_buffer("mean", torch.zeros(8))', "warning"),
        ("torchvision.models.resnet18()", "pass", "warning"),
        ("nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))", "pass", "warning"),
        ("nn.SyncBatchNorm.convert_sync_batchnorm(build())", "pass", "warning"),
        ("Net(3)", "self.norm = norm(8)", "info"),
        ("build()", "self.norm = nn.BatchNorm2d(8)", "info"),
    ],
)
def test_what_is_known_of_the_buffers(tmp_path, model, layer, severity):
    files = {
        "train.py": TRAIN.format(model=model),
        "models.py": NET.format(layer=layer),
        "run.sh": "torchrun --nproc_per_node=4 train.py\n",
    }
    assert severities_in(tmp_path, files, BOOK, preview=True) == [("CODE005", severity)]
