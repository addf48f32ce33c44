"""CODE029: a file that all ranks write."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from doctor.api import Script, Severity, Violation, rule
from doctor.lint.python.loader_calls import belongs_to_lightning, words_behind
from doctor.lint.python.project.settings.options import is_switched_off
from doctor.lint.python.project.starts.launch_counts import lines_naming
from doctor.lint.python.reachable_functions import run_by_all
from doctor.lint.python.script import FunctionNode, last_name
from doctor.lint.python.single_rank import excludes, may_run_alone, ways_to
from doctor.lint.python.training import (
    RANK_WORDS,
    TRAINER,
    calls_of,
    is_test,
    only_infers,
    several_ranks,
    trains_on_several,
    unwrapped,
)
from doctor.lint.python.value_flow import computed_from, handed_in
from doctor.testing.script_cases import fails, passes
from doctor_checks.code.processes._written_values import WRITERS, file_of, severity_of

_QUOTES = "'\""
_DATA_SETS = ("torchvision.datasets.", "torchaudio.datasets.", "torchtext.datasets.")
_LAUNCHED = re.compile(
    r"torchrun|torch\.distributed|accelerate launch|deepspeed |local_rank|LOCAL_RANK|world_size(?!\W{0,3}[=:]\s?1\b)"
)
"""Words of scripts that a launcher starts in several ranks."""
_OWN = re.compile(
    r"rank|proc(?:ess)?_?(?:id|index)|getpid|gethostname|hostname|node_?name|uuid|te?mp|mkstemp|local|device|gpu|worker|"
    r"shard|BytesIO|buffer|stream|time|now|random|dev.null|part|split_id|\bpid\b|stdout|stderr|socket|queue|job_id",
    re.IGNORECASE,
)
"""Words of paths that differ between ranks, or are not files."""

_CPUS_OF_GPU = 16
"""CPU cores for each GPU: NVIDIA's DGX A100 has 128 for eight."""
_LOADER = re.compile(r"loader|(?:^|_)dl$", re.IGNORECASE)
_OPTIMIZES = re.compile(r"optim|[Tt]rainer|train_one_epoch|\.train\(|\btrain\(", re.IGNORECASE)


