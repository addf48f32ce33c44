"""What a file holds, by what the project saves under its name."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from doctor.lint.python.rank_branches import statements_above
from doctor.lint.python.script import FunctionNode, Script, last_name, module_of
from doctor.lint.python.training import ACCELERATOR, FABRIC, GROUP, TRAINER
from doctor.lint.python.value_flow import handed_in

PUBLISHED = re.compile(r"-(?!20\d{6}\.)[0-9a-f]{8}\.pth?$")
"""``resnet50-19c8e357.pth``, a name with the hash that ``torch.hub.load_state_dict_from_url`` checks; torchvision loads
these without ``map_location``, with or without a GPU."""
_OF_GPUS = re.compile(r"cuda|gpu|device|accelerat|trainer|deepspeed|fabric|\.to\(|backward|\bfit\(", re.IGNORECASE)
"""Words of programs that may use GPUs, also through a library that trains."""
_Seen = set[tuple[int, str]]
MOST_FILES = 8
"""Other scripts with the name of a file that are read for what they save in it."""
_NUMBERS = frozenset(
    {
        *("item", "tolist", "int", "float", "str", "len", "bool", "round", "format", "vars", "asdict", "to_dict"),
        *("time", "perf_counter", "monotonic", "strftime", "isoformat", "getstate", "get_state", "get_rng_state"),
        *("get_last_lr", "get_world_size", "get_rank", "cpu", "numpy"),
    }
)
"""Calls that return numbers, texts, what Python and NumPy draw from, and tensors on the CPU."""
_ADDS = ("append", "extend", "add")
_FILLS = ("update", "setdefault", "insert")
_OF_SAME_DEVICE = frozenset({"clone", "detach", "contiguous", "float", "half", "bfloat16", "double"})
"""Methods that return a tensor on the device of their own."""
_OF_PARTS = frozenset({"max", "min", "sum", "abs", "sorted", "dict", "list", "tuple", "set", "OrderedDict", "range"})
"""Calls that return what their arguments are."""
_ON_CPU = re.compile(r"sched|scaler|sampler|loader|rng|generator|random|counter|timer|progress|early_?stop", re.I)
"""Objects whose ``state_dict()`` has numbers, or tensors on the CPU."""
_SETTINGS = re.compile(
    r"^_?(?:\w+_)?(?:args?|opts?|options|config|cfg|conf|h_?params|settings|flags)$|^(?:cur_?|start_?|last_?|best_?)?"
    r"(?:epochs?|steps?|iters?|iteration)$|^global_step$|^batch_size$",
    re.IGNORECASE,
)


def is_saved_without_gpu(script: Script, path: ast.expr) -> bool:
    """Whether no tensor of a GPU is in a file: it has the name of published weights, which load on any machine, or all
    that the script, or otherwise another one of its project, saves under its name are numbers, texts, settings and the
    states of samplers and the like, or what a script without a word of GPUs has."""
    name = file_name(script, path)
    if not name or PUBLISHED.search(name):
        return bool(name)
    own = [(script, one) for one in _saved_in(script, name)]
    found = own or [(other, one) for other in _others(script, name) for one in _saved_in(other, name)]
    return bool(found) and all(
        has_no_tensors(where, one)
        or not _OF_GPUS.search(where.text)
        or _trains_on_cpu(where)
        or _is_after_fit(where, one)
        for where, one in found
    )


def is_saved_no_more(script: Script, path: ast.expr) -> bool:
    """Whether a script saves nothing under the name of a file, and a comment of it has the call that did so
    (``# torch.save(optimizer.state_dict(), os.path.join(folder, "optimizer.pt"))``): its runs leave no such file."""
    name = file_name(script, path)
    in_comment = re.compile(rf"^[ \t]*#[^\n]*\bsave\w*\([^\n]*[\"'/]{re.escape(name)}[\"']", re.MULTILINE)
    return bool(name) and in_comment.search(script.text) is not None and not any(True for _ in _saved_in(script, name))


def is_read_without_gpu(script: Script, call: ast.Call) -> bool:
    """Whether all that a function reads of what a call loads are entries of dictionaries, and those that the script, or
    otherwise its project, saves with such entries have no tensors: ``state = torch.load(path)``, ``state["fid"]``."""
    keys = _keys_read(script, call)
    if not keys:
        return False
    own = [(script, one) for one in _saved_with(script, keys)]
    word = max(keys, key=len)
    found = own or [(other, one) for other in _others(script, word) for one in _saved_with(other, keys)]
    return bool(found) and all(_is_small(where, one) for where, one in found)


def _is_small(script: Script, saved: ast.Dict) -> bool:
    """Whether each entry of a dictionary is a score or counter by its name, or has no tensor by its value."""
    pairs = zip(saved.keys, saved.values, strict=True)
    return all(_is_score(script, key, value) or has_no_tensors(script, value) for key, value in pairs)


def _keys_read(script: Script, call: ast.Call) -> set[str]:
    """The entries that are read of what a call returns; empty if it is used in another way too."""
    kept = script.parent(call)
    target = kept.targets[0] if isinstance(kept, ast.Assign) and len(kept.targets) == 1 else None
    if not isinstance(target, ast.Name):
        return set()
    scope = script.scope_of(target, target.id)
    uses = [one for one in script.all(ast.Name) if one.id == target.id and script.scope_of(one, one.id) is scope]
    keys: set[str] = set()
    for one in uses:
        entry = script.parent(one)
        known = script.value(entry.slice) if isinstance(entry, ast.Subscript) and entry.value is one else None
        if one is not target and (not isinstance(known, str) or not isinstance(one.ctx, ast.Load)):
            return set()
        keys |= {known} if isinstance(known, str) else set()
    return keys


def _saved_with(script: Script, keys: set[str]) -> Iterator[ast.Dict]:
    """The dictionaries with such entries, and maybe more, that calls such as ``torch.save`` save."""
    for call in script.all(ast.Call):
        for one in call.args[:2] if "save" in last_name(call.func).lower() else ():
            values = script.values_of(one) if isinstance(one, ast.Name) else (one,)
            written = values[0] if len(values) == 1 else None
            is_whole = isinstance(one, ast.Dict) or f"{ast.unparse(one)}[" not in script.text
            if isinstance(written, ast.Dict) and is_whole:
                if keys <= {script.value(key) for key in written.keys if key}:
                    yield written


def _trains_on_cpu(script: Script) -> bool:
    """Whether a program joins groups over Gloo alone, names the CPU wherever it makes a device, and has no name, option
    of a call or text of CUDA in its code."""
    groups = list(script.calls(GROUP))
    devices = list(script.calls("torch.device"))
    if not groups or not devices or next(script.calls(TRAINER, FABRIC, ACCELERATOR), None) is not None:
        return False
    if any(script.value(script.argument(one, "backend", 0)) != "gloo" for one in groups):
        return False
    if any(script.value(script.argument(one, "type", 0)) != "cpu" for one in devices):
        return False
    named = (last_name(one) for kind in (ast.Name, ast.Attribute) for one in script.all(kind))
    written = (one.value for one in script.all(ast.Constant) if isinstance(one.value, str))
    return not any("cuda" in one for one in named) and not any(map(_IS_GPU.match, written))


_IS_GPU = re.compile(r"(?:cuda|gpu|xpu|hpu|npu|mps)(?::\d*)?$")


def holds_scores(script: Script, saved: ast.expr) -> bool:
    """Whether a dictionary that is saved has scores and counters alone, by the names of its entries and their
    values: ``{"epoch": epoch, "best_acc": best_acc}``."""
    values = script.values_of(saved) if isinstance(saved, ast.Name) else (saved,)
    if len(values) != 1 or not isinstance(values[0], ast.Dict) or not values[0].keys:
        return False
    if isinstance(saved, ast.Name) and f"{saved.id}[" in script.text:
        return False
    return all(_is_score(script, *pair) for pair in zip(values[0].keys, values[0].values, strict=True))


_SCORE = re.compile(
    r"^(?:\w+_)?(?:acc\d?|accuracy|accuracies|dice|m?iou|m?ap|auc|auroc|f1|bleu|rouge|psnr|ssim|fid|wer|cer|hd95|scores?|"
    r"metrics?|loss|losses|perplexity|ppl|error|rmse|mse|mae|precision|recall|epochs?|steps?|iters?|iterations?|top\d|lr)"
    r"(?:_\w+)?$|^best_\w+$",
    re.IGNORECASE,
)
_OF_WEIGHTS = re.compile(r"state|model|optim|weight|param|tensor|embed|feature|logit|pred|output|map", re.IGNORECASE)
_OF_PYTHON = frozenset({"str", "repr", "dict", "sorted", "vars", "getattr"})


def _is_score(script: Script, key: ast.expr | None, value: ast.expr) -> bool:
    word = script.value(key) if key is not None else None
    if not isinstance(word, str) or _OF_WEIGHTS.search(word):
        return False
    named = {word, *(one.id for one in ast.walk(value) if isinstance(one, ast.Name) and one.id not in _OF_PYTHON)}
    is_plain = not any(isinstance(one, ast.Call) for one in ast.walk(value)) or has_no_tensors(script, value)
    return is_plain and any(map(_SCORE.match, named)) and not any(map(_OF_WEIGHTS.search, named))


def _is_after_fit(script: Script, saved: ast.expr) -> bool:
    """Whether it is saved below ``trainer.fit()``, at whose end Lightning moves the model to the CPU
    (lightning/pytorch/strategies/strategy.py: ``teardown``)."""
    return any(
        call.lineno < saved.lineno and script.function_of(call) is script.function_of(saved)
        for call in script.calls(f"{TRAINER}().fit")
    )


def file_name(script: Script, path: ast.expr) -> str:
    """The last part of a path as far as it is written: ``scores.bin`` of ``f"{folder}/scores.bin"`` and of
    ``os.path.join(folder, "scores.bin")``; that of a parameter is its default."""
    last = path
    for _ in range(3):
        if isinstance(last, ast.Name) and len(values := script.values_of(last)) == 1:
            last = values[0]
        elif isinstance(last, ast.Name) and (value := _bound_above(script, last)) is not None:
            last = value
        elif isinstance(last, ast.Name):
            last = _default_of(script, last) or last
        if isinstance(last, ast.JoinedStr) and last.values:
            last = last.values[-1]
        elif isinstance(last, ast.BinOp):
            last = last.right
        elif isinstance(last, ast.Call) and last.args and last_name(last.func) in ("join", "joinpath", "Path", "str"):
            last = last.args[-1]
    known = script.value(last)
    return known.rpartition("/")[2] if isinstance(known, str) else ""


def _bound_above(script: Script, name: ast.Name) -> ast.expr | None:
    """The value that the nearest statement above a name, in its block or one around it, gives it, unless another
    statement between the two may do so."""
    for one in sorted(statements_above(script, name), key=lambda above: -above.lineno):
        stored = [part for part in ast.walk(one) if isinstance(part, ast.Name) and part.id == name.id]
        if any(isinstance(part.ctx, ast.Store) for part in stored):
            is_plain = isinstance(one, ast.Assign) and len(one.targets) == 1 and isinstance(one.targets[0], ast.Name)
            return one.value if is_plain and isinstance(one, ast.Assign) else None
    return None


_OF_PRETRAINED = re.compile(r"pre-?_?train|imagenet", re.IGNORECASE)


def is_for_torchvision(script: Script, call: ast.Call) -> bool:
    """Whether a model as torchvision makes it, with the classes of ImageNet, gets all that a call loads from a path for
    pretrained weights, strictly: published files of torchvision fit, and these hold tensors of the CPU."""
    parent = script.parent(call)
    model = parent.func.value if isinstance(parent, ast.Call) and isinstance(parent.func, ast.Attribute) else None
    if not isinstance(parent, ast.Call) or not isinstance(model, ast.Name) or not call.args:
        return False
    if last_name(parent.func) != "load_state_dict" or len(parent.args) + len(parent.keywords) != 1:
        return False
    path = call.args[0]
    made = (_bound_above(script, path) if isinstance(path, ast.Name) else None) or path
    words = (one.value for one in ast.walk(made) if isinstance(one, ast.Constant) and isinstance(one.value, str))
    return any(map(_OF_PRETRAINED.search, words)) and _is_made_by_torchvision(script, model)


def _is_made_by_torchvision(script: Script, model: ast.Name) -> bool:
    """Whether the nearest statement above a model that gives it a value has constructors of torchvision for it, and
    nothing below changes a part of it: ``model.fc = Linear(512, 10)``."""
    for one in sorted(statements_above(script, model), key=lambda above: -above.lineno):
        named = [part for part in ast.walk(one) if isinstance(part, ast.Name) and part.id == model.id]
        bound = [part for part in named if isinstance(part.ctx, ast.Store)]
        if not bound:
            if any(
                isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store)
                for part in map(script.parent, named)
            ):
                return False
            continue
        givers = [script.parent(part) for part in bound]
        values = [part.value for part in givers if isinstance(part, ast.Assign)]
        calls = [part for part in values if isinstance(part, ast.Call)]
        is_known = len(values) == len(bound) and all(isinstance(part, (ast.Call, ast.Constant)) for part in values)
        return (
            is_known
            and bool(calls)
            and len(named) == len(bound)
            and all(_is_plain_torchvision(script, one) for one in calls)
        )
    return False


