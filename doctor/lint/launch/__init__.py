"""Launch files, parsed and never run: shell and batch scripts, and the YAML and JSON of schedulers and launchers."""

from __future__ import annotations

from doctor.lint.launch.file_type import read_launch_file
from doctor.lint.launch.launch_file import EnvironmentSetting, Launch, LaunchFile
from doctor.lint.launch.manifest import Manifest
from doctor.lint.launch.shell.reader import ShellFile

__all__ = ["EnvironmentSetting", "Launch", "LaunchFile", "Manifest", "ShellFile", "read_launch_file"]
