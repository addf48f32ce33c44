"""Whether a script uses GPUs, and which parts run only with a single process."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import PurePath

from doctor.core.text import joined_lines
from doctor.lint.python.project.settings.option_values import given_in_commands, lists_one
from doctor.lint.python.project.starts.launch_counts import programs_of
from doctor.lint.python.project.unreached import is_program
from doctor.lint.python.script import ProjectModules, Script, last_name, per_script
from doctor.lint.python.training import ACCELERATOR, FABRIC, TRAINER, has_one_rank

_ASKS_FOR_RANKS = re.compile(
    r"distributed|\bddp\b|multi_?gpu|world_?size|n_?gpus?|num_gpus|\bgpus?_nums?\b|device_count|nprocs"
)
_OF_LAUNCHERS = re.compile(r"(?:^|_)(?:RANK|PROCID|WORLD_SIZE|LOCAL_SIZE|NTASKS|COMM_SIZE)$")
_OFF = frozenset({"off", "no", "none", "false", "single", ""})
MAKES_RANKS = (
    "torch.distributed.init_process_group",
    "deepspeed.initialize",
    "deepspeed.init_distributed",
    "deepspeed.comm.init_distributed",
    "deepspeed.comm.comm.init_distributed",
)
"""Functions that make a process a rank."""
_OF_RANKS = re.compile(
    r"(?:^|_)(?:rank|dist|ddp|fsdp|hvd|horovod|accelerator|fabric|trainer|slurm|mpu)(?:_|$)|distributed|world_?size|"
    r"fully_?shard|main_?process|tensor_?parallel|process_?group|all_?reduce|all_?gather|barrier|broadcast",
    re.IGNORECASE,
)
"""Words of names by which a script, or a function that it calls, has to do with ranks."""
_COMPARED_WITH_ONE = (ast.Gt, ast.GtE, ast.NotEq)


def uses_gpus(script: Script) -> bool:
    """Whether anything in the file mentions GPUs; Trainers, Fabrics and Accelerators use them by default."""
    if any(True for _ in script.calls(TRAINER, FABRIC, ACCELERATOR)):
        return True
    text = script.text.lower()
    return any(word in text for word in ("cuda", "nccl", "gpu"))


@per_script
def sees_one_gpu(script: Script) -> bool:
    """Whether a script leaves one GPU visible wherever it sets which ones are, unless an option that nothing in the
    project gives says otherwise; or every command of the project that starts it does."""
    values = [
        one.value
        for one in script.all(ast.Assign)
        for target in one.targets
        if isinstance(target, ast.Subscript)
        and script.name(target.value) == "os.environ"
        and script.value(target.slice) == _VISIBLE
    ]
    if values:
        return all(_is_one_gpu(script, one) for one in values)
    return _is_started_with_one(script)


_VISIBLE = "CUDA_VISIBLE_DEVICES"
_ONE_GPU = re.compile(r"[\"']?\d{1,2}[\"']?$")
_SHOWS = re.compile(r"CUDA_VISIBLE_DEVICES=[\"']?(?P<devices>[\w,${}@-]+)")


def _is_one_gpu(script: Script, value: ast.expr) -> bool:
    """Whether a value is one device: a literal, the default of an option, or a constant of a module of the project."""
    while isinstance(value, ast.Call) and last_name(value.func) == "str" and len(value.args) == 1:
        value = value.args[0]
    known = script.value(value)
    if isinstance(known, (str, int)) and not isinstance(known, bool):
        return _ONE_GPU.match(str(known)) is not None
    if not isinstance(value, ast.Attribute) or not isinstance(value.value, ast.Name):
        return False
    bound = script.scope_of(value, value.value.id)
    found = bound.names[value.value.id] if bound is not None else []
    if len(found) == 1 and isinstance(found[0], str):
        return _is_constant_of(script, found[0], value.attr)
    if lists_one(script, value.attr):
        return True
    given = given_in_commands(script, value.attr)
    return given is not None and all(_ONE_GPU.match(str(one)) is not None for one in given)


def _is_constant_of(script: Script, module: str, name: str) -> bool:
    modules = script.modules
    if modules is None or not modules.has(script.location, module):
        return False
    shown = [text for place, text in modules.mentioning(name) if PurePath(place).stem == module.rpartition(".")[2]]
    values = [
        one[1] for text in shown for one in re.finditer(rf"^{re.escape(name)}\s*=\s*([^#\n]+)", text, re.MULTILINE)
    ]
    return bool(values) and all(_ONE_GPU.match(one.strip()) for one in values)


def _is_started_with_one(script: Script) -> bool:
    """Whether the project shows commands that start a script, or each program that imports a module, and all of them
    leave one GPU visible, or are in a job that asks for one; or such a program leaves itself one."""
    modules = script.modules
    if modules is None or not script.location:
        return False
    programs = [script.path] if is_program(script) else programs_of(modules, script.path)
    pages = list(modules.pages(script.location))
    return bool(programs) and all(
        (one != script.path and _leaves_itself_one(modules.text_at(one))) or _is_shown_with_one(modules, one, pages)
        for one in programs
    )


_SETS_VISIBLE = re.compile(
    rf"^(?P<indent>[ \t]*)os\.environ\[[\"']{_VISIBLE}[\"']\][ \t]*=[ \t]*(?P<devices>[^#\n]*)", re.MULTILINE
)


def _leaves_itself_one(text: str) -> bool:
    """Whether all lines of a program that set the visible GPUs are of its module, and set one."""
    found = list(_SETS_VISIBLE.finditer(text))
    return bool(found) and all(not one["indent"] and _ONE_GPU.match(one["devices"].strip()) for one in found)


def _is_shown_with_one(modules: ProjectModules, path: str, pages: list[str]) -> bool:
    name = PurePath(path).name
    started = re.compile(
        rf"\bpython[\d.]*[\"']?(?:[ \t]+|,[ \t]*)(?:-\w[ \t]+)*[\"']?(?:[\w./${{}}-]*/)?{re.escape(name)}(?![\w.])"
    )
    found = []
    for shown_at, text in (*modules.mentioning(name, launches=True), *(("", page) for page in pages)):
        is_for_one = bool(shown_at) and (
            _is_for_one_gpu(PurePath(shown_at).name, pages) or _sees_one_gpu(modules, shown_at, pages)
        )
        exported = "0" if is_for_one or set(_gpus_of_job(text)) == {"1"} else ""
        for line in joined_lines(text):
            shown = _SHOWS.search(line) or _OF_CONTAINER.search(line)
            if started.search(line):
                found.append(shown["devices"] if shown else exported)
            elif shown and line.lstrip().startswith("export"):
                exported = shown["devices"]
    return bool(found) and all(map(_ONE_GPU.match, found))


def _sees_one_gpu(modules: ProjectModules, launch: str, pages: Iterable[str]) -> bool:
    """Whether the project shows commands that start a launch file, and each of them lets it see one GPU:
    ``CUDA_VISIBLE_DEVICES=0 sh scripts/run.sh``; or each file that starts it is a job that asks for one, and what the
    pages show says nothing of GPUs."""
    name = PurePath(launch).name
    named = re.compile(rf"(?:\b(?:sh|bash|source)[ \t]+|\./)[\w./-]*(?<![\w-]){re.escape(name)}(?![\w-])")

    def starts(text: str) -> list[str]:
        return [one for one in joined_lines(text) if named.search(one)]

    texts = [text for shown, text in modules.mentioning(name) if shown != launch]
    shown = [_SHOWS.search(line) for text in (*texts, *pages) for line in starts(text)]
    jobs = [text for text in texts if starts(text)]
    if jobs and not any(shown) and all(set(_gpus_of_job(one)) == {"1"} for one in jobs):
        return True
    return bool(shown) and all(one is not None and _ONE_GPU.match(one["devices"]) for one in shown)


def _is_for_one_gpu(launch: str, pages: Iterable[str]) -> bool:
    """Whether a page says that a launch file is the way for one GPU: "Single GPU training, use run.sh"."""
    says = re.compile(
        rf"\b(?:single|one|1)[- ]gpu\b(?!s)[^.\n]{{0,40}}[\s`(/]{re.escape(launch)}(?![\w-])", re.IGNORECASE
    )
    return any(map(says.search, pages))


_OF_CONTAINER = re.compile(r"--gpus[= ][\\\"']*device=(?P<devices>[\d,]+)")
_GPUS_OF_JOB = re.compile(
    r"^#SBATCH\s(?:[^#\n]*\s)?(?:--gres[= ][\"']?gpu(?::[\w.-]*[A-Za-z][\w.-]*)?:|-G\s?|"
    r"--gpus(?:-per-node)?[= ](?:[\w.-]*[A-Za-z][\w.-]*:)?)(\d+)|"
    r"^#PBS\b.*\bngpus=(\d+)|^#BSUB\s+-gpu\s+[\"']?num=(\d+)|\b(?:nvidia|amd)\.com/gpu[\"']?:[ \t]*[\"']?(\d+)",
    re.MULTILINE,
)


def _gpus_of_job(text: str) -> Iterator[str]:
    """The numbers of GPUs that the jobs of a launch file ask for."""
    yield from (one for found in _GPUS_OF_JOB.findall(text) for one in found if one)


_VISIBLE_GPUS = "torch.cuda.device_count()"


def is_where_one_gpu(script: Script, node: ast.AST) -> bool:
    """Whether ``node`` is in a branch that is taken only where its process sees one GPU, which then has the number 0:
    ``elif torch.cuda.device_count() == 1``."""
    return any(_asks_for_one_gpu(script, test) is holds for test, holds in _branches_around(script, node))


def _asks_for_one_gpu(script: Script, test: ast.expr) -> bool | None:
    """Whether a test holds only where one GPU is visible (true), or fails only there (false); ``None`` for others."""
    if not isinstance(test, ast.Compare) or len(test.ops) != 1:
        return None
    counted = script.values_of(test.left) if isinstance(test.left, (ast.Name, ast.Attribute)) else (test.left,)
    if not counted or any(script.name(one) != _VISIBLE_GPUS for one in counted):
        return None
    asked = (type(test.ops[0]), script.value(test.comparators[0]))
    if asked in ((ast.Eq, 1), (ast.Lt, 2), (ast.LtE, 1)):
        return True
    return False if asked in ((ast.NotEq, 1), (ast.Gt, 1), (ast.GtE, 2)) else None


def simulates_ranks(script: Script) -> bool:
    """Whether the process group has one rank, or is a fake one that simulates ranks."""
    return any(
        has_one_rank(script, call) or script.value(script.argument(call, "backend", 0)) == "fake"
        for call in script.calls("torch.distributed.init_process_group")
    )


def runs_alone(script: Script, node: ast.AST) -> bool:
    """Whether ``node`` is in a branch for a single process: ``if not args.distributed``, the ``else`` of ``if
    world_size > 1``, ``if args.gpu is None``, or the other branch of the switch that makes the ranks."""
    switches = _switches_of_ranks(script)
    for test, holds in _branches_around(script, node):
        if (asks := asks_for_several(test)) is not None and asks is not holds:
            return True
        option, is_on = _option_of(test, holds)
        if not is_on and (option in switches or option.rpartition(".")[2] in _switches_of_launchers(script)):
            return True
        if is_on and option in _switches_of_one(script):
            return True
    return False


@per_script
def _switches_of_one(script: Script) -> frozenset[str]:
    """The options of the command line with which a script has no ranks: it makes them, wraps its model and calls
    torch.distributed only where the option is off: ``if not args.standalone: init_process_group("gloo")``."""
    makers = list(script.calls(*MAKES_RANKS))
    if not makers or any(True for _ in script.calls(TRAINER, FABRIC, ACCELERATOR)):
        return frozenset()
    used = [
        call
        for call in script.all(ast.Call)
        if script.name(call.func).startswith(_MADE_FOR_RANKS) and not last_name(call.func).startswith("is_")
    ]
    off = frozenset.intersection(*(_options_on(script, one, is_on=False) for one in (*makers, *used)))
    return frozenset(one for one in off if _is_plain_option(script, one))


def _is_plain_option(script: Script, option: str) -> bool:
    """Whether a parser of the script declares an option, which is not for another kind of ranks, and the script sets
    no attribute of that name."""
    name = option.rpartition(".")[2]
    declared = re.compile(rf"add_argument\(\s*[\"']--{re.escape(name).replace('_', '[-_]')}[\"']")
    stored = any(one.attr == name and isinstance(one.ctx, ast.Store) for one in script.all(ast.Attribute))
    is_asked = _OF_RANKS.search(name) or _MAY_MAKE_RANKS.search(name) or _OF_ENGINES.search(name)
    return not stored and not is_asked and declared.search(script.text) is not None


_OF_ENGINES = re.compile(r"deepspeed|zero|megatron|ray|xla|tpu|mpi|apex|parallel", re.IGNORECASE)
"""Words of options for ranks that something else than torch.distributed makes."""


@per_script
def _switches_of_launchers(script: Script) -> frozenset[str]:
    """The names of options, for ranks as their words say, without which a script reads none of the variables that
    launchers set, and wraps no model: ``if args.enable_fsdp: rank = int(os.environ["RANK"])``."""
    read = [one for one in script.all(ast.Constant) if _is_launch_variable(one)]
    if not read or any(True for _ in script.calls(TRAINER, FABRIC, ACCELERATOR)):
        return frozenset()
    used = [
        call
        for call in script.all(ast.Call)
        if script.name(call.func).startswith(_MADE_FOR_RANKS) or _MAY_MAKE_RANKS.search(last_name(call.func))
    ]
    used = [call for call in used if not last_name(call.func).startswith("is_")]  # also where there are no ranks
    found = [{one.rpartition(".")[2] for one in _options_on(script, part)} for part in (*read, *used)]
    return frozenset(one for one in frozenset.intersection(*map(frozenset, found)) if _OF_RANKS.search(one))


_MAY_MAKE_RANKS = re.compile(
    r"dist(?!ill|anc|rib(?!uted))|process_?group|ddp|launch|spawn|trainer|trainingarg|partialstate|hvd|"
    r"^(?:set_?up|init(?:iali[sz]e)?)$",
    re.IGNORECASE,
)
"""Functions and classes that make ranks, or may do so in another module."""
_MADE_FOR_RANKS = ("torch.distributed.", "torch.nn.parallel.Distributed", "deepspeed.", "horovod.", "apex.parallel.")


def block_with_ranks(script: Script, branch: ast.If) -> list[ast.stmt]:
    """The block of a branch that runs where the option is on which makes the ranks; none if it asks for another one."""
    option, is_on = _option_of(branch.test, holds=True)
    if option not in _switches_of_ranks(script):
        return []
    return branch.body if is_on else branch.orelse


def _branches_around(script: Script, node: ast.AST) -> Iterator[tuple[ast.expr, bool]]:
    """The tests of the branches around a node, each with whether it holds there."""
    inner = node
    for outer in script.around(node):
        if isinstance(outer, (ast.If, ast.IfExp)) and inner is not outer.test:
            below = outer.orelse if isinstance(outer.orelse, list) else [outer.orelse]
            yield outer.test, inner not in below
        inner = outer


def _option_of(test: ast.expr, holds: bool) -> tuple[str, bool]:
    """The option that a test asks for, as written, and whether it is on where the test holds or not."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _option_of(test.operand, not holds)
    return (ast.unparse(test), holds) if isinstance(test, (ast.Name, ast.Attribute)) else ("", holds)


