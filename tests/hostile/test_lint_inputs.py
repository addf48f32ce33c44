"""Launch files that repeat what costs: work grows with the file, counted in steps of the reader."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from doctor.lint.engine import file_check
from doctor.lint.engine.discovery import ending_of
from doctor.lint.engine.runner import build_report, lint_paths
from doctor.lint.launch.shell.lexer import tokens
from doctor.lint.launch.yaml_tree import MERGES, read_trees


def calls(work: Callable[[], object]) -> int:
    """Functions that are called, those of C too."""
    count = 0

    def counted(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(counted)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("unit", ["${A:-", '"${A:-" ', '$A"b"', "A=(", "$(", "`", "<(", "${A:-x}", "\\$((", "[[ "])
def test_a_shell_script_costs_as_much_as_it_is_long(unit: str) -> None:
    short, long = ("srun echo " + unit * times for times in (500, 4000))
    assert calls(lambda: list(tokens(long))) < 12 * calls(lambda: list(tokens(short))) + 2000


def test_brackets_cost_few_steps_a_character() -> None:
    text = "srun echo " + "${A:-" * 20_000
    assert calls(lambda: list(tokens(text))) < 12 * len(text)


def test_words_of_many_parts_are_not_copied_for_each() -> None:
    (word,) = list(tokens('$A"b"' * 20_000))
    assert len(word.parts) == 40_000  # type: ignore[union-attr]


def test_merge_keys_are_followed_once() -> None:
    lines = ["a0: &a0 {x: 1}"]
    lines += [f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 6)}]}}" for n in range(1, 40)]
    (tree,) = read_trees("\n".join(lines) + "\nlast: {<<: *a39}\n")
    assert calls(lambda: tree.get("last", "missing")) < 20 * MERGES
    assert tree.number("last", "x") == 1


def test_the_nearest_merge_wins() -> None:
    (tree,) = read_trees("a: &a {x: 1, y: 1}\nb: &b {<<: *a, x: 2}\nc: {<<: [*b, *a], z: 3}\n")
    assert [tree.number("c", key) for key in "xyz"] == [2, 1, 3]


def test_a_file_that_runs_out_of_time_is_inconclusive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked) -> None:
    (tmp_path / "train.py").write_text("import torch\n")
    monkeypatch.setattr(file_check, "TOGETHER", -1.0)
    verdicts = lint_paths([tmp_path / "train.py"], asked)
    report = build_report(verdicts, asked, started=0.0)
    assert (report.exit_code, report.verdict) == (3, "inconclusive")
    assert "took longer than" in str(report.inputs[0].skipped)


@pytest.fixture
def asked():
    from doctor.core.settings import Settings
    from doctor.lint.engine.request import lint_request

    return lint_request(Settings(), typed=(), lightning=None, processors=None, strict=False)


@pytest.mark.parametrize(
    ("text", "ending"),
    [
        ("import torch\n", ".py"),
        ("#!/bin/bash\n#SBATCH -N2\n", ".sh"),
        ("srun torchrun train.py", ".sh"),
        ("#!/usr/bin/env python3\nprint(1)", ".py"),
        ("kind: PyTorchJob\n", ".yaml"),
        ('{"cells": []}', ".ipynb"),
        ('{"fp16": {}}', ".json"),
        ("x = 1", ".py"),
    ],
)
def test_a_stream_is_told_by_its_begin(text: str, ending: str) -> None:
    assert ending_of(text.encode()) == ending
