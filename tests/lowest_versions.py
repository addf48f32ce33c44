"""Print the lowest releases that pyproject.toml permits of each dependency, as constraints of pip."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"


def lowest(requirement: str) -> str:
    """The requirement with its lower bound as the only release.

    Raises:
        ValueError: it has no lower bound.
    """
    parsed = Requirement(requirement)
    bounds = [one.version for one in parsed.specifier if one.operator == ">="]
    if len(bounds) != 1:
        raise ValueError(f"{requirement}: one lower bound (>=) is needed")
    parsed.specifier = SpecifierSet(f"=={bounds[0]}")
    return str(parsed)


def dependencies() -> list[str]:
    """What the package itself needs, without its extras."""
    declared: list[str] = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]["dependencies"]
    return declared


def lines(requirements: Iterable[str]) -> str:
    """One constraint a line."""
    return "".join(f"{lowest(one)}\n" for one in requirements)


if __name__ == "__main__":
    sys.stdout.write(lines(dependencies()))
