"""Modules and classes that nothing in their project uses, as far as it shows."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import PurePath

from doctor.lint.python.project.call_graph import CallGraph
from doctor.lint.python.project.failing_start import lacks_configuration, stopped_before
from doctor.lint.python.project.left_over import STARTS_PROGRAM, is_old_copy, left_over_folder
from doctor.lint.python.script import ProjectModules, Script, last_name, per_script

_FINDS_BY_NAME = re.compile(
    r"\b(?:import_module|__import__|walk_packages|iter_modules|LightningCLI|getmembers|load_module|module_from_spec)\b|"
    r"globals\(\)\[|getattr\((?:mod|modules?|models?|lib|package|archs?|networks?|sys\.modules\[[^\]]{0,80}\]),"
)
"""Programs that may use what no text names."""
_WORDS = ("import_module", "__import__", "walk_packages", "iter_modules", "LightningCLI", "getmembers", "getattr")
_STARTS = (ast.For, ast.While, ast.With)
_PREPARES = re.compile(
    r"(?:warnings|logg(?:ing|er)|log|sys|os|random|np|numpy|plt|matplotlib|torch\.(?:backends|set_)|(?:pl\.)?seed_everything|"
    r"pd|pandas|sns|gc|locale|faulthandler|load_dotenv|nltk|(?:mp|multiprocessing)\.set_\w+|torch\.manual_seed|cv2|tf|"
    r"absl|tqdm|register\w*|[\w.]+\.(?:register\w*|set_verbosity\w*|setLevel|setrecursionlimit|filterwarnings|use)|"
    r"torch\.multiprocessing\.set_\w+|rdkit|RDLogger|faiss|simplefilter|filterwarnings)\b"
)
"""Calls of modules that are not programs."""


def unreached(script: Script, line: int) -> str:
    """Why no start of the project runs a line of a script, which then fails in no run; empty if one does, or that is
    unknown: of a file alone, of a part of a repository, and of what an installed package offers to others."""
    modules = script.modules
    if script.path.endswith(".ipynb") and modules is not None and not modules.is_one_file:
        name = _only_defined_at(script, line)
        return f"no cell of the notebook uses {name}" if name else ""
    if modules is None or modules.is_one_file or not script.location or not modules.is_whole(script.location):
        return ""
    if modules.fails_to_import(script.location):
        return "the imports of this file fail, or those of every file that imports it"
    if folder := left_over_folder(script):
        return f"nothing outside {folder} imports or starts this file"
    if is_old_copy(script):
        return "its name says that this file is an old copy, and nothing in the project imports or starts it"
    is_offered = modules.installs(script.location)
    if not (is_offered or _has_programs(script)):
        return ""
    missing = "" if is_offered else stopped_before(script, line) or lacks_configuration(script)
    if missing and not _may_be_imported(script):
        return f"every run stops before: {missing} does not exist"
    if is_imported_nowhere(script):
        return "nothing in the project imports or starts this file"
    name = CallGraph(modules, script.location).unreached_at(script.path, line)
    return f"nothing that runs in the project uses {name}" if name else ""


def _only_defined_at(script: Script, line: int) -> str:
    """The function or class of a notebook around a line that its text names once, where it is defined."""
    for one in script.tree.body:
        if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and not one.decorator_list:
            if one.lineno <= line <= (one.end_lineno or 0):
                is_only = len(re.findall(rf"\b{re.escape(one.name)}\b", script.text)) == 1
                return one.name if is_only and _FINDS_BY_NAME.search(script.text) is None else ""
    return ""


@per_script
def _has_programs(script: Script) -> bool:
    """Whether the project shows how it is started: by a file that is a program, or by a command."""
    modules = script.modules
    return modules is not None and (is_program(script) or next(iter(modules.mentioning("__main__")), None) is not None)


@per_script
def is_imported_nowhere(script: Script) -> bool:
    """Whether a module that is no program is imported by nothing in its project, and nothing there names its path: a
    copy that is left over, or a part that nobody has connected."""
    modules, place = script.modules, PurePath(script.location)
    if modules is None or modules.is_one_file or not script.location or is_program(script):
        return False
    if place.stem == "__init__" or (_imports_by_name(script, modules) and not _finds_by_configuration(modules)):
        return False
    stem = re.escape(place.stem)
    named = re.compile(
        rf"\b{re.escape(place.parent.name)}[./\\]{stem}\b|[\w./-]*\b{stem}\.py\b|"
        rf"(?:import_module|__import__|run_module)\(\s{{0,40}}[\"'][\w.]{{0,200}}\b{stem}[\"']"
    )
    for shown, text in modules.mentioning(place.stem):
        if shown != script.path and (named.search(text) or may_import(place, text)):
            return False
    pages = modules.pages(script.location)
    return not any(named.search(text) for text in pages) and not _is_installed_as(script, place)


@per_script
def _may_be_imported(script: Script) -> bool:
    """Whether another file, a notebook or a page of a project imports a script."""
    modules, place = script.modules, PurePath(script.location)
    if modules is None:
        return True
    texts = [text for shown, text in modules.mentioning(place.stem) if shown != script.path]
    texts += modules.pages(script.location)
    in_cell = re.compile(rf"\b(?:from|import)\s[^\n]*\b{re.escape(place.stem)}\b")
    return any(may_import(place, text) for text in texts) or any(
        in_cell.search(text) for text in modules.notebooks(place.stem)
    )


def is_optional_part(script: Script, at: ast.AST) -> bool:
    """Whether an import is below one of a package that the requirements of the project do not have, in a module that no
    program of the project imports: only a configuration names it, for those who have installed that package too."""
    modules, place = script.modules, PurePath(script.location)
    if modules is None or not script.location or is_program(script):
        return False
    above = [one for one in script.tree.body if isinstance(one, (ast.Import, ast.ImportFrom))]
    above = above[: above.index(at)] if isinstance(at, (ast.Import, ast.ImportFrom)) and at in above else []
    named = [name.name for one in above if isinstance(one, ast.Import) for name in one.names]
    named += [one.module for one in above if isinstance(one, ast.ImportFrom) and one.module and not one.level]
    others = [one for one in named if not modules.named(script.path, one)]
    heads = {one.partition(".")[0] for one in others} - sys.stdlib_module_names
    if all(modules.may_install(script.location, one.lower()) for one in heads):
        return False
    users = [text for shown, text in modules.mentioning(place.stem) if shown.endswith(".py") and shown != script.path]
    if place.stem in sys.stdlib_module_names:  # ``import logging`` is not of ``utils/logging.py``
        plain = re.compile(rf"^[ \t]*(?:from|import)\s+{place.stem}\b[^\n]*", re.MULTILINE)
        users = [plain.sub("", text) for text in users]
    return not any(may_import(place, text) for text in users)


def may_import(place: PurePath, text: str) -> bool:
    """Whether a text may import the module at ``place``."""
    stem = re.escape(place.stem)
    imports = re.compile(
        rf"^[ \t]*(?:from\s+([.\w]*\b{stem}|\.+)\s+import\b|import\s+([.\w]*\b{stem})\b|"
        rf"from\s+([.\w]+)\s+import\b(?:\s*\([^)]{{0,2000}}?|(?:\\\n|[^#\n(])*?)\b{stem}\b)",
        re.MULTILINE,
    )
    return any(_may_be(place, *one.groups("")) for one in imports.finditer(text))


def imports_function(script: Script, function: str, word: str) -> bool:
    """Whether a module of the project that a script imports has a function of this name, and a word."""
    texts = script.modules.mentioning(word) if script.modules is not None else ()
    return bool(function) and any(
        f"def {function}(" in text and may_import(PurePath(shown), script.text) for shown, text in texts
    )


def _may_be(place: PurePath, module: str, plain: str, package: str) -> bool:
    """Whether a dotted name may be of the file at ``place``: its last parts are those of the path."""
    dotted = module or plain or f"{package}.{place.stem}"
    named = [one for one in dotted.split(".") if one]
    return all(map(str.__eq__, reversed(named), reversed(place.with_suffix("").parts)))


def _is_installed_as(script: Script, place: PurePath) -> bool:
    """Whether a requirement file may name an entry point in a module."""
    word = f"{place.parent.name}.{place.stem}".lower()
    return script.modules is not None and script.modules.may_install(script.location, word)


@per_script
def is_program(script: Script) -> bool:
    """Whether a file does something when started: ``if __name__ == "__main__":``, calls or loops of the module, also
    loops in its branches."""
    if script.path.endswith(".ipynb") or ("__main__" in script.text and not _only_says(script)):
        return True
    return any(
        any(isinstance(inner, _STARTS) for inner in _in_branches(one))
        or (
            isinstance(one, ast.Expr)
            and isinstance(one.value, ast.Call)
            and _PREPARES.match(script.text_of(one.value.func)) is None
        )
        for one in script.tree.body
    )


def _only_says(script: Script) -> bool:
    """Whether the only block for a start, ``if __name__ == "__main__":``, prints the name of a module."""
    blocks = [one for one in script.tree.body if isinstance(one, ast.If) and "__main__" in ast.unparse(one.test)]
    if len(blocks) != 1 or script.text.count("__main__") != 1:
        return False
    return all(isinstance(one, ast.Pass) or _is_said(one) for one in blocks[0].body)


def _is_said(statement: ast.stmt) -> bool:
    """A text, or ``print()`` of constants."""
    value = statement.value if isinstance(statement, ast.Expr) else None
    if isinstance(value, ast.Call) and last_name(value.func) == "print":
        return all(isinstance(one, ast.Constant) for one in value.args)
    return isinstance(value, ast.Constant)


def _in_branches(statement: ast.stmt) -> Iterator[ast.stmt]:
    """A statement, or those in a branch."""
    yield statement
    if isinstance(statement, ast.If):
        for one in (*statement.body, *statement.orelse):
            yield from _in_branches(one)


_IMPORTS_BY_NAME = re.compile(
    r"\b(?:import_module|__import__|walk_packages|iter_modules|LightningCLI|load_module|module_from_spec|run_path|"
    r"run_module|spec_from_file_location|entry_points)\b|\bexec\("
)
_OF_IMPORTS = (*_WORDS[:5], "load_module", "from_spec", "run_path", "run_module", "from_file_location", "entry_points")
_OF_OTHERS = re.compile(
    r"(?:import_module|__import__)\(\s*[fr]?[\"'](?:torch|torchvision|numpy|scipy|pkg_resources|transformers|timm|"
    r"sklearn|tensorflow|apex|flash_attn|xformers|bitsandbytes|wandb|horovod|deepspeed|accelerate|matplotlib)\b"
)


_OF_LITERALS = re.compile(
    r"\b(?:import_module|__import__|run_module|run_path)\(\s{0,40}[\"'][\w./-]{1,200}[\"']\s{0,40}[,)]"
)
"""Imports of modules whose names the text has: ``run_module("package.train")``."""
_OF_ITS_PACKAGE = re.compile(
    r"import_module\(\s*(?:[\"']\.[\"']\s*\+|f[\"']\.(?=\{))[^\n]{0,100},\s*(?:package\s*=\s*)?(?:__name__|__package__)\s*\)"
)
"""Imports of modules beside a file: ``import_module("." + name, __name__)``."""
_ANYWHERE = "*"
_COMMENT = re.compile(r"^[ \t]*#.*$", re.MULTILINE)


def _imports_by_name(script: Script, modules: ProjectModules) -> bool:
    """Whether a program imports modules whose names no text has, and a script may be one: attributes that are found by
    name are of a module that is imported, and names of other distributions are not of the project."""
    key = ("imports by name",)
    if key not in modules.memo:
        texts = dict(one for word in (*_OF_IMPORTS, "exec(") for one in modules.mentioning(word))
        modules.memo[key] = tuple(filter(None, (_imported_from(shown, text) for shown, text in texts.items())))
    return any(one == _ANYWHERE or PurePath(script.path).is_relative_to(one) for one in modules.memo[key])


def _imported_from(shown: str, text: str) -> str:
    """The folder whose modules a file imports by computed names; empty if it imports none."""
    plain = _OF_LITERALS.sub("", _OF_OTHERS.sub("", _COMMENT.sub("", text)))
    if "def exec(" in plain:  # a function of the file
        plain = plain.replace("exec(", "")
    if _IMPORTS_BY_NAME.search(_OF_ITS_PACKAGE.sub("", plain)):
        return _ANYWHERE
    return str(PurePath(shown).parent) if _OF_ITS_PACKAGE.search(plain) else ""


@per_script
def _finds_by_name(script: Script) -> bool:
    modules = script.modules
    return modules is not None and any(
        _FINDS_BY_NAME.search(text) for word in _WORDS for _, text in modules.mentioning(word)
    )


_READS_TARGET = re.compile(r"[\"'](?:_?target_?|class_path)[\"']")
_IMPORTS_TARGET = re.compile(r"import_module|getattr\((?:mod|module|lib|package),")
_TARGET = re.compile(
    r"^[ \t-]*[\"']?(?:_?target_?|class_path)[\"']?[ \t]*:[ \t]*"
    r"[\"']?(?P<module>\w+(?:\.\w+)*)\.\w+[\"']?[ \t,]*(?:#.*)?$",
    re.MULTILINE,
)
"""A class in a configuration: ``target: models.autoencoder.AutoencoderKL``."""


def _finds_by_configuration(modules: ProjectModules) -> bool:
    """Whether all that a project finds by name are classes under ``target``, ``_target_`` or ``class_path`` of its
    configurations, which then have the names of their modules."""
    key = ("finds by configuration",)
    if key not in modules.memo:
        finders = {text for word in _WORDS for _, text in modules.mentioning(word) if _FINDS_BY_NAME.search(text)}
        texts = [(shown, text) for word in ("target", "class_path") for shown, text in modules.mentioning(word)]
        named = [one["module"] for shown, text in texts if not shown.endswith(".py") for one in _TARGET.finditer(text)]
        modules.memo[key] = any(modules.named("", one) for one in named) and all(
            _READS_TARGET.search(text) and not _FINDS_BY_NAME.search(_IMPORTS_TARGET.sub("", text)) for text in finders
        )
    found: bool = modules.memo[key]
    return found


def is_used_nowhere(script: Script, owner: ast.ClassDef) -> bool:
    """Whether nothing in a project of several files uses a class, besides restoring it from a checkpoint: no text makes
    one, derives a class that is used from it, passes it on or exports it from a package, and what the project finds by
    name are classes that its configurations name."""
    modules = script.modules
    if modules is None or modules.is_one_file or owner.decorator_list:
        return False
    return _is_left_alone(script, owner.name, _HEIRS if _has_programs(script) else 0)


_HEIRS = 3
"""Classes in a row that derive from each other."""


def _is_left_alone(script: Script, name: str, depth: int) -> bool:
    modules = script.modules
    word = rf"\b{re.escape(name)}\b"
    harmless = re.compile(
        rf"\bclass {re.escape(name)}\b|super\(\s*{word}|{word}\.(?:load_from_checkpoint|__name__)|"
        rf"->\s*['\"]?{word}|:\s*['\"]?{word}['\"]?\s*[,)=]|isinstance\([^()]*{word}\)|['\"]{word}['\"]"
    )
    named, derived = re.compile(word), re.compile(rf"^[ \t]*class (\w+)\([^)]*{word}")
    texts = [(shown, text) for shown, text in modules.mentioning(name) if shown != script.path] if modules else []
    if modules is None or (script.location and any(named.search(text) for text in modules.pages(script.location))):
        return False
    is_restored = any(f"{name}.load_from_checkpoint" in text for _, text in texts)
    for shown, text in ((script.path, script.text), *texts):
        is_package = shown.endswith("__init__.py") and not is_restored
        for line in text.splitlines():
            if name not in line or (not is_package and re.match(r"\s*(?:from|import)\b", line)):
                continue
            plain = harmless.sub("", line.partition("#")[0]) if shown.endswith(".py") else line
            heir = derived.match(plain)
            if named.search(plain) and not (heir and depth and _is_left_alone(script, heir[1], depth - 1)):
                return False
    return is_restored or not _finds_by_name(script) or _finds_by_configuration(modules)


_MAKES_TRAINER = re.compile(
    r"\bTrainer(?:\.from_argparse_args)?\(|LightningCLI|\bimport\b[^\n#]{0,200}\b(?:Trainer|LightningCLI)\b|"
    r"(?P<own>\b(?:pl|L|lightning|pytorch_lightning)[\w.]{0,60}\.(?:Trainer|Fabric|LightningLite|LightningCLI)\b)|\.fit\("
)


def is_set_aside(script: Script, package: str) -> bool:
    """Whether the requirements of a project lack a package that a script needs, and its pages start other programs,
    while nothing names the script: one that came with a copied library."""
    modules, stem = script.modules, PurePath(script.path).stem
    if modules is None or not script.location or modules.may_install(script.location, package):
        return False
    pages = (*modules.pages(script.location), *modules.pages_at_root(script.location))
    named = (*pages, *(text for shown, text in modules.mentioning(stem) if shown != script.path))
    return any(map(STARTS_PROGRAM.search, pages)) and not any(
        stem in text for text in (*named, *modules.notebooks(stem))
    )


@per_script
def has_no_trainer(script: Script) -> bool:
    """Whether no text of a whole project of several files makes a Trainer, whose loops alone call the hooks of a
    LightningModule: it serves as a plain module, whose weights are loaded."""
    modules = script.modules
    if modules is None or modules.is_one_file or not script.location or not modules.is_whole(script.location):
        return False
    if modules.installs(script.location) or not _has_programs(script):
        return False
    texts = [text for word in ("Trainer", "LightningCLI", ".fit(") for _, text in modules.mentioning(word)]
    texts += [*modules.notebooks("Trainer"), *modules.pages(script.location)]
    return not any(map(_makes_lightning_trainer, (script.text, *texts)))


def _makes_lightning_trainer(text: str) -> bool:
    """Whether a text may make a Trainer of Lightning, or run one: that of another library does not name Lightning."""
    return any(one["own"] or "lightning" in text.lower() for one in _MAKES_TRAINER.finditer(text))


def calls_nowhere(script: Script, method: str) -> bool:
    """Whether no text of a project of several files calls a method of that name, or starts a command line that may."""
    modules = script.modules
    if modules is None or modules.is_one_file or _finds_by_name(script):
        return False
    return not any(f".{method}(" in text for _, text in modules.mentioning(f".{method}("))
