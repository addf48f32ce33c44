"""Write the output of commands that README.md shows.

    python benchmarks/samples.py

Each sample is the output of its command in an empty folder, in a terminal of 96 columns.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from evidence_pages import ROOT, write_between

BIN = Path(sys.executable).parent
WIDTH = "96"
FAILING = """import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.ones(2)
dist.all_reduce(total)
if dist.get_rank() == 2:
    raise KeyError("label")
dist.all_reduce(total)
"""


def run(command: list[str], folder: Path, variables: dict[str, str] | None = None) -> str:
    """The output of a command of the environment's bin folder."""
    environment = {**os.environ, "COLUMNS": WIDTH, "OMP_NUM_THREADS": "1", **(variables or {})}
    done = subprocess.run(
        [BIN / command[0], *command[1:]], cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )
    return done.stdout


def shown(command: str, output: str) -> str:
    """A block of code with a command and its output."""
    return f"```\n$ {command}\n{output.strip()}\n```"


def check_sample(folder: Path) -> str:
    """An interface that does not exist."""
    output = run(["doctor", "check", "--isolated", "-q", "--select", "NET007"], folder, {"NCCL_SOCKET_IFNAME": "eth9"})
    return shown("NCCL_SOCKET_IFNAME=eth9 doctor check -q --select NET007", output)


def diagnose_sample(folder: Path) -> str:
    """Four ranks, one of which raises."""
    (folder / "train.py").write_text(FAILING, encoding="utf-8")
    log = subprocess.run(
        [BIN / "torchrun", "--nproc-per-node=4", "train.py"],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=120,
    ).stdout
    (folder / "job.log").write_bytes(log)
    output = run(["doctor", "diagnose", "--isolated", "--quiet", "job.log"], folder).strip()
    summary = output.partition("\n\n")[0].replace(f"{folder}/", "")
    return shown("doctor diagnose job.log --quiet | head -4        # four ranks under torchrun", summary)


def lint_sample(folder: Path) -> str:
    """The example with three faults."""
    (folder / "train.py").write_bytes((ROOT / "examples" / "faulty_training.py").read_bytes())
    return shown("doctor lint -q train.py", run(["doctor", "lint", "--isolated", "-q", "train.py"], folder))


SAMPLES = {"check sample": check_sample, "diagnose sample": diagnose_sample, "lint sample": lint_sample}


if __name__ == "__main__":
    for name, sample in SAMPLES.items():
        with tempfile.TemporaryDirectory() as made:
            write_between(name, sample(Path(made)))
