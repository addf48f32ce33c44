"""Which samples loaders really draw: seen where torch's iterators ask their sampler for the next index, until enough of
a pass is known.

``_BaseDataLoaderIter._next_index`` is the one place that every loader of torch, and every one made from it (Lightning,
accelerate, torchdata's stateful loader), comes through in the process that trains, with and without workers. It is
private: where it is missing, nothing is seen, and a note says so.
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
"""Indices of a pass that go into its hash."""
LEAST = 8
"""Fewer indices than this tell too little of an order to be hashed."""
MOST_PASSES = 64
"""Samplers whose newest pass is kept, so that loaders that nobody attached cost no more than this."""


class LoaderPass:
    """The first indices that a sampler gave in one pass: from the begin of an iterator, or its reset, to the end."""

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
        """Whether ``iterator`` makes this pass."""
        return self._iterator() is iterator

    def is_from(self, sampler: object) -> bool:
        """Whether it is a pass over ``sampler``; by its iterator where the sampler can't be told apart."""
        if (known := self._sampler()) is not None:
            return known is sampler
        iterator: Any = self._iterator()
        return iterator is not None and getattr(iterator, "_index_sampler", None) is sampler

    def add(self, indices: Iterable[object]) -> None:
        """More indices were drawn."""
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
        """No more is drawn, or wanted. The hash is of so many indices as its text begins with."""
        if self.is_open:
            self.is_open = False
            self.drawn = f"{self.count}:{self._digest.hexdigest()}" if self.count >= LEAST else None


class SampleTrace:
    """The newest pass over each sampler of this process, while it is open."""

    def __init__(self) -> None:
        self.hidden: HiddenField | None = None
        self._passes: dict[int, LoaderPass] = {}

    def open(self) -> None:
        """Begin to see what is drawn; ``hidden`` says why where that can't be."""
        self.hidden = _watch(self)

    def close(self) -> None:
        """See no more. The last one to close leaves torch as it was."""
        _unwatch(self)

    def newest(self, sampler: object) -> LoaderPass | None:
        """The newest pass over ``sampler``."""
        known = self._passes.get(id(sampler))
        return known if known is not None and known.is_from(sampler) else None

    def drew(self, iterator: Any, index: object) -> bool:
        """``iterator`` was given ``index``, of one sample or a batch. Returns whether more of its pass is wanted."""
        known = self._passes.get(id(iterator._index_sampler))
        if known is None or _is_first(iterator) or not known.is_of(iterator):
            known = self._begin(iterator)
        if known.is_open:
            known.add(_indices(index) if iterator._auto_collation else (index,))
        return known.is_open

    def exhausted(self, iterator: Any) -> None:
        """``iterator`` was given nothing more."""
        known = self._passes.get(id(iterator._index_sampler))
        if known is not None and known.is_of(iterator):
            known.close()

    def give_up(self, error: Exception) -> None:
        """Something is not as it is in the torch that this was written for: see no more."""
        self.hidden = HiddenField(
            "drawn", f"the draws of this loader could not be followed: {type(error).__name__}: {error}"
        )
        self.close()

    def _begin(self, iterator: Any) -> LoaderPass:
        sampler = iterator._index_sampler
        self._passes.pop(id(sampler), None)
        if len(self._passes) >= MOST_PASSES:
            self._passes.pop(next(iter(self._passes), 0), None)
        started = self._passes[id(sampler)] = LoaderPass(iterator, sampler)
        return started


def _is_first(iterator: Any) -> bool:
    """Whether nothing was drawn since the iterator began or was reset: with workers by the tasks that it sent out,
    since these are ahead of the batches that it gave."""
    sent: object = getattr(iterator, "_send_idx", None)
    return (iterator._num_yielded if sent is None else sent) == 0


def _indices(batch: Any) -> Iterable[object]:
    """The indices of a batch."""
    if isinstance(batch, (list, tuple)):
        return batch
    return batch.tolist() if _is_array(batch) and batch.ndim == 1 else (batch,)


