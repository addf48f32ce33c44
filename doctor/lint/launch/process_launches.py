"""Counts what a launch file starts: agents (one torchrun on each host), their processes, and hosts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from doctor.knowledge.launcher_index import STEP
from doctor.lint.launch.launch_file import Launch, LaunchFile
from doctor.lint.launch.partial_text import is_known, whole_number
from doctor.lint.launch.shell.reader import ShellFile
from doctor.lint.launch.slurm_batch import Allocation


class ProcessLaunch(NamedTuple):
    """One command that starts ranks, or a single program. ``outer``: the srun or mpirun around it; ``launch``: the
    launcher of a host's ranks, or the program itself; ``step``: the allocation of srun's step."""

    launch: Launch
    outer: Launch | None = None
    step: Allocation | None = None

    @property
    def is_agent(self) -> bool:
        """Whether it starts the ranks of its host."""
        return self.launch.is_agent

    @property
    def is_part(self) -> bool:
        """Whether other steps may belong to the same job: one for each host, in a loop or the background."""
        is_placed = self.outer is not None and self.outer.option(*self.outer.command.parts) is not None
        return is_placed or self.launch.in_loop or self.launch.in_background


def starts_of(file: LaunchFile) -> Iterator[ProcessLaunch]:
    """Commands that start ranks or may be one, in the order of the text."""
    job = file.allocation if isinstance(file, ShellFile) else None
    for first in file.launches:
        chain = list(first.chain())
        last = next((one for one in chain if one.is_agent), chain[-1])
        outer = next((one for one in chain if one.starts_tasks), None)
        srun = next((one for one in chain if one.program == STEP.title), None)
        step = (job or Allocation()).step(srun) if srun is not None else None
        yield ProcessLaunch(last, outer if outer is not last else None, step)


def option_of(launch: Launch, *names: str) -> str | None:
    """The first of these options that is given, or the variable that the launcher reads instead; it may hold marks."""
    given = launch.option(*names)
    if given is not None or launch.command.variable_prefix is None:
        return given
    settings = (launch.settings.get(_variable(launch, name)) for name in names)
    return next((one.value for one in settings if one is not None), None)


def option_name(launch: Launch, name: str) -> str:
    """How a user writes an option of this launcher: ``--node-rank``; as a variable, if it has no options."""
    return f"--{name}" if launch.command.options is not None else _variable(launch, name)


def _variable(launch: Launch, name: str) -> str:
    """torch/distributed/argparse_util.py: PET_NODE_RANK is --node-rank."""
    return f"{launch.command.variable_prefix}{name.replace('-', '_').upper()}"


def processes_of(launch: Launch) -> int | None:
    """Ranks that one agent starts on its host; ``None`` if unknown."""
    command = launch.command
    if command.all_processes:
        ranks, hosts = whole_number(option_of(launch, command.all_processes)), hosts_of(launch)
        return ranks // hosts if ranks and hosts and ranks % hosts == 0 else None
    given = option_of(launch, *command.processes)
    if given is None and command.included:
        # Devices in "localhost:0,1,3"; entries of several hosts are not counted.
        match = re.fullmatch(r"[\w.-]+:(\d+(?:,\d+)*)", launch.known_option(command.included) or "")
        return match[1].count(",") + 1 if match else None
    if given is None:
        return None if launch.is_open else command.default_processes
    return whole_number(given)


def says_processes(launch: Launch) -> bool:
    """Whether an option or a variable of the launcher says how many ranks there are."""
    names = filter(None, (*launch.command.processes, launch.command.all_processes))
    return option_of(launch, *names) is not None


def hosts_of(launch: Launch) -> int | None:
    """Hosts that the agents wait for; ``None`` if unknown, as with an elastic range."""
    if launch.option(launch.command.standalone):
        return 1
    given = option_of(launch, launch.command.hosts)
    if given is None:
        return None if launch.is_open else launch.command.default_hosts
    least, colon, most = given.partition(":")
    return whole_number(least) if not colon or least == most else None


def rank_of_host(launch: Launch) -> str | None:
    """The node rank that it is given; it may hold marks; ``None`` if there is none."""
    return option_of(launch, launch.command.node_rank)


def uses_node_rank(launch: Launch) -> bool:
    """Whether hosts take the node ranks that they are given, and not those that a rendezvous assigns."""
    backend = option_of(launch, launch.command.rendezvous) or "static"
    return launch.is_agent and backend == "static" and not launch.option(launch.command.standalone)


def endpoint_of(launch: Launch) -> str | None:
    """The host at which it looks for the master; ``None`` if it is given none."""
    given = option_of(launch, launch.command.host_port)
    if given is None:
        return option_of(launch, launch.command.master)
    return re.sub(r":\d*$", "", given) if is_known(given) else given


def trainer_option(launch: Launch, name: str) -> str | None:
    """A known ``trainer.devices`` or the like, as written for LightningCLI or Hydra."""
    for at, word in enumerate(launch.arguments):
        key, equals, value = word.lstrip("-+").partition("=")
        if key != f"trainer.{name}":
            continue
        if not equals:
            value = launch.arguments[at + 1] if at + 1 < len(launch.arguments) else ""
        return value if value and is_known(value) else None
    return None


def file_spans_hosts(file: LaunchFile) -> bool:
    """Whether something in the file runs on several hosts at once."""
    return any(
        (hosts_of(start.launch) or 1) > 1 or (start.step is not None and (start.step.nodes or 1) > 1)
        for start in starts_of(file)
    )


def is_one_process(file: LaunchFile) -> bool:
    """Whether all that a file starts are launchers which are told to start one process on one host."""
    starts = list(starts_of(file))
    return bool(starts) and all(start.outer is None and _is_told_one(start.launch) for start in starts)


_RANKS = frozenset({"RANK", "WORLD_SIZE", "LOCAL_RANK"})
_LAUNCHERS = re.compile(
    r"torchrun|\bsrun\b|mpirun|mpiexec|distributed\.(?:launch|run)\b|accelerate|deepspeed|horovodrun"
)


def joins_no_group(file: LaunchFile) -> bool:
    """Whether all that a shell script starts are programs by plain ``python`` that mention no ranks, or join a group
    only with the variables of a launcher, which neither the script nor another file that names it gives."""
    modules = file.modules
    if not isinstance(file, ShellFile) or modules is None or not file.launches:
        return False
    if any(one.name in _RANKS for one in file.settings):
        return False
    programs = [one for first in file.launches for one in first.chain()]
    if any(one.program != "python" for one in programs):
        return False
    if not all(modules.waits_for_launcher(one.script) or modules.runs_alone(one.script) for one in programs):
        return False
    name = file.path.replace("\\", "/").rpartition("/")[2]
    texts = (text for shown, text in modules.mentioning(name) if shown != file.path)
    return not any(map(_LAUNCHERS.search, texts))


def _is_told_one(launch: Launch) -> bool:
    is_told = says_processes(launch) or launch.option(launch.command.included or "") is not None
    on_one_host = option_of(launch, launch.command.hosts) is None or hosts_of(launch) == 1
    return launch.is_agent and is_told and processes_of(launch) == 1 and on_one_host


def visible_devices(launch: Launch) -> tuple[str, int] | None:
    """CUDA_VISIBLE_DEVICES of this program and its number of devices; ``None`` if unset or unknown."""
    listed = launch.setting("CUDA_VISIBLE_DEVICES")
    if listed is None or not re.fullmatch(r"[\w-]+(,[\w-]+)*,?", listed.strip()) or listed.startswith("-"):
        return None
    return listed, len([entry for entry in listed.split(",") if entry])


def port_of(launch: Launch) -> str | None:
    """The port that it fixes for its master; ``None`` if that is unknown or any free one."""
    if launch.option(launch.command.standalone):
        return None
    endpoint = launch.known_option(launch.command.host_port)
    if endpoint is not None:
        host, _, port = endpoint.rpartition(":")
        return port if host and port.isdigit() and port != "0" else None
    given = option_of(launch, launch.command.port) if launch.is_agent else launch.setting("MASTER_PORT")
    return given if given is not None and given.isdigit() and given != "0" else None
