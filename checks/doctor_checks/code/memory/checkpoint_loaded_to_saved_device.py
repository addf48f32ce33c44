"""CODE001: every rank loads a checkpoint onto the GPU it was saved from."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import replace

from doctor.api import Script, SetArgument, Severity, Violation, location_of, rule
from doctor.lint.engine.rule import LONGEST_SUMMARY
from doctor.lint.python.cuda import shows_one_gpu, shows_own_gpu
from doctor.lint.python.gpu_use import simulates_ranks, uses_gpus
from doctor.lint.python.project.absent_values import is_none_on_others
from doctor.lint.python.project.random_data import trains_on_noise
from doctor.lint.python.project.saved_values import (
    PUBLISHED,
    file_name,
    is_for_torchvision,
    is_read_without_gpu,
    is_saved_no_more,
    is_saved_without_gpu,
)
from doctor.lint.python.project.settings.option_values import (
    is_empty_in_commands,
    is_given_in_no_text,
    is_given_nowhere,
    is_given_to_one_process,
    is_in_no_configuration,
    is_left_by_all_starts,
    option_values,
    texts_in_commands,
)
from doctor.lint.python.project.settings.options import OF_SETTINGS
from doctor.lint.python.rank_branches import rank_condition
from doctor.lint.python.reachable_functions import run_by_all
from doctor.lint.python.script import UNKNOWN, last_name
from doctor.lint.python.single_rank import is_of_one_rank
from doctor.lint.python.training import TRAINER, WRAPPERS, only_infers, several_ranks, unwrapped
from doctor.lint.python.value_flow import computed_from
from doctor.testing.script_cases import fails, passes

_CHECKPOINT = re.compile(
    r"ckpt|checkpoint|chkpt|\bcp\b|resume|pretrain|weight|snapshot|state_?dict|model|optim|\bbest|backbone|\.pth|"
    r"finetune|restore",
    re.IGNORECASE,
)
_OF_MODEL_NAME = re.compile(r"\bmodel_name(?:_or_path)?\b")
"""In the name of a folder or a file of something else."""
_DATA = re.compile(r"data|feature|feat\b|cache|embed|vocab|index|token|buffer|bytes|sample|batch|latent", re.IGNORECASE)
_HELD_ON_CPU = re.compile(r"sched|scaler|sampler|loader|rng|generator|random", re.IGNORECASE)
"""States of numbers or CPU tensors."""
_SETTINGS = re.compile(
    r"(?:^|_)(?:args|opts?|options|config|cfg|h_?params|hyper_?param(?:eter)?s|meta)$|"
    r"^params$|(?:train|training|run|cli|build|init)_params$",
    re.IGNORECASE,
)
"""Names of what holds settings, and no tensors."""
_SAVED_FROM_CPU = re.compile(
    r"\{\s*(\w+)\s*:\s*(\w+)(?:\.detach\(\))?(?:\.data)?\.(?:cpu\(\)|to\([\"']cpu)[^{}]*\bfor\s+\1,\s*\2\s+in\b|"
    r"[Dd]ict\(\s*(?:\[\s*)?[\[(]\s*(\w+)\b[^{}=\n]{0,80},\s*(\w+)(?:\.detach\(\))?(?:\.data)?\.(?:cpu\(\)|to\([\"']cpu[\"']\))"
    r"\s*[\])]\s*for\s+\3,\s*\4\s+in\b|"
    r"\.cpu\(\)\.state_dict\(|\.to\([\"']cpu[\"']\)\.state_dict\(|FullStateDictConfig\([^()]*offload_to_cpu\s?=\s?True|"
    r"StateDictOptions\([^()]*cpu_offload\s?=\s?True|"
    r"tree_map\(\s?lambda (\w+): \5(?:\.detach\(\))?\.(?:cpu\(\)|to\([\"']cpu)|"
    r"\bfor (\w+), ?(\w+) in (?=[^\n]{0,200}(?:named_parameters\(|state_dict|\bstate\b))[^\n]{0,200}:\n"
    r"(?:[^\n]*\n){0,3}?[ \t]+\w+\[\6\] ?= ?\7(?:\.data|\.detach\(\)|\.clone\(\))*\.(?:cpu\(\)|to\([\"']cpu[\"']\))"
    r"(?:\.clone\(\))?[ \t]*(?:#|\n)"
)
"""``{k: v.cpu() for k, v in state.items()}``, also as ``dict([[k, v.cpu()] for k, v in state.items()])`` or in a loop,
``net.cpu().state_dict()``, and states that FSDP gathers on the CPU: what a project saves like this is loaded onto the
CPU."""
_HELPS_TO_CPU = re.compile(r"(?<!def )\b\w*to_cpu\(\s?\w*(?:model|net|state|sd|weights|params)|\bxm\.save\(")
"""Helpers that put states on the CPU: ``weights_to_cpu(state)`` of mmcv, ``xm.save`` of torch_xla. A project may have a
copy of them that it does not use, so they count in the file that loads."""
_CPU_WORDS = (".cpu", "cpu_offload", "offload_to_cpu", '.to("cpu', ".to('cpu")
_GATHERED_ON_CPU = ("offload_to_cpu", "cpu_offload")
_OPTIMIZER = re.compile(r"optim|^opt(?:_|$)", re.IGNORECASE)
_OF_A_RANK = re.compile(r"rank|process_index", re.IGNORECASE)
"""A file that each rank saved for itself."""
_FIRST = re.compile(r"^cuda:0$")
_STAGES = tuple(f"{TRAINER}().{name}" for name in ("fit", "validate", "test", "predict"))
_SCALARS = ("epoch", "step", "global_step", "iteration", "args", "best_acc", "best_acc1", "best_loss", "config")


@rule(
    id="CODE001",
    severity=Severity.WARNING,
    reads=Script,
    mentions=("load(",),
    foreshadows=("MEM001",),
    impacts={
        r"onto GPU 0": "All ranks of a host hold a copy of the checkpoint on GPU 0, which may run out of memory.",
    },
    cases=lambda: (
        fails("a snapshot of the elastic example", _SNAPSHOT),
        fails(
            "the weights straight into the model",
            _WEIGHTS,
            fixed={"weights_only=True": 'weights_only=True, map_location="cpu"'},
        ),
        fails(
            "model and optimizer, mapped files are no other device",
            _STATES,
            fixed={"mmap=True": 'mmap=True, map_location="cpu"'},
        ),
        fails("mapped to the first GPU", _MAPPED_FIRST),
        passes("onto the CPU, by name and by place", _ONTO_CPU),
        passes("onto the GPU of the rank", _ONTO_GPU),
        passes("nothing shows several ranks", _NO_RANKS),
        passes(
            "the script shows all ranks one GPU",
            'os.environ["CUDA_VISIBLE_DEVICES"] = "2"\n' + _WEIGHTS.replace("  # !", ""),
        ),
        passes("settings that an earlier run kept", _WEIGHTS_ARGS),
        fails("weights that are called parameters", _WEIGHTS_PARAMS),
        passes("the project saves states from the CPU", _FROM_CPU),
        passes(
            "the project saves pairs from the CPU",
            _FROM_CPU.replace(_EACH, "dict([[name[7:], one.cpu()] for name, one in model.state_dict().items()])"),
        ),
        fails(
            "the optimizer is saved as it is",
            _OPTIMIZER_AS_IT_IS,
            fixed={"_of_optimizer))": '_of_optimizer, map_location="cpu"))'},
        ),
        passes("the model is moved to the CPU before", _FROM_CPU.replace(_EACH, "model.cpu().state_dict()")),
        passes(
            "FSDP gathers on the CPU what is saved",
            _FROM_CPU.replace(_EACH, "gathered(FullStateDictConfig(offload_to_cpu=True, rank0_only=True))"),
        ),
        fails(
            "the model is saved as it is",
            _FROM_CPU.replace(_EACH, "model.state_dict()").replace("(checkpoint))", "(checkpoint))  # !"),
            fixed={"(checkpoint))": '(checkpoint, map_location="cpu"))'},
        ),
        passes("the branch beside one that maps it", _IN_BRANCHES.format(other="path")),
        fails(
            "the branch beside one that maps another file",
            _IN_BRANCHES.format(other="teacher").replace("(path)", "(path)  # !"),
        ),
        passes("an entry for one process", _ONE_PROCESS),
        passes(
            "a GPU for each rank",
            'os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["LOCAL_RANK"]\n' + _WEIGHTS.replace("  # !", ""),
        ),
        passes("a published file", _WEIGHTS_OF.replace('"weights/NAME"', 'hf_hub_download("a/b", "model.pt")')),
        passes(
            "a shard of a published model",
            _WEIGHTS_OF.replace('"weights/NAME"', 'os.path.join(base, index["weight_map"][name])'),
        ),
        passes("a helper puts states on the CPU", _FROM_CPU.replace(_EACH, "weights_to_cpu(model.state_dict())")),
        passes("in the role of one rank", _WEIGHTS_OF_CHIEF.format(test="self.chief")),
        passes("on the first GPU", _WEIGHTS_OF_CHIEF.format(test="gpu == 0")),
        fails(
            "by another number",
            _WEIGHTS_OF_CHIEF.format(test="level == 0").replace("))", "))  # !"),
            fixed={"weights_only=True": 'weights_only=True, map_location="cpu"'},
        ),
        passes("no launcher has set the rank", _NO_LAUNCHER),
        passes("the first rank alone, one process alone, and no checkpoint", _FIRST_RANK),
        passes("the file is saved with numbers alone", _SAVED_NUMBERS),
        fails(
            "the file is saved with tensors",
            _SAVED_NUMBERS.replace(".item()", "").replace('state.pt")', 'state.pt")  # !', 1),
        ),
        passes("the file is saved with losses and the state of a sampler", _SAVED_PROGRESS),
        fails(
            "the file is saved with the state of an optimizer",
            _SAVED_PROGRESS.replace("sampler.state_dict()", "optimizer.state_dict()").replace(
                '.pt"))', '.pt"))  # !', 1
            ),
        ),
        passes("published weights, by the hash in their name", _WEIGHTS_OF.replace("NAME", "resnet50-19c8e357.pth")),
        fails(
            "weights of a run, by its date",
            _WEIGHTS_OF.replace("NAME", "resnet50-20261129.pth").replace("))", "))  # !"),
            fixed={'.pth")': '.pth", map_location="cpu")'},
        ),
        passes("Lightning has moved the model to the CPU after the training", _AFTER_FIT),
        fails(
            "another stage follows",
            _AFTER_FIT.replace("_path))", "_path))  # !") + "trainer.test(system)\n",
            fixed={"_path))": '_path, map_location="cpu"))'},
        ),
        passes("states that are numbers, and an app that trains nothing", _NUMBERS),
        passes("ranks on CPUs, other functions of that name, and arguments that can't be told", _CPU_RANKS),
    ),
)
def checkpoint_loaded_to_saved_device(script: Script) -> Iterator[Violation]:
    """Ask whether ranks load checkpoints onto the CPU or their own GPU.

    Why it hurts: torch.load restores each tensor to the device it was saved from, usually GPU 0. All ranks of a host
    then hold a copy of the checkpoint there, and rank 0 may run out of memory.
    Fix: Pass `map_location="cpu"` to torch.load; load_state_dict then copies the tensors to the device of the model.
    """
    shown = several_ranks(script)
    if shown is None or not uses_gpus(script) or simulates_ranks(script) or only_infers(script, shown):
        return
    if shows_one_gpu(script) or shows_own_gpu(script) or "FSDPStrategy" in script.text:
        return  # each rank sees one GPU; or Lightning saves gathered states from the CPU
    for call in script.calls("torch.load", "torch.jit.load"):
        if script.function_of(call) not in run_by_all(script) or is_of_one_rank(script, call) or script.is_open(call):
            continue
        if _has_one_process(script, call) or _is_mapped_otherwise(script, call):
            continue
        if _is_after_training(script, call) or _is_given_published(script, call):
            continue
        where = script.argument(call, "map_location", 1)
        if where is None or script.value(where) is None:
            if _is_checkpoint(script, call) and (_is_of_optimizer(script, call) or not _saves_from_cpu(script)):
                found = _unmapped(script, call, shown)
                is_less = _is_from_elsewhere(script, call) or _is_given_by_no_start(script, call)
                is_less = is_less or _only_evaluates(script, shown) or _is_published(script, call)
                is_less = is_less or is_for_torchvision(script, call) or _is_given_to_one_process(script, call)
                is_less = is_less or trains_on_noise(script) or _is_bare_name(script, call)
                is_less = is_less or (bool(call.args) and is_saved_no_more(script, call.args[0]))
                is_less = is_less or any(is_none_on_others(script, one) for one in _paths(script, call))
                yield replace(found, severity=Severity.INFO, preview=True) if is_less else found
        elif fixed := _first_gpu(script, where):
            yield Violation(
                call,
                f"Every rank loads {_source(script, call)} onto GPU 0 (map_location={fixed})",
                fix='Use `map_location="cpu"`, or `map_location=f"cuda:{local_rank}"` for the GPU of each rank.',
            )


def _only_evaluates(script: Script, shown: ast.Call) -> bool:
    """Whether a Trainer is the reason for several ranks and trains nothing: no gradients and no states of an optimizer
    are on GPU 0 in addition to the weights."""
    return script.name(shown.func) == TRAINER and next(script.method_calls("fit"), None) is None


def _unmapped(script: Script, call: ast.Call, shown: ast.Call) -> Violation:
    certain = script.name(call.func) == "torch.load" and _goes_into_state(script, call)
    summary = f"Every rank loads {_source(script, call)} onto the GPU it was saved from"
    reason = ": map_location is not set"
    return Violation(
        call,
        summary + (reason if len(summary + reason) <= LONGEST_SUMMARY else ""),
        evidence=(("job_started_at_line", shown.lineno),),
        confidence=0.9,
        edits=(SetArgument(location_of(call), "map_location", '"cpu"'),) if certain and len(call.args) == 1 else (),
    )


def _has_one_process(script: Script, call: ast.Call) -> bool:
    """Whether the function around a call gives its model to DataParallel, and to no wrapper of several ranks: the
    entry for one process next to one for several."""
    function = script.function_of(call)
    if function is None:
        return False
    names = {script.name(one.func) for one in script.inside(function, ast.Call)}
    return "torch.nn.DataParallel" in names and names.isdisjoint(WRAPPERS)


def _is_mapped_otherwise(script: Script, call: ast.Call) -> bool:
    """Whether the other branch loads the same file with a ``map_location``: the program thought of several ranks, and
    this branch is that of one process."""
    inner: ast.AST = call
    for outer in script.around(call):
        if isinstance(outer, ast.If) and inner is not outer.test and call.args:
            other = outer.orelse if inner in outer.body else outer.body
            loads = (one for part in other for one in script.inside(part, ast.Call) if one.args)
            same = (one for one in loads if script.name(one.func) == script.name(call.func))
            shown = ast.unparse(call.args[0])
            if any(script.argument(one, "map_location", 1) and ast.unparse(one.args[0]) == shown for one in same):
                return True
        inner = outer
    return False


def _is_after_training(script: Script, call: ast.Call) -> bool:
    """Whether Lightning's Trainer has ended its last stage in the function around a call: it has moved the model and
    the optimizers to the CPU (lightning/pytorch/strategies/strategy.py: ``teardown``), so GPU 0 has room."""
    stages = list(script.calls(*_STAGES))
    here = script.function_of(call)
    return bool(stages) and all(one.lineno < call.lineno and script.function_of(one) is here for one in stages)


def _saves_from_cpu(script: Script) -> bool:
    """Whether the file, or the project, moves states to the CPU before it saves them."""
    if _has_cpu_state(script.text) or _HELPS_TO_CPU.search(script.text):
        return True
    if script.modules is None:
        return False
    key = ("saved from the CPU",)
    if key not in script.modules.memo:
        texts = (text for _, text in script.modules.mentioning("torch.save("))
        script.modules.memo[key] = any(map(_has_cpu_state, texts))
    found: bool = script.modules.memo[key]
    return found


def _has_cpu_state(text: str) -> bool:
    return any(word in text for word in _CPU_WORDS) and _SAVED_FROM_CPU.search(text) is not None


def _is_of_optimizer(script: Script, call: ast.Call) -> bool:
    """Whether an optimizer alone gets what is loaded, and nothing puts its tensors on the CPU: they are inside the
    entries of its state, where ``v.cpu()`` of each entry, or of the model, moves none."""
    parent = script.parent(call)
    if not isinstance(parent, ast.Call) or not isinstance(parent.func, ast.Attribute) or not _copies(script, call):
        return False
    return _OPTIMIZER.search(last_name(parent.func.value)) is not None and not _gathers_on_cpu(script)


def _gathers_on_cpu(script: Script) -> bool:
    """Whether FSDP gathers states on the CPU, those of optimizers too, in the file or its project."""
    others = script.modules.mentioning("torch.save(") if script.modules is not None else ()
    return any(word in text for word in _GATHERED_ON_CPU for text in (script.text, *(text for _, text in others)))


def _source(script: Script, call: ast.Call) -> str:
    return script.text_of(call.args[0], 40) if call.args else "a checkpoint"


def _is_checkpoint(script: Script, call: ast.Call) -> bool:
    """Whether the file shows that this is a checkpoint, by its path, its name or its use; data saved with torch.save is
    usually on the CPU."""
    sources = (call.args[0], *script.values_of(call.args[0])) if call.args else ()
    path = _OF_MODEL_NAME.sub("", " ".join(script.text_of(one, 200) for one in sources))
    if _HELD_ON_CPU.search(path) or _OF_A_RANK.search(path) or "BytesIO" in path or _saved_here(script, call):
        return False
    if call.args and (is_saved_without_gpu(script, call.args[0]) or _is_fetched(script, call.args[0])):
        return False
    if is_read_without_gpu(script, call):
        return False
    if _goes_into_state(script, call):
        return True
    statement = script.statement_of(call)
    given = script.text_of(statement.targets[0]) if isinstance(statement, ast.Assign) else ""
    if _DATA.search(given) or _HELD_ON_CPU.search(given) or _SETTINGS.search(given):
        return False
    return bool(_CHECKPOINT.search(given) or (_CHECKPOINT.search(path) and not _DATA.search(path)))


_OF_HUB = re.compile(r"(?:^|/)(?:diffusion_|open_clip_)?pytorch_model(?:-\d+-of-\d+)?\.bin$")
"""Files of published models on the Hub."""


_OF_OWN_RUNS = re.compile(r"ckpt|check_?point|resum|restor|continu|snapshot|last|best|load|run", re.IGNORECASE)


_OF_WEIGHTS = re.compile(r"pre_?train|weight|init|backbone|finetune|teacher", re.IGNORECASE)
"""Options for weights to start from."""


def _is_from_elsewhere(script: Script, call: ast.Call) -> bool:
    """Whether the path is an option or a setting for weights that another project has saved, on a device that nothing
    shows: one that no start of the project gives, or the file of a published model. States to resume from, which the
    project saves itself, are not meant (``option_values``)."""
    given = script.values_of(call.args[0]) if call.args and isinstance(call.args[0], ast.Name) else call.args[:1]
    named = [one for made in given for one in ast.walk(made) if isinstance(one, ast.Attribute)]
    named = [one for one in named if not _OF_OWN_RUNS.search(one.attr)]
    if any(_OF_WEIGHTS.search(one.attr) and is_given_nowhere(script, one) for one in named):
        return True
    settings = [one for one in named if isinstance(one.value, ast.Name)]
    values = [option_values(script, one, restarts=True) for one in settings]
    return any(
        bool(given) and all(not one or (isinstance(one, str) and _OF_HUB.search(one)) for one in given)
        for given in values
        if given is not None
    )


def _is_published(script: Script, call: ast.Call) -> bool:
    """Whether a text of the project has an address that ends with the name of the file, which it says to download:
    nothing shows the device on which others have saved it."""
    name = file_name(script, call.args[0]) if call.args else ""
    if not name or script.modules is None:
        return False
    address = re.compile(rf"https?://[^\s\"'<>()]*/{re.escape(name)}(?![\w.-])")
    pages = script.modules.pages(script.location) if script.location else ()
    return any(address.search(text) for text in (*pages, *(text for _, text in script.modules.mentioning(name))))


def _entry(script: Script, node: ast.Attribute | ast.Subscript) -> str:
    return node.attr if isinstance(node, ast.Attribute) else str(script.value(node.slice))


def _is_given_by_no_start(script: Script, call: ast.Call) -> bool:
    """Whether the path is an option or an entry of configurations that no command of the project gives which starts the
    script with several ranks, though there are some, or an option that no text of the project has."""
    given = script.values_of(call.args[0]) if call.args and isinstance(call.args[0], ast.Name) else call.args[:1]
    kinds = (ast.Attribute, ast.Subscript)
    entries = [one for made in given for one in ast.walk(made) if isinstance(one, kinds)]
    whole = [
        one for one in entries if not isinstance(script.parent(one), kinds)
    ]  # not ``cfg.model`` of ``cfg.model.file``
    named = [
        one
        for one in whole
        if one in given or _OF_OWN_RUNS.search(_entry(script, one)) or _OF_WEIGHTS.search(_entry(script, one))
    ]
    others = [one for one in named if not _OF_RESTARTS.search(_entry(script, one))]
    return any(is_left_by_all_starts(script, one) or is_in_no_configuration(script, one) for one in named) or any(
        is_empty_in_commands(script, one) or is_given_in_no_text(script, one) for one in others
    )


def _is_given_published(script: Script, call: ast.Call) -> bool:
    """Whether the path is an option to which all commands that give it, give published weights, by the hash in their
    names: these hold tensors of the CPU."""
    option = call.args[0] if call.args else None
    given = texts_in_commands(script, option) if isinstance(option, ast.Attribute) else frozenset()
    return bool(given) and all(map(PUBLISHED.search, given))


def _is_given_to_one_process(script: Script, call: ast.Call) -> bool:
    """Whether each path is made of an option that only commands for one process give, ``torch.load(args.load)``, also
    as the argument of the function around: ``self.load(args.load)``."""
    own = _option_in(script, call.args[0]) if call.args else None
    options = [own] if own is not None else [_option_in(script, one) for one in _paths(script, call)]
    return bool(options) and all(
        one is not None and not _OF_RESTARTS.search(one.attr) and is_given_to_one_process(script, one)
        for one in options
    )


def _paths(script: Script, call: ast.Call) -> list[ast.expr]:
    """What a path is made of: names as what they are bound to, a parameter as what all calls in the file give it."""
    function = script.function_of(call)
    names = [one for one in ast.walk(call.args[0]) if isinstance(one, ast.Name)] if call.args else []
    if len(names) != 1 or not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return []
    parameters = [one.arg for one in function.args.args if one.arg != "self"]
    if names[0].id not in parameters:
        return list(script.values_of(names[0]))
    place = parameters.index(names[0].id)
    calls = [one for one in script.all(ast.Call) if last_name(one.func) == function.name]
    if len(re.findall(rf"\b{function.name}\b", script.text)) != len(calls) + 1:
        return []
    given = [script.argument(one, names[0].id, place) for one in calls]
    return [made for one in given for made in (script.values_of(one) if one is not None else [call])]


def _option_in(script: Script, made: ast.expr) -> ast.Attribute | None:
    """The only option in an expression: ``args.load``."""
    found = [one for one in ast.walk(made) if isinstance(one, ast.Attribute) and isinstance(one.value, ast.Name)]
    found = [one for one in found if OF_SETTINGS.match(last_name(one.value)) and last_name(one.value) != "self"]
    return found[0] if len(found) == 1 else None


def _is_bare_name(script: Script, call: ast.Call) -> bool:
    """Whether the path is the name of a file that is not in the current folder, without its folder, so that the
    call fails with a FileNotFoundError: ``for name in os.listdir(folder): torch.load(name)``."""
    path = call.args[0] if call.args else None
    scope = script.scope_of(path, path.id) if isinstance(path, ast.Name) else None
    bound = scope.names[path.id] if scope is not None and isinstance(path, ast.Name) else ()
    loops = [one for one in bound if isinstance(one, ast.For)]
    if not bound or len(loops) != len(bound) or "chdir" in script.text:
        return False
    lists = [unwrapped(one.iter) for one in loops]
    return all(
        isinstance(one, ast.Call)
        and script.name(one.func) == "os.listdir"
        and bool(one.args)
        and script.value(one.args[0]) not in (".", "./")
        and "getcwd" not in ast.unparse(one)
        for one in lists
    )


_OF_RESTARTS = re.compile(r"resum|restor|continu|restart", re.IGNORECASE)
"""Options that a first start gives as an empty text, for the next one to fill in: ``--resume ''``."""


_FETCHES = re.compile(
    r"^(?:(?:hf_hub|cached|snapshot)_download|cached_(?:file|path)|load_file_from_url|urlretrieve|"
    r"download_(?:url|file|weights|pretrained|checkpoint)\w*)$|^(?:gdown|wget)\.",
    re.IGNORECASE,
)


def _is_fetched(script: Script, path: ast.expr) -> bool:
    """Whether the file is one that the script downloads, or a shard that the index of a published model names:
    published weights are made to be loaded on any machine."""
    parts = list(computed_from(script, path))
    if any(isinstance(one, ast.Constant) and one.value == "weight_map" for one in parts):
        return True
    calls = [one for one in parts if isinstance(one, ast.Call)]
    text = ast.unparse(path)
    given = [
        one
        for one in script.all(ast.Call)
        if any(ast.unparse(part) == text for part in (*one.args, *(word.value for word in one.keywords)))
    ]
    named = (name for one in (*calls, *given) for name in (last_name(one.func), script.name(one.func)))
    return any(map(_FETCHES.match, named))


def _saved_here(script: Script, call: ast.Call) -> bool:
    path = ast.unparse(call.args[0]) if call.args else ""
    return any(
        len(one.args) > 1
        and ast.unparse(one.args[1]) == path
        and one.lineno < call.lineno
        and script.function_of(one) is script.function_of(call)
        and rank_condition(script, one) is None
        for one in script.calls("torch.save")
    )


def _goes_into_state(script: Script, call: ast.Call) -> bool:
    """Whether everything loaded is copied by ``load_state_dict``, except for numbers."""
    if _copies(script, call):
        return True
    statement = script.parent(call)
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return False
    target = statement.targets[0]
    if not isinstance(target, ast.Name) or len(script.values_of(target)) != 1:
        return False
    scope = script.function_of(call) or script.tree
    uses = [one for one in ast.walk(scope) if isinstance(one, ast.Name) and one.id == target.id and one is not target]
    copied = [one for one in uses if _copies(script, one)]
    return bool(copied) and all(one in copied or _is_scalar(script, one) for one in uses)


def _copies(script: Script, node: ast.expr) -> bool:
    parent = script.parent(node)
    while isinstance(parent, ast.Subscript) and parent.value is node:
        node, parent = parent, script.parent(parent)
    return (
        isinstance(parent, ast.Call)
        and node in parent.args[:1]
        and isinstance(parent.func, ast.Attribute)
        and parent.func.attr == "load_state_dict"
        and script.argument(parent, "assign") is None
        and not _HELD_ON_CPU.search(script.text_of(parent.func.value))
    )


def _is_scalar(script: Script, node: ast.expr) -> bool:
    parent = script.parent(node)
    if isinstance(parent, ast.Subscript) and parent.value is node:
        return script.value(parent.slice) in _SCALARS
    return isinstance(parent, ast.Delete) or (isinstance(parent, ast.Compare) and node in parent.comparators)


def _first_gpu(script: Script, where: ast.expr) -> str:
    """The source of a device that is the first GPU on every rank; empty if it is another one or unknown."""
    value = script.value(where) if isinstance(where, ast.Constant) else UNKNOWN
    if isinstance(value, str) and _FIRST.match(value):
        return f'"{value}"'
    if isinstance(where, ast.Call) and script.name(where.func) == "torch.device" and where.args:
        named, index = script.value(where.args[0]), script.value(script.argument(where, "index", 1))
        return script.text_of(where) if (named, index) in (("cuda:0", UNKNOWN), ("cuda", 0)) else ""
    if isinstance(where, ast.Lambda) and isinstance(where.body, ast.Call):
        moved = where.body
        bare = moved.func.attr if isinstance(moved.func, ast.Attribute) else ""
        is_first = bare == "cuda" and script.value(script.argument(moved, "device", 0)) == 0
        return script.text_of(where) if is_first else ""
    return ""


_WEIGHTS_OF_CHIEF = """\
dist.init_process_group("nccl")
model = Net().cuda()
if {test}:
    model.load_state_dict(torch.load("best.pt", weights_only=True))
