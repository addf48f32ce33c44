"""MEM010: pods with several ranks are left with 64 MiB of /dev/shm."""

from __future__ import annotations

import re
from collections.abc import Iterator

from doctor.api import FileFails, FilePasses, Severity, SourceLocation, Violation, rule
from doctor.lint.launch.kubernetes import Container, Workload
from doctor.lint.launch.manifest import Manifest

_JOB = """\
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata: {name: llm}
spec:
  pytorchReplicaSpecs:
    Worker:
      replicas: 2
      template:
        spec:
          containers:
            - name: pytorch
              command: [COMMAND]
              resources:
                limits:
                  nvidia.com/gpu: GPUS
"""
_MOUNT = """\
              volumeMounts:
                - {mountPath: /dev/shm, name: shm}
          volumes:
            - {name: shm, emptyDir: {medium: Memory, sizeLimit: 16Gi}}
"""
_POD = """\
apiVersion: v1
kind: Pod
spec:
  containers:
    - name: trainer
      command: ["COMMAND"]
      resources: {limits: {nvidia.com/gpu: 4}}MARK
"""


def _job(command: str, gpus: str) -> str:
    return _JOB.replace("COMMAND", command).replace("GPUS", gpus)


@rule(
    id="MEM010",
    severity=Severity.WARNING,
    reads=Manifest,
    cases=lambda: (
        FileFails("eight GPUs and Docker's default", _job("torchrun, train.py", "8  # !"), name="job.yaml"),
        FileFails("a pod", _POD.replace("COMMAND", "torchrun").replace("MARK", "  # !"), name="pod.yaml"),
        FileFails(
            "one GPU with data workers",
            _job("python, train.py, --num_workers=8", "1  # !"),
            name="job.yaml",
        ),
        FilePasses("an emptyDir in memory", _job("torchrun, train.py", "8") + _MOUNT, name="job.yaml"),
        FilePasses("one GPU", _job("python, train.py", "1"), name="job.yaml"),
        FilePasses("no data workers", _job("python, train.py, --num_workers=0", "1"), name="job.yaml"),
        FilePasses(
            "the host's own",
            _job("torchrun, train.py", "8").replace(
                "          containers:", "          hostIPC: true\n          containers:"
            ),
            name="job.yaml",
        ),
        FilePasses("nothing that trains", _POD.replace("COMMAND", "nvidia-smi").replace("MARK", ""), name="pod.yaml"),
    ),
)
def shared_memory_small(file: Manifest) -> Iterator[Violation]:
    """Ask whether pods that train on several GPUs, or with data workers, get shared memory.

    Why it hurts: a container has 64 MiB of /dev/shm unless something is mounted there: NCCL fails at start ("failed to
    extend /dev/shm/nccl-…"), or data workers die with a bus error in the middle of an epoch.
    Fix: mount an emptyDir with `medium: Memory` and a sizeLimit of 16Gi at /dev/shm.
    """
    for job in file.workloads:
        for role in job.roles:
            for box in role.containers:
                if box.gpus and not box.has_shm and (why := _why(job, box)):
                    yield Violation(
                        box.gpus_place or SourceLocation(1),
                        f"{why}, and nothing is mounted at /dev/shm: it has 64 MiB",
                        evidence=(("container", box.name), ("gpus", box.gpus)),
                    )


def _why(job: Workload, box: Container) -> str:
    """Peer access over NVLink makes do with little; whether the node has it, the manifest does not say."""
    trains = job.kind in ("PyTorchJob", "MPIJob") or any(one.program != "other" for one in box.chain())
    if not trains:
        return ""
    if (box.gpus or 0) > 1:
        return f"the ranks of {box.gpus} GPUs share a pod"
    workers = re.search(r"num[_-]workers[= ]+(\d+)", box.words)
    return f"{workers[1]} data workers" if workers and workers[1] != "0" else ""
