"""The resources that a batch script requests from SLURM, and those of a step (srun)."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

from doctor.core.text import lazy_compile
from doctor.knowledge.launchers import SLURM_OPTIONS
from doctor.lint.launch.launch_file import Launch
from doctor.lint.launch.launcher_options import CommandWord, parse_options
from doctor.lint.launch.partial_text import is_known, unknown_mark, whole_number
from doctor.lint.launch.shell.lexer import comments

_HEADER = lazy_compile(r"#SBATCH(?=\s|-)\s*(.*)")
_GRES = lazy_compile(r"(?:gres[/:])?gpu(?::(?P<type>[A-Za-z][\w.-]*))?(?:[:=](?P<count>\d+))?(?:\([^)]*\))?")
_COUNT = lazy_compile(r"(?:[A-Za-z][\w.-]{0,60}:)?(?P<count>\d{1,9})")


@dataclass(frozen=True)
class Allocation:
    """Options by long name, and their lines. Numbers are ``None`` if unknown."""

    options: Mapping[str, str] = field(default_factory=dict)
    lines: Mapping[str, int] = field(default_factory=dict)

    def line(self, *names: str) -> int | None:
        """The line of the first of these options."""
        return next((self.lines[name] for name in names if name in self.lines), None)

    def number(self, name: str) -> int | None:
        """An option that is a whole number."""
        return whole_number(self.options.get(name))

    @property
    def nodes(self) -> int | None:
        """The number of hosts, by default one."""
        given = self.options.get("nodes")
        if given is not None:
            least, dash, most = given.partition("-")
            return whole_number(least) if not dash or least == most else None
        several = self.options.get("ntasks", "1") != "1" or "nodelist" in self.options
        return None if several else 1

    @property
    def tasks(self) -> int | None:
        """Tasks of the whole job or step."""
        if "ntasks" in self.options:
            return self.number("ntasks")
        each, nodes = self.tasks_per_node, self.nodes
        return each * nodes if each is not None and nodes is not None else None

    @property
    def tasks_per_node(self) -> int | None:
        """Tasks of each host; --ntasks may be distributed in any way unless it divides evenly."""
        each = self.number("ntasks-per-node")
        if "ntasks" not in self.options:
            if {"ntasks-per-gpu", "ntasks-per-socket", "ntasks-per-core"} & self.options.keys():
                return None
            return each if "ntasks-per-node" in self.options else 1
        tasks, nodes = self.number("ntasks"), self.nodes
        if tasks is None or not nodes or tasks % nodes:
            return None
        return tasks // nodes if each in (None, tasks // nodes) else None

    @property
    def gpus_per_node(self) -> int | None:
        """GPUs of each host."""
        if "gpus-per-node" in self.options:
            return gpus_of(self.options["gpus-per-node"])
        if (by_gres := gres_of(self.options.get("gres", ""))) is not None:
            return by_gres
        nodes, tasks = self.nodes, self.tasks_per_node
        gpus = gpus_of(self.options["gpus"]) if "gpus" in self.options else None
        if gpus is not None and nodes and gpus % nodes == 0:
            return gpus // nodes
        each = self.gpus_per_task
        return each * tasks if each is not None and tasks is not None and "gpus" not in self.options else None

    @property
    def gpus_per_task(self) -> int | None:
        """GPUs of each task, if requested this way."""
        return gpus_of(self.options["gpus-per-task"]) if "gpus-per-task" in self.options else None

    @property
    def asks_for_gpus(self) -> bool:
        """Whether it requests GPUs in any way."""
        by_option = {"gpus", "gpus-per-node", "gpus-per-task"} & self.options.keys()
        return bool(by_option or gres_of(self.options.get("gres", "")))

    @property
    def splits_gpus(self) -> bool:
        """Whether each task sees only its own GPUs: --gpus-per-task implies --gpu-bind=per_task unless --gpu-bind=none
        (srun(1))."""
        bind = self.options.get("gpu-bind", "").removeprefix("verbose,").removeprefix("v,")
        if not is_known(bind) or bind.startswith("none"):
            return False
        return bool(bind) or "gpus-per-task" in self.options

    @property
    def shares_gpus(self) -> bool:
        """Whether several tasks are told to use one GPU: --gpu-bind=single:<tasks>, --ntasks-per-gpu, or parts of a GPU
        as generic resources (srun(1), gres.conf(5))."""
        bound = re.search(r"single:(\d+)", self.options.get("gpu-bind", ""))
        tasks = max(int(bound[1]) if bound else 0, self.number("ntasks-per-gpu") or 0)
        return tasks > 1 or re.search(r"\b(?:mps|shard)\b", self.options.get("gres", "")) is not None

    @property
    def runs_beside_itself(self) -> bool:
        """Whether several jobs of an array may run concurrently; ``%1`` prevents it."""
        array = self.options.get("array")
        if array is None or array.endswith("%1"):
            return False
        return not re.fullmatch(r"\d+(-0)?", array)

    def step(self, launch: Launch) -> Allocation:
        """The allocation of a step that ``srun`` starts. Options of the job that the step overrides become unknown."""
        given = dict(launch.options)
        own = {name: value for name, value in self.options.items() if name not in given}
        if "ntasks" in given:
            own.pop("ntasks-per-node", None)
            if given["ntasks"] == "1":
                given.setdefault("nodes", "1")
        elif given.get("nodes", self.options.get("nodes")) != self.options.get("nodes"):
            own["ntasks"] = unknown_mark("SLURM_NTASKS")
        elif given.get("ntasks-per-node", self.options.get("ntasks-per-node")) != self.options.get("ntasks-per-node"):
            if self.tasks != self.nodes:
                own["ntasks"] = unknown_mark("SLURM_NTASKS")
        if launch.is_open:
            overridden = [name for name in ("ntasks", "nodes", "ntasks-per-node") if name not in given]
            own.update({name: unknown_mark(name) for name in overridden})
        if "gpus-per-node" in given or "gres" in given:
            own = {name: value for name, value in own.items() if name not in ("gpus-per-node", "gres", "gpus")}
        return Allocation({**own, **given}, self.lines)

    def variables(self) -> dict[str, str]:
        """The variables that SLURM sets for the batch script (sbatch(1), OUTPUT ENVIRONMENT VARIABLES)."""
        tasks = self.tasks if {"ntasks", "ntasks-per-node"} & self.options.keys() else None
        numbers = {
            "SLURM_NNODES": self.nodes,
            "SLURM_JOB_NUM_NODES": self.nodes,
            "SLURM_NTASKS": tasks,
            "SLURM_NPROCS": tasks,
            "SLURM_NTASKS_PER_NODE": self.number("ntasks-per-node"),
            "SLURM_CPUS_PER_TASK": self.number("cpus-per-task"),
            "SLURM_GPUS_ON_NODE": self.gpus_per_node if self.asks_for_gpus else None,
            "SLURM_GPUS_PER_NODE": self.number("gpus-per-node"),
            "SLURM_GPUS": self.number("gpus"),
            "SLURM_GPUS_PER_TASK": self.number("gpus-per-task"),
        }
        return {name: str(number) for name, number in numbers.items() if number is not None}


def gpus_of(text: str, pattern: re.Pattern[str] = _COUNT) -> int | None:
    """GPUs in ``4`` and ``a100:4`` (--gpus and the like), summed; ``None`` if unknown."""
    matches = [match for entry in text.split(",") if (match := pattern.fullmatch(entry))]
    return sum(int(match["count"] or 1) for match in matches) if matches and is_known(text) else None


def gres_of(text: str) -> int | None:
    """GPUs in ``gpu:a100:4``, ``gpu:4`` and ``gpu`` (--gres), without other resources."""
    return gpus_of(text, _GRES)


def read_headers(text: str) -> Allocation | None:
    """The ``#SBATCH`` lines of a script, up to its first command, as sbatch reads them; ``None`` if it has none."""
    options: dict[str, str] = {}
    lines: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if stripped and not stripped.startswith("#"):
            break
        if match := _HEADER.match(line):
            words = _words(match[1])
            if words[:1] in (["hetjob"], ["packjob"]):
                return Allocation({name: unknown_mark(name) for name in ("nodes", "ntasks")}, lines)
            found = parse_options([CommandWord(word, number) for word in words], SLURM_OPTIONS).options
            options.update(found)
            lines.update(dict.fromkeys(found, number))
    return Allocation(options, lines) if lines else None


def read_late_headers(text: str) -> dict[int, dict[str, str]]:
    """``#SBATCH`` lines behind the first command, which sbatch ignores, and their options with the values."""
    begin = next((at for at, line in enumerate(text.splitlines(), 1) if line.strip() and line.lstrip()[0] != "#"), None)
    if begin is None or "#SBATCH" not in text:
        return {}
    found = ((line, match) for line, comment in comments(text) if line > begin and (match := _HEADER.match(comment)))
    fields = {line: [CommandWord(word, line) for word in _words(match[1])] for line, match in found}
    return {line: dict(parse_options(words, SLURM_OPTIONS).options) for line, words in fields.items()}


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text, comments=True)
    except ValueError:
        return text.split("#")[0].split()
