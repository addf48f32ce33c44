"""CODE023: CUDA is used in a process and in a child forked from it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from doctor.api import Script, Severity, Violation, rule
from doctor.lint.python.cuda import initializes_cuda, start_method
from doctor.lint.python.gpu_use import runs_alone
from doctor.lint.python.project.left_defaults import possible_values
from doctor.lint.python.script import UNKNOWN, FunctionNode
from doctor.lint.python.training import LOADER, TRAINER
from doctor.testing.script_cases import fails, passes


@rule(
    id="CODE023",
    severity=Severity.ERROR,
    reads=Script,
    mentions=("DataLoader", "Process(", "start_processes", "ddp_fork", "ddp_notebook"),
    foreshadows=("HOST006",),
    impacts={
        r"forked workers": 'The workers fail with "Cannot re-initialize CUDA in forked subprocess", or hang.',
        r"forks the ranks": 'The ranks fail with "Cannot re-initialize CUDA in forked subprocess", or hang.',
    },
    cases=lambda: (
        fails("a data set moves its samples to the GPU", _DATA_SET),
        fails("a collate function does", _COLLATE),
        fails("ranks are forked after the model was moved", _PROCESS),
        fails("Lightning forks its ranks", _LIGHTNING),
        passes("the main process moves them", _MOVED),
        passes(
            "workers that are spawned",
            _DATA_SET.replace("num_workers=4", 'num_workers=4, multiprocessing_context="spawn"'),
        ),
        passes("no workers", _DATA_SET.replace("num_workers=4", "num_workers=0")),
        passes(
            "the start method is spawn",
            _PROCESS.replace("\nif __name__", '\nmp.set_start_method("spawn")\nif __name__'),
        ),
        passes("the children use no CUDA", _CHILDREN),
        passes("CUDA after the fork alone", _AFTER),
        passes("Lightning starts its ranks anew", _LIGHTNING.replace("ddp_fork", "ddp")),
    ),
)
def cuda_before_fork(script: Script) -> Iterator[Violation]:
    """Ask whether CUDA is used in a process and in children forked from it.

    Why it hurts: the forked process fails with "Cannot re-initialize CUDA in forked subprocess", or hangs.
    Fix: Start the processes with torchrun or `mp.spawn`, not with fork.
    """
    if start_method(script) in ("spawn", "forkserver"):
        return
    for loader in script.calls(LOADER):
        yield from _in_workers(script, loader)
    for call in script.all(ast.Call):
        yield from _in_children(script, call)
    for trainer in script.calls(TRAINER):
        yield from _in_ranks(script, trainer)


def _in_workers(script: Script, loader: ast.Call) -> Iterator[Violation]:
    workers = script.argument(loader, "num_workers", 5)
    if workers is None or script.value(workers) == 0 or script.is_given(loader, "multiprocessing_context"):
        return
    if possible_values(script, workers, options=False) == frozenset({0}):
        return  # a parameter whose default all calls leave
    for function, what in _run_by_workers(script, loader):
        used = next((one for one in script.inside(function, ast.Call) if initializes_cuda(script, one)), None)
        if used is not None:
            yield Violation(
                used,
                f"`{script.text_of(used, 40)}` uses CUDA in forked workers of the DataLoader at line {loader.lineno}",
                fix='Return CPU tensors from the workers, or pass `multiprocessing_context="spawn"` to the DataLoader.',
                evidence=(("called_by", what), ("loader_at_line", loader.lineno), ("workers", script.text_of(workers))),
                confidence=0.9,
            )


def _run_by_workers(script: Script, loader: ast.Call) -> Iterator[tuple[FunctionNode, str]]:
    data = script.argument(loader, "dataset", 0)
    owner = script.class_definition(data) if data is not None else None
    for name in ("__getitem__", "__iter__") if owner is not None else ():
        method = script.bindings.methods.get((owner.name, name)) if owner is not None else None
        if method is not None:
            yield method, name
    collate = script.argument(loader, "collate_fn", 6)
    function = script.definition(collate) if collate is not None else None
    if function is not None:
        yield function, "the collate function"


def _in_children(script: Script, call: ast.Call) -> Iterator[Violation]:
    name = script.name(call.func)
    if name in ("multiprocessing.Process", "torch.multiprocessing.Process"):
        target = script.argument(call, "target", 1)
    elif name == "torch.multiprocessing.start_processes":
        target = script.argument(call, "fn", 0)
        if script.value(script.argument(call, "start_method", 5)) != "fork":
            return
    else:
        return
    function = script.definition(target) if target is not None else None
    inner = _first_use(script, function) if function is not None else None
    before = _used_before(script, call)
    if function is not None and inner is not None and before is not None:
        yield Violation(
            call,
            f"`{function.name}` uses CUDA in a process forked after `{script.text_of(before, 30)}` (line "
            f"{before.lineno}) initialized CUDA",
            evidence=(("parent_at_line", before.lineno), ("child_at_line", inner.lineno)),
            confidence=0.9,
        )


def _first_use(script: Script, function: FunctionNode) -> ast.Call | None:
    for call in script.inside(function, ast.Call):
        if initializes_cuda(script, call) or script.name(call.func) == "torch.cuda.set_device":
            return call
    return None


def _used_before(script: Script, call: ast.AST) -> ast.Call | None:
    scope = script.function_of(call)
    line = getattr(call, "lineno", 0)
    for one in script.all(ast.Call):
        above = one.lineno < line and script.function_of(one) in (scope, None) and not runs_alone(script, one)
        if above and initializes_cuda(script, one) and script.class_of(one) is script.class_of(call):
            return one
    return None


def _in_ranks(script: Script, trainer: ast.Call) -> Iterator[Violation]:
    strategy = script.value(script.argument(trainer, "strategy"))
    if strategy is UNKNOWN or not str(strategy).startswith(("ddp_fork", "ddp_notebook")):
        return
    if script.value(script.argument(trainer, "accelerator")) == "cpu":
        return
    before = _used_before(script, trainer)
    if before is not None:
        yield Violation(
            trainer,
            f"Strategy {strategy} forks the ranks after `{script.text_of(before, 40)}` (line {before.lineno}) "
            "initialized CUDA",
            fix='Use CUDA only after fit() has started the ranks, or outside notebooks use `strategy="ddp"`.',
            evidence=(("strategy", strategy), ("parent_at_line", before.lineno)),
        )


_DATA_SET = """\
import torch
from torch.utils.data import Dataset

