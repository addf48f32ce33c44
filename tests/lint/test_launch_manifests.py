"""YAML and JSON are read by what they hold, and nothing in them is built or run."""

import contextlib
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from doctor.lint.engine.discovery import UnreadableFile
from doctor.lint.engine.registry import builtin_rules
from doctor.lint.launch.file_type import read_launch_file
from doctor.lint.launch.launch_file import EnvironmentSource
from doctor.lint.launch.manifest import Manifest
from doctor.lint.launch.shell.reader import ShellFile
from doctor.lint.launch.yaml_tree import DEPTH, MOST_BYTES, MOST_NODES, read_trees
from doctor.lint.python.script import Script

EXAMPLES = Path(__file__).parents[2] / "examples"
JOB = """\
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata: {name: llm}
spec:
  nprocPerNode: "4"
  pytorchReplicaSpecs:
    Master: &role
      replicas: 1
      template:
        spec:
          hostNetwork: true
          containers:
            - name: pytorch
              command: ["bash", "-c"]
              args:
                - |
                  export NCCL_DEBUG=INFO
                  torchrun --nnodes=${PET_NNODES} \\
                    --nproc_per_node=$NPROC train.py
              env:
                - {name: NPROC, value: "4"}
                - {name: HOST, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}
              resources: {limits: {nvidia.com/gpu: 8}}
    Worker:
      <<: *role
      replicas: 3
"""


def workload(text):
    (one,) = read_launch_file("job.yaml", text).workloads
    return one


def test_a_pytorch_job():
    job = workload(JOB)
    assert (job.kind, job.pods, job.processes_per_pod) == ("PyTorchJob", 4, "4")
    master, worker = job.roles
    assert (master.name, worker.name, worker.replicas, worker.on_host_network) == ("Master", "Worker", 3, True)
    (box,) = master.containers
    assert (box.gpus, box.has_shm) == (8, False)
    (launch,) = box.launches
    assert (launch.program, launch.place.line, launch.number("nproc-per-node")) == ("torchrun", 18, 4)
    assert launch.known_option("nnodes") is None
    names = {setting.name: (setting.known_value, setting.place.line) for setting in box.settings}
    assert names == {"NPROC": ("4", 21), "HOST": (None, 22), "NCCL_DEBUG": ("INFO", 17)}


@pytest.mark.parametrize(
    ("version", "kind", "spec", "pods"),
    [
        ("batch/v1", "Job", "{parallelism: 3, template: {spec: {containers: [{name: a}]}}}", 3),
        ("v1", "Pod", "{containers: [{name: a}]}", 1),
        (
            "kubeflow.org/v2beta1",
            "MPIJob",
            "{mpiReplicaSpecs: {Launcher: {template: {spec: {containers: [{name: a}]}}}, Worker: {replicas: 2, "
            "template: {spec: {containers: [{name: a}]}}}}}",
            3,
        ),
        (
            "jobset.x-k8s.io/v1alpha2",
            "JobSet",
            "{replicatedJobs: [{name: w, replicas: 2, template: {spec: {parallelism: 4, template: {spec: "
            "{containers: [{name: a}]}}}}}]}",
            8,
        ),
        ("trainer.kubeflow.org/v1alpha1", "TrainJob", "{trainer: {numNodes: 5, numProcPerNode: 8}}", 5),
        (
            "kubeflow.org/v1",
            "PyTorchJob",
            "{pytorchReplicaSpecs: {Worker: {replicas: $N, template: {spec: {containers: [{name: a}]}}}}}",
            None,
        ),
    ],
)
def test_pods_of_each_kind(version, kind, spec, pods):
    assert workload(f"apiVersion: {version}\nkind: {kind}\nspec: {spec}\n").pods == pods


def test_documents_of_one_file_are_read_apart():
    other = "apiVersion: v1\nkind: Service\nspec: {}\n"
    assert len(read_launch_file("all.yaml", f"{other}---\n{JOB}---\n{JOB}").workloads) == 2


@pytest.mark.parametrize(
    ("name", "text", "kind"),
    [
        ("config.yaml", "distributed_type: FSDP\nnum_processes: 8\n", "accelerate"),
        ("config.json", '{\n\t"distributed_type": "NO",\n\t"num_processes": 1\n}', "accelerate"),
        ("ds.json", json.dumps({"zero_optimization": {"stage": 3}}), "deepspeed"),
    ],
)
def test_configurations_of_launchers(name, text, kind):
    assert [config.kind for config in read_launch_file(name, text).configs] == [kind]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("values.yaml", "image: a\nreplicas: 3\n"),
        ("data.json", '[{"text": "kind"}]'),
        ("service.yaml", "apiVersion: v1\nkind: Service\nspec: {}\n"),
        ("notes.txt", "torchrun train.py\n"),
        ("library.sh", "say() { echo hello; }\n"),
        ("train.py", "import torch\n"),
    ],
)
def test_other_files_are_no_launch_files(name, text):
    assert read_launch_file(name, text) is None


def test_a_script_is_told_by_its_first_line_too():
    assert isinstance(read_launch_file("launch", "#!/usr/bin/env bash\ntorchrun train.py\n"), ShellFile)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (JOB.replace("replicas: 3", "replicas: {{ .Values.workers }}"), "template"),
        (JOB + "  broken: [\n", "not valid YAML"),
        (JOB + "#" * MOST_BYTES, "larger"),
        (JOB + "deep: " + "[" * (DEPTH + 1), "deeper"),
        (JOB + "many: [" + "1," * MOST_NODES + "]\n", "more than"),
    ],
)
def test_what_can_not_be_read_is_said_with_the_reason(text, why):
    with pytest.raises(UnreadableFile, match=why):
        read_launch_file("job.yaml", text)


def test_tags_are_not_followed():
    text = "distributed_type: !!python/object/apply:os.system ['touch /tmp/rankdoctor-tag']\nnum_processes: 2\n"
    read_launch_file("config.yaml", text)
    assert not Path("/tmp/rankdoctor-tag").exists()


def test_an_alias_is_no_copy():
    bomb = "a0: &a0 [1, 2, 3, 4, 5, 6, 7, 8, 9]\n" + "".join(
        f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 60)
    )
    assert isinstance(read_launch_file("job.yaml", JOB + bomb), Manifest)


def test_an_alias_of_itself_ends():
    text = "apiVersion: v1\nkind: List\nitems: &all\n  - &one {apiVersion: v1, kind: List, items: *all}\n  - <<: *one\n"
    assert read_launch_file("list.yaml", text) is None
    (tree,) = read_trees("a: &a\n  <<: *a\n  b: 1\n")
    assert tree.get("a").word("c") is None


@settings(max_examples=150)
@given(st.text(alphabet="kind: PyTorchJob\n-&*<[]{}!|>'\"$()specabt\t", max_size=200))
def test_nothing_breaks_the_reader(text):
    with contextlib.suppress(UnreadableFile):
        read_launch_file("a.yaml", f"kind: PyTorchJob\n{text}")


def test_the_examples_of_this_project_are_silent():
    rules = [rule for rule in builtin_rules() if issubclass(rule.reads, EnvironmentSource) and rule.reads is not Script]
    read = []
    for path in sorted(EXAMPLES.rglob("*")):
        if path.suffix not in (".sh", ".sbatch", ".yaml", ".yml"):
            continue
        file = read_launch_file(str(path), path.read_text())
        if file is not None:
            read.append(path.name)
            assert not [hit for rule in rules if isinstance(file, rule.reads) for hit in rule.violations(file)], path
    assert {"slurm_job.sbatch", "torchrun.sh", "pytorchjob.yaml"} <= set(read)
