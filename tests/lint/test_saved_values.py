"""Checkpoints that another program of the project saves: what it saves decides where they are loaded."""

from __future__ import annotations

import time

import pytest

from doctor.core.settings import Settings
from doctor.lint.engine.registry import Rulebook, builtin_rules
from doctor.lint.engine.releases import Releases
from doctor.lint.engine.runner import LintRequest, build_report, lint_paths
from tests.lint.linted import severities_in

BOOK = Rulebook(tuple(one for one in builtin_rules() if one.id == "CODE001"))
LOADS = """\
import os
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

torch.distributed.init_process_group("nccl")
model = build().cuda()
state = torch.load(os.path.join("runs", "model_state.pt"))
model.load_state_dict(state)
model = DDP(model)
train(model)
"""
CONVERTS = """\
import torch
import torchvision

net = torchvision.models.resnet18()
weights = net.state_dict()
torch.save(weights, "runs/model_state.pt")
"""
FITS = """\
import torch
import lightning as L

def main(net):
    trainer = L.Trainer(accelerator="gpu")
    trainer.fit(net)
    torch.save(net.state_dict(), "model_state.pt")
"""
COUNTS = """\
import torch

for step in range(100):
    loss = evaluate()
    torch.save({"step": step, "loss": loss.item()}, f"{folder}/model_state.pt")
"""


KEEPS = """\
import torch

def save(step, losses, value):
    torch.save({"step": step, "losses": losses, "value": value}, "model_state.pt")

def main(model, loader):
    model.cuda()
    losses = []
    for step, batch in enumerate(loader):
        loss = model(batch).mean()
        losses.append(loss.item())
        save(step, losses, loss.item())
"""
MOVES = """\
import torch

def main(model):
    state = model.cuda().state_dict()
    for name in state:
        state[name] = state[name].cpu()
    torch.save(state, "model_state.pt")
"""


EXTRACTS = """\
import torch

def extract(source="bert/pytorch_model.bin", target="runs/model_state.pt"):
    state, kept = torch.load(source), {}
    for name in state:
        if name.startswith("embeddings."):
            kept[name] = state[name]
    torch.save(kept, target)

def train(model):
    model.cuda()
"""
COLLECTS = """\
import torch

def states(model):
    found = {}
    for name, one in model.cuda().named_parameters():
        if one.requires_grad:
            found[name] = one.cpu()
    return found

def main(model, path):
    torch.save({"model": states(model)}, path)
"""


@pytest.mark.parametrize(
    ("saver", "is_found"),
    [
        ("pass\n", True),
        (EXTRACTS, False),
        (EXTRACTS.replace('"runs/model_state.pt"', "None"), True),
        (EXTRACTS.replace("state[name]\n", "state[name].cuda()\n"), True),
        (EXTRACTS + "\nextract(target='other.pt')\n", True),
        (COLLECTS, False),
        (COLLECTS.replace("one.cpu()", "one.detach().to('cpu').clone()  # on any machine"), False),
        (COLLECTS.replace("one.cpu()", "one.clone().detach().cpu()"), False),
        (COLLECTS.replace("one.cpu()", "one.clone().detach()"), True),
        (COLLECTS.replace("one.cpu()", "one"), True),
        (COLLECTS.replace("one.cpu()", "one.cpu().cuda()"), True),
        (CONVERTS, False),
        (CONVERTS.replace("resnet18()", "resnet18().cuda()"), True),
        (CONVERTS.replace("model_state", "another"), True),
        (FITS, False),
        (KEEPS, False),
        (KEEPS.replace("losses, loss.item()", "losses, loss"), True),
        (KEEPS.replace("append(loss.item())", "append(loss)"), True),
        (MOVES, False),
        (MOVES.replace(".cpu()", ".half()"), True),
        (FITS.replace("    trainer.fit(net)\n", "    net.cuda()\n"), True),
        (COUNTS, False),
        ("device = 'cuda'\n" + COUNTS, False),
        ("device = 'cuda'\n" + COUNTS.replace("loss.item()", "loss"), True),
        ("def broken(:\n" + COUNTS, True),
    ],
)
def test_what_another_program_saves_decides(tmp_path, saver, is_found):
    (tmp_path / "train.py").write_text(LOADS)
    (tmp_path / "prepare.py").write_text(saver)
    asked = LintRequest(BOOK, Settings(preview=True), {one.id: one.family for one in BOOK.rules}, Releases({}))
    report = build_report(lint_paths([tmp_path], asked), asked, started=time.time())
    assert not [result for result in report.results if result.crash]
    assert bool([one for result in report.results for one in result.findings]) == is_found


ADAPTS = """\
import torch

class Adapter:
    def delta(self, device):
        found = {"embedding": {}, "net": {}}
        found["embedding"]["new"] = self.embedding.weight[self.new].detach().cpu()
        for name, one in self.net.to(device).named_parameters():
            found["net"][name] = one.cpu().clone()
        return found
"""
ENDS = """\
path = os.path.join("runs", f"{kind}-{step}.pth")
save_on_main({"params": unwrap(model).delta("cuda")}, path)
model.load_state_dict(torch.load(path))
"""


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("", "", []),
        ("one.cpu().clone()", "one.to('cpu')", []),
        ("one.cpu().clone()", "one.clone()", ["warning"]),
        ("one.cpu().clone()", "one.cpu().to(device)", ["warning"]),
        ("return found", "return found, self.net.state_dict()", ["warning"]),
        ("        for name", "        found['net'].update(self.net.state_dict())\n        for name", ["warning"]),
        ("def delta", "@on_gpu\n    def delta", ["warning"]),
        ("return found", "return self.delta(device)", ["warning"]),
    ],
)
def test_a_method_that_puts_what_it_returns_on_the_cpu(tmp_path, old, new, expected):
    files = {"train.py": LOADS.partition("state = ")[0] + ENDS, "adapter.py": ADAPTS.replace(old, new)}
    assert [severity for _, severity in severities_in(tmp_path, files, BOOK)] == expected


