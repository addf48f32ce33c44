"""Findings of rules over scripts are errors only where the fault is certain on several ranks."""

from __future__ import annotations

import pytest

from doctor.api import Script, Severity
from doctor.lint.engine.registry import builtin_rules

_IMPORTS = """\
import os
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

"""
_STEP = """\
from accelerate import Accelerator

accelerator = Accelerator()

def train(net, loader, optimizer):
    model = DDP(net)
    for batch in loader:
        try:
            model(batch).sum().backward()
        except RuntimeError as error:
            {handler}
        optimizer.step()
"""
_RANKS = """\
import json, yaml, torch

dist.init_process_group("nccl")
settings = yaml.safe_load(open("settings.yaml"))
{write}
"""
_WITH_LOADER = """\
train(model)
decoder = build(loader)
{first}
torch.save(decoder, "last.pt")
"""
_SAMPLER = """\
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("nccl")
world_size, local_rank = dist.get_world_size(), int(os.environ["LOCAL_RANK"])
sampler = DistributedSampler(dataset, num_replicas=world_size, rank=local_rank){hosts}
"""
_LOGGED = """\
import torch
import lightning as L

class Net(L.LightningModule):
    def {hook}(self, batch, batch_idx):
        loss = self.net(batch).mean()
        if torch.isfinite(loss):
            self.log("loss", loss, sync_dist=True{given})

L.Trainer(devices=4)
"""
_LOADERS = """\
import torch
from torch.utils.data import DataLoader

dist.init_process_group("nccl")
model = DDP(net)
if args.{option}:
    loader = DataLoader(data, sampler=torch.utils.data.DistributedSampler(data))
else:
    loader = DataLoader(data, shuffle=True)
for batch in loader:
    model(batch).sum().backward()
"""
_RECOMPUTED = """\
from torch.utils.checkpoint import checkpoint

class Block(torch.nn.Module):
    def forward(self, x):
        if {test}:
            return checkpoint(self.inner, x)
        return self.inner(x)

model = DDP(Block(), find_unused_parameters=True)
"""
_OPTIONAL = """\
parser = argparse.ArgumentParser()
parser.add_argument("--full_state", action="store_true")
args = parser.parse_args()
"""
_IF_ASKED = "if args.full_state:\n            print(accelerator.get_state_dict(net))"
_GATHERED = """\
scores = accelerator.gather(scores)
with open("scores.json", "w") as file:
    json.dump(scores, file)
"""
_AVERAGED = """\
evaluator = Evaluator(model, world_size=world_size)
scores = evaluator.run(loader)
with open("scores.json", "w") as file:
    json.dump(scores, file)
"""
_NUMBERS = """\
importance = {}
train(model)
for name, weight in model.named_parameters():
    importance[name] = (weight**2).mean().item()
torch.save(importance, "importance.pt")
"""
_EVALUATED = """\
from torch.utils.data import DataLoader

dist.init_process_group("nccl")
test_loader = DataLoader(test_set, {size}, sampler=shares, drop_last=True)
for batch in test_loader:
    print(model(batch))
"""
_SHARED_GPU = """\
import torch

dist.init_process_group("{backend}")
local_rank = int(os.environ["LOCAL_RANK"])
model = build().to("cuda:0")
"""
_COPIED = """\
with open(__file__) as source, open("runs/train.py", "w") as target:
    target.write(source.read())
"""
_DEBUGGED = """\
train(model)
if {test}:
    torch.save(model, "last.pt")
"""
_FILLED = """\
train(model)
kept = {{}}
kept["epoch"] = 3
kept["net"] = {value}
torch.save(kept, "last.pt")
"""
_FAILED = """\
try:
    train(model)
except {error}:
    torch.save(model.state_dict(), "last.pt")
"""
_HANDED_OVER = """\
def keep(found, path):
    torch.save(found, path)

train(model)
keep({saved}, "last.pt")
"""
_BAD_LOSS = """\
for batch in loader:
    loss = train(model, batch)
    if {test}:
        torch.save({saved}, "batch.pt")
        {leave}
"""
_EMBEDDINGS = """\
import safetensors.torch

train(model)
learned_embeds = accelerator.{made}
learned_embeds_dict = {{"token": learned_embeds.detach().cpu()}}
safetensors.torch.save_file(learned_embeds_dict, "embeddings.safetensors")
"""
_CACHE = """\
train(model)
if {test}:
    features = {made}
    torch.save(features, "features.pt")
else:
    features = torch.load("features.pt")
"""
_SCORES = """\
for epoch in range(9):
    train(model)
    best_acc = measure(model)
    print(accelerator.{averages}(best_acc))
    torch.save({{"epoch": epoch, "{key}": {value}}}, "last.pt")
"""
_LABELS = """\
table = frame["kind"].unique()
{more}
with open("label_names.bin", "wb") as file:
    pickle.dump({value}, file)
"""
_KEPT_SETTINGS = """\
used = copy.deepcopy({copied})
with open("used.json", "w") as file:
    json.dump({{"all": asdict(used)}}, file)
"""
_TEXT = """\
with open("settings.json") as file:
    text = file.{read}()
with open("out/settings.json", "w") as file:
    file.write(text)
"""
_ACCUMULATED = """\
def train(net, loader, optimizer):
    accumulation = {steps}
    if too_large(loader):
        accumulation = 8
    model = DDP(net)
    for step, batch in enumerate(loader):
        (model(batch).sum() / accumulation).backward()
        if step % accumulation == 0:
            optimizer.step()
"""
_ONE_RANK = """\
import torch
from accelerate import Accelerator

accelerator = Accelerator()

def main(net, x):
    model = DDP(net)
    if dist.get_rank() == 0:
        {call}
"""
_PREPARED = """\
from datasets import load_dataset
from huggingface_hub import snapshot_download

dist.init_process_group("nccl")
data = load_dataset(args.name)
if dist.get_rank() == 0:
    {work}
dist.barrier()
"""
_FIRST = """\
from accelerate import Accelerator

accelerator = Accelerator()
with accelerator.main_process_first():
    {call}
"""
_STOPPED = """\
import signal

stopping = False

def on_term(number, frame):
    global stopping
    stopping = True

signal.signal(signal.SIGTERM, on_term)

def train(net, loader, limit):
    model, began = DDP(net), time.time()
    for batch in loader:
        model(batch).sum().backward()
        if {test}:
            {leave}
"""
_ASKED = """\
class Saver:
    def may_save(self, model):
        if time.time() - self.last > self.interval:
            dist.barrier()
"""
_SAVED = "dist.barrier()\n            dist.barrier()\n            return"
_TRIED_SAVE: str = _STEP.format(handler="print(error)").replace(
    "model(batch).sum().backward()", "accelerator.save_state('last')"
)
_TRIED_GATHER: str = _STEP.format(handler="print(error)").replace(
    "model(batch).sum().backward()", "accelerator.gather(batch)"
)
_NOT_FINITE = """\
def train(net, loader):
    model = DDP(net)
    for step, batch in enumerate(loader):
        loss = model(batch).sum()
        loss.backward()
        if {test}:
            if not torch.isnan(loss):
                dist.barrier()
"""
_PLATEAU = """\
import torch
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("nccl")
model = DDP(build().cuda())
optimizer = torch.optim.Adam(model.parameters())
schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
loader = DataLoader(data, sampler=DistributedSampler(data))

def validate():
    total = 0.0
    for batch in loader:
        total += model(batch).sum().item()
    return total / len(loader)

schedule.step(validate())
"""
_STATISTICS = """\
norm_stats = {made}
with open("stats.bin", "wb") as file:
    pickle.dump(norm_stats, file)
"""
_WRITTEN_BELOW = """\
file = open("used.json", "w")
file.write(json.dumps({value}))
file.close()
"""
_PORT = 'os.environ["MASTER_PORT"] = "80000"\n'


