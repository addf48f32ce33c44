"""CODE031: a random split of the data that differs between ranks."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from doctor.api import Script, Severity, Violation, rule
from doctor.lint.python.loader_calls import depends_on_ranks
from doctor.lint.python.rank_branches import is_rank, rank_condition
from doctor.lint.python.reachable_functions import is_run_by_all
from doctor.lint.python.script import last_name
from doctor.lint.python.training import several_ranks
from doctor.testing.script_cases import fails, passes

_SPLITS = {
    "torch.utils.data.random_split": ("generator", 2),
    "sklearn.model_selection.train_test_split": ("random_state", None),
    "sklearn.model_selection._split.train_test_split": ("random_state", None),
}
"""Calls that draw random numbers, and their source argument."""
_ORDERS = {
    "torch.randperm": ("generator", None),
    "numpy.random.permutation": ("", None),
    "numpy.random.shuffle": ("", None),
    "random.shuffle": ("", None),
}
_SUBSETS = (
    "torch.utils.data.Subset",
    "torch.utils.data.SubsetRandomSampler",
    "torch.utils.data.sampler.SubsetRandomSampler",
)
_SEEDS = re.compile(r"seed|deterministic|fix_random|reproduc", re.IGNORECASE)
_PREPARES = re.compile(
    r"_?(?:set_?up|init|config|prepare|launch|start|bootstrap)(?![a-z]*_?(?:log|wandb))", re.IGNORECASE
)
"""Names of functions that prepare a process."""
_LIBRARIES = frozenset({"torch", "lightning", "accelerate", "deepspeed", "horovod", "wandb", "logging", "threading"})
"""Packages whose functions of such names set no seed."""
_COPIED = ("spawn", "fork", "notebook")


@rule(
    id="CODE031",
    severity=Severity.ERROR,
    reads=Script,
    mentions=("random_split", "train_test_split", "Subset"),
    foreshadows=("DATA005",),
    impacts={
        r"rank-specific": (
            "Each rank trains on samples that other ranks validate on, so the validation metric is too optimistic."
        ),
    },
    cases=lambda: (
        fails("random_split without a generator", _script("train, val = random_split(data, [0.9, 0.1])  # !")),
        fails(
            "each rank with a seed of its own",
            _script("torch.manual_seed(42 + rank)\ntrain, val = random_split(data, [900, 100])  # !"),
        ),
        fails(
            "indices in another order on each rank",
            _script("order = torch.randperm(len(data)).tolist()  # !\ntrain = Subset(data, order[:900])"),
        ),
        fails(
            "shuffled in place",
            _script("order = list(range(len(data)))\nrandom.shuffle(order)  # !\ntrain = Subset(data, order[100:])"),
        ),
        fails("in a data module of Lightning", _DATA_MODULE),
        passes(
            "a generator with a seed",
            _script("train, val = random_split(data, [0.9, 0.1], generator=torch.Generator().manual_seed(0))"),
        ),
        passes("one seed on all ranks", _script("torch.manual_seed(42)\ntrain, val = random_split(data, [0.9, 0.1])")),
        passes(
            "seeded by a function of somebody else",
            _script("set_seed(args.seed)\ntrain, val = random_split(data, [0.9, 0.1])"),
        ),
        passes(
            "seeded by Lightning",
            _DATA_MODULE.replace("trainer =", "L.seed_everything(1)\ntrainer =").replace("# !", ""),
        ),
        passes(
            "the order of rank 0, sent to all",
            _script("order = torch.randperm(len(data))\ndist.broadcast(order, 0)\ntrain = Subset(data, order[:900])"),
        ),
        passes("an order for another use", _script("noise = torch.randperm(10)")),
        passes(
            "one process",
            _script("train, val = random_split(data, [0.9, 0.1])")
            .replace("dist.init", "# dist.init")
            .replace("DistributedSampler(train)", "None"),
        ),
        passes("before ranks are started, which get the same", _SPAWNED),
        passes("the others only count what rank 0 keeps", _KEPT_BY_ONE),
        fails(
            "rank 0 keeps what all of them train on",
            _KEPT_BY_ONE.replace("[0.9, 0.1])", "[0.9, 0.1])  # !") + "fit(train)\n",
        ),
    ),
)
def split_not_seeded(script: Script) -> Iterator[Violation]:
    """Ask whether all ranks split the data in the same way.

    Why it hurts: each rank trains on samples that other ranks validate on, so the validation metric is too optimistic.
    Fix: Pass a generator with the same seed on all ranks (`generator=torch.Generator().manual_seed(42)`).
    """
    ranks = several_ranks(script)
    if ranks is None or _copies(script, ranks):
        return
    seeds = [call for call in script.all(ast.Call) if _is_seeding(last_name(call.func))]
    for call, argument in _draws(script):
        if _is_shared(script, call):
            continue
        alone = not is_run_by_all(script, call) or depends_on_ranks(script, call) or _is_kept_by_one(script, call)
        if not alone and not (argument and script.is_given(call, *argument)):
            before = [one for one in seeds if _comes_first(script, one, call)]
            own = _own_seed(script, before)
            if not before or own is not None:
                seed = f"a rank-specific seed (line {own.lineno})" if own is not None else "no fixed seed"
                yield Violation(
                    call,
                    f"{script.text_of(call.func)} uses {seed}: each rank gets a different split",
                    fix=_fix(script, call),
                    severity=Severity.WARNING if own is None and _may_be_seeded(script, call) else None,
                )


def _fix(script: Script, call: ast.Call) -> str:
    name = script.name(call.func)
    if last_name(call.func) == "random_split":
        return ""
    if last_name(call.func) == "train_test_split":
        return "Pass the same seed on all ranks (`random_state=42`)."
    library = name.rpartition(".")[0]
    seed = "torch.manual_seed(42)" if library == "torch" else f"{library}.seed(42)"
    return f"Set the same seed on all ranks before line {call.lineno}, for example `{seed}`."


def _draws(script: Script) -> Iterator[tuple[ast.Call, tuple[str, int | None] | None]]:
    for name, argument in _SPLITS.items():
        yield from ((call, argument) for call in script.calls(name))
    for name, argument in _ORDERS.items():
        for call in script.calls(name):
            if _parts_data(script, call):
                yield call, argument if argument[0] else None


def _is_shared(script: Script, call: ast.Call) -> bool:
    names = _names_of(script, call.args[0] if _in_place(call) and call.args else call)
    for sent in script.method_calls("broadcast", "broadcast_object_list"):
        if any(isinstance(part, ast.Name) and part.id in names for one in sent.args for part in ast.walk(one)):
            return True
    return False


def _is_kept_by_one(script: Script, call: ast.Call) -> bool:
    """Whether only one rank uses the parts, as to write them to files; others may print how many there are."""
    names = _names_of(script, call)
    function = script.function_of(call)
    reads = [
        one
        for one in script.all(ast.Name)
        if isinstance(one.ctx, ast.Load) and one.id in names and script.function_of(one) is function
    ]
    used = [one for one in reads if script.nearest(one, ast.JoinedStr) is None]
    return bool(used) and all(rank_condition(script, one) is not None for one in used)


def _parts_data(script: Script, call: ast.Call) -> bool:
    kept = call.args[0] if _in_place(call) and call.args else call
    names = _names_of(script, kept)
    for subset in script.calls(*_SUBSETS):
        for part in (node for one in subset.args[:2] for node in ast.walk(one)):
            if part is call or (isinstance(part, ast.Name) and (part.id in names or _sliced_from(script, part, names))):
                return True
    return False


def _in_place(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and call.func.attr == "shuffle"


def _names_of(script: Script, node: ast.expr) -> set[str]:
    if isinstance(node, ast.Name):
        return {node.id}
    statement = script.statement_of(node)
    if isinstance(statement, ast.Assign):
        return {one.id for target in statement.targets for one in ast.walk(target) if isinstance(one, ast.Name)}
    return set()


def _sliced_from(script: Script, name: ast.Name, names: set[str]) -> bool:
    """``train_order = order[:900]``."""
    parts = (part for value in script.values_of(name) for part in ast.walk(value))
    return any(isinstance(part, ast.Name) and part.id in names for part in parts)


def _is_seeding(called: str) -> bool:
    return bool(_SEEDS.search(called)) and "get" not in called and "initial_seed" not in called


def _comes_first(script: Script, seed: ast.Call, draw: ast.Call) -> bool:
    return script.function_of(seed) is not script.function_of(draw) or seed.lineno <= draw.lineno


def _may_be_seeded(script: Script, draw: ast.Call) -> bool:
    """Whether a function of another module of the project, which may set the seed, prepares the process before."""
    prepares = (one for one in script.all(ast.Call) if _PREPARES.match(last_name(one.func)))
    return any(
        _comes_first(script, one, draw)
        and script.definition(one.func) is None
        and script.name(one.func).partition(".")[0] not in _LIBRARIES
        for one in prepares
    )


def _own_seed(script: Script, seeds: list[ast.Call]) -> ast.Call | None:
    own = [
        one
        for one in seeds
        if any(is_rank(script, part) for given in one.args for part in ast.walk(given) if isinstance(part, ast.expr))
    ]
    return own[0] if own and len(own) == len(seeds) else None


def _copies(script: Script, ranks: ast.Call) -> bool:
    """Whether a Trainer copies its process, with the drawn numbers, to the ranks."""
    strategy = script.value(script.argument(ranks, "strategy"))
    return isinstance(strategy, str) and any(word in strategy for word in _COPIED)


def _script(body: str) -> str:
    return f"""\
import random
import torch
from torch.utils.data import Subset, random_split
from helpers import args, build, load, set_seed

dist.init_process_group("nccl")
rank = dist.get_rank()
data = load()
{body}
loader = DataLoader(train, sampler=DistributedSampler(train))
"""


_DATA_MODULE = """\
from torch.utils.data import random_split

class Data(L.LightningDataModule):
    def setup(self, stage):
        whole = load(self.root)
        self.train, self.val = random_split(whole, [0.8, 0.2])  # !

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=32, shuffle=True)

trainer = L.Trainer(devices=2, strategy="ddp")
"""
_SPAWNED = """\
import torch
from torch.utils.data import random_split

def main(rank, train):
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    sampler = DistributedSampler(train)

if __name__ == "__main__":
    train, val = random_split(load(), [0.9, 0.1])
    mp.spawn(main, args=(train,), nprocs=2)
"""
_KEPT_BY_ONE = """\
import torch
from torch.utils.data import random_split

torch.distributed.init_process_group("nccl")
train, val = random_split(load(), [0.9, 0.1])
print(f"{len(train)} and {len(val)} samples")
if torch.distributed.get_rank() == 0:
    save(train, "train.json")
    save(val, "val.json")
"""
