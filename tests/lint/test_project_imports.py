"""Imports that are followed inside the paths given: what they show, and that hostile projects do no harm."""

import time

import pytest

from doctor.core.settings import Settings
from doctor.lint.engine.registry import Rulebook, builtin_rules
from doctor.lint.engine.releases import Releases
from doctor.lint.engine.runner import LintRequest, build_report, lint_paths

RULES = tuple(one for one in builtin_rules() if one.id in ("CODE003", "CODE005", "CODE017"))
BOOK = Rulebook(RULES)
REDUCES = (
    "import torch.distributed as dist\ndef mean(x):\n    dist.all_reduce(x)\n    return x / dist.get_world_size()\n"
)
CALLS = "import torch.distributed as dist\n{imported}\ndef main(x):\n    if dist.get_rank() == 0:\n        {call}\n"


def findings(folder, files, only=None):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    asked = LintRequest(BOOK, Settings(), {one.id: one.family for one in BOOK.rules}, Releases({}))
    paths = [folder] if only is None else [folder / only]
    report = build_report(lint_paths(paths, asked), asked, started=time.time())
    assert not [result for result in report.results if result.crash or result.status.value == "error"]
    return [
        (result.id, one.source.file.removeprefix(f"{folder}/"), one.source.line, one)
        for result in report.results
        for one in result.findings
    ]


def places(folder, files, only=None):
    return [(rule, file, line) for rule, file, line, _ in findings(folder, files, only)]


@pytest.mark.parametrize(
    ("files", "imported", "call"),
    [
        ({"metrics.py": REDUCES}, "from metrics import mean", "mean(x)"),
        ({"metrics.py": REDUCES}, "import metrics", "metrics.mean(x)"),
        ({"tools/__init__.py": "", "tools/metrics.py": REDUCES}, "from tools.metrics import mean as m", "m(x)"),
        ({"tools/__init__.py": "", "tools/metrics.py": REDUCES}, "from tools import metrics", "metrics.mean(x)"),
        (
            {"tools/__init__.py": "from .metrics import mean", "tools/metrics.py": REDUCES},
            "import tools",
            "tools.mean(x)",
        ),
        ({"src/tools/metrics.py": REDUCES}, "from tools.metrics import mean", "mean(x)"),
        (
            {"a.py": "from b import mean\ndef score(x):\n    return mean(x)\n", "b.py": REDUCES},
            "from a import score",
            "print(score(x))",
        ),
        (
            {"a.py": "from b import Meter\ndef score(x):\n    meter = Meter()\n    return meter.value(x)\n"}
            | {"b.py": REDUCES + "class Meter:\n    def value(self, x):\n        return mean(x)\n"},
            "from a import score",
            "print(score(x))",
        ),
    ],
)
def test_a_collective_in_another_module_is_found(tmp_path, files, imported, call):
    assert places(tmp_path, files | {"train.py": CALLS.format(imported=imported, call=call)}) == [
        ("CODE005", "train.py", 5)
    ]


@pytest.mark.parametrize(
    "helper",
    [
        "def mean(x):\n    return x.mean()\n",
        REDUCES.replace("    dist.all_reduce(x)\n", "    if x > 3:\n        dist.all_reduce(x)\n"),
        REDUCES.replace(
            "    dist.all_reduce(x)\n", "    if dist.get_rank() == 0:\n        return x\n    dist.all_reduce(x)\n"
        ),
        REDUCES.replace("all_reduce(x)", "all_reduce(x, group=GROUP)"),
        "this is no Python",
        "from train import main as mean\n",
    ],
)
def test_other_helpers_are_no_collectives(tmp_path, helper):
    train = CALLS.format(imported="from metrics import mean", call="mean(x)")
    found = places(tmp_path, {"metrics.py": helper, "train.py": train})
    assert [one for one in found if one[1] == "train.py"] == []


def test_a_name_of_a_collective_is_read_if_it_is_of_the_project(tmp_path):
    train = CALLS.format(imported="from misc import barrier", call="barrier()")
    assert places(tmp_path / "a", {"train.py": train}) == [("CODE005", "train.py", 5)]
    assert places(tmp_path / "b", {"train.py": train, "misc.py": "def barrier():\n    print('here')\n"}) == []


