"""Trainers of Lightning that Hydra makes of the configurations which a project selects."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePath

from doctor.core.text import joined_lines
from doctor.lint.python.project.starts.launch_counts import LAUNCHERS
from doctor.lint.python.script import ProjectModules, Script, per_script

_MAKES = re.compile(r"^[ \t]*_target_:[ \t]*[\"']?(?:[\w.]+\.)?Trainer[\"']?[ \t]*(?:#.*)?$", re.MULTILINE)
_COUNTS = re.compile(
    r"^[ \t]*(?:[\w.]*\.)?(?:devices|gpus|num_nodes)[ \t]*:[ \t]*(?!\$\{)([^\s#][^#\n]*)", re.MULTILINE
)
_PROCESSES = re.compile(r"^[ \t]*(?:devices|gpus)[ \t]*:[ \t]*(?!\$\{)([^\s#][^#\n]*)", re.MULTILINE)
_DEFAULT = re.compile(r"^[ \t]*-[ \t]+[\"']?([\w-]+?)(?:\.yaml)?[\"']?[ \t]*(?:#.*)?$", re.MULTILINE)
"""An entry of a list of defaults that is another file of the same folder: ``- default.yaml``."""
_DEPTH = 4


@per_script
def has_trainer_of_one(script: Script) -> bool:
    """Whether the Trainer of a project is made of the configurations in one folder (a config group of Hydra), and those
    of it that its main configurations select have one device, while no command, page or other configuration selects
    one with more: ``- trainer: gpu.yaml``, with ``devices: 1`` there."""
    modules = script.modules
    if modules is None or modules.is_one_file or not script.location or not modules.is_whole(script.location):
        return False
    if "lightning" not in script.text or re.search(r"\bTrainer\(|init_process_group", script.text):
        return False
    key = ("hydra trainers", modules.root_of(script.location))
    if key not in modules.memo:
        modules.memo[key] = _has_one_device(script, modules)
    return bool(modules.memo[key])


def _has_one_device(script: Script, modules: ProjectModules) -> bool:
    files = {PurePath(shown): text for shown, text in modules.mentioning("", launches=True) if _is_yaml(shown)}
    folders = {place.parent for place, text in files.items() if _MAKES.search(text)}
    if len(folders) != 1:
        return False
    (folder,) = folders
    group = {place.stem: text for place, text in files.items() if place.parent == folder}
    others = {place: text for place, text in files.items() if place.parent != folder}
    texts = [*_commands(script, modules), *others.values()]
    if any(_gives_more(text, folder.name) for text in texts) or any(
        _COUNTS_MORE.search(one) for one in others.values()
    ):
        return False
    mains = [text for place, text in others.items() if place.parent == folder.parent]
    entry = re.compile(rf"^[ \t]*-[ \t]+(?:override[ \t]+)?/?{folder.name}[ \t]*:[ \t]*[\"']?([\w-]+)", re.MULTILINE)
    named = re.compile(rf"(?<![\w./-]){folder.name}=([\w-]+)")
    selected = {one[1] for text in mains for one in entry.finditer(text)}
    chosen = {one[1] for text in texts for kind in (entry, named) for one in kind.finditer(text)}
    return bool(selected) and all(_is_one(group, name, _DEPTH) for name in {*selected, *chosen} - {"null"})


def _is_yaml(shown: str) -> bool:
    return shown.endswith((".yaml", ".yml"))


_COUNTS_MORE = re.compile(
    r"^[ \t]*(?:[\w.]*\.)?(?:devices|num_nodes)[ \t]*:[ \t]*"
    r"(?![\"']?(?:1|null|\$\{[^}\n]*\}|\[\d\])[\"']?[ \t]*(?:#.*)?$)\S",
    re.MULTILINE,
)


def _commands(script: Script, modules: ProjectModules) -> Iterator[str]:
    """The texts that may have commands: launch files, programs and pages."""
    yield from (text for shown, text in modules.mentioning("", launches=True) if not _is_yaml(shown))
    yield from (text for word in ("trainer", "devices") for _, text in modules.mentioning(word))
    yield from modules.all_pages(script.location)


def _gives_more(text: str, group: str) -> bool:
    """Whether a text overrides the number of devices or hosts, or starts a program with a launcher."""
    given = re.search(rf"(?<![\w.-])\+?{group}\.(?:\w+\.)*(?:devices|gpus|num_nodes)=[\"']?(?!1\b)", text)
    return given is not None or any(LAUNCHERS.search(line) and ".py" in line for line in joined_lines(text))


def _is_one(group: dict[str, str], name: str, depth: int) -> bool:
    """Whether a configuration of the group, or one that it takes its defaults from, has one device, and no other."""
    text = group.get(name, "")
    counts = {one[1].rstrip().strip("\"'") for one in _COUNTS.finditer(text)}
    if not text or counts - {"1", "[0]"}:
        return False
    if _PROCESSES.search(text) is not None:
        return True
    return depth > 0 and any(_is_one(group, one[1], depth - 1) for one in _DEFAULT.finditer(text) if one[1] in group)