@rule(
    id="CODE029",
    severity=Severity.ERROR,
    preview_infos=True,
    reads=Script,
    mentions=(*RANK_WORDS, "num_proc"),
    impacts={
        r"download": "Ranks on the same file system overwrite each other's files, and may read an incomplete dataset.",
        r"^Every rank runs": "Every rank does the same work, and the processes of all ranks compete for the CPUs.",
    },
    cases=lambda: (
        fails("a checkpoint after each epoch", _script("torch.save(model.module.state_dict(), 'last.pt')  # !")),
        fails(
            "in a function",
            _script(
                "save(model, epoch)",
                "def save(model, epoch):\n"
                "    path = os.path.join(OUT, f'{epoch}.pt')\n"
                "    torch.save(model.state_dict(), path)  # !",
            ),
        ),
        fails(
            "results as JSON",
            _script("with open(OUT + '/results.json', 'w') as file:  # !\n        json.dump({'epoch': epoch}, file)"),
        ),
        fails(
            "the best one",
            _script("if loss < best:\n        torch.save({'model': model.state_dict()}, f'{OUT}/best.pth')  # !"),
        ),
        fails("predictions as an array", _script("np.save('predictions.npy', predictions)  # !")),
        fails("in ranks that the script starts", _SPAWNED),
        fails("in ranks that it starts unless there is one GPU", _SPAWNED_OR_ALONE),
        fails("a path that the caller hands in", _HANDED),
        fails(
            "a download",
            _script("pass", "import torchvision\ndata = torchvision.datasets.MNIST('d', download=True)  # !"),
        ),
        fails("a data set that every rank maps in many processes", _MAPPED),
        passes("a download before a Trainer starts the other ranks", _DOWNLOADED_BEFORE_FIT),
        fails("a download in a hook of each rank", _DOWNLOADED_IN_SETUP),
        passes("a download in the hook of one rank", _DOWNLOADED_IN_SETUP.replace("setup", "prepare_data")),
        fails(
            "a download on each of several hosts",
            _DOWNLOADED_BEFORE_FIT.replace("True)", "True)  # !").replace("devices=4", "devices=4, num_nodes=2"),
        ),
        passes("mapped by the main process first", _MAPPED_FIRST),
        passes(
            "a download of rank 0, while the others wait",
            _script(
                "pass",
                "from torchvision.datasets import MNIST\nif int(os.environ['LOCAL_RANK']) == 0:\n"
                "    MNIST('d', download=True)\ntorch.distributed.barrier()\ndata = MNIST('d', download=True)",
            ),
        ),
        passes(
            "a path that the caller hands in, with the rank in it",
            _HANDED.replace("{name}/", "{name}/{dist.get_rank()}"),
        ),
        passes("rank 0", _script("if rank == 0:\n        torch.save(model.module.state_dict(), 'last.pt')")),
        passes("a file for each rank", _script("torch.save(model.state_dict(), f'last-{rank}.pt')")),
        passes(
            "a folder for each rank",
            _script("torch.save(model, os.path.join(mine, 'last.pt'))", "mine = f'{OUT}/{dist.get_rank()}'"),
        ),
        passes(
            "in a function that rank 0 calls",
            _script("if rank == 0: save(model)", "def save(model):\n    torch.save(model, 'last.pt')"),
        ),
        passes(
            "in a function that nobody calls here",
            _script("pass", "def save(model):\n    torch.save(model, 'last.pt')"),
        ),
        passes("in a method that the process of device 0 calls", _BY_DEVICE),
        passes(
            "what rank 0 alone has",
            _script("if found is not None:\n        np.save('found.npy', found)", "found = None").replace(
                "    predictions", "    if rank == 0:\n        found = loss\n    predictions"
            ),
        ),
        passes(
            "one of many, by turns", _script("for n in range(rank, 24, 8):\n        np.save(f'{n}.npy', predictions)")
        ),
        passes("a file for each sample of its own loader", _SAMPLES),
        passes(
            "where an option says one process", _script("if args.dist == 'off':\n        np.save('a.npy', predictions)")
        ),
        fails("where it says several", _script("if args.dist == 'on':\n        np.save('a.npy', predictions)  # !")),
        passes("one after the other", _script("with FileLock('a.lock'):\n        np.save('a.npy', predictions)")),
        passes("a cache that rank 0 makes first, while the others wait", _CACHED),
        passes("a cache that the process of GPU 0 makes first", _CACHED_BY_DEVICE),
        fails(
            "a cache that all make at the same time",
            _CACHED_BY_DEVICE.replace("gpu != 0", "args.waits").replace('"wb") as file:', '"wb") as file:  # !'),
        ),
        passes(
            "in a function that returns where the rank is not 0",
            _script(
                "save(rank, model)",
                "def save(rank, model):\n    if rank: return\n    torch.save(model.state_dict(), 'last.pt')",
            ),
        ),
        passes(
            "under a parameter that says whether this is rank 0",
            _script(
                "save(model, writes=rank == 0)",
                "def save(model, writes):\n    if writes:\n        torch.save(model.state_dict(), 'last.pt')",
            ),
        ),
        passes("in a function that is given to one rank", _ON_MAIN.format(decorator="record")),
        passes(
            "a decorator for one rank",
            _ON_MAIN.format(decorator="run_on_master").replace("run_on_main(save, model)", "save(model)"),
        ),
        fails(
            "another decorator",
            _ON_MAIN.format(decorator="record")
            .replace("run_on_main(save, model)", "save(model)")
            .replace(".pt')", ".pt')  # !"),
        ),
        passes("where the other ranks start the next round", _script("if rank: continue\n    np.save('a.npy', loss)")),
        passes("where the other ranks end", _script("if rank != 0: sys.exit(0)\n    np.save('a.npy', loss)")),
        passes("where one rank is asserted", _script("assert rank == 0\n    np.save('a.npy', loss)")),
        passes("an attribute that says it", _script("if args.keeps: np.save('a.npy', loss)", "args.keeps = RANK == 0")),
        fails(
            "in the branch of a distributed run",
            _script("if args.ddp: torch.save(model.module, 'last.pt')  # !\n    else: torch.save(model, 'last.pt')"),
        ),
        passes("what is not there yet", _LEFT),
        passes("a mode that is not for several ranks", _EVOLVED),
        passes(
            "returned before by the others",
            _script(
                "save(model)",
                "def save(model):\n    if dist.get_rank() != 0:\n        return\n    torch.save(model, 'last.pt')",
            ),
        ),
        passes(
            "a checkpoint of all ranks together",
            _script("torch.distributed.checkpoint.save(state, checkpoint_id='last')"),
        ),
        passes("read", _script("with open('settings.json') as file:\n        settings = json.load(file)")),
        passes(
            "before the ranks are started",
            _SPAWNED.replace("def main", "np.save('a.npy', data)\n\ndef main").replace("torch.save", "print"),
        ),
        passes(
            "one process",
            _script("torch.save(model, 'last.pt')").replace("dist.init", "# dist.init").replace("DDP(", "("),
        ),
        passes("saved by accelerate", _ACCELERATE),
        passes("a marker with the same constant from all ranks", _script(_MARKER)),
        fails("a marker that holds the epoch", _script(_MARKER_OF_EPOCH)),
        passes("in the mode that joins no group, and by rank 0 in the other one", _MODES),
        fails(
            "in a mode, after all modes have joined a group",
            _MODES.replace("    if args", "    dist.init_process_group('nccl')\n    if args").replace(
                'npz", summary)', 'npz", summary)  # !'
            ),
        ),
        fails(
            "by all ranks of the other mode",
            _MODES.replace("if rank == 0", "if args.keep").replace('npz", summary)', 'npz", summary)  # !'),
        ),
        passes("a group of one rank", _OF_ONE),
        passes("in a function that refuses jobs of several ranks", _REFUSES),
        fails("settings that all ranks read from one file", _SETTINGS),
        fails("settings with the options of the rank", _SETTINGS_OF_RANK),
        fails("settings with a number that the rank computed", _SETTINGS_COMPUTED),
        passes("a log into which rank 0 alone prints", _script("if rank == 0:\n        print(loss, file=log)", _LOG)),
        passes(
            "a log with the models, into which rank 0 alone writes more",
            _script("if rank == 0:\n        log.write(str(loss))", _LOG_OF_MODELS),
        ),
        fails(
            "a log with the models, into which all ranks write more",
            _script("log.write(str(loss))", _LOG_OF_MODELS.replace('"w")', '"w")  # !')),
        ),
        fails("a log into which all ranks print", _script("print(loss, file=log)", f"{_LOG}  # !")),
        passes("a file that rank 0 alone fills, by the name of one that was read", _script(_FILLED_ON_FIRST)),
        fails(
            "a file that all ranks fill, by the name of one that was read",
            _script(_FILLED_ON_FIRST.replace("rank == 0", "predictions").replace("as out:", "as out:  # !", 2)).replace(
                "as out:  # !", "as out:", 1
            ),
        ),
        passes(
            "a branch that the calls of all ranks do not take",
            _BRANCH.replace("  # !", "").replace("1 > epoch", "True"),
        ),
        fails("a branch that a call of all ranks takes", _BRANCH),
        fails("two splits of one dataset", _TWO_SPLITS),
        passes("mapped in memory", _MAPPED.replace("  # !", "").replace("16", "16, keep_in_memory=True")),
        passes("after the ranks that Ray started are done", _ON_RAY),
        fails(
            "in what Ray runs on each rank",
            _ON_RAY.replace("DDP(build())", 'DDP(build())\n        torch.save(model.state_dict(), "last.pt")  # !'),
        ),
        passes("a process of Spark that has started the ranks", _ON_SPARK),
        passes("the program that starts ranks as actors of Ray", _ACTORS),
        fails("a process for something else beside the ranks", _BESIDE),
        passes("after a Trainer has spawned the ranks and they are done", _SPAWNED_BY_TRAINER),
        fails(
            "after fit() in each rank",
            _SPAWNED_BY_TRAINER.replace("_spawn", "").replace('"last.pt")', '"last.pt")  # !'),
        ),
        passes("where old releases spawn", _SPAWNED_BY_TRAINER.replace('devices=4, strategy="ddp_spawn"', "gpus=4")),
        fails(
            "on several hosts",
            _SPAWNED_BY_TRAINER.replace('devices=4, strategy="ddp_spawn"', "gpus=4, num_nodes=2").replace(
                '"last.pt")', '"last.pt")  # !'
            ),
        ),
        passes("a mode that makes no Trainer", _AVERAGED),
        fails("before a mode is chosen", _AVERAGED_BEFORE),
        passes("the folder of a run that the main process has", _OF_TRACKER),
        passes(
            "the folder of a run of wandb", _script("torch.save(model, os.path.join(wandb.run.dir, 'a.pt'))", _WANDB)
        ),
        passes("names of samples that a pool gets", _script(_IN_POOL.format(given="names"), _SAVES)),
        fails(
            "one name that a pool gets",
            _script(_IN_POOL.format(given="['a', 'b']"), _SAVES.replace("latent)", "latent)  # !")),
        ),
        passes("names of samples of a step", _PREDICTED % 'batch["name"]'),
        fails("other names in a step", (_PREDICTED % '["a", "b"]').replace("name))", "name))  # !")),
        passes("a log that is emptied", _script("with open(OUT + '/log.txt', 'w') as file:\n        pass")),
    ),
)
def file_written_by_all(script: Script) -> Iterator[Violation]:
    """Ask whether each file of a job is written by one rank only.

    Why it hurts: ranks on the same file system overwrite each other's output. The file may be truncated or corrupted,
    which is noticed only when it is read.
    Fix: Write under `if torch.distributed.get_rank() == 0:`, or include the rank in the file name.
    """
    ranks = several_ranks(script)
    if is_test(script):
        return
    yield from _mapped(script)
    if ranks is None:
        return
    later = _starts_ranks_later(script, ranks)
    trainers = [one for one in script.calls(TRAINER) if trains_on_several(script, one)] if later else []
    yield from (one for one in _downloaded(script) if not later or _is_in_hook(script, one.at))
    # Scripts that train nothing are often started as one process.
    infers = only_infers(script, ranks) or not _OPTIMIZES.search(script.text)
    for call, where in _written(script):
        function = script.function_of(call)
        # ``if os.path.exists(path): continue`` in its loop: ranks share work by existing files.
        loop = script.nearest(call, ast.For, ast.While)
        branches = script.inside(loop, ast.If) if loop is not None else ()
        if any(
            "exists" in script.text_of(one.test) and any(isinstance(last, ast.Continue) for last in one.body)
            for one in branches
        ):
            continue
        if later and _is_without(script, call, trainers):
            continue
        if function in run_by_all(script) and not may_run_alone(script, call) and not _is_own(script, where, function):
            place = script.text_of(where, 50)
            yield Violation(
                call,
                f"All ranks write to {place if place[0] in _QUOTES else f'`{place}`'} at the same time",
                evidence=(("job_started_at_line", ranks.lineno),),
                severity=severity_of(script, call, infers=infers),
                once=_part(script, call),
                fix=_fix(script, call, ranks),
            )


