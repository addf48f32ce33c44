"""Numbers that a project gives in its configurations, commands and pages: what one that is 1 everywhere changes."""

from __future__ import annotations

import time

import pytest

from doctor.core.settings import Settings
from doctor.lint.engine.registry import Rulebook, builtin_rules
from doctor.lint.engine.releases import Releases
from doctor.lint.engine.runner import LintRequest, build_report, lint_paths
from tests.lint.linted import severities_in

BOOK = Rulebook(tuple(one for one in builtin_rules() if one.id in ("CODE011", "CODE015", "CODE018", "CODE032")))
ACCUMULATES = """\
import torch, yaml
from torch.nn.parallel import DistributedDataParallel as DDP

torch.distributed.init_process_group("nccl")
config = load(yaml.safe_load(open("config.yaml")))
model = DDP(build())
for step, batch in enumerate(loader):
    (model(batch).sum() / config.accumulation_steps).backward()
    if (step + 1) % {counter} == 0:
        optimizer.step()
        optimizer.zero_grad()
"""
SHUFFLES = """\
import argparse
import torch
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

def train(model, data, num_epochs):
    torch.distributed.init_process_group("nccl")
    loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))
    for epoch in range(1, num_epochs + 1):
        for batch in loader:
            model(batch).sum().backward()

parser = argparse.ArgumentParser()
parser.add_argument("--num_epochs", type=int, default=3)
train(build(), read(), parser.parse_args().num_epochs)
"""


def found(folder, files):
    return severities_in(folder, files, BOOK, preview=True)


@pytest.mark.parametrize(
    ("files", "severity"),
    [
        ({"config.yaml": "lr: 3\naccumulation_steps: 1\n"}, "info"),
        ({"config.yaml": "accumulation_steps: 4\n"}, "warning"),
        ({"config.yaml": "accumulation_steps: 1\n", "large.yaml": "accumulation_steps: 8\n"}, "warning"),
        ({"config.yaml": "accumulation_steps: 1\n", "run.sh": "torchrun train.py accumulation_steps=2\n"}, "warning"),
        ({"config.yaml": "accumulation_steps: 1\n", "README.md": "- `accumulation_steps`: 2\n"}, "warning"),
        ({"config.yaml": "accumulation_steps: 1\n", "more.py": "config['accumulation_steps'] = 2\n"}, "warning"),
        ({"config.yaml": "accumulation_steps: ${STEPS}\n"}, "warning"),
        ({"config.yaml": "lr: 3\n"}, "warning"),
    ],
)
@pytest.mark.parametrize("counter", ["config.accumulation_steps", "config['accumulation_steps']"])
def test_one_micro_step_in_all_configurations_wastes_nothing(tmp_path, files, severity, counter):
    assert found(tmp_path, {"train.py": ACCUMULATES.format(counter=counter), **files}) == [("CODE032", severity)]


@pytest.mark.parametrize("counter", ["max(config.accumulation_steps, 1)", "max(1, config.accumulation_steps)"])
def test_no_less_than_one_micro_step(tmp_path, counter):
    text = ACCUMULATES.format(counter=counter)
    assert found(tmp_path, {"train.py": text, "config.yaml": "accumulation_steps: 1\n"}) == [("CODE032", "info")]
    assert found(tmp_path, {"train.py": text, "config.yaml": "accumulation_steps: 4\n"}) == [("CODE032", "warning")]


MAKES = "_target_: work.{}.Work\naccumulation_steps: {}\n"


@pytest.mark.parametrize(
    ("files", "severity"),
    [
        ({"small.yaml": MAKES.format("train", 1), "large.yaml": MAKES.format("other", 8)}, "info"),
        ({"small.yaml": MAKES.format("train", 1), "large.yaml": MAKES.format("train", 8)}, "warning"),
        ({"small.yaml": MAKES.format("train", 1), "more.yaml": "accumulation_steps: 8\n"}, "warning"),
        (
            {"small.yaml": MAKES.format("train", 1), "run.sh": "torchrun main.py small accumulation_steps=8\n"},
            "warning",
        ),
        (
            {
                "small.yaml": MAKES.format("train", 1),
                "large.yaml": MAKES.format("other", 1),
                "run.sh": "torchrun main.py --config-name=large accumulation_steps=8\n",
            },
            "info",
        ),
        (
            {
                "small.yaml": MAKES.format("train", 1),
                "run.sh": "torchrun main.py --config-name=$NAME accumulation_steps=8\n",
            },
            "warning",
        ),
    ],
)
def test_configurations_that_make_an_object_of_another_module_do_not_count(tmp_path, files, severity):
    text = ACCUMULATES.format(counter="config.accumulation_steps")
    assert found(tmp_path, {"train.py": text, **files}) == [("CODE032", severity)]


