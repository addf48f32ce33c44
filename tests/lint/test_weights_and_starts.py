"""Weights to start from, and commands that start one process: what a project shows of them decides what is certain."""

from __future__ import annotations

import pytest

from doctor.lint.engine.registry import Rulebook, builtin_rules
from tests.lint.linted import severities_in

BOOK = Rulebook(tuple(one for one in builtin_rules() if one.id in ("CODE001", "CODE009", "CODE025", "CODE029")))
LOADS = """\
import argparse
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

parser = argparse.ArgumentParser()
parser.add_argument("--encoder_weights", default=None)
parser.add_argument("--lr", type=float)
args = parser.parse_args()
torch.distributed.init_process_group("nccl")
model = build().cuda()
if {test}:
    model.load_state_dict(torch.load({path}))
model = DDP(model)
train(model)
"""


def found(folder, files):
    return severities_in(folder, files, BOOK, preview=True)


STARTED = {"net.py": "print()\n", "run.sh": "torchrun --nproc_per_node=8 train.py --lr 3\n"}
RESUMES = "torchrun --nproc_per_node=8 train.py --resume last.pt\n"
OPTION = LOADS.format(test="args.encoder_weights", path='f"{args.encoder_weights}/model.bin"')


@pytest.mark.parametrize(
    ("train", "files", "severity"),
    [
        (OPTION, STARTED, "info"),
        (OPTION, {"run.sh": STARTED["run.sh"].replace("--lr", "--encoder_weights runs --lr")}, "warning"),
        (OPTION, STARTED | {"README.md": "Give `--encoder_weights` the folder of a run.\n"}, "warning"),
        (OPTION, STARTED | {"more.py": "args.encoder_weights = 'runs'\n"}, "warning"),
        (OPTION.replace("default=None", 'default="runs"'), STARTED, "warning"),
        (OPTION.replace("encoder_weights", "resume"), STARTED, "info"),
        (OPTION.replace("encoder_weights", "resume"), {"run.sh": STARTED["run.sh"] + RESUMES}, "warning"),
        (OPTION.replace("encoder_weights", "resume"), {"run.sh": "torchrun other.py --lr 3\n"}, "warning"),
        (OPTION, {"other.py": "print()\n"}, "warning"),
        (OPTION, {"net.py": "print()\n", "run.sh": "torchrun --nproc_per_node=8 other.py\n"}, "info"),
        (
            OPTION,
            {"net.py": "print()\n", "run.sh": "torchrun --nproc_per_node=8 other.py --encoder_weights runs\n"},
            "warning",
        ),
        (OPTION, {"net.py": "print()\n", "run.sh": "torchrun --nproc_per_node=8 train.py $@\n"}, "warning"),
    ],
)
def test_weights_that_no_start_gives_may_be_from_anywhere(tmp_path, train, files, severity):
    assert found(tmp_path, {"train.py": train, **files}) == [("CODE001", severity)]


LOADED = LOADS.format(test="args.encoder_weights", path="args.encoder_weights")
GIVEN = "torchrun --nproc_per_node=8 train.py --encoder_weights {file}\n"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (("weights/resnet18-f37072fd.pth",), []),
        (("weights/resnet18-f37072fd.pth", "weights/resnet34-b627a593.pth"), []),
        (("weights/resnet18-f37072fd.pth", "runs/last.pth"), [("CODE001", "warning")]),
        (("$WEIGHTS/resnet18-f37072fd.pth",), [("CODE001", "warning")]),
        (("runs/last.pth",), [("CODE001", "warning")]),
    ],
)
def test_commands_that_give_published_weights(tmp_path, files, expected):
    starts = "".join(GIVEN.format(file=one) for one in files)
    assert found(tmp_path, {"train.py": LOADED, "net.py": "print()\n", "run.sh": starts}) == expected