_STEP_AND_TEST = """\
model = DDP(net)
for batch in loader:
    loss = model(batch).sum()
    loss.backward()
    optimizer.step()
    if {test}:
        {leave}
"""
_TEST_AND_STEP = """\
model = DDP(net)
for batch in loader:
    loss = model(batch).sum()
    if torch.isnan(loss):
        break
    loss.backward()
    optimizer.step()
"""
_SCALED = """\
model = DDP(net)
for batch in loader:
    loss = model(batch).sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    if torch.isnan(loss):
        break
"""


@pytest.mark.parametrize(
    ("id_", "text", "severity"),
    [
        ("CODE016", _STEP.format(handler='print("CUDA out of memory")'), Severity.WARNING),
        ("CODE016", _STEP.format(handler="print(error)"), Severity.WARNING),
        ("CODE016", _STOPPED.format(test="stopping", leave="break"), Severity.WARNING),
        ("CODE016", _STOPPED.format(test="time.time() - began > limit", leave="break"), Severity.ERROR),
        ("CODE008", _STOPPED.format(test="stopping", leave=_SAVED), Severity.WARNING),
        ("CODE008", _STOPPED.format(test="time.time() - began > limit", leave=_SAVED), Severity.ERROR),
        ("CODE008", _ASKED, Severity.WARNING),
        ("CODE029", _RANKS.format(write='train(model)\ntorch.save(model, "last.pt")'), Severity.WARNING),
        ("CODE029", _RANKS.format(write=_FILLED.format(value="model.module.state_dict()")), Severity.WARNING),
        (
            "CODE029",
            _RANKS.format(write=_WITH_LOADER.format(first="adam = Adam(decoder.parameters())")),
            Severity.WARNING,
        ),
        ("CODE029", _RANKS.format(write=_WITH_LOADER.format(first="adam = Adam(other.parameters())")), Severity.ERROR),
        ("CODE029", _RANKS.format(write=_FILLED.format(value="model(batch)")), Severity.ERROR),
        (
            "CODE029",
            _RANKS.format(write=_EMBEDDINGS.format(made="unwrap_model(net).get_input_embeddings().weight[3:9]")),
            Severity.WARNING,
        ),
        (
            "CODE029",
            _RANKS.format(write=_EMBEDDINGS.format(made="unwrap_model(net)(batch).embeddings")),
            Severity.ERROR,
        ),
        (
            "CODE029",
            _RANKS.format(
                write=_EMBEDDINGS.format(made="unwrap_model(net).weight[ids]\nlearned_embeds = learned_embeds[None]")
            ),
            Severity.WARNING,
        ),
        (
            "CODE029",
            _RANKS.format(write=_FILLED.format(value="encoder.text.embeddings.weight.data[ids]")),
            Severity.WARNING,
        ),
        ("CODE029", _RANKS.format(write=_FILLED.format(value="batch.weight[ids]")), Severity.ERROR),
        (
            "CODE029",
            _RANKS.format(write=_CACHE.format(test='not os.path.exists("features.pt")', made="convert(examples)")),
            Severity.WARNING,
        ),
        (
            "CODE029",
            _RANKS.format(write=_CACHE.format(test='not os.path.exists("features.pt")', made="convert(loader)")),
            Severity.ERROR,
        ),
        ("CODE029", _RANKS.format(write=_CACHE.format(test="args.again", made="convert(examples)")), Severity.ERROR),
        (
            "CODE029",
            _RANKS.format(write=_FILLED.format(value="FullyShardedDataParallel(model).state_dict()")),
            Severity.ERROR,
        ),
        ("CODE029", _RANKS.format(write=_HANDED_OVER.format(saved="model.state_dict()")), Severity.WARNING),
        ("CODE029", _RANKS.format(write=_HANDED_OVER.format(saved="predict(model)")), Severity.ERROR),
        ("CODE029", _RANKS.format(write='torch.save(features(model), "features.pt")'), Severity.WARNING),
        ("CODE029", _RANKS.format(write=_AVERAGED), Severity.INFO),
        ("CODE029", _RANKS.format(write=_AVERAGED.replace(", world_size=world_size", "")), Severity.WARNING),
        ("CODE029", _RANKS.format(write=_NUMBERS), Severity.WARNING),
        ("CODE029", _RANKS.format(write=_NUMBERS.replace(".item()", "")), Severity.WARNING),
        ("CODE029", _RANKS.format(write='train(model)\ntorch.save(tokenize(texts), "texts.pt")'), Severity.WARNING),
        (
            "CODE029",
            _RANKS.format(write='import numpy as np\ntrain(model)\nnp.save("a.npy", model(batch))'),
            Severity.ERROR,
        ),
        (
            "CODE029",
            _RANKS.format(write='import numpy as np\ntrain(model)\nnp.save("a.npy", accelerator.gather(model(batch)))'),
            Severity.WARNING,
        ),
        ("CODE029", _RANKS.format(write=_FAILED.format(error="Exception")), Severity.INFO),
        ("CODE029", _RANKS.format(write=_FAILED.format(error="KeyboardInterrupt")), Severity.WARNING),
        ("CODE029", _RANKS.format(write=_GATHERED), Severity.INFO),
        ("CODE029", _RANKS.format(write='json.dump(vars(args), open("args.json", "w"))'), Severity.INFO),
        (
            "CODE029",
            _RANKS.format(write='json.dump({**vars(args), "loss": loss}, open("a.json", "w"))'),
            Severity.WARNING,
        ),
        ("CODE029", _RANKS.format(write='json.dump(scores, open("scores.json", "w"))'), Severity.WARNING),
        ("CODE029", _RANKS.format(write='yaml.dump(settings, open("used.yaml", "w"))'), Severity.INFO),
        ("CODE029", _RANKS.format(write=_COPIED), Severity.INFO),
        ("CODE029", _RANKS.format(write=_COPIED.replace("source.read()", "str(loss)")), Severity.WARNING),
        ("CODE029", _RANKS.format(write=_DEBUGGED.format(test="args.debug")), Severity.INFO),
        ("CODE029", _RANKS.format(write=_DEBUGGED.format(test="not args.debug")), Severity.WARNING),
        ("CODE029", _RANKS.format(write=_DEBUGGED.format(test='os.path.exists("debug.pt")')), Severity.WARNING),
        (
            "CODE029",
            _RANKS.format(write=_BAD_LOSS.format(test="not math.isfinite(loss)", saved="model", leave="break")),
            Severity.INFO,
        ),
        (
            "CODE029",
            _RANKS.format(write=_BAD_LOSS.format(test="loss > 9", saved="batch", leave="sys.exit(1)")),
            Severity.INFO,
        ),
        (
            "CODE029",
            _RANKS.format(write=_BAD_LOSS.format(test="loss > 9", saved="batch", leave="raise ValueError(loss)")),
            Severity.INFO,
        ),
        (
            "CODE029",
            _RANKS.format(write=_BAD_LOSS.format(test="late", saved="model.state_dict()", leave="sys.exit(1)")),
            Severity.WARNING,
        ),
        (
            "CODE029",
            _RANKS.format(write=_BAD_LOSS.format(test="loss > 9", saved="batch", leave="sys.exit(0)")),
            Severity.ERROR,
        ),
        (
            "CODE029",
            _RANKS.format(write=_SCORES.format(averages="reduce", key="best_acc", value="best_acc")),
            Severity.INFO,
        ),
        (
            "CODE029",
            _RANKS.format(write=_SCORES.format(averages="trackers", key="best_acc", value="best_acc")),
            Severity.WARNING,
        ),
        (
            "CODE029",
            _RANKS.format(write=_SCORES.format(averages="trackers", key="features", value="best_acc")),
            Severity.ERROR,
        ),
        (
            "CODE029",
            _RANKS.format(write=_SCORES.format(averages="reduce", key="best_acc", value="model.state_dict()")),
            Severity.WARNING,
        ),
        ("CODE029", _RANKS.format(write=_LABELS.format(more="", value="sorted(class_names)")), Severity.INFO),
        (
            "CODE029",
            _RANKS.format(write=_LABELS.format(more="class_names.append(0)", value="class_names")),
            Severity.WARNING,
        ),
        (
            "CODE029",
            _RANKS.format(write=_LABELS.format(more="labels = predict(model)", value="labels")),
            Severity.WARNING,
        ),
        ("CODE029", _RANKS.format(write=_KEPT_SETTINGS.format(copied="config")), Severity.INFO),
        ("CODE029", _RANKS.format(write=_KEPT_SETTINGS.format(copied="history")), Severity.WARNING),
        ("CODE029", _RANKS.format(write=_TEXT.format(read="read")), Severity.INFO),
        ("CODE029", _RANKS.format(write=_TEXT.format(read="evaluate")), Severity.WARNING),
        ("CODE029", _RANKS.format(write=_STATISTICS.format(made="measure(data_set)")), Severity.INFO),
        ("CODE029", _RANKS.format(write=_STATISTICS.format(made="measure(train_loader)")), Severity.WARNING),
        ("CODE029", _RANKS.format(write=_WRITTEN_BELOW.format(value="vars(args)")), Severity.INFO),
        ("CODE029", _RANKS.format(write=_WRITTEN_BELOW.format(value="history")), Severity.WARNING),
        ("CODE007", _PLATEAU, Severity.ERROR),
        ("CODE016", _STEP_AND_TEST.format(test="torch.isnan(loss)", leave="break"), Severity.WARNING),
        ("CODE016", _STEP_AND_TEST.format(test="not math.isfinite(loss.item())", leave="break"), Severity.WARNING),
        ("CODE016", _STEP_AND_TEST.format(test="loss > 5", leave="break"), Severity.ERROR),
        ("CODE016", _TEST_AND_STEP, Severity.ERROR),
        ("CODE016", _SCALED, Severity.ERROR),
        ("CODE016", _TRIED_SAVE, Severity.INFO),
        ("CODE016", _TRIED_GATHER, Severity.INFO),
        ("CODE016", _TRIED_GATHER.replace("accelerator.g", "prepare(net); accelerator.g"), Severity.WARNING),
        ("CODE008", _NOT_FINITE.format(test="step % 100 == 0"), Severity.INFO),
        ("CODE008", _NOT_FINITE.format(test="args.checks"), Severity.WARNING),
        ("CODE010", _LOADERS.format(option="balanced"), Severity.WARNING),
        ("CODE018", _RECOMPUTED.format(test="self.training"), Severity.ERROR),
        ("CODE018", _RECOMPUTED.format(test="self.use_checkpoint"), Severity.WARNING),
        ("CODE032", _ACCUMULATED.format(steps=2), Severity.WARNING),
        ("CODE032", _ACCUMULATED.format(steps=1), Severity.INFO),
        ("CODE005", _ONE_RANK.format(call="print(accelerator.get_state_dict(net))"), Severity.INFO),
        ("CODE005", _OPTIONAL + _ONE_RANK.format(call=_IF_ASKED), Severity.INFO),
        ("CODE005", _ONE_RANK.format(call="print(model(x))"), Severity.INFO),
        (
            "CODE005",
            _ONE_RANK.format(call="print(model(x))").replace("DDP(net)", "DDP(torch.nn.BatchNorm1d(8))"),
            Severity.WARNING,
        ),
        ("CODE005", _ONE_RANK.format(call="with torch.no_grad():\n            print(model(x))"), Severity.INFO),
        ("CODE005", _FIRST.format(call="accelerator.gather(x)"), Severity.ERROR),
        ("CODE005", _FIRST.format(call="accelerator.wait_for_everyone()"), Severity.WARNING),
        ("CODE030", _PREPARED.format(work="data.map(tokenize)"), Severity.INFO),
        ("CODE030", _PREPARED.format(work="snapshot_download(args.name)"), Severity.WARNING),
        ("CODE008", _LOGGED.format(hook="validation_step", given=", on_step=False"), Severity.INFO),
        ("CODE008", _LOGGED.format(hook="validation_step", given=""), Severity.INFO),
        ("CODE008", _LOGGED.format(hook="validation_step", given=", on_step=True"), Severity.WARNING),
        ("CODE008", _LOGGED.format(hook="training_step", given=""), Severity.WARNING),
        ("CODE008", _LOGGED.format(hook="on_validation_epoch_end", given=", on_step=False"), Severity.WARNING),
        ("CODE012", _SAMPLER.format(hosts='\nnodes = int(os.environ["NNODES"])'), Severity.ERROR),
        ("CODE012", _SAMPLER.format(hosts="  # torchrun --nnodes 2"), Severity.WARNING),
        ("CODE012", _SAMPLER.format(hosts=""), Severity.WARNING),
        ("CODE015", _EVALUATED.replace("test", "val").format(size=8), Severity.INFO),
        ("CODE015", _EVALUATED.format(size=2), Severity.INFO),
        ("CODE015", _EVALUATED.format(size=3), Severity.WARNING),
        ("CODE015", _EVALUATED.format(size=8), Severity.WARNING),
        ("CODE002", _SHARED_GPU.format(backend="nccl"), Severity.ERROR),
        ("CODE002", _SHARED_GPU.format(backend="gloo"), Severity.WARNING),
        ("NCCL001", 'os.environ["CUDA_VISIABLE_DEVICES"] = "0"', Severity.INFO),
        ("NCCL001", 'os.environ["CUDA_VISIABLE_DEVICES"] = "1"', Severity.WARNING),
        ("NCCL001", 'dist.init_process_group("nccl")\nos.environ["CUDA_VISIABLE_DEVICES"] = "0"', Severity.WARNING),
        ("ENV007", _PORT + 'dist.init_process_group("nccl")\n', Severity.ERROR),
        ("ENV007", _PORT + "with Engine() as engine:\n    train(engine)\n", Severity.WARNING),
    ],
)
def test_what_depends_on_more_than_ranks_is_no_error(id_, text, severity):
    rule = next(one for one in builtin_rules() if one.id == id_ and issubclass(Script, one.reads))
    imports = "import time\n" + _IMPORTS
    found = [one.severity or rule.severity for one in rule.violations(Script("train.py", imports + text))]
    assert found == [severity]


