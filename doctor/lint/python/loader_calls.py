"""Data loaders and samplers of a script, their purpose and the origin of their data."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple

from doctor.core.text import lazy_compile
from doctor.lint.python.project.imported_functions import called_function
from doctor.lint.python.reachable_functions import is_run_by_all
from doctor.lint.python.script import Script, last_name, per_script
from doctor.lint.python.training import DATA_MODULE, LOADER, MODULE, hooks, shards_loaders_itself, unwrapped

LOADERS = (
    LOADER,
    "torchdata.stateful_dataloader.StatefulDataLoader",
    "torch_geometric.loader.DataLoader",
    "monai.data.DataLoader",
)
"""Loaders with the arguments of torch's DataLoader."""

EVALUATION = frozenset({"val", "valid", "validation", "validate", "test", "testing", "eval", "evaluation", "dev"})
"""Words in names of functions, loaders and data sets for evaluation."""
_PREDICTION = frozenset({"predict", "prediction", "inference", "infer"})
_TRAINING = frozenset({"train", "training", "trn", "tr"})
_WORDS = lazy_compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_TAIL = lazy_compile(r"(?:data)?(?:loaders?|sets?|samplers?|ds|dl|iter|data)$")
_MAKERS = lazy_compile(r"(?:_?(?:get|make|build|create|load|prepare|setup|init)_|[a-z]+_?(?:data)?_?loaders?$)")
"""Names of functions that make loaders."""
_SETTINGS = lazy_compile(
    r"^_?(?:args?|opts?|options|configs?|cfg|conf|hparams|h|flags|params|settings|parser)$", re.IGNORECASE
)
"""Names of objects with all settings of a script; one setting does not depend on the others."""
RANK_PATTERN = lazy_compile(
    r"rank|world|shard|replica|process_index|num_processes|partition|distribut|split_by_node|get_worker_info|local_id|"
    r"hvd|horovod|_dp|dp_|mesh",
    re.IGNORECASE,
)
"""Words of data that the script itself distributes to ranks, and of names that differ between ranks."""
_RANK_TEST_WORDS = lazy_compile(
    r"distribut|ddp|world_?size|multi_?(?:gpu|process)|parallel|n_?gpus?$|num_gpus|rank|horovod|hvd|is_initialized|"
    r"fsdp|num_processes|sampler|is_dist|use_dist",
    re.IGNORECASE,
)
STREAMS = (
    "torch.utils.data.IterableDataset",
    "torch.utils.data.ChainDataset",
    "torch.utils.data.IterDataPipe",
    "webdataset.WebDataset",
    "webdataset.DataPipeline",
)
_MAPS = lazy_compile(
    r"^(?:torchvision\.datasets\.|torchaudio\.datasets\.|torch\.utils\.data\.(?:TensorDataset|Subset|ConcatDataset))"
)


def words_of(name: str) -> frozenset[str]:
    """The words of a name without those for a loader or a data set: ``testDataLoader`` is ``test``."""
    words = [word.lower() for word in _WORDS.findall(name)]
    return frozenset(words) | {bare for word in words if (bare := _TAIL.sub("", word))}


def is_for_evaluation(name: str) -> bool:
    """Whether a name is about evaluation: ``val_loader``, ``test_dataset``, ``evaluate``."""
    words = words_of(name)
    return any(word in EVALUATION | _PREDICTION or word.startswith(("valid", "evalu")) for word in words)


def evaluates(name: str) -> bool | None:
    """Whether a name is for evaluation (``False``: for training); ``None`` if it is for neither or both."""
    trains, judges = not _TRAINING.isdisjoint(words_of(name)), is_for_evaluation(name)
    return judges if trains != judges else None


