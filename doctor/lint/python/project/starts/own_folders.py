"""Ranks with folders of their own: those in different pods, or on listed hosts, write to different file systems."""

from __future__ import annotations

import ast
import re
from pathlib import PurePath

from doctor.core.text import joined_lines
from doctor.lint.python.project.left_defaults import shown_numbers
from doctor.lint.python.project.settings.options import shown_starts
from doctor.lint.python.project.starts.launch_counts import LAUNCHERS, is_nearest, may_mean, may_start_ranks
from doctor.lint.python.script import Script, per_script

_RANK_PER_HOST = re.compile(
    r"\bworld_?size\s{0,3}=\s{0,3}len\(\s{0,3}[\w.]{0,40}(?:hosts?|nodes?|servers?|machines?|ips?|addresse?s?)\s{0,3}\)",
    re.IGNORECASE,
)
"""Jobs with as many ranks as listed hosts: each rank has a host, and the folders there, of its own."""
_POD = re.compile(r"^[ \t]*kind:[ \t]*(?:\w*Job|JobSet|Pod|TrainingRuntime|ClusterTrainingRuntime)\b", re.MULTILINE)
_VOLUMES = re.compile(
    r"^[ \t]*(?:-[ \t]+)?(?:persistentVolumeClaim|nfs|hostPath|csi|cephfs|glusterfs|azureFile|flexVolume|iscsi|fc|rbd|"
    r"volumeClaimTemplates|gcePersistentDisk|awsElasticBlockStore):",
    re.MULTILINE,
)
"""Volumes that other pods may mount (kubernetes.io/docs/concepts/storage/volumes)."""
_MOUNT = re.compile(r"\bmountPath:[ \t]*[\"']?([^\s\"'#]+)")
_GPUS = re.compile(r"(?:nvidia|amd)\.com/gpu[\"']?:[ \t]*[\"']?(\d+)")
_PER_POD = re.compile(r"\b(?:nprocPerNode|numProcPerNode|nproc[_-]per[_-]node)\b[\"']?[ \t]*[:=][ \t]*[\"']?([\w$]+)")


def has_folder_of_its_own(script: Script, at: ast.AST) -> bool:
    """Whether each rank that reaches a place writes into a folder that no other one has."""
    if _RANK_PER_HOST.search(script.text) is not None or _spawns_one(script):
        return True
    return _is_in_pods(script, _path_at(script, at))


@per_script
def _spawns_one(script: Script) -> bool:
    """Whether a program of a project spawns one rank on each host, by all numbers that the project shows:
    ``mp.spawn(train, nprocs=args.gpus)`` with ``--gpus``, which is 1 by default and given nowhere."""
    if script.modules is None or script.modules.is_one_file:
        return False
    spawned = list(script.calls("torch.multiprocessing.spawn"))
    counts = [script.argument(one, "nprocs", 2) for one in spawned]
    return bool(counts) and all(one is not None and shown_numbers(script, one) == {1} for one in counts)


