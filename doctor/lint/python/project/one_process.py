"""Places of a script that never run, or that only one process runs."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import PurePath

from doctor.core.finding import Severity
from doctor.lint.engine.rule import FlowStep, Violation
from doctor.lint.python.project.abnormal_values import is_led_to_by_accident
from doctor.lint.python.project.before_group import is_apart_from_group
from doctor.lint.python.project.earlier_branches import is_taken_before
from doctor.lint.python.project.failing_calls import (
    fails_before,
    fails_with_ranks,
    is_left_to_one_rank,
    makes_no_trainer,
    training_fails,
)
from doctor.lint.python.project.imported_functions import may_be_imported
from doctor.lint.python.project.left_defaults import has_no_rounds, is_off_in_text, outcome
from doctor.lint.python.project.left_over import is_of_documentation
from doctor.lint.python.project.never_used import cannot_run, fails_to_spawn, is_notebook_of_one_process
from doctor.lint.python.project.settings.compared_ranks import is_never_certain
from doctor.lint.python.project.settings.option_values import numbers_of
from doctor.lint.python.project.settings.options import (
    is_behind_switch,
    left_off,
    shown_starts,
)
from doctor.lint.python.project.starts.console_starts import is_shown_as_one
from doctor.lint.python.project.starts.gpu_wrappers import all_ranks_are_bound, is_run_through
from doctor.lint.python.project.starts.hydra_trainers import has_trainer_of_one
from doctor.lint.python.project.starts.launch_counts import (
    LAUNCHERS,
    STARTS_RANKS,
    asks_for_more,
    is_one_on_each_host,
    is_started_as_one,
    lines_naming,
    shown_counts,
)
from doctor.lint.python.project.starts.option_counts import is_asked_of_one_process
from doctor.lint.python.project.starts.other_starts import is_shown_elsewhere
from doctor.lint.python.project.starts.own_folders import has_folder_of_its_own, has_gpu_of_pod
from doctor.lint.python.project.starts.own_start import is_demonstration, is_of_own_main, shows_bug
from doctor.lint.python.project.unreached import is_program, unreached
from doctor.lint.python.project.wrapped_model import fails_to_wrap, uses_past_wrapper
from doctor.lint.python.rank_branches import (
    BLOCKS,
    block_of,
    statements_above,
    statements_before,
    stops_several,
)
from doctor.lint.python.reachable_functions import run_by_all
from doctor.lint.python.script import FunctionNode, ProjectModules, Script, module_of, per_script
from doctor.lint.python.training import ACCELERATOR, FABRIC, GROUP, SAMPLER, TRAINER, is_one_in_all_calls, several_ranks

OF_SEVERAL_RANKS = frozenset(
    f"CODE{number:03}" for number in (*range(1, 9), *range(10, 19), *range(29, 34), 36, 37, *range(39, 42), 43)
)
"""Rules about what happens between ranks, or on each of them."""
_LEAVING = (ast.Raise, ast.Return, ast.Break, ast.Continue)
_DEPTH = 4
_PLAIN_BASES = frozenset({"object", "nn.Module", "torch.nn.Module", "Module", "ABC", "abc.ABC"})
_CALLED_BY_TORCH = frozenset({"forward", "backward", "main", "run", "step", "state_dict", "load_state_dict"})
_WORDS_OF_RANKS = (
    *("init_process_group", "torchrun", "torch.distributed", "accelerate launch", "Accelerator(", "deepspeed", "srun"),
    *("Trainer(", "Fabric(", "horovod", "mpirun", "hvd.init", "world_size", "WORLD_SIZE"),
)
_SHOWS_RANKS = re.compile("|".join(map(re.escape, _WORDS_OF_RANKS)))


_SHOWN_ELSEWHERE = "the project shows how it starts other programs, but no start of this one on several ranks"


def as_placed(script: Script, rule: str, severity: Severity, violation: Violation) -> Violation | None:
    """The violation of a rule over scripts as its place deserves: ``None`` where it cannot happen, an info in preview
    where it needs more processes than the project starts, or shows to start, or an option that no start gives, and no
    error where the project calls nothing that reaches it, or shows no job of several ranks, or where only an abnormal
    value leads to it, or in a listing of documentation.

    ``severity``: of the rule."""
    if why := unreached(script, violation.place.line):
        step = FlowStep(script.path, violation.place.line, "", why)
        return replace(violation, severity=Severity.INFO, preview=True, flow=(*violation.flow, step))
    if shows_bug(script, violation.place.line):
        return replace(violation, severity=Severity.INFO, preview=True)
    if not isinstance(violation.at, ast.AST):
        written = (*script.all(ast.Assign), *script.all(ast.Expr))
        statements = (one for one in written if one.lineno == violation.place.line)
        is_left = any(never_runs(script, one, options=True) for one in statements)
        return replace(violation, severity=Severity.INFO, preview=True) if is_left else violation
    at = violation.at
    if (violation.severity or severity) is Severity.ERROR:
        violation = _in_doubt(script, rule, violation, at)
    placed = _as_started(script, rule, severity, violation, at)
    return _as_shown(script, placed) if placed is not None and rule in OF_SEVERAL_RANKS else placed


def _in_doubt(script: Script, rule: str, violation: Violation, at: ast.AST) -> Violation:
    """An error as a warning where only an abnormal value leads to it, and as an info in a listing of documentation, or
    (in preview) where it depends on the rank, which may have the same answer on all ranks."""
    if rule in OF_SEVERAL_RANKS and is_never_certain(script, at):
        return replace(violation, severity=Severity.INFO, preview=True)
    if is_of_documentation(script) and not shown_starts(script):
        return replace(violation, severity=Severity.INFO)
    return replace(violation, severity=Severity.WARNING) if is_led_to_by_accident(script, at) else violation


def _as_shown(script: Script, violation: Violation) -> Violation:
    if violation.severity is Severity.INFO or not is_shown_elsewhere(script):
        return violation
    step = FlowStep(script.path, violation.place.line, "", _SHOWN_ELSEWHERE)
    return replace(violation, severity=Severity.INFO, preview=True, flow=(*violation.flow, step))


def _as_started(script: Script, rule: str, severity: Severity, violation: Violation, at: ast.AST) -> Violation | None:
    if never_runs(script, at):
        return None
    is_behind = fails_before(script, at) or (rule != _OF_LIGHTNING and makes_no_trainer(script, at))
    is_behind = is_behind or (rule in _OF_TRAINING and training_fails(script))
    if is_behind or never_runs(script, at, options=True):
        return replace(violation, severity=Severity.INFO, preview=True)
    if rule not in OF_SEVERAL_RANKS:
        return violation
    if runs_in_one_process(script, at) or _is_tried_out(script, at) or is_notebook_of_one_process(script):
        return None
    if rule in _OF_DEVICES and _has_one_gpu_each(script):
        return None
    if rule == _OF_SAVED_DEVICE and _all_launches_bind(script):
        return None
    if _is_left_to_others(script, rule, at) or (rule in _NEEDING_OPTIONS and left_off(script, at)):
        return replace(violation, severity=Severity.INFO, preview=True)
    if (violation.severity or severity) is Severity.ERROR:
        unseen = not _shows_ranks(script) or not _is_of_a_job(script) or not _has_the_host(script, rule)
        if unseen or _is_reached_nowhere(script, at):
            return replace(violation, severity=Severity.WARNING)
    return violation


def _is_left_to_others(script: Script, rule: str, at: ast.AST) -> bool:
    """Whether what needs several ranks, or a folder that they share, happens in no start that the project shows."""
    if (
        fails_with_ranks(script, at)
        or (rule != _OF_NAMES and is_left_to_one_rank(script, at))
        or (rule == _OF_SHARED_FOLDERS and has_folder_of_its_own(script, at))
        or (rule == _OF_SAVED_DEVICE and has_gpu_of_pod(script))
        or (rule in _OF_DEVICES and is_one_on_each_host(script))
    ):
        return True
    if is_demonstration(script) or is_of_own_main(script, at) or is_apart_from_group(script, at):
        return True
    if fails_to_spawn(script) or is_asked_of_one_process(script, at):
        return True
    return is_made_for_one(script) or cannot_run(script, at) or uses_past_wrapper(script) or fails_to_wrap(script)


_MOST_USERS = 4
"""Other files with the name of a function that are parsed."""
_COMMENT = re.compile(r"(?<=\s)#[^\n]*$|^#[^\n]*$", re.MULTILINE)


def never_runs(script: Script, node: ast.AST, depth: int = _DEPTH, *, options: bool = False) -> bool:
    """Whether a place is in a branch that no run takes, since its condition is constant, depends on arguments that
    every call leaves at their default, or holds only where one above it does, below a statement that leaves its block,
    in a private function of the module that nothing in its file or its project names, or in a function all of whose
    uses are at such places. ``options``: also where it depends on the values of options and settings that the project
    shows, and in loops of 0 rounds."""
    inner = node
    for outer in script.around(node):
        if isinstance(outer, (ast.If, ast.IfExp)) and inner is not outer.test:
            is_in_body = inner is outer.body or inner in block_of(outer, inner, ("body",))
            if outcome(script, outer.test, options=options) is (not is_in_body):
                return True
            if is_in_body and isinstance(outer, ast.If) and is_taken_before(script, outer):
                return True
            if options and _is_set_off(script, outer, inner):
                return True
        if options and isinstance(outer, ast.For) and inner in outer.body and has_no_rounds(script, outer):
            return True
        if any(_leaves(script, one, options=options) for one in statements_before(outer, inner, BLOCKS)):
            return True
        if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef)):
            if _is_never_named(script, outer) or _is_used_in_vain(script, outer, depth, options=options):
                return True
        inner = outer
    return False


def _is_set_off(script: Script, branch: ast.AST, inner: ast.AST) -> bool:
    """Whether the branch of an attribute is taken that a statement above it has set to a constant for the other one:
    ``args.cached = False`` above ``if args.cached:``."""
    test = branch.test if isinstance(branch, ast.If) else None
    asks = test.operand if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not) else test
    if not isinstance(branch, ast.If) or not isinstance(asks, ast.Attribute):
        return False
    text, wanted = ast.unparse(asks), (inner in branch.body) is (asks is test)
    values = [one.value for one in script.all(ast.Assign) if any(ast.unparse(target) == text for target in one.targets)]
    above = {one.value for one in statements_above(script, branch) if isinstance(one, ast.Assign)}
    value = values[0] if len(values) == 1 and values[0] in above else None
    return isinstance(value, ast.Constant) and bool(value.value) is not wanted


def _is_used_in_vain(script: Script, function: FunctionNode, depth: int, *, options: bool) -> bool:
    """Whether a function of the module, or a method of a plain class, has uses, all of them where no run gets to."""
    owner, name = script.parent(function), function.name
    if depth == 0 or function.decorator_list or script.modules is None or name.startswith("__"):
        return False
    if isinstance(owner, ast.Module):
        uses: list[ast.expr] = [one for one in script.all(ast.Name) if one.id == name]
        is_known = all(script.definition(one) is function for one in uses)
    else:
        uses = [one for one in script.all(ast.Attribute) if one.attr == name]
        is_plain = isinstance(owner, ast.ClassDef) and all(ast.unparse(one) in _PLAIN_BASES for one in owner.bases)
        is_known = is_plain and name not in _CALLED_BY_TORCH
    if not is_known or len(re.findall(rf"\b{name}\b", script.text)) != len(uses) + 1:
        return False
    if not all(never_runs(script, one, depth - 1, options=options) for one in uses):
        return False
    others = [(shown, text) for shown, text in script.modules.mentioning(name) if shown != script.path]
    if not (uses or others) or len(others) > _MOST_USERS or (others and script.modules.installs(script.location)):
        return False
    return all(_uses_in_vain(script, shown, name, depth - 1, options=options) for shown, _ in others)


def _uses_in_vain(script: Script, shown: str, name: str, depth: int, *, options: bool) -> bool:
    """Whether all places where another file of the project uses a name are such that no run gets there, and there are
    some."""
    modules = script.modules
    if modules is None or not shown.endswith(".py"):
        return False
    text = _COMMENT.sub("", modules.text_at(shown))
    try:
        other = module_of(modules, shown, text)
    except (SyntaxError, ValueError, RecursionError):
        return False
    uses: list[ast.expr] = [one for one in other.all(ast.Name) if one.id == name]
    uses += [one for one in other.all(ast.Attribute) if one.attr == name]
    imports = [one for node in other.all(ast.ImportFrom) for one in node.names if one.name == name and not one.asname]
    if not uses or len(re.findall(rf"\b{name}\b", text)) != len(uses) + len(imports):
        return False
    return all(never_runs(other, one, depth, options=options) for one in uses)


def is_called_in_vain(script: Script, method: str) -> bool:
    """Whether all programs of a project that call a method of that name do so in branches which none of the starts
    takes that the project shows, as far as it shows which methods are called: ``if cfg.test: trainer.test(model)``."""
    modules = script.modules
    if modules is None or modules.is_one_file or modules.notebooks(f".{method}("):
        return False
    users = [shown for shown, text in modules.mentioning(f".{method}(")]
    if len(users) > _MOST_USERS or modules.mentioning("LightningCLI"):
        return False
    return bool(users) and all(_calls_in_vain(modules, shown, method) for shown in users)


def _calls_in_vain(modules: ProjectModules, shown: str, method: str) -> bool:
    try:
        other = module_of(modules, shown, modules.text_at(shown))
    except (SyntaxError, ValueError, RecursionError):
        return False
    calls = list(other.method_calls(method))
    return bool(calls) and all(never_runs(other, one, options=True) for one in calls)


def _leaves(script: Script, statement: ast.stmt, *, options: bool) -> bool:
    """Whether a statement leaves its block in every run."""
    if isinstance(statement, ast.If) and statement.body and isinstance(statement.body[-1], _LEAVING):
        return outcome(script, statement.test, options=options) is True
    return isinstance(statement, _LEAVING)


def _is_never_named(script: Script, function: FunctionNode) -> bool:
    name = function.name
    if not name.startswith("_") or name.startswith("__") or function.decorator_list or script.modules is None:
        return False
    if not isinstance(script.parent(function), ast.Module):
        return False  # a base class may call a method
    return not _is_named_again(script, name)


def _is_named_again(script: Script, name: str) -> bool:
    """Whether the file of a function, besides its definition, or another file of the project has its name."""
    named = re.compile(rf"\b{re.escape(name)}\b")
    if script.modules is None or (len(named.findall(script.text)) > 1 and _is_in_code(script, name)):
        return True
    return any(shown != script.path and named.search(text) for shown, text in script.modules.mentioning(name))


def _is_in_code(script: Script, name: str) -> bool:
    """Whether a name, also in a string, is in more than comments of a file."""
    return any(
        name in (getattr(one, "id", ""), getattr(one, "attr", ""))
        or (isinstance(one, ast.Constant) and name in str(one.value))
        or (isinstance(one, ast.alias) and name in (one.name, one.asname))
        for kind in (ast.Name, ast.Attribute, ast.Constant, ast.alias)
        for one in script.all(kind)
    )


def _is_reached_nowhere(script: Script, node: ast.AST) -> bool:
    """Whether nothing in the project names the function around a place, which joins no job itself: a part of a library
    that others may call. Of a file alone, the callers are unknown."""
    function = script.function_of(node)
    if function is None or script.modules is None or script.modules.is_one_file:
        return False
    if function.decorator_list or function.name.startswith("__"):
        return False
    if any(script.name(call.func) == GROUP for call in script.inside(function, ast.Call)):
        return False
    owner = script.parent(function)
    if isinstance(owner, ast.ClassDef) and any(ast.unparse(base) not in _PLAIN_BASES for base in owner.bases):
        return False  # a base class may call it
    if not isinstance(owner, (ast.Module, ast.ClassDef)) or function.name in _CALLED_BY_TORCH:
        return False
    return not _is_named_again(script, function.name)


@per_script
def _shows_ranks(script: Script) -> bool:
    """Whether the file, or another one of its project, starts a job of several ranks or is made for one."""
    if script.modules is None or several_ranks(script) is not None or _SHOWS_RANKS.search(script.text):
        return True
    return any(next(iter(script.modules.mentioning(word)), None) is not None for word in _WORDS_OF_RANKS)


_ON_A_HOST = re.compile(r"local_?rank|nprocs|\bspawn\(|device_count|local_process_index|n_?gpus?\b", re.IGNORECASE)
_OF_DEVICES = frozenset({"CODE002", "CODE003"})


_BINDS_GPUS = re.compile(
    r"--gpus-per-task|--gpu-bind|SLURM_LOCALID|_LOCAL_RANK|(?:CUDA|ROCR|HIP)_VISIBLE_DEVICES=(?:\$|\W*\+|\{)|gpu_bind"
)
"""Commands that give each rank a GPU of its own, which is number 0 there."""
_IS_FIRST_EVERYWHERE = re.compile(
    r"[\"']LOCAL_RANK[\"']\]\s{0,9}=\s{0,9}[\"']0[\"']|^assert [^\n]{0,100}local_rank[\"'\])\s]{0,9}==\s{0,9}[\"']?0",
    re.IGNORECASE | re.MULTILINE,
)
_SETS_DEVICE = re.compile(r"\b(?:HfArgumentParser|TrainingArguments)\b")
"""transformers/training_args.py: ``__post_init__`` reads ``device``, for which Accelerate sets the GPU of the rank."""


@per_script
def _has_one_gpu_each(script: Script) -> bool:
    """Whether the script says that each rank is the first of its host, or the project starts it with one GPU each."""
    if _IS_FIRST_EVERYWHERE.search(script.text) or script.modules is None:
        return script.modules is not None
    name = PurePath(script.path).name
    texts = [text for shown, text in script.modules.mentioning(name) if shown != script.path]
    if any(_SETS_DEVICE.search(text) for text in script.modules.texts_around(script.location)):
        return True
    texts += [text for text in script.modules.pages(script.location) if name in text] if script.location else []
    return any(_BINDS_GPUS.search(text) for text in texts)


_OF_TRAINING = frozenset({"CODE009", "CODE010", "CODE011", "CODE015", "CODE032", "CODE033"})
"""Rules about what training costs or does to its result."""
_NEEDING_OPTIONS = frozenset(f"CODE{number:03}" for number in (1, 2, 3, 5, 7, 8, 12, 16, 28, 29, 30, 32, 33, 39))
"""Rules about ranks whose hits count for little in a branch of an option that no start of the project gives. Others ask
themselves which options matter: one for a tracker is off by default in most programs, and users turn it on."""
_OF_LIGHTNING = "CODE022"
"""Says itself that a Trainer is refused, and what else its release has no more."""
_OF_SAVED_DEVICE = "CODE001"
_BOUND_BY_LAUNCH = re.compile(
    r"--gpus-per-task[= ][\"']?(?:\w+:)?1\b|"
    r"--gpu-bind[= ][\"']?(?:verbose,)?(?:single|per_task|closest|map_gpu|mask_gpu)|"
    r"--tres-per-task[= ]\S*gpu[:=]1\b|(?:CUDA|ROCR|HIP)_VISIBLE_DEVICES=[\"']?\$\{?(?:SLURM_LOCALID|\w*LOCAL_RANK)"
)
"""Options of Slurm, and variables, that let each task see one GPU: srun(1) on ``--gpus-per-task``, which implies
``--gpu-bind=per_task``."""
_OF_NAMES = "CODE043"
"""The rule that reports ranks without a name: their failure does not hide it."""
_OF_SHARED_FOLDERS = "CODE029"
_RUNS_PYTHON = re.compile(r"\bpython|torchrun|launch|\bsrun\b|mpirun|deepspeed")
_SEES_ONE = re.compile(r"CUDA_VISIBLE_DEVICES=[\"']?(?:\$\{?\w+\}?|\d)[\"']?(?=\s|$)", re.MULTILINE)
"""A GPU for the one process that a script starts, by a number or what the script is given: ``$1``."""
_TAKES_GPU_OF_RANK = re.compile(
    r"set_device\([^)\n]{0,60}(?:rank|RANK|LOCALID)|device_ids=\[[^\]\n]{0,40}(?:rank|RANK|LOCALID)"
)
"""Under such a binding there is no such GPU on all ranks but the first of a host."""


@per_script
def _all_launches_bind(script: Script) -> bool:
    """Whether every launch file of the project that starts a script gives each of its tasks one GPU, which is number 0
    in it, and the script does not look for another one. Of a script that none starts: whether all that start ranks do
    so through a script which gives each of them one."""
    if script.modules is None or _TAKES_GPU_OF_RANK.search(script.text):
        return False
    name = PurePath(script.path).name
    named = re.compile(rf"(?<![\w-]){re.escape(name)}\b")
    found = [text for _, text in script.modules.mentioning(name, launches=True) if named.search(text)]
    starts = [text for text in found if _RUNS_PYTHON.search(text)]
    if not starts:
        return all_ranks_are_bound(script.modules)
    is_started_alone = STARTS_RANKS.search(script.text) is None
    return bool(starts) and all(
        _BOUND_BY_LAUNCH.search(text)
        or is_run_through(script.modules, text)
        or (is_started_alone and _SEES_ONE.search(text) and LAUNCHERS.search(text) is None)
        for text in starts
    )


def _has_the_host(script: Script, rule: str) -> bool:
    """Whether a file in whose project ranks are started counts those of a host, as far as a rule needs several there:
    one process on each host may use GPU 0."""
    alone = script.modules is None or script.modules.is_one_file
    return rule not in _OF_DEVICES or alone or _ON_A_HOST.search(script.text) is not None


_STARTS_JOB = re.compile(
    r"init_process_group|torchrun|accelerate launch|Accelerator\(|torch\.distributed\.(?:launch|run)\b|deepspeed|"
    r"\bsrun\b|mpirun|mpiexec|Trainer\(|Fabric\(|hvd\.init|\bspawn\(|launch\(|DistributedDataParallel|init_distributed|"
    r"initialize_megatron|LightningCLI|init_dist|setup_dist|ddp_setup|setup_ddp"
)


@per_script
def _is_of_a_job(script: Script) -> bool:
    """Whether a start of several ranks was seen that reaches this file: in it, or in a file of the project that has its
    name, as one that imports or starts it does. Of a file alone, nothing else is known."""
    if script.modules is None or script.modules.is_one_file or several_ranks(script) is not None:
        return True
    if _STARTS_JOB.search(script.text):
        return True
    stem = PurePath(script.path).stem
    if stem == "__init__":
        return True
    named = re.compile(rf"\b{re.escape(stem)}\b")
    texts = (text for shown, text in script.modules.mentioning(stem) if shown != script.path)
    pages = script.modules.pages(script.location) if script.location else ()
    return any(_STARTS_JOB.search(text) and named.search(text) for text in (*texts, *pages))


def runs_in_one_process(script: Script, node: ast.AST, depth: int = _DEPTH) -> bool:
    """Whether a statement beside a place, or beside each use of its function, stops jobs of several ranks: ``assert
    world_size == 1``, or ``raise`` under ``if world_size > 1``."""
    if any(stops_several(script, one) for one in _statements_beside(script, node)):
        return True
    function = script.function_of(node)
    if function is None or depth == 0 or not isinstance(script.parent(function), ast.Module):
        return False
    uses = script.uses_of(function)
    return (
        bool(uses)
        and all(never_runs(script, one) or runs_in_one_process(script, one, depth - 1) for one in uses)
        and not may_be_imported(script, function.name)
    )


def _is_tried_out(script: Script, node: ast.AST) -> bool:
    """Whether a place is in the part of a module for ``__main__``, which tries it out in one process: none of the calls
    that show several ranks are reached from there."""
    tests = (one.test for one in script.around(node) if isinstance(one, ast.If))
    if script.function_of(node) is not None or not any("__main__" in ast.unparse(one) for one in tests):
        return False
    shown = several_ranks(script)
    return shown is not None and script.function_of(shown) not in run_by_all(script)


def _statements_beside(script: Script, node: ast.AST) -> Iterator[ast.stmt]:
    """The statements that run in a job that reaches a place: those of its blocks, and of the blocks around them."""
    inner = node
    for outer in script.around(node):
        yield from block_of(outer, inner)
        if isinstance(outer, ast.If) and inner in outer.orelse:
            yield outer
        if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            return
        inner = outer


@per_script
def is_made_for_one(script: Script) -> bool:
    """Whether a script is used with one process, as far as its project shows, though it may run with more: its only
    Accelerator is one of the CPU, or the launchers that start it in the project's files get one process each, or its
    configurations select a Trainer with one device."""
    accelerators = list(script.calls(ACCELERATOR))
    if accelerators and all(script.value(script.argument(one, "cpu")) is True for one in accelerators):
        return True
    spawned = list(script.calls(*_SPAWNS))
    if spawned and (all(_starts_one(script, one) for one in spawned) or _spawns_never(script, spawned)):
        return True
    if spawned and _sees_one_gpu(script, spawned):
        return True
    if _leaves_models_apart(script) or _is_run_with_one(script) or _has_one_worker(script) or _divides_never(script):
        return True
    if _has_one_device(script) or _sets_one_rank(script) or _has_batch_of_one(script) or _joins_never(script):
        return True
    if script.modules is None or STARTS_RANKS.search(script.text):
        return False
    return is_started_as_one(script) or is_shown_as_one(script) or has_trainer_of_one(script)


_SPAWNS = {
    "torch.multiprocessing.spawn": ("nprocs", 2, True),
    "torch.multiprocessing.start_processes": ("nprocs", 2, True),
    "accelerate.notebook_launcher": ("num_processes", 2, False),
    "pyspark.ml.torch.distributor.TorchDistributor": ("num_processes", 0, True),
}
"""Calls that start processes: the argument with their number, its place, and whether it is 1 by default."""


def _spawns_never(script: Script, spawned: Iterable[ast.Call]) -> bool:
    """Whether only an option starts processes which is off by default and which no command or page of the project
    gives, though they start the script: ``if args.multiprocessing_distributed: mp.spawn(...)``."""
    if script.modules is None or not all(is_behind_switch(script, one) for one in spawned):
        return False
    starts = shown_starts(script)
    return bool(starts) and not any(LAUNCHERS.search(one) or asks_for_more(script, one) for one in starts)


_COUNTS_GPUS = re.compile(r"\bdevice_count\(\)")
_ONE_VISIBLE = re.compile(r"(?:^|\s)CUDA_VISIBLE_DEVICES=[\"']?\d[\"']?\s")


def _sees_one_gpu(script: Script, spawned: Iterable[ast.Call]) -> bool:
    """Whether a script starts a rank for each GPU that it sees, and every command of the project that starts it lets
    it see one: ``CUDA_VISIBLE_DEVICES=0 python main.py``."""
    counts = [script.argument(one, *_SPAWNS[script.name(one.func)][:2]) for one in spawned]
    if script.modules is None or not all(one is not None and _is_of_gpus(script, one) for one in counts):
        return False
    starts = shown_starts(script)
    return bool(starts) and all(_ONE_VISIBLE.search(one) and not LAUNCHERS.search(one) for one in starts)


def _is_of_gpus(script: Script, count: ast.expr) -> bool:
    """Whether a number is that of the GPUs that a process sees: also of an attribute, ``args.nprocs``."""
    values = [count, *script.values_of(count)]
    if isinstance(count, ast.Attribute):
        text = ast.unparse(count)
        values += [
            one.value for one in script.all(ast.Assign) if any(ast.unparse(target) == text for target in one.targets)
        ]
    return any(_COUNTS_GPUS.search(ast.unparse(one)) for one in values)


def _starts_one(script: Script, call: ast.Call) -> bool:
    name, place, is_default = _SPAWNS[script.name(call.func)]
    given = script.argument(call, name, place)
    return _is_one(script, given) if given is not None or script.is_open(call) else is_default


def _is_one(script: Script, given: ast.expr | None) -> bool:
    return given is not None and (script.value(given) == 1 or is_one_in_all_calls(script, given))


_PLACES = {"sparkdl.HorovodRunner": 0}
"""Of the number of processes; HorovodRunner starts -1 on the driver (sparkdl/horovod/runner_base.py)."""
_RUNS_OF_HOROVOD = ("horovod.run", "horovod.spark.run", "sparkdl.HorovodRunner")


def _is_run_with_one(script: Script) -> bool:
    """Whether every run of Horovod that a script starts itself has one process: ``horovod.run(train, np=1)``."""
    runs = list(script.calls(*_RUNS_OF_HOROVOD))
    counts = [script.value(script.argument(one, "np", _PLACES.get(script.name(one.func)))) for one in runs]
    return bool(counts) and all(count in (1, -1) and not isinstance(count, bool) for count in counts)


_SCALING = ("ray.train.ScalingConfig", "ray.air.ScalingConfig", "ray.air.config.ScalingConfig")
_SECTION = re.compile(r"[\"'](\w+)[\"']|(?:^|\.)(\w+)$")


def _has_one_worker(script: Script) -> bool:
    """Whether every job of Ray that a script starts has one worker: ``ScalingConfig(num_workers=1)``, or a number that
    is 1 wherever the project's configurations give it."""
    given = [script.argument(one, "num_workers") for one in script.calls(*_SCALING)]
    return bool(given) and all(script.value(one) == 1 or _is_one_in_configurations(script, one) for one in given)