def test_the_name_of_another_option_is_no_abbreviation(tmp_path):
    declares = 'parser.add_argument("--encoder", default=None)\n'
    train = LOADED.replace("args = parser", f"{declares}args = parser")
    starts = GIVEN.format(file="weights/resnet18-f37072fd.pth") + GIVEN.format(file="x").replace("_weights x", " small")
    files = {"net.py": "print()\n", "run.sh": starts}
    assert found(tmp_path, {"train.py": train, **files}) == []
    assert found(tmp_path, {"train.py": LOADED, **files}) == [("CODE001", "warning")]


@pytest.mark.parametrize(
    ("path", "severity"), [("name", "info"), ("os.path.join(folder, name)", "warning"), ("folder + name", "warning")]
)
def test_names_of_files_in_another_folder_are_not_found(tmp_path, path, severity):
    train = LOADS.replace("if {test}:", "folder = 'weights/'\nfor name in os.listdir(folder):").format(path=path)
    assert found(tmp_path, {"train.py": f"import os\n{train}"}) == [("CODE001", severity)]


SWITCHED = """\
import hydra
import torch


@hydra.main(config_path="conf", config_name="train.yaml")
def main(args):
    model = build().cuda()
    if {test}:
        model = torch.nn.DataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in loader():
        model(batch).sum().backward()
        optimizer.step()
    torch.save(model.state_dict(), "last.pt")


if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize(
    ("test", "entry", "severity"),
    [
        ("args.parallel == True", "False", "info"),
        ("args.parallel is True", "False", "info"),
        ("args.parallel == True", "True", "warning"),
        ("args.parallel == False", "False", "warning"),
    ],
)
def test_a_switch_that_is_compared_with_true(tmp_path, test, entry, severity):
    files = {"train.py": SWITCHED.format(test=test), "net.py": "print()\n", "conf/train.yaml": f"parallel: {entry}\n"}
    assert found(tmp_path, files) == [("CODE009", severity)]


CONFIGURED = """\
import torch
import yaml
from torch.nn.parallel import DistributedDataParallel as DDP

config = yaml.safe_load(open(args.config))
torch.distributed.init_process_group("nccl")
model = build().cuda()
if config.get("resume") is not None:
    saved = torch.load(config["resume"])
    model.load_state_dict(saved["model"])
model = DDP(model)
train(model)
"""


@pytest.mark.parametrize(
    ("entry", "command", "severity"),
    [
        ("# resume: last.pth\n", "python train.py --config conf/a.yaml", "info"),
        ("resume: null\n", "python train.py --config conf/a.yaml", "info"),
        ("resume: last.pth\n", "python train.py --config conf/a.yaml", "warning"),
        ("# resume: last.pth\n", "python train.py --config conf/a.yaml resume=last.pth", "warning"),
        ("# resume: last.pth\n", "python train.py --config conf/b.yaml", "warning"),
        ("resume: last.pth\n", "torchrun --nproc_per_node=1 train.py --config conf/a.yaml", "info"),
    ],
)
def test_an_entry_that_no_configuration_of_several_ranks_has(tmp_path, entry, command, severity):
    files = {"conf/a.yaml": f"lr: 3\n{entry}", "conf/c.yaml": "lr: 3\n"}
    starts = f"{command}\nCUDA_VISIBLE_DEVICES=0,1 python train.py --config conf/c.yaml\n"
    assert found(tmp_path, {"train.py": CONFIGURED, "run.sh": starts, **files}) == [("CODE001", severity)]


SETTING = LOADS.format(test='config.model.coder.get("weights_path")', path="config.model.coder.weights_path")
SETTING = SETTING.replace("args = parser", "config = read()\nargs = parser", 1)


@pytest.mark.parametrize(
    ("entries", "command", "severity"),
    [
        ("  coder:\n    name: vq\n  decoder:\n    weights_path: last.pt\n", "", "info"),
        ("  coder:\n    name: vq\n    weights_path: last.pt\n  decoder:\n    size: 3\n", "", "warning"),
        ("  coder: {weights_path: last.pt}\n", "", "warning"),
        ("  coder:\n    name: vq\n", "model.coder.weights_path=last.pt", "warning"),
        ("  decoder:\n    size: 3\n", "", "warning"),
    ],
)
def test_weights_that_no_configuration_has_in_their_section(tmp_path, entries, command, severity):
    files = {
        "net.py": "print()\n",
        "conf.yaml": f"model:\n{entries}",
        "run.sh": f"torchrun --nproc_per_node=8 train.py {command}\n",
    }
    assert found(tmp_path, {"train.py": SETTING, **files}) == [("CODE001", severity)]


@pytest.mark.parametrize(
    ("above", "expected"),
    [
        ('path = "models/resnet50-19c8e357.pth"', []),
        ('path = "models/resnet50-19c8e357.pth"\n    if small:\n        path = "models/small.pth"', ["warning"]),
        ('path = "models/small.pth"', ["warning"]),
    ],
)
def test_the_path_is_the_one_of_the_branch(tmp_path, above, expected):
    train = LOADS.format(test="args.lr", path="path").replace("    model.load", f"    {above}\n    model.load")
    train = train.replace("model = DDP", 'else:\n    path = "models/other.pth"\nmodel = DDP')
    assert [one for _, one in found(tmp_path, {"train.py": train})] == expected


EVALUATES = """\
import torch
import lightning.pytorch as pl

