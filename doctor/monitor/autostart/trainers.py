"""Installers for Trainers: each gets the callback that its program could have passed to it.

Lightning's gets it when it has been constructed, Hugging Face's while it trains, evaluates or predicts, unless the
program has passed one itself. Nothing of the doctor is imported before.
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
        _value_or_line(_add_to_lightning, self)

    kind.__init__ = constructed


def watch_transformers(module: Any) -> None:
    """Have every ``Trainer`` of the module ``transformers.trainer`` started with a callback."""
    for name in ENTRIES:
        setattr(module.Trainer, name, _with_callback(getattr(module.Trainer, name)))


def _with_callback(start: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(start)
    def started(self: Any, *args: Any, **kwargs: Any) -> Any:
        added = _value_or_line(_add_to_transformers, self)
        if added is None:
            return start(self, *args, **kwargs)
        try:
            return start(self, *args, **kwargs)
        except BaseException as error:
            added._on_exception(error)
            raise
        finally:
            _value_or_line(self.callback_handler.remove_callback, added)

    return started


def _value_or_line(change: Callable[[Any], Any], value: Any) -> Any:
    """Return ``change(value)``; ``None`` if that fails, which costs one line."""
    if is_disabled():
        return None
    try:
        return change(value)
    except Exception as error:  # noqa: BLE001 - the program must not be affected
        tell(f"{type(error).__name__}: {error}")
        return None


def _add_to_lightning(trainer: Any) -> None:
    """Insert it before the checkpoint callbacks, which Lightning keeps at the end of its list."""
    with random_state_kept():
        from doctor.monitor.integrations.lightning.callback import DoctorCallback, LightningHooks

        if any(isinstance(one, LightningHooks) for one in trainer.callbacks):
            return
        added = _made(DoctorCallback)
    last = list(trainer.checkpoint_callbacks)
    trainer.callbacks[:] = [*(one for one in trainer.callbacks if one not in last), added, *last]


def _add_to_transformers(trainer: Any) -> Any:
    """Add it for one call of the Trainer, and return it; ``None`` if there is one, as within another call."""
    with random_state_kept():
        from doctor.monitor.integrations.transformers.hf_callback import HFDoctorCallback, TransformersHooks

        if any(isinstance(one, TransformersHooks) for one in trainer.callback_handler.callbacks):
            return None
        added = _made(HFDoctorCallback)
    trainer.callback_handler.add_callback(added)
    return added


def _made(kind: Callable[..., Any]) -> Any:
    from doctor.monitor.autostart.options import decode_options

    added = kind(**decode_options())
    added.unasked = True
    added.after_run = _await_late_start
    return added


def _await_late_start() -> None:
    """Have this rank watched on if it waits for others after its Trainer has returned, or others for it."""
    from doctor.monitor.autostart.torch_modules import await_late_start

    await_late_start()