def _part(script: Script, call: ast.Call) -> str:
    """The loop or function whose body has a call, with all branches there: one condition fits all files of it."""
    part = script.nearest(call, ast.For, ast.AsyncFor, ast.While, ast.FunctionDef, ast.AsyncFunctionDef)
    return f"{script.path}:{part.lineno if part is not None else 0}"


def _fix(script: Script, call: ast.Call, ranks: ast.Call) -> str:
    """A condition around the line is not enough if each rank has its own data, or uses the open file later."""
    joins = script.name(ranks.func).startswith("torch.distributed.") and call.lineno < ranks.lineno
    is_before = joins and script.function_of(call) is script.function_of(ranks)
    is_first = 'int(os.environ["RANK"]) == 0' if is_before else "torch.distributed.get_rank() == 0"
    if script.name(call.func).startswith("numpy."):
        return (
            f"Include the rank in the file name, or gather the data and put line {call.lineno} under `if {is_first}:`."
        )
    if isinstance(script.parent(call), (ast.Assign, ast.AnnAssign)):
        return f"Include the rank in the file name, or open and write the file only `if {is_first}:`."
    block = "the block at line" if isinstance(script.parent(call), ast.withitem) else "line"
    return f"Put {block} {call.lineno} under `if {is_first}:`."


def _starts_ranks_later(script: Script, ranks: ast.Call) -> bool:
    """Whether a Trainer starts the other ranks, which run the script again after rank 0 has reached ``fit()``: what it
    has downloaded is complete then."""
    if script.name(ranks.func) != TRAINER or script.is_given(ranks, "num_nodes"):
        return False
    return not script.is_open(ranks) and not _LAUNCHED.search(script.text)