"""
_SNAPSHOT = """\
import torch.distributed as dist

class Trainer:
    def __init__(self, model, snapshot_path):
        self.gpu_id = int(os.environ["LOCAL_RANK"])
        self.model = model.to(self.gpu_id)
        if os.path.exists(snapshot_path):
            self._load_snapshot(snapshot_path)
        self.model = DDP(self.model, device_ids=[self.gpu_id])

    def _load_snapshot(self, snapshot_path):
        snapshot = torch.load(snapshot_path)  # !
        self.model.load_state_dict(snapshot["MODEL_STATE"])
        self.epochs_run = snapshot["EPOCHS_RUN"]

trainer = Trainer(Net(), "snapshot.pt")
"""
_WEIGHTS = """\
dist.init_process_group("nccl")
model = Net().cuda()
model.load_state_dict(torch.load("pretrained.pt", weights_only=True))  # !
"""
_STATES = """\
from torch import load

accelerator = Accelerator()
checkpoint = load(args.resume, mmap=True)  # !
model.load_state_dict(checkpoint["model"])
optimizer.load_state_dict(checkpoint["optimizer"])
start = checkpoint["epoch"] + 1
for batch in loader:
    accelerator.backward(model(batch))
"""
_MAPPED_FIRST = """\
import torch
from torch.nn.parallel import DistributedDataParallel

