"""What rules know of Lightning holds for the Lightning that is installed."""

from importlib.util import find_spec
from pathlib import Path

import msgspec
import pytest

from doctor.api import Script
from doctor.knowledge.data_files import read
from doctor.knowledge.lightning_api import ArgumentInfo, hook, imported
from doctor.lint.python.lightning_version import known_lightning
from tests.lab.cases import each_case


class Tables(msgspec.Struct):
    imports: dict[str, ArgumentInfo]
    methods: dict[str, ArgumentInfo]


TABLES = read("lightning.json", Tables)


def lightning_sources():
    spec = find_spec("lightning")
    if spec is None or spec.origin is None:
        pytest.skip("Lightning is not installed")
    return Path(spec.origin).parent / "pytorch"


def offers(root, dotted):
    """Whether a module or name is there, as far as its text tells."""
    path = root.joinpath(*dotted.split("."))
    if path.is_dir() or path.with_suffix(".py").is_file():
        return True
    home = path.parent / "__init__.py" if path.parent.is_dir() else path.parent.with_suffix(".py")
    return home.is_file() and path.name in home.read_text(encoding="utf-8")


@each_case("name", sorted(TABLES.imports))
def test_what_is_said_to_be_gone_is_gone(name):
    assert not offers(lightning_sources(), name)


def test_what_lives_is_there():
    root = lightning_sources()
    assert offers(root, "strategies.DDPStrategy")
    assert offers(root, "utilities.rank_zero")
    assert imported("strategies.DDPStrategy") is None
    assert hook("on_validation_epoch_end") is None


def test_methods_of_the_trainer_are_gone():
    text = (lightning_sources() / "trainer" / "trainer.py").read_text(encoding="utf-8")
    assert not [name for name in TABLES.methods if f"def {name}(" in text]


def test_a_name_is_gone_with_its_module():
    assert imported("utilities.cloud_io.load") == imported("utilities.cloud_io")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import pytorch_lightning as pl", "1.9.5"),
        ("from lightning.pytorch import Trainer", "2.6.6"),
        ("import lightning as L", "2.6.6"),
        ("import torch", None),
    ],
)
def test_the_release_is_that_of_the_package_that_is_imported(text, expected):
    script = Script("train.py", text, releases={"pytorch-lightning": "1.9.5", "lightning": "2.6.6"})
    assert known_lightning(script).number == expected
