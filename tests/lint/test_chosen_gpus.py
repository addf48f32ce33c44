"""A misspelled CUDA_VISIBLE_DEVICES is an info where Accelerate's configuration chooses the same GPUs."""

import pytest

from doctor.lint.engine.registry import Rulebook, builtin_rules
from tests.lint.linted import severities_in

BOOK = Rulebook(tuple(one for one in builtin_rules() if one.id == "NCCL001"))
COMMAND = "CUDA_VISISBLE_DEVICES=0,1 accelerate launch --config_file=configs/two.yaml train.py\n"
CONFIGURATION = '{\n  "distributed_type": "MULTI_GPU",\n  "gpu_ids": "0,1",\n  "num_processes": 2\n}\n'


@pytest.mark.parametrize(
    ("command", "configuration", "severity"),
    [
        (COMMAND, CONFIGURATION, "info"),
        (COMMAND, "distributed_type: MULTI_GPU\ngpu_ids: 0,1\nnum_processes: 2\n", "info"),
        (COMMAND, CONFIGURATION.replace("0,1", "2,3"), "warning"),
        (COMMAND, CONFIGURATION.replace("0,1", "all"), "warning"),
        (COMMAND.replace("two", "other"), CONFIGURATION, "warning"),
        (COMMAND.replace("launch", "launch --gpu_ids=all"), CONFIGURATION, "warning"),
        (COMMAND.replace("accelerate launch --config_file=configs/two.yaml", "torchrun"), CONFIGURATION, "warning"),
        (COMMAND.replace("CUDA_VISISBLE_DEVICES=0,1", "NCCL_SOKET_IFNAME=0,1"), CONFIGURATION, "warning"),
    ],
)
def test_gpus_of_a_configuration(tmp_path, command, configuration, severity):
    files = {"train.sh": f"#!/bin/bash\n{command}", "configs/two.yaml": configuration, "train.py": "print()\n"}
    assert severities_in(tmp_path, files, BOOK) == [("NCCL001", severity)]
