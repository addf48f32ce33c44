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
    """A Trainer argument or strategy name.

    ``since`` is ``None`` if 1.5.0 had it; ``removed``: the first release without it, ``None`` if it exists;
    ``replacement``: what to write instead.
    """

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


class _Trainer(msgspec.Struct, frozen=True):
    arguments: dict[str, ArgumentInfo]
    strategies: dict[str, ArgumentInfo]
    hooks: dict[str, ArgumentInfo]
    methods: dict[str, ArgumentInfo]
    imports: dict[str, ArgumentInfo]


@cache
def _trainer() -> _Trainer:
    return read("lightning.json", _Trainer)


def argument(name: str) -> ArgumentInfo | None:
    """Return the Trainer argument ``name``; ``None`` for one that no release from 1.5.0 on had."""
    return _trainer().arguments.get(name)


def strategy(name: str) -> ArgumentInfo | None:
    """Return the strategy ``name`` if it was removed or renamed; ``None`` for all others, because plugins register
    their own."""
    return _trainer().strategies.get(name)


def hook(name: str) -> ArgumentInfo | None:
    """Return the method ``name`` of a LightningModule if Lightning no longer calls it."""
    return _trainer().hooks.get(name)


def method(name: str) -> ArgumentInfo | None:
    """Return the method ``name`` of a Trainer if it was removed."""
    return _trainer().methods.get(name)


def imported(name: str) -> ArgumentInfo | None:
    """Return a name below ``lightning.pytorch``, or its module, if it was removed: ``plugins.DDPPlugin``."""
    parts = name.split(".")
    heads = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((_trainer().imports[head] for head in heads if head in _trainer().imports), None)
