"""Watches a loop of the program's own around a wrapped model, from what torch is called for.

It sees every batch that a ``DataLoader`` yields, and the steps of optimizers by torch's global hooks. A run begins with
the first pass over a loader, or step, in the thread that wrapped a model, if a process group of several ranks exists;
or, beside that thread, if it has done neither some seconds after it wrapped a model: the other ranks may wait for it.
It ends with the program, when the default process group is destroyed, or when the model is gone.

A pass over a loader trains if gradients are enabled and the model is in training mode when its first batch arrives;
otherwise it is an evaluation, of which only the progress is recorded. The first optimizer step confirms it: then all
ranks are evaluated once, and a pass that ended before without a step is forgotten. A batch in which optimizers stepped
counts as one optimizer step, because some optimizers consist of several. Without a loader, a batch lasts from one step
of the first optimizer to the next.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Concatenate, ParamSpec, TypeVar

import torch

from doctor.core.background import start_daemon
from doctor.core.clock import sleep
from doctor.core.random_state import random_state_kept
from doctor.monitor.autostart.constructors import CALL_AFTER, call_late_ranks, refused_wrapper
from doctor.monitor.autostart.late_exit import watch_late_exit
from doctor.monitor.autostart.options import decode_options
from doctor.monitor.autostart.uncounted_passes import UncountedPasses
from doctor.monitor.findings_error import Findings
from doctor.monitor.integrations.adapter import Adapter, guarded
from doctor.monitor.integrations.data_parallel import infer_data_parallel_rank
from doctor.monitor.integrations.deepspeed_engine import is_engine
from doctor.monitor.integrations.hook_guard import value_or_default
from doctor.monitor.integrations.plain import LoaderSlot, PlainRun, plain_facts
from doctor.monitor.integrations.torch_state import distributed, is_megatron_ddp, replication, torch_rank, unwrapped
from doctor.monitor.telemetry.data.loader_history import weak_reference
from doctor.monitor.telemetry.progress import PHASE_TIMEOUTS
from doctor.monitor.telemetry.replica.step_settings import MOST_OPTIMIZERS
from doctor.monitor.telemetry.stacks.live_stacks import is_waiting_in_collective
from doctor.monitor.telemetry.stacks.loop_exits import LoopExits, loop_exits
from doctor.monitor.watch_session import WatchSession

P = ParamSpec("P")
T = TypeVar("T")

TRAIN = LoaderSlot("train", 0)
"""Slot of the loader whose batches are counted: of several at once, the first."""
START_AFTER = 3.0
"""Seconds after a model was wrapped from which a rank that does not train yet is watched, too."""
CALLS = 80
"""Looks of 1.5 s after that for a wait before the first step."""
BEGIN_WITHIN = 5.0
"""Seconds for which the training waits for a run that begins beside it. A run begins within one, and if its first steps
were missed on some ranks, steps of equal number would not be the same."""
UNUSED_TIMEOUT = 1.0
"""Seconds for the final round of a run that began beside its thread and makes way for another."""
TRAINER_MODULE = "transformers.trainer"
"""Of a Trainer that wraps its model before its callback begins a run."""
UNKNOWN_WORK = {**PHASE_TIMEOUTS, "setup": 86_400.0, "batch-end": 60.0, "epoch-end": 120.0}
"""Seconds for a rank that is busy after a step or a pass: nothing tells an evaluation without a loader, an upload, or
the end of training from a hang there; nor, before the first batch, preparation from a program that never trains. Ranks
that wait for one another report early all the same."""


class ObservedPass:
    """One pass over a loader, neither of which is kept alive.

    ``trains``: whether its batches are those of training, known from the first one on; ``batches``: so far; ``exits``:
    of the loop that trains; ``kind``: what loaders that are made anew for every epoch have in common.
    """

    def __init__(self, loader: Any, iterator: Any) -> None:
        self.slot = TRAIN
        self.trains: bool | None = None
        self.batches = 0
        self.has_ended = False
        self.exits = LoopExits()
        dataset: Any = getattr(loader, "dataset", None)
        self.kind = (type(dataset), value_or_default(lambda: len(dataset), None), getattr(loader, "batch_size", None))
        self._loader: Callable[[], Any] = lambda: loader
        self._iterator = weak_reference(iterator)

    @property
    def wrapped(self) -> Any:
        """The loader."""
        return self._loader()

    def release(self) -> None:
        """Leave the loader to the program, which may have nothing but its iterator."""
        self._loader = weak_reference(self._loader())

    def release_persistent(self) -> None:
        """Do so if the loader keeps its iterator, and with it would be kept alive by this pass."""
        if getattr(self._loader(), "persistent_workers", False):
            self.release()

    @property
    def is_over(self) -> bool:
        """Whether no batch can follow: it was exhausted, or its iterator is gone."""
        return self.has_ended or self._iterator() is None


class LoopRun(PlainRun):
    """One watched run of a loop that was not edited.

    ``is_early``: its training thread has not used it yet. ``observes_loaders``: what loaders yield is recorded.
    """

    observes_first_step = False
    """A hook that comes and goes has torch compile a compiled optimizer step anew."""

    def __init__(self, session: WatchSession) -> None:
        super().__init__(session)
        self.telemetry.progress.phase_timeouts = UNKNOWN_WORK
        self._has_checked_start = True  # not before the first batch: a rank may evaluate alone
        self._primary: ObservedPass | None = None
        self._last: ObservedPass | None = None
        self._is_fetched = False  # the primary pass, since the last optimizer step
        self._kinds: set[tuple[Any, ...]] = set()  # of the passes that optimizers stepped in
        self._in_batch = False
        self._has_stepped = False
        self._engine_loss: object = None
        self._is_confirmed = False
        self._optimizer: Callable[[], Any] = lambda: None
        self._optimizers: dict[int, Callable[[], Any]] = {}  # the last ones, by identity
        self.is_early = False
        self.observes_loaders = True
        self._uncounted: UncountedPasses | None = None  # of loaders whose batches are not those of this run
        self._without_loader = 0
        self._version: Callable[[], int] = lambda: 0
        self._seen_version = 0

    def use_model(self, module: Any) -> None:
        """Record the model, and a parameter that shows steps of optimizers that torch compiled."""
        super().use_model(module)
        if is_megatron_ddp(module):
            self._use_loaders_of_megatron(module)
        first = next((one for one in module.parameters() if one.requires_grad), None)
        if first is not None and not is_engine(module):  # which replaces the data of its parameters
            parameter = weakref.ref(first)
            self._version = lambda: getattr(parameter(), "_version", 0)
            self._seen_version = self._version()

    def _use_loaders_of_megatron(self, module: Any) -> None:
        from doctor.monitor.integrations.megatron_ddp import reads_alone

        alone = reads_alone(module)
        self.observes_loaders = alone is not None
        self._uncounted = UncountedPasses(self.telemetry.loaders) if alone is False else None

    def use_refused(self) -> None:
        """Record the model that a wrapper refused, without its values: what failed may be their device."""
        if (wrapper := refused_wrapper()) is not None:
            self.telemetry.replica.describe(unwrapped(wrapper), *replication(wrapper))
            self.telemetry.training = plain_facts(wrapper)

    def fetching(self, one: ObservedPass) -> None:
        """Record that the loop asks for a batch: the one before is done. (step path)"""
        if one is self._primary:
            self._end_batch()
        elif one.trains is False and self._uncounted is None:
            self.telemetry.mark("data")

    def fetched(self, one: ObservedPass, batch: object) -> None:
        """Record the next batch of a pass. (step path)"""
        self._last = one
        if one.trains is None:
            one.trains = torch.is_grad_enabled() and bool(getattr(unwrapped(self.wrapper), "training", True))
            if one.trains:
                one.exits = value_or_default(lambda: loop_exits(sys._getframe()), LoopExits())
            self._begin_pass(one)
            one.release_persistent()
        if one is self._primary:
            self._is_fetched = self._in_batch = True
            self.batch_start(one, one.batches, batch)
        elif self._uncounted is not None:
            self._last = None
            self._uncounted.fetched(one, batch)
        else:
            self.telemetry.mark("step")
        one.batches += 1

    def exhausted(self, one: ObservedPass) -> None:
        """Record that a pass has no more batches."""
        one.has_ended = True
        one.release()
        if self._uncounted is not None:
            self._uncounted.end(one, ended=True, is_confirmed=self._is_confirmed)
        elif one is self._primary:
            self._end_pass(ended=True)
        elif one.trains is False:
            self.telemetry.stage_end("validate", back_to="train" if self._is_confirmed else None)

    def restarted(self, loader: object) -> None:
        """Record that a new pass over a loader begins, which leaves the one before."""
        if self._uncounted is not None:
            self._uncounted.restarted(loader, is_confirmed=self._is_confirmed)
        elif self._primary is not None and self._primary.wrapped is loader:
            self._end_pass(ended=False)

    def optimizer_begins(self, optimizer: object) -> None:
        """Record the start of an optimizer step. (step path)"""
        if self._primary is None and not self._passes:
            self._step_without_loader(optimizer)
        known = self._optimizers.get(id(optimizer))
        if known is None or known() is None:
            self._take_optimizer(optimizer)
        self.telemetry.mark("optimizer")

    def _take_optimizer(self, optimizer: object) -> None:
        """Have the settings of an optimizer recorded; those of an engine are known from its model."""
        held = [one for reference in self._optimizers.values() if (one := reference()) is not None]
        self._optimizers = {id(one): weak_reference(one) for one in (*held[-MOST_OPTIMIZERS + 1 :], optimizer)}
        if not is_engine(self.wrapper):
            self.telemetry.replica.settings.use_optimizers([*held, optimizer])

    def optimizer_ended(self) -> None:
        """Record the end of an optimizer step. (step path)"""
        self._has_stepped = True
        last, is_fetched, self._is_fetched = self._last, self._is_fetched, False
        if last is not None and last is not self._primary and last.trains and not is_fetched:
            self._take(last)  # the loop has gone on to another loader
        if self._primary is not None:
            self._kinds.add(self._primary.kind)
        self.telemetry.mark("forward" if self._without_loader else "batch-end")
        if not self._is_confirmed:
            self._confirm()

    def use_loss(self, loss: object) -> None:
        """Record the loss of which an engine begins the backward pass, before the engine scales it. (step path)"""
        self._engine_loss = loss

    def mark_checkpoint(self, *, begins: bool) -> None:
        """Record the start or the end of writing a file."""
        self.telemetry.mark("checkpoint" if begins else "batch-end")

    def close(self) -> None:
        """Close the session; of a run that was not used, not all ranks may know."""
        self.session.close(*(UNUSED_TIMEOUT,) if self.is_early else ())

    def finish(self) -> None:
        """Record the last batch, if its step was done."""
        if self._has_stepped:
            self._end_batch()

    def _begin_pass(self, one: ObservedPass) -> None:
        if self._uncounted is not None:
            if one.trains:
                self._uncounted.begin(one)
            one.release()
        elif not one.trains:
            self.telemetry.stage_start("validate")
        elif (self._primary is None or self._primary.is_over) and (not self._kinds or one.kind in self._kinds):
            self._take(one)  # another kind of loader may be one that is evaluated in training mode

    def _take(self, one: ObservedPass) -> None:
        """Count the batches of this pass, those that it has yielded included."""
        if self._primary is not None:
            self._end_pass(ended=False)
        self._without_loader = 0
        self._primary = one
        self.pass_start(one, one.exits)
        one.release()
        for number in range(one.batches):
            self.batch_start(one, number, None)
        self._in_batch = one.batches > 0

    def _end_batch(self) -> None:
        if not self._in_batch:
            return
        self._in_batch = False
        version = self._version()
        if version != self._seen_version and not self._has_stepped:
            self._has_stepped = True  # a compiled optimizer calls no hooks
            self._confirm()
        self._seen_version = version
        loss = self.take_loss(self._engine_loss)
        self._engine_loss = None
        if self._has_stepped:
            self._has_stepped = False
            self.steps += 1
            self.telemetry.optimizer_step()
        self.telemetry.batch_end("train", step=self.steps, loss=loss)

    def _end_pass(self, *, ended: bool) -> None:
        one, self._primary = self._primary, None
        if one is None:
            return
        if self._has_stepped:
            self._end_batch()
        self._in_batch = False
        if self._is_confirmed:
            self.pass_end(one, ended=ended)
            return
        self._active_loaders.clear()
        self._attached.clear()
        self._exits.clear()
        self.telemetry.epoch_end("train")
        self.telemetry.loaders.forget(*TRAIN)

    def _step_without_loader(self, optimizer: object) -> None:
        """Let a batch end, and the next one begin, with each step of the first optimizer that is still in use."""
        if self._optimizer() is None:
            self._optimizer = weak_reference(optimizer)
        if self._optimizer() is not optimizer:
            return
        if not self._without_loader:
            self.telemetry.stage_start("train")
            self.telemetry.epoch_start("train", 0, of_loaders=self._uncounted is None)
        self._end_batch()
        self.telemetry.train_batch_start(self._without_loader, 0)
        self._in_batch = True
        self._without_loader += 1

    def _confirm(self) -> None:
        """Have all ranks evaluated once: with the first optimizer step, in which they meet."""
        if not self._is_confirmed:
            self._is_confirmed = True
            self._refresh_facts()
            self.session.check_start(meets=True)


def harmless(hook: Callable[Concatenate[LoopWatch, P], T]) -> Callable[Concatenate[LoopWatch, P], T | None]:
    """Wrap what torch's functions call to raise only :class:`Findings`; ``None`` after another exception."""

    def wrapper(self: LoopWatch, /, *args: P.args, **kwargs: P.kwargs) -> T | None:
        try:
            return hook(self, *args, **kwargs)
        except Findings:
            raise
        except Exception as error:  # noqa: BLE001 - the program must not be affected
            self._failed(hook.__name__, error)
            return None

    wrapper.__name__, wrapper.__doc__ = hook.__name__, hook.__doc__
    return wrapper


