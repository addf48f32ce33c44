"""Binds a callback to the ``Callback`` of every Lightning package that is loaded.

A Lightning that the program does not use is never imported. ``lightning`` requires ``pytorch-lightning``, so both are
usually installed, and the second one to be imported takes over the logger of their common rank-zero messages
(lightning_utilities/core/rank_zero.py), makes the filters of the first one ineffective, and costs a second.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys

LIGHTNINGS = {"lightning.pytorch": "lightning", "pytorch_lightning": "pytorch_lightning"}
"""Modules with a Callback, and their packages; the preferred one first."""

MISSING = "DoctorCallback needs Lightning: pip install lightning"


def bind_callback_base(kind: type) -> bool:
    """Add every loaded Lightning's Callback to the bases of ``kind``; return whether it has one.

    Its instances, its subclasses and their instances become Callbacks with it. ``kind`` is left unchanged if a subclass
    would get inconsistent bases.
    """
    bound = False
    for name in LIGHTNINGS:
        callback = getattr(sys.modules.get(name), "Callback", None)  # absent while Lightning itself is being imported
        if not isinstance(callback, type):
            continue
        if not issubclass(kind, callback):
            with contextlib.suppress(TypeError):
                kind.__bases__ = (*kind.__bases__, callback)
        bound = bound or issubclass(kind, callback)
    return bound


def installed() -> list[str]:
    """Return the modules of :data:`LIGHTNINGS` whose package is installed."""
    return [module for module, package in LIGHTNINGS.items() if importlib.util.find_spec(package) is not None]


def import_one() -> None:
    """Import the preferred Lightning if the program has imported none.

    Raises:
        ImportError: none can be imported.
    """
    errors = []
    for module in installed():
        try:
            importlib.import_module(module)
            return
        except ImportError as error:
            errors.append(f"{module}: {error}")
    raise ImportError(f"{MISSING} ({'; '.join(errors)})" if errors else MISSING)