class Images(Dataset):
    def __init__(self, paths):
        self.paths = paths

    def __getitem__(self, index):
        image = read(self.paths[index])
        return torch.from_numpy(image).float().cuda()  # !

    def __len__(self):
        return len(self.paths)

def main(model, paths):
    model = model.cuda()
    images = Images(paths)
    for batch in DataLoader(images, batch_size=8, num_workers=4):
        model(batch).mean().backward()
"""
_COLLATE = """\
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

def collate(rows):
    x = torch.stack([row[0] for row in rows])
    return x.to(device)  # !

def main(data, model, args):
    model.to(device)
    loader = DataLoader(data, 8, shuffle=True, num_workers=args.workers, collate_fn=collate)
    return [model(x) for x in loader]
"""
_PROCESS = """\
def run(rank, model):
    torch.cuda.set_device(rank)
    model = model.cuda()

if __name__ == "__main__":
    model = build().cuda()
    processes = []
    for rank in range(2):
        process = mp.Process(target=run, args=(rank, model))  # !
        process.start()
        processes.append(process)
"""
_LIGHTNING = """\
def main(model, data):
    print(torch.cuda.get_device_name(0))
    trainer = L.Trainer(accelerator="gpu", devices=2, strategy="ddp_fork")  # !
    trainer.fit(model, data)
"""
_MOVED = """\
import torch
from torch.utils.data import Dataset

class Images(Dataset):
    def __getitem__(self, index):
        return torch.from_numpy(read(index)).float()

def main(model):
    model = model.cuda()
    for batch in DataLoader(Images(), batch_size=8, num_workers=4, pin_memory=True):
        model(batch.cuda(non_blocking=True)).mean().backward()
"""
_CHILDREN = """\
import torch
import multiprocessing as mp

def write(queue):
    while (item := queue.get()) is not None:
        print(item)

def main(model, queue):
    model = model.cuda()
    writer = mp.Process(target=write, args=(queue,))
    writer.start()
"""
_AFTER = """\
def run(rank):
    torch.cuda.set_device(rank)
    build().cuda()

def other(model):
    return model.cuda()

def main():
    processes = [mp.Process(target=run, args=(rank,)) for rank in range(torch.cuda.device_count())]
    for process in processes:
        process.start()
    mp.spawn(run, nprocs=2)
"""