@per_script
def _switches_of_ranks(script: Script) -> frozenset[str]:
    """The options without which a script has no ranks: it makes them where the option is on, and whatever else it does
    with ranks is there too. Scripts with an engine that makes ranks on its own have none."""
    makers = list(script.calls(*MAKES_RANKS))
    if not makers or any(True for _ in script.calls(TRAINER, FABRIC, ACCELERATOR)):
        return frozenset()
    named = [one for one in (*script.all(ast.Name), *script.all(ast.Attribute)) if _OF_RANKS.search(last_name(one))]
    named += [one for one in script.all(ast.Constant) if _is_launch_variable(one)]
    switches = [_options_on(script, one) for one in (*makers, *named)]
    return frozenset.intersection(*switches)


def _options_on(script: Script, node: ast.AST, *, is_on: bool = True) -> frozenset[str]:
    """The options that are on, or off, in the branches around a node."""
    found = (_option_of(*one) for one in _branches_around(script, node))
    return frozenset(option for option, holds in found if option and holds is is_on)


def asks_for_several(test: ast.expr) -> bool | None:
    """Whether a test holds in jobs of several ranks (true) or of one (false); ``None`` if it does not ask for that."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        asks = asks_for_several(test.operand)
        return None if asks is None else not asks
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        return next((asks for one in test.values if (asks := asks_for_several(one)) is not None), None)
    words = ast.unparse(test).lower()
    if isinstance(test, ast.Compare):
        if isinstance(test.ops[0], (ast.In, ast.NotIn)) and _is_launch_variable(test.left):
            return isinstance(test.ops[0], ast.In)
        asks_nothing = ast.unparse(test.comparators[-1]) in ("None", "-1")
        if asks_nothing and re.search(r"\b(?:gpu|(?:local_)?rank|device)\b", words):
            return not isinstance(test.ops[0], (ast.Is, ast.Eq))
        if isinstance(said := getattr(test.comparators[0], "value", None), str) and _is_switch(test.left):
            is_off = said.lower() in _OFF
            return is_off is not isinstance(test.ops[0], ast.Eq)
        if _ASKS_FOR_RANKS.search(words):
            return isinstance(test.ops[0], _COMPARED_WITH_ONE)
        return None
    return True if _ASKS_FOR_RANKS.search(words) or _is_switch(test) else None


def _is_launch_variable(node: ast.expr) -> bool:
    """``"RANK" in os.environ``: launchers of ranks set it, and a shell does not."""
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and bool(_OF_LAUNCHERS.search(node.value))


def _is_switch(node: ast.expr) -> bool:
    """``args.dist``, ``config.distributed``: an option that says whether there are several ranks."""
    return last_name(node).lower() in ("dist", "ddp", "distributed", "distributed_type")
