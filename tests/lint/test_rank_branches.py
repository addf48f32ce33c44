"""Conditions on the rank: what is one, what only looks like one, and where one holds."""

import ast

import pytest

from doctor.lint.python.rank_branches import (
    denied_test,
    is_of_the_job,
    is_rank,
    is_rank_test,
    main_first,
    plain_test,
    rank_condition,
    rank_conditions,
)
from doctor.lint.python.script import Script
from tests.lab.cases import each_case


def expression(text, before=""):
    script = Script("a.py", f"{before}\nfound = ({text})\n")
    return script, script.tree.body[-1].value


def marked(text):
    """The script, and its call ``here()``."""
    script = Script("a.py", text)
    return script, next(call for call in script.all(ast.Call) if getattr(call.func, "id", "") == "here")


@pytest.mark.parametrize(
    "text",
    [
        "rank",
        "args.local_rank",
        "self.global_rank",
        "dist.get_rank()",
        "hvd.rank()",
        'int(os.environ["RANK"])',
        'os.environ.get("LOCAL_RANK", 0)',
        'os.getenv("SLURM_PROCID")',
        "accelerator.process_index",
        "get_data_parallel_rank()",
    ],
)
def test_a_rank(text):
    assert is_rank(*expression(text))


@pytest.mark.parametrize(
    "text", ["world_size", "lora_rank", "matrix_rank(a)", "frank", 'row["rank"]', "rank_zero_only"]
)
def test_no_rank(text):
    assert not is_rank(*expression(text))


@each_case(
    "text",
    [
        "rank == 0",
        "0 == rank",
        "not rank",
        "args.rank % 8 == 0",
        "local_rank in [-1, 0]",
        "local_rank not in (-1, 0)",
        "rank == world_size - 1",
        "rank > 0",
        "step % 10 == 0 and rank == 0",
        "not distributed or rank == 0",
        "not (rank == 0)",
        "is_main_process",
        "is_main_process()",
        "not utils.is_primary(args)",
        "trainer.is_global_zero",
        "self.trainer.is_global_zero and self.save",
        "accelerator.is_local_main_process",
        "state.is_world_process_zero",
        "is_last_rank()",
        "bool(rank == 0)",
        "master_process",
    ],
)
def test_asks_for_the_rank(text):
    assert is_rank_test(*expression(text))


@each_case(
    "text",
    [
        "rank is None",
        "rank is not None",
        "local_rank != -1",
        "local_rank == -1",
        "rank >= 0",
        "rank > -1",
        "rank < world_size",
        "rank >= args.world_size",
        "rank == 0 and world_size == 1",
        "not distributed and rank == 0",
        "rank == 0 and num_processes < 2",
        "is_first",
        "first",
        "is_training",
        "lora_rank == 0",
        "main",
        "step == 0",
    ],
)
def test_does_not_ask_for_the_rank(text):
    assert not is_rank_test(*expression(text))


@pytest.mark.parametrize(
    ("text", "is_test"),
    [
        ("size = dist.get_world_size()\nif rank >= size:\n    here()", False),
        ("def run(rank, size):\n    if rank >= size:\n        here()", False),
        ("def run(size):\n    if rank >= size:\n        here()", True),
        ("size = args.readers\nif rank >= size:\n    here()", True),
    ],
)
def test_processes_beyond_the_number_of_ranks(text, is_test):
    assert (rank_condition(*marked(text)) is not None) is is_test


@pytest.mark.parametrize(
    "before",
    [
        "master = rank == 0",
        "def master(): return dist.get_rank() == 0",
        "def inner(): return rank == 0\nmaster = inner()",
    ],
)
def test_a_test_that_is_kept_under_another_name(before):
    assert is_rank_test(*expression("master" if "def master" not in before else "master()", before))


@pytest.mark.parametrize(
    "text",
    [
        "match mode:\n    case 0:\n        here()",
        "match rank:\n    case _:\n        here()",
        "match rank:\n    case int():\n        here()",
        "match rank:\n    case 0:\n        pass\nhere()",
    ],
)
def test_a_match_that_all_ranks_pass(text):
    assert rank_condition(*marked(text)) is None


