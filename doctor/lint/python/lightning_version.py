"""The Lightning release of a script, and what it supports."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from doctor.knowledge.lightning_api import argument as trainer_argument
from doctor.knowledge.lightning_api import hook as lightning_hook
from doctor.knowledge.lightning_api import imported as lightning_import
from doctor.knowledge.lightning_api import method as trainer_method
from doctor.knowledge.lightning_api import strategy as trainer_strategy
from doctor.knowledge.releases import is_older
from doctor.lint.python.script import Script

__all__ = [
    "is_older",
    "lightning_hook",
    "lightning_import",
    "lightning_release",
    "trainer_argument",
    "trainer_method",
    "trainer_strategy",
]

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
