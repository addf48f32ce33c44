"""Branches on entries of dictionaries that hold options of the program (CODE029)."""

from __future__ import annotations

import pytest

from doctor.lint.engine.registry import Rulebook, builtin_rules
from tests.lint.linted import severities_in

BOOK = Rulebook(tuple(one for one in builtin_rules() if one.id == "CODE029"))
PROGRAM = """\
import argparse
import torch
import torch.distributed as dist

def make(args, model):
    settings = {"plain": args.plain_format, "folder": args.folder}
    return model, settings

def save(model, settings):
    if settings["plain"]:
        torch.save(model.state_dict(), f"{settings['folder']}/last.pt")

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--plain_format", action="store_true")
    parser.add_argument("--folder", default="runs")
    dist.init_process_group("nccl")
    parts = make(parser.parse_args(), torch.nn.parallel.DistributedDataParallel(build()))
    model, settings = parts
    save(model, settings)

if __name__ == "__main__":
    main()
"""
RUN = "torchrun --nproc_per_node 8 train.py --folder runs\n"


@pytest.mark.parametrize(
    ("program", "command", "severity"),
    [
        (PROGRAM, RUN, "info"),
        (PROGRAM, RUN.replace("torchrun", "dlrover-run"), "info"),
        (PROGRAM, RUN.replace("torchrun", "start"), "warning"),
        (PROGRAM, RUN.replace("--folder", "--plain_format --folder"), "warning"),
        (PROGRAM.replace("    save(", '    settings["plain"] = True\n    save('), RUN, "warning"),
        (PROGRAM.replace("    save(", "    settings.update(read())\n    save("), RUN, "warning"),
        (
            PROGRAM.replace("    model, settings = parts", "    model, settings = parts[0], 1\n    settings = read()"),
            RUN,
            "warning",
        ),
    ],
)
def test_branch_on_an_entry_that_holds_an_option(tmp_path, program, command, severity):
    found = severities_in(tmp_path, {"train.py": program, "run.sh": command}, BOOK, preview=True)
    assert found == [("CODE029", severity)]
