"""Counts the processes that the files of a project start of a script."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import PurePath

from doctor.core.text import joined_lines
from doctor.lint.launch.file_type import read_launch_file
from doctor.lint.launch.launch_file import Launch
from doctor.lint.launch.partial_text import whole_number
from doctor.lint.launch.process_launches import (
    hosts_of,
    option_of,
    processes_of,
    says_processes,
    starts_of,
    visible_devices,
)
from doctor.lint.python.project.call_graph import folders_in_common
from doctor.lint.python.project.starts.unused_imports import imports_in_vain
from doctor.lint.python.project.unreached import is_program, may_import
from doctor.lint.python.script import ProjectModules, Script, per_script
from doctor.lint.python.training import FABRIC, TRAINER

STARTS_RANKS = re.compile(
    r"\b(?:spawn|start_processes|notebook_launcher|debug_launcher|TorchTrainer|AutoExecutor|idist\.Parallel)\("
)
_STARTS_PROGRAMS = re.compile(r"\b(?:launch|Popen|check_call|Process|LightningCLI|run_on_slurm)\(|subprocess\.run\(")
LAUNCHERS = re.compile(
    r"accelerate launch|torchrun|torch\.distributed\.(?:launch|run)\b|\bdeepspeed (?:-|\w+\.py)|\bsrun\b|\bmpirun\b|"
    r"notebook_launcher|--local[-_]rank|LOCAL_RANK"
)
_NAMES_LAUNCHER = re.compile(
    rf"{LAUNCHERS.pattern}|horovodrun|mpiexec|sbatch|\blaunch(?:er)?\b|submitit|deepspeed|\bjsrun\b|\baprun\b"
)
_SHOWS_GPUS = re.compile(r"CUDA_VISIBLE_DEVICES=[\"']?\d+,")
_ASKS_FOR_MORE = re.compile(
    r"(?<![\w.-])--?(?![\w.-]{0,60}(?:batch|memory))[\w.-]{0,40}?"
    r"(?:gpu|nproc|world|ddp|dist(?!ill|anc|rib(?!uted)|[-_]?eval)|devices|nodes|launcher|parallel)[\w-]{0,40}"
    r"(?:[ =](?!(?:1|0|false|False|none)\b)|$)"
)
"""A command that asks a program for more ranks than one; ``--per_gpu_batch_size 8`` and ``--dist_eval`` do not."""
_STARTS_ON_ITS_OWN = re.compile(r"\b(?:Trainer|Fabric|LightningCLI|launch|Popen|check_call)\(|subprocess\.run\(")
"""What may start a rank for each GPU that a program sees."""
_USES_ALL_GPUS = re.compile(r"(?<![\w])(?:nn\.)?DataParallel\(")
"""One process that uses all GPUs that it sees."""


MOST_PROGRAMS = 24
"""Programs that are looked at for one module."""


def lines_naming(script: Script, modules: ProjectModules) -> Iterator[str]:
    """The lines of the project's other files, and of its pages, that have the name of a script."""
    name = PurePath(script.path).name
    texts = [text for shown, text in modules.mentioning(name) if shown != script.path]
    for text in (*texts, *modules.pages(script.location)):
        yield from (line for line in joined_lines(text) if name in line and may_mean(script, line, script.path))


def may_mean(script: Script, line: str, path: str) -> bool:
    """Whether a line that has the name of a file may mean the one at ``path``: the folder before the name, if there is
    one, is its own. That of a file at the top of a project has the name of the project, which is unknown."""
    place = PurePath(path)
    root = script.modules.root_of(script.location) if script.modules is not None and script.location else ""
    if PurePath(root).name == place.parent.name:
        return True
    named = re.finditer(rf"(?:([\w.${{}}-]+)/)?(?<![\w-]){re.escape(place.name)}", line)
    folders = [one[1] for one in named]
    return any(one is None or one in (".", "..", place.parent.name) or "$" in one for one in folders) or not folders


@per_script
def is_started_as_one(script: Script) -> bool:
    """Whether every launcher in the project's files that starts a script, or of a module every program that imports it,
    gets one process."""
    modules = script.modules
    if modules is None:
        return False
    counts = shown_counts(script)
    if counts or is_program(script):
        return _are_one(counts)
    programs = programs_of(modules, script.path)
    return bool(programs) and all(
        _are_one([*_counts_of_files(modules, shown), *_counts_of_pages(script, shown, is_own=False)])
        for shown in programs
    )


