"""Places that no run reaches, since it fails before, or that only a start with one process has."""

from __future__ import annotations

import json

import pytest

from tests.lint.test_one_process import HANG, HEAD, JOINS, found, indented

SETS_UP = "setup.py"
TRAINS = "def train(net, steps):\n" + indented(HANG)
RUNS = "class Runs:\n    def __init__(self, net, steps=1):\n" + indented(HANG, 8)
IN_LOOP = "def main(batches):\n    for batch in batches:\n        {use}\n" + indented(HANG, 8) + "{more}\nmain([])\n"
METHODS = (
    "def load(path):\n    return path\n\nclass Runs:\n    def train(self, batches):\n        {first}\n"
    "        for batch in batches:\n            self.advance(1)\n\n    def advance(self, number):\n"
    + indented(HANG, 8)
    + "\nRuns().train([])\n"
)
OBJECTS = (
    "class Env:\n    def __init__(self, width):\n        self.width = width\n\n"
    "    def reset(self):\n        return 1\n\ndef main():\n    env = Env(1)\n    env.{use}\n"
    + indented(HANG)
    + "\nmain()\n"
)
INNER = (
    "def load(path):\n    return path\n\ndef work():\n    {first}\n\ndef main():\n    work()\n"
    + indented(HANG)
    + "\nmain()\n"
)
VAIN = {
    "a required argument is missing": f"{TRAINS}\ntrain(1)\n",
    "an unknown argument": f"{TRAINS}\ntrain(1, steps=2, rate=3)\n",
    "one argument too many": f"{TRAINS}\ntrain(1, 2, 3)\n",
    "of a class": f"{RUNS}\nRuns(steps=2)\n",
    "a class, from a function": f"{RUNS}\ndef main():\n    Runs()\n\nmain()\n",
    "the call above": "def load(path):\n    return path\n\ndef main():\n    load()\n" + indented(HANG) + "\nmain()\n",
    "each way to a place": "def load(path):\n    return path\n\n" + TRAINS + "\nload()\ntrain(1, 2)\n",
    "a function that is defined below its use": "for step in range(9):\n    save(step)\n\ndef save(step):\n"
    + indented(HANG),
    "a list that is made below the loop": IN_LOOP.format(use="seen.append(batch)", more="    seen = []\n"),
    "a list that a branch of the loop makes below": IN_LOOP.format(
        use="seen.append(batch)", more="        if batch:\n            seen = []\n"
    ),
    "a sampler for a loader that shuffles": "from torch.utils.data import DataLoader, RandomSampler\n"
    "sampler = RandomSampler(data)\nloader = DataLoader(data, 8, True, sampler)\n" + HANG,
    "a list that the loop makes below": IN_LOOP.format(use="seen.append(batch)", more="        seen = []\n"),
    "a list that the loop replaces": IN_LOOP.format(use="seen = seen + [batch]", more=""),
    "the function that is called above reads what nothing defines": INNER.format(first="print(nothing)"),
    "the function that is called above calls one that fails": INNER.format(first="load()"),
    "its constructor": INNER.format(first="load()").replace("def work():", "class work:\n  def __init__(self):"),
    "a method that the class does not have": OBJECTS.format(use="set_batch(1)"),
    "a method, from a loop of another": METHODS.format(first="load()"),
    "a method, with too many arguments": METHODS.format(first="pass").replace("self.advance(1)", "self.advance(1, 2)"),
    "in a condition": IN_LOOP.format(use="if len(seen): print(batch)", more="    seen = []\n"),
}
REACHED = {
    "with all arguments": f"{TRAINS}\ntrain(1, steps=2)\n",
    "with unknown arguments": f"{TRAINS}\ntrain(*given)\n",
    "one of two calls": f"{TRAINS}\ntrain(1, 2)\ntrain(1)\n",
    "a class with a default": f"{RUNS}\nRuns(1)\n",
    "any arguments": TRAINS.replace("steps", "*steps, **more") + "\ntrain(1, 2, rate=3)\n",
    "arguments of a dictionary": "def load(path, rate):\n    return path\n\ndef main():\n"
    "    given = dict(path=1, rate=2)\n    load(**given)\n" + indented(HANG) + "\nmain()\n",
    "a function that is decorated": "@given(1)\n" + TRAINS + "\ntrain()\n",
    "a loader that shuffles or has a sampler": "from torch.utils.data import DataLoader, RandomSampler\n"
    "sampler = RandomSampler(data) if data else None\nloader = DataLoader(data, 8, sampler is None, sampler)\n" + HANG,
    "a call that may not be made": "def load(path):\n    return path\n\ndef main(x):\n    if x:\n        load()\n"
    + indented(HANG)
    + "\nmain(1)\n",
    "an error that is caught": "def load(path):\n    return path\n\ndef main():\n    try:\n        load()\n"
    "    except TypeError:\n        pass\n" + indented(HANG) + "\nmain()\n",
    "a function below its use in another": "def main():\n    save(1)\n\ndef save(step):\n"
    + indented(HANG)
    + "\nmain()\n",
    "a list that a branch of the loop makes above": IN_LOOP.format(
        use="if batch:\n            seen = []\n        seen.append(batch)", more=""
    ),
    "a list that the loop makes for its next rounds": IN_LOOP.format(
        use="if batch:\n            seen.append(batch)", more="        seen = []\n"
    ),
    "a list that an inner loop reads in later rounds": IN_LOOP.format(
        use="for one in batch:\n            seen.append(one)", more="        seen = []\n"
    ),
    "a list that the loop makes in one line": IN_LOOP.format(use="seen = [batch]; seen = seen + [1]", more=""),
    "the function that is called above may return before": INNER.format(
        first="if load:\n        return\n    print(nothing)"
    ),
    "the function that is called above may not read it": INNER.format(first="if load:\n        print(nothing)"),
    "the function that is called above catches it": INNER.format(
        first="try:\n        load()\n    except TypeError:\n        pass"
    ),
    "a generator that is called above": INNER.format(first="load()\n    yield 1"),
    "a function that calls itself": INNER.format(first="work()"),
    "a method that the class has": OBJECTS.format(use="reset()"),
    "a method that a base may have": OBJECTS.format(use="set_batch(1)").replace("class Env", "class Env(Base)"),
    "a method that something sets": OBJECTS.format(use="set_batch(1)") + "Env.set_batch = print\n",
    "a method of any name": OBJECTS.format(use="set_batch(1)").replace("def reset(self", "def __getattr__(self, name"),
    "a method that is called well": METHODS.format(first="load(1)"),
    "a method that a base may call": METHODS.format(first="load()").replace("class Runs", "class Runs(Base)"),
    "a method that is also called elsewhere": METHODS.format(first="load()") + "\nRuns().advance(2)\n",
    "a list of the module": "seen = []\n" + IN_LOOP.format(use="seen.append(batch)", more="    print(seen)\n"),
    "a name that a star gives": "from tools import *\n\nsave(1)\n\ndef save(step):\n" + indented(HANG) + "\nsave(2)\n",
    "a global name": "def fill():\n    global save\n    save = print\n\nfill()\nsave(1)\n\ndef save(step):\n"
    + indented(HANG)
    + "\nsave(2)\n",
}


