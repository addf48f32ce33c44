"""A method of the module inside DDP that has a whole step of training in it, in another file of the project."""

from __future__ import annotations

import pytest

from doctor.lint.engine.registry import Rulebook, builtin_rules
from tests.lint.linted import severities_in

BOOK = Rulebook(tuple(one for one in builtin_rules() if one.id == "CODE033"))
AGENT = """\
import torch
from torch import nn

class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(2, 2)
        self.optimizer = torch.optim.SGD(self.net.parameters(), 0.1)

    def learn(self, states):
        loss = self.net(states).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
"""
TRAIN = """\
import torch
from torch.nn.parallel import DistributedDataParallel as DDP
from agents import Agent

torch.distributed.init_process_group("gloo")
agent = DDP(Agent())
for states in range(9):
    agent.module.learn(torch.ones(2))
"""
ANOTHER = "class Head:\n    def learn(self, x):\n        return x\n"


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({}, [("CODE033", "error")]),
        ({"train.py": TRAIN.replace("agent.module.learn(", "agent(")}, []),
        ({"train.py": TRAIN.replace("    agent.module", "    agent(states)\n    agent.module")}, []),
        ({"agents.py": AGENT.replace("        loss.backward()\n", "")}, []),
        (
            {
                "agents.py": AGENT.replace(
                    "        self.optimizer.step()", "        average_gradients(self)\n        self.optimizer.step()"
                )
            },
            [],
        ),
        ({"agents.py": AGENT.replace("self.net(states)", "states")}, []),
        ({"heads.py": ANOTHER}, []),
    ],
)
def test_a_whole_step_in_a_method_goes_past_the_wrapper(tmp_path, files, found):
    assert severities_in(tmp_path, {"agents.py": AGENT, "train.py": TRAIN} | files, BOOK) == found


FREEZES = """\
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("nccl")
model = build()
for name, param in model.named_parameters():
    if {test}:
        {freezes}
model = DDP(model.cuda())
for x, y in loader:
    loss = criterion(model.module.{part}(x), y)
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("part", "freezes", "severity"),
    [
        ("text", "param.requires_grad_(False)", "info"),
        ("text", "param.requires_grad = False", "info"),
        ("text", "param.requires_grad = True", "error"),
        ("forward", "param.requires_grad_(False)", "error"),
    ],
)
def test_parts_of_a_model_that_is_frozen_by_names(tmp_path, part, freezes, severity):
    text = FREEZES.format(test='"visual" not in name', freezes=freezes, part=part)
    assert severities_in(tmp_path, {"train.py": text}, BOOK, preview=True) == [("CODE033", severity)]