state = torch.load("last.ckpt", map_location="cuda:0")  # !
also = torch.load("ema.ckpt", torch.device("cuda", 0))  # !
moved = torch.load("teacher.ckpt", lambda storage, place: storage.cuda(0))  # !
model = DistributedDataParallel(model)
"""
_IN_BRANCHES = """\
import torch

dist.init_process_group("nccl")
path, teacher = "model.pt", "teacher.pt"
if args.half:
    state = torch.load(path)
else:
    state = torch.load({other}, map_location=f"cuda:{{args.gpu}}")
model = DDP(build().cuda())
model.module.load_state_dict(state["model"])
"""
_ONTO_CPU = """\
dist.init_process_group("nccl")
model.load_state_dict(torch.load("pretrained.pt", map_location="cpu"))
optimizer.load_state_dict(torch.load("optimizer.pt", "cpu"))
ema.load_state_dict(torch.load("ema.pt", lambda storage, place: storage))
"""
_ONTO_GPU = """\
local_rank = int(os.environ["LOCAL_RANK"])
dist.init_process_group("nccl")
state = torch.load(args.resume, map_location=f"cuda:{local_rank}")
older = torch.load(args.resume, map_location={"cuda:0": f"cuda:{local_rank}"})
"""
_NO_RANKS = """\
model = Net().cuda()
model.load_state_dict(torch.load("model.pt"))
"""
_WEIGHTS_ARGS = """\
import torch