READS = """\
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

torch.distributed.init_process_group("nccl")
model = DDP(build().cuda())
checkpoint = torch.load(args.resume_path)
start, best = checkpoint["epoch"], checkpoint["best_fid"]
{more}
train(model, start, best)
"""
SEARCHES = """\
import torch

def search(space, loader):
    space.cuda()
    epoch, score = 3, measure(space, loader)
    nodes, code = space.decode({given})
    torch.save({{"epoch": epoch, "best_fid": score, "nodes": nodes, {entry}}}, f"{{folder}}/{{epoch}}.pth")
"""


@pytest.mark.parametrize(
    ("more", "given", "entry", "expected"),
    [
        ("", "", '"code": code', []),
        ("", "", '"net": space.state_dict()', ["warning"]),
        ("", "latents", '"code": code', ["warning"]),
        ("load(checkpoint)", "", '"code": code', ["warning"]),
        ('model.load_state_dict(checkpoint["net"])', "", '"code": code', ["warning"]),
    ],
)
def test_entries_that_the_project_saves_without_tensors(tmp_path, more, given, entry, expected):
    files = {"train.py": READS.format(more=more), "search.py": SEARCHES.format(given=given, entry=entry)}
    assert [severity for _, severity in severities_in(tmp_path, files, BOOK)] == expected


ON_CPU = """\
import torch as th
from torch.nn.parallel import DistributedDataParallel

def train(rank, device, is_first):
    \"\"\"device: the GPU device to train on\"\"\"
    th.distributed.init_process_group({backend}, rank=rank, world_size=4)
    model = DistributedDataParallel(build().to(device))
    if not is_first:
        checkpoint = th.load("model.pt")
        model.load_state_dict(checkpoint["model"])
    fit(model).backward()
    th.save({{"model": model.state_dict()}}, "{name}")

run(train, args=(th.device({device}), True))
"""


@pytest.mark.parametrize(
    ("backend", "device", "name", "expected"),
    [
        ('"gloo"', '"cpu"', "model.pt", []),
        ("backend", '"cpu"', "model.pt", ["warning"]),
        ('"gloo"', '"cuda"', "model.pt", ["warning"]),
        ('"gloo"', '"cpu"', "other.pt", ["warning"]),
    ],
)
def test_ranks_over_gloo_that_train_on_the_cpu(tmp_path, backend, device, name, expected):
    files = {"train.py": ON_CPU.format(backend=backend, device=device, name=name)}
    assert [severity for _, severity in severities_in(tmp_path, files, BOOK)] == expected


RESNETS = """\
import os
import torch
import torchvision.models as models
from torch.nn.parallel import DistributedDataParallel as DDP

torch.distributed.init_process_group("nccl")
path = os.path.join(args.models, "pretrained_models", args.net)
if "50" in path:
    model = models.resnet50(pretrained=False)
elif "18" in path:
    model = models.resnet18(pretrained=False)
else:
    model = None
model.load_state_dict(torch.load(path))
train(DDP(model.cuda()))
"""


@pytest.mark.parametrize(
    ("old", "new", "severity"),
    [
        ("", "", "info"),
        ("torch.load(path)", "torch.load(path), strict=False", "warning"),
        ("torch.load(path)", "torch.load(path)['model']", "warning"),
        ("pretrained_models", "runs", "warning"),
        ("resnet18(pretrained=False)", "resnet18(num_classes=10)", "warning"),
        ("    model = None\n", "    model = build()\n", "warning"),
        ("model.load", "model.fc = torch.nn.Linear(512, 10)\nmodel.load", "warning"),
        ("import torchvision.models as", "from . import", "warning"),
    ],
)
def test_a_model_of_torchvision_may_get_published_weights(tmp_path, old, new, severity):
    files = {"train.py": RESNETS.replace(old, new)}
    assert severities_in(tmp_path, files, BOOK, preview=True) == [("CODE001", severity)]


RESUMES_OPTIMIZER = """\
import os
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

torch.distributed.init_process_group("nccl")
model = build().cuda()
optimizer = torch.optim.AdamW(model.parameters())
optimizer.load_state_dict(torch.load(os.path.join(args.folder, "optimizer.pt")))
model = DDP(model)
train(model, optimizer)
{save}torch.save(optimizer.state_dict(), os.path.join(args.output, "{name}"))
"""


@pytest.mark.parametrize(
    ("save", "name", "severity"),
    [
        ("# ", "optimizer.pt", "info"),
        ("", "optimizer.pt", "warning"),
        ("# ", "scheduler.pt", "warning"),
        ("# earlier: ", "optimizer.pt", "info"),
    ],
)
def test_a_file_whose_save_is_in_a_comment_is_from_elsewhere(tmp_path, save, name, severity):
    train = RESUMES_OPTIMIZER.format(save=save, name=name)
    assert severities_in(tmp_path, {"train.py": train}, BOOK, preview=True) == [("CODE001", severity)]


def test_a_comment_beside_a_call_that_saves_counts_for_nothing(tmp_path):
    train = RESUMES_OPTIMIZER.format(save="# ", name="optimizer.pt")
    train += 'torch.save(optimizer.state_dict(), os.path.join(args.folder, "optimizer.pt"))\n'
    assert severities_in(tmp_path, {"train.py": train}, BOOK) == [("CODE001", "warning")]
