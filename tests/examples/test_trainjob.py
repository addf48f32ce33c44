"""The manifest for Kubeflow Trainer 2: its form by the CRD of the trainer, its command on hosts of the lab."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import yaml

from tests.examples.trainjob_schema import SCHEMA
from tests.lab.hosts import LabHost, together

Document: TypeAlias = dict[str, Any]
MANIFEST: Document = yaml.safe_load((Path(__file__).parents[2] / "examples" / "trainjob.yaml").read_text())
TRAIN = "import os; print('trained', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])"


def _faults(document: Document) -> list[str]:
    from jsonschema import (
        Draft202012Validator,
    )  # here: it takes a second, in every worker that only collects this module

    return [fault.message for fault in Draft202012Validator(json.loads(SCHEMA.read_text())).iter_errors(document)]


def _pod(document: Document) -> Document:
    patch = document["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"][0]
    pod: Document = patch["template"]["spec"]["template"]["spec"]
    return pod


def test_the_crd_knows_every_field() -> None:
    assert _faults(MANIFEST) == []


SPOILS: dict[str, Callable[[Document], object]] = {
    "field of the spec": lambda one: one["spec"].update(trainers={}),
    "field of the trainer": lambda one: one["spec"]["trainer"].update(nodes=2),
    "text for a number": lambda one: one["spec"]["trainer"].update(numNodes="2"),
    "text for a list": lambda one: one["spec"]["trainer"].update(command="bash -c"),
    "no runtime": lambda one: one["spec"].pop("runtimeRef"),
    "no owner of the patch": lambda one: one["spec"]["runtimePatches"][0].pop("manager"),
    "field of a volume": lambda one: _pod(one)["volumes"][0].update(emptydir={}),
    "field of a container": lambda one: _pod(one)["containers"][0].update(image="x"),
}


@pytest.mark.parametrize("spoil", SPOILS.values(), ids=SPOILS)
def test_a_wrong_form_is_noticed(spoil: Callable[[Document], object]) -> None:
    spoilt = copy.deepcopy(MANIFEST)
    spoil(spoilt)
    assert _faults(spoilt) != []


def test_names_fit_together() -> None:
    (container,) = _pod(MANIFEST)["containers"]
    assert container["name"] == "node", "the container of the runtime torch-distributed"
    assert {one["name"] for one in container["volumeMounts"]} == {one["name"] for one in _pod(MANIFEST)["volumes"]}


def _environment(master: LabHost, place: int, nodes: int) -> dict[str, str]:
    """What the trainer's plugin for torch sets (release 2.3, pkg/runtime/framework/plugins/torch/torch.go)."""
    address = {"PET_MASTER_ADDR": master.name, "PET_MASTER_PORT": "29500"}
    return {**address, "PET_NODE_RANK": str(place), "PET_NNODES": str(nodes), "PET_NPROC_PER_NODE": "1"}


@pytest.mark.parametrize(("odd", "code"), [({}, 0), ({"NCCL_SOCKET_IFNAME": "eth9"}, 1)])
def test_nodes_are_checked_and_train(
    lab_hosts: Callable[..., tuple[LabHost, ...]], tmp_path: Path, odd: dict[str, str], code: int
) -> None:
    pytest.importorskip("torch")
    (tmp_path / "train.py").write_text(TRAIN)
    trainer = MANIFEST["spec"]["trainer"]
    command = [*trainer["command"], trainer["args"][0].replace("train.py", str(tmp_path / "train.py"))]
    hosts = lab_hosts(trainer["numNodes"])
    nodes = [
        (host, command, {**_environment(hosts[0], place, len(hosts)), **(odd if place else {})})
        for place, host in enumerate(hosts)
    ]
    for place, done in enumerate(together(nodes, timeout=110)):
        assert done.returncode == code, (done.stdout, done.stderr)
        assert (f"trained {place} of {len(hosts)}" in done.stdout) == (code == 0)
