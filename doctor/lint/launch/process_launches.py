"""What a launch file starts, in numbers: agents (one torchrun on each host), the processes of each, and the hosts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from doctor.lint.launch.launch_file import Launch, LaunchFile
from doctor.lint.launch.launcher_options import AGENTS
from doctor.lint.launch.partial_text import is_known, whole_number
from doctor.lint.launch.shell.reader import ShellFile
from doctor.lint.launch.slurm_batch import Allocation

LOOPBACK = re.compile(r"localhost|127(\.\d+){3}|::1|\[::1\]")


@dataclass(frozen=True)
class ProcessLaunch:
    """One command that starts ranks, or a lone program. ``outer``: srun or mpirun, where one of them starts it;
    ``launch``: the launcher of a host's ranks, or the program itself; ``step``: what srun gives, if it does."""

    launch: Launch
    outer: Launch | None = None
    step: Allocation | None = None

    @property
    def is_agent(self) -> bool:
        """Whether it starts the ranks of its host."""
        return self.launch.program in AGENTS

    @property
    def is_part(self) -> bool:
        """Whether other steps beside it may belong to the same job: one for each host, in a loop or the background."""
        given = self.outer.options.keys() if self.outer is not None else ()
        placed = any(name in given for name in ("nodelist", "relative", "multi-prog", "het-group"))
        return placed or self.launch.in_loop or self.launch.in_background


def starts_of(file: LaunchFile) -> Iterator[ProcessLaunch]:
    """What starts ranks, or may be a rank, in the order of the text."""
    job = file.allocation if isinstance(file, ShellFile) else None
    for first in file.launches:
        chain = list(first.chain())
        last = next((one for one in chain if one.program in AGENTS), chain[-1])
        outer = next((one for one in chain if one.program in ("srun", "mpirun")), None)
        srun = next((one for one in chain if one.program == "srun"), None)
        step = (job or Allocation()).step(srun) if srun is not None else None
        yield ProcessLaunch(last, outer if outer is not last else None, step)


def option_of(launch: Launch, *names: str) -> str | None:
    """An option of torchrun, which ``PET_`` and its name stand for too (torch/distributed/argparse_util.py)."""
    given = launch.option(*names)
    if given is not None:
        return given
    settings = (launch.settings.get(f"PET_{name.replace('-', '_').upper()}") for name in names)
    return next((one.value for one in settings if one is not None), None)


def processes_of(launch: Launch) -> int | None:
    """Ranks that one agent starts on its host; ``None`` where it can't be told."""
    if launch.program == "torchrun":
        given = option_of(launch, "nproc-per-node")
        return whole_number(given) if given is not None else None if launch.is_open else 1
    if launch.program == "accelerate":
        ranks, hosts = launch.number("num-processes"), hosts_of(launch)
        return ranks // hosts if ranks and hosts and ranks % hosts == 0 else None
    if launch.program == "deepspeed":
        return launch.number("num-gpus", "num-accelerators") or _included(launch.told("include"))
    if launch.program == "fabric":
        return launch.number("devices")
    if launch.program == "llamafactory":
        return whole_number(launch.setting("NPROC_PER_NODE"))
    return 1


def _included(text: str | None) -> int | None:
    """Devices in ``localhost:0,1,3``; of several hosts nothing is told."""
    match = re.fullmatch(r"[\w.-]+:(\d+(?:,\d+)*)", text or "")
    return match[1].count(",") + 1 if match else None


def hosts_of(launch: Launch) -> int | None:
    """Hosts that the agents wait for; ``None`` where it can't be told, as with an elastic range."""
    if launch.program == "torchrun":
        if launch.option("standalone"):
            return 1
        given = option_of(launch, "nnodes")
        if given is None:
            return None if launch.is_open else 1
        least, colon, most = given.partition(":")
        return whole_number(least) if not colon or least == most else None
    if launch.program == "accelerate":
        return launch.number("num-machines")  # else that of a configuration, which may be anywhere
    if launch.program == "deepspeed":
        return launch.number("num-nodes")
    if launch.program == "fabric":
        return launch.number("num-nodes", "num_nodes") or 1
    if launch.program == "llamafactory":
        return whole_number(launch.setting("NNODES"))
    return None


def rank_of_host(launch: Launch) -> str | None:
    """What it says the number of its own host is; it may hold marks; ``None`` where it says nothing."""
    if launch.program == "accelerate":
        return launch.option("machine-rank")
    if launch.program == "llamafactory":
        setting = launch.settings.get("NODE_RANK")
        return setting.value if setting is not None else None
    return option_of(launch, "node-rank")


def is_static(launch: Launch) -> bool:
    """Whether torchrun goes by --node-rank and --master-addr, and not by a rendezvous that gives out numbers."""
    backend = option_of(launch, "rdzv-backend") or "static"
    return launch.program == "torchrun" and backend == "static" and not launch.option("standalone")


def endpoint_of(launch: Launch) -> tuple[str, str] | None:
    """The option and the host at which it looks for the master; ``None`` where it says none."""
    names = {
        "torchrun": ("rdzv-endpoint", "master-addr"),
        "accelerate": ("main-process-ip",),
        "deepspeed": ("master-addr",),
        "fabric": ("main-address",),
    }
    for name in names.get(launch.program, ()):
        given = option_of(launch, name)
        if given is not None:
            host = re.sub(r":\d*$", "", given) if name == "rdzv-endpoint" and is_known(given) else given
            return name, host
    return None


def trainer_option(launch: Launch, name: str) -> str | None:
    """``trainer.devices`` and so on, as Lightning's own command line and Hydra write it, if it is told."""
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
    for start in starts_of(file):
        if (hosts_of(start.launch) or 1) > 1 or (start.step is not None and (start.step.nodes or 1) > 1):
            return True
    return False


def is_loopback_name(host: str) -> bool:
    """Whether a host's name or address leads to whoever asks."""
    return bool(LOOPBACK.fullmatch(host.strip()))


def visible_devices(launch: Launch) -> tuple[str, int] | None:
    """CUDA_VISIBLE_DEVICES as the file sets it for this program, and how many it names; ``None``: not, or not told."""
    listed = launch.setting("CUDA_VISIBLE_DEVICES")
    if listed is None or not re.fullmatch(r"[\w-]+(,[\w-]+)*,?", listed.strip()) or listed.startswith("-"):
        return None
    return listed, len([entry for entry in listed.split(",") if entry])


def port_of(launch: Launch) -> str | None:
    """The port that it fixes for its master, where it is told; ``None`` where it is free to be another."""
    if launch.option("standalone"):
        return None
    endpoint = launch.told("rdzv-endpoint")
    if endpoint is not None:
        host, _, port = endpoint.rpartition(":")
        return port if host and port.isdigit() and port != "0" else None
    given = launch.option("master-port", "main-process-port", "main-port")
    if given is None and launch.program not in ("torchrun", "accelerate", "deepspeed", "fabric"):
        given = launch.setting("MASTER_PORT")
    return given if given is not None and given.isdigit() and given != "0" else None
