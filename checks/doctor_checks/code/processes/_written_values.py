"""What all ranks write into one file: whether it is the same from each of them, and what is lost if two mix."""

from __future__ import annotations

import ast
import re

from doctor.api import Script, Severity
from doctor.lint.python.collective_paths import ends_in_error
from doctor.lint.python.project.saved_values import entries_of, has_no_tensors, holds_scores
from doctor.lint.python.rank_branches import block_of
from doctor.lint.python.script import last_name
from doctor.lint.python.value_flow import computed_from, handed_in

WRITERS = {
    "torch.save": ("f", 1),
    "numpy.save": ("file", 0),
    "numpy.savez": ("file", 0),
    "numpy.savez_compressed": ("file", 0),
    "safetensors.torch.save_file": ("filename", 1),
    "joblib.dump": ("filename", 1),
}
"""Calls that write, with their path argument."""
_READERS = re.compile(r"^(?:\w+\.)*\w*(?:yaml|json|toml|tomllib|OmegaConf|YAML)(?:\(\))?\.\w*load\w*$")
"""Functions that read settings from a file."""
_DUMPS = frozenset({"dump", "dumps", "safe_dump", "save", "write", "writerow", "writelines"})


def severity_of(script: Script, call: ast.Call, *, infers: bool) -> Severity | None:
    """By what is lost: data that each rank has for itself are errors, since those of one rank remain, or of none if
    they differ in size. States that all ranks have, texts and numbers are warnings. What is small and the same from all
    ranks, or a dump of a run that stops there, is an info."""
    if _is_of_debug_run(script, call) or _is_dump_of_failure(script, call) or _is_of_failed_training(script, call):
        return Severity.INFO
    if script.name(call.func) in WRITERS:
        saved = _saved_by(script, call)
        is_torch = script.name(call.func) == "torch.save" and bool(saved)
        if is_torch and holds_scores(script, saved[0]):
            return Severity.INFO if _averages(script) else Severity.WARNING
        is_less = infers or (is_torch and has_no_tensors(script, saved[0])) or _is_cache(script, call, saved)
        return None if not is_less and any(_is_of_rank(script, one) for one in saved) else Severity.WARNING
    is_same = _is_copy(script, call) or _is_same(script, call) or _is_made_before(script, call)
    return Severity.INFO if is_same else Severity.WARNING


_STATES = re.compile(
    r"^(?:\w+_)?(?:state_?dicts?|state|states|models?|module|net|network|checkpoints?|ckpts?|snapshots?|weights|optimizers?)"
    r"(?:_(?:dict|state|to_save|cpu|without_ddp|module|ema|\d+))*$",
    re.IGNORECASE,
)
_PARTS_STATES = re.compile(
    r"FSDP|[Ff]ully_?[Ss]hard|ZeroRedundancy|zero_?3|stage_?3|\"stage\": 3|device_mesh|DeviceMesh|parallelize|DTensor|"
    r"(?:tensor|pipeline|expert|model|sequence)_parallel|\bmpu\.|megatron|\brpc\b|local_state_dict|hybrid"
)
"""Words of files whose ranks hold parts of a model, so that their states differ."""


_OF_RANK = re.compile(
    r"loader|batch|pred|output|logit|feat(?:ure)?s?(?:_|$)|embed|result|loss|score|acc(?:uracy)?s?(?:_|$)|prob|hidden|recon|"
    r"generated|rank|(?:^|_)dl$",
    re.IGNORECASE,
)
"""Names of what a rank computes from its own share of the data."""


_OF_SHARES = re.compile(r"loader|batch(?!_?size)|sampler|rank|(?:^|_)dl$", re.IGNORECASE)
"""Names of the share of the data that a rank has."""
_ASKS_FOR_FILE = frozenset({"exists", "isfile", "is_file", "lexists"})