def _has_one_device(script: Script) -> bool:
    """Whether every Trainer of a script gets the number of its devices from the project's configurations, and that is 1
    wherever they give it: ``Trainer(gpus=cfg.gpus)``."""
    trainers = list(script.calls(TRAINER, FABRIC))
    given = [script.argument(one, "devices") or script.argument(one, "gpus") for one in trainers]
    named = [_entry(script, one)[1] for one in given]
    if any(script.is_given(one, "num_nodes") for one in trainers) or not all(named):
        return False
    return bool(named) and all(numbers_of(script, one) == {1} for one in named)


def _has_batch_of_one(script: Script) -> bool:
    """Whether every engine of DeepSpeed that a script makes has ``"train_batch_size": 1``, the batch of all ranks
    together: with several, a rank has less than one sample (``_batch_assertion`` of deepspeed/runtime/config.py)."""
    engines = list(script.calls("deepspeed.initialize"))
    given = [script.argument(one, "config") or script.argument(one, "config_params") for one in engines]
    found = [[] if one is None else [*script.values_of(one)] for one in given]
    return bool(found) and all(values and all(_is_batch_of_one(script, one) for one in values) for values in found)


def _is_batch_of_one(script: Script, config: ast.expr) -> bool:
    entries = zip(config.keys, config.values, strict=True) if isinstance(config, ast.Dict) else ()
    return any(
        key is not None and script.value(key) == "train_batch_size" and script.value(value) == 1
        for key, value in entries
    )