dist.init_process_group("nccl")
torch.cuda.set_device(rank)
train_args = torch.load(os.path.join(folder, "model_args.pth"))
model = DDP(build(train_args.size).cuda())
fit(model)
"""
_WEIGHTS_PARAMS = """\
import torch

dist.init_process_group("nccl")
resnet_params = torch.load("resnet18.pth")  # !
model = DDP(build().cuda())
model.module.fill(resnet_params)
"""
_EACH = "{name: one.cpu() for name, one in model.state_dict().items()}"
_FROM_CPU = """\
import torch

def save(model, path):
    torch.save({name: one.cpu() for name, one in model.state_dict().items()}, path)

dist.init_process_group("nccl")
torch.cuda.set_device(rank)
model = build().cuda()
model.load_state_dict(torch.load(checkpoint))
model = DDP(model)
fit(model)
save(model, checkpoint)
"""
_OPTIMIZER_AS_IT_IS = """\
import torch

def save(model, optimizer, path):
    torch.save({name: one.cpu() for name, one in model.state_dict().items()}, path)
    torch.save(optimizer.state_dict(), f"{path}.optimizer")

dist.init_process_group("nccl")
torch.cuda.set_device(rank)
model = build().cuda()
model.load_state_dict(torch.load(checkpoint))
optimizer.load_state_dict(torch.load(checkpoint_of_optimizer))  # !
model = DDP(model)
fit(model)
save(model, optimizer, checkpoint)
"""
_ONE_PROCESS = """\
import torch

