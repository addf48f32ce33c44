"""Reads what is installed in a virtual environment inside a project. Nothing in it is run."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path

from doctor.lint.engine.project_requirements import folders_of

_ENVIRONMENTS = (".venv", "venv", ".env", "env")
"""Usual names of the folder of a virtual environment."""
_METADATA = re.compile(r"(?P<name>[\w.]+)-(?P<release>\d[\w.]*)\.dist-info")
"""The folder of a distribution's metadata, whose name holds its release."""


def installed_in_project(path: Path, root: Path, name: str) -> str | None:
    """The release of a distribution (in lowercase with hyphens) in an environment beside a file, or in a folder above
    it in its repository or in ``root``; ``None`` without one."""
    found = (_installed_below(folder).get(name) for folder in folders_of(path.parent, root))
    return next((one for one in found if one is not None), None)


@lru_cache(maxsize=256)
def _installed_below(folder: Path) -> dict[str, str]:
    installed: dict[str, str] = {}
    for name in _ENVIRONMENTS:
        if not (folder / name / "pyvenv.cfg").is_file():
            continue
        for one in (folder / name).glob("lib/python3*/site-packages/*.dist-info"):
            if known := _METADATA.fullmatch(one.name):
                installed.setdefault(known["name"].lower().replace("_", "-"), known["release"])
    return installed
