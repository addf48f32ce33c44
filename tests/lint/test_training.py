"""What a script is about, told from its text: ranks, loops, loaders, and who runs what."""

import ast

import pytest

from doctor.api import Script
from doctor.lint.python.loader_calls import (
    data_of,
    depends_on_ranks,
    evaluates,
    is_iterable,
    loaders,
    mentions_ranks,
    target_name,
    words_behind,
)
from doctor.lint.python.reachable_functions import run_by_all
from doctor.lint.python.training import (
    calls_of,
    epoch_loops,
    is_test,
    loops,
    several_ranks,
    shards_loaders_itself,
    unwrapped,
)
from tests.lab.cases import each_case


@each_case(
    ("line", "several"),
    [
        ("import torch.distributed as dist; dist.init_process_group('nccl')", True),
        ("from torch.nn.parallel import DistributedDataParallel as DDP; DDP(model)", True),
        ("import torch; torch.nn.parallel.DistributedDataParallel(model)", True),
        ("from apex.parallel import DistributedDataParallel as DDP; DDP(model)", True),
        ("from accelerate import Accelerator; Accelerator()", True),
        ("import lightning as L; L.Trainer(devices=2)", True),
        ("import lightning as L; L.Trainer(devices='0,1')", True),
        ("import pytorch_lightning as pl; pl.Trainer(gpus=4)", True),
        ("import pytorch_lightning as pl; pl.Trainer(accelerator='ddp')", True),
        ("import lightning as L; L.Trainer(strategy='fsdp')", True),
        ("import lightning as L; L.Fabric(devices=2)", True),
        ("import lightning as L; L.Trainer(num_nodes=2, devices=1)", True),
        ("import lightning as L; L.Trainer()", False),
        ("import lightning as L; L.Trainer(devices=1, strategy='ddp')", False),
        ("import lightning as L; L.Trainer(devices=n)", False),
        ("import lightning as L; L.Trainer(devices=8, accelerator='ipu')", False),
        ("import lightning as L; L.Trainer(accelerator='cpu', strategy='ddp')", False),
        ("import lightning as L; L.Trainer(accelerator='cpu', strategy='ddp', devices=2)", True),
        ("import lightning as L; L.Trainer(strategy='auto')", False),
        ("import torch; model.to('cuda')", False),
        ("from mylib import DistributedDataParallel; DistributedDataParallel(model)", False),
    ],
)
def test_several_ranks(line, several):
    assert (several_ranks(Script("a.py", line)) is not None) == several


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("from accelerate import Accelerator; loader = Accelerator().prepare(loader)", True),
        ("import lightning as L; L.Trainer().fit(model)", True),
        ("fabric.setup_dataloaders(loader)", True),
        ("from transformers import Seq2SeqTrainer; Seq2SeqTrainer(model)", True),
        ("from transformers import Trainer\nclass Mine(Trainer): pass", True),
        ("import ray.train.torch as rt; rt.prepare_data_loader(loader)", True),
        ("from torch.nn.parallel import DistributedDataParallel as DDP; DDP(model)", False),
        ("from transformers import AutoModel; AutoModel.from_pretrained('a')", False),
    ],
)
def test_who_puts_samplers_into_loaders(line, parts):
    assert shards_loaders_itself(Script("a.py", line)) == parts


@each_case(
    ("name", "told"),
    [
        ("val_loader", True),
        ("testloader", True),
        ("valDataLoader", True),
        ("evaluate", True),
        ("validation_set", True),
        ("data_loader_test", True),
        ("predict_dataloader", True),
        ("train_loader", False),
        ("trainset", False),
        ("training_data", False),
        ("loader", None),
        ("train_val_loader", None),
        ("interval_loader", None),
        ("latest_loader", None),
        ("contest", None),
        ("", None),
    ],
)
def test_what_a_name_says(name, told):
    assert evaluates(name) is told


TWO_FUNCTIONS = """
def train(model, loader):
    for step, (x, y) in enumerate(tqdm(loader, desc="train")):
        loss = model(x, y)
        loss.backward()

def validate(model, val_loader):
    for x, y in val_loader:
        model(x)

def main():
    for epoch in range(10):
        train(model, loader)
        validate(model, val_loader)
"""