def _is_cache(script: Script, call: ast.Call, saved: list[ast.expr]) -> bool:
    """Whether a file is written only if it does not exist, with what is computed from nothing that a rank has for
    itself: a cache, which the ranks of the first run write with the same bytes."""
    inner: ast.AST = call
    for outer in script.around(call):
        if isinstance(outer, ast.If) and inner is not outer.test:
            is_denied = isinstance(outer.test, ast.UnaryOp) and isinstance(outer.test.op, ast.Not)
            asked = outer.test.operand if isinstance(outer.test, ast.UnaryOp) else outer.test
            is_missing = is_denied is (inner in outer.body)
            if is_missing and isinstance(asked, ast.Call) and last_name(asked.func) in _ASKS_FOR_FILE:
                made = [part for one in saved for part in computed_from(script, one)]
                named = [last_name(one) for one in made if isinstance(one, (ast.Name, ast.Attribute))]
                return not any(map(_OF_SHARES.search, named))
        if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return False
        inner = outer
    return False


def _saved_by(script: Script, call: ast.Call) -> list[ast.expr]:
    """What a call writes: its arguments without the path."""
    path = script.argument(call, *WRITERS[script.name(call.func)])
    return [one for one in (*call.args, *(word.value for word in call.keywords)) if one is not path]


def _is_of_rank(script: Script, saved: ast.expr) -> bool:
    """Whether the value differs between ranks: a part of a model, or what it computed from its own data and
    did not gather. A state that all ranks have is as many bytes from each, so that the file can be read when all have
    ended (measured with eight processes: in 15 of 15 runs, and in 3 of 15 if sizes differed). So is what all ranks make
    of the same files, as a cache of the dataset."""
    if _is_state(script, saved):
        return _PARTS_STATES.search(script.text) is not None
    if _averages(script):
        return False
    made = [part for one in (saved, *handed_in(script, saved)) for part in computed_from(script, one)]
    filled = [one for part in made if isinstance(part, ast.Name) for one in entries_of(script, part.id)]
    parts = (*made, *(part for one in filled for part in computed_from(script, one)))
    return any(_OF_RANK.search(last_name(one)) for one in parts if isinstance(one, (ast.Name, ast.Attribute)))


_GIVE_STATES = frozenset({"state_dict", "get_state_dict", "serialize", "unwrap_model", "unwrap"})
_KEEP = frozenset({"cpu", "to", "half", "float", "bfloat16", "clone", "items", "copy", "deepcopy", "dict"})
"""Calls that return what they are given, or what they belong to, in another form."""


def _is_state(script: Script, saved: ast.expr, depth: int = 4) -> bool:
    """Whether a value is the state of a model or an optimizer, or has one among its entries, by what it is made of, and
    otherwise by its name: ``{"net": net.state_dict(), "epoch": epoch}``."""
    if isinstance(saved, ast.Call) and last_name(saved.func) in _GIVE_STATES:
        return True
    if _is_weight(script, saved):
        return True
    if isinstance(saved, ast.Name) and _is_module(script, saved):
        return True
    parts = _made_of(script, saved)
    is_named = isinstance(saved, (ast.Name, ast.Attribute)) and _STATES.match(last_name(saved))
    if is_named and not any(isinstance(one, (ast.Dict, ast.DictComp)) for one in parts):
        return True
    return depth > 0 and any(_is_state(script, one, depth - 1) for one in parts)


def _is_module(script: Script, name: ast.Name) -> bool:
    """Whether the function around a name, or the module, asks what it names for its parameters, or freezes them:
    ``Adam(decoder.parameters())``."""
    function = script.function_of(name)
    owners = [one.func.value for one in script.method_calls(*_OF_MODULES) if isinstance(one.func, ast.Attribute)]
    return any(
        isinstance(one, ast.Name) and one.id == name.id and script.function_of(one) is function for one in owners
    )


_OF_MODULES = ("parameters", "named_parameters", "named_modules", "requires_grad_")


