"""CODE044: the command of a launcher ends before the lines that were meant to continue it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from doctor.api import Severity, SourceLocation, Violation, rule
from doctor.lint.launch.launch_file import EnvironmentSetting, Launch
from doctor.lint.launch.process_launches import starts_of
from doctor.lint.launch.shell.left_exports import is_sourced
from doctor.lint.launch.shell.reader import ShellFile
from doctor.lint.launch.shell.unexported import DEVICES
from doctor.testing.script_cases import shell_fails, shell_passes

_LONGEST_WORD = 24
"""Characters of a word that a summary names."""
_CAUSES = {
    "blank": "a blank behind the backslash",
    "comment": "a comment",
    "newline": "a line without a backslash",
}
_FIXES = {
    "blank": "",
    "comment": "Move the comment above the command.",
    "newline": "Add a backslash at the end of the line.",
}
_LOST = "The shell runs the next lines as another command: the program runs without their options."


@rule(
    id="CODE044",
    severity=Severity.ERROR,
    reads=ShellFile,
    mentions=("\\", "--", "="),
    impacts={
        r"as an argument": (
            "A program that does not expect it, such as one that uses `argparse`, ends with an error on every rank."
        ),
        r"before its script": "The launcher does not start any rank: it has no script to run.",
    },
    cases=lambda: (
        shell_fails(
            "options of the script on the next line",
            "torchrun --nproc-per-node 4 train.py \\  # !",
            "    --lr 0.1 \\",
            "    --batch-size 8",
        ),
        shell_fails(
            "the script on the next line",
            "accelerate launch --num_processes 4 \\  # !",
            "    train.py --lr 0.1",
        ),
        shell_fails(
            "the program of a step",
            "#SBATCH --nodes=2",
            "srun --ntasks-per-node 4 \\  # !",
            "    python train.py",
        ),
        shell_fails(
            "an override of Hydra",
            "for seed in 1 2; do",
            "    torchrun --nproc-per-node 4 train.py \\  # !",
            "        trainer.seed=$seed",
            "done",
        ),
        shell_fails("the last line", "torchrun --nproc-per-node 4 train.py --lr 0.1 \\  # !", "", "echo done"),
        shell_fails(
            "an option that is commented out",
            "torchrun --nproc-per-node 4 train.py \\",
            "    --lr 0.1 \\",
            "    # --resume last.pt  # !",
            "    --batch-size 8",
        ),
        shell_fails(
            "a line without a backslash",
            "torchrun --nproc-per-node 4 train.py \\",
            "    --lr 0.1  # !",
            "    --batch-size 8",
        ),
        shell_fails(
            "a variable on a separate line",
            "CUDA_VISIBLE_DEVICES=4,5,6,7  # !",
            "torchrun --nproc-per-node 4 train.py",
        ),
        shell_fails("a variable of NCCL, which the shell keeps", "NCCL_SOCKET_IFNAME=ib0  # !", "torchrun train.py"),
        shell_passes("a variable of the command", "CUDA_VISIBLE_DEVICES=4,5,6,7 \\", "torchrun train.py"),
        shell_passes("an exported one", "CUDA_VISIBLE_DEVICES=4,5", "export CUDA_VISIBLE_DEVICES", "torchrun train.py"),
        shell_passes("one that the script reads", "OMP_NUM_THREADS=8", "torchrun train.py --threads $OMP_NUM_THREADS"),
        shell_passes(
            "one that Slurm has exported", "#SBATCH --gpus=4", "CUDA_VISIBLE_DEVICES=2,3", "torchrun train.py"
        ),
        shell_passes(
            "the last option is commented out",
            "torchrun --nproc-per-node 4 train.py \\",
            "    --lr 0.1 \\",
            "    # --batch-size 8",
            "echo done",
        ),
        shell_passes(
            "nothing behind the backslash",
            "torchrun --nproc-per-node 4 train.py \\",
            "    --lr 0.1 \\",
            "    --batch-size 8",
        ),
        shell_passes("a blank in a name", "torchrun --nproc-per-node 4 train.py --data /data/my\\ images --lr 0.1"),
        shell_passes("a quoted backslash", "torchrun --nproc-per-node 4 train.py --note 'a \\ '"),
        shell_passes("a program without a launcher", "python count.py \\  ", "    --verbose"),
        shell_passes("a comment", "torchrun train.py", "# torchrun train.py \\  ", "#    --lr 0.1"),
    ),
)
def command_ended_early(file: ShellFile) -> Iterator[Violation]:
    """Ask whether no command of a launcher ends before the lines that continue it.

    Why it hurts: the shell passes the blank to the program as an argument, ends the command there, and runs the next
    line as another command. Its options are lost: the program ends with an error, or runs without them.
    Fix: Remove the blank behind the backslash, so that the line is continued.
    """
    cuts = {one.end: one for one in file.cuts}
    for start in starts_of(file):
        launch, outer = start.launch, start.outer
        cut = cuts.get(launch.place.end_line or launch.place.line)
        if cut is None or not (launch.is_agent or launch.starts_tasks or outer is not None):
            continue
        program = (launch if launch.is_agent or outer is None else outer).program
        place, ended = SourceLocation(cut.line), f"{_CAUSES[cut.by]} ends {program} here"
        if _lacks_script(launch):
            yield Violation(place, f"{ended}, before its script", fix=_FIXES[cut.by])
        elif cut.rest:
            word = cut.rest.split()[0][:_LONGEST_WORD]
            lost = "" if cut.by == "blank" else _LOST
            yield Violation(place, f"{ended}: `{word}` starts another command", fix=_FIXES[cut.by], effect=lost)
        elif cut.by == "blank":
            words = "the blank behind the backslash is passed to the program as an argument"
            yield Violation(place, words, severity=Severity.WARNING)

    yield from _unexported(file)


_OF_TRANSPORTS = re.compile(r"NCCL_(?:SOCKET|IB|P2P|SHM|NET|CROSS_NIC)\w*|GLOO_SOCKET_IFNAME")


def _unexported(file: ShellFile) -> Iterator[Violation]:
    """The variables on lines of their own that no program gets, unless the environment of the script has exported them.
    It matters which GPUs and networks a job uses; other settings cost little."""
    for setting in file.set_as_arguments:
        yield Violation(
            setting.place,
            f"`set {setting.name}=…` sets no variable: the shell takes the words as its own arguments",
            fix=f"Use `export {setting.name}={setting.value}`.",
            effect="The setting is ignored silently.",
            severity=Severity.WARNING if _selects(setting) else Severity.INFO,
        )
    if file.modules is not None and file.unexported and is_sourced(file, file.modules):
        return
    for setting in file.unexported:
        if _is_named_by_others(file, setting.name):
            continue
        yield Violation(
            setting.place,
            f"{setting.name} is set for the shell alone: the programs that it starts do not see the value",
            fix=f"Use `export {setting.name}={setting.value}`.",
            effect="The setting is ignored silently, unless the environment of the script has exported the variable.",
            severity=Severity.WARNING if _selects(setting) else Severity.INFO,
        )


def _is_named_by_others(file: ShellFile, name: str) -> bool:
    """Whether a file or page that names the script has the variable too, which it may export."""
    script = file.path.replace("\\", "/").rpartition("/")[2]
    return file.modules is not None and any(name in text for text in file.modules.texts_with(file.path, script))


def _selects(setting: EnvironmentSetting) -> bool:
    """Whether a value selects other GPUs than the first ones, or a transport."""
    if setting.name in DEVICES:
        return setting.value.split(",") != [str(at) for at in range(setting.value.count(",") + 1)]
    return _OF_TRANSPORTS.fullmatch(setting.name) is not None


def _lacks_script(launch: Launch) -> bool:
    return launch.is_agent and not launch.is_open and not launch.script.strip()
