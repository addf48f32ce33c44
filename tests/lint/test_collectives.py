"""What synchronises ranks, through functions of a file, and whether the other ranks join."""

import ast

import pytest

from doctor.lint.python.collectives import collectives_and_forwards, collectives_of
from doctor.lint.python.matching_collectives import unmatched_condition
from doctor.lint.python.reachable_functions import is_certain
from doctor.lint.python.script import Script
from tests.lab.cases import each_case

TORCH = "import torch\nimport torch.distributed as dist\n"


def found(text):
    return [(one.call.lineno, one.word, one.through) for one in collectives_of(Script("a.py", text)).all()]


def words(text):
    return [one.word for one in collectives_of(Script("a.py", text)).all()]


@each_case(
    ("text", "word"),
    [
        ("import torch.distributed as dist\ndist.all_reduce(x)", "all_reduce"),
        ("from torch import distributed\ndistributed.barrier()", "barrier"),
        ("from torch.distributed import broadcast as b\nb(x, 0)", "broadcast"),
        ("import torch\ntorch.distributed.distributed_c10d.all_gather_object(a, b)", "all_gather_object"),
        ("import accelerate\na = accelerate.Accelerator()\na.gather_for_metrics(x)", "gather_for_metrics"),
        ("import lightning as L\nt = L.Trainer()\nt.save_checkpoint(p)", "save_checkpoint"),
        ("import lightning as L\nf = L.Fabric()\nf.save(p, s)", "save"),
        ("import horovod.torch as hvd\nhvd.allreduce(x)", "allreduce"),
        ("import lightning as L\nclass M(L.LightningModule):\n    def f(self): self.all_gather(1)", "all_gather"),
        ("self.log('x', x, sync_dist=True)", "sync_dist"),
        ("from transformers import Trainer\nt = Trainer(m)\nt.evaluate()", "evaluate"),
        ("import lightning as L\nclass M(L.LightningModule):\n    def f(self): self.trainer.test(self)", "test"),
        ("from detectron2.utils import comm\ncomm.all_gather(x)", "all_gather"),
        ("logger.synchronize_between_processes()", "synchronize_between_processes"),
        (
            "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP\n"
            "def f(model):\n    model = FSDP(model)\n    model.state_dict()",
            "state_dict of FSDP",
        ),
        (
            "import deepspeed\nengine, _, _, _ = deepspeed.initialize()\nengine.save_checkpoint(p)",
            "save_checkpoint of DeepSpeed",
        ),
    ],
)
def test_words(text, word):
    assert word in words(text)


@pytest.mark.parametrize(
    "text",
    [
        "import torch.distributed as dist\ndist.get_rank()\ndist.destroy_process_group()\ndist.send(x, 1)",
        "self.log('x', x)\nself.log('x', x, sync_dist=False)\nself.log('x', x, sync_dist=flag)",
        "import functools\nfunctools.reduce(f, xs)\nqueue.gather(x)\nmodel.state_dict()",
        "import threading\nbarrier = threading.Barrier(2)\nbarrier.wait()",
        "def all_reduce(x):\n    return x\nall_reduce(1)",
        "import jax\njax.lax.all_gather(x)",
    ],
)
def test_no_collectives(text):
    assert words(text) == []


def test_through_functions_of_the_file():
    text = TORCH + (
        "def total(x):\n    if not dist.is_initialized():\n        return x\n    dist.all_reduce(x)\n    return x\n"
        "def evaluate(x):\n    return total(x)\n"
        "evaluate(1)\n"
    )
    assert found(text) == [(6, "all_reduce", None), (9, "all_reduce", "total"), (10, "all_reduce", "evaluate")]


@pytest.mark.parametrize(
    "body",
    [
        "if flag:\n        dist.all_reduce(flag)",  # a switch of one call
        "if rank == 0:\n        dist.all_reduce(flag)",
        "if flag.done:\n        return\n    dist.all_reduce(flag)",
        "try:\n        pass\n    except ValueError:\n        dist.barrier()",
        "flag and dist.barrier()",
        "def later():\n        dist.barrier()\n    later2(later)",
        "dist.all_reduce(flag, group=flag.group)",
        "dist.barrier(flag)",
    ],
)
def test_functions_that_need_not_synchronise(body):
    assert all(through is None for _, _, through in found(f"{TORCH}def f(flag):\n    {body}\nf(1)\n"))


def test_methods_are_followed():
    text = TORCH + "class A:\n    def f(self):\n        dist.barrier()\n    def g(self):\n        self.f()\nA().g()\n"
    assert [(word, through) for _, word, through in found(text)] == [
        ("barrier", None),
        ("barrier", "f"),
        ("barrier", "g"),
    ]


