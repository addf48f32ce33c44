"""What an option asks for is an info where a project gives it in commands of one process alone."""

import pytest

from doctor.lint.engine.registry import Rulebook, builtin_rules
from tests.lint.linted import severities_in

BOOK = Rulebook(tuple(one for one in builtin_rules() if one.id == "CODE029"))
PROGRAM = """\
import argparse

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from net import Net

parser = argparse.ArgumentParser()
parser.add_argument("--export_to", default=None, type=str)
args = parser.parse_args()
dist.init_process_group("nccl")
model = Net().cuda()
if args.export_to:
    torch.save(model.state_dict(), args.export_to)
train(DistributedDataParallel(model))
"""
MANY = "python -m torch.distributed.launch --nproc_per_node=8 main.py --lr 1"
ONE = "python -m torch.distributed.launch --nproc_per_node=1 main.py --eval --export_to net.pth"


def page(*lines):
    return {"README.md": "\n".join(("# Nets", "```", *lines, "```", ""))}


FILES = {"main.py": PROGRAM, "net.py": "class Net:\n    pass\n"}
OFTEN = {
    "several processes export": page(MANY, ONE.replace("node=1", "node=8")),
    "one of two commands": page(MANY, ONE, f"{MANY} --export_to net.pth"),
    "an unknown number": page(MANY, ONE.replace("node=1", "node=$GPUS")),
    "a sentence": page(MANY, ONE) | {"docs.md": "`main.py`: add `--export_to net.pth` to keep the weights\n"},
    "a command with other options": page(MANY.replace("--lr 1", "$ARGS"), ONE),
    "a configuration": page(MANY, ONE) | {"run.sh": f"#!/bin/bash\n{MANY} --export-to net.pth\n"},
    "on by default": page(MANY, ONE) | {"main.py": PROGRAM.replace("default=None", "default='net.pth'")},
    "set by the program": page(MANY, ONE)
    | {"main.py": PROGRAM.replace("dist.init", "args.export_to = args.export_to or 'a'\ndist.init")},
    "no condition": page(MANY, ONE) | {"main.py": PROGRAM.replace("if args.export_to", "if torch.cuda.is_available()")},
    "an option of restarts": {
        one: text.replace("export_to", "resume_to") for one, text in (FILES | page(MANY, ONE)).items()
    },
}


@pytest.mark.parametrize("name", OFTEN)
def test_options_that_several_processes_may_have(tmp_path, name):
    assert severities_in(tmp_path, FILES | OFTEN[name], BOOK) == [("CODE029", "warning")]


@pytest.mark.parametrize(
    "files",
    [
        page(MANY, ONE),
        page(MANY, ONE) | {"main.py": PROGRAM.replace("if args.export_to", "if args.export_to is not None")},
        page(MANY) | {"export.sh": f"#!/bin/bash\n{ONE}\n"},
        page(MANY, "python main.py --export_to net.pth"),
    ],
)
def test_an_option_of_one_process(tmp_path, files):
    assert severities_in(tmp_path, FILES | files, BOOK, preview=True) == [("CODE029", "info")]