def _is_without(script: Script, node: ast.AST, trainers: list[ast.Call]) -> bool:
    """Whether no run of the script that gets to a place makes a Trainer, which alone starts other ranks: it has a mode
    for something else."""
    ways = [list(ways_to(script, one)) for one in (node, *trainers)]
    return all(ways) and all(excludes(one, other) for one in ways[0] for found in ways[1:] for other in found)


def _is_in_hook(script: Script, node: object) -> bool:
    """Whether it is in a hook that the Trainer calls on each rank at the same time: ``setup``, or a loader."""
    function = script.function_of(node) if isinstance(node, ast.AST) else None
    if function is None or getattr(function, "name", "") not in _ON_EACH_RANK:
        return False
    return belongs_to_lightning(script, function)


_ON_EACH_RANK = frozenset({"setup", *(f"{stage}_dataloader" for stage in ("train", "val", "test", "predict"))})


def _downloaded(script: Script) -> Iterator[Violation]:
    """Datasets that every rank downloads into the same folder, unless one rank did so before."""
    calls = [
        call
        for call in script.all(ast.Call)
        if script.value(script.argument(call, "download")) is True and script.name(call.func).startswith(_DATA_SETS)
    ]
    first = {script.name(call.func) for call in calls if not _is_by_all(script, call)}
    first |= {name for name in {script.name(call.func) for call in calls} if _has_program_for(script, name)}
    opened: list[ast.Call] = []
    for call in calls:
        where = script.argument(call, "root", 0)
        if any(_is_same_download(script, one, call) for one in opened):
            continue
        follows = any(_may_follow(script, one, call) for one in opened)
        opened.append(call)
        is_own = where is not None and _is_own(script, where, script.function_of(call))
        if script.name(call.func) not in first and not (is_own and where is not None and _names_ranks(script, where)):
            yield Violation(
                call,
                f"All ranks download {script.text_of(call.func)} into the same folder at the same time",
                severity=Severity.INFO if follows or is_switched_off(script, call) else Severity.WARNING,
                preview=follows,
                fix="Download in `prepare_data()`, which Lightning calls in one process per host (per job with "
                "`self.prepare_data_per_node = False`, for a shared folder), and open the dataset with "
                "`download=False`."
                if _is_in_hook(script, call)
                else "Download on one rank per file system (rank 0 if the folder is shared, otherwise local rank 0 of "
                "each host), call `torch.distributed.barrier()`, then open the dataset on all ranks with "
                "`download=False`.",
            )


_FETCHES = re.compile(r"download|fetch|prepare|get_?data|setup_data", re.IGNORECASE)


def _has_program_for(script: Script, name: str) -> bool:
    """Whether a program of the project whose name says that it prepares data downloads a dataset of that name."""
    modules, kind = script.modules, name.rpartition(".")[2]
    downloads = re.compile(rf"\b{re.escape(kind)}\([^()]*\bdownload\s?=\s?True")
    return modules is not None and any(
        _FETCHES.search(shown.rpartition("/")[2]) and shown != script.path and downloads.search(text)
        for shown, text in modules.mentioning(kind)
    )


def _is_same_download(script: Script, first: ast.Call, second: ast.Call) -> bool:
    """Whether the rank that reaches the second call has made the first, of the same dataset in the same folder: another
    split of what is there then."""
    above = script.parent(script.statement_of(first))
    is_above = above is script.parent(script.statement_of(second)) or any(one is above for one in script.around(second))
    in_branch = isinstance(above, (ast.If, ast.Try)) and above is not script.parent(script.statement_of(second))
    return _are_alike(script, first, second) and is_above and not in_branch


def _are_alike(script: Script, first: ast.Call, second: ast.Call) -> bool:
    """Whether two calls are of the same dataset in the same folder."""
    places = [script.argument(one, "root", 0) for one in (first, second)]
    texts = {ast.unparse(one) if one is not None else "" for one in places}
    return script.name(first.func) == script.name(second.func) and len(texts) == 1


def _may_follow(script: Script, first: ast.Call, second: ast.Call) -> bool:
    """Whether a run may make both calls of a function, the first in a branch above: the second one then finds the files
    of a dataset that comes with all its splits."""
    answers = [{(ast.unparse(one.test), is_in) for one, is_in in script.branches(call)} for call in (first, second)]
    return (
        script.name(first.func).endswith(_WITH_ALL_SPLITS)
        and script.function_of(first) is script.function_of(second)
        and _are_alike(script, first, second)
        and not any((test, not is_in) in answers[1] for test, is_in in answers[0])
    )


_WITH_ALL_SPLITS = ("MNIST", "CIFAR10", "CIFAR100")
"""torchvision/datasets/mnist.py and cifar.py: ``download()`` fetches what both splits need."""


def _names_ranks(script: Script, where: ast.expr) -> bool:
    return any(_OWN.search(word) for word in words_behind(script, where))


def _is_by_all(script: Script, call: ast.Call) -> bool:
    return script.function_of(call) in run_by_all(script) and not may_run_alone(script, call)