def test_the_first_backward_pass_of_a_static_graph_is_reduced(tmp_path):
    text = ACCUMULATES.format(counter="4").replace("DDP(build())", "DDP(build(), static_graph=True)")
    (tmp_path / "train.py").write_text(text)
    asked = LintRequest(BOOK, Settings(), {one.id: one.family for one in BOOK.rules}, Releases({}))
    report = build_report(lint_paths([tmp_path], asked), asked, started=time.time())
    (fix,) = [one.fix for result in report.results for one in result.findings]
    assert "except the very first" in fix


@pytest.mark.parametrize(
    ("files", "severity"),
    [
        ({"run.sh": "torchrun train.py --num_epochs 1\n"}, "info"),
        ({"run.sh": "torchrun train.py \\\n  --lr 3 \\\n  --num-epochs=1\n"}, "info"),
        ({"run.sh": "torchrun train.py --num_epochs 1\ntorchrun train.py\n"}, "warning"),
        ({"run.sh": "torchrun train.py --num_epochs 1\n", "README.md": "    torchrun train.py\n"}, "warning"),
        ({"run.sh": "torchrun train.py --num_epochs 1\n", "more.sh": "torchrun a.py --num_epochs 9\n"}, "warning"),
        ({"run.sh": "torchrun train.py --num_epochs $EPOCHS\n"}, "warning"),
        ({"run.sh": "EPOCHS=1\ntorchrun train.py --num_epochs $EPOCHS\n"}, "info"),
        ({"run.sh": "EPOCHS=1\nEPOCHS=9\ntorchrun train.py --num_epochs $EPOCHS\n"}, "warning"),
        ({"run.sh": "torchrun other.py --num_epochs 1\n"}, "warning"),
        ({}, "warning"),
    ],
)
def test_one_epoch_in_all_commands_has_one_order(tmp_path, files, severity):
    assert found(tmp_path, {"train.py": SHUFFLES, **files}) == [("CODE011", severity)]


@pytest.mark.parametrize(
    ("files", "severity"),
    [
        ({"second/run.sh": "torchrun train.py --num_epochs 1\n"}, "info"),
        ({"second/run.sh": "torchrun train.py --num_epochs 2\n"}, "warning"),
        ({"second/run.sh": "echo\n"}, "warning"),
    ],
)
def test_the_commands_in_the_folder_of_a_program_are_its_own(tmp_path, files, severity):
    one = SHUFFLES.replace("type=int, default=3", "\n    type=int,\n    default=1,\n")
    first = {"first/run.sh": "torchrun train.py --num_epochs 9\n", "first/train.py": "print()\n"}
    assert found(tmp_path, {"second/train.py": one, **first, **files}) == [("CODE011", severity)]


MICRO = """\
import argparse
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

torch.distributed.init_process_group("nccl")
{declares}
model = DDP(build())
for step in range(1000):
    for micro in range(args.accumulation_steps):
        (model(next(batches)).sum() / args.accumulation_steps).backward()
    optimizer.step()
"""
PARSED = 'parser = argparse.ArgumentParser()\nparser.add_argument("--accumulation_steps", type=int, default={})\n'
FIELD = "class Options:\n    accumulation_steps: int = {}\n"


@pytest.mark.parametrize("declares", [PARSED + "args = parser.parse_args()", FIELD + "\nargs = read(Options)"])
@pytest.mark.parametrize(("default", "severity"), [(1, "info"), (8, "warning")])
def test_loops_over_micro_batches_run_once_by_default(tmp_path, declares, default, severity):
    text = MICRO.format(declares=declares.format(default))
    assert found(tmp_path, {"train.py": text}) == [("CODE032", severity)]


def test_commands_that_give_more_than_the_default_of_a_field(tmp_path):
    files = {"train.py": MICRO.format(declares=FIELD.format(1) + "\nargs = read(Options)")}
    files |= {"run.sh": "torchrun train.py --accumulation_steps 16\n"}
    assert found(tmp_path, files) == [("CODE032", "warning")]


