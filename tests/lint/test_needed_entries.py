"""Configurations without an entry that a program always reads are not of this program."""

import pytest

from doctor.lint.engine.registry import Rulebook, builtin_rules
from doctor.lint.python.project.settings.needed_entries import may_be_read
from doctor.lint.python.script import Script
from tests.lint.linted import severities_in

BOOK = Rulebook(tuple(one for one in builtin_rules() if one.id == "CODE032"))
PROGRAM = """\
import argparse

import torch
import yaml
from torch.nn.parallel import DistributedDataParallel


def evaluate(model, config):
    return model(config["captions"])


def train(model, loader, optimizer, config):
    steps = int(config.get("accumulate_steps", 1))
    for number, batch in enumerate(loader):
        loss = model(batch)
        loss.backward()
        if (number + 1) % steps == 0:
            optimizer.step()
            optimizer.zero_grad()


def main(args, config):
    torch.distributed.init_process_group("nccl")
    model = DistributedDataParallel(build(config))
    optimizer = torch.optim.SGD(model.parameters())
    if args.test:
        print(config["answers"])
    else:
        for epoch in range(config["epochs"]):
            train(model, load(config), optimizer, config)
            if rank() == 0:
                evaluate(model, config)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True)
    parser.add_argument("--test", action="store_true")
    args = parser.parse_args()
    config = yaml.load(open(args.config), Loader=yaml.Loader)
    main(args, config)
"""
OWN = "captions: 3\nepochs: 4\n"
OTHER = "answers: 3\nepochs: 4\naccumulate_steps: 2\n"
MERGED = PROGRAM.replace("    main(args, config)\n", "    config.update(defaults)\n    main(args, config)\n")


@pytest.mark.parametrize(
    ("program", "other", "severity"),
    [
        (PROGRAM, OTHER, "info"),
        (PROGRAM, f"{OTHER}captions: 1\n", "warning"),
        (PROGRAM, f"_base_: own.yaml\n{OTHER}", "warning"),
        (PROGRAM.replace('config["captions"]', 'config.get("captions")'), OTHER, "warning"),
        (PROGRAM.replace("    return model", '    config["captions"] = 2\n    return model'), OTHER, "warning"),
        (PROGRAM.replace("                evaluate(model, config)", "                print()"), OTHER, "warning"),
        (PROGRAM.replace("    return model", "    if model.captions:\n        return model"), OTHER, "warning"),
        (MERGED, OTHER, "warning"),
        (MERGED.replace("config.update(defaults)", "update(config, args.override)"), OTHER, "info"),
    ],
)
def test_a_configuration_of_another_program(tmp_path, program, other, severity):
    files = {"caption.py": program, "configs/own.yaml": OWN, "configs/other.yaml": other}
    assert severities_in(tmp_path, files, BOOK, preview=True) == [("CODE032", severity)]


def test_functions_that_call_each_other_end_the_search():
    text = "def first():\n    print(config['captions'])\n    second()\n\n\ndef second():\n    first()\n"
    script = Script("train.py", f"import yaml\n\nconfig = yaml.safe_load(open('a.yaml'))\n\n\n{text}")
    assert may_be_read(script, "other.yaml", "epochs: 4\n")
