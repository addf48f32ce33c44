"""The Lightning release of a script."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import PurePath
from typing import NamedTuple

from doctor.knowledge.releases import end_of_line, release
from doctor.lint.engine.project_requirements import bounds
from doctor.lint.engine.releases import LIMITS_OF_LIGHTNING, NEWEST_LIGHTNING, Releases
from doctor.lint.python.project.unreached import may_import
from doctor.lint.python.script import ProjectModules, Script, per_script

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


_LISTED = re.compile(
    r"[\s>*+|`-]*pytorch[ _-]?lightning[`* ]*(?:(?:\||[:=(]{1,2})[` ]*)?v?(?P<release>\d+\.\d+(?:\.\d+)*)[\s|`)]*",
    re.IGNORECASE,
)
"""An entry of a list or a row of a table: ``- PyTorch Lightning 1.5.10`` or ``| pytorch-lightning | 1.5.10 |``."""
_PINNED = re.compile(r"(?<![\w/.-])(?:pytorch[_-])?lightning[ \t]*(?:={1,2}|<=?|~=)[ \t]*\d[\w.,<>=! ]*", re.IGNORECASE)
"""A requirement in a program or a launch file."""
_INSTALLED_HERE = re.compile(r"\binstall\b[^\n]*(?<![\w/.-])(?:pytorch[_-])?lightning(?![\w/.-])")
"""A command in a notebook, or in a comment, that installs Lightning."""
_NEEDS_2 = re.compile(
    r"\b(?P<argument>use_distributed_sampler|barebones)\s*=(?!=)|"
    r"[\"'](?P<value>(?:bf)?16-(?:mixed|true)|32-true|ddp_find_unused_parameters_true)[\"']"
)
"""Arguments and values that Lightning 2.0 added: the wheel of 1.9.5 has none of these words."""
_SERVES_BOTH = re.compile(r"__version__|\bversion\(|_GREATER|\bVersion\(")


class KnownLightning(NamedTuple):
    """The release of Lightning that a script gets. ``number``: ``None`` if unknown; ``is_open``: nothing in the project
    states it, so that it is only that of the interpreter that runs lint; ``proof``: the code by which the project needs
    2.0 or newer, if nothing states a release."""

    number: str | None
    is_open: bool = False
    proof: str = ""


@per_script
def known_lightning(script: Script) -> KnownLightning:
    """The release of the Lightning that the script imports, an older one if its comments say that it is for that, or
    if other packages that it imports limit it. Sentences of the project's pages count if no requirement has a bound."""
    packages = _packages(script)
    distribution = _distribution(script, packages)
    known = script.releases[distribution] if distribution else None
    limits = [LIMITS_OF_LIGHTNING[_LIMITED_BY[one]] for one in packages if one in _LIMITED_BY]
    said = [*limits, *(_said_by_file(script) if "ightning" in script.text else ())]
    releases = script.releases if isinstance(script.releases, Releases) else None
    if releases is not None and not said and not releases.is_bounded(distribution):
        said = [*_said_by_pages(releases), *_said_elsewhere(script, releases)]
    number = min((one for one in (known, *said) if one), key=end_of_line, default=None)
    if said or releases is None or releases.is_bounded(distribution):
        return KnownLightning(number)
    if releases.is_certain(distribution):
        return KnownLightning(number and ".".join(number.split(".")[:2]))  # permitted, and not what is installed here
    if _INSTALLED_HERE.search(script.text):
        return KnownLightning(number or NEWEST_LIGHTNING)
    proof = _proof_of_2(script)
    return KnownLightning(NEWEST_LIGHTNING, proof=proof) if proof else KnownLightning(number, releases.is_of_folder)


def _proof_of_2(script: Script) -> str:
    """Code of the file, of a file that imports it, or of one that it imports, which needs Lightning 2.0; empty if there
    is none, or if the code asks for the release."""
    texts = [script.text]
    if script.modules is not None and script.location:
        texts += script.modules.texts_around(script.location)
        place = PurePath(script.location)
        texts += [text for _, text in script.modules.mentioning(place.stem) if may_import(place, text)]
    texts = [one for one in texts if "ightning" in one]
    if any(map(_SERVES_BOTH.search, texts)):
        return ""
    found = next(filter(None, map(_NEEDS_2.search, texts)), None)
    if found is None:
        return ""
    return f"{found['argument']}=" if found["argument"] else f'"{found["value"]}"'


def _packages(script: Script) -> list[str]:
    packages = [one.name.partition(".")[0] for node in script.all(ast.Import) for one in node.names]
    origins = (node.module for node in script.all(ast.ImportFrom) if node.module and not node.level)
    return packages + [origin.partition(".")[0] for origin in origins]


def _distribution(script: Script, packages: list[str]) -> str:
    """The distribution of the Lightning that a script imports, whose release is known; empty if it is unknown."""
    names = (name for package in packages for name in _DISTRIBUTIONS.get(package, ()))
    return next((name for name in names if script.releases.get(name)), "")


def _said_by_file(script: Script) -> Iterator[str]:
    """The releases that the comments and the docstring of a module say it is for."""
    docstring = ast.get_docstring(script.tree) or _first_text(script)
    comments = (line.partition("#")[2] for line in script.text.splitlines() if "#" in line and "ightning" in line)
    return _said_in((*docstring.splitlines(), *comments))


def _said_by_pages(releases: Releases) -> Iterator[str]:
    """The releases that the pages of the project say it is for, or list."""
    for text in releases.pages:
        lines = [line for line in text.splitlines() if "ightning" in line]
        yield from _said_in(lines)
        yield from (listed["release"] for line in lines if (listed := _LISTED.fullmatch(line)))


def _said_elsewhere(script: Script, releases: Releases) -> Iterator[str]:
    """The releases that requirement files of other folders permit, and that programs and launch files install: those in
    a folder around the script, or in one without programs for Lightning, which is then for the whole project."""
    pinned, programs = _texts_for_lightning(script.modules) if script.modules is not None else ({}, [])
    stated = [(file.parent, bound) for file, found in pinned.items() for bound in found]
    for folder, bound in (*releases.elsewhere("pytorch-lightning"), *stated):
        is_around = folder in PurePath(script.path).parents
        if is_around or not any(folder in one.parents for one in programs if one not in pinned):
            yield bound


def _texts_for_lightning(modules: ProjectModules) -> tuple[dict[PurePath, list[str]], list[PurePath]]:
    """The programs and launch files of a project that require a release of Lightning, with its newest, and all programs
    that mention Lightning."""
    key = ("texts for Lightning",)
    if key not in modules.memo:
        texts = [(PurePath(shown), text) for shown, text in modules.mentioning("ightning")]
        pins = ((path, [bound for pin in _PINNED.findall(text) for _, bound in bounds(pin)]) for path, text in texts)
        modules.memo[key] = (
            {path: found for path, found in pins if found},
            [path for path, _ in texts if path.suffix == ".py"],
        )
    found: tuple[dict[PurePath, list[str]], list[PurePath]] = modules.memo[key]
    return found


def _said_in(lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
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