@pytest.mark.parametrize(
    ("files", "severity"),
    [
        ({}, "info"),
        ({"run.sh": "torchrun train.py\n"}, "info"),
        ({"run.sh": "torchrun other.py --num_epochs 3\n", "more.py": "num_epochs = 9\n"}, "info"),
        ({"run.sh": "torchrun train.py --num_epochs 3\n"}, "warning"),
        ({"README.md": "Train longer with `--num_epochs 3`.\n"}, "warning"),
    ],
)
def test_one_epoch_by_default_has_one_order(tmp_path, files, severity):
    one = SHUFFLES.replace("default=3", "default=1").replace("range(1, num", "range(start_epoch, num")
    one = one.replace("import argparse\n", "import argparse\nimport sys\n\nstart_epoch = int(sys.argv[1])\n")
    assert found(tmp_path, {"train.py": one, "other.py": "import torch\n", **files}) == [("CODE011", severity)]


ENDLESS = """\
import torch
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision.datasets import CIFAR10

def cycle(loader):
    while True:
        for batch in loader:
            yield batch

torch.distributed.init_process_group("nccl")
data = {data}
batches = cycle(DataLoader(data, batch_size=8, sampler=DistributedSampler(data)))
for step in range(10_000):
    model(next(batches)).sum().backward()
"""


@pytest.mark.parametrize(("data", "severity"), [("Proteins('pdb')", "info"), ("CIFAR10('data')", "warning")])
def test_a_number_of_steps_may_be_less_than_an_epoch(tmp_path, data, severity):
    assert found(tmp_path, {"train.py": ENDLESS.format(data=data)}) == [("CODE011", severity)]


ENGINE = """\
from accelerate import Accelerator

accelerator = Accelerator()
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for step, batch in enumerate(loader):
    accelerator.backward(model(**batch).loss / 4)
    if (step + 1) % 4 == 0:
        optimizer.step()
        optimizer.zero_grad()
"""
ZERO = "distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 2\n"


@pytest.mark.parametrize(
    ("files", "is_found"),
    [
        ({"zero.yaml": ZERO, "run.sh": "accelerate launch --config_file zero.yaml train.py\n"}, False),
        ({"fsdp.yaml": "distributed_type: FSDP\n", "a.sh": "accelerate launch --config_file $C train.py\n"}, False),
        ({"tp.yaml": "distributed_type: TP\n", "a.sh": "accelerate launch --config_file $C train.py\n"}, False),
        ({"run.sh": "accelerate launch --use_deepspeed train.py\n"}, False),
        ({"zero.yaml": ZERO, "run.sh": "accelerate launch train.py\n"}, True),
        ({"zero.yaml": ZERO, "run.sh": "accelerate launch --config_file a.yaml train.py\ntorchrun train.py\n"}, True),
        (
            {
                "zero.yaml": ZERO,
                "ddp.yaml": "distributed_type: MULTI_GPU\n",
                "run.sh": "accelerate launch --config_file zero.yaml train.py\n",
            },
            True,
        ),
        ({}, True),
    ],
)
def test_configurations_of_accelerate_say_that_models_are_sharded(tmp_path, files, is_found):
    assert bool(found(tmp_path, {"train.py": ENGINE, **files})) is is_found


TIMED = """\
import sys, time
import torch
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

def {name}(model, data):
    torch.distributed.init_process_group("nccl")
    loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))
    steps = 0
    for epoch in range(10):
        began = time.time()
        for batch in loader:
            model(batch).sum().backward()
            steps += 1
            {leaves}
        print(time.time() - began)
    {keeps}

{name}(build(), read())
"""


@pytest.mark.parametrize(
    ("name", "leaves", "keeps", "severity"),
    [
        ("train", "pass", "pass", "warning"),
        ("benchmark", "pass", "pass", "info"),
        ("benchmark", "pass", "torch.save(model, 'last.pt')", "warning"),
        ("train", "if steps >= 1000: sys.exit()", "pass", "info"),
        ("train", "if steps >= 1000: break", "pass", "warning"),
        ("train", "if loss.isnan(): sys.exit()", "pass", "warning"),
    ],
)
def test_no_epochs_in_a_program_that_measures_or_ends_early(tmp_path, name, leaves, keeps, severity):
    text = TIMED.format(name=name, leaves=leaves, keeps=keeps)
    assert found(tmp_path, {"train.py": text}) == [("CODE011", severity)]


