"""CODE010: a training data loader under plain DDP that gives every rank the whole dataset."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from doctor.api import Script, Severity, Violation, rule
from doctor.lint.python.gpu_use import runs_alone
from doctor.lint.python.loader_calls import (
    LoaderCall,
    data_of,
    depends_on_ranks,
    evaluates,
    is_iterable,
    loaders,
    loops_over,
    mentions_ranks,
    words_behind,
)
from doctor.lint.python.project.imported_functions import imported_function
from doctor.lint.python.reachable_functions import is_certain, run_by_all
from doctor.lint.python.script import UNKNOWN, last_name, step_at
from doctor.lint.python.training import (
    SAMPLER,
    WRAPPERS,
    has_backward,
    is_without_gradients,
    loops,
    shards_loaders_itself,
    unwrapped,
)
from doctor.testing.script_cases import fails, passes
from doctor_checks.code.data._imported_loaders import ImportedLoader, imported_loaders, is_made_by_rank

_MADE_UP = re.compile(
    r"^(?:rand|randn|randint|rand_like|randn_like|fake\w*|dummy\w*|synth\w*|toy\w*|"
    r"random_?(?:data|tensor|image|sample|input|text)\w*)$",
    re.IGNORECASE,
)
"""Words of data that each rank generates itself."""
_RANDOM = ("torch.utils.data.RandomSampler", "torch.utils.data.sampler.RandomSampler")
_SHARED_INPUT = ("torch.distributed.tensor.parallel.parallelize_module", "torch.distributed.pipelining.pipeline")
"""Ranks with parts of one model must read the same data."""


@rule(
    id="CODE010",
    severity=Severity.ERROR,
    reads=Script,
    mentions=(
        "DistributedDataParallel",
        "fully_shard",
        "FullyShardedDataParallel",
        "DistributedOptimizer",
        "deepspeed",
    ),
    foreshadows=("DATA003",),
    cases=lambda: (
        fails("plain DDP with a shuffling loader", _script("DataLoader(train_set, batch_size=64, shuffle=True)  # !")),
        fails("the validation has a sampler, the training none", _WITH_VALIDATION),
        fails("FSDP, in functions", _FSDP),
        fails("DeepSpeed, which was not given the data", _DEEPSPEED),
        fails(
            "a sampler that knows no ranks",
            _script("order = RandomSampler(load_corpus())\nloader = DataLoader(load_corpus(), sampler=order)  # !"),
        ),
        fails(
            "a sampler that no loader gets, of data from elsewhere",
            _script(
                "texts = load_corpus()\norder = DistributedSampler(texts)\norder.set_epoch(1)\n"
                "loader = DataLoader(texts, batch_size=8)  # !"
            ),
        ),
        passes(
            "a sampler for one process, another for several",
            _script(
                "kind = RandomSampler(train_set)\nif world_size > 1:\n    kind = DistributedSampler(train_set)\n"
                "loader = DataLoader(train_set, sampler=kind)"
            ),
        ),
        fails("a method makes loader and sampler", _RECIPE),
        passes(
            "a method makes a distributed one",
            _RECIPE.replace("RandomSampler(data)", "DistributedSampler(data)").replace("  # !", ""),
        ),
        passes("DeepSpeed makes the loader", _DEEPSPEED.replace("args=args", "args=args, training_data=train_set")),
        passes("a distributed sampler", _script("DataLoader(train_set, batch_size=64, sampler=sampler)")),
        passes("a loader that a job of several ranks replaces", _REPLACED),
        passes("a loader that is replaced where the model is wrapped", _REPLACED.replace("world > 1", "args.together")),
        fails(
            "a loader that is replaced for another reason",
            _REPLACED.replace("if world > 1", "if args.sorted", 1).replace("shuffle=True)", "shuffle=True)  # !", 1),
        ),
        fails(
            "a loader that is read before it is replaced",
            _REPLACED.replace("    if world", "    fit(train_loader)\n    if world", 1).replace(
                "shuffle=True)", "shuffle=True)  # !", 1
            ),
        ),
        passes("one of the two branches is for one process", _BRANCHES),
        passes("an option without which there are no ranks", _SWITCHED),
        fails(
            "the option, in a program that has ranks without it",
            _SWITCHED.replace("import deepspeed\n", "import deepspeed\n\ndeepspeed.init_distributed()\n").replace(
                "shuffle=True)", "shuffle=True)  # !"
            ),
        ),
        passes("an option that is called dist", _BRANCHES.replace("args.distributed", "args.dist")),
        passes(
            "validation that each rank does as a whole",
            _script("loader = 0\nval_loader = DataLoader(train_set, shuffle=True)"),
        ),
        passes(
            "each rank has its own files",
            _script("DataLoader(Images(f'part-{rank}', transform), batch_size=64, shuffle=True)"),
        ),
        passes("prepared by accelerate", _ACCELERATE),
        passes(
            "a subset by rank",
            _script("DataLoader(Subset(train_set, range(rank, len(train_set), world_size)), shuffle=True)"),
        ),
        passes("a loader over what another one gave this rank", _NESTED),
        passes("each rank draws at random with its own seed, for a number of steps", _OWN_SEED),
        passes(
            "each rank draws with its own seed from a loader without an end",
            _OWN_SEED.replace(
                "    while step < total_steps:\n        for batch in loader:",
                "    if True:\n        for batch in endless(loader):",
            ).replace("step += 1", "step += 1\n            if step > total_steps:\n                break"),
        ),
        fails(
            "the same seed on all ranks",
            _OWN_SEED.replace("seed + rank", "seed").replace("batch_size=8)", "batch_size=8)  # !"),
        ),
        passes("a data set that may be a stream", _script("DataLoader(load_corpus(), batch_size=64)")),
        passes("a caller gives each rank its own file", _OF_OWN_FILE),
        passes("each process that a loop starts has its part", _OF_OWN_PART),
        fails(
            "each process that a loop starts has all",
            _OF_OWN_PART.replace("(mine,)", "(chosen,)").replace("shuffle=True)", "shuffle=True)  # !"),
        ),
        passes("a caller lets another process make it", _OF_OWN_FILE.replace("make(files", "pool.submit(make, files")),
        fails("ranks that the file spawns", _SPAWNED),
        fails(
            "a caller gives all ranks one file",
            _OF_OWN_FILE.replace("files[dist.get_rank()]", "files[0]").replace("(rows))", "(rows))  # !"),
        ),
        passes(
            "samples in the code", _script("DataLoader(TensorDataset(torch.tensor([[1, 2], [3, 4]])), shuffle=True)")
        ),
        fails(
            "options that are unpacked",
            _script("DataLoader(train_set, shuffle=True, **options)  # !", "options = dict(batch_size=8, timeout=9)"),
        ),
        passes(
            "a sampler among options that are unpacked",
            _script("DataLoader(train_set, **options)", "options = dict(batch_size=8, sampler=sampler)"),
        ),
        passes(
            "options that may change",
            _script("DataLoader(train_set, shuffle=True, **options)", "options = dict(batch_size=8)\nfill(options)"),
        ),
        passes("another function trains on one of the same name", _SAME_NAME),
        fails(
            "both functions train",
            _SAME_NAME.replace("with torch.no_grad():", "if True:")
            .replace("total += model(x)", "model(x).sum().backward()")
            .replace(", 8)", ", 8)  # !"),
        ),
        passes("data made up on each rank", _script("DataLoader(TensorDataset(torch.randn(999, 8)), shuffle=True)")),
    ),
)
def loader_not_distributed(script: Script) -> Iterator[Violation]:
    """Ask whether the training data loader shards the data across ranks.

    Why it hurts: an epoch takes as long as on one rank, and contains each sample once per rank.
    Fix: Pass `sampler=DistributedSampler(dataset)` to the loader instead of `shuffle=True`, and call
    `loader.sampler.set_epoch(epoch)` at the start of each epoch.
    """
    # The call that makes ranks train one model; DeepSpeed distributes data that it is given
    engines = (call for call in script.calls("deepspeed.initialize") if not script.is_given(call, "training_data", 3))
    wrapper = next(script.calls(*WRAPPERS), None) or next(engines, None)
    if wrapper is None or shards_loaders_itself(script):
        return
    if next(script.calls(*_SHARED_INPUT), None) is not None or _draws_by_rank(script):
        return
    trained = {loop.source.id for loop in loops(script) if loop.trains and isinstance(loop.source, ast.Name)}
    trained |= {name for loop in loops(script) if loop.trains for name in _returned_for(script, loop.source)}
    for loader in loaders(script):
        if _is_trained_on(script, loader, trained) and _gives_all(script, loader) and not _may_part(script, loader):
            named, given = _dataset_of(script, loader.call)
            is_stopped = _asks_for_epoch_in_vain(script, loader)
            yield Violation(
                loader.call,
                f"{loader.title} has no distributed sampler: each rank trains on all of {named}",
                fix=f"Pass `sampler=DistributedSampler({given})` to the loader{_instead_of(script, loader.call)}, and "
                f"call `{_variable(script, loader.call)}.sampler.set_epoch(epoch)` at the start of each epoch.",
                evidence=(("wrapped_at_line", wrapper.lineno),),
                severity=Severity.INFO if is_stopped else _severity(script, wrapper, loader.call),
                preview=is_stopped,
            )
    for one in imported_loaders(script, trained):
        if _gives_all(one.made_in, one.loader) and not _may_part(one.made_in, one.loader):
            yield _of_other_module(script, one, wrapper)


def _dataset_of(script: Script, loader: ast.Call) -> tuple[str, str]:
    """The dataset of a loader as a sentence names it, and as an argument of another call."""
    data = script.argument(loader, "dataset", 0)
    named = script.text_of(data, 40) if data is not None else "dataset"
    return named, named if isinstance(data, (ast.Name, ast.Attribute)) else "dataset"


def _severity(script: Script, wrapper: ast.Call, loader: ast.Call) -> Severity | None:
    return Severity.WARNING if _has_other_launch(script, wrapper) or _is_alternative(script, loader) else None


def _asks_for_epoch_in_vain(script: Script, loader: LoaderCall) -> bool:
    """Whether every job of several ranks ends at ``loader.sampler.set_epoch(epoch)`` before it trains: the loader has a
    RandomSampler, which has no such method (torch/utils/data/sampler.py)."""
    sampler = script.argument(loader.call, "sampler", 3)
    if sampler is None or not loader.name or not _is_random(script, sampler):
        return False
    for call in script.method_calls("set_epoch"):
        owner = call.func.value if isinstance(call.func, ast.Attribute) else None
        is_own = owner is not None and ast.unparse(owner) in (f"{loader.name}.sampler", ast.unparse(sampler))
        is_caught = script.nearest(call, ast.Try) is not None
        if is_own and not is_caught and script.function_of(call) is script.function_of(loader.call):
            if _comes_first(script, call) and is_certain(script, call):
                return True
    return False


def _comes_first(script: Script, call: ast.Call) -> bool:
    """Whether no loop that trains is above a call, besides those around it."""
    above = (one.node for one in loops(script) if one.trains and one.node.lineno < call.lineno)
    return all(one in script.around(call) for one in above)


def _of_other_module(script: Script, one: ImportedLoader, wrapper: ast.Call) -> Violation:
    made, place = one.loader.call, re.split(r"[/\\]", one.made_in.path)[-1]
    named, given = _dataset_of(one.made_in, made)
    return Violation(
        one.call,
        f"{one.name} has no distributed sampler ({place}:{made.lineno}): each rank trains on all of {named}",
        fix=f"Pass `sampler=DistributedSampler({given})` to the loader at line {made.lineno} of {place}"
        f"{_instead_of(one.made_in, made)}, and call `{one.name}.sampler.set_epoch(epoch)` at the start of each epoch.",
        evidence=(("wrapped_at_line", wrapper.lineno),),
        flow=(step_at(one.made_in, made),),
        severity=Severity.WARNING if _has_other_launch(script, wrapper) else None,
    )


def _instead_of(script: Script, loader: ast.Call) -> str:
    sampler = script.argument(loader, "sampler", 3)
    if sampler is not None:
        return f" instead of `sampler={script.text_of(sampler, 40)}`"
    shuffle = script.argument(loader, "shuffle", 2)
    if shuffle is None or script.value(shuffle) is not True:
        return ""
    text = script.text_of(shuffle, 40)
    return f" instead of `shuffle={text}`" if shuffle not in loader.args else f" instead of `{text}` (shuffle)"


def _variable(script: Script, loader: ast.Call) -> str:
    """The variable that the loader is assigned to; `loader` if it has none."""
    statement = script.parent(loader)
    target = statement.targets[0] if isinstance(statement, ast.Assign) else None
    return script.text_of(target) if isinstance(target, (ast.Name, ast.Attribute)) else "loader"


def _has_other_launch(script: Script, wrapper: ast.Call) -> bool:
    """Whether the wrapper is in a branch, and the file trains with DataParallel otherwise: it may be started as one
    process always."""
    return script.nearest(wrapper, ast.If) is not None and next(script.calls("torch.nn.DataParallel"), None) is not None


def _is_alternative(script: Script, loader: ast.Call) -> bool:
    """Whether the opposite branch has a distributed sampler: the test may ask whether the job has several ranks."""
    others = (one.orelse if is_in_body else one.body for one, is_in_body in script.branches(loader))
    calls = (call for block in others for one in block for call in script.inside(one, ast.Call))
    return any(script.name(call.func) == SAMPLER for call in calls)


_SEEDS = ("torch.manual_seed", "torch.random.manual_seed", "transformers.set_seed", "accelerate.utils.set_seed")
_STEPS = re.compile(r"step|iter", re.IGNORECASE)


def _draws_by_rank(script: Script) -> bool:
    """Whether each rank has its own order, and trains for a number of steps: there are no epochs to share."""
    seeds = [script.argument(call, "seed", 0) for call in script.calls(*_SEEDS)]
    is_seeded = any(_SEEDED.search(text) for text in (script.text, *_texts_around(script)))
    if is_seeded and not any(one is not None and mentions_ranks(words_behind(script, one)) for one in seeds):
        return False
    around = [loop.epochs or loop.node for loop in loops(script) if loop.trains]
    return bool(around) and all(_counts_steps(script, one) for one in around)


_SEEDED = re.compile(r"seed", re.IGNORECASE)
"""Without any, each rank has its own random order."""


def _texts_around(script: Script) -> Iterator[str]:
    return script.modules.texts_around(script.location) if script.modules is not None and script.location else iter(())


def _counts_steps(script: Script, loop: ast.For | ast.While) -> bool:
    """``while step < total``, ``for step in range(total_steps)``, or a loop over batches that ends so."""
    if isinstance(loop, ast.While) and _STEPS.search(ast.unparse(loop.test)):
        return True
    if isinstance(loop, ast.For) and last_name(loop.iter) == "range":
        return bool(_STEPS.search(ast.unparse(loop.iter)))
    ends = (one.test for one in loop.body if isinstance(one, ast.If) and isinstance(one.body[-1], ast.Break))
    return any(isinstance(test, ast.Compare) and _STEPS.search(ast.unparse(test)) for test in ends)


_PARTS = re.compile(r"loader|sampler|shard|(?:^|_)dl$|chunk|files", re.IGNORECASE)


def _may_part(script: Script, loader: LoaderCall) -> bool:
    """Whether a module of the project creates the dataset and reads the rank: it may divide the data itself."""
    data = script.argument(loader.call, "dataset", 0)
    around = script.nearest(loader.call, ast.For)
    if around is not None and _PARTS.search(last_name(unwrapped(around.iter))):
        return True  # of what another loader gives this rank
    if _is_cut_by_rank(script, loader, data):
        return True
    for one in script.values_of(data) if data is not None else ():
        made = imported_function(script, one.func, whole=True) if isinstance(one, ast.Call) else None
        if (made is not None and made.module.reads_rank) or is_made_by_rank(script, one):
            return True
    return False


def _is_cut_by_rank(script: Script, loader: LoaderCall, data: ast.expr | None) -> bool:
    """Whether each rank keeps its part of the data (``data.rows = data.rows[rank::world_size]``), or of what the loader
    gives: it continues with the next batch, or takes a slice of each."""
    for one in script.all(ast.Assign):
        owners = [target.value for target in one.targets if isinstance(target, (ast.Attribute, ast.Subscript))]
        if data is not None and any(ast.unparse(owner) == ast.unparse(data) for owner in owners):
            if mentions_ranks(words_behind(script, one.value)):
                return True
    return any(_takes_part(script, one) for one in loops_over(script, loader.name))


def _takes_part(script: Script, loop: ast.For) -> bool:
    slices = (one for one in ast.walk(loop.iter) if isinstance(one, ast.Call) and last_name(one) == "islice")
    if any(mentions_ranks(_words(one)) for one in slices):
        return True
    targets = {one.id for one in ast.walk(loop.target) if isinstance(one, ast.Name)}
    for one in loop.body:
        if isinstance(one, ast.If) and isinstance(one.body[-1], ast.Continue):
            if _MODULO.search(ast.unparse(one.test)) and mentions_ranks(_words(one.test)):
                return True
        bound = {last_name(target) for target in one.targets} if isinstance(one, ast.Assign) else set()
        if isinstance(one, ast.Assign) and not targets.isdisjoint(bound) and _SIZE.search(ast.unparse(one.value)):
            return True
    return False


_MODULO = re.compile(r"%")
_SIZE = re.compile(r"world_?size|num_replicas|n_?ranks", re.IGNORECASE)


def _words(node: ast.AST) -> frozenset[str]:
    return frozenset(last_name(one) for one in ast.walk(node) if isinstance(one, (ast.Name, ast.Attribute)))


def _returned_for(script: Script, source: ast.expr) -> Iterator[str]:
    """The names in a method of what ``self.loader`` is made of: ``self.sampler, self.loader = self.make()``."""
    for value in script.values_of(source) if isinstance(source, ast.Attribute) else ():
        made = value.value if isinstance(value, ast.Starred) else value
        function = script.definition(made.func) if isinstance(made, ast.Call) else None
        statement = script.parent(made)
        targets = statement.targets[0] if isinstance(statement, ast.Assign) else None
        for returned in script.inside(function, ast.Return) if function is not None else ():
            if isinstance(returned.value, ast.Name):
                yield returned.value.id
            elif isinstance(returned.value, ast.Tuple) and isinstance(targets, ast.Tuple):
                pairs = zip(targets.elts, returned.value.elts, strict=False)
                yield from (
                    part.id
                    for target, part in pairs
                    if isinstance(part, ast.Name) and ast.unparse(target) == ast.unparse(source)
                )


def _is_trained_on(script: Script, loader: LoaderCall, trained: set[str]) -> bool:
    return (
        script.function_of(loader.call) in run_by_all(script)
        and loader.evaluates is not True
        and (loader.evaluates is False or loader.name in trained)
        and not _is_only_evaluated(script, loader)
    )


def _is_only_evaluated(script: Script, loader: LoaderCall) -> bool:
    """Whether the function of a loader alone reads it, in loops without gradients: another function may train on one of
    the same name."""
    made, function = script.parent(loader.call), script.function_of(loader.call)
    target = made.targets[0] if isinstance(made, ast.Assign) else None
    if function is None or not isinstance(target, ast.Name) or script.scope_of(target, target.id) is None:
        return False
    own = [one for one in script.all(ast.For) if script.function_of(one) is function and _reads(one.iter, target.id)]
    inside = [one for one in ast.walk(function) if isinstance(one, ast.Name) and one.id == target.id]
    read = [one for one in inside if isinstance(one.ctx, ast.Load) and last_name(script.parent(one) or one) != "len"]
    return (
        bool(own)
        and len(read) == len(own)
        and all(is_without_gradients(script, one) and not has_backward(script, one) for one in own)
    )


def _reads(iterable: ast.expr, name: str) -> bool:
    source = unwrapped(iterable)
    return isinstance(source, ast.Name) and source.id == name


def _gives_all(script: Script, loader: LoaderCall) -> bool:
    call = loader.call
    sampler = script.argument(call, "sampler", 3)
    is_random = sampler is not None and _is_random(script, sampler)
    if script.is_open(call) or (sampler is not None and (not is_random or evaluates(loader.name))):
        return False
    if script.argument(call, "batch_sampler", 4) is not None:
        return False
    if depends_on_ranks(script, call) or runs_alone(script, call) or _is_replaced(script, loader):
        return False
    is_map = is_iterable(script, call) is False or _has_unused_sampler(script, call)
    if not is_map and not is_random:
        return False
    words = data_of(script, call)
    if (
        mentions_ranks(words)
        or _differs_by_process(script, call, words)
        or any(_MADE_UP.match(word) for word in words)
        or _is_written_out(script, call)
    ):
        return False
    return not any(mentions_ranks(words_behind(script, one)) for one in _given_for(script, call, words))


def _given_for(script: Script, loader: ast.Call, words: frozenset[str]) -> Iterator[ast.expr]:
    """What callers in the file give for the parameters that the data are made from, also to one that runs the function
    later: ``pool.submit(make_loader, files[rank])``."""
    function = script.function_of(loader)
    if function is None:
        return
    parameters = [one.arg for one in function.args.args]
    for call in script.all(ast.Call):
        is_call = script.definition(call.func) is function
        is_later = last_name(call) in _RUN_LATER and any(last_name(one) == function.name for one in call.args[:1])
        if is_call or is_later:
            given = call.args if is_call else call.args[1:]
            skipped = parameters[:1] == ["self"] and is_call
            named = [*zip(parameters[skipped:], given, strict=False)]
            named += [(one.arg, one.value) for one in call.keywords if is_call and one.arg]
            yield from (value for name, value in named if name in words)


_RUN_LATER = frozenset({"submit", "apply_async"})


_OF_DEVICES = re.compile(r"dev|gpu|cuda", re.IGNORECASE)


def _differs_by_process(script: Script, loader: ast.Call, words: frozenset[str]) -> bool:
    """Whether the data are made from a part of something that a loop gives to each process that it starts: ``mine =
    seeds[i * size : (i + 1) * size]; Process(target=run, args=(mine,))``."""
    function = script.function_of(loader)
    parameters = [one.arg for one in function.args.args] if function is not None else []
    for call in script.all(ast.Call) if not words.isdisjoint(parameters) else ():
        target, given = script.argument(call, "target", 1), script.argument(call, "args", 3)
        loop = script.nearest(call, ast.For) if last_name(call) == "Process" else None
        if function is None or target is None or last_name(target) != function.name or not isinstance(given, ast.Tuple):
            continue
        parts = _parts_by(script, loop) if isinstance(loop, ast.For) else frozenset()
        for name, value in zip(parameters, given.elts, strict=False):
            if name in words and not _OF_DEVICES.search(name) and not parts.isdisjoint(_words(value)):
                return True
    return False


def _parts_by(script: Script, loop: ast.For) -> frozenset[str]:
    """The names that a loop binds to the part of something which its variable chooses: ``mine = seeds[i]``."""
    own = _words(loop.target)
    return frozenset(
        target.id
        for one in script.inside(loop, ast.Assign)
        if isinstance(one.value, ast.Subscript) and not own.isdisjoint(_words(one.value.slice))
        for target in one.targets
        if isinstance(target, ast.Name)
    )


def _is_written_out(script: Script, loader: ast.Call) -> bool:
    """Whether the samples are in the code: ``TensorDataset(torch.tensor([[1, 2], [3, 4]]))``, which show how something
    is called."""
    data = script.argument(loader, "dataset", 0)
    made = script.values_of(data) if data is not None else ()
    return bool(made) and all(
        isinstance(one, ast.Call)
        and script.name(one.func) == "torch.utils.data.TensorDataset"
        and bool(one.args)
        and all(_is_literal(script, part) for part in one.args)
        for one in made
    )


def _is_literal(script: Script, tensor: ast.expr) -> bool:
    values = script.values_of(tensor)
    inner = [one.args[0] for one in values if isinstance(one, ast.Call) and one.args]
    return bool(values) and len(inner) == len(values) and UNKNOWN not in map(script.value, inner)


def _has_unused_sampler(script: Script, loader: ast.Call) -> bool:
    """Whether a DistributedSampler of the same data is made, and given to no loader."""
    data = script.argument(loader, "dataset", 0)
    for sampler in script.calls(SAMPLER):
        statement, given = script.parent(sampler), script.argument(sampler, "dataset", 0)
        if data is None or given is None or not isinstance(statement, ast.Assign):
            continue
        names = {ast.unparse(one) for one in statement.targets}
        used: list[ast.Name | ast.Attribute] = [*script.all(ast.Name), *script.all(ast.Attribute)]
        lasts = {last_name(one) for one in statement.targets}
        loads = (one for one in used if isinstance(one.ctx, ast.Load) and last_name(one) in lasts)
        read = (script.parent(one) for one in loads if ast.unparse(one) in names)
        if ast.unparse(given) == ast.unparse(data) and all(last_name(one or data) == "set_epoch" for one in read):
            return True
    return False


def _is_replaced(script: Script, loader: LoaderCall) -> bool:
    """Whether a job of several ranks has another loader under the same name before it reads this one: one with a
    distributed sampler, in a branch for several ranks, or for the condition under which the model is wrapped."""
    made = script.parent(loader.call)
    if not isinstance(made, ast.Assign) or not isinstance(made.targets[0], ast.Name):
        return False
    name = made.targets[0].id
    wrapped = {part for call in script.calls(*WRAPPERS) for part in _conditions(script, call)}
    later = (
        one
        for one in script.all(ast.Assign)
        if one.lineno > made.lineno
        and script.function_of(one) is script.function_of(made)
        and any(isinstance(target, ast.Name) and target.id == name for target in one.targets)
        and isinstance(one.value, ast.Call)
        and _has_distributed_sampler(script, one.value)
    )
    for other in later:
        conditions = _conditions(script, other) - _conditions(script, made)
        is_for_ranks = depends_on_ranks(script, other) or (bool(conditions) and conditions <= wrapped)
        if is_for_ranks and not _is_read_between(script, name, made, other):
            return True
    return False


def _has_distributed_sampler(script: Script, call: ast.Call) -> bool:
    sampler = script.argument(call, "sampler", 3)
    values = [sampler, *script.values_of(sampler)] if sampler is not None else []
    return any(isinstance(one, ast.Call) and script.name(one.func) == SAMPLER for one in values)


def _conditions(script: Script, node: ast.AST) -> frozenset[str]:
    """All that holds in the branches around a place, as far as they are those of ``if`` and not of ``else``."""
    found: set[str] = set()
    inner = node
    for outer in script.around(node):
        if isinstance(outer, ast.If):
            test = outer.test
            is_all = isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And)
            parts = test.values if isinstance(test, ast.BoolOp) and is_all else [test]
            texts = {ast.unparse(one) for one in parts}
            found |= texts if inner in outer.body else {f"not {one}" for one in texts}
        elif isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef)):
            break
        inner = outer
    return frozenset(found)


def _is_read_between(script: Script, name: str, first: ast.stmt, second: ast.stmt) -> bool:
    scope = script.function_of(first)
    return any(
        one.id == name
        and isinstance(one.ctx, ast.Load)
        and script.function_of(one) is scope
        and (first.end_lineno or first.lineno) < one.lineno < second.lineno
        for one in script.all(ast.Name)
    )


def _is_random(script: Script, sampler: ast.expr) -> bool:
    """Whether it can only be torch's RandomSampler over a whole dataset, with the order of this rank."""
    made = [one for one in script.values_of(sampler) if not (isinstance(one, ast.Constant) and one.value is None)]
    return bool(made) and all(
        isinstance(one, ast.Call)
        and script.name(one.func) in _RANDOM
        and not script.is_given(one, "num_samples", 2)
        and not depends_on_ranks(script, one)
        and not any(mentions_ranks(words_behind(script, given)) for given in one.args)
        for one in made
    )