def _is_plain_torchvision(script: Script, call: ast.Call) -> bool:
    names = {one.arg for one in call.keywords}
    return script.name(call.func).startswith("torchvision.models.") and names <= {"pretrained", "weights", "progress"}


def _default_of(script: Script, name: ast.Name) -> ast.expr | None:
    """The default of a parameter that no call in the file gives."""
    function = script.function_of(name) if not any(True for _ in handed_in(script, name)) else None
    named = [*function.args.posonlyargs, *function.args.args] if function is not None else []
    defaults = zip(named[::-1], function.args.defaults[::-1], strict=False) if function is not None else ()
    return next((default for one, default in defaults if one.arg == name.id), None)


def _others(script: Script, name: str) -> Iterator[Script]:
    modules = script.modules
    texts = modules.mentioning(name) if modules is not None and len(name) > 3 else ()
    savers = [(at, text) for at, text in texts if at.endswith(".py") and "save(" in text and at != script.path]
    for shown, text in savers[:MOST_FILES] if len(savers) <= MOST_FILES else ():
        try:
            yield module_of(modules, shown, text) if modules is not None else Script(shown, text)
        except (SyntaxError, ValueError, RecursionError):
            return  # what it saves is not known; its own reading reports that


def _saved_in(script: Script, name: str) -> Iterator[ast.expr]:
    """What calls such as ``torch.save(state, path)`` save in a file of that name."""
    for call in script.all(ast.Call):
        if "save" not in last_name(call.func).lower():
            continue
        given = [*call.args, *(word.value for word in call.keywords)]
        places = [one for one in given if file_name(script, one) == name]
        objects = [one for one in given if one not in places]
        if places and objects:
            yield objects[0]


