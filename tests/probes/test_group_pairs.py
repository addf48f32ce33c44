"""Messages of pairs between real processes over Gloo: what is measured, and who has no time left."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from doctor.probes.group_pairs import FIRST_BYTES, MOST_BYTES
from tests.lab.needs import ROOT, clean_environ

pytest.importorskip("torch")

PROGRAM = """
import json, sys, datetime
import torch, torch.distributed as dist
from doctor.probes import group_pairs

place, count, folder, late = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:]
if str(place) in late:
    group_pairs.SECONDS = 0.0
store = dist.FileStore(folder + "/store", count)
dist.init_process_group("gloo", store=store, rank=place, world_size=count, timeout=datetime.timedelta(seconds=20))
partners = [place ^ 1, -1, place ^ 1] + ([place ^ 2] if count > 2 else [])
numbers = [10 + one for one in range(count)]
found = group_pairs.exchanges(partners, place, numbers, torch.device("cpu"))
print(json.dumps([[one.source, one.bytes, one.seconds, one.round] for one in found]))
dist.barrier()
"""


def played(count: int, folder: Path, *late: int) -> list[list[list[float]]]:
    """What each of so many processes measured; ``late`` ones have no time from the start."""
    environ = {**clean_environ(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-c", PROGRAM]
    processes = [
        subprocess.Popen(
            [*command, str(place), str(count), str(folder), *map(str, late)], stdout=subprocess.PIPE, env=environ
        )
        for place in range(count)
    ]
    try:
        return [json.loads(process.communicate(timeout=120)[0]) for process in processes]
    finally:
        for process in processes:
            process.kill()


def test_both_of_a_pair_measure_what_they_got(tmp_path: Path) -> None:
    one, other = played(2, tmp_path)
    for found, source in ((one, 11), (other, 10)):
        assert [(sender, turn) for sender, _, _, turn in found] == [(source, 0), (source, 2)]
        assert all(FIRST_BYTES <= size <= MOST_BYTES["cpu"] and 0 < seconds < 20 for _, size, seconds, _ in found)


def test_who_has_no_time_left_holds_nobody_up(tmp_path: Path) -> None:
    found = played(4, tmp_path, 3)
    assert [[int(sender) for sender, *_ in own] for own in found] == [[11, 11, 12], [10, 10], [10], []]
