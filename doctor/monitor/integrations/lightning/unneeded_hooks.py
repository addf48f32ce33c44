"""Hooks that a Trainer does not call for this callback, because nothing is done in them.

For each callback and hook, implemented or not, a Trainer enters a context of its profiler, which takes 13 calls of
Python functions: most of what a callback costs in a short step. It skips a callback whose attribute is not callable
(lightning/pytorch/trainer/call.py, ``_call_callback_hooks``). Programs also call the hooks of all callbacks themselves,
and not all of them look whether they can, so only the lookup by the Trainer finds nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from sys import _getframe
from types import CodeType
from typing import Any

from doctor.monitor.integrations.lightning.trainer_facts import package_of

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