def _mapped(script: Script) -> Iterator[Violation]:
    """Hugging Face datasets that every rank maps with many processes. The work is only repeated, since each rank writes
    a temporary file and renames it (datasets/arrow_dataset.py: ``_map_single``), and the other ranks would wait
    meanwhile: it takes longer if the ranks of a host have more processes than CPUs."""
    if several_ranks(script) is None and not _LAUNCHED.search(script.text):
        return
    if "disable_caching(" in script.text:
        return
    for call in script.method_calls("map"):
        if not isinstance(call.func, ast.Attribute) or not _is_by_all(script, call):
            continue
        data = call.func.value
        while isinstance(data, ast.Subscript):
            data = data.value
        if _is_in_memory(script, call) or any(_is_in_memory(script, one) for one in _loaded(script, data)):
            continue
        count = script.value(script.argument(call, "num_proc"))
        if script.name(data).startswith("datasets.load_") and isinstance(count, int) and count > 1:
            yield Violation(
                call,
                f"Every rank runs {script.text_of(call.func)} in {count} processes, all for the same cache file",
                severity=Severity.WARNING if count > _CPUS_OF_GPU and _is_launched(script) else Severity.INFO,
                once=f"{script.path} map",
                fix="Wrap the call in `main_process_first()` of TrainingArguments or Accelerator, so that the other "
                "ranks read the cache.",
            )


_LAUNCHES = re.compile(
    r"torchrun|accelerate launch|torch\.distributed\.(?:launch|run)\b|\bdeepspeed\b[^\n]*\.py|\bsrun\b|\bmpirun\b|"
    r"launch\("
)


def _is_launched(script: Script) -> bool:
    """Whether the script, or a line of its project that names it, has a launcher; of a file alone, that is unknown."""
    modules = script.modules
    if modules is None or modules.is_one_file or not script.location or _LAUNCHES.search(script.text):
        return True
    return any(map(_LAUNCHES.search, lines_naming(script, modules)))


def _is_in_memory(script: Script, call: ast.Call) -> bool:
    """datasets/arrow_dataset.py: such a ``map()``, or one of a dataset without cache files, writes none."""
    return script.value(script.argument(call, "keep_in_memory")) is True


def _loaded(script: Script, data: ast.expr) -> Iterator[ast.Call]:
    yield from (one for one in script.values_of(data) if isinstance(one, ast.Call))


def _written(script: Script) -> Iterator[tuple[ast.Call, ast.expr]]:
    for name, (argument, place) in WRITERS.items():
        for call in script.calls(name):
            if (where := script.argument(call, argument, place)) is not None:
                yield call, where
    for call in script.calls("open", ""):
        if isinstance(call.func, ast.Name) and call.func.id == "open" and call.args:
            mode = script.value(script.argument(call, "mode", 1))
            if not isinstance(mode, str) or mode[:1] not in ("w", "x"):
                continue
            if not (_is_marker(script, call) or _is_only_emptied(script, call) or _holds_models(script, call)):
                yield call, call.args[0]


def _is_marker(script: Script, call: ast.Call) -> bool:
    """``with open(path, "w") as file: file.write("done")``: the same constant from every rank does no harm."""
    around = _block_of(script, call)
    if around is None:
        return False
    item = next((one for one in around.items if one.context_expr is call), None)
    if all(isinstance(one, ast.Pass) for one in around.body):
        return True  # emptied before anything is written
    if item is None or not isinstance(item.optional_vars, ast.Name):
        return False
    file = item.optional_vars.id
    uses = [one for part in around.body for one in script.inside(part, ast.Name) if one.id == file]
    return bool(uses) and all(_writes_constant(script, one) for one in uses)


def _is_only_emptied(script: Script, call: ast.Call) -> bool:
    """Whether all ranks open a file, and one of them alone, or none, writes into it."""
    uses = _uses_of_file(script, call)
    return uses is not None and all(_only_closes(script, one) or may_run_alone(script, one) for one in uses)


def _holds_models(script: Script, call: ast.Call) -> bool:
    """Whether all ranks write the text of their models, which is the same, and one of them alone, or none, writes more:
    ``log.write(str(model))``."""
    uses = _uses_of_file(script, call) or []
    shared = [one for one in uses if not _only_closes(script, one) and not may_run_alone(script, one)]
    return bool(shared) and all(_writes_models(script, one) for one in shared)


def _writes_models(script: Script, file: ast.expr) -> bool:
    method = script.parent(file)
    call = script.parent(method) if isinstance(method, ast.Attribute) and method.attr == "write" else None
    if not isinstance(call, ast.Call) or len(call.args) != 1 or script.nearest(call, ast.For, ast.While) is not None:
        return False
    models = {ast.unparse(one.func).removesuffix(".parameters") for one in script.method_calls("parameters")}
    waiting = [call.args[0]]
    while waiting:
        part = waiting.pop()
        if isinstance(part, ast.BinOp):
            waiting += [part.left, part.right]
        elif isinstance(part, ast.JoinedStr):
            waiting += [one.value if isinstance(one, ast.FormattedValue) else one for one in part.values]
        elif isinstance(part, ast.Call) and ast.unparse(part.func) in ("str", "repr"):
            waiting += part.args
        elif not isinstance(part, ast.Constant) and ast.unparse(part) not in models:
            return False
    return True


def _uses_of_file(script: Script, call: ast.Call) -> list[ast.expr] | None:
    """The uses of the variable of an open file; ``None`` if it has none."""
    file = file_of(script, call)
    if isinstance(file, ast.Name):
        scope = script.scope_of(file, file.id)
        block = _block_of(script, call)  # another file may have the name outside of it
        names = script.inside(block, ast.Name) if block is not None else script.all(ast.Name)
        return [
            one
            for one in names
            if one.id == file.id and isinstance(one.ctx, ast.Load) and script.scope_of(one, one.id) is scope
        ]
    if isinstance(file, ast.Attribute) and isinstance(file.value, ast.Name) and file.value.id == "self":
        return [one for one in script.all(ast.Attribute) if isinstance(one.ctx, ast.Load) and one.attr == file.attr]
    return None


def _block_of(script: Script, call: ast.Call) -> ast.With | None:
    """The block of ``with open(path, "w")``."""
    block = script.parent(script.parent(call) or call)
    return block if isinstance(block, ast.With) else None


