"""Whether the start of any program of a project can reach a function: what names it, and whether that is reached."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import PurePath
from typing import NamedTuple

from doctor.lint.python.script import FunctionNode, ProjectModules, last_name, parsed

Definition = FunctionNode | ast.ClassDef
MOST_READ = 12
"""Files with a name that are parsed; one that more of them have is not followed."""
MOST_NAMING = 400
"""Files with a name that are searched for an import of it."""
MOST_IMPORTS = 4
"""Imports in a row that a name is followed through."""
MOST_STEPS = 60
"""Definitions that are looked at for one place."""
PLAIN_BASES = frozenset({"object", "Module", "ABC", "Enum", "Dataset", "IterableDataset", "Protocol"})
CALLED_BY_TORCH = frozenset({"forward", "backward", "extra_repr", "run", "step", "state_dict", "load_state_dict"})
"""Methods that the plain bases call, or that are called through an optimizer or a runner of another library."""
INERT = frozenset(
    {
        *("staticmethod", "classmethod", "property", "cached_property", "abstractmethod", "no_grad", "inference_mode"),
        *("enable_grad", "contextmanager", "lru_cache", "cache", "compile", "dataclass", "wraps", "override", "final"),
        *("rank_zero_only", "record", "autocast", "custom_fwd", "custom_bwd", "once_differentiable", "setter"),
    }
)
"""Decorators that do not call or register what they decorate."""
_BY_NAME = re.compile(
    r"\bglobals\(\)|\blocals\(\)\s*[\[.]|\bvars\((?!(?:\w+_)?(?:args|cfg|config|opts?|hparams|params)\))|__dict__|"
    r"getmembers|(?<![.\w])eval\(|\bexec\(|fire\.Fire|"
    r"\bimport_module|__import__|entry_points|LightningCLI|"
    r"getattr\((?!(?:self\.)?(?:args|cfg|config|opts?|hparams|params|torch|nn|optim|np|logging|signal|F)\b)"
    r"[^,\n]{1,80},\s*(?![\"']\w+[\"']\s*[,)])"
)
"""Code that may use a function or method whose name is computed."""
_BY_IMPORT = re.compile(r"import_module|__import__|entry_points|sys\.modules|LightningCLI|fire\.Fire|\beval\(|\bexec\(")
"""Such code that needs no import of the module."""
_LOOKS_UP = ("getattr", "__dict__", "getmembers", "vars(", "eval(", "exec(")
"""Words of the code above that may find a name in another module."""
_REGISTERS = ("__subclasses__", "__init_subclass__", "metaclass=", "LightningCLI", "import_module", "__import__")
"""Words of projects in which a class may be used once its module is imported, or modules have computed names."""
_SELF = re.compile(r"\bself\.__dict__|\b(?:vars\(self\)|getattr\(self,)")
"""What finds members of an object, and no names of a module."""
_TESTS = re.compile(r"(?:^|[/\\])(?:tests?|examples?|demos?|docs?)(?:[/\\]|_)|(?:^|[/\\])test_|_test\.py$")
"""Paths of files that use a package as others do."""
_IMPORTS = re.compile(r"^\s*(?:from|import)\b[^\n]*", re.MULTILINE)
_PLACE = re.compile(r"^[\w.]*[.:]")


class Use(NamedTuple):
    """A use of a name: ``kind`` (``name``, ``attribute``, ``import``, ``text``), the definitions around it, and the
    name of what an attribute belongs to, the module of an import, or what stands before it in a text."""

    kind: str
    around: tuple[Definition, ...]
    of: str


class Exported(NamedTuple):
    """A definition of a module that others may import: the shown path of its file, and its name."""

    path: str
    name: str


class ModuleNames:
    """The definitions of a module, with those around each, and the uses of all names in it."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.around: dict[Definition, tuple[Definition, ...]] = {}
        self.uses: dict[str, list[Use]] = defaultdict(list)
        self.imported: dict[str, str] = {}
        self.stars: list[str] = []
        self.modules: list[str] = []  # that it imports, or all names of
        stack: list[tuple[ast.AST, tuple[Definition, ...]]] = [(parsed(text), ())]
        while stack:
            node, around = stack.pop()
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                self.around[node] = around
                stack += [(one, around) for one in node.decorator_list]
                around = (*around, node)
            else:
                self._read(node, around)
            left = {*getattr(node, "decorator_list", ()), *_never_taken(node)}
            stack += [(one, around) for one in ast.iter_child_nodes(node) if one not in left]

    def _read(self, node: ast.AST, around: tuple[Definition, ...]) -> None:
        if isinstance(node, ast.Name):
            self.uses[node.id].append(Use("name", around, ""))
        elif isinstance(node, ast.Attribute):
            self.uses[node.attr].append(Use("attribute", around, last_name(node.value)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 120:
            place = _PLACE.match(node.value)
            begin = place[0] if place else ""
            self.uses[node.value[len(begin) :]].append(Use("text", around, begin))
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            for one in node.names:
                if one.name == "*":
                    self.stars.append(module)
                    self.modules.append(module)
                else:
                    self.uses[one.name].append(Use("import", around, module))
                    self.imported[one.asname or one.name] = f"{module}.{one.name}"
                    self.modules.append(f"{module}{'' if module.endswith('.') else '.'}{one.name}")
        elif isinstance(node, ast.Import):
            for one in node.names:
                self.imported[one.asname or one.name.rpartition(".")[2]] = one.name
                self.modules.append(one.name)


def _never_taken(node: ast.AST) -> list[ast.AST]:
    """The statements or the value of a branch that no run takes, because its condition is a constant: those in ``if
    False:``."""
    if not isinstance(node, (ast.If, ast.While, ast.IfExp)):
        return []
    holds = _constant(node.test)
    if holds is None or (holds and isinstance(node, ast.While)):
        return []
    left = node.orelse if holds else node.body
    return [*left] if isinstance(left, list) else [left]


def _constant(test: ast.expr) -> bool | None:
    """What a condition is in every run, if it is a constant, or one of its parts decides it."""
    if isinstance(test, ast.Constant):
        return bool(test.value)
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        holds = _constant(test.operand)
        return None if holds is None else not holds
    if isinstance(test, ast.BoolOp):
        decides = isinstance(test.op, ast.Or)
        parts = [_constant(one) for one in test.values]
        return decides if decides in parts else None
    return None


def folders_in_common(first: str, second: str) -> int:
    """The number of folders that two paths have in common."""
    pairs = zip(PurePath(first).parts, PurePath(second).parts, strict=False)
    return next((count for count, (one, other) in enumerate(pairs) if one != other), 0)


class CallGraph:
    """What reaches the definitions of the project of a script, as far as its texts show."""

    def __init__(self, modules: ProjectModules, location: str) -> None:
        self._modules = modules
        self._location = location
        self._is_installed = modules.installs(location)
        self._reached: set[Definition] = set()
        self._count = 0

    def unreached_at(self, path: str, line: int) -> str:
        """The name of the outermost function or class around a line of a file that nothing reaches; empty if all are
        reached, or that is unknown."""
        module = self.names(path)
        holders = [one for one in module.around if one.lineno <= line <= (one.end_lineno or 0)] if module else []
        holders.sort(key=lambda one: one.lineno)
        return next((one.name for one in holders if not self.is_reached(path, one)), "")

    def is_reached(self, path: str, definition: Definition, steps: tuple[Definition, ...] = ()) -> bool:
        """Whether something that may run names a definition of the file that is shown as ``path``, or that is unknown.
        ``steps``: the definitions whose uses led here; what is reached only through itself is not reached."""
        if definition in self._reached:
            return True
        if definition in steps:
            return False
        self._count += 1
        if self._count > MOST_STEPS or self._is_used(path, definition, (*steps, definition)):
            self._reached.add(definition)
            return True
        return False

    def _is_used(self, path: str, definition: Definition, steps: tuple[Definition, ...]) -> bool:
        module = self.names(path)
        if module is None:
            return True
        around = module.around.get(definition, ())
        if around and not self.is_reached(path, around[-1], steps):
            return False
        if any(last_name(one) not in INERT for one in definition.decorator_list):
            return True
        if around and isinstance(around[-1], ast.ClassDef) and not isinstance(definition, ast.ClassDef):
            return self._is_method_reached(path, definition, around[-1], steps)
        if around:  # a function in a function: its block has all uses, unless it is returned, which is one
            inner = (one for one in module.uses[definition.name] if definition not in one.around)
            return any(self._runs(path, one, steps) for one in inner)
        return self._is_global_reached(path, definition, steps)

    def names(self, path: str) -> ModuleNames | None:
        """The names of a file; ``None`` if it cannot be read."""
        key = ("names of a module", path)
        if key not in self._modules.memo:
            text = self._modules.text_at(path)
            try:
                self._modules.memo[key] = ModuleNames(text) if text else None
            except (SyntaxError, ValueError, RecursionError, MemoryError):
                self._modules.memo[key] = None
        found: ModuleNames | None = self._modules.memo[key]
        return found

    def _runs(self, path: str, use: Use, steps: tuple[Definition, ...]) -> bool:
        inner = path.removeprefix(self._modules.root_of(self._location))
        is_test = self._is_installed and _TESTS.search(inner) is not None  # pytest calls what it finds there
        return not use.around or is_test or self.is_reached(path, use.around[-1], steps)

    def _is_global_reached(self, path: str, definition: Definition, steps: tuple[Definition, ...]) -> bool:
        """Whether a function or class of a module is used in a place that is reached."""
        own, name, stem = self.names(path), definition.name, PurePath(path).stem
        if own is None or _BY_NAME.search(_without_self(own.text)) or self._is_named_outside(name, stem):
            return True
        if self._is_installed and self._is_offered(path, definition, own):
            return True
        uses = (one for one in own.uses[name] if definition not in one.around)
        if any(one.kind in ("name", "text") and _is_of_file(one) and self._runs(path, one, steps) for one in uses):
            return True
        places = {stem, *PurePath(path).parts[:-1]}
        others = [shown for shown, text in self._modules.mentioning(name) if shown != path and shown.endswith(".py")]
        others = [shown for shown in others if re.search(rf"\b{re.escape(name)}\b", self._modules.text_at(shown))]
        if stem == "__init__" or len(others) > MOST_NAMING:
            return True
        target = Exported(path, name)
        others = self._importers(others, target, places)
        if len(others) > MOST_READ:
            return True
        return any(self._uses_of_other(shown, target, places, steps) for shown in others)

    def _is_offered(self, path: str, definition: Definition, own: ModuleNames) -> bool:
        """Whether an installed package offers a function or class of a module to others: ``__all__``, an entry point or
        a page names it, or a package around it imports the module or all its names."""
        name = definition.name
        stem, word = PurePath(path).stem, re.escape(name)
        if any(one.kind == "text" and not one.around for one in own.uses[name]):
            return True
        if self._modules.may_install(self._location, f"{stem}:{name}".lower()):
            return True
        kind = "class" if isinstance(definition, ast.ClassDef) else "def"
        defined = re.compile(rf"^{kind} {word}\b", re.MULTILINE)
        is_only = sum(defined.search(text) is not None for _, text in self._modules.mentioning(f"{kind} {name}")) == 1
        named = re.compile(rf"\b{word}\b" if kind == "class" else rf"[`.:]{word}\b|\b{word}\(|import\b.*\b{word}\b")
        pages = (text for text in self._modules.pages(self._location) if is_only or stem in text)
        if any(named.search(text) for text in pages):
            return True
        packages = [shown for shown, _ in self._modules.mentioning(stem) if PurePath(shown).name == "__init__.py"]
        return any(self._gives_module(shown, path) for shown in packages)

    def _gives_module(self, package: str, path: str) -> bool:
        """Whether a package imports a module as such, or all its names."""
        module = self.names(package)
        return module is None or any(path in self._modules.named(package, one) for one in module.modules)

    def _importers(self, files: list[str], target: Exported, places: set[str]) -> list[str]:
        """The files that may import what is defined in ``target``, also from others that import it, whose names are
        added to ``places``."""
        found: list[str] = []
        for _ in range(MOST_IMPORTS):
            more = [shown for shown in files if shown not in found and self._may_import(shown, places)]
            if not more or len(found) > MOST_READ:
                break
            found += more
            for shown in more:
                module = self.names(shown)
                uses = module.uses[target.name] if module is not None else ()
                if any(one.kind == "import" and self._is_import_of(shown, one, target, places) for one in uses):
                    places.add(_module_name(shown))
        return found

    def _may_import(self, shown: str, places: set[str]) -> bool:
        """Whether a file imports from a module or a package of one of these names, or looks names up."""
        key = ("words of imports", shown)
        if key not in self._modules.memo:
            lines = _IMPORTS.findall(self._modules.text_at(shown))
            words = {word for line in lines for word in re.findall(r"\w+", line)}
            is_open = any(re.match(r"\s*from\s+\.+\s+import", line) for line in lines)
            self._modules.memo[key] = None if is_open else frozenset(words)
        found: frozenset[str] | None = self._modules.memo[key]
        return found is None or not found.isdisjoint(places)

    def _uses_of_other(self, shown: str, target: Exported, places: set[str], steps: tuple[Definition, ...]) -> bool:
        module = self.names(shown)
        if module is None:
            return True
        has_star = any(_is_of(one, places) for one in module.stars)
        for one in module.uses[target.name]:
            if one.kind == "import":
                is_import = self._is_import_of(shown, one, target, places)
                is_used = is_import and self._is_import_used(shown, one, target.name, steps)
            else:
                is_use = (
                    (one.kind == "attribute" and (one.of in module.imported or one.of in places))
                    or (one.kind == "name" and has_star)
                    or (one.kind == "text" and (one.of != "" or self._looks_up_in(shown, module, target)))
                )
                is_used = is_use and self._runs(shown, one, steps)
            if is_used:
                return self._modules.can_run(shown)
        return False

    def _looks_up_in(self, shown: str, module: ModuleNames, target: Exported) -> bool:
        """Whether a file may look up a text in the module of ``target``: it has that one, or imports by name."""
        if _BY_NAME.search(module.text) is None:
            return False
        return _BY_IMPORT.search(module.text) is not None or self._holds(shown, target.path)

    def _is_import_of(self, shown: str, use: Use, target: Exported, places: set[str]) -> bool:
        """Whether an import may be of ``target``: one that cannot be followed is, if its module has a name of it."""
        leads = self._leads_to(shown, use.of, target, MOST_IMPORTS)
        return _is_of(use.of, places) if leads is None else leads

    def _leads_to(self, shown: str, module: str, target: Exported, depth: int) -> bool | None:
        """Whether the name of ``target`` in a module, as a file imports it, is what is defined there; ``None`` if that
        is unknown. An absolute import may be of each module of the project that ends with its name."""
        found = self._modules.named(shown, module)
        if target.path in found:
            return True
        if not found or not depth:
            return None
        answers = [self._exports(one, target, depth - 1) for one in found]
        return True if True in answers else None if None in answers else False

    def _exports(self, shown: str, target: Exported, depth: int) -> bool | None:
        """Whether the name of ``target`` in another file is what is defined there; ``None`` if that is unknown."""
        module = self.names(shown)
        if module is None or module.stars or _BY_NAME.search(_without_self(module.text)):
            return None
        if module.imported.get(target.name, target.name).rpartition(".")[2] != target.name:
            return None
        imports = [one for one in module.uses[target.name] if one.kind == "import" and not one.around]
        is_defined = any(one.name == target.name and not around for one, around in module.around.items())
        if imports:
            answers = [self._leads_to(shown, one.of, target, depth) for one in imports]
            return True if True in answers else None if None in answers else False
        return False if is_defined else None

    def _is_import_used(self, shown: str, use: Use, name: str, steps: tuple[Definition, ...]) -> bool:
        """Whether what a file imports is used in a place that is reached, or by others that look names up. Those that
        import it in turn are judged by their own uses. A module that does not use its import may need it all the same,
        to restore objects; a package offers it."""
        module = self.names(shown)
        if module is None or module.imported.get(name) != f"{use.of}.{name}":
            return True
        if _BY_NAME.search(_without_self(module.text)):
            return True
        uses = [one for one in module.uses[name] if one.kind == "name"]
        if any(self._runs(shown, one, steps) for one in uses) or not (uses or PurePath(shown).stem == "__init__"):
            return True
        if self._is_installed and not uses:
            return True
        return self._may_be_looked_up(shown, name)

    def _may_be_looked_up(self, shown: str, name: str) -> bool:
        """Whether a program may find a name of a module without naming it, or a notebook or page names it."""
        registers = any(next(iter(self._modules.mentioning(word)), None) for word in _REGISTERS)
        if registers or self._is_named_outside(name, _module_name(shown)):
            return True
        texts = (one for word in _LOOKS_UP for one in self._modules.mentioning(word))
        return any(_BY_NAME.search(_without_self(text)) and self._holds(user, shown) for user, text in texts)

    def _holds(self, user: str, shown: str) -> bool:
        """Whether a file imports a module as such, or a package around it."""
        module = self.names(user)
        if module is None:
            return True
        imported = (self._modules.named(user, one) for one in (*module.imported.values(), *module.stars))
        packages = (PurePath(one) for found in imported for one in found)
        return any(
            one == PurePath(shown) or (one.stem == "__init__" and PurePath(shown).is_relative_to(one.parent))
            for one in packages
        )

    def _is_method_reached(
        self, path: str, method: FunctionNode, owner: ast.ClassDef, steps: tuple[Definition, ...]
    ) -> bool:
        """Whether a method of a class that is reached is called, or a base may call it."""
        name, own = method.name, self.names(path)
        is_special = name.startswith("__") and name.endswith("__")
        if is_special or name in CALLED_BY_TORCH or own is None or not self._are_bases_known(path, owner, 4):
            return True
        if _BY_NAME.search(own.text) or self._is_named_outside(name, ""):
            return True
        if self._is_installed and not name.startswith("_"):
            return True  # what is offered may be called
        files = [shown for shown, _ in self._modules.mentioning(name) if shown.endswith(".py") and shown != path]
        spelled = re.compile(rf"\.\s*{re.escape(name)}\b|[\"']{re.escape(name)}[\"']")
        files = [one for one in files if spelled.search(self._modules.text_at(one))]
        files = [one for one in files if not self._has_copy(one, path, name)]
        if len(files) > MOST_READ:
            return True
        for shown in (path, *files):
            module = self.names(shown)
            if module is None:
                return True
            for one in module.uses[name]:
                is_use = one.kind in ("attribute", "text") or (shown == path and one.around[-1:] == (owner,))
                if is_use and method not in one.around and self._runs(shown, one, steps):
                    if shown == path or self._modules.can_run(shown):
                        return True
                    break
        return False

    def _has_copy(self, shown: str, path: str, method: str) -> bool:
        """Whether a file is of another copy of the program: a file of the same name and folder as ``path``, with the
        same method, is nearer to it."""
        place, near = PurePath(path), folders_in_common(shown, path)
        others = (PurePath(one) for one, _ in self._modules.mentioning(f"def {method}("))
        return any(
            (one.name, one.parent.name) == (place.name, place.parent.name) and folders_in_common(shown, str(one)) > near
            for one in others
        )

    def _are_bases_known(self, path: str, owner: ast.ClassDef, depth: int) -> bool:
        """Whether all bases of a class are of the project, or call no method that they do not name."""
        if not depth or any(last_name(one.value) != "ABCMeta" for one in owner.keywords):
            return False
        module = self.names(path)
        for base in owner.bases:
            name = last_name(base)
            if name in PLAIN_BASES:
                continue
            found = list(self._classes(path, name, module))
            if not found or not all(self._are_bases_known(shown, one, depth - 1) for shown, one in found):
                return False
        return True

    def _classes(self, path: str, name: str, own: ModuleNames | None) -> Iterator[tuple[str, ast.ClassDef]]:
        """The classes of a name in the file, or else in the project."""
        here = [one for one in own.around if isinstance(one, ast.ClassDef) and one.name == name] if own else []
        if here or not name:
            yield from ((path, one) for one in here)
            return
        files = [shown for shown, _ in self._modules.mentioning(f"class {name}") if shown.endswith(".py")]
        for shown in files[:MOST_READ]:
            module = self.names(shown)
            yield from (
                (shown, one)
                for one in (module.around if module else ())
                if isinstance(one, ast.ClassDef) and one.name == name
            )

    def _is_named_outside(self, name: str, stem: str) -> bool:
        """Whether a launch file, notebook or page may use a function (of the module ``stem``), or a method. What a page
        says of it in words is no use."""
        word = re.escape(name)
        used = rf"\bimport\b[^\n]*\b{word}\b|\b{re.escape(stem)}\s?[.:]\s?{word}\b" if stem else rf"\.{word}\("
        called = rf"{used}|(?<![.\w])(?<!def ){word}\(" if stem else used
        is_value = rf"{called}|[:=]\s*[\"']?[\w.]*\b{word}[\"']?\s*$"
        launches = (text for _, text in self._modules.mentioning(name, launches=True))
        if any(re.search(is_value, text, re.MULTILINE) for text in launches):
            return True
        if any(stem in text and re.search(called, text) for text in self._modules.notebooks(name)):
            return True
        pages = self._modules.pages(self._location)
        return any(name in text and stem in text and re.search(used, text) for text in pages)


def _is_of_file(use: Use) -> bool:
    """Whether a use in the own file is one: texts only with a path to it."""
    return use.kind == "name" or use.of != ""


def _is_of(module: str, places: set[str]) -> bool:
    """Whether the module of an import has one of these names, or is only a package around the file."""
    last = module.rpartition(".")[2]
    return not last or last in places


def _module_name(shown: str) -> str:
    place = PurePath(shown)
    return place.parent.name if place.stem == "__init__" else place.stem


def _without_self(text: str) -> str:
    return _SELF.sub("", text)
