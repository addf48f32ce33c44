"""What synchronises ranks: calls that all ranks of a group have to make, or that wait for others, also through
functions of the file."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

from doctor.lint.ranks import rank_condition
from doctor.lint.script import FunctionNode, Script

_TORCH = (
    "all_reduce all_gather all_gather_into_tensor all_gather_object all_to_all all_to_all_single barrier "
    "monitored_barrier broadcast broadcast_object_list gather gather_object reduce reduce_scatter "
    "reduce_scatter_tensor scatter scatter_object_list all_reduce_coalesced all_gather_coalesced new_group "
    "new_subgroups split_group destroy_process_group init_process_group"
)
_ACCELERATOR = (
    "gather gather_for_metrics reduce pad_across_processes wait_for_everyone save_state load_state backward prepare "
    "clip_grad_norm_"
)
_FABRIC = "all_gather all_reduce barrier broadcast save load backward clip_gradients setup"
_TRAINER = "save_checkpoint fit validate test predict"
_STRATEGY = "barrier reduce broadcast all_gather reduce_boolean_decision"

COLLECTIVES: dict[str, str] = {
    **{f"torch.distributed.{name}": name for name in _TORCH.split()},
    **{f"torch.distributed.nn.{name}": name for name in ("all_reduce", "all_gather", "broadcast", "reduce", "scatter")},
    **{f"torch.distributed.nn.functional.{name}": name for name in ("all_reduce", "all_gather", "broadcast")},
    **{f"accelerate.Accelerator().{name}": name for name in _ACCELERATOR.split()},
    **{
        f"accelerate.utils.{name}": name
        for name in (
            "gather",
            "gather_object",
            "broadcast",
            "broadcast_object_list",
            "wait_for_everyone",
            "reduce",
            "pad_across_processes",
        )
    },
    **{f"lightning.fabric.Fabric().{name}": name for name in _FABRIC.split()},
    **{f"lightning.pytorch.Trainer().{name}": name for name in _TRAINER.split()},
    **{f"lightning.pytorch.Trainer().strategy.{name}": name for name in _STRATEGY.split()},
    "lightning.pytorch.LightningModule().all_gather": "all_gather",
    "lightning.pytorch.LightningModule().trainer.save_checkpoint": "save_checkpoint",
    "lightning.pytorch.LightningModule().trainer.strategy.barrier": "barrier",
    "lightning.pytorch.LightningModule().trainer.strategy.broadcast": "broadcast",
    "lightning.pytorch.LightningModule().trainer.strategy.reduce": "reduce",
    "lightning.pytorch.LightningModule().trainer.validate": "validate",
    "torch.distributed.checkpoint.save": "distributed checkpoint",
    "torch.distributed.checkpoint.load": "distributed checkpoint",
    "torch.distributed.checkpoint.save_state_dict": "distributed checkpoint",
    "torch.distributed.checkpoint.load_state_dict": "distributed checkpoint",
    "horovod.torch.allreduce": "allreduce",
    "horovod.torch.allgather": "allgather",
    "horovod.torch.broadcast": "broadcast",
}
"""Dotted names of calls, and the word for each. Point-to-point calls (send, recv) are made by some ranks by design."""


class Collective(NamedTuple):
    """A call that synchronises: ``word`` is what it does in the end, ``through`` the function of this file that does it
    (``None``: the call itself does)."""

    call: ast.Call
    word: str
    through: str | None = None


class Collectives:
    """Those of one script, found once."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._inside: dict[ast.AST, str] = {}
        self._direct = tuple(self._find())

    def _find(self) -> Iterator[Collective]:
        for call in self._script.all(ast.Call):
            if word := self.word(call):
                yield Collective(call, word)

    def word(self, call: ast.Call) -> str:
        """What a call does among the ranks by itself; empty: nothing that is known. ``self.log(…, sync_dist=True)``
        reduces."""
        script = self._script
        name = script.name(call.func)
        if name in COLLECTIVES:
            return COLLECTIVES[name]
        bare = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        synced = script.value(script.argument(call, "sync_dist")) is True
        return "sync_dist" if bare in ("log", "log_dict") and synced else ""

    def all(self) -> Iterator[Collective]:
        """Every call that synchronises, those through functions of this file included, in the order of the text."""
        through = self._reaching()
        found = list(self._direct)
        direct = {one.call for one in self._direct}
        for call in self._script.all(ast.Call):
            function = self._script.definition(call.func) if call not in direct else None
            if function is not None and function in through:
                found.append(Collective(call, through[function], function.name))
        yield from sorted(found, key=lambda one: (one.call.lineno, one.call.col_offset))

    def _reaching(self) -> dict[ast.AST, str]:
        """Functions that run a collective on every way through them, as far as one looks: not under a condition on the
        rank, and not only defined there."""
        if self._inside:
            return self._inside
        found: dict[ast.AST, str] = {}
        for one in self._direct:
            self._note(found, one.call, one.word)
        calls = [(call, self._script.definition(call.func)) for call in self._script.all(ast.Call)]
        known = [(call, function) for call, function in calls if function is not None]
        changed = True
        while changed:
            before = len(found)
            for call, function in known:
                if function in found:
                    self._note(found, call, found[function])
            changed = len(found) > before
        self._inside = found
        return found

    def _note(self, found: dict[ast.AST, str], call: ast.Call, word: str) -> None:
        function = self._script.function_of(call)
        if function is not None and function not in found and rank_condition(self._script, call) is None:
            found[function] = word

    def in_body(self, node: ast.AST) -> Iterator[Collective]:
        """Those below ``node``, nested functions left out."""
        below = set(self._script.inside(node, ast.Call))
        yield from (one for one in self.all() if one.call in below)

    def reached_from(self, function: FunctionNode) -> str:
        """What a function of this file does among the ranks; empty: nothing that is known."""
        return self._reaching().get(function, "")


def collectives_of(script: Script) -> Collectives:
    """The collectives of a script, kept with it."""
    found = script.__dict__.get("_collectives")
    if found is None:
        found = script.__dict__["_collectives"] = Collectives(script)
    return found
