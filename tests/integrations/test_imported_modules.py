"""What a training process imports because of the callback: only what evaluates and reports a run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.lab.speed import patience

FIT = """
import re
import sys
import lightning.pytorch as L
import torch
from torch.utils.data import DataLoader, TensorDataset

class Tiny(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

def fit(*callbacks):
    trainer = L.Trainer(accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False,
                        enable_progress_bar=False, callbacks=[*callbacks])
    trainer.fit(Tiny(), DataLoader(TensorDataset(torch.ones(8, 4))))

fit()
before = set(sys.modules)
from doctor import DoctorCallback
fit(DoctorCallback("."))
new = sorted(set(sys.modules) - before)
print("imported", *new)
values = [(f"{name}.{key}", value) for name in new for key, value in vars(sys.modules[name]).items()]
types = {value for name, value in values if isinstance(value, type) and value.__module__.startswith("doctor")}
print("tuples", *[one.__qualname__ for one in types if issubclass(one, tuple)])
print("dataclasses", *[one.__qualname__ for one in types if hasattr(one, "__dataclass_fields__")])
print("compiled", *[name for name, value in values if name.startswith("doctor") and isinstance(value, re.Pattern)])
"""

ABSENT = ("attach", "cli", "estimate", "lint", "postmortem", "probes", "report.html", "monitor.autostart")
"""Rooms, and parts of them, that only commands need."""

MOST_MODULES, MOST_TUPLES = 430, 21
"""Of a healthy fit of one process, which may take 0.2 s longer because of the callback."""


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """What a healthy fit of one process printed of itself, by the first word of the line."""
    pytest.importorskip("lightning.pytorch")
    folder = tmp_path_factory.mktemp("fit")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FIT], cwd=folder, capture_output=True, text=True, timeout=patience(120)
    )
    assert done.returncode == 0, done.stderr
    assert (Path(folder) / "report.json").is_file(), done.stderr
    kinds = ("imported", "tuples", "dataclasses", "compiled")
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith(kinds)]
    return {first: set(names) for first, *names in lines}


@pytest.fixture(scope="module")
def imported(printed: dict[str, set[str]]) -> set[str]:
    """The modules that a healthy fit of one process imports because of the callback."""
    return printed["imported"]


def test_rooms_of_commands_are_absent(imported: set[str]) -> None:
    assert {"doctor.monitor", "doctor.collectors", "doctor_checks.launch.master_port_invalid"} <= imported
    assert [name for name in imported if f"{name}.".startswith(tuple(f"doctor.{room}." for room in ABSENT))] == []


def test_rules_are_absent(imported: set[str]) -> None:
    assert [name for name in imported if name.startswith(("doctor_checks.rules", "doctor_checks.code"))] == []


def test_libraries_of_commands_are_absent(imported: set[str]) -> None:
    libraries = {name.partition(".")[0] for name in imported}
    assert (
        libraries & {"rich", "yaml", "jinja2", "libcst", "re2", "ahocorasick_rs", "argparse", "html", "psutil"} == set()
    )


def test_what_locates_slow_paths_is_absent(imported: set[str]) -> None:
    assert [name for name in imported if name.startswith("doctor.analysis.fabric.localization")] == []


def test_few_modules_are_imported(imported: set[str]) -> None:
    """Each takes a fifth of a millisecond before the first batch."""
    assert len(imported) <= MOST_MODULES


def test_few_records_are_named_tuples(printed: dict[str, set[str]]) -> None:
    """To define one takes 0.15 ms, and 0.02 ms to define a struct."""
    assert len(printed["tuples"]) <= MOST_TUPLES, sorted(printed["tuples"])


def test_no_record_is_a_dataclass(printed: dict[str, set[str]]) -> None:
    """To define one takes 0.6 ms."""
    assert printed["dataclasses"] == set()


def test_no_pattern_of_a_module_is_compiled_while_it_is_imported(printed: dict[str, set[str]]) -> None:
    """Most are for logs and faults; :func:`doctor.core.text.lazy_compile` compiles the others when they are used."""
    assert printed["compiled"] == set()
