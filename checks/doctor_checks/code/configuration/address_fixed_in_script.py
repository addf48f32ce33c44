"""CODE025: a port, an address or an interface is hard-coded in the script."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from doctor.api import Script, Severity, Violation, rule
from doctor.lint.python.cuda import shows_one_gpu
from doctor.lint.python.gpu_use import runs_alone
from doctor.lint.python.project.imported_functions import imported_function
from doctor.lint.python.script import last_name
from doctor.lint.python.training import SAMPLER, WRAPPERS, is_test, several_ranks
from doctor.lint.python.value_flow import origins
from doctor.testing.script_cases import fails, passes

_PORT = "MASTER_PORT"
_ADDRESS = "MASTER_ADDR"
_INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "UCX_NET_DEVICES", "NCCL_IB_HCA")
_HERE = ("localhost", "127.0.0.1", "::1", "0.0.0.0")  # noqa: S104 - compared, not bound
_TCP = re.compile(r"^tcp://(?P<host>[^:/\\]+|\[[^\]]+\]):(?P<port>\d+)$")
_GIVEN = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
"""Variables that torchrun sets for ranks, together with address and port."""
_STARTS = ("torch.multiprocessing.spawn", "torch.multiprocessing.start_processes", "torch.multiprocessing.Process")


@rule(
    id="CODE025",
    severity=Severity.WARNING,
    preview_infos=True,
    reads=Script,
    mentions=(_PORT, _ADDRESS, *_INTERFACES, "tcp://"),
    foreshadows=("ENV008", "NET005", "NET006", "NET007", "NET018"),
    impacts={
        r"second job": (
            'A second job on this host fails with "Address already in use", or its ranks connect to the store of the '
            "first job."
        ),
        r"^NCCL.*interface has another name": (
            "Ranks on hosts without this interface fail when NCCL starts, and the others wait for them."
        ),
        r"^GLOO.*interface has another name": (
            "Ranks on hosts without this interface fail when Gloo starts, and the others wait for them."
        ),
        r"^TP.*interface has another name": (
            "On hosts without this interface, RPC listens on 127.0.0.1, which other hosts cannot reach."
        ),
        r"^UCX.*adapter has another name": "Ranks on hosts without this adapter use another transport, or fail.",
        r"adapter has another name": (
            "On hosts without this adapter, NCCL finds no RDMA device: it uses TCP sockets, or the job may hang at "
            "startup."
        ),
        r"must run on that host": (
            "If rank 0 runs on another host, no process listens at this address, and all ranks wait until the timeout."
        ),
        r"overrides the address": "Each host connects to itself, so a job on several hosts blocks until the timeout.",
    },
    cases=lambda: (
        fails("port and address of the tutorial, started by a launcher", _PORT_IN_ADDRESS),
        fails("an interface that other hosts need not have", _INTERFACE),
        fails("the loopback interface, whose ranks may be on several hosts", _LOOPBACK.replace("MASTER_ADDR", "ADDR")),
        passes("the loopback interface of ranks on one host", _LOOPBACK.replace("  # !", "")),
        fails("one host's address in the call", _HOST_ADDRESS),
        fails("a port of one's own for spawned ranks", _OWN_PORT),
        passes("only where nothing is given", _AS_DEFAULT),
        passes("a free port, an option, and interfaces left out", _FREE_PORT),
        passes("read, and kept from before", _KEPT),
        passes("put aside to show a check", _PUT_ASIDE),
        passes("the address of ranks that tell themselves which they are", _OF_RANKS),
        passes("one process that needs a group", _ONE_PROCESS),
        passes("a world of one rank", _WORLD_OF_ONE),
        passes("a group of one rank beside one of several", _GROUP_OF_ONE),
        passes("ranks that meet in a file", _IN_A_FILE),
        passes("ranks that meet by a URL, which is an option", _BY_OPTION),
        fails("an option that leaves it to the variables", _BY_OPTION_OF_VARIABLES),
        passes("a script without a process group", _NO_GROUP),
        passes("a context of another module joins, with its own port", _JOINED_ELSEWHERE),
        passes("one GPU is visible, so there is one rank", _ONE_GPU),
        passes("no valid port, which another rule reports", _OWN_PORT.replace("12355", "80000").replace("  # !", "")),
        passes("a unit test", _OWN_PORT + "\ndef test_sum(): pass\n", name="tests/test_sum.py"),
    ),
)
def address_fixed_in_script(script: Script) -> Iterator[Violation]:
    """Ask whether ports, addresses and interfaces come from the job and not from the script.

    Why it hurts: a second job on this host uses the same port and fails with "Address already in use", or its ranks
    connect to the store of the first job.
    Fix: Leave the variable to the launcher, or set it with `os.environ.setdefault(...)`.
    """
    if is_test(script):
        return
    writes = list(_writes(script))
    are_unread = _are_unread(script)
    given = _reads_ranks(script) and not any(write.name in _GIVEN for write in writes)
    starts = next(script.calls(*_STARTS), None) is not None
    commands = _commands_on_one_host(script)
    is_local = bool(commands) or _is_for_one_host(script)
    has_port = bool(commands) and all(map(_KEEPS_PORT.search, commands))
    for write in writes:
        if write.kept or _is_asked_before(script, write.at, write.name):
            continue
        if write.name in (_PORT, _ADDRESS) and (are_unread or _is_one_rank(script, write.at, writes)):
            continue
        if _is_loopback(write) and any(one.name == _ADDRESS and one.value in _HERE for one in writes):
            continue  # all ranks are on this host, and each host has the loopback interface
        if hit := _judge(write, given, starts):
            in_branch = script.nearest(write.at, ast.If) is not None
            fits = (is_local and write.name == _ADDRESS and write.value in _HERE) or (has_port and write.name == _PORT)
            yield replace(hit, severity=Severity.INFO) if in_branch or fits else hit
    for call in script.calls("torch.distributed.init_process_group"):
        yield from _of_method(script, call, starts)


_OF_SEVERAL_HOSTS = re.compile(
    r"\b(?:WORLD_SIZE|RANK|GROUP_RANK|NODE_RANK|NNODES)\b|SLURM_|OMPI_|PMI_|nnodes|num_nodes"
)


def _is_for_one_host(script: Script) -> bool:
    """Whether a script can only be the job of one host: its only rank is ``LOCAL_RANK``, and the number of ranks that
    each group gets is that of the host's GPUs."""
    if _OF_SEVERAL_HOSTS.search(script.text):
        return False
    groups = list(script.calls("torch.distributed.init_process_group"))
    sizes = [script.argument(one, "world_size") for one in groups]
    return bool(groups) and all(one is not None and _counts_gpus(script, one) for one in sizes)


