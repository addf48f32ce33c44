"""CODE011: a DistributedSampler whose set_epoch() is never called."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

from doctor.api import InsertStatement, Script, Severity, Violation, location_of, rule
from doctor.lint.python.gpu_use import runs_alone
from doctor.lint.python.loader_calls import depends_on_ranks, evaluates, target_name
from doctor.lint.python.project.left_defaults import shown_numbers
from doctor.lint.python.project.random_data import is_random
from doctor.lint.python.project.starts.own_start import measures_speed
from doctor.lint.python.project.unreached import imports_function
from doctor.lint.python.script import UNKNOWN, last_name
from doctor.lint.python.training import SAMPLER, Loop, calls_of, epoch_loops, loops, shards_loaders_itself, unwrapped
from doctor.lint.python.value_flow import handed_in, origins, part_of
from doctor.testing.script_cases import fails, passes
from doctor_checks.code.data._imported_samplers import ImportedSampler, imported_samplers


@rule(
    id="CODE011",
    severity=Severity.WARNING,
    reads=Script,
    mentions=("DistributedSampler", "loader"),
    foreshadows=("DATA006",),
    cases=lambda: (
        fails(
            "one loop in the other", _PLAIN, _PLAIN.replace("range(10):", "range(10):\n    sampler.set_epoch(epoch)")
        ),
        fails(
            "the loop over batches is a function of its own",
            _FUNCTIONS,
            _FUNCTIONS.replace("epochs):", "epochs):\n        train_loader.sampler.set_epoch(epoch)"),
        ),
        fails("in methods, where other loaders come as well", _METHODS),
        fails("made in a branch, where no line fits all", _BRANCH),
        fails("a helper makes the loader", _HELPER),
        fails("several loaders in a list", _LIST),
        fails("a helper makes both loaders", _BOTH),
        fails("a generator that never ends", _ENDLESS),
        fails("an iterator in each epoch", _ITERATOR),
        fails("an object keeps the loader that a helper made", _OBJECT),
        passes(
            "the object sets it",
            _OBJECT.replace("        for batch", "        self.loader.sampler.set_epoch(epoch)\n        for batch"),
        ),
        passes(
            "an iterator of one epoch",
            _ITERATOR.replace("for state", "batches = iter(loader)\nfor state").replace(
                "    batches = iter(loader)\n", ""
            ),
        ),
        passes(
            "a helper that shuffles the second one alone",
            _BOTH.replace("(tests)", "(tests, shuffle=True)").replace("(data)  # !", "(data, shuffle=False)"),
        ),
        passes("a helper that makes it for the validation", _HELPER.replace('make("train")', 'make("val")')),
        passes("set", _PLAIN.replace("range(10):", "range(10):\n    loader.sampler.set_epoch(epoch)")),
        passes("a dataset that draws at random, whatever the index", _DRAWN),
        fails(
            "a dataset that uses the index",
            _DRAWN.replace("draw()", "self.rows[index]").replace("data)\n", "data)  # !\n", 1),
            _DRAWN.replace("draw()", "self.rows[index]").replace("(10):", "(10):\n    sampler.set_epoch(epoch)"),
        ),
        passes("random numbers, made by a helper", _NUMBERS),
        fails(
            "numbers of a file",
            _NUMBERS.replace("torch.rand(20), 0", "torch.load(FILE)").replace("(data))", "(data))  # !"),
        ),
        fails(
            "numbers that the caller gives",
            _NUMBERS.replace("[(torch.rand(20), 0) for _ in range(size)]", "size").replace("(data))", "(data))  # !"),
        ),
        fails(
            "a bar over the loader in each epoch",
            _PLAIN.replace("range(10):", "range(10):\n    loader = tqdm(loader)"),
        ),
        fails(
            "a bar with its own name",
            _PLAIN.replace("range(10):", "range(10):\n    bar = tqdm(loader, disable=rank > 0)").replace(
                "enumerate(loader)", "enumerate(bar)"
            ),
        ),
        passes(
            "a bar over another loader",
            _PLAIN.replace("range(10):", "range(10):\n    bar = tqdm(others)").replace(
                "enumerate(loader)", "enumerate(bar)"
            ),
        ),
        passes("assigned", _PLAIN.replace("range(10):", "range(10):\n    sampler.epoch = epoch")),
        passes(
            "a new loader in each epoch",
            _PLAIN.replace(
                "range(10):",
                "range(10):\n    loader = DataLoader(dataset, sampler=DistributedSampler(dataset, seed=epoch))",
            ),
        ),
        passes(
            "a list of random numbers",
            _PLAIN.replace("dataset, net = load()", "net = load()\ndataset = [torch.rand(8) for _ in range(99)]"),
        ),
        passes(
            "made up by torchvision",
            _PLAIN.replace(
                "dataset, net = load()", "import torchvision\nnet = load()\ndataset = torchvision.datasets.FakeData()"
            ),
        ),
        passes("random numbers that a dataset is given", _GIVEN),
        fails(
            "a file that it is given",
            _GIVEN.replace("torch.randn(9, 8))", "torch.load('rows.pt'))").replace("(data)\n", "(data)  # !\n", 1),
            _GIVEN.replace("torch.randn(9, 8))", "torch.load('rows.pt'))").replace(
                "(10):", "(10):\n    sampler.set_epoch(epoch)"
            ),
        ),
        passes("one text, repeated", _GIVEN.replace("self.rows = rows", 'self.rows = ["one text"] * 99')),
        passes("not shuffled", _PLAIN.replace("(dataset)", "(dataset, shuffle=False)")),
        passes("made for each epoch, of other data", _EACH),
        passes("one epoch", _PLAIN.replace("for epoch in range(10):", "if True:")),
        passes("tensors of random numbers", _PLAIN.replace("dataset, net = load()", _DRAWN_TENSORS)),
        fails(
            "random numbers beside labels from a file",
            _PLAIN.replace("dataset, net = load()", _DRAWN_TENSORS.replace("np.random.rand(999)", "np.load('y.npy')")),
            fixed={_LOOP: f"{_LOOP}\n    sampler.set_epoch(epoch)"},
        ),
        passes(
            "tensors of random numbers, whose names the loop takes",
            _PLAIN.replace("dataset, net = load()", _DRAWN_TENSORS)
            .replace("for step, batch in enumerate(loader)", "for step, (x, y) in enumerate(loader)")
            .replace("net(batch)", "net(x.cuda())"),
        ),
        passes("in the branch for one process", _FOR_ONE),
        fails("in the branch for several", _FOR_ONE.replace("if not", "if").replace("(dataset)", "(dataset)  # !")),
        passes("one epoch, as a setting of the script", "EPOCHS = 1\n" + _PLAIN.replace("range(10)", "range(EPOCHS)")),
        passes("of the validation", _PLAIN.replace("sampler", "val_sampler").replace("loader", "val_loader")),
        passes("Lightning sets it", _PLAIN + "\nimport lightning\nlightning.Trainer(devices=2).fit(net, loader)\n"),
        passes("the loader goes to somebody else, who may set it", _FUNCTIONS.replace("def train_epoch", "def other")),
    ),
)
def sampler_epoch_not_set(script: Script) -> Iterator[Violation]:
    """Ask whether a script that creates a DistributedSampler calls set_epoch() in every epoch.

    Why it hurts: every epoch has the same batches in the same order, so the model may generalize worse; no error is
    raised.
    Fix: Call `sampler.set_epoch(epoch)` as the first statement of the loop over epochs.
    """
    if shards_loaders_itself(script) or next(script.method_calls("set_epoch"), None) is not None:
        return
    trained = [loop for loop in loops(script) if loop.trains]
    endless = list(_endless(script)) if trained else []
    trained += [*endless, *_by_iterators(script, trained)] if trained else ()
    for call in script.calls(SAMPLER):
        if runs_alone(script, call):
            continue
        given = script.argument(call, "shuffle", 3)
        known = given is None or script.value(given) is True
        shuffles = not script.is_open(call) and (known or _is_asked_by_caller(script, given))
        if shuffles and not _is_order_ignored(script, call) and evaluates(target_name(script, call)) is not True:
            yield from _hits(script, call, trained, endless)
    for made in imported_samplers(script) if trained else ():
        yield from _hits_of_import(script, made, [one for one in trained if one not in endless])


def _hits_of_import(script: Script, made: ImportedSampler, trained: list[Loop]) -> Iterator[Violation]:
    """The first training loop that goes several times over a loader which a function of another module gives."""
    for loop in trained:
        sources = (loop.source, *_behind_bar(script, loop), *_handed(script, loop))
        if not any(isinstance(one, ast.Name) and _is_of_import(script, one, made) for one in sources):
            continue
        repeated = [one for one in epoch_loops(script, loop) if _repeats(script, one)]
        if not repeated or any(outer in repeated for outer in script.around(made.call)):
            continue
        is_once = all(_is_one_epoch(script, one) for one in repeated) or _ends_program(script, loop)
        is_once = is_once or measures_speed(script)
        statement = f"{made.name}.sampler.set_epoch({_counter(repeated[0])})"
        if made.is_alternative:
            statement = f"if isinstance({made.name}.sampler, DistributedSampler): {statement}"
        yield Violation(
            made.call,
            f"{made.name}.sampler.set_epoch() is never called: every epoch of the loop at line {repeated[0].lineno} "
            "uses the same order",
            severity=Severity.INFO if is_once else None,
            preview=is_once,
            evidence=(("sampler_made_at", f"{made.made_in.path}:{made.sampler.lineno}"),),
            fix=f"Start the loop at line {repeated[0].lineno} with `{statement}`."
            if isinstance(repeated[0], ast.For)
            else f"Count the epochs in the loop at line {repeated[0].lineno}, and start it with `{statement}`.",
        )
        return


def _is_of_import(script: Script, name: ast.Name, made: ImportedSampler) -> bool:
    """Whether a name is the one that holds the loader, in the function that gets it, or of the whole module."""
    owner = script.function_of(made.call)
    return name.id == made.name and owner in (None, script.function_of(name))


def _counter(epochs: ast.For | ast.While) -> str:
    is_named = isinstance(epochs, ast.For) and isinstance(epochs.target, ast.Name) and epochs.target.id != "_"
    return ast.unparse(epochs.target) if isinstance(epochs, ast.For) and is_named else "epoch"


_RANDOM_WALKS = re.compile(r"^torch_geometric\.(?:data|loader)\.(?:\w+\.)?GraphSAINT\w*Sampler$")
"""torch_geometric/loader/graph_saint.py: ``__getitem__`` draws a new subgraph whatever the index."""


def _is_order_ignored(script: Script, sampler: ast.Call) -> bool:
    """Whether what the indices of a sampler select does not depend on them: random numbers, a dataset of the file whose
    ``__getitem__`` does not use its index, or a loader that draws subgraphs."""
    data = script.argument(sampler, "dataset", 0)
    if data is not None and is_random(script, data):
        return True
    owner = script.class_definition(data) if data is not None else None
    getter = script.bindings.methods.get((owner.name, "__getitem__")) if owner is not None else None
    if getter is not None and len(getter.args.args) > 1:
        index = getter.args.args[1].arg
        return not any(one.id == index for one in script.inside(getter, ast.Name)) and "super()" not in ast.unparse(
            getter
        )
    walks = [one for one in script.all(ast.Call) if _RANDOM_WALKS.match(script.name(one.func))]
    return any(_uses(script, one, sampler) for one in walks)


def _is_asked_by_caller(script: Script, given: ast.expr | None) -> bool:
    """``shuffle=split == "train"``, where every caller in the file that says so passes that value."""
    if not isinstance(given, ast.Compare) or len(given.ops) != 1 or not isinstance(given.ops[0], ast.Eq):
        return False
    wanted = script.value(given.comparators[0])
    passed = [script.value(one) for one in handed_in(script, given.left)]
    return isinstance(wanted, str) and wanted in passed


def _hits(script: Script, sampler: ast.Call, trained: list[Loop], endless: list[Loop]) -> Iterator[Violation]:
    for loop in trained:
        fed = _is_fed_by(script, loop, sampler)
        visited = _visiting(script, loop)
        epochs = epoch_loops(script, loop if visited is None else loop._replace(epochs=_loop_around(script, visited)))
        repeated = [one for one in _of_sampler(script, loop, sampler, epochs) if _repeats(script, one)]
        # A sampler that is created in each epoch may have different data each time.
        if fed and repeated and not any(outer in repeated for outer in script.around(sampler)):
            if all(_is_set_otherwise(script, one, sampler, fed) for one in repeated):
                return
            name = target_name(script, sampler) or "DistributedSampler"
            handed = list(_handed(script, loop))
            made = [script.values_of(source) for source in handed or [loop.source]]
            is_once = all(_is_one_epoch(script, one) for one in repeated)
            is_once = is_once or _ends_program(script, loop) or measures_speed(script)
            counts = loop in endless and not _is_public(script)
            yield Violation(
                sampler,
                f"{name}.set_epoch() is never called: every epoch of the loop at line {repeated[0].lineno} uses the "
                "same order",
                severity=Severity.INFO if is_once or counts else None,
                preview=is_once,
                once=f"{script.path}:{repeated[0].lineno} {name}",  # of other branches too
                fix=_fix(script, sampler, repeated[0], fed),
                edits=tuple(_edit(script, sampler, repeated, fed))
                if all(
                    len(values) == 1 and isinstance(values[0], ast.Call) and _uses(script, values[0], sampler)
                    for values in made
                )
                else (),
            )
            return


def _is_set_otherwise(script: Script, epochs: ast.For | ast.While, sampler: ast.Call, loader: str) -> bool:
    """Whether each epoch has another order by other means: its number is assigned to the sampler (``sampler.epoch =
    epoch``), a new sampler or loader gets the name, or a function of the project that sets it is given one of them."""
    names = {target_name(script, sampler), loader.rpartition(".")[2]} - {""}
    counters = (
        {one.id for one in ast.walk(epochs.target) if isinstance(one, ast.Name)}
        if isinstance(epochs, ast.For)
        else set()
    )
    for one in script.inside(epochs, ast.Assign):
        parts = list(ast.walk(one.value))
        is_new = any(isinstance(part, ast.Call) and script.name(part.func) == SAMPLER for part in parts)
        is_new = is_new or any(isinstance(part, ast.Name) and part.id in counters for part in parts)
        for target in one.targets:
            is_number = isinstance(target, ast.Attribute) and target.attr in ("epoch", "seed")
            owner = target.value if isinstance(target, ast.Attribute) and is_number else target
            if is_new and last_name(owner) in (names | {"sampler"} if is_number else names):
                return True
    for call in script.inside(epochs, ast.Call):
        given = {last_name(one) for one in (*call.args, *(word.value for word in call.keywords))}
        if (
            not names.isdisjoint(given)
            and script.definition(call.func) is None
            and imports_function(script, last_name(call), "set_epoch")
        ):
            return True
    return False


def _is_public(script: Script) -> bool:
    """Whether a program reads a dataset of torchvision or the like, of which a training has many epochs. Of other
    data, a number of steps may be less than one."""
    return any(_PUBLIC.match(script.name(one.func)) for one in script.all(ast.Call))


_PUBLIC = re.compile(r"torch(?:vision|audio|text)\.datasets\.|datasets\.load_dataset$|sklearn\.datasets\.")


def _fix(script: Script, sampler: ast.Call, epochs: ast.For | ast.While, fed: str) -> str:
    statement = _statement(script, sampler, epochs, fed)
    is_alternative = _is_alternative(script, sampler)
    if is_alternative:
        statement = f"if isinstance({statement.partition('.set_epoch')[0]}, DistributedSampler): {statement}"
    if isinstance(epochs, ast.For) and ast.unparse(epochs.target) == "_":
        return f"Rename `_` in line {epochs.lineno} to `epoch`, and start the loop with `{statement}`."
    if is_alternative:
        return f"Start the loop at line {epochs.lineno} with `{statement}`."
    return f"Call `{statement}` as the first statement of the loop at line {epochs.lineno}."


def _is_alternative(script: Script, sampler: ast.Call) -> bool:
    """Whether the name of the sampler holds another one in jobs of one process."""
    statement = script.parent(sampler)
    target = statement.targets[0] if isinstance(statement, ast.Assign) else None
    return isinstance(target, (ast.Name, ast.Attribute)) and len(script.values_of(target)) > 1


def _endless(script: Script) -> Iterator[Loop]:
    """Generators that go over a loader again and again: ``while True: for batch in loader: yield batch``."""
    for one in script.all(ast.Yield):
        loop = script.nearest(one, ast.For)
        around = script.parent(loop) if loop is not None else None
        if loop is not None and isinstance(around, ast.While):
            yield Loop(loop, unwrapped(loop.iter), around, trains=True)


def _by_iterators(script: Script, trained: list[Loop]) -> Iterator[Loop]:
    """Loops over steps that take ``next(batches)`` of ``batches = iter(loader)``, which each epoch creates again."""
    for loop in trained:
        taken = (one for one in script.inside(loop.node, ast.Call) if last_name(one) == "next" and one.args)
        for value in (value for one in taken for value in script.values_of(one.args[0])):
            made = isinstance(value, ast.Call) and last_name(value) == "iter" and value.args
            if made and isinstance(value, ast.Call) and any(one is loop.epochs for one in script.around(value)):
                yield loop._replace(source=value.args[0])


def _repeats(script: Script, epochs: ast.For | ast.While) -> bool:
    """Whether a loop may run more than one epoch over the same data."""
    if not isinstance(epochs, ast.For):
        return True
    counted = epochs.iter.args if isinstance(epochs.iter, ast.Call) and last_name(epochs.iter) == "range" else []
    if len(counted) == 1 and script.value(counted[0]) == 1:
        return False
    return not isinstance(epochs.iter, (ast.Tuple, ast.List))


def _is_fed_by(script: Script, loop: Loop, sampler: ast.Call) -> str:
    """The loader of a loop that has the sampler; empty if another one may have it."""
    if of_object := _kept_by_object(script, loop, sampler):
        return of_object
    sources = (loop.source, *_behind_bar(script, loop), *_handed(script, loop))
    source = next((one for one in sources if _has_sampler(script, one, sampler)), None)
    if source is not None:
        return script.text_of(source)
    visited = _visiting(script, loop)
    kept = [] if visited is None else _kept_in(script, visited)
    return script.text_of(loop.source) if any(_uses(script, one, sampler) for one in kept) else ""


def _behind_bar(script: Script, loop: Loop) -> Iterator[ast.expr]:
    """What a progress bar in a loop over epochs goes over: ``bar = tqdm(loader)``, ``for batch in bar``."""
    for value in script.values_of(loop.source) if isinstance(loop.source, ast.Name) else ():
        inner = unwrapped(value)
        if inner is not value and any(outer is loop.epochs for outer in script.around(value)):
            yield inner


def _has_sampler(script: Script, loader: ast.expr, sampler: ast.Call) -> bool:
    for value in script.values_of(loader):
        made = part_of(script, loader, value) if isinstance(value, ast.Starred) else value
        if isinstance(made, ast.Call) and any(_uses(script, one, sampler) for one in _made_by(script, made)):
            return True
    return False


def _of_sampler(
    script: Script, loop: Loop, sampler: ast.Call, epochs: Sequence[ast.For | ast.While]
) -> Sequence[ast.For | ast.While]:
    """Of the loops over epochs, those that give the function of a loop over batches a loader with the sampler, if there
    are any: others may train without it in one process."""
    given = [one for one in _handed(script, loop) if _has_sampler(script, one, sampler)]
    return [one for one in epochs if any(one in script.around(part) for part in given)] or epochs


def _kept_by_object(script: Script, loop: Loop, sampler: ast.Call) -> str:
    """The loader that an object was made with: ``self.loader = loader`` in ``__init__``, and callers that give it."""
    if not isinstance(loop.source, ast.Attribute):
        return ""
    calls = [one for one in origins(script, loop.source) if isinstance(one, ast.Call)]
    found = len(calls) == 1 and any(_uses(script, one, sampler) for one in _made_by(script, calls[0]))
    return script.text_of(loop.source) if found else ""


def _made_by(script: Script, made: ast.Call) -> Iterator[ast.Call]:
    """The call, and the loaders that the function of the file returns which it calls."""
    yield made
    function = script.definition(made.func)
    for returned in script.inside(function, ast.Return) if function is not None else ():
        for value in script.values_of(returned.value) if returned.value is not None else ():
            if isinstance(value, ast.Call) and function is not None and _is_this_case(script, function, made, value):
                yield value


def _is_this_case(script: Script, function: ast.AST, made: ast.Call, loader: ast.Call) -> bool:
    """Whether a call asks for the case in which the function's sampler shuffles."""
    texts = {script.value(one) for one in (*made.args, *(word.value for word in made.keywords))} - {UNKNOWN}
    tests = [one for call in script.inside(function, ast.Call) if (one := script.argument(call, "shuffle", 3))]
    wanted = {script.value(one.comparators[0]) for one in tests if isinstance(one, ast.Compare)}
    return not wanted or not wanted.isdisjoint(texts)


