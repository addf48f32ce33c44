"""MEM007: a launch file gives torch's allocator options that it does not take."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.api import FileFails, FilePasses, LaunchFile, Severity, Violation, rule
from doctor.knowledge.alloc_conf import alloc_conf_faults as allocator_complaints
from doctor.testing import lines

_NAMES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_POD = """\
apiVersion: v1
kind: Pod
spec:
  containers:
    - name: trainer
      env:
        - name: PYTORCH_CUDA_ALLOC_CONF
          value: expandable_segments=True
"""


@rule(
    id="MEM007",
    severity=Severity.ERROR,
    reads=LaunchFile,
    cases=lambda: (
        FileFails(
            "an equals sign",
            lines("export PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb=512  # !", "torchrun train.py"),
            name="train.sh",
        ),
        FileFails(
            "true in small letters",
            lines("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:true torchrun train.py  # !"),
            name="train.sh",
        ),
        FileFails(
            "an option that there is not",
            lines('export PYTORCH_ALLOC_CONF="max_split_size:512"  # !', "torchrun train.py"),
            name="train.sh",
        ),
        FileFails(
            "in a pod",
            _POD.replace("- name: P", "- value: expandable_segments=True  # !\n          name: P").replace(
                "          value: expandable_segments=True\n", ""
            ),
            name="pod.yaml",
        ),
        FilePasses(
            "sound options",
            lines("export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True,max_split_size_mb:512", "torchrun x.py"),
            name="train.sh",
        ),
        FilePasses(
            "in quotes of the shell", lines("export PYTORCH_CUDA_ALLOC_CONF='expandable_segments:True'"), name="a.sh"
        ),
        FilePasses(
            "from outside",
            lines("export PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:$SIZE", "torchrun x.py"),
            name="a.sh",
        ),
        FilePasses("in a pod, with a colon", _POD.replace("=", ":"), name="pod.yaml"),
    ),
)
def allocator_setting_invalid(file: LaunchFile) -> Iterator[Violation]:
    """Ask whether PYTORCH_ALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF hold options and values that torch takes.

    Why it hurts: torch raises `Unrecognized key` or `Expected 'True' or 'False'` at the first use of CUDA, on every
    rank.
    Fix: `export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True` (option:value, commas between, True or False).
    """
    for setting in file.settings:
        if setting.name in _NAMES and setting.is_exported and setting.told:
            for complaint in allocator_complaints(setting.told):
                yield Violation(
                    setting.place,
                    f"{setting.name} {complaint.text}",
                    fix=f"`{complaint.value or complaint.fix}`" if complaint.value or complaint.fix else "",
                    severity=Severity.WARNING if complaint.harmless else None,
                    evidence=(("value", setting.told), ("option", complaint.option)),
                )
