"""Switches of the command line that are off unless a user asks for them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from pathlib import PurePath
from typing import NamedTuple, TypeGuard

from doctor.core.text import joined_lines
from doctor.lint.python.script import ProjectModules, Script, last_name

OF_SETTINGS = re.compile(
    r"^_?(?:args?|opts?|options|configs?|cfgs?|conf|hparams|flags|params|settings|self)$", re.IGNORECASE
)


def switch_off_by_default(script: Script, test: ast.expr) -> str:
    """The option that a test needs (``args.dist_eval``), if its default is off and no launch file or page of the
    project sets it: ``--dist_eval``; empty otherwise."""
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        return next(filter(None, (switch_off_by_default(script, one) for one in test.values)), "")
    if _is_compared_with_true(test):
        return switch_off_by_default(script, test.left)
    name = _entry_of(test)
    if not name.isidentifier() or script.modules is None:
        return ""
    spelled = name.replace("_", "[-_]")
    declared = re.compile(
        rf"[\"']--{spelled}[\"'](?:[^\n]{{0,120}}|,\s{{1,40}}(?:action\s?=\s?[\"'])?)"
        rf"(?:store_true|default\s?=\s?(?:False|0)\b)|"
        rf"^\s+{name}\s?:\s?bool\s?=\s?(?:False|field\(\s?default\s?=\s?False)",
        re.MULTILINE,
    )
    own = [script.text, *(text for _, text in script.modules.mentioning(name))]
    is_on = re.compile(
        rf"[\"']--{spelled}[\"'][^\n]{{0,120}}default\s?=\s?True|set_defaults\([^)\n]*\b{name}\s?=\s?True"
    )
    configured = re.compile(rf"^[ \t]*[\"']?{name}[\"']?\s*:\s*(?:[Ff]alse|no|0)\b", re.MULTILINE)
    configurations = [text for _, text in script.modules.mentioning(name, launches=True)]
    is_declared = any(map(declared.search, own)) or any(map(configured.search, configurations))
    is_off = is_declared and not any(map(is_on.search, own)) and not sets(script, name)
    return f"--{name}" if is_off and not _is_asked_for(script, name, spelled) else ""


def _is_compared_with_true(test: ast.expr) -> TypeGuard[ast.Compare]:
    """``args.parallel == True``, or with ``is``."""
    if not isinstance(test, ast.Compare) or len(test.ops) != 1 or not isinstance(test.ops[0], (ast.Eq, ast.Is)):
        return False
    given = test.comparators[0]
    return isinstance(given, ast.Constant) and given.value is True


def is_switched_off(script: Script, node: ast.AST) -> bool:
    """Whether a part of a program in a project is in the branch of a switch that is off by default and that nothing
    there turns on: ``if args.use_cifar:``."""
    return script.modules is not None and not script.modules.is_one_file and is_behind_switch(script, node)


def is_behind_switch(script: Script, node: ast.AST) -> bool:
    """The same, also of a program without a project."""
    return any(is_in_body and switch_off_by_default(script, one.test) for one, is_in_body in script.branches(node))


def _turned_off_by(script: Script, test: ast.expr) -> str:
    """The option that turns off what a test asks for, if it is on by default and no launch file or page of the project
    turns it off: ``--no_repeated_aug``; empty otherwise."""
    name, modules = _entry_of(test), script.modules
    if not name.isidentifier() or modules is None or sets(script, name):
        return ""
    spelled = name.replace("_", "[-_]")
    declared = re.compile(rf"[\"']--no[-_]{spelled}[\"'][^\n]{{0,60}}store_false[^\n]{{0,60}}\b{name}\b")
    is_on = re.compile(rf"set_defaults\([^)\n]*\b{name}\s?=\s?True")
    given = re.compile(rf"--no[-_]{spelled}\b|\b{name}[\"']?\s*[:=]\s*(?:[Ff]alse|0|no)\b")
    texts = [text for one in {name, name.replace("_", "-")} for _, text in modules.mentioning(one, launches=True)]
    texts += modules.pages(script.location) if script.location else ()
    is_declared = declared.search(script.text) is not None and is_on.search(script.text) is not None
    return f"--no_{name}" if is_declared and not any(map(given.search, texts)) else ""


_GIVES_OPTIONS = re.compile(r"[\"'\s]--\w+")


def left_off(script: Script, node: ast.AST) -> str:
    """The option that a place needs, if it is off by default, and the commands and programs of the project which start
    the script with other options, also those of its pages, do not give it: ``--test_only``; empty otherwise."""
    option = _option_off_at(script, node, _CALLERS)
    place, modules = PurePath(script.path), script.modules
    if not option or modules is None:
        return ""
    named = re.compile(rf"\b{re.escape(place.stem)}\b")
    texts = [*modules.mentioning(place.stem), *modules.mentioning(place.name, launches=True)]
    starts = [text for shown, text in texts if shown != script.path and named.search(text)]
    starts += own_starts(script, modules.pages(script.location) if script.location else ())
    given = [text for text in starts if _GIVES_OPTIONS.search(text)]
    is_given = any(one in text for one in (option, option.replace("_", "-")) for text in given)
    return option if given and not is_given else ""


_CALLERS = 3
"""Functions in a row, each called by the one before."""


def _option_off_at(script: Script, node: ast.AST, depth: int) -> str:
    """The option that a branch around a place needs, or one around each use of the function that it is in, if that is
    off by default; empty otherwise."""
    branches = list(script.branches(node))
    options = (
        *(switch_off_by_default(script, one.test) for one, is_in_body in branches if is_in_body),
        *(_turned_off_by(script, one.test) for one, is_in_body in branches if not is_in_body),
    )
    option = next(filter(None, options), "")
    function = script.function_of(node)
    if option or function is None or depth == 0 or not isinstance(script.parent(function), ast.Module):
        return option
    if function.decorator_list or script.modules is None:
        return ""
    uses = [one for one in script.all(ast.Name) if one.id == function.name]
    word = re.compile(rf"\b{re.escape(function.name)}\b")
    is_known = bool(uses) and len(word.findall(_LINE_COMMENT.sub("", script.text))) == len(uses) + 1
    texts = script.modules.mentioning(function.name) if is_known else ()
    if not is_known or any(shown != script.path and _may_take(script, text, word) for shown, text in texts):
        return ""
    needed = [_option_off_at(script, one, depth - 1) for one in uses]
    return needed[0] if all(needed) else ""


_LINE_COMMENT = re.compile(r"(?<=\s)#[^\n\"']*$|^#[^\n]*$", re.MULTILINE)


def _may_take(script: Script, text: str, name: re.Pattern[str]) -> bool:
    """Whether another file may use a function of a script."""
    return (
        name.search(text) is not None and re.search(rf"\b{re.escape(PurePath(script.path).stem)}\b", text) is not None
    )


def _entry_of(test: ast.expr) -> str:
    """The name of an entry of settings: of ``args.dist_eval`` and ``cfg["dist_eval"]``."""
    if (
        isinstance(test, ast.Subscript)
        and isinstance(test.slice, ast.Constant)
        and OF_SETTINGS.match(last_name(test.value))
    ):
        return str(test.slice.value)
    return test.attr if isinstance(test, ast.Attribute) and OF_SETTINGS.match(last_name(test.value)) else ""


_COMMENT = re.compile(r"^[ \t]*#.*\n?", re.MULTILINE)
_STARTS = re.compile(r"\b(?:python[\d.]*|torchrun|dlrover-run|launch|deepspeed|srun|mpirun)\b")


class StartTexts(NamedTuple):
    """The launch files and pages that may start a script; ``own``: they are those of its own folder, which has its
    commands, while others may start a file of the same name."""

    launches: list[str]
    pages: list[str]
    own: bool


def texts_of_starts(script: Script) -> StartTexts:
    """The launch files and pages that may start a script."""
    modules, place = script.modules, PurePath(script.path)
    if modules is None:
        return StartTexts([], [], own=False)
    found = modules.mentioning(place.name, launches=True)
    pages = list(modules.pages(script.location)) if script.location else []
    below = [text for shown, text in found if PurePath(shown).is_relative_to(place.parent)]
    is_inner = script.location and str(PurePath(script.location).parent) != modules.root_of(script.location)
    if is_inner and starts_in(place.name, below):
        above = modules.pages_at_root(script.location)
        return StartTexts(below, [one for one in pages if one not in above], own=True)
    return StartTexts([text for _, text in found], pages, own=False)


def number_in(given: str, text: str) -> str:
    """What a command gives; of a variable, the only value that its file gives it, or else its default:
    ``${STEPS:-4}``."""
    if not given.startswith("$"):
        return given
    name, _, default = given.strip("${}").partition(":-")
    if not name.isidentifier():
        return given
    values = set(re.findall(rf"^[ \t]*(?:export[ \t]+)?{name}=[\"']?([^\s\"'#;]*)", text, re.MULTILINE))
    values = {one.removeprefix(f"${{{name}:-").rstrip("}") for one in values}
    return values.pop() if len(values) == 1 else given if values or not default else default


def with_variables(line: str, text: str) -> str:
    """A command with the options that it has in variables of its file: ``train.py $ARGS``, ``"${ARGS[@]}"``."""

    def options_in(found: re.Match[str]) -> str:
        given = re.findall(rf"^[ \t]*{found[1]}=(?:\"([^\"]*)\"|'([^']*)'|\(([^)]*)\))", text, re.MULTILINE)
        return " ".join(" ".join(given[0]).replace("\\\n", " ").split()) if len(given) == 1 else found[0]

    return _VARIABLE.sub(options_in, line)


_VARIABLE = re.compile(r"\"?\$\{?(\w+)(?:\[@\])?\}?\"?(?![\w/.:}])")


def starts_in(name: str, texts: Iterable[str]) -> list[str]:
    """The commands that start a file of that name."""
    without_comments = (_COMMENT.sub("", text) for text in texts if name in text)  # "\\" does not continue them
    lines = (line for text in without_comments for line in joined_lines(text) if name in line)
    return [line for line in lines if _STARTS.search(line.partition(name)[0])]


def own_starts(script: Script, texts: Iterable[str]) -> list[str]:
    """The commands that start a script, without those of another file of its name in the project."""
    place = PurePath(script.path)
    return [line for line in starts_in(place.name, texts) if not names_other(script, line)]


def shown_starts(script: Script) -> list[str]:
    """The commands that start a script in the launch files and pages that may start it."""
    texts = texts_of_starts(script)
    return own_starts(script, (*texts.launches, *texts.pages))


def names_other(script: Script, line: str) -> bool:
    """Whether a command names another file of the project that has the name of the script: ``second/main.py`` for
    ``first/main.py``."""
    modules, place = script.modules, PurePath(script.path)
    folders = re.findall(rf"([\w-]+)/{re.escape(place.name)}\b", line)
    if modules is None or not folders or place.parent.name in folders:
        return False
    return all(modules.named(script.path, f"{folder}.{place.stem}") for folder in folders)


def sets(script: Script, name: str) -> bool:
    """Whether the file itself turns it on: ``args.dist_eval = True``."""
    targets = (target for one in script.all(ast.Assign) for target in one.targets)
    return any(isinstance(one, ast.Attribute) and one.attr == name for one in targets)


def _is_asked_for(script: Script, name: str, spelled: str) -> bool:
    """Whether a launch file or a page has the option with a value that is not off."""
    given = re.compile(
        rf"--{spelled}\b(?![ =][\"']?(?:[Ff]alse|0|no)\b)|\b{name}[\"']?\s*[:=]\s*[\"']?(?:[Tt]rue|1|yes)\b"
    )
    modules = script.modules
    spellings = {name, name.replace("_", "-")} if modules is not None else set()
    texts = [text for one in spellings if modules for _, text in modules.mentioning(one, launches=True)]
    texts += modules.pages(script.location) if modules is not None and script.location else ()
    return any(given.search(text) for text in texts)


_READ = r"\b(?:args|opts?|options|FLAGS)\.{name}\b(?!\s*(?:[-+*/|]|//)?=(?!=))|\b(?:DataParallel|DDP)\([^\n]*?\b{name}="
"""An attribute of the arguments that is not a target, and the keyword of a wrapper that has its name."""
_MAKES_ATTRIBUTES = re.compile(
    r"setattr\(|__dict__|\bvars\(|Namespace\(|exec\(|set_defaults\(\*\*|namespace=|parents=|add_argparse_args|"
    r"add_config_arguments|HfArgumentParser|parse_known_args|import_module|add_\w{0,40}arg\w{0,40}\(\w{0,40}parser"
)
"""Ways to make attributes of arguments without their names, also by parsers of libraries."""
_OTHERS = re.compile(r"^\s*(?:self\.)?args\s*=(?!=)(?![^\n]*(?:parse|args|opt|arg_))", re.MULTILINE)
"""Arguments that are something else than what a parser gives."""


def lacks_option(script: Script, node: ast.AST) -> bool:
    """Whether an expression is an attribute of the parsed arguments that nothing in the project makes: all its texts
    only read it. It ends with an AttributeError."""
    modules = script.modules
    if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Load) or modules is None:
        return False
    if last_name(node.value) not in _OF_PARSERS or not modules.is_whole(script.location) or hasattr(object, node.attr):
        return False
    if _is_of_own_parser(script, node):
        return True
    key = ("lacks option", node.attr)
    if key not in modules.memo:
        modules.memo[key] = _is_made_by_nothing(modules, node.attr)
    found: bool = modules.memo[key]
    return found


_PARSER = "argparse.ArgumentParser"


def _is_of_own_parser(script: Script, node: ast.Attribute) -> bool:
    """Whether an attribute is one of what a parser of the script returns, whose options are all declared there by their
    names, and none has that name; and neither the script nor what it imports from the project may set it."""
    bound = script.values_of(node.value) if isinstance(node.value, ast.Name) else ()
    parses = bound[0] if len(bound) == 1 else None
    if not isinstance(parses, ast.Call) or script.name(parses.func) != f"{_PARSER}().parse_args":
        return False
    parser = parses.func.value if isinstance(parses.func, ast.Attribute) else None
    if not isinstance(parser, ast.Name) or script.modules is None:
        return False
    scope = script.scope_of(parser, parser.id)
    read = [one for one in script.all(ast.Name) if one.id == parser.id and isinstance(one.ctx, ast.Load)]
    declared = _declared_by(script, [one for one in read if script.scope_of(one, one.id) is scope])
    if declared is None or node.attr in declared:
        return False
    sets = re.compile(rf"\.{node.attr}\b\s*(?::[^=\n]+)?=(?!=)|\bsetattr\(|__dict__|\bvars\(|\bnamespace=")
    return not any(map(sets.search, script.modules.texts_around(script.location)))


def _declared_by(script: Script, uses: list[ast.Name]) -> set[str] | None:
    """The options that a parser declares; ``None`` if it may have others: it is passed on, or has groups."""
    made = script.values_of(uses[0])
    if len(made) != 1 or not isinstance(made[0], ast.Call) or script.argument(made[0], "parents") is not None:
        return None
    found: set[str] = set()
    for one in uses:
        method = script.parent(one)
        call = script.parent(method) if isinstance(method, ast.Attribute) else None
        if not isinstance(method, ast.Attribute) or not isinstance(call, ast.Call) or call.func is not method:
            return None
        names = [script.value(word) for word in (*call.args, script.argument(call, "dest")) if word is not None]
        if method.attr == "add_argument" and names and all(isinstance(name, str) for name in names):
            found.update(str(name).lstrip("-").replace("-", "_") for name in names)
        elif method.attr not in ("parse_args", "print_help"):
            return None
    return found


_OF_PARSERS = frozenset({"args", "opt", "opts", "options"})


def _is_made_by_nothing(modules: ProjectModules, name: str) -> bool:
    parsers = [text for _, text in modules.mentioning(".parse_args(")]
    if not parsers or any(_MAKES_ATTRIBUTES.search(one) for one in parsers):
        return False
    if any(_OTHERS.search(text) for _, text in modules.mentioning("args")):
        return False
    spelled, read = re.compile(name.replace("_", "[-_]")), re.compile(_READ.format(name=name))
    texts = {text for one in (name, name.replace("_", "-")) for _, text in modules.mentioning(one)}
    return not any(spelled.search(read.sub("", text)) for text in texts) and not modules.notebooks(name)
