"""Hits that say less than they seem to: hooks that did nothing, trials on random numbers, branches for one GPU."""

from __future__ import annotations

import pytest

from doctor.lint.engine.registry import Rulebook, builtin_rules
from tests.lint.linted import severities_in


def book(rule):
    return Rulebook(tuple(one for one in builtin_rules() if one.id == rule))


MODULE = """\
import pytorch_lightning as pl

class Model(pl.LightningModule):
    def training_step(self, batch, batch_idx):
        return {{"loss": self.loss(batch)}}

    def training_step_end(self, outputs):
        {body}

trainer = pl.Trainer(devices=4)
trainer.fit(Model())
"""


@pytest.mark.parametrize(
    ("body", "severity"),
    [
        ("return outputs['loss']", "info"),
        ("'''Average.'''\n        return outputs['loss'].mean()", "info"),
        ("return outputs", "info"),
        ("return outputs['distance']", "error"),
        ("self.log('loss', outputs['loss'])\n        return outputs['loss']", "error"),
    ],
)
def test_hook_that_gave_back_what_it_got(tmp_path, body, severity):
    files = {"train.py": MODULE.format(body=body), "requirements.txt": "pytorch-lightning>=2.0\n"}
    assert severities_in(tmp_path, files, book("CODE022"), preview=True) == [("CODE022", severity)]


TRIAL = """\
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

def train(device):
    model = DDP(torch.nn.Linear(4, 5).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    measure = torch.nn.MSELoss()
    for step in range(5):
        batch = torch.randn(2, 4).to(device)
        labels = torch.randn(2, 5).to(device)
        loss = measure(model(batch), labels)
        loss.backward()
        optimizer.step()

torch.distributed.init_process_group("nccl")
train("cuda")
"""


@pytest.mark.parametrize(
    ("before", "after", "severity"),
    [
        ("", "", "info"),
        ("range(5)", "range(5000)", "error"),
        ("torch.randn(2, 4)", "next(loader)", "error"),
    ],
)
def test_few_steps_on_random_numbers(tmp_path, before, after, severity):
    files = {"train.py": TRIAL.replace(before, after) if before else TRIAL}
    assert severities_in(tmp_path, files, book("CODE042"), preview=True) == [("CODE042", severity)]


LOADER = """\
import torch
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

def main(args, dataset):
    gpu_nums = (len(args.devices) + 1) // 2
    if gpu_nums > 1:
        torch.distributed.init_process_group(backend="nccl")
    if {test}:
        train_loader = DataLoader(dataset, batch_size=8, shuffle=True)
    else:
        train_loader = DataLoader(dataset, batch_size=8, sampler=DistributedSampler(dataset))
    model = build()
    if gpu_nums > 1:
        model = torch.nn.parallel.DistributedDataParallel(model)
    for batch in train_loader:
        model(batch).mean().backward()

main(parse(), load())
"""


@pytest.mark.parametrize(("test", "expected"), [("gpu_nums == 1", []), ("args.simple", ["CODE010"])])
def test_loader_of_the_branch_for_one_gpu(tmp_path, test, expected):
    found = severities_in(tmp_path, {"train.py": LOADER.format(test=test)}, book("CODE010"), preview=True)
    assert [rule for rule, _ in found] == expected
