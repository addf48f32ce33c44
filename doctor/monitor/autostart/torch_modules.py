"""Installers for torch, DeepSpeed, Ray Train and Accelerate: what a program does is passed on to ``plain_loop.py``.

A process that never wraps a model (DistributedDataParallel, FSDP, ``fully_shard``, DeepSpeed) pays for one more frame
in each of these rare calls, and with a process group for a thread that sleeps (``constructors.py``). An exception that
ends it is reported, which takes some seconds. Nothing else is changed in it: loaders and optimizers are observed from
the first wrapped model on.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any

from doctor.monitor.autostart.constructors import (
    LateRank,
    awaits_group,
    calling_late_ranks,
    is_of_all_ranks,
    note_refused,
)
from doctor.monitor.autostart.hook.sitecustomize import INSTALLERS, TORCH, ImportWatcher, is_begun, is_disabled, tell
from doctor.monitor.autostart.launchers import watch_spawn

PLAIN_LOOP = "doctor.monitor.autostart.plain_loop"
ADAPTER = "doctor.monitor.integrations.adapter"
PACKS = "construct_user_exception_with_traceback"
OPEN_WITHIN = 30.0
"""Seconds for another thread of this process that loads the code that watches a loop."""
_failures: list[Exception] = []
_late: list[LateRank] = []
_observed: list[Callable[..., object]] = []
"""The hook for exceptions that was there before ours."""
_opening = threading.Lock()


def watch_from_here(options: Mapping[str, Any]) -> None:
    """Have this process watched from now on as below ``doctor run``, but only once. ``options``: as of an adapter.

    What the program has imported already is changed at once.

    Raises:
        ValueError: an option is not valid.
    """
    from doctor.core.random_state import random_state_kept
    from doctor.monitor.watch_options import WatchOptions

    WatchOptions(**options)
    if is_begun() or not _may_watch():
        return
    try:
        with random_state_kept():
            _opened(options)
        watcher = ImportWatcher({name: target for name, target in INSTALLERS.items() if target.startswith(TORCH)})
        sys.meta_path.insert(0, watcher)
        for name in [name for name in watcher.waiting if name in sys.modules]:
            _install(watcher, name)
    except Exception as error:  # noqa: BLE001 - the program must not be affected
        _failed(error)


def _install(watcher: ImportWatcher, name: str) -> None:
    """Have a loaded module changed, and the packages that took names of it when they were imported."""
    module = sys.modules[name]
    before = dict(vars(module))
    watcher.install(name, module)
    changed = [key for key, value in before.items() if vars(module).get(key) is not value]
    parts = name.split(".")
    for package in (sys.modules.get(".".join(parts[:depth])) for depth in range(1, len(parts))):
        for key in changed:
            if getattr(package, key, None) is before[key]:
                setattr(package, key, vars(module)[key])


def watch_ddp(module: Any) -> None:
    """Have every ``DistributedDataParallel`` that is constructed observed."""
    _after_construction(module.DistributedDataParallel)


def watch_megatron(module: Any) -> None:
    """Have every wrapper of Megatron-LM observed, whose constructor waits for no other rank."""
    kind = module.DistributedDataParallel
    construct = kind.__init__

    @functools.wraps(construct)
    def constructed(self: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        _wrapped(self)

    kind.__init__ = constructed


def watch_fsdp(module: Any) -> None:
    """Have every ``FullyShardedDataParallel`` that is constructed observed."""
    _after_construction(module.FullyShardedDataParallel)


def watch_fully_shard(module: Any) -> None:
    """Have every module that ``fully_shard`` changes observed."""
    shard = module.fully_shard
    if getattr(shard, "__watched__", False):  # an older path of the same function
        return

    @functools.wraps(shard)
    def fully_shard(module: Any, *args: Any, **kwargs: Any) -> Any:
        sharded = shard(module, *args, **kwargs)
        for one in module if isinstance(module, (list, tuple)) else (module,):
            _wrapped(one)
        return sharded

    fully_shard.__watched__ = True  # type: ignore[attr-defined]
    module.fully_shard = fully_shard


def watch_process_groups(module: Any) -> None:
    """Have the watch ended before the default process group is destroyed, and late ranks found after it was created."""
    create, destroy = module.init_process_group, module.destroy_process_group

    @functools.wraps(create)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        with calling_late_ranks(_begin_beside, is_of_all=True):
            created = create(*args, **kwargs)
        if (loop := _loop()) is not None:
            loop.group_created()
        _await_late_start(module)
        return created

    @functools.wraps(destroy)
    def destroy_process_group(group: Any = None) -> Any:
        if group is None or group == module.GroupMember.WORLD:
            _end_late_start()
            if (loop := _loop()) is not None:
                loop.end()
        return destroy(group)

    module.init_process_group = init_process_group
    if awaits_group():
        _await_late_start(module)
    module.destroy_process_group = destroy_process_group


def watch_checkpoints(module: Any) -> None:
    """Have the time of ``torch.save`` recorded as that of a checkpoint."""
    module.save = _as_checkpoint(module.save)


def _as_checkpoint(write: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(write)
    def save(*args: Any, **kwargs: Any) -> Any:
        loop = _loop()
        if loop is None or not loop.checkpoint_begins():
            with _checkpoint_of_trainer():
                return write(*args, **kwargs)
        try:
            return write(*args, **kwargs)
        finally:
            loop.checkpoint_ended()

    return save


@contextlib.contextmanager
def _checkpoint_of_trainer() -> Iterator[None]:
    """Have what the thread of a Trainer does within recorded as a checkpoint, unless the Trainer announced one."""
    module = sys.modules.get("doctor.monitor.watch_session")
    end: Callable[[], None] | None = None
    with contextlib.suppress(Exception):
        sessions = module.WatchSession.open_sessions if module is not None else ()
        end = next(iter(sessions)).telemetry.checkpoint_begins() if len(sessions) == 1 else None
    try:
        yield
    finally:
        if end is not None:
            end()


def watch_deepspeed(module: Any) -> None:
    """Have every engine of DeepSpeed observed, with its losses, and its steps where it has accumulated enough."""
    kind = module.DeepSpeedEngine
    _after_construction(kind)
    for name, observed in (
        ("backward", _with_loss),
        ("_take_model_step", _as_one),
        ("save_checkpoint", _as_checkpoint),
    ):
        method = getattr(kind, name, None)
        if method is not None:
            setattr(kind, name, observed(method))


def _with_loss(backward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(backward)
    def observed(self: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
        if (loop := _loop()) is not None:
            loop.backward_begins(loss)
        return backward(self, loss, *args, **kwargs)

    return observed


def _as_one(step: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an engine's step, whose optimizer may step several times."""

    @functools.wraps(step)
    def stepped(self: Any, *args: Any, **kwargs: Any) -> Any:
        loop = _loop()
        if loop is None or not loop.engine_begins(self):
            return step(self, *args, **kwargs)
        try:
            result = step(self, *args, **kwargs)
        except BaseException:
            loop.engine_ended(stepped=False)
            raise
        loop.engine_ended(stepped=True)
        return result

    return stepped