@pytest.mark.parametrize("name", VAIN)
def test_what_follows_a_failure_is_an_info(tmp_path, name):
    assert found(tmp_path, {"train.py": HEAD + JOINS + VAIN[name], "other.py": ""}) == [("CODE005", "info")]


@pytest.mark.parametrize("name", REACHED)
def test_what_may_run_is_an_error(tmp_path, name):
    assert ("CODE005", "error") in found(tmp_path, {"train.py": HEAD + JOINS + REACHED[name], "other.py": ""})


def test_a_function_with_wrong_calls_may_be_imported(tmp_path):
    files = {"train.py": HEAD + JOINS + VAIN["a required argument is missing"], "use.py": "from train import train\n"}
    assert found(tmp_path, files) == [("CODE005", "error")]


NET = (
    "class Net(torch.nn.Module):\n    def __init__(self, width):\n        super().__init__()\n\n"
    "    def forward(self, x, mask=None):\n        return x\n\n"
)
OWN = "class Job:\n    def load(self, path):\n        return path\n\n    def fit(self):\n        self.load()\n"
WRAPPED = "    net = Net(1).cuda()\n    net = torch.nn.parallel.DistributedDataParallel(net)\n"
TOOLS = "def load(path):\n    return path\n"
RUNS_IT = "def run():\n    seen.append(1)\n" + indented(HANG) + "\nrun()\n"
USES_TOOLS = "tools.pad(1)\ntools.cut(2)\n" + HANG


