"""Searches that a thread computes in Python, whose length no data bounds, in code of the user or of a library.

A search goes through the permutations, products or combinations of :mod:`itertools`; takes from a container and puts
into it until it is empty, such as all paths through a graph; or calls itself again and again. How long it takes grows
exponentially with its input, and nothing shows how much is left: it may end. Work on data goes through these with a
``for`` statement, and is none of them; neither is what calls torch.
"""

from __future__ import annotations

import ast
import builtins
import collections
import inspect
import itertools
import sys
import textwrap
from collections.abc import Hashable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple

from doctor.core.clock import monotonic
from doctor.core.frames import is_user_code, line_of
from doctor.core.stack_dumps.rank_conditions import Loop, loops_around
from doctor.core.text import lazy_compile
from doctor.monitor.telemetry.stacks.loop_exits import variables_of
from doctor.monitor.telemetry.stacks.rank_conditions import source_tree
from doctor.monitor.telemetry.stacks.stillness import nanoseconds_busy

LONG_SEARCH = 9.0
"""Seconds from which a search is long while other ranks wait."""
BUSY = 0.8
"""Least share of the time for which the thread runs, or could run if a processor were free."""
_MOST_FRAMES, _RECURSIONS, _SHRINKING = 200, 4, 6
"""Frames that are looked at; calls of one function within one another that are a recursion; and looks in turn after
which a container that became smaller each time is work that comes to an end."""
_LONGEST = 40
"""Characters of a condition that are named."""
_MISSES, _CALLERS = 4, 12
"""Looks in turn without a search after which it is over; and frames around one whose loops have to be in one round."""
_OTHER_WORK = lazy_compile(r"importlib|^<frozen|/torch/(?!_tensor\.py|functional\.py)|/triton/|/site-packages/numba/")
"""Files of what no search calls: imports, compilation, modules and data of torch."""
_COMBINATIONS = (
    itertools.permutations,
    itertools.product,
    itertools.combinations,
    itertools.combinations_with_replacement,
)
_GROWS = frozenset({"append", "appendleft", "push", "put", "add", "insert", "extend", "update", "heappush"})
_SHRINKS = frozenset({"pop", "popleft", "popitem", "heappop", "remove", "discard"})
_BOUNDED = frozenset(
    """
    time monotonic perf_counter time_ns monotonic_ns now read readline readlines recv recvfrom recv_bytes sleep step
    backward
    """.split()  # noqa: SIM905 - eighty lines otherwise
)
"""Calls of loops that end by a clock or with what they read, and of a training."""
_CONTAINERS = (list, set, dict, collections.deque)


class Search(NamedTuple):
    """``words``: what the search is and where. ``size`` of the container that it works off; ``None`` if unknown.
    ``rounds``: its arguments and the rounds of the loops around it, the same as long as it is one search. ``turn``:
    differs from one turn of its own loop to a later one; ``None`` if nothing tells."""

    words: str
    size: int | None = None
    rounds: Hashable = None
    turn: Hashable = None


class SearchClock:
    """For how long one thread of this process has been in the same search, from one look to the next.

    ``words``: what was found last; empty if nothing was."""

    def __init__(self, thread: int, native_id: int) -> None:
        self.words = ""
        self._thread = thread
        self._native_id = native_id
        self._lasting: list[tuple[int, int]] = []
        self._since, self._busy = 0.0, 0
        self._sizes: collections.deque[int] = collections.deque(maxlen=_SHRINKING + 1)
        self._rounds: Hashable = None
        self._misses = 0
        self._turns: collections.deque[Hashable] = collections.deque(maxlen=_SHRINKING)

    def look(self) -> float:
        """Return the seconds, 0 below :data:`LONG_SEARCH`; takes some microseconds, once the sources are read."""
        now, busy, frames = monotonic(), nanoseconds_busy(self._native_id), self._frames()
        calls = [(id(one), id(one.f_code)) for one in frames]
        pairs = enumerate(zip(calls, self._lasting, strict=False))
        lasting = next((at for at, (one, other) in pairs if one != other), min(len(calls), len(self._lasting)))
        search = search_in(frames[:lasting], frames[lasting:]) if busy is not None else None
        is_idle = busy is None or busy - self._busy < BUSY * (now - self._since - 1.0) * 1e9
        self._misses = self._misses + 1 if search is None else 0
        if search is None and not is_idle and self._misses < _MISSES and self._rounds is not None:
            return now - self._since if self.words else 0.0  # the generator that searches may have yielded
        if search is None or is_idle or self._comes_to_an_end(search):
            self._lasting, self._since, self._busy = calls, now, busy or 0
            self._rounds, self.words = None if search is None else search.rounds, ""
            self._sizes.clear()
            self._turns.clear()
            return 0.0
        self._lasting = self._lasting[:lasting]
        if now - self._since >= LONG_SEARCH:
            self.words = search.words
        return now - self._since if self.words else 0.0

    def _frames(self) -> list[FrameType]:
        """Return the stack, outermost frame first; none if it is deeper than is looked at."""
        frame = sys._current_frames().get(self._thread)
        found: list[FrameType] = []
        while frame is not None and len(found) <= _MOST_FRAMES:
            found.append(frame)
            frame = frame.f_back
        return found[::-1] if frame is None else []

    def _comes_to_an_end(self, search: Search) -> bool:
        if self._rounds is None:
            self._rounds = search.rounds
        self._turns.append(search.turn)
        if len(self._turns) == _SHRINKING and len(set(self._turns)) == 1 and search.turn is not None:
            return True  # the loop is still in one turn, which is other work
        if search.size is not None:
            self._sizes.append(search.size)
        sizes = list(self._sizes)
        shrinks = len(sizes) > _SHRINKING and all(later < earlier for earlier, later in itertools.pairwise(sizes))
        return shrinks or search.rounds != self._rounds