def _visiting(script: Script, loop: Loop) -> ast.For | None:
    """The loop that gives each loader of a list to this loop."""
    name = loop.source.id if isinstance(loop.source, ast.Name) else ""
    for outer in script.around(loop.node):
        if isinstance(outer, ast.For) and any(
            isinstance(one, ast.Name) and one.id == name for one in ast.walk(outer.target)
        ):
            return outer
    return None


def _loop_around(script: Script, loop: ast.For) -> ast.For | ast.While | None:
    around = script.parent(loop)
    return around if isinstance(around, (ast.For, ast.While)) else None


def _kept_in(script: Script, visited: ast.For) -> list[ast.Call]:
    """The loaders of the lists that a loop goes over: their elements, and what is appended to them."""
    lists = {one.id for one in ast.walk(visited.iter) if isinstance(one, ast.Name)}
    appended = [
        call.args[0]
        for call in script.method_calls("append")
        if call.args and isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name)
        if call.func.value.id in lists and script.function_of(call) is script.function_of(visited)
    ]
    values = [made for one in appended for made in script.values_of(one)]
    return [one for one in values if isinstance(one, ast.Call)]


def _handed(script: Script, loop: Loop) -> Iterator[ast.expr]:
    function = script.function_of(loop.node)
    if function is None or not isinstance(loop.source, ast.Name):
        return
    parameters = [one.arg for one in (*function.args.posonlyargs, *function.args.args)]
    if loop.source.id in parameters:
        place = parameters.index(loop.source.id) - (parameters[0] in ("self", "cls"))
        for call in calls_of(script, function):
            given = script.argument(call, loop.source.id, place)
            if given is not None:
                yield given