def test_the_cells_of_a_notebook_share_one_gpu():
    rule = next(one for one in builtin_rules() if one.id == "CODE003")
    text = 'import torch\n\ntorch.distributed.init_process_group("nccl")\nmodel = torch.nn.Linear(8, 8).cuda()\n'
    assert [len(list(rule.violations(Script(name, text)))) for name in ("train.py", "train.ipynb")] == [1, 0]


@pytest.mark.parametrize(
    ("rank", "severity"),
    [("dist.get_rank()", None), ("tp_rank", Severity.INFO), ("mpu.get_data_parallel_rank()", Severity.INFO)],
)
def test_a_rank_in_a_part_of_the_job_is_not_certain(rank, severity):
    (rule,) = (one for one in builtin_rules() if one.id == "CODE005")
    script = Script("train.py", _IMPORTS + f"if {rank} == 0:\n    dist.barrier()\n")
    assert [hit.severity for hit in rule.violations(script)] == [severity]


@pytest.mark.parametrize(
    ("test", "severity"),
    [
        ("rank != 0", None),
        ("distributed and rank != 0", None),
        ("stops and rank == 0 and stops(args)", None),
        ("args.only_test and rank == 0", Severity.INFO),
    ],
)
def test_a_rank_that_leaves_only_if_it_is_asked_to_is_not_certain(test, severity):
    (rule,) = (one for one in builtin_rules() if one.id == "CODE005")
    text = f"def main(args, rank):\n    if {test}:\n        return\n    dist.barrier()\n"
    script = Script("train.py", _IMPORTS + text)
    assert [hit.severity for hit in rule.violations(script)] == [severity]


