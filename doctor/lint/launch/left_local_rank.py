"""Finds programs that take their local rank from an option alone, which no launcher gives them."""

from __future__ import annotations

import ast
import re

from doctor.lint.engine.project_files import ProjectFiles
from doctor.lint.launch.launch_file import Launch
from doctor.lint.launch.partial_text import is_all_unknown
from doctor.lint.launch.process_launches import processes_of
from doctor.lint.launch.refused_words import AskedParser
from doctor.lint.python.script import Script, last_name

_NAMES = ("--local_rank", "--local-rank")
_OTHER_SOURCES = re.compile(
    r"RANK\b|LOCALID|PROCID|local_process_index|get_(?:node_)?local_rank|local_rank[\"']?\]?\s*=(?!=)\s*(?!(?:args|opts?)\.)"
    r"|[.\"']local_rank[\"']?\]?\s*=(?!=)|\bsetattr\(|__dict__|\bvars\(|deepspeed|[Aa]ccelerat|horovod|\bhvd\b"
    r"|lightning|\bspawn\(|%\s*torch\.cuda\.device_count"
)
"""What gives a local rank otherwise: variables of launchers, a value that the program computes, and libraries."""
_TAKES_DEVICE = ("set_device", "cuda", "to", "device", "DistributedDataParallel", "DDP")


def left_local_rank(modules: ProjectFiles, location: str, launch: Launch, parsers: tuple[AskedParser, ...]) -> str:
    """The default of the option by which a program selects its GPU, if several ranks get it: torchrun gives the local
    rank in a variable alone, which the program does not read. Empty if it may have another one."""
    gives_option = launch.module == "torch.distributed.launch" and launch.option("use-env") is None
    if launch.program != "torchrun" or gives_option or launch.is_open or processes_of(launch) == 1:
        return ""
    if any(is_all_unknown(one) or one.startswith("--l") for one in launch.arguments):
        return ""
    declared = [one for parser in parsers for one in parser.read.declared if set(_NAMES) & set(one.names)]
    if len(parsers) != 1 or len(declared) != 1 or not declared[0].is_certain:
        return ""
    default = declared[0].given.get("default")
    script = modules.script_at(location)
    if script is None or not isinstance(default, int) or isinstance(default, bool):
        return ""
    if not any(_selects_gpu(script, one) for one in script.all(ast.Call)):
        return ""
    texts = [_without_declaration(text) for text in modules.texts_around(location)]
    joins = any("init_process_group" in text for text in texts)
    return str(default) if joins and not any(map(_OTHER_SOURCES.search, texts)) else ""


def _selects_gpu(script: Script, call: ast.Call) -> bool:
    """``torch.cuda.set_device(args.local_rank)``, ``device_ids=[args.local_rank]``."""
    if last_name(call.func) not in _TAKES_DEVICE:
        return False
    given = [*call.args, *(one.value for one in call.keywords if one.arg in ("device", "device_ids", "output_device"))]
    inner = [one for value in given for one in (value.elts if isinstance(value, (ast.List, ast.Tuple)) else [value])]
    return any(isinstance(one, ast.Attribute) and one.attr == "local_rank" for one in inner)


def _without_declaration(text: str) -> str:
    """A text without comments, and without the declarations of options."""
    text = re.sub(r"(?m)^[ \t]*#.*$", "", text)
    return re.sub(r"add_argument\(\s*[\"']--local[_-]rank[\"'][^\n]*", "", text)