@pytest.mark.parametrize(
    ("name", "size", "severity"), [("val", 8, "info"), ("val", 9, "warning"), ("test", 8, "warning")]
)
def test_few_samples_of_a_validation_cost_little(tmp_path, name, size, severity):
    text = KEPT.replace("val_loader", f"{name}_loader").format(size=size, reads=f"best = score(self.{name}_loader)")
    assert found(tmp_path, {"train.py": text}) == [("CODE015", severity)]


def test_the_loop_over_epochs_is_that_of_the_sampler(tmp_path):
    text = """\
import torch
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

def train_epoch(model, batches):
    for batch in batches:
        model(batch).sum().backward()

def alone(model, data):
    for epoch in range(9):
        train_epoch(model, DataLoader(data, batch_size=8, shuffle=True))

def together(model, data):
    torch.distributed.init_process_group("nccl")
    loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))
    for epoch in range(9):
        train_epoch(model, loader)

together(build(), read())
"""
    (tmp_path / "train.py").write_text(text)
    asked = LintRequest(BOOK, Settings(), {one.id: one.family for one in BOOK.rules}, Releases({}))
    report = build_report(lint_paths([tmp_path], asked), asked, started=time.time())
    (summary,) = [one.summary for result in report.results for one in result.findings]
    assert "the loop at line 16" in summary


COUNTED = """\
import os
import torch
from torch.nn.parallel import DistributedDataParallel as DDP
{imports}

{above}def main({parameters}):
    torch.distributed.init_process_group("nccl")
    model = DDP(torch.nn.Linear(8, 8))
    optimizer = torch.optim.Adam(model.parameters())
    for step, batch in enumerate(torch.load("batches.pt")):
        (model(batch).sum() / {steps}).backward()
        if (step + 1) % {steps} == 0:
            optimizer.step()
            optimizer.zero_grad()

{below}
"""
_PARSES = "import argparse\nparser = argparse.ArgumentParser()\n{}\nargs = parser.parse_args()"
_REQUIRED = _PARSES.format("parser.add_argument('--steps', type=int, required=True)")
_OF_TWO = _PARSES.format("parser.add_argument('--steps', type=int, default=2)")
_OF_BATCHES = (
    _PARSES.format("parser.add_argument('--batch', type=int, default=16)")
    + """
args.whole_batch = args.batch
args.batch = args.whole_batch // int(os.environ["WORLD_SIZE"])
whole_batch = args.whole_batch
accumulate = max(round(64 / whole_batch), 1)
"""
)
RUN = {"run.sh": "torchrun --nproc_per_node 8 train.py\n"}


def counted(steps, imports="", *, below="main()", parameters="", above=""):
    parts = {"steps": steps, "imports": imports, "below": below, "parameters": parameters, "above": above}
    return {"train.py": COUNTED.format(**parts)}


_AS_MAIN = 'if __name__ == "__main__":\n    main()'