def test_nothing_outside_of_the_paths_is_read(tmp_path):
    train = CALLS.format(imported="from metrics import mean", call="mean(x)")
    files = {"metrics.py": REDUCES, "run/train.py": train}
    assert places(tmp_path, files, only="run") == []
    assert places(tmp_path, {"run/metrics.py": REDUCES}, only="run/train.py") == []


def test_a_rank_test_of_another_module(tmp_path):
    files = {
        "ranks.py": "import torch.distributed as dist\ndef writes():\n    return dist.get_rank() == 0\n",
        "train.py": "import torch.distributed as dist\nfrom ranks import writes\nif writes():\n    dist.barrier()\n",
    }
    assert places(tmp_path, files) == [("CODE005", "train.py", 4)]


def test_a_wrapped_model_that_another_module_runs(tmp_path):
    train = (
        "from torch.nn.parallel import DistributedDataParallel as DDP\nfrom evaluation import evaluate\n"
        "import torchvision\nmodel = DDP(torchvision.models.resnet18())\nif rank == 0:\n    evaluate({model}, loader)\n"
    )
    files = {"evaluation.py": "def evaluate(net, loader):\n    for x in loader:\n        net(x)\n"}
    assert places(tmp_path, files | {"train.py": train.format(model="model")}) == [("CODE005", "train.py", 6)]
    assert places(tmp_path, files | {"train.py": train.format(model="model.module")}) == []


def test_a_helper_that_starts_nccl_without_a_device(tmp_path):
    start = "import torch\nimport torch.distributed as dist\ndef start():\n    dist.init_process_group('nccl')\n"
    train = "from start import start\nstart()\nmodel = build().cuda()\n"
    assert places(tmp_path, {"start.py": start, "train.py": train}) == [("CODE003", "train.py", 3)]
    bound = f"{start}    torch.cuda.set_device(dist.get_rank() % 8)\n"
    assert places(tmp_path, {"start.py": bound, "train.py": train}) == []


def test_the_flow_names_all_steps(tmp_path):
    files = {
        "a.py": "from b import mean\ndef score(x):\n    return mean(x)\n",
        "b.py": REDUCES,
        "train.py": CALLS.format(imported="from a import score", call="print(score(x))"),
    }
    ((_, _, _, finding),) = findings(tmp_path, files)
    steps = [(one["file"].removeprefix(f"{tmp_path}/"), one["line"], one["code"]) for one in finding.evidence["flow"]]
    assert steps == [
        ("train.py", 4, "if dist.get_rank() == 0:"),
        ("train.py", 5, "score(x)"),
        ("a.py", 3, "mean(x)"),
        ("b.py", 3, "dist.all_reduce(x)"),
    ]
    assert finding.evidence["flow"][-1]["note"] == "all_reduce: waits for all ranks"


def test_hostile_projects_end_soon(tmp_path):
    chain = {f"m{n}.py": f"from m{n + 1} import f as g\ndef f(x):\n    return g(x)\n" for n in range(30)}
    star = "\n".join(f"def f{n}(x):\n    return f{n - 1}(x)\n" for n in range(1, 400))
    files = {
        **chain,
        "m30.py": "from m0 import f as g\ndef f(x):\n    return g(x)\n",
        "deep.py": star,
        "loop.py": "from loop import f\nfrom other import f as g\nx = g(f)\n",
        "other.py": "from loop import g as f\n",
        "long.py": "x = 1\n" * 60_000,
        "train.py": CALLS.format(
            imported="from m0 import f\nfrom deep import f399\nfrom loop import f as h, g\nimport long",
            call="f(f399(h(g(long.x(x)))))",
        ),
    }
    began = time.perf_counter()
    assert places(tmp_path, files) == []
    assert time.perf_counter() - began < 20


CONVERTER = """\
import torch
from {imported}

torch.distributed.init_process_group("nccl", world_size=args.world_size, rank=args.rank)
model = build(args).cuda()
"""


@pytest.mark.parametrize(
    ("made", "several"),
    [
        ("Namespace(layers=2, world_size=1, rank=0)", False),
        ("Namespace(layers=2, world_size=8, rank=0)", True),
        ("Namespace(layers=2)", True),
        ("ArgumentParser().parse_args()", True),
    ],
)
def test_a_group_whose_size_another_module_knows(tmp_path, made, several):
    files = {
        "settings/small.py": f"from argparse import ArgumentParser, Namespace\n\nargs = {made}\n",
        "convert.py": CONVERTER.format(imported="settings.small import args"),
    }
    assert places(tmp_path, files) == ([("CODE003", "convert.py", 4)] if several else [])