def test_a_name_of_several_values_is_no_test():
    assert not is_rank_test(*expression("flag", "flag = rank == 0\nflag = True"))


@each_case(
    ("text", "test"),
    [
        ("if rank == 0:\n    here()", "rank == 0"),
        ("if rank == 0:\n    pass\nelse:\n    here()", "not (rank == 0)"),
        ("if rank == 0:\n    pass\nelif rank == 1:\n    here()", "rank == 1"),
        ("rank == 0 and here()", "rank == 0"),
        ("match rank:\n    case 0:\n        here()", "rank == 0"),
        ("match dist.get_rank():\n    case 0 | 1:\n        here()", "dist.get_rank() in (0, 1)"),
        ("match rank:\n    case 0:\n        pass\n    case _:\n        here()", "not (rank == 0)"),
        ("found = here() if rank == 0 else None", "rank == 0"),
        ("def f():\n    if rank != 0:\n        return\n    here()", "not (rank != 0)"),
        ("for x in y:\n    if rank != 0:\n        continue\n    here()", "not (rank != 0)"),
        ("@rank_zero_only\ndef f():\n    here()", "@rank_zero_only"),
        ("@accelerator.on_main_process\ndef f():\n    here()", "@accelerator.on_main_process"),
        ("def f():\n    with x:\n        for y in z:\n            if is_main():\n                here()", None),
        ("if rank == 0:\n    def f():\n        here()", None),
        ("if rank == 0:\n    f = lambda: here()", None),
        ("if here():\n    pass\nif rank == 0:\n    pass", None),
        ("if rank == 0:\n    return_later()\nhere()", None),
        ("if distributed:\n    here()", None),
    ],
)
def test_where_a_condition_holds(text, test):
    found = rank_condition(*marked(text))
    if "is_main()" in text:
        test = "is_main()"
    assert (found.test if found else None) == test


def test_all_conditions_the_nearest_first():
    text = "if rank != 3:\n    if local_rank == 0:\n        if step:\n            here()\n"
    assert [one.test for one in rank_conditions(*marked(text))] == ["local_rank == 0", "rank != 3"]


@pytest.mark.parametrize(
    ("text", "asks"),
    [
        ("dist.is_initialized()", True),
        ("args.distributed", True),
        ("world_size > 1", True),
        ("dist.is_available() and dist.is_initialized()", True),
        ("self.use_ddp", True),
        ("epoch % 5 == 0", False),
        ("verbose", False),
    ],
)
def test_whether_there_are_several_ranks(text, asks):
    assert is_of_the_job(*expression(text)) is asks


def test_a_switch_of_a_function_is_not_of_the_job():
    script = Script("a.py", "def f(distributed, world_size):\n    if distributed: pass\n    if world_size > 1: pass\n")
    switch, size = script.all(ast.If)
    assert not is_of_the_job(script, switch.test)
    assert is_of_the_job(script, size.test)


def test_the_block_that_one_rank_enters_first():
    script, call = marked("with accelerator.main_process_first():\n    if x:\n        here()\n")
    assert main_first(script, call).lineno == 1
    assert main_first(*marked("with accelerator.accumulate(model):\n    here()\n")) is None
    assert main_first(*marked("with fabric.rank_zero_first():\n    def f():\n        here()\n")) is None


def test_tests_are_shown_without_double_negation() -> None:
    """A negated comparison or negation is shown as its opposite; a negated condition with parts as what excludes."""
    assert plain_test("not (rank != 0)") == "rank == 0"
    assert plain_test("not (not self.is_main)") == "self.is_main"
    assert plain_test("rank == 0 and (done)") == "rank == 0 and (done)"
    assert denied_test("not (rank == 0 and not done)") == "rank == 0 and not done"
    assert denied_test("not (rank == 0)") == denied_test("not (a) or (b)") == ""