def _is_weight(script: Script, saved: ast.expr, depth: int = 3) -> bool:
    """Whether a value is a parameter of a layer, or a part of a model whose wrapper is taken off, and of nothing that
    it computed: ``accelerator.unwrap_model(encoder).get_input_embeddings().weight[first:].detach()``."""
    inner = saved
    while isinstance(inner, (ast.Attribute, ast.Subscript, ast.Call)):
        bare = last_name(inner.func) if isinstance(inner, ast.Call) and not isinstance(inner.func, ast.Call) else ""
        if bare in ("unwrap_model", "unwrap"):
            return True
        if isinstance(inner, ast.Attribute) and inner.attr in ("weight", "bias") and _is_of_layer(inner.value):
            return True
        if isinstance(inner, ast.Call) and (inner.args or inner.keywords) and bare not in _KEEP:
            return False
        inner = inner.func if isinstance(inner, ast.Call) else inner.value
    if not isinstance(inner, ast.Name) or not depth:
        return False
    values = [one for one in script.values_of(inner) if one is not inner and not _is_part_of(one, inner.id)]
    return bool(values) and all(_is_weight(script, one, depth - 1) for one in values)


def _is_of_layer(owner: ast.expr) -> bool:
    """``encoder.embeddings``, ``model.get_input_embeddings()``: not ``batch``, whose weights are data."""
    return isinstance(owner, ast.Attribute) or (isinstance(owner, ast.Call) and isinstance(owner.func, ast.Attribute))


def _is_part_of(value: ast.expr, name: str) -> bool:
    """Whether a value is another shape of what a name had before: ``embeds = embeds[None]``."""
    return isinstance(value, ast.Subscript) and isinstance(value.value, ast.Name) and value.value.id == name


def _made_of(script: Script, saved: ast.expr) -> list[ast.expr]:
    """The values that a container holds, a name is given, or a call keeps."""
    if isinstance(saved, ast.Dict):
        return saved.values
    if isinstance(saved, (ast.DictComp, ast.GeneratorExp, ast.ListComp)):
        return [saved.generators[0].iter]
    if isinstance(saved, ast.Call) and last_name(saved.func) in _KEEP:
        owner = [saved.func.value] if isinstance(saved.func, ast.Attribute) else []
        return [*owner, *saved.args[:1], *(word.value for word in saved.keywords)]
    if isinstance(saved, ast.Name):
        made = (*script.values_of(saved), *handed_in(script, saved), *entries_of(script, saved.id))
        kinds = (ast.Dict, ast.DictComp, ast.Call, ast.Name)
        return [one for one in made if one is not saved and (isinstance(one, kinds) or _is_weight(script, one))]
    return []


_IS_BAD = frozenset({"isfinite", "isnan", "isinf", "is_finite", "is_nan", "isreal"})


def _is_dump_of_failure(script: Script, call: ast.Call) -> bool:
    """Whether a branch for a loss that is not finite has it, or one without a model in the file that ends the process
    with an error: the file serves to find the reason, and has no result of the run."""
    inner: ast.AST = script.statement_of(call)
    has_model = any(_OF_MODELS.search(last_name(one)) for given in call.args for one in ast.walk(given))
    for outer in script.around(inner):
        if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return False
        if isinstance(outer, ast.If) and inner in outer.body:
            tested = {last_name(one.func) for one in ast.walk(outer.test) if isinstance(one, ast.Call)}
            if tested & _IS_BAD or (not has_model and any(map(ends_in_error, outer.body))):
                return True
        inner = outer
    return False


_TRAINS = re.compile(r"^(?:\w+_)?(?:train|fit|run)(?:_\w+)?$|^backward$", re.IGNORECASE)


def _is_of_failed_training(script: Script, call: ast.Call) -> bool:
    """Whether the handler of an error of the training has it, which a job gets to that fails: what each rank still has
    may not be the same. An interrupt is a way to end a run."""
    inner: ast.AST = call
    for outer in script.around(call):
        if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return False
        if isinstance(inner, ast.ExceptHandler) and isinstance(outer, ast.Try) and inner in outer.handlers:
            is_error = inner.type is None or "Interrupt" not in ast.unparse(inner.type)
            tried = (one for part in outer.body for one in script.inside(part, ast.Call))
            if is_error and any(_TRAINS.match(last_name(one.func)) for one in tried):
                return True
        inner = outer
    return False


