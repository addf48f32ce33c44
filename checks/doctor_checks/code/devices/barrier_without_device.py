"""CODE004: a barrier over NCCL in a process that has not set its GPU."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from doctor.api import Edit, Script, SetArgument, Severity, Violation, location_of, rule
from doctor.knowledge.releases import within
from doctor.lint.python.collectives import collectives_of
from doctor.lint.python.cuda import (
    binds_device,
    is_nccl,
    joins,
    may_be_started_before,
    on_current_device,
    shows_whole_process,
)
from doctor.testing.script_cases import fails, passes

_USES_CURRENT = "2.7"
"""Releases before it take the GPU of an earlier collective, or count from the rank (ProcessGroupNCCL.cpp); the current
device is https://github.com/pytorch/pytorch/pull/152834."""


@rule(
    id="CODE004",
    severity=Severity.INFO,
    reads=Script,
    state="preview",
    mentions=("barrier",),
    foreshadows=("MEM001",),
    cases=lambda: (
        fails(
            "devices by number, and a barrier without one",
            _NUMBERED,
            {"dist.barrier()": "dist.barrier(device_ids=[local_rank])"},
        ),
        fails("the wait at the end", _AT_END),
        fails("a wait for the download of rank 0", _DOWNLOAD),
        passes(
            "the barrier is told its device",
            _NUMBERED.replace("dist.barrier()", "dist.barrier(device_ids=[local_rank])"),
        ),
        passes("the process group knows the device", _NUMBERED_BOUND),
        passes("set_device", _AT_END.replace("    model =", "    torch.cuda.set_device(rank)\n    model =")),
        passes("gloo", _AT_END.replace("nccl", "gloo")),
        passes("a file that does not start the job", _LIBRARY),
        passes("a group that another module may have started", _STARTED_BEFORE),
        passes("a group of its own, on the CPU", _GROUP),
        passes(
            "an older torch, which takes the GPU of earlier collectives",
            _AT_END.replace("  # !", ""),
            releases=(("torch", "1.9.0"),),
        ),
    ),
)
def barrier_without_device(script: Script) -> Iterator[Violation]:
    """Ask whether barriers over NCCL use the GPU of their rank.

    Why it hurts: an NCCL barrier is an all_reduce of one number on the current device, unless another device is given.
    In ranks that never called set_device this is GPU 0: each rank opens a context of several hundred MiB there, and the
    barrier may hang or fail with "Duplicate GPU detected".
    Fix: Call `torch.cuda.set_device(local_rank)` at the start, or pass `init_process_group(...,
    device_id=torch.device("cuda", local_rank))` or `dist.barrier(device_ids=[local_rank])`.
    """
    started = list(joins(script))
    if (
        not started
        or not all(is_nccl(script, call) for call in started)
        or all(may_be_started_before(script, call) for call in started)
        or binds_device(script)
        or on_current_device(script) is not None
        or within(script.releases.get("torch", ""), before=_USES_CURRENT)
    ):
        return  # implicit use of the current device is CODE003's
    for one in collectives_of(script).all():
        call = one.call
        if script.name(call.func) != "torch.distributed.barrier" or one.grouped or script.is_given(call, "device_ids"):
            continue
        if not shows_whole_process(script, started[0], call):
            continue
        yield Violation(
            call,
            f"{script.text_of(call)} runs on GPU 0 on every rank: torch.cuda.set_device() is not called",
            edits=_edits(script, call),
            evidence=(("process_group_started_at_line", started[0].lineno),),
            confidence=0.85,
        )


def _edits(script: Script, call: ast.Call) -> tuple[Edit, ...]:
    for name in ("local_rank",):
        scope = script.scope_of(call, name)
        if scope is not None and len(scope.names[name]) == 1 and scope.node is script.function_of(call):
            return (SetArgument(location_of(call), "device_ids", f"[{name}]"),)
    return ()


_STARTED_BEFORE = """\
from project import start_ranks

def main():
    start_ranks()
    if not dist.is_initialized():
        dist.init_process_group("nccl")
    dist.barrier()

if __name__ == "__main__":
    main()
"""
_NUMBERED = """\
def main():
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    model = DDP(build().to(local_rank), device_ids=[local_rank])
    train(model)
    dist.barrier()  # !
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), "model.pt")
"""
_NUMBERED_BOUND = """\
local_rank = int(os.environ["LOCAL_RANK"])
dist.init_process_group("nccl", device_id=torch.device("cuda", local_rank))
model = build().to(local_rank)
dist.barrier()
"""
_AT_END = """\
def run(rank, world):
    dist.init_process_group(backend="nccl", rank=rank, world_size=world)
    model = build().to(f"cuda:{rank}")
    train(model)
    torch.distributed.barrier()  # !
    dist.destroy_process_group()

mp.spawn(run, args=(4,), nprocs=4)
"""
_DOWNLOAD = """\
from torch import distributed as dist

def prepare(rank):
    if rank == 0:
        download()
    dist.barrier()  # !

def main(rank, world):
    dist.init_process_group("cpu:gloo,cuda:nccl", rank=rank, world_size=world)
    prepare(rank)
    return build().to(rank)

if __name__ == "__main__":
    main(*environment())
"""
_LIBRARY = """\
def synchronize():
    if dist.is_initialized():
        dist.barrier()
"""
_GROUP = """\
def main(rank, world):
    dist.init_process_group("nccl", rank=rank, world_size=world)
    quiet = dist.new_group(backend="gloo")
    model = build().to(rank)
    dist.barrier(quiet)
    dist.barrier(group=quiet)
"""
