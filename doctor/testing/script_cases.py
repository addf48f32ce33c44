"""Cases of rules over files; texts of Python scripts leave out the usual imports."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from doctor.lint.engine.rule import MARK, FileCase, FileFails, FilePasses
from doctor.testing import lines

_IMPORTS = {
    "os": "import os",
    "time": "import time",
    "np": "import numpy as np",
    "torch": "import torch",
    "dist": "import torch.distributed as dist",
    "mp": "import torch.multiprocessing as mp",
    "L": "import lightning as L",
    "Accelerator": "from accelerate import Accelerator",
    "FSDP": "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP",
    "DDP": "from torch.nn.parallel import DistributedDataParallel as DDP",
    "DataLoader": "from torch.utils.data import DataLoader",
    "DistributedSampler": "from torch.utils.data import DistributedSampler",
}


def fails(title: str, text: str, fixed: str | Mapping[str, str] = "", **options: Any) -> FileFails:
    """A failing case of a script, with the imports of the usual names (``torch``, ``dist``, ``DDP``) that it lacks."""
    return FileFails(title, with_imports(text), with_imports(fixed) if isinstance(fixed, str) else fixed, **options)


def passes(title: str, text: str, **options: Any) -> FilePasses:
    """A passing case of a script, likewise; marks of a failing case that it was made from are left out."""
    return FilePasses(title, with_imports(text.replace(f"  {MARK}", "")), **options)


def shell_fails(title: str, *text: str, beside: Mapping[str, str] | None = None, **options: Any) -> FileFails:
    """A failing case of a batch script of these lines; ``beside``: other files of its project."""
    return FileFails(title, lines(*text), name="job.sbatch", beside=tuple((beside or {}).items()), **options)


def shell_passes(title: str, *text: str, beside: Mapping[str, str] | None = None, **options: Any) -> FilePasses:
    """A passing case of a batch script, likewise."""
    return FilePasses(title, lines(*text), name="job.sbatch", beside=tuple((beside or {}).items()), **options)


def file_case(title: str, text: str, name: str) -> FileCase:
    """A failing case of a file if a line of it is marked, else a passing one."""
    return (FileFails if MARK in text else FilePasses)(title, text, name=name)


def with_imports(text: str) -> str:
    """The text below an import of each usual name that it uses and does not import itself."""
    nodes = list(ast.walk(ast.parse(text)))
    used = {node.id for node in nodes if isinstance(node, ast.Name)}
    imports = [node for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom))]
    bound = {alias.asname or alias.name.partition(".")[0] for node in imports for alias in node.names}
    return "".join(f"{line}\n" for name, line in _IMPORTS.items() if name in used - bound) + text