_OF_MODELS = re.compile(r"state_dict|model|net$|optim|checkpoint|ckpt", re.IGNORECASE)


def _averages(script: Script) -> bool:
    """Whether a script exchanges numbers between its ranks, also by functions that it imports by their names."""
    named = (last_name(one.func) for one in script.all(ast.Call) if isinstance(one.func, ast.Name))
    return any(True for _ in script.method_calls(*_GATHERS)) or any(one in _FUNCTIONS for one in named)


_OF_RUN = re.compile(
    rf"{_OF_RANK.pattern}|history|metric|(?:^|_)logs?(?:_|$)|best|correct|answer|response|eval|time|epoch|step|iter|sample|"
    r"(?:^|_)(?:train|test|valid(?:ation)?)(?:_|$)|stat(?:e|us)|found|count|total|mean|sum",
    re.IGNORECASE,
)
"""Names of what a run computes."""
_COMPUTES = re.compile(r"model|net$|predict|evaluat|generat|infer|validat|^test|^run|gather|reduce|item", re.IGNORECASE)
"""Functions that compute with a model."""
_OF_DATA_SETS = re.compile(r"^(?:\w*_)?(?:stats|statistics|mean|std|norm_stats)$", re.IGNORECASE)
_FILLED = ("append", "extend", "update", "setdefault")


def _is_made_before(script: Script, call: ast.Call) -> bool:
    """Whether a script writes once what it has of its options and data before it trains, as far as names say: settings,
    the command, names of classes, a vocabulary, statistics of the data. Every rank has the same, and a later job reads
    the file."""
    if script.nearest(call, ast.For, ast.While) is not None:
        return False
    dumped = _dumped(script, call)
    filled = {last_name(one.func.value) for one in script.method_calls(*_FILLED) if isinstance(one.func, ast.Attribute)}
    return bool(dumped) and not any(
        _is_of_run(script, part, filled) for one in dumped for part in computed_from(script, one, above=call.lineno)
    )


def _is_of_run(script: Script, part: ast.AST, filled: set[str]) -> bool:
    if isinstance(part, ast.Call):
        return _COMPUTES.search(last_name(part.func)) is not None
    if not isinstance(part, (ast.Name, ast.Attribute)):
        return False
    name = last_name(part)
    if isinstance(part, ast.Attribute) and _SETTINGS_NAME.match(last_name(part.value)):
        return False  # an option may have any name
    return name in filled or (_OF_RUN.search(name) is not None and not _OF_DATA_SETS.match(name))


def _dumped(script: Script, call: ast.Call) -> list[ast.expr]:
    """What is written into an open file."""
    calls = [one for part in _body_of(script, call) for one in script.inside(part, ast.Call)]
    dumps = [one for one in calls if last_name(one.func) in _DUMPS]
    printing = [
        one for one in calls if last_name(one.func) == "print" and any(word.arg == "file" for word in one.keywords)
    ]
    prints = [part for one in printing for part in one.args]
    return [*prints, *(one.args[0] for one in dumps if one.args and one.args[0] not in dumps)]


def _body_of(script: Script, call: ast.Call) -> list[ast.stmt]:
    """The statements that have an open file: those of ``with open(path, "w")``, or that of the call, with those below
    it that use the file."""
    around = script.parent(script.parent(call) or call)
    if isinstance(around, ast.With):
        return around.body
    here, file = script.statement_of(call), file_of(script, call)
    block = block_of(script.parent(here) or here, here)
    below = block[block.index(here) + 1 :] if isinstance(file, ast.Name) and block else []
    found = [here]
    for one in below:
        uses = [
            part
            for part in ast.walk(one)
            if isinstance(part, ast.Name) and ast.unparse(part) == ast.unparse(file or here)
        ]
        if any(isinstance(part.ctx, ast.Store) for part in uses):
            break  # another file
        found += [one] if uses else []
    return found


_DEBUGS = re.compile(r"(?:^|_)debug(?:$|_|ging)", re.IGNORECASE)


