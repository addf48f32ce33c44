"""Findings in copies of the same code: one finding with the places of the others."""

import json
import time

import pytest

from doctor.core.settings import IgnoreEntry, Settings
from doctor.lint.engine.request import lint_request
from doctor.lint.engine.runner import build_report, lint_paths
from doctor.report.lint.sarif import render_sarif
from tests.lint.test_cli_lint import lint

BARRIER = """\
import torch.distributed as dist


def finish():
    if dist.get_rank() == 0:
        dist.barrier()


dist.init_process_group("gloo")
finish()
"""
LATER = BARRIER.replace("import torch", '"""Another program."""\n\nimport argparse\nimport torch', 1).replace(
    "    if dist", "    # the first rank\n\n    if  dist"
)
"""The same function at other lines, with a comment, another blank and a blank line."""
ENDED = (
    "import torch.distributed as dist\ndist.init_process_group('gloo')\nif dist.get_rank() == 0:\n    dist.barrier()\n"
)
JOB = "#!/bin/bash\n#SBATCH --nodes=2\nexport MASTER_PORT=70000\nsrun torchrun --nnodes=2 train.py\n"


def write(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def report_of(folder, files, settings=None):
    write(folder, files)
    asked = lint_request(settings or Settings())
    return build_report(lint_paths([folder], asked), asked, started=time.time()), asked


def found(folder, files, rule="CODE005", settings=None):
    report, _ = report_of(folder, files, settings)
    [result] = [one for one in report.results if one.id == rule]
    return [
        (one.source.file.removeprefix(f"{folder}/"), one.source.line, one.evidence.get("also", []), one.ignored)
        for one in result.findings
    ]


def test_the_same_function_of_several_files_is_one_finding(tmp_path):
    files = {"b/finish.py": LATER, "a/finish.py": BARRIER, "c/finish.py": BARRIER}
    also = [f"{tmp_path}/b/finish.py:11", f"{tmp_path}/c/finish.py:6"]
    assert found(tmp_path, files) == [("a/finish.py", 6, also, None)]


OTHER = {
    "another function": BARRIER.replace("get_rank() == 0", "get_rank() == 1"),
    "another line of the function": BARRIER.replace("    if dist", "    print('end')\n    if dist"),
}


@pytest.mark.parametrize("name", OTHER)
def test_other_code_keeps_its_own_finding(tmp_path, name):
    places = found(tmp_path, {"a.py": BARRIER, "b.py": OTHER[name]})
    assert [(file, also) for file, _, also, _ in places] == [("a.py", []), ("b.py", [])]


def test_two_lines_of_one_function_are_two_findings(tmp_path):
    text = BARRIER.replace(
        "        dist.barrier()\n", "        dist.barrier()\n    if dist.get_rank() == 0:\n", 1
    ).replace("== 0:\n\n\n", "== 0:\n        dist.barrier()\n\n\n")
    places = found(tmp_path, {"a.py": text, "b.py": text})
    assert [(file, line, len(also)) for file, line, also, _ in places] == [("a.py", 6, 1), ("a.py", 8, 1)]


def test_outside_of_functions_whole_files_are_compared(tmp_path):
    files = {"a.py": ENDED, "b.py": ENDED + "# the end\n", "c.py": ENDED + "print('end')\n"}
    places = found(tmp_path, files)
    assert places == [("a.py", 4, [f"{tmp_path}/b.py:4"], None), ("c.py", 4, [], None)]


def test_launch_files_are_compared_without_comments_and_arguments(tmp_path):
    commented = JOB.replace("export", "# the port\n\nexport  ")
    files = {"a.sh": JOB, "b.sh": commented, "c.sh": JOB.replace("train.py", "\\\n    train.py --lr 0.1")}
    also = [f"{tmp_path}/b.sh:5", f"{tmp_path}/c.sh:3"]
    assert found(tmp_path, files, "ENV007") == [("a.sh", 3, also, None)]


OTHER_JOBS = {
    "another value": JOB.replace("70000", "80000"),
    "another program": JOB.replace("train", "tune"),
    "another command": JOB.replace("export", "module load cuda\nexport"),
}


@pytest.mark.parametrize("name", OTHER_JOBS)
def test_other_launch_files_keep_their_own_finding(tmp_path, name):
    places = found(tmp_path, {"a.sh": JOB, "b.sh": OTHER_JOBS[name]}, "ENV007")
    assert [(file, also) for file, _, also, _ in places] == [("a.sh", []), ("b.sh", [])]


def test_configurations_are_compared_as_a_whole(tmp_path):
    pod = "apiVersion: v1\nkind: Pod\nspec:\n  containers:\n  - env:\n    - {name: MASTER_PORT, value: '70000'}\n"
    files = {"a.yaml": pod, "b.yaml": f"# a pod\n{pod}", "c.yaml": pod + "  restartPolicy: Never\n"}
    places = found(tmp_path, files, "ENV007")
    assert places == [("a.yaml", 6, [f"{tmp_path}/b.yaml:7"], None), ("c.yaml", 6, [], None)]


def test_a_suppressed_place_is_not_listed(tmp_path):
    accepted = BARRIER.replace("barrier()", "barrier()  # doctor: ignore[CODE005] tried")
    places = found(tmp_path, {"a.py": accepted, "b.py": BARRIER, "c.py": BARRIER})
    assert [(file, also, ignored is None) for file, _, also, ignored in places] == [
        ("a.py", [], False),
        ("b.py", [f"{tmp_path}/c.py:6"], True),
    ]


def test_settings_that_accept_one_place_leave_the_others(tmp_path):
    settings = Settings(ignore=(IgnoreEntry("CODE005", "tried", path="a.py"),))
    places = found(tmp_path, {"a.py": BARRIER, "b.py": BARRIER, "c.py": BARRIER}, settings=settings)
    assert [(file, also, ignored is None) for file, _, also, ignored in places] == [
        ("a.py", [], False),
        ("b.py", [f"{tmp_path}/c.py:6"], True),
    ]


@pytest.fixture
def copies(tmp_path):
    write(tmp_path, {f"{folder}/train.py": BARRIER for folder in "abcdefgh"})
    return tmp_path


def test_text_lists_some_places(copies):
    shown = lint(".", cwd=copies, code=1).stdout
    assert "a/train.py:6:9: error CODE005" in shown
    assert "b/train.py:6:9" not in shown
    assert "(and at 7 more places with the same code)" in shown
    assert "also: b/train.py:6, c/train.py:6, d/train.py:6, e/train.py:6, f/train.py:6 and 2 more" in shown
    assert "Failed: 1 error in 8 of 8 files" in shown
    assert "h/train.py:6" in lint("-v", ".", cwd=copies, code=1).stdout
    assert lint("-q", ".", cwd=copies, code=1).stdout.count("same code") == 1


def test_json_lists_all_places(copies):
    report = json.loads(lint("--format", "json", ".", cwd=copies, code=1).stdout)
    [finding] = [one for result in report["results"] for one in result["findings"]]
    assert finding["source"] == {"file": "a/train.py", "line": 6}
    assert finding["evidence"]["also"] == [f"{folder}/train.py:6" for folder in "bcdefgh"]


@pytest.mark.parametrize("form", ["github", "markdown", "junit", "html"])
def test_other_formats_name_the_places(copies, form):
    shown = lint("--format", form, ".", cwd=copies, code=1).stdout
    assert "and at 7 more places with the same code" in shown
    assert "b/train.py:6" in shown
    if form == "github":
        assert [line.partition(",title")[0] for line in shown.splitlines()[:-1]] == ["::error file=a/train.py,line=6"]


def test_sarif_has_related_locations(copies):
    from jsonschema import validate

    from tests.lint.test_sarif import SCHEMA

    document = json.loads(lint("--format", "sarif", ".", cwd=copies, code=1).stdout)
    validate(document, SCHEMA)
    [result] = document["runs"][0]["results"]
    related = [one["physicalLocation"] for one in result["relatedLocations"]]
    assert [one["artifactLocation"]["uri"] for one in related] == [f"{folder}/train.py" for folder in "bcdefgh"]
    assert {one["region"]["startLine"] for one in related} == {6}


def test_a_new_copy_is_a_new_result_of_a_scan(tmp_path):
    def fingerprints(files):
        report, asked = report_of(tmp_path, files)
        document = json.loads(render_sarif(report, asked.book.rules))
        return {one["partialFingerprints"]["rankdoctorLine/v1"] for one in document["runs"][0]["results"]}

    before = fingerprints({"a.py": BARRIER, "b.py": BARRIER})
    assert fingerprints({"a.py": f"\n{BARRIER}"}) == before
    assert fingerprints({"c.py": BARRIER}).isdisjoint(before)


def test_places_are_redacted(copies):
    shown = lint("--redact", "--format", "json", str(copies), cwd=copies, code=1).stdout
    [finding] = [one for result in json.loads(shown)["results"] for one in result["findings"]]
    assert copies.name not in json.dumps(finding["evidence"]["also"])
    assert finding["evidence"]["also"][0].rpartition("/")[0] != finding["source"]["file"].rpartition("/")[0]


def test_a_fix_changes_all_copies(tmp_path):
    text = (
        "from torch.utils.data import DataLoader, DistributedSampler\n\nsampler = DistributedSampler(data)\n"
        "loader = DataLoader(data, sampler=sampler)\n"
        "for epoch in range(3):\n    for batch in loader:\n        model(batch).backward()\n"
    )
    write(tmp_path, {"a.py": text, "b.py": text})
    assert "--fix corrects 2 findings automatically" in lint(".", cwd=tmp_path).stdout
    assert "2 findings were fixed in a.py, b.py" in lint("--fix", ".", cwd=tmp_path, code=0).stderr
    [run] = json.loads(lint("--format", "sarif", ".", cwd=tmp_path, code=0).stdout)["runs"]
    assert run["results"] == []


SAVES = """\
import torch.distributed as dist


def save(model, path):
    write(model, path)
    dist.barrier()


def load(path):
    dist.barrier()
"""
CALLS = """\
import torch.distributed as dist
from saving import load, save

dist.init_process_group("nccl")
if dist.get_rank() == 0:
    {call}
"""
PAST = """\
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

torch.distributed.init_process_group("nccl")
model = DDP(build())
for batch in loader:
    loss = model.module.{part}(batch)
    loss.backward()
"""
FIRST_GPU = """\
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

def main():
    torch.distributed.init_process_group("nccl")
    torch.cuda.set_device(0)
    model = DDP(torch.nn.Linear(2, 2).cuda(0), device_ids=[0])

main()  # torchrun --nproc-per-node 4 train.py
"""


def places(folder, files, rule):
    return sorted((file, line, len(also)) for file, line, also, _ in found(folder, files, rule))


def test_callers_of_one_function_that_meets_share_a_finding(tmp_path):
    files = {
        "saving.py": SAVES,
        "train.py": CALLS.format(call="save(1, 'a')"),
        "test.py": "# tests\n" + CALLS.format(call="print(save(2, 'b'))"),
        "resume.py": CALLS.format(call="load('a')"),
    }
    assert places(tmp_path, files, "CODE005") == [("resume.py", 6, 0), ("test.py", 7, 1)]


def test_calls_of_one_method_past_the_wrapper_share_a_finding(tmp_path):
    files = {name: f"# {name}\n" + PAST.format(part="train_step") for name in ("a.py", "b.py")}
    files["c.py"] = PAST.format(part="compute_loss")
    assert places(tmp_path, files, "CODE033") == [("a.py", 8, 1), ("c.py", 7, 0)]


def test_the_first_gpu_of_a_program_is_one_finding(tmp_path):
    files = {"a/train.py": FIRST_GPU, "b/train.py": FIRST_GPU, "other.py": FIRST_GPU.replace("model", "net")}
    assert places(tmp_path, files, "CODE002") == [("a/train.py", 6, 2), ("other.py", 6, 1)]


GUARDED = """\
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

torch.distributed.init_process_group("nccl")
model = DDP(build())
for batch in loader:
    loss = model(batch).{reduced}()
    if {test}:
        loss.backward()
"""


def test_the_same_guard_against_bad_losses_is_one_finding(tmp_path):
    finite, small = "not torch.isnan(loss)", "loss.item() > 3"
    files = {
        "a.py": GUARDED.format(reduced="mean", test=finite),
        "b.py": GUARDED.format(reduced="sum", test=finite),
        "c.py": GUARDED.format(reduced="mean", test=small),
        "d.py": GUARDED.format(reduced="sum", test=small),
    }
    assert places(tmp_path, files, "CODE008") == [("a.py", 9, 1), ("c.py", 9, 0), ("d.py", 9, 0)]


WRITES_TWICE = """\
import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

torch.distributed.init_process_group("nccl")
model = DDP(build())
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for epoch in range(9):
    train(model, optimizer)
    torch.save(model.state_dict(), "last.pt")
    if {test}:
        torch.save(optimizer.state_dict(), "best.pt")
{after}torch.save(model.state_dict(), "end.pt")
"""


def test_files_that_one_condition_would_keep_apart_are_one_finding(tmp_path):
    files = {
        "a.py": WRITES_TWICE.format(test="epoch > 3", after="    "),
        "b.py": "# other\n" + WRITES_TWICE.format(test="torch.distributed.get_rank() == 0", after=""),
    }
    assert places(tmp_path, files, "CODE029") == [("a.py", 10, 2), ("b.py", 11, 0), ("b.py", 14, 0)]


SAMPLES = """\
import torch
from torch.utils.data import DataLoader, DistributedSampler

def main(args, seen, unseen, model, optimizer):
    torch.distributed.init_process_group("nccl")
    if args.long:
        {first} = DistributedSampler(seen)
        loader = DataLoader(seen, sampler={first})
    else:
        {second} = DistributedSampler(unseen)
        loader = DataLoader(unseen, sampler={second})
    for epoch in range(9):
        for batch in loader:
            model(batch).sum().backward()
            optimizer.step()

main(parse(), read("a"), read("b"), *build())
"""


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [("sampler", "sampler", [("train.py", 7, 1)]), ("one", "other", [("train.py", 7, 0), ("train.py", 10, 0)])],
)
def test_the_samplers_of_two_branches_are_one_finding(tmp_path, first, second, expected):
    files = {"train.py": SAMPLES.format(first=first, second=second), "other.py": "def build(): pass\n"}
    assert places(tmp_path, files, "CODE011") == expected


