"""CODE013: an IterableDataset that every worker and every rank reads completely."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from doctor.api import Script, Severity, Violation, rule
from doctor.lint.python.loader_calls import LOADERS, data_of, loaders, mentions_ranks
from doctor.lint.python.training import ACCELERATOR, hooks, several_ranks, shards_loaders_itself
from doctor.testing.script_cases import fails, passes

_STREAM = "torch.utils.data.IterableDataset"
_PARTS = re.compile(
    r"worker|rank|world|shard|replica|process_index|num_processes|split_by|partition|distribut|node|islice_by|"
    r"num_parts|part_id|subset_id",
    re.IGNORECASE,
)
"""Words of streams that are partitioned by reader."""
_DRAWS = re.compile(r"^(?:rand\w*|random|randn|choices?|shuffle|sample|Generator|default_rng|normal|uniform|env|step)$")
"""Words of infinite streams that each reader generates."""
_READS = frozenset(
    {
        *("open", "glob", "iglob", "rglob", "iterdir", "listdir", "scandir", "read_csv", "read_parquet", "read_text"),
        *("read_table", "ParquetFile", "TarFile", "iter_lines", "readlines", "reader", "DictReader", "jsonlines"),
    }
)
_FILES = re.compile(r"(?:^|_)(?:files?|filenames?|paths?|urls?|lines|samples|examples|texts|rows|records|documents)$")
_SPLITS = frozenset(
    {
        *("split_dataset_by_node", "split_by_node", "shard", "nodesplitter", "ResampledShards", "resampled"),
        *("dispatch_batches", "prepare_data_loader", "split_by_worker"),
    }
)


@rule(
    id="CODE013",
    severity=Severity.WARNING,
    reads=Script,
    mentions=("IterableDataset", "load_dataset"),
    foreshadows=("DATA008",),
    cases=lambda: (
        fails("workers that all read the file", _STREAM_CASE),
        fails(
            "ranks that all read the files",
            _STREAM_CASE.replace("num_workers=4", "num_workers=0") + "torch.distributed.init_process_group()\n",
        ),
        fails("the documents that were loaded, in order", _LIST),
        fails("a stream of Hugging Face in plain DDP", _HUB),
        passes("parted by worker and rank", _PARTED),
        passes("files of each rank's own", _OWN_FILES),
        passes("one process", _STREAM_CASE.replace("num_workers=4", "num_workers=0")),
        passes(
            "drawn at random by each reader", _STREAM_CASE.replace("yield json.loads(line)", "yield random.random()")
        ),
        passes("around another stream, which may be parted", _AROUND),
        passes("split by node", _HUB.replace("model = ", "data = split_dataset_by_node(data, rank, world)\nmodel = ")),
        passes(
            "accelerate gives each rank its batches",
            _HUB.replace(
                "import torch\n", "import torch\nimport accelerate\naccelerate.Accelerator().prepare(loader)\n"
            ),
        ),
        passes("not in this file's loaders", _STREAM_CASE.partition("loader =")[0]),
    ),
)
def stream_not_parted(script: Script) -> Iterator[Violation]:
    """Ask whether an IterableDataset gives each rank and each worker its own shard.

    Why it hurts: an epoch takes several times as long without training on additional data.
    Fix: In `__iter__`, yield only the samples of this rank and of this worker (`torch.utils.data.get_worker_info()`).
    """
    ranks = several_ranks(script)
    if next(script.calls(ACCELERATOR, "transformers.Trainer"), None) is not None:
        ranks = None
    for owner in script.all(ast.ClassDef):
        if script.derives(owner, _STREAM):
            yield from _hits(script, owner, ranks)
    if ranks is not None and not shards_loaders_itself(script):
        yield from _from_the_hub(script, ranks)


def _hits(script: Script, owner: ast.ClassDef, ranks: ast.Call | None) -> Iterator[Violation]:
    reads = next(hooks(owner, "__iter__"), None)
    loader = next(_fed_loaders(script, owner), None)
    if reads is None or loader is None or not _reads_by_itself(script, owner, reads):
        return
    if mentions_ranks(data_of(script, loader)):
        ranks = None
    workers = script.argument(loader, "num_workers", 5)
    several = workers is not None and script.value(workers) != 0
    if ranks is None and not several:
        return
    number = script.value(workers)
    count = f"{number} " if isinstance(number, int) else ""
    readers = [f"in each of the {count}workers (line {loader.lineno})"] if several else []
    if ranks is not None:
        readers.append("on each rank")
    yield Violation(
        reads,
        f"Dataset {owner.name} yields all of its samples {' and '.join(readers)}",
        fix="In `__iter__`, yield only the samples of this worker (`torch.utils.data.get_worker_info()`)."
        if ranks is None
        else "",
        evidence=(("job_started_at_line", ranks.lineno),) if ranks is not None else (),
    )


def _fed_loaders(script: Script, owner: ast.ClassDef) -> Iterator[ast.Call]:
    for call in script.calls(*LOADERS):
        data = script.argument(call, "dataset", 0)
        is_fed = data is not None and script.class_definition(data) is owner
        if is_fed and script.argument(call, "worker_init_fn") is None:
            yield call


def _reads_by_itself(script: Script, owner: ast.ClassDef, reads: ast.FunctionDef) -> bool:
    bases = (base for one in owner.bases if (base := script.class_definition(one)) not in (None, owner))
    words = {word for one in (owner, *filter(None, bases)) for part in ast.walk(one) for word in _words(part)}
    if any(_PARTS.search(word) or _DRAWS.match(word) for word in words):
        return False
    if not words.isdisjoint(_READS):
        return True
    return any(_is_whole(loop.iter) for loop in script.inside(reads, ast.For))


def _words(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.Attribute):
        yield node.attr
    elif isinstance(node, ast.arg):
        yield node.arg


def _is_whole(source: ast.expr) -> bool:
    if isinstance(source, ast.Call) and isinstance(source.func, ast.Name):
        if source.func.id == "range":
            return any(isinstance(one, ast.Attribute) for one in ast.walk(source))
        if source.func.id in ("enumerate", "iter", "zip") and source.args:
            return _is_whole(source.args[0])
    return isinstance(source, ast.Attribute) and bool(_FILES.search(source.attr))


def _name(script: Script, call: ast.Call, words: str) -> str:
    """The variable that holds the result of a call, in ``words``; empty if there is none."""
    statement = script.parent(call)
    target = statement.targets[0] if isinstance(statement, ast.Assign) else None
    return words.format(target.id) if isinstance(target, ast.Name) else ""


def _from_the_hub(script: Script, ranks: ast.Call) -> Iterator[Violation]:
    """``load_dataset(…, streaming=True)``, which is partitioned for workers but not for ranks."""
    words = {word for part in ast.walk(script.tree) for word in _words(part)}
    if not words.isdisjoint(_SPLITS) or "Trainer" in words:
        return
    fed = {
        script.name(data) for one in loaders(script) if (data := script.argument(one.call, "dataset", 0)) is not None
    }
    for call in script.calls("datasets.load_dataset"):
        if script.value(script.argument(call, "streaming")) is True and any("load_dataset()" in name for name in fed):
            yield Violation(
                call,
                f"Each rank reads the whole stream{_name(script, call, ' `{}`')}: an epoch has each sample once per "
                "rank",
                evidence=(("job_started_at_line", ranks.lineno),),
                fix="Use `datasets.distributed.split_dataset_by_node("
                f"{_name(script, call, '{}') or 'dataset'}, rank, world_size)`.",
            )


_STREAM_CASE = """\
import json
import random
import torch
from torch.utils.data import IterableDataset