def _sets_one_rank(script: Script) -> bool:
    """Whether a program gives itself what a launcher would, for one process, and nothing in the project starts it with
    several: ``os.environ.setdefault("WORLD_SIZE", "1")``."""
    if script.modules is None or STARTS_RANKS.search(script.text) or not is_program(script):
        return False
    given = [call.args for call in script.calls("os.environ.setdefault") if len(call.args) == 2]
    is_one = any(script.value(name) == "WORLD_SIZE" and script.value(size) == "1" for name, size in given)
    return is_one and all(count == 1 for count in shown_counts(script))


def _joins_never(script: Script) -> bool:
    """Whether a program makes its group only in branches that switches in its text leave out: ``ddp = False``; or in
    functions that nothing names."""
    made = list(script.calls(GROUP))
    others = (ACCELERATOR, FABRIC, TRAINER)
    if not made or not is_program(script) or any(True for _ in script.calls(*others)):
        return False
    around = {one: script.function_of(one) for one in made}
    left = [one for one, function in around.items() if function is None or _is_named_again(script, function.name)]
    return bool(left) and all(is_off_in_text(script, one) for one in left)


def _is_one_in_configurations(script: Script, given: ast.expr | None) -> bool:
    """``cfg.trainer.num_workers``, or with ``trainer = cfg.get("trainer")`` before: the section of a configuration that
    it names has 1 in all of them, and no command overrides it."""
    owner, name = _entry(script, given)
    values = script.values_of(owner) if isinstance(owner, ast.Name) else ()
    found = _SECTION.search(ast.unparse(values[0] if values else owner)) if owner is not None else None
    if not name or found is None or script.modules is None:
        return False
    section = found[1] or found[2]
    texts = [text for _, text in script.modules.mentioning(name, launches=True)]
    pages = script.modules.pages(script.location) if script.location else ()
    if any(re.search(rf"\b{section}\.{name}\s?=", text) for text in (*texts, *pages)):
        return False
    listed = re.compile(rf"^{section}:[ \t]*(?:#.*)?\n(?:[ \t].*\n|\n)*?[ \t]+{name}:[ \t]*([^\s#]+)", re.MULTILINE)
    counts = [one[1] for text in texts for one in listed.finditer(f"{text}\n")]
    return bool(counts) and all(one == "1" for one in counts)


