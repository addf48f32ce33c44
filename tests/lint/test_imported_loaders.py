"""Training loaders that a function of another module of the project makes (CODE010)."""

from __future__ import annotations

import pytest

from doctor.lint.engine.registry import Rulebook, builtin_rules
from tests.lint.linted import findings_in

BOOK = Rulebook(tuple(one for one in builtin_rules() if one.id == "CODE010"))
DATA = """\
import torch
from torch.utils.data import DataLoader


class Texts(torch.utils.data.Dataset):
    def __init__(self, path):
        self.lines = open(path).read().splitlines()

    def __len__(self):
        return len(self.lines)

    def __getitem__(self, index):
        return self.lines[index]


def prepare(path):
    train_set = Texts(path)
    train_loader = DataLoader(train_set, batch_size=8, shuffle=True)
    val_loader = DataLoader(Texts(path), batch_size=8)
    return train_loader, val_loader
"""
TRAIN = """\
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from data import prepare


def main(path):
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    train_loader, val_loader = prepare(path)
    model = DistributedDataParallel(torch.nn.Linear(8, 1).to(local_rank), device_ids=[local_rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in train_loader:
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()


if __name__ == "__main__":
    main("corpus.txt")
"""
START = {"start.sh": "torchrun --nproc_per_node=8 train.py\n"}


def found(folder, train=TRAIN, data=DATA):
    return [one for _, one in findings_in(folder, {"train.py": train, "data.py": data, **START}, BOOK, preview=True)]


def test_a_loader_of_another_module_that_gives_all_ranks_everything(tmp_path):
    (one,) = found(tmp_path)
    assert (one.severity.value, one.source.line) == ("error", 11)
    assert one.summary == ("train_loader has no distributed sampler (data.py:18): each rank trains on all of train_set")
    assert "at line 18 of data.py instead of `shuffle=True`" in one.fix


def test_a_function_that_returns_the_loader_alone(tmp_path):
    data = DATA.replace("return train_loader, val_loader", "return train_loader")
    train = TRAIN.replace("train_loader, val_loader =", "train_loader =")
    assert [one.severity.value for one in found(tmp_path, train, data)] == ["error"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("shuffle=True", "sampler=DistributedSampler(train_set)"),
        ("    return train", "    train_loader = shard(train_loader)\n    return train"),
        ("return train_loader, val_loader", "return val_loader, train_loader"),
        ("Texts(path)\n    train_loader", "Texts(path)[dist.get_rank() :: 8]\n    train_loader"),
        ("return train_loader, val_loader", "return build(train_loader, val_loader)"),
    ],
)
def test_a_module_that_may_divide_the_data(tmp_path, before, after):
    assert found(tmp_path, data=DATA.replace(before, after)) == []


def test_a_stream(tmp_path):
    data = DATA.replace("data.Dataset)", "data.IterableDataset)").replace(", shuffle=True", "")
    assert found(tmp_path, data=data) == []


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("prepare(path)", "prepare(path[local_rank])"),
        ("    model =", "    train_loader = part(train_loader, local_rank)\n    model ="),
        ("    train_loader, val", "    if dist.get_rank() == 0:\n        train_loader, val"),
        ("from data import prepare", "from other_data import prepare"),
        ("in train_loader:", "in val_loader:"),
    ],
)
def test_a_program_that_may_give_each_rank_its_part(tmp_path, before, after):
    assert found(tmp_path, TRAIN.replace(before, after)) == []


PARTS = """\
import torch.distributed as dist


class Parts:
    def __init__(self, path):
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.path = path

    def read(self):
        return open(self.path).read().splitlines()[self.rank :: self.ranks]
"""
KIND = "from parts import *\n\n\ndef kind_of(path):\n    return Parts\n"
OF_KIND = "kind_of(path)(path).read()"


@pytest.mark.parametrize(
    ("before", "after", "is_reported"),
    [
        ("", "", False),
        ("dist.get_rank(), dist.get_world_size()", "0, 1", True),
        ("[self.rank :: self.ranks]", "", False),
        ("class Parts:", "class Others:", True),
    ],
)
def test_a_class_that_asks_for_the_number_of_ranks_may_divide_its_data(tmp_path, before, after, is_reported):
    train = TRAIN.replace(
        "from data import prepare", "from torch.utils.data import DataLoader\nfrom kinds import kind_of"
    )
    train = train.replace("train_loader, val_loader = prepare(path)", "train_set = {}\n    train_loader = {}").format(
        OF_KIND, "DataLoader(train_set, batch_size=8, shuffle=True)"
    )
    files = {"train.py": train, "kinds.py": KIND, "parts.py": PARTS.replace(before, after), **START}
    assert bool(findings_in(tmp_path, files, BOOK)) is is_reported


