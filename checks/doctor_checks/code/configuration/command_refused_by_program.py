"""CODE045: a command gives a program arguments that its parser does not accept."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from doctor.api import Severity, Violation, rule
from doctor.knowledge.launchers import AddedOption
from doctor.knowledge.releases import end_of_line, release
from doctor.lint.launch.launch_file import Launch, LaunchFile
from doctor.lint.launch.left_local_rank import left_local_rank
from doctor.lint.launch.partial_text import is_known, unknown_mark
from doctor.lint.launch.process_launches import ProcessLaunch, starts_of
from doctor.lint.launch.refused_words import AskedParser, CommandRefusal, asked_parsers
from doctor.lint.launch.shell.reader import ShellFile
from doctor.lint.launch.stale_commands import starts_own_files
from doctor.testing.script_cases import shell_fails, shell_passes

_PLAIN = re.compile(r"(?!/)[\w./-]+")
_LONGEST_WORD = 32
"""Characters of a word that a summary names."""
MOST_PROGRAMS = 4
"""Files that a command may mean."""


_TRAIN = """import argparse

parser = argparse.ArgumentParser()
parser.add_argument('--lr', type=float, default=0.1)
parser.add_argument('--batch-size', type=int, default=8)
parser.add_argument('--model', choices=('vit-b', 'vit-l'), default='vit-b')
parser.add_argument('--amp', action='store_true')
args = parser.parse_args()
"""


class _Program(NamedTuple):
    """A file that a command starts: its absolute and its shown path, and the parsers that must accept the command."""

    place: str
    path: str
    parsers: tuple[AskedParser, ...]


@rule(
    id="CODE045",
    severity=Severity.ERROR,
    reads=LaunchFile,
    mentions=(".py", " -m "),
    impacts={
        r"from torch 2\.0 on": "Every rank ends with `unrecognized arguments` if torch 2.0 or newer is installed.",
    },
    cases=lambda: (
        shell_fails(
            "an option of the launcher behind the script",
            "torchrun train.py --lr 0.1 --nproc_per_node=4  # !",
            beside={"train.py": _TRAIN},
        ),
        shell_fails(
            "an option in the wrong spelling",
            "srun python train.py --batch_size 8 --lr $LR  # !",
            beside={"train.py": _TRAIN},
        ),
        shell_fails(
            "a value for a switch",
            "torchrun --nproc-per-node 4 train.py --amp True  # !",
            beside={"train.py": _TRAIN},
        ),
        shell_fails(
            "a word for a number",
            "deepspeed --no_local_rank train.py --lr high  # !",
            beside={"train.py": _TRAIN},
        ),
        shell_fails("another choice", "accelerate launch train.py --model vit-x  # !", beside={"train.py": _TRAIN}),
        shell_fails(
            "a required option",
            "torchrun tools/train.py --lr 0.1  # !",
            beside={"tools/train.py": _TRAIN.replace("default=8", "required=True")},
        ),
        shell_fails(
            "the local rank of the DeepSpeed launcher",
            "deepspeed --num_gpus 4 train.py --lr 0.1  # !",
            beside={"train.py": _TRAIN},
        ),
        shell_fails(
            "the local rank of torch 2.0",
            "python -m torch.distributed.launch --nproc_per_node=4 train.py  # !",
            beside={"train.py": _TRAIN.replace("--amp", "--local_rank").replace("action='store_true'", "type=int")},
        ),
        shell_passes(
            "both spellings of the local rank",
            "python -m torch.distributed.launch --nproc_per_node=4 train.py",
            beside={"train.py": _TRAIN.replace("'--amp', action='store_true'", "'--local-rank', '--local_rank'")},
        ),
        shell_passes(
            "the local rank of an older torch",
            "python -m torch.distributed.launch --nproc_per_node=4 train.py",
            beside={"train.py": _TRAIN.replace("--amp", "--local_rank").replace("action='store_true'", "type=int")},
            releases=(("torch", "1.13"),),
        ),
        shell_passes(
            "the local rank of a torch that a module needs",
            "python -m torch.distributed.launch --nproc_per_node=4 train.py",
            beside={
                "train.py": "from torch._six import inf\n"
                + _TRAIN.replace("--amp", "--local_rank").replace("action='store_true'", "type=int")
            },
        ),
        shell_passes(
            "the local rank in a variable",
            "python -m torch.distributed.launch --use_env --nproc_per_node=4 train.py",
            beside={"train.py": _TRAIN},
        ),
        shell_passes(
            "the begin of a name, which argparse accepts",
            "torchrun --nproc-per-node 4 train.py --batch 8 --lr=0.1 --mod vit-b -- ",
            beside={"train.py": _TRAIN},
        ),
        shell_passes(
            "words that the shell expands",
            'torchrun train.py --lr $LR $EXTRA --model "$MODEL" "$@"',
            beside={"train.py": _TRAIN},
        ),
        shell_passes(
            "a program that accepts unknown arguments",
            "torchrun train.py --nproc_per_node 4",
            beside={"train.py": _TRAIN.replace("args = parser.parse_args()", "args, _ = parser.parse_known_args()")},
        ),
        shell_passes(
            "a parser that a library extends",
            "torchrun train.py --max_epochs 4",
            beside={"train.py": _TRAIN.replace("args = ", "parser = Trainer.add_argparse_args(parser)\nargs = ")},
        ),
        shell_passes("a program of another project", "torchrun train.py --nproc_per_node 4"),
    ),
)
def command_refused_by_program(file: LaunchFile) -> Iterator[Violation]:
    """Ask whether the program of each command accepts the arguments that the command and its launcher give it.

    Why it hurts: `argparse` ends every rank as soon as the job starts, maybe after hours in the queue.
    Fix: Give the program only arguments that its parser declares.
    """
    programs: dict[str, tuple[_Program, ...]] = {}
    for start in starts_of(file):
        script = start.launch.script
        if not _PLAIN.fullmatch(script) or start.launch.program == "other":
            continue
        if script not in programs:
            programs[script] = _programs(file, script)
        if programs[script]:
            yield from _refused(file, start, programs[script])


def _programs(file: LaunchFile, script: str) -> tuple[_Program, ...]:
    """The files that a command may mean; none if one of them has a parser that is not read whole."""
    modules = file.modules
    if modules is None:
        return ()
    places = modules.started_by(file.path, script)
    if not 0 < len(places) <= MOST_PROGRAMS or not starts_own_files(file, modules):
        return ()
    found = tuple(_Program(one, modules.shown_at(one), asked_parsers(modules, one)) for one in places)
    return found if all(one.parsers for one in found) else ()


def _name_of(program: _Program) -> str:
    return program.path.replace("\\", "/").rpartition("/")[2]


def _refused(file: LaunchFile, start: ProcessLaunch, programs: Sequence[_Program]) -> Iterator[Violation]:
    """What is refused by all files that a command may mean."""
    launch = start.launch
    added = _added(file, launch)
    for one in added:
        if all(_refuses_added(program, one, launch) for program in programs):
            yield _of_launcher(file, launch, programs[0], one)
            return
    words = [*(f"{one.option}=0" for one in added), *launch.arguments]
    if launch.is_open and launch.command.added:
        words.insert(0, unknown_mark("options"))
    refusals = [_refusal(program, words) for program in programs]
    first = refusals[0]
    if first is None:
        yield from _of_left_rank(file, launch, programs)
    if first is None or not all(one is not None and one.kind == first.kind for one in refusals):
        return
    if first.kind == "count" and not _is_written(file, launch, first):
        return  # a variable for the user to set
    if not (first.kind == "missing" and _is_cut(file, start)):
        yield _of_command(file, start, programs[0], first)


def _is_cut(file: LaunchFile, start: ProcessLaunch) -> bool:
    """Whether CODE044 reports that a command ends too early, so that it lacks options."""
    of_launcher = start.is_agent or start.outer is not None
    end = start.launch.place.end_line or start.launch.place.line
    return of_launcher and isinstance(file, ShellFile) and any(one.end == end for one in file.cuts)


def _refusal(program: _Program, words: Sequence[str]) -> CommandRefusal | None:
    return next(filter(None, (one.refusal(words) for one in program.parsers)), None)


def _is_written(file: LaunchFile, launch: Launch, refusal: CommandRefusal) -> bool:
    """Whether the text of a command has no word behind an option, not even one that expands to nothing."""
    text = file.modules.text_at(file.path) if file.modules is not None else ""
    lines = text.split("\n")[launch.place.line - 1 : launch.place.end_line or launch.place.line]
    names = "|".join(map(re.escape, refusal.option.split("/")))
    return re.search(rf"(?<!\S)(?:{names})[\s\\]*(?:\s--?[A-Za-z]|\Z)", "\n".join(lines)) is not None


# -- what the launcher adds


def _added(file: LaunchFile, launch: Launch) -> list[AddedOption]:
    """The options that a launcher gives the program, of each release that the project permits."""
    if launch.is_open or not launch.command.added:
        return []
    of_launch = [one for one in launch.command.added if not one.modules or launch.module in one.modules]
    given = [one for one in of_launch if launch.option(*one.unless) is None]
    oldest, newest = file.permitted_torch
    return [one for one in given if _is_permitted(one, oldest, newest)]


def _is_permitted(added: AddedOption, oldest: str, newest: str) -> bool:
    if added.since and newest and end_of_line(newest) < release(added.since):
        return False
    # Without a bound the newest release is installed.
    return not added.until or bool(newest and end_of_line(newest) < release(added.until))


def _refuses_added(program: _Program, added: AddedOption, launch: Launch) -> bool:
    """Whether a program ends at an option that the launcher adds, or requires it in the spelling of older releases."""
    return not _accepts(program, added.option) or _requires_older(program, added, launch)


def _requires_older(program: _Program, added: AddedOption, launch: Launch) -> bool:
    older = _older(added)
    if not added.since or launch.is_open or any(one.startswith(older) or not is_known(one) for one in launch.arguments):
        return False
    declared = (one for parser in program.parsers for one in parser.read.declared if older in one.names)
    required = [one for one in declared if one.is_certain and one.given.get("required") is True]
    return any(added.option not in one.names for one in required)


def _older(added: AddedOption) -> str:
    """``--local_rank`` of ``--local-rank``."""
    return f"--{added.option[2:].replace('-', '_')}"


def _of_launcher(file: LaunchFile, launch: Launch, program: _Program, added: AddedOption) -> Violation:
    name, title = _name_of(program), launch.module or launch.program
    oldest, _ = file.permitted_torch
    older = _older(added)
    has_older = bool(added.since) and _accepts(program, older)
    is_certain = not has_older or bool(oldest and release(oldest) >= release(added.since))
    suffix = "" if is_certain else f" from torch {added.since} on"
    declared = f'"{added.option}", "{older}"' if added.since else f'"{added.option}"'
    remedy = "start it with torchrun and read LOCAL_RANK" if added.modules else "give the launcher --no_local_rank"
    summary = f"{title} passes {added.option}{suffix}, which is not an option of {name}"
    effect = "Every rank ends with `error: unrecognized arguments` as soon as it starts." if is_certain else ""
    if _accepts(program, added.option):  # parse_known_args
        summary = f"{title} passes {added.option}{suffix}, and {name} requires {older}"
        effect = f"Every rank ends with `error: the following arguments are required: {older}` as soon as it starts."
    return Violation(
        launch.place,
        summary,
        fix=f"Declare it in {name}: `add_argument({declared}, type=int)`, or {remedy}.",
        effect=effect,
        severity=None if is_certain else Severity.WARNING,
        once=added.option,
    )


def _accepts(program: _Program, option: str) -> bool:
    return all(one.accepts(f"{option}=0") for one in program.parsers)


def _of_left_rank(file: LaunchFile, launch: Launch, programs: Sequence[_Program]) -> Iterator[Violation]:
    """An option for the local rank that no launcher gives to programs that read it nowhere else."""
    modules, name = file.modules, _name_of(programs[0])
    left = [left_local_rank(modules, one.place, launch, one.parsers) for one in programs] if modules is not None else []
    if left and all(left):
        yield Violation(
            launch.place,
            f"No launcher gives {name} its --local_rank: every rank has the default {left[0]}",
            fix=f'Use `default=int(os.environ["LOCAL_RANK"])` for --local_rank in {name}.',
            effect="torchrun sets LOCAL_RANK and adds no option: all ranks of a host use the same GPU, or train alone.",
            once=f"{programs[0].path} local rank",
        )


# -- what the command gives


def _of_command(file: LaunchFile, start: ProcessLaunch, program: _Program, refusal: CommandRefusal) -> Violation:
    launch, name = start.launch, _name_of(program)
    summary, fix = _of_kind(launch, name, refusal, program)
    of_job = launch.is_agent or start.outer is not None or (isinstance(file, ShellFile) and file.allocation is not None)
    ends = "argparse ends every rank" if of_job else "argparse ends the program"
    return Violation(
        launch.place,
        summary,
        fix=fix,
        effect=f"{ends} as soon as it starts: `{_MESSAGES[refusal.kind]}`.",
        severity=None if of_job else Severity.WARNING,
        once=f"{program.path} {refusal.kind} {refusal.option} {' '.join(refusal.words)} {refusal.detail}",
    )


def _of_kind(launch: Launch, name: str, found: CommandRefusal, program: _Program) -> tuple[str, str]:
    """The summary and the fix."""
    option, word = _main_name(found.option), _shown(found.words[0]) if found.words else ""
    detail = _shown(found.detail)
    if found.kind == "unknown":
        given = _shown(found.words[0].partition("=")[0])
        more = f" and {len(found.words) - 1} more" if len(found.words) > 1 else ""
        return f"`{given}`{more} {'are' if more else 'is'} not declared by {name}", _remedy(
            launch, name, given, program
        )
    if found.kind == "surplus":
        return (
            f"{name} takes no argument `{word}` in this place",
            f"Remove `{word}`, or give the option that it is for.",
        )
    if found.kind == "value":
        kind = {"int": "an integer", "float": "a number"}.get(detail, f"a valid {detail}")
        return f"`{word}`, given for {option} of {name}, is not {kind}", f"Give {option} {kind}."
    if found.kind == "choice":
        choices = _choices(program, found.option)
        near = difflib.get_close_matches(found.words[0], choices, 1)
        fix = f"Use `{near[0]}`." if near else f"Use one of {', '.join(choices[:_MOST_CHOICES])}."
        return f"{option} of {name} does not accept `{word}`", fix
    if found.kind == "missing":
        required = detail.removeprefix("one of the arguments ").removesuffix(" is required")
        return f"{name} requires {required}, which the command does not give", f"Give {required}."
    if found.kind == "count":
        return f"{option} of {name} has too few or too many values ({detail})", f"Give {option} the values it takes."
    if found.kind == "flag":
        return (
            f"{option} of {name} is a switch and takes no value: `{word}`",
            f"Write `{option}` alone, or leave it out.",
        )
    if found.kind == "exclusive":
        return f"{option} and {detail} of {name} exclude each other", f"Remove {option} or {detail}."
    return f"`{option}` is an ambiguous option of {name}: {detail}", "Write the name of the option in full."


def _remedy(launch: Launch, name: str, given: str, program: _Program) -> str:
    """What to do about an unknown option: write the one that is meant, or give it to the launcher."""
    if launch.command.options is not None and given.lstrip("-").replace("_", "-") in _of_launcher_itself(launch):
        return f"Move `{given}` before {name}: it is an option of {launch.program}."
    declared = [one for parser in program.parsers for one in parser.options]
    alike = [one for one in declared if one.replace("_", "-") == given.replace("_", "-")]
    near = alike or difflib.get_close_matches(given, declared, 1, _SIMILAR)
    return f"Write `{near[0]}`." if near else f"Remove `{given}`, or declare it in {name}."


def _of_launcher_itself(launch: Launch) -> set[str]:
    command = launch.command
    named = (*command.processes, command.hosts, command.node_rank, command.host_port, command.master, command.port)
    flags = command.options.flags if command.options is not None else ()
    others = (command.all_processes, command.rendezvous, command.standalone, *flags)
    return {one.replace("_", "-") for one in (*named, *others) if one}


def _choices(program: _Program, option: str) -> list[str]:
    names = option.split("/")
    found = (
        one.given.get("choices") for parser in program.parsers for one in parser.read.declared if names[0] in one.names
    )
    return [str(one) for values in found if isinstance(values, tuple) for one in values[:_MOST_LISTED]]


def _main_name(option: str) -> str:
    """The long name of an option that argparse names by all of them: ``-b/--batch``."""
    names = option.split("/")
    return _shown(next((one for one in names if one.startswith("--")), names[0]))


def _shown(word: str) -> str:
    return word if len(word) <= _LONGEST_WORD else f"{word[: _LONGEST_WORD - 1]}…"


_SIMILAR = 0.75
"""The least similarity, of at most 1, between an option and the declared one that is probably meant."""
_MOST_CHOICES = 6
_MOST_LISTED = 200
_MESSAGES = {
    "unknown": "unrecognized arguments",
    "surplus": "unrecognized arguments",
    "value": "invalid value",
    "choice": "invalid choice",
    "missing": "the following arguments are required",
    "count": "expected another number of arguments",
    "flag": "ignored explicit argument",
    "exclusive": "not allowed with argument",
    "ambiguous": "ambiguous option",
}
