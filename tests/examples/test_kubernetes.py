"""The manifests and commands for Kubernetes that `doctor attach` needs: their form by the API, and what they name."""

from __future__ import annotations

import copy
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import pytest
import yaml
from kubernetes.client import ApiClient

from tests.lab.speed import patience

Document: TypeAlias = dict[str, Any]
ROOT = Path(__file__).parents[2]
SERVICE, JOB = yaml.safe_load_all((ROOT / "examples" / "kubernetes_job.yaml").read_text())
DEBUG = yaml.safe_load((ROOT / "examples" / "kubernetes_debug_container.yaml").read_text())
PYTORCH = yaml.safe_load((ROOT / "examples" / "pytorchjob.yaml").read_text())
NODE_CHECK = yaml.safe_load((ROOT / "examples" / "kubernetes_node_check.yaml").read_text())
CHECK_SERVICE, CHECK_JOB = yaml.safe_load_all((ROOT / "examples" / "kubernetes_check_job.yaml").read_text())
PAGE = ROOT / "docs" / "how-to" / "my-job-hangs-now.md"
POD = JOB["spec"]["template"]["spec"]
TRACER = {"add": ["SYS_PTRACE"]}


def _is_kept(document: Document, model: str) -> bool:
    """Whether the API keeps every field as it is. The models are made from the OpenAPI document of Kubernetes."""
    client = ApiClient()
    try:
        read = client.deserialize(SimpleNamespace(data=json.dumps(document)), model)
        return bool(client.sanitize_for_serialization(read) == document)
    except (ValueError, TypeError, AttributeError):
        return False


def _debug_container(part: Document) -> Document:
    """What kubectl debug makes of a part."""
    return {"name": "debugger-x", "image": "x", "targetContainerName": "train", **part}


def _put(*path: str | int, **wrong: object) -> Callable[[Document], None]:
    def put(document: Document) -> None:
        holder: Any = document
        for key in path:
            holder = holder[key]
        holder.update(wrong)

    return put


def test_the_api_knows_every_field() -> None:
    assert _is_kept(SERVICE, "V1Service")
    assert _is_kept(JOB, "V1Job")
    assert _is_kept(_debug_container(DEBUG), "V1EphemeralContainer")
    assert _is_kept(NODE_CHECK, "V1DaemonSet")
    assert _is_kept(CHECK_SERVICE, "V1Service")
    assert _is_kept(CHECK_JOB, "V1Job")


CONTAINERS = ("spec", "template", "spec")


@pytest.mark.parametrize(
    ("part", "model", "spoil"),
    [
        (JOB, "V1Job", _put("spec", completionmode="Indexed")),
        (JOB, "V1Job", _put("spec", parallelism="four")),
        (JOB, "V1Job", _put(*CONTAINERS, shareProcessNamespaces=True)),
        (JOB, "V1Job", _put(*CONTAINERS, "initContainers", 0, "securityContext", capability=TRACER)),
        (JOB, "V1Job", _put(*CONTAINERS, "volumes", 1, persistentVolumeClaim={"name": "shared"})),
        (_debug_container(DEBUG), "V1EphemeralContainer", _put("securityContext", capability=TRACER)),
        (_debug_container(DEBUG), "V1EphemeralContainer", _put(target="train")),
        (NODE_CHECK, "V1DaemonSet", _put("spec", replicas=2)),
        (NODE_CHECK, "V1DaemonSet", _put(*CONTAINERS, runtimeClass="nvidia")),
        (CHECK_JOB, "V1Job", _put(*CONTAINERS, affinity={"podAntiAffinity": {"required": []}})),
    ],
)
def test_a_wrong_form_is_noticed(part: Document, model: str, spoil: Callable[[Document], None]) -> None:
    spoilt = copy.deepcopy(part)
    spoil(spoilt)
    assert _is_kept(part, model)
    assert not _is_kept(spoilt, model)


def test_names_fit_together() -> None:
    assert POD["subdomain"] == SERVICE["metadata"]["name"]
    assert SERVICE["spec"]["selector"] == {"job-name": JOB["metadata"]["name"]}, (
        "the label that the Job controller sets"
    )
    assert JOB["spec"]["completions"] == JOB["spec"]["parallelism"]
    assert f"--nnodes={JOB['spec']['completions']} " in POD["containers"][0]["args"][0]
    assert f"--master-addr={JOB['metadata']['name']}-0.{POD['subdomain']} " in POD["containers"][0]["args"][0]
    volumes = {one["name"] for one in POD["volumes"]}
    mounts = [mount for one in (*POD["initContainers"], *POD["containers"], DEBUG) for mount in one["volumeMounts"]]
    assert {mount["name"] for mount in mounts} == volumes


