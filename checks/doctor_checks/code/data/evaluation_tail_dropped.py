"""CODE015: an evaluation that drops the last samples, or counts some twice."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from doctor.api import Script, Severity, Violation, rule
from doctor.lint.python.loader_calls import (
    LoaderCall,
    belongs_to_lightning,
    evaluates,
    is_cut_short,
    is_endless,
    is_read_by_one_rank,
    is_sharded_by_framework,
    is_unused,
    loaders,
    loops_over,
    target_name,
    words_of,
)
from doctor.lint.python.project.left_defaults import shown_numbers
from doctor.lint.python.project.loader_loops import computed_over, trains
from doctor.lint.python.project.one_process import never_runs
from doctor.lint.python.project.settings.option_values import values_in_own_file
from doctor.lint.python.rank_branches import rank_condition
from doctor.lint.python.script import last_name
from doctor.lint.python.training import ACCELERATOR, SAMPLER, is_test, several_ranks
from doctor.lint.python.value_flow import handed_in
from doctor.testing.script_cases import fails, passes

_WHOLE_BATCHES = re.compile(
    r"fp8|float8|torch_xla|transformer_engine|static_shape|fsdp|fully_?shard|PipelineModule|Schedule(?:GPipe|\w{0,40}1F1B)|"
    r"contrastive|info_?nce|nt_?xent|clip_?loss|in_?batch",
    re.IGNORECASE,
)
"""Files whose kernels or pipelines need full batches in evaluation too, whose ranks synchronize in each forward pass,
or whose loss or metric compares the samples of a batch, so that its value depends on their number."""
_METRICS = re.compile(
    r"accura|(?:\b|_)acc(?:s|\d)?(?:\b|_)|\btop_?[15k]|f1|\bauc|"
    r"auroc|bleu|rouge|psnr|ssim|\bdice|\bm?iou|precision_|recall|perplex|\bppl|score|error_?rate|\b[cw]er\b|"
    r"\bm[as]e\b|rmse|pearson|spearman|lowest|confusion",
    re.IGNORECASE,
)
"""Words of metrics that are reported."""
_DECIDES = re.compile(
    rf"best|early_?stop|should_stop|patience|plateau|monitor|{_METRICS.pattern}",
    re.IGNORECASE,
)
"""Words of files that select something by an evaluation, or compute metrics that are reported."""


@rule(
    id="CODE015",
    severity=Severity.WARNING,
    reads=Script,
    mentions=("drop_last",),
    foreshadows=("DATA007",),
    preview_infos=True,
    cases=lambda: (
        fails("the loader of the test", _script("DataLoader(test_set, 64, sampler=shares, drop_last=True)  # !")),
        fails("a loader that Accelerate divides", _PREPARED),
        passes(
            "a loader that Accelerate is not given",
            _PREPARED.replace("  # !", "").replace(
                "loader, test_loader = accelerator.prepare(model, loader, test_loader)",
                "loader = accelerator.prepare(model, loader)",
            ),
        ),
        fails(
            "a loader that other code may give it",
            _PREPARED.replace("(model, loader, test_loader)", "(*parts)"),
        ),
        fails("returned by a function, where the names of the data say nothing", _FUNCTION),
        fails(
            "its sampler",
            _script(
                "DataLoader(test_set, 64)",
                "test_sampler = DistributedSampler(test_set, shuffle=False, drop_last=True)  # !",
            ),
        ),
        fails("in a data module", _DATA_MODULE),
        passes(
            "the training, where the tail can go",
            _script("DataLoader(test_set)", "train_loader = DataLoader(train_set, drop_last=True)"),
        ),
        passes("a loader that the function which gets it does not read", _IGNORED),
        fails(
            "a loader that it reads",
            _IGNORED.replace("drop_last=True)", "drop_last=True)  # !").replace("tests):", "tests):\n    score(tests)"),
        ),
        passes("a module that is tried out in one process", _TRIED_OUT),
        passes("all of it on each rank", _script("DataLoader(test_set, batch_size=64, drop_last=True)")),
        passes(
            "all of it, with options that are unpacked",
            _script("DataLoader(test_set, drop_last=True, **options)", "options = dict(batch_size=64, num_workers=2)"),
        ),
        fails(
            "a sampler among options that are unpacked",
            _script(
                "DataLoader(test_set, **options)  # !",
                "options = dict(batch_size=64, drop_last=True, sampler=DistributedSampler(test_set))",
            ),
        ),
        passes(
            "all of it, because there is no sampler yet",
            _script("DataLoader(test_set, 64, sampler=shares, drop_last=True)", "shares = None"),
        ),
        passes(
            "a sampler that knows no ranks",
            _script("DataLoader(test_set, 64, sampler=all_of_it, drop_last=True)", _WHOLE_SET),
        ),
        fails(
            "one that knows them in some starts",
            _script(
                "DataLoader(test_set, 64, sampler=all_of_it, drop_last=True)  # !",
                f"{_WHOLE_SET}\nif args.divided:\n    all_of_it = DistributedSampler(test_set)",
            ),
        ),
        passes("kept", _script("DataLoader(test_set, sampler=shares, drop_last=False)")),
        passes(
            "prompts without end",
            _script("DataLoader(test_set, 64, sampler=shares, drop_last=True)")
            + "def prompts():\n    while True:\n        for batch in test_loader:\n            yield batch\n",
        ),
        passes("a loader that the caller does not use", _UNUSED),
        fails("a loader that the caller uses", _UNUSED.replace("drop_last=True)", "drop_last=True)  # !") + _USED),
        passes("a test by the first rank alone, which sees its own share", _OF_FIRST),
        fails(
            "a test by all ranks",
            _OF_FIRST.replace("if dist.get_rank() == 0:", "if True:").replace(
                "drop_last=True)", "drop_last=True)  # !"
            ),
        ),
        passes(
            "stages of a pipeline, whose buffers have the size of a batch",
            _script("DataLoader(test_set, 64, sampler=shares, drop_last=True)", "net = PipelineModule(layers=layers)"),
        ),
        passes(
            "a number of batches",
            _script("DataLoader(test_set, 64, sampler=shares, drop_last=True)")
            + "for number, batch in enumerate(test_loader):\n    if number == 50:\n        break\n    test(batch)\n",
        ),
        passes(
            "one batch",
            _script("DataLoader(test_set, 64, sampler=shares, drop_last=True)")
            + "for batch in test_loader:\n    test(batch)\n    break\n",
        ),
        fails(
            "until something is found",
            _script("DataLoader(test_set, 64, sampler=shares, drop_last=True)  # !")
            + "for number, batch in enumerate(test_loader):\n    if bad > 50:\n        break\n    test(batch)\n",
        ),
        passes(
            "batches for a look at the results",
            _script("DataLoader(test_set, 64, sampler=shares, drop_last=True)") + "batch = next(iter(test_loader))\n",
        ),
        fails(
            "batches for a look, and a test",
            _script("DataLoader(test_set, 64, sampler=shares, drop_last=True)  # !")
            + "batch = next(iter(test_loader))\ntest(test_loader)\n",
        ),
        passes(
            "a loss that compares the samples of a batch",
            _script("DataLoader(test_set, 64, sampler=shares, drop_last=True)", "loss = InfoNCE()"),
        ),
        passes(
            "an adaptation to the samples of a test",
            _script("DataLoader(test_set, 64, sampler=shares, drop_last=True)")
            + "for batch in test_loader:\n    adapt(batch).backward()\n",
        ),
        fails(
            "an evaluation of them",
            _script("DataLoader(test_set, 64, sampler=shares, drop_last=True)  # !")
            + "for batch in test_loader:\n    count(adapt(batch))\n",
        ),
        passes("one sample a batch", _script("DataLoader(test_set, sampler=shares, drop_last=True)")),
        passes(
            "the samplers' rest by itself",
            _script("DataLoader(test_set, 64)", "test_sampler = DistributedSampler(test_set, drop_last=True)")
            + "rest = Subset(test_loader.dataset, range(64, 99))\n",
        ),
        passes(
            "one loader for both",
            _script("0", "def make(dataset, is_train):\n    return DataLoader(dataset, drop_last=is_train)"),
        ),
        passes(
            "one process",
            _script("DataLoader(test_set, 64, sampler=s, drop_last=True)").replace("dist.init_process_group()", ""),
        ),
    ),
)
def evaluation_tail_dropped(script: Script) -> Iterator[Violation]:
    """Ask whether an evaluation on several ranks covers all samples.

    Why it hurts: the metric leaves out the dropped samples, so it depends on the number of ranks and the batch size.
    Fix: Remove `drop_last=True`: a forward pass under DDP does not need batches of equal size.
    """
    if several_ranks(script) is None or _WHOLE_BATCHES.search(script.text) or is_test(script):
        return
    for loader in loaders(script):
        if (
            not loader.evaluates
            or _is_whole(script, loader.call)
            or is_unused(script, loader)
            or _is_trained_on(script, loader)
            or _is_of_one_rank(script, loader.name)
            or is_endless(script, loader.call, loader.name)
            or is_cut_short(script, loader.name)
            or not _is_divided(script, loader.call)
        ):
            continue
        if script.value(script.argument(loader.call, "drop_last", 8)) is True:
            size = script.value(script.argument(loader.call, "batch_size", 1))
            batch = "a batch of the evaluation"
            if isinstance(size, int) and size > 1:
                batch = f"{size - 1} evaluation sample{'s' if size > 2 else ''}"
            yield Violation(
                loader.call,
                f"{loader.title} drops up to {batch} on each rank (drop_last=True)",
                # A few samples of a validation set, or a mean that is logged, or selects a checkpoint
                severity=Severity.INFO
                if _costs_little(script, loader) or _only_logs(script, loader.call) or _is_for_loss(script, loader)
                else None,
            )
    for call in script.calls(SAMPLER):
        data = script.argument(call, "dataset", 0)
        purposes = [evaluates(target_name(script, call)), evaluates(script.text_of(data)) if data is not None else None]
        if True not in purposes or False in purposes or _is_made_up_for(script) or _feeds_one_rank(script, call):
            continue
        if script.value(script.argument(call, "drop_last", 5)) is True:
            name = target_name(script, call) or "DistributedSampler"
            yield Violation(
                call,
                f"{name} (line {call.lineno}) drops up to world_size - 1 evaluation samples (drop_last=True)",
                fix=f"Evaluate the last samples separately: `Subset({script.text_of(data, 40) if data else 'dataset'}, "
                f"range(len({target_name(script, call) or 'sampler'}) * world_size, "
                f"len({script.text_of(data, 40) if data else 'dataset'})))`.",
                effect="The metric leaves out the dropped samples, so it depends on the number of ranks.",
                severity=Severity.INFO,
            )


def _only_logs(script: Script, loader: ast.Call) -> bool:
    """Whether a file evaluates itself, and neither it nor what it imports from the project has a word for a metric or
    for a selection: the mean of a loss, which is logged."""
    if not _EVALUATES.search(script.text) or belongs_to_lightning(script, loader):
        return False
    texts = script.modules.texts_around(script.location) if script.modules is not None else ()
    return not any(_DECIDES.search(text) for text in (script.text, *texts))


_SELECTING = re.compile(
    r"^_*(?:val|valid|validation|dev|eval)(?:_|$)|_(?:val|valid|validation|dev|eval)(?:_|$)", re.IGNORECASE
)


def _is_for_loss(script: Script, loader: LoaderCall) -> bool:
    """Whether all that the project computes over a loader for validation are losses, by the names in the loops over it
    and in the functions that it is handed to: their mean selects a checkpoint at most."""
    if not _SELECTING.search(loader.name):
        return False
    blocks = list(_computed_over(script, loader.name))
    texts = ["\n".join(map(ast.unparse, one)) for one in blocks if one is not None]
    is_known = bool(blocks) and len(texts) == len(blocks)
    return is_known and all("loss" in one.lower() and not _METRICS.search(one) for one in texts)


def _computed_over(script: Script, name: str) -> Iterator[list[ast.stmt] | None]:
    """What is done with the batches of a loader, in the files of the project that name it."""
    modules = script.modules
    if not name.isidentifier():
        return
    texts = {script.path: script.text}
    texts |= {shown: text for shown, text in modules.mentioning(name) if shown.endswith(".py")} if modules else {}
    near = list(modules.texts_around(script.location)) if modules is not None else []
    yield from computed_over(name, texts.values(), near)


def _is_trained_on(script: Script, loader: LoaderCall) -> bool:
    """Whether every loop over a loader computes gradients: what it leaves out is for training."""
    bodies = [one for one in loops_over(script, loader.name) if loader.name]
    return bool(bodies) and all(trains(one.body) for one in bodies)


_EVALUATES = re.compile(r"\.eval\(\)|\bno_grad\b|\binference_mode\b")


def _is_divided(script: Script, loader: ast.Call) -> bool:
    """Whether each rank reads its share of the data. Without a sampler, or with one that knows no ranks in all starts
    that the project shows, all read the same, and drop the same tail however many they are."""
    samplers = (script.argument(loader, name) for name in ("sampler", "batch_sampler"))
    given = any(one is not None and not _knows_no_ranks(script, one) for one in samplers)
    is_sharded = is_sharded_by_framework(script, loader) and not _is_left_out(script, loader)
    return given or script.is_open(loader) or is_sharded


def _is_left_out(script: Script, loader: ast.Call) -> bool:
    """Whether the function that makes a loader hands others to ``Accelerator.prepare``, by name, but not this one:
    then each rank reads all of it."""
    function, name = script.function_of(loader), target_name(script, loader)
    made = next(script.calls(ACCELERATOR), None)
    calls = [
        one for one in script.method_calls("prepare", "prepare_data_loader") if script.function_of(one) is function
    ]
    given = [one for call in calls for one in (*call.args, *(word.value for word in call.keywords))]
    if made is None or not name or not given or not all(isinstance(one, (ast.Name, ast.Attribute)) for one in given):
        return False
    return not belongs_to_lightning(script, loader) and name not in map(last_name, given)


def _knows_no_ranks(script: Script, sampler: ast.expr) -> bool:
    values = [one for one in script.values_of(sampler) if not never_runs(script, one, options=True)]
    return bool(script.values_of(sampler)) and all(
        (isinstance(one, ast.Constant) and one.value is None)
        or (isinstance(one, ast.Call) and script.name(one.func) in _WHOLE)
        for one in values
    )


_WHOLE = tuple(
    f"torch.utils.data.{part}{name}Sampler" for part in ("", "sampler.") for name in ("Sequential", "Random")
)


def _is_whole(script: Script, loader: ast.Call) -> bool:
    """Batches of one sample, which leave no remainder, or a loader of one rank."""
    size = script.argument(loader, "batch_size", 1)
    given = list(handed_in(script, size)) if size is not None else []
    one = size is None or script.value(size) == 1 or (bool(given) and all(script.value(part) == 1 for part in given))
    one = one or (size is not None and _sizes(script, size) == {1})
    return (one and not script.is_open(loader)) or rank_condition(script, loader) is not None


def _sizes(script: Script, size: ast.expr) -> frozenset[object]:
    """The sizes of a batch that the project shows."""
    return values_in_own_file(script, size) or shown_numbers(script, size)


def _costs_little(script: Script, loader: LoaderCall) -> bool:
    """Whether each rank leaves out fewer than :data:`_FEW` samples of a validation set, by all sizes of a batch that
    the project shows: they change less than the selection of a checkpoint depends on. Of a test set, it may leave out
    one."""
    size = script.argument(loader.call, "batch_size", 1)
    data = script.argument(loader.call, "dataset", 0)
    names = {word for one in (loader.name, script.text_of(data) if data is not None else "") for word in words_of(one)}
    sizes = _sizes(script, size) if size is not None else frozenset()
    is_of_test = not names.isdisjoint(_OF_TESTS)
    if size is None or (is_of_test and not sizes):
        return False
    most = _FEW_OF_TEST if is_of_test else _FEW
    return all(isinstance(one, (int, float)) and one <= most for one in sizes)


_FEW, _FEW_OF_TEST = 8, 2
_OF_TESTS = frozenset({"test", "testing"})


def _is_of_one_rank(script: Script, name: str) -> bool:
    """Whether only some ranks evaluate: that misses far more than what is dropped."""
    return bool(name) and is_read_by_one_rank(script, name)


def _feeds_one_rank(script: Script, sampler: ast.Call) -> bool:
    """Whether only loaders which are not read, or which only some ranks read, have a sampler."""
    fed = [
        loader
        for loader in loaders(script)
        if any(sampler in script.values_of(given) for given in _samplers_of(script, loader.call))
    ]
    return bool(fed) and all(is_unused(script, one) or _is_of_one_rank(script, one.name) for one in fed)


def _samplers_of(script: Script, loader: ast.Call) -> list[ast.expr]:
    given = (script.argument(loader, name) for name in ("sampler", "batch_sampler"))
    return [one for one in given if one is not None]


def _is_made_up_for(script: Script) -> bool:
    subsets = (script.argument(call, "dataset", 0) for call in script.calls("torch.utils.data.Subset"))
    return any(one is not None and evaluates(script.text_of(one)) for one in subsets)


_PREPARED = """\
from accelerate import Accelerator
from torch.utils.data import DataLoader

