"""CODE026: an environment variable is set after it has been read."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from doctor.api import Script, Severity, Violation, rule
from doctor.knowledge.variable_values import effective
from doctor.lint.python.collectives import collectives_of
from doctor.lint.python.cuda import initializes_cuda, joins
from doctor.lint.python.loader_calls import words_behind
from doctor.lint.python.script import UNKNOWN, last_name
from doctor.lint.python.training import WRAPPERS, calls_of, several_ranks
from doctor.testing.script_cases import fails, passes


@rule(
    id="CODE026",
    severity=Severity.WARNING,
    reads=Script,
    mentions=("environ", "putenv"),
    foreshadows=("NCCL003", "ENV005", "GPU001", "GPU002", "MEM006"),
    impacts={
        r"process group read it": (
            "The later value is silently ignored: the process group keeps the one that was set before, or its default."
        ),
        r"allocator read it": (
            "The later value is silently ignored: the allocator keeps the options that were set before, or its "
            "defaults."
        ),
        r"NCCL|Gloo|GLOO": (
            "The later value is silently ignored: communication uses the settings that were in effect before."
        ),
        r"CUDA": "The later value is silently ignored: the process uses the GPUs that were visible before.",
    },
    cases=lambda: (
        fails("the address, after the job was joined", _ADDRESS),
        fails("visible GPUs, after CUDA has started", _VISIBLE),
        fails("NCCL has its settings by then", _NCCL),
        fails("the allocator has them too", _ALLOCATOR),
        fails("joined in a function that was called before", _CALLED),
        passes("before", _BEFORE),
        passes("NCCL reads its own at the first collective", _LAZY),
        passes("for children", _CHILDREN),
        passes("in another branch", _BRANCHES),
        passes("a variable that is read when it is used", _AT_USE),
        passes("read again, and the value that it had before", _READ_AGAIN),
        passes("for the groups that follow, whose communicators read it again", _FOR_OTHER_GROUPS),
        fails(
            "for the groups that follow, but kept from the first one",
            _FOR_OTHER_GROUPS.replace("COLLNET_ENABLE", "SOCKET_IFNAME").replace('"0"', '"eth1"  # !'),
        ),
        passes("a group that meets by a URL, for other programs", _BY_URL),
        fails("the rank, after a group that reads it", _RANK),
        passes(
            "the rank, for others, after a group that was given it",
            _RANK.replace('"nccl")', '"nccl", rank=rank, world_size=world)').replace("  # !", ""),
        ),
        passes("the rank, for a library that reads it", f"{_RANK.replace('  # !', '')}    wandb.init()\n"),
        passes("GPU 0, for a program that uses it anyway", _FIRST),
        fails("GPU 1, for a program that uses another one", _FIRST.replace('"0"', '"1"  # !')),
        passes("the GPU that the rank has chosen", _CHOSEN),
        passes("a GPU that the rank chooses below", _CHOSEN_BELOW),
        passes("all GPUs, of which the rank has chosen one", _CHOSEN.replace("str(local_rank)", '"0,1,2,3"')),
        passes(
            "their order", _CHOSEN.replace("VISIBLE_DEVICES", "DEVICE_ORDER").replace("str(local_rank)", '"PCI_BUS_ID"')
        ),
        fails("other GPUs than the rank can choose", _CHOSEN.replace("str(local_rank)", '"2,3"  # !')),
        fails(
            "a GPU that no rank has chosen",
            _CHOSEN.replace("set_device(local_rank)", "init()").replace("str(local_rank)", "str(local_rank)  # !"),
        ),
        passes("a cache that is empty before CUDA has started", _EMPTY),
    ),
)
def environment_written_late(script: Script) -> Iterator[Violation]:
    """Ask whether environment variables are set before the library that reads them starts.

    Why it hurts: the variable is read only once. A later value is silently ignored: the job continues with the
    interface, the GPUs or the settings that were in effect before.
    Fix: Set the variable at the top of the script, before torch.distributed and CUDA are used, or in the launcher.
    """
    for at, variable in _written(script):
        reader = _reader(variable)
        started = _started_before(script, at, reader) if reader is not None else None
        if reader is None or started is None or _is_for_later(script, at):
            continue
        if variable in _READ_BY_EACH_COMMUNICATOR and _makes_groups(script):
            continue
        if _is_read_again(script, at, variable) or _has_the_value(script, at, variable, started):
            continue
        if _changes_nothing(script, at, variable):
            continue
        yield Violation(
            at,
            f"{variable} is set too late: {reader.words} in `{script.text_of(started, 29)}` (line {started.lineno})",
            fix=f"Set {variable} above line {started.lineno}, or in the environment of the launcher.",
            # The cells of a notebook run in any order
            severity=Severity.INFO
            if script.path.endswith(".ipynb") or _is_setting(variable) or _is_in_use(script, at, variable)
            else None,
            evidence=(("variable", variable), ("read_at_line", started.lineno), ("foreshadows", _in_a_run(variable))),
            confidence=0.85,
        )


def _is_setting(variable: str) -> bool:
    """Whether a job that starts works without it, as its project does: it tunes NCCL, the allocator or what PyTorch
    does at a timeout. Without an interface or a transport, ranks may not find each other."""
    return (
        variable in _READ_BY_ALLOCATOR
        or variable.startswith(_READ_BY_TORCH)
        or variable in _READ_BY_CUDA[2:]
        or (variable.startswith("NCCL_") and not variable.endswith(("_IFNAME", "_HCA", "_DISABLE")))
    )


def _changes_nothing(script: Script, at: ast.stmt, variable: str) -> bool:
    """Whether each rank has chosen its GPU by number before, and the variable says the same: the GPU of the rank, GPUs
    from 0 on, or their order; or whether it chooses its GPU below, by its rank on the host, or a program of one process
    names GPU 0, which it uses anyway."""
    if variable == "CUDA_VISIBLE_DEVICES" and _value_written(script, at) == "0" and _is_for_one_gpu(script):
        return True
    function = script.function_of(at)
    below = (one for one in _choosing_by_rank(script) if one.lineno > at.lineno)
    if variable in _READ_BY_CUDA[:2] and any(script.function_of(one) is function for one in below):
        return True
    chosen = _VariableReader("", _choosing_by_rank)
    if variable not in _READ_BY_CUDA[:2] or _started_before(script, at, chosen) is None:
        return False
    value = at.value if isinstance(at, ast.Assign) else None
    if variable == "CUDA_DEVICE_ORDER" or value is None:
        return variable == "CUDA_DEVICE_ORDER"
    known = script.value(value)
    if isinstance(known, str):
        numbers = [one.strip() for one in known.split(",")]
        return len(numbers) > 1 and numbers == [str(number) for number in range(len(numbers))]
    return any("rank" in word.lower() for word in words_behind(script, value))


_MAKES_GROUPS = ("new_group", "init_device_mesh", "DeviceMesh(")


_READ_BY_EACH_COMMUNICATOR = frozenset(
    {
        *("NCCL_ALGO", "NCCL_PROTO", "NCCL_COLLNET_ENABLE", "NCCL_NET", "NCCL_TOPO_FILE", "NCCL_GRAPH_FILE"),
        *("NCCL_CTA_POLICY", "NCCL_TOPO_DUMP_FILE", "NCCL_GRAPH_DUMP_FILE", "NCCL_CHECK_MODE", "NCCL_LAUNCH_MODE"),
    }
)
"""Variables that NCCL reads again for each new communicator (``ncclGetEnv`` in src/init.cc, src/graph/tuning.cc and
src/graph/topo.cc), unlike those that ``NCCL_PARAM`` keeps: a program may set them between two groups on purpose, as
Megatron-LM does to restrict SHARP to one of them."""


def _makes_groups(script: Script) -> bool:
    """Whether the script or its project makes groups besides the first one."""
    texts = [script.text]
    if script.modules is not None:
        texts += [text for word in _MAKES_GROUPS for _, text in script.modules.mentioning(word)]
    return any(word in text for text in texts for word in _MAKES_GROUPS)


def _is_for_one_gpu(script: Script) -> bool:
    is_split = re.search(r"DataParallel|data_parallel|device_map|cuda:[1-9]", script.text) is not None
    return several_ranks(script) is None and not is_split


def _is_in_use(script: Script, at: ast.stmt, variable: str) -> bool:
    """Whether the value is the default of the variable."""
    value = at.value if isinstance(at, ast.Assign) else None
    if isinstance(value, ast.Call) and script.text_of(value.func) == "str" and len(value.args) == 1:
        value = value.args[0]
    known = script.value(value) if value is not None else UNKNOWN
    if not isinstance(known, (str, int)):
        return False
    return (default := effective(variable, None)) is not None and effective(variable, str(known)) == default


def _choosing_by_rank(script: Script) -> Iterator[ast.Call]:
    for call in script.calls("torch.cuda.set_device"):
        device = script.argument(call, "device", 0)
        if device is not None and any("rank" in word.lower() for word in words_behind(script, device)):
            yield call


def _in_a_run(variable: str) -> list[str]:
    """The checks that report the setting that stays in effect; none reports how PyTorch watches NCCL."""
    if variable in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        return ["GPU001", "GPU002"]
    if variable in _READ_BY_ALLOCATOR:
        return ["MEM006"]
    if variable in _MEETING or variable in ("RANK", "WORLD_SIZE"):
        return ["ENV005"]
    return ["NCCL003"] if variable.startswith("NCCL_") and not variable.startswith(_READ_BY_TORCH) else []


class _VariableReader(NamedTuple):
    """What reads a variable: ``words`` for when it is too late, ``starts``: the calls that read it."""

    words: str
    starts: Callable[[Script], Iterator[ast.Call]]


def _communicating(script: Script) -> Iterator[ast.Call]:
    """The first collective creates the first communicator; a group with a known device does so at once."""
    yield from (call for call in joins(script) if script.argument(call, "device_id") is not None)
    yield from script.calls(*WRAPPERS)
    without = ("init_process_group", "new_group", "prepare", "setup")
    for one in collectives_of(script).all():
        if script.name(one.call.func).startswith("torch.distributed.") and one.word not in without:
            yield one.call


def _using_cuda(script: Script) -> Iterator[ast.Call]:
    for call in script.all(ast.Call):
        if initializes_cuda(script, call):
            yield call


def _joining_by_variables(script: Script) -> Iterator[ast.Call]:
    """Groups that read address and port: ``env://`` alone does, which is the default."""
    for call in joins(script):
        method = script.argument(call, "init_method", 1)
        if method is None or script.value(method) in (None, "env://"):
            yield call


