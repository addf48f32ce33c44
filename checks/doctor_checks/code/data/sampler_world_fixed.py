"""CODE012: a DistributedSampler with a hard-coded rank or number of ranks."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from doctor.api import Script, Severity, Violation, rule
from doctor.lint.python.loader_calls import words_behind
from doctor.lint.python.project.starts.launch_counts import is_started_on_one_host, shown_counts
from doctor.lint.python.training import SAMPLER, WRAPPERS, is_test
from doctor.testing.script_cases import fails, passes

_JOINS = "torch.distributed.init_process_group"
_ENGINES = ("deepspeed.initialize", "deepspeed.init_distributed")
_SEVERAL = (*WRAPPERS, _JOINS, *_ENGINES)
_STARTS = ("torch.multiprocessing.spawn", "torch.multiprocessing.start_processes")
_CONFIGS = tuple(f"torch.distributed.launcher.{one}LaunchConfig" for one in ("", "api."))
_AGENTS = tuple(f"torch.distributed.launcher.{one}elastic_launch" for one in ("", "api."))
_LOCAL = re.compile(r"^(?:args\.|opt\.|config\.|self\.)?_?local_?rank$|LOCAL_RANK|^gpu_id$", re.IGNORECASE)
_WORLD = re.compile(r"world_?size", re.IGNORECASE)
_OF_ONE_NODE = re.compile(r"device_count|nprocs|n_?gpus|num_gpus|LOCAL_WORLD_SIZE|local_world_size", re.IGNORECASE)

_HOSTS = re.compile(r"n_?nodes|num_(?:nodes|machines)|node_rank|machine_rank|SLURM_NODEID|GROUP_RANK", re.IGNORECASE)
"""Words of scripts for several hosts."""
_COMMENT = re.compile(r"^[ \t]*#.*|[ \t]#.*", re.MULTILINE)


@rule(
    id="CODE012",
    severity=Severity.ERROR,
    reads=Script,
    mentions=("DistributedSampler",),
    foreshadows=("DATA004",),
    impacts={
        r"uses \d+ shards": (
            'With more ranks than shards, the surplus ranks fail with ValueError ("Invalid rank"). With fewer, part of '
            "the data is never read, and no error is raised."
        ),
        r"local rank": (
            "On several nodes, ranks with the same local rank read the same data, and the rest of the data is never "
            "read; no error is raised."
        ),
        r"uses shard \d+": (
            "Every rank reads the same shard, and the rest of the data is never read; no error is raised."
        ),
    },
    cases=lambda: (
        fails("a number of ranks", _script("num_replicas=4, rank=dist.get_rank()")),
        fails("the rank, where every rank takes part 0", _script("num_replicas=dist.get_world_size(), rank=0")),
        fails("the rank on the node, of all nodes", _script("num_replicas=world_size, rank=local_rank")),
        fails("by position", _script("8, dist.get_rank()")),
        passes("the number of ranks of the process group", _script("4, dist.get_rank()", "world_size=4")),
        fails("another number than that of the process group", _script("4, dist.get_rank()", "world_size=8")),
        passes("what torch tells it", _script("shuffle=True")),
        passes("asked for", _script("num_replicas=world_size, rank=dist.get_rank()")),
        passes("every rank is to read everything", _script("num_replicas=1, rank=0, shuffle=True")),
        passes(
            "the rank, from those of the host and on the host",
            _script("num_replicas=world_size, rank=host * per_host + local_rank"),
        ),
        passes(
            "the same with other names",
            _script('num_replicas=world_size, rank=int(os.environ["GROUP_RANK"]) * 8 + int(os.environ["LOCAL_RANK"])'),
        ),
        passes(
            "ranks of one node, which the script starts",
            _script("num_replicas=world_size, rank=local_rank").replace(
                "dist.get_world_size()", "torch.cuda.device_count()"
            ),
        ),
        passes("the number under which it joins the group", _JOINED),
        passes("the rank on the node, where the script starts all ranks on one", _LAUNCHED.format(nodes=1)),
        fails(
            "the rank on the node, where the script waits for several",
            _LAUNCHED.format(nodes="args.nodes").replace("local_rank)", "local_rank)  # !"),
        ),
        passes(
            "no job of several ranks: a test of the sampler",
            _script("num_replicas=2, rank=1").replace("dist.init", "# dist.init"),
        ),
    ),
)
def sampler_world_fixed(script: Script) -> Iterator[Violation]:
    """Ask whether DistributedSampler uses the actual rank and number of ranks.

    Why it hurts: with more ranks than the hard-coded number, the surplus ranks fail with ValueError ("Invalid rank");
    with fewer, part of the data is never read. A fixed rank gives every rank the same shard.
    Fix: Omit `num_replicas` and `rank`: DistributedSampler then takes them from torch.distributed.
    """
    if next(script.calls(*_SEVERAL), None) is None or is_test(script):
        return
    for call in script.calls(SAMPLER):
        if not script.is_open(call):
            yield from _hits(script, call)


def _hits(script: Script, call: ast.Call) -> Iterator[Violation]:
    replicas, rank = script.argument(call, "num_replicas", 1), script.argument(call, "rank", 2)
    if _number(replicas) == 1:
        return
    if (number := _number(replicas)) is not None:
        if _joins_with(script, number):
            return
        counts = shown_counts(script)
        is_shown = bool(counts) and all(count == number for count in counts)
        yield Violation(
            call,
            f"DistributedSampler uses {number} shards, regardless of the number of ranks",
            severity=Severity.INFO if is_shown else None,
            preview=is_shown,
        )
    elif (number := _number(rank)) is not None:
        yield Violation(call, f"DistributedSampler uses shard {number} of the data on every rank")
    elif rank is not None and replicas is not None and _mixes(script, replicas, rank):
        is_on_one_host, is_for_hosts = is_started_on_one_host(script), _knows_hosts(script)
        if _starts_on_one_host(script):
            return
        if is_on_one_host and not is_for_hosts:
            return
        yield Violation(
            call,
            f"DistributedSampler uses the local rank ({script.text_of(rank, 40)}): every node reads the same shards",
            fix="Pass `rank=dist.get_rank()`, or neither `num_replicas` nor `rank`.",
            severity=Severity.INFO if is_on_one_host else None if is_for_hosts else Severity.WARNING,
            preview=is_on_one_host,
            confidence=0.8,
        )


def _number(node: ast.expr | None) -> int | None:
    return node.value if isinstance(node, ast.Constant) and type(node.value) is int else None


def _joins_with(script: Script, number: int) -> bool:
    """Whether the file makes every process group with that number of ranks: with another one, no run gets further."""
    if any(script.name(call.func) in _ENGINES for call in script.all(ast.Call)):
        return False
    given = [script.argument(call, "world_size", 3) for call in script.calls(_JOINS)]
    return bool(given) and all(one is not None and script.value(one) == number for one in given)


def _mixes(script: Script, replicas: ast.expr, rank: ast.expr) -> bool:
    """A local rank with the number of all ranks; one that is derived from this node's devices is fine."""
    if not _LOCAL.search(script.text_of(rank)) or not _WORLD.search(script.text_of(replicas)):
        return False
    if any(isinstance(one, ast.BinOp) and isinstance(one.op, ast.Add) for one in ast.walk(rank)):
        return False  # host * ranks_per_host + local_rank
    if any(script.name(call.func) in _STARTS or _joins_as(script, call, rank) for call in script.all(ast.Call)):
        return False
    behind = words_behind(script, replicas) | words_behind(script, rank)
    return not any(_OF_ONE_NODE.search(word) for word in behind) and "get_rank" not in behind