accelerator = Accelerator()
train_set, test_set = load()
loader = DataLoader(train_set, 64, shuffle=True)
test_loader = DataLoader(test_set, 64, drop_last=True)  # !
model, loader, test_loader = accelerator.prepare(model, loader, test_loader)
"""


def _script(loader: str, before: str = "pass") -> str:
    return f"""\
from torch.utils.data import DataLoader, DistributedSampler, Subset

dist.init_process_group()
train_set, test_set = load()
{before}
test_loader = {loader}
"""


_WHOLE_SET = "all_of_it = torch.utils.data.SequentialSampler(test_set)"
_UNUSED = """\
from torch.utils.data import DataLoader, DistributedSampler

def build(train_set, test_set, shares):
    train_loader = DataLoader(train_set, 64, sampler=DistributedSampler(train_set))
    test_loader = DataLoader(test_set, 64, sampler=shares, drop_last=True)
    return train_loader, test_loader

def main():
    dist.init_process_group()
    train_loader, test_loader = build(*load())
    train(train_loader)
"""
_USED = """\
    test(test_loader)
"""
_OF_FIRST = """\
from torch.utils.data import DataLoader, DistributedSampler

def test(loader):
    for images, labels in loader:
        count(model(images), labels)

dist.init_process_group()
train_set, test_set = load()
test_loader = DataLoader(test_set, 64, sampler=DistributedSampler(test_set), drop_last=True)
if dist.get_rank() == 0:
    test(test_loader)
