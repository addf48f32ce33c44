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
MOST_STEPS = 60
"""Definitions that are looked at for one place."""
_PLAIN_BASES = frozenset({"object", "Module", "ABC", "Enum", "Dataset", "IterableDataset", "Protocol"})
_CALLED_BY_TORCH = frozenset({"forward", "backward", "extra_repr", "run", "step", "state_dict", "load_state_dict"})
"""Methods that the plain bases call, or that are called through an optimizer or a runner of another library."""
_INERT = frozenset(
    {
        *("staticmethod", "classmethod", "property", "cached_property", "abstractmethod", "no_grad", "inference_mode"),
        *("enable_grad", "contextmanager", "lru_cache", "cache", "compile", "dataclass", "wraps", "override", "final"),
        *("rank_zero_only", "record", "autocast", "custom_fwd", "custom_bwd", "once_differentiable", "setter"),
    }
)
"""Decorators that do not call or register what they decorate."""
_BY_NAME = re.compile(
    r"\bglobals\(\)|\blocals\(\)\s*[\[.]|\bvars\(|__dict__|getmembers|(?<![.\w])eval\(|\bexec\(|fire\.Fire|"
    r"\bimport_module|__import__|entry_points|LightningCLI|"
    r"getattr\((?!(?:self\.)?(?:args|cfg|config|opts?|hparams|params|torch|nn|optim|np|logging|signal|F)\b)"
    r"[^,\n]{1,80},\s*(?![\"']\w+[\"']\s*[,)])"
)
"""Code that may use a function or method whose name is computed."""
_PLACE = re.compile(r"^[\w.]*[.:]")


class Use(NamedTuple):
    """A use of a name: ``kind`` (``name``, ``attribute``, ``import``, ``text``), the definitions around it, and the
    name of what an attribute belongs to, the module of an import, or what stands before it in a text."""

    kind: str
    around: tuple[Definition, ...]
    of: str


class ModuleNames:
    """The definitions of a module, with those around each, and the uses of all names in it."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.around: dict[Definition, tuple[Definition, ...]] = {}
        self.uses: dict[str, list[Use]] = defaultdict(list)
        self.imported: dict[str, str] = {}
        self.stars: list[str] = []
        stack: list[tuple[ast.AST, tuple[Definition, ...]]] = [(parsed(text), ())]
        while stack:
            node, around = stack.pop()
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                self.around[node] = around
                stack += [(one, around) for one in node.decorator_list]
                around = (*around, node)
            else:
                self._read(node, around)
            stack += [
                (one, around) for one in ast.iter_child_nodes(node) if one not in getattr(node, "decorator_list", ())
            ]

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
            module = node.module or ""
            for one in node.names:
                if one.name == "*":
                    self.stars.append(module)
                else:
                    self.uses[one.name].append(Use("import", around, module))
                    self.imported[one.asname or one.name] = f"{module}.{one.name}"
        elif isinstance(node, ast.Import):
            for one in node.names:
                self.imported[one.asname or one.name.rpartition(".")[2]] = one.name


class CallGraph:
    """What reaches the definitions of the project of a script, as far as its texts show."""

    def __init__(self, modules: ProjectModules, location: str) -> None:
        self._modules = modules
        self._location = location
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
        if any(last_name(one) not in _INERT for one in definition.decorator_list):
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
        return not use.around or self.is_reached(path, use.around[-1], steps)

    def _is_global_reached(self, path: str, definition: Definition, steps: tuple[Definition, ...]) -> bool:
        """Whether a function or class of a module is used in a place that is reached."""
        own, name, stem = self.names(path), definition.name, PurePath(path).stem
        if own is None or _BY_NAME.search(own.text) or self._is_named_outside(name, stem):
            return True
        uses = (one for one in own.uses[name] if definition not in one.around)
        if any(one.kind in ("name", "text") and _is_of_file(one) and self._runs(path, one, steps) for one in uses):
            return True
        places = {stem, *PurePath(path).parts[:-1]}
        others = [shown for shown, text in self._modules.mentioning(name) if shown != path and shown.endswith(".py")]
        others = [shown for shown in others if re.search(rf"\b{re.escape(name)}\b", self._modules.text_at(shown))]
        if stem == "__init__" or len(others) > MOST_READ * 4:
            return True
        others = [shown for shown in others if self._may_import(shown, places)]
        if len(others) > MOST_READ:
            return True
        return any(self._uses_of_other(shown, name, places, steps) for shown in others)

    def _may_import(self, shown: str, places: set[str]) -> bool:
        """Whether a file imports from a module or a package of one of these names, or looks names up."""
        text = self._modules.text_at(shown)
        words = "|".join(map(re.escape, filter(None, places)))
        return re.search(rf"^\s*(?:from|import)\b[^\n]*\b(?:{words})\b|^\s*from\s+\.+\s+import", text, re.M) is not None

    def _uses_of_other(self, shown: str, name: str, places: set[str], steps: tuple[Definition, ...]) -> bool:
        module = self.names(shown)
        if module is None:
            return True
        has_star = any(not one or one.rpartition(".")[2] in places for one in module.stars)
        for one in module.uses[name]:
            is_use = (
                (one.kind == "import" and (not one.of or one.of.rpartition(".")[2] in places))
                or (one.kind == "attribute" and one.of in module.imported)
                or (one.kind == "name" and has_star)
                or (one.kind == "text" and (one.of != "" or _BY_NAME.search(module.text) is not None))
            )
            if is_use and (one.kind == "import" or self._runs(shown, one, steps)):
                return self._modules.can_run(shown)
        return False

    def _is_method_reached(
        self, path: str, method: FunctionNode, owner: ast.ClassDef, steps: tuple[Definition, ...]
    ) -> bool:
        """Whether a method of a class that is reached is called, or a base may call it."""
        name, own = method.name, self.names(path)
        is_special = name.startswith("__") and name.endswith("__")
        if is_special or name in _CALLED_BY_TORCH or own is None or not self._are_bases_known(path, owner, 4):
            return True
        if _BY_NAME.search(own.text) or self._is_named_outside(name, ""):
            return True
        files = [shown for shown, _ in self._modules.mentioning(name) if shown.endswith(".py") and shown != path]
        spelled = re.compile(rf"\.\s*{re.escape(name)}\b|[\"']{re.escape(name)}[\"']")
        files = [one for one in files if spelled.search(self._modules.text_at(one))]
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

    def _are_bases_known(self, path: str, owner: ast.ClassDef, depth: int) -> bool:
        """Whether all bases of a class are of the project, or call no method that they do not name."""
        if not depth or any(last_name(one.value) != "ABCMeta" for one in owner.keywords):
            return False
        module = self.names(path)
        for base in owner.bases:
            name = last_name(base)
            if name in _PLAIN_BASES:
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
        called = rf"{used}|(?<![.\w]){word}\(" if stem else used
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
