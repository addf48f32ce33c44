"""How the programs that start ranks read their command lines: which options have a value, and where options end.

Sources: torch/distributed/run.py, accelerate/commands/launch.py, deepspeed/launcher/runner.py, lightning/fabric/cli.py,
https://slurm.schedmd.com/srun.html, https://docs.open-mpi.org/en/main/man-openmpi/man1/mpirun.1.html.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from doctor.lint.launch.partial_text import is_all_unknown


class CommandWord(NamedTuple):
    """A word of a command, and the line on which it begins."""

    text: str
    line: int


@dataclass(frozen=True)
class OptionSyntax:
    """``flags``: long names, with dashes, of options without a value; ``short``: letters to long names."""

    flags: frozenset[str]
    short: Mapping[str, str] = field(default_factory=dict)


class ParsedOptions(NamedTuple):
    """``end``: where the options end; ``is_open``: among them are words that can't be told."""

    options: dict[str, str]
    end: int
    is_open: bool


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


TORCHRUN = OptionSyntax(
    _words("standalone no-python module run-path use-env virtual-local-rank help"), {"m": "module", "r": "redirects"}
)
ACCELERATE = OptionSyntax(
    _words(
        "quiet cpu multi-gpu tpu use-deepspeed use-fsdp use-megatron-lm use-parallelism-config enable-cpu-affinity "
        "dynamo-use-fullgraph dynamo-use-dynamic dynamo-use-regional-compilation same-network module no-python "
        "tpu-cluster no-tpu-cluster tpu-use-sudo downcast-bf16 fp8-use-autocast-during-eval debug use-mps-device ipex "
        "use-xpu mps help"
    ),
    {"m": "module", "q": "quiet", "t": "tee"},
)
DEEPSPEED = OptionSyntax(
    _words(
        "no-python no-local-rank module no-ssh-check no-ssh force-multi save-pid elastic-training bind-cores-to-rank "
        "help"
    ),
    {"H": "hostfile", "i": "include", "e": "exclude"},
)
FABRIC = OptionSyntax(_words("help"))
SLURM = OptionSyntax(
    _words(
        "overlap exclusive kill-on-bad-exit label unbuffered pty verbose quiet overcommit oversubscribe no-kill "
        "no-container-mount-home container-mount-home container-remap-root no-container-remap-root container-writable "
        "container-readonly no-container-entrypoint container-entrypoint disable-status multi-prog preserve-env "
        "test-only contiguous hold reboot spread-job use-min-nodes propagate no-requeue requeue parsable "
        "wait-all-nodes no-allocate help version mem-per-gpu-bind"
    ),
    {
        "A": "account",
        "a": "array",
        "b": "begin",
        "B": "extra-node-info",
        "C": "constraint",
        "c": "cpus-per-task",
        "d": "dependency",
        "D": "chdir",
        "E": "preserve-env",
        "e": "error",
        "G": "gpus",
        "H": "hold",
        "i": "input",
        "J": "job-name",
        "K": "kill-on-bad-exit",
        "k": "no-kill",
        "l": "label",
        "L": "licenses",
        "M": "clusters",
        "m": "distribution",
        "N": "nodes",
        "n": "ntasks",
        "O": "overcommit",
        "o": "output",
        "p": "partition",
        "Q": "quiet",
        "q": "qos",
        "r": "relative",
        "s": "oversubscribe",
        "S": "core-spec",
        "T": "threads",
        "t": "time",
        "u": "unbuffered",
        "v": "verbose",
        "W": "wait",
        "w": "nodelist",
        "X": "disable-status",
        "x": "exclude",
    },
)
MPIRUN = OptionSyntax(
    _words(
        "allow-run-as-root oversubscribe report-bindings tag-output display-map display-allocation nooversubscribe "
        "merge-stderr-to-stdout verbose quiet genvall timestamp-output help"
    ),
    {
        "n": "np",
        "c": "np",
        "np": "np",
        "x": "x",
        "H": "host",
        "N": "npernode",
        "npernode": "npernode",
        "ppn": "npernode",
        "hostfile": "hostfile",
        "host": "host",
        "mca": "mca",
    },
)
AGENTS = ("torchrun", "accelerate", "deepspeed", "fabric", "llamafactory")
"""Launchers that start the ranks of one host."""
ALIASES = {"nproc": "nproc-per-node", "nnode": "nnodes", "n-tasks": "ntasks", "machinefile": "hostfile"}
"""Older and other spellings of one option."""
WRAPPERS = _words(
    "nohup time exec sudo stdbuf nice ionice taskset numactl timeout env command setsid unbuffer singularity apptainer "
    "enroot shifter podman-hpc conda mamba micromamba uv poetry pipenv pixi pdm hatch run nsys ncu dlprof coverage "
    "xvfb-run"
)
"""Programs that run what follows, here, on the same host."""
OTHERS = _words(
    "ray horovodrun composer colossalai jsrun aprun flux prun charmrun clush ibrun blaunch mpiexec.hydra mpirun_rsh "
    "make parallel xargs ssh pdsh sbatch docker podman kubectl sky wandb dask optuna snakemake nextflow submitit dora "
    "swift xtuner deepy.py"
)
"""Programs that may start ranks in ways that are not followed."""
MODULES = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "accelerate.commands.launch": "accelerate",
    "deepspeed.launcher.runner": "deepspeed",
    "deepspeed": "deepspeed",
}


def parse_options(fields: Sequence[CommandWord], syntax: OptionSyntax) -> ParsedOptions:
    """The options at the beginning of ``fields``, up to the program or script; ``--`` ends them."""
    options: dict[str, str] = {}
    at, is_open = 0, False
    while at < len(fields):
        text = fields[at].text
        if text == "--":
            return ParsedOptions(options, at + 1, is_open)
        if is_all_unknown(text):
            at, is_open = at + 1, True
            continue
        if not text.startswith("-") or text == "-":
            break
        name, value = _split(text, syntax)
        at += 1
        if value is None and not _is_flag(name, syntax) and at < len(fields) and _may_be_value(fields[at].text):
            value = fields[at].text
            at += 1
        _add(options, name, "true" if value is None else value)
    return ParsedOptions(options, at, is_open)


def _split(text: str, syntax: OptionSyntax) -> tuple[str, str | None]:
    """``--name=value``, ``--name``, ``-n4``, ``-n``: the long name and what stands behind it in the same word."""
    if text.startswith("--"):
        name, equals, value = text[2:].partition("=")
        name = name.replace("_", "-")
        return ALIASES.get(name, name), value if equals else None
    body, equals, value = text[1:].partition("=")
    if body in syntax.short:
        return syntax.short[body], value if equals else None
    letter = syntax.short.get(text[1])
    if letter is None or _is_flag(letter, syntax):
        return (letter or body.replace("_", "-")), None
    return letter, text[2:].removeprefix("=")


def _is_flag(name: str, syntax: OptionSyntax) -> bool:
    return name in syntax.flags


def _may_be_value(text: str) -> bool:
    return not text.startswith("-") or bool(re.fullmatch(r"-\d+", text))


def _add(options: dict[str, str], name: str, value: str) -> None:
    """Variables (``mpirun -x A=1 -x B=2``) are many, of all others the last one counts."""
    options[name] = f"{options[name]}\n{value}" if name == "x" and name in options else value
