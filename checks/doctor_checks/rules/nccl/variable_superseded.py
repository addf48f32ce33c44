"""NCCL004 in launch files: a renamed or removed variable is set."""

from __future__ import annotations

import re
from collections.abc import Iterator

from doctor.api import FileFails, FilePasses, Script, Severity, Violation, is_older, rule
from doctor.knowledge.environment_variables import VariableInfo, without_loss
from doctor.knowledge.environment_variables import known as known_variable
from doctor.knowledge.releases import bundled_nccl
from doctor.lint.launch.launch_file import LAST_WITH_SIX, SIX, EnvironmentSource, LaunchFile, import_six
from doctor.lint.launch.process_launches import is_one_process, joins_no_group
from doctor.lint.python.project.starts.other_accelerators import uses_no_nccl
from doctor.testing.script_cases import fails, passes, shell_fails, shell_passes
from doctor_checks.nccl.variable_superseded import superseded_summary, variable_superseded


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
            "a program that runs with torch below 2.0 alone",
            'from torch._six import inf\nos.environ["NCCL_ASYNC_ERROR_HANDLING"] = "1"\n',
        ),
        fails(
            "a program that also runs with later ones",
            "try:\n    from torch._six import inf\nexcept ImportError:\n    from math import inf\n"
            'os.environ["NCCL_ASYNC_ERROR_HANDLING"] = "1"  # !\n',
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
        passes(
            "a program for an accelerator that has no NCCL",
            'import habana_frameworks.torch\nos.environ["NCCL_ASYNC_ERROR_HANDLING"] = "1"\n',
        ),
        fails(
            "a program that runs on others too",
            "try:\n    import habana_frameworks.torch\nexcept ImportError:\n    pass\n"
            'os.environ["NCCL_ASYNC_ERROR_HANDLING"] = "1"  # !\n',
        ),
        shell_fails("a switch that is on by default now", "export NCCL_IB_CUDA_SUPPORT=1  # !", "torchrun train.py"),
        shell_fails("the same, switched off", "export NCCL_IB_CUDA_SUPPORT=0  # !", "torchrun train.py"),
        shell_fails("the number of channels", "export NCCL_MIN_NCHANNELS=32  # !", "torchrun train.py"),
        FilePasses(
            "the same for RCCL",
            "export NCCL_MIN_NCHANNELS=32\ntorchrun train.py\n",
            name="run.sh",
            releases=(("rocm", "6.3.1"),),
        ),
        FileFails(
            "of PyTorch, with RCCL",
            "export NCCL_BLOCKING_WAIT=1  # !\ntorchrun train.py\n",
            name="run.sh",
            releases=(("rocm", "6.3.1"),),
        ),
        shell_passes("of the script alone", "NCCL_BLOCKING_WAIT=1", "torchrun train.py"),
        shell_passes(
            "one process", "export NCCL_BLOCKING_WAIT=1", "wandb disabled", "torchrun --nproc_per_node=1 x.py"
        ),
        shell_fails(
            "one process on each host", "export NCCL_BLOCKING_WAIT=1  # !", "srun torchrun --nproc_per_node=1 x.py"
        ),
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
    if (isinstance(file, LaunchFile) and (is_one_process(file) or joins_no_group(file))) or uses_no_nccl(file):
        return
    for setting in file.settings:
        info = known_variable(setting.name)
        if not setting.is_exported or info is None or info.superseded is None or info.replaced_by in names:
            continue
        if info.reader == "nccl" and file.releases.get("rocm"):
            continue  # RCCL, whose documentation has names that NCCL replaced
        if info.reader == "nccl" and is_older(bundled_nccl(file.stated_torch) or "", info.superseded) is True:
            continue  # the wheels of that torch still read it
        if info.reader == "torch" and _is_read_by_none(file, info):
            continue
        kept = without_loss(setting.name, setting.known_value or "0")
        yield Violation(
            setting.place,
            superseded_summary(setting.name, info),
            fix=f"Replace `{setting.name}` with `{info.replaced_by}`."
            if info.replaced_by and not kept
            else f"Remove `{setting.name}`.",
            severity=Severity.INFO,  # what is lost is a tuning that NCCL or PyTorch replaces by its default
            effect=kept,
        )


_BENCHMARK = re.compile(
    r"\b(?:all_?gather|all_?reduce|all_?to_?all|broadcast|gather|hypercube|reduce|reduce_scatter|scatter|sendrecv)_perf\b"
)
"""A program of nccl-tests, which uses NCCL without PyTorch."""


def _is_read_by_none(file: EnvironmentSource, info: VariableInfo) -> bool:
    """Whether no torch that is known to run reads the new name: the project asks for an older one, the file starts
    programs without torch, or the project names no torch and starts its ranks as it was done before torchrun (1.10),
    so that the old name may be the right one."""
    if is_older(file.releases.get("torch", ""), info.superseded or "") is True:
        return True
    if is_older(file.stated_torch, info.superseded or "") is True:
        return True
    if is_older(LAST_WITH_SIX, info.superseded or "") is True and _needs_old_torch(file):
        return True
    if not isinstance(file, LaunchFile) or file.modules is None:
        return False
    text = file.modules.text_at(file.path)
    programs = {one.program for first in file.launches for one in first.chain()}
    if _BENCHMARK.search(text) and programs <= {"srun", "mpirun", "other"}:
        return True
    return info.replaced_by is not None and "torch.distributed.launch" in text and not file.may_tell("torch")


def _needs_old_torch(file: EnvironmentSource) -> bool:
    if not isinstance(file, Script):
        return isinstance(file, LaunchFile) and file.imports_six
    others = (text for _, text in file.modules.mentioning(SIX)) if file.modules is not None else ()
    return import_six((file.text, *others))