def has_no_tensors(script: Script, saved: ast.expr) -> bool:
    """Whether a value that is saved holds numbers, texts, settings and the states of samplers alone."""
    return not _is_loaded(script, saved) and _is_plain(script, saved, set())


def _is_moved(script: Script, text: str, entries: list[ast.expr]) -> bool:
    """``state[name] = state[name].cpu()``: each entry is put on the CPU."""
    moved = (one for one in entries if isinstance(one, ast.Call) and last_name(one.func) == "cpu")
    return any(f"{text}[" in script.text_of(one) for one in moved)


def entries_of(script: Script, text: str) -> Iterator[ast.expr]:
    """The values of ``saved[...] = value``, and what is appended to it or to an entry."""
    pairs = [(target, one.value) for one in script.all(ast.Assign) for target in one.targets]
    pairs += [(one.target, one.value) for one in script.all(ast.AugAssign)]
    for target, value in pairs:
        if isinstance(target, ast.Subscript) and script.text_of(_container(target)) == text:
            yield value
    for call in script.method_calls(*_ADDS):
        receiver = call.func.value if isinstance(call.func, ast.Attribute) else call.func
        if script.text_of(_container(receiver)) == text:
            yield from call.args


def _container(node: ast.expr) -> ast.expr:
    """What an entry is one of, also of an inner container: ``state`` of ``state["net"][name]``."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return node


def _is_loaded(script: Script, node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and script.name(node.func) == "torch.load"


def _is_plain(script: Script, node: ast.AST | str, seen: _Seen) -> bool:
    """Whether a value holds no tensor of a GPU, as far as the file shows."""
    if isinstance(node, (ast.Constant, ast.JoinedStr)):
        return True
    if isinstance(node, ast.Call):
        return _returns_plain(script, node, seen)
    if isinstance(node, (ast.Name, ast.Attribute)):
        return _is_bound_to_plain(script, node, seen)
    if isinstance(node, ast.Subscript):
        return any(_is_loaded(script, one) for one in script.values_of(node.value)) or _is_plain(
            script, node.value, seen
        )
    if isinstance(node, (ast.AugAssign, ast.DictComp)):
        return _is_plain(script, node.value, seen)
    parts = [*_parts(node)] if isinstance(node, ast.expr) else []
    return bool(parts) and all(one is not None and _is_plain(script, one, seen) for one in parts)


def _parts(node: ast.expr) -> Iterator[ast.expr | None]:
    """What a container holds, and an operation computes with."""
    if isinstance(node, (ast.Dict, ast.BoolOp)):
        yield from node.values
    elif isinstance(node, (ast.List, ast.Tuple, ast.Set)):
        yield from node.elts
    elif isinstance(node, ast.BinOp):
        yield from (node.left, node.right)
    elif isinstance(node, ast.Compare):
        yield from (node.left, *node.comparators)
    elif isinstance(node, ast.UnaryOp):
        yield node.operand
    elif isinstance(node, ast.IfExp):
        yield from (node.body, node.orelse)


def _returns_plain(script: Script, call: ast.Call, seen: _Seen) -> bool:
    last = last_name(call.func)
    if last == "state_dict" and isinstance(call.func, ast.Attribute):
        owner = script.text_of(call.func.value)
        return _ON_CPU.search(owner) is not None or any(
            script.text_of(one.func) == f"{owner}.cpu" and script.function_of(one) is script.function_of(call)
            for one in script.method_calls("cpu")
            if one.lineno < call.lineno
        )
    if last == "decode" and not call.args and not call.keywords:
        return True  # of bytes; monai/networks/nets/dints.py: ``TopologySearch.decode`` returns arrays of NumPy
    if last in _OF_PARTS and not isinstance(call.func, ast.Attribute):
        return all(_is_plain(script, one, seen) for one in (*call.args, *(word.value for word in call.keywords)))
    if last in _NUMBERS or _is_loaded(script, call) or last.endswith("to_cpu"):
        return True
    if last == "to" and isinstance(call.func, ast.Attribute):
        return _names_cpu(script, script.argument(call, "device", 0))
    if last in _OF_SAME_DEVICE and isinstance(call.func, ast.Attribute):
        return isinstance(call.func.value, ast.Call) and _is_plain(script, call.func.value, seen)
    return not _is_of_library(last) and _is_returned_plain(script, last, seen)


_OF_MODULES = frozenset({"state_dict", "named_parameters", "parameters", "named_buffers", "buffers", "modules"})


def _is_of_library(name: str) -> bool:
    """Whether each module, dictionary or text has a method of that name, which may be the one that is called."""
    return name in _OF_MODULES or hasattr(dict, name) or hasattr(str, name) or hasattr(list, name)


def _names_cpu(script: Script, device: ast.expr | None) -> bool:
    if isinstance(device, ast.Call) and script.name(device.func) == "torch.device":
        device = script.argument(device, "type", 0)
    return device is not None and script.value(device) == "cpu"


def _is_returned_plain(script: Script, name: str, seen: _Seen) -> bool:
    """Whether the only function or method of a name in a script, or otherwise in its project, returns no tensor of a
    GPU: ``{"lora": {name: one.cpu() for ...}}``."""
    followed = {one for one in seen if one[0] == _OF_FUNCTIONS}
    if not name or (_OF_FUNCTIONS, name) in followed or len(followed) == _MOST_FOLLOWED:
        return False
    found = _definition_of(script, name)
    if found is None or found[1].decorator_list:
        return False
    where, function = found
    returned = [one.value for one in where.inside(function, ast.Return) if one.value is not None]
    if not returned or next(where.inside(function, ast.Yield), None) is not None:
        return False
    return not any(_is_loaded(where, one) for one in returned) and all(
        _is_plain(where, one, followed | {(_OF_FUNCTIONS, name)}) for one in returned
    )


_MOST_FOLLOWED = 3
_OF_FUNCTIONS = 0
"""Marks the names of functions whose results are being read, next to names of scopes."""


def _definition_of(script: Script, name: str) -> tuple[Script, FunctionNode] | None:
    """The only function or method of a name, and its script: in the file, or else in its project."""
    own = [one for one in script.functions if one.name == name]
    if own or script.modules is None:
        return (script, own[0]) if len(own) == 1 else None
    texts = [(at, text) for at, text in script.modules.mentioning(f"def {name}(") if at.endswith(".py")]
    if len(texts) != 1:
        return None
    try:
        other = module_of(script.modules, *texts[0])
    except (SyntaxError, ValueError, RecursionError):
        return None
    found = [one for one in other.functions if one.name == name]
    return (other, found[0]) if len(found) == 1 else None


def _is_bound_to_plain(script: Script, node: ast.Name | ast.Attribute, seen: _Seen) -> bool:
    text = script.text_of(node)
    scope = script.scope_of(node, node.id) if isinstance(node, ast.Name) else None
    if (id(scope), text) in seen:
        return True  # of what the other values decide
    seen.add((id(scope), text))
    root = last_name(node.value) if isinstance(node, ast.Attribute) else ""
    if _SETTINGS.match(last_name(node)) or (root != "self" and _SETTINGS.match(root)):
        return True
    entries = [*entries_of(script, text)]
    if _is_moved(script, text, entries):
        return True
    fills = (one.func for one in script.method_calls(*_FILLS) if isinstance(one.func, ast.Attribute))
    if any(script.text_of(_container(one.value)) == text for one in fills):
        return False
    if isinstance(node, ast.Name):
        bound = scope.names[node.id] if scope is not None else []
    else:
        bound = [one for one in script.values_of(node) if one is not node]
    bound = [_unpacked_from(one) for one in bound]
    values = [one for one in bound if not _is_counted(one) and not _is_empty(one)]
    if any(isinstance(one, ast.arg) for one in values):
        given = list(handed_in(script, node))
        values = [*given, *(one for one in values if not (given and isinstance(one, ast.arg)))]
    known = [one for one in (*values, *entries) if not (isinstance(one, ast.AST) and _is_loaded(script, one))]
    is_made = bool(known) or any(map(_is_counted, bound))
    return is_made and all(_is_plain(script, one, seen) for one in known)


def _unpacked_from(bound: ast.AST | str) -> ast.AST | str:
    """``space.decode()`` of ``nodes, code = space.decode()``: what all parts are taken from."""
    call = bound.value if isinstance(bound, ast.Starred) else None
    return call if isinstance(call, ast.Call) and last_name(call.func) == "decode" else bound


def _is_empty(bound: ast.AST | str) -> bool:
    """``{}``, ``[]`` or ``{"net": {}}``: what is put into it decides."""
    if isinstance(bound, ast.Dict):
        return all(map(_is_empty, bound.values))
    return isinstance(bound, ast.List) and not bound.elts


def _is_counted(bound: ast.AST | str) -> bool:
    """A number that a loop counts: ``for step in range(n)``."""
    return isinstance(bound, ast.For) and isinstance(bound.target, ast.Name) and last_name(bound.iter) == "range"
