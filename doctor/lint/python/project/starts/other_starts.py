"""Programs of which a project shows no start on several ranks, though it shows how it starts its other programs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePath
from typing import NamedTuple

from doctor.core.text import joined_lines
from doctor.lint.python.project.settings.options import number_in
from doctor.lint.python.project.starts.launch_counts import STARTS_RANKS, asks_for_more, is_nearest, programs_of
from doctor.lint.python.project.starts.unused_imports import imports_in_vain
from doctor.lint.python.project.unreached import is_program, may_import
from doctor.lint.python.script import ProjectModules, Script, per_script

_LAUNCHER = re.compile(
    r"torchrun|accelerate[ \t-]launch|accelerate\.commands|torch\.distributed\.(?:launch|run)\b|\bdeepspeed[ \t]|"
    r"\bsrun\b|\bmpi(?:run|exec)\b|horovodrun|\b[ja]srun\b|\baprun\b|colossalai run|\bcomposer[ \t]|"
    r"\b(?:dist|slurm)_(?:train|test)\b"
)
_SAYS_SEVERAL = re.compile(
    rf"{_LAUNCHER.pattern}|launch|submitit|sbatch|nproc|num_processes|local[-_]rank|world[-_]size|\bGPUs\b|distributed|"
    r"multi[- _]?(?:gpu|node|process)|data[- ]parallel|\bDDP\b|\bFSDP\b|分布式|多卡|多机|多\s?GPU",
    re.IGNORECASE,
)
"""Words on a line that names a program: it is started on several ranks there, or meant to be."""
_STARTS_ITSELF = re.compile(
    rf"{STARTS_RANKS.pattern}|\b(?:launch|Popen|check_call|Process|run_on_slurm)\(|subprocess\.|os\.system|submitit|"
    r"\b(?:(?P<trainer>(?<!\.)\w*Trainer)|\w*Trainer|\w*(?:Fabric|LightningCLI|LightningLite|ScalingConfig|"
    r"TorchDistributor|HorovodRunner))\("
)
"""Code that may start ranks itself."""
_PROGRAM_FILE = re.compile(r"\.py\b")
_STARTS_PROGRAMS = re.compile(r"subprocess|os\.system|\bPopen\(|\bexec[lv]\w*\(|check_call|submitit|\bsh\.|\brun\(")
_STARTER = re.compile(rf"{_LAUNCHER.pattern}|\bpython[\d.]*[ \t]|\buv run\b|\bpython[\d.]*\"")
_PROGRAM = re.compile(
    r"(?<![\w./${}-])[\w./${}-]*?(?<![\w-])(?P<stem>[\w-]+)\.py\b|"
    r"[ \t](?:-m|--module)[ \t=]+(?!torch\.|accelerate|deepspeed)(?P<module>[A-Za-z_][\w.]*)"
)
"""A command is a starter and the first program after it. One pattern for both would read the rest of a line without a
program once for each starter."""
_MAY_START = re.compile(rf"{_LAUNCHER.pattern}|\bpython|\buv run\b")
"""What a text must contain to start a program, as lists of data in large JSON files do not."""
_NAMES_PROGRAM = re.compile(
    r"[\w}*>]\.(?:py|sh|sbatch|slurm|ya?ml)\b|[ \t](?:-m|--module)[ \t=]+(?!torch\.|accelerate)\w"
)
_OF_ARGUMENTS = re.compile(r"\$\{?[@*\d]")
_OF_VARIABLE = re.compile(r"\$\{?[A-Za-z_]|\{\{|\{\w+\}|<\w[\w .-]*>")
"""What a launcher may start then: ``torchrun "$@"``, ``{{ .Values.script }}``, ``<script>``."""
_OF_PLACEHOLDER = re.compile(
    r"\b(?:your|my|some|any|the)?_?(?:script|program|file|code|app|xxx+|foo)$|\*", re.IGNORECASE
)
_INSTEAD = re.compile(
    r"\b(?:instead|replac\w+|prepend\w*|prefix\w*|any|all|every|each|your|others?|same|similar\w*|scripts|programs|examples)\b",
    re.IGNORECASE,
)
"""Words of sentences about launchers and programs that they do not name."""
_JOBS = re.compile(r"#SBATCH|#PBS|#BSUB|\bssh\b|kind:|\bRANK=|WORLD_SIZE|MASTER_ADDR|&[ \t]*$", re.MULTILINE)
_LONGEST_LINE = 4_000
_TOOLS = frozenset({"setup", "conftest", "get-pip", "__init__", "manage", "collect_env"})


class _Shown(NamedTuple):
    """What a project shows: the stems of its programs that commands start, of those that launchers start, the first
    words of programs that launchers start and the project does not have (``train_xx.py``), whether a launcher starts
    what it is given, and whether a page speaks of several ranks."""

    stems: frozenset[str]
    launched: frozenset[str]
    absent: frozenset[str]
    is_open: bool
    speaks: bool


@per_script
def is_shown_elsewhere(script: Script) -> bool:
    """Whether the pages and launch files of a whole project start programs of it, while nothing there starts a script,
    or a program that imports it, on several ranks, or may start one that is given. A Trainer, and whatever else starts
    ranks itself, needs no launcher, and an installed package is started by others."""
    modules = script.modules
    if modules is None or modules.is_one_file or not script.location or not modules.is_whole(script.location):
        return False
    if modules.installs(script.location):
        return False
    programs = programs_of(modules, script.path)
    if not programs and _is_imported(script, modules):
        return False  # by programs that start ranks, or by too many
    if not programs and not is_program(script):
        return False
    programs += [script.path] if script.path not in programs else []
    if any(PurePath(one).stem == "__init__" for one in programs if one != script.path):
        return False
    own = {PurePath(one).stem for one in programs}
    if any(_starts_itself(modules, one) for one in programs):
        return False
    if any(STARTS_RANKS.search(text) for text in modules.texts_around(script.location)):
        return False
    shown = _shown(script, modules)
    if shown.is_open or not shown.stems - own or (shown.speaks and not shown.launched - own):
        return False
    if not shown.absent.isdisjoint(map(_first_word, own)):
        return False
    return not any(_may_be_several(script, modules, one) for one in programs)


_BASES = 5
"""Classes in a row that a Trainer is made of."""


def _starts_itself(modules: ProjectModules, path: str, depth: int = _BASES) -> bool:
    """Whether a program may start ranks itself. A Trainer whose class, and all that it is made of, the project defines
    does what is written there."""
    commands, rest = _apart(modules.text_at(path))
    if not all(_starts_another(modules, path, one) for one in commands):
        return True
    found = _STARTS_ITSELF.finditer(rest)
    return not all(one["trainer"] and _is_own_class(modules, path, one["trainer"], depth) for one in found)


def _apart(text: str) -> tuple[list[str], str]:
    """The lines of a program that say how one is launched, each up to the last program that it names, and the rest of
    the text."""
    if not _LAUNCHER.search(text):
        return [], text
    commands, rest = [], []
    for line in text.split("\n"):
        launched = _LAUNCHER.search(line)
        ends = [one.end() for one in _PROGRAM_FILE.finditer(line, launched.end())] if launched else []
        commands += [line[:end] for end in ends[-1:]]
        rest.append(line[ends[-1] :] if ends else line)
    return commands, "\n".join(rest)


def _starts_another(modules: ProjectModules, path: str, line: str) -> bool:
    """Whether a comment is the command of another program of the project, as in a copy of it."""
    command = next(_commands(line), None) if line.lstrip().startswith("#") else None
    return command is not None and command.stem != PurePath(path).stem and bool(modules.named(path, command.stem))


def _is_own_class(modules: ProjectModules, path: str, name: str, depth: int) -> bool:
    """Whether a file defines a class without the bases of a library, or imports it from such files of the project, none
    of which starts ranks."""
    text = modules.text_at(path)
    defined = re.findall(rf"^class {name}\b[ \t]*(?:\(([^()]*)\))?[ \t]*:", text, re.MULTILINE)
    imports = rf"^[ \t]*from[ \t]+([.\w]+)[ \t]+import\b(?:[ \t]*\([^)]*?|[^\n#(]*?)\b{name}\b(?![ \t]+as\b)"
    imported = re.findall(imports, text, re.MULTILINE)
    if depth == 0 or len(defined) + len(imported) != 1:
        return False
    if defined:
        bases = [one.strip() for one in defined[0].split(",") if one.strip()]
        return all(
            one in _PLAIN_BASES or (one.isidentifier() and _is_own_class(modules, path, one, depth - 1))
            for one in bases
        )
    places = modules.named(path, imported[0])
    return bool(places) and all(
        _is_own_class(modules, one, name, depth - 1) and not _starts_itself(modules, one, depth - 1) for one in places
    )


_PLAIN_BASES = frozenset({"object", "ABC", "abc.ABC", "nn.Module", "torch.nn.Module"})


def _is_imported(script: Script, modules: ProjectModules) -> bool:
    """Whether another file of the project may import a script to use it."""
    place = PurePath(script.path)
    others = [(shown, text) for shown, text in modules.mentioning(place.stem) if shown != script.path]
    return any(may_import(place, text) and not imports_in_vain(modules, place, shown) for shown, text in others)


def _shown(script: Script, modules: ProjectModules) -> _Shown:
    key = ("shown starts", modules.root_of(script.location))
    if key not in modules.memo:
        launches = [text for _, text in modules.mentioning("", launches=True) if _MAY_START.search(text)]
        pages = filter(_MAY_START.search, (*modules.all_pages(script.location), *modules.notebooks("")))
        lines = [line for text in (*launches, *pages) for line in _lines_with_stems(text) if len(line) < _LONGEST_LINE]
        commands = [one for line in lines for one in _commands(line)]
        stems = {one.stem for one in commands}
        launched = {one.stem for one in commands if _LAUNCHER.search(one.text)}
        found = {one for one in stems - _TOOLS if modules.named(script.path, one)}
        is_open = any(map(_starts_given, launches)) or any(map(_speaks_of_given, lines))
        is_open = is_open or any(_IN_STEM.search(line) and _LAUNCHER.search(line) for line in lines)
        is_open = is_open or any(_starts_given_program(text) for text in _programs_with_launchers(modules))
        speaks = any(map(_SAYS_SEVERAL.search, modules.all_pages(script.location)))
        absent = frozenset(map(_first_word, launched - found - _TOOLS))
        modules.memo[key] = _Shown(frozenset(found), frozenset(launched & found), absent, is_open, speaks)
    kept: _Shown = modules.memo[key]
    return kept


_IN_STEM = re.compile(r"\$\{?(?:([A-Za-z_]\w*)(?!\w)|\d)(?=[\w${}-]{0,60}\.py\b)\}?")
"""The variable of ``src/${task}.py``, which decides what is started."""
_MOST_NAMES = 50
"""Variables of a text whose values are looked up: each lookup reads all of the text."""


def _lines_with_stems(text: str) -> Iterator[str]:
    """The commands of a text, with the names of programs that it has in variables which it sets once."""
    values: dict[str, str] = {}

    def value_of(found: re.Match[str]) -> str:
        name = found[1]
        if name and name not in values and len(values) < _MOST_NAMES:
            is_changed = re.search(rf"\bfor[ \t]+{name}\b|\bread\b[^\n]{{0,200}}\b{name}\b", text)
            values[name] = "$" if is_changed else number_in(f"${name}", text)
        value = values.get(name, "$")
        return found[0] if "$" in value or "`" in value else value

    for line in joined_lines(text):
        yield _IN_STEM.sub(value_of, line) if ".py" in line and "$" in line else line


def _first_word(stem: str) -> str:
    return re.split(r"[_\W\d]", stem, maxsplit=1)[0].lower()


class _Command(NamedTuple):
    """What starts a program, up to the program; the name of the program, and whether it is that of a file."""

    text: str
    stem: str
    is_file: bool


def _commands(line: str, start: int = 0) -> Iterator[_Command]:
    """The commands of a line that start a program, from a place in it."""
    while starter := _STARTER.search(line, start):
        program = _PROGRAM.search(line, starter.end())
        if program is None:
            return
        stem = program["stem"] or program["module"].rpartition(".")[2]
        yield _Command(line[starter.start() : program.end()], stem, program["stem"] is not None)
        start = program.end()


def _starts_given(text: str) -> bool:
    """Whether a launch file gives a launcher a program that it does not name: ``srun python "$@"``."""
    names_any = ".py" in text
    for line in joined_lines(text):
        launched = _LAUNCHER.search(line)
        if launched is None or line.lstrip().startswith("#") or _NAMES_PROGRAM.search(line, launched.end()):
            continue
        if _OF_ARGUMENTS.search(line, launched.end()) or (not names_any and _OF_VARIABLE.search(line, launched.end())):
            return True
    return False


def _speaks_of_given(line: str) -> bool:
    """Whether a line says of programs that it does not name how they are launched: "use `torchrun` instead of
    `python`", ``torchrun your_script.py``."""
    launched = _LAUNCHER.search(line)
    if launched is None:
        return False
    if command := next(_commands(line, launched.start()), None):
        return command.is_file and _OF_PLACEHOLDER.search(command.stem) is not None
    named = _NAMES_PROGRAM.search(line)
    return named is None and (_INSTEAD.search(line) is not None or re.search(r"<\w[\w .-]*>", line) is not None)


