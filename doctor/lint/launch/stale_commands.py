"""Commands of launch files that no longer fit their project: the program or a configuration that they name is gone."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import PurePath
from typing import TYPE_CHECKING

from doctor.core.finding import Severity
from doctor.lint.engine.rule import Violation
from doctor.lint.launch.launch_file import Launch, LaunchFile
from doctor.lint.launch.partial_text import is_known, is_placeholder
from doctor.lint.launch.process_launches import is_one_process, joins_no_group
from doctor.lint.python.project.left_over import copied_library, is_old_folder

if TYPE_CHECKING:
    from doctor.lint.engine.project_files import ProjectFiles

_BRINGS_FILES = re.compile(
    r"\bgit\s+(?:clone|submodule|checkout|pull)\b|\b(?:wget|curl|rsync|scp|unzip|tar|gsutil|docker|podman|singularity|"
    r"apptainer|enroot|pyxis|sky)\b|--container|^(?:[^#\n]*[;&|])?[ \t]*(?:cp|mv|ln|pushd)\s|\bs3\s+(?:cp|sync)\b",
    re.MULTILINE,
)
"""Commands after which the files are not those of the project."""
_COPIES_INTO = re.compile(r"^[ \t]*cp[ \t][^\n;&|]*[ \t](?P<folder>\$\S+)[ \t]*$\n?", re.MULTILINE)
_CHANGES_FOLDER = re.compile(
    r"^[^#\n]*?\bcd\s+(?P<folder>[^\s;&|)]+)|--(?:chdir|workdir)\b|#SBATCH\s+-D\b", re.MULTILINE
)
_OF_CONFIGURATION = re.compile(
    r"--?(?:\w+[-_])?(?:config|cfg|deepspeed|ds[-_]config|yaml)(?:[-_](?:file|path|yaml|json))?", re.IGNORECASE
)
_CONFIGURATIONS = (".yaml", ".yml", ".json")


_OF_NCCL = frozenset({"NCCL001", "NCCL002", "NCCL004", "NCCL011"})
"""Rules about variables that matter only between ranks."""
_OF_ALLOCATIONS = frozenset({"ENV010", "ENV011", "ENV012", "ENV014"})
"""Rules about what the ``#SBATCH`` lines of a script request."""


def as_launched(file: LaunchFile, rule: str, violation: Violation) -> Violation:
    """The violation in a launch file, as information in preview if it is of commands alone whose program or
    configuration does not exist in the project, since who starts them gets that error first; if the folder of the file
    is an old one, from which the project names nothing, or a copied project that it uses as a library; if it is about
    an allocation, and the project runs the script in a shell; or if it is about NCCL, and all that the file starts is
    one process, or programs that join no group."""
    modules, line = file.modules, violation.place.line
    if modules is None or not file.launches:
        return violation
    is_unused = rule in _OF_NCCL and (is_one_process(file) or joins_no_group(file))
    is_unused = is_unused or (rule in _OF_ALLOCATIONS and _is_run_by_shell(file, modules))
    if is_unused or _is_left_over(file, modules):
        return replace(violation, severity=Severity.INFO, preview=True)
    if not modules.is_script_of_whole(file.path):
        return violation
    meant = [one for one in file.launches if _has_line(one, line)] or list(file.launches)
    is_stale = all(_is_stale(file, modules, one) for one in meant)
    return replace(violation, severity=Severity.INFO, preview=True) if is_stale else violation


def _is_run_by_shell(file: LaunchFile, modules: ProjectFiles) -> bool:
    """Whether the pages and files of the project run a batch script in a shell, which reads its ``#SBATCH`` lines as
    comments, and none of their commands submits it: ``bash train.sh``."""
    name = PurePath(file.path).name
    named = rf"[^\n|;&`]*?(?<![\w-]){re.escape(name)}(?![\w.-])"
    by_shell, submitted = (re.compile(rf"\b{one}\b{named}") for one in (r"(?:ba|z)?sh(?:[ \t]+-\w+)*", "sbatch"))
    texts = list(modules.texts_with(file.path, name))
    return any(map(by_shell.search, texts)) and not any(map(submitted.search, texts))


