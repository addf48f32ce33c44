"""Everything that a rule over launch files may import, besides pure standard library."""

from __future__ import annotations

from doctor.finding import Severity
from doctor.knowledge.allocator import complaints as allocator_complaints
from doctor.knowledge.grammar import looks_like_nccl_syntax
from doctor.knowledge.values import effective as effective_value
from doctor.knowledge.values import fault as value_fault
from doctor.knowledge.variables import concerns_nccl
from doctor.knowledge.variables import is_foreign as is_foreign_variable
from doctor.knowledge.variables import known as known_variable
from doctor.knowledge.variables import nearest as nearest_variable
from doctor.lint.launch.configs import Config, Contradiction, contradictions_in
from doctor.lint.launch.kubernetes import Container, Role, Workload
from doctor.lint.launch.manifest import Manifest
from doctor.lint.launch.model import Launch, LaunchFile, Setting
from doctor.lint.launch.names import list_fault
from doctor.lint.launch.programs import AGENTS
from doctor.lint.launch.reading import read_launch_file
from doctor.lint.launch.shell import ShellFile
from doctor.lint.launch.slurm import Allocation
from doctor.lint.launch.starts import (
    Start,
    endpoint_of,
    hosts_of,
    is_loopback,
    is_static,
    option_of,
    port_of,
    processes_of,
    rank_of_host,
    spans_hosts,
    starts_of,
    trainer_option,
    visible_devices,
)
from doctor.lint.launch.told import is_told, names_in, shown, whole_number
from doctor.lint.launch.tree import Node
from doctor.lint.rule import Bad, Good, Hit, Place, rule

__all__ = [
    "AGENTS",
    "Allocation",
    "Bad",
    "Config",
    "Container",
    "Contradiction",
    "Good",
    "Hit",
    "Launch",
    "LaunchFile",
    "Manifest",
    "Node",
    "Place",
    "Role",
    "Setting",
    "Severity",
    "ShellFile",
    "Start",
    "Workload",
    "allocator_complaints",
    "concerns_nccl",
    "contradictions_in",
    "effective_value",
    "endpoint_of",
    "hosts_of",
    "is_foreign_variable",
    "is_loopback",
    "is_static",
    "is_told",
    "known_variable",
    "lines",
    "list_fault",
    "looks_like_nccl_syntax",
    "names_in",
    "nearest_variable",
    "option_of",
    "port_of",
    "processes_of",
    "rank_of_host",
    "read_launch_file",
    "rule",
    "shown",
    "spans_hosts",
    "starts_of",
    "trainer_option",
    "value_fault",
    "visible_devices",
    "whole_number",
]


def lines(*text: str) -> str:
    """The text of a case, line by line."""
    return "\n".join(text) + "\n"