def _is_one_epoch(script: Script, loop: ast.For | ast.While) -> bool:
    """Whether every start that the project shows has one epoch: ``range(args.epochs)`` with ``--epochs 1``."""
    counted = loop.iter if isinstance(loop, ast.For) else loop.test
    if isinstance(counted, ast.Call) and last_name(counted) == "range" and len(counted.args) > 1:
        counted = counted.args[1]  # the first epoch, after which a run may start again, is another number
    if isinstance(counted, ast.Compare):
        counted = counted.comparators[0]  # while epoch < args.epochs
    parts = (one for one in ast.walk(counted) if isinstance(one, ast.expr))
    options = {name: one for one in parts if "epoch" in (name := _entry_of(one)).lower()}
    return len(options) == 1 and all(shown_numbers(script, one) == {1} for one in options.values())


def _ends_program(script: Script, loop: Loop) -> bool:
    """Whether a loop over batches ends the program, or the function that counts the epochs, after a number of them:
    ``if step >= 1000: sys.exit()``."""
    ends: list[ast.AST] = [one for one in script.inside(loop.node, ast.Call) if script.text_of(one.func) in _EXITS]
    ends += script.inside(loop.node, ast.Return) if loop.epochs is not None else ()
    branches = (script.nearest(one, ast.If) for one in ends)
    return any(one is not None and _counts_steps(one.test) for one in branches)