class LoaderCall(NamedTuple):
    """``name``: the variable of the loader or the function that returns it (``is_returned``); ``evaluates``: as in
    :func:`evaluates`."""

    call: ast.Call
    name: str
    evaluates: bool | None
    is_returned: bool = False

    @property
    def title(self) -> str:
        """Its name in reports."""
        if self.is_returned and self.name:
            return f"Loader of {self.name} (line {self.call.lineno})"
        return f"{self.name or 'The loader'} (line {self.call.lineno})"


def loaders(script: Script) -> Iterator[LoaderCall]:
    """Every loader that is made in a script, in the order of the text."""
    for call in script.calls(*LOADERS):
        name = target_name(script, call)
        purposes = {evaluates(one) for one in (name, *_names_of_data(script, call))} - {None}
        maker = _function_name(script, call)
        if not purposes and _MAKERS.match(maker):
            purposes = {evaluates(maker)}
        purpose = purposes.pop() if len(purposes) == 1 else None
        yield LoaderCall(call, name, purpose, bool(name) and name == maker and _is_returned(script, call))


def _is_returned(script: Script, node: ast.AST) -> bool:
    outer = next(one for one in script.around(node) if isinstance(one, (ast.stmt, ast.Lambda)))
    return isinstance(outer, (ast.Return, ast.Lambda))


def target_name(script: Script, node: ast.AST) -> str:
    """The name of what a value is assigned or passed to, or of the function that returns it."""
    for outer in script.around(node):
        if isinstance(outer, ast.keyword):
            return outer.arg or ""
        if isinstance(outer, ast.Assign) and len(outer.targets) == 1:
            return _bare(outer.targets[0])
        if isinstance(outer, (ast.AnnAssign, ast.NamedExpr)):
            return _bare(outer.target)
        if isinstance(outer, (ast.Return, ast.Lambda)):
            return _function_name(script, outer)
        if isinstance(outer, ast.stmt):
            return ""
    return ""


def _bare(node: ast.AST) -> str:
    if isinstance(node, ast.Subscript):
        key = node.slice.value if isinstance(node.slice, ast.Constant) else ""
        return f"{_bare(node.value)}_{key}" if isinstance(key, str) else ""
    return "" if isinstance(node, ast.Call) else last_name(node)


def _function_name(script: Script, node: ast.AST) -> str:
    function = script.function_of(node)
    return function.name if function is not None else ""


def _names_of_data(script: Script, call: ast.Call) -> Iterator[str]:
    """Names of the data set and of its split: ``train=False``, ``split="test"``."""
    data = script.argument(call, "dataset", 0)
    if data is None:
        return
    for one in (data, *script.values_of(data)):
        yield _bare(one)
        if isinstance(one, ast.Call):
            yield _split_of(script, one)


def _split_of(script: Script, made: ast.Call) -> str:
    if isinstance(train := script.value(script.argument(made, "train")), bool):
        return "train" if train else "test"
    for name in ("split", "mode", "phase", "stage", "image_set", "subset"):
        if isinstance(split := script.value(script.argument(made, name)), str):
            return split if not re.search(r"[\[+]", split) else ""
    return ""


def data_of(script: Script, loader: ast.Call) -> frozenset[str]:
    """All words from which the data set of a loader is made, as far as this file shows."""
    data = script.argument(loader, "dataset", 0)
    return words_behind(script, data) if data is not None else frozenset()


def words_behind(script: Script, node: ast.expr, steps: int = 40) -> frozenset[str]:
    """Identifiers and strings behind an expression: its own, those of the values of its names, and of the functions and
    classes of this file that it calls."""
    found: set[str] = set()
    seen: set[ast.AST] = set()
    waiting: list[ast.AST] = [node]
    while waiting and steps:
        current = waiting.pop()
        if current in seen:
            continue
        seen.add(current)
        steps -= 1
        for part in ast.walk(current):
            found.update(_identifiers(part))
            waiting.extend(_made_from(script, part))
    return frozenset(found)


def _identifiers(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.Attribute):
        yield node.attr
    elif isinstance(node, (ast.arg, ast.keyword)):
        yield node.arg or ""
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 80:
        yield node.value