def _number(index: Any) -> int | None:
    """An index as a number that is the same on all ranks; ``None`` for what only a device or its owner can tell."""
    kind = type(index)
    if kind is int:
        return index  # type: ignore[no-any-return]
    if kind is str or (kind is tuple and all(type(part) in (int, str, float) for part in index)):
        return int.from_bytes(hashlib.blake2b(repr(index).encode("utf-8", "replace"), digest_size=6).digest(), "big")
    return int(index) if _is_array(index) and index.ndim == 0 and hasattr(index, "__index__") else None


def _is_array(thing: Any) -> bool:
    """A number or array of numpy, or a tensor of torch in the host's memory."""
    kind = type(thing)
    return kind.__module__ == "numpy" or (
        kind.__name__ == "Tensor" and kind.__module__ == "torch" and bool(thing.is_cpu)
    )


def _weak(thing: object) -> Callable[[], object]:
    """A weak reference; to nothing where there can be none (a plain list as sampler)."""
    try:
        return weakref.ref(thing)
    except TypeError:
        return _nothing


def _nothing() -> None:
    return None


# One watch a process, whoever looks on: monitors of two runs at once must not undo one another's.

BEGINS = ("__init__", "_reset")
"""Methods of torch's iterators with which a pass begins. From there on an iterator has its own way to the next index,
until enough of the pass is known."""

_lock = threading.Lock()
_observers: tuple[SampleTrace, ...] = ()
_originals: dict[str, Callable[..., object]] = {}
_wrappers: dict[str, Callable[..., object]] = {}


def _watch(draws: SampleTrace) -> HiddenField | None:
    global _observers
    iterator = _iterator_class()
    if iterator is None:
        return HiddenField("drawn", "this torch has no _BaseDataLoaderIter._next_index", "torch 2.4 to 2.13 have it")
    with _lock:
        if not _observers:
            for name in BEGINS:
                _originals[name] = original = getattr(iterator, name)
                _wrappers[name] = wrapper = _beginning(original)
                setattr(iterator, name, wrapper)
        if draws not in _observers:
            _observers = (*_observers, draws)
    return None


def _unwatch(draws: SampleTrace) -> None:
    global _observers
    with _lock:
        _observers = tuple(one for one in _observers if one is not draws)
        iterator = _iterator_class()
        if _observers or iterator is None:
            return
        for name, wrapper in _wrappers.items():
            # Where somebody has wrapped the wrapper, theirs stays, and ours does nothing from now on.
            if getattr(iterator, name) is wrapper:
                setattr(iterator, name, _originals[name])
        _wrappers.clear()


def _beginning(original: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(original)
    def begin(self: Any, *args: Any, **kwargs: Any) -> object:
        result = original(self, *args, **kwargs)
        if _observers:  # not bound to it: a cycle would keep its workers alive
            self._next_index = functools.partial(_next_index, weakref.ref(self))
        return result

    return begin


def _next_index(asking: Callable[[], Any]) -> object:
    """What stands in place of an iterator's own method while its pass is followed."""
    iterator = asking()
    try:
        index: object = type(iterator)._next_index(iterator)
    except StopIteration:
        _all_tell(SampleTrace.exhausted, iterator)
        raise
    if not _all_tell(SampleTrace.drew, iterator, index):
        vars(iterator).pop("_next_index", None)
    return index


def _all_tell(what: Callable[..., bool | None], *arguments: object) -> bool:
    """Whether any of the observers wants to hear more."""
    wanted = False
    for draws in _observers:
        try:
            wanted = bool(what(draws, *arguments)) or wanted
        except _UNLIKELY as error:
            draws.give_up(error)
    return wanted


_UNLIKELY = (AttributeError, TypeError, ValueError, LookupError, RuntimeError, OverflowError)
"""What looking at a stranger's iterator and indices may raise: inside a user's loader nothing of ours may."""


def _iterator_class() -> Any:
    """The base of torch's iterators, or ``None`` where it has no such method. Loads torch: who trains has it loaded."""
    try:
        from torch.utils.data import dataloader
    except ImportError:
        return None
    found = getattr(dataloader, "_BaseDataLoaderIter", None)
    return found if found is not None and "_next_index" in vars(found) else None