_STARTS_HOSTS = re.compile(
    r"n?nodes[= ](?![\"']?1\b)|num_machines[= ](?![\"']?1\b)|SLURM|\bsrun\b|hostfile|mpirun|mpiexec|horovodrun|rdzv|"
    r"(?:node|machine)_rank[= ](?![\"']?0\b)|#SBATCH\s+-N",
    re.IGNORECASE,
)
_LAUNCHES = re.compile(r"torchrun|torch\.distributed|accelerate launch|deepspeed")


_KEEPS_PORT = re.compile(r"\bdeepspeed\b(?!.*(?:master_port|torchrun|accelerate launch))", re.DOTALL)
"""A start by DeepSpeed, which gives every job of a host the same port unless an option sets another one."""


def _commands_on_one_host(script: Script) -> list[str]:
    """The texts that start the script with a launcher: launch files, pages and notebooks of the project, and lines of
    a script that is for one host. None if one of them names further hosts: otherwise the launcher gives the same
    address."""
    name = script.path.rpartition("/")[2]
    lines = script.text.replace("\\\n", " ").splitlines() if _divides_by_local_rank(script) else []
    texts = [line for line in lines if _starts(name, line)]
    if script.modules is not None:
        texts += [text for _, text in script.modules.mentioning(name, launches=True)]
        texts += [text for text in script.modules.pages(script.location) if name in text] if script.location else []
        notebooks = script.modules.notebooks(name)
        texts += [line for text in notebooks for line in text.splitlines() if _starts(name, line)]
    return [] if any(map(_STARTS_HOSTS.search, texts)) else list(filter(_LAUNCHES.search, texts))