@per_script
def shown_counts(script: Script) -> list[int | None]:
    """The processes of each command of the project that starts a script; ``None`` for an unknown number."""
    modules = script.modules
    if modules is None:
        return []
    counts = [*_counts_of_files(modules, script.path), *_counts_of_pages(script, script.path)]
    return [*counts, *_counts_of_python(script, modules)]


def _are_one(counts: list[int | None]) -> bool:
    return bool(counts) and all(count == 1 for count in counts)


def programs_of(modules: ProjectModules, path: str) -> list[str]:
    """The shown paths of the programs that import a module of the project to use it, also through others; none if one
    of them starts ranks itself, or if there are too many to look at."""
    waiting, seen, programs = [path], {path}, []
    while waiting:
        place = PurePath(waiting.pop())
        own, place = str(place), place.parent.with_suffix(".py") if place.name == "__init__.py" else place
        importers = [
            (shown, text)
            for shown, text in modules.mentioning(place.stem)
            if shown.endswith(".py")
            and own != shown
            and may_import(place, text)
            and not _has_own(modules, shown, text, place)
            and not imports_in_vain(modules, place, shown)
        ]
        if own != path and (not importers or "__main__" in modules.text_at(own)):
            programs.append(own)
        new = [(shown, text) for shown, text in importers if shown not in seen]
        if any(STARTS_RANKS.search(text) for _, text in new) or len(seen) + len(new) > MOST_PROGRAMS:
            return []
        seen.update(shown for shown, _ in new)
        waiting += [shown for shown, _ in new]
    return programs


def _has_own(modules: ProjectModules, shown: str, text: str, place: PurePath) -> bool:
    """Whether a program finds another file than that of a module by the name that it imports, one below its own folder:
    the projects of several folders have copies of it."""
    home, parts = PurePath(shown).parent, place.with_suffix("").parts
    if place.is_relative_to(home):
        return False
    dotted = [parts[-count:] for count in range(1, min(len(parts), 4))]
    return any(
        re.search(rf"^[ \t]*(?:from|import)[ \t]+{re.escape('.'.join(one))}\b", text, re.MULTILINE)
        and modules.text_at(str(home.joinpath(*one).with_suffix(".py")))
        for one in dotted
    )


def _counts_of_files(modules: ProjectModules, path: str) -> Iterator[int | None]:
    yield from _counts_of_launches(modules, path)
    yield from _counts_of_lists(modules, path)


def _counts_of_pages(script: Script, path: str, *, is_own: bool = True) -> Iterator[int | None]:
    """The processes of each command in the project's pages and notebooks that starts a file; ``None`` if unknown.
    ``python`` is one process of a script that starts no others. ``is_own``: the file is the script."""
    if script.modules is None or not script.location:
        return
    name = PurePath(path).name
    plain = _plain_start(name)
    for page in (*script.modules.pages(script.location), *script.modules.notebooks(PurePath(path).stem)):
        lines = joined_lines(_with_files(page, path)) if PurePath(path).stem in page else []
        named = [one for one in lines if name in one and may_mean(script, one, path)]
        for line in _without_mentions(named, name):
            if _NAMES_LAUNCHER.search(line):
                yield _count_of_command(script.modules, line, name)
            elif plain.search(line):
                is_one = is_own and not asks_for_more(script, line) and not _names_other_start(script)
                yield 1 if is_one else None


_OWN_LAUNCHERS = re.compile(
    r"torchrun|accelerate launch|torch\.distributed\.(?:launch|run)\b|deepspeed|horovod|\bsrun\b"
)


def _counts_of_python(script: Script, modules: ProjectModules) -> Iterator[int | None]:
    """One for each command in the launch files and programs of the project that starts a script with ``python``, if
    neither it nor what it imports starts ranks, else ``None``. In a job of a cluster, it may run more than once."""
    name = PurePath(script.path).name
    plain = _plain_start(name)
    for shown, read in modules.mentioning(PurePath(name).stem):
        if shown == script.path or (shown.endswith(".py") and name not in read):
            continue
        if (name in read and not is_nearest(modules, shown, script.path)) or _JOBS.search(read):
            continue
        text = read if shown.endswith(".py") else _with_files(read, script.path)
        runs = _RUNS_COMMAND if shown.endswith(".py") else _NOT_A_COMMENT
        lines = [one for one in joined_lines(text) if name in one and plain.search(one)]
        for line in lines:
            if runs.search(line) and not _NAMES_LAUNCHER.search(line):
                yield None if asks_for_more(script, line) or may_start_ranks(script, modules) else 1


