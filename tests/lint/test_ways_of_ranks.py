"""Faults in code that ranks never come to: other branches, functions of other programs, options that nothing gives; and
of models that a program discards."""

from __future__ import annotations

import pytest

from doctor.lint.engine.registry import Rulebook, builtin_rules
from tests.lint.linted import severities_in


def found(folder, rule, files):
    book = Rulebook(tuple(one for one in builtin_rules() if one.id == rule))
    return [severity for _, severity in severities_in(folder, files, book, preview=True)]


SHARDS = """\
import os

import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from work.setup import set_up

def evaluate(settings, model, loader):
    for batch in loader:
        {test}
            batch = batch.to(int(os.environ["LOCAL_RANK"]))
        else:
            batch = batch.to("cuda:0")
        print(model(batch), torch.distributed.is_initialized())

def main(args, model, loader):
    if args.use_fsdp:
        set_up()
        model = FSDP(model, device_id=int(os.environ["LOCAL_RANK"]))
    {more}
    evaluate(args, model, loader)

main(read(), build(), load())
"""


@pytest.mark.parametrize(
    ("test", "more", "expected"),
    [
        ("if settings.use_fsdp:", "", []),
        ("if settings.training.use_fsdp:", "", []),
        ("if settings.is_large:", "", ["error"]),
        ("if settings.use_fsdp:", "rank = int(os.environ['RANK'])", ["error"]),
        ("if settings.use_fsdp:", "init_distributed_mode(args)", ["error"]),
        ("if settings.use_fsdp:", "torch.distributed.init_process_group('nccl')", ["error"]),
    ],
)
def test_the_other_branch_of_the_option_that_reads_what_launchers_set(tmp_path, test, more, expected):
    assert found(tmp_path, "CODE002", {"train.py": SHARDS.format(test=test, more=more)}) == expected


JOINS = """\
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from work import app, build, train

def main():
    dist.init_process_group("nccl")
    rank = dist.get_rank() % torch.cuda.device_count()
    model = DDP(build().to(rank), device_ids=[rank])
    train(model){more}

{decorator}def predict(path):
    model = build().to("cuda")
    return model(torch.load(path))

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize(
    ("more", "decorator", "other", "expected"),
    [
        ("", "", "", []),
        ("", "", "from train import predict\n\nprint(predict('a.pt'))\n", []),
        ("", "", "import train\n\nprint(train.predict('a.pt'))\n", []),
        ("; predict('a.pt')", "", "", ["error"]),
        ("; globals()[args.after]('a.pt')", "", "", ["error"]),
        ("", "@app.command\n", "", ["error"]),
        (
            "",
            "",
            "from train import main, predict\nfrom torch import distributed\n\nmain()\npredict('a.pt')\n",
            ["error"],
        ),
    ],
)
def test_a_function_that_the_program_of_the_ranks_never_names(tmp_path, more, decorator, other, expected):
    files = {"train.py": JOINS.format(more=more, decorator=decorator), "show.py": other}
    assert found(tmp_path, "CODE003", files) == expected


STAGES = """\
import torch.distributed as dist
from work.settings import Base

class Stages(Base):
    def enters(self, stage, everywhere=False):
        is_on = self.first <= stage and ({test})
        if is_on and dist.get_world_size() > 1:
            dist.barrier()
        return is_on
