"""Arguments and strategy names of the Trainer of Lightning by release, and hooks, methods and imports that were
removed.

Source: the signature of ``Trainer.__init__`` (src/lightning/pytorch/trainer/trainer.py) at every tag from 1.5.0 on, the
upgrade guide (docs/source-pytorch/upgrade), and the modules of the wheels of 1.9.5, 2.0.0 and 2.6.6.
"""

from __future__ import annotations

from functools import cache

import msgspec

from doctor.knowledge.data_files import read
from doctor.knowledge.releases import release


class ArgumentInfo(msgspec.Struct, frozen=True):
    """A Trainer argument or strategy name. ``since`` is ``None`` if 1.5.0 had it; ``removed``: the first release
    without it, ``None`` if it exists; ``replacement``: what to write instead."""

    since: str | None = None
    removed: str | None = None
    replacement: str = ""

    def is_taken_by(self, lightning: str) -> bool:
        """Return whether the release ``lightning`` accepts it; true if that is not a version."""
        numbers = release(lightning)
        if not numbers:
            return True
        if self.removed is not None and numbers >= release(self.removed):
            return False
        return self.since is None or numbers >= release(self.since)


@cache
def _table() -> dict[str, dict[str, ArgumentInfo]]:
    return read("lightning.json", dict[str, dict[str, ArgumentInfo]])


def argument(name: str) -> ArgumentInfo | None:
    """Return the Trainer argument ``name``; ``None`` for one that no release from 1.5.0 on had."""
    return _table()["arguments"].get(name)


def strategy(name: str) -> ArgumentInfo | None:
    """Return the strategy ``name`` if it was removed or renamed; ``None`` for all others, because plugins register
    their own."""
    return _table()["strategies"].get(name)


def hook(name: str) -> ArgumentInfo | None:
    """Return the method ``name`` of a LightningModule if Lightning no longer calls it."""
    return _table()["hooks"].get(name)


def method(name: str) -> ArgumentInfo | None:
    """Return the method ``name`` of a Trainer if it was removed."""
    return _table()["methods"].get(name)


def qualified(replacement: str, module: str) -> str:
    """Return a replacement for something in ``module`` with the name of the package that the program uses:
    ``pytorch_lightning.strategies.DDPStrategy`` for ``strategies.DDPStrategy``."""
    package = "pytorch_lightning" if module.startswith("pytorch_lightning") else "lightning.pytorch"
    is_part = replacement.partition(".")[0] in ("loggers", "plugins", "profilers", "strategies", "utilities")
    return f"{package}.{replacement}" if is_part else replacement


def imported(name: str) -> ArgumentInfo | None:
    """Return a name below ``lightning.pytorch``, or its module, if it was removed: ``plugins.DDPPlugin``."""
    parts, imports = name.split("."), _table()["imports"]
    heads = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((imports[head] for head in heads if head in imports), None)
