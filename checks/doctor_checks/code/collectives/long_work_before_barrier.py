"""CODE030: one rank downloads or prepares data while the others wait with the default timeout."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from doctor.api import Script, Severity, Violation, rule
from doctor.lint.python.collectives import collectives_of
from doctor.lint.python.cuda import joins
from doctor.lint.python.project.one_process import may_be_several
from doctor.lint.python.rank_branches import main_first, rank_condition
from doctor.lint.python.script import UNKNOWN, last_name
from doctor.lint.python.training import ACCELERATOR
from doctor.lint.python.value_flow import origins
from doctor.testing.script_cases import fails, passes


@rule(
    id="CODE030",
    severity=Severity.WARNING,
    reads=Script,
    mentions=("init_process_group", "Accelerator", "TrainingArguments"),
    foreshadows=("RUN010",),
    cases=lambda: (
        fails("the main process tokenises first", _FIRST),
        fails("rank 0 downloads a model", _DOWNLOAD),
        fails("the arguments of Transformers", _ARGUMENTS),
        passes("with a limit of its own", _DOWNLOAD.replace('"nccl"', '"nccl", timeout=timedelta(hours=3)')),
        passes("all ranks load what was prepared", _PREPARED),
        passes("a known small dataset", _SMALL),
        passes("a known small dataset, beside others", _SMALL_BESIDE),
        fails("a known small dataset, or files", _SMALL_OR_FILES),
        passes("nobody waits", _NOBODY),
        fails("an archive of unknown size", _ARCHIVES.replace("aclImdb_v1", "corpus")),
        passes("the limit is given where the script is started", _PARSED),
    ),
)
def long_work_before_barrier(script: Script) -> Iterator[Violation]:
    """Ask whether ranks wait with the default timeout while one rank downloads or prepares data.

    Why it hurts: the default timeout is 10 minutes with NCCL and 30 minutes with Gloo. With more data, or a slower disk
    or network, the waiting ranks end the job with a timeout that looks like a network fault.
    Fix: Prepare the data before the run, or raise the timeout with `init_process_group(timeout=timedelta(hours=2))`.
    """
    started = _started(script)
    if started is None or (script.name(started.func) not in _GROUPS and not may_be_several(script)):
        return
    reported = set()
    for call in script.all(ast.Call):
        found = _waiting(script, call) if _is_long(script, call) else None
        if found is not None and found[0] not in reported:
            place, words = found
            reported.add(place)
            severity = _severity(script, call, started)
            yield Violation(
                call,
                f"{script.text_of(call.func, 40)} may exceed the timeout of the ranks that wait {words}",
                fix=_FIXES.get(script.name(started.func), ""),
                severity=severity,
                preview=severity is Severity.INFO and _is_of_small_archive(script, call),
                evidence=(("waits_at_line", place), ("job_started_at_line", started.lineno)),
                confidence=0.7,
                once=f"{script.path} map" if last_name(call.func) == "map" else "",
            )


def _severity(script: Script, call: ast.Call, started: ast.Call) -> Severity | None:
    """An info for ``map``, because the size of the data is not in the code, for a small archive, and for a download
    under Gloo, whose default timeout of 30 minutes most downloads keep."""
    backend = script.value(script.argument(started, "backend", 0)) if script.name(started.func) in _GROUPS else None
    is_brief = last_name(call.func) == "map" or backend == "gloo" or _is_of_small_archive(script, call)
    return Severity.INFO if is_brief else None


_ARCHIVE = re.compile(r"(?<![\w.-])([\w.-]+)\.(?:zip|tgz|tar(?:\.\w+)?)$", re.IGNORECASE)
_SMALL_ARCHIVES = re.compile(
    r"(?:aclImdb(?:_v\d)?|cifar-?100?(?:-python)?|(?:fashion-?|k)?mnist|svhn|hymenoptera_data|101_ObjectCategories|"
    r"102flowers|tiny-imagenet-200|ml-(?:latest-small|100k|1m|10m|20m)|wikitext-(?:2|103)(?:-raw)?(?:-v\d)?|"
    r"SST-2|MRPC|CoLA|cora|citeseer|simple-examples)",
    re.IGNORECASE,
)
"""Archives of at most some hundred megabytes, by their published names: a minute or two to fetch and to unpack."""


def _is_of_small_archive(script: Script, call: ast.Call) -> bool:
    """Whether all archives that the function around a call names, or the file if that names none, are small ones."""
    for within in (script.function_of(call), script.tree):
        texts = () if within is None else script.inside(within, ast.Constant)
        named = [_ARCHIVE.search(one.value) for one in texts if isinstance(one.value, str)]
        archives = [one[1] for one in named if one is not None]
        if archives:
            return all(map(_SMALL_ARCHIVES.fullmatch, archives))
    return False


_FIXES = {
    "transformers.TrainingArguments": (
        "Prepare the data before the run, or raise the timeout with `TrainingArguments(ddp_timeout=7200)`."
    ),
    ACCELERATOR: (
        "Prepare the data before the run, or pass `InitProcessGroupKwargs(timeout=timedelta(hours=2))` in the "
        "`kwargs_handlers` of Accelerator."
    ),
}


def _started(script: Script) -> ast.Call | None:
    """The call that starts the job and takes the timeout; ``None`` if there is none, or a timeout is given."""
    if "timeout" in script.text:
        return None
    calls = (*joins(script), *script.calls(ACCELERATOR, "transformers.TrainingArguments"))
    return None if not calls or any(script.is_open(call) for call in calls) else calls[0]


_GROUPS = ("torch.distributed.init_process_group", "torch.distributed.init_device_mesh")
_FETCHES = frozenset({"snapshot_download", "urlretrieve", "extractall", "download_and_extract_archive"})


def _is_long(script: Script, call: ast.Call) -> bool:
    bare = last_name(call.func)
    if bare in _FETCHES:
        return True
    if bare != "map" or not isinstance(call.func, ast.Attribute) or not (call.args or call.keywords):
        return False
    if _is_over_small(script, call.func.value):
        return False
    paths = [script.value(script.argument(one, "path", 0)) for one in script.calls("datasets.load_dataset")]
    return UNKNOWN in paths or any(True for _ in script.calls("datasets.load_from_disk"))


_SMALL_SETS = frozenset(
    {
        *("ag_news", "alpaca", "alpaca-cleaned", "beans", "cifar10", "cifar100", "conll2003", "databricks-dolly-15k"),
        *("dbpedia_14", "emotion", "fashion_mnist", "glue", "gsm8k", "imdb", "mnist", "mrpc", "piqa", "ptb_text_only"),
        *("rotten_tomatoes", "samsum", "squad", "squad_v2", "sst2", "super_glue", "tiny_shakespeare", "tweet_eval"),
        *("wikitext", "yelp_polarity"),
    }
)
"""Datasets of the Hugging Face Hub, without their owners, that are tokenized within a few minutes."""


def _is_over_small(script: Script, data: ast.expr) -> bool:
    """Whether data are a small dataset as it was loaded, and nothing else."""
    while isinstance(data, ast.Subscript):
        data = data.value
    loaded = list(origins(script, data))
    names = [
        script.value(script.argument(one, "path", 0))
        for one in loaded
        if isinstance(one, ast.Call) and script.name(one.func) == "datasets.load_dataset"
    ]
    small = [name for name in names if isinstance(name, str) and name.rpartition("/")[2] in _SMALL_SETS]
    return bool(loaded) and len(small) == len(loaded)


def _waiting(script: Script, call: ast.Call) -> tuple[int, str] | None:
    """Where the others wait: at the block that the main process enters first, or at a barrier after the condition."""
    first = main_first(script, call)
    if first is not None:
        return first.lineno, f"in {script.text_of(first.func, 40)} (line {first.lineno})"
    condition = rank_condition(script, call)
    if condition is None or not isinstance(condition.where, ast.If):
        return None
    for one in collectives_of(script).in_body(script.function_of(call) or script.tree):
        after = one.call.lineno > (condition.where.end_lineno or 0)
        if after and one.word in _WAITS and rank_condition(script, one.call) is None:
            return one.call.lineno, f"at {script.text_of(one.call.func, 40)} (line {one.call.lineno})"
    return None


_WAITS = frozenset({"barrier", "wait_for_everyone", "broadcast", "broadcast_object_list", "all_reduce"})


_FIRST = """\
import argparse
from datasets import load_dataset

