"""The Lightning release of a script."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from doctor.lint.python.script import Script

_DISTRIBUTIONS = {"pytorch_lightning": ("pytorch-lightning", "lightning"), "lightning": ("lightning",)}
"""The distributions that provide an imported package, or are released with it."""


def lightning_release(script: Script) -> str | None:
    """The release of the Lightning that the script imports; ``None`` if unknown."""
    for package in _imported(script):
        for distribution in _DISTRIBUTIONS.get(package, ()):
            if found := script.releases.get(distribution):
                return found
    return None


def _imported(script: Script) -> Iterator[str]:
    for node in script.all(ast.Import):
        yield from (one.name.partition(".")[0] for one in node.names)
    for origin in script.all(ast.ImportFrom):
        if origin.module and not origin.level:
            yield origin.module.partition(".")[0]
