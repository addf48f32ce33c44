"""Launch files, read and never run: shell and batch scripts, and the YAML and JSON of schedulers and launchers."""

from __future__ import annotations

from doctor.lint.launch.manifest import Manifest
from doctor.lint.launch.model import Launch, LaunchFile, Setting
from doctor.lint.launch.reading import read_launch_file
from doctor.lint.launch.shell import ShellFile

__all__ = ["Launch", "LaunchFile", "Manifest", "Setting", "ShellFile", "read_launch_file"]
