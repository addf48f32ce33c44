"""CODE044: the command of a launcher ends before the lines that were meant to continue it."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.api import Severity, SourceLocation, Violation, rule
from doctor.lint.launch.launch_file import Launch
from doctor.lint.launch.process_launches import starts_of
from doctor.lint.launch.shell.reader import ShellFile
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
    mentions=("\\", "--"),
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


def _lacks_script(launch: Launch) -> bool:
    return launch.is_agent and not launch.is_open and not launch.script.strip()
