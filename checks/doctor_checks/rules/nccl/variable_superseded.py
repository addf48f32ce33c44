"""NCCL004 in launch files: a renamed or removed variable is set."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.api import FilePasses, Script, Severity, Violation, is_older, rule
from doctor.knowledge.environment_variables import VariableInfo
from doctor.knowledge.environment_variables import known as known_variable
from doctor.lint.launch.launch_file import EnvironmentSource
from doctor.testing.script_cases import fails, passes, shell_fails, shell_passes
from doctor_checks.nccl.variable_superseded import superseded_summary, variable_superseded, without_loss


@rule(
    check=variable_superseded,
    reads=EnvironmentSource,
    cases=lambda: (
        fails("in a script", 'os.environ["NCCL_ASYNC_ERROR_HANDLING"] = "1"  # !\n'),
        shell_fails("renamed by torch 2.2", "export NCCL_ASYNC_ERROR_HANDLING=1  # !", "torchrun train.py"),
        shell_fails("renamed too", "NCCL_BLOCKING_WAIT=1 torchrun train.py  # !"),
        shell_fails("for all tasks", "srun --export=ALL,NCCL_BLOCKING_WAIT=0 python train.py  # !"),
        shell_passes("the name of today", "export TORCH_NCCL_ASYNC_ERROR_HANDLING=1", "torchrun x.py"),
        shell_passes(
            "both names", "export NCCL_ASYNC_ERROR_HANDLING=1 TORCH_NCCL_ASYNC_ERROR_HANDLING=1", "torchrun x.py"
        ),
        passes(
            "torch reads the old name",
            'os.environ["NCCL_ASYNC_ERROR_HANDLING"] = "1"\n',
            releases=(("torch", "2.0.1"),),
        ),
        FilePasses(
            "torch reads the old name in the job of a launch file",
            "export NCCL_ASYNC_ERROR_HANDLING=1\ntorchrun train.py\n",
            name="job.sbatch",
            releases=(("torch", "2.0.1"),),
        ),
        passes(
            "a process that makes itself the only rank",
            'os.environ["WORLD_SIZE"] = "1"\nos.environ["NCCL_ASYNC_ERROR_HANDLING"] = "1"\n',
        ),
        fails(
            "a number of ranks that is set where nothing else does",
            'if "WORLD_SIZE" not in os.environ:\n    os.environ["WORLD_SIZE"] = "1"\n'
            'os.environ["NCCL_ASYNC_ERROR_HANDLING"] = "1"  # !\n',
        ),
        shell_fails("a switch that is on by default now", "export NCCL_IB_CUDA_SUPPORT=1  # !", "torchrun train.py"),
        shell_fails("the same, switched off", "export NCCL_IB_CUDA_SUPPORT=0  # !", "torchrun train.py"),
        shell_passes("of the script alone", "NCCL_BLOCKING_WAIT=1", "torchrun train.py"),
    ),
)
def variable_superseded_in_files(file: EnvironmentSource) -> Iterator[Violation]:
    """Ask whether a launch file uses the current names of its variables.

    Why it hurts: an old name is read with a warning for some releases and then ignored.
    Fix: Use the new name.
    """
    names = {setting.name for setting in file.settings}
    sizes = [one for one in file.settings if one.name == "WORLD_SIZE" and one.is_certain]
    if isinstance(file, Script) and any(one.known_value == "1" for one in sizes):
        return  # a single rank has no peer to wait for
    for setting in file.settings:
        info = known_variable(setting.name)
        if not setting.is_exported or info is None or info.superseded is None or info.replaced_by in names:
            continue
        if info.reader == "torch" and _is_before(file, info.superseded):
            continue
        kept = without_loss(setting.name, setting.known_value or "0")
        yield Violation(
            setting.place,
            superseded_summary(setting.name, info),
            fix=f"Replace `{setting.name}` with `{info.replaced_by}`."
            if info.replaced_by and not kept
            else f"Remove `{setting.name}`.",
            severity=_severity(info, kept),
            effect=kept,
        )


def _severity(info: VariableInfo, kept: str) -> Severity | None:
    """``None``, that of the check, where what it sets is lost: not by a name that is still read, or may be, nor by one
    whose loss changes nothing (``kept`` says so)."""
    return None if info.is_superseded_everywhere and not info.still_read and not kept else Severity.INFO


def _is_before(file: EnvironmentSource, superseded: str) -> bool:
    """Whether the project asks for a torch that reads the old name alone."""
    release = file.releases.get("torch")
    return release is not None and is_older(release, superseded) is True
