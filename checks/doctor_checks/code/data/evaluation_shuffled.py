"""CODE014: an evaluation data loader that shuffles."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from doctor.api import Script, SetArgument, Severity, Violation, location_of, rule
from doctor.lint.python.loader_calls import (
    evaluates,
    is_collected,
    is_endless,
    is_sharded_by_framework,
    loaders,
    target_name,
)
from doctor.lint.python.script import last_name
from doctor.lint.python.training import RANK_WORDS, SAMPLER, is_test, several_ranks, unwrapped
from doctor.testing.script_cases import fails, passes


@rule(
    id="CODE014",
    severity=Severity.INFO,
    state="preview",
    reads=Script,
    mentions=RANK_WORDS,
    foreshadows=("DATA007",),
    cases=lambda: (
        fails(
            "the loader of the validation",
            _script("DataLoader(val_set, batch_size=64, shuffle=True)  # !"),
            _script("DataLoader(val_set, batch_size=64, shuffle=False)"),
        ),
        fails("by position", _script("DataLoader(val_set, 64, True)  # !")),
        fails(
            "in a function that gets the loader",
            _script("DataLoader(val_set, shuffle=True)  # !", loop=_FUNCTION),
            _script("DataLoader(val_set, shuffle=False)", loop=_FUNCTION),
        ),
        fails(
            "a sampler with another tail to drop in each epoch",
            _script(_TAIL, "val_sampler = DistributedSampler(val_set)  # !", loop=_MOVED),
            _script(_TAIL, "val_sampler = DistributedSampler(val_set, shuffle=False)", loop=_MOVED),
        ),
        passes("sums, which have no order", _script("DataLoader(val_set, 64, shuffle=True)", loop=_SUMS)),
        passes(
            "sums with a sampler",
            _script(
                "DataLoader(val_set, sampler=val_sampler)", "val_sampler = DistributedSampler(val_set)", loop=_SUMS
            ),
        ),
        passes("results beside their labels", _script("DataLoader(val_set, shuffle=True)", loop=_PAIRS)),
        passes("a loader that nothing reads", _script("DataLoader(val_set, shuffle=True)", loop="")),
        passes("in a data module of Lightning, which adds a sampler", _DATA_MODULE),
        fails(
            "a sampler, which shuffles unless it is told not to",
            _script("DataLoader(val_set, sampler=val_sampler)", "val_sampler = DistributedSampler(val_set)  # !"),
            _script(
                "DataLoader(val_set, sampler=val_sampler)", "val_sampler = DistributedSampler(val_set, shuffle=False)"
            ),
        ),
        passes("in order", _script("DataLoader(val_set, batch_size=64)")),
        passes("the training", _script("DataLoader(val_set)", "train_loader = DataLoader(train_set, shuffle=True)")),
        passes(
            "a sampler that shuffles by intention",
            _script("DataLoader(val_set, sampler=sampler)", "val_sampler = DistributedSampler(val_set, shuffle=True)"),
        ),
        passes("one rank", _script("DataLoader(val_set, shuffle=True)").replace("dist.init_process_group()", "")),
        passes(
            "a few pictures to look at",
            _script("DataLoader(val_set, shuffle=True)") + "pictures = next(iter(val_loader))\n",
        ),
        passes(
            "prompts without end",
            _script("DataLoader(val_set, shuffle=True)").partition("for x, y")[0] + _ENDLESS,
        ),
        passes(
            "batches without end, with a sampler",
            _script("cycle(DataLoader(val_set, sampler=val_sampler))", "val_sampler = DistributedSampler(val_set)"),
        ),
    ),
)
def evaluation_shuffled(script: Script) -> Iterator[Violation]:
    """Ask whether evaluation reads its data in order.

    Why it hurts: gathered results do not match the order of the dataset. If the last batch is dropped, each epoch drops
    different samples, so the metric of the same model varies.
    Fix: Pass `shuffle=False`, also to DistributedSampler, whose default is `shuffle=True`.
    """
    if several_ranks(script) is None or is_test(script):
        return
    # Loaders of which only a few batches are used: there the shuffle draws a sample
    taken = [call.args[0] for call in script.all(ast.Call) if last_name(call) in ("next", "islice") and call.args]
    left = [loop.iter for loop in script.all(ast.For) if next(script.inside(loop, ast.Break), None) is not None]
    sources = [unwrapped(one) for one in (*taken, *left)]
    looked_at = {
        one.id if isinstance(one, ast.Name) else one.attr
        for one in sources
        if isinstance(one, (ast.Name, ast.Attribute))
    }
    for loader in loaders(script):
        shuffled = script.argument(loader.call, "shuffle", 2)
        if (
            loader.evaluates
            and script.value(shuffled) is True
            and loader.name not in looked_at
            and not is_endless(script, loader.call, loader.name)
            and not is_sharded_by_framework(script, loader.call)
            and is_collected(script, loader.name)
        ):
            named = any(one.arg == "shuffle" for one in loader.call.keywords)
            yield Violation(
                loader.call,
                f"{loader.title} shuffles the evaluation data: the order of its results differs between ranks",
                fix="Pass `shuffle=False` to the DataLoader.",
                edits=(SetArgument(location_of(loader.call), "shuffle", "False"),) if named else (),
            )
    for call in script.calls(SAMPLER):
        name = target_name(script, call)
        data = script.argument(call, "dataset", 0)
        evaluates_it = (
            evaluates(name) if evaluates(name) is not None else evaluates(script.text_of(data) if data else "")
        )
        if (
            evaluates_it
            and not script.is_given(call, "shuffle", 3)
            and not _is_of_endless(script, call)
            and _matters(script, call, name)
        ):
            yield Violation(
                call,
                f"{name or 'DistributedSampler'} (line {call.lineno}) shuffles the evaluation data, because "
                "shuffle=True is the default",
                fix="Pass `shuffle=False` to DistributedSampler.",
                edits=(SetArgument(location_of(call), "shuffle", "False"),),
            )


def _is_of_endless(script: Script, sampler: ast.Call) -> bool:
    """Whether loaders that are read round and round are all that get a sampler."""
    bound = [
        loader
        for loader in loaders(script)
        if sampler in script.values_of(script.argument(loader.call, "sampler", 3) or loader.call)
    ]
    return bool(bound) and all(is_endless(script, one.call, one.name) for one in bound)


def _matters(script: Script, sampler: ast.Call, name: str) -> bool:
    """Whether the order of a sampler shows in the results: they are collected in order, or each epoch drops others."""
    of_it = [one for one in loaders(script) if _has_sampler(script, one.call, sampler, name)]
    names = {one.name for one in of_it}
    drops = any(
        script.value(script.argument(one.call, "drop_last", 8)) is True
        or (script.is_open(one.call) and _DROPS.search(script.text))
        for one in of_it
    )
    moves = any(
        _OF_SAMPLER.sub("", ast.unparse(call.func)) in names | {name} for call in script.method_calls("set_epoch")
    )
    return (drops and moves) or any(is_collected(script, one) for one in names)


_DROPS = re.compile(r"drop_last[\"']?\s*[:=]\s*True")
_OF_SAMPLER = re.compile(r"(?:\.(?:batch_)?sampler)?\.set_epoch$")


def _has_sampler(script: Script, loader: ast.Call, sampler: ast.Call, name: str) -> bool:
    given = script.argument(loader, "sampler", 3)
    parts = list(ast.walk(given)) if given is not None else []
    return sampler in parts or any(
        isinstance(one, (ast.Name, ast.Attribute)) and last_name(one) == name for one in parts
    )


_ENDLESS = """\
def prompts():
    while True:
        for batch in val_loader:
            yield batch
"""


_COLLECTS = """\
for x, y in val_loader:
    results.append(model(x))
"""
_FUNCTION = """\
def predict(model, batches):
    for step, batch in enumerate(batches):
        numbers.extend(model(batch).tolist())

predict(model, val_loader)
"""
_SUMS = """\
for x, y in val_loader:
    losses.append(criterion(model(x), y).item())
    right += (model(x).argmax(1) == y).sum()
"""
_TAIL = "DataLoader(val_set, sampler=val_sampler, drop_last=True)"
_MOVED: str = _SUMS + "val_sampler.set_epoch(1)\n"
_PAIRS = """\
for x, labels in val_loader:
    results.append(model(x))
    everything.append(labels)
"""


def _script(loader: str, before: str = "pass", loop: str = _COLLECTS) -> str:
    return f"""\
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group()
train_set, val_set = load()
{before}
val_loader = {loader}
{loop}"""


_DATA_MODULE = """\
import lightning.pytorch as pl

class Cats(pl.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(self.train_set, batch_size=32, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.held_out, batch_size=32, shuffle=True, num_workers=4)

pl.Trainer(devices=8, accelerator="gpu").fit(model, Cats())
"""