"""
STARTS = (
    "from stages import Stages\n\nif Stages().enters(1, {}):\n    train()\nif Stages().enters(2, {}):\n    test()\n"
)


@pytest.mark.parametrize(
    ("test", "first", "second", "is_found"),
    [
        ("everywhere or dist.get_rank() == 0", "everywhere=True", "everywhere=True", False),
        ("dist.get_rank() == 0 or everywhere", "everywhere=True", "everywhere=True", False),
        ("everywhere or dist.get_rank() == 0", "everywhere=True", "everywhere=False", True),
        ("everywhere or dist.get_rank() == 0", "everywhere=True", "", True),
        ("everywhere or dist.get_rank() == 0", "everywhere=asked", "everywhere=True", True),
        ("everywhere and dist.get_rank() == 0", "everywhere=True", "everywhere=True", True),
    ],
)
def test_every_call_lets_all_ranks_in(tmp_path, test, first, second, is_found):
    files = {"stages.py": STAGES.format(test=test), "run.py": STARTS.format(first, second)}
    assert bool(found(tmp_path, "CODE005", files)) is is_found


SPREADS = """\
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer
{more}
accelerator = Accelerator()
tokenizer = AutoTokenizer.from_pretrained("gpt2")
model = AutoModelForCausalLM.from_pretrained("gpt2", device_map={device_map})
trainer = Trainer(model=model, train_dataset=load(tokenizer))
trainer.train()
if accelerator.is_main_process:
    print(trainer.evaluate())
"""
ONE_OR_MORE = '"balanced" if torch.cuda.device_count() > 1 else None'


@pytest.mark.parametrize(
    ("device_map", "more", "expected"),
    [
        ('"auto"', "", ["info"]),
        (ONE_OR_MORE, "", ["info"]),
        ("None", "", ["error"]),
        ('{"": accelerator.process_index}', "", ["error"]),
        ('"auto"', 'import os\nos.environ["ACCELERATE_BYPASS_DEVICE_MAP"] = "true"\n', ["error"]),
        ('"auto"', 'reference = AutoModelForCausalLM.from_pretrained("gpt2")\n', ["error"]),
    ],
)
def test_accelerate_refuses_a_model_over_several_gpus(tmp_path, device_map, more, expected):
    assert found(tmp_path, "CODE005", {"train.py": SPREADS.format(device_map=device_map, more=more)}) == expected


CHECKPOINTS = """\
import argparse

import torch
from torch.utils.checkpoint import checkpoint

parser = argparse.ArgumentParser()
parser.add_argument(
    "--train_encoder",
    action="store_true",
    help="also the encoder",
)

def main(args, net):
    if args.train_encoder:
        checkpoint(net.encoder, torch.ones(2), use_reentrant=True)
    torch.distributed.init_process_group("nccl")
    torch.nn.parallel.DistributedDataParallel(net, find_unused_parameters=True)
"""
LAUNCHES = "from train import main, parser\n\nmain(parser.parse_args([{}]), build())\n"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, ["error"]),
        ({"run.sh": "torchrun train.py --lr 3\n"}, []),
        ({"launch.py": LAUNCHES.format("'--lr=3'")}, ["info"]),
        ({"launch.py": LAUNCHES.format("'--lr=3', '--train_encoder'")}, ["error"]),
        ({"launch.py": LAUNCHES.format("'--lr=3', '--train-encoder'")}, ["error"]),
        ({"launch.py": LAUNCHES.format("")}, ["error"]),
        ({"run.sh": "torchrun train.py --lr 3\n", "all.sh": "torchrun train.py --train_encoder\n"}, ["error"]),
    ],
)
def test_checkpointing_below_an_option_that_no_start_gives(tmp_path, files, expected):
    assert found(tmp_path, "CODE018", {"train.py": CHECKPOINTS, **files}) == expected


MEASURES = """\
import time
import torch
from work import build, evaluate, loss_of

def {name}({given}, images, target):
    {made}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    began = time.time()
    for _ in range(100):
        loss_of(net(images), target).backward()
        optimizer.step()
    print(time.time() - began)
    {after}

def main(net):
    net.eval()
"""


@pytest.mark.parametrize(
    ("name", "given", "made", "after", "severity"),
    [
        ("benchmark_steps", "size", "net = build(size)", "pass", "info"),
        ("model_speed_test", "size", "net = build(size)", "return", "info"),
        ("measure_speed", "size", "net = build(size)", "pass", "info"),
        ("train", "size", "net = build(size)", "pass", "error"),
        ("speed_up", "size", "net = build(size)", "pass", "error"),
        ("benchmark_steps", "net", "pass", "pass", "error"),
        ("benchmark_steps", "size", "net = build(size)", "return net", "error"),
        ("benchmark_steps", "size", "net = build(size)", "torch.save(net.state_dict(), 'last.pt')", "error"),
    ],
)
def test_gradients_of_a_model_that_is_made_to_be_measured(tmp_path, name, given, made, after, severity):
    text = MEASURES.format(name=name, given=given, made=made, after=after)
    assert found(tmp_path, "CODE042", {"train.py": text}) == [severity]


TIMES = """\
import torch
from time import time