def main(args, tokenizer):
    accelerator = Accelerator(gradient_accumulation_steps=args.accumulate)
    raw = load_dataset(args.dataset_name)
    with accelerator.main_process_first():
        tokenized = raw.map(lambda rows: tokenizer(rows["text"]), batched=True)  # !
    return tokenized
"""
_DOWNLOAD = """\
from datetime import timedelta
from huggingface_hub import snapshot_download

def main(name, folder):
    dist.init_process_group("nccl")
    if dist.get_rank() == 0:
        snapshot_download(name, local_dir=folder)  # !
    dist.barrier()
    return load(folder)
"""
_ARCHIVES = """\
import tarfile

def prepare(folder, url="https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz"):
    dist.init_process_group("nccl")
    if dist.get_rank() == 0:
        with tarfile.open(os.path.join(folder, "aclImdb_v1.tar.gz")) as tar:
            tar.extractall(folder)  # !
    dist.barrier()
"""
_ARGUMENTS = """\
from transformers import Trainer, TrainingArguments
from datasets import load_dataset

def main(path, tokenizer):
    training_args = TrainingArguments(output_dir="out", per_device_train_batch_size=4)
    data = load_dataset("json", data_files=path)
    other = load_dataset(path)
    with training_args.main_process_first(desc="tokenize"):
        data = other.map(tokenizer, num_proc=8)  # !
"""
_PREPARED = """\
from datasets import load_dataset, load_from_disk

accelerator = Accelerator()
data = load_from_disk(args.prepared)
with accelerator.main_process_first():
    data = data.with_transform(augment)
words = list(map(len, data))
"""
_SMALL = """\
from datasets import load_dataset

accelerator = Accelerator()
data = load_dataset("glue", "mrpc")
with accelerator.main_process_first():
    data = data.map(tokenize, batched=True)
"""
_SMALL_BESIDE = """\
import datasets

accelerator = Accelerator()
with accelerator.main_process_first():
    if "wikitext" in args.task:
        raw = datasets.load_dataset("wikitext", args.task)
        data = raw.map(tokenize, batched=True)
    else:
        data = datasets.load_from_disk(args.folder)
"""
_SMALL_OR_FILES = """\
from datasets import load_dataset

accelerator = Accelerator()
raw = load_dataset("nyu-mll/glue", args.task) if args.task else load_dataset("csv", data_files=args.files)
other = load_dataset(args.name)
with accelerator.main_process_first():
    data = other["train"].map(tokenize)  # !
"""
_NOBODY = """\
from huggingface_hub import snapshot_download

def main(name, rank):
    dist.init_process_group("nccl")
    snapshot_download(name)
    if rank == 0:
        snapshot_download("another")
    train()
"""
_PARSED = """\
from datasets import load_dataset
from transformers import HfArgumentParser, TrainingArguments

def main(path, tokenizer):
    training_args, = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    data = load_dataset(path)
    with training_args.main_process_first():
        data = data.map(tokenizer)
"""