def search_in(lasting: Sequence[FrameType], inner: Sequence[FrameType] = ()) -> Search | None:
    """Return the innermost search among frames, outermost first, that have lasted; ``inner`` are called by the last."""
    if any(_OTHER_WORK.search(one.f_code.co_filename) for one in inner):
        return None
    calls = collections.Counter(id(one.f_code) for one in lasting)
    is_recursion, is_in_loop = True, False
    for at in range(len(lasting) - 1, -1, -1):
        frame = lasting[at]
        if _OTHER_WORK.search(frame.f_code.co_filename):
            return None
        is_recursion = is_recursion and calls[id(frame.f_code)] > 1
        if is_recursion and calls[id(frame.f_code)] >= _RECURSIONS:
            first = next(one for one, outer in enumerate(lasting) if outer.f_code is frame.f_code)
            return _in_rounds(Search(f"a recursion of {_name(frame)}"), lasting[: first + 1])
        loops = _loops_of(frame)
        if loops is None:
            return None
        search = _of_loops(frame, loops)
        if search is not None:
            # A short loop in each turn may have a frame at the same address each time.
            return None if is_in_loop and search.turn is None else _in_rounds(search, lasting[: at + 1])
        is_in_loop = is_in_loop or bool(loops)
    return None


def _loops_of(frame: FrameType) -> list[Loop] | None:
    """Return the loops that a frame is in, outermost first; ``None`` if its source is not known."""
    tree = source_tree(frame.f_code.co_filename)
    if tree is None:
        return [] if not is_user_code(frame.f_code.co_filename) else None
    if frame.f_code.co_name.startswith("<") and frame.f_code.co_name != "<module>":
        return [*_loops_of_comprehension(tree, frame)]
    return loops_around(tree, line_of(frame))


def _loops_of_comprehension(tree: ast.Module, frame: FrameType) -> Iterator[Loop]:
    """Yield the clauses of the comprehension that a frame runs as loops. Others on its line have other variables."""
    kinds, line = (ast.GeneratorExp, ast.ListComp, ast.SetComp, ast.DictComp), line_of(frame)
    own = {*frame.f_code.co_varnames, *frame.f_code.co_cellvars}
    for node in ast.walk(tree):
        if isinstance(node, kinds) and node.lineno <= line <= (node.end_lineno or node.lineno):
            targets = [name for one in node.generators for name in ast.walk(one.target) if isinstance(name, ast.Name)]
            if not {one.id for one in targets} <= own:
                continue
            for at, one in enumerate(node.generators):
                iterable = one.iter if at else ast.Name(".0")  # which Python evaluates before
                yield ast.For(one.target, iterable, [], [], lineno=one.iter.lineno, col_offset=0)


def _of_loops(frame: FrameType, loops: Sequence[Loop]) -> Search | None:
    with variables_of(frame) as variables:
        names = collections.ChainMap(dict(variables), frame.f_globals, vars(builtins))
        for at in range(len(loops) - 1, -1, -1):
            found = _of_loop(loops[at], names)
            if found is not None:
                rounds = tuple(_round_of(one, names) for one in loops[:at])
                words = f"the loop {found.words} at {_place(frame, loops[at].lineno)}"
                return None if None in rounds else found._replace(words=words, rounds=(id(frame), rounds))
    return None


