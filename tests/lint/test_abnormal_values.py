"""What only an abnormal value leads to is a risk: no finding there is an error."""

from __future__ import annotations

import ast

import pytest

from doctor.lint.engine.registry import Rulebook, builtin_rules
from doctor.lint.python.project.abnormal_values import is_led_to_by_accident, ordinary_outcome
from doctor.lint.python.script import Script
from tests.lint.linted import severities_in

_STEPS = """\
import math
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

def train(net, loader, optimizer, rank):
    dist.init_process_group("nccl")
    torch.cuda.set_device(rank)
    model = DDP(net.cuda())
    for batch in loader:
        loss = model(batch).mean()
        {step}
        loss.backward()
        optimizer.step()

torch.multiprocessing.spawn(train, nprocs=4)
"""
_FLAGS = """\
import math
import torch

def has_bad(loss):
    return torch.isnan(loss) or torch.isinf(loss)

def look(x, y, losses):
    bad = False
    if torch.isnan(x):
        bad = True
    late = False
    if y > 3:
        late = True
    print(late)

    if {test}:
        print(x)
"""
_DUMPS = """\
def dump(model, rank):
    if rank == 0:
        dist.barrier()

"""
_BACKWARD = "if {test}:\n            loss.backward()"
_TRIED = """\
try:
            pass
        except {error}:
            if rank == 0:
                dist.barrier()
"""
_SKIPS = "if {test}:\n            continue"


def _severities(tmp_path, step, rule):
    book = Rulebook(tuple(one for one in builtin_rules() if one.id == rule))
    return [found for _, found in severities_in(tmp_path, {"train.py": _STEPS.format(step=step)}, book)]


@pytest.mark.parametrize(
    "test",
    [
        "not math.isfinite(loss.item())",
        "torch.isnan(loss).any() or torch.isinf(loss).any()",
        "torch.isnan(loss).sum() > 0",
        "batch is None",
        "len(batch) == 0",
    ],
)
def test_steps_that_only_an_abnormal_value_skips_are_a_risk(tmp_path, test):
    assert _severities(tmp_path, _SKIPS.format(test=test), "CODE016") == ["warning"]


@pytest.mark.parametrize("test", ["loss.item() > 9", "any(len(one) < 1 for one in batch.targets)"])
def test_steps_that_ordinary_values_skip_are_errors(tmp_path, test):
    step = _SKIPS.format(test=test).replace("batch.targets", "batch['targets']")
    assert _severities(tmp_path, step, "CODE016") == ["error"]


@pytest.mark.parametrize(("test", "severity"), [("torch.isfinite(loss)", "warning"), ("loss.item() > 0.5", "error")])
def test_a_backward_pass_of_finite_losses_misses_ranks_only_by_accident(tmp_path, test, severity):
    assert _severities(tmp_path, _BACKWARD.format(test=test), "CODE008") == [severity]


@pytest.mark.parametrize(
    ("step", "severity"),
    [
        ("if rank == 0:\n            dist.barrier()", "error"),
        ("if torch.isfinite(loss):\n            if rank == 0:\n                dist.barrier()", "error"),
        ("if torch.isnan(loss):\n            if rank == 0:\n                dist.barrier()", "warning"),
        (_TRIED.format(error="ValueError"), "warning"),
        (_TRIED.format(error="ImportError"), "error"),
    ],
)
def test_a_barrier_of_one_rank_is_certain_where_ordinary_runs_get_to(tmp_path, step, severity):
    assert _severities(tmp_path, step, "CODE005") == [severity]


@pytest.mark.parametrize(
    ("step", "found"),
    [
        ("if torch.isnan(loss):\n            dump(model, rank)", ["warning"]),
        ("dump(model, rank)", ["error"]),
        ("if torch.isnan(loss):\n            dump(model, rank)\n        dump(model, rank)", ["error"]),
    ],
)
def test_a_function_is_called_by_accident_if_all_its_calls_are(tmp_path, step, found):
    text = _STEPS.format(step=step).replace("def train", f"{_DUMPS}def train")
    book = Rulebook(tuple(one for one in builtin_rules() if one.id == "CODE005"))
    assert [severity for _, severity in severities_in(tmp_path, {"train.py": text}, book)] == found


@pytest.mark.parametrize(
    ("test", "outcome"),
    [
        ("math.isnan(x)", False),
        ("not torch.isfinite(x).all()", False),
        ("any(math.isnan(one) for one in losses)", False),
        ("torch.all(torch.isfinite(x))", True),
        ("torch.isfinite(x).all() and y > 3", None),
        ("math.isnan(x) and y > 3", False),
        ("torch.isfinite(x).sum() > 3", None),
        ("(torch.isnan(x) | torch.isinf(x)).any()", False),
        ("torch.isnan(x).any() is False", True),
        ("x > 3", None),
        ("x != x", False),
        ("has_bad(x)", False),
        ("bad", False),
        ("late", None),
    ],
)
def test_what_a_test_gives_for_ordinary_values(test, outcome):
    script = Script("train.py", _FLAGS.format(test=test))
    asked = list(script.all(ast.If))[-1]
    assert ordinary_outcome(script, asked.test) is outcome


_LISTING = """\
import torch

model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for x, y in loader():
    loss = torch.nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("place", "page", "found"),
    [
        ("docs/scripts/first_steps.py", "", ["info"]),
        ("docs/scripts/first_steps.py", "python docs/scripts/first_steps.py\n", ["error"]),
        ("src/first_steps.py", "", ["error"]),
        ("documents/first_steps.py", "", ["error"]),
    ],
)
def test_a_listing_of_documentation_has_no_errors(tmp_path, place, page, found):
    book = Rulebook(tuple(one for one in builtin_rules() if one.id == "CODE042"))
    files = {"pyproject.toml": "", "README.md": f"# A project\n\n```\n{page}```\n", place: _LISTING}
    files["src/data.py"] = "def main():\n    print()\n\nif __name__ == '__main__':\n    main()\n"
    assert [severity for _, severity in severities_in(tmp_path, files, book)] == found


def test_a_flag_that_its_own_branch_changes_ends_the_search():
    script = Script(
        "train.py", "done = False\nwhile not done:\n    if not done:\n        done = True\n        dist.barrier()\n"
    )
    barrier = next(one for one in script.all(ast.Call))
    assert not is_led_to_by_accident(script, barrier)
