"""ENV007 in launch files: MASTER_PORT is not a valid port for the master to listen on."""

from __future__ import annotations

import re
from collections.abc import Iterator

from doctor.api import FilePasses, LaunchFile, Script, Severity, Violation, is_older, rule
from doctor.lint.launch.launch_file import EnvironmentSource
from doctor.lint.launch.process_launches import option_name, starts_of
from doctor.testing.script_cases import fails, passes, shell_fails, shell_passes
from doctor_checks.launch.master_port_invalid import master_port_invalid


@rule(
    check=master_port_invalid,
    reads=EnvironmentSource,
    cases=lambda: (
        fails("in a script", 'os.environ["MASTER_PORT"] = "80000"  # !\n'),
        passes("in a script, a free one", 'os.environ["MASTER_PORT"] = str(find_free_port())\n'),
        shell_fails("above the highest", "export MASTER_PORT=295000  # !", "srun python train.py"),
        shell_fails("an option", "torchrun --nproc_per_node=8 --master_port=65537 train.py  # !"),
        shell_fails(
            "summed up beyond it", "BASE=65000", "export MASTER_PORT=$((BASE + 1000))  # !", "srun python train.py"
        ),
        shell_fails("no number", "export MASTER_PORT=auto  # !", "srun python train.py"),
        shell_passes("a port", "export MASTER_PORT=29500", "srun python train.py"),
        shell_passes(
            "a blank after it", "torchrun --master_port 29500\\ ", "  --nproc_per_node=8 train.py", "echo $MASTER_PORT"
        ),
        shell_passes("any", "torchrun --rdzv-backend=c10d --rdzv-endpoint=localhost:0 train.py"),
        shell_passes("by the job", "export MASTER_PORT=$((10000 + RANDOM % 50000))", "srun python train.py"),
        shell_passes(
            "old arithmetic of bash", "for run in 1 2; do", "torchrun --master_port $[29500 + run] x.py", "done"
        ),
        shell_fails("old arithmetic beyond it", "torchrun --master_port $[65000 + 1000] train.py  # !"),
        shell_passes("escapes that are not followed", r"export MASTER_PORT=$'\x32\x39500'", "srun python train.py"),
        shell_passes("to be filled in", "export MASTER_PORT=your_free_port", "torchrun --nproc_per_node=8 train.py"),
        shell_passes("its own name", "torchrun --nproc_per_node=8 --master_port=master_port train.py"),
        shell_fails("another name", "torchrun --nproc_per_node=8 --master_port=auto train.py  # !"),
        FilePasses(
            "an option of a template",
            "PORT='a free port'\ntorchrun --nproc_per_node=8 --master_port $PORT train.py\n",
            name="run.sh",
        ),
        shell_passes("not of this file", "MASTER_PORT=70000", "echo $MASTER_PORT; python x.py"),
    ),
)
def master_port_invalid_in_files(file: EnvironmentSource) -> Iterator[Violation]:
    """Ask whether the master port is a valid port number.

    Why it hurts: PyTorch rejects the port on every rank, and the job does not start.
    Fix: Set the same port from 1024 to 32767 on all ranks, for example with `export MASTER_PORT=29500`.
    """
    for setting in file.settings:
        if (
            setting.name == "MASTER_PORT"
            and setting.is_exported
            and setting.known_value
            and not _is_port(setting.known_value)
        ):
            replaced, cut = _may_be_replaced(file), _cut_port(file, setting.known_value)
            yield Violation(
                setting.place,
                f"MASTER_PORT={setting.known_value} is not a valid port (1-65535)"
                + (", unless another module replaces it" if replaced else ""),
                evidence=(("value", setting.known_value),),
                severity=Severity.INFO if cut else Severity.WARNING if replaced else None,
                effect=_effect_of_cut(cut),
            )
    for start in starts_of(file) if isinstance(file, LaunchFile) else ():
        given = start.launch.known_option(start.launch.command.port)
        if given and not _is_port(given):
            cut = _cut_port(file, given)
            yield Violation(
                start.launch.place,
                f"{given} is not a valid master port (1-65535)",
                fix="Use the same port from 1024 to 32767 in all commands of the job, for example "
                f"`{option_name(start.launch, start.launch.command.port)}=29500`.",
                evidence=(("value", given),),
                severity=Severity.INFO if cut else None,
                effect=_effect_of_cut(cut),
            )


def _effect_of_cut(port: int) -> str:
    return f"The torch of the project uses port {port}, and a newer one does not start." if port else ""


_JOINS = re.compile(r"init_process_group|init_device_mesh|Accelerator\(|deepspeed|Trainer\(|Fabric\(|spawn\(")
"""Calls of scripts that join a job, or start its ranks."""


def _may_be_replaced(file: EnvironmentSource) -> bool:
    """Whether the process group starts in another module, which may set the port itself."""
    return isinstance(file, Script) and _JOINS.search(file.text) is None


_CHECKED_SINCE = "1.9"
"""Older torch keeps the lowest 16 bits of a port; 1.10 rejects one with more (pytorch/pytorch#67172)."""


def _cut_port(file: EnvironmentSource, port: str) -> int:
    """The port that the torch of the project makes of a too high one; 0 if it rejects it, or is unknown. A folder that
    states none is of the time of the others in its project."""
    stated = [file.stated_torch] if file.stated_torch else _torch_of_others(file)
    is_cut = bool(stated) and all(is_older(one, _CHECKED_SINCE) for one in stated)
    return int(port) & 0xFFFF if port.isdigit() and is_cut else 0


def _torch_of_others(file: EnvironmentSource) -> list[str]:
    """The newest torch that each other part of the project permits; none of a file that is linted alone."""
    elsewhere = getattr(file.releases, "elsewhere", None)
    return [newest for _, newest in elsewhere("torch")] if elsewhere is not None else []


def _is_port(text: str) -> bool:
    """Whether ``int()`` makes a port of a text: blanks around it do not matter."""
    return text.strip().isdigit() and int(text) <= 65535