@pytest.mark.parametrize(
    ("text", "files", "severity"),
    [
        (OWN + indented(HANG, 8) + "\nJob().fit()\n", {}, "info"),
        (OWN.replace("path)", "path='x')") + indented(HANG, 8) + "\nJob().fit()\n", {}, "error"),
        (OWN + indented(HANG, 8) + "\nclass Mine(Job):\n    def load(self): pass\n\nMine().fit()\n", {}, "error"),
        ("from tools import load as get\nget()\n" + HANG, {"tools.py": TOOLS}, "info"),
        ("from tools import load\nload(1)\n" + HANG, {"tools.py": TOOLS}, "error"),
        (
            "try:\n    from fast import load\nexcept ImportError:\n    from tools import load\nload()\n" + HANG,
            {"tools.py": TOOLS},
            "error",
        ),
        ("from lib.net import Net\nnet = Net()\n" + HANG, {"lib/net.py": "import torch\n" + NET}, "info"),
        (
            "from lib.net import Net\nnet = Net(1)\nnet(1, 2, 3)\n" + HANG,
            {"lib/net.py": "import torch\n" + NET},
            "info",
        ),
        (NET + "def main():\n" + WRAPPED + "    net(x, parts=1)\n" + indented(HANG) + "\nmain()\n", {}, "info"),
        (NET + "def main():\n" + WRAPPED + "    net(x, mask=1)\n" + indented(HANG) + "\nmain()\n", {}, "error"),
        (
            "import enum\nclass Kind(enum.Enum):\n    A = 1, 2\n    def __init__(self, one, two): pass\nKind((1, 2))\n"
            + HANG,
            {},
            "error",
        ),
        (
            "class Base(torch.nn.Module):\n    def __call__(self, *given, **named): pass\n"
            + NET.replace("torch.nn.Module", "Base")
            + "net = Net(1)\nnet(x, parts=1)\n"
            + HANG,
            {},
            "error",
        ),
        (NET + "net = Net(1) if y else build()\nnet(x, parts=1)\n" + HANG, {}, "error"),
        (NET + "net = Net(1)\nfor net in nets:\n    net(x, parts=1)\n" + HANG, {}, "error"),
    ],
)
def test_calls_are_compared_with_what_they_run(tmp_path, text, files, severity):
    (tmp_path / "lib").mkdir()
    written = {"train.py": HEAD + JOINS + text, "lib/__init__.py": "", **files}
    assert found(tmp_path, written) == [("CODE005", severity)]


@pytest.mark.parametrize(
    ("text", "files", "severity"),
    [
        ("from tools import *\n" + RUNS_IT, {"tools.py": "other = []\n"}, "info"),
        ("from tools import *\n" + RUNS_IT, {"tools.py": "seen = []\n"}, "error"),
        ("from tools import *\n" + RUNS_IT, {"tools.py": "from more import *\n", "more.py": "seen = []\n"}, "error"),
        ("from torch import *\n" + RUNS_IT, {}, "error"),
        ("import tools\n" + USES_TOOLS, {"lib/tools.py": "def pad(x): pass\ndef cut(x): pass\n"}, "info"),
        ("import tools\n" + USES_TOOLS, {"lib/tools.py": "def pad(x): pass\n"}, "error"),
        (
            "import sys\nsys.path.append('lib')\nimport tools\n" + USES_TOOLS,
            {"lib/tools.py": "def pad(x): pass\ndef cut(x): pass\n"},
            "error",
        ),
    ],
)
def test_names_and_modules_that_are_not_there(tmp_path, text, files, severity):
    (tmp_path / "lib").mkdir()
    (tmp_path / ".git").mkdir()
    assert ("CODE005", severity) in found(tmp_path, {"train.py": HEAD + JOINS + text, "other.py": "", **files})