def _divides_by_local_rank(script: Script) -> bool:
    """Whether the ranks of one host share all data, so that the commands in the script say how it can run."""
    samplers = (call for call in script.all(ast.Call) if last_name(call.func) == "DistributedSampler")
    given = (script.argument(call, "rank", 2) for call in samplers)
    return any(one is not None and _is_local(script, one) for one in given)


def _is_local(script: Script, rank: ast.expr) -> bool:
    return any("LOCAL_RANK" in ast.unparse(one) for one in (*script.values_of(rank), *origins(script, rank)))


def _starts(name: str, line: str) -> bool:
    launcher, found, _ = line.partition(name)
    return bool(found) and _LAUNCHES.search(launcher) is not None


def _counts_gpus(script: Script, size: ast.expr) -> bool:
    found = (*script.values_of(size), *origins(script, size))
    made = [one for one in found if isinstance(one, ast.Call)]
    return bool(made) and all(last_name(one.func) == "device_count" for one in made)


def _are_unread(script: Script) -> bool:
    """Whether nothing here reads address and port: there is no process group, or each one is initialized by a file, a
    store or a URL, or the ranks of the job have one GPU, and are one."""
    groups = list(script.calls("torch.distributed.init_process_group"))
    if not groups:
        return not _starts_ranks(script)
    methods = [script.argument(call, "init_method", 1) for call in groups]
    return shows_one_gpu(script) or all(
        script.argument(call, "store") is not None
        or (method is not None and _text(script, method).startswith(("file://", "tcp://")))
        for call, method in zip(groups, methods, strict=True)
    )


def _starts_ranks(script: Script) -> bool:
    """Whether the file starts ranks, uses a library that joins a job, or calls a function of its project that does. A
    wrapped model alone shows a group that something else has started, which may set the port itself."""
    shown = several_ranks(script)
    if shown is not None and script.name(shown.func) not in (*WRAPPERS, SAMPLER):
        return True
    if next(script.calls(*_STARTS), None) is not None:
        return True
    called = (imported_function(script, call.func) for call in script.all(ast.Call))
    return any(
        one is not None and (one.function.starts_nccl or "init_process_group" in one.function.reached) for one in called
    )


def _text(script: Script, node: ast.expr) -> str:
    """The text of a string, or the beginning of a formatted one; of an option, its default."""
    if isinstance(node, ast.Attribute):
        node = _default_of(script, node.attr) or node
    first = node.values[0] if isinstance(node, ast.JoinedStr) and node.values else node
    return first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else ""


def _default_of(script: Script, option: str) -> ast.expr | None:
    """The default of ``parser.add_argument("--option", default=…)``."""
    for call in script.method_calls("add_argument"):
        names = [name for one in call.args if isinstance(name := script.value(one), str)]
        if option in [name.lstrip("-").replace("-", "_") for name in names]:
            return script.argument(call, "default")
    return None


def _is_one_rank(script: Script, at: ast.AST, writes: list[_Write]) -> bool:
    """Whether the same function makes it a job of one rank: ``os.environ["WORLD_SIZE"] = "1"``, or a group of one."""
    function = script.function_of(at)
    groups = script.calls("torch.distributed.init_process_group", "torch.distributed.rpc.init_rpc")
    sizes = [script.value(script.argument(one, "world_size")) for one in groups if script.function_of(one) is function]
    return (bool(sizes) and all(size == 1 for size in sizes)) or any(
        one.name == "WORLD_SIZE" and one.value == "1" and script.function_of(one.at) is function for one in writes
    )


