"""CODE003: NCCL is initialized before the ranks select their GPUs."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from doctor.api import Edit, InsertStatement, Script, Severity, Violation, location_of, rule
from doctor.lint.python.cuda import (
    binds_device,
    is_nccl,
    joins,
    may_be_started_before,
    on_current_device,
    shows_whole_process,
)
from doctor.lint.python.project.imported_functions import imported_function, imports_project
from doctor.lint.python.reachable_functions import run_by_all
from doctor.lint.python.training import is_test
from doctor.testing.script_cases import fails, passes


@rule(
    id="CODE003",
    severity=Severity.ERROR,
    reads=Script,
    mentions=("nccl", "cuda"),
    foreshadows=("GPU001", "MEM001"),
    cases=lambda: (
        fails("a script for torchrun", _TORCHRUN, {"    dist.init": f"{_SET_DEVICE}    dist.init"}),
        fails("a function for mp.spawn", _SPAWNED),
        fails("the device is called cuda", _NAMED),
        fails("objects travel over the current device", _OBJECTS),
        passes("set_device before", _TORCHRUN.replace("    dist.init", f"{_SET_DEVICE}    dist.init")),
        passes(
            "device_id", _SPAWNED.replace("world_size=world)  # !", "world_size=world, device_id=torch.device(rank))")
        ),
        passes("devices told by number", _BY_NUMBER),
        passes("a device with the number of the rank, if there is one", _RANK_IF_ANY),
        fails(
            "the first GPU, if there is one",
            _RANK_IF_ANY.replace("f'cuda:{rank}' if rank is not None", "'cuda' if is_gpu").replace(
                "world_size=world)", "world_size=world)  # !"
            ),
        ),
        passes("where there is one process alone", _ALONE),
        passes("rank 0 alone uses the current device", _FIRST_RANK),
        passes(
            "rank 0 alone calls the method that does",
            _FIRST_RANK.replace("def document(model, path):", "class Net:\n  def document(model, path):").replace(
                "    document(model, ", "    model.document("
            ),
        ),
        fails(
            "all ranks call that function",
            _FIRST_RANK.replace('("nccl")', '("nccl")  # !').replace("if rank == 0 and args.document:\n    ", ""),
        ),
        passes("gloo", _TORCHRUN.replace("nccl", "gloo")),
        passes("one process sees one GPU", _MASKED),
        passes("a helper of the project sets it", _HELPER),
        passes("a group of one rank, as a namespace says", _CONVERTER),
        passes("a unit test", _TORCHRUN + "\ndef test_it(): main()\n", name="tests/test_sum.py"),
        passes("a file of helpers, for scripts that set it", _LIBRARY),
        passes("a helper that joins unless the process has joined", _JOINS_ONCE),
    ),
)
def device_not_set_before_nccl(script: Script) -> Iterator[Violation]:
    """Ask whether each rank selects its GPU before it initializes NCCL.

    Why it hurts: the current device of every process defaults to GPU 0. All ranks of a host put their tensors there:
    NCCL fails with "Duplicate GPU detected", or GPU 0 runs out of memory.
    Fix: Call `torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))` right before init_process_group.
    """
    if binds_device(script) or is_test(script):
        return
    calls = [call for call in joins(script) if is_nccl(script, call)]
    if not calls:
        yield from _started_by_helper(script)
        return
    used = on_current_device(script) or next(script.calls(*_OBJECTS_TRAVEL), None)
    if used is None or not shows_whole_process(script, calls[0], used):
        return
    if script.path.endswith(".ipynb") and script.function_of(calls[0]) not in run_by_all(script):
        return  # the cells of a notebook run in one process
    if may_be_started_before(script, calls[0]) and script.function_of(calls[0]) not in run_by_all(script):
        return  # a helper for other modules, which may set the device before they call it
    yield Violation(
        calls[0],
        f"`{script.text_of(used, 36)}` (line {used.lineno}) uses GPU 0: torch.cuda.set_device() is not called",
        severity=Severity.WARNING if may_be_started_before(script, calls[0]) else None,
        edits=_edits(script, calls[0]),
        evidence=(("uses_current_device", f"{script.text_of(used)}, line {used.lineno}"),),
        confidence=0.9,
    )


def _started_by_helper(script: Script) -> Iterator[Violation]:
    """A helper in another module initializes NCCL, and neither that module nor this one sets the device."""
    calls = script.all(ast.Call) if imports_project(script) else ()
    starts = ((call, imported_function(script, call.func)) for call in calls)
    start = next((call for call, helper in starts if helper is not None and helper.function.starts_nccl), None)
    used = on_current_device(script) if start is not None else None
    if start is None or used is None or not shows_whole_process(script, start, used):
        return
    helpers = (imported_function(script, call.func, whole=True) for call in calls)
    if not any(one is not None and one.module.binds_device for one in helpers):
        yield Violation(
            used,
            f"`{script.text_of(used, 36)}` (line {used.lineno}) uses GPU 0: torch.cuda.set_device() is not called",
            severity=Severity.WARNING,
            fix=f"Call torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) before line {start.lineno}.",
            evidence=(("uses_current_device", f"{script.text_of(used)}, line {used.lineno}"),),
            confidence=0.8,
        )


_OBJECTS_TRAVEL = tuple(
    f"torch.distributed.{name}" for name in ("all_gather_object", "broadcast_object_list", "gather_object")
)


def _edits(script: Script, call: ast.Call) -> tuple[Edit, ...]:
    scope = script.scope_of(call, "local_rank")
    given = scope.names["local_rank"] if scope is not None else []
    before = given[0] if len(given) == 1 else None
    if not isinstance(before, ast.expr) or "LOCAL_RANK" not in script.text_of(before) or before.lineno >= call.lineno:
        return ()
    statement = script.statement_of(call)
    if script.function_of(before) is not script.function_of(call) or script.scope_of(call, "torch") is None:
        return ()
    return (InsertStatement(location_of(statement), "torch.cuda.set_device(local_rank)", inside=False),)


_TORCHRUN = """\
def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    dist.init_process_group(backend="nccl")  # !
    model = DDP(torch.nn.Linear(8, 8).cuda())
    for x in batches():
        model(x.cuda(non_blocking=True)).sum().backward()
