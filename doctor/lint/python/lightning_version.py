"""The Lightning release of a script."""

from __future__ import annotations

import ast

from doctor.lint.python.script import Script

_DISTRIBUTIONS = {"pytorch_lightning": ("pytorch-lightning", "lightning"), "lightning": ("lightning",)}
"""The distributions that provide an imported package, or are released with it."""


def lightning_release(script: Script) -> str | None:
    """The release of the Lightning that the script imports; ``None`` if unknown."""
    packages = [one.name.partition(".")[0] for node in script.all(ast.Import) for one in node.names]
    origins = (node.module for node in script.all(ast.ImportFrom) if node.module and not node.level)
    packages += [origin.partition(".")[0] for origin in origins]
    for package in packages:
        for distribution in _DISTRIBUTIONS.get(package, ()):
            if found := script.releases.get(distribution):
                return found
    return None
