"""What groups are for, in a process that has them: of torch's mesh, of DeepSpeed and of Megatron-LM."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.lab.needs import ROOT, clean_environ
from tests.lab.ports import free_port
from tests.lab.speed import patience

BEGIN = """
import json, os, sys, types
import torch.distributed as dist
dist.init_process_group("gloo", rank=0, world_size=1, init_method=sys.argv[1])
"""
MESH = """
for name in ("dp", "cp"):  # a dimension of all ranks has the default group
    dist.new_group([0], group_desc=f"mesh_{name}")
"""
OF_A_MODULE = """
groups = types.ModuleType("deepspeed.utils.groups")
groups._EXPERT_PARALLEL_GROUP = {"ep_size_2": dist.new_group([0])}
groups._EXPERT_PARALLEL_GROUP_RANKS = {"ep_size_2": [[0]]}
groups._TENSOR_MODEL_PARALLEL_GROUP = groups._MODEL_PARALLEL_GROUP = dist.new_group([0])
groups._DATA_PARALLEL_GROUP = None
sys.modules[groups.__name__] = groups
dist.new_group([0])  # of the program
"""
DEEPSPEED = """
import deepspeed
from deepspeed.utils import groups
deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
groups._create_expert_and_data_parallel(1)
"""
MEGATRON = """
from megatron.core import parallel_state
parallel_state.initialize_model_parallel()
"""
END = """
from doctor.monitor.telemetry.group_names import group_descriptions
print(json.dumps(group_descriptions()))
dist.destroy_process_group()
"""


def descriptions(folder: Path, program: str) -> list[str]:
    """The descriptions of the groups in a process, without that of the default group."""
    command = [sys.executable, "-c", BEGIN + program + END, f"tcp://127.0.0.1:{free_port()}"]
    environ = clean_environ(folder) | {"PYTHONPATH": f"{ROOT}:{ROOT / 'checks'}"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=patience(600))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.pop("0", "default_pg") == "default_pg"
    return list(found.values())


def test_those_that_torch_knows(tmp_path: Path) -> None:
    assert descriptions(tmp_path, MESH) == ["mesh_dp", "mesh_cp"]


def test_those_in_variables_of_a_module(tmp_path: Path) -> None:
    assert descriptions(tmp_path, OF_A_MODULE) == ["EXPERT_PARALLEL_GROUP ep_size_2", "TENSOR_MODEL_PARALLEL_GROUP"]


@pytest.mark.timeout(660)  # DeepSpeed compiles an extension when it is used first
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs deepspeed; benchmarks/frameworks/environment has it")
def test_those_of_deepspeed(tmp_path: Path) -> None:
    found = descriptions(tmp_path, DEEPSPEED)
    assert {"EXPERT_PARALLEL_GROUP ep_size_1", "EXPERT_DATA_PARALLEL_GROUP ep_size_1"} <= set(found)


@pytest.mark.skipif(
    find_spec("megatron") is None, reason="needs megatron-core; benchmarks/frameworks/environment has it"
)
def test_those_of_megatron(tmp_path: Path) -> None:
    found = descriptions(tmp_path, MEGATRON)
    assert {"CONTEXT_PARALLEL_GROUP", "EXPERT_MODEL_PARALLEL_GROUP", "PIPELINE_MODEL_PARALLEL_GROUP"} <= set(found)