def _script(loader: str, before: str = "") -> str:
    loader = loader if "loader =" in loader else f"loader = {loader}"
    return f"""\
import os
import torch
from torch.utils.data import DataLoader, RandomSampler, Subset, TensorDataset
from torchvision.datasets import ImageFolder
from corpus import Images, load_corpus

dist.init_process_group("nccl")
rank, world_size = dist.get_rank(), dist.get_world_size()
train_set = ImageFolder("/data/train")
sampler = DistributedSampler(train_set)
{before}
{loader}
model = DDP(torch.nn.Linear(8, 8).cuda(), device_ids=[rank % 8])
for epoch in range(10):
    for x, y in loader:
        model(x).sum().backward()
"""


_SAME_NAME = """\
import torch
from torch.utils.data import DataLoader, DistributedSampler
from torchvision.datasets import ImageFolder

def score(model, rows):
    total = 0
    batches = DataLoader(ImageFolder(rows), 8)
    with torch.no_grad():
        for x in batches:
            total += model(x)
    return total / len(batches)

def train(model, rows):
    batches = DataLoader(ImageFolder(rows), batch_size=4, sampler=DistributedSampler(rows))
    for x in batches:
        model(x).sum().backward()

def main(rows):
    dist.init_process_group("nccl")
    model = DDP(Net())
    train(model, rows)
    score(model, rows)

main(None)
"""
_OF_OWN_PART = """\
from multiprocessing import Process
from torch.utils.data import DataLoader

def run(seeds):
    dist.init_process_group("nccl")
    model = DDP(Net())
    loader = DataLoader(seeds.numpy(), batch_size=8, shuffle=True)
    for batch in loader:
        model(batch).sum().backward()

chosen = torch.randperm(total)
for number in range(4):
    mine = chosen[number * size : (number + 1) * size]
    Process(target=run, args=(mine,)).start()
"""
_OF_OWN_FILE = """\
import torch
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

def make(path):
    rows = TensorDataset(torch.load(path))
    train_loader = DataLoader(rows, batch_size=8, sampler=RandomSampler(rows))
    return train_loader

dist.init_process_group("nccl")
loader = make(files[dist.get_rank()])
model = DDP(Net())
for x in loader:
    model(x).sum().backward()
"""
_SPAWNED = """\
import torch
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder

def main(rank, world_size, args):
    dist.init_process_group("nccl", rank=rank, world_size=world_size)
    train_loader = DataLoader(ImageFolder(args.data), batch_size=8, shuffle=True)  # !
    model = DDP(Net())
    for x, y in train_loader:
        model(x).sum().backward()

torch.multiprocessing.spawn(main, args=(world_size, args), nprocs=world_size)
"""
_NESTED = """\
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

model = DistributedDataParallel(Net())
sampler = DistributedSampler(keys)
key_loader = DataLoader(keys, sampler=sampler)
for epoch in range(9):
    sampler.set_epoch(epoch)
    for part in key_loader:
        rows = fetch(part)
        train_loader = DataLoader(rows, shuffle=True)
        for x in train_loader:
            model(x).sum().backward()
            optimizer.step()
"""
_OWN_SEED = """\
import torch
from torch.utils.data import DataLoader, RandomSampler
from corpus import load_corpus

def train(model, seed, rank, total_steps):
    torch.manual_seed(seed + rank)
    texts = load_corpus()
    order = RandomSampler(texts)
    loader = DataLoader(texts, sampler=order, batch_size=8)
    model, step = DDP(model), 0
    while step < total_steps:
        for batch in loader:
            model(batch).sum().backward()
            step += 1

train(build(), 1, dist.get_rank(), 100)
"""
_WITH_VALIDATION = """\
import torch
import torch.nn as nn
from torch.utils.data.distributed import DistributedSampler

class Tiles(torch.utils.data.Dataset):
    def __init__(self, root):
        self.root = root
    def __len__(self):
        return 10
    def __getitem__(self, index):
        return index

def main(args):
    torch.distributed.init_process_group(backend="nccl")
    train_set, val_set = Tiles("train"), Tiles("val")
    train_loader = DataLoader(train_set, batch_size=args.batch_size, num_workers=8)  # !
    val_loader = DataLoader(val_set, sampler=DistributedSampler(val_set, shuffle=False))
    net = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    for epoch in range(args.epochs):
        train(net, train_loader)

def train(net, loader):
    for x in loader:
        net(x).mean().backward()

if __name__ == "__main__":
    main(None)
"""
_FSDP = """\
from torchvision import datasets

def get_train_loader(batch_size):
    dataset = datasets.CIFAR10(".", train=True)
    return DataLoader(dataset, batch_size, True)  # !

def fit():
    torch.distributed.init_process_group("nccl")
    model = FSDP(torch.nn.Linear(4, 4).cuda())
    for x, y in get_train_loader(32):
        model(x).sum().backward()

fit()
"""
_DEEPSPEED = """\
import deepspeed

def main(args):
    train_set = get_dataset(args.dataset, "train")
    train_loader = torch.utils.data.DataLoader(train_set, batch_size=args.batch_size, shuffle=True)  # !
    model, optimizer, _, schedule = deepspeed.initialize(model=build(args), args=args)
    for epoch in range(args.epochs):
        for images, target in train_loader:
            model.backward(model(images, target))
            model.step()

main(parse())
"""
_SWITCHED = """\
from torch.utils.data import DataLoader, DistributedSampler
import deepspeed

if args.offload:
    shares = DistributedSampler(train_set)
    loader = DataLoader(train_set, 8, sampler=shares)
    model, optimizer, _, _ = deepspeed.initialize(args=args, model=Net())
else:
    loader = DataLoader(train_set, 8, shuffle=True)
    model, optimizer = Net().cuda(), None
for x, y in loader:
    if args.offload:
        model.backward(model(x, y))
        model.step()
    else:
        model(x, y).backward()
"""
_BRANCHES = """\
import torch
from torch.nn.parallel import DistributedDataParallel
from torchvision.datasets import MNIST

def main(args, model):
    train_set = MNIST(".", train=True)
    if args.distributed:
        sampler = torch.utils.data.distributed.DistributedSampler(train_set)
        train_loader = DataLoader(train_set, batch_size=32, sampler=sampler)
        model = DistributedDataParallel(model)
    else:
        train_loader = DataLoader(train_set, batch_size=32, shuffle=True)
    for x, y in train_loader:
        model(x).sum().backward()

main(*load())
"""
_REPLACED = """\
from torchvision.datasets import MNIST

def loader_of(args, world):
    train_set = MNIST(".", train=True)
    train_loader = DataLoader(train_set, batch_size=32, shuffle=True)
    if world > 1:
        sampler = DistributedSampler(train_set)
        train_loader = DataLoader(train_set, batch_size=32, sampler=sampler)
    return train_loader

def main(args, model, world):
    if world > 1:
        model = DDP(model)
    for x, y in loader_of(args, world):
        model(x).sum().backward()

main(*load())
"""
_ACCELERATE = """\
from torch.nn.parallel import DistributedDataParallel

accelerator = Accelerator()
train_loader = DataLoader(train_set, shuffle=True)
model = DistributedDataParallel(model)
train_loader = accelerator.prepare(train_loader)
for x in train_loader:
    accelerator.backward(model(x))
"""
_RECIPE = """\
from torch.distributed.fsdp import fully_shard
from torch.utils.data import RandomSampler

class Recipe:
    def __init__(self, config):
        self.model = build()
        fully_shard(self.model)
        self.sampler, self.loader = self.make(config)

    def make(self, config):
        data = Chats(config.path)
        sampler = RandomSampler(data)
        batches = DataLoader(data, batch_size=4, sampler=sampler)  # !
        return sampler, batches

    def train(self):
        for batch in self.loader:
            self.model(batch).sum().backward()

torch.distributed.init_process_group("nccl")
Recipe(config).train()
"""
