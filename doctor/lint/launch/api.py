"""Everything that a rule over launch files may import, besides pure standard library."""

from __future__ import annotations

from doctor.core.finding import Severity
from doctor.knowledge.alloc_conf import alloc_conf_faults as allocator_complaints
from doctor.knowledge.environment_variables import concerns_nccl
from doctor.knowledge.environment_variables import is_foreign as is_foreign_variable
from doctor.knowledge.environment_variables import known as known_variable
from doctor.knowledge.environment_variables import nearest as nearest_variable
from doctor.knowledge.interface_syntax import looks_like_nccl_syntax
from doctor.knowledge.variable_values import effective as effective_value
from doctor.knowledge.variable_values import fault as value_fault
from doctor.lint.engine.rule import FileFails, FilePasses, SourceLocation, Violation, rule
from doctor.lint.launch.configs import Contradiction, LauncherConfig, contradictions_in
from doctor.lint.launch.file_type import read_launch_file
from doctor.lint.launch.interface_list_syntax import list_fault
from doctor.lint.launch.kubernetes import Container, Role, Workload
from doctor.lint.launch.launch_file import EnvironmentSetting, Launch, LaunchFile
from doctor.lint.launch.launcher_options import AGENTS
from doctor.lint.launch.manifest import Manifest
from doctor.lint.launch.partial_text import is_known, names_in, shown, whole_number
from doctor.lint.launch.process_launches import (
    ProcessLaunch,
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
from doctor.lint.launch.shell.reader import ShellFile
from doctor.lint.launch.slurm_batch import Allocation
from doctor.lint.launch.yaml_tree import YamlNode

__all__ = [
    "AGENTS",
    "Allocation",
    "Container",
    "Contradiction",
    "EnvironmentSetting",
    "FileFails",
    "FilePasses",
    "Launch",
    "LaunchFile",
    "LauncherConfig",
    "Manifest",
    "ProcessLaunch",
    "Role",
    "Severity",
    "ShellFile",
    "SourceLocation",
    "Violation",
    "Workload",
    "YamlNode",
    "allocator_complaints",
    "concerns_nccl",
    "contradictions_in",
    "effective_value",
    "endpoint_of",
    "hosts_of",
    "is_foreign_variable",
    "is_known",
    "is_loopback",
    "is_static",
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
