"""Releases that belong together."""

from __future__ import annotations

import pytest

from doctor.knowledge import lightning_api, releases


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("2.27.3+cuda12.8", (2, 27, 3)),
        ("570.124.06", (570, 124, 6)),
        ("v2.30.7-1", (2, 30, 7)),
        ("2.16.0a0+git1234", (2, 16, 0)),
        (" 12.8", (12, 8)),
        ("unknown", ()),
        ("", ()),
    ],
)
def test_release(text: str, numbers: tuple[int, ...]) -> None:
    assert releases.release(text) == numbers


@pytest.mark.parametrize(
    ("one", "other", "older"),
    [
        ("2.9.1", "2.10.0", True),
        ("2.27.3", "2.27.3+cuda12.8", False),
        ("2.27", "2.27.3", False),
        ("570.86.10", "570.124.06", True),
        ("main", "2.1", None),
    ],
)
def test_is_older(one: str, other: str, older: bool | None) -> None:
    assert releases.is_older(one, other) is older


def test_within_is_closed_below_and_open_above() -> None:
    assert releases.within("2.24.3", first="2.24.3", before="2.25")
    assert not releases.within("2.25", first="2.24.3", before="2.25")
    assert not releases.within("unknown", before="9")


def test_minimum_driver_and_nccl() -> None:
    assert releases.minimum_driver("12.8") == "525.60.13"
    assert releases.minimum_driver("13.0") == "580.65.06"
    assert releases.minimum_driver("99.0") is None
    assert releases.minimum_nccl("9.0") == "2.15.1"
    assert releases.minimum_nccl("10.3") == "2.25.1"
    assert releases.minimum_nccl("3.5") is None


def test_the_nccl_of_a_torch_is_that_of_its_line() -> None:
    assert releases.bundled_nccl("2.2.2+cu118") == "2.19.3"
    assert releases.bundled_nccl("1.12.1") == "2.10.3"
    assert releases.bundled_nccl("1.1") == releases.bundled_nccl("1.4") == "2.4.8"
    assert releases.bundled_nccl("2") is None  # all of 2.x
    assert releases.bundled_nccl("2.99.0") is None
    assert releases.bundled_nccl("") is None


def test_every_line_of_the_table_is_a_release() -> None:
    table = releases._table()
    versions = [*table.lightning, *table.minimum_driver.values(), *table.minimum_nccl.values()]
    versions += [*table.bundled_nccl, *table.bundled_nccl.values()]
    assert all(releases.release(version) for version in versions)


def test_lightning_takes_the_newest_fitting_line() -> None:
    assert releases.lightning_release("2.6.5").since == "2.6.1"  # type: ignore[union-attr]
    assert releases.lightning_release("2.5.2").since == "2.5"  # type: ignore[union-attr]
    assert releases.lightning_release("1.9.5") is None


def test_trainer_arguments() -> None:
    gpus, devices = lightning_api.argument("gpus"), lightning_api.argument("devices")
    assert gpus is not None
    assert devices is not None
    assert "devices" in gpus.replacement
    assert gpus.is_taken_by("1.9.5")
    assert not gpus.is_taken_by("2.0.0")
    assert devices.is_taken_by("2.6.1")
    assert gpus.is_taken_by("unknown")
    assert lightning_api.argument("no_such_argument") is None


def test_strategies() -> None:
    dp = lightning_api.strategy("dp")
    assert dp is not None
    assert not dp.is_taken_by("2.0.0")
    assert lightning_api.strategy("single_tpu").is_taken_by("2.0.9")  # type: ignore[union-attr]
    assert lightning_api.strategy("ddp") is None


def test_trainer_table_against_the_installed_lightning() -> None:
    trainer = pytest.importorskip("lightning.pytorch.trainer.trainer").Trainer
    import inspect
    from importlib.metadata import version

    taken = set(inspect.signature(trainer.__init__).parameters) - {"self"}
    table = lightning_api._table()["arguments"]
    assert {name for name, info in table.items() if info.is_taken_by(version("lightning"))} == taken


def test_the_torch_of_an_image_is_that_of_its_date() -> None:
    assert releases.torch_of_ngc("23.05-py3") == "2.0"
    assert releases.torch_of_ngc("24.01") == "2.1"  # an alpha of 2.2
    assert releases.torch_of_ngc("24.03-py3") == "2.3"
    assert releases.torch_of_ngc("18.01-py3") is None
    assert releases.torch_of_ngc("latest") is None