def _only_closes(script: Script, file: ast.expr) -> bool:
    method = script.parent(file)
    return isinstance(method, ast.Attribute) and method.attr in ("close", "flush", "closed", "name")


def _writes_constant(script: Script, file: ast.Name) -> bool:
    call = script.parent(script.parent(file) or file)
    is_write = isinstance(call, ast.Call) and last_name(call.func) == "write" and len(call.args) == 1
    return is_write and isinstance(call, ast.Call) and isinstance(call.args[0], ast.Constant)


def _is_own(script: Script, where: ast.expr, function: FunctionNode | None) -> bool:
    """Whether the path may differ between ranks, by its words or those of the callers' arguments."""
    words = words_behind(script, where)
    if any(_is_of_tracker(script, one) for one in computed_from(script, where)):
        return True
    if any(_OWN.search(word) for word in words) or not _can_be_told(script, where, function):
        return True
    if _is_of_sample(script, where):
        return True
    handed = (given for name in words for given in _handed_in(script, name, function))
    return any(_OWN.search(word) for given in handed for word in words_behind(script, given))


def _is_of_tracker(script: Script, node: ast.AST) -> bool:
    """A run of a tracker, whose folder is its own; ``accelerator.get_tracker()`` gives one on the main process only."""
    if isinstance(node, ast.Call):
        return last_name(node.func) == "get_tracker"
    return isinstance(node, ast.Attribute) and script.name(node) in ("wandb.run", "wandb.run.dir", "wandb.init().dir")


def _is_of_sample(script: Script, where: ast.expr, depth: int = 2) -> bool:
    """Whether the name is made of what a loader gives, also through callers: each rank has its own samples."""
    for node in computed_from(script, where):
        if isinstance(node, ast.Call) and last_name(node.func) == "get" and not node.args and not node.keywords:
            return True  # of a queue, which gives each thing to one process
        scope = script.scope_of(node, node.id) if isinstance(node, ast.Name) else None
        bound = scope.names[node.id] if scope is not None and isinstance(node, ast.Name) else ()
        if any(isinstance(one, ast.For) and _LOADER.search(last_name(unwrapped(one.iter))) for one in bound):
            return True
        if isinstance(node, ast.Name) and _is_batch_of_step(script, node):
            return True
        given = (
            (*handed_in(script, node), *_handed_by_pool(script, node)) if depth and isinstance(node, ast.Name) else ()
        )
        if any(_is_of_sample(script, one, depth - 1) for one in given):
            return True
    return False


_STEPS = frozenset({"training_step", "validation_step", "test_step", "predict_step"})


def _is_batch_of_step(script: Script, name: ast.Name) -> bool:
    """Whether a name is the batch that a Trainer gives a step of a LightningModule, from its part of the data."""
    function = script.function_of(name)
    if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)) or function.name not in _STEPS:
        return False
    return [one.arg for one in function.args.args][1:2] == [name.id]


_OF_POOL = frozenset({"map", "imap", "imap_unordered", "starmap", "submit", "apply_async"})


def _handed_by_pool(script: Script, name: ast.Name) -> Iterator[ast.expr]:
    """What threads or processes of a pool give a parameter, or the values of which it gets one: ``executor.map(save,
    images, names)``, and joblib's ``delayed(save)(image, name)``."""
    function = script.function_of(name)
    if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return
    parameters = [one.arg for one in (*function.args.posonlyargs, *function.args.args)]
    place = parameters.index(name.id) + 1 if name.id in parameters else 0
    for call in script.all(ast.Call):
        is_of_pool = last_name(call.func) in _OF_POOL and bool(call.args) and last_name(call.args[0]) == function.name
        if is_of_pool and 0 < place < len(call.args):
            yield call.args[place]
        if _is_delayed(call, function.name) and 0 < place <= len(call.args):
            yield call.args[place - 1]


def _is_delayed(call: ast.Call, name: str) -> bool:
    made = call.func
    return isinstance(made, ast.Call) and last_name(made.func) == "delayed" and [*map(last_name, made.args)] == [name]


def _can_be_told(script: Script, where: ast.expr, function: FunctionNode | None) -> bool:
    """Whether it is a known path: literal, joined, or a setting; of a parameter, whether callers pass one."""
    if isinstance(where, ast.Attribute):
        return True
    values = script.values_of(where)
    if isinstance(where, ast.Name) and not values:
        values = tuple(made for given in _handed_in(script, where.id, function) for made in script.values_of(given))
    return bool(values) and all(isinstance(one, (ast.Constant, ast.JoinedStr, ast.BinOp, ast.Call)) for one in values)


def _handed_in(script: Script, name: str, function: FunctionNode | None) -> Iterator[ast.expr]:
    names = [one.arg for one in function.args.args] if function is not None else []
    if function is None or name not in names:
        return
    place = names.index(name) - (names[0] in ("self", "cls"))
    for call in calls_of(script, function):
        given = script.argument(call, name, place) if place >= 0 else None
        if given is not None:
            yield given


def _script(body: str, before: str = "pass") -> str:
    return f"""\
import json
import os
import numpy as np
import torch
import torch.distributed.checkpoint

OUT = "runs/a"
{before}
dist.init_process_group("nccl")
rank = dist.get_rank()
model, loader = build()
model = DDP(model)
best = 9.0
for epoch in range(10):
    for x in loader:
        loss = model(x).sum()
        loss.backward()
    predictions = model(x).cpu().numpy()
    {body}
"""


_FILLED_ON_FIRST = """with open("questions.txt") as out:
        question = out.readline()
    with open(OUT + "/answers.txt", "w") as out:
        answer = model(question)
        if rank == 0:
            out.write(question)
            out.write(str(predictions))"""
