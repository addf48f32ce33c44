"""What ``--fix`` writes: the formatting stays, and a file that would break stays as it was."""

import ast
import os

import pytest

from doctor.api import DropArgument, InsertStatement, RenameArgument, ReplaceExpression, SetArgument, location_of
from doctor.lint.fix.edits import changed_lines, difference, fixed_text, why_untouched, write_whole


def node_of(text, kind, number=0):
    found = [node for node in ast.walk(ast.parse(text)) if isinstance(node, kind)]
    return location_of(sorted(found, key=lambda node: (node.lineno, node.col_offset, -node.end_col_offset))[number])


def fixed(text, *wishes):
    new, granted = fixed_text(text, wishes)
    return new if len(granted) == len(wishes) else None


def set_argument(text, name, value, number=0):
    return [SetArgument(node_of(text, ast.Call, number), name, value)]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("f()\n", "f(a=1)\n"),
        ("f(x)  # why\n", "f(x, a=1)  # why\n"),
        ("f(a=2, b=3)\n", "f(a=1, b=3)\n"),
        ("f(\n    x,\n    y,  # the y\n)\n", "f(\n    x,\n    y,\n    a=1,  # the y\n)\n"),
        ("f(\n    x\n)\n", "f(\n    x,\n    a=1\n)\n"),
        ("s = 'äöü'; f(x)\n", "s = 'äöü'; f(x, a=1)\n"),
        ("f(x)\r\ng()\r\n", "f(x, a=1)\r\ng()\r\n"),
        ("f(a=2, **k)\n", "f(a=1, **k)\n"),
    ],
)
def test_an_argument_is_set(text, wanted):
    assert fixed(text, set_argument(text, "a", "1")) == wanted


def test_an_argument_is_not_set_beside_what_may_have_it():
    text = "f(x, **options)\n"
    assert fixed(text, set_argument(text, "a", "1")) is None


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("f(a=1)\n", "f()\n"),
        ("f(x, a=1)\n", "f(x)\n"),
        ("f(a=1, b=2)\n", "f(b=2)\n"),
        ("f(\n    x,\n    a=1,\n)\n", "f(\n    x,\n)\n"),
    ],
)
def test_an_argument_is_dropped(text, wanted):
    assert fixed(text, [DropArgument(node_of(text, ast.Call), "a")]) == wanted


def test_an_argument_is_renamed():
    text = "f(x, gpus = 2)\n"
    place = node_of(text, ast.Call)
    assert fixed(text, [RenameArgument(place, "gpus", "devices")]) == "f(x, devices = 2)\n"
    assert fixed(text, [RenameArgument(place, "gpus", "devices", "4")]) == "f(x, devices = 4)\n"


def test_an_expression_is_replaced():
    text = "x = (a.b)  # kept\n"
    assert fixed(text, [ReplaceExpression(node_of(text, ast.Attribute), "c.d")]) == "x = c.d  # kept\n"


@pytest.mark.parametrize(
    ("text", "kind", "inside", "wanted"),
    [
        ("for x in y:\n    # first\n    g()\n", ast.For, True, "for x in y:\n    s()\n    # first\n    g()\n"),
        (
            'def f():\n    """Words."""\n    g()\n',
            ast.FunctionDef,
            True,
            'def f():\n    """Words."""\n    s()\n    g()\n',
        ),
        ("if x:\n\tg()\n", ast.Expr, False, "if x:\n\ts()\n\tg()\n"),
        ("@d\ndef f():\n    g()\n", ast.FunctionDef, True, "@d\ndef f():\n    s()\n    g()\n"),
    ],
)
def test_a_statement_is_put_in(text, kind, inside, wanted):
    assert fixed(text, [InsertStatement(node_of(text, kind), "s()", inside)]) == wanted


@pytest.mark.parametrize(
    ("text", "kind", "inside"),
    [("for x in y: g()\n", ast.For, True), ("if a:\n    f()\nelif b:\n    g()\n", "elif", False)],
)
def test_where_there_is_no_room_nothing_is_changed(text, kind, inside):
    place = node_of(text, ast.If, 1) if kind == "elif" else node_of(text, kind)
    assert fixed_text(text, [[InsertStatement(place, "s()", inside)]]) == (text, ())


def test_all_edits_of_a_finding_or_none():
    text = "f(x)\n"
    impossible = [*set_argument(text, "a", "1"), DropArgument(node_of(text, ast.Call), "not_there")]
    assert fixed_text(text, [impossible, set_argument(text, "b", "2")]) == ("f(x, b=2)\n", (1,))


def test_several_in_one_file_and_in_one_call():
    text = "f(g(x))\nf(y)\n"
    wishes = [set_argument(text, "a", "1", 0), set_argument(text, "b", "2", 1), set_argument(text, "c", "3", 2)]
    assert fixed(text, *wishes) == "f(g(x, b=2), a=1)\nf(y, c=3)\n"


def test_what_overlaps_waits_for_the_next_round():
    text = "f(g(x))\n"
    replaced = [ReplaceExpression(node_of(text, ast.Call, 0), "h()")]
    inner = set_argument(text, "a", "1", 1)
    assert fixed_text(text, [inner, replaced]) == ("f(g(x, a=1))\n", (0,))
    assert fixed_text(text, [replaced, inner]) == ("h()\n", (0,))


@pytest.mark.parametrize("value", ["1 +", "x y", ")"])
def test_what_would_be_no_python_is_left(value):
    text = "f(x)\n"
    assert fixed_text(text, [set_argument(text, "a", value)]) == (text, ())


def test_a_file_is_written_whole_with_its_mode(tmp_path):
    path = tmp_path / "x.py"
    path.write_text("old")
    path.chmod(0o754)
    write_whole(path, b"new")
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o754
    assert os.listdir(tmp_path) == ["x.py"]


def test_a_link_out_of_the_folder_is_not_followed(tmp_path):
    outside = tmp_path / "outside.py"
    outside.write_text("x")
    folder = tmp_path / "given"
    folder.mkdir()
    (folder / "link.py").symlink_to(outside)
    (folder / "real.py").write_text("x")
    (folder / "near.py").symlink_to("real.py")
    assert "outside" in why_untouched(folder / "link.py", folder)
    assert "outside" in why_untouched(folder / "link.py", folder / "link.py")
    assert why_untouched(folder / "near.py", folder) is None
    assert why_untouched(folder / "real.py", folder / "real.py") is None


def test_what_changed():
    before, after = "a\nb\nc\n", "a\nB\nc\nd"
    assert changed_lines(before, after) == [(2, 3, "B\n"), (4, 4, "d")]
    assert difference("x.py", before, after).splitlines()[-2:] == ["+d", "\\ No newline at end of file"]