dist.init_process_group("nccl")
model = torch.nn.parallel.DistributedDataParallel(build())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(100):
    x = {x}
    began = {clock}
    criterion(model(x), x).backward()
    optimizer.step()
    print({clock} - began)
{after}
"""


@pytest.mark.parametrize(
    ("x", "clock", "after", "severity"),
    [
        ("torch.rand(8, 8)", "time()", "", "info"),
        ("next(batches) + torch.rand(8, 8)", "time()", "", "error"),
        ("batches[step]", "time()", "", "error"),
        ("torch.rand(8, 8)", "step", "", "error"),
        ("torch.rand(8, 8)", "time()", "torch.save(model.state_dict(), 'last.pt')", "error"),
    ],
)
def test_gradients_of_timed_steps_on_random_numbers(tmp_path, x, clock, after, severity):
    text = TIMES.format(x=x, clock=clock, after=after)
    assert found(tmp_path, "CODE042", {"train.py": text}) == [severity]


ALONE = """\
import argparse
import torch

def run(args, model):
    if not args.standalone:
        model = torch.nn.parallel.DistributedDataParallel(model)
    pred = train(model, torch.optim.SGD(model.parameters(), 0.1))
    if {test}:
        torch.save(pred, "emb.pt")

def main(args):
    if not args.standalone:
        torch.distributed.init_process_group(backend="gloo")
    {more}
    run(args, build())

parser = argparse.ArgumentParser()
parser.add_argument("--standalone", action="store_true")
parser.add_argument("--keep", action="store_true")
main(parser.parse_args())
"""


@pytest.mark.parametrize(
    ("test", "more", "expected"),
    [
        ("args.standalone", "", []),
        ("not args.standalone", "", ["error"]),
        ("args.keep", "", ["error"]),
        ("args.standalone", "args.standalone = False", ["error"]),
        ("args.standalone", "print(torch.distributed.get_rank())", ["error"]),
    ],
)
def test_a_switch_with_which_a_program_makes_no_ranks(tmp_path, test, more, expected):
    assert found(tmp_path, "CODE029", {"train.py": ALONE.format(test=test, more=more)}) == expected


USES_CURRENT_GPU = """\
import os

import torch
from torch.nn.parallel import DistributedDataParallel as DDP

torch.distributed.init_process_group("nccl")
print("rank", os.environ["LOCAL_RANK"])
model = DDP(build().cuda())
model(torch.ones(2).cuda()).sum().backward()
"""


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("python -m torch.distributed.launch --use_env train.py --lr 3", "info"),
        ("torchrun --nnodes=4 --rdzv-endpoint=$HEAD train.py", "info"),
        ("torchrun --nproc_per_node=8 train.py", "error"),
        ("torchrun --nproc_per_node=$GPUS train.py", "error"),
        ("srun torchrun --nnodes=4 train.py", "error"),
        ("deepspeed train.py", "error"),
    ],
)
def test_one_process_on_each_host_may_use_its_first_gpu(tmp_path, command, expected):
    files = {"train.py": USES_CURRENT_GPU, "net.py": "print()\n", "README.md": f"```bash\n{command}\n```\n"}
    assert found(tmp_path, "CODE003", files) == [expected]


def test_another_command_starts_several_on_a_host(tmp_path):
    files = {"train.py": USES_CURRENT_GPU, "net.py": "print()\n", "README.md": "```bash\ntorchrun train.py\n```\n"}
    assert found(tmp_path, "CODE003", files | {"run.sh": "torchrun --nproc_per_node=8 train.py\n"}) == ["error"]
