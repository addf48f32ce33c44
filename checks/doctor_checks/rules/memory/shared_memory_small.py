"""MEM010 in launch files: /dev/shm is too small."""

from __future__ import annotations

import re
from collections.abc import Iterator

from doctor.api import FileFails, FilePasses, Severity, SourceLocation, Violation, rule
from doctor.lint.launch.kubernetes import Container, Workload
from doctor.lint.launch.manifest import Manifest
from doctor.lint.launch.process_launches import option_of, processes_of
from doctor_checks.memory.shared_memory_small import shared_memory_small

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
_ON_NODES = """\
apiVersion: kubeflow.org/v1
kind: PyTorchJob
spec:
  pytorchReplicaSpecs:
    Master:
      template:
        spec:
          affinity:
            nodeAffinity:
              requiredDuringSchedulingIgnoredDuringExecution:
                nodeSelectorTerms:
                  - matchExpressions:
                      - {key: nvidia.com/gpu.product, operator: In, values: [GPU]}
          containers:
            - name: pytorch
              image: registry.example/tuning
              resources:
                limits:
                  nvidia.com/gpu: 2
"""


def _job(command: str, gpus: str) -> str:
    return _JOB.replace("COMMAND", command).replace("GPUS", gpus)


@rule(
    check=shared_memory_small,
    severity=Severity.WARNING,
    reads=Manifest,
    impacts={r"workers mounts": "DataLoader workers crash with a bus error when their batches fill /dev/shm."},
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
        FilePasses(
            "one rank on a GPU of several", _job("torchrun, --nproc_per_node=1, train.py", "2"), name="job.yaml"
        ),
        FilePasses(
            "a script that is told to be alone", _job('python, train.py, --world-size, "1"', "2"), name="job.yaml"
        ),
        FileFails(
            "a script that starts its ranks", _job('python, train.py, --world_size, "2"', "2  # !"), name="job.yaml"
        ),
        FileFails(
            "one rank with data workers",
            _job('python, train.py, --world_size=1, --num_workers, "4"', "2  # !"),
            name="job.yaml",
        ),
        FilePasses(
            "a program of the image on GPUs with NVLink",
            _ON_NODES.replace("GPU", "NVIDIA-A100-SXM4-80GB"),
            name="j.yaml",
        ),
        FileFails(
            "the same without NVLink",
            _ON_NODES.replace("GPU", "NVIDIA-L40S").replace("gpu: 2", "gpu: 2  # !"),
            name="j.yaml",
        ),
        FileFails(
            "a script on GPUs with NVLink",
            _job("torchrun, train.py", "8  # !").replace(
                "          containers:", "          nodeSelector: {pool: a3-highgpu-8g}\n          containers:"
            ),
            name="job.yaml",
        ),
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
def shared_memory_small_in_files(file: Manifest) -> Iterator[Violation]:
    """Ask whether pods that train on several GPUs, or with DataLoader workers, have enough shared memory.

    Why it hurts: NCCL fails at startup ("failed to extend /dev/shm/nccl-…"), or DataLoader workers crash with a bus
    error.
    Fix: Mount an emptyDir with `medium: Memory` at /dev/shm.
    """
    for job in file.workloads:
        for role in job.roles:
            for box in role.containers:
                if box.gpus and not box.has_shm and (why := _why(job, box)):
                    yield Violation(
                        box.gpus_place or SourceLocation(1),
                        f"{why} mounts no volume at /dev/shm, which has 64 MiB by default",
                        fix=f"Mount an emptyDir with `medium: Memory` at /dev/shm in the container {box.name}."
                        if box.name
                        else "",
                        evidence=(("container", box.name), ("gpus", box.gpus)),
                    )


def _starts_one(box: Container) -> bool:
    """Whether each command says that it starts one rank; a script alone may start more."""
    starts = [next((one for one in first.chain() if one.is_agent), [*first.chain()][-1]) for first in box.launches]
    return bool(starts) and all(
        option_of(one, *one.command.processes) is not None and processes_of(one) == 1
        if one.is_agent
        else one.program == "python" and _ALONE.search(" ".join(one.arguments))
        for one in starts
    )


_ALONE = re.compile(r"(?:^| )--world[_-]size[= ]1(?: |$)")


def _why(job: Workload, box: Container) -> str:
    """With peer access over NVLink, NCCL needs little shared memory; a program of the file may have data workers."""
    trains = job.kind in ("PyTorchJob", "MPIJob") or any(one.program != "other" for one in box.chain())
    if not trains:
        return ""
    needs_little = box.has_nvlink and not box.launches
    if (box.gpus or 0) > 1 and not _starts_one(box) and not needs_little:
        return f"A pod with {box.gpus} GPUs"
    workers = re.search(r"num[_-]workers[= ]+(\d+)", box.words)
    return f"A pod with {workers[1]} DataLoader workers" if workers and workers[1] != "0" else ""