_SAVES = """
def keep(latent, folder, name):
    path = os.path.join(folder, name + ".npy")
    np.save(path, latent)
"""
_IN_POOL = """for latents, names in loader:
        pool.map(keep, latents, itertools.repeat(OUT), {given})"""
_PREDICTED = """\
import os
import torch
from joblib import Parallel, delayed
from lightning import LightningModule, Trainer

def keep(features, name):
    torch.save(features, os.path.join("features", name))

class Encoder(LightningModule):
    def predict_step(self, batch, index):
        features = self.encode(batch["image"])
        names = %s
        Parallel(n_jobs=2)(delayed(keep)(features[at], names[at]) for at in range(2))

Trainer(devices=4, strategy="ddp").predict(Encoder(), loader)
"""
_LOG = 'log = open(OUT + "/log.txt", "w")'
_LOG_OF_MODELS: str = f"{_LOG}\nSGD(model.parameters(), lr=0.1)\nlog.write(str(model) + '\\n')\nlog.write(f'{{model}}')"
_BRANCH = """\
import torch

def save(model, last=False):
    if not last:
        torch.save(model.state_dict(), "epoch.pt")  # !
    elif model.is_best:
        print("kept")

def main():
    dist.init_process_group("nccl")
    model = DDP(build())
    for epoch in range(10):
        train(model)
        if dist.get_rank() == 0:
            save(model)
    save(model, last=1 > epoch)

main()
"""
_TWO_SPLITS = """\
import torchvision

dist.init_process_group("nccl")
seen = torchvision.datasets.MNIST("d", train=True, download=True)  # !
unseen = torchvision.datasets.MNIST("d", train=False, download=True)
model = DDP(build())
"""
_ON_RAY = """\
import json
import torch
from ray.train.torch import TorchTrainer

def make_loop():
    def loop(config):
        torch.distributed.init_process_group("nccl")
        model = DDP(build())
        train(model)

    return loop

def main():
    loop = make_loop()
    trainer = TorchTrainer(loop, scaling_config=scaling)
    result = trainer.fit()
    with open("summary.json", "w") as file:
        json.dump(result.metrics, file)

main()
"""
_ON_SPARK = """\
import torch
from pyspark.ml.torch.distributor import TorchDistributor

def train(rate):
    dist.init_process_group("nccl")
    model = DDP(build())
    fit(model, torch.optim.SGD(model.parameters(), rate))
    return model.module

best = TorchDistributor(num_processes=4).run(train, 0.1)
torch.save(best, "best.pt")
"""
_ACTORS = """\
import json
import ray

@ray.remote(num_gpus=1)
class Worker:
    def join(self, rank):
        torch.distributed.init_process_group("nccl", rank=rank, world_size=4)
        self.model = DDP(build())

    def train(self):
        return self.optimizer.step(self.model)

workers = [Worker.remote() for _ in range(4)]
ray.get([worker.join.remote(rank) for rank, worker in enumerate(workers)])
with open("losses.json", "w") as file:
    json.dump(ray.get([worker.train.remote() for worker in workers]), file)
"""
_BESIDE = """\
import torch
import torch.multiprocessing as mp

def watch(folder):
    print(folder)

mp.get_context("spawn").Process(target=watch, args=("runs",)).start()
dist.init_process_group("nccl")
model = DDP(build())
train(model)
torch.save(model.state_dict(), "last.pt")  # !
"""
_SPAWNED_BY_TRAINER = """\
import torch
import lightning.pytorch as pl

trainer = pl.Trainer(devices=4, strategy="ddp_spawn")
trainer.fit(model)
torch.save(model.state_dict(), "last.pt")
"""
_AVERAGED = """\
import torch
import lightning.pytorch as pl

def train():
    pl.Trainer(devices=4, strategy="ddp").fit(build())

def average(paths):
    torch.save(sum(map(torch.load, paths)) / len(paths), "mean.pt")

def main(args):
    if args.mode == "average":
        average(args.paths)
        return
    train()

main(parse())
"""
_AVERAGED_BEFORE: str = _AVERAGED.replace("        return\n", "").replace('"mean.pt")', '"mean.pt")  # !')
_OF_TRACKER = """\
import os
from accelerate import Accelerator

accelerator = Accelerator(log_with="wandb")
model = accelerator.prepare(build())
accelerator.backward(model(x))
run = accelerator.get_tracker("wandb", unwrap=True)
with open(os.path.join(run.dir, "address.txt"), "w") as file:
    file.write(run.url)
"""
_WANDB = "import wandb"
_SAMPLES = """\
import numpy as np

def save(results, paths, folder):
    for result, path in zip(results, paths):
        name = path.split(".")[0] + ".npy"
        np.save(os.path.join(folder, name), result)

def main(vae, data, folder):
    accelerator = Accelerator()
    dataloader = accelerator.prepare(DataLoader(data))
    for images, paths in dataloader:
        save(vae(images), paths, "out")

main(None, None, "out")
"""
_SETTINGS = """\
import yaml

def main(args, settings):
    dist.init_process_group("nccl")
    model = DDP(build(settings))

args = parser.parse_args()
settings = yaml.safe_load(open(args.settings))
yaml.dump(settings, open(os.path.join("out", "settings.yaml"), "w"))  # !
main(args, settings)
"""
_SETTINGS_OF_RANK: str = _SETTINGS.replace("yaml.dump", "settings.update(vars(args))\nyaml.dump")
_SETTINGS_COMPUTED: str = _SETTINGS_OF_RANK.replace(
    "settings.update(vars(args))", 'settings["model"]["scale"] = float(np.mean(seen))'
)
_MARKER = "with open(OUT + '/COMPLETED', 'w') as file:\n        file.write('done')"
_MARKER_OF_EPOCH: str = _MARKER.replace(":\n", ":  # !\n").replace("'done'", "str(epoch)")
_REFUSES = """\
def main():
    dist.init_process_group("nccl")
    model = DDP(build())
    for step in range(100):
        train(model)
        snapshot(model, "screening.pt")

def snapshot(model, path):
    if not path:
        return
    if dist.get_world_size() != 1:
        raise RuntimeError("snapshots are for jobs of one process")
    torch.save({"model": model.state_dict()}, path)

import torch
main()
"""
_MODES = """\
import numpy as np

def run_single(args):
    save(args, forward(args))

def run_ranks(args):
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    found = forward(args)
    if rank == 0:
        save(args, found)

def save(args, summary):
    np.savez(f"{args.mode}.npz", summary)

def main(args):
    if args.mode == "single":
        run_single(args)
    else:
        run_ranks(args)

main(parse_args())
"""
_OF_ONE = """\
import argparse
import torch

args = argparse.Namespace(world_size=1, rank=0)
torch.distributed.init_process_group("nccl", world_size=args.world_size, rank=args.rank)
torch.save(optimizer.state_dict(), "last.pt")
"""
_ON_MAIN: str = _script(
    "run_on_main(save, model)", "@{decorator}\ndef save(model):\n    torch.save(model.state_dict(), 'last.pt')"
)
_SPAWNED = """\
import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

def main(rank, world_size):
    torch.distributed.init_process_group("nccl", rank=rank, world_size=world_size)
    model = DistributedDataParallel(build())
    train(model)
    torch.save(model.state_dict(), "model.pt")  # !

if __name__ == "__main__":
    mp.spawn(main, nprocs=4, args=(4,))
"""
_SPAWNED_OR_ALONE: str = _SPAWNED.replace(
    "    mp.spawn(main, nprocs=4, args=(4,))",
    "    if args.multiprocessing_distributed:\n        mp.spawn(main, nprocs=4, args=(4,))\n"
    "    else:\n        main(0, 1)",
)
_DOWNLOADED_IN_SETUP = """\
import lightning as L
from torchvision.datasets import CIFAR10

class Data(L.LightningDataModule):
    def setup(self, stage=None):
        self.train = CIFAR10("data", download=True)  # !

L.Trainer(devices=4, accelerator="gpu").fit(model, Data())
"""
_DOWNLOADED_BEFORE_FIT = """\
import lightning as L
from torchvision.datasets import CIFAR10

digits = CIFAR10("data", download=True)
trainer = L.Trainer(devices=4, accelerator="gpu")
trainer.fit(model, DataLoader(digits))
"""
_MAPPED = """\
# torchrun --nproc-per-node 8 train.py
from datasets import load_dataset
from transformers import Trainer

raw = load_dataset("text")
data = raw["train"].map(tokenize, num_proc=16)  # !
Trainer(train_dataset=data).train()
"""
_MAPPED_FIRST = """\
from datasets import load_dataset

accelerator = Accelerator()
raw = load_dataset("text")
with accelerator.main_process_first():
    data = raw.map(tokenize, num_proc=16)
short = raw.map(tokenize)
"""
_HANDED = """\
import json

def train(model, output_file):
    with open(output_file, "w") as file:  # !
        json.dump(model.history, file)

def main(name):
    dist.init_process_group("nccl")
    summary = f"output/{name}/train.json"
    train(build(), summary)

main("bert")
"""
_ACCELERATE = """\
accelerator = Accelerator()
model, loader = accelerator.prepare(model, loader)
accelerator.wait_for_everyone()
accelerator.save(accelerator.unwrap_model(model).state_dict(), "last.pt")
if accelerator.is_main_process:
    with open("done.txt", "w") as file:
        file.write("done")
"""
_BY_DEVICE = """\
class Trainer:
    def __init__(self, model, gpu_id):
        self.gpu_id = gpu_id
        self.model = DDP(model, device_ids=[gpu_id])

    def save(self, epoch):
        torch.save(self.model.module.state_dict(), "checkpoint.pt")

    def train(self):
        for epoch in range(9):
            if self.gpu_id == 0 and epoch % 3 == 0:
                self.save(epoch)

trainer = Trainer(build(), 0)
trainer.train()
"""
_EVOLVED = """\
if int(os.environ["RANK"]) != -1:
    assert not opt.evolve, "one process"
    torch.distributed.init_process_group("nccl")
if not opt.evolve:
    train()
else:
    with open("population.yaml", "w") as file:
        file.write(str(opt))
"""
_LEFT = """\
torch.distributed.init_process_group("nccl")
for image in images:
    path = os.path.join("out", os.path.basename(image))
    if os.path.exists(path):
        continue
    torch.save(annotate(image), path)
"""
_CACHED = """\
import pickle

class Texts:
    def __init__(self, path):
        if os.path.exists(path):
            self.texts = pickle.load(open(path, "rb"))
        else:
            self.texts = read()
            with open("cached.bin", "wb") as file:
                pickle.dump(self.texts, file)

def main(args):
    torch.distributed.init_process_group("nccl")
    if args.local_rank not in (-1, 0):
        torch.distributed.barrier()
    data = Texts(args.path)
    if args.local_rank == 0:
        torch.distributed.barrier()

main(parse())
"""
_CACHED_BY_DEVICE: str = (
    _CACHED.replace("main(args)", "main(gpu, args)")
    .replace("args.local_rank not in (-1, 0)", "gpu != 0")
    .replace("args.local_rank == 0", "gpu == 0")
    .replace("main(parse())", "torch.multiprocessing.spawn(main, args=(parse(),), nprocs=4)")
)