def test_loops_and_the_epochs_around_them():
    script = Script("a.py", TWO_FUNCTIONS)
    training, validation = loops(script)
    assert (training.trains, ast.unparse(training.source)) == (True, "loader")
    assert (validation.trains, ast.unparse(validation.source)) == (False, "val_loader")
    assert [loop.lineno for loop in epoch_loops(script, training)] == [12]
    assert len(list(calls_of(script, script.bindings.functions["train"]))) == 1


def test_the_innermost_loop_with_a_backward_pass_trains():
    script = Script(
        "a.py", "for epoch in range(3):\n  for x in data:\n    for part in x:\n      f(part)\n    loss.backward()\n"
    )
    (loop,) = loops(script)
    assert loop.node.lineno == 2
    assert loop.epochs is not None
    assert loop.epochs.lineno == 1


def test_a_backward_pass_in_a_function_of_the_file():
    script = Script("a.py", "def step(x):\n  model(x).backward()\nfor x in train_loader:\n  step(x)\n")
    (loop,) = loops(script)
    assert loop.trains


def test_wrappers_of_what_a_loop_goes_through():
    wrapped = ast.parse("logger.log_every(enumerate(tqdm.tqdm(loader), 1), 10, header)", mode="eval").body
    assert ast.unparse(unwrapped(wrapped)) == "loader"
    opened = ast.parse("enumerate(*many)", mode="eval").body
    assert unwrapped(opened) is opened


LOADERS = """
import torch.utils.data as data
from torch.utils.data import DataLoader, IterableDataset
from torchvision.datasets import MNIST

class Stream(IterableDataset):
    pass

class Mine(data.Dataset):
    def __getitem__(self, index): ...

class Model:
    def val_dataloader(self):
        return [DataLoader(Mine(), 32)]

train_loader = DataLoader(Mine())
held_out = MNIST(".", train=False)
loader = data.DataLoader(held_out)
loaders = {"test": DataLoader(Stream())}
mixed = DataLoader(dataset=unknown, shuffle=True)
val_loader = DataLoader(train_set)
"""


def test_loaders_and_what_they_are_for():
    script = Script("a.py", LOADERS)
    found = [(one.name, one.evaluates, is_iterable(script, one.call)) for one in loaders(script)]
    assert found == [
        ("val_dataloader", True, False),
        ("train_loader", False, False),
        ("loader", True, False),
        ("loaders", None, True),
        ("mixed", None, False),
        ("val_loader", None, None),
    ]


@pytest.mark.parametrize(
    ("data", "ranked"),
    [
        ("Images(path)", False),
        ("Images(f'shard-{n}')", True),
        ("whole.shard(8, index)", True),
        ("parted", True),
        ("build()", True),
        ("plain()", False),
        ("ByRank()", True),
    ],
)
def test_data_that_is_parted_by_hand(data, ranked):
    text = f"""
from torch.utils.data import DataLoader
parted = Subset(whole, range(get_rank(), 100, 8))
def build():
    return load(world_size=8)
def plain():
    return load()
class ByRank:
    def __init__(self):
        self.rank = 3
DataLoader({data})
"""
    script = Script("a.py", text)
    (loader,) = loaders(script)
    assert mentions_ranks(data_of(script, loader.call)) == ranked


def test_names_that_refer_to_one_another_come_to_an_end():
    script = Script("a.py", "from torch.utils.data import DataLoader\na = f(b)\nb = g(a)\nDataLoader(a)\n")
    (loader,) = loaders(script)
    assert {"a", "b", "f", "g"} <= data_of(script, loader.call)


@pytest.mark.parametrize(
    ("line", "ranked"),
    [("args.out = f'{args.out}/{args.rank}'", True), ("args.out = 'a'", False), ("args.other = rank", False)],
)
def test_one_setting_is_not_made_from_the_others(line, ranked):
    script = Script("a.py", f"args = parse('--local_rank')\n{line}\nf(args.out)\n")
    call = script.all(ast.Call)[-1]
    assert mentions_ranks(words_behind(script, call.args[0])) == ranked


def test_under_what_name_something_is_kept():
    script = Script(
        "a.py", "x = a()\nself.y = a()\nd['z'] = a()\nf(w=a())\ndef v():\n  return [a()]\na()\nu: int = a()\n"
    )
    names = [target_name(script, call) for call in script.all(ast.Call) if ast.unparse(call) == "a()"]
    assert names == ["x", "y", "d_z", "w", "v", "", "u"]