def _joining_without(script: Script, variable: str) -> Iterator[ast.Call]:
    """Groups to which neither an argument nor a store says what the variable does."""
    argument, place = _GIVEN_BY[variable]
    for call in joins(script):
        if not script.is_given(call, argument, place) and not script.is_given(call, "store"):
            yield call


_MEETING = ("MASTER_ADDR", "MASTER_PORT")
_GIVEN_BY = {"RANK": ("rank", 4), "WORLD_SIZE": ("world_size", 3)}
"""Variables that a group reads unless an argument gives the value."""
_READ_BY_TORCH = ("TORCH_NCCL_", "NCCL_ASYNC_ERROR_HANDLING", "NCCL_BLOCKING_WAIT")
_READ_BY_CUDA = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS")
_READ_BY_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def _reader(variable: str) -> _VariableReader | None:
    if variable in _MEETING:
        return _VariableReader("the process group read it", _joining_by_variables)
    if variable in _GIVEN_BY:
        return _VariableReader("the process group read it", lambda script: _joining_without(script, variable))
    if variable == "GLOO_SOCKET_IFNAME" or variable.startswith(_READ_BY_TORCH):
        return _VariableReader("the process group read it", joins)
    if variable.startswith("NCCL_"):
        return _VariableReader("NCCL read it", _communicating)
    if variable in _READ_BY_CUDA:
        return _VariableReader("CUDA read it", _using_cuda)
    if variable in _READ_BY_ALLOCATOR:
        return _VariableReader("the allocator read it", _using_cuda)
    return None