WAYS = {
    "a default in several lines": lambda n: counted(
        "args.steps",
        _PARSES.format(f"parser.add_argument(\n    '--steps',\n    help='how (many)',\n    default={n},\n)"),
    ),
    "another name": lambda n: counted(
        "args.steps", _PARSES.format(f"parser.add_argument('--accum', dest='steps', type=int, default={n})")
    ),
    "a default that is set": lambda n: counted(
        "args.steps", _PARSES.format(f"parser.add_argument('--steps', type=int)\nparser.set_defaults(steps={n})")
    ),
    "click": lambda n: counted(
        "steps", "import click", parameters="steps", above=f"@click.command()\n@click.option('--steps', default={n})\n"
    ),
    "typer": lambda n: counted(
        "steps", "import typer", parameters=f"steps: int = typer.Option({n})", below="typer.run(main)"
    ),
    "fire": lambda n: counted("steps", "import fire", parameters=f"steps={n}", below="fire.Fire(main)"),
    "absl": lambda n: counted(
        "flags.FLAGS.steps",
        f"from absl import app, flags\nflags.DEFINE_integer('steps', {n}, 'how many')",
        parameters="_",
        below="app.run(main)",
    ),
    "pydantic": lambda n: counted(
        "cfg.steps",
        f"from pydantic import *\nclass Config(BaseModel):\n    steps: int = Field({n}, ge=1)\ncfg = Config()",
    ),
    "a module with settings": lambda n: {**counted("config.STEPS", "import config"), "config.py": f"STEPS = {n}\n"},
    "a name of that module": lambda n: {**counted("STEPS", "from config import STEPS"), "config.py": f"STEPS = {n}\n"},
    "yacs": lambda n: {
        **counted("cfg.TRAIN.STEPS", "from config import cfg"),
        "config.py": f"cfg = CfgNode()\ncfg.TRAIN.STEPS = {n}\n",
    },
    "a class with settings": lambda n: counted("CFG.steps", f"class CFG:\n    steps = {n}"),
    "a dictionary": lambda n: counted("config['steps']", f"config = {{'lr': 1, 'steps': {n}}}"),
    "an entry that may be absent": lambda n: {
        **counted("config.get('steps', 1)", "config = torch.load('c.pt')"),
        "c.yaml": f"steps: {n}\n" if n > 1 else "lr: 1\n",
    },
    "a variable of the environment": lambda n: counted("STEPS", f"STEPS = int(os.getenv('STEPS', {n}))"),
    "an exported variable": lambda n: {
        **counted("STEPS", "STEPS = int(os.environ.get('STEPS', 1))"),
        "start.sh": f"export STEPS={n}\ntorchrun train.py\n",
    },
    "an argument": lambda n: counted("steps", parameters="steps", below=f"main({n})"),
    "an argument of another file": lambda n: {
        "work.py": counted("steps", parameters="steps", below="")["train.py"],
        "train.py": f"from work import main\nmain(steps={n})\n",
    },
    "an argument of processes": lambda n: counted(
        "steps",
        parameters="rank, size, steps",
        below=f"if __name__ == '__main__':\n    torch.multiprocessing.spawn(main, args=(8, {n}), nprocs=8)",
    ),
    "what is left of a larger batch": lambda n: counted(
        "steps", f"BATCH = 8\nMICRO = {8 // n}\nsteps = max(1, BATCH // MICRO)"
    ),
    "what is left of the batch of an option, which is divided below": lambda n: {
        **counted("accumulate", _OF_BATCHES),
        "run.sh": f"torchrun --nproc_per_node 8 train.py --batch {64 // n}\n",
        "other.py": "def test(batch=16, whole_batch=2):\n    print(batch)\n",
    },
    "a number that rises during the first steps": lambda n: counted(
        "steps", f"import numpy as np\nsteps = max(1, np.interp(3, [0, 8], [1, {n}]).round())"
    ),
    "one unless it is given": lambda n: counted(
        "(args.steps or 1)",
        _PARSES.format(f"parser.add_argument('--steps', type=int{'' if n == 1 else ', default=4'})"),
    ),
    "a default in the shell": lambda n: {
        **counted("args.steps", _REQUIRED),
        "run.sh": f"STEPS=${{STEPS:-{n}}}\ntorchrun train.py --steps $STEPS\n",
    },
    "options in a variable": lambda n: {
        **counted("args.steps", _OF_TWO),
        "run.sh": f'ARGS="--lr 3 \\\n  --steps {n}"\ntorchrun train.py $ARGS\n',
    },
    "options in a list": lambda n: {
        **counted("args.steps", _OF_TWO),
        "run.sh": f'ARGS=(\n  --lr 3\n  --steps {n}\n)\ntorchrun train.py "${{ARGS[@]}}"\n',
    },
    "another command for one process": lambda n: {
        **counted("args.steps", _PARSES.format("parser.add_argument('--steps', type=int, default=1)")),
        "run.sh": f"torchrun --nproc_per_node=8 train.py --steps {n}\n",
        "one.sh": "torchrun --nproc_per_node=1 train.py --steps 16\n",
    },
    "a page with a command of one process": lambda n: {
        **counted("args.steps", _PARSES.format(f"parser.add_argument('--steps', type=int, default={n})")),
        "README.md": "    python train.py --steps 16\n",
    },
    "a value that the program gives itself": lambda n: {
        **counted(
            "args.steps", "import argparse", above=f"args = argparse.Namespace()\nargs.steps = {n}\n", below=_AS_MAIN
        ),
        "other.py": "import argparse\n\nargs = argparse.Namespace()\nargs.steps = 2\n",
    },
    "a comment that names it": lambda n: {
        **counted("args.steps", _PARSES.format("parser.add_argument('--steps', type=int, default=1)")),
        "run.sh": f"# whole batch = steps * size\ntorchrun train.py --steps {n}\n",
    },
    "a number in a comment": lambda n: {
        **counted("args.steps", _PARSES.format("parser.add_argument('--steps', type=int, default=1)")),
        "run.sh": f"# with less memory: --steps {n}\ntorchrun train.py --steps 1\n",
    },
    "a command for another file of the name": lambda n: {
        "second/train.py": counted(
            "args.steps", _PARSES.format(f"parser.add_argument('--steps', type=int, default={n})")
        )["train.py"],
        "first/train.py": "print()\n",
        "first.sh": "torchrun ../first/train.py --steps 16\n",
        "second.sh": "torchrun ../second/train.py\n",
    },
    "a page with the commands of another program": lambda n: {
        **counted("args.steps", _PARSES.format("parser.add_argument('--steps', type=int, default=1)")),
        "README.md": f"    torchrun other.py --steps 16\n\n    torchrun train.py --steps {n}\n",
    },
}