def watch_spawned_processes(module: Any) -> None:
    """Have exceptions of functions that ``torch.multiprocessing.spawn`` runs reported: it catches them itself."""
    watch_spawn(module)
    run = module._wrap

    @functools.wraps(run)
    def wrapped(function: Callable[..., Any], *args: Any) -> Any:
        return run(functools.partial(_reporting, function), *args)

    module._wrap = wrapped


def _reporting(function: Callable[..., Any], *args: Any) -> Any:
    try:
        return function(*args)
    except Exception as error:
        if (loop := _loop()) is not None:
            loop.end(error)
        raise


def watch_ray_workers(module: Any) -> None:
    """Have exceptions of functions that workers of Ray Train run reported: its thread passes them to the driver.

    The function that packs an exception (ray/train/v2/_internal/execution/worker_group/thread_runner.py) is changed,
    because a frame of ours around the user's function would be in the traceback that Ray prints.
    """
    pack = getattr(module, PACKS, None)
    if pack is None:
        return

    @functools.wraps(pack)
    def packed(error: BaseException, *args: Any, **kwargs: Any) -> Any:
        if (loop := _loop()) is not None:
            loop.end(error)
        return pack(error, *args, **kwargs)

    setattr(module, PACKS, packed)


def watch_accelerate_loaders(module: Any) -> None:
    """Have loaders that Accelerate prepared observed as a whole: inside, they fetch one batch ahead, or on rank 0."""
    for name in ("DataLoaderShard", "DataLoaderDispatcher"):
        kind = getattr(module, name, None)
        if kind is not None:
            kind.__iter__ = _as_whole(kind.__iter__)


