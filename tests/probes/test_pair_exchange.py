"""Messages of pairs between real processes over Gloo: what is measured, and who has no time left."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from doctor.probes.collectives.group_limits import FIRST_BYTES, MOST_BYTES, NO_TIME
from tests.lab.needs import ROOT, clean_environ
from tests.lab.speed import patience

pytest.importorskip("torch")

PROGRAM = """
import json, os, sys, datetime
import torch, torch.distributed as dist
from doctor.probes.collectives import pair_exchange

count, folder, late = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
place = next((one for one in range(1, count) if not os.fork()), 0)
if str(place) in late:
    pair_exchange.SECONDS = 0.0
store = dist.FileStore(folder + "/store", count)
dist.init_process_group("gloo", store=store, rank=place, world_size=count, timeout=datetime.timedelta(seconds=20))
partners = [place ^ 1, -1, place ^ 1] + ([place ^ 2] if count > 2 else [])
numbers = [10 + one for one in range(count)]
pairs = pair_exchange.PairExchange(place, numbers, torch.device("cpu"))
if "room" in late and place == 1:
    pair_exchange.MOST_BYTES = {"cpu": 1 << 60}
reason = pairs.run(partners)
found = [[one.source, one.bytes, one.seconds, one.round, one.round_trip] for one in pairs.found]
with open(f"{folder}/{place}.json", "w") as answer:
    json.dump([reason, found], answer)
dist.barrier()
if place == 0:
    sys.exit(any(os.wait()[1] for _ in range(count - 1)))
"""


def played(count: int, folder: Path, *odd: int | str) -> list[tuple[str, list[list[float]]]]:
    """Why each of so many processes ended early, and what it measured; those in ``odd`` have no time from the start, or
    rank 1 has no ``room``. They are forks of one process, which imports torch once."""
    environ = {**clean_environ(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-c", PROGRAM, str(count), str(folder), *map(str, odd)]
    subprocess.run(command, env=environ, check=True, timeout=patience(120))
    return [json.loads((folder / f"{place}.json").read_text()) for place in range(count)]


def test_both_of_a_pair_measure_what_they_got(tmp_path: Path) -> None:
    for (reason, found), source in zip(played(2, tmp_path), (11, 10), strict=True):
        assert reason == ""
        assert [(sender, turn) for sender, _, _, turn, _ in found] == [(source, 0), (source, 2)]
        assert all(FIRST_BYTES <= size <= MOST_BYTES["cpu"] for _, size, *_ in found)
        assert all(trip > 0 and seconds > 0 for _, _, seconds, _, trip in found)


def test_where_one_has_no_time_left_nobody_begins_another_round(tmp_path: Path) -> None:
    assert played(4, tmp_path, 3) == [[NO_TIME, []]] * 4


def test_where_one_has_no_room_it_says_so_and_nobody_waits_for_it(tmp_path: Path) -> None:
    (other, found), (own, none) = played(2, tmp_path, "room")
    assert own.startswith("no room for messages: ")
    assert other == NO_TIME
    assert found == none == []
