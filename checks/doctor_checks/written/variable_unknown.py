"""NCCL001: a launch file sets a variable that nobody reads."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.api import FileFails, FilePasses, LaunchFile, Severity, Violation, rule
from doctor.knowledge.environment_variables import concerns_nccl
from doctor.knowledge.environment_variables import is_foreign as is_foreign_variable
from doctor.knowledge.environment_variables import known as known_variable
from doctor.knowledge.environment_variables import nearest as nearest_variable
from doctor.testing import lines

_POD = """\
apiVersion: v1
kind: Pod
spec:
  containers:
    - name: trainer
      env:
        - {name: NAME, value: eth0}
"""


@rule(
    id="NCCL001",
    severity=Severity.WARNING,
    reads=LaunchFile,
    cases=lambda: (
        FileFails(
            "a letter is missing", lines("export NCCL_SOKET_IFNAME=eth0  # !", "torchrun train.py"), name="train.sh"
        ),
        FileFails("an underscore too many", lines("NCCL_IB_DIS_ABLE=1 torchrun train.py  # !"), name="train.sh"),
        FileFails(
            "for mpirun",
            lines("mpirun -np 8 -x NCCL_SOCKET_IF_NAME=eth0 python train.py  # !"),
            name="train.sh",
        ),
        FileFails(
            "in a pod", _POD.replace("NAME, value: eth0}", "NCCL_SOKET_IFNAME, value: eth0}  # !"), name="pod.yaml"
        ),
        FilePasses(
            "known names", lines("export NCCL_SOCKET_IFNAME=eth0 NCCL_DEBUG=INFO", "torchrun train.py"), name="a.sh"
        ),
        FilePasses(
            "packages, plugins and forks",
            lines("export NCCL_HOME=/opt/nccl NCCL_FASTRAK_CTRL_DEV=eth0 NCCL_NCHANNELS_PER_PEER=4", "torchrun a.py"),
            name="train.sh",
        ),
        FilePasses("of the script alone", lines("NCCL_TESTS_VERSON=2.13", "make -C nccl-tests"), name="build.sh"),
        FilePasses("near to nothing", lines("export NCCL_TEAM_COLOUR=blue", "torchrun train.py"), name="train.sh"),
        FilePasses("in a pod, known", _POD.replace("NAME", "NCCL_SOCKET_IFNAME"), name="pod.yaml"),
    ),
)
def variable_unknown(file: LaunchFile) -> Iterator[Violation]:
    """Ask whether the NCCL_* and TORCH_NCCL_* variables of a launch file are ones that somebody reads.

    Why it hurts: a misspelled name is silently ignored, and the run behaves as if it were not set.
    Fix: write the name as the documentation of NCCL or PyTorch has it.
    """
    for setting in file.settings:
        name = setting.name
        if not setting.is_exported or not concerns_nccl(name) or known_variable(name) or is_foreign_variable(name):
            continue
        near = nearest_variable(name)
        if near is not None:
            yield Violation(
                setting.place,
                f"Unknown variable {name}: neither NCCL, PyTorch nor a known plugin reads it. Did you mean {near}?",
                fix=f"`{near}` in place of `{name}`.",
                evidence=(("name", name), ("near", near)),
            )