BESIDE = {"pieces.py": "a = 1\n", "losses.py": "b = 1\n", "requirements.txt": "numpy\n", "run.py": "print()\n"}
IMPORTS = "from pieces import a\nfrom losses import b\nfrom data_generator import Set\n" + HANG


@pytest.mark.parametrize(
    ("files", "severity"),
    [
        ({}, "info"),
        ({"requirements.txt": "data-generator\n"}, "error"),
        ({"lib/data_generator.py": "Set = 1\n"}, "info"),  # not beside it
        ({".gitignore": "data_generator.py\n"}, "error"),
        ({"README.md": "Download data_generator.py first.\n"}, "error"),
        ({"run.sh": "torchrun --nproc_per_node=8 train.py\n"}, "error"),
        ({"losses.py": "import os\n"}, "info"),
    ],
)
def test_a_script_may_import_a_file_that_was_left_out(tmp_path, files, severity):
    (tmp_path / "lib").mkdir()
    (tmp_path / ".git").mkdir()
    hits = found(tmp_path, {"train.py": HEAD + JOINS + IMPORTS, **BESIDE, **files})
    assert ("CODE005", severity) in hits


@pytest.mark.parametrize(
    ("name", "files", "severity"),
    [
        ("own_evaluation", {}, "info"),
        ("own_judgement", {}, "error"),
        ("own_evaluation", {"requirements.txt": "own-evaluation\n"}, "error"),
        ("own_evaluation", {"run.sh": "torchrun --nproc_per_node=8 train.py\n"}, "error"),
        ("own_evaluation", {"losses.py": None}, "error"),
    ],
)
def test_a_variant_of_a_file_beside_was_left_out(tmp_path, name, files, severity):
    (tmp_path / ".git").mkdir()
    script = HEAD + JOINS + f"from evaluation import a\nfrom losses import b\nfrom {name} import c\n" + HANG
    given = {"train.py": script, **BESIDE, "evaluation.py": "a = 1\n", **files}
    assert ("CODE005", severity) in found(tmp_path, {one: text for one, text in given.items() if text is not None})


LIGHT = (
    "import pytorch_lightning as pl\nimport torch\n\nclass Net(pl.LightningModule):\n"
    "    def training_step(self, batch, i):\n        torch.save(self.state_dict(), 'step.pt')\n\n"
    "trainer = pl.Trainer(devices=4, gpus=4)\ntrainer.fit(Net())\ntorch.save(1, 'net.pt')\n"
)


@pytest.mark.parametrize(
    ("requirement", "severity"),
    [
        ("pytorch-lightning>=2.0", "info"),
        ("lightning~=2.1", "info"),
        ("pytorch-lightning", "warning"),
        ("pytorch-lightning>=1.4", "warning"),
    ],
)
def test_a_trainer_that_every_permitted_lightning_refuses_trains_nothing(tmp_path, requirement, severity):
    (tmp_path / ".git").mkdir()
    files = {"train.py": LIGHT, "other.py": "", "requirements.txt": f"{requirement}\n"}
    hits = found(tmp_path, files)
    assert ("CODE022", "error") in hits
    assert {one for rule, one in hits if rule == "CODE029"} == {severity}


OF_RANK = "import os\n\nif dist.get_rank() == 0:\n    folder = 'out'\n"
SAVES = "torch.save(net, os.path.join(folder, 'net.pt'))\n"


