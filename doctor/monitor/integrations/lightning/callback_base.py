"""Binds a callback to the ``Callback`` of every Lightning package that is loaded.

A Lightning that the program does not use is never imported. ``lightning`` requires ``pytorch-lightning``, so both are
usually installed, and the second one to be imported takes over the logger of their common rank-zero messages
(lightning_utilities/core/rank_zero.py), makes the filters of the first one ineffective, and costs a second.

Also hooks that a Trainer does not call for the callback, because nothing is done in them.
For each callback and hook, implemented or not, a Trainer enters a context of its profiler, which takes 13 calls of
Python functions: most of what a callback costs in a short step. It skips a callback whose attribute is not callable
(lightning/pytorch/trainer/call.py, ``_call_callback_hooks``). Programs also call the hooks of all callbacks themselves,
and not all of them look whether they can, so only the lookup by the Trainer finds nothing.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from sys import _getframe
from types import CodeType
from typing import Any

from doctor.monitor.integrations.lightning.trainer_facts import package_of

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


CALL_MODULES = {
    "lightning": "lightning.pytorch.trainer.call",
    "pytorch_lightning": "pytorch_lightning.trainer.call",
}
"""The module of each Lightning that calls the hooks of callbacks."""


class UnneededHook:
    """A hook that the Trainer skips while ``_unneeded`` of the callback names it, with the code that looks it up."""

    def __init__(self, hook: Callable[..., None]) -> None:
        self._hook = hook
        self._name = hook.__name__
        self.__doc__ = hook.__doc__

    def __get__(self, callback: Any, owner: type | None = None) -> Any:
        """Return the hook, bound to ``callback``; ``None`` to a Trainer that need not call it. (step path)"""
        if callback is not None and _getframe(1).f_code is callback._unneeded.get(self._name):
            return None
        return self._hook.__get__(callback, owner)


def hook_caller(trainer: Any) -> CodeType | None:
    """Return the code with which a Trainer calls hooks; ``None`` unless it skips what is not callable."""
    module = sys.modules.get(CALL_MODULES.get(package_of(trainer) or "", ""))
    code: CodeType | None = getattr(getattr(module, "_call_callback_hooks", None), "__code__", None)
    return code if code is not None and "callable" in code.co_names else None
