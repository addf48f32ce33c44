"""Names, values and the tree of a file, without running it."""

import ast

import pytest

from doctor.lint.python.script import UNKNOWN, Script
from tests.lab.cases import each_case


def last(text):
    """The script, and the value of its last statement."""
    script = Script("a.py", text)
    return script, script.tree.body[-1].value


def name(text):
    script, node = last(text)
    return script.name(node)


@each_case(
    ("text", "expected"),
    [
        ("import torch\ntorch.load", "torch.load"),
        ("import torch as t\nt.load", "torch.load"),
        ("import torch.distributed as dist\ndist.barrier", "torch.distributed.barrier"),
        ("import torch.distributed\ntorch.distributed.barrier", "torch.distributed.barrier"),
        ("from torch import load as fetch\nfetch", "torch.load"),
        ("from torch.utils.data.dataloader import DataLoader\nDataLoader(x)", "torch.utils.data.DataLoader()"),
        ("import pytorch_lightning as pl\npl.Trainer()", "lightning.pytorch.Trainer()"),
        ("from lightning.pytorch import Trainer\nt = Trainer()\nt.fit", "lightning.pytorch.Trainer().fit"),
        ("import torch\nload = torch.load\nload", "torch.load"),
        ("import torch\na = torch\nb = a\nb.load", "torch.load"),
        ("import torch\nx = y = torch.load\ny", "torch.load"),
        ("import torch\na, b = torch.load, 1\na", "torch.load"),
        ("import torch\nt = None\nt = torch.device('cpu')\nt", "torch.device()"),
        ("from . import comm\ncomm.barrier", ".comm.barrier"),
        ("def f(): pass\nf", ".f"),
        ("class A: pass\nA()", ".A()"),
        ("import torch\nwith torch.no_grad() as g:\n    pass\ng", ""),
        ("print", ""),
        ("x = 1\nx = 2\nx.y", ""),
        ("import torch, numpy\nload = torch.load\nload = numpy.load\nload", ""),
        ("a = b\nb = a\na", ""),
        ("import torch\nfor torch in range(3):\n    pass\ntorch.load", ""),
    ],
)
def test_names(text, expected):
    assert name(text) == expected


def test_a_local_name_hides_an_outer_one():
    script = Script("a.py", "import torch\ndef f(torch):\n    torch.load\ndef g():\n    torch.load\n")
    hidden, seen = (statement.value for function in script.functions for statement in function.body)
    assert script.name(hidden) == ""
    assert script.name(seen) == "torch.load"


def test_methods_do_not_see_the_names_of_their_class():
    script = Script("a.py", "import torch\nclass A:\n    torch = 1\n    def f(self):\n        torch.load\n")
    assert script.name(script.functions[0].body[0].value) == "torch.load"


def test_global_binds_in_the_module():
    script, node = last(
        "import torch\ndevice = None\ndef f():\n    global device\n    device = torch.device('cpu')\ndevice"
    )
    assert script.name(node) == "torch.device()"


def test_attributes_of_self_and_of_bases():
    text = (
        "import torch\nimport lightning as L\n"
        "class Base(L.LightningModule):\n    def __init__(self):\n        self.net = torch.nn.Linear(1, 1)\n"
        "class Net(Base):\n    def f(self):\n        self.net\n        self.log\n        self.f\n        self.other.x\n"
    )
    script = Script("a.py", text)
    method = next(one for one in script.functions if one.name == "f")
    assert [script.name(statement.value) for statement in method.body] == [
        "torch.nn.Linear()",
        "lightning.pytorch.LightningModule().log",
        ".Net().f",
        "lightning.pytorch.LightningModule().other.x",
    ]
    assert script.derives(script.class_of(method), "lightning.pytorch.LightningModule")
    assert script.definition(method.body[2].value) is method


def test_what_callbacks_are_handed():
    text = (
        "import lightning as L\n"
        "class C(L.Callback):\n    def on_fit_end(self, trainer, pl_module):\n        trainer\n        pl_module\n"
    )
    script = Script("a.py", text)
    assert [script.name(one.value) for one in script.functions[0].body] == [
        "lightning.pytorch.Trainer()",
        "lightning.pytorch.LightningModule()",
    ]


def test_annotated_parameters():
    script = Script(
        "a.py", "import lightning as L\ndef f(a: L.Trainer, b: L.Trainer | None, c):\n    a\n    b\n    c\n"
    )
    assert [script.name(one.value) for one in script.functions[0].body] == ["lightning.pytorch.Trainer()"] * 2 + [""]