ONE_HOST = """\
import os
import torch

def setup(rank, world_size):
    os.environ["MASTER_ADDR"] = "{address}"
    torch.distributed.init_process_group("nccl", rank=rank, world_size=world_size)

def train(rank, world_size):
    setup(rank, world_size)

train(int(os.environ["LOCAL_RANK"]), {size})
"""


@pytest.mark.parametrize(
    ("address", "size", "severity"),
    [
        ("localhost", "torch.cuda.device_count()", Severity.INFO),
        ("10.1.1.4", "torch.cuda.device_count()", None),
        ("localhost", "int(os.environ['WORLD_SIZE'])", None),
        ("localhost", "torch.cuda.device_count() * int(os.environ['NNODES'])", None),
        ("localhost", "count()", None),
    ],
)
def test_the_address_of_the_host_fits_a_script_that_can_only_be_of_one_host(address, size, severity):
    rule = next(one for one in builtin_rules() if one.id == "CODE025")
    script = Script("train.py", ONE_HOST.format(address=address, size=size))
    assert [one.severity for one in rule.violations(script)] == [severity]


@pytest.mark.parametrize(
    ("variable", "severity"),
    [
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", Severity.INFO),
        ("NCCL_BLOCKING_WAIT", Severity.INFO),
        ("NCCL_MIN_NCHANNELS", Severity.INFO),
        ("NCCL_SOCKET_IFNAME", None),
        ("NCCL_IB_HCA", None),
        ("NCCL_P2P_DISABLE", None),
    ],
)
def test_a_job_that_starts_does_without_a_late_setting(variable, severity):
    text = f"""import os
import torch.distributed as dist

dist.init_process_group("nccl")
dist.barrier()
os.environ["{variable}"] = sys.argv[1]
"""
    rule = next(one for one in builtin_rules() if one.id == "CODE026")
    assert [hit.severity for hit in rule.violations(Script("train.py", text))] == [severity]