def _is_of_debug_run(script: Script, call: ast.Call) -> bool:
    """Whether a branch for debugging has it: such runs mostly have one process."""
    tests = (branch.test for branch, is_in_body in script.branches(call) if is_in_body)
    named = (
        last_name(one)
        for test in tests
        if not any(map(_negates, ast.walk(test)))
        for one in ast.walk(test)
        if isinstance(one, (ast.Name, ast.Attribute))
    )
    return any(map(_DEBUGS.search, named))


def _negates(node: ast.AST) -> bool:
    return isinstance(node, (ast.Not, ast.NotEq, ast.IsNot)) or (isinstance(node, ast.Constant) and not node.value)


_GATHERS = ("gather", "gather_for_metrics", "all_gather", "all_gather_object", "all_reduce", "reduce")
_FUNCTIONS = frozenset({*_GATHERS, "all_gather_into_tensor", "gather_object"} - {"gather", "reduce"})
"""Those that mean ranks by their name alone: ``functools.reduce`` does not."""


_SETTINGS_NAME = re.compile(
    r"^(?:\w+_)?(?:args?|arguments|opts?|options|cfg|config|conf|hps|hparams|params|settings|flags|variant)(?:_(?:text|str|json))?$",
    re.IGNORECASE,
)
_OF_PYTHON = frozenset(
    {"json", "yaml", "str", "repr", "vars", "dict", "sorted", "asdict", "pprint", "OmegaConf", "getattr"}
)


def _is_same(script: Script, call: ast.Call) -> bool:
    """A text that is the same on all ranks: settings, by their name or because YAML holds them, and what is written
    once, not in a loop, by a script that gathers its numbers or has them averaged."""
    body = _body_of(script, call)
    dumps = [one for part in body for one in script.inside(part, ast.Call) if last_name(one.func) in _DUMPS]
    made = (part for one in dumps for given in (one, *one.args) for part in computed_from(script, given))
    if any(isinstance(one, ast.Call) and script.name(one.func).startswith("yaml.") for one in made):
        return True
    names = [_settings_named(script, one.args[0]) for one in dumps if one.args]
    parts = _parts_of_settings(script, body)
    if names and all(given and all(one in parts or _SETTINGS_NAME.match(one) for one in given) for given in names):
        return True
    if _is_repeated(script, call):
        return False
    written = [one.args[0] for one in dumps if one.args]
    return _averages(script) or (bool(written) and all(_may_be_averaged(script, one) for one in written))


_OF_ALL_RANKS = re.compile(r"^(?:num_)?(?:world_?size|replicas|process_group)$", re.IGNORECASE)


def _may_be_averaged(script: Script, value: ast.expr) -> bool:
    """Whether a value is computed by a function or an object that was given the number of ranks, with which it may
    average: ``evaluator = Evaluator(model, world_size=world_size)``, and ``evaluator.run(loader)``. A caller may give
    the object: ``report(evaluator)``."""
    made = list(computed_from(script, value))
    if any(_knows_ranks(one) for one in made):
        return True
    handed = (given for one in made if isinstance(one, ast.Name) for given in handed_in(script, one))
    behind = (one for given in handed for one in computed_from(script, given))
    return any(_knows_ranks(one) and _MEASURES.search(last_name(one)) for one in behind)


_MEASURES = re.compile(r"train|eval|metric|meter|test|valid|runner", re.IGNORECASE)


def _knows_ranks(node: ast.AST) -> bool:
    given = [*node.args, *(word.value for word in node.keywords)] if isinstance(node, ast.Call) else []
    return any(_OF_ALL_RANKS.match(last_name(one)) for one in given)


def _is_repeated(script: Script, call: ast.Call) -> bool:
    """Whether a loop has it, besides one over places that are written out: ``for folder in [out, os.getcwd()]``."""
    loop = script.nearest(call, ast.For, ast.While)
    return loop is not None and not (isinstance(loop, ast.For) and isinstance(loop.iter, (ast.List, ast.Tuple)))