def _made_from(script: Script, node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and _SETTINGS.match(node.value.id):
        yield from _assigned_to_attributes(script).get(node.attr, ())
    elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Load):
        if not (isinstance(node, ast.Name) and _SETTINGS.match(node.id)):
            yield from (one for one in script.values_of(node) if one is not node)
            scope = script.scope_of(node, node.id) if isinstance(node, ast.Name) else None
            bound = scope.names[node.id] if scope is not None and isinstance(node, ast.Name) else ()
            yield from (one.iter for one in bound if isinstance(one, (ast.For, ast.comprehension)))
    if isinstance(node, ast.Call):
        made = None if script.name(node.func).endswith("()") else script.class_definition(node.func)
        yield from (one for one in (script.definition(node.func), made) if one is not None)


@per_script
def _assigned_to_attributes(script: Script) -> dict[str, list[ast.expr]]:
    """The values that attributes of any object get in a file, by their names: ``args.output = …``."""
    found: dict[str, list[ast.expr]] = {}
    for statement in script.all(ast.Assign):
        for target in statement.targets:
            if isinstance(target, ast.Attribute):
                found.setdefault(target.attr, []).append(statement.value)
    return found


def mentions_ranks(words: frozenset[str]) -> bool:
    """Whether one of the words does."""
    return any(RANK_PATTERN.search(word) for word in words)


def depends_on_ranks(script: Script, node: ast.AST) -> bool:
    """Whether it is in a branch on the presence of several ranks, or on the rank."""
    return any(True for _ in branches_on_ranks(script, node))


def branches_on_ranks(script: Script, node: ast.AST) -> Iterator[tuple[ast.expr, bool]]:
    """The tests of such branches around it in its function, each with whether it holds there."""
    inner = node
    for outer in script.around(node):
        if isinstance(outer, (ast.If, ast.IfExp)) and inner is not outer.test:
            words = (word for part in ast.walk(outer.test) for word in _identifiers(part))
            if any(_RANK_TEST_WORDS.search(word) for word in words):
                below = outer.orelse if isinstance(outer.orelse, list) else [outer.orelse]
                yield outer.test, inner not in below
        if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            return
        inner = outer


def is_iterable(script: Script, loader: ast.Call) -> bool | None:
    """Whether the data set of a loader is a stream; ``None`` if unknown."""
    if script.is_given(loader, "shuffle", 2) and script.value(script.argument(loader, "shuffle", 2)) is True:
        return False
    data = script.argument(loader, "dataset", 0)
    if data is None:
        return None
    owner = script.class_definition(data)
    if owner is not None:
        is_map = next(hooks(owner, "__getitem__"), None) is not None
        return script.derives(owner, *STREAMS) or (False if is_map else None)
    name = script.name(data)
    if name.removesuffix("()") in STREAMS:
        return True
    return False if _MAPS.match(name) else None


_CYCLES = lazy_compile(r"cycle|infinite|endless|forever", re.IGNORECASE)


def is_endless(script: Script, loader: ast.Call, name: str) -> bool:
    """Whether a loader is only read as a source of samples: ``cycle(DataLoader(…))``, ``next(iter(loader))``, or a loop
    over it inside ``while True:``."""
    outer = script.parent(loader)
    if isinstance(outer, ast.Call) and loader in outer.args and _CYCLES.search(last_name(outer.func)):
        return True
    used: list[ast.Name | ast.Attribute] = [*script.all(ast.Name), *script.all(ast.Attribute)]
    users = [script.parent(one) for one in used if name and last_name(one) == name and isinstance(one.ctx, ast.Load)]
    if users and all(isinstance(one, ast.Call) and script.text_of(one.func) == "iter" for one in users):
        return not any(isinstance(script.parent(one), (ast.For, ast.comprehension)) for one in users if one is not None)
    read = [loop for loop in script.all(ast.For) if name and last_name(unwrapped(loop.iter)) == name]
    return bool(read) and all(
        isinstance(outer := script.parent(loop), ast.While) and script.value(outer.test) is True for loop in read
    )


