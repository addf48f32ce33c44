"""Plants a recorded tree of /proc, /sys, /etc and /dev.

One line a file (``path = text``, with ``\\n`` and ``\\0`` for line ends and zero bytes), a link (``path -> target``)
or an empty folder (``path/``); the trees are in tests/data/sysfs and named after what they show.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from doctor.collectors.base import Machine

DATA = Path(__file__).parents[1] / "data" / "sysfs"


def plant(name: str, root: Path, environ: Mapping[str, str] | None = None) -> Machine:
    """Write the tree called ``name`` below ``root`` and give the machine that it makes."""
    for line in (DATA / f"{name}.tree").read_text().splitlines():
        if line and not line.startswith("#"):
            _plant_line(line, root)
    return machine_at(root, environ)


def machine_at(root: Path, environ: Mapping[str, str] | None = None) -> Machine:
    """Surroundings whose folders all lie below ``root``; nothing of this machine."""
    for name in ("proc", "sys", "etc", "dev"):
        (root / name).mkdir(parents=True, exist_ok=True)
    return Machine(environ=environ or {}, proc=root / "proc", sys=root / "sys", etc=root / "etc", dev=root / "dev")


def _plant_line(line: str, root: Path) -> None:
    path, arrow, target = line.partition(" -> ")
    if arrow:
        put_parent(root / path).symlink_to(target)
        return
    path, equals, text = line.partition(" = ")
    if equals:
        put_parent(root / path).write_text(text.replace("\\n", "\n").replace("\\0", "\0") + "\n")
    else:
        (root / path).mkdir(parents=True, exist_ok=True)


def put_parent(path: Path) -> Path:
    """``path``, whose folder exists now."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return path