class LoopWatch(Adapter[LoopRun]):
    """Watches the loops of this process that no other adapter watches, one after the other."""

    current: ClassVar[LoopWatch | None] = None
    unasked = True

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._models: list[weakref.ref[Any]] = []
        self._passes: weakref.WeakKeyDictionary[Any, ObservedPass] = weakref.WeakKeyDictionary()
        self._thread = self._native_id = 0
        self._begins = threading.Lock()
        self._begin_within = BEGIN_WITHIN
        self._has_waited = False
        self._is_called = False  # another rank waits for this one
        self._within = False  # a loader that Accelerate prepared, or a step of DeepSpeed's engine: both use others
        self._saves = False

    def wrapped(self, model: Any) -> None:
        """Take note of a model that was wrapped in this thread."""
        self._thread, self._native_id = threading.get_ident(), threading.get_native_id()
        self._models = [weakref.ref(one) for one in (*self._known(), model)]
        if self._run is not None and self._run.is_early:
            self._run.telemetry.progress.has_peers = True
        if not self._has_waited:
            self._has_waited = True
            with contextlib.suppress(RuntimeError):  # no memory for a thread
                start_daemon("doctor-start", self._wait_for_start)

    def _wait_for_start(self) -> None:
        sleep(START_AFTER)
        self.begin_early()
        with contextlib.suppress(Exception):  # the store is gone, or is not a TCPStore
            self._call_late_ranks()

    def _call_late_ranks(self) -> None:
        """Call the ranks that have not wrapped a model, if this one waits for others before its first step."""
        for _ in range(CALLS):
            waited = [is_waiting_in_collective(self._thread)]
            for _ in range(3):
                sleep(0.5)
                waited.append(is_waiting_in_collective(self._thread))
            run = self._run
            if run is None or run.steps or not self._is_of_all():
                return
            if all(waited):
                call_late_ranks()
                return

    def _is_of_all(self) -> bool:
        """Return whether a wrapper has all ranks as one group, none of which may do without a model."""
        process = torch_rank(os.environ)
        found = (infer_data_parallel_rank(one, (), process).size for one in self._known())
        return process.world_size in found

    @harmless
    def begin_early(self) -> None:
        """Begin the run of a model that is to be trained, beside its thread, which has not used it yet.

        Not for Trainers that will begin a run of their own. Random states are those of the program, so nothing here
        may draw.
        """
        if Adapter.claimed or TRAINER_MODULE in sys.modules or not (self._is_called or self._will_train()):
            return
        self._begin_beside()

    @harmless
    def _begin_beside(self) -> None:
        claims = Adapter.claims
        with self._begins:
            if self._run is None and self._may_begin():
                self._begin(self._start_early)
                self._watch_end()
        if Adapter.claims != claims:  # meanwhile
            self._end_run()

    def begin_beside(self, thread: int, native_id: int) -> None:
        """Begin the run of a thread that nothing watches: it waits for other ranks, or another rank for it."""
        if not self._known() or Adapter.claimed:
            self._thread, self._native_id = thread, native_id
        self._is_called = True
        self._begin_beside()
        run = self._run
        if run is not None and run.is_early:
            run.telemetry.progress.has_peers = True
            run.telemetry.progress.since -= CALL_AFTER  # the rank that calls has waited for as long

    def group_created(self) -> None:
        """Watch a rank no more that another one waited for before the group, until another one waits for it again: it
        may never train."""
        run = self._run
        if run is not None and run.is_early and not self._known():
            run.telemetry.progress.has_peers = False

    @harmless
    def failed(self, error: Exception) -> None:
        """Report an exception that ends this rank while nothing watches it, by a run for that purpose."""
        if Adapter.reported != id(error) and not isinstance(error, Findings):
            self._thread, self._native_id = threading.get_ident(), threading.get_native_id()
            self._is_called = True
            self._begin_beside()  # also where a Trainer would have begun a run of its own
            self._end(error)

    @harmless
    def is_watching(self) -> bool:
        """Return whether a run is under way that this thread trains in; begin one if there is something to watch.

        Called before a loader is iterated over, because its samplers are traced from then on.
        """
        return self._listens() and self._has_begun()

    def observes_loaders(self) -> bool:
        """Return whether batches of loaders are recorded in the run that is under way; begins one like the above."""
        return bool(self.is_watching() and self._run is not None and self._run.observes_loaders)

    @harmless
    def pass_starts(self, loader: Any, iterator: Any) -> None:
        """Called when a loader is iterated over anew, in a run."""
        self._restarted(loader)
        self._passes[iterator] = ObservedPass(loader, iterator)

    @guarded
    def _restarted(self, run: LoopRun, loader: Any) -> None:
        run.restarted(loader)

    @harmless
    def fetching(self, iterator: Any) -> bool:
        """Called before a batch is fetched; returns whether its arrival is to be told. (step path)"""
        if not self.observes_loaders():
            return False
        one = self._passes.get(iterator)
        if one is None:  # begun before the first model was wrapped, or by a loader with an iterator of its own
            one = self._passes[iterator] = ObservedPass(iterator, iterator)
        self._fetching(one)
        return True

    @guarded
    def _fetching(self, run: LoopRun, one: ObservedPass) -> None:
        run.fetching(one)

    @guarded
    def fetched(self, run: LoopRun, iterator: Any, batch: object) -> None:
        """Called with a batch. (step path)"""
        run.fetched(self._passes[iterator], batch)

    @guarded
    def exhausted(self, run: LoopRun, iterator: Any) -> None:
        """Called when there is no more batch."""
        run.exhausted(self._passes[iterator])

    def watched_pass(self, loader: Any, iterator: Iterator[Any]) -> Iterator[Any]:
        """Iterate over a loader that fetches from others, whose batches do not count."""
        if not self.observes_loaders():
            yield from iterator
            return
        self.pass_starts(loader, iterator)
        while True:
            told = self.fetching(iterator)
            self._within = True
            try:
                batch = next(iterator)
            except StopIteration:
                self._within = False
                if told:
                    self.exhausted(iterator)
                return
            finally:
                self._within = False
            if told:
                self.fetched(iterator, batch)
            yield batch

    @harmless
    def optimizer_begins(self, optimizer: Any) -> None:
        """Called before a step of any optimizer. (step path)"""
        if self.is_watching():
            self._optimizer_begins(optimizer)

    @guarded
    def _optimizer_begins(self, run: LoopRun, optimizer: Any) -> None:
        run.optimizer_begins(optimizer)

    @harmless
    def optimizer_ended(self) -> None:
        """Called after a step of any optimizer. (step path)"""
        if self._listens() and not self._precedes_model():
            self._optimizer_ended()

    @guarded
    def _optimizer_ended(self, run: LoopRun) -> None:
        run.optimizer_ended()

    @harmless
    def engine_begins(self, engine: Any) -> bool:
        """Called before an engine steps, whose optimizers are part of it; returns whether its end is to be told."""
        if not self.is_watching():
            return False
        self._optimizer_begins(engine)
        self._within = True
        return True

    @harmless
    def engine_ended(self, *, stepped: bool) -> None:
        """Called after the step of an engine; ``stepped``: without an exception."""
        self._within = False
        if stepped:
            self._optimizer_ended()

    @harmless
    def backward_begins(self, loss: Any) -> None:
        """Called before the backward pass of an engine. (step path)"""
        if self._listens() and not self._precedes_model():
            self._use_loss(loss.detach())

    @guarded
    def _use_loss(self, run: LoopRun, loss: object) -> None:
        run.use_loss(loss)

    @harmless
    def checkpoint_begins(self) -> bool:
        """Called before a file is written; returns whether its end is to be told."""
        if self._run is None or self._saves or not self._listens() or self._precedes_model():
            return False
        self._saves = True
        self._checkpoint(begins=True)
        return True

    @harmless
    def checkpoint_ended(self) -> None:
        """Called when the file is written."""
        self._saves = False
        self._checkpoint(begins=False)

    @guarded
    def _checkpoint(self, run: LoopRun, *, begins: bool) -> None:
        run.mark_checkpoint(begins=begins)

    @harmless
    def end(self, error: BaseException | None = None) -> None:
        """End the run, if there is one. ``error``: the exception that ends it."""
        rank = self._run.session.rank if self._run is not None and error is None else None
        self._end(error)
        if rank is not None:
            watch_late_exit(rank, WatchSession.write_line)

    @guarded
    def _end(self, run: LoopRun, error: BaseException | None = None) -> None:
        if error is not None and run.wrapper is None:
            value_or_default(run.use_refused, None)
        value_or_default(run.finish, None)
        self._end_run(error)

    def forget(self) -> None:
        """Called in a forked process, which has neither the threads nor the connections of the run."""
        if self._run is not None:
            self._run.leave_backward()
        self._run, self._thread, self._begins = None, 0, threading.Lock()

    def _listens(self) -> bool:
        return threading.get_ident() == self._thread and not self._within and not Adapter.claimed

    def _precedes_model(self) -> bool:
        """Return whether the run began before its model exists, whose constructor may step an optimizer."""
        run = self._run
        return run is not None and run.is_early and not self._known()

    def _has_begun(self) -> bool:
        """Return whether a run is under way; begin one if there is something to watch."""
        run = self._run
        if run is not None:
            if run.is_early:
                if not self._known():
                    return False
                run.is_early = False
                run.telemetry.progress.has_peers = True
                run.telemetry.progress.follow(self._thread, self._native_id)  # not always the one that began
                self._use_model()
            if run.wrapper is not None:
                return True
            self._end()
        if not self._known():
            return False
        if not self._begins.acquire(timeout=self._begin_within):
            self._begin_within = 0.0  # the training waits once, and not in every step
            return False
        try:
            is_begun = self._run is not None  # meanwhile, in a thread beside this one
            if not is_begun:
                if not self._may_begin():
                    return False
                with random_state_kept():
                    self._begin(self._start)
                    self._watch_end()
                    self._use_model()
        finally:
            self._begins.release()
        return self._has_begun() if is_begun else self._run is not None

    def _may_begin(self) -> bool:
        if self._guard.off or not (self._is_called or self._known()):
            return False
        is_one = distributed() is not None or self._is_called
        return is_one and torch_rank(os.environ).world_size > 1 and not WatchSession.open_sessions

    def _known(self) -> list[Any]:
        """Return the wrapped models that still exist."""
        return [one for ref in self._models if (one := ref()) is not None]

    def _will_train(self) -> bool:
        return any(unwrapped(one).training for one in self._known())

    def _start(self) -> LoopRun:
        process = torch_rank(os.environ)
        # Not every rank has one before a Trainer's run, and the numbers of runs have to be equal on all ranks.
        series = f"loop-{Adapter.claims}"
        return LoopRun(self._new_session(process.rank, process.world_size, Path.cwd(), plain_facts(None), series))

    def _start_early(self) -> LoopRun:
        run = self._start()
        run.is_early = True
        run.telemetry.progress.follow(self._thread, self._native_id)
        return run

    @guarded
    def _watch_end(self, run: LoopRun) -> None:
        run.watch_exceptions(self._end)
        run.watch_exit(self._end)

    @guarded
    def _use_model(self, run: LoopRun) -> None:
        run.use_model(max(self._known(), key=_size))