@pytest.mark.parametrize("way", WAYS)
def test_ways_to_give_a_number(tmp_path, way):
    for folder, number, severities in (("one", 1, ([], ["info"])), ("more", 4, (["warning"],))):
        (tmp_path / folder).mkdir()
        hits = found(tmp_path / folder, {**RUN, **WAYS[way](number)})
        assert [severity for name, severity in hits if name == "CODE032"] in severities, folder


def test_a_copy_of_an_option_that_is_computed_above(tmp_path):
    divides, copies = "args.batch //= 8\n", "args.whole_batch = args.batch\n"
    for folder, lines, severity in (("copy", copies, "info"), ("divided", divides + copies, "warning")):
        (tmp_path / folder).mkdir()
        parsed = _OF_BATCHES.partition("args.whole_batch")[0]
        files = counted("accumulate", f"{parsed}{lines}accumulate = max(round(64 / args.whole_batch), 1)")
        run = {"run.sh": "torchrun --nproc_per_node 8 train.py --batch 64\n"}
        assert found(tmp_path / folder, {**files, **run}) == [("CODE032", severity)], folder


@pytest.mark.parametrize(
    ("imports", "steps", "severity"),
    [("import peft", 2, "info"), ("import peft", 16, "warning"), ("import torch as peft", 2, "warning")],
)
def test_one_reduction_of_adapters_costs_little(tmp_path, imports, steps, severity):
    text = counted("accumulation_steps", f"{imports}\naccumulation_steps = {steps}")["train.py"]
    text = text.replace("torch.nn.Linear(8, 8)", "peft.get_peft_model(build(), settings)")
    assert found(tmp_path, {"train.py": text}) == [("CODE032", severity)]


CHECKPOINTS = """\
import torch
from model import Net

torch.distributed.init_process_group("nccl")
net = Net()
net.gradient_checkpointing_enable()
model = torch.nn.parallel.DistributedDataParallel(net, find_unused_parameters=True)
"""
OWN_METHOD = "class Net(torch.nn.Module):\n    def gradient_checkpointing_enable(self):\n        self.kind = {}\n"


@pytest.mark.parametrize(
    ("model", "is_found"),
    [
        (OWN_METHOD.format("dict(use_reentrant=False)"), False),
        (OWN_METHOD.format("dict(use_reentrant=True)"), True),
        ("from transformers import BertModel as Net\n", True),
    ],
)
def test_a_method_of_the_project_is_not_that_of_transformers(tmp_path, model, is_found):
    files = {"train.py": CHECKPOINTS, "model.py": f"import torch\n{model}", "requirements.txt": "transformers==4.40\n"}
    assert [name for name, _ in found(tmp_path, files)] == ["CODE018"] * is_found


ALTERNATIVE = """\
import argparse
import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.nn.parallel import DistributedDataParallel as DDP

parser = argparse.ArgumentParser()
parser.add_argument("--no_fsdp", action="store_true")
args = parser.parse_args()
torch.distributed.init_process_group("nccl")
if args.no_fsdp:
    model = DDP(build())
else:
    model = FSDP(build())
for step, batch in enumerate(loader):
    (model(batch).sum() / 4).backward()
    if (step + 1) % 4 == 0:
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("files", "is_found"),
    [
        ({"run.sh": "torchrun train.py\n", "README.md": "Compare with `--no_fsdp`.\n"}, False),
        ({"run.sh": "torchrun train.py --no_fsdp\n"}, True),
        ({}, True),
    ],
)
def test_an_alternative_to_fsdp_that_no_command_takes(tmp_path, files, is_found):
    assert bool(found(tmp_path, {"train.py": ALTERNATIVE, **files})) is is_found
    other = ALTERNATIVE.replace("FSDP(build())", "Other(build())")
    assert found(tmp_path, {"train.py": other, **files}) == [("CODE032", "warning")]


KEPT = """\
import torch
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

