"""Reads the newest releases that a project's requirement files permit. Nothing is run or resolved."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from itertools import chain
from pathlib import Path
from types import MappingProxyType

from doctor.knowledge.releases import end_of_line, release, torch_of_ngc
from doctor.lint.engine.discovery import LintTarget, UnreadableFile, read_text

MOST_FOLDERS = 12
"""Folders above a file that are searched."""
MOST_FILES = 40
"""Requirement files of one folder that are read."""
MOST_FOLDERS_BELOW = 1_000
"""Folders below one that are searched for requirement files."""
MOST_PAGES_BELOW = 400
"""Pages below a folder that are read."""
LONGEST_LINE = 2_000
"""Characters of a line in which the name of an image is searched."""
_FILES = frozenset({"pyproject.toml", "setup.cfg", "setup.py", "pipfile"})
_FOLDERS = ("requirements", "environments", "environment", "envs", "env", "conda", "docker", "install", "setup")
"""Folders of requirement files beside those of the project."""
_PIN = re.compile(
    r"(?<![\w./-])(?:[\w-]{1,40}::)?(?P<name>[A-Za-z][\w-]{1,40})(?:\[[\w, -]{0,60}\])?"
    r"(?:[ \t]*=[ \t]*(?:\{[ \t]*version[ \t]*=[ \t]*)?[\"'](?P<quoted>[^\"'\n]{1,80})[\"']"
    r"|[ \t]*(?P<bare>[=<>~!][^;#\"'\n\]]{1,80}))"
)
"""A requirement of Poetry or Pipenv (``name = "^1.9"``), or of pip, conda or setuptools (``name<2``)."""
_DIRECT = re.compile(
    r"(?<![\w./-])(?P<name>[A-Za-z][\w.-]{1,40})(?:\[[\w, -]{0,60}\])?[ \t]*@[ \t]*"
    r"(?P<address>(?:git\+|https?:|file:)[^\s#;\"']{1,300})"
)
"""A direct reference (PEP 508): ``name @ git+https://host/name.git@v0.8.5``."""
_TAG = re.compile(r"[@/-]v?(?P<release>\d{1,4}\.\d[\d.]{0,20})[^/@]*$")
"""A tag or a file name of a release at the end of an address."""
_NAMED = re.compile(r"(?<![\w./-])[A-Za-z][\w-]{1,40}(?![\w/])")
"""A word that may be the name of a distribution."""
_OF_CONDA = re.compile(
    r"^dependencies:[ \t]*(?:#.*)?\n(?:[ \t]*(?:#.*)?\n)*[ \t]*-[ \t]+"
    r"(?:pip:|[\"']?[\w.-]+(?:::[\w.-]+)?[\"']?[ \t]*(?:[=<>~!\[#].*)?)$",
    re.MULTILINE,
)
"""The list at the top of an environment of conda, whose first entry is a package or the list of pip."""
_LISTED = re.compile(
    r"^(?P<name>[A-Za-z][\w.-]{1,40})[ \t]+(?P<release>\d[\w.]{0,20})[ \t]+[\w.]+(?:[ \t]+[\w./-]+)?[ \t]*$",
    re.MULTILINE,
)
"""A row of ``conda list``: name, version, build and channel."""
_LOCKS = frozenset({"poetry.lock", "uv.lock", "pdm.lock", "pipfile.lock", "Pipfile.lock", "pixi.lock"})
_LOCKED = re.compile(
    r"^name = \"(?P<name>[\w.-]{1,60})\"\s*\nversion = \"(?=(?P<release>\d[\d.]{0,20}))|"
    r"^[ \t]*\"(?P<pinned>[\w.-]{1,60})\": \{[^{}]{0,20000}\"version\": \"==(?P<given>\d[\d.]{0,20})",
    re.MULTILINE,
)
"""A package of poetry.lock, uv.lock or pdm.lock, and one of Pipfile.lock."""
_IMAGE = re.compile(
    r"(?<![\w.-])(?:"
    r"nvidia[/+#](?P<ngc>(?:pytorch[:+_]\d{2}\.\d{2}(?=-py3)|nemo[:+_]\d{2}\.\d{2}))"
    r"|(?:(?:pytorch|mosaicml|runpod|anibali|bitnami|bitnamilegacy|cnstark)[/+]pytorch|"
    r"[\w.-]{1,60}/pytorch-training):v?(?P<release>\d\.\d[\d.]*)"
    r"|[\w.-]{0,60}pytorch-(?:gpu|cu\d+)\.(?P<major>\d)-(?P<minor>\d+)"
    r"|[\w.-]{1,60}:[\w.-]{0,60}?torch[-_]?(?P<named>\d+\.\d+(?:\.\d+)?)"
    r"|[\w.-]{1,60}/[\w.-]{0,60}torch[-_](?P<titled>\d\.\d+(?:\.\d+)?)[\w.-]{0,60}:)",
    re.IGNORECASE,
)
"""The name of an image and its tag, or of a file that was made of it: images of NVIDIA, whose tags are dates
(``nvcr.io/nvidia/pytorch:23.05-py3``, ``nvidia+pytorch+23.05-py3.sqsh``), also those with NeMo, which are made of one
of that date or an earlier one, those of PyTorch, SageMaker and owners whose tags begin with the release of torch, of
Google (``pytorch-gpu.1-13``) and with torch in their tag or name (``0.0.1-pytorch1.12.1-cuda11.6``,
``acpt-pytorch-1.13-cuda11.7:latest``)."""
_MODULE = re.compile(
    r"^[^#\n]*\b(?:module|ml)[ \t]+(?:(?:load|add|swap)[ \t]+)?[^#\n]*?torch/(?:[A-Za-z][\w.-]*/)?v?"
    r"(?P<release>\d\.\d[\d.]*)|^[^#\n]*\bactivate[ \t]+[^\s#;]*torch[-_]?(?P<named>\d\.\d+(?:\.\d+)?)",
    re.MULTILINE | re.IGNORECASE,
)
"""A module of the host, and an environment that is named after its torch: ``module load PyTorch/1.12.0-foss-2022a``,
``conda activate torch1.13``."""
_ROCM = re.compile(
    r"^[^#\n]*(?:\b(?:module|ml)[ \t]+(?:(?:load|add|swap)[ \t]+)?(?:[^#\n]*?[ \t/])?rocm(?:/|(?![\w.-]))|"
    r"\brocm/[\w-]+:(?:rocm)?|/whl/(?:nightly/|test/)?rocm|\bROCM_(?:HOME|PATH)=[\"']?[\w./-]*/rocm[-/]?|"
    r"[-_/]rocm-(?=\d[\w.-]{0,80}\.(?:sif|sqsh)\b))"
    r"(?P<release>\d[\d.]*)?",
    re.MULTILINE,
)
"""What says that a job runs on ROCm: a module, an image of AMD, wheels for it, the folder that it is in, and the file
of a container that is named after it, as LUMI's are (``lumi-pytorch-rocm-6.2.4-python-3.12-pytorch-v2.6.0.sif``)."""
NEWEST_ROCM = "7"
"""The newest line of ROCm, for a job that names none."""
_CUDA_OF_CONDA = re.compile(r"\b(?P<package>cudatoolkit|pytorch-cuda)[ \t]*={1,2}[ \t]*(?P<cuda>\d+\.\d)")
_NEWEST_WITH_CUDA = {
    **dict.fromkeys(("11.6", "11.3", "10.2"), "1.12"),
    "11.1": "1.10",
    **dict.fromkeys(("11.0", "9.2"), "1.7"),
    "10.1": "1.8",
    "10.0": "1.4",
}
"""The newest torch of the channel ``pytorch`` for a release of cudatoolkit; later ones need pytorch-cuda
(pytorch.org/get-started/previous-versions)."""
_NEWEST_WITH_PYTORCH_CUDA = {"11.6": "1.13", "11.7": "2.0", **dict.fromkeys(("11.8", "12.1", "12.4"), "2.5")}
"""The same for a release of pytorch-cuda. The channel ends with torch 2.5."""
_INSTALLS = re.compile(r"\b(?:pip3?|conda|mamba|micromamba|uv)[ \t]+(?:install|add|create)\b(?P<given>[^\n#;&|`]*)")
"""A command of a page or a script that installs distributions."""
_TELLS = re.compile(
    r"\b[Ii]nstall[ \t]+(?:[\[*`][\[*`]?)?(?i:pytorch|torch)\b[*`]{0,2}[ \t]+(?:v|version[ \t]+)?"
    r"(?P<release>\d{1,2}\.\d{1,2}(?:\.\d{1,2})?)(?![\d.]*(?:\d|\.[\dx]|[ \t]*(?:\+|<|>|-|~|/)))"
    r"(?![^\n]{0,60}\b(?:or|newer|later|higher|above|least|greater|minimum)\b)"
)
"""A sentence of a page that says which release of torch to install: "Install [PyTorch 2.0.1](https://pytorch.org)"."""
_PAGES = re.compile(
    r"^(?:readme|install(?:ation)?)(?:\.(?:md|rst|txt))?$|^(?:docker|container)file|^[\w.-]+\.(?:dockerfile|def)$|"
    r"^(?:docker-)?compose[\w.-]*\.ya?ml$|"
    r"^(?=[\w.-]*\.sh$)(?:[\w.-]*[-_.\d])?"
    r"(?:install|setup|env|environment|conda|venv|requirements|deps|dependencies)(?:[-_.\d]|[a-z]*\.sh$)"
)
"""Files with commands that install distributions, or with images; ``.def``: of Apptainer."""
_READABLE = re.compile(r"\.(?:md|rst)$|^readme|^dockerfile|^containerfile|^makefile$", re.IGNORECASE)
"""Files that show how programs are started, without being launch files."""
_LISTS_COMMANDS = re.compile(
    r"\.(?:job|pbs|lsf|qsub|bat|ps1|cmd|tex)$|^(?=.*\.txt$)(?!.*require).*(?:run|train|command|script|note|usage|how|step)|^justfile$",
    re.IGNORECASE,
)
_NOT_PAGES = frozenset({"node_modules", "site-packages", "__pycache__", "venv", "wandb"})
_OF_THE_PAST = re.compile(
    r"^(?:change[-_ ]?log|changes|history|news|release[-_ ]?notes?|releases|what'?s[-_ ]?new|todo|roadmap|authors|"
    r"contributors|code[-_ ]of[-_ ]conduct|security|citation|licen[sc]e|notice|third[-_ ]party)\b",
    re.IGNORECASE,
)
"""Pages that tell what changed, or who may do what, and not how programs are started."""
_LICENSE = re.compile(r"^(?:licen[sc]e|copying)\b", re.IGNORECASE)
_CITES = re.compile(r"@(?:article|inproceedings|misc|software)\s*\{", re.IGNORECASE)
_PACKAGING = frozenset({"setup.py", "setup.cfg"})
_BUILDS = {
    "setup.py": re.compile(r"\bsetup\s*\(|setuptools|distutils|skbuild"),
    "setup.cfg": re.compile(r"^\[(?:metadata|options)\b", re.MULTILINE),
    "pyproject.toml": re.compile(r"^\[(?:build-system|tool\.(?:poetry|setuptools|hatch|flit|pdm)\b)", re.MULTILINE),
}
"""What files have that build a package: a ``setup.py`` may be a script of another kind, and ``setup.cfg`` the settings
of a formatter."""
_FINDS = re.compile(r"\bpackages\s*=\s*(?:(?:setuptools\.)?find_packages\(\s*(?:\)|(?:in|ex)clude\b)|find:)")
"""``find_packages()`` from the folder of the file, in setup.py or setup.cfg."""
_FINDS_MORE = re.compile(
    r"namespace|package_dir|py_modules|\bwhere\s*=|packages\s*=\s*[^fs\s]|^\[tool\.(?!setuptools_scm)|"
    r"packages\s*=[^\n]*\)\s*\+",
    re.MULTILINE,
)
"""Packages and modules that it does not find: named ones, and those of other folders."""
_BOUND = re.compile(r"[ \t]*(?:(?P<sign>={1,3}|~=|<=|<|\^)[ \t]*)?(?P<release>\d[\d.]{0,20})")


