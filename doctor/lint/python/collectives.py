"""Finds calls that synchronize ranks: collectives and waits, also through functions of the file."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

from doctor.lint.engine.rule import FlowStep
from doctor.lint.python.project.imported_functions import collective_of, imported_function, imports_project
from doctor.lint.python.rank_branches import has_rank_conditions, rank_condition
from doctor.lint.python.reachable_functions import is_certain
from doctor.lint.python.script import Script, last_name, per_script, step_at
from doctor.lint.python.training import ACCELERATOR, FSDP, runs_one_process, several_ranks
from doctor.lint.python.wrapped_models import (
    FORWARD_OF_DDP,
    HandedModel,
    forwards_in,
    handed_models,
    parameter_of,
    saves_shards,
    wrapper_of,
    wraps_models,
)

_BY_GROUP_POSITION = {
    0: "barrier monitored_barrier",
    2: "all_reduce all_gather all_gather_into_tensor all_gather_object all_to_all broadcast broadcast_object_list "
    "all_reduce_coalesced all_gather_coalesced",
    3: "gather gather_object reduce reduce_scatter reduce_scatter_tensor scatter scatter_object_list",
    4: "all_to_all_single",
    None: "new_group new_subgroups split_group init_process_group",
}
_TORCH = {name: position for position, names in _BY_GROUP_POSITION.items() for name in names.split()}
"""Collectives of torch.distributed, and the position of their group argument."""
_ACCELERATOR = (
    "gather gather_for_metrics reduce pad_across_processes wait_for_everyone save_state load_state backward prepare "
    "get_state_dict"
)
_UTILS = "gather gather_object broadcast broadcast_object_list wait_for_everyone reduce pad_across_processes"
_FABRIC = "all_gather all_reduce barrier broadcast save load backward setup"
_TRAINER = "save_checkpoint fit validate test predict"
_STRATEGY = "barrier reduce broadcast all_gather reduce_boolean_decision"
_OF_KWARGS = ("accelerate", "accelerate.utils")
_SHARDED = "torch.distributed.fsdp.FullyShardedDataParallel"
_STATE = "torch.distributed.checkpoint.state_dict"

_OF_SHARDED_STATE = frozenset({"get_model_state_dict", "get_optimizer_state_dict", "get_state_dict"})

COLLECTIVES: dict[str, str] = {
    **{f"torch.distributed.{name}": name for name in _TORCH},
    **{f"torch.distributed.nn.{name}": name for name in ("all_reduce", "all_gather", "broadcast", "reduce", "scatter")},
    **{f"torch.distributed.nn.functional.{name}": name for name in ("all_reduce", "all_gather", "broadcast")},
    **{f"accelerate.Accelerator().{name}": name for name in _ACCELERATOR.split()},
    "ray.train.report": "report",
    "ray.train.collective.barrier": "barrier",
    "ray.train.collective.broadcast_from_rank_zero": "broadcast",
    **{f"accelerate.utils.{name}": name for name in _UTILS.split()},
    "accelerate.PartialState().wait_for_everyone": "wait_for_everyone",
    **{f"lightning.fabric.Fabric().{name}": name for name in _FABRIC.split()},
    **{f"lightning.pytorch.Trainer().{name}": name for name in _TRAINER.split()},
    **{f"lightning.pytorch.Trainer().strategy.{name}": name for name in _STRATEGY.split()},
    "lightning.pytorch.LightningModule().all_gather": "all_gather",
    "lightning.pytorch.LightningModule().trainer.save_checkpoint": "save_checkpoint",
    **{f"lightning.pytorch.LightningModule().trainer.strategy.{name}": name for name in _STRATEGY.split()},
    **{f"lightning.pytorch.LightningModule().trainer.{name}": name for name in ("validate", "test", "predict")},
    **{f"transformers.Trainer().{name}": name for name in ("train", "evaluate", "predict")},
    **{
        f"torch.distributed.checkpoint.{name}": "distributed checkpoint"
        for name in ("save", "load", "save_state_dict", "load_state_dict")
    },
    **{f"{_STATE}.{name}": name for name in sorted(_OF_SHARDED_STATE)},
    **{f"{_SHARDED}.{name}": name for name in ("optim_state_dict", "full_optim_state_dict", "summon_full_params")},
    **{
        f"horovod.torch.{name}": name
        for name in ("allreduce", "allgather", "broadcast", "broadcast_parameters", "broadcast_optimizer_state")
    },
}
"""Dotted names of collectives, and the word for each. Point-to-point calls (send, recv) run on some ranks by design,
and ``destroy_process_group`` does not wait."""

METRIC = re.compile(r"^torchmetrics\.(?:\w+\.)*[A-Z]\w*\(\)$")
"""An object of torchmetrics: ``compute`` gathers what the ranks have seen."""
_GATHERING = frozenset({"state_dict", "clip_grad_norm_", "forward", "backward"})
_OF_AN_ENGINE = frozenset({"backward", "step", "save_checkpoint", "load_checkpoint", "save_16bit_model"})
_BY_WRAPPER: dict[str, tuple[str, frozenset[str]]] = {
    "FSDP": ("FSDP", _GATHERING),
    "fully_shard": ("FSDP", frozenset({"forward", "backward"})),
    "DeepSpeed": ("DeepSpeed", _OF_AN_ENGINE),
}
"""The name of a wrapper in the words, and its methods that wait for other ranks."""
_OF_PROJECTS = (
    "all_reduce all_gather barrier all_reduce_mean concat_all_gather all_gather_object all_gather_list "
    "synchronize_between_processes reduce_dict reduce_tensor"
)
_PLAIN = frozenset(_OF_PROJECTS.split())
"""Names of collectives in projects' own modules that can't be read."""

_OF_TRAINERS = ("lightning.pytorch.Trainer().", "lightning.fabric.Fabric().")
_LAST = (
    _GATHERING
    | _OF_AN_ENGINE
    | _PLAIN
    | {"full_tensor", "log", "log_dict", "save_model", "compute"}
    | {one.rpartition(".")[2] for one in COLLECTIVES}
)
"""Last parts of the names of collectives; other calls are not resolved."""


def _is_of_one_process(script: Script, call: ast.Call) -> bool:
    """Whether the Trainer or Fabric of a call runs in the calling process alone: ``Trainer(devices=1)`` selects
    ``SingleDeviceStrategy`` (trainer/connectors/accelerator_connector.py), whose methods wait for nobody."""
    owner = call.func.value if isinstance(call.func, ast.Attribute) else call.func
    while isinstance(owner, ast.Attribute):
        owner = owner.value
    made = [owner, *script.values_of(owner)]
    return any(runs_one_process(script, one) for one in made if isinstance(one, ast.Call))


class CollectiveCall(NamedTuple):
    """A call that synchronizes: ``word`` is the collective, ``through`` the function of this file that calls it
    (``None``: the call itself). ``grouped``: it runs in a given group, whose ranks may be exactly those that call
    it. ``reached``: all collectives that the function may run. ``parameter``: the parameter whose value decides whether
    it synchronizes. ``certain``: whether the code that was read shows that it does. ``steps``: the calls from the
    function down to the collective."""

    call: ast.Call
    word: str
    through: str | None = None
    grouped: bool = False
    reached: frozenset[str] = frozenset()
    parameter: str = ""
    certain: bool = True
    steps: tuple[FlowStep, ...] = ()


class CollectiveCalls:
    """The collectives of one script."""

    def __init__(self, script: Script, *, with_forwards: bool) -> None:
        self._script = script
        found = {call: word for call in script.all(ast.Call) if (word := self.word(call))}
        if with_forwards:
            found = forwards_in(script) | found
        direct = [self._described(call, word) for call, word in found.items()]
        handed = [
            CollectiveCall(one.call, one.word, one.function, parameter=one.parameter, certain=self._is_known(one))
            for one in handed_models(script)
            if one.call not in found and (with_forwards or not one.word.startswith("forward"))
        ]
        self._direct = (*direct, *handed, *self._imported({*found, *(one.call for one in handed)}))

    def _imported(self, known: set[ast.Call]) -> Iterator[CollectiveCall]:
        """Calls of functions of other modules of the project that run a collective."""
        script = self._script
        for call in script.all(ast.Call) if imports_project(script) and has_rank_conditions(script) else ():
            one = imported_function(script, call.func) if call not in known else None
            reached = collective_of(script.modules, one) if one is not None and script.modules is not None else None
            if one is not None and reached is not None:
                yield CollectiveCall(
                    call,
                    reached.word,
                    one.function.name,
                    reached=one.function.reached,
                    certain=reached.certain,
                    steps=reached.steps,
                )

    def word(self, call: ast.Call) -> str:
        """The collective that a call is itself; empty if unknown. ``self.log(…, sync_dist=True)`` reduces."""
        script = self._script
        bare = last_name(call.func)
        if isinstance(call.func, ast.Attribute) and bare not in _LAST:
            return ""
        name = script.name(call.func)
        if name in COLLECTIVES:
            if name.startswith(_OF_TRAINERS) and _is_of_one_process(script, call):
                return ""
            is_local = script.value(script.argument(call, "no_dist")) is True  # a checkpoint of this process alone
            return "" if is_local or _is_of_replicas(script, name) else COLLECTIVES[name]
        if bare == "compute" and METRIC.match(name.rpartition(".")[0]) and several_ranks(script) is not None:
            return "compute of a metric"
        if bare in ("log", "log_dict") and script.value(script.argument(call, "sync_dist")) is True:
            return "sync_dist"
        if bare == "full_tensor" and not call.args and next(script.calls(FSDP[1]), None) is not None:
            return bare
        if bare == "save_model" and saves_shards(script, call):
            return "save_model"
        is_read = bare in _PLAIN and imported_function(script, call.func) is not None
        return ("" if is_read else _of_a_project(name, bare)) or _of_a_wrapper(script, call, bare)

    def _described(self, call: ast.Call, word: str) -> CollectiveCall:
        model = call.func.value if isinstance(call.func, ast.Attribute) else call.func
        return CollectiveCall(
            call,
            word,
            grouped=_is_grouped(self._script, call),
            parameter=parameter_of(self._script, model) if " of " in word else "",
            certain=_is_known_to_wait(self._script, call, word),
        )

    def _is_known(self, one: HandedModel) -> bool:
        return _is_known_to_wait(self._script, one.call, one.word)

    def all(self) -> Iterator[CollectiveCall]:
        """Every call that synchronizes, those through functions of this file included, in the order of the text."""
        yield from self._all

    @cached_property
    def _all(self) -> list[CollectiveCall]:
        found = {one.call: one for one in self._direct}
        through = self._run
        for call in self._script.all(ast.Call) if through else ():
            function = self._script.definition(call.func)
            if function is not None and function in through:
                one = through[function]._replace(call=call, through=function.name, reached=self.reached_words[function])
                found.setdefault(call, one)
        return sorted(found.values(), key=lambda one: (one.call.lineno, one.call.col_offset))

    def run_by(self, function: ast.AST) -> CollectiveCall | None:
        """The collective of all ranks that a function runs whenever it is called, with the calls down to it."""
        return self._run.get(function)

    @cached_property
    def _run(self) -> dict[ast.AST, CollectiveCall]:
        """The functions that run a collective of all ranks whenever a job of several ranks calls them."""
        found: dict[ast.AST, CollectiveCall] = {}
        for one in self._direct:
            if not one.grouped and not one.parameter:
                self._note(found, one.call, one)
        calls = [(call, self._script.definition(call.func)) for call in self._script.all(ast.Call)] if found else []
        known = [(call, function) for call, function in calls if function is not None]
        before = -1
        while len(found) > before:
            before = len(found)
            for call, function in known:
                if function in found:
                    self._note(found, call, found[function])
        return found

    @cached_property
    def reached_words(self) -> dict[ast.AST, frozenset[str]]:
        """The collectives that each function may run, under any condition."""
        script = self._script
        words: dict[ast.AST | None, set[str]] = {}
        callers: dict[ast.AST, set[ast.AST]] = {}
        for one in self._direct:
            words.setdefault(script.function_of(one.call), set()).add(one.word)
        for call in script.all(ast.Call):
            caller, function = script.function_of(call), script.definition(call.func)
            if caller is not None and function is not None:
                callers.setdefault(function, set()).add(caller)
        waiting: list[ast.AST] = [one for one in words if one is not None]
        while waiting:
            called = waiting.pop()
            for calling in callers.get(called, ()):
                known = words.setdefault(calling, set())
                if not words[called] <= known:
                    known |= words[called]
                    waiting.append(calling)
        return {function: frozenset(found) for function, found in words.items() if function is not None}

    def _note(self, found: dict[ast.AST, CollectiveCall], call: ast.Call, one: CollectiveCall) -> None:
        function = self._script.function_of(call)
        if function is None or function in found or rank_condition(self._script, call) is not None:
            return
        if is_certain(self._script, call):
            found[function] = one._replace(steps=(step_at(self._script, call), *one.steps))

    def in_body(self, node: ast.AST) -> Iterator[CollectiveCall]:
        """Those below ``node``, nested functions left out."""
        below = set(self._script.inside(node, ast.Call))
        yield from (one for one in self.all() if one.call in below)


def _is_of_replicas(script: Script, name: str) -> bool:
    """Whether it is ``Accelerator.get_state_dict`` in a script that configures DDP and names no sharding: every rank
    has the whole state."""
    if name != f"{ACCELERATOR}().get_state_dict" or re.search(r"fsdp|deepspeed", script.text, re.IGNORECASE):
        return False
    if _STARTS_REPLICAS.search(script.text):
        return True
    return next(script.calls(*(f"{one}.DistributedDataParallelKwargs" for one in _OF_KWARGS)), None) is not None


_STARTS_REPLICAS = re.compile(r"\b(?:TorchTrainer|notebook_launcher|debug_launcher)\(")
"""Starts that set no variable of ``accelerate launch``, so that an Accelerator without plugins uses DDP
(accelerate/state.py: ACCELERATE_USE_FSDP, ACCELERATE_USE_DEEPSPEED)."""


def _is_grouped(script: Script, call: ast.Call) -> bool:
    name = script.name(call.func)
    if not name.startswith("torch.distributed."):
        return script.argument(call, "group") is not None
    bare = name.rpartition(".")[2]
    group = script.argument(call, "group", _TORCH.get(bare))
    if group is None and script.is_open(call):
        return _may_unpack_group(script, call)
    if group is None:
        return bare == "new_group" and script.value(script.argument(call, "use_local_synchronization")) is True
    return script.value(group) is not None and script.name(group) not in (
        "torch.distributed.group.WORLD",
        "torch.distributed.GroupMember.WORLD",
    )


def _may_unpack_group(script: Script, call: ast.Call) -> bool:
    """Whether unpacked arguments may have a group: not ``**{"src": 0}``."""
    unpacked = [one.value for one in call.keywords if one.arg is None]
    made = [value for one in unpacked for value in script.values_of(one)]
    if any(isinstance(one, ast.Starred) for one in call.args) or not made:
        return True
    return any(not isinstance(one, ast.Dict) or _has_group(one) for one in made)


def _has_group(given: ast.Dict) -> bool:
    return any(not isinstance(key, ast.Constant) or key.value in ("group", "process_group") for key in given.keys)


def _of_a_project(name: str, bare: str) -> str:
    """``misc.all_reduce_mean(loss)``, ``metric_logger.synchronize_between_processes()``."""
    if bare not in _PLAIN or name.startswith(("torch.", "jax.", "numpy.", "tensorflow.", ".")):
        return ""
    return bare if name or bare == "synchronize_between_processes" else ""


def _of_a_wrapper(script: Script, call: ast.Call, bare: str) -> str:
    if not isinstance(call.func, ast.Attribute) or bare not in _GATHERING | _OF_AN_ENGINE:
        return ""
    name, exchanging = _BY_WRAPPER.get(wrapper_of(script, call.func.value), ("", frozenset()))
    return f"{bare} of {name}" if bare in exchanging else ""


def _is_known_to_wait(script: Script, call: ast.Call, word: str) -> bool:
    """Whether the file shows that a collective which depends on the model exchanges anything."""
    if word == FORWARD_OF_DDP:
        return False  # without buffers in the model it does not
    if script.name(call.func) == f"{ACCELERATOR}().get_state_dict":
        return False  # it gathers with FSDP and ZeRO stage 3 alone, which the command line may ask for
    if word in _OF_SHARDED_STATE:
        model = script.argument(call, "model", 0)
        return model is not None and wrapper_of(script, model) in ("FSDP", "fully_shard")
    return True


@per_script
def collectives_of(script: Script) -> CollectiveCalls:
    """The collectives of a script."""
    return CollectiveCalls(script, with_forwards=False)


@per_script
def collectives_and_forwards(script: Script) -> CollectiveCalls:
    """The collectives of a script, and the forward passes of wrapped models: FSDP gathers parameters in them, and DDP
    broadcasts buffers."""
    return CollectiveCalls(script, with_forwards=True) if wraps_models(script) else collectives_of(script)
