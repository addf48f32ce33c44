"""Fixes of rules that name the very loader, sampler or option of their case."""

from __future__ import annotations

from doctor.api import Script
from doctor.lint.engine.registry import builtin_rules
from doctor.lint.launch.file_type import read_launch_file
from tests.lab.cases import each_case


def texts_of(id_, case_name):
    for rule in builtin_rules():
        for case in rule.cases() if rule.id == id_ else ():
            if case.title == case_name:
                is_script = case.name.endswith(".py")
                file = Script(case.name, case.text) if is_script else read_launch_file(case.name, case.text)
                return [f"{one.summary} | {one.fix}" for one in rule.violations(file)]
    raise AssertionError(case_name)


@each_case(
    ("id_", "case", "text"),
    [
        ("CODE010", "a method makes loader and sampler", "call `batches.sampler.set_epoch(epoch)` at the start"),
        ("CODE010", "FSDP, in functions", "Loader of get_train_loader (line "),
        ("CODE010", "FSDP, in functions", "instead of `True` (shuffle), and call `loader.sampler.set_epoch(epoch)`"),
        ("CODE010", "plain DDP with a shuffling loader", "instead of `shuffle=True`"),
        ("CODE011", "made in a branch, where no line fits all", "Rename `_` in line "),
        (
            "CODE011",
            "made in a branch, where no line fits all",
            "`if isinstance(sampler, DistributedSampler): sampler.set_epoch(epoch)`",
        ),
        ("ENV006", "accelerate", "Use `--main_process_ip a` in the command of host 1."),
        ("ENV006", "another port on the second host", "Use `--master-port 29500` in the command of host 1."),
    ],
)
def test_a_fix_names_what_its_case_has(id_, case, text):
    (found,) = texts_of(id_, case)
    assert text in found