def required_releases(path: Path, root: Path, *, shown: bool = True) -> Mapping[str, str]:
    """The newest release that the requirements of a file's project permit, by distribution in lowercase with hyphens.

    ``1.9`` stands for all of ``1.9.x``; a release that a direct reference does not name is empty. Distributions without
    an upper bound are absent. The folders from that of ``path`` up to its repository, or up to ``root`` if it is in
    none, are read; the nearest bound applies. ``shown``: also what the commands of pages install.
    """
    found: dict[str, str] = {}
    for folder in folders_of(path.parent, root):
        if own := files_of_part(path, folder):
            bounds_here: Mapping[str, str] = {**(_lowest(_pages(folder)) if shown else {}), **_lowest(own)}
        else:
            bounds_here = _bounds_in(folder) if shown else _stated_in(folder)
        for name, bound in bounds_here.items():
            found.setdefault(name, bound)
    return found


_OF_PART = re.compile(r"^(?:requirements?|environment|env|conda)[-_.](?P<part>[a-z]{4,20})\.(?:txt|in|ya?ml)$")


def files_of_part(path: Path, folder: Path) -> list[Path]:
    """The requirement files of a folder that are named after a part of the project which has ``path``:
    ``requirements_eval.txt`` of ``listen-eval-kit/run.py``. It has an environment of its own."""
    own = Path(os.path.abspath(path))  # noqa: PTH100 - Path.absolute keeps ".."
    if not own.is_relative_to(folder):
        return []
    words = set(re.split(r"[^a-z]+", own.relative_to(folder).with_suffix("").as_posix().lower()))
    files = _requirement_files(folder)
    named = ((file, _OF_PART.match(file.name.lower())) for file in files if file.parent == folder)
    return [file for file, one in named if one is not None and one["part"] in words] if len(files) > 1 else []