def _starts_on_one_host(script: Script) -> bool:
    """Whether a script starts its ranks itself, on one host in all of them: ``LaunchConfig(max_nodes=1)``."""
    made = list(script.calls(*_CONFIGS))
    most = [script.value(script.argument(one, "max_nodes", 1)) for one in made]
    return bool(made) and next(script.calls(*_AGENTS), None) is not None and all(one == 1 for one in most)


def _knows_hosts(script: Script) -> bool:
    """Whether the code of the file is for several hosts, not only a comment; on one, the local rank is the rank."""
    return _HOSTS.search(_COMMENT.sub("", script.text)) is not None


def _joins_as(script: Script, call: ast.Call, rank: ast.expr) -> bool:
    """Whether a process joins the group under the same number, which then is its rank."""
    given = script.argument(call, "rank", 4) if script.name(call.func) == _JOINS else None
    return given is not None and script.text_of(given) == script.text_of(rank)


def _script(arguments: str, joins: str = "") -> str:
    return f"""\
import torch
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("nccl"{", " * bool(joins)}{joins})
world_size, local_rank = dist.get_world_size(), int(os.environ["LOCAL_RANK"])
sampler = DistributedSampler(dataset, {arguments})  # !
loader = DataLoader(dataset, batch_size=16, sampler=sampler)
"""


_LAUNCHED = """\
import torch.distributed.launcher as pet
from torch.utils.data.distributed import DistributedSampler

def train():
    dist.init_process_group("nccl")
    world_size, local_rank = dist.get_world_size(), int(os.environ["LOCAL_RANK"])
    return DistributedSampler(dataset, num_replicas=world_size, rank=local_rank)

config = pet.LaunchConfig(min_nodes=1, max_nodes={nodes}, nproc_per_node=4)
pet.elastic_launch(config, entrypoint=train)()
"""
_JOINED = """\
from torch.utils.data.distributed import DistributedSampler

def worker(local_rank, world_size):
    dist.init_process_group("nccl", world_size=world_size, rank=local_rank)
    return DistributedSampler(load(), num_replicas=world_size, rank=local_rank)
"""
