"""A local address in a script is no fault of a project that starts it on one host only."""

from __future__ import annotations

import time

import pytest

from doctor.core.settings import Settings
from doctor.lint.engine.registry import Rulebook, builtin_rules
from doctor.lint.engine.releases import Releases
from doctor.lint.engine.runner import LintRequest, build_report, lint_paths

BOOK = Rulebook(tuple(one for one in builtin_rules() if one.id == "CODE025"))
SCRIPT = """\
import os
import torch

os.environ["MASTER_ADDR"] = "localhost"
torch.distributed.init_process_group("nccl", rank=int(os.environ["RANK"]))
"""

LOCAL = """\
rank = int(os.environ["LOCAL_RANK"])
sampler = torch.utils.data.distributed.DistributedSampler(data, num_replicas=8, rank=rank)
"""
OF_PORT = SCRIPT.replace('MASTER_ADDR"] = "localhost"', 'MASTER_PORT"] = "29600"')


@pytest.mark.parametrize(
    ("files", "severity"),
    [
        ({}, "warning"),
        ({"run.sh": "torchrun --nproc_per_node=4 train.py\n"}, "info"),
        ({"run.sh": "torchrun --nnodes=1 --node_rank=0 --nproc_per_node=4 train.py\n"}, "info"),
        ({"run.sh": "torchrun --nnodes=2 --nproc_per_node=4 train.py\n"}, "warning"),
        ({"run.sh": "srun python train.py\n"}, "warning"),
        ({"run.sh": "torchrun --nproc_per_node=4 test.py\n"}, "warning"),
        ({"README.md": "Run `torchrun --nproc_per_node=4 train.py`.\n"}, "info"),
        ({"train.py": f"{SCRIPT}{LOCAL}# torchrun --standalone --nproc_per_node=2 train.py\n"}, "info"),
        ({"train.py": f"{SCRIPT}{LOCAL}# torchrun --nnodes=2 --nproc_per_node=2 train.py\n"}, "warning"),
        ({"train.py": f"{SCRIPT}{LOCAL}# see torchrun in the manual\n"}, "warning"),
        ({"train.py": f"{SCRIPT}# torchrun --standalone --nproc_per_node=2 train.py\n"}, "warning"),
        ({"run.sh": "deepspeed train.py\n", "train.py": OF_PORT}, "info"),
        ({"run.sh": "deepspeed --master_port 29501 train.py\n", "train.py": OF_PORT}, "warning"),
        ({"run.sh": "torchrun --nproc_per_node=4 train.py\n", "train.py": OF_PORT}, "warning"),
    ],
)
def test_commands_for_one_host_give_the_same_address(tmp_path, files, severity):
    for name, text in {"train.py": SCRIPT, **files}.items():
        (tmp_path / name).write_text(text)
    asked = LintRequest(BOOK, Settings(preview=True), {one.id: one.family for one in BOOK.rules}, Releases({}))
    report = build_report(lint_paths([tmp_path], asked), asked, started=time.time())
    assert not [result for result in report.results if result.crash]
    assert [one.severity.value for result in report.results for one in result.findings] == [severity]