@lru_cache(maxsize=256)
def folders_of(folder: Path, root: Path) -> tuple[Path, ...]:
    """The folder and those above it in the same repository, or in ``root``."""
    own = Path(os.path.abspath(folder))  # noqa: PTH100 - Path.absolute keeps ".."
    above = [own, *own.parents][:MOST_FOLDERS]
    top = next((one for one in above if (one / ".git").exists()), None)
    if top is None:
        top = Path(os.path.abspath(root if root.is_dir() else folder))  # noqa: PTH100 - as above
    return tuple(above[: above.index(top) + 1]) if top in above else (own,)


@lru_cache(maxsize=256)
def _bounds_in(folder: Path) -> Mapping[str, str]:
    """The lowest upper bound of each distribution in the requirement files of one folder, or, without one there, in
    the commands that its pages and Dockerfiles give."""
    return MappingProxyType({**_lowest(_pages(folder)), **_stated_in(folder)})


@lru_cache(maxsize=256)
def _stated_in(folder: Path) -> Mapping[str, str]:
    locked: dict[str, str] = {}
    for name in sorted(set(_names(folder)) & _LOCKS):
        with suppress(UnreadableFile):
            text = read_text(LintTarget(folder / name, name, "notebook", folder)).text  # megabytes, as notebooks
            for one in _LOCKED.finditer(text):
                locked.setdefault(_distribution(one["name"] or one["pinned"]), one["release"] or one["given"])
    return MappingProxyType({**_lowest(_requirement_files(folder)), **locked})


