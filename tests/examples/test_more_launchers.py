"""The recipes for Accelerate and LLaMA-Factory, over hosts of the lab."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.lab.hosts import LabHost, together
from tests.lab.sample import long_only

EXAMPLES = Path(__file__).parents[2] / "examples"
TRAIN = "import os; print('trained', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])"
# What llamafactory-cli does with its variables, in src/llamafactory/launcher.py of LLaMA-Factory 0.9.5; the program
# that it starts is the training itself.
LLAMAFACTORY = """#!/usr/bin/env bash
[ "$1" = train ] && [ "$FORCE_TORCHRUN" = 1 ] || exit 2
shift
exec torchrun --nnodes "$NNODES" --node_rank "$NODE_RANK" --nproc_per_node "$NPROC_PER_NODE" \\
    --master_addr "$MASTER_ADDR" --master_port "$MASTER_PORT" "$@"
"""

pytest.importorskip("torch")


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A training that says that it ran."""
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    return path


@pytest.fixture
def llamafactory(tmp_path: Path) -> Path:
    """The folder of a stand-in for llamafactory-cli."""
    command = tmp_path / "bin" / "llamafactory-cli"
    command.parent.mkdir()
    command.write_text(LLAMAFACTORY)
    command.chmod(0o755)
    return command.parent


Runs = list["subprocess.CompletedProcess[str]"]


def _on_both(hosts: tuple[LabHost, ...], argv: list[str | Path], common: dict[str, str], odd: dict[str, str]) -> Runs:
    """The recipe on both hosts; ``odd`` is what the second one has besides."""
    return together(
        [
            (host, ["bash", *argv], {**common, "NODE_RANK": str(place), **(odd if place else {})})
            for place, host in enumerate(hosts)
        ],
        timeout=110,
    )


SICK = {"NCCL_SOCKET_IFNAME": "eth9"}


def _trained(runs: Runs) -> None:
    for place, done in enumerate(runs):
        assert done.returncode == 0, (done.stdout, done.stderr)
        assert done.stdout.splitlines()[-1] == f"trained {place} of 2"


def _stopped(runs: Runs) -> None:
    assert [done.returncode for done in runs] == [1, 1], [(done.stdout, done.stderr) for done in runs]
    assert "NET007" in runs[0].stdout
    assert not any("trained" in done.stdout for done in runs)


@pytest.mark.parametrize(("odd", "ends"), [({}, _trained), (SICK, _stopped)], ids=["well", "fail"])
def test_accelerate_checks_and_trains(
    lab_hosts: Callable[..., tuple[LabHost, ...]], script: Path, odd: dict[str, str], ends: Callable[[Runs], None]
) -> None:
    pytest.importorskip("accelerate")
    hosts = lab_hosts(2)
    argv: list[str | Path] = [EXAMPLES / "accelerate.sh", "--multi_gpu", "--", script]
    ends(_on_both(hosts, argv, {"HEAD": hosts[0].name, "NODES": "2"}, odd))


@pytest.mark.parametrize(
    ("odd", "ends"),
    [
        pytest.param({}, _trained, id="well", marks=long_only("the job that fails is started, and Accelerate trains")),
        pytest.param(SICK, _stopped, id="fail"),
    ],
)
def test_llamafactory_is_checked_as_it_will_be_started(
    lab_hosts: Callable[..., tuple[LabHost, ...]],
    script: Path,
    llamafactory: Path,
    odd: dict[str, str],
    ends: Callable[[Runs], None],
) -> None:
    hosts = lab_hosts(2)
    common = {
        "NNODES": "2",
        "NPROC_PER_NODE": "1",
        "MASTER_ADDR": hosts[0].name,
        "MASTER_PORT": "29511",
        "PATH": f"{llamafactory}:{hosts[0].environ['PATH']}",
    }
    ends(_on_both(hosts, [EXAMPLES / "llamafactory.sh", script], common, odd))