MAPS = """\
# torchrun --nproc-per-node 8 train.py
from datasets import load_dataset
from transformers import Trainer, TrainingArguments

raw = load_dataset("text")
arguments = TrainingArguments("out")
{first}seen = raw["train"].map(tokenize, num_proc=32)
{second}unseen = raw["test"].map(tokenize, num_proc=32)
Trainer(args=arguments, train_dataset=seen, eval_dataset=unseen).train()
"""
WAITS = "with arguments.main_process_first():\n    "


@pytest.mark.parametrize(
    ("first", "second", "rule", "expected"),
    [
        ("", "", "CODE029", [("train.py", 7, 1)]),
        (WAITS, "", "CODE029", [("train.py", 9, 0)]),
    ],
)
def test_the_datasets_that_a_file_maps_are_one_finding(tmp_path, first, second, rule, expected):
    files = {"train.py": MAPS.format(first=first, second=second)}
    assert places(tmp_path, files, rule) == expected


FIRST = """\
from accelerate import Accelerator
from datasets import load_dataset

accelerator = Accelerator()
raw = load_dataset(args.path)
with accelerator.main_process_first():
    seen = raw["train"].map(tokenize)
with accelerator.main_process_first():
    unseen = raw["test"].{second}(tokenize)
model = accelerator.prepare(build())
train(model, accelerator, seen, unseen)
"""


@pytest.mark.parametrize(("second", "others"), [("map", 1), ("select", 0)])
def test_the_datasets_that_ranks_wait_for_are_one_finding(tmp_path, second, others):
    files = {"train.py": FIRST.format(second=second)}
    assert places(tmp_path, files, "CODE030") == [("train.py", 7, others)]