def is_cut_short(script: Script, name: str) -> bool:
    """Whether every loop over a loader takes a number of batches: ``islice(loader, 50)``, or ``break`` at a count or at
    the end of the first one."""
    read = list(loops_over(script, name))
    return bool(read) and all(_takes_some(script, one) for one in read)


def _takes_some(script: Script, loop: ast.For) -> bool:
    called = {last_name(one) for one in ast.walk(loop.iter) if isinstance(one, ast.Call)}
    if "islice" in called or {"zip", "range"} <= called or isinstance(loop.body[-1], ast.Break):
        return True
    counters = (
        {one.id for one in ast.walk(loop.target) if isinstance(one, ast.Name)} if "enumerate" in called else set()
    )
    counters |= {last_name(one.target) for one in script.inside(loop, ast.AugAssign)}
    for branch in loop.body:
        if (
            isinstance(branch, ast.If)
            and isinstance(branch.body[-1], ast.Break)
            and isinstance(branch.test, ast.Compare)
        ):
            if any(isinstance(one, ast.Name) and one.id in counters for one in ast.walk(branch.test)):
                return True
    return False


_KEEPS = frozenset({"append", "extend", "write", "writerow", "writerows", "concatenate"})
_WITHOUT_ORDER = lazy_compile(r"loss|time|acc|metric|norm|correct|total|score|nll|psnr|ssim|iou|error", re.IGNORECASE)
_ANSWERS = lazy_compile(r"label|target|truth|\bgts?\b|gt_", re.IGNORECASE)


def is_collected(script: Script, name: str) -> bool:
    """Whether a loop over a loader keeps its results in order, here or in a function of the file that gets the loader;
    not numbers to be averaged, and not results that are kept beside the labels of the same batches."""
    kept = [call for loop in loops_over(script, name) for call in script.inside(loop, ast.Call) if _keeps(call)]
    texts = [ast.unparse(one) for one in kept]
    return any(not _WITHOUT_ORDER.search(one) for one in texts) and not any(map(_ANSWERS.search, texts))


def _keeps(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and call.func.attr in _KEEPS and bool(call.args)


def loops_over(script: Script, name: str) -> Iterator[ast.For]:
    """The loops over a loader, also in functions of the file that get it."""
    if not name:
        return
    handed: set[tuple[ast.AST | None, str]] = set()
    for call in script.all(ast.Call):
        function = script.definition(call.func)
        given = [number for number, one in enumerate(call.args) if last_name(one) == name]
        if function is None:
            continue
        parameters = [one.arg for one in function.args.args]
        skipped = 1 if parameters[:1] == ["self"] else 0
        handed |= {(function, parameters[at + skipped]) for at in given if at + skipped < len(parameters)}
        handed |= {(function, one.arg) for one in call.keywords if one.arg and last_name(one.value) == name}
    for loop in script.all(ast.For):
        source = unwrapped(loop.iter)
        values = [source, *script.values_of(source)]
        read = {
            last_name(part) for one in values for part in ast.walk(one) if isinstance(part, (ast.Name, ast.Attribute))
        }
        function = script.function_of(loop)
        if name in read or any((function, one) in handed for one in read):
            yield loop


def is_unused(script: Script, loader: LoaderCall) -> bool:
    """Whether nothing reads the variable of a loader, or what the callers of its function unpack from the result."""
    statement = script.parent(loader.call)
    if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Attribute):
        kept = statement.targets[0].attr
        reads_it = any(one.attr == kept and isinstance(one.ctx, ast.Load) for one in script.all(ast.Attribute))
        return not reads_it and not _has_text(script, kept) and _is_named_here_only(script, kept)
    if not isinstance(statement, ast.Assign) or not isinstance(statement.targets[0], ast.Name):
        return False
    name, scope = statement.targets[0].id, script.scope_of(loader.call, statement.targets[0].id)
    reads = [one for one in script.all(ast.Name) if one.id == name and isinstance(one.ctx, ast.Load)]
    reads = [one for one in reads if script.scope_of(one, name) is scope]
    if not reads:
        return scope is not None and (not isinstance(scope.node, ast.Module) or _is_named_here_only(script, name))
    return all(_is_returned_in_vain(script, one) or _is_given_in_vain(script, one) for one in reads)


