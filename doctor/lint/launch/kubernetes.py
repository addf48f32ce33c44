"""Reads Kubernetes jobs: their pods, resources and commands.

Sources: https://www.kubeflow.org/docs/components/trainer/legacy-v1/user-guides/pytorch/,
https://kubernetes.io/docs/concepts/workloads/controllers/job/, https://jobset.sigs.k8s.io/docs/reference/.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from doctor.lint.engine.rule import SourceLocation
from doctor.lint.launch.launch_file import EnvironmentSetting, Launch
from doctor.lint.launch.partial_text import OUTPUT, unknown_mark
from doctor.lint.launch.shell.reader import ScriptReader
from doctor.lint.launch.yaml_tree import YamlNode

GPU_RESOURCES = ("nvidia.com/gpu", "amd.com/gpu")


@dataclass(frozen=True)
class Container:
    """``gpus``: ``None`` if it requests none. ``has_shm``: something is mounted at /dev/shm, or it uses the host's.
    ``command`` and ``args`` were parsed into ``launches`` and ``settings``; ``places``: their words, with the place of
    each. ``has_nvlink``: its pod asks for GPUs that NVLink connects."""

    name: str
    place: SourceLocation
    gpus: int | None
    gpus_place: SourceLocation | None
    has_shm: bool
    settings: tuple[EnvironmentSetting, ...]
    launches: tuple[Launch, ...]
    words: str
    places: tuple[tuple[str, SourceLocation], ...] = ()
    has_nvlink: bool = False

    def chain(self) -> Iterator[Launch]:
        """Every program that is started."""
        return (one for launch in self.launches for one in launch.chain())


class Role(NamedTuple):
    """Identical pods. ``replicas``: ``None`` if unknown."""

    name: str
    place: SourceLocation
    replicas: int | None
    on_host_network: bool
    containers: tuple[Container, ...]


class Workload(NamedTuple):
    """A job. ``kind`` as it is written there; ``processes_per_pod``: nprocPerNode, numProcPerNode."""

    kind: str
    place: SourceLocation
    roles: tuple[Role, ...]
    processes_per_pod: str | None = None
    processes_place: SourceLocation | None = None
    is_elastic: bool = False

    @property
    def pods(self) -> int | None:
        """Pods of all roles together."""
        counts = [role.replicas for role in self.roles]
        return sum(count for count in counts if count is not None) if None not in counts else None


def workloads_in(tree: YamlNode) -> Iterator[Workload]:
    """The job in a document; each job of a List."""
    if tree.word("kind") == "List":
        for item in (tree.get("items") or tree).children():
            yield from workloads_in(item)
        return
    spec = tree.get("spec")
    read = _KINDS.get(tree.word("kind") or "")
    if read is None or spec is None or not tree.word("apiVersion"):
        return
    given = {}
    if tree.word("kind") in ("PyTorchJob", "TrainJob"):
        given = {name: EnvironmentSetting(name, unknown_mark(name), tree.place) for name in _SET_BY_KUBEFLOW}
    roles = tuple(read(spec, given))
    if roles:
        processes = spec.get("nprocPerNode") or spec.get("trainer", "numProcPerNode")
        yield Workload(
            tree.word("kind") or "",
            tree.place,
            roles,
            processes.text if processes else None,
            processes.place if processes else None,
            spec.get("elasticPolicy") is not None,
        )


Given = Mapping[str, EnvironmentSetting]
"""The environment that an operator adds to containers."""

_SET_BY_KUBEFLOW = (
    *("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR"),
    *("PET_MASTER_PORT", "PET_NPROC_PER_NODE", "PET_RDZV_BACKEND", "PET_RDZV_ENDPOINT", "PET_RDZV_ID"),
)
"""https://github.com/kubeflow/trainer/pull/1840 (training-operator pkg/controller.v1/pytorch/envvar.go, elastic.go)."""


def _replicated(key: str, spec: YamlNode, given: Given) -> Iterator[Role]:
    """Kubeflow's jobs: {Master: {replicas, template}, Worker: …}."""
    roles = spec.get(key)
    for name, role in (roles.pairs if roles else None) or ():
        pod = role.get("template", "spec")
        if pod is not None:
            yield _role(name.text or "", role, pod, _count(role, "replicas"), given)


def _job(spec: YamlNode, given: Given) -> Iterator[Role]:
    """An indexed Job runs ``parallelism`` pods at once; other pods need not belong together."""
    pod = spec.get("template", "spec")
    if pod is not None:
        yield _role("pod", spec, pod, _count(spec, "parallelism"), given)


def _jobset(spec: YamlNode, given: Given) -> Iterator[Role]:
    for job in (spec.get("replicatedJobs") or spec).children():
        inner, pod = job.get("template", "spec"), job.get("template", "spec", "template", "spec")
        if inner is not None and pod is not None:
            times, each = _count(job, "replicas"), _count(inner, "parallelism")
            pods = times * each if times is not None and each is not None else None
            yield _role(job.word("name") or "", job, pod, pods, given)