@pytest.mark.parametrize(("value", "severity"), [("0", Severity.INFO), ("1", None)])
def test_a_late_default_costs_nothing(value, severity):
    text = f"""import os
import torch.distributed as dist

dist.init_process_group("nccl")
dist.barrier()
os.environ["NCCL_IB_DISABLE"] = "{value}"
"""
    rule = next(one for one in builtin_rules() if one.id == "CODE026")
    assert [hit.severity for hit in rule.violations(Script("train.py", text))] == [severity]


@pytest.mark.parametrize(("backend", "severity"), [("gloo", Severity.INFO), ("nccl", None)])
def test_a_download_is_short_for_the_timeout_of_gloo(backend, severity):
    text = f"""import torch.distributed as dist
from modelscope import snapshot_download

dist.init_process_group(backend="{backend}")
if dist.get_rank() == 0:
    snapshot_download(name)
dist.barrier()
"""
    rule = next(one for one in builtin_rules() if one.id == "CODE030")
    assert [hit.severity for hit in rule.violations(Script("train.py", text))] == [severity]


@pytest.mark.parametrize(
    ("rest", "severity"),
    [
        ('model.to("cuda").eval()', Severity.INFO),
        ('model = torch.nn.DataParallel(model.to("cuda"))', None),
        ('AutoModel.from_pretrained(name, device_map="auto").to("cuda")', None),
        ('model.to("cuda:1")', None),
        ("evaluate(model)", None),
    ],
)
def test_a_list_of_which_the_first_gpu_is_read_is_enough_for_one_process(rest, severity):
    rule = next(one for one in builtin_rules() if one.id == "GPU003")
    text = f'import os\n\nos.environ["CUDA_VISIBLE_DEVICES"] = "4.5.6.7"\n{rest}\n'
    assert [hit.severity for hit in rule.violations(Script("predict.py", text))] == [severity]