def _written(script: Script) -> Iterator[tuple[ast.stmt, str]]:
    for statement in script.all(ast.Assign):
        for target in statement.targets:
            if isinstance(target, ast.Subscript) and script.name(target.value) == "os.environ":
                yield from _named(script, statement, target.slice)
    for call in script.calls("os.environ.setdefault", "os.putenv"):
        if call.args:
            yield from _named(script, script.statement_of(call), call.args[0])


def _named(script: Script, at: ast.stmt, key: ast.expr) -> Iterator[tuple[ast.stmt, str]]:
    name = script.value(key)
    if isinstance(name, str):
        yield at, name


def _started_before(script: Script, at: ast.stmt, reader: _VariableReader) -> ast.Call | None:
    """The first earlier call that reads, in the same function or the module, or in a function that is called before."""
    scope = script.function_of(at)
    starts = list(reader.starts(script))
    inside = {script.function_of(one) for one in starts} - {scope, None}
    calls = [one for one in script.all(ast.Call) if script.definition(one.func) in inside] if inside else []
    for call in sorted((*starts, *calls), key=lambda one: one.lineno):
        if call.lineno >= at.lineno or script.function_of(call) not in (scope, None):
            continue
        if not _is_apart(script, call, at):
            return call
    return None


def _is_apart(script: Script, call: ast.Call, at: ast.stmt) -> bool:
    """Whether the two may not both run: in two branches, or one leaves, or the call is conditional."""
    inner: ast.AST = call
    around = set(script.around(at))
    for outer in script.around(call):
        if outer in around:
            return isinstance(outer, (ast.If, ast.Try)) and not _same_block(outer, inner, at, script)
        if isinstance(outer, (ast.If, ast.Try, ast.While, ast.Lambda, ast.IfExp)) and inner is not getattr(
            outer, "test", None
        ):
            return True
        inner = outer
    return False