net = build()
net.load_state_dict(torch.load("runs/last.ckpt")["state_dict"])
pl.Trainer(devices=8, strategy="ddp").{stage}(net, loader)
"""


@pytest.mark.parametrize(("stage", "severity"), [("validate", "info"), ("test", "info"), ("fit", "warning")])
def test_an_evaluation_has_no_gradients_on_the_first_gpu(tmp_path, stage, severity):
    assert found(tmp_path, {"score.py": EVALUATES.format(stage=stage)}) == [("CODE001", severity)]


BESIDE = LOADS.format(test="args.lr", path='"last.pt"').replace(
    "model = DDP(model)", "model = DDP(model) if args.local_rank != -1 else torch.nn.DataParallel(model)"
)


@pytest.mark.parametrize(
    ("train", "command", "severity"),
    [
        (BESIDE, "python train.py --per_gpu_train_batch_size 8", "info"),
        (BESIDE, "python train.py --distill_weight 8", "info"),
        (BESIDE, "python train.py --gpus 8", "warning"),
        (BESIDE, "python train.py --distributed", "warning"),
        (BESIDE, "CUDA_VISIBLE_DEVICES=0,1 python train.py", "info"),
        (
            BESIDE.replace("torch.nn.DataParallel(model)", "model"),
            "CUDA_VISIBLE_DEVICES=0,1 python train.py",
            "warning",
        ),
        (f"{BESIDE}trainer = Trainer(model)\n", "CUDA_VISIBLE_DEVICES=0,1 python train.py", "warning"),
        (BESIDE, "CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc_per_node=2 train.py", "warning"),
    ],
)
def test_one_process_may_use_several_gpus(tmp_path, train, command, severity):
    assert ("CODE001", severity) in found(tmp_path, {"train.py": train, "run.sh": f"{command}\n"})


SCORES = """\
import argparse
import json
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--score_only", action="store_true")
args = parser.parse_args()
torch.distributed.init_process_group("nccl")
if args.score_only:
    with open("scores.json", "w") as file:
        json.dump(score(build()), file)
"""
RUNS = "torchrun --nproc_per_node=8 train.py\n"
SCORES_HANDS = "torchrun --nproc_per_node=8 hands.py --score_only\n"


@pytest.mark.parametrize(
    ("files", "severity"),
    [
        ({"hands.py": SCORES.replace("open(", "read("), "run.sh": RUNS + SCORES_HANDS}, "info"),
        ({"hands.py": "print()\n", "run.sh": RUNS + SCORES_HANDS}, "warning"),
        ({"hands.py": SCORES.replace("open(", "read("), "run.sh": f"{RUNS}--score_only\n{SCORES_HANDS}"}, "warning"),
        ({"run.sh": f"{RUNS}{SCORES_HANDS.replace('hands', 'train')}"}, "warning"),
    ],
)
def test_another_program_has_an_option_of_the_same_name(tmp_path, files, severity):
    assert ("CODE029", severity) in found(tmp_path, {"train.py": SCORES, **files})


LOADS_IN_METHOD = """
import argparse
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