@pytest.mark.parametrize(("count", "severity"), [(4, Severity.INFO), (48, Severity.WARNING)])
def test_ranks_that_map_a_dataset_each_only_repeat_work_unless_cpus_are_short(count, severity):
    text = (
        "# torchrun --nproc-per-node 8 train.py\nfrom datasets import load_dataset\n\n"
        f'data = load_dataset("text").map(tokenize, num_proc={count})\n'
    )
    rule = next(one for one in builtin_rules() if one.id == "CODE029")
    assert [one.severity for one in rule.violations(Script("train.py", text))] == [severity]


_GATHERED = """\
import torch
from comm import all_gather
from functools import reduce

def evaluate(model, loader):
    return {call}

dist.init_process_group("nccl")
model = DDP(build())
train(model, torch.optim.SGD(model.parameters(), 0.1))
result = evaluate(model, loader)
torch.save(result, "result.pt")
"""


@pytest.mark.parametrize(
    ("call", "severity"),
    [
        ("all_gather(measure(model, loader))", Severity.WARNING),
        ("measure(model, loader)", None),
        ("reduce(max, measure(model, loader))", None),
    ],
)
def test_results_that_an_imported_function_gathers_are_the_same_on_all_ranks(call, severity):
    rule = next(one for one in builtin_rules() if one.id == "CODE029")
    found = rule.violations(Script("train.py", _IMPORTS + _GATHERED.format(call=call)))
    assert [one.severity for one in found] == [severity]