@each_case(
    ("text", "value"),
    [
        ("3", 3),
        ("-1", -1),
        ("'ddp'", "ddp"),
        ("None", None),
        ("[1, 2]", (1, 2)),
        ("(0,)", (0,)),
        ("x = 4\nx", 4),
        ("x = 4\ny = x\ny", 4),
        ("x = 4\nx = 5\nx", UNKNOWN),
        ("x = 4\nx += 1\nx", UNKNOWN),
        ("f()", UNKNOWN),
        ("[1, f()]", UNKNOWN),
        ("for x in y:\n    pass\nx", UNKNOWN),
        ("a = a\na", UNKNOWN),
        ("True", True),
    ],
)
def test_values(text, value):
    script, node = last(text)
    assert script.value(node) == value


def test_arguments():
    script, call = last("f(1, b=2)")
    assert script.value(script.argument(call, "a", 0)) == 1
    assert script.value(script.argument(call, "b", 5)) == 2
    assert script.argument(call, "c", 1) is None
    _, opened = last("f(*rest, **options)")
    assert script.is_open(opened)
    assert script.is_given(opened, "anything")
    assert script.argument(opened, "a", 0) is None


@pytest.mark.parametrize("options", ["dict(a=1, b=2)", '{"a": 1, "b": 2}'])
def test_arguments_of_an_unpacked_dictionary(options):
    script, call = last(f"options = {options}\noptions['a']\nf(0, c=3, **options)")
    assert not script.is_open(call)
    assert script.value(script.argument(call, "a", 1)) == 1
    assert script.argument(call, "d") is None
    assert not script.is_given(call, "d")


@pytest.mark.parametrize(
    "changed",
    [
        "options.update(more)",
        'options["c"] = 3',
        "fill(options)",
        "options = load()",
        'options |= {"c": 3}',
        "other = options",
        "del options['a']",
    ],
)
def test_arguments_of_a_dictionary_that_may_change(changed):
    script, call = last(f"options = dict(a=1)\n{changed}\nf(**options)")
    assert script.is_open(call)
    assert script.argument(call, "a") is None


def test_arguments_of_an_unknown_dictionary():
    for text in ("f(**dict(more, a=1))", "f(**{key: 1})", "f(**load())", "def g(**options):\n    pass\nf(**options)"):
        script, call = last(text)
        assert script.is_open(call)
        assert script.argument(call, "a") is None


def test_calls_come_in_the_order_of_the_text():
    script = Script("a.py", "import torch\nfrom torch import load\ntorch.save(a)\nload(b)\nx.load(c)\ntorch.load(d)\n")
    assert [call.lineno for call in script.calls("torch.load", "torch.save")] == [3, 4, 6]
    assert [call.lineno for call in script.method_calls("load")] == [5, 6]


def test_inside_leaves_nested_functions_out():
    script = Script("a.py", "def f():\n    a()\n    def g():\n        b()\n    h = lambda: c()\n")
    outer = next(one for one in script.functions if one.name == "f")
    assert [script.text_of(call) for call in script.inside(outer, ast.Call)] == ["a()"]


def test_text_is_cut():
    script, node = last("f(aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa, bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb)")
    assert script.text_of(node, 20) == "f(aaaaaaaaaaaaaaaaa…"


def test_strange_files():
    assert list(Script("a.py", "").calls("torch.load")) == []
    assert Script("a.py", "global x\nx = 1\nx").value(ast.Constant(1)) == 1
    with pytest.raises(SyntaxError):
        Script("a.py", "print 'hello'")


def test_functions_with_one_name_are_told_by_their_scope():
    script = Script("a.py", "def a():\n  def f(): ...\n  f()\ndef b():\n  def f(): ...\n  f()\n")
    assert [script.definition(one.func).lineno for one in script.all(ast.Call)] == [2, 5]


def test_methods_of_classes_with_one_name_are_told_by_their_class():
    text = "class A:\n  def f(self): ...\n  def g(self):\n    self.f()\n"
    script = Script("a.py", f"{text}{text}")
    assert [script.definition(one.func).lineno for one in script.all(ast.Call)] == [2, 6]


def test_a_function_defined_again_is_the_one_above_a_call_of_the_module():
    text = "def f(): ...\nf()\ndef f(): ...\nf()\ndef g():\n  f()\n"
    script = Script("a.py", text)
    assert [script.definition(one.func).lineno for one in script.all(ast.Call)] == [1, 3, 3]