@lru_cache(maxsize=16)
def bounds_below(root: Path) -> tuple[tuple[Path, Mapping[str, str]], ...]:
    """The folders below one with requirement files, and the lowest upper bound of each distribution in these."""
    found: list[tuple[Path, Mapping[str, str]]] = []
    for count, (folder, folders, names) in enumerate(os.walk(root)):
        folders[:] = sorted(one for one in folders if not one.startswith("."))
        files = [Path(folder, name) for name in sorted(names) if _is_requirements(name.lower())]
        if files:
            found.append((Path(folder), MappingProxyType(_lowest(files[:MOST_FILES]))))
        if count > MOST_FOLDERS_BELOW or len(found) > MOST_FILES:
            break
    return tuple(found)


def _lowest(files: Iterable[Path]) -> dict[str, str]:
    found: dict[str, str] = {}
    for file in files:
        try:
            text = read_text(LintTarget(file, str(file), "config", file)).text
        except UnreadableFile:
            continue
        if _PAGES.match(file.name.lower()):
            text = _with_arguments(text.replace("\\\n", " "))
            commands = [one["given"] for one in _INSTALLS.finditer(text)]
            stated = [*_images_in(text), *filter(None, map(_bound_of_cuda, commands))]
            stated += [one["release"] for one in _TELLS.finditer(text)]
            found.update(("torch", one) for one in stated[:1])
            text = _words_of(commands)
        elif bound := _bound_of_cuda(text):
            found["torch"] = bound
        for name, bound in bounds(text):
            known = found.get(name)
            if not known or (bound and end_of_line(bound) < end_of_line(known)):
                found[name] = bound
    return found