def _reads_ranks(script: Script) -> bool:
    for one in script.all(ast.Subscript):
        if (
            isinstance(one.ctx, ast.Load)
            and script.name(one.value) == "os.environ"
            and script.value(one.slice) in _GIVEN
        ):
            return True
    asked = script.calls("os.environ.get", "os.getenv")
    return any(call.args and script.value(call.args[0]) in _GIVEN for call in asked)


class _Write(NamedTuple):
    """A write of a variable; ``value`` is empty if unknown. ``kept``: only if it is unset."""

    at: ast.AST
    name: str
    value: str
    kept: bool = False


def _writes(script: Script) -> Iterator[_Write]:
    for statement in script.all(ast.Assign):
        target = statement.targets[0]
        if isinstance(target, ast.Subscript) and script.name(target.value) == "os.environ":
            yield from _write(script, statement, target.slice, statement.value)
    for call in script.calls("os.environ.setdefault", "os.putenv"):
        if len(call.args) == 2:
            key, value = call.args
            yield from _write(script, call, key, value, kept="setdefault" in script.text_of(call.func))
    for call in script.calls("os.environ.update"):
        for one in call.args:
            for name, given in zip(one.keys, one.values, strict=True) if isinstance(one, ast.Dict) else ():
                if name is not None:
                    yield from _write(script, name, name, given)


def _write(script: Script, at: ast.AST, key: ast.expr, value: ast.expr, kept: bool = False) -> Iterator[_Write]:
    if isinstance(value, ast.Call) and script.text_of(value.func) == "str" and len(value.args) == 1:
        value = value.args[0]
    name, text = script.value(key), script.value(value)
    if isinstance(name, str):
        is_known = isinstance(text, (str, int)) and not isinstance(text, bool)
        yield _Write(at, name, str(text) if is_known else "", kept)


def _is_asked_before(script: Script, at: ast.AST, name: str) -> bool:
    """Whether it is written only if the job did not set it, or in a job of one process."""
    for outer in script.around(at):
        if isinstance(outer, (ast.If, ast.IfExp, ast.Try)):
            words = ast.unparse(outer.test) if not isinstance(outer, ast.Try) else "environ"
            if name in words or "environ" in words or "getenv" in words or "RANK" in words:
                return True
    return runs_alone(script, at) or _is_put_aside(script, at, name)


def _is_put_aside(script: Script, at: ast.AST, name: str) -> bool:
    """Whether the function takes the value of the job away before, to show or to test something."""
    taken = (*script.calls("os.environ.pop", "os.unsetenv"),)
    return any(
        call.args and script.value(call.args[0]) == name and script.function_of(call) is script.function_of(at)
        for call in taken
    )


def _is_loopback(write: _Write) -> bool:
    return write.name in _INTERFACES and write.value.strip().lstrip("=") == "lo"


def _judge(write: _Write, given: bool, starts: bool) -> Violation | None:
    if write.name in _INTERFACES:
        value = write.value.strip()
        if not value or value.startswith("^") or value == "all" or any(sign in value for sign in "*{"):
            return None
        what = "adapter" if "HCA" in write.name or "UCX" in write.name else "interface"
        do = "cannot use RDMA" if what == "adapter" else "cannot join"
        which = f"hosts whose {what} has another name {do}"
        return Violation(
            write.at,
            f'{write.name}="{value}" is hard-coded: '
            + ("ranks of several hosts cannot connect" if _is_loopback(write) else which),
            fix=f"Set {write.name} in the environment of the cluster instead.",
            severity=Severity.INFO,
            confidence=0.8,
            evidence=_in_a_run("NET018" if what == "adapter" else "NET007"),
        )
    if write.name == _PORT and write.value.isdigit() and 0 < int(write.value) < 65536:  # else ENV007
        return _of_port(write, given and not starts)
    if write.name == _ADDRESS and write.value and given and not starts:
        return Violation(
            write.at,
            f'MASTER_ADDR="{write.value}" in the script overrides the address set by the launcher',
            fix=f'Remove the assignment, or use `os.environ.setdefault("MASTER_ADDR", "{write.value}")`.',
            evidence=_in_a_run("NET005" if write.value in _HERE else "NET006"),
        )
    return None


