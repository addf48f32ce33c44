"""Programs and modules for which a project shows starts, each of one process: also by the commands that it installs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePath

from doctor.core.text import joined_lines
from doctor.lint.python.project.starts.launch_counts import programs_of, shown_counts
from doctor.lint.python.script import ProjectModules, Script, per_script

_SAYS_SEVERAL = re.compile(
    r"accelerate (?:launch|config)|torchrun|torch\.distributed|\bdeepspeed\b|\bsrun\b|\bmpi(?:run|exec)\b|horovod|"
    r"sbatch|\bnproc|num_processes|local[-_]rank|world[-_]size|notebook_launcher|multi[- ]?(?:gpu|node|process)|"
    r"\bGPUs\b|distributed|data[- ]parallel|\bDDP\b|\bFSDP\b",
    re.IGNORECASE,
)
"""Words of pages and launch files of projects whose programs are meant for several ranks."""
_MADE_FOR_SEVERAL = re.compile(
    r"init_process_group|init_distributed|DistributedSampler|DistributedDataParallel|WORLD_SIZE|LOCAL_RANK|torchrun|"
    r"accelerate launch|launch\w{0,40}\(|\b(?:spawn|start_processes|Trainer|Fabric|Popen|check_call|Process)\(|"
    r"ScalingConfig|\bsubprocess\b|LightningCLI|TorchDistributor|submitit"
)
"""Code that joins a job itself, or may start one. An Accelerator in a process that nothing launched is alone."""
_WORDS = ("torchrun", "accelerate", "torch.distributed", "deepspeed", "srun", "mpirun", "mpiexec", "sbatch")
_BEFORE = r"^(?:[$>!%\s]|CMD|RUN|ENTRYPOINT|\w+=\S*\s|(?:uv|poetry|pdm|hatch|pixi) run\s)*"
"""What stands before the command of a line: a prompt, variables, and a tool that chooses the environment."""


@per_script
def is_shown_as_one(script: Script) -> bool:
    """Whether the pages of a whole project show starts of a program, or of programs that import a module, each of one
    process: by ``python`` or ``uv run``, or by a command of ``[project.scripts]``. No page or launch file of it may
    name a launcher or several processes, nor may the code start some or join a job itself."""
    modules = script.modules
    if modules is None or modules.is_one_file or not script.location or not modules.is_whole(script.location):
        return False
    if any(count != 1 for count in shown_counts(script)):
        return False
    starts = list(_starts(script, modules))
    if not starts or any(map(_SAYS_SEVERAL.search, (*modules.pages(script.location), *starts))):
        return False
    texts = (text for word in _WORDS for _, text in modules.mentioning(word, launches=True))
    return not any(map(_SAYS_SEVERAL.search, texts))


def _starts(script: Script, modules: ProjectModules) -> Iterator[str]:
    """The commands in the project's pages that start the script or a program that imports it; none if one of these may
    start ranks."""
    commands = modules.console_commands(script.location)
    programs = {script.path, *programs_of(modules, script.path)}
    if any(_MADE_FOR_SEVERAL.search(text) for text in (script.text, *map(modules.text_at, programs))):
        return
    if any(_MADE_FOR_SEVERAL.search(text) for text in modules.texts_around(script.location)):
        return
    places = [PurePath(one) for one in programs]
    names = [name for name, module in commands.items() if any(_is_module(one, module) for one in places)]
    files = "|".join(re.escape(one.name) for one in places if one.name != "__init__.py")
    own = "|".join(map(re.escape, names)) or r"(?!)"
    plain = rf"(?:python[\d.]*\s+(?:-[uO]\s+)*|uv run\s+)[\"']?(?:[\w.-]+/)*(?:{files})(?![\w.])"
    start = re.compile(rf"{_BEFORE}(?:(?:{own})(?=\s|$)|{plain})")
    for page in modules.pages(script.location):
        yield from (line for line in joined_lines(page) if start.match(line))


def _is_module(place: PurePath, module: str) -> bool:
    """Whether a dotted name is of a file: ``dreamer.cli``, or the package of an ``__init__.py``."""
    parts = place.parent.parts if place.name == "__init__.py" else place.with_suffix("").parts
    named = tuple(module.split("."))
    return parts[-len(named) :] == named
