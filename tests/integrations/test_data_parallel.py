"""Who shares the data in a loop of the user's own, and what is not known of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch.utils.data import DataLoader, DistributedSampler

import doctor
from doctor.core.facts import Sampler
from doctor.monitor.integrations.data_parallel import DataParallelRank, infer_data_parallel_rank
from doctor.monitor.integrations.torch_state import MEGATRON, TorchRank, ddp_arguments
from tests.integrations.recorded import RecordedSession
from tests.lab.speed import patience

PROGRAM = Path(__file__).with_name("data_parallel_ranks.py")
ROOT = Path(__file__).parents[2]

ALL = [[rank, 4, 0] for rank in range(4)]
PAIRS = [[0, 2, 0], [0, 2, 1], [1, 2, 0], [1, 2, 1]]
"""Ranks 0 and 2 are one group, ranks 1 and 3 another."""
EXPECTED = {
    "bare": [[None, None, None]] * 4,
    "ddp": ALL,
    "ddp of two": PAIRS,
    "ddp within": ALL,
    "fsdp": PAIRS,
    "hybrid fsdp": ALL,
    "fully_shard": PAIRS,
    "hybrid fully_shard": ALL,
}


def test_wrappers_tell_which_ranks_they_join(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(tmp_path)],
        cwd=ROOT,
        timeout=patience(60),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    assert {"bare", "ddp of two", "hybrid fsdp"} <= ranks[0].keys()
    assert {name: [rank[name] for rank in ranks] for name in ranks[0]} == {name: EXPECTED[name] for name in ranks[0]}


class _Wrapper(torch.nn.Module):
    """The attributes of DistributedDataParallel."""

    find_unused_parameters, static_graph, broadcast_buffers = True, False, True
    bucket_bytes_cap = 25 * 2**20


def test_arguments_that_decide_on_collectives() -> None:
    wrapper = type("DistributedDataParallel", (_Wrapper,), {})()
    usual = {"find_unused_parameters": "True", "static_graph": "False", "bucket_cap_mb": "25"}
    assert {one.name: one.value for one in ddp_arguments(wrapper)} == usual
    wrapper.norm = torch.nn.BatchNorm1d(2)
    assert {one.name: one.value for one in ddp_arguments(wrapper)} == usual | {"broadcast_buffers": "True"}
    assert ddp_arguments(_Wrapper()) == ()
    of_megatron = type("DistributedDataParallel", (_Wrapper,), {"__module__": f"{MEGATRON}ddp", "buffers": []})()
    assert ddp_arguments(of_megatron) == ()


def _parting(replicas: int | None, rank: int | None) -> Sampler:
    return Sampler("DistributedSampler", replicas is not None, replicas, rank)


@pytest.mark.parametrize(
    ("samplers", "share"),
    [
        ([_parting(4, 2)], DataParallelRank(2, 4)),
        ([_parting(4, 0)], DataParallelRank(2, 4)),  # another rank's part: whose place this is the world tells
        ([_parting(2, 1)], DataParallelRank(1, 2)),
        ([Sampler("RandomSampler"), _parting(4, 2)], DataParallelRank(2, 4)),
        ([_parting(3, 1)], DataParallelRank()),
        ([_parting(8, 2)], DataParallelRank()),
        ([_parting(1, 0)], DataParallelRank()),
        ([_parting(2, 2)], DataParallelRank()),
        ([Sampler("RandomSampler")], DataParallelRank()),
        ([], DataParallelRank()),
    ],
)
def test_samplers_tell_between_how_many_the_data_is_parted(samplers: list[Sampler], share: DataParallelRank) -> None:
    assert infer_data_parallel_rank(torch.nn.Linear(1, 1), samplers, TorchRank(2, 4)) == share


def test_a_process_alone_reads_everything() -> None:
    assert infer_data_parallel_rank(None, [_parting(2, 1)], TorchRank()) == DataParallelRank(0, 1)


@pytest.mark.usefixtures("recorded")
def test_a_loop_learns_it_from_the_loaders_that_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    sampler: Any = DistributedSampler(range(8), num_replicas=2, rank=1)
    with doctor.watch() as w:
        w.model(torch.nn.Linear(1, 1))
        training = [RecordedSession.made[0].telemetry.training]
        for loader in (DataLoader(torch.arange(8)), DataLoader(torch.arange(8), sampler=sampler)):
            list(w.loader(loader))
            training.append(RecordedSession.made[0].telemetry.training)
    places = [(one.data_parallel_rank, one.data_parallel_size, one.data_parallel_root) for one in training]
    assert places == [(None, None, None), (None, None, None), (1, 2, None)]
