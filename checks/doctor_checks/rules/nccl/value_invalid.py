"""NCCL002 in launch files: a known variable has an invalid value."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.api import FileFails, FilePasses, Severity, Violation, rule
from doctor.knowledge.environment_variables import known as known_variable
from doctor.knowledge.interface_syntax import parse_nccl_integer
from doctor.knowledge.releases import bundled_nccl, nccl_of_rocm
from doctor.knowledge.variable_values import ValueFault
from doctor.knowledge.variable_values import fault as value_fault
from doctor.lint.launch.launch_file import EnvironmentSource, LaunchFile
from doctor.lint.launch.process_launches import is_one_process
from doctor.lint.launch.ray_jobs import set_for_ray_jobs
from doctor.testing.script_cases import fails, passes, shell_fails, shell_passes
from doctor_checks.nccl.value_invalid import (
    IB_DISABLE,
    UNUSED,
    intended_value,
    is_of_infiniband,
    severity_of,
    valid_values,
    value_invalid,
)


@rule(
    check=value_invalid,
    reads=EnvironmentSource,
    cases=lambda: (
        fails("in a script", 'os.environ.setdefault("NCCL_P2P_LEVEL", "NVLINK")  # !\n'),
        fails(
            "several at once", 'os.environ.update({\n    "NCCL_DEBUG": "DEBUG",  # !\n    "OMP_NUM_THREADS": "4",\n})\n'
        ),
        passes("in a script, from outside", 'os.environ["NCCL_DEBUG"] = args.debug\n'),
        shell_fails("true is read as 0", "export NCCL_IB_DISABLE=true  # !", "torchrun train.py"),
        shell_fails("an unknown log level", "NCCL_DEBUG=DEBUG srun python train.py  # !"),
        shell_fails("a level in small letters", "export NCCL_P2P_LEVEL=nvl  # !", "srun python train.py"),
        shell_fails("an algorithm that not every collective has", "export NCCL_ALGO=Tree  # !", "torchrun train.py"),
        FilePasses(
            "an algorithm that not every collective has, and a torch whose NCCL falls back to another one",
            "export NCCL_ALGO=Tree\ntorchrun train.py\n",
            name="run.sh",
            releases=(("torch", "2.5.1"),),
        ),
        FileFails(
            "the same with a newer torch",
            "export NCCL_ALGO=Tree  # !\ntorchrun train.py\n",
            name="run.sh",
            releases=(("torch", "2.8.0"),),
        ),
        FilePasses(
            "an algorithm that not every collective has, and an RCCL that falls back to another one",
            "export NCCL_ALGO=Tree\ntorchrun train.py\n",
            name="run.sh",
            releases=(("rocm", "6.3.1"),),
        ),
        FileFails(
            "the same with a newer ROCm",
            "export NCCL_ALGO=Tree  # !\ntorchrun train.py\n",
            name="run.sh",
            releases=(("rocm", "7.0"),),
        ),
        FileFails(
            "a number of threads that NCCL replaces",
            "export NCCL_NTHREADS=1  # !\ntorchrun train.py\n",
            name="run.sh",
        ),
        shell_fails("no level of torch", "export TORCH_DISTRIBUTED_DEBUG=1  # !", "torchrun train.py"),
        shell_passes(
            "sound values", "export NCCL_IB_DISABLE=1 NCCL_DEBUG=info", "export NCCL_P2P_LEVEL=NVL", "torchrun train.py"
        ),
        FileFails(
            "of InfiniBand, which is off",
            "export NCCL_IB_DISABLE=1\nexport NCCL_IB_TIMEOUT=3600  # !\ntorchrun train.py\n",
            name="run.sh",
        ),
        FileFails(
            "of InfiniBand, which is cut to eight bits",
            "export NCCL_IB_TIMEOUT=3600  # !\ntorchrun --nnodes=2 --nproc_per_node=8 train.py\n",
            name="run.sh",
        ),
        shell_passes("one process", "export NCCL_DEBUG=DEBUG", "deepspeed --include localhost:0 train.py"),
        shell_passes("from outside", "export NCCL_DEBUG=$1", "torchrun train.py"),
        shell_passes("empty", "export NCCL_IB_DISABLE=", "torchrun train.py"),
        shell_passes("of the script alone", "NCCL_DEBUG=maybe", "torchrun train.py"),
    ),
)
def value_invalid_in_files(file: EnvironmentSource) -> Iterator[Violation]:
    """Ask whether every known variable of a launch file has a valid value."""
    rocm = file.releases.get("rocm", "")
    nccl = nccl_of_rocm(rocm) if rocm else bundled_nccl(file.releases.get("torch", ""))
    is_off = any(
        one.name == IB_DISABLE and one.is_exported and parse_nccl_integer(one.known_value, 0) for one in file.settings
    )
    is_alone = isinstance(file, LaunchFile) and is_one_process(file)
    replaced = set_for_ray_jobs(file) if isinstance(file, LaunchFile) else frozenset()
    for setting in file.settings:
        if setting.name in replaced:
            continue
        info = known_variable(setting.name)
        if not setting.is_exported or setting.known_value is None or info is None:
            continue
        if is_alone and info.reader == "nccl":
            continue  # a rank without peers sends nothing
        fault = value_fault(setting.name, setting.known_value, release=nccl if info.reader == "nccl" else None)
        if fault is not None:
            is_unused = is_off and is_of_infiniband(setting.name)
            yield Violation(
                setting.place,
                f"{setting.name}={setting.known_value or repr('')} {fault.problem}{UNUSED if is_unused else ''}",
                fix=_fix(setting.name, setting.known_value, fault),
                severity=Severity.INFO if is_unused else severity_of(fault) or _of_start(setting.name, fault),
                evidence=(("expected", fault.expected),),
            )


def _of_start(name: str, fault: ValueFault) -> Severity | None:
    """A warning, unless the job does not start: where NCCL ignores a value, reads it as another one or cuts it to eight
    bits (``timeout`` of ``ibv_qp_attr``), only the setting is lost."""
    return None if "rejects" in fault.problem or name == "NCCL_COMM_ID" else Severity.WARNING


def _fix(name: str, value: str, fault: ValueFault) -> str:
    meant = intended_value(name, value, fault.expected)
    if meant is not None:
        return f"Set `{name}={meant}`."
    if fault.ignored:
        return f"Remove {', '.join(fault.ignored)} from {name}."
    return f"Set {name} to {valid_values(fault)}, or remove it."
