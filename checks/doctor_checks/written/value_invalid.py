"""NCCL002: a launch file gives a known variable a value that it does not take."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.api import FileFails, FilePasses, LaunchFile, Severity, Violation, rule
from doctor.knowledge.environment_variables import known as known_variable
from doctor.knowledge.variable_values import fault as value_fault
from doctor.testing import lines


@rule(
    id="NCCL002",
    severity=Severity.ERROR,
    reads=LaunchFile,
    cases=lambda: (
        FileFails("true is read as 0", lines("export NCCL_IB_DISABLE=true  # !", "torchrun train.py"), name="train.sh"),
        FileFails("an unknown log level", lines("NCCL_DEBUG=DEBUG srun python train.py  # !"), name="train.sh"),
        FileFails(
            "a level in small letters", lines("export NCCL_P2P_LEVEL=nvl  # !", "srun python train.py"), name="a.sh"
        ),
        FileFails(
            "no level of torch", lines("export TORCH_DISTRIBUTED_DEBUG=1  # !", "torchrun train.py"), name="train.sh"
        ),
        FilePasses(
            "sound values",
            lines("export NCCL_IB_DISABLE=1 NCCL_DEBUG=info", "export NCCL_P2P_LEVEL=NVL", "torchrun train.py"),
            name="train.sh",
        ),
        FilePasses("from outside", lines("export NCCL_DEBUG=$1", "torchrun train.py"), name="train.sh"),
        FilePasses("empty", lines("export NCCL_IB_DISABLE=", "torchrun train.py"), name="train.sh"),
        FilePasses("of the script alone", lines("NCCL_DEBUG=maybe", "torchrun train.py"), name="train.sh"),
    ),
)
def value_invalid(file: LaunchFile) -> Iterator[Violation]:
    """Ask whether every known variable of a launch file has a value that its reader takes.

    Why it hurts: NCCL reads text as 0 and passes unknown words over in silence, so the setting does not do what it
    says; torch raises when it makes the process group.
    Fix: write a value that the variable takes, or unset it.
    """
    for setting in file.settings:
        if not setting.is_exported or setting.told is None or known_variable(setting.name) is None:
            continue
        fault = value_fault(setting.name, setting.told)
        if fault is not None:
            yield Violation(
                setting.place,
                f"{setting.name}={setting.told or repr('')} {fault.problem}",
                fix=f"A value that fits: {fault.expected}.",
                severity=Severity.INFO if fault.harmless else Severity.WARNING if fault.mild else None,
                evidence=(("name", setting.name), ("value", setting.told), ("expected", fault.expected)),
            )