def _same_block(outer: ast.AST, inner: ast.AST, at: ast.stmt, script: Script) -> bool:
    if inner is getattr(outer, "test", None):
        return True
    above = (at, *script.around(at))
    for name in ("body", "orelse", "finalbody", "handlers"):
        block = getattr(outer, name, None) or []
        if inner in block:
            return any(one in block for one in above)
    return False


_CHILDREN_STARTED = ("subprocess.", "torch.multiprocessing.", "multiprocessing.", "os.system", "os.exec", "os.spawn")


def _is_for_later(script: Script, at: ast.stmt, depth: int = 3) -> bool:
    """Whether other processes start below a place in its function, or below each call of that, and get the variable."""
    scope = script.function_of(at)
    if any(
        script.name(call.func).startswith((*_CHILDREN_STARTED, "torch.distributed.new_group"))
        and call.lineno > at.lineno
        for call in script.inside(scope or script.tree, ast.Call)
    ):
        return True
    calls = [script.statement_of(one) for one in calls_of(script, scope)] if scope is not None and depth else []
    return bool(calls) and all(_is_for_later(script, one, depth - 1) for one in calls)


def _is_read_again(script: Script, at: ast.stmt, variable: str) -> bool:
    """Whether the same function reads the variable after it, or starts RPC, which reads it again."""
    for one in script.inside(script.function_of(at) or script.tree, ast.Subscript):
        is_read = isinstance(one.ctx, ast.Load) and script.name(one.value) == "os.environ"
        if is_read and one.lineno > at.lineno and script.value(one.slice) == variable:
            return True
    readers = script.calls("os.environ.get", "os.getenv", "torch.distributed.rpc.init_rpc")
    return _is_for_others(script, at, variable) or any(
        call.lineno > at.lineno
        and script.function_of(call) is script.function_of(at)
        and (last_name(call) == "init_rpc" or (call.args and script.value(call.args[0]) == variable))
        for call in readers
    )


def _is_for_others(script: Script, at: ast.stmt, variable: str) -> bool:
    """Whether a variable that says who a process is, and where the job meets, is read elsewhere in the project, or by a
    library that takes these from the environment."""
    if variable not in (*_MEETING, *_GIVEN_BY):
        return False
    below = script.text.splitlines()[at.lineno :]
    texts = ["\n".join(below)]
    if script.modules is not None:
        texts += [text for shown, text in script.modules.mentioning(variable) if shown != script.path]
    reads = re.compile(rf"environ(?:\.get\(|\[)[\"']{variable}[\"'](?!\]\s*=[^=])|getenv\([\"']{variable}[\"']")
    return any(map(reads.search, texts)) or _READS_JOB.search(texts[0]) is not None


_READS_JOB = re.compile(r"\b(?:Trainer|Accelerator|TrainingArguments|Fabric|init_distributed|wandb\.init|hvd\.init)\(")


def _has_the_value(script: Script, at: ast.stmt, variable: str, started: ast.Call) -> bool:
    """Whether the variable was given the same value before it was read, as in a cell that is repeated."""
    value = _value_written(script, at)
    earlier = [one for one, name in _written(script) if name == variable and one.lineno < started.lineno]
    return isinstance(value, str) and bool(earlier) and _value_written(script, earlier[-1]) == value


def _value_written(script: Script, at: ast.stmt) -> object:
    return script.value(at.value) if isinstance(at, ast.Assign) else UNKNOWN