def extract(path, files):
    model = build().cuda()
    model.load_state_dict(torch.load(path))
    return collect(torch.nn.DataParallel(model), files)

def train(rank, files):
    dist.init_process_group("nccl")
    model = DDP(build().cuda(rank))
    fit(model, files)

extract("model.pt", files)
train(rank, files)
"""
_NO_LAUNCHER = """\
dist.init_process_group("nccl")
model = Net().cuda()
if "RANK" not in os.environ:
    checkpoint = torch.load(args.resume)
    model.load_state_dict(checkpoint["model"])
"""
_FIRST_RANK = """\
import io

if args.distributed:
    dist.init_process_group("nccl")
if dist.get_rank() == 0:
    state = torch.load("model.pt")
if args.gpu is None:
    checkpoint = torch.load(args.resume)
else:
    checkpoint = torch.load(args.resume, map_location=f"cuda:{args.gpu}")
tokens = torch.load("tokens.pt")
received = torch.load(io.BytesIO(message))
buffer = io.BytesIO(message)
model.load_state_dict(torch.load(buffer))
torch.save(model.state_dict(), mine)
model.load_state_dict(torch.load(mine))
"""
_NUMBERS = """\
dist.init_process_group("nccl")
scheduler.load_state_dict(torch.load("scheduler.pt"))
grad_scaler.load_state_dict(torch.load("scaler.pt"))

