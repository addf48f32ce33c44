"""Comparisons of a rank with a value that may be computed from the rank as well (CODE005, CODE043)."""

from __future__ import annotations

import pytest

from doctor.lint.engine.registry import Rulebook, builtin_rules
from tests.lint.linted import severities_in

BOOK = Rulebook(tuple(one for one in builtin_rules() if one.id in ("CODE005", "CODE043")))
EXCHANGE = """\
import torch.distributed as dist

def exchange(send_to, tensor):
    if send_to != dist.get_rank():
        dist.barrier()
"""
CALLER = """\
import torch.distributed as dist
from exchange import exchange

dist.init_process_group("nccl")
rank = dist.get_rank()
for step in range(4):
    send_to = (rank + step) % dist.get_world_size()
    exchange(send_to, build())
"""


@pytest.mark.parametrize(
    ("test", "caller", "severity"),
    [
        ("send_to != dist.get_rank()", CALLER, "info"),
        ("send_to != dist.get_rank()", CALLER.replace("exchange(send_to", "exchange(0"), "error"),
        ("send_to != dist.get_rank()", CALLER.replace("(send_to", "(dist.get_world_size() - 1"), "error"),
        ("send_to == dist.get_rank()", CALLER.replace("exchange(send_to", "exchange(find(step)"), "info"),
        ("dist.get_rank() == 0", CALLER, "error"),
        ("dist.get_rank() in (0, 1)", CALLER, "error"),
        ("send_to != dist.get_rank() and dist.get_rank() != 0", CALLER, "error"),
    ],
)
def test_other_side_of_a_comparison_with_the_rank(tmp_path, test, caller, severity):
    files = {"exchange.py": EXCHANGE.replace("send_to != dist.get_rank()", test), "train.py": caller}
    assert severities_in(tmp_path, files, BOOK, preview=True) == [("CODE005", severity)]
    if severity == "info":
        assert severities_in(tmp_path, files, BOOK) == []


BOUND = """\
import torch.distributed as dist

def main(args):
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    chosen = {chosen}
    if rank == chosen:
        folder = make()
    model = DDP(build())
    load(folder)

main(parse())
"""


@pytest.mark.parametrize(("chosen", "severity"), [("find(rank)", "info"), ("args.writer", "error"), ("3", "error")])
def test_name_bound_where_the_rank_is_a_computed_one(tmp_path, chosen, severity):
    found = severities_in(tmp_path, {"train.py": BOUND.format(chosen=chosen)}, BOOK, preview=True)
    assert found == [("CODE043", severity)]


SAMPLE = """\
import torch

def sample(generator, x):
    with torch.no_grad():
        return generator(x)
"""
SHOWS = """\
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from sample import sample

def train(net, loader):
    rank = dist.get_rank()
    net = DDP(net)
    for x in loader:
        net(x).mean().backward()
        if rank == 0:
            sample(net, x)

dist.init_process_group("nccl")
train(nn.BatchNorm1d(3), build())
"""


@pytest.mark.parametrize(("changed", "severity"), [("no_grad", "info"), ("enable_grad", "warning")])
def test_forward_pass_in_a_function_of_another_file(tmp_path, changed, severity):
    files = {"sample.py": SAMPLE.replace("no_grad", changed), "train.py": SHOWS}
    assert severities_in(tmp_path, files, BOOK, preview=True) == [("CODE005", severity)]


VALIDATES = """\
import torch.distributed as dist

def main(opt):
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    for step in range(1000):
        train(step)
        if {test}:
            validate()
        else:
            dist.reduce(measure(), 0)

main(parse())
"""


@pytest.mark.parametrize(
    ("test", "severity"),
    [
        ("opt['model'] in ['sr', 'srgan'] and rank == 0", "info"),
        ("not opt.train and rank == 0", "info"),
        ("step % 10 == 0 and rank == 0", "error"),
        ("rank == 0", "error"),
    ],
)
def test_the_other_branch_of_an_option_and_the_rank(tmp_path, test, severity):
    found = severities_in(tmp_path, {"train.py": VALIDATES.format(test=test)}, BOOK, preview=True)
    assert found == [("CODE005", severity)]