def _words_of(commands: Iterable[str]) -> str:
    """The words of install commands, one a line."""
    return "\n".join(word.strip("\"'") for one in commands for word in one.split())


def _images_in(text: str) -> Iterator[str]:
    """The releases of torch in the images that a text names."""
    text = _with_arguments(text)
    lines = (line for line in text.splitlines() if len(line) < LONGEST_LINE and _OF_IMAGES.search(line))
    for one in (found for line in lines for found in _IMAGE.finditer(line)):
        if one["ngc"]:
            known = torch_of_ngc(one["ngc"][-len("24.07") :])
        else:
            known = one["release"] or one["named"] or one["titled"] or f"{one['major']}.{one['minor']}"
        if known:
            yield known.rstrip(".")


_PYTORCH_OF_CONDA = re.compile(r"^[ \t]*-[ \t]*(?:pytorch::)?pytorch[ \t]*$", re.MULTILINE)
_OF_IMAGES = re.compile(r"torch|nemo[:+_]", re.IGNORECASE)
_ARGUMENT = re.compile(
    r"^[ \t]*(?:(?:ARG|export)[ \t]+)?(?P<name>[A-Z]\w*)=[\"']?(?P<value>[\w.:/-]{1,60})[\"']?[ \t]*$", re.MULTILINE
)

_VARIABLE = re.compile(r"\$(?:\{(?P<braced>[A-Z]\w*)\}|(?P<plain>[A-Z]\w*))")


def _with_arguments(text: str) -> str:
    """A text with the default of each ``ARG`` of a Dockerfile, or variable of a script, in place of its name."""
    if "$" not in text:
        return text
    given: dict[str, str] = {}
    for one in _ARGUMENT.finditer(text):
        given.setdefault(one["name"], one["value"])
    return _VARIABLE.sub(lambda one: given.get(one["braced"] or one["plain"], one[0]), text)


@lru_cache(maxsize=256)
def releases_in(text: str) -> Mapping[str, str]:
    """The newest releases that a launch file permits where it runs its programs: in an image, with a module or in an
    environment that names its torch, or by what it installs. ``rocm``: only of a job that runs on it."""
    text = re.sub(r"^[ \t]*#(?!SBATCH)[^\n]*", "", text.replace("\\\n", " "), flags=re.MULTILINE)
    modules = (one["release"] or one["named"] for one in _MODULE.finditer(text))
    found = {
        name: bound for name, bound in bounds(_words_of(one["given"] for one in _INSTALLS.finditer(text))) if bound
    }
    if first := next(chain(_images_in(text), modules), ""):
        found.setdefault("torch", first.rstrip("."))
    if platforms := [one["release"] or "" for one in _ROCM.finditer(text)]:
        found["rocm"] = next(filter(None, platforms), NEWEST_ROCM).rstrip(".")
    return MappingProxyType(found)


def _bound_of_cuda(text: str) -> str:
    """The newest torch that a conda environment with a pinned release of CUDA can have, where ``pytorch`` itself has no
    release and comes from the channel of that name; else empty."""
    cuda = _CUDA_OF_CONDA.search(text)
    if cuda is None or re.search(r"(?<![\w/:-])pytorch[ \t]*[=<>]|\btorch[ \t]*[=<>~]", text):
        return ""
    of_command = re.search(r"-c[ \t]+pytorch\b", text) and re.search(r"(?<!-c )(?<![\w-])pytorch(?![\w-])", text)
    of_channel = re.search(r"channels:(?:\s+-[ \t]*[\w-]+)*?\s+-[ \t]*pytorch\s", text)
    start = text.find("dependencies:")
    of_file = of_channel and start >= 0 and _PYTORCH_OF_CONDA.search(text, start)
    newest = _NEWEST_WITH_PYTORCH_CUDA if cuda["package"] == "pytorch-cuda" else _NEWEST_WITH_CUDA
    return newest.get(cuda["cuda"], "") if of_command or of_file else ""