def _programs_with_launchers(modules: ProjectModules) -> Iterator[str]:
    texts = dict(
        one
        for word in ("torchrun", "accelerate", "torch.distributed.", "srun", "mpirun")
        for one in modules.mentioning(word)
    )
    return (text for shown, text in texts.items() if shown.endswith(".py"))


_QUOTED = re.compile(
    r"[\"'](?:[^\"'\n]*(?:torchrun|accelerate launch|torch\.distributed\.(?:run|launch)|"
    r"\bsrun\b|\bmpirun\b)|accelerate[\"'])"
)


def _starts_given_program(text: str) -> bool:
    """Whether a program gives a launcher, in a subprocess, a program that it does not name."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    is_launcher = any(map(_QUOTED.search, lines)) and _STARTS_PROGRAMS.search(text) is not None
    return is_launcher and not any(re.search(r"[\"'/\w]\w*\.py\b[^\"'\n]*[\"']", line) for line in lines)


def _launches_below(line: str) -> bool:
    """Whether a line has a launcher and options, and so the program on one of the next lines."""
    launched = _LAUNCHER.search(line)
    return (
        launched is not None and " --" in line[launched.end() :] and _NAMES_PROGRAM.search(line, launched.end()) is None
    )


def _may_be_several(script: Script, modules: ProjectModules, path: str) -> bool:
    """Whether a text of the project may start a program on several ranks, or says that it is started so."""
    place = PurePath(path)
    stem = re.escape(place.stem)
    named = re.compile(
        rf"(?<![\w-]){stem}(?:\.py\b|(?=[`\"'\s]*$))|[ \t](?:-m|--module)[ \t=]+[\w.]*\b{stem}\b(?![\w.])"
    )
    plain = re.compile(rf"\bpython[\d.]*[ \t]+(?:-\w[ \t]+)*(?:[\w./${{}}-]*/)?{stem}\b|-m[ \t]+[\w.]*\b{stem}\b")

    def is_several(line: str) -> bool:
        return _SAYS_SEVERAL.search(named.sub("", line)) is not None or asks_for_more(script, line)

    for page in (*modules.all_pages(script.location), *modules.notebooks(place.stem)):
        lines = [one for one in _lines_with_stems(page) if named.search(one)] if place.stem in page else []
        if lines and (any(map(is_several, lines)) or any(map(_launches_below, joined_lines(page)))):
            return True
    for shown, text in modules.mentioning(place.stem):
        lines = [line for line in _lines_with_stems(text) if named.search(line)] if shown != path else []
        if shown.endswith(".py") and lines and _STARTS_PROGRAMS.search(text):
            return True
        if shown.endswith(".py") or not lines or not is_nearest(modules, shown, path):
            continue
        if _JOBS.search(text) or any(is_several(line) or not plain.search(line) for line in lines):
            return True
    return False