@pytest.mark.parametrize(
    ("call", "grouped"),
    [
        ("dist.all_reduce(x)", False),
        ("dist.all_reduce(x, group=None)", False),
        ("dist.all_reduce(x, group=dist.group.WORLD)", False),
        ("dist.all_reduce(x, dist.ReduceOp.SUM, group)", True),
        ("dist.all_reduce(x, group=tensor_group)", True),
        ("dist.barrier(group)", True),
        ("dist.barrier(device_ids=[0])", False),
        ("dist.barrier(**kwargs)", True),
        ("dist.broadcast(x, **{'src': 0})", False),
        ("dist.broadcast(x, **{'src': 0, 'group': group})", True),
        ("dist.broadcast(*given)", True),
        ("dist.new_group([0, 1])", False),
        ("dist.new_group([0, 1], use_local_synchronization=True)", True),
    ],
)
def test_groups(call, grouped):
    (one,) = collectives_of(Script("a.py", f"{TORCH}{call}\n")).all()
    assert one.grouped is grouped


def test_recursion_ends():
    text = TORCH + "def a():\n    b()\ndef b():\n    a()\n    dist.barrier()\na()\n"
    assert {through for _, _, through in found(text)} == {None, "a", "b"}


@pytest.mark.parametrize(
    ("body", "certain"),
    [
        ("dist.barrier()", True),
        ("for x in y:\n        dist.barrier()", True),
        ("while True:\n        dist.barrier()", True),
        ("while x:\n        dist.barrier()", False),
        ("with x:\n        dist.barrier()", True),
        ("if world_size > 1:\n        dist.barrier()", True),
        ("if world_size > 1:\n        pass\n    else:\n        dist.barrier()", False),
        ("if x:\n        return\n    dist.barrier()", False),
        ("if world_size == 1:\n        return\n    dist.barrier()", True),
        ("if not dist.is_initialized():\n        return\n    dist.barrier()", True),
        ("if not (dist.is_available() and dist.is_initialized()):\n        return\n    dist.barrier()", True),
        ("if not dist.is_initialized():\n        dist.barrier()", False),
        ("if not dist.is_initialized():\n        pass\n    else:\n        dist.barrier()", True),
        ("if dist.is_initialized():\n        return\n    dist.barrier()", False),
        ("if world_size > 1 and x:\n        dist.barrier()", False),
        ("y = dist.barrier() if x else 0", False),
    ],
)
def test_what_is_reached_for_certain(body, certain):
    script = Script("a.py", f"{TORCH}def f(x, y, world_size):\n    {body}\n")
    call = next(call for call in script.all(ast.Call) if getattr(call.func, "attr", "") == "barrier")
    assert is_certain(script, call) is certain


WAIT = "dist.barrier()"
JOINED = {
    "both branches": f"if rank == 0:\n    {WAIT}\nelse:\n    {WAIT}\n",
    "all of three branches": f"if rank == 0:\n    {WAIT}\nelif rank == 1:\n    {WAIT}\nelse:\n    {WAIT}\n",
    "the others, then the first": f"if rank not in (-1, 0):\n    {WAIT}\nwork()\nif rank == 0:\n    {WAIT}\n",
    "the others come to it below": (
        f"def f():\n    if rank != 0:\n        {WAIT}\n        return\n    work()\n    {WAIT}\n"
    ),
    "the first meets the others below": (
        f"def f(found):\n    if rank == 0:\n        if not found:\n            {WAIT}\n            return\n"
        f"        write()\n    {WAIT}\n"
    ),
    "an error of the first is raised after the wait of all": (
        f"def f():\n    if rank == 0:\n        try:\n            write()\n        except OSError:\n            {WAIT}\n"
        f"            raise\n    {WAIT}\n"
    ),
    "the next turn of the loop": (
        f"for x in y:\n    if x + rank < n:\n        if x == 0:\n            {WAIT}\n            continue\n    {WAIT}\n"
    ),
    "as often in both branches": f"if rank == 0:\n    {WAIT}\n    {WAIT}\nelse:\n    {WAIT}\n    {WAIT}\n",
    "for another reason on all": f"def f(sharded):\n    if rank == 0 or sharded:\n        {WAIT}\n",
    "the others make it in a function, under a condition of their own": (
        f"def other(x):\n    if x:\n        {WAIT}\ndef f(x):\n    if rank == 0:\n        return other(x)\n    {WAIT}\n"
    ),
    "a loop that all leave for the same reason": (
        f"while True:\n    if rank == 0 and done():\n        break\n    if rank != 0 and told():\n        break\n"
        f"    {WAIT}\n"
    ),
    "one process leaves inside its branch": (
        "def f(world_size):\n    if rank == 0:\n        if world_size == 1:\n            return\n        write()\n"
        f"    {WAIT}\n"
    ),
    "a loop inside its branch is left": (
        "def f(names):\n    if rank == 0:\n        for name in names:\n            if not name:\n"
        f"                continue\n            write(name)\n    {WAIT}\n"
    ),
    "the others are gone": f"if rank == 0:\n    {WAIT}\nelse:\n    sys.exit(1)\n",
    "a group": "if rank in ranks:\n    dist.barrier(group)\n",
    "no condition": f"{WAIT}\n",
    "no rank of a job": f"if rank != Settings.NO_RANK:\n    {WAIT}\n",
    "through a function": f"def wait():\n    {WAIT}\nif rank == 0:\n    wait()\nelse:\n    wait()\n",
}
ALONE = {
    "one branch": f"if rank == 0:\n    {WAIT}\n",
    "another word in the other branch": f"if rank == 0:\n    {WAIT}\nelse:\n    dist.all_reduce(x)\n",
    "the others leave in the other branch": (
        f"def f():\n    if rank == 0:\n        work()\n    else:\n        return\n    {WAIT}\n"
    ),
    "one rank ends the loop": f"while True:\n    if rank == 0 and done():\n        break\n    {WAIT}\n",
    "one rank may leave inside its branch": (
        f"def f(found):\n    if rank == 0:\n        if not found:\n            return\n        write()\n    {WAIT}\n"
    ),
    "one rank may skip the rest of a step": (
        f"for x in y:\n    if rank == 0:\n        if x:\n            continue\n        write()\n    {WAIT}\n"
    ),
    "one rank leaves after fewer calls": (
        f"def f(found):\n    if rank == 0:\n        if not found:\n            {WAIT}\n            return\n"
        f"        write()\n    {WAIT}\n    {WAIT}\n"
    ),
    "twice in one branch": f"if rank == 0:\n    {WAIT}\n    {WAIT}\nelse:\n    {WAIT}\n",
    "once more before it leaves": (
        f"def f():\n    if rank == 0:\n        {WAIT}\n        {WAIT}\n        return\n    {WAIT}\n"
    ),
    "the next turn of a loop without it": f"for x in y:\n    if rank == 0:\n        {WAIT}\n        continue\n{WAIT}\n",
    "the same condition twice": f"if rank == 0:\n    {WAIT}\nwork()\nif rank == 0:\n    {WAIT}\n",
    "an outer condition": f"if rank != 3:\n    if rank == 0:\n        {WAIT}\n    else:\n        {WAIT}\n",
    "a group for some ranks": "if rank < 2:\n    group = dist.new_group([0, 1])\n",
    "through a function": f"def wait():\n    {WAIT}\nif rank == 0:\n    wait()\n",
}


