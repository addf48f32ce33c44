"""Traces the indices that torch's iterators get from their sampler in one pass.

Every torch loader, and every one derived from it (Lightning, accelerate, torchdata's stateful loader), calls
``_BaseDataLoaderIter._next_index`` in the training process, with and without workers. It is private: if it is missing,
nothing is traced and a note says so.
"""

from __future__ import annotations

import functools
import hashlib
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from doctor.core.facts import HiddenField

KEPT = 64
"""Indices of a pass that are kept themselves."""
HASHED = 256
"""Indices of a pass that are included in its hash."""
LEAST = 8
"""Minimum number of indices for a hash; fewer say too little about the order."""
MOST_PASSES = 64
"""Samplers whose newest pass is kept, which bounds the cost of loaders that were never attached."""


class LoaderPass:
    """The first indices of a pass over a sampler, from an iterator's creation or reset."""

    __slots__ = ("_digest", "_iterator", "_sampler", "count", "drawn", "first", "is_open")

    def __init__(self, iterator: Any, sampler: object) -> None:
        self.count = 0
        self.drawn: str | None = None
        self.first: list[int] = []
        self.is_open = True
        self._digest = hashlib.blake2b(digest_size=8)
        self._iterator = _weak(iterator)
        self._sampler = _weak(sampler)

    def is_of(self, iterator: object) -> bool:
        """Return whether ``iterator`` makes this pass."""
        return self._iterator() is iterator

    def is_from(self, sampler: object) -> bool:
        """Return whether it is a pass over ``sampler``, by its iterator without a weak reference."""
        if (known := self._sampler()) is not None:
            return known is sampler
        iterator: Any = self._iterator()
        return iterator is not None and getattr(iterator, "_index_sampler", None) is sampler

    def add(self, indices: Iterable[object]) -> None:
        """Record more indices."""
        for index in indices:
            number = _number(index)
            if number is None:
                self.close()
                return
            if len(self.first) < KEPT:
                self.first.append(number)
            self._digest.update(b"%d," % number)
            self.count += 1
            if self.count == HASHED:
                self.close()
                return

    def close(self) -> None:
        """Stop recording. The hash covers as many indices as its text begins with."""
        if self.is_open:
            self.is_open = False
            self.drawn = f"{self.count}:{self._digest.hexdigest()}" if self.count >= LEAST else None


class SampleTrace:
    """The newest pass over each sampler of this process, while it is open."""

    def __init__(self) -> None:
        self.hidden: HiddenField | None = None
        self._passes: dict[int, LoaderPass] = {}

    def open(self) -> None:
        """Start tracing; ``hidden`` gives the reason if that is not possible."""
        self.hidden = _start_observing(self)

    def close(self) -> None:
        """Stop tracing. The last one to close restores torch."""
        _stop_observing(self)

    def newest(self, sampler: object) -> LoaderPass | None:
        """Return the newest pass over ``sampler``."""
        known = self._passes.get(id(sampler))
        return known if known is not None and known.is_from(sampler) else None

    def record(self, iterator: Any, index: object) -> bool:
        """Record ``index``, of a sample or batch, for ``iterator``; return whether to continue."""
        known = self._passes.get(id(iterator._index_sampler))
        if known is None or _is_first(iterator) or not known.is_of(iterator):
            sampler = iterator._index_sampler
            self._passes.pop(id(sampler), None)
            if len(self._passes) >= MOST_PASSES:
                self._passes.pop(next(iter(self._passes), 0), None)
            known = self._passes[id(sampler)] = LoaderPass(iterator, sampler)
        if known.is_open:
            indices: Any = index if iterator._auto_collation else (index,)
            if not isinstance(indices, (list, tuple)):
                indices = indices.tolist() if _is_array(indices) and indices.ndim == 1 else (indices,)
            known.add(indices)
        return known.is_open

    def exhausted(self, iterator: Any) -> None:
        """Record that ``iterator`` is exhausted."""
        known = self._passes.get(id(iterator._index_sampler))
        if known is not None and known.is_of(iterator):
            known.close()

    def disable(self, error: Exception) -> None:
        """Stop tracing, because this torch differs from the versions that are supported."""
        self.hidden = HiddenField(
            "drawn", f"the draws of this loader could not be followed: {type(error).__name__}: {error}"
        )
        self.close()