@pytest.mark.parametrize(
    ("text", "severity"),
    [
        (OF_RANK + SAVES, "info"),  # NameError on the other ranks
        (OF_RANK + "print(folder)\ntorch.save(net, 'net.pt')\n", "info"),
        (
            f"{OF_RANK}if args.cache:\n    path = folder + 'a'\nprint(1)\n"
            "if args.cache:\n    torch.save(net, 'net.pt')\n",
            "info",
        ),
        (f"def save(net, folder):\n    torch.save(net, 'net.pt')\n\n{OF_RANK}save(net, folder)\n", "info"),
        (f"{OF_RANK}else:\n    folder = 'other'\n{SAVES}", "warning"),
        (f"folder = ''\n{OF_RANK}{SAVES}", "warning"),
        (OF_RANK.replace("== 0", "> 0") + SAVES, "warning"),  # several ranks come further
        (OF_RANK.replace("dist.get_rank() == 0", "dist.get_rank() % 2 == 0") + SAVES, "warning"),
        (OF_RANK + "torch.save(net, 'net.pt')\nprint(folder)\n", "warning"),
        (OF_RANK + "print(folder if first else '')\ntorch.save(net, 'net.pt')\n", "warning"),
        (OF_RANK + "if first:\n    print(folder)\ntorch.save(net, 'net.pt')\n", "warning"),
        (
            f"def save(net, folder):\n    torch.save(net, 'net.pt')\n\n{OF_RANK}save(net, 1)\nsave(net, folder)\n",
            "warning",
        ),
    ],
)
def test_ranks_without_a_name_do_not_come_further(tmp_path, text, severity):
    hits = found(tmp_path, {"train.py": HEAD + JOINS + text, "other.py": ""})
    assert ("CODE029", severity) in hits


ABSENT = """\
class Tester:
    def __init__(self, args, loaders=None):
        self.args = args
        self.loaders = loaders

    def test(self):
        loader = self.loaders["test"]
        with open("out.json", "w") as file:
            json.dump(predict(loader), file)


def work(gpu, args):
    if gpu == 0:
        loaders = {"test": make(args)}
    else:
        loaders = None
    Tester(args, loaders).test()


work(args.local_rank, args)
"""
OF_FILE = f"loaders = None\n{OF_RANK.replace('folder =', 'loaders =')}"


@pytest.mark.parametrize(
    ("text", "severity"),
    [
        (ABSENT, "info"),  # 'NoneType' object is not subscriptable
        (f"{OF_FILE}net.load(loaders.path)\ntorch.save(net, 'net.pt')\n", "info"),
        (ABSENT.replace("loaders = None\n    Tester", "loaders = {}\n    Tester"), "warning"),
        (ABSENT.replace("gpu == 0", "gpu < 4"), "warning"),
        (ABSENT.replace("work(args.local_rank", "work(args.device"), "warning"),
        (ABSENT.replace("Tester(args, loaders)", "Tester(args, other)"), "warning"),
        (ABSENT.replace("self.loaders = loaders", "self.loaders = loaders or {}"), "warning"),
        (f"{ABSENT}Tester(args, make(args)).test()\n", "warning"),
        (ABSENT.replace('self.loaders["test"]', 'self.loaders["test"] if self.loaders else None'), "warning"),
        (f"{OF_FILE}print(loaders)\ntorch.save(net, 'net.pt')\n", "warning"),
        (f"{OF_FILE.replace('== 0:', '== 0 or args.all:')}loaders.load()\ntorch.save(net, 'net.pt')\n", "warning"),
        (f"{OF_FILE}loaders = shared(loaders)\nloaders.load()\ntorch.save(net, 'net.pt')\n", "warning"),
    ],
)
def test_ranks_without_a_value_do_not_come_further(tmp_path, text, severity):
    hits = [
        one
        for rule, one in found(tmp_path, {"train.py": f"import json\n{HEAD}{JOINS}{text}", "other.py": ""})
        if rule == "CODE029"
    ]
    assert hits == [severity]


FIRST_ROUND = (
    "from torch.utils.data import DataLoader\nfrom torch.utils.data.distributed import DistributedSampler\n\n"
    + "def train(data, net, optimizer):\n    loader = DataLoader(data, sampler=DistributedSampler(data))\n"
    + "    for epoch in range(9):\n        for batch in loader:\n            net(batch).backward()\n"
    + "            optimizer.step()\n            {line}\n\ntrain(1, 2, 3)\n"
)