def _in_rounds(search: Search, frames: Sequence[FrameType]) -> Search:
    """Add the arguments of the function that searches, the last of ``frames``, and the rounds of its callers' loops.

    A function that is called again may have its frame at the same address."""
    own = frames[-1]
    with variables_of(own) as variables:
        given = tuple(id(variables.get(name)) for name in own.f_code.co_varnames[: own.f_code.co_argcount])
    rounds: list[Hashable] = [search.rounds, given]
    for caller, called in itertools.pairwise(frames[-_CALLERS:]):
        loops = _loops_of(caller) or []
        # The innermost one may take what the generator that searches yields.
        loops = loops[:-1] if called.f_code.co_flags & inspect.CO_GENERATOR else loops
        with variables_of(caller) as variables:
            rounds += [_round_of(loop, variables) for loop in loops]
    return search._replace(rounds=tuple(rounds))


def _round_of(loop: Loop, names: Mapping[str, Any]) -> Hashable:
    """Return what tells one round of a loop around a search from the next; ``None`` if nothing does."""
    target = None if isinstance(loop, ast.While) else loop.target
    targets = target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]
    found = [id(names[one.id]) for one in targets if isinstance(one, ast.Name) and one.id in names]
    return tuple(found) or None


def _of_loop(loop: Loop, names: Mapping[str, Any]) -> Search | None:
    if isinstance(loop, ast.While):
        calls = list(_calls_in(loop))
        if any(name in _BOUNDED for name, _ in calls):
            return None
        worked_off = _worked_off(calls)
        tested = {ast.unparse(one) for one in ast.walk(loop.test) if isinstance(one, (ast.Name, ast.Attribute))}
        if not worked_off & tested and not (isinstance(loop.test, ast.Constant) and worked_off):
            return None
        size, turn = next((_size(names[one]) for one in sorted(worked_off) if one in names), (None, None))
        test = textwrap.shorten(ast.unparse(loop.test), _LONGEST, placeholder=" …")
        return Search(f"`while {test}`", size, turn=turn)
    if not (kind := _combinations_in(loop.iter, names)):
        return None
    targets = [names.get(one.id) for one in ast.walk(loop.target) if isinstance(one, ast.Name)]
    turn = next((tuple(map(id, one)) for one in targets if type(one) is tuple), None)
    return Search(f"over `itertools.{kind}()`", turn=turn)


def _combinations_in(iterable: ast.expr, names: Mapping[str, Any]) -> str:
    """Return the class of :mod:`itertools` that a loop goes through, also by another name or within ``enumerate()``;
    empty for other iterables."""
    if isinstance(iterable, ast.Name):
        made = type(names.get(iterable.id))
        return made.__name__ if made in _COMBINATIONS else ""
    if not isinstance(iterable, ast.Call):
        return ""
    called = _value(iterable.func, names)
    if called in _COMBINATIONS:
        return str(called.__name__)
    return _combinations_in(iterable.args[0], names) if called is enumerate and iterable.args else ""


def _calls_in(loop: ast.While) -> Iterator[tuple[str, str]]:
    """Yield the name of each function that a loop calls, and the container that it belongs to, or is given first."""
    for node in ast.walk(loop):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            of_heap = node.func.attr.startswith("heap") and node.args
            yield node.func.attr, ast.unparse(node.args[0] if of_heap else node.func.value)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield node.func.id, ast.unparse(node.args[0]) if node.args else ""


def _worked_off(calls: Sequence[tuple[str, str]]) -> set[str]:
    """Return the containers that a loop both takes from and puts into."""
    grow = {container for name, container in calls if name in _GROWS}
    return grow & {container for name, container in calls if name in _SHRINKS}


def _size(value: Any) -> tuple[int | None, Hashable]:
    """Return the length of a container of Python itself, whose methods run no code of the program, and what differs
    from one turn to another."""
    if type(value) not in _CONTAINERS:
        return None, None
    last = id(value[-1]) if type(value) in (list, collections.deque) and value else None
    return len(value), (len(value), last)


def _value(node: ast.expr, names: Mapping[str, Any]) -> Any:
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and names.get(node.value.id) is itertools:
        return getattr(itertools, node.attr, None)
    return None


def _name(frame: FrameType) -> str:
    """Return ``fibonacci() at train.py:12``: the function around a comprehension too."""
    outer: FrameType | None = frame
    while outer is not None and outer.f_code.co_name.startswith("<"):
        outer = outer.f_back
    named = outer or frame
    return f"{named.f_code.co_name}() at {_place(named, line_of(named))}"


def _place(frame: FrameType, line: int) -> str:
    return f"{frame.f_code.co_filename.rpartition('/')[2]}:{line}"