class Runner:
    def __init__(self, args):
        torch.distributed.init_process_group("nccl")
        self.model = DDP(build().cuda())
        if args.{name} is not None:
            path = args.{name}
            self.read(path)

    def read(self, path):
        self.model.load_state_dict(torch.load("%s.pt" % path))

parser = argparse.ArgumentParser()
parser.add_argument("--{name}", default=None)
Runner(parser.parse_args())
"""
LOADS_IN_MAIN = """
import argparse
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--{name}", default=None)
    args = parser.parse_args()
    torch.distributed.init_process_group("nccl")
    model = DDP(build().cuda())
    if args.{name}:
        model.load_state_dict(torch.load(args.{name}))

main()
"""
TESTS_ALONE = "python train.py --load out/best --test_only\n"
EXPLAINED = "## Test\n- `--load`: the weights\n\n{}\n\n## Train\n\n{}\n"


@pytest.mark.parametrize(
    ("files", "name", "severity"),
    [
        ({"run.sh": RUNS, "test.sh": TESTS_ALONE}, "load", "info"),
        ({"run.sh": 'torchrun train.py "$@"\n', "test.sh": TESTS_ALONE}, "load", "info"),
        ({"run.sh": "torchrun train.py --load out/last\n", "test.sh": TESTS_ALONE}, "load", "warning"),
        ({"run.sh": RUNS, "test.sh": f"{TESTS_ALONE.rstrip()} --gpus 4\n"}, "load", "warning"),
        ({"run.sh": RUNS, "test.sh": TESTS_ALONE, "README.md": "Start again with `--load`.\n"}, "load", "warning"),
        ({"run.sh": RUNS, "test.sh": TESTS_ALONE.replace("load", "resume")}, "resume", "warning"),
        ({"README.md": EXPLAINED.format(f"    {TESTS_ALONE}", f"    {RUNS}")}, "load", "info"),
        ({"README.md": EXPLAINED.format(f"    {TESTS_ALONE}    {RUNS}", "")}, "load", "warning"),
        ({"run.sh": RUNS, "test.sh": TESTS_ALONE, "README.md": EXPLAINED.format("", "")}, "load", "warning"),
    ],
)
@pytest.mark.parametrize("program", ["method", "main"])
def test_a_checkpoint_that_only_commands_of_one_process_load(tmp_path, files, name, severity, program):
    text = LOADS_IN_METHOD if program == "method" else LOADS_IN_MAIN
    reported = found(tmp_path, {"train.py": text.format(name=name), **files})
    assert [one for one in reported if one[0] == "CODE001"] == [("CODE001", severity)]


DOWNLOADS = """\
import torch
from torchvision.datasets import MNIST

torch.distributed.init_process_group("gloo")
data = MNIST("../data", download=True)
"""
JOB = """\
apiVersion: kubeflow.org/v1
kind: PyTorchJob
spec:
  pytorchReplicaSpecs:
    Worker:
      replicas: 2
      template:
        spec:
          containers:
            - name: pytorch
              image: mnist:1.0
              resources:
                limits:
                  nvidia.com/gpu: 1