def _entry(script: Script, given: ast.expr | None) -> tuple[ast.expr | None, str]:
    """The owner and the name of an entry: ``trainer.num_workers`` or ``trainer["num_workers"]``."""
    if isinstance(given, ast.Attribute):
        return given.value, given.attr
    key = script.value(given.slice) if isinstance(given, ast.Subscript) else None
    return (
        (given.value, key)
        if isinstance(given, ast.Subscript) and isinstance(key, str) and key.isidentifier()
        else (None, "")
    )


_JOINS_JOB = re.compile(r"DistributedSampler|init_process_group")
_JOINS_MODELS = re.compile(
    r"(?<!nn\.)\b(?:\w*Distributed)?[Dd]ata_?[Pp]arallel|DDP\b|FSDP|fully_shard|[Mm]odel_?[Pp]arallel|parallelize|deepspeed|"
    r"horovod|hvd\.|[Aa]ccelerat|\bapex\.parallel|average_grad|sync_grad|sync_param|wrap_model|device_mesh|\brpc\b|"
    r"\bdist(?:ributed)?\.(?:all_|reduce|broadcast|gather|i?send|i?recv|scatter)|\ball_?reduce|pipelining|[Mm]egatron|"
    r"Trainer\(|lightning|Fabric|bagua|colossal|fairscale|fairseq|mmcv|mmengine|detectron|composer|ignite|\bray\b|xla|"
    r"smdistributed"
)