def _of_port(write: _Write, given: bool) -> Violation:
    if given:
        return Violation(
            write.at,
            f"MASTER_PORT={write.value} in the script overrides the port set by the launcher",
            fix=f'Remove the assignment, or use `os.environ.setdefault("MASTER_PORT", "{write.value}")`.',
            evidence=_in_a_run("ENV008"),
        )
    return Violation(
        write.at,
        f"MASTER_PORT={write.value} is hard-coded: a second job on this host, or a leftover rank, may hold the port",
        fix="Before the ranks start, get a free port by binding a socket to port 0, and pass it with "
        '`os.environ.setdefault("MASTER_PORT", str(port))`.',
        severity=Severity.INFO,
        evidence=_in_a_run("ENV008"),
    )


def _in_a_run(check: str) -> tuple[tuple[str, object], ...]:
    """The check that reports this kind of value in a run, instead of those of all kinds."""
    return (("foreshadows", [check]),)


def _of_method(script: Script, call: ast.Call, starts: bool) -> Iterator[Violation]:
    method = script.argument(call, "init_method", 1)
    text = script.value(method) if method is not None else None
    found = _TCP.match(text) if isinstance(text, str) else None
    if found is None or found["port"] == "0" or script.value(script.argument(call, "world_size")) == 1:
        return
    if runs_alone(script, call):
        return
    here = found["host"] in _HERE
    yield Violation(
        call,
        f'init_method="{text}" is hard-coded: '
        + ("a second job on this host may hold the port" if here else "rank 0 must run on that host"),
        fix="Before the ranks start, get a free port by binding a socket to port 0, and pass them the URL with it."
        if here and starts
        else 'Use `init_method="env://"` (the default), with MASTER_ADDR and MASTER_PORT from torchrun.',
        severity=Severity.INFO if here else None,
        evidence=_in_a_run("ENV008" if here else "NET006"),
    )