"""
CLAIM = "          volumes:\n            - persistentVolumeClaim:\n                claimName: all\n"


@pytest.mark.parametrize(
    ("job", "severity"),
    [
        (JOB, "info"),
        (JOB.replace("gpu: 1", "gpu: 8"), "warning"),
        (JOB.replace("image:", "command: [torchrun, train.py]\n              image:"), "warning"),
        (JOB.replace("kind: PyTorchJob", "kind: Job"), "warning"),
        (JOB.replace("kind: PyTorchJob", "kind: AdaptDLJob"), "info"),
        (JOB + CLAIM, "warning"),
    ],
)
def test_the_operator_starts_one_rank_in_each_pod(tmp_path, job, severity):
    files = {"mnist/train.py": DOWNLOADS, "mnist/v1/job.yaml": job}
    assert found(tmp_path, files) == [("CODE029", severity)]


PLAIN = "command: [python3, {}]\n              image:"
LISTED = 'command:\n                - "python"\n                - "/opt/mnist/train.py"\n              image:'


@pytest.mark.parametrize(
    ("command", "script", "severity"),
    [
        (PLAIN.format("-u, train.py"), DOWNLOADS, "info"),
        (LISTED, DOWNLOADS, "info"),
        (PLAIN.format("/opt/other/train.py"), DOWNLOADS, "warning"),
        (PLAIN.format("other.py"), DOWNLOADS, "warning"),
        (PLAIN.format("train.py"), f"{DOWNLOADS}\nimport subprocess\nsubprocess.run(['ls'])\n", "warning"),
        ("image:", DOWNLOADS, "warning"),
    ],
)
def test_pods_that_start_a_script_with_python_have_one_process(tmp_path, command, script, severity):
    job = JOB.replace("gpu: 1", "gpu: 8").replace("image:", command)
    assert found(tmp_path, {"mnist/train.py": script, "jobs/job.yaml": job}) == [("CODE029", severity)]
    volume = found(tmp_path, {"mnist/train.py": script, "jobs/job.yaml": job + CLAIM})
    assert volume == [("CODE029", "warning")]


@pytest.mark.parametrize(
    ("job", "severity"),
    [
        (JOB, "info"),
        (JOB + CLAIM, "info"),
        (JOB.replace("gpu: 1", "gpu: 8"), "warning"),
        (JOB.replace("kind: PyTorchJob", "kind: Job"), "warning"),
        (JOB.replace("image:", "command: [torchrun, train.py]\n              image:"), "warning"),
    ],
)
def test_checkpoints_of_ranks_that_have_a_gpu_in_a_pod(tmp_path, job, severity):
    files = {"net/train.py": LOADS.format(test="args.lr", path='"last.pt"'), "net/v1/job.yaml": job}
    assert found(tmp_path, files) == [("CODE001", severity)]


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        ("pip install -e parts/other-main\ntorchrun --nproc-per-node=8 main.py\n", ["info"]),
        ("cd parts/other-main\npip install -e .\ncd ../..\ntorchrun --nproc-per-node=8 main.py\n", ["info"]),
        ("torchrun --nproc-per-node=8 main.py\n", ["info"]),
        (
            "pip install -e parts/other-main\ntorchrun --nproc-per-node=8 parts/other-main/examples/train.py\n",
            ["warning"],
        ),
    ],
)
def test_examples_of_a_copied_project_that_is_installed(tmp_path, page, expected):
    copied = {"parts/other-main/LICENSE": "MIT\n", "parts/other-main/other/net.py": "class Net:\n    pass\n"}
    train = LOADS.format(test="args.lr", path='"last.pt"') + 'if __name__ == "__main__":\n    print()\n'
    main = 'import other\n\nif __name__ == "__main__":\n    other.run()\n'
    (tmp_path / ".git").mkdir()
    files = {"parts/other-main/examples/train.py": train, "main.py": main, "README.md": page, **copied}
    assert [one for _, one in found(tmp_path, files)] == expected


WRAPS = """\
import torch

def train(model, loader):
    for x in loader:
        model(x).sum().backward()

def test(model, loader):
    return [model(x) for x in loader]

def main(loader):
    model = build()
    {above}
    model = torch.nn.DataParallel(build())
    {below}

main(load())
"""


@pytest.mark.parametrize(
    ("above", "below", "severity"),
    [
        ("train(model, loader)", "save(test(model, loader))", "info"),
        ("pass", "train(model, loader)", "warning"),
        ("train(model, loader)", "train(model, loader)", "warning"),
        ("train(model, loader)", "test(model, loader).sum().backward()", "warning"),
    ],
)
def test_threads_that_evaluate_after_the_training(tmp_path, above, below, severity):
    assert found(tmp_path, {"train.py": WRAPS.format(above=above, below=below)}) == [("CODE009", severity)]


MAPS = """\
import argparse
from datasets import load_dataset
from transformers import Trainer

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
def tokenize(row):
    return row