"""
_TRIED_OUT = """\
from torch.utils.data import DataLoader, DistributedSampler

def make(data):
    return DataLoader(data, sampler=DistributedSampler(data, shuffle=True))

if __name__ == "__main__":
    val_loader = DataLoader(Scans("data"), batch_size=4, drop_last=True)
    for x in val_loader:
        print(x.shape)
"""
_IGNORED = """\
from torch.utils.data import DataLoader, DistributedSampler

def train(model, batches, tests):
    for batch in batches:
        model(batch).sum().backward()

def main(model, seen, unseen):
    dist.init_process_group()
    train_loader = DataLoader(seen, 64, sampler=DistributedSampler(seen))
    test_loader = DataLoader(unseen, 64, sampler=DistributedSampler(unseen), drop_last=True)
    train(model, train_loader, test_loader)
"""
_DATA_MODULE = """\
import pytorch_lightning as pl

class Scans(pl.LightningDataModule):
    def val_dataloader(self):
        return DataLoader(self.scans["held out"], batch_size=4, drop_last=True)  # !

    def train_dataloader(self):
        return DataLoader(self.scans["seen"], batch_size=4, drop_last=True)

trainer = pl.Trainer(accelerator="gpu", devices=4, strategy="ddp")
"""
_FUNCTION = """\
def get_val_loader(folder, options):
    images = Images(folder)
    return DataLoader(  # !
        images, batch_size=32, drop_last=True, **options
    )

torch.distributed.init_process_group("nccl")
"""
