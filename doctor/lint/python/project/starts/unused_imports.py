"""Imports of programs by other ones that use nothing of them, and so run no function there."""

from __future__ import annotations

import ast
import re
from pathlib import PurePath

from doctor.lint.python.script import ProjectModules

_USES_BY_NAME = re.compile(
    r"\bglobals\(\)|\blocals\(\)|\bsys\.modules\b|\b__all__\b|(?<![.\w])(?:eval|exec)\((?![\w.]+\)\[)"
)
"""Of a module: ``eval(name)``, unless what it gives is read as a list, as in ``eval(args.image_size)[0]``."""
_HAS_START = re.compile(r"^if __name__ == [\"']__main__[\"']", re.MULTILINE)


def imports_in_vain(modules: ProjectModules, place: PurePath, importer: str) -> bool:
    """Whether a file imports the program at ``place``, which starts under ``if __name__ == "__main__":`` only, as a
    module that it never names again."""
    text = modules.text_at(importer)
    if PurePath(importer).stem == "__init__" or _USES_BY_NAME.search(text):
        return False
    if _HAS_START.search(modules.text_at(str(place))) is None:
        return False
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError, RecursionError):
        return False
    imports = [one for one in nodes if isinstance(one, (ast.Import, ast.ImportFrom)) and _may_mean(one, place.stem)]
    names = [alias.asname or alias.name for one in imports for alias in one.names if alias.name == place.stem]
    is_whole = all(not isinstance(one, ast.ImportFrom) or one.module != place.stem for one in imports)
    used = {one.id for one in nodes if isinstance(one, ast.Name)}
    return bool(names) and len(names) == len(imports) and is_whole and used.isdisjoint(names)


def _may_mean(statement: ast.Import | ast.ImportFrom, stem: str) -> bool:
    """Whether a statement imports a module of that name, or from it."""
    of_module = (statement.module or "").split(".") if isinstance(statement, ast.ImportFrom) else []
    return stem in of_module or any(stem in alias.name.split(".") for alias in statement.names)