@pytest.mark.parametrize(
    ("line", "severity"),
    [
        ("print(f'{seconds}')", "info"),  # a name that nothing defines
        ("if steps > 250: print(batch)", "info"),
        ("print(epoch)", "warning"),
        ("if epoch: print(f'{seconds}')", "warning"),
    ],
)
def test_a_loop_whose_first_round_fails_has_no_second_epoch(tmp_path, line, severity):
    text = HEAD + JOINS + FIRST_ROUND.format(line=line)
    assert ("CODE011", severity) in found(tmp_path, {"train.py": text, "other.py": ""})


@pytest.mark.parametrize(("page", "severity"), [("CHANGELOG.md", "info"), ("README.md", "error")])
def test_a_page_of_changes_shows_no_start(tmp_path, page, severity):
    text = "from lib import absent\nimport lib.there\n" + HANG
    (tmp_path / "lib").mkdir()
    (tmp_path / ".git").mkdir()
    files = {"train.py": HEAD + JOINS + text, "lib/__init__.py": "", "lib/there.py": "", page: "train.py is new\n"}
    assert found(tmp_path, files) == [("CODE005", severity)]


WRITES = "torch.save(names, 'list.pt')\n"
TOOL = (
    HEAD
    + "def mean(x):\n    dist.barrier()\n    dist.init_process_group()\n    return x\n\n"
    + "def prepare(names):\n"
    + indented(WRITES)
    + "\nif __name__ == '__main__':\n    prepare([1])\n"
)


@pytest.mark.parametrize(
    ("tool", "train", "severity"),
    [
        (TOOL, "from tool import mean\nmean(1)\n", "info"),
        (TOOL, "from tool import mean, prepare\nmean(1)\nprepare(1)\n", "warning"),
        (TOOL, "print()\n", "warning"),
        (TOOL + "    mean(1)\n", "from tool import mean\nmean(1)\n", "warning"),
    ],
)
def test_a_module_that_programs_import_may_prepare_data_itself(tmp_path, tool, train, severity):
    assert ("CODE029", severity) in found(tmp_path, {"tool.py": tool, "train.py": train})


TRAINED = HEAD + "model = Accelerator().prepare(net)\nloss.backward()\noptimizer.step()\ntorch.save(model, 'last.pt')\n"
SHOWS = HEAD + "model = Accelerator().prepare(net)\ntorch.save(model(x), 'seen.pt')\n"


@pytest.mark.parametrize(
    ("text", "files", "severity"),
    [
        (SHOWS, {"README.md": "accelerate launch train.py\n\nThen see show.py.\n", "train.py": ""}, "info"),
        (SHOWS, {"README.md": "accelerate launch show.py\n", "train.py": ""}, "warning"),
        (SHOWS, {"run.sh": "accelerate launch \\\n    show.py\n", "train.py": ""}, "warning"),
        (SHOWS, {"train.py": "import show\n"}, "warning"),
        (TRAINED, {"train.py": ""}, "warning"),
        (SHOWS + "PPOTrainer(model).step(x)\n", {"train.py": ""}, "warning"),
    ],
)
def test_a_program_that_only_shows_results_is_one_process(tmp_path, text, files, severity):
    assert ("CODE029", severity) in found(tmp_path, {"show.py": text, **files})


@pytest.mark.parametrize(
    ("command", "severity"),
    [("python show.py", "info"), ("accelerate launch show.py", "warning")],
)
def test_an_accelerator_starts_no_ranks_itself(tmp_path, command, severity):
    files = {"show.py": TRAINED, "README.md": f"    {command}\n", "other.py": ""}
    assert found(tmp_path, files) == [("CODE029", severity)]


OLD = HEAD + "model = torch.nn.DataParallel(net)\nmodel(x).backward()\n"
SHOWN = "See `legacy/train.py` for the first version.\n"


