"""Which files are looked at, and what becomes of those that can't be read."""

import json
import os

import pytest

from doctor.lint.engine.discovery import UnreadableFile, find_files, read_text
from doctor.lint.python.notebooks import read_notebook


def found(*paths):
    return {target.shown: (target.kind, target.skipped) for target in find_files(paths)}


def names(folder):
    return [target.path.relative_to(folder).as_posix() for target in find_files([folder])]


def put(folder, *files, text="x = 1\n"):
    for file in files:
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_a_folder_gives_python_and_launch_files_in_order(tmp_path):
    put(tmp_path, "b.py", "a/z.py", "a/run.sbatch", "conf.yaml", "nb.ipynb", "README.md", "data.csv")
    assert names(tmp_path) == ["b.py", "conf.yaml", "nb.ipynb", "a/run.sbatch", "a/z.py"]


def test_what_others_made_is_passed_by_unless_it_is_given(tmp_path):
    put(
        tmp_path,
        "x.py",
        ".git/h.py",
        "venv/lib/site-packages/p/m.py",
        "own/pyvenv.cfg",
        "own/m.py",
        "a/__pycache__/c.py",
    )
    assert names(tmp_path) == ["x.py"]
    packages = tmp_path / "venv/lib/site-packages"
    assert names(packages) == ["p/m.py"]
    assert names(tmp_path / "own") == ["m.py"]


@pytest.mark.parametrize("folder", ["third_party", "vendor", "src/_vendor", "extern"])
def test_copies_of_other_projects_are_passed_by_unless_they_are_given(tmp_path, folder):
    put(tmp_path, "x.py", "vendors.py", "externals/y.py", f"{folder}/other/train.py")
    assert names(tmp_path) == ["vendors.py", "x.py", "externals/y.py"]
    assert names(tmp_path / folder) == names(tmp_path / folder)[:1] == ["other/train.py"]
    assert names(tmp_path / folder / "other") == ["train.py"]


def test_a_file_without_an_ending_is_told_by_its_first_line(tmp_path):
    put(tmp_path, "launch", text="#!/usr/bin/env bash\nsrun python t.py\n")
    put(tmp_path, "train", text="#!/usr/bin/python3\n")
    put(tmp_path, "notes", text="python\n")
    assert {target.path.name: target.kind for target in find_files([tmp_path])} == {
        "launch": "shell",
        "train": "python",
    }


def test_each_file_once_however_it_is_given(tmp_path):
    put(tmp_path, "x.py")
    assert len(find_files([tmp_path, tmp_path / "x.py", tmp_path / "." / "x.py"])) == 1


def test_what_is_not_there_is_listed(tmp_path):
    ((_, (kind, why)),) = found(tmp_path / "gone.py").items()
    assert kind == "python"
    assert "No such file" in why


def test_a_named_file_of_another_kind_is_listed(tmp_path):
    put(tmp_path, "README.md")
    ((_, (kind, why)),) = found(tmp_path / "README.md").items()
    assert (kind, why) == ("unknown", "it is neither Python nor a launch file")


def text_of(path, content):
    path.write_bytes(content)
    (target,) = find_files([path])
    return read_text(target)


def test_the_encoding_is_that_of_the_file(tmp_path):
    path = tmp_path / "x.py"
    assert text_of(path, "# -*- coding: latin-1 -*-\ns = 'ü'\n".encode("latin-1")).text.endswith("s = 'ü'\n")
    marked = text_of(path, "\ufeffs = 'ü'\r\n".encode())
    assert marked.text == "s = 'ü'\r\n"
    assert marked.text.encode(marked.encoding) == "\ufeffs = 'ü'\r\n".encode()


@pytest.mark.parametrize("content", [b"# coding: klingon\n", b"s = '\xff'\n"])
def test_an_encoding_that_is_not_known_is_said(tmp_path, content):
    with pytest.raises(UnreadableFile, match="encoding"):
        text_of(tmp_path / "x.py", content)


def test_a_file_that_is_too_large_or_none_is_said(tmp_path):
    large = tmp_path / "large.py"
    with large.open("wb") as stream:
        stream.truncate(5 << 20)
    pipe = tmp_path / "pipe.py"
    os.mkfifo(pipe)
    for path, why in ((large, "larger than 4 MiB"), (pipe, "not a regular file")):
        (target,) = find_files([path])
        with pytest.raises(UnreadableFile, match=why):
            read_text(target)


def notebook(*cells, **metadata):
    cells = [{"cell_type": "code", "metadata": {}, "outputs": [], "source": one.splitlines(True)} for one in cells]
    return json.dumps({"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}, indent=1)


def test_a_notebook_is_one_script_without_what_is_no_python():
    text = notebook("%matplotlib inline\nimport torch\n!ls\n", "%%bash\nls | wc\n", "x = torch.load('a')\n", "def (:\n")
    read = read_notebook(text)
    assert [line for line in read.script.split("\n") if line] == ["pass", "import torch", "pass", "x = torch.load('a')"]
    place = read.places[read.script.split("\n").index("x = torch.load('a')")]
    assert place[1:] == (3, 1)
    assert "torch.load" in text.split("\n")[place[0] - 1]


LISTED = '"""\nsrc/ddp.py\n"""\nimport torch\n'
ALSO_LISTED = "# plain.py\nimport torch\n"
STARTS = ("!torchrun --nproc_per_node=2 ../src/ddp.py\n", "!python plain.py --epochs 2\n")


@pytest.mark.parametrize(
    ("cells", "kept"),
    [
        ((LISTED, ALSO_LISTED, *STARTS), 0),
        ((LISTED, *STARTS), 1),
        ((LISTED, ALSO_LISTED), 2),
        ((LISTED.replace("ddp", "other"), ALSO_LISTED, *STARTS), 2),
        ((LISTED.replace("src/ddp.py", "How ddp.py joins"), ALSO_LISTED, *STARTS), 2),
    ],
)
def test_cells_that_only_show_programs_which_others_start(cells, kept):
    text = notebook(*cells)
    assert read_notebook(text).script.count("import torch") == kept
    run = text.replace('"outputs": []', '"outputs": [{}]')
    assert read_notebook(run).script.count("import torch") == sum("import torch" in one for one in cells)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "not valid JSON"),
        ("[]", "not a notebook"),
        (notebook("x <- 1", kernelspec={"language": "R"}), "its language is r"),
    ],
)
def test_what_is_no_notebook_of_python_is_said(text, why):
    with pytest.raises(UnreadableFile, match=why):
        read_notebook(text)