_PORT_IN_ADDRESS = """\
local_rank = int(os.environ["LOCAL_RANK"])
os.environ["MASTER_ADDR"] = "localhost"  # !
os.environ["MASTER_PORT"] = "12355"  # !
dist.init_process_group("nccl")
"""
_INTERFACE = """\
os.environ["NCCL_SOCKET_IFNAME"] = "eth0"  # !
os.environ["GLOO_SOCKET_IFNAME"] = "ens5"  # !
os.environ["TP_SOCKET_IFNAME"] = "ens5"  # !
os.environ["UCX_NET_DEVICES"] = "mlx5_0:1"  # !
os.environ.update({"NCCL_IB_HCA": "mlx5_0"})  # !
dist.init_process_group("nccl")
"""
_LOOPBACK = """\
def worker(rank, size):
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = str(find_free_port())
    os.environ["NCCL_SOCKET_IFNAME"] = "lo"  # !
    dist.init_process_group("nccl", rank=rank, world_size=size)

mp.spawn(worker, args=(8,), nprocs=8)
"""
_HOST_ADDRESS = """\
import torch.distributed as dist

dist.init_process_group("nccl", init_method="tcp://10.1.1.20:23456", rank=args.rank, world_size=4)  # !
"""
_OWN_PORT = """\
import torch

def worker(rank, world_size):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "12355"  # !
    dist.init_process_group("nccl", rank=rank, world_size=world_size)

mp.spawn(worker, args=(8,), nprocs=8)
"""
_AS_DEFAULT = """\
os.environ.setdefault("MASTER_ADDR", "localhost")
os.environ.setdefault("MASTER_PORT", "29500")
os.environ.setdefault("NCCL_SOCKET_IFNAME", "ib0")
if "MASTER_PORT" not in os.environ:
    os.environ["MASTER_PORT"] = "29501"
if "LOCAL_RANK" not in os.environ:
    os.environ["MASTER_ADDR"] = "localhost"
dist.init_process_group("nccl")
"""
_FREE_PORT = """\
parser.add_argument("--dist-url", default="tcp://127.0.0.1:23456")
os.environ["MASTER_ADDR"] = args.master
os.environ["MASTER_PORT"] = str(find_free_port())
os.environ["NCCL_SOCKET_IFNAME"] = "^lo,docker0"
dist.init_process_group("nccl", init_method=args.dist_url)
"""
_KEPT = """\
port = os.environ["MASTER_PORT"]
os.environ["MASTER_PORT"] = os.environ.get("MASTER_PORT", "29500")
dist.init_process_group("nccl", init_method="env://")
"""
_OF_RANKS = """\
os.environ["RANK"] = os.environ["PMI_RANK"]
os.environ["WORLD_SIZE"] = os.environ["PMI_SIZE"]
os.environ["MASTER_ADDR"] = "127.0.0.1"
dist.init_process_group("gloo", rank=int(os.environ["RANK"]))
"""
_ONE_PROCESS = """\
if int(os.environ.get("WORLD_SIZE", 1)) == 1:
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "29500"
dist.init_process_group("gloo", rank=0, world_size=1, init_method="tcp://127.0.0.1:29501")
"""
_WORLD_OF_ONE = """\
def prepare():
    os.environ["RANK"] = "0"
    os.environ["WORLD_SIZE"] = "1"
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "29500"
"""
_GROUP_OF_ONE = """\
def try_sharding():
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "5679"
    torch.distributed.init_process_group("nccl", rank=0, world_size=1)

def train():
    torch.distributed.init_process_group("nccl")
"""
_IN_A_FILE = """\
def worker(rank, size, path):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "29500"
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=size)

mp.spawn(worker, args=(4, "/shared/meeting"), nprocs=4)
"""
_BY_OPTION = """\
parser.add_argument("--dist-url", default="tcp://127.0.0.1:23456", type=str)
os.environ["MASTER_ADDR"] = "localhost"
os.environ["MASTER_PORT"] = "28890"

def worker(rank, args):
    dist.init_process_group("nccl", init_method=args.dist_url, world_size=args.world_size, rank=rank)

mp.spawn(worker, args=(parser.parse_args(),), nprocs=8)
"""
_BY_OPTION_OF_VARIABLES: str = _BY_OPTION.replace("tcp://127.0.0.1:23456", "env://").replace('"28890"', '"28890"  # !')
_NO_GROUP = """\
from model import build, load_weights

os.environ["MASTER_ADDR"] = "localhost"
os.environ["MASTER_PORT"] = "28890"
model = load_weights(build()).cuda()
for scan in scans:
    write(model(scan))
"""
_JOINED_ELSEWHERE = """\
from engine import Engine

os.environ["MASTER_PORT"] = "29611"
with Engine(parser) as engine:
    model = DDP(build().cuda())
    train(engine, model)
"""
_ONE_GPU = """\
local_rank = int(os.environ["LOCAL_RANK"])
os.environ["CUDA_VISIBLE_DEVICES"] = "0"
os.environ["MASTER_ADDR"] = "localhost"
os.environ["MASTER_PORT"] = "28890"
dist.init_process_group("nccl")
"""
_PUT_ASIDE = """\
def show_check():
    own = os.environ.pop("NCCL_SOCKET_IFNAME", None)
    check_settings()
    os.environ["NCCL_SOCKET_IFNAME"] = "ib0"
    check_settings()
    os.environ["NCCL_SOCKET_IFNAME"] = own or ""
"""
