"""What variables tell the Trainer and Fabric."""

import pytest

from doctor.collectors.base import Machine, NotPresent
from doctor.collectors.launch.trainer_variables import collect_trainer, device_count
from doctor.core.masking import REDACTED
from tests.lab.cases import each_case


@each_case(
    ("text", "count"),
    [
        ("4", 4),
        ("0,1", 2),
        ("0,", 1),
        ("[0, 1, 5]", 3),
        ("auto", None),
        ("-1", None),
        ("-1,", None),
        ("", None),
        (None, None),
        ("[", None),
        ("[" * 100_000, None),
        ("[]", None),
        ("a,b", None),
        ("9" * 40, None),
        ("99999999999", None),
    ],
)
def test_device_count(text: str | None, count: int | None) -> None:
    assert device_count(text) == count


def test_the_trainer_comes_before_fabric() -> None:
    environ = {"PL_TRAINER_DEVICES": "2", "PL_TRAINER_STRATEGY": "ddp_spawn", "LT_DEVICES": "4", "LT_CLI_USED": "1"}
    facts = collect_trainer(Machine(environ=environ))
    assert (facts.source, facts.devices, facts.strategy, facts.node_count) == ("PL_TRAINER_*", 2, "ddp_spawn", None)
    assert [argument.name for argument in facts.arguments] == ["devices", "strategy"]


def test_fabric_run() -> None:
    environ = {
        "LT_CLI_USED": "1",
        "LT_ACCELERATOR": "cpu",
        "LT_DEVICES": "auto",
        "LT_NUM_NODES": "2",
        "LT_LOGGER_TOKEN": "x",
    }
    facts = collect_trainer(Machine(environ=environ))
    assert (facts.source, facts.accelerator, facts.devices, facts.node_count) == ("LT_*", "cpu", None, 2)
    assert [argument.name for argument in facts.arguments] == ["accelerator", "devices", "num_nodes"]


def test_arguments_lose_secrets() -> None:
    facts = collect_trainer(Machine(environ={"PL_TRAINER_LOGGER_TOKEN": "x", "PL_TRAINER_": "y"}))
    assert [(argument.name, argument.value) for argument in facts.arguments] == [("logger_token", REDACTED)]


@pytest.mark.parametrize("environ", [{}, {"LT_CLI_USED": "1"}, {"PL_GLOBAL_SEED": "1"}])
def test_nothing_told(environ: dict[str, str]) -> None:
    with pytest.raises(NotPresent):
        collect_trainer(Machine(environ=environ))


def test_fabric_reads_what_we_say_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """LT_DEVICES counts without LT_CLI_USED too, and a list of indices is as long as we say."""
    connector = pytest.importorskip("lightning.fabric.connector")
    monkeypatch.setenv("LT_DEVICES", "3")
    monkeypatch.setenv("LT_ACCELERATOR", "cpu")
    assert len(connector._Connector()._parallel_devices) == device_count("3")
