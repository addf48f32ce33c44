"""Installers for Trainers: each gets the callback that its program could have passed to it.

The callback is added when a Trainer has been constructed (Lightning) or starts (Hugging Face), unless the program has
passed one itself. Nothing of the doctor is imported before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from doctor.core.random_state import random_state_kept
from doctor.monitor.autostart.hook.sitecustomize import is_disabled, tell

ENTRIES = ("train", "evaluate", "predict")
"""Methods of Hugging Face's Trainer that start it (transformers/trainer.py)."""


def watch_lightning(module: Any) -> None:
    """Have every ``Trainer`` of the module ``lightning.pytorch.trainer.trainer`` constructed with a callback."""
    kind = module.Trainer
    construct = kind.__init__

    @functools.wraps(construct)
    def constructed(self: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        _harmless(_add_to_lightning, self)

    kind.__init__ = constructed


def watch_transformers(module: Any) -> None:
    """Have every ``Trainer`` of the module ``transformers.trainer`` started with a callback."""
    for name in ENTRIES:
        setattr(module.Trainer, name, _with_callback(getattr(module.Trainer, name)))


def _with_callback(start: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(start)
    def started(self: Any, *args: Any, **kwargs: Any) -> Any:
        _harmless(_add_to_transformers, self)
        return start(self, *args, **kwargs)

    return started


def _harmless(add: Callable[[Any], None], trainer: Any) -> None:
    if is_disabled():
        return
    try:
        add(trainer)
    except Exception as error:  # noqa: BLE001 - the program must not be affected
        tell(f"{type(error).__name__}: {error}")


def _add_to_lightning(trainer: Any) -> None:
    """Insert it before the checkpoint callbacks, which Lightning keeps at the end of its list."""
    with random_state_kept():
        from doctor.monitor.integrations.lightning.callback import DoctorCallback, LightningHooks

        if any(isinstance(one, LightningHooks) for one in trainer.callbacks):
            return
        added = _made(DoctorCallback)
    last = list(trainer.checkpoint_callbacks)
    trainer.callbacks[:] = [*(one for one in trainer.callbacks if one not in last), added, *last]


def _add_to_transformers(trainer: Any) -> None:
    """Add it, or remove it again where the program has added its own since."""
    with random_state_kept():
        from doctor.monitor.integrations.transformers.hf_callback import HFDoctorCallback, TransformersHooks

        callbacks = trainer.callback_handler.callbacks
        present = [one for one in callbacks if isinstance(one, TransformersHooks)]
        if not present:
            trainer.callback_handler.add_callback(_made(HFDoctorCallback))
    if not all(one.unasked for one in present):
        callbacks[:] = [one for one in callbacks if one not in present or not one.unasked]


def _made(kind: Callable[..., Any]) -> Any:
    from doctor.monitor.autostart.options import decode_options

    added = kind(**decode_options())
    added.unasked = True
    return added