shard = torch.load(f"model_rank{dist.get_rank()}.pt")

def load_checkpoint(path):
    return torch.load(path)
"""
_SAVED_NUMBERS = """\
import torch

dist.init_process_group("nccl")
model = DDP(build().cuda())
checkpoint = torch.load(f"{args.before}/state.pt")
for name, weight in model.named_parameters():
    checkpoint[name] = (weight**2).mean().item()
torch.save(checkpoint, f"{args.output}/state.pt")
"""
_SAVED_PROGRESS = """\
import torch

dist.init_process_group("nccl")
model = DDP(build().cuda())
total = 0.0
if os.path.exists(folder):
    progress = torch.load(os.path.join(folder, "progress_of_model.pt"))
    sampler.load_state_dict(progress["sampler"])
    total = progress["total"]
for step in range(sampler.done, 100):
    total += model(batch).sum().item()
    entries = {"sampler": sampler.state_dict(), "total": total, "mean": total / step, "step": step}
    save_atomically(entries, os.path.join(temporary, "progress_of_model.pt"))
"""
_WEIGHTS_OF = """\
import torch

dist.init_process_group("nccl")
net = build().cuda()
net.load_state_dict(torch.load("weights/NAME"))
model = DDP(net)
"""
_AFTER_FIT = """\
import pytorch_lightning as pl
import torch

system = System(build())
trainer = pl.Trainer(accelerator="gpu", devices=4, strategy="ddp")
trainer.fit(system)
system.load_state_dict(torch.load(checkpoint.best_model_path))
"""
_CPU_RANKS = """\
import json
import yaml

dist.init_process_group("gloo")
model.load_state_dict(torch.load("model.pt"))
settings = yaml.load(open("model.yaml"))
names = json.load(open("checkpoint.json"))
other = torch.load("model.pt", **options)
"""