def test_a_group_of_one_rank_by_a_name_that_is_not_known(tmp_path):
    files = {"convert.py": CONVERTER.format(imported="elsewhere import args")}
    assert places(tmp_path, files) == [("CODE003", "convert.py", 4)]


TESTED = """\
import torch
import torch.distributed as dist

def check(x):
    if dist.get_rank() == 0:
        dist.all_reduce(x)

{}
"""
STARTS = 'dist.init_process_group("nccl")\nx = torch.ones(1).cuda()\n'


@pytest.mark.parametrize(
    ("name", "rules"),
    [
        ("tests/helpers.py", []),
        ("package/test_utils/scripts/launch.py", []),
        ("unittests/test_it.py", []),
        ("test/infer.py", []),
        ("test_infer.py", ["CODE003", "CODE005"]),
        ("contests/train.py", ["CODE003", "CODE005"]),
        ("train.py", ["CODE003", "CODE005"]),
    ],
)
def test_in_unit_tests_nothing_is_reported(tmp_path, name, rules):
    assert sorted(rule for rule, *_ in findings(tmp_path, {name: TESTED.format(STARTS)})) == rules


def test_a_unit_test_that_is_named_is_read_like_any_file(tmp_path):
    name = "tests/helpers.py"
    assert len(findings(tmp_path, {name: TESTED.format(STARTS)}, only=name)) == 2


FIRST = "import torch.distributed as dist\ndef is_main_process():\n    return dist.get_rank() == 0\n"
ASKS = "import torch.distributed as dist\n{before}\ndef main(x):\n    if {test}:\n        dist.all_reduce(x)\n"
OF_OBJECT = (
    "class Job:\n    {decorator}\n    def is_main_process(self):\n        return dist.get_rank() == 0\njob = Job()"
)


@pytest.mark.parametrize(
    ("before", "test", "is_found"),
    [
        ("from tools import is_main_process", "is_main_process", False),
        ("from tools import is_main_process", "is_main_process()", True),
        ("import tools", "tools.is_main_process", False),
        ("import tools", "x and not tools.is_main_process()", True),
        ("from elsewhere import is_main_process", "is_main_process", True),
        ("from tools import is_main_process\nis_master = is_main_process()", "is_master", True),
        ("def is_main_process():\n    return dist.get_rank() == 0", "is_main_process", False),
        ("def is_main_process():\n    return dist.get_rank() == 0", "is_main_process()", True),
        (OF_OBJECT.format(decorator="# asked"), "job.is_main_process", False),
        (OF_OBJECT.format(decorator="@property"), "job.is_main_process", True),
        ("from tools import Job\njob = Job()", "job.is_main_process", True),
    ],
)
def test_a_function_that_nothing_calls_is_no_condition_on_the_rank(tmp_path, before, test, is_found):
    tools = FIRST + OF_OBJECT.format(decorator="@property")
    found = places(tmp_path, {"tools.py": tools, "train.py": ASKS.format(before=before, test=test)})
    assert bool(found) is is_found


COLLATES = (
    "import torch\n{imported}\n\ndef collate(batch):\n    batch = list(filter(lambda one: one is not None, batch))\n"
    "    return torch.utils.data.default_collate(batch)\n\ntorch.distributed.init_process_group('nccl')\n"
    "loader = torch.utils.data.DataLoader(Images(), 8, collate_fn=collate)\n"
)
IMAGES = (
    "class Images:\n    def __getitem__(self, index):\n        image = read(index)\n{before}"
    "        return image, index\n"
)


@pytest.mark.parametrize("imported", ["from tools.images import *", "from tools.images import (\n    Images,\n)"])
@pytest.mark.parametrize(
    ("before", "is_found"), [("", False), ("        if not image:\n            return None\n", True)]
)
def test_a_filter_of_none_drops_nothing_where_no_dataset_returns_it(tmp_path, imported, before, is_found):
    files = {"train.py": COLLATES.format(imported=imported), "tools/images.py": IMAGES.format(before=before)}
    assert bool(places(tmp_path, files)) is is_found