def _is_first(iterator: Any) -> bool:
    """Return whether nothing was drawn since the iterator began or was reset.

    With workers, by the tasks sent to them, which precede the delivered batches.
    """
    sent: object = getattr(iterator, "_send_idx", None)
    return (iterator._num_yielded if sent is None else sent) == 0


def _number(index: Any) -> int | None:
    """Return an index as a number equal on all ranks; ``None`` for device and custom objects."""
    kind = type(index)
    if kind is int:
        return index  # type: ignore[no-any-return]
    if kind is str or (kind is tuple and all(type(part) in (int, str, float) for part in index)):
        return int.from_bytes(hashlib.blake2b(repr(index).encode("utf-8", "replace"), digest_size=6).digest(), "big")
    return int(index) if _is_array(index) and index.ndim == 0 and hasattr(index, "__index__") else None


def _is_array(thing: Any) -> bool:
    """Return whether it is a numpy number or array, or a torch tensor in host memory."""
    kind = type(thing)
    return kind.__module__ == "numpy" or (
        kind.__name__ == "Tensor" and kind.__module__ == "torch" and bool(thing.is_cpu)
    )


def _weak(thing: object) -> Callable[[], object]:
    """Return a weak reference, or one to nothing if not supported (a plain list as sampler)."""
    try:
        return weakref.ref(thing)
    except TypeError:
        return lambda: None


# One patch per process for all observers: two runs at once must not undo each other's.

BEGINS = ("__init__", "_reset")
"""Methods of torch's iterators that begin a pass. They set an instance attribute ``_next_index``, which is removed
once enough of the pass is known."""

_lock = threading.Lock()
_observers: tuple[SampleTrace, ...] = ()
_originals: dict[str, Callable[..., object]] = {}
_wrappers: dict[str, Callable[..., object]] = {}


def _start_observing(trace: SampleTrace) -> HiddenField | None:
    global _observers
    iterator = _iterator_class()
    if iterator is None:
        return HiddenField("drawn", "this torch has no _BaseDataLoaderIter._next_index", "torch 2.4 to 2.13 have it")
    with _lock:
        if not _observers:
            for name in BEGINS:
                _originals[name] = original = getattr(iterator, name)
                _wrappers[name] = wrapper = _wrap_begin(original)
                setattr(iterator, name, wrapper)
        if trace not in _observers:
            _observers = (*_observers, trace)
    return None


def _stop_observing(trace: SampleTrace) -> None:
    global _observers
    with _lock:
        _observers = tuple(one for one in _observers if one is not trace)
        iterator = _iterator_class()
        if _observers or iterator is None:
            return
        for name, wrapper in _wrappers.items():
            # If the wrapper was wrapped by others, theirs stays, and ours does nothing from now on.
            if getattr(iterator, name) is wrapper:
                setattr(iterator, name, _originals[name])
        _wrappers.clear()


def _wrap_begin(original: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(original)
    def begin(self: Any, *args: Any, **kwargs: Any) -> object:
        result = original(self, *args, **kwargs)
        if _observers:  # not a bound method: a cycle would keep its workers alive
            self._next_index = functools.partial(_next_index, weakref.ref(self))
        return result

    return begin


def _next_index(iterator_ref: Callable[[], Any]) -> object:
    """Replacement of an iterator's own method while its pass is traced."""
    iterator = iterator_ref()
    try:
        index: object = type(iterator)._next_index(iterator)
    except StopIteration:
        _notify_observers(SampleTrace.exhausted, iterator)
        raise
    if not _notify_observers(SampleTrace.record, iterator, index):
        vars(iterator).pop("_next_index", None)
    return index


def _notify_observers(method: Callable[..., bool | None], *arguments: object) -> bool:
    wanted = False
    for trace in _observers:
        try:
            wanted = bool(method(trace, *arguments)) or wanted
        except _FOREIGN_ERRORS as error:
            trace.disable(error)
    return wanted


_FOREIGN_ERRORS = (AttributeError, TypeError, ValueError, LookupError, RuntimeError, OverflowError)
"""What reading foreign iterators and indices may raise; nothing may propagate into a user's loader."""


def _iterator_class() -> Any:
    """Import torch and return the base of its iterators, or ``None`` without the method."""
    try:
        from torch.utils.data import dataloader
    except ImportError:
        return None
    found = getattr(dataloader, "_BaseDataLoaderIter", None)
    return found if found is not None and "_next_index" in vars(found) else None