def _has_text(script: Script, name: str) -> bool:
    return any(one.value == name for one in script.all(ast.Constant))


def _is_given_in_vain(script: Script, read: ast.Name) -> bool:
    """Whether a name is an argument of a function of the project that does not read its parameter."""
    word = script.parent(read)
    call = script.parent(word) if isinstance(word, ast.keyword) else word
    found = called_function(script, call) if isinstance(call, ast.Call) and read is not call.func else None
    if found is None or not isinstance(call, ast.Call) or script.is_open(call):
        return False
    function = found[1]
    names = [one.arg for one in (*function.args.posonlyargs, *function.args.args)]
    given = [one for one, value in zip(names, call.args, strict=False) if value is read]
    given += [word.arg] if isinstance(word, ast.keyword) and word.arg else []
    reads = {one.id for one in ast.walk(function) if isinstance(one, ast.Name)}
    return len(given) == 1 and given[0] not in reads and "locals" not in reads


def _is_named_here_only(script: Script, name: str) -> bool:
    """Whether no other file of the project has the name of a variable of the module."""
    modules = script.modules
    return modules is not None and all(shown == script.path for shown, _ in modules.mentioning(name))


def _is_returned_in_vain(script: Script, read: ast.Name) -> bool:
    """Whether a name is a part of what a function returns that no caller in the project uses."""
    parts = script.parent(read)
    function = script.function_of(read)
    if not isinstance(parts, ast.Tuple) or not isinstance(script.parent(parts), ast.Return) or function is None:
        return False
    calls = re.compile(rf"^[ \t]*([\w ,\t]+?)[ \t]*=[ \t]*(?:[\w.]+\.)?{function.name}\(", re.MULTILINE)
    texts = [script.text] if script.modules is None else [text for _, text in script.modules.mentioning(function.name)]
    found = [(text, [part.strip() for part in call[1].split(",")]) for text in texts for call in calls.finditer(text)]
    named = sum(len(re.findall(rf"\b{function.name}\(", text)) for text in texts)
    if not found or named != len(found) + sum(text.count(f"def {function.name}(") for text in texts):
        return False
    place = parts.elts.index(read)
    return all(len(names) == len(parts.elts) and not _reads(script, text, names[place], read) for text, names in found)


def _reads(script: Script, text: str, name: str, apart: ast.Name) -> bool:
    """Whether a file has a name more often than it is unpacked to; in this file, whether other functions read it."""
    if text != script.text:
        return len(re.findall(rf"\b{re.escape(name)}\b", text)) != 1
    own = script.function_of(apart)
    named = (one for one in script.all(ast.Name) if one.id == name and isinstance(one.ctx, ast.Load))
    return any(script.function_of(one) is not own for one in named)


def is_read_by_one_rank(script: Script, name: str) -> bool:
    """Whether every loop over a loader is in a part that only some ranks run."""
    read = list(loops_over(script, name))
    return bool(read) and not any(is_run_by_all(script, loop) for loop in read)


def is_sharded_by_framework(script: Script, loader: ast.Call) -> bool:
    """Whether a framework gives the loader its own sampler, with one order for all ranks."""
    return belongs_to_lightning(script, loader) or shards_loaders_itself(script)


def belongs_to_lightning(script: Script, node: ast.AST) -> bool:
    """Whether it is in a LightningModule or LightningDataModule, for whose loaders the Trainer adds samplers."""
    return script.derives(script.class_of(node), MODULE, DATA_MODULE)