@pytest.mark.parametrize(
    ("page", "text", "severity"),
    [
        ("# First version\n\nThe files must not be executed.\n", OLD, "info"),
        ("# First version\n\nThis code is no longer maintained.\n", OLD, "info"),
        ("", '"""LEGACY: not part of the pipeline."""\n' + OLD, "info"),
        ("", OLD, "warning"),
        ("# First version\n\nRun train.py.\n", OLD, "warning"),
    ],
)
def test_a_page_of_a_folder_may_say_that_it_is_old(tmp_path, page, text, severity):
    (tmp_path / "legacy").mkdir()
    files = {"README.md": SHOWN, "main.py": "print()\n", "legacy/README.md": page, "legacy/train.py": text}
    assert ("CODE009", severity) in found(tmp_path, files)


@pytest.mark.parametrize(
    ("setup", "severity"),
    [("import shutil\n\nshutil.copy('a', 'b')\n", "info"), ("from setuptools import setup\nsetup()\n", "error")],
)
def test_a_setup_that_installs_nothing_gives_no_modules(tmp_path, setup, severity):
    (tmp_path / "libs").mkdir()
    files = {SETS_UP: setup, "libs/losses.py": "def loss():\n    pass\n", "other.py": ""}
    text = f"from losses import loss\n{HEAD}{JOINS}{HANG}"
    assert found(tmp_path, {"train.py": text, **files}) == [("CODE005", severity)]


THREADS = "import torch\n\ndef train(net, x):\n    model = torch.nn.DataParallel(net)\n    model(x).backward()\n"


def notebook(*cells):
    parts = [{"cell_type": "code", "metadata": {}, "outputs": [], "source": one} for one in cells]
    return json.dumps({"cells": parts, "metadata": {}, "nbformat": 4, "nbformat_minor": 5})


@pytest.mark.parametrize(
    ("cells", "severity"),
    [((THREADS,), "info"), ((THREADS, "train(1, 2)"), "warning"), ((THREADS, "run = partial(train, 1)"), "warning")],
)
def test_a_function_that_no_cell_uses_is_an_info(tmp_path, cells, severity):
    assert found(tmp_path, {"look.ipynb": notebook(*cells), "a.py": "", "b.py": ""}) == [("CODE009", severity)]


@pytest.mark.parametrize(
    ("cell", "severity"),
    [("def train(net):\n    pass\n", "info"), ("from tools import train\ntrain(1, 2)\n", "warning")],
)
def test_a_notebook_that_defines_a_function_of_that_name_does_not_use_it(tmp_path, cell, severity):
    main = "import tools\n\nif __name__ == '__main__':\n    print(tools)\n"
    files = {"tools.py": THREADS, "tools.ipynb": notebook(cell), "main.py": main}
    assert found(tmp_path, files) == [("CODE009", severity)]


ENGINE = """\
import deepspeed
import torch
from torch.utils.data import DataLoader, DistributedSampler

if args.engine:
    deepspeed.init_distributed()
    loader = DataLoader(data, 8, {order}sampler=DistributedSampler(data))
    engine, optimizer, _, _ = deepspeed.initialize(args=args, model=model)
else:
    loader = DataLoader(data, 8, shuffle=True)
    optimizer = torch.optim.Adam(model.parameters())
for x in loader:
    model(x).sum().backward()
    optimizer.step()
torch.save(model.state_dict(), "last.pt")
"""


@pytest.mark.parametrize(("order", "severity"), [("shuffle=True, ", "info"), ("", "warning")])
def test_the_branch_of_several_ranks_fails(tmp_path, order, severity):
    files = {"train.py": ENGINE.format(order=order), "run.sh": "deepspeed train.py --engine\n"}
    assert ("CODE029", severity) in found(tmp_path, files)