def _pages(folder: Path) -> list[Path]:
    listed = [*_names(folder), *(f"docker/{name}" for name in _names(folder / "docker"))]
    return [folder / name for name in sorted(listed) if _PAGES.match(name.lower().rpartition("/")[2])][:MOST_FILES]


def pages_of(path: Path, root: Path) -> tuple[str, ...]:
    """The texts of the pages, Dockerfiles and Makefiles in the folders from that of ``path`` up to its repository, or
    up to ``root``, and in their ``docs``."""
    return tuple(text for folder in folders_of(path.parent, root) for text in _texts_of_pages(folder))


@lru_cache(maxsize=64)
def pages_below(root: Path) -> tuple[str, ...]:
    """The texts of the pages, Dockerfiles and Makefiles in a folder and in those below it, and of plain text files that
    may list commands."""
    texts: list[str] = []
    for count, (folder, inner, names) in enumerate(os.walk(root)):
        inner[:] = sorted(one for one in inner if not one.startswith(".") and one not in _NOT_PAGES)
        for name in sorted(one for one in names if _shows_starts(one) or _LISTS_COMMANDS.search(one)):
            with suppress(UnreadableFile):
                texts.append(read_text(LintTarget(Path(folder, name), name, "config", root)).text)
        if count > MOST_FOLDERS_BELOW or len(texts) > MOST_PAGES_BELOW:
            break
    return tuple(texts)


@lru_cache(maxsize=256)
def is_root(folder: Path) -> bool:
    """Whether a folder holds all of its repository: no folder above it is one."""
    own = Path(os.path.abspath(folder))  # noqa: PTH100 - Path.absolute keeps ".."
    return folder.is_dir() and ((own / ".git").exists() or not any((one / ".git").exists() for one in own.parents))


@lru_cache(maxsize=256)
def is_copied(folder: Path) -> bool:
    """Whether a folder has a license of its own, or a page that says how to cite it."""
    is_licensed = any(_LICENSE.match(name) for name in _names(folder))
    return is_licensed or any(_CITES.search(text) for text in _texts_of_pages(folder))


@lru_cache(maxsize=256)
def is_installed(path: Path, root: Path) -> bool:
    """Whether a folder from that of ``path`` up to ``root`` has a file that installs packages."""
    return any(map(_installs, folders_of(path.parent, root)))


@lru_cache(maxsize=256)
def _installs(folder: Path) -> bool:
    for name in set(_names(folder)) & _BUILDS.keys():
        try:
            if _BUILDS[name].search(read_text(LintTarget(folder / name, name, "config", folder)).text):
                return True
        except UnreadableFile:
            return True
    return False


def is_packaged(path: Path, root: Path) -> bool:
    """Whether what installs packages from a folder has that of ``path`` among them, as far as it shows, and is not
    named after another one, beside which this one is for its own use."""
    own = Path(os.path.abspath(path))  # noqa: PTH100 - Path.absolute keeps ".."
    folders = folders_of(path.parent, root)
    return any(
        _installs(one) and not _is_left_out(own, one) and not _is_beside_its_package(own, one) for one in folders
    )


_NAME = re.compile(
    r"^[ \t]*name[ \t]*=[ \t]*(?:\n[ \t]*)?[\"']?(?P<name>[A-Za-z][\w.-]*)[\"']?[ \t]*(?:,[ \t]*)?(?:#.*)?$",
    re.MULTILINE,
)


def _is_beside_its_package(path: Path, folder: Path) -> bool:
    """Whether the distribution of a folder has the name of another package in it than that of ``path``."""
    for base in (folder / "src", folder):
        if path.is_relative_to(base):
            top = path.relative_to(base).parts[0]
            packages = {_distribution(name) for name in _names(base) if "__init__.py" in _names(base / name)}
            given = _names_of_distribution(folder)
            return _distribution(top) not in given and not given.isdisjoint(packages)
    return False


@lru_cache(maxsize=256)
def _names_of_distribution(folder: Path) -> frozenset[str]:
    found: set[str] = set()
    for name in ("setup.py", "setup.cfg", "pyproject.toml"):
        file = folder / name
        with suppress(UnreadableFile):
            text = read_text(LintTarget(file, str(file), "config", file)).text
            found.update(_distribution(one["name"]) for one in _NAME.finditer(text))
    return frozenset(found)