torch.distributed.init_process_group("nccl")
args = parse()

class Job:
    def __init__(self, seen, unseen):
        self.train_loader = DataLoader(seen, 8)
        self.val_loader = DataLoader(unseen, {size}, sampler=DistributedSampler(unseen), drop_last=True)

    def run(self, model):
        {reads}
        for batch in self.train_loader:
            model(batch).sum().backward()

Job(*read()).run(build())
"""
OVER_VALIDATION = (
    "bar = tqdm(self.val_loader)\n        for x in bar:\n            {adds}\n        best = min(best, total_loss)"
)
REPORTED = "\n        report(self.val_loader)"
VALIDATED = "from other import measure\n        best = min(best, measure(model, self.val_loader))"
MEASURES = "def measure(model, loader):\n    for x in loader:\n        {adds}\n    return total_loss\n"
DECLARES_SIZE = "def sizes(parser):\n    parser.add_argument('--val_size', type=int, default={})\n"


@pytest.mark.parametrize(
    ("size", "reads", "files", "expected"),
    [
        ("64", "best = min(best, score(self.val_loader))", {}, ["warning"]),
        ("64", "pass", {}, []),
        ("64", "pass", {"other.py": "best(job.val_loader)\n"}, ["warning"]),
        ("args.val_size", "best = score(self.val_loader)", {"a.py": DECLARES_SIZE.format(1)}, []),
        ("args.val_size", "best = score(self.val_loader)", {"a.py": DECLARES_SIZE.format(64)}, ["warning"]),
        ("64", "with torch.no_grad(): log(sum(map(model, self.val_loader)))", {}, ["info"]),
        ("64", "with torch.no_grad(): log_accuracy(map(model, self.val_loader))", {}, ["warning"]),
        ("64", OVER_VALIDATION.format(adds="total_loss += model(x)"), {}, ["info"]),
        ("64", OVER_VALIDATION.format(adds="accuracy += is_right(model(x))"), {}, ["warning"]),
        ("64", OVER_VALIDATION.format(adds="total_loss += model(x)") + REPORTED, {}, ["warning"]),
        ("64", VALIDATED, {"other.py": MEASURES.format(adds="total_loss += model(x)")}, ["info"]),
        ("64", VALIDATED, {"other.py": MEASURES.format(adds="bleu += model(x)")}, ["warning"]),
        ("64", VALIDATED, {"other.py": "def another(loader):\n    pass\n"}, ["warning"]),
    ],
)
def test_what_depends_on_the_samples_that_an_evaluation_drops(tmp_path, size, reads, files, expected):
    start = {"run.sh": "torchrun train.py\n", "main.py": "import train\n"}
    text = KEPT.format(size=size, reads=reads)
    severities = [one for name, one in found(tmp_path, {"train.py": text, **start, **files}) if name == "CODE015"]
    assert severities == expected


@pytest.mark.parametrize(
    ("entries", "command", "expected"),
    [
        ("train:\n  size: 1\n", "torchrun train.py", []),
        ("train:\n  size: 9\n", "torchrun train.py", ["warning"]),
        ("train:\n  size: 1\n", "torchrun train.py --size 9", ["warning"]),
        ("train:\n  size: 1\ntest:\n  size: 9\n", "torchrun train.py", ["warning"]),
        ("train:\n  size: 4\n", "size=6\ntorchrun train.py --size $size", ["info"]),
        ("train:\n  size: 4\n", "size=64\ntorchrun train.py --size $size", ["warning"]),
    ],
)
def test_the_configuration_that_a_script_opens_has_the_size_of_a_batch(tmp_path, entries, command, expected):
    text = KEPT.replace("args = parse()", "cfg = yaml.safe_load(open('./conf/own.yml'))")
    text = text.format(size="cfg['train']['size']", reads="best = min(best, score(self.val_loader))")
    (tmp_path / "conf").mkdir()
    other = tmp_path / "other"
    other.mkdir()
    (other / "own.yml").write_text("train:\n  size: 4\n")
    files = {"train.py": text, "run.sh": f"{command}\n", "conf/own.yml": entries}
    assert [one for name, one in found(tmp_path, files) if name == "CODE015"] == expected


OWN_SIZE = """import argparse
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--size", type=int, default=4)
args = parser.parse_args()
dist.init_process_group("nccl")
val_loader = DataLoader(data, args.size, sampler=DistributedSampler(data), drop_last=True)
best = min(best, accuracy(val_loader))
"""


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"README.md": "```\ntorchrun --nproc_per_node=4 train.py --path data\n```\n"}, "info"),
        ({"README.md": "```\ntorchrun --nproc_per_node=4 train.py --size 64\n```\n"}, "warning"),
        ({"README.md": "Training and tests.\n"}, "warning"),
    ],
)
def test_options_of_other_programs_do_not_count_for_one_that_a_page_starts(tmp_path, files, expected):
    other = "import argparse\n\nparser = argparse.ArgumentParser()\nparser.add_argument('--size', default=64)\n"
    reported = found(tmp_path, {"train.py": OWN_SIZE, "test.py": other, **files})
    assert [one for one in reported if one[0] == "CODE015"] == [("CODE015", expected)]


TRACKERS = Rulebook(tuple(one for one in builtin_rules() if one.id == "CODE041"))
TRACKED = """\
import argparse
import torch
import wandb

