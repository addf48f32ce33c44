"""Programs that a project keeps, but neither starts nor imports: old ones, and those of copied projects."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import PurePath

from doctor.core.text import joined_lines
from doctor.lint.python.script import ProjectModules, Script, per_script

_OLD = re.compile(
    r"^_?(?:archived?s?|old|olds|older|elder|legacy|deprecated|depreciated|obsolete|outdated|unused|useless|backups?|bak|"
    r"attic|graveyard|trash|junk|abandoned|discarded|retired|superseded|failed|dont_use|do_not_use)"
    r"(?:[_-]?(?:code|codes|scripts?|shells?|versions?|files?|experiments?|attempts?|runs?|stuff|src|models?|"
    r"benchmarks?|examples?|recipes?|projects?|programs?|demos?))?$|"
    r"^(?:code|codes|scripts?|versions?|files?|experiments?|src)[_-]?(?:old|archived?|backup|bak|legacy|deprecated)$|"
    r"^\w[\w-]*[_-](?:old|elder|backup|bak|legacy|deprecated|obsolete)$|"
    r"^(?:bugs?|issues?|hangs?|crash(?:es)?)[_-]?(?:repros?|reproductions?|reproducers?|reports?)$|^repros?$",
    re.IGNORECASE,
)
"""Names of folders that say that what is in them is kept for reference, or to show a bug."""
_ORIGINAL = re.compile(r"^(?:\w[\w-]*[_-])?orig(?:inals?)?$", re.IGNORECASE)
"""Names of folders with the files from which a project has made its own."""
_OLD_COPY = re.compile(
    r"(?:^|[_\-. (])(?:backups?|bak|old|legacy|deprecated|obsolete|outdated|unused|useless)(?:$|[_\-. (\d])|"
    r"[_\-. ]copy[ _]?\(?\d*\)?$",
    re.IGNORECASE,
)
"""Names of files that say the same: ``train_backup(1).py``, ``train copy.py``."""
_SAYS_OLD = re.compile(
    r"\b(?:must|should) not be (?:executed|run|used|imported)\b|"
    r"\b(?:do not|don't|never) (?:run|use|execute|rely on|train with)\b[^.\n]{0,40}"
    r"\b(?:it|this|these|them|files?|scripts?|code|folder)\b|"
    r"\b(?:no longer|not) (?:maintained|supported|in use)\b|"
    r"\b(?:is|are|has been|have been) (?:now )?(?:deprecated|obsolete|archived|superseded|frozen|retired)\b|"
    r"\bkept (?:only )?(?:for|as a?) ?(?:reference|historical|history)|"
    r"^[\W_]*(?:legacy|deprecated|obsolete|archived?|retired|superseded|frozen historical)\b",
    re.IGNORECASE | re.MULTILINE,
)
"""What a folder's page, or the first lines of a file, say of code that nobody shall start."""
_FIRST_LINES = 8
STARTS_PROGRAM = re.compile(r"(?:\bpython[\d.]*|torchrun|launch|deepspeed|\bsrun)\b[^\n]{0,400}\.py\b")
"""A command that starts a program of Python, in a launch file or a page."""
_RUNS = re.compile(r"\bos\.(?:system|popen)\(|\bsubprocess\b|\bPopen\(")


def is_old_folder(name: str) -> bool:
    """Whether the name of a folder says that what is in it is kept for reference, or to show a bug."""
    return _OLD.match(name) is not None


@per_script
def left_over_folder(script: Script) -> str:
    """The folder of a script that nothing outside it starts or imports, if its name says that it is old; or that of a
    copied project, whose modules are imported or which is installed, if nothing outside it starts the script, though
    pages, launch files or programs of the project start other programs. Empty otherwise."""
    modules = script.modules
    if modules is None or not script.location:
        return ""
    root = modules.root_of(script.location)
    place = PurePath(script.location)
    if not root or not place.is_relative_to(root):
        return ""
    folders = place.parent.relative_to(root).parts
    for depth, name in enumerate(folders, 1):
        if _OLD.match(name) or (_ORIGINAL.match(name) and _has_own_file(script, len(folders) - depth)):
            says_so = _says_old(script, "/".join((root, *folders[:depth])))
            return name if not _is_used_from_outside(script, name, pages=not says_so) else ""
        if _is_copied_library(modules, script.location, "/".join((root, *folders[:depth])), root):
            return name
    return ""


def copied_library(modules: ProjectModules, location: str, root: str) -> str:
    """The folder of a copied project around a file below ``root`` that nothing outside the folder starts or imports,
    though the project imports or installs others of it, and starts programs; empty if there is none."""
    folders = PurePath(location).parent.relative_to(root).parts
    paths = (("/".join((root, *folders[:depth])), name) for depth, name in enumerate(folders, 1))
    return next((name for path, name in paths if _is_copied_library(modules, location, path, root)), "")


def _is_copied_library(modules: ProjectModules, location: str, folder: str, root: str) -> bool:
    return modules.is_copied_project(folder, root) and _is_library(modules, location, PurePath(folder).name, root)


def _has_own_file(script: Script, below: int) -> bool:
    """Whether the project has a file of its own beside the folder that many folders above a script, at the place that
    the script has in it: ``main.py`` for ``net-original/main.py``."""
    parts = PurePath(script.path).parts
    own = PurePath(*parts[: -below - 2], *parts[-below - 1 :])
    found = script.modules.named(script.path, PurePath(script.path).stem) if script.modules is not None else ()
    return any(PurePath(one) == own for one in found)