_EXITS = ("sys.exit", "exit", "quit", "os._exit")


def _counts_steps(test: ast.expr) -> bool:
    is_reached = isinstance(test, ast.Compare) and isinstance(test.ops[0], (ast.Gt, ast.GtE, ast.Eq))
    most = getattr(test.comparators[0], "value", None) if isinstance(test, ast.Compare) else None
    is_few = isinstance(most, int) and 0 < most <= _FEW_STEPS
    return is_reached and is_few and _COUNTERS.search(ast.unparse(test)) is not None


_COUNTERS = re.compile(r"iter|step|batch|\bi(?:dx)?\b", re.IGNORECASE)
_FEW_STEPS = 10_000
"""Less than an epoch of most datasets."""


def _entry_of(node: ast.AST) -> str:
    """The name of a variable or an entry: of ``cfg["epochs"]`` and ``cfg.get("epochs", 1)``, ``epochs``."""
    key = node.slice if isinstance(node, ast.Subscript) else None
    if isinstance(node, ast.Call) and last_name(node) == "get" and node.args:
        key = node.args[0]
    if key is not None:
        return str(key.value) if isinstance(key, ast.Constant) else ""
    return last_name(node) if isinstance(node, (ast.Name, ast.Attribute)) else ""


def _uses(script: Script, loader: ast.Call, sampler: ast.Call) -> bool:
    given = script.argument(loader, "sampler", 3) or script.argument(loader, "batch_sampler", 4)
    if given is None:
        return False
    inside = [one for made in script.values_of(given) for one in ast.walk(made)]
    return sampler in inside or any(sampler in script.values_of(one) for one in inside if isinstance(one, ast.Name))