TRACKED = """\
import argparse
import torch
import torch.distributed as dist
import wandb

def train(rank, args):
    dist.init_process_group("nccl", rank=rank, world_size=4)
    for step in range(9):
        if args.track:
            wandb.log({"step": step})
        if args.track and rank == 0:
            dist.barrier()

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--track", default=True, type=bool)
    parser.add_argument("--more", default=False, type=bool)
    args = parser.parse_args()
    if args.track:
        wandb.init(project="gpt")
    torch.multiprocessing.spawn(train, args=(args,), nprocs=4)

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize(
    ("before", "after", "severity"),
    [
        ("", "", "info"),
        ("        if args.track:\n", "        if args.more:\n", "error"),
        (
            "        if args.track:\n            wandb",
            "        if args.track:\n            args.track = 0\n            wandb",
            "error",
        ),
        ("    for step", "    wandb.init()\n    for step", "error"),
        ("import wandb\n", "import wandb\n\nwandb.init()\n", "error"),
        ("    torch.multi", "    train(0, args)\n    torch.multi", "error"),
        ("wandb.init(project", "print(project", "error"),
        (
            "            wandb.log({",
            "            try:\n                wandb.log({})\n            except Exception:\n                print({",
            "error",
        ),
    ],
)
def test_a_spawned_process_has_no_run_of_its_parent(tmp_path, before, after, severity):
    text = TRACKED.replace(before, after, 1) if before else TRACKED
    assert [one for one in found(tmp_path, {"train.py": text, "other.py": ""}) if one[0] == "CODE005"] == [
        ("CODE005", severity)
    ]


@pytest.mark.parametrize(
    ("files", "severity"),
    [
        ({"other.py": "import wandb\n\nwandb.init()\n"}, "info"),
        ({"other.py": "from train import train\n\ntrain(0, read())\n"}, "error"),
        ({"other.py": "import wandb\n\nwandb.init()\n", "train.py": f"import other\n{TRACKED}"}, "error"),
    ],
)
def test_another_module_may_start_the_run(tmp_path, files, severity):
    assert ("CODE005", severity) in found(tmp_path, {"train.py": TRACKED, **files})


PARSED = (
    "import argparse\nimport os\n\ndef main():\n    def save(state, path):\n        torch.save(state, path)\n\n"
    "    parser = argparse.ArgumentParser()\n    parser.add_argument('--steps', type=int, default=9)\n"
    "    args = parser.parse_args()\n    dist.init_process_group('nccl')\n    args.ddp = 'RANK' in os.environ\n"
    "    model = torch.nn.parallel.DistributedDataParallel(Net())\n    for step in range(args.steps):\n"
    "        model(step).backward()\n        if args.ddp:\n            is_due = dist.get_rank() == 0 and step > 3\n"
    "        else:\n            is_due = step > 3\n        if is_due:\n            save(model.state_dict(), 'a.pt')\n"
    "    last = {'epoch': args.epochs}\n    save(last, 'last.pt')\n\nmain()\n"
)
OTHER = "def run(args):\n    return args.epochs, args.max_epochs\n"
ADDS = "import argparse\n\nparser = argparse.ArgumentParser()\nparser.add_argument('--epochs')\n"


@pytest.mark.parametrize(
    ("text", "files", "severity"),
    [
        (PARSED, {}, "info"),
        (PARSED, {"other.py": ADDS}, "info"),
        (PARSED.replace("'--steps'", "'--steps', '--epochs'"), {}, "warning"),
        (PARSED.replace("dist.get_rank() == 0 and ", ""), {}, "warning"),
        (PARSED.replace("    args.ddp", "    add_options(parser)\n    args.ddp"), {"other.py": ADDS}, "warning"),
        (PARSED.replace("    args.ddp", "    fill(args)\n    args.ddp"), {"other.py": ADDS}, "info"),
        (
            "from fills import fill\n" + PARSED.replace("    args.ddp", "    fill(args)\n    args.ddp"),
            {"other.py": ADDS, "fills.py": "def fill(args):\n    args.epochs = 9\n"},
            "warning",
        ),
    ],
)
def test_a_local_function_below_an_option_that_its_parser_lacks(tmp_path, text, files, severity):
    (tmp_path / ".git").mkdir()
    written = {"train.py": HEAD + text, "use.py": OTHER, "run.sh": "torchrun --nproc_per_node=4 train.py\n", **files}
    assert ("CODE029", severity) in found(tmp_path, written)