def _pod(spec: YamlNode, given: Given) -> Iterator[Role]:
    if spec.get("containers"):
        yield _role("pod", spec, spec, 1, given)


def _train_job(spec: YamlNode, given: Given) -> Iterator[Role]:
    """Its runtime, defined elsewhere, may mount shared memory."""
    trainer = spec.get("trainer")
    if trainer is not None and trainer.is_mapping:
        box = replace(_container(trainer, spec, given), has_shm=True)
        nodes = trainer.number("numNodes") if trainer.get("numNodes") is not None else None
        yield Role("trainer", trainer.place, nodes, False, (box,))


_KINDS: dict[str, Callable[[YamlNode, Given], Iterator[Role]]] = {
    "TrainJob": _train_job,
    "PyTorchJob": partial(_replicated, "pytorchReplicaSpecs"),
    "MPIJob": partial(_replicated, "mpiReplicaSpecs"),
    "Job": _job,
    "JobSet": _jobset,
    "Pod": _pod,
}


def _count(node: YamlNode, key: str) -> int | None:
    return node.number(key) if node.get(key) is not None else 1


def _role(name: str, node: YamlNode, pod: YamlNode, replicas: int | None, given: Given) -> Role:
    boxes = tuple(_container(box, pod, given) for box in (pod.get("containers") or pod).children() if box.is_mapping)
    return Role(name, node.place, replicas, pod.flag("hostNetwork") is True, boxes)


def _container(box: YamlNode, pod: YamlNode, given: Given) -> Container:
    limits = [box.get(name, kind) for name in ("resources", "resourcesPerNode") for kind in ("limits", "requests")]
    found = (group.get(key) for key in GPU_RESOURCES for group in limits if group is not None)
    asked = next((one for one in found if one is not None), None)
    settings = tuple(_settings(box))
    environment = {**given, **{one.name: one for one in settings}}
    reader = ScriptReader({name: one.value for name, one in environment.items()}, environment)
    nodes = [one for key in ("command", "args") if (listed := box.get(key)) for one in listed.children()]
    command = [one for one in nodes if one.text is not None]
    reader.run([_word(one) for one in command])
    mounts = (box.get("volumeMounts") or box).children()
    return Container(
        box.word("name") or "",
        box.place,
        int(asked.text) if asked is not None and asked.text and asked.text.isdigit() else None,
        asked.place if asked is not None else None,
        pod.flag("hostIPC") is True or any((one.word("mountPath") or "").startswith("/dev/shm") for one in mounts),  # noqa: S108
        (*settings, *reader.settings),
        tuple(reader.launches),
        " ".join(one.text or "" for one in command),
        tuple((one.text or "", one.place) for one in command),
        any(map(_NVLINK.search, _asked_of_nodes(pod))),
    )


_NVLINK = re.compile(
    r"SXM|HGX|DGX|NVL\d|^nvidia-(?:tesla-a100|a100-80gb|[bh][12]00(?!-pcie)|gb[23]00)|^a[234]x?-\w*gpu|"
    r"^p(?:3|4d|4de|5|5e|5en|6)\w*\."
)
"""Names of products, and of machines of clouds, whose GPUs NVLink connects (nvidia.com/gpu.product,
cloud.google.com/gke-accelerator, node.kubernetes.io/instance-type)."""


def _asked_of_nodes(pod: YamlNode) -> Iterator[str]:
    """The values that labels of the nodes of a pod must have."""
    for _, value in (pod.get("nodeSelector") or pod).pairs or ():
        if value.text is not None:
            yield value.text
    required = pod.get(
        "affinity", "nodeAffinity", "requiredDuringSchedulingIgnoredDuringExecution", "nodeSelectorTerms"
    )
    for term in (required or pod).children():
        for rule in (term.get("matchExpressions") or term).children():
            if rule.word("operator") == "In":
                yield from (one.text for one in (rule.get("values") or rule).children() if one.text is not None)


def _settings(box: YamlNode) -> Iterator[EnvironmentSetting]:
    for entry in (box.get("env") or box).children():
        name, value = entry.word("name"), entry.get("value")
        if name is not None:
            text = value.text if value is not None else None
            yield EnvironmentSetting(name, unknown_mark(name) if text is None else _filled(text), entry.place)


def _filled(text: str) -> str:
    """Kubernetes expands ``$(NAME)``; envsubst expands ``${NAME}`` before."""
    return re.sub(
        r"\$(?:\(([A-Za-z_]\w*)\)|\{?([A-Za-z_]\w*)\}?)", lambda match: unknown_mark(match[1] or match[2]), text
    )


def _word(node: YamlNode) -> tuple[str, int]:
    """A word of a command and its line; the shell expands the variables of a script."""
    text = node.text or OUTPUT
    is_script = bool(re.search(r"\s", text))
    return (re.sub(r"\$\(([A-Za-z_]\w*)\)", r"${\1}", text) if is_script else _filled(text)), node.line + node.block