data = load_dataset("text").map(tokenize, num_proc=48)
Trainer(train_dataset=data).train()
"""


@pytest.mark.parametrize(
    ("command", "severity"),
    [("deepspeed train.py --lr 3", "warning"), ("deepspeed other.py --lr 3", "info"), ("ls", "info")],
)
def test_processes_of_ranks_that_the_project_starts_compete(tmp_path, command, severity):
    files = {"train.py": MAPS, "other.py": "print()\n", "run.sh": f"#!/bin/bash\n{command}\n"}
    assert found(tmp_path, files) == [("CODE029", severity)]


SAVES = """\
import torch
from accelerate import Accelerator

accelerator = Accelerator()
model, loader = accelerator.prepare(*build())
for batch in loader:
    accelerator.backward(model(batch).sum())
torch.save(model.state_dict(), "last.pt")
"""
OTHER_START = "import torch\ntorch.distributed.init_process_group('nccl')\n"


@pytest.mark.parametrize(
    ("command", "severity"),
    [
        ("python train.py \\\n  --lr 3\n", "info"),
        ("# accelerate launch --main_process_port 8888 \\\npython train.py \\\n  --lr 3\n", "info"),
        ("# accelerate launch \\\nCUDA_VISIBLE_DEVICES=3 python train.py\n", "info"),
        ("accelerate launch --main_process_port 8888 \\\n  train.py \\\n  --lr 3\n", "warning"),
        ("# accelerate launch --main_process_port 8888 \\\n# train.py \\\n#  --lr 3\n", "warning"),
    ],
)
def test_a_comment_above_a_command_is_no_part_of_it(tmp_path, command, severity):
    files = {"train.py": SAVES, "other.py": OTHER_START, "run.sh": command}
    assert found(tmp_path, files) == [("CODE029", severity)]


TESTS_ALONE = """\
import argparse
import torch
from net import build, load, optimizer, predict

parser = argparse.ArgumentParser()
parser.add_argument("--num_gpus", type=int, default=8)
parser.add_argument("--evaluate", action="store_true")
args = parser.parse_args()

def test(model):
    torch.save(predict(model), "predictions.pt")

def work(gpu):
    model = build().cuda(gpu)
    if args.num_gpus > 1:
        torch.distributed.init_process_group("nccl", world_size=args.num_gpus, rank=gpu)
        model = torch.nn.parallel.DistributedDataParallel(model)
    if args.evaluate:
        assert args.num_gpus == 1
        test(model)
        return
    for batch in load():
        model(batch).sum().backward()
        optimizer.step()
    if gpu == 0:
        test(model)

torch.multiprocessing.spawn(work, nprocs=args.num_gpus)
"""


@pytest.mark.parametrize(
    ("asserted", "severity"),
    [
        ("assert args.num_gpus == 1", []),
        ("assert args.num_gpus > 1", ["error"]),
        ("assert args.epochs == 1", ["error"]),
        ("print(args.num_gpus)", ["error"]),
    ],
)
def test_a_branch_that_asserts_one_process_has_one(tmp_path, asserted, severity):
    text = TESTS_ALONE.replace("assert args.num_gpus == 1", asserted)
    assert found(tmp_path, {"train.py": text, "net.py": "from somewhere import *\n"}) == [
        ("CODE029", one) for one in severity
    ]


VARIANTS = """\
import torch
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel as DDP

class Trainer:
    def __init__(self, model):
        self.model = model

    def save(self):
        torch.save(self.model.state_dict(), "alone.pt")

    def train(self, epochs):
        for epoch in range(epochs):
            self.model(load()).sum().backward()
            self.save()

class Trainer:
    def __init__(self, model, rank):
        self.model, self.rank = DDP(model), rank

    def save(self):
        torch.save(self.model.module.state_dict(), "last.pt")

    def train(self, epochs):
        for epoch in range(epochs):
            self.model(load()).sum().backward()
            if self.rank == 0:
                self.save()

def main(rank, size):
    torch.distributed.init_process_group("nccl", rank=rank, world_size=size)
    Trainer(build(), rank).train(9)

