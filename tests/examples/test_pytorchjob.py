"""The manifest for the Kubeflow Training Operator: its form by the operator's API, its command on hosts of the lab."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import pytest
import yaml
from kubeflow.training import ApiClient
from kubernetes.utils.quantity import parse_quantity

from tests.lab.hosts import LabHost, together

Spoil: TypeAlias = Callable[[dict[str, Any]], object]
MANIFEST = Path(__file__).parents[2] / "examples" / "pytorchjob.yaml"
TRAIN = "import os; print('trained', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])"


@pytest.fixture
def manifest() -> dict[str, Any]:
    # Through JSON, as it goes to the API: what stands behind an alias is a copy then, and can be spoilt alone.
    loaded: dict[str, Any] = json.loads(json.dumps(yaml.safe_load(MANIFEST.read_text())))
    return loaded


def _pod(manifest: dict[str, Any], role: str) -> dict[str, Any]:
    pod: dict[str, Any] = manifest["spec"]["pytorchReplicaSpecs"][role]["template"]["spec"]
    return pod


def _worker(manifest: dict[str, Any]) -> dict[str, Any]:
    worker: dict[str, Any] = manifest["spec"]["pytorchReplicaSpecs"]["Worker"]
    return worker


def _container(manifest: dict[str, Any]) -> dict[str, Any]:
    container: dict[str, Any] = _pod(manifest, "Worker")["containers"][0]
    return container


def _as_the_api_has_it(manifest: dict[str, Any]) -> object:
    """The manifest as the operator's published API keeps it: fields that it does not know are gone, and numbers are
    text where it has text. The models are made from the types from which the operator's CRD is made.

    Raises:
        ValueError: a field that it must have is missing, or holds what it can't.
    """
    client = ApiClient()
    answer = SimpleNamespace(data=json.dumps(manifest))
    return client.sanitize_for_serialization(client.deserialize(answer, "KubeflowOrgV1PyTorchJob"))


def _has_the_form(manifest: dict[str, Any]) -> bool:
    """Whether the API keeps every field of the manifest as it is, and reads every amount. To the models an amount is
    any text, and the schema has a pattern for it, so amounts are read by themselves.
    """
    try:
        for role in manifest["spec"]["pytorchReplicaSpecs"]:
            for container in _pod(manifest, role)["containers"]:
                for amount in container["resources"]["limits"].values():
                    parse_quantity(amount)
        return _as_the_api_has_it(manifest) == manifest
    except (KeyError, ValueError, TypeError, AttributeError):
        return False


def test_the_api_knows_every_field(manifest: dict[str, Any]) -> None:
    assert _as_the_api_has_it(manifest) == manifest
    assert _has_the_form(manifest)


def _rename(holder: Callable[[dict[str, Any]], dict[str, Any]], name: str, wrong: str) -> Spoil:
    def spoil(manifest: dict[str, Any]) -> None:
        inside = holder(manifest)
        inside[wrong] = inside.pop(name)

    return spoil


def _put(holder: Callable[[dict[str, Any]], dict[str, Any]], **wrong: object) -> Spoil:
    return lambda manifest: holder(manifest).update(wrong)


def _lose(holder: Callable[[dict[str, Any]], dict[str, Any]], name: str) -> Spoil:
    return lambda manifest: holder(manifest).pop(name)


def _limits(manifest: dict[str, Any]) -> dict[str, Any]:
    limits: dict[str, Any] = _container(manifest)["resources"]["limits"]
    return limits


def _mount(manifest: dict[str, Any]) -> dict[str, Any]:
    mount: dict[str, Any] = _container(manifest)["volumeMounts"][0]
    return mount


OF_WRONG_FORM = {
    "field of a container": _rename(_container, "resources", "resource"),
    "field of a replica": _rename(_worker, "replicas", "replica"),
    "field of the spec": _rename(lambda manifest: manifest["spec"], "runPolicy", "runpolicy"),
    "field of the run policy": _rename(lambda manifest: manifest["spec"]["runPolicy"], "cleanPodPolicy", "cleanPod"),
    "replicas misspelt": _rename(lambda manifest: manifest["spec"], "pytorchReplicaSpecs", "pyTorchReplicaSpecs"),
    "mapping for a list": _put(_container, args={"-c": "doctor check"}),
    "text for a number": _put(_worker, replicas="1"),
    "number for text": _put(lambda manifest: manifest["spec"], nprocPerNode=8),
    "number in a variable": _put(_container, env=[{"name": "NCCL_DEBUG", "value": 1}]),
    "no amount": _put(_limits, **{"nvidia.com/gpu": "eight"}),
    "no name of a container": _lose(_container, "name"),
    "no place to mount": _lose(_mount, "mountPath"),
    "no containers": _lose(lambda manifest: _pod(manifest, "Worker"), "containers"),
}


@pytest.mark.parametrize("spoil", OF_WRONG_FORM.values(), ids=OF_WRONG_FORM)
def test_a_wrong_form_is_noticed(manifest: dict[str, Any], spoil: Spoil) -> None:
    spoilt = copy.deepcopy(manifest)
    spoil(spoilt)
    assert _has_the_form(manifest)
    assert not _has_the_form(spoilt)


def _refusal(role: str, spec: dict[str, Any]) -> str:
    """Why the operator's webhook refuses the pods of a role, if it does. The CRD's schema takes any role, and pods
    without a template; the webhook does not (release 1.9, pkg/webhooks/pytorch/pytorchjob_webhook.go).
    """
    containers = spec.get("template", {}).get("spec", {}).get("containers", [])
    if role not in {"Master", "Worker"}:
        return "role"
    if "pytorch" not in {one.get("name") for one in containers}:
        return "container"
    if not all(one.get("image") for one in containers):
        return "image"
    replicas = spec.get("replicas")
    fits = replicas == 1 if role == "Master" else replicas is None or replicas >= 1
    return "" if fits else "replicas"


def _refusals(manifest: dict[str, Any]) -> list[str]:
    specs = manifest["spec"]["pytorchReplicaSpecs"]
    # The job's name becomes the name of services, so it is one label of RFC 1035.
    name = [] if re.fullmatch("[a-z]([-a-z0-9]{0,61}[a-z0-9])?", manifest["metadata"]["name"]) else ["name"]
    return name + [why for role, spec in specs.items() if (why := _refusal(role, spec))]


def _specs(manifest: dict[str, Any]) -> dict[str, Any]:
    specs: dict[str, Any] = manifest["spec"]["pytorchReplicaSpecs"]
    return specs


REFUSED = [
    (_rename(_specs, "Worker", "Wroker"), "role"),
    (_lose(_worker, "template"), "container"),
    (_put(_container, name="torch"), "container"),
    (_lose(_container, "image"), "image"),
    (_put(_worker, replicas=0), "replicas"),
    (_put(lambda manifest: _specs(manifest)["Master"], replicas=2), "replicas"),
    (_put(lambda manifest: manifest["metadata"], name="Train_1"), "name"),
]


@pytest.mark.parametrize(("spoil", "why"), REFUSED, ids=[why for _, why in REFUSED])
def test_the_operator_takes_it(manifest: dict[str, Any], spoil: Spoil, why: str) -> None:
    spoilt = copy.deepcopy(manifest)
    spoil(spoilt)
    assert set(_specs(manifest)) == {"Master", "Worker"}
    assert _refusals(manifest) == []
    assert _refusals(spoilt) == [why]


def test_every_manifest_of_the_examples_is_tested() -> None:
    texts = {path: path.read_text() for path in MANIFEST.parent.rglob("*.y*ml")}
    others = ("kubernetes_job", "kubernetes_node_check", "kubernetes_check_job", "trainjob")
    tested = {MANIFEST, *(MANIFEST.with_name(f"{name}.yaml") for name in others)}
    assert {path for path, text in texts.items() if re.search("^apiVersion:", text, re.MULTILINE)} == tested


def _environment(master: LabHost, place: int, pods: int) -> dict[str, str]:
    """What the operator sets for one process a pod (pkg/controller.v1/pytorch/envvar.go, master.go)."""
    address = {"MASTER_ADDR": master.name, "MASTER_PORT": "23456"}
    return {
        **address,
        **{f"PET_{name}": value for name, value in address.items()},
        "WORLD_SIZE": str(pods),
        "RANK": str(place),
        "PET_NODE_RANK": str(place),
        "PET_NNODES": str(pods),
        "PET_NPROC_PER_NODE": "1",
    }


@pytest.mark.parametrize(("odd", "code"), [({}, 0), ({"NCCL_SOCKET_IFNAME": "eth9"}, 1)])
def test_pods_are_checked_and_train(
    lab_hosts: Callable[..., tuple[LabHost, ...]],
    manifest: dict[str, Any],
    tmp_path: Path,
    odd: dict[str, str],
    code: int,
) -> None:
    pytest.importorskip("torch")
    (tmp_path / "train.py").write_text(TRAIN)
    container = _pod(manifest, "Worker")["containers"][0]
    (script,) = container["args"]
    command = [*container["command"], script.replace("train.py", str(tmp_path / "train.py"))]
    hosts = lab_hosts(2)
    pods = [
        (host, command, {**_environment(hosts[0], place, 2), **(odd if place else {})})
        for place, host in enumerate(hosts)
    ]
    for place, done in enumerate(together(pods, timeout=110)):
        assert done.returncode == code, (done.stdout, done.stderr)
        assert (f"trained {place} of 2" in done.stdout) == (code == 0)