class Lines(IterableDataset):
    def __init__(self, path):
        self.path = path

    def __iter__(self):  # !
        with open(self.path) as file:
            for line in file:
                yield json.loads(line)

loader = DataLoader(Lines("train.jsonl"), batch_size=8, num_workers=4)
"""

_OWN_FILES: str = (
    _STREAM_CASE.replace("num_workers=4", "num_workers=0").replace('"train.jsonl"', 'f"{rank}.jsonl"')
    + 'torch.distributed.init_process_group("gloo")\n'
)

_LIST = """\
class Packed(torch.utils.data.IterableDataset):
    def __init__(self, documents, length):
        self.documents, self.length = documents, length

    def __iter__(self):  # !
        held = []
        for document in self.documents:
            held.extend(document)
            while len(held) >= self.length:
                yield torch.tensor(held[: self.length])
                held = held[self.length :]

def main(documents, model):
    dist.init_process_group("nccl")
    dataset = Packed(documents, 1024)
    loader = torch.utils.data.DataLoader(dataset, batch_size=8)
    model = DDP(model)
    for batch in loader:
        model(batch).mean().backward()
"""
_PARTED = """\
import itertools
import torch
from torch.utils.data import IterableDataset

class Lines(IterableDataset):
    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        workers, worker = (info.num_workers, info.id) if info else (1, 0)
        reader = dist.get_rank() * workers + worker
        with open("train.jsonl") as file:
            yield from itertools.islice(file, reader, None, dist.get_world_size() * workers)

dist.init_process_group("nccl")
loader = DataLoader(Lines(), batch_size=8, num_workers=4)
"""
_AROUND = """\
import torch
from torch.utils.data import IterableDataset

class Tokenized(IterableDataset):
    def __init__(self, source, tokenizer):
        self.source, self.tokenizer = source, tokenizer

    def __iter__(self):
        for text in self.source:
            yield self.tokenizer(text)

loader = DataLoader(Tokenized(build(), tokenizer), num_workers=4)
"""
_HUB = """\
import torch
from datasets import load_dataset
from datasets.distributed import split_dataset_by_node as split
from torch.nn.parallel import DistributedDataParallel

torch.distributed.init_process_group("nccl")
data = load_dataset("allenai/c4", "en", split="train", streaming=True)  # !
model = DistributedDataParallel(build_model())
loader = DataLoader(data, batch_size=8, num_workers=2)
for batch in loader:
    model(**batch).loss.backward()
"""