def _statement(script: Script, sampler: ast.Call, epochs: ast.For | ast.While, loader: str) -> str:
    name = target_name(script, sampler)
    counter = epochs.target.id if isinstance(epochs, ast.For) and isinstance(epochs.target, ast.Name) else "epoch"
    counter = "epoch" if counter == "_" else counter
    is_kept = isinstance(script.parent(sampler), ast.Assign) and script.scope_of(epochs, name) is not None
    return f"{name if is_kept else f'{loader}.sampler'}.set_epoch({counter})"


def _edit(
    script: Script, sampler: ast.Call, repeated: list[ast.For | ast.While], loader: str
) -> Iterator[InsertStatement]:
    """Whether one loop counts the epochs, and the sampler exists on every path to it."""
    epochs = repeated[0]
    if len(repeated) > 1 or not isinstance(epochs, ast.For) or not isinstance(epochs.target, ast.Name):
        return
    if epochs.target.id == "_":
        return  # a name that the loop may assign again, for example by `for _, batch in loader`
    if "range" not in script.text_of(epochs.iter) or depends_on_ranks(script, sampler):
        return
    if any(isinstance(one, (ast.If, ast.IfExp)) for one in script.around(sampler)):
        return
    if loader.isidentifier() and script.scope_of(epochs, loader) is not None:
        yield InsertStatement(location_of(epochs), _statement(script, sampler, epochs, loader))


