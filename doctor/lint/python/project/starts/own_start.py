"""Programs that a project starts as one process (demonstrations, tools in modules), those that measure how fast they
are, and bugs that its pages show."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import PurePath

from doctor.core.text import joined_lines
from doctor.lint.python.project.starts.launch_counts import LAUNCHERS, STARTS_RANKS
from doctor.lint.python.project.unreached import is_program, may_import
from doctor.lint.python.script import FunctionNode, Script, per_script
from doctor.lint.python.training import ACCELERATOR, only_infers, several_ranks

_STARTS = re.compile(rf"{LAUNCHERS.pattern}|launch|\bsbatch\b|nproc|num_processes|\$\{{?\w*(?:LAUNCH|RUN|CMD)")
_TRAINS = re.compile(r"[Tt]rainer\b|\boptimizer|\.train\(\)|\btrain\(|\.step\(")
"""Words of programs that train, also through a library: ``PPOTrainer(...).step()``."""
_ASKS_FOR_RANKS = re.compile(
    r"\.(?:is_(?:local_)?main_process|wait_for_everyone|gather\w*|reduce|num_processes|(?:local_)?process_index|"
    r"(?:local_)?main_process_first|split_between_processes|on_(?:local_)?main_process)\b"
)
"""What only programs for several ranks ask of an Accelerator."""
_GUARD = "__name__ == '__main__'"
_OF_RANKS = re.compile(
    r"\bdist\.|distributed|rank|world_?size|accelerat|\bDDP\b|deepspeed|horovod|trainer\(", re.IGNORECASE
)


@per_script
def is_demonstration(script: Script) -> bool:
    """Whether a program that nothing imports trains nothing, only an Accelerator in it could be for several ranks, no
    line asks for the rank, and no command of the project gives it to a launcher: what is started with ``python`` to
    show results."""
    shown = several_ranks(script)
    if shown is None or script.modules is None or script.modules.is_one_file or not is_program(script):
        return False
    if script.name(shown.func) != ACCELERATOR or not only_infers(script, shown) or LAUNCHERS.search(script.text):
        return False
    if _TRAINS.search(script.text) or _ASKS_FOR_RANKS.search(script.text):
        return False
    place = PurePath(script.location or script.path)
    return not STARTS_RANKS.search(script.text) and not any(
        may_import(place, text) or any(map(_STARTS.search, _lines(text, place))) for text in _texts_naming(script)
    )


def is_of_own_main(script: Script, node: ast.AST) -> bool:
    """Whether only ``if __name__ == "__main__":`` of a module reaches a place, with no word of ranks on the way, while
    the programs of the project import the module: a step of one process that prepares something."""
    guard = next((one for one in script.tree.body if isinstance(one, ast.If) and _is_guard(one)), None)
    function = script.function_of(node)
    if (
        guard is None
        or function is None
        or script.modules is None
        or not isinstance(script.parent(function), ast.Module)
    ):
        return False
    place = PurePath(script.location or script.path)
    others = [text for shown, text in script.modules.mentioning(place.stem) if shown != script.path]
    importers = [text for text in others if may_import(place, text)]
    if not importers or any(LAUNCHERS.search(line) for text in _texts_naming(script) for line in _lines(text, place)):
        return False
    on_the_way = _reached_from(script, guard)
    if function not in on_the_way or any(_shows_ranks(script, one) for one in (guard, *on_the_way)):
        return False
    uses = [one for one in script.all(ast.Name) if script.definition(one) is function]
    inside = (script.function_of(one) in on_the_way or guard in script.around(one) for one in uses)
    word = re.compile(rf"\b{re.escape(function.name)}\b|\b{re.escape(place.stem)}\s+import\s+\*")
    return all(inside) and not any(map(word.search, importers))


def _shows_ranks(script: Script, part: ast.AST) -> bool:
    """Whether a statement has words of ranks, besides the calls of the module itself that it keeps out of a job:
    ``Trainer(0, dist=False)``, where ``class Trainer`` is above."""
    own = {one.name for one in script.tree.body if isinstance(one, (ast.ClassDef, ast.FunctionDef))}
    alone = [
        ast.unparse(one)
        for one in script.inside(part, ast.Call)
        if isinstance(one.func, ast.Name) and one.func.id in own and any(map(_keeps_out, one.keywords))
    ]
    text = ast.unparse(part)
    for one in alone:
        text = text.replace(one, "")
    return _OF_RANKS.search(text) is not None


def _keeps_out(word: ast.keyword) -> bool:
    is_off = isinstance(word.value, ast.Constant) and word.value.value is False
    return is_off and word.arg in ("dist", "distributed", "is_distributed", "ddp", "use_ddp")


def _is_guard(statement: ast.If) -> bool:
    return ast.unparse(statement.test) == _GUARD


def _reached_from(script: Script, node: ast.AST) -> list[FunctionNode]:
    """The functions of the module that a part of it names, also through others."""
    found: list[FunctionNode] = []
    waiting = [node]
    while waiting:
        for one in ast.walk(waiting.pop()):
            function = script.definition(one) if isinstance(one, ast.Name) else None
            if function is not None and function not in found:
                found.append(function)
                waiting.append(function)
    return found


def _texts_naming(script: Script) -> Iterator[str]:
    """The launch files, programs and pages of the project that have the name of a script."""
    modules, stem = script.modules, PurePath(script.path).stem
    if modules is None:
        return
    named = re.compile(rf"(?<![\w-]){re.escape(stem)}(?![\w-])")
    texts = [text for shown, text in modules.mentioning(stem) if shown != script.path]
    texts += [*(modules.pages(script.location) if script.location else ()), *modules.notebooks(stem)]
    yield from (text for text in texts if named.search(text))


def _lines(text: str, place: PurePath) -> Iterator[str]:
    """The lines that start a file, or it as a module."""
    named = re.compile(rf"{re.escape(place.name)}|-m\s+[\w.]*\b{re.escape(place.stem)}\b")
    return (line for line in joined_lines(text) if named.search(line))


_SAYS_BUG = re.compile(r"#\s*(?i:intentional |deliberate )?BUG\b")
_SHOWS_BUGS = re.compile(
    r"\b(?:buggy|broken|faulty|wrong) (?:script|program|example|code|version)\b|"
    r"\b(?:demonstrat|reproduc|illustrat|show)\w*\b[^.\n]{0,60}\b(?:bug|hang|deadlock|mistake|fault)",
    re.IGNORECASE,
)


def shows_bug(script: Script, line: int) -> bool:
    """Whether a comment on a line calls it a bug, and a page of the project presents the file as one with a bug: a
    comment alone may be of an author who has not repaired it yet."""
    lines = script.lines
    if script.modules is None or not 0 < line <= len(lines) or _SAYS_BUG.search(lines[line - 1]) is None:
        return False
    name = PurePath(script.path).name
    told = (one for text in script.modules.pages(script.location) if name in text for one in text.splitlines())
    return any(name in one and _SHOWS_BUGS.search(one) is not None for one in told)


_OF_BENCHMARKS = re.compile(
    r"(?:^|[_/\W])(?:bench(?:mark)?\w*|profil(?:e|er|ers|ing)|throughput|speed_?tests?|(?:test|measure)_?speed)(?=$|[_\W])",
    re.IGNORECASE,
)
_TAKES_TIME = re.compile(r"\btime\.(?:time|perf_counter|monotonic)\(|\bperf_counter\(|cuda\.Event\(")
_CLOCKS = ("time.time", "time.perf_counter", "time.monotonic", "timeit.default_timer")
_COMMENTS = re.compile(r"#.*")
_KEEPS_MODEL = re.compile(
    r"\bsave\w*\(|state_dict\(\)|push_to_hub|\bdump\(|\.eval\(\)|\bno_grad\(|inference_mode|\bvalid\w*\(|"
    r"\b(?:val|valid|test)_?(?:loader|data)|accuracy"
)


@per_script
def measures_speed(script: Script) -> bool:
    """Whether a program is named after measuring, or has a function that is, takes the time, and neither evaluates nor
    saves a model: what it has learned is discarded."""
    if _TAKES_TIME.search(script.text) is None or _KEEPS_MODEL.search(_COMMENTS.sub("", script.text)) is not None:
        return False
    names = (PurePath(script.path).as_posix().rsplit("/", 2)[-2:], [one.name for one in script.functions])
    return any(_OF_BENCHMARKS.search(name) for part in names for name in part)


def times_steps(script: Script, loop: ast.For | ast.While) -> bool:
    """Whether a loop takes the time at least twice around what it does, in a program that neither evaluates nor saves a
    model: its steps are measured, and what the model has learned is discarded."""
    clocks = set(script.calls(*_CLOCKS))
    taken = sum(one in clocks for one in script.inside(loop, ast.Call))
    return taken > 1 and _KEEPS_MODEL.search(_COMMENTS.sub("", script.text)) is None


_GETS_MODEL = re.compile(r"net|model|module|optim|engine|self", re.IGNORECASE)


def is_measured(script: Script, node: ast.AST) -> bool:
    """Whether a program measures its speed, or the function around a place does: by its name, with a model that it
    makes itself, which it neither evaluates nor saves nor returns."""
    function = script.function_of(node)
    if function is None or measures_speed(script):
        return measures_speed(script)
    body = "\n".join(map(ast.unparse, function.body))
    is_timed = _TAKES_TIME.search(body) is not None and _KEEPS_MODEL.search(body) is None
    given = (one.arg for one in ast.walk(function.args) if isinstance(one, ast.arg))
    is_left = not any(map(_GETS_MODEL.search, given)) and not any(
        one.value is not None for one in script.inside(function, ast.Return)
    )
    return _OF_BENCHMARKS.search(function.name) is not None and is_timed and is_left
