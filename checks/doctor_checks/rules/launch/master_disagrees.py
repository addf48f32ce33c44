"""ENV006 in launch files: ranks use different master addresses or ports."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.api import LaunchFile, Violation, rule
from doctor.knowledge.interface_syntax import is_loopback_name
from doctor.lint.launch.launch_file import Launch
from doctor.lint.launch.partial_text import IN_STEP, is_known, names_in, shown
from doctor.lint.launch.process_launches import (
    endpoint_of,
    hosts_of,
    port_of,
    rank_of_host,
    starts_of,
)
from doctor.testing.script_cases import shell_fails, shell_passes
from doctor_checks.launch.master_disagrees import master_disagrees

_OLD = "python -m torch.distributed.launch --nproc_per_node=8 --nnodes=2"


@rule(
    check=master_disagrees,
    reads=LaunchFile,
    cases=lambda: (
        shell_fails(
            "each host is told itself",
            "# node 1",
            f'{_OLD} --node_rank=0 --master_addr="192.168.1.3" --master_port=12581 train.py > 1.log 2>&1 &',
            "# node 2",
            f'{_OLD} --node_rank=1 --master_addr="192.168.1.2" --master_port=12581 train.py > 2.log 2>&1 &  # !',
        ),
        shell_fails(
            "another port on the second host",
            f"{_OLD} --node_rank=0 --master_addr=10.0.0.1 --master_port=29500 train.py",
            f"{_OLD} --node_rank=1 --master_addr=10.0.0.1 --master_port=29501 train.py  # !",
        ),
        shell_fails(
            "accelerate",
            "accelerate launch --num_machines 2 --num_processes 16 --machine_rank 0 --main_process_ip a x.py",
            "accelerate launch --num_machines 2 --num_processes 16 --machine_rank 1 --main_process_ip b x.py  # !",
        ),
        shell_fails(
            "each host of a step is told itself",
            "#SBATCH --nodes=4",
            "srun bash -c 'torchrun --nnodes=4 --rdzv-backend=c10d --rdzv-endpoint=$(hostname):29500 x.py'  # !",
        ),
        shell_passes(
            "the batch script is told the first host",
            "#SBATCH --nodes=4",
            'srun bash -c "torchrun --nnodes=4 --rdzv-backend=c10d --rdzv-endpoint=$(hostname):29500 x.py"',
        ),
        shell_passes(
            "a job of its own on each host",
            "#SBATCH --nodes=4",
            "srun bash -c 'torchrun --nnodes=1 --rdzv-endpoint=$(hostname):29500 x.py'",
        ),
        shell_passes(
            "both are told the first",
            f"{_OLD} --node_rank=0 --master_addr=10.0.0.1 --master_port=29500 train.py",
            f"{_OLD} --node_rank=1 --master_addr=10.0.0.1 --master_port=29500 train.py",
        ),
        shell_passes(
            "two jobs",
            f"{_OLD} --node_rank=0 --master_addr=10.0.0.1 --master_port=29500 pretrain.py",
            f"{_OLD} --node_rank=1 --master_addr=10.0.0.2 --master_port=29500 finetune.py",
        ),
        shell_passes(
            "from outside",
            f"{_OLD} --node_rank=0 --master_addr=$1 --master_port=29500 train.py",
            f"{_OLD} --node_rank=1 --master_addr=$2 --master_port=29500 train.py",
        ),
    ),
)
def master_disagrees_in_files(file: LaunchFile) -> Iterator[Violation]:
    """Ask whether the commands for the hosts of one job use the same master.

    Why it hurts: each host waits for the others at a different address until the store times out.
    Fix: Use the address and port of host 0 in all commands.
    """
    yield from _told_themselves(file)
    masters: dict[tuple[str, ...], tuple[str, str, int]] = {}
    for start in starts_of(file):
        launch = start.launch
        hosts, number, endpoint = hosts_of(launch), rank_of_host(launch), endpoint_of(launch)
        if not hosts or hosts < 2 or number is None or not number.isdigit() or endpoint is None:
            continue
        if not is_known(endpoint) or is_loopback_name(endpoint):
            continue
        master = f"{endpoint}:{port_of(launch) or ''}"
        key = (launch.program, str(hosts), launch.script)
        first, other, line = masters.setdefault(key, (number, master, launch.place.line))
        if first != number and other != master:
            yield Violation(
                launch.place,
                f"Host {number} uses master {master.rstrip(':')}, but host {first} (line {line}) uses "
                f"{other.rstrip(':')}",
                fix=_fix_of_master(launch, number, master, other),
                evidence=(("master", master.rstrip(":")), (f"master_of_host_{first}", other.rstrip(":"))),
            )


def _fix_of_master(launch: Launch, number: str, own: str, wanted: str) -> str:
    """The options of this command with the master that the first one uses; empty if variables set it."""
    command, (host, _, port) = launch.command, wanted.rpartition(":")
    if command.host_port and launch.option(command.host_port) is not None:
        options = {command.host_port: wanted.rstrip(":")}
    else:
        own_host, _, own_port = own.rpartition(":")
        options = {command.master: host if host != own_host else "", command.port: port if port != own_port else ""}
    given = [(name, value) for name, value in options.items() if value]
    if not given or any(launch.option(name) is None for name, _ in given):
        return ""
    return f"Use `{' '.join(f'--{name} {value}' for name, value in given)}` in the command of host {number}."


_OWN_HOST = frozenset({f"{IN_STEP}HOSTNAME", f"{IN_STEP}SLURMD_NODENAME"})
"""Marks of variables that each task of a step expands to the name of its own host."""


def _told_themselves(file: LaunchFile) -> Iterator[Violation]:
    """Report multi-host steps in which each task uses its own host as the master."""
    for start in starts_of(file):
        launch = start.launch
        if start.step is None or (start.step.nodes or 1) < 2 or hosts_of(launch) == 1:
            continue
        setting = launch.settings.get("MASTER_ADDR")
        endpoint = endpoint_of(launch) if launch.is_agent else None
        own = endpoint if endpoint is not None else setting.value if setting is not None else ""
        if not _OWN_HOST.isdisjoint(names_in(own)):
            is_from_setting = setting is not None and not _OWN_HOST.isdisjoint(names_in(setting.value))
            yield Violation(
                setting.place if setting is not None and is_from_setting else launch.place,
                f"Each of {start.step.nodes} hosts uses its own name as the master: {shown(own)}",
                fix="Export the first host of the job before srun, and use `$head` as the master:\n"
                'export head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
                evidence=(("endpoint", shown(own)), ("nodes", start.step.nodes)),
            )