_OF_DOCUMENTATION = re.compile(r"^(?:docs?|documentation|doc[_-]?(?:src|source)|(?:doc[_-]?)?snippets)$", re.IGNORECASE)


@per_script
def is_of_documentation(script: Script) -> bool:
    """Whether a script is in a folder of documentation: a listing for a page, as far as no command starts it."""
    root = script.modules.root_of(script.location) if script.modules is not None and script.location else ""
    place = PurePath(script.location)
    if not root or not place.is_relative_to(root):
        return False
    return any(_OF_DOCUMENTATION.match(one) for one in place.parent.relative_to(root).parts)


@per_script
def is_old_copy(script: Script) -> bool:
    """Whether the name of a file says that it is kept for reference, and nothing in the project names it."""
    modules, stem = script.modules, PurePath(script.path).stem
    if modules is None or not script.location or _OLD_COPY.search(stem) is None:
        return False
    others = [text for shown, text in modules.mentioning(stem) if shown != script.path]
    return not others and not any(stem in text for text in (*modules.notebooks(stem), *modules.pages(script.location)))


def _outside(modules: ProjectModules, folder: str, word: str, *, launches: bool = False) -> Iterator[str]:
    """The texts of scripts and launch files with a word that are not below a folder of that name."""
    return (text for shown, text in modules.mentioning(word, launches=launches) if folder not in PurePath(shown).parts)


def _says_old(script: Script, folder: str) -> bool:
    """Whether a page of a folder says of all in it that it is old, or the first lines of the script do so of it."""
    modules = script.modules
    begin = "\n".join(script.text.split("\n", _FIRST_LINES)[:_FIRST_LINES])
    texts = (*(modules.pages_in(folder) if modules is not None else ()), "\n".join(_COMMENT.findall(begin)))
    return any(_SAYS_OLD.search(text) for text in texts)


_COMMENT = re.compile(r"^(?:#|[rR]?[\"']{3}|(?!from |import |@|def |class )[A-Z*]).*$", re.MULTILINE)


def _is_used_from_outside(script: Script, folder: str, *, pages: bool) -> bool:
    """Whether a program, launch file or notebook imports from a folder of that name, or names a file in it; ``pages``:
    or a page, unless what is said there is that the folder is old."""
    modules, word = script.modules, re.escape(folder)
    if modules is None:
        return True
    used = re.compile(
        rf"^\s*(?:from|import)\s+[\w.]*\b{word}\b|(?<![\w-]){word}/[\w./-]*\.(?:py|sh|slurm|sbatch|ya?ml)\b|"
        rf"\bcd\s+[\w./-]*\b{word}\b|-m\s+[\w.]*\b{word}\.",
        re.MULTILINE,
    )
    texts = [*_outside(modules, folder, folder), *modules.notebooks(folder)]
    texts += modules.pages_at_root(script.location) if pages else ()
    return any(used.search(text) for text in texts)


def _is_library(modules: ProjectModules, location: str, folder: str, root: str) -> bool:
    """Whether a copied project is only imported from outside, or installed to be (``pip install -e copied/``), and no
    page or file there starts or imports the file at ``location``."""
    pages = modules.pages_in(root)
    place = PurePath(location)
    own = re.compile(rf"(?<![\w-]){re.escape(place.name)}\b|\b{re.escape(folder)}\.[\w.]*\b{re.escape(place.stem)}\b")
    imported = re.compile(rf"^\s*(?:from|import)\s+[\w.]*(?<!\w){re.escape(folder)}\b", re.MULTILINE)
    starts = map(
        STARTS_PROGRAM.search, (*pages, *_outside(modules, folder, ".py", launches=True), *_run(modules, folder))
    )
    is_imported = any(map(imported.search, _outside(modules, folder, folder)))
    if not any(starts) or not (is_imported or _is_installed(modules, pages, folder)):
        return False
    named = (*_outside(modules, folder, place.stem), *pages, *modules.notebooks(place.stem))
    return not any(map(own.search, named))


def _run(modules: ProjectModules, folder: str) -> Iterator[str]:
    """The lines of programs outside a folder that run commands: ``os.system("torchrun main.py")``."""
    texts = (text for text in _outside(modules, folder, ".py") if _RUNS.search(text) is not None)
    return (line for text in texts for line in joined_lines(text) if not line.lstrip().startswith("#"))


def _is_installed(modules: ProjectModules, pages: Iterable[str], folder: str) -> bool:
    """Whether a page or launch file of a project installs what is in a folder: ``pip install -e ./copied``, or ``cd
    copied`` and ``pip install .``; not a package of that name, nor a repository at an address."""
    word, install = rf"(?<![\w-]){re.escape(folder)}(?![\w.-])", r"\bpip\d?[ \t]+install\b"
    of_folder = re.compile(
        rf"{install}(?:(?!://)[^\n])*(?:(?:-e|--editable)[ \t=]+[\"']?|/){word}|{install}[^\n]*[\s\"']{word}/|"
        rf"\bcd[ \t][^\n]*{word}[\w./-]*\s*(?:&&|;)?\s*(?:\w+[ \t]+-m[ \t]+)?{install}"
    )
    return any(map(of_folder.search, (*pages, *_outside(modules, folder, folder, launches=True))))
