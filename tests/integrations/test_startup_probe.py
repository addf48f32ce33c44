"""The ways between the hosts of a run, tried before its first batch."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.lab.hosts import LabHost, together

pytest.importorskip("torch")

TRAIN = """
import sys, torch, torch.distributed as dist
from doctor import watch
dist.init_process_group("gloo")
with watch(dirpath=sys.argv[1], probe="light") as w:
    for batch in w.loader([torch.rand(2) + dist.get_rank() for _ in range(3)]):
        dist.all_reduce(batch)
        w.step()
dist.destroy_process_group()
"""


def test_two_hosts_probe_their_connectivity(lab_hosts: Callable[..., tuple[LabHost, ...]], tmp_path: Path) -> None:
    hosts = lab_hosts(2)
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": hosts[0].name, "MASTER_PORT": "29517", "GLOO_SOCKET_IFNAME": "eth0"}
    argv = [sys.executable, script, tmp_path / "out"]
    done = together([(host, argv, {**common, "RANK": str(rank)}) for rank, host in enumerate(hosts)], timeout=60)
    assert [one.returncode for one in done] == [0, 0], "\n".join(one.stderr for one in done)
    assert "light probes: 2 hosts" in done[0].stderr, done[0].stderr + done[1].stderr
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    status = {result["name"]: result["status"] for result in report["results"]}
    assert {status[name] for name in ("peer-unreachable", "clocks-differ")} == {"pass"}, status
    assert report["verdict"] == "pass"