SAMPLED = """\
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, RandomSampler
from texts import Texts


def main(args):
    dist.init_process_group("nccl")
    train_set = Texts(args.path)
    sampler = RandomSampler(train_set)
    train_loader = DataLoader(train_set, sampler=sampler, batch_size=8)
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    for epoch in range(9):
        if args.distributed:
            train_loader.sampler.set_epoch(epoch)
        for batch in train_loader:
            model(batch).sum().backward()


main(read())
"""


@pytest.mark.parametrize(
    ("before", "after", "severity"),
    [
        ("", "", "info"),
        ("train_loader.sampler.set", "sampler.set", "info"),
        ("train_loader.sampler.set_epoch(epoch)", "print(epoch)", "error"),
        ("train_loader.sampler.set", "test_loader.sampler.set", "error"),
        ("if args.distributed", "if hasattr(sampler, 'set_epoch')", "error"),
        ("if args.distributed", "if args.shuffles", "error"),
        (
            "    for epoch",
            "    for batch in train_loader:\n        model(batch).sum().backward()\n    for epoch",
            "error",
        ),
        (
            "        if args.distributed",
            "        for batch in train_loader:\n            model(batch).sum().backward()\n"
            "        if args.distributed",
            "error",
        ),
    ],
)
def test_a_sampler_that_has_no_epoch_ends_the_job_before_it_trains(tmp_path, before, after, severity):
    files = {"train.py": SAMPLED.replace(before, after) if before else SAMPLED, "texts.py": "class Texts:\n    pass\n"}
    found = findings_in(tmp_path, files | START, BOOK, preview=True)
    assert {one.severity.value for _, one in found} == {severity}


SAMPLERS = Rulebook(tuple(one for one in builtin_rules() if one.id == "CODE011"))
DIVIDES = """\
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


def prepare(path, ranks):
    data = read(path)
    sampler = DistributedSampler(data{shuffle})
    loader = DataLoader(data, sampler=sampler)
    if ranks == 1:
        loader = DataLoader(data, shuffle=True)
    return loader
"""
REPEATS = """\
import torch
from data import prepare
from net import init_distributed


def train(path, ranks):
    init_distributed(ranks)
    loader = prepare(path, ranks)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    {loop}:
        for batch in loader:
            model(batch).sum().backward()
            optimizer.step()


if __name__ == "__main__":
    train("corpus.txt", 4)
"""
EPOCHS = REPEATS.format(loop="for epoch in range(9)")
GROUP = "import torch\n\ndef init_distributed(ranks):\n    torch.distributed.init_process_group('nccl')\n"


@pytest.mark.parametrize(
    ("train", "shuffle", "net", "fix"),
    [
        (EPOCHS, "", GROUP, "Start the loop at line 11 with"),
        (REPEATS.format(loop="while optimizer.step_count < 9"), "", GROUP, "Count the epochs in the loop"),
        (EPOCHS, ", shuffle=False", GROUP, ""),
        (EPOCHS, "", f"{GROUP}\ndef begin(loader, epoch):\n    loader.sampler.set_epoch(epoch)\n", ""),
        (REPEATS.format(loop="if True"), "", GROUP, ""),
        (EPOCHS.replace("loader = prep", "loader = None\n    loader = prep"), "", GROUP, ""),
        (EPOCHS.replace("in loader", "in prepare(path, 1)"), "", GROUP, ""),
    ],
)
def test_the_sampler_of_a_loader_that_another_module_makes(tmp_path, train, shuffle, net, fix):
    files = {"train.py": train, "data.py": DIVIDES.format(shuffle=shuffle), "net.py": net, **START}
    fixes = [one.fix for _, one in findings_in(tmp_path, files, SAMPLERS)]
    assert [one[: len(fix)] for one in fixes] == ([fix] if fix else [])