def asks_for_more(script: Script, line: str) -> bool:
    """Whether a command of ``python`` asks for several ranks by an option, or lets a program see several GPUs that does
    not use them with DataParallel, or may start a rank for each of them."""
    if _ASKS_FOR_MORE.search(line):
        return True
    return _SHOWS_GPUS.search(line) is not None and not _uses_all_gpus(script)


@per_script
def _uses_all_gpus(script: Script) -> bool:
    """Whether a program uses all GPUs that it sees in its one process, and starts no other."""
    if script.modules is None or not script.location or may_start_ranks(script, script.modules):
        return False
    texts = (script.text, *script.modules.texts_around(script.location))
    return _USES_ALL_GPUS.search(script.text) is not None and not any(map(_STARTS_ON_ITS_OWN.search, texts))


_RUNS_COMMAND = re.compile(r"\bos\.system\(|\bsubprocess\.|\bPopen\(|\bcheck_call\(|\brun\(")
_NOT_A_COMMENT = re.compile(r"^\s*(?!#)\S")
_JOBS = re.compile(
    r"\bsrun\b|\bmpirun\b|\bmpiexec\b|\bssh\b|^#SBATCH[^\n]*--array|kind:|&\s*$|\bRANK=|WORLD_SIZE|"
    r"MASTER_ADDR(?!=[\"']?(?:127\.0\.0\.1|localhost)\b)|\bNODE_?RANK|SLURM_(?:PROCID|NTASKS|NNODES|NODEID)",
    re.MULTILINE,
)
"""Words of files whose commands run more than once at the same time. Slurm runs the script of a job once, on its first
host (sbatch(1)): what it starts without ``srun`` is one process."""


def may_start_ranks(script: Script, modules: ProjectModules) -> bool:
    """Whether a script, or a module of the project that it imports, may start ranks when ``python`` starts it."""
    texts = modules.texts_around(script.location) if script.location else ()
    return _names_other_start(script) or any(STARTS_RANKS.search(one) for one in texts)


def _plain_start(name: str) -> re.Pattern[str]:
    return re.compile(rf"\bpython[\d.]*[ \t]+(?:-[uO][ \t]+)*(?:[\w./${{}}-]*/)?{re.escape(name)}(?![\w.])")


def is_nearest(modules: ProjectModules, shown: str, path: str) -> bool:
    """Whether of the files with one name, that at ``path`` is as near to a file that names it as any."""
    place = PurePath(path)
    others = (one for one in modules.named(shown, place.stem) if PurePath(one).name == place.name)
    return all(folders_in_common(shown, one) <= folders_in_common(shown, path) for one in others)


def _names_other_start(script: Script) -> bool:
    """Whether a script that ``python`` can start may have more ranks: it has a Trainer or a Fabric, which start them,
    starts processes, or names a launcher. An Accelerator starts none."""
    starts = next(script.calls(TRAINER, FABRIC), None) is not None
    return starts or _STARTS_PROGRAMS.search(script.text) is not None or _OWN_LAUNCHERS.search(script.text) is not None


def _counts_of_lists(modules: ProjectModules, path: str) -> Iterator[int | None]:
    """The processes of each launcher's command that another program of the project has as a list of words, or as a
    text."""
    name = PurePath(path).name
    listed = re.compile(rf"\[[^\[\]]*[\"'][\w./-]*{re.escape(name)}[\"'][^\[\]]*\]")
    written = re.compile(rf"^[^#\n]*?([\"'])([^\"'\n]*(?<![\w-]){re.escape(name)}\b[^\"'\n]*)\1", re.MULTILINE)
    words = ("torchrun", "torch.distributed", "accelerate", "deepspeed")
    texts = dict(one for word in words for one in modules.mentioning(word))
    for shown, text in texts.items():
        if name not in text or not shown.endswith(".py") or shown == path:
            continue
        for found in listed.finditer(text):
            command = " ".join(re.findall(r"[\"']([^\"'\n]*)[\"']", found[0]))
            if _NAMES_LAUNCHER.search(command):
                yield _count_of_command(modules, command, name)
        for found in written.finditer(text.replace("\\\n", " ")):
            if LAUNCHERS.search(found[2]):
                yield _count_of_command(modules, re.sub(r"\{[^{}]*\}", "$GIVEN", found[2]), name)