@pytest.mark.parametrize("title", JOINED)
def test_the_others_join(title):
    script = Script("a.py", TORCH + "import sys\nrank = dist.get_rank()\n" + JOINED[title])
    assert {unmatched_condition(script, one) for one in collectives_of(script).all()} == {None}


@pytest.mark.parametrize("title", ALONE)
def test_nobody_joins(title):
    script = Script("a.py", TORCH + "rank = dist.get_rank()\n" + ALONE[title])
    conditions = [unmatched_condition(script, one) for one in collectives_of(script).all()]
    assert any(one is not None and "rank" in one.test for one in conditions)


MODELS = """\
import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

def evaluate(model, loader):
    for x in loader:
        model(x)

def validate(net, loader):
    return evaluate(net, loader)

def save(model, path):
    torch.save(model.state_dict(), path)

"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("model = DDP(net)\nvalidate(model, x)", "forward of DDP"),
        ("model = FSDP(net)\nevaluate(model, x)", "forward of FSDP"),
        ("fully_shard(model)\nevaluate(model=model, loader=x)", "forward of FSDP"),
        ("model = FSDP(net)\nsave(model, 'a.pt')", "state_dict of FSDP"),
        ("model = DDP(net)\nsave(model, 'a.pt')", ""),
        ("fully_shard(model)\nsave(model, 'a.pt')", ""),
        ("fully_shard(model)\nmodel.state_dict()", ""),
        ("fully_shard(model)\nmodel.state_dict()['weight'].full_tensor()", "full_tensor"),
        ("class M:\n  def step(self, x):\n    return self(x)\nmodel = DDP(M())\nm = M()\nm.step(x)", ""),
        ("model = DDP(net)\nevaluate(model.module, x)", ""),
        ("model = build()\nevaluate(model, x)\nmodel = DDP(model)", ""),
        ("model = DDP(net, broadcast_buffers=False)\nevaluate(model, x)", ""),
    ],
)
def test_models_that_functions_are_given(text, expected):
    calls = collectives_and_forwards(Script("a.py", MODELS + text)).all()
    assert [one.word for one in calls if one.call.col_offset == 0] == ([expected] if expected else [])


def test_a_parameter_is_no_collective_of_its_function():
    text = MODELS + "model = FSDP(net)\nevaluate(model, x)\nevaluate(model.module, x)\n"
    through = [one.call.lineno for one in collectives_and_forwards(Script("a.py", text)).all() if one.through]
    assert through == [MODELS.count("\n") + 2]


def test_the_number_of_paths_is_bounded():
    branches = "".join(f"    if x > {n}:\n        {WAIT}\n" for n in range(150))
    script = Script("a.py", f"{TORCH}def f(rank, x):\n  if rank == 0:\n{branches}")
    unmatched = [one for one in collectives_of(script).all() if unmatched_condition(script, one) is not None]
    assert 0 < len(unmatched) < 150
