"""Jobs that a launch file submits to a running cluster of Ray."""

from __future__ import annotations

import re

from doctor.lint.launch.launch_file import LaunchFile

_SUBMITS = re.compile(
    r"^[^#\n]*\bray job submit\b(?P<rest>(?:[^\n]|\n(?!\s*\n|[^#\n]*\bray job submit\b))*)", re.MULTILINE
)
_PROGRAM = re.compile(r"\bpython[\d.]*\s+(?:-u\s+)?(?:-m\s+(?P<module>[\w.]+)|(?P<file>[\w./-]+\.py)\b)")
_VARIABLES = re.compile(r"\benv_vars[\"']?\s*[:=]\s*\{(?P<entries>[^{}]*)\}")
_NAME = re.compile(r"[\"'](?P<name>[A-Z]\w+)[\"']\s*:")


def set_for_ray_jobs(file: LaunchFile) -> frozenset[str]:
    """The variables that all jobs of a file for ``ray job submit`` get from ``env_vars`` of a ``runtime_env``, in the
    command or in the program that it starts. Processes of the cluster have no variables of the shell that submits."""
    text = file.modules.text_at(file.path) if file.modules is not None else ""
    found = [_set_for(file, one["rest"]) for one in _SUBMITS.finditer(text)]
    return frozenset.intersection(*found) if found else frozenset()


def _set_for(file: LaunchFile, command: str) -> frozenset[str]:
    texts = [command]
    program = _PROGRAM.search(command)
    if program is not None and file.modules is not None:
        module = program["module"] or program["file"].removesuffix(".py").removeprefix("./").replace("/", ".")
        texts += map(file.modules.text_at, file.modules.named(file.path, module))
    return frozenset(
        one["name"]
        for text in texts
        for entries in _VARIABLES.finditer(text)
        for one in _NAME.finditer(entries["entries"])
    )