_NAMES_MODULE = re.compile(r"(?<![\w-])(?:-m|--module)[ \t=]+(?P<module>[A-Za-z_]\w*(?:\.\w+)*)(?![\w.-])")


def _with_files(text: str, path: str) -> str:
    """Commands that start a file as a module (``-m src.tools.train``), with the path of the file instead."""
    parts = PurePath(path).with_suffix("").parts

    def file_of(found: re.Match[str]) -> str:
        named = tuple(found["module"].split("."))
        is_meant = parts[-len(named) :] == named and len(named) >= min(2, len(parts))
        return f"{'/'.join(named)}.py" if is_meant else found[0]

    return _NAMES_MODULE.sub(file_of, text)


_MENTION = re.compile(r"(?<=[^`\s\]][ ,(])`(?P<launcher>torchrun|deepspeed|python3?) [\w./-]+`")
"""A launcher and a file in a sentence, with no options of either."""


def _without_mentions(lines: list[str], name: str) -> list[str]:
    """The lines of a page that name a file; where one of them has a whole command of a launcher, without the sentences
    that only say that it is used: "by module, as in `deepspeed train.py`"."""
    whole = " ".join(line for line in lines if name in _MENTION.sub("", line))

    def only_says_it(line: str) -> bool:
        launchers = {found["launcher"] for found in _MENTION.finditer(line)} - {"python", "python3"}
        return name not in _MENTION.sub("", line) and bool(launchers) and all(map(whole.__contains__, launchers))

    return [line for line in lines if not only_says_it(line)]


def count_of_start(script: Script, line: str) -> int | None:
    """The processes of a command that starts a script; ``None`` if they are unknown."""
    if script.modules is None:
        return None
    if _NAMES_LAUNCHER.search(line):
        return _count_of_command(script.modules, line, PurePath(script.path).name)
    return None if asks_for_more(script, line) or may_start_ranks(script, script.modules) else 1


def _count_of_command(modules: ProjectModules, line: str, name: str) -> int | None:
    """The processes of a launcher's command in a page."""
    counts = list(_counts_in(modules, "page.sh", f"{_command_in(line)}\n", name))
    return counts[0] if len(counts) == 1 else None


def _command_in(line: str) -> str:
    """The command of a line of a page, without its prompt."""
    return re.sub(r"^(?:RUN|CMD|ENTRYPOINT|[$>!%\"`\s-])+", "", line).rstrip('`", ')


def _counts_of_launches(modules: ProjectModules, path: str) -> Iterator[int | None]:
    """The processes of each launcher in the project's files that starts a file; ``None`` if unknown."""
    name = PurePath(path).name
    for shown, read in modules.mentioning(PurePath(path).stem, launches=True):
        if name in read and not is_nearest(modules, shown, path):
            continue
        text = _with_files(read, path)
        if name in text and _has_one_gpu(text):
            yield 1  # several ranks cannot share it
        elif name in text:
            yield from _counts_in(modules, shown, text, name)


_ONE_GPU_OF_JOB = re.compile(
    r"^#SBATCH\s+(?:--gres[= ][\"']?gpu(?::\w+)?:|--gpus(?:-per-node)?[= ](?:\w+:)?|-G\s?)0{0,3}1\b",
    re.MULTILINE,
)
_SEVERAL_OF_JOB = re.compile(
    r"^#SBATCH\s+(?:--(?:nodes|ntasks|ntasks-per-node)[= ]|-[Nn])(?!\s?0{0,3}1\s*$)|\$\{?GPUS|"
    r"(?:nproc[_-]per[_-]node|num[_-]processes|-np)[= ](?![\"']?1\b)",
    re.MULTILINE,
)


def _has_one_gpu(text: str) -> bool:
    """Whether a job of Slurm asks for one task on one host with one GPU, and starts no more itself."""
    return _ONE_GPU_OF_JOB.search(text) is not None and _SEVERAL_OF_JOB.search(text) is None


