"""Finds and summarizes the Python files of a project that other files import. Nothing is imported or run."""

from __future__ import annotations

import ast
import os
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any

from doctor.lint.engine.absent_modules import may_appear, may_give
from doctor.lint.engine.discovery import LintTarget, UnreadableFile, read_text
from doctor.lint.engine.imported_names import failing_import, imports_at_top, modules_at_top, names_in
from doctor.lint.engine.project_requirements import (
    console_commands,
    is_copied,
    is_installed,
    is_packaged,
    is_required,
    is_root,
    may_install,
    pages_below,
    pages_of,
)
from doctor.lint.python.project.imported_functions import ModuleSummary
from doctor.lint.python.project.module_summary import summary_of
from doctor.lint.python.script import Script, last_name

LONGEST_MODULE = 300_000
"""Characters of a module that is followed; longer ones are generated, or data."""
MOST_FOLDERS = 12
"""Folders above a file in which an absolute import is searched."""
MOST_TEXTS = 3_000
"""Files that are searched for a word."""
MOST_KEPT = 30_000_000
"""Characters of files that are kept in memory."""
MOST_NOTEBOOKS = 200
"""Notebooks that are searched for a word."""
MOST_SCRIPTS = 128
"""Parsed modules that are kept."""
MOST_RELATED = 40
"""Modules that are searched for the words of collectives, from one on."""
_SOURCE_FOLDERS = ("", "src")
_RELEVANT = re.compile(
    r"distributed|\bdist\b|barrier|all_?reduce|all_?gather|broadcast|wait_for_everyone|[Aa]ccelerat|lightning|"
    r"fsdp|FSDP|deepspeed|horovod|RANK|get_rank|_rank\b|is_main|is_master"
)
"""Words of modules with a collective or a test of the rank."""
_JOINS = re.compile(
    r"distributed|\bdist\.|nccl|WORLD_SIZE|world_size|RANK|accelerat|lightning|fabric|deepspeed|horovod|fairscale|"
    r"data_?parallel|fsdp|\bDDP\b|trainer|transformers|\btrl\b|\bray\b|mmcv|mmengine|detectron|fairseq|megatron|nemo|"
    r"composer|ultralytics|\bspawn\b",
    re.IGNORECASE,
)
"""Words of programs that are for several ranks, or may be: of PyTorch, and of libraries that create the group."""
_ADDS_TO_PATH = re.compile(r"^[^#\n]*(?:\bsys\.path\b|PYTHONPATH|addsitedir|pip3? install (?:-e|\.))", re.MULTILINE)
_OWN_FOLDER = re.compile(r"getcwd\(\)|__file__|[\"']\.{1,2}/?[\"']")
_ENTRY_OF_TREE = re.compile(r"^[ \t]*(?:[│|][ \t]*)*(?:[├└│]|\|--|\+--|`--).*$", re.MULTILINE)
"""A line of a page that shows the files of a project as a tree."""
_STAR = re.compile(r"^[ \t]*from[ \t]+(?P<module>[.\w]+)[ \t]+import[ \t]+\*", re.MULTILINE)
_MOST_STARS = 3
"""Modules in a row that give all names of another one."""
_NO_GPU = re.compile(r".*VISIBLE_DEVICES'\] = '(?:-1)?'$|(?:\w+\.)?device = (?:torch\.device\()?'cpu'")
_IN_TURN = re.compile(
    r"(?:rank|LOCALID|PROCID)\w{0,40}[\"')\]]*\s*%\s*(?:[\w.]*device_count\(|(?:\w+\.)?\w*(?:gpu|device))",
    re.IGNORECASE,
)
_MAY_USE_NCCL = re.compile(
    r"nccl|init_process_group\(\s*\)|\bTrainer\(|\bAccelerator\(|\bFabric\(|deepspeed|horovod", re.IGNORECASE
)
_GROUP = re.compile(r"\binit_process_group\((?P<given>(?:[^()]|\([^()]*\)){0,400})\)")
_GIVES_RANK = re.compile(r"\brank\s*=|world_size|\*|,\s*(?!\w+\s*=)[^\s,)]|(?:file|tcp)://|store\s*=")
"""Arguments that say more than the backend: ``rank``, a file, a store, or several without a name."""
_STARTS_OR_RANKS = re.compile(
    r"spawn\(|start_processes|Process\(|Popen|subprocess|os\.system|launch\w{0,40}\(|Trainer\(|Accelerator\(|Fabric\(|deepspeed|horovod|\bhvd\b|"
    r"mpi4py|\bray\b|ignite|\bxmp\b|submitit|SLURM_|OMPI_|PMI_|environ\[[\"'](?:LOCAL_)?(?:RANK|WORLD_SIZE)[\"']\]\s*=(?!=)|"
    r"environ\.(?:setdefault|update)\([^)\n]{0,80}(?:RANK|WORLD_SIZE)|environ\s*\|="
)
_COMMENT = re.compile(r"#[^\n]*")
_STEPS = re.compile(r"\b(?:srun|mpirun|mpiexec)\b")
_SPAWNS = re.compile(
    r"\b(?:mp|multiprocessing)\.(?:spawn|start_processes)\(|\bmultiprocessing import [^#\n]{0,100}\bspawn\b"
)
_THREADS = re.compile(r"\bDataParallel\b|\bdata_parallel\b")
"""Names of torch.nn that use several GPUs from one process."""
_COUNTS_TASKS = re.compile(rf"{_JOINS.pattern}|SLURM_|OMPI_|PMI_", re.IGNORECASE)
_OF_TASKS = re.compile(
    r"SLURM_|OMPI_|PMI_|mpi4py|horovod|\bhvd\b|lightning|\bFabric\b|init_process_group|WORLD_SIZE|world_size|\bRANK\b|"
    r"deepspeed|init_distributed|\bidist\b|distributed|\bDDP\b|megatron|nemo|fairseq|mmengine|mmcv|detectron2|composer",
    re.IGNORECASE,
)
"""Words of programs whose ranks something else starts. Accelerate and the Trainer of Transformers read no variables of
Slurm: more tasks would be as many jobs."""
_IMPORT = re.compile(
    r"^[ \t]*(?:from[ \t]+([.\w]+)[ \t]+import[ \t]+(\w+|\*|(?=\())|import[ \t]+([.\w]+))", re.MULTILINE
)
_OF_A_PART = re.compile(
    r"^(?!.*(?:torch|keras|tensor|segmentation|hugging|flax|jax))(?:\w+_)?(?:data|utils?|utilities|configs?|models?|trainer|"
    r"loader|dataloader|loss(?:es)?|generator|nets?|networks?|helpers?|tools|params|options|preprocess\w*|metrics?)(?:_\w+)?$"
)
"""Names of parts of a program, and of hardly a distribution."""
_SHORT = 5
"""Letters of names that distributions have as their last word: ``rouge_score``."""
_FRAMEWORKS = frozenset({"torch", "lightning", "pytorch_lightning", "accelerate", "transformers", "deepspeed", "numpy"})