mp.spawn(main, args=(8,), nprocs=8)
"""


def test_a_class_defined_again_has_methods_of_its_own(tmp_path):
    assert found(tmp_path, {"train.py": VARIANTS, "other.py": ""}) == []
    every = VARIANTS.replace("            if self.rank == 0:\n                self.save()", "            self.save()")
    assert found(tmp_path, {"train.py": every, "other.py": ""}) == [("CODE029", "warning")]


SPAWNS = """\
import argparse
import os
import torch
import torch.multiprocessing as mp

torch.cuda.current_device()
parser = argparse.ArgumentParser()
parser.add_argument("--gpu", default="0,1,2")
args = parser.parse_args()

def prepare():
    os.environ["CUDA_VISIBLE_DEVICES"] = args.gpu

def work(rank):
    torch.distributed.init_process_group("nccl", rank=rank, world_size=3)
    train(rank)

if __name__ == "__main__":
    prepare()
    mp.spawn(work, nprocs=3)
"""


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("", "", []),
        ("    mp.spawn(work, nprocs=3)", "    work(0)", ["warning"]),
        ("    prepare()\n    mp.spawn(work, nprocs=3)", "    mp.spawn(work, nprocs=3)\n    prepare()", ["warning"]),
        ("    prepare()\n    mp", "    mp", ["warning"]),
    ],
)
def test_processes_that_start_later_get_a_variable(tmp_path, before, after, expected):
    text = SPAWNS.replace(before, after) if before else SPAWNS
    if "    prepare()" not in text:
        text = text.replace("    train(rank)", "    prepare()\n    train(rank)")
    rules = Rulebook(tuple(one for one in builtin_rules() if one.id == "CODE026"))
    reported = severities_in(tmp_path, {"train.py": text, "other.py": ""}, rules, preview=True)
    assert reported == [("CODE026", one) for one in expected]


REPORTS = """\
import json
import torch
from net import Trainer, build

def report(trainer, folder):
    results = trainer.hooks[0].aggregate(trainer)
    for place in [folder, "."]:
        with open(f"{place}/results.json", "w") as file:
            json.dump(results, file)

def main(rank, world_size):
    torch.distributed.init_process_group("nccl", rank=rank, world_size=world_size)
    model = torch.nn.parallel.DistributedDataParallel(build())
    trainer = Trainer(model, world_size=world_size)
    trainer.train()
    report(trainer, "out")

torch.multiprocessing.spawn(main, args=(8,), nprocs=8)
"""


@pytest.mark.parametrize(
    ("before", "after", "severity"),
    [
        ("", "", "info"),
        (", world_size=world_size)\n    trainer.train", ")\n    trainer.train", "warning"),
        ("Trainer(model", "Network(model", "warning"),
        ('for place in [folder, "."]', "for place in places(folder)", "warning"),
    ],
)
def test_a_trainer_that_knows_the_ranks_may_average_its_results(tmp_path, before, after, severity):
    text = REPORTS.replace(before, after) if before else REPORTS
    files = {"train.py": text, "net.py": "from somewhere import *\n"}
    assert found(tmp_path, files) == [("CODE029", severity)]


TUNES = """\
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

torch.distributed.init_process_group("nccl")
model = DDP(torch.nn.Linear(2, 2).cuda())
for step in range(99):
    model(torch.ones(1, 2).cuda()).sum().backward()
