"""Nothing that the doctor imports into a program moves the random state of that program."""

from __future__ import annotations

import ast
import random
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from doctor.core.random_state import random_state_kept
from tests.lab.needs import ROOT
from tests.lab.sample import long_only
from tests.lab.speed import patience

EVERY = """
import importlib, pkgutil, random, sys
random.seed(1)
state = random.getstate()
import doctor
modules = [one.name for one in pkgutil.walk_packages(doctor.__path__, "doctor.") if not one.name.endswith("__main__")]
for name in [*modules, *sys.argv[1:]]:
    try:
        importlib.import_module(name)
    except ImportError:
        continue
    if random.getstate() != state:
        print(name)
        random.setstate(state)
"""

BY_NAME = """
import random, sys
random.seed(1)
{before}
{ours}
print(random.random(), "rich" in sys.modules)
"""


def _run(program: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=patience(300)
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_modules_that_draw_while_they_are_imported_are_not_ours() -> None:
    """Third-party modules that functions import late count, too: the program that calls these may have set its seed."""
    moved = set(_run(EVERY, *sorted(_third_party())).split())
    assert not [name for name in moved if name.startswith("doctor")]
    assert moved <= {"rich.console", "rich.markdown", "rich.padding", "rich.rule", "rich.table"}


def _third_party() -> set[str]:
    """Modules of other distributions that any module of ours imports, frameworks of the user's own aside."""
    found: set[str] = set()
    for path in (ROOT / "doctor").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module)
            elif isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
    theirs = {
        "doctor",
        "doctor_checks",
        "lightning",
        "pytorch_lightning",
        "transformers",
        "ray",
        *sys.stdlib_module_names,
    }
    return {name for name in found if name.partition(".")[0] not in theirs}


@pytest.mark.parametrize(
    ("before", "ours", "needs"),
    [
        ("", "from doctor import watch\nwith watch(dirpath={folder!r}) as w: list(w.loader([1]))", "doctor"),
        ("", "from doctor import DoctorCallback\nDoctorCallback(); import lightning.pytorch", "lightning"),
        pytest.param(
            *("import lightning.pytorch", "from doctor import DoctorCallback\nDoctorCallback()", "lightning"),
            marks=long_only("it is run where it is imported before Lightning"),
        ),
        pytest.param(
            *("import transformers", "from doctor import HFDoctorCallback\nHFDoctorCallback()", "transformers"),
            marks=long_only("test_frameworks.py compares the numbers of a whole job of Transformers"),
        ),
    ],
)
def test_no_door_draws_or_spares_a_draw(before: str, ours: str, needs: str, tmp_path: Path) -> None:
    """A framework may draw when it is imported (Lightning imports rich): then as often as without the doctor."""
    if find_spec(needs) is None:
        pytest.skip(f"needs {needs}")
    theirs = "import lightning.pytorch" if needs == "lightning" and not before else "import random"
    theirs = "from transformers import TrainerCallback" if needs == "transformers" else theirs
    bare = _run(BY_NAME.format(before=before, ours=theirs))
    assert _run(BY_NAME.format(before=before, ours=ours.format(folder=str(tmp_path)))) == bare


def test_the_states_of_numpy_and_torch_are_kept() -> None:
    numpy: Any = pytest.importorskip("numpy")
    torch: Any = pytest.importorskip("torch")
    draws = [random.random, numpy.random.rand, lambda: torch.rand(1).item()]
    random.seed(3), numpy.random.seed(3), torch.manual_seed(3)
    expected = [draw() for draw in draws]
    random.seed(3), numpy.random.seed(3), torch.manual_seed(3)
    with random_state_kept():
        for draw in draws:
            draw()
    assert [draw() for draw in draws] == expected