_PLAIN = """\
import torch

dist.init_process_group("nccl")
dataset, net = load()
sampler = DistributedSampler(dataset)  # !
loader = DataLoader(dataset, batch_size=32, sampler=sampler)
for epoch in range(10):
    for step, batch in enumerate(loader):
        net(batch).sum().backward()
"""
_GIVEN = """\
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

class Rows(Dataset):
    def __init__(self, rows):
        self.rows = rows
    def __len__(self):
        return len(self.rows)
    def __getitem__(self, index):
        return self.rows[index]

torch.distributed.init_process_group("nccl")
data = Rows(torch.randn(9, 8))
sampler = DistributedSampler(data)
loader = DataLoader(data, sampler=sampler)
for epoch in range(10):
    for batch in loader:
        net(batch).sum().backward()
"""
_LOOP = "for epoch in range(10):"
_DRAWN_TENSORS = """\
import numpy as np

net = build()
x, y = np.random.uniform(size=[999, 8]), np.random.rand(999).astype(int)
x, y = torch.Tensor(x), torch.Tensor(y)
dataset = torch.utils.data.TensorDataset(x, y)"""
_FOR_ONE = """\
import torch

def train(args, dataset, net):
    if not args.distributed:
        sampler = torch.utils.data.DistributedSampler(dataset)
        loader = torch.utils.data.DataLoader(dataset, sampler=sampler)
    for epoch in range(10):
        for batch in loader:
            net(batch).sum().backward()

train(parse(), read(), build())
"""
_NUMBERS = """\
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

class Numbers(Dataset):
    def __init__(self, size):
        self.data = [(torch.rand(20), 0) for _ in range(size)]

    def __getitem__(self, index):
        return self.data[index]

def build():
    return Numbers(2048), torch.nn.Linear(20, 1)

def load(data):
    return DataLoader(data, 32, sampler=DistributedSampler(data))

def main():
    data, net = build()
    loader = load(data)
    for epoch in range(10):
        for x, y in loader:
            criterion(net(x), y).backward()
"""
_DRAWN = """\
import torch

class Scenes(torch.utils.data.Dataset):
    def __getitem__(self, index):
        return draw()

dist.init_process_group("nccl")
data = Scenes()
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=32, sampler=sampler)
for epoch in range(10):
    for step, batch in enumerate(loader):
        net(batch).sum().backward()
"""
_METHODS = """\
import torch

class Trainer:
    def __init__(self, model, dataset, extra):
        self.model = model
        self.extra = DataLoader(extra)
        self.loader = DataLoader(dataset, batch_size=8, sampler=DistributedSampler(dataset))  # !

    def run(self, loader):
        for batch in loader:
            self.model(batch).backward()

    def fit(self):
        for epoch in range(10):
            self.run(self.loader)
            self.run(self.extra)
"""
_HELPER = """\
import torch

def make(split):
    data = Clips(split)
    sampler = DistributedSampler(data, shuffle=split == "train")  # !
    return DataLoader(data, batch_size=8, sampler=sampler)

def main(model):
    loader = make("train")
    val_loader = make("val")
    for epoch in range(10):
        for batch in loader:
            model(batch).backward()
"""
_BOTH = """\
import torch

def make(data, tests):
    sampler = DistributedSampler(data)  # !
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    return loader, DataLoader(tests, sampler=DistributedSampler(tests))

def main(model):
    train_loader, val_loader = make(load("train"), load("test"))
    for epoch in range(10):
        for batch in train_loader:
            model(batch).backward()
"""
_ENDLESS = """\
import torch

def cycle(batches):
    while True:
        for batch in batches:
            yield batch

sampler = DistributedSampler(data)  # !
batches = cycle(DataLoader(data, sampler=sampler))
for step in range(100_000):
    model(next(batches)).backward()
"""
_ITERATOR = """\
loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))  # !
state = {"epoch": 0}
for state["epoch"] in range(10):
    batches = iter(loader)
    for step in range(len(loader)):
        model(next(batches)).sum().backward()
"""
_LIST = """\
import torch

def main(model, tasks):
    loaders = []
    for task in tasks:
        sampler = DistributedSampler(task)  # !
        loaders.append(DataLoader(task, sampler=sampler))
    for epoch in range(10):
        for name, loader in zip(tasks, loaders):
            for batch in loader:
                model(batch).backward()
"""
_EACH = """\
import torch
from torch.utils.data.distributed import DistributedSampler

for epoch in range(3):
    dataset = Pregenerated(epoch)
    loader = DataLoader(dataset, sampler=DistributedSampler(dataset))
    for batch in loader:
        model(batch).backward()
"""
_FUNCTIONS = """\
import torch
from torch.utils.data.distributed import DistributedSampler
from tqdm import tqdm

def train_epoch(model, loader, optimizer):
    for x, y in tqdm(loader):
        loss = model(x, y)
        loss.backward()
        optimizer.step()

def main(args):
    dataset, model, optimizer = build(args)
    train_loader = DataLoader(
        dataset,
        batch_size=args.batch_size,
        sampler=DistributedSampler(dataset, shuffle=True),  # !
    )
    for epoch in range(args.epochs):
        train_epoch(model, train_loader, optimizer)
"""
_BRANCH = """\
import torch
from torch.utils.data import RandomSampler

def main(args, dataset, model):
    if args.local_rank == -1:
        sampler = RandomSampler(dataset)
    else:
        sampler = DistributedSampler(dataset)  # !
    loader = DataLoader(dataset, sampler=sampler)
    for _ in range(int(args.num_train_epochs)):
        for batch in loader:
            model(batch).loss.backward()
"""
_OBJECT = """\
def make_loader(dataset):
    return DataLoader(dataset, 8, sampler=DistributedSampler(dataset))  # !

class Training:
    def __init__(self, net, loader, optimizer):
        self.net, self.optimizer = DDP(net), optimizer
        self.loader = loader

    def one_epoch(self, epoch):
        for batch in self.loader:
            self.net(batch).sum().backward()
            self.optimizer.step()

    def run(self):
        for epoch in range(20):
            self.one_epoch(epoch)

loader = make_loader(Images("train"))
Training(net, loader, optimizer).run()
"""
