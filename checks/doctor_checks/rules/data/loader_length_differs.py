"""DATA001 in scripts: ranks have different numbers of batches."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from doctor.api import Script, Severity, Violation, rule
from doctor.testing.script_cases import fails, passes
from doctor_checks.data.loader_length_differs import loader_length_differs

_EVENS = re.compile(r"\bJoin\(|\.join\(\)|with \w+\.join\(|islice|\bmin\(|drop_last=True|//\s*world|%\s*world")
"""Words of scripts that may give all ranks as many batches."""
_WORLD = re.compile(r"world|num_(?:processes|replicas|ranks)|size$", re.IGNORECASE)


@rule(
    check=loader_length_differs,
    reads=Script,
    severity=Severity.WARNING,
    mentions=("DistributedDataParallel", "FullyShardedDataParallel", "fully_shard"),
    cases=lambda: (
        fails("every world_size-th index", _sliced("Subset(data, indices[rank::world_size])  # !")),
        fails("of functions", _sliced("files[dist.get_rank() :: dist.get_world_size()]  # !")),
        fails("in the loader itself", _sliced("list(data)[args.rank :: args.world_size]  # !")),
        passes(
            "cut to a multiple",
            _sliced("indices[: len(data) // world_size * 2][rank::world_size]"),
        ),
        passes("a slice for something else", _sliced("data\nprint(indices[rank::world_size])")),
        fails("of files, without a loader", _FILES),
        fails("a stream of the rank's own files", _STREAM),
        passes(
            "a stream that begins again", _STREAM.replace("        for path", "        while True:\n         for path")
        ),
        passes("as many steps on all ranks", _STREAM + "    if step == 900:\n        break\n"),
        passes("of files that all ranks read", _FILES.replace("[rank::size]", "")),
        passes(
            "joined",
            _sliced("indices[rank::world_size]").replace("    for batch", "    with model.join():\n     for batch"),
        ),
    ),
)
def loader_length_differs_in_scripts(script: Script) -> Iterator[Violation]:
    """Ask whether slices of the data by rank give all ranks the same number of batches.

    Why it hurts: if the sample adds a batch, the ranks that have it wait in its backward pass for ranks that have left
    the loop.
    Fix: Cut the list to a multiple of the world size before slicing it, or wrap the loop in `with model.join():`.
    """
    # Imported when a script is read, which a watched run does not do: these modules take several milliseconds.
    from doctor.lint.python.training import LOADER, WRAPPERS, loops
    from doctor.lint.python.value_flow import computed_from

    if next(script.calls(*WRAPPERS), None) is None or _EVENS.search(script.text):
        return
    slices = [one for one in script.all(ast.Subscript) if _is_by_rank(script, one)]
    for loop in loops(script) if slices else ():
        for made in script.values_of(loop.source) if loop.trains else ():
            data = made
            if isinstance(made, ast.Call):
                dataset = script.argument(made, "dataset", 0)
                if dataset is None or script.name(made.func) != LOADER:
                    continue
                data = dataset
            behind = {*computed_from(script, data), *_kept_by_stream(script, loop.node, data)}
            for one in slices:
                if one in behind and not _is_cut(script, one):
                    yield Violation(
                        one,
                        f"`{script.text_of(one, 40)}` may give some ranks one more sample than others (loop at line "
                        f"{loop.node.lineno})",
                    )


def _kept_by_stream(script: Script, loop: ast.For, data: ast.expr) -> Iterator[ast.AST]:
    """The nodes of an iterable dataset of the file that a loop reads to its end."""
    from doctor.lint.python.loader_calls import STREAMS
    from doctor.lint.python.training import hooks

    leaves = any(isinstance(one, (ast.Break, ast.Return)) for one in script.inside(loop, ast.stmt))
    for made in script.values_of(data) if not leaves else ():
        owner = script.class_definition(made)
        if owner is None or not script.derives(owner, *STREAMS):
            continue
        parts = [part for method in hooks(owner, "__init__", "__iter__") for part in ast.walk(method)]
        if not any(isinstance(one, ast.While) and script.value(one.test) is True for one in parts):
            yield from parts


def _is_cut(script: Script, node: ast.Subscript) -> bool:
    """Whether the list was cut to a multiple before: ``files = files[: len(files) - len(files) % world_size]``."""
    values = script.values_of(node.value) if isinstance(node.value, ast.Name) else ()
    return any(
        isinstance(part, ast.BinOp) and isinstance(part.op, (ast.Mod, ast.FloorDiv))
        for one in values
        for part in ast.walk(one)
    )


def _is_by_rank(script: Script, node: ast.Subscript) -> bool:
    """``indices[rank::world_size]``."""
    from doctor.lint.python.rank_branches import is_rank
    from doctor.lint.python.script import last_name

    part = node.slice
    if not isinstance(part, ast.Slice) or part.lower is None or part.step is None or part.upper is not None:
        return False
    return is_rank(script, part.lower) and bool(_WORLD.search(last_name(part.step)))


_FILES = """\
rank, size = dist.get_rank(), dist.get_world_size()
model = DDP(net())
files = sorted(folder.glob("*.pt"))
mine = files[rank::size]  # !
for path in mine:
    model(torch.load(path)).sum().backward()
"""


_STREAM = """\
class Shards(torch.utils.data.IterableDataset):
    def __init__(self, paths, rank, world_size):
        self.paths = paths[rank::world_size]  # !

    def __iter__(self):
        for path in self.paths:
            yield from torch.load(path)

shards = Shards(sorted(folder.glob("*.pt")), dist.get_rank(), dist.get_world_size())
model = DDP(net())
loader = DataLoader(shards, batch_size=None)
for step, batch in enumerate(loader):
    model(batch).sum().backward()
"""


def _sliced(data: str) -> str:
    return f"""\
rank, world_size = dist.get_rank(), dist.get_world_size()
model = DDP(net())
for epoch in range(3):
    part = {data.replace(chr(10), chr(10) + "    ")}
    loader = DataLoader(part, batch_size=8)
    for batch in loader:
        model(batch).sum().backward()
"""