def _counts_in(modules: ProjectModules, shown: str, text: str, name: str) -> Iterator[int | None]:
    try:
        file = read_launch_file(shown, text)
    except Exception:  # noqa: BLE001 - the file's own reading reports it; here nothing is known of it
        yield None
        return
    for start in starts_of(file) if file is not None else ():
        if PurePath(start.launch.script).name != name or not start.launch.is_agent:
            continue
        launch = start.launch
        if start.outer is None and _shows_one_gpu(launch):
            yield 1  # several ranks cannot share it
            continue
        if launch.command.all_processes and _all_processes(modules, launch) == 1:
            yield 1  # on whatever number of hosts
            continue
        # Without a hostfile of its own, DeepSpeed starts the ranks of this host, unless /job/hostfile exists
        is_alone = launch.program == "deepspeed" and launch.option("hostfile", "num_nodes") is None
        is_one_host = start.outer is None and (hosts_of(launch) == 1 or is_alone)
        says = says_processes(launch) or launch.option(launch.command.included) is not None
        yield processes_of(launch) if is_one_host and says else None


@per_script
def is_started_on_one_host(script: Script) -> bool:
    """Whether the project shows how a script is started, and every launcher there waits for one host."""
    return _is_one_in_all(script, hosts_of)


@per_script
def is_one_on_each_host(script: Script) -> bool:
    """Whether the project shows how a script is started, and every launcher there starts one process on each host, as
    ``torchrun`` does without ``--nproc-per-node``."""
    modules = script.modules
    return modules is not None and _is_one_in_all(script, processes_of) and not may_start_ranks(script, modules)


def _is_one_in_all(script: Script, count: Callable[[Launch], int | None]) -> bool:
    modules = script.modules
    if modules is None or not script.location:
        return False
    name = PurePath(script.path).name
    counts: list[int | None] = []
    for shown, text in modules.mentioning(name):
        if shown.endswith(".py"):
            counts += [None] if shown != script.path and _NAMES_LAUNCHER.search(text) else []
        elif is_nearest(modules, shown, script.path):
            counts += _of_starts(shown, text, name, count)
    for text in (*modules.pages(script.location), *modules.notebooks(name)):
        for line in joined_lines(text):
            if name in line and _NAMES_LAUNCHER.search(line) and may_mean(script, line, script.path):
                counts += list(_of_starts("page.sh", f"{_command_in(line)}\n", name, count)) or [None]
    return bool(counts) and all(one == 1 for one in counts)


def _of_starts(shown: str, text: str, name: str, count: Callable[[Launch], int | None]) -> Iterator[int | None]:
    """A number of each start of a script; ``None`` if unknown."""
    try:
        file = read_launch_file(shown, text)
    except Exception:  # noqa: BLE001 - as above
        yield None
        return
    for start in starts_of(file) if file is not None else ():
        if PurePath(start.launch.script).name == name:
            yield count(start.launch) if start.is_agent and start.outer is None else None


_PROCESSES = re.compile(r"^num_processes:[ \t]*[\"']?(\d{1,6})\b", re.MULTILINE)


def _all_processes(modules: ProjectModules, launch: Launch) -> int | None:
    """The processes on all hosts that an option of ``accelerate launch`` says, or the configuration that it names."""
    if says_processes(launch):
        return whole_number(option_of(launch, launch.command.all_processes))
    given = launch.known_option("config_file") if launch.command.has_config else None
    place = PurePath(given) if given else None
    if place is None:
        return None
    found = {
        one[1] if (one := _PROCESSES.search(text)) else ""
        for shown, text in modules.mentioning("num_processes", launches=True)
        if _ends_alike(PurePath(shown), place)
    }
    count = found.pop() if len(found) == 1 else ""
    return int(count) if count else None


def _ends_alike(shown: PurePath, given: PurePath) -> bool:
    """Whether a file of the project may be the one that a command names: ``../configs/one.yaml``."""
    named = [one for one in given.parts if one not in (".", "..")]
    return bool(named) and list(shown.parts[-len(named) :]) == named


def _shows_one_gpu(launch: Launch) -> bool:
    """Whether the launcher of one host sees one GPU: ``CUDA_VISIBLE_DEVICES=0 accelerate launch train.py``."""
    seen = visible_devices(launch)
    is_one_host = hosts_of(launch) == 1 or launch.option(launch.command.hosts, "config_file") is None
    return seen is not None and seen[1] == 1 and is_one_host
