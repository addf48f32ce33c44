"""Whether a script uses GPUs, and which parts run only with a single process."""

from __future__ import annotations

import ast
import re

from doctor.lint.python.script import Script, last_name
from doctor.lint.python.training import ACCELERATOR, FABRIC, TRAINER, has_one_rank

_ASKS_FOR_RANKS = re.compile(r"distributed|\bddp\b|multi_?gpu|world_?size|n_?gpus?|num_gpus|device_count|nprocs")
_OFF = frozenset({"off", "no", "none", "false", "single", ""})
_COMPARED_WITH_ONE = (ast.Gt, ast.GtE, ast.NotEq)


def uses_gpus(script: Script) -> bool:
    """Whether anything in the file mentions GPUs; Trainers, Fabrics and Accelerators use them by default."""
    if any(True for _ in script.calls(TRAINER, FABRIC, ACCELERATOR)):
        return True
    text = script.text.lower()
    return any(word in text for word in ("cuda", "nccl", "gpu"))


def simulates_ranks(script: Script) -> bool:
    """Whether the process group has one rank, or is a fake one that simulates ranks."""
    return any(
        has_one_rank(script, call) or script.value(script.argument(call, "backend", 0)) == "fake"
        for call in script.calls("torch.distributed.init_process_group")
    )


def runs_alone(script: Script, node: ast.AST) -> bool:
    """Whether ``node`` is in a branch for a single process: ``if not args.distributed``, the ``else`` of ``if
    world_size > 1``, ``if args.gpu is None``."""
    inner = node
    for outer in script.around(node):
        if isinstance(outer, (ast.If, ast.IfExp)) and inner is not outer.test:
            below = outer.orelse if isinstance(outer.orelse, list) else [outer.orelse]
            if (asks := asks_for_several(outer.test)) is not None and asks is (inner in below):
                return True
        inner = outer
    return False


def asks_for_several(test: ast.expr) -> bool | None:
    """Whether a test holds in jobs of several ranks (true) or of one (false); ``None`` if it does not ask for that."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        asks = asks_for_several(test.operand)
        return None if asks is None else not asks
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        return next((asks for one in test.values if (asks := asks_for_several(one)) is not None), None)
    words = ast.unparse(test).lower()
    if isinstance(test, ast.Compare):
        asks_nothing = ast.unparse(test.comparators[-1]) in ("None", "-1")
        if asks_nothing and re.search(r"\b(?:gpu|(?:local_)?rank|device)\b", words):
            return not isinstance(test.ops[0], (ast.Is, ast.Eq))
        if isinstance(said := getattr(test.comparators[0], "value", None), str) and _is_switch(test.left):
            is_off = said.lower() in _OFF
            return is_off is not isinstance(test.ops[0], ast.Eq)
        if _ASKS_FOR_RANKS.search(words):
            return isinstance(test.ops[0], _COMPARED_WITH_ONE)
        return None
    return True if _ASKS_FOR_RANKS.search(words) else None


def _is_switch(node: ast.expr) -> bool:
    """``args.dist``, ``config.distributed``: an option that says whether there are several ranks."""
    return last_name(node).lower() in ("dist", "ddp", "distributed", "distributed_type")