torch.save(model.state_dict(), "last.pt")
"""
OTHERS = {"tools/train.py": "print()\n", "README.md": "torchrun --nproc_per_node=8 tools/train.py\n"}


@pytest.mark.parametrize(
    "before",
    ["# torchrun --nproc_per_node=8 tune.py\n", "import torch.multiprocessing as mp\nmp.spawn(print, nprocs=8)\n"],
)
def test_a_program_that_shows_its_start_needs_no_other_page(tmp_path, before):
    assert found(tmp_path, {"tools/tune.py": TUNES, **OTHERS}) == [("CODE029", "info")]
    assert found(tmp_path, {"tools/tune.py": before + TUNES, **OTHERS}) == [("CODE029", "warning")]


@pytest.mark.parametrize(
    ("command", "severity"),
    [
        ("srun -n $2 python train.py --lr 3", "info"),
        ('srun -n $2 python train.py --lr 3 "$@"', "warning"),
        ("srun -n $2 python train.py --lr 3 --encoder_weights runs", "warning"),
    ],
)
def test_arguments_of_a_launcher_give_a_program_no_options(tmp_path, command, severity):
    assert found(tmp_path, {"train.py": OPTION, "net.py": "print()\n", "run.sh": f"{command}\n"}) == [
        ("CODE001", severity)
    ]


@pytest.mark.parametrize(("more", "severity"), [("", "info"), (" ${CONFIG}", "warning")])
def test_commands_of_another_program_of_the_same_name_may_have_more(tmp_path, more, severity):
    files = {
        "vision/train.py": OPTION.replace("args =", "parser.set_defaults(**read())\nargs ="),
        "vision/run.sh": f"torchrun --nproc_per_node=8 train.py --lr 3{more}\n",
        "text/train.py": "print()\n",
        "text/run.sh": "torchrun --nproc_per_node=8 ${ROOT}/train.py ${CONFIG}\n",
    }
    assert found(tmp_path, files) == [("CODE001", severity)]


SECTION = """\
import torch
import yaml
from torch.nn.parallel import DistributedDataParallel as DDP

cfgs = Wrapped(yaml.safe_load(open(args.config)))
torch.distributed.init_process_group("nccl")
model = build().cuda()
if cfgs.saver.pretrain_model:
    model.load_state_dict(torch.load(cfgs.saver.pretrain_model))
model = DDP(model)
train(model)
"""


@pytest.mark.parametrize(
    ("entry", "severity"),
    [("", "info"), (" null  # later", "info"), (" ''", "info"), (" runs/last.pth", "warning")],
)
def test_an_entry_that_is_empty_in_all_configurations(tmp_path, entry, severity):
    files = {
        "train.py": SECTION,
        "net.py": "print()\n",
        "conf/a.yaml": "saver:\n  folder: runs\n  pretrain_model:\n",
        "conf/b.yaml": f"saver:\n  folder: runs\n  pretrain_model:{entry}\nlr: 3\n",
        "run.sh": "srun -n $2 python train.py --config $1\n",
    }
    assert found(tmp_path, files) == [("CODE001", severity)]


EVALUATES_LATER = """\
import argparse
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

def fit(model):
    model = DDP(model)
    model(torch.ones(2)).sum().backward()
    torch.save(model.state_dict(), "best.pth")

def evaluate(model):
    restore(model)
    score(model)

def restore(model):
    model.load_state_dict(torch.load("best.pth"))

parser = argparse.ArgumentParser()
parser.add_argument("--evaluate_only", action="store_true")
parser.add_argument("--lr", type=float)
args = parser.parse_args()
torch.distributed.init_process_group("nccl")
if args.evaluate_only:
    evaluate(build().cuda())
else:
    fit(build().cuda())
"""


@pytest.mark.parametrize(
    ("train", "files", "severity"),
    [
        (EVALUATES_LATER, {"run.sh": "torchrun --nproc_per_node=8 train.py --lr 3\n"}, "info"),
        (EVALUATES_LATER, {"run.sh": "torchrun --nproc_per_node=8 train.py --lr 3 --evaluate_only\n"}, "warning"),
        (f"{EVALUATES_LATER}restore(net)\n", {"run.sh": "torchrun --nproc_per_node=8 train.py --lr 3\n"}, "warning"),
        (
            EVALUATES_LATER,
            {
                "run.sh": "torchrun --nproc_per_node=8 train.py --lr 3\n",
                "more.py": "from train import evaluate\nevaluate(build())\n",
            },
            "warning",
        ),
    ],
)
def test_functions_that_only_an_option_reaches_which_no_start_gives(tmp_path, train, files, severity):
    assert [one for rule, one in found(tmp_path, {"train.py": train, **files}) if rule == "CODE001"] == [severity]