def _as_whole(iterate: Callable[[Any], Iterator[Any]]) -> Callable[[Any], Iterator[Any]]:
    @functools.wraps(iterate)
    def iterated(self: Any) -> Iterator[Any]:
        iterator, loop = iterate(self), _loop()
        return iterator if loop is None else loop.watched_pass(self, iterator)

    return iterated


def _after_construction(kind: Any) -> None:
    construct = kind.__init__

    @functools.wraps(construct)
    def constructed(self: Any, *args: Any, **kwargs: Any) -> None:
        is_of_all = is_of_all_ranks(construct, (self, *args), kwargs)
        try:
            with calling_late_ranks(_begin_beside, is_of_all=is_of_all):
                construct(self, *args, **kwargs)
        except Exception:
            note_refused(self)
            raise
        _wrapped(self)

    kind.__init__ = constructed


def _wrapped(model: Any) -> None:
    """Pass on a wrapped model; the first one loads the code that watches a loop.

    None is passed on after a failure, or once a Trainer or the program itself has begun to watch.
    """
    try:
        _end_late_start()
        if not _may_watch():
            return
        loop = _loop()
        if loop is None:
            from doctor.core.random_state import random_state_kept

            with random_state_kept():
                loop = _opened()
        loop.wrapped(model)
    except Exception as error:  # noqa: BLE001 - the program must not be affected
        _failed(error)


def _begin_beside(thread: int, native_id: int) -> None:
    """Begin a run beside a thread that nothing watches, also after a Trainer's; random states are the program's."""
    try:
        if _is_off():
            return
        _opened().begin_beside(thread, native_id)
    except Exception as error:  # noqa: BLE001 - the program must not be affected
        _failed(error)


def _is_off() -> bool:
    return is_disabled() or bool(_failures)


def _may_watch() -> bool:
    return not (_is_off() or getattr(_class_in(ADAPTER, "Adapter"), "claimed", False))


def _failed(error: Exception) -> None:
    _failures.append(error)
    tell(f"{type(error).__name__}: {error}")


def _opened(options: Mapping[str, Any] | None = None) -> Any:
    """Return what watches the loop of this process, made once. ``options``: as of ``open_loop``."""
    if not _opening.acquire(timeout=OPEN_WITHIN):
        raise TimeoutError("its code was not loaded in time")
    try:
        loop = _loop()
        if loop is None:
            from doctor.monitor.autostart.plain_loop import open_loop

            loop = open_loop(options)
        return loop
    finally:
        _opening.release()


def await_late_start() -> None:
    """Have this rank watched after a Trainer's run, while there is a process group."""
    module = sys.modules.get("torch.distributed.distributed_c10d")
    if module is not None and module.is_initialized():
        _await_late_start(module)


def _await_late_start(module: Any) -> None:
    """Have this rank watched once another one waits for it, or it for others."""
    try:
        if _is_off():
            return
        if module.get_world_size() > 1 if module.is_initialized() else awaits_group():
            _end_late_start()
            _late.append(LateRank(_begin_beside))
            _observe_exceptions()
    except Exception as error:  # noqa: BLE001 - the program must not be affected
        _failed(error)


def _observe_exceptions() -> None:
    """Have an exception that ends this process reported, if it is raised before a run has begun."""
    if _observed:
        return
    before, process = sys.excepthook, os.getpid()
    _observed.append(before)

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() == process and isinstance(error, Exception):  # not in a process that the program forked
            _report_failure(error)
        before(kind, error, trace)

    sys.excepthook = report


def _report_failure(error: Exception) -> None:
    try:
        _end_late_start()
        if not _is_off():
            _opened().failed(error)
    except Exception as own:  # noqa: BLE001 - the program must not be affected
        _failed(own)


def _end_late_start() -> None:
    while _late:
        _late.pop().end()


def _loop() -> Any:
    """Return what watches the loop of this process, once a model was wrapped."""
    return getattr(_class_in(PLAIN_LOOP, "LoopWatch"), "current", None)


def _class_in(module: str, name: str) -> Any:
    """Return a class of a module that was imported; ``None`` while another thread imports it."""
    return getattr(sys.modules.get(module), name, None)
