"""The repeated blocks of a model, which activation checkpointing wraps and FSDP shards."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch.nn import Module, ModuleDict, ModuleList, Sequential
from torch.utils.checkpoint import checkpoint

_CONTAINERS = (ModuleList, ModuleDict, Sequential)
NEARLY = 0.8
"""Share of the largest class's parameters from which on another class may be the better block."""
BESIDE = 0.2
"""Share of the blocks' parameters from which on blocks of another class beside them count, as encoder layers beside
decoder layers."""


def repeated_blocks(module: Module) -> tuple[Module, ...]:
    """Return two or more members of lists, of the class that holds most parameters and of those beside it, none nested.

    The model's own classes are preferred to sequences, and these to single layers."""
    members: dict[type, dict[int, Module]] = defaultdict(dict)
    for container in module.modules():
        for child in container.children() if isinstance(container, _CONTAINERS) else ():
            if not isinstance(child, (ModuleList, ModuleDict)):
                members[type(child)][id(child)] = child
    found = [_outermost(tuple(blocks.values())) for blocks in members.values()]
    sizes = {blocks: _size(blocks) for blocks in found if len(blocks) > 1}
    enough = NEARLY * max(sizes.values(), default=0)
    candidates = [blocks for blocks, size in sizes.items() if size and size >= enough]
    best = max(candidates, key=lambda blocks: (_rank(blocks[0]), sizes[blocks], -len(blocks)), default=())
    enough = BESIDE * sizes.get(best, 0)
    for other in sorted(sizes, key=lambda blocks: -sizes[blocks]) if best else ():
        if sizes[other] >= enough and _rank(other[0]) == _rank(best[0]) and not _overlap(best, other):
            best += other
    places = {id(each): place for place, each in enumerate(module.modules())}
    return tuple(sorted(best, key=lambda block: places[id(block)]))


def _overlap(some: tuple[Module, ...], others: tuple[Module, ...]) -> bool:
    seen, inside = ({id(each) for block in blocks for each in block.modules()} for blocks in (some, others))
    return not seen.isdisjoint(inside)


def _rank(block: Module) -> int:
    if isinstance(block, Sequential):
        return 1
    return 2 if any(True for _ in block.children()) else 0


def _outermost(blocks: tuple[Module, ...]) -> tuple[Module, ...]:
    inner = {id(each) for block in blocks for each in block.modules() if each is not block}
    return tuple(block for block in blocks if id(block) not in inner)


def _size(blocks: tuple[Module, ...]) -> int:
    return sum({id(each): each.numel() for block in blocks for each in block.parameters()}.values())


@contextmanager
def checkpointed(blocks: tuple[Module, ...]) -> Iterator[None]:
    """Let each block save only its inputs, and run again in the backward pass."""
    for block in blocks:
        block.forward = partial(_again, block.forward)
    try:
        yield
    finally:
        for block in blocks:
            del block.forward


def _again(forward: Any, *args: Any, **kwargs: Any) -> Any:
    # The RNG state would be saved on a GPU, which may not exist; fake tensors have no values that could differ.
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, determinism_check="none", **kwargs)


def in_words(blocks: tuple[Module, ...]) -> str:
    """Return ``12 x Block``."""
    kinds = {type(block).__name__ for block in blocks}
    return f"{len(blocks)} x {', '.join(sorted(kinds))}"