parser = argparse.ArgumentParser()
parser.add_argument("--{name}", action="store_true")
parser.add_argument("--epochs", type=int)
args = parser.parse_args()
torch.distributed.init_process_group("nccl")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
if args.{name}:
    wandb.init(project="runs")
"""


@pytest.mark.parametrize(
    ("name", "start", "severity"),
    [
        ("test_only", "torchrun train.py --epochs 3 ${@:2}", "info"),
        ("test_only", "torchrun train.py --epochs 3 --test_only", "warning"),
        ("use_wandb", "torchrun train.py --epochs 3 ${@:2}", "warning"),
    ],
)
def test_a_tracker_behind_an_option_that_no_start_gives(tmp_path, name, start, severity):
    files = {"train.py": TRACKED.format(name=name), "run.sh": f"#!/bin/bash\n{start}\n"}
    assert severities_in(tmp_path, files, TRACKERS, preview=True) == [("CODE041", severity)]


WRITES = Rulebook(tuple(one for one in builtin_rules() if one.id == "CODE029"))


@pytest.mark.parametrize(
    ("start", "severity"),
    [
        ("torchrun train.py --epochs 3", "info"),
        ("torchrun train.py --epochs 3 --save_model", "warning"),
        ("make", "warning"),
    ],
)
def test_a_file_behind_an_option_that_no_start_gives(tmp_path, start, severity):
    saves = "torch.save(model.state_dict(), 'last.pt')"
    train = TRACKED.format(name="save_model").replace('wandb.init(project="runs")', f"model.train()\n    {saves}")
    files = {"train.py": f"{train}\nmodel(1).sum().backward()\noptimizer.step()\n", "run.sh": f"#!/bin/bash\n{start}\n"}
    assert severities_in(tmp_path, files, WRITES, preview=True) == [("CODE029", severity)]


BY_PYTHON = ACCUMULATES.format(counter="config.accumulation_steps").replace(
    'yaml.safe_load(open("config.yaml"))', "sys.argv[1]"
)
START = "torchrun --nproc_per_node=4 train.py configs/{name}.py\n"


@pytest.mark.parametrize(
    ("command", "severity"),
    [
        (START.format(name="small"), "info"),
        (START.format(name="plain"), "info"),
        (START.format(name="large"), "warning"),
        (START.format(name="small") + START.format(name="large"), "warning"),
        (START.format(name="small").replace(".py\n", ".py accumulation_steps=2\n"), "warning"),
        (START.format(name="small").replace("configs/small.py", "$1"), "warning"),
    ],
)
def test_python_configurations_that_the_commands_name(tmp_path, command, severity):
    files = {
        "train.py": BY_PYTHON,
        "configs/base.py": "config = Config()\nconfig.accumulation_steps = 1\n",
        "configs/small.py": "config = Config()\nconfig.accumulation_steps = 1\n",
        "configs/plain.py": "config = Config()\nconfig.lr = 1\n",
        "configs/large.py": "config = Config()\nconfig.accumulation_steps = 4\n",
        "run.sh": command,
    }
    assert found(tmp_path, files) == [("CODE032", severity)]