def _is_left_out(path: Path, folder: Path) -> bool:
    """Whether setuptools has to find the packages below a folder and does not find that of ``path``, since
    ``find_packages()`` goes through no folder without ``__init__.py``."""
    if all("__init__.py" in _names(one) for one in path.parents if one != folder and one.is_relative_to(folder)):
        return False
    texts = []
    for name in _names(folder):
        if name in _PACKAGING or name == "pyproject.toml":
            try:
                texts.append(read_text(LintTarget(folder / name, name, "config", folder)).text)
            except UnreadableFile:
                return False
    return any(map(_FINDS.search, texts)) and not any(map(_FINDS_MORE.search, texts))


_SCRIPTS = re.compile(r"^\[(?:project|tool\.poetry)\.scripts\][^\n]*\n((?:(?!\[)[^\n]*\n?)*)", re.MULTILINE)
_COMMAND = re.compile(r"^[ \t]*[\"']?([\w.-]+)[\"']?[ \t]*=[ \t]*[\"']([\w.]+)[ \t]*:", re.MULTILINE)


def console_commands(path: Path, root: Path) -> dict[str, str]:
    """The commands of ``[project.scripts]`` in the folders of :func:`pages_of`, with the modules that they run."""
    found: dict[str, str] = {}
    for folder in folders_of(path.parent, root):
        file = folder / "pyproject.toml"
        with suppress(UnreadableFile):
            text = read_text(LintTarget(file, str(file), "config", folder)).text if file.name in _names(folder) else ""
            tables = (one[1] for one in _SCRIPTS.finditer(text))
            found.update((one[1], one[2]) for table in tables for one in _COMMAND.finditer(table))
    return found


@lru_cache(maxsize=256)
def may_install(path: Path, root: Path, word: str) -> bool:
    """Whether a requirement file or a page in the folders of :func:`pages_of` has a word, or there is no such file."""
    listed = [file for folder in folders_of(path.parent, root) for file in _requirement_files(folder)]
    return not listed or is_required(path, root, word)


def is_required(path: Path, root: Path, word: str) -> bool:
    """Whether a requirement file or a page in the folders of :func:`pages_of` has a word, or cannot be read."""
    texts = []
    for file in (file for folder in folders_of(path.parent, root) for file in _requirement_files(folder)):
        try:
            texts.append(read_text(LintTarget(file, str(file), "config", file)).text)
        except UnreadableFile:
            return True
    return any(word in text.lower() for text in (*texts, *pages_of(path, root)))


@lru_cache(maxsize=256)
def _texts_of_pages(folder: Path) -> tuple[str, ...]:
    listed = [*_names(folder), *(f"docs/{name}" for name in _names(folder / "docs"))]
    texts = []
    for name in sorted(one for one in listed if _shows_starts(one.rpartition("/")[2]))[:MOST_FILES]:
        try:
            texts.append(read_text(LintTarget(folder / name, name, "config", folder)).text)
        except UnreadableFile:
            continue
    return tuple(texts)


def _shows_starts(name: str) -> bool:
    return _READABLE.search(name) is not None and _OF_THE_PAST.search(name) is None


def _requirement_files(folder: Path) -> tuple[Path, ...]:
    listed = [*_names(folder), *(f"{inner}/{name}" for inner in _FOLDERS for name in _names(folder / inner))]
    fitting = [name for name in listed if _is_requirements(name.lower())]
    others = sorted(one for one in listed if one.endswith((".yml", ".yaml")) and one not in fitting)[:MOST_FILES]
    fitting += [name for name in others if _is_environment(folder / name)]
    return tuple(folder / name for name in sorted(fitting)[:MOST_FILES])


@lru_cache(maxsize=1024)
def _is_environment(file: Path) -> bool:
    """Whether a YAML file of any name is an environment of conda."""
    try:
        return _OF_CONDA.search(read_text(LintTarget(file, file.name, "config", file.parent)).text) is not None
    except UnreadableFile:
        return False


def is_installed_by(path: Path, root: Path, name: str) -> bool:
    """Whether a requirement file or a command of a page, in the folders from that of ``path`` up to its repository or
    to ``root``, installs a distribution (in lowercase with hyphens), of any release."""
    folders = folders_of(path.parent, root)
    return any(name in _installed_in(folder, tuple(files_of_part(path, folder))) for folder in folders)