class ProjectFiles:
    """The modules among the files to lint, which are the only ones that imports are followed to. Summaries are kept,
    and so is ``memo``, what rules derived from them."""

    def __init__(self, targets: Iterable[LintTarget]) -> None:
        read = [one for one in targets if one.skipped is None]
        python = (one for one in read if one.kind == "python")
        self._texts = [one for one in read if one.kind in ("python", "shell", "config")]
        self._shown = {one.shown: one for one in self._texts}
        self._notebooks = [one for one in read if one.kind == "notebook"]
        self._targets = {os.path.abspath(one.path): one for one in python}  # noqa: PTH100 - Path.absolute keeps ".."
        self._names = {name for path in self._targets for name in Path(path).with_suffix("").parts}
        self._by_filename: dict[str, list[str]] = defaultdict(list)
        for path in self._targets:
            self._by_filename[os.path.basename(path)].append(path)  # noqa: PTH119 - called for each file
        self._summaries: dict[str, ModuleSummary | None] = {}
        self._scans: dict[str, tuple[bool, tuple[str, ...]]] = {}
        self._relevant: dict[str, bool] = {}
        self._located: dict[tuple[str, str], str | None] = {}
        self.memo: dict[tuple[str, ...], Any] = {}
        self._kept: dict[str, str] = {}
        self._room = MOST_KEPT

    @property
    def is_one_file(self) -> bool:
        """Whether there is one module only."""
        return len(self._targets) < 2

    def has(self, importer: str, module: str) -> bool:
        """Whether there is a module of that dotted name, as a file at ``importer`` imports it."""
        return self._locate(importer, module) is not None

    def named(self, importer: str, module: str) -> tuple[str, ...]:
        """The shown paths of the modules that a dotted name may mean in the file that is shown as ``importer``; of an
        absolute one, all that end with it."""
        key = ("named", importer if module.startswith(".") else "", module)
        if key not in self.memo:
            target = self._shown.get(importer)
            found = self._alike(module)
            if module.startswith(".") and target is not None:
                found = [self._locate(os.path.abspath(target.path), module) or ""]  # noqa: PTH100 - as above
            self.memo[key] = tuple(self._targets[one].shown for one in found if one in self._targets)
        found_before: tuple[str, ...] = self.memo[key]
        return found_before

    def mentioning(self, word: str, *, launches: bool = False) -> tuple[tuple[str, str], ...]:
        """The shown path and the text of each script and launch file with a word; ``launches``: of launch files."""
        key = ("mentioning", word, str(launches))
        if key not in self.memo:
            read = [one for one in self._texts if not launches or one.kind != "python"]
            texts = ((one.shown, self._read(one)) for one in read[:MOST_TEXTS])
            self.memo[key] = tuple((shown, text) for shown, text in texts if word in text)
        found: tuple[tuple[str, str], ...] = self.memo[key]
        return found

    def text_at(self, shown: str) -> str:
        """The text of a script or launch file by its shown path; empty if there is none."""
        key = ("text", shown)
        if key not in self.memo:
            self.memo[key] = self._read(self._shown[shown]) if shown in self._shown else ""
        found: str = self.memo[key]
        return found

    def can_run(self, shown: str) -> bool:
        """Whether the imports of the script that is shown by this path may succeed."""
        target = self._shown.get(shown)
        return target is None or not self.fails_to_import(os.path.abspath(target.path))  # noqa: PTH100 - as above

    def notebooks(self, word: str) -> tuple[str, ...]:
        """The texts of the notebooks with a word."""
        if ("notebooks",) not in self.memo:
            texts = (self._read(one).replace("\\n", "\n") for one in self._notebooks[:MOST_NOTEBOOKS])
            self.memo["notebooks",] = tuple(texts)
        return tuple(text for text in self.memo["notebooks",] if word in text)

    def is_whole(self, location: str) -> bool:
        """Whether all of the repository of the file at ``location`` is linted, as far as it shows."""
        target = self._targets.get(location)
        return target is not None and not target.is_named and is_root(target.root)

    def root_of(self, location: str) -> str:
        """The folder that was given to be linted, in which the file at ``location`` was found; empty if it is none."""
        target = self._targets.get(location)
        return "" if target is None or target.is_named else os.path.abspath(target.root)  # noqa: PTH100 - as above

    def is_copied_project(self, folder: str, root: str) -> bool:
        """Whether a folder below ``root`` has a license of its own, or a page that says how to cite it."""
        return folder != root and is_copied(Path(folder))

    def pages_in(self, folder: str) -> tuple[str, ...]:
        """The texts of the pages of a folder."""
        return pages_of(Path(folder) / "program.py", Path(folder))

    def pages_at_root(self, location: str) -> tuple[str, ...]:
        """The texts of the pages of the folder that :meth:`root_of` gives."""
        root = self.root_of(location)
        return self.pages_in(root) if root else ()

    def installs(self, location: str) -> bool:
        """Whether the file at ``location`` is of a package that its project installs, which others may import."""
        target = self._targets.get(location)
        beside = os.path.join(os.path.dirname(location), "__init__.py")  # noqa: PTH118, PTH120 - as above
        return target is None or (beside in self._targets and is_packaged(target.path, target.root))

    def pages(self, location: str) -> tuple[str, ...]:
        """The texts of the pages, Dockerfiles and Makefiles that may show how the file at ``location`` is started."""
        target = self._targets.get(location)
        return pages_of(target.path, target.root) if target is not None else ()

    def all_pages(self, location: str) -> tuple[str, ...]:
        """The texts of the pages, Dockerfiles and Makefiles of the whole project of the file at ``location``."""
        root = self.root_of(location)
        return pages_below(Path(root)) if root else ()

    def console_commands(self, location: str) -> Mapping[str, str]:
        """The commands that the project of the file at ``location`` installs, with the dotted modules that they run."""
        target = self._targets.get(location)
        return console_commands(target.path, target.root) if target is not None else {}

    def may_install(self, location: str, word: str) -> bool:
        """Whether the requirements of the project of the file at ``location`` have a word, as far as they are known."""
        target = self._targets.get(location)
        return target is None or may_install(target.path, target.root, word)

    def texts_around(self, location: str) -> Iterator[str]:
        """The text of a module, and of those of the project that it imports, the nearest first."""
        yield from map(self._text, self._related(location) if location in self._targets else ())

    def fails_to_import(self, location: str) -> bool:
        """Whether a module that no launch file names imports a name from a module of the project that has none of that
        name, or every module of the project that imports it does."""
        key = ("fails to import", location)
        if key not in self.memo and location in self._targets:
            self.memo[key] = False  # while it is searched: modules that import each other
            self.memo[key] = self._imports_a_missing_name(location) or self._is_imported_in_vain(location)
        return bool(self.memo.get(key))

    def _is_imported_in_vain(self, location: str) -> bool:
        if "__main__" in self._text(location) or os.path.basename(location) == "__init__.py":  # noqa: PTH119
            return False
        importers = self._importers_of(location)
        return bool(importers) and all(map(self.fails_to_import, importers))

    def _importers_of(self, location: str) -> list[str]:
        """The modules that import one; none if something else may start or import it."""
        stem = PurePath(location).stem
        word = re.escape(stem)
        named = re.compile(rf"^[^#\n]*(?:\b(?:import|from)\b[^#\n]*\b{word}\b|\b{word}\.py\b)", re.MULTILINE)
        found = []
        for target in self._texts:
            path = os.path.abspath(target.path)  # noqa: PTH100 - as above
            if path == location or not named.search(self._read(target)):
                continue
            imported = self._scanned(path)[1] if path in self._targets else ()
            if location in imported:
                found.append(path)
            elif stem not in {PurePath(one).stem for one in imported}:
                return []
        return found

    def _imports_a_missing_name(self, location: str) -> bool:
        key = ("missing name", location)
        if key not in self.memo:
            self.memo[key] = ""  # while it is searched
            if not self._is_started(location):
                text = self._text(location)
                self.memo[key] = failing_import(
                    text,
                    lambda module, name: self._names_of(location, module, name, stars=_MOST_STARS),
                    lambda module: self._is_own(location, module),
                ) or next(
                    (
                        module
                        for module, names in imports_at_top(text)
                        if self._is_out_of_reach(location, module, names)
                        or any(self.lacks(location, module, name) for name in names)
                    ),
                    next(
                        (
                            module
                            for module in modules_at_top(text)
                            if self._is_absent(location, module)
                            or self._is_plainly_out_of_reach(location, module)
                            or self._is_missing_beside(location, module)
                        ),
                        self._of_another_copy(location, text),
                    ),
                )
        return bool(self.memo[key])

    def lacks(self, importer: str, module: str, name: str) -> bool:
        """Whether a module of the project is the one that a file imports, which nothing that shows starts, and surely
        has no such name."""
        is_module, names = self._names_of(importer, module, name)
        if is_module or names is None or name in names or not self._is_meant(importer, module):
            return False
        package, _, own = module.rpartition(".")
        if package.strip("."):  # the package may give its own name to something else
            given = self._names_of(importer, package, own)[1]
            if given is None or own in given:
                return False
        return not self._may_be_repaired(importer) and not self._may_appear(importer, module, name)

    def _is_absent(self, importer: str, module: str) -> bool:
        """Whether a package of the project is surely the one that a file imports from, and has no module of a name."""
        package = module.rpartition(".")[0] if module.strip(".").count(".") else module[: -len(module.lstrip("."))]
        name = module.rpartition(".")[2]
        if not package or not name or self._locate(importer, module) is not None:
            return False
        is_new = name not in self._names
        return (is_new and self.lacks(importer, package, name)) or self._is_absent(importer, package)

    def _may_be_repaired(self, location: str) -> bool:
        """Whether a launch file of the same folder or a page names a file, whose errors will then be repaired."""
        name = os.path.basename(location)  # noqa: PTH119 - as above
        return self._is_started(location) or any(name in text for text in self.pages(location))

    def _is_meant(self, importer: str, module: str) -> bool:
        """Whether an import is of the project, and not of a distribution: it is relative, its package is a folder or
        file beside an importer that is in no package, or the importer has another import from it that succeeds."""
        if module.startswith("."):
            return True
        head = module.partition(".")[0]
        located = self._locate(importer, head) if head and head not in sys.stdlib_module_names else None
        texts = (self._text(importer), *map(self._text, self._scanned(importer)[1]))
        if located is None or any(map(_ADDS_TO_PATH.search, texts)):
            return False
        folder = os.path.dirname(importer)  # noqa: PTH120 - as above
        package = os.path.join(folder, "__init__.py")  # noqa: PTH118 - as above
        beside = {os.path.join(folder, f"{head}.py"), os.path.join(folder, head, "__init__.py")}  # noqa: PTH118
        if located in beside and package not in self._targets:
            return True
        others = [one for one in imports_at_top(texts[0]) if one[0].partition(".")[0] == head]
        return any(self._has_all(importer, *one) for one in others)

    def _has_all(self, importer: str, module: str, names: list[str]) -> bool:
        known = self._names_of(importer, module, names[0])[1]
        return known is not None and known.issuperset(names)

    def _may_appear(self, importer: str, module: str, name: str) -> bool:
        """Whether a name of a module may be that of a module which is built, downloaded or left out of the project, or
        be given to it by another file."""
        place = self._locate(importer, module)
        target = self._targets.get(place or "")
        if place is None or target is None or is_installed(target.path, target.root):
            return True
        texts = [text for _, text in self.mentioning(name)]
        texts += (*self.notebooks(name), *(text for text in self.pages(importer) if name in text))
        if any(may_give(name, text) for text in texts):
            return True
        is_package = os.path.basename(place) == "__init__.py"  # noqa: PTH119 - as above
        root = Path(os.path.abspath(target.root))  # noqa: PTH100 - as above
        return is_package and ("__path__" in self._text(place) or may_appear(Path(place).parent, root, name))

    def _is_started(self, location: str) -> bool:
        """Whether a launch file of the same folder names a module: an error in its imports will be repaired."""
        named = re.compile(rf"(?<![\w-]){re.escape(os.path.basename(location))}\b")  # noqa: PTH119
        folder = os.path.dirname(location)  # noqa: PTH120 - as above
        launches = (one for one in self._texts if one.kind != "python")
        beside = (one for one in launches if os.path.abspath(one.path).startswith(folder))  # noqa: PTH100
        return any(named.search(self._read(one)) for one in beside)

    def _is_own(self, importer: str, module: str) -> bool:
        """Whether an import of a module in a package is of the project: nothing requires a distribution of that name,
        and the importer, which no page names, adds at most folders of the project to the path."""
        head, separator, _ = module.partition(".")
        target = self._targets[importer]
        if not head or not separator or self._locate(importer, module) is None or self._may_be_repaired(importer):
            return False
        added = [found[0] for found in _ADDS_TO_PATH.finditer(self._text(importer))]
        lines = [line for line in self._text(importer).splitlines() if any(line.startswith(one) for one in added)]
        is_added = all(_OWN_FOLDER.search(line) for line in lines)
        return is_added and not is_required(target.path, target.root, head.lower())

    def _names_by_stars(self, path: str, stars: int) -> frozenset[str] | None:
        """All names of a module, with those that modules of the project give it by ``import *``, through so many."""
        text = self._text(path)
        names = names_in(_STAR.sub("pass", text))
        for found in _STAR.finditer(text) if names is not None else ():
            given = self._locate(path, found["module"])
            more = self._names_by_stars(given, stars - 1) if given in self._targets and given and stars else None
            names = names | more if names is not None and more is not None else None
        return names

    def _names_of(self, importer: str, module: str, name: str, stars: int = 0) -> tuple[bool, frozenset[str] | None]:
        """Whether a name of a module is a module too, and all names in it, as far as they are known: of an absolute
        import, in every module of the project that may be meant. ``stars``: as in :meth:`_names_by_stars`."""
        if self._locate(importer, module) is None:
            return False, None
        names: set[str] = set()
        for path in self._alike(module) if module.lstrip(".") else [self._locate(importer, module) or ""]:
            key = ("names", path, str(stars))
            if key not in self.memo:
                is_read = path in self._targets
                named = self._names_by_stars(path, stars) if stars and is_read else None
                self.memo[key] = named if stars else names_in(self._text(path)) if is_read else None
            if self.memo[key] is None:
                return False, None
            names |= self.memo[key]
        below = self._locate(importer, f"{module}{'' if module.endswith('.') else '.'}{name}")
        return below is not None or name in self._names, frozenset(names)

    def _alike(self, module: str) -> list[str]:
        """The modules whose path ends with a dotted name."""
        tail = f"{os.sep}{module.lstrip('.').replace('.', os.sep)}"
        return [path for path in self._targets if path.endswith((f"{tail}.py", f"{tail}{os.sep}__init__.py"))]

    def _is_out_of_reach(self, importer: str, module: str, names: list[str]) -> bool:
        """Whether a module that is neither beside the importer nor below a folder above it is one of the project which
        has these names, in a folder that nothing adds to the path."""
        if module.startswith(".") or self._locate(importer, module) is not None:
            return False
        head, *inner = module.split(".")
        if not head or head in sys.stdlib_module_names or head not in self._names:
            return False
        tail = os.path.join(os.sep, head, *inner)  # noqa: PTH118 - as above
        meant = [path for path in self._targets if path.endswith((f"{tail}.py", f"{tail}{os.sep}__init__.py"))]
        if not meant or not any(frozenset(names) <= (names_in(self._text(path)) or frozenset()) for path in meant):
            return False
        texts = [self._text(importer), *map(self._text, self._scanned(importer)[1])]
        folders = {os.path.basename(path[: path.rindex(tail)]) for path in meant}  # noqa: PTH119 - as above
        lines = (line for _, text in self.mentioning("PYTHONPATH", launches=True) for line in text.splitlines())
        texts += [line for line in lines if any(folder in line for folder in folders)]
        target = self._targets[importer]
        pages = pages_of(target.path, target.root)
        is_added = any(_ADDS_TO_PATH.search(text) for text in (*texts, *pages))
        installed = any(is_installed(self._targets[path].path, target.root) for path in (importer, *meant))
        return not is_added and not installed and not is_required(target.path, target.root, head.lower())

    def _is_plainly_out_of_reach(self, importer: str, module: str) -> bool:
        """The same of ``import module``, whose names are what the importer uses of it."""
        used = re.findall(rf"(?<![\w.]){re.escape(module)}\.(\w+)", self._text(importer)) if "." not in module else []
        return len(set(used)) > 1 and self._is_out_of_reach(importer, module, used)

    def _is_missing_beside(self, importer: str, module: str) -> bool:
        """Whether a script that imports several files beside it imports one more, of the name of a part of a program
        (``data_generator``) or that of one of them after another word (``own_evaluation`` beside ``evaluation``), which
        neither the project nor its requirements have."""
        head = module.partition(".")[0]
        if head in self._names or head in sys.stdlib_module_names:
            return False
        lines = self._text(importer).splitlines()
        if any(_ADDS_TO_PATH.search(line) and "../" not in line for line in lines):
            return False
        target, folder = self._targets[importer], os.path.dirname(importer)  # noqa: PTH120 - as above
        beside = {
            one
            for one in modules_at_top(self._text(importer))
            if os.path.join(folder, f"{one}.py") in self._targets  # noqa: PTH118 - as above
        }
        is_variant = any(len(one) > _SHORT and head.endswith(f"_{one}") for one in beside)
        if not (is_variant or _OF_A_PART.search(head)):
            return False
        if len(beside) < 2 or self._may_be_repaired(importer):
            return False
        words = {head.lower(), head.lower().replace("_", "-")}
        texts = [text for _, text in self.mentioning(head)]
        texts += [text for text in self.pages(importer) if head in text]
        root = Path(os.path.abspath(target.root))  # noqa: PTH100 - as above
        return not (
            any(may_install(target.path, target.root, word) for word in words)
            or any(may_give(head, text) for text in texts)
            or may_appear(Path(folder), root, head)
        )

    def _of_another_copy(self, importer: str, text: str) -> str:
        """The first module that a copy of a program lacks: it imports other modules of the nearest package of that name
        above it, and only packages of that name in folders that no line adds to the path have this one."""
        wanted = modules_at_top(text)
        wanted += [f"{module}.{name}" for module, names in imports_at_top(text) for name in names]
        for module in wanted:
            head, _, inner = module.partition(".")
            place, inside, _ = importer.rpartition(f"{os.sep}{head}{os.sep}")
            if not inner or not inside or module.startswith(".") or self._locate(importer, module) is not None:
                continue
            own = [one for one in wanted if one.startswith(f"{head}.") and self._is_below(importer, one, place)]
            copies = self._alike(module)
            if own and copies and not self._may_reach(importer, place, module, copies):
                return module
        return ""

    def _is_below(self, importer: str, module: str, folder: str) -> bool:
        found = self._locate(importer, module)
        return found is not None and found.startswith(f"{folder}{os.sep}")

    def _may_reach(self, importer: str, place: str, module: str, copies: list[str]) -> bool:
        """Whether modules of other folders than ``place`` may be imported in it: a line adds one of these folders to
        the path, they are installed, or the module is built or left out. So may all in what a launch file there
        starts, since its author will repair it."""
        tail = f"{os.sep}{module.replace('.', os.sep)}"
        target, root = self._targets[importer], Path(os.path.abspath(self._targets[importer].root))  # noqa: PTH100
        folders = {os.path.basename(one[: one.rindex(tail)]) for one in copies}  # noqa: PTH119 - as above
        texts = [self._text(importer), *map(self._text, self._scanned(importer)[1])]
        texts += [text for _, text in self.mentioning("PYTHONPATH")] + list(pages_of(target.path, target.root))
        lines = (line for text in texts for line in text.splitlines() if _ADDS_TO_PATH.search(line))
        named = re.compile(rf"(?<![\w-]){re.escape(os.path.basename(importer))}\b")  # noqa: PTH119
        below = f"{place}{os.sep}"
        launches = (one for one in self._texts if one.kind != "python")
        beside = (one for one in launches if os.path.abspath(one.path).startswith(below))  # noqa: PTH100
        package = Path(place, *module.split(".")[:-1])
        return (
            any(folder in line for line in lines for folder in folders)
            or any(is_installed(self._targets[one].path, root) for one in (importer, *copies))
            or any(named.search(self._read(one)) for one in beside)
            or may_appear(package, root, module.rpartition(".")[2])
        )

    def located(self, importer: str, module: str) -> str | None:
        """The absolute path of the module that a dotted name means in the file at ``importer``; ``None`` if it is none
        of the project."""
        return self._locate(importer, module)

    def text_of(self, location: str) -> str:
        """The text of the module at ``location``."""
        return self._text(location)

    def shown_at(self, location: str) -> str:
        """The shown path of the module at ``location``."""
        return self._targets[location].shown

    def script_at(self, location: str) -> Script | None:
        """The module at ``location``; ``None`` if it cannot be parsed. The last ones are kept."""
        kept: dict[str, Script | None] = self.memo.setdefault(("scripts",), {})
        if location not in kept:
            while len(kept) >= MOST_SCRIPTS:
                del kept[next(iter(kept))]
            try:
                kept[location] = Script(self._targets[location].shown, self._text(location), location=location)
            except (SyntaxError, ValueError, RecursionError, MemoryError):
                kept[location] = None
        return kept[location]

    def started_by(self, shown: str, script: str) -> tuple[str, ...]:
        """The absolute paths of the files that a command of the launch file at ``shown`` may start as ``script``, a
        relative path or a module: those below the folder of the launch file and the folders above it, else all whose
        path ends so."""
        programs = self._programs(script)
        target = self._shown.get(shown)
        if target is None or len(programs) < 2:
            return tuple(programs)
        place = Path(os.path.abspath(target.path)).parent  # noqa: PTH100 - as above
        name = script if script.endswith(".py") else f"{script.replace('.', '/')}.py"
        above = {os.path.normpath(one / name) for one in (place, *place.parents)}
        return tuple(one for one in programs if one in above) or tuple(programs)

    def is_script_of_whole(self, shown: str) -> bool:
        """Whether the file that is shown by this path is a shell script, and all of its repository is linted, with
        several modules."""
        target = self._shown.get(shown)
        if target is None or target.kind != "shell" or target.is_named:
            return False
        return is_root(target.root) and not self.is_one_file

    def inner_path(self, shown: str) -> str:
        """The path of a file that is shown by this one, below what is linted."""
        target = self._shown.get(shown)
        if target is None or not target.path.is_relative_to(target.root):
            return ""
        return target.path.relative_to(target.root).as_posix()

    def is_unnamed(self, shown: str) -> bool:
        """Whether all of a repository is linted, and no other file, page or notebook in it has the name of a file, but
        for a tree of its files."""
        target, stem = self._shown.get(shown), PurePath(shown).stem
        if target is None or target.is_named or not is_root(target.root) or self.is_one_file:
            return False
        word = re.compile(rf"(?<![\w-]){re.escape(stem)}(?![\w-])")
        return not any(word.search(_ENTRY_OF_TREE.sub("", text)) for text in self.texts_with(shown, stem))

    def texts_with(self, shown: str, word: str) -> Iterator[str]:
        """The texts of other files, notebooks and pages that have a word, for the file that is shown by this path."""
        target = self._shown.get(shown)
        yield from (text for other, text in self.mentioning(word) if other != shown)
        yield from self.notebooks(word)
        if target is not None:
            yield from (text for text in pages_of(Path(target.path), Path(target.root)) if word in text)

    def has_folder(self, folder: str) -> bool:
        """Whether a relative path may be of a folder with scripts or launch files of the project."""
        key = ("folders",)
        if key not in self.memo:
            self.memo[key] = {f"{os.sep}{os.path.dirname(os.path.abspath(one.path))}{os.sep}" for one in self._texts}  # noqa: PTH100, PTH120
        tail = "".join(f"{os.sep}{one}" for one in folder.split("/") if one not in ("", ".", ".."))
        return any(f"{tail}{os.sep}" in one for one in self.memo[key])

    def lacks_file(self, shown: str, path: str) -> bool:
        """Whether a file that the launch file at ``shown`` names by a relative path is surely not in the project, which
        has its folder: Git leaves out none of that name, and no script names it, which may write it."""
        parts = [one for one in path.split("/") if one not in ("", ".", "..")]
        if not parts or (len(parts) > 1 and not self.has_folder("/".join(parts[:-1]))):
            return False
        root = Path(os.path.abspath(self._shown[shown].root))  # noqa: PTH100 - as above
        place = Path(os.path.abspath(self._shown[shown].path)).parent  # noqa: PTH100 - as above
        named = [one.joinpath(*parts) for one in (place, *place.parents) if one.is_relative_to(root)]
        tail = "".join(f"{os.sep}{one}" for one in parts)
        if any(one.exists() for one in named) or any(
            os.path.abspath(one.path).endswith(tail)  # noqa: PTH100 - as above
            for one in self._texts
        ):
            return False
        stem = PurePath(path).stem
        may_come = any(one.parent.is_dir() and may_appear(one.parent, root, stem) for one in named)
        return not may_come and not any(name.endswith(".py") for name, _ in self.mentioning(parts[-1]))

    def lacks_above(self, shown: str, path: str) -> bool:
        """Whether a file that the launch file at ``shown`` names by a path that starts with ``../`` is surely not
        there, neither from its folder, nor from one inside or above it."""
        root = Path(os.path.abspath(self._shown[shown].root))  # noqa: PTH100 - as above
        place = Path(os.path.abspath(self._shown[shown].path)).parent  # noqa: PTH100 - as above
        folders = [one for one in (place, *place.parents) if one.is_relative_to(root)]
        named = [place / path.removeprefix("../"), *(Path(os.path.abspath(one / path)) for one in folders)]  # noqa: PTH100
        if not folders or any(one.exists() for one in named):
            return False
        return not any(
            one.parent.is_dir() and may_appear(one.parent, root, one.stem) for one in named if one.is_relative_to(root)
        )

    def runs_alone(self, script: str) -> bool:
        """Whether a program that a launch file names is a file of the project, and neither it nor the modules that it
        imports from the project mention ranks or a library that joins a job."""
        places = self._programs(script) or self._moved(script)
        return bool(places) and not any(
            _JOINS.search(self._text(one)) for place in places for one in self._related(place)
        )

    def waits_for_launcher(self, script: str) -> bool:
        """Whether a program that a launch file names is a file of the project that joins a group only with the
        variables of a launcher: neither it nor the modules that it imports give a rank, start processes, or use a
        library that does."""
        places = self._programs(script)
        texts = [_COMMENT.sub("", self._text(one)) for place in places for one in self._related(place)]
        calls = [one for text in texts for one in _GROUP.finditer(text)]
        has_rank = any(_GIVES_RANK.search(one["given"]) for one in calls)
        return bool(calls) and not has_rank and not any(map(_STARTS_OR_RANKS.search, texts))

    def shares_gpus(self, script: str) -> bool:
        """Whether a program that a launch file names is a file of the project that gives its ranks the GPUs of the host
        in turn, so that several may share one, and whose process group, if any, is not of NCCL."""
        return any(map(self._takes_turns, self._programs(script)))

    def _takes_turns(self, location: str) -> bool:
        texts = [_COMMENT.sub("", self._text(one)) for one in self._related(location)]
        return any(map(_IN_TURN.search, texts)) and not any(map(_MAY_USE_NCCL.search, texts))

    def starts_steps(self, script: str) -> bool:
        """Whether a program that a launch file names is a file of the project that runs srun or mpirun itself."""
        return any(_STEPS.search(self._text(one)) for one in self._programs(script))

    def is_one_process(self, script: str) -> bool:
        """Whether a program that a launch file names is a file of the project, and either starts the processes of its
        host itself, or trains a model with nothing in it, or in the modules that it imports from the project, that
        could be for several processes."""
        places = self._programs(script)
        return bool(places) and all(self._spawns(one) or self._trains_alone(one) for one in places)

    def takes_tasks(self, script: str) -> bool:
        """Whether a program that a launch file names may be one of several tasks: it, or a module that it imports from
        the project, names ranks or tasks, or a library that reads them from Slurm or MPI. So may all in a folder
        without programs."""
        if not self._targets:
            return True
        return any(
            _OF_TASKS.search(self._text(one)) for place in self._programs(script) for one in self._related(place)
        )

    def _spawns(self, location: str) -> bool:
        return any(_SPAWNS.search(self._text(one)) for one in self._related(location))

    def _trains_alone(self, location: str) -> bool:
        texts = [_THREADS.sub("", self._text(one)) for one in self._related(location)]
        return any(".backward(" in one for one in texts) and not any(map(_COUNTS_TASKS.search, texts))

    def hides_gpus(self, script: str) -> bool:
        """Whether a program that a launch file names gives some of its ranks no GPU: it hides all of them, or takes the
        CPU, under a condition on the rank."""
        return any(_leaves_ranks_without_gpu(self._text(one)) for one in self._programs(script))

    def takes_only_gpu(self, script: str) -> bool:
        """Whether each program that a launch file may name takes GPU 0 where it sees only one."""
        programs = self._programs(script)
        return bool(programs) and all(_takes_only_gpu(self._text(one)) for one in programs)

    def _programs(self, script: str) -> list[str]:
        """The files that may be a program as a launch file names it, by the part of its path that is known, or as a
        module."""
        if re.fullmatch(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*", script) and not script.endswith(".py"):
            script = f"{script.replace('.', '/')}.py"
        parts = tuple(re.sub(r"^.*[^\w./-]", "", script).strip("/").split("/"))
        while parts and parts[0] in ("", ".", ".."):
            parts = parts[1:]
        same = self._by_filename.get(parts[-1], ()) if parts else ()
        return [one for one in same if PurePath(one).parts[-len(parts) :] == parts]

    def _moved(self, script: str) -> list[str]:
        """The only file with the name of a program that a launch file gives by an absolute path, as on the machine of
        its author."""
        same = self._by_filename.get(PurePath(script).name, []) if script.startswith("/") else []
        return same if len(same) == 1 else []

    def find(self, importer: str, module: str, *, whole: bool) -> ModuleSummary | None:
        """Its summary; ``None`` if there is none, or it cannot be read, or, unless ``whole``, if neither it nor what it
        imports has a word of collectives."""
        location = self._locate(importer, module)
        if location is None or not (whole or self._is_relevant(location)):
            return None
        if location not in self._summaries:
            self._summaries[location] = None  # while it is made, and if it fails
            self._summaries[location] = self._summarized(location)
        return self._summaries[location]

    def _summarized(self, location: str) -> ModuleSummary | None:
        try:
            return summary_of(Script(self._targets[location].shown, self._text(location), location=location), self)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None

    def _text(self, location: str) -> str:
        return self._read(self._targets[location])

    def _is_relevant(self, location: str) -> bool:
        if location not in self._relevant:
            self._relevant[location] = any(map(self._has_words, self._related(location)))
        return self._relevant[location]

    def _read(self, target: LintTarget) -> str:
        """The text of a file, which is kept as long as there is room: many questions read all files."""
        if (text := self._kept.get(target.shown)) is None:
            text = _text_of(target)
            if len(text) <= self._room:
                self._room -= len(text)
                self._kept[target.shown] = text
        return text

    def _has_words(self, location: str) -> bool:
        return self._scanned(location)[0]

    def _related(self, location: str) -> Iterator[str]:
        """The module and those that it imports, the nearest first."""
        waiting = [location]
        for count, one in enumerate(waiting):
            yield one
            if count < MOST_RELATED:
                waiting += [other for other in self._scanned(one)[1] if other not in waiting]

    def _scanned(self, location: str) -> tuple[bool, tuple[str, ...]]:
        """Whether a module has a word of collectives, and the modules of the project that it imports."""
        if location not in self._scans:
            text = self._text(location)
            names = (_imported(*found.groups()) for found in _IMPORT.finditer(text))
            located = (self._locate(location, name) for pair in names for name in pair)
            imports = tuple(dict.fromkeys(one for one in located if one is not None))
            self._scans[location] = (_RELEVANT.search(text) is not None, imports)
        return self._scans[location]

    def _locate(self, importer: str, module: str) -> str | None:
        last = module.rpartition(".")[2]
        if last and last not in self._names:  # most imports are of other distributions
            return None
        folder = os.path.dirname(importer)  # noqa: PTH120 - called for each import of each file
        key = (folder, module)
        if key not in self._located:
            found = (path for path in _candidates(folder, module) if path in self._targets)
            self._located[key] = next(found, None)
        return self._located[key]


def _leaves_ranks_without_gpu(text: str) -> bool:
    """Whether a branch on the rank hides all GPUs, or takes the CPU as the device."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    branches = [one for one in ast.walk(tree) if isinstance(one, ast.If) and "rank" in ast.unparse(one.test).lower()]
    assigned = (one for branch in branches for one in (*branch.body, *branch.orelse) if isinstance(one, ast.Assign))
    return any(_NO_GPU.match(ast.unparse(one)) for one in assigned)


_IS_ONE = re.compile(r"(.+?) (?:== 1|<= 1|< 2)$")
_FIRST_GPU = re.compile(
    r"(?:device|gpu)\w{0,40} = (?:0$|.{0,100}'cuda:0')|set_device\((?:0|'cuda:0')\)$",
    re.IGNORECASE,
)
_LOCAL_RANK = re.compile(r"local_?rank|LOCALID", re.IGNORECASE)


def _takes_only_gpu(text: str) -> bool:
    """Whether a branch for one visible GPU takes the first, and nothing selects the GPU by the local rank alone:
    ``if torch.cuda.device_count() == 1: device = 0``."""
    if "device_count" not in text:
        return False
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    nodes = list(ast.walk(tree))
    if any(isinstance(one, ast.Call) and _takes_gpu_of_rank(one) for one in nodes):
        return False
    made = [one for one in nodes if isinstance(one, ast.Assign)]
    counts = {"torch.cuda.device_count()"}
    counts |= {ast.unparse(one.targets[0]) for one in made if ast.unparse(one.value) in counts}
    counts -= {ast.unparse(one.targets[0]) for one in made if ast.unparse(one.value) not in counts}

    def is_of_one(test: ast.expr) -> bool:
        found = _IS_ONE.match(ast.unparse(test))
        return found is not None and found[1] in counts

    chosen = [part for one in nodes if isinstance(one, ast.If) and is_of_one(one.test) for part in one.body]
    chosen += [one for one in made if isinstance(one.value, ast.IfExp) and is_of_one(one.value.test)]
    return any("\n" not in one and _FIRST_GPU.search(one.partition(" if ")[0]) for one in map(ast.unparse, chosen))


def _takes_gpu_of_rank(call: ast.Call) -> bool:
    """Whether a call selects the GPU by the local rank alone: ``torch.cuda.set_device(args.local_rank)``."""
    if not last_name(call.func).lower().endswith("set_device"):
        return False
    given = [ast.unparse(one) for one in (*call.args, *call.keywords)]
    return any(map(_LOCAL_RANK.search, given)) and not any("%" in one for one in given)


def _text_of(target: LintTarget) -> str:
    """The text of a file; empty if it is too long or cannot be read."""
    try:
        text = read_text(target).text
    except UnreadableFile:
        return ""
    return text if len(text) <= LONGEST_MODULE else ""


def _imported(package: str | None, name: str | None, module: str | None) -> tuple[str, ...]:
    """The modules that an import may name: ``from a import b`` is of ``a`` or ``a.b``."""
    if package is None:
        return (module or "",)
    return (f"{package}{'' if package.endswith('.') else '.'}{name}", package)


def _candidates(folder: str, module: str) -> Iterator[str]:
    """The files that may be a module, the likeliest first: beside the file, then below each folder above it."""
    dots = len(module) - len(module.lstrip("."))
    parts = [one for one in module[dots:].split(".") if one]
    if not all(one.isidentifier() for one in parts) or (not dots and (not parts or parts[0] in _FRAMEWORKS)):
        return
    above = [folder, *map(str, PurePath(folder).parents)]
    if dots:
        roots = above[dots - 1 : dots]
    else:
        roots = [os.path.join(one, source) for one in above[:MOST_FOLDERS] for source in _SOURCE_FOLDERS]  # noqa: PTH118
    for root in roots:
        path = os.path.join(root, *parts).rstrip(os.sep)  # noqa: PTH118 - as above
        yield f"{path}.py"
        yield os.path.join(path, "__init__.py")  # noqa: PTH118 - as above