def test_names_of_the_checks_fit_together() -> None:
    pod = CHECK_JOB["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    name = CHECK_JOB["metadata"]["name"]
    (term,) = pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert pod["subdomain"] == CHECK_SERVICE["metadata"]["name"]
    assert CHECK_SERVICE["spec"]["selector"] == term["labelSelector"]["matchLabels"] == {"job-name": name}
    assert f" WORLD_SIZE={CHECK_JOB['spec']['completions']} " in container["args"][0]
    assert f" MASTER_ADDR={name}-0.{pod['subdomain']} " in container["args"][0]
    labels = NODE_CHECK["spec"]["template"]["metadata"]["labels"]
    assert NODE_CHECK["spec"]["selector"]["matchLabels"] == labels
    for one in (pod, NODE_CHECK["spec"]["template"]["spec"]):
        mounted = {mount["name"] for box in one["containers"] for mount in box["volumeMounts"]}
        assert mounted == {volume["name"] for volume in one["volumes"]}


def test_the_loop_of_the_node_check_writes_gauges_whatever_is_found(tmp_path: Path) -> None:
    (container,) = NODE_CHECK["spec"]["template"]["spec"]["containers"]
    script = container["args"][0].replace("/textfile/", f"{tmp_path}/").replace("sleep 3600", "break")
    environment = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    for odd, code in (({}, ""), ({"NCCL_SOCKET_IFNAME": "eth9"}, "exit code 1\n")):
        command = [*container["command"], script]
        done = subprocess.run(
            command, env={**environment, **odd}, capture_output=True, text=True, timeout=patience(60), check=True
        )
        gauges = (tmp_path / "rankdoctor.prom").read_text()
        assert done.stdout == code
        assert ('id="NET007"' in gauges) == bool(code)


def test_one_container_may_trace_the_processes_of_the_other() -> None:
    (sidecar,), (train,) = POD["initContainers"], POD["containers"]
    assert POD["shareProcessNamespace"] is True
    assert sidecar["restartPolicy"] == "Always"
    assert sidecar["securityContext"]["capabilities"] == DEBUG["securityContext"]["capabilities"] == TRACER
    assert sidecar["securityContext"]["runAsUser"] == DEBUG["securityContext"]["runAsUser"] == 0
    assert "securityContext" not in train
    replicas = PYTORCH["spec"]["pytorchReplicaSpecs"].values()
    containers = [one for replica in replicas for one in replica["template"]["spec"]["containers"]]
    assert all(one["securityContext"]["capabilities"] == TRACER for one in containers)


def test_what_kubectl_lets_complete_a_debug_container() -> None:
    """By Validate in pkg/cmd/debug/debug.go of kubectl, and the API's rules for ephemeral containers."""
    assert not {"name", "command", "image", "lifecycle", "volumeDevices"} & DEBUG.keys()
    assert not {"ports", "livenessProbe", "readinessProbe", "startupProbe", "resources"} & DEBUG.keys()
    assert not any("subPath" in mount or "subPathExpr" in mount for mount in DEBUG["volumeMounts"])


def _commands() -> Iterator[list[str]]:
    """The words of each kubectl command of the page and of the manifests, from ``kubectl`` to ``doctor``."""
    texts = (path.read_text() for path in (PAGE, ROOT / "examples" / "kubernetes_job.yaml"))
    for text in texts:
        lines = re.sub(r"\\\n#?", " ", text)
        for match in re.finditer(r"kubectl (?:exec|debug|get) [^\n`|]*", lines):
            yield shlex.split(match[0])


def test_commands_name_what_the_manifests_have() -> None:
    commands = list(_commands())
    names = {one["name"] for one in (*POD["containers"], *POD["initContainers"])}
    used: set[str] = set()
    for words in commands:
        options = words[: words.index("--")] if "--" in words else words
        for at, word in enumerate(options):
            used.add(word.partition("=")[0])
            name = options[at + 1] if word == "-c" else word.removeprefix("--target=")
            if word == "-c" or word.startswith("--target="):
                assert name in names, words
            if word.startswith("--custom="):
                assert (ROOT / "examples" / word.removeprefix("--custom=")).is_file()
        if words[1] == "debug" and not words[2].startswith("node/"):
            assert "--keep-labels" in words
        if words[1] != "get":
            assert words[words.index("--") + 1 :][:2] == ["doctor", "attach"]
    assert {"-c", "--target", "--custom", "--keep-labels", "-l"} <= used
    assert {words[1] for words in commands} == {"get", "exec", "debug"}