"""
_FIRST_RANK = """\
import torch

def document(model, path):
    torch.save(model.weight + torch.tensor(0.0).cuda(), path)

torch.distributed.init_process_group("nccl")
model = build().to(rank)
if rank == 0 and args.document:
    document(model, "weights.pt")
"""
_CONVERTER = """\
import argparse

args = argparse.Namespace(layers=12, world_size=1, rank=0)
torch.distributed.init_process_group("nccl", init_method="tcp://127.0.0.1:16666", world_size=args.world_size, rank=0)
model = convert(args).cuda()
torch.save(model.state_dict(), "converted.pt")
"""
_SET_DEVICE = "    torch.cuda.set_device(local_rank)\n"
_SPAWNED = """\
def worker(rank, world):
    dist.init_process_group("nccl", init_method="tcp://localhost:29511", rank=rank, world_size=world)  # !
    total = torch.zeros(1, device="cuda")
    dist.all_reduce(total)

if __name__ == "__main__":
    mp.spawn(worker, args=(torch.cuda.device_count(),), nprocs=torch.cuda.device_count())
"""
_NAMED = """\
import torch
from torch.distributed import init_process_group
from torch.nn.parallel import DistributedDataParallel

init_process_group("nccl")  # !
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = DistributedDataParallel(build().to(device))
"""
_OBJECTS = """\
import torch

def gather(rank, scores):
    dist.init_process_group("nccl", rank=rank, world_size=2)  # !
    model = load().to(rank)
    found = [None, None]
    dist.all_gather_object(found, scores)
"""
_BY_NUMBER = """\
rank = int(os.environ["LOCAL_RANK"])
dist.init_process_group("nccl")
model = DDP(build().to(rank), device_ids=[rank])
for x in batches():
    model(x.cuda(rank)).sum().backward()
other = torch.device("cuda", rank)
text = torch.zeros(3, device=f"cuda:{rank}")
"""
_ALONE = """\
import torch

def main(args, net):
    if args.distributed:
        dist.init_process_group("nccl")
        model = DDP(net.to(args.local_rank), device_ids=[args.local_rank])
    else:
        model = net.cuda()
"""
_RANK_IF_ANY = """\
import torch

class Recipe:
    def __init__(self, rank=None):
        self.device = f'cuda:{rank}' if rank is not None else 'cuda'
        self.model = build().to(self.device)

def worker(rank, world):
    dist.init_process_group("nccl", rank=rank, world_size=world)
    Recipe(rank).train()

if __name__ == "__main__":
    mp.spawn(worker, args=(4,), nprocs=4)
"""
_MASKED = """\
import torch

os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["LOCAL_RANK"]
dist.init_process_group("nccl")
model = build().cuda()
"""
_HELPER = """\
from project.setup import setup_device

setup_device()
dist.init_process_group("nccl")
model = build().cuda()
"""
_JOINS_ONCE = """\
def join_once(args):
    if not dist.is_initialized():
        dist.init_process_group("nccl", rank=args.rank, world_size=args.world)
        dist.all_reduce(torch.zeros(1).cuda())
"""
_LIBRARY = """\
def start(args):
    dist.init_process_group("nccl", rank=args.rank, world_size=args.world)

def total(value):
    found = torch.tensor(value).cuda()
    dist.all_reduce(found)
    return found.item()
"""