@pytest.mark.parametrize(
    ("path", "text", "tests"),
    [
        ("tests/test_lite.py", "def test_a(): ...", True),
        ("tests/training/helpers.py", "class T:\n  def test_a(self): ...", True),
        ("test.py", "def test(model): ...", False),
        ("test_mnist.py", "def train(): ...", False),
        ("train.py", "def test_epoch(): ...", False),
    ],
)
def test_files_that_test_software(path, text, tests):
    assert is_test(Script(path, text)) == tests


def run(text):
    return {one.name if one is not None else None for one in run_by_all(Script("a.py", text))}


def test_ranks_from_outside_run_the_module_and_what_it_calls():
    text = "def a(): b()\ndef b(): ...\ndef c(): ...\nif __name__ == '__main__':\n  a()\n"
    assert run(text) == {None, "a", "b"}


def test_ranks_that_a_launcher_starts_run_its_function():
    text = "import torch.multiprocessing as mp\ndef a(): b()\ndef b(): ...\ndef c(): ...\nc()\nmp.spawn(a, nprocs=2)\n"
    assert run(text) == {"a", "b"}


def test_what_one_rank_calls_is_not_run_by_all():
    assert run("def a(): ...\ndef b(): ...\nif rank == 0:\n  a()\nb()\n") == {None, "b"}


def test_methods_are_followed_and_hooks_of_lightning_are_run():
    text = "class T:\n  def __init__(self): ...\n  def go(self): self.save()\n  def save(self): ...\nt = T()\nt.go()\n"
    assert run(text) == {None, "__init__", "go", "save"}
    text = "import lightning as L\nclass M(L.LightningModule):\n  def on_fit_end(self): ...\n"
    assert run(text) == {None, "on_fit_end"}


@pytest.mark.parametrize(
    ("test", "depends"),
    [
        ("args.distributed", True),
        ("world_size > 1", True),
        ("dist.is_initialized()", True),
        ("local_rank == -1", True),
        ("epoch > 3", False),
        ("args.resume", False),
    ],
)
def test_branches_by_the_number_of_ranks(test, depends):
    script = Script("a.py", f"if {test}:\n  a = call()\nelse:\n  a = call()\n")
    calls = [one for one in script.all(ast.Call) if ast.unparse(one) == "call()"]
    assert [depends_on_ranks(script, one) for one in calls] == [depends, depends]


def test_the_cells_of_a_notebook_are_one_process():
    text = "def train():\n    pass\nprepare()\ntrain()\n"
    assert run_by_all(Script("a.ipynb", text)) == frozenset()
    launched = Script("a.ipynb", f"from accelerate import notebook_launcher\n{text}notebook_launcher(train)\n")
    assert {one.name for one in run_by_all(launched)} == {"train"}


SETUP = "def setup(rank, size):\n    dist.init_process_group('gloo', rank=rank, world_size=size)\n\n"


@pytest.mark.parametrize(
    ("line", "several"),
    [
        ("dist.init_process_group('gloo', rank=0, world_size=1)", False),
        ("dist.init_process_group('gloo', None, None, 1, 0)", False),
        ("args = Namespace(world_size=1)\ndist.init_process_group('gloo', world_size=args.world_size)", False),
        ("args = Namespace(world_size=1)\nDDP(net)", True),
        ("args = Namespace(size=1)\ndist.init_process_group('gloo', world_size=args.world_size)", True),
        (
            "args = Namespace(world_size=1)\nif many:\n    args = parse()\n"
            "dist.init_process_group('gloo', world_size=args.world_size)",
            True,
        ),
        ("dist.init_process_group('gloo', rank=0, world_size=size)", True),
        (f"{SETUP}def main():\n    rank = 0\n    size = 1\n    setup(rank, size)\n", False),
        (f"{SETUP}setup(0, size=1)\n", False),
        (f"{SETUP}setup(0, 1)\nsetup(0, 2)\n", True),
        (f"{SETUP}setup(0, 1)\nspawn(setup)\n", True),
        (f"{SETUP}def main(size):\n    setup(0, size)\n", True),
        (SETUP.replace("size):", "size):\n    size = count()", 1) + "setup(0, 1)\n", True),
        (SETUP, True),
    ],
)
def test_groups_of_one_rank(line, several):
    head = "import torch.distributed as dist\nfrom argparse import Namespace\n"
    text = f"{head}from torch.nn.parallel import DistributedDataParallel as DDP\n{line}\n"
    assert (several_ranks(Script("train.py", text)) is not None) is several
