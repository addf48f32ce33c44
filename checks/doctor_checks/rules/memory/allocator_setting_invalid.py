"""MEM007 in launch files: a setting of PyTorch's CUDA memory allocator is invalid."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.api import FileFails, FilePasses, Severity, Violation, rule
from doctor.knowledge.alloc_conf import alloc_conf_faults as allocator_complaints
from doctor.lint.launch.launch_file import EnvironmentSource
from doctor.testing.script_cases import fails, shell_fails, shell_passes
from doctor_checks.memory.allocator_setting_invalid import CUDA_VARIABLE, GENERAL_VARIABLE, allocator_setting_invalid

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
    check=allocator_setting_invalid,
    reads=EnvironmentSource,
    cases=lambda: (
        fails("in a script", 'os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments=True"  # !\n'),
        shell_fails("an equals sign", "export PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb=512  # !", "torchrun train.py"),
        shell_fails("true in small letters", "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:true torchrun train.py  # !"),
        shell_fails(
            "an option that there is not", 'export PYTORCH_ALLOC_CONF="max_split_size:512"  # !', "torchrun train.py"
        ),
        FileFails(
            "in a pod",
            _POD.replace("- name: P", "- value: expandable_segments=True  # !\n          name: P").replace(
                "          value: expandable_segments=True\n", ""
            ),
            name="pod.yaml",
        ),
        shell_passes(
            "sound options",
            "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True,max_split_size_mb:512",
            "torchrun x.py",
        ),
        shell_passes("in quotes of the shell", "export PYTORCH_CUDA_ALLOC_CONF='expandable_segments:True'"),
        shell_passes("from outside", "export PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:$SIZE", "torchrun x.py"),
        FilePasses("in a pod, with a colon", _POD.replace("=", ":"), name="pod.yaml"),
    ),
)
def allocator_setting_invalid_in_files(file: EnvironmentSource) -> Iterator[Violation]:
    """Ask whether the options and values in PYTORCH_ALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF are valid.

    Why it hurts: PyTorch raises an error at the first use of CUDA on every rank.
    Fix: Write option:value pairs separated by commas, for example `export
    PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`.
    """
    for setting in file.settings:
        if setting.name in (CUDA_VARIABLE, GENERAL_VARIABLE) and setting.is_exported and setting.known_value:
            for complaint in allocator_complaints(setting.known_value):
                if complaint.ignored:
                    continue
                yield Violation(
                    setting.place,
                    f"{setting.name} {complaint.text}",
                    fix=f"Write `{complaint.value or complaint.fix}` in {setting.name}."
                    if complaint.value or complaint.fix
                    else "",
                    severity=Severity.WARNING if complaint.harmless else None,
                    evidence=(("value", setting.known_value), ("option", complaint.option)),
                )