_COPIES = frozenset({"deepcopy", "copy", "vars", "asdict", "dict", "to_dict", "to_container", "dumps"})


def _settings_named(script: Script, node: ast.expr) -> set[str]:
    """The names in a value, of a copy of settings those of what was copied: ``used = copy.deepcopy(config)``."""
    found: set[str] = set()
    for part in ast.walk(node):
        if not isinstance(part, ast.Name):
            continue
        values = () if _SETTINGS_NAME.match(part.id) else script.values_of(part)
        made = values[0] if len(values) == 1 else None
        is_copy = isinstance(made, ast.Call) and last_name(made.func) in _COPIES
        found |= _named(made) - {"copy"} if is_copy and made is not None else {part.id}
    return found - _OF_PYTHON


def _named(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def _parts_of_settings(script: Script, body: list[ast.stmt]) -> set[str]:
    """The names of what a loop over settings, and the statements in it, take from them:
    ``for name in vars(args): value = getattr(args, name)``."""
    parts: set[str] = set()
    steps: list[ast.For | ast.Assign] = []
    for part in body:
        steps += [*script.inside(part, ast.For), *script.inside(part, ast.Assign)]
    for step in sorted(steps, key=lambda one: one.lineno):
        source = step.iter if isinstance(step, ast.For) else step.value
        targets = [step.target] if isinstance(step, ast.For) else step.targets
        given = _named(source) - _OF_PYTHON
        if given and all(one in parts or _SETTINGS_NAME.match(one) for one in given):
            parts |= {name for target in targets for name in _named(target)}
    return parts


def _is_copy(script: Script, call: ast.Call) -> bool:
    """``yaml.dump(settings, open(path, "w"))`` of settings that were read from a file, or the text of one: every rank
    writes the same."""
    written = _dumped(script, call)
    return bool(written) and all(_is_read(script, one) or _is_read_only(script, one) for one in written)


def _is_read(script: Script, node: ast.expr) -> bool:
    """``source.read()`` of a file that the script opened, or the only value of a name."""
    values = script.values_of(node) if isinstance(node, ast.Name) else ()
    if len(values) == 1 and values[0] is not node and isinstance(values[0], ast.expr):
        return _is_read(script, values[0])
    if isinstance(node, ast.Call) and last_name(node.func) in ("read_text", "read_bytes"):
        return True
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr != "read":
        return False
    files = (file_of(script, one) for one in script.all(ast.Call) if last_name(one.func) == "open")
    return ast.unparse(node.func.value) in (ast.unparse(one) for one in files if one is not None)


def _is_read_only(script: Script, node: ast.expr) -> bool:
    """Whether a name is bound once, to what a file held, and the function adds at most constants to it."""
    made = script.values_of(node)
    if not isinstance(node, ast.Name) or len(made) != 1 or not isinstance(made[0], ast.Call):
        return False
    if not _READERS.match(script.name(made[0].func)):
        return False
    updates = (one for one in script.method_calls("update") if ast.unparse(one.func).partition(".")[0] == node.id)
    stored = (one for one in script.all(ast.Assign) if script.function_of(one) is script.function_of(node))
    added = [one for one in stored if any(_root(target) == node.id for target in one.targets)]
    return next(updates, None) is None and all(isinstance(one.value, ast.Constant) for one in added)


def _root(target: ast.expr) -> str:
    """``settings`` of ``settings["model"]["size"]``; empty for a plain name."""
    inner = target
    while isinstance(inner, ast.Subscript):
        inner = inner.value
    return inner.id if isinstance(inner, ast.Name) and inner is not target else ""


def file_of(script: Script, call: ast.Call) -> ast.expr | None:
    """What ``open()`` is bound to: ``file`` of ``file = open(path, "w")`` or of ``with open(path, "w") as file``."""
    outer = script.parent(call)
    if isinstance(outer, ast.withitem):
        return outer.optional_vars
    is_plain = isinstance(outer, ast.Assign) and outer.value is call and len(outer.targets) == 1
    return outer.targets[0] if isinstance(outer, ast.Assign) and is_plain else None