def _leaves_models_apart(script: Script) -> bool:
    """Whether several ranks would train models that nothing ties together: a program with ``backward()`` and, in
    branches, a group or a distributed sampler, where neither it nor what it imports from the project wraps a model or
    exchanges anything. Such branches are left over, or nobody has used them."""
    if script.modules is None or script.modules.is_one_file or ".backward(" not in script.text:
        return False
    if STARTS_RANKS.search(script.text) or not _JOINS_JOB.search(script.text):
        return False
    if any(script.nearest(one, ast.If, ast.IfExp) is None for one in script.calls(GROUP, SAMPLER)):
        return False
    texts = list(script.modules.texts_around(script.location))
    own = re.sub(r"^\s*(?:from|import) .*$|#.*$", "", script.text, flags=re.MULTILINE)
    others = (one for one in texts if one != script.text)
    return bool(texts) and not any(_JOINS_MODELS.search(text) for text in (own, *others))


def _divides_never(script: Script) -> bool:
    """Whether the branches in which a script makes distributed samplers are switched off (``if False:``), and no
    launcher in the project's files and pages starts it: then its ranks would train on the same data."""
    samplers = list(script.calls(SAMPLER))
    if script.modules is None or not samplers or not all(never_runs(script, one) for one in samplers):
        return False
    return not any(map(LAUNCHERS.search, lines_naming(script, script.modules)))


@per_script
def may_be_several(script: Script) -> bool:
    """Whether the project shows that several processes run a script which works with one too: a launcher that is
    named in it, or that starts it, or a file that imports it, in the project's files. A file alone may be started in
    any way."""
    if script.modules is None or LAUNCHERS.search(script.text) or STARTS_RANKS.search(script.text):
        return True
    stem = PurePath(script.path).stem
    named = re.compile(rf"\b{re.escape(stem)}\b")
    texts = [text for shown, text in script.modules.mentioning(stem) if shown != script.path]
    if not texts and not next((True for _ in script.modules.mentioning("launch")), False):
        return True  # nothing in the project says how anything is started
    return any(LAUNCHERS.search(text) and named.search(text) for text in texts)