def open_loop(options: Mapping[str, Any] | None = None) -> LoopWatch:
    """Create the watch of this process, and have torch's loaders and optimizers call it.

    ``options``: arguments of :class:`Adapter`; ``None``: those of ``doctor run``.

    Raises:
        ValueError: an option is not valid.
    """
    loop = LoopWatch(**(decode_options() if options is None else options))
    _observe_loaders(loop)
    _observe_optimizers(loop)
    os.register_at_fork(after_in_child=loop.forget)
    LoopWatch.current = Adapter.stand_in = loop
    return loop


def _observe_loaders(loop: LoopWatch) -> None:
    from torch.utils.data import dataloader

    iterations: Any = dataloader._BaseDataLoaderIter
    iterate, fetch = dataloader.DataLoader.__iter__, iterations.__next__

    @functools.wraps(iterate)
    def iterated(self: Any) -> Any:
        is_watched = loop.observes_loaders()
        iterator = iterate(self)
        if is_watched:
            loop.pass_starts(self, iterator)
        return iterator

    @functools.wraps(fetch)
    def next_batch(self: Any) -> Any:
        if not loop.fetching(self):
            return fetch(self)
        try:
            batch = fetch(self)
        except StopIteration:
            loop.exhausted(self)
            raise
        loop.fetched(self, batch)
        return batch

    dataloader.DataLoader.__iter__ = iterated  # type: ignore[method-assign]
    iterations.__next__ = next_batch


def _observe_optimizers(loop: LoopWatch) -> None:
    """``torch.compile`` traces hooks, and would compile a counter anew at every step: it sees empty functions."""
    from torch.optim import optimizer as optimizers

    def before(optimizer: Any, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            loop.optimizer_begins(optimizer)

    def after(optimizer: Any, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            loop.optimizer_ended()

    optimizers.register_optimizer_step_pre_hook(before)
    optimizers.register_optimizer_step_post_hook(after)


def _size(model: Any) -> int:
    return sum(one.numel() for one in model.parameters())