_ADDRESS = """\
def main(rank, world):
    dist.init_process_group("gloo", rank=rank, world_size=world)
    os.environ["MASTER_ADDR"] = "10.0.0.1"  # !
    os.environ["MASTER_PORT"] = "29500"  # !
    train()
"""
_VISIBLE = """\
model = build().cuda()
os.environ["CUDA_VISIBLE_DEVICES"] = "2,3"  # !
model = torch.nn.DataParallel(model)
"""
_NCCL = """\
def main(rank):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    model = DDP(build())
    os.environ["NCCL_SOCKET_IFNAME"] = "eth0"  # !
    os.environ.setdefault("NCCL_IB_DISABLE", "1")  # !
    train(model)
"""
_ALLOCATOR = """\
def main():
    device = torch.device("cuda:0")
    model = build().to(device)
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"  # !
    train(model)
"""
_CALLED = """\
def setup(rank, world):
    dist.init_process_group("nccl", rank=rank, world_size=world)

def main(rank, world):
    setup(rank, world)
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"  # !
    train()
"""
_BEFORE = """\
import torch

def setup(rank, world):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "29501"
    os.environ["NCCL_DEBUG"] = "INFO"
    dist.init_process_group("nccl", rank=rank, world_size=world)

if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = "0,1"
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    model = build().cuda()
    setup(0, 1)
"""
_LAZY = """\
dist.init_process_group("nccl")
os.environ["NCCL_DEBUG"] = "WARN"
dist.barrier()
"""
_CHILDREN = """\
import subprocess

def main(commands):
    torch.zeros(1, device="cuda")
    for number, command in enumerate(commands):
        os.environ["CUDA_VISIBLE_DEVICES"] = str(number)
        subprocess.Popen(command)
"""
_BRANCHES = """\
def main(args):
    if args.distributed:
        dist.init_process_group("nccl")
    else:
        os.environ["MASTER_ADDR"] = "localhost"
        dist.init_process_group("gloo", rank=0, world_size=1)
    if args.warm:
        torch.zeros(1).cuda()
        return
    os.environ["CUDA_VISIBLE_DEVICES"] = "0"
"""
_AT_USE = """\
import torch

dist.init_process_group("gloo")
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["WANDB_MODE"] = "offline"
print(os.environ["MASTER_ADDR"])
"""
_FOR_OTHER_GROUPS = """\
import torch.distributed as dist

def make_groups(create):
    dist.barrier(group=first_group())
    os.environ["NCCL_COLLNET_ENABLE"] = "0"
    return [create(ranks) for ranks in parts()]

def create(ranks):
    return dist.new_group(ranks)

make_groups(create)
"""
_READ_AGAIN = """\
def main(rank, world):
    os.environ["MASTER_PORT"] = "29500"
    dist.init_process_group("gloo", rank=rank, world_size=world)
    os.environ["MASTER_PORT"] = "29501"
    store = f"tcp://localhost:{os.environ['MASTER_PORT']}"
    connect(store)

os.environ["CUDA_VISIBLE_DEVICES"] = "1"
model = build().cuda()
os.environ["CUDA_VISIBLE_DEVICES"] = "1"
evaluate(model)
"""
_BY_URL = """\
def join(args):
    dist.init_process_group("nccl", init_method=args.url, rank=args.rank, world_size=args.world_size)
    host, _, port = args.url.removeprefix("tcp://").partition(":")
    os.environ["MASTER_ADDR"] = host
    os.environ["MASTER_PORT"] = port
    dist.all_reduce(torch.zeros(1).cuda())
"""
_RANK = """\
import torch.distributed as dist

def join(rank, world):
    dist.init_process_group("nccl")
    os.environ["RANK"] = str(dist.get_rank())  # !
    os.environ["WORLD_SIZE"] = str(world)  # !
"""
_CHOSEN_BELOW = """\
import os
import torch

def join():
    if "AMD" in torch.cuda.get_device_name():
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["ROCR_VISIBLE_DEVICES"]
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
"""
_FIRST = """\
import os
import torch

model = torch.nn.Linear(4, 4).cuda()
os.environ["CUDA_VISIBLE_DEVICES"] = "0"
"""
_CHOSEN = """\
def join(local_rank):
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")

local_rank = int(os.environ["LOCAL_RANK"])
join(local_rank)
model = DDP(build().cuda())
os.environ["CUDA_VISIBLE_DEVICES"] = str(local_rank)
"""
_EMPTY = """\
import torch

def prepare(devices):
    torch.cuda.empty_cache()
    os.environ["CUDA_VISIBLE_DEVICES"] = devices
"""