def _path_at(script: Script, at: ast.AST) -> str:
    """The absolute path that a call is given, also as the default of an option; empty if there is none."""
    texts = [one.value for one in ast.walk(at) if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    names = [one.attr for one in ast.walk(at) if isinstance(one, ast.Attribute)]
    for call in script.method_calls("add_argument"):
        named = [one for arg in call.args if isinstance(one := script.value(arg), str)]
        if any(one.lstrip("-").replace("-", "_") in names for one in named):
            default = script.value(script.argument(call, "default"))
            texts += [default] if isinstance(default, str) else []
    return next((one for one in texts if one.startswith("/")), "")


def _is_in_pods(script: Script, path: str) -> bool:
    """Whether every launch file of the project that starts a script, or if there is none, every job beside it, does so
    in pods of one process, which mount nothing there that other pods have."""
    manifests = _manifests(script)
    return bool(manifests) and all(
        _has_one_process(script, text) and (not _VOLUMES.search(text) or (path and not _is_mounted(text, path)))
        for text in manifests
    )


def has_gpu_of_pod(script: Script) -> bool:
    """Whether each rank is in a pod that has one GPU, by all launch files of the project that may start a script: what
    an earlier run saved from GPU 0 comes back to the rank's own. A page may start more on a host."""
    manifests = [] if any(map(LAUNCHERS.search, shown_starts(script))) else _manifests(script)
    return bool(manifests) and all(
        _has_one_process(script, text) and set(_GPUS.findall(text)) == {"1"} and _VISIBLE.search(text) is None
        for text in manifests
    )


_VISIBLE = re.compile(r"(?:CUDA|NVIDIA|HIP|ROCR)_VISIBLE_DEVICES")


def _is_mounted(text: str, path: str) -> bool:
    return any(PurePath(path).is_relative_to(one[1]) for one in _MOUNT.finditer(text))


def _has_one_process(script: Script, text: str) -> bool:
    """Whether the pods of a manifest have one process each: as it says, or one for each of their single GPUs, or since
    they start the script with ``python`` alone."""
    counts = set(_PER_POD.findall(text))
    has_one_gpu = set(_GPUS.findall(text)) == {"1"}
    if not counts and _STARTS_MORE.search(text) is None:
        return (has_one_gpu and _OF_OPERATOR.search(text) is not None) or _starts_plainly(script, text)
    return _POD.search(text) is not None and (
        counts == {"1"} or (bool(counts) and counts <= {"1", "auto"} and has_one_gpu)
    )


def _starts_plainly(script: Script, text: str) -> bool:
    """Whether the containers of a manifest run a script with ``python``, and it starts no other process: the operator
    gives the ranks to the pods (RANK and WORLD_SIZE of a PyTorchJob)."""
    if script.modules is None or "apiVersion" not in text or may_start_ranks(script, script.modules):
        return False
    name = re.escape(PurePath(script.path).name)
    plain = text.replace("\\n", " ").replace("\\", "")  # in JSON
    words = re.sub(r"[\"',\s\[\]]+|(?<=\s)-(?=\s)", " ", plain)
    return re.search(rf"\bpython[\d.]* +(?:- +|-u +)*(?:[\w./-]*/)?{name}\b", words) is not None


_OF_OPERATOR = re.compile(r"^[ \t]*kind:[ \t]*[\"']?(?:PyTorchJob|AdaptDLJob)\b", re.MULTILINE)
"""A job whose operator gives each pod a rank (kubeflow.org/docs/components/trainer/legacy-v1/user-guides/pytorch;
adaptdl.readthedocs.io: each replica of an AdaptDLJob is a pod)."""
_STARTS_MORE = re.compile(r"torchrun|torch\.distributed|deepspeed|accelerate|mpirun|horovodrun|elasticPolicy")


@per_script
def _manifests(script: Script) -> list[str]:
    """The texts of the launch files that may start a script."""
    modules, place = script.modules, PurePath(script.path)
    if modules is None:
        return []
    named = [
        text
        for shown, text in modules.mentioning(place.name, launches=True)
        if is_nearest(modules, shown, script.path) and _means(script, text)
    ]
    jobs = [(PurePath(shown).parent, text) for shown, text in modules.mentioning("kind:", launches=True)]
    beside = [text for folder, text in jobs if folder == place.parent and _PER_POD.search(text)]
    below = [text for folder, text in jobs if folder.is_relative_to(place.parent) and _OF_OPERATOR.search(text)]
    return named or beside or below


def _means(script: Script, text: str) -> bool:
    """Whether a launch file names a script: not one of that name in another folder."""
    name = re.compile(rf"(?<![\w-]){re.escape(PurePath(script.path).name)}\b")
    return any(may_mean(script, line, script.path) for line in joined_lines(text) if name.search(line))