def _is_left_over(file: LaunchFile, modules: ProjectFiles) -> bool:
    """Whether a launch file is below a folder for old files, by its name, and nothing in the project names the file, or
    is in a copied project that is used as a library alone."""
    inner, location = modules.inner_path(file.path), os.path.abspath(file.path)  # noqa: PTH100 - links are kept
    folders = PurePath(inner).parent.parts
    if folders and location.endswith(f"/{inner}"):
        if copied_library(modules, location, location.removesuffix(f"/{inner}")):
            return True
    return any(map(is_old_folder, folders)) and modules.is_unnamed(file.path)


def _has_line(launch: Launch, line: int) -> bool:
    return launch.place.line <= line <= (launch.place.end_line or launch.place.line)


def _is_stale(file: LaunchFile, modules: ProjectFiles, launch: Launch) -> bool:
    """Whether the program that a command starts, or a configuration that it reads, is surely not in the project."""
    last = list(launch.chain())[-1]
    if last.program == "other" or not _is_plain(last.script) or not last.script.endswith(".py"):
        return False
    text = modules.text_at(file.path)
    entered = _CHANGES_FOLDER.finditer(text)
    brought = _without_backups(text) if "/" not in last.script else text
    if _BRINGS_FILES.search(brought) or not all(_is_inside(modules, one["folder"]) for one in entered):
        return False
    if modules.lacks_file(file.path, last.script):
        return True
    if last.script.startswith("../") and not _CHANGES_FOLDER.search(text):
        return modules.lacks_above(file.path, last.script)
    return any(modules.lacks_file(file.path, one) for one in _configurations(last) if _is_plain(one))


_FETCHES = re.compile(r"\bgit\s+(?:clone|submodule|checkout|pull|reset|stash)\b")
_OF_PROJECT = re.compile(r"dirname|pwd|BASH_SOURCE|SUBMIT_DIR|ROOT|PROJECT|REPO|SCRIPT|CODE|BASE_?DIR", re.IGNORECASE)
"""Names of variables and commands that give a folder of the project."""


def starts_own_files(file: LaunchFile, modules: ProjectFiles) -> bool:
    """Whether the relative paths in a launch file are of its project: it fetches no other files, and enters no folder
    that may be of another one."""
    text = modules.text_at(file.path)
    if _FETCHES.search(text):
        return False
    for entered in _CHANGES_FOLDER.finditer(text):
        folder = (entered["folder"] or "").strip("\"'").rstrip("/")
        last = folder.rpartition("/")[2]
        is_named = _is_plain(last) and last not in (".", "..") and modules.has_folder(last)
        if not (_is_inside(modules, folder) or is_named or ("$" in folder and _OF_PROJECT.search(folder))):
            return False
    return True


def _without_backups(text: str) -> str:
    """A script without copies into a folder that it has made, which is not the one that it is in: ``mkdir -p $OUT``."""

    def kept(copy: re.Match[str]) -> str:
        folder = re.escape(copy["folder"])
        return "" if re.search(rf"^[ \t]*mkdir[ \t](?:[^\n]*[ \t])?{folder}[ \t]*$", text, re.MULTILINE) else copy[0]

    return _COPIES_INTO.sub(kept, text)


def _is_inside(modules: ProjectFiles, folder: str | None) -> bool:
    """Whether a folder that a script enters is of the project, by its name."""
    plain = (folder or "").strip("\"'").rstrip("/")
    return bool(re.fullmatch(r"(?:\.\.?/?)+", plain)) or (_is_plain(plain) and modules.has_folder(plain))


def _is_plain(path: str) -> bool:
    """Whether a path is relative, and all of it is known."""
    known = bool(path) and is_known(path) and not is_placeholder("file", path)
    return known and re.fullmatch(r"[\w./-]+", path) is not None and not path.startswith(("/", "-"))


def _configurations(launch: Launch) -> Iterator[str]:
    """The files that options for configurations name, of a launcher or a program."""
    given = [(f"--{name}", value) for name, value in launch.options.items()]
    words = launch.arguments
    given += [(name, value) for word in words for name, equals, value in [word.partition("=")] if equals]
    given += itertools.pairwise(words)
    yield from (value for name, value in given if _OF_CONFIGURATION.fullmatch(name) and value.endswith(_CONFIGURATIONS))
