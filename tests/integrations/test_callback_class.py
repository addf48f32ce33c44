"""The callbacks as classes: whose they are, what they take, where they can be sent."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import doctor
from doctor.monitor.integrations.hook_guard import SWITCH
from tests.integrations.recorded import RecordedSession
from tests.lab.sample import long_only
from tests.lab.speed import patience

WITHOUT = """
import sys
for name in {missing!r}:
    sys.modules[name] = None
import doctor
{line}
"""


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_it_is_a_callback_of_every_lightning(package: str) -> None:
    lightning = pytest.importorskip(package)
    assert issubclass(doctor.DoctorCallback, lightning.Callback)
    trainer = lightning.Trainer(callbacks=doctor.DoctorCallback(), logger=False, accelerator="cpu")
    assert any(isinstance(one, doctor.DoctorCallback) for one in trainer.callbacks)


def test_every_hook_of_ours_is_one_of_lightnings() -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    from doctor.monitor.integrations.lightning.callback import LightningHooks

    hooks = {name for name in vars(LightningHooks) if not name.startswith("_")}
    assert hooks <= set(dir(lightning.Callback))


LIGHTNINGS = ("lightning.pytorch", "pytorch_lightning")

ONE_LIGHTNING = """
import copy, importlib, inspect, logging, pickle, sys, typing
first, other, order = {first!r}, {other!r}, {order!r}
if order == "callback first":
    from doctor import DoctorCallback
lightning = importlib.import_module(first)
from doctor import DoctorCallback

class Mine(DoctorCallback):
    def on_fit_start(self, trainer, pl_module):
        super().on_fit_start(trainer, pl_module)
        sys.stdout.write("mine ")

for kind in (DoctorCallback, Mine):
    callback = kind(hang_after=3.0)
    for one in (callback, pickle.loads(pickle.dumps(callback)), copy.deepcopy(callback)):
        assert type(one) is kind and isinstance(one, (lightning.Callback, kind))
        assert one.state_key == kind.__qualname__ and one._options == callback._options
assert issubclass(DoctorCallback, lightning.Callback)
assert "hang_after" in inspect.signature(DoctorCallback).parameters
assert "on_error" in typing.get_type_hints(DoctorCallback.__init__)

logging.getLogger(first).setLevel(logging.ERROR)
demos = importlib.import_module(first + ".demos.boring_classes")
trainer = lightning.Trainer(
    callbacks=Mine(), fast_dev_run=1, logger=False, accelerator="cpu", enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(demos.BoringModel())
assert other not in sys.modules
assert first.partition(".")[0] in sys.modules

later = importlib.import_module(other)
assert isinstance(DoctorCallback(), later.Callback) and isinstance(callback, later.Callback)
"""


OTHER_PAIRS = long_only("each package and each order is run once")


@pytest.mark.parametrize(
    ("first", "order"),
    [
        ("lightning.pytorch", "callback first"),
        ("pytorch_lightning", "lightning first"),
        pytest.param("lightning.pytorch", "lightning first", marks=OTHER_PAIRS),
        pytest.param("pytorch_lightning", "callback first", marks=OTHER_PAIRS),
    ],
)
def test_no_second_lightning_is_imported(first: str, order: str, tmp_path: Path) -> None:
    for package in LIGHTNINGS:
        pytest.importorskip(package)
    [other] = {*LIGHTNINGS} - {first}
    program = ONE_LIGHTNING.format(first=first, other=other, order=order)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        capture_output=True,
        text=True,
        timeout=patience(120),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "mine "
    said = [line for line in done.stderr.splitlines() if line and "rankdoctor" not in line]
    assert said == []


@pytest.mark.parametrize("package", [pytest.param(None, marks=OTHER_PAIRS), "pytorch_lightning"])
def test_where_no_lightning_is_loaded_one_is(package: str | None) -> None:
    for needed in LIGHTNINGS:
        pytest.importorskip(needed)
    missing = ["lightning"] if package else []
    line = "from doctor import DoctorCallback; DoctorCallback(); print(*sys.modules)"
    program = WITHOUT.format(missing=missing, line=line)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=patience(60))
    assert done.returncode == 0, done.stderr
    assert {*LIGHTNINGS} & {*done.stdout.split()} == {package or "lightning.pytorch"}


def test_it_travels_without_its_run(recorded: list[RecordedSession]) -> None:
    pytest.importorskip("lightning.pytorch")
    callback = doctor.DoctorCallback("somewhere", hang_after=3.0, ignore=["NET001"])
    callback._begin(lambda: _run(callback))
    assert callback._run is not None
    for twin in (pickle.loads(pickle.dumps(callback)), copy.deepcopy(callback)):
        assert type(twin) is type(callback)
        assert twin._options == callback._options
        assert twin._run is None
    assert callback._run is not None
    assert callback.state_dict() == {}


def _run(callback: Any) -> Any:
    from doctor.core.facts import TrainingFacts
    from doctor.monitor.integrations.adapter import AdapterRun

    return AdapterRun(callback._new_session(0, 1, Path("unused"), TrainingFacts()))


@pytest.mark.parametrize(
    "wrong",
    [
        {"on_error": "ignore"},
        {"on_hang": "kill"},
        {"hang_after": 0},
        {"hang_after": float("nan")},
        {"every_n_steps": 0},
        {"prometheus_port": 70_000},
        {"select": "NET"},
        {"select": ["NOPE99"]},
        {"probe": "full"},
    ],
)
def test_an_argument_that_cannot_be_meant_is_refused_at_once(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong)) if "select" not in wrong else "."):
        doctor.watch(**wrong)


@pytest.mark.parametrize(
    ("missing", "line", "says"),
    [
        (
            ["lightning", "pytorch_lightning"],
            "from doctor import DoctorCallback",
            "pip install lightning",
        ),
        (["transformers"], "from doctor import HFDoctorCallback", "pip install transformers"),
        (["lightning", "pytorch_lightning", "transformers", "torch"], "from doctor import *", ""),
    ],
)
def test_a_missing_framework_is_named(missing: list[str], line: str, says: str) -> None:
    program = WITHOUT.format(missing=missing, line=line)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=patience(60))
    assert done.returncode == bool(says), done.stderr
    assert says in done.stderr
    assert "ImportError" in done.stderr or not says


def test_watching_needs_no_torch() -> None:
    line = "with doctor.watch(dirpath={!r}) as w:\n    assert [*w.loader([1, 2])] == [1, 2]"
    program = WITHOUT.format(missing=["torch", "lightning"], line=line.format("/nowhere"))
    environ = {"PATH": "/usr/bin:/bin", SWITCH: "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=patience(60), env=environ
    )
    assert done.returncode == 0, done.stderr
