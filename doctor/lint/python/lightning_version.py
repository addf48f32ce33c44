"""The Lightning release of a script."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from doctor.knowledge.releases import release
from doctor.lint.engine.releases import LIMITS_OF_LIGHTNING
from doctor.lint.python.script import Script, per_script

_DISTRIBUTIONS = {"pytorch_lightning": ("pytorch-lightning", "lightning"), "lightning": ("lightning",)}
"""The distributions that provide an imported package, or are released with it."""
_LIMITED_BY = {"ray_lightning": "ray-lightning", "pl_bolts": "lightning-bolts"}
"""Packages whose distributions limit Lightning."""
_STATED = re.compile(
    r"(?<![\w/.])(?:pytorch[ _-]?)?lightning[`'\"* ]{0,3}(?:[,(]? ?(?:version|release|ver\b\.?)[ :]{0,3})?"
    r"(?P<sign><=|<|={1,2}|~=)?[ ]{0,3}v?(?P<release>\d+\.\d+(?:\.\d+)*)",
    re.IGNORECASE,
)
"""``pytorch lightning version < 2.0.0``, ``pytorch-lightning==1.9.5`` or ``Lightning 1.9``."""
_IS_FOR = re.compile(r"\b(?:for|with|requires?|required|needs?|uses?|using|tested|written|works?|install\w*)\b", re.I)
_IS_OF_A_CHANGE = re.compile(
    r"remov|deprecat|\bsince\b|\bnew(?:er)?\b|\blater\b|\babove\b|upgrad|migrat|renam|chang|no longer|\bbug|"
    r"compatib|support|[>+]",
    re.IGNORECASE,
)
"""Words of sentences about what a release did."""


@per_script
def lightning_release(script: Script) -> str | None:
    """The release of the Lightning that the script imports, an older one if its comments say that it is for that;
    ``None`` if unknown. Other packages that it imports may limit it."""
    packages = _packages(script)
    known = _known_release(script, packages)
    limits = [LIMITS_OF_LIGHTNING[_LIMITED_BY[one]] for one in packages if one in _LIMITED_BY]
    stated = list(_stated_releases(script)) if "ightning" in script.text else []
    return min((one for one in (known, *limits, *stated) if one), key=release, default=None)


def _packages(script: Script) -> list[str]:
    packages = [one.name.partition(".")[0] for node in script.all(ast.Import) for one in node.names]
    origins = (node.module for node in script.all(ast.ImportFrom) if node.module and not node.level)
    return packages + [origin.partition(".")[0] for origin in origins]


def _known_release(script: Script, packages: list[str]) -> str | None:
    for package in packages:
        for distribution in _DISTRIBUTIONS.get(package, ()):
            if found := script.releases.get(distribution):
                return found
    return None


def _stated_releases(script: Script) -> Iterator[str]:
    """The releases that the comments and the docstring of a module say it is for."""
    docstring = ast.get_docstring(script.tree) or _first_text(script)
    comments = (line.partition("#")[2] for line in script.text.splitlines() if "#" in line and "ightning" in line)
    for line in (*docstring.splitlines(), *comments):
        found = _STATED.search(line)
        if found is None:
            continue
        numbers = list(release(found["release"]))
        if found["sign"] == "<":
            while numbers and numbers[-1] == 0:
                numbers.pop()
            numbers[-1:] = [numbers[-1] - 1] if numbers else []
        elif found["sign"] is None and (_IS_OF_A_CHANGE.search(line) or not _IS_FOR.search(line)):
            continue
        elif found["sign"] == "~=":
            numbers = numbers[:-1]
        yield ".".join(map(str, numbers))


def _first_text(script: Script) -> str:
    """The first text that stands alone in a module, which may follow comments, imports or another text."""
    for statement in script.tree.body[:8]:
        value = statement.value if isinstance(statement, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            return value.value
    return ""