_AT_LEAST = (
    r"(?<![\w./-])(?:[\w-]{{1,40}}::)?(?:{names})(?:\[[\w, -]{{0,60}}\])?"
    r"(?:[ \t]*=[ \t]*(?:\{{[ \t]*version[ \t]*=[ \t]*)?[\"'])?[ \t]*"
    r"(?:>=|={{1,3}}|~=|\^|>)[ \t]*v?(?P<release>\d[\d.]{{0,20}})"
)
"""A requirement with a lower bound, also of Poetry."""


def oldest_required(path: Path, root: Path, *names: str) -> str:
    """The oldest release that the nearest requirement file with a lower bound permits of a distribution, which has
    these names in it; empty if there is none."""
    bound = re.compile(_AT_LEAST.format(names="|".join(one.replace("-", "[-_]") for one in names)), re.IGNORECASE)
    for folder in folders_of(path.parent, root):
        found: list[str] = []
        for file in files_of_part(path, folder) or _requirement_files(folder):
            with suppress(UnreadableFile):
                text = read_text(LintTarget(file, str(file), "config", file)).text
                found += [one["release"].rstrip(".") for one in bound.finditer(re.sub(r"(?m)#.*", "", text))]
        if found:
            return min(found, key=release)
    return ""


@lru_cache(maxsize=256)
def _installed_in(folder: Path, own: tuple[Path, ...]) -> frozenset[str]:
    """The distributions, and other words, in the requirement files of a folder, or its ``own`` of a part of the
    project, and in the commands of its pages."""
    found: set[str] = set()
    for file in (*(own or _requirement_files(folder)), *_pages(folder)):
        with suppress(UnreadableFile):
            text = read_text(LintTarget(file, str(file), "config", file)).text
            if _PAGES.match(file.name.lower()):
                commands = _INSTALLS.finditer(text.replace("\\\n", " "))
                text = "\n".join(one["given"] for one in commands)
            found.update(_distribution(one) for one in _NAMED.findall(re.sub(r"#.*", "", text)))
    return frozenset(found)


def _is_requirements(name: str) -> bool:
    if name.endswith((".txt", ".in")):
        return "require" in name
    if name.endswith((".yml", ".yaml")):
        return "env" in name or name.startswith("conda") or name == "cog.yaml"
    return name in _FILES


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)  # noqa: PTH208 - names alone
    except OSError:
        return []


def bounds(text: str) -> Iterator[tuple[str, str]]:
    """The distributions of a requirement file with an upper bound, and the newest release permitted; empty for a branch
    or a commit."""
    for pin in _PIN.finditer(text):
        ranges = (pin["quoted"] or pin["bare"]).split(",")
        limits = [_newest(bound) for one in ranges if (bound := _BOUND.match(one))]
        if any(limits):
            yield _distribution(pin["name"]), min(filter(None, limits), key=end_of_line)
    for one in _DIRECT.finditer(text):
        tag = _TAG.search(one["address"])
        yield _distribution(one["name"]), tag["release"].rstrip(".") if tag else ""
    for row in _LISTED.finditer(text):
        yield _distribution(row["name"]), ".".join(map(str, release(row["release"])))


def _distribution(name: str) -> str:
    """The name on PyPI of a distribution, which conda calls otherwise for torch."""
    plain = name.lower().replace("_", "-")
    return "torch" if plain == "pytorch" else plain


def _newest(bound: re.Match[str]) -> str:
    """The newest release within one bound; empty if there is none."""
    numbers = list(release(bound["release"]))
    if bound["sign"] == "~=":
        numbers = numbers[:-1]
    elif bound["sign"] == "^":
        numbers = numbers[:1] if numbers[0] else numbers[:2]
    elif bound["sign"] == "<":
        numbers = _before(numbers)
    return ".".join(map(str, numbers))


def _before(numbers: list[int]) -> list[int]:
    """The newest line of releases before one: 1 for 2.0, 1.6 for 1.7.0, 2.1.2 for 2.1.3."""
    while numbers and numbers[-1] == 0:
        numbers = numbers[:-1]
    return [*numbers[:-1], numbers[-1] - 1] if numbers else []
